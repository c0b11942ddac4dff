"""Whether a compiled configuration may be shipped: limits, spills, and the matrix instructions it uses."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator

from harness.catalogue.architectures import Architecture
from harness.compile.launches import Launch
from harness.compile.resources import Figures
from harness.paths import DATA

SPILLS = DATA / "spills.json"
REFUSED = DATA / "refused.json"


def violations(launch: Launch, figures: Figures, architecture: Architecture) -> list[str]:
    """Why it may not, in words; empty if it may."""
    if figures.error:
        return [figures.error]
    return [
        *_limits(figures, architecture),
        *_spills(launch, figures),
        *_products(launch, figures, architecture),
        *figures.remarks,
        *_elsewhere(launch),
    ]


def _limits(figures: Figures, architecture: Architecture) -> Iterator[str]:
    for what, taken, limit in (
        ("registers of a thread", figures.registers, architecture.registers_per_thread),
        ("threads", figures.threads, architecture.threads_per_program),
        ("bytes of shared memory", figures.shared_bytes, architecture.shared_per_program),
        ("columns of tensor memory", figures.columns, architecture.tensor_columns),
    ):
        if taken > limit:
            yield f"takes {taken} {what}; {architecture.arch} has {limit}"
    waves = figures.threads // architecture.threads_per_wave
    if not architecture.resident(figures.registers, 0, 0, max(1, waves))[0]:
        yield f"{figures.threads} threads of {figures.registers} registers are more than a compute unit has"


def _spills(launch: Launch, figures: Figures) -> Iterator[str]:
    if figures.scratch_bytes and not excused(launch):
        what = f"spills {figures.spills} registers: " if figures.spills else ""
        yield f"{what}{figures.scratch_bytes} bytes of scratch a thread, and no run that shows it faster so"


def excused(launch: Launch) -> str:
    """What a recorded run says for its spills; empty where there is none."""
    words = set(launch.config.split())
    return next(
        (
            entry["why"]
            for entry in _measured()
            if (entry["kernel"], entry["target"]) == (launch.name, launch.arch)
            and words.issuperset(entry["config"].split())
        ),
        "",
    )


@functools.cache
def _measured() -> list[dict[str, str]]:
    return json.loads(SPILLS.read_text())["measured"]


def _elsewhere(launch: Launch) -> Iterator[str]:
    """What another version of Triton in use made of it, where that must not be shipped."""
    for triton, reason in (
        _refused().get((launch.name, launch.arch, launch.config, launch.arguments), {}).items()
    ):
        yield f"under Triton {triton}: {reason}"


@functools.cache
def _refused() -> dict[tuple[str, ...], dict[str, str]]:
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for entry in json.loads(REFUSED.read_text())["refused"]:
        place = tuple(entry[name] for name in ("kernel", "target", "config", "arguments"))
        found.setdefault(place, {})[entry["triton"]] = entry["reason"]
    return found


def _products(launch: Launch, figures: Figures, architecture: Architecture) -> Iterator[str]:
    """Each product must find an instruction of its dtype and of full rate, or where its tile has too few rows
    for one, the older that its implementation declares."""
    for product in figures.products:
        tile = f"{product.m}x{product.n}x{product.k} in {product.dtype}"
        wanted = architecture.instructions.get(product.dtype)
        wide = product.m >= architecture.rows
        if wanted is None:
            yield f"multiplies {tile}, for which {architecture.arch} has no fast instruction"
        elif _any(wanted, figures):
            continue
        elif wide or product.dtype not in architecture.older:
            yield f"multiplies {tile} without {architecture.arch}'s instruction for it"
        elif not launch.excuse:
            yield f"multiplies {tile}, fewer rows than {architecture.arch}'s instruction has, undeclared"
        elif not _any(architecture.older[product.dtype], figures):
            yield f"multiplies {tile} without the older instruction that it declares"
    if figures.products and all(product.m >= architecture.rows for product in figures.products):
        for older in set(architecture.older.values()):
            if _any(older, figures):
                yield f"has {older} where all tiles have the rows of {architecture.arch}'s instructions"


def _any(pattern: str, figures: Figures) -> bool:
    return any(re.fullmatch(pattern, instruction) for instruction in figures.instructions)
