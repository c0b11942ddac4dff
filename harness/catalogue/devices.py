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
"""Words in a name, in small letters, for cards with other power, memory or links than the usual card."""
PART = re.compile(r" (MIG\b.*|(?:DPX|TPX|QPX|CPX)\b.*|\d of \d XCC.*)$")
"""The end of the name of a part of a GPU: a MIG slice (NVIDIA), a compute and memory partition (AMD)."""

MIG_MEMORY = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}
"""Sevenths of the SMs in a slice's name (`3g`) -> eighths of the memory it usually has (MIG User Guide)."""
MIG_SMS = {3: 1 / 2}
"""Sevenths of the SMs in a slice's name -> the most of the SMs that it may have, where that is more than its
name says: a `3g` slice of an H100 has 60 of 132 SMs, and 3/7 would be 57."""
PARTITIONS = {"DPX": 2, "TPX": 3, "QPX": 4, "CPX": 8}  # mode of an AMD GPU -> the number of parts


@dataclass(frozen=True)
class Ceilings:
    """The best rates of a device."""

    rates: Mapping[str, float]  # dtype of operands -> floating-point operations per second of matrix products
    read: float  # bytes read per second
    copy: float = 0.0  # bytes read plus bytes written, per second; 0 if unknown
    measured: str = ""  # when they were measured; empty for data sheets
    reach: int = 0
    """Reads of so many bytes are as slow as memory on this CPU, see workers/child/meter.py; 0: unknown."""
    disturbed: str = ""
    """What disturbed the machine in every measurement so far; empty once a measurement was quiet."""

    @staticmethod
    def recorded(facts: JsonObject) -> Ceilings | None:
        """The ceilings that a run recorded, or None. Older runs recorded as `flops` the rate of bf16 products
        and as `bytes` the rate of reading."""
        if "flops" in facts:
            return Ceilings({"bf16": facts["flops"]}, facts["bytes"], measured=facts["measured"])
        return Ceilings(**facts) if facts else None

    def rate(self, dtype: str) -> float:
        """The rate of products of operands of `dtype`, in operations per second: the best of this dtype and
        of the wider ones, which can hold the same values; if none of these was measured, the best of all."""
        this_and_wider = DTYPES[DTYPES.index(dtype) :]
        measured_rates = [self.rates[d] for d in this_and_wider if d in self.rates]
        return max(measured_rates or self.rates.values())

    @property
    def bandwidth(self) -> float:
        """Bytes per second. Ops mostly read, so the rate of reading bounds them. If a copy moves more bytes,
        a mix of reads and writes is faster than reads alone, and an op may be such a mix."""
        return max(self.read, self.copy)

    def min_time(self, work: Work) -> float:
        """The least seconds that the work takes if all its bytes come from memory."""
        return max(work.flops / self.rate(work.dtype), work.bytes / self.bandwidth)

    def or_better(self, other: Ceilings | None) -> Ceilings:
        """The higher of the two for each rate, measured at this one's time, disturbed only if both were."""
        if other is None:
            return self
        known = [dtype for dtype in DTYPES if dtype in {**self.rates, **other.rates}]
        rates = {dtype: max(self.rates.get(dtype, 0.0), other.rates.get(dtype, 0.0)) for dtype in known}
        return Ceilings(
            rates=rates, read=max(self.read, other.read), copy=max(self.copy, other.copy),
            measured=self.measured, reach=max(self.reach, other.reach),
            disturbed=self.disturbed if other.disturbed else "",
        )  # fmt: skip


def known_devices() -> list[JsonObject]:
    """The data sheets: name, architecture, `tflops` by dtype, `tbps`, `memory_gib` and so on."""
    devices: list[JsonObject] = json.loads((DATA / "devices.json").read_bytes())["devices"]
    return devices


def part_of(name: str) -> str:
    """The end of a device's name that names a part (`MIG 1g.10gb`, `CPX/NPS4`); empty for a whole GPU."""
    match = PART.search(name)
    return match[1] if match else ""


def known_type(text: str) -> str:
    """The name of the data sheet of the device that the text names (MI300X for `AMD-Instinct-MI300X-OAM`), or
    the text itself where there is none. For a part of a GPU the name of the part follows. Only whole words
    count (H2000 is not H200), and another card of a chip is another device (H100 PCIe is not H100)."""

    def means(name: str) -> bool:
        word = rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])"
        same_card = CARD.findall(text.lower()) == CARD.findall(name.lower())
        return same_card and bool(re.search(word, text, re.IGNORECASE))

    names = [sheet["name"] for sheet in known_devices() if means(sheet["name"])]
    return f"{max(names, key=len)} {part_of(text)}".strip() if names else text


def _sheets_of_whole(platform: Platform) -> list[JsonObject]:
    """The data sheets that this device, or the GPU that it is a part of, may have: those of its architecture
    that its name contains, or all of the architecture, as ROCm's kernel driver names no product."""
    of_arch = [sheet for sheet in known_devices() if sheet["arch"] == platform.arch]
    named = [sheet for sheet in of_arch if re.search(rf"\b{sheet['name']}\b", platform.name)]
    return named or of_arch


def datasheets(platform: Platform) -> list[JsonObject]:
    """The data sheets that this device may have. For a part of a GPU they give the most that it can have of
    the whole GPU's rates, with the shares in `source`; a part of unknown size has no data sheet."""
    part, sheets = part_of(platform.name), _sheets_of_whole(platform)
    if not part:
        return sheets
    return list(filter(None, (_sheet_of_part(sheet, part) for sheet in sheets)))


def _sheet_of_part(whole: JsonObject, part: str) -> JsonObject | None:
    """The data sheet of a part of a GPU, by its shares of SMs or dies and of memory; None if unknown."""
    if mig := re.search(r"(\d)g\.(\d+)gb", part):
        sevenths, gigabytes = int(mig[1]), int(mig[2])
        compute_share = max(sevenths / 7, MIG_SMS.get(sevenths, 0))
        # A slice may have twice the usual memory (`1g.20gb`). The gigabytes in its name are rounded up, which
        # adds less than 0.1 eighths.
        eighths = max(MIG_MEMORY.get(sevenths, 8), math.ceil(8 * gigabytes / whole["memory_gib"] - 0.1))
        memory_share, units = min(1.0, eighths / 8), "SMs"
    elif part[:3] in PARTITIONS:
        parts = PARTITIONS[part[:3]]
        if whole["name"] == "MI300A" and part.startswith("CPX"):
            parts = 6  # CPX makes each accelerator die a part, of which an MI300A has 6 and others 8
        memory_parts = re.search(r"NPS(\d)", part)
        compute_share, units = 1 / parts, "dies"
        memory_share = 1 / int(memory_parts[1]) if memory_parts else 1.0
    else:
        return None
    shares = f"{compute_share:.1%} of its {units} and {memory_share:.1%} of its memory's bandwidth"
    return whole | {
        "name": f"{whole['name']} {part}", "tbps": round(memory_share * whole["tbps"], 3),
        "tflops": {dtype: round(compute_share * rate, 1) for dtype, rate in whole["tflops"].items()},
        "source": f"{part} has at most {shares}; {whole['source']}",
    }  # fmt: skip


def peaks(platform: Platform) -> Ceilings | None:
    """The highest peaks of the data sheets that the device may have, with the highest rate of any dtype (FP8)
    for all dtypes: a right measurement never exceeds them. None without a data sheet: CPUs have none, as
    software cannot find the number of memory channels or the highest clock."""
    sheets = datasheets(platform)
    if not sheets:
        return None
    highest = max(rate for sheet in sheets for rate in sheet["tflops"].values())
    return Ceilings(dict.fromkeys(DTYPES, highest * 1e12), max(sheet["tbps"] for sheet in sheets) * 1e12)


def last_level(platform: Platform, ceilings: Ceilings | None = None) -> int:
    """Bytes of the last-level cache by the system or the data sheet; 0 if unknown. It is at most the measured
    reach, as a virtual machine may report the cache of its whole host. torch is not asked: on AMD it reports
    the L2, which is not the last level."""
    of_sheets = [sheet.get("last_level_mb", 0) << 20 for sheet in _sheets_of_whole(platform)]
    claimed = max([platform.last_level, *of_sheets])
    reach = ceilings.reach if ceilings else 0
    return min(claimed, reach) if reach else claimed
