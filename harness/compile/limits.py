"""Limits that keep a compiled configuration from being shipped: registers, spills, matrix instructions."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator

from harness.catalogue.architectures import Architecture
from harness.compile.launches import KernelLaunch
from harness.compile.resources import Resources
from harness.paths import DATA

SPILLS = DATA / "spills.json"
REFUSED = DATA / "refused.json"


def violations(launch: KernelLaunch, resources: Resources, architecture: Architecture) -> list[str]:
    """Why it may not, in words; empty if it may."""
    if resources.error:
        return [resources.error]
    return [
        *_limits(resources, architecture),
        *_spills(launch, resources),
        *_products(launch, resources, architecture),
        *resources.remarks,
        *_refusals(launch),
    ]


def _limits(resources: Resources, architecture: Architecture) -> Iterator[str]:
    for what, taken, limit in (
        ("registers of a thread", resources.registers, architecture.registers_per_thread),
        ("threads", resources.threads, architecture.threads_per_program),
        ("bytes of shared memory", resources.shared_bytes, architecture.shared_per_program),
        ("columns of tensor memory", resources.columns, architecture.tensor_columns),
    ):
        if taken > limit:
            yield f"takes {taken} {what}; {architecture.arch} has {limit}"
    waves = resources.threads // architecture.threads_per_wave
    if not architecture.resident(resources.registers, 0, 0, max(1, waves))[0]:
        what = f"{resources.threads} threads of {resources.registers} registers"
        yield f"{what} are more than a compute unit has"


def _spills(launch: KernelLaunch, resources: Resources) -> Iterator[str]:
    if resources.scratch_bytes and not excused(launch):
        what = f"spills {resources.spills} registers: " if resources.spills else ""
        yield f"{what}{resources.scratch_bytes} bytes of scratch a thread, and no run that shows it faster so"


def excused(launch: KernelLaunch) -> str:
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
    entries: list[dict[str, str]] = json.loads(SPILLS.read_text())["measured"]
    return entries


def _refusals(launch: KernelLaunch) -> Iterator[str]:
    """What another version of Triton in use made of it, where that must not be shipped."""
    for triton, reason in (
        _refused().get((launch.name, launch.arch, launch.config, launch.arguments), {}).items()
    ):
        yield f"under Triton {triton}: {reason}"


@functools.cache
def _refused() -> dict[tuple[str, ...], dict[str, str]]:
    reasons: dict[tuple[str, ...], dict[str, str]] = {}
    for entry in json.loads(REFUSED.read_text())["refused"]:
        place = tuple(entry[name] for name in ("kernel", "target", "config", "arguments"))
        reasons.setdefault(place, {})[entry["triton"]] = entry["reason"]
    return reasons


def _products(launch: KernelLaunch, resources: Resources, architecture: Architecture) -> Iterator[str]:
    """Each product must find an instruction of its dtype and of full rate, or where its tile has too few rows
    for one, the older that its implementation declares."""
    for product in resources.products:
        tile = f"{product.m}x{product.n}x{product.k} in {product.dtype}"
        wanted = architecture.instructions.get(product.dtype)
        wide = product.m >= architecture.rows
        if wanted is None:
            yield f"multiplies {tile}, for which {architecture.arch} has no fast instruction"
        elif _any(wanted, resources):
            continue
        elif wide or product.dtype not in architecture.older:
            yield f"multiplies {tile} without {architecture.arch}'s instruction for it"
        elif not launch.excuse:
            yield f"multiplies {tile}, fewer rows than {architecture.arch}'s instruction has, undeclared"
        elif not _any(architecture.older[product.dtype], resources):
            yield f"multiplies {tile} without the older instruction that it declares"
    if resources.products and all(product.m >= architecture.rows for product in resources.products):
        for older in set(architecture.older.values()):
            if _any(older, resources):
                yield f"has {older} where all tiles have the rows of {architecture.arch}'s instructions"


def _any(pattern: str, resources: Resources) -> bool:
    return any(re.fullmatch(pattern, instruction) for instruction in resources.instructions)
