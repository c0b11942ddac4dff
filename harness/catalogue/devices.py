"""Datasheets of devices: peak rates, memory bandwidth, last-level cache."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from harness.files import JsonObject
from harness.paths import DATA
from kernels.op import DTYPES, Work
from kernels.platform import Platform

DATASHEETS = DATA / "devices.json"

CARD = re.compile(r"\b(?:pcie|nvl)\b")
"""Cards with less power, memory or links than the chip's usual one, in small letters."""
PART = re.compile(r" (MIG\b.*|(?:DPX|TPX|QPX|CPX)\b.*|\d of \d XCC.*)$")
"""How the name of a part of a GPU ends: a MIG slice of NVIDIA's, a compute and memory partition of AMD's."""

MIG_MEMORY = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}
"""Eighths of the memory by sevenths of the SMs, of the usual slices (NVIDIA's MIG User Guide)."""

MIG_SMS = {3: 1 / 2}
"""The most of the SMs that a slice has, where that is more than sevenths: `3g` has 60 of an H100's 132."""

PARTITIONS = {"DPX": 2, "TPX": 3, "QPX": 4, "CPX": 8}


@dataclass(frozen=True)
class Ceilings:
    """The best that was seen, each per second.

    rates:    floating-point operations of matrix products, by the dtype of their operands
    read:     bytes read
    copy:     bytes read plus bytes written; 0 if unknown
    measured: when
    reach:    bytes from which on a CPU reads again as slowly as from memory (see meter.py); 0: not measured
    disturbed: what disturbed the machine whenever they were measured; empty: once nothing did
    """

    rates: Mapping[str, float]
    read: float
    copy: float = 0.0
    measured: str = ""
    reach: int = 0
    disturbed: str = ""

    @staticmethod
    def recorded(facts: JsonObject) -> Ceilings | None:
        """As a run recorded them, if it did. Older runs have one rate, of bf16 products, and what was
        read: going on with such a run keeps the yardstick of its first rows."""
        if "flops" in facts:
            return Ceilings({"bf16": facts["flops"]}, facts["bytes"], measured=facts["measured"])
        return Ceilings(**facts) if facts else None

    def rate(self, dtype: str) -> float:
        """Of products whose operands are `dtype` by the op's definition: the best of that and of any wider
        dtype, which holds the same values. Where none of these was measured, the best of all."""
        wide = DTYPES[DTYPES.index(dtype) :]
        return max([self.rates[d] for d in wide if d in self.rates] or self.rates.values())

    @property
    def bandwidth(self) -> float:
        """Bytes per second. Ops read far more than they write, so reading is what bounds them; where a copy
        moves more, some mix of reads and writes is faster than reads alone, and an op may be that mix."""
        return max(self.read, self.copy)

    def min_time(self, work: Work) -> float:
        """Seconds below which the work cannot be done, all its bytes coming from memory."""
        return max(work.flops / self.rate(work.dtype), work.bytes / self.bandwidth)

    def or_better(self, other: Ceilings | None) -> Ceilings:
        """Whatever is higher of either; of the time of this one."""
        if other is None:
            return self
        rates = {
            dtype: max(self.rates.get(dtype, 0.0), other.rates.get(dtype, 0.0))
            for dtype in DTYPES
            if dtype in self.rates or dtype in other.rates
        }
        read, copy, reach = (
            max(getattr(self, name), getattr(other, name)) for name in ("read", "copy", "reach")
        )
        return Ceilings(rates, read, copy, self.measured, reach, self.disturbed and other.disturbed)


def known_devices() -> list[JsonObject]:
    """All that there is a data sheet of."""
    devices: list[JsonObject] = json.loads(DATASHEETS.read_text())["devices"]
    return devices


def part_of(name: str) -> str:
    """`MIG 1g.10gb`, `CPX/NPS4`: which part of a GPU a device of this name is; empty of a whole one."""
    found = PART.search(name)
    return found[1] if found else ""


def known_type(text: str) -> str:
    """The device of a data sheet that a longer name means (`AMD-Instinct-MI300X-OAM`), or that name; of a
    part of a device with that part, as its times are no whole device's. A part of a word is no name: H2000 is
    no H200. Neither is another card of the same chip: H100 PCIe is no H100."""

    def stands_in(name: str) -> bool:
        word = rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])"
        same_card = CARD.findall(text.lower()) == CARD.findall(name.lower())
        return same_card and bool(re.search(word, text, re.IGNORECASE))

    names = [entry["name"] for entry in known_devices() if stands_in(entry["name"])]
    return f"{max(names, key=len)} {part_of(text)}".strip() if names else text


def _entries(platform: Platform) -> list[JsonObject]:
    """Those that this device may be, or be a part of: those of its architecture with a word of its name, or
    all of its architecture, as ROCm's kernel driver names no product."""
    entries = [device for device in known_devices() if device["arch"] == platform.arch]
    named = [d for d in entries if re.search(rf"\b{d['name']}\b", platform.name)]
    return named or entries


def datasheets(platform: Platform) -> list[JsonObject]:
    """The entries that this device may be. Of a part of a device what it can have at most of the whole one's
    rates, which the source says; none where that is not known."""
    part = part_of(platform.name)
    if not part:
        return _entries(platform)
    return [scaled for entry in _entries(platform) if (scaled := _scaled(entry, part))]


def _scaled(entry: JsonObject, part: str) -> JsonObject | None:
    """By its share of SMs or accelerator dies, which no other part uses, and of the memory that it reads."""
    if row := re.search(r"(\d)g\.(\d+)gb", part):
        sevenths, gigabytes = int(row[1]), int(row[2])
        compute = max(sevenths / 7, MIG_SMS.get(sevenths, 0))
        # A slice may have twice the memory that is usual (`1g.20gb`); gigabytes are rounded up.
        eighths = max(MIG_MEMORY.get(sevenths, 8), math.ceil(8 * gigabytes / entry["memory_gib"] - 0.1))
        memory, units = min(1.0, eighths / 8), "SMs"
    elif part[:3] in PARTITIONS:
        parts = 6 if entry["name"] == "MI300A" and part.startswith("CPX") else PARTITIONS[part[:3]]
        split = re.search(r"NPS(\d)", part)
        compute, memory, units = 1 / parts, 1 / int(split[1]) if split else 1.0, "dies"
    else:
        return None
    shares = f"{part} has at most {compute:.1%} of its {units} and {memory:.1%} of its memory's bandwidth"
    return entry | {
        "name": f"{entry['name']} {part}",
        "tflops": {dtype: round(compute * rate, 1) for dtype, rate in entry["tflops"].items()},
        "tbps": round(memory * entry["tbps"], 3),
        "source": f"{shares}; {entry['source']}",
    }


def peaks(platform: Platform) -> Ceilings | None:
    """The highest of the datasheets' peaks, that of FP8 for products of any dtype: nothing right is ever
    beyond them. None for CPUs: how many memory channels a machine has is not known from within, nor
    how high it may clock."""
    entries = datasheets(platform)
    if not entries:
        return None
    highest = max(rate for entry in entries for rate in entry["tflops"].values())
    return Ceilings(dict.fromkeys(DTYPES, highest * 1e12), max(entry["tbps"] for entry in entries) * 1e12)


def last_level(platform: Platform, ceilings: Ceilings | None = None) -> int:
    """Bytes of the last-level cache by the system or the datasheet, 0 if neither knows; no more than the
    reach that was measured, as a virtual machine may claim the cache of its whole host. Not what torch
    reports: on AMD that is the L2, before the last level."""
    claimed = max(
        [platform.last_level, *(entry.get("last_level_mb", 0) << 20 for entry in _entries(platform))]
    )
    reach = ceilings.reach if ceilings else 0
    return min(claimed, reach) if reach else claimed
