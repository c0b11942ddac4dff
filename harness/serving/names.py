"""One spelling for what has several: machines by their data sheets, engines by their usual names."""

from __future__ import annotations

import re

from harness.catalogue.devices import known_devices

ENGINES = {"tensorrtllm": "trtllm", "trt": "trtllm", "sgl": "sglang"}
"""Other spellings of engines, without their dashes and blanks."""


MAKERS = re.compile(r"\b(nvidia|amd|instinct|intel)\b", re.IGNORECASE)


def hardware_name(text: str) -> str:
    """In small letters as its data sheet calls it, where the text has that as a word (`NVIDIA H200`), else
    the text without its maker. A part of a word is no name: GH200, H2000 and H20 are no H200."""
    names = [d["name"] for d in known_devices() if re.search(rf"\b{d['name']}\b", text, re.IGNORECASE)]
    return max(names, key=len, default=" ".join(MAKERS.sub("", text).split())).lower()


def engine_name(text: str) -> str:
    plain = re.sub(r"[-_ ]", "", text.lower())
    return ENGINES.get(plain, plain)
