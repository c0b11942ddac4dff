"""The command that checks a wrong row alone and saves its output beside the reference."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from harness.report.case_notes import Notes
from harness.results.schema import Cell, Run
from shapes.case import text_of

FOLDER = "wrong"
AT = re.compile(r"at ((?:\S+=\S+ ?)+): ")
"""Begins the reason where another case showed it: see CaseRun.ragged."""
FAR = "with addresses of more than 32 bits: "
"""Stands in it where the cache stood far away (see CaseRun)."""


def reproductions(cells: Iterable[Cell], run: Run) -> Notes:
    """A command for each wrong row, but for those of another source tree and those that only far addresses
    show, which `check` does not run."""
    wrong = (
        cell
        for cell in cells
        if cell.status == "wrong" and cell.setting not in run.trees and FAR not in cell.reason
    )
    return [("reproduce", command(cell, run)) for cell in wrong]


def command(cell: Cell, run: Run) -> str:
    """What a run does by default is left out."""
    variables = run.settings.get(cell.setting, {})
    text = cell.case.removeprefix(f"{cell.op} ").removesuffix(f" {cell.boundary}")
    if elsewhere := AT.match(cell.reason):
        text = elsewhere[1]
    words = [f"--op {cell.op} --impl {shlex.quote(cell.impl)} --case {_quoted(text)}"]
    words += [f"--boundary {cell.boundary}"] * (cell.boundary != "core")
    words += [f"--cache {cell.cache}"] * (cell.cache != "serving")
    words += ["--device cpu"] * (cell.platform == "cpu")
    words += ["--launch eager"] * (cell.launch == "eager" and cell.platform != "cpu")
    words += [
        f"--set {shlex.quote(f'{name}={value}')}" for name, value in variables.items() if value is not None
    ]
    words += [f"--config {_quoted(text_of(cell.config))}"] if cell.config else []
    words += [f"--seed {run.seed}"] * bool(run.seed)
    words += [f"--threads {run.threads}"] * ("--threads" in run.command)
    unset = [f"-u {name}" for name, value in variables.items() if value is None]
    before = f"env {' '.join(unset)} " if unset else ""
    return f"{before}python -m harness check {' '.join(words)} --save {FOLDER}"


def _quoted(text: str) -> str:
    """In double quotes, as documents have it, where the shell leaves what is in them alone."""
    return shlex.quote(text) if set(text) & set('"$`\\!') else f'"{text}"'
