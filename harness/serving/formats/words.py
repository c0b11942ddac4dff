"""What people write into one phrase where a client has fields: `8xMI300X TP8`, `--tp 8 (decode x3)`."""

from __future__ import annotations

import re

from harness.serving.schema import Parallelism

GPUS = re.compile(r"\b(\d+)x ?([A-Za-z]\w*)")
GPU = re.compile(r"(?:MI|H|B|GB|A|L)\d+\w*")
SIZES = re.compile(r"\b(TP|PP|DP|EP)(\d+)\b")
OPTION = re.compile(r"--[\w-]+(?:[ =](?:[^\s;()-]|-\d)[^\s;()]*)?")
ASIDE = re.compile(r"\([^()]*\)")


def gpus_of(text: str) -> tuple[int | None, str]:
    """(count, name) of `8xMI300X`; the name is empty where what stands there is no GPU's."""
    found = GPUS.search(text)
    if not found:
        return None, ""
    return int(found[1]), found[2] if GPU.fullmatch(found[2]) else ""


def parallelism_of(text: str) -> Parallelism:
    """Of `TP8`, `DP8 EP8`."""
    return Parallelism(**{kind.lower(): int(size) for kind, size in SIZES.findall(text)})


def options_of(text: str) -> tuple[tuple[str, ...], str]:
    """The options in a text, each with its value, and what else it says; what stands in brackets is said of
    something else."""
    outside = ASIDE.sub("", text)
    return tuple(OPTION.findall(outside)), " ".join(OPTION.sub("", outside).split()).strip(" ;,")
