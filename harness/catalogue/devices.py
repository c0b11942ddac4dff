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

CARD = re.compile(r"\b(?:pcie|nvl)\b")
"""Words, in small letters, for cards that have less power, memory or links than the chip's usual card."""
PART = re.compile(r" (MIG\b.*|(?:DPX|TPX|QPX|CPX)\b.*|\d of \d XCC.*)$")
"""The end of the name of a part of a GPU: a MIG slice (NVIDIA), a compute and memory partition (AMD)."""

MIG_MEMORY = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}
"""Sevenths of the SMs -> eighths of the memory that the usual slice has (NVIDIA's MIG User Guide)."""

MIG_SMS = {3: 1 / 2}
"""Sevenths -> the share of the SMs, where a slice may have more: `3g` has 60 of an H100's 132."""

PARTITIONS = {"DPX": 2, "TPX": 3, "QPX": 4, "CPX": 8}  # mode of an AMD GPU -> the number of parts


@dataclass(frozen=True)
class Ceilings:
    """The best rates of a device, per second."""

    rates: Mapping[str, float]  # dtype of the operands -> floating-point operations of matrix products
    read: float  # bytes read
    copy: float = 0.0  # bytes read plus bytes written; 0 if unknown
    measured: str = ""  # when they were measured
    reach: int = 0
    """The size in bytes from which a CPU reads as slowly as from memory (see meter.py); 0: not measured."""
    disturbed: str = ""
    """What disturbed the machine in every measurement so far; empty once a measurement was quiet."""

    @staticmethod
    def recorded(facts: JsonObject) -> Ceilings | None:
        """The ceilings that a run recorded, or None. Older runs recorded one rate of bf16 products and the
        bytes read; a run that is resumed keeps the ceilings of its first rows."""
        if "flops" in facts:
            return Ceilings({"bf16": facts["flops"]}, facts["bytes"], measured=facts["measured"])
        return Ceilings(**facts) if facts else None

    def rate(self, dtype: str) -> float:
        """The rate of products of operands of `dtype`: the best of this dtype and the wider ones, which hold
        the same values. If none of these was measured it is the best of all."""
        wide = DTYPES[DTYPES.index(dtype) :]
        return max([self.rates[d] for d in wide if d in self.rates] or self.rates.values())

    @property
    def bandwidth(self) -> float:
        """Bytes per second. Ops mostly read, so the rate of reading bounds them. If a copy moves more bytes,
        a mix of reads and writes is faster than reads alone, and an op may be such a mix."""
        return max(self.read, self.copy)

    def min_time(self, work: Work) -> float:
        """The least seconds that the work takes if all its bytes come from memory."""
        return max(work.flops / self.rate(work.dtype), work.bytes / self.bandwidth)

    def or_better(self, other: Ceilings | None) -> Ceilings:
        """The higher of the two for each rate, with the time of this one."""
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
    devices: list[JsonObject] = json.loads((DATA / "devices.json").read_bytes())["devices"]
    return devices


def part_of(name: str) -> str:
    """The part of a GPU that a device of this name is (`MIG 1g.10gb`, `CPX/NPS4`); empty for a whole GPU."""
    found = PART.search(name)
    return found[1] if found else ""


def known_type(text: str) -> str:
    """The name of the data sheet that a longer name means (MI300X for `AMD-Instinct-MI300X-OAM`), or else the
    name itself. A part of a device keeps the name of the part, as a whole device has other times. Only whole
    words count (H2000 is not H200), and another card of a chip is another device (H100 PCIe is not H100)."""

    def stands_in(name: str) -> bool:
        word = rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])"
        same_card = CARD.findall(text.lower()) == CARD.findall(name.lower())
        return same_card and bool(re.search(word, text, re.IGNORECASE))

    names = [entry["name"] for entry in known_devices() if stands_in(entry["name"])]
    return f"{max(names, key=len)} {part_of(text)}".strip() if names else text


def _entries(platform: Platform) -> list[JsonObject]:
    """The data sheets that this device, or the whole GPU that it is a part of, may have: those of its
    architecture whose name is in its name, or else all of its architecture, as ROCm's kernel driver names no
    product."""
    entries = [device for device in known_devices() if device["arch"] == platform.arch]
    named = [d for d in entries if re.search(rf"\b{d['name']}\b", platform.name)]
    return named or entries


def datasheets(platform: Platform) -> list[JsonObject]:
    """The data sheets that this device may have. For a part of a GPU they give the most that it can have of
    the whole GPU's rates, with the shares in `source`; a part of unknown size has no data sheet."""
    part = part_of(platform.name)
    if not part:
        return _entries(platform)
    return [scaled for entry in _entries(platform) if (scaled := _scaled(entry, part))]


def _scaled(entry: JsonObject, part: str) -> JsonObject | None:
    """The data sheet of a part, by its share of the SMs or accelerator dies, which no other part uses, and
    its share of the memory; None where the shares are unknown."""
    if row := re.search(r"(\d)g\.(\d+)gb", part):
        sevenths, gigabytes = int(row[1]), int(row[2])
        compute = max(sevenths / 7, MIG_SMS.get(sevenths, 0))
        # A slice may have twice the usual memory (`1g.20gb`); the gigabytes in its name are rounded up.
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
    """The highest peaks of the data sheets, with the rate of FP8 for products of any dtype: a right
    measurement never exceeds them. None for CPUs, as software cannot find the number of memory channels or
    the highest clock."""
    entries = datasheets(platform)
    if not entries:
        return None
    highest = max(rate for entry in entries for rate in entry["tflops"].values())
    return Ceilings(dict.fromkeys(DTYPES, highest * 1e12), max(entry["tbps"] for entry in entries) * 1e12)


def last_level(platform: Platform, ceilings: Ceilings | None = None) -> int:
    """Bytes of the last-level cache by the system or the data sheet; 0 if unknown. It is at most the measured
    reach, as a virtual machine may report the cache of its whole host. torch is not asked: on AMD it reports
    the L2, which is not the last level."""
    claimed = max(
        [platform.last_level, *(entry.get("last_level_mb", 0) << 20 for entry in _entries(platform))]
    )
    reach = ceilings.reach if ceilings else 0
    return min(claimed, reach) if reach else claimed
