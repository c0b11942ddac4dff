"""Names: of op classes, and one spelling for machines, engines and models, which have several."""

from __future__ import annotations

import json
import re

from harness.catalogue.devices import known_devices, known_type
from harness.errors import UsageError
from harness.files import JsonObject
from harness.paths import DATA
from shapes.names import unknown

OP_CLASSES: dict[str, dict[str, str]] = json.loads((DATA / "op_classes.json").read_bytes())["classes"]
"""Op classes, into which a step's time is split: what each is, and its colour in charts. Traces, the model,
replay and the ledger use these names, so that a share of one can be set beside another's."""

COMMUNICATION = ("all_reduce", "all_to_all")

ENGINES = {"tensorrtllm": "trtllm", "trt": "trtllm", "sgl": "sglang"}
"""Other spellings of engines, without their dashes and blanks."""

KNOWN_ENGINES = ("sglang", "vllm", "trtllm", "lmdeploy", "tgi", "atom")

FRONTS = ("dynamo", "moreh", "mori")
"""What serves with an engine of others, as InferenceX and the documents name it: `dynamo-sglang`."""

MODELS = {"dsr1": "deepseek-r1"}
"""InferenceX's own short names."""

MAKERS = re.compile(r"\b(nvidia|amd|instinct|intel)\b", re.IGNORECASE)


def hardware_name(text: str) -> str:
    """In small letters as its data sheet calls it, or without its maker where there is none."""
    return " ".join(MAKERS.sub("", known_type(text)).split()).lower()


def data_sheet(hardware: str) -> JsonObject:
    """Of a machine as `hardware_name` calls it; empty where there is none."""
    return next((entry for entry in known_devices() if hardware_name(entry["name"]) == hardware), {})


def engine_name(text: str) -> str:
    """In one spelling: `trtllm`, or `dynamo-trtllm` where a front stands before the engine."""
    plain = re.sub(r"[-_ ]", "", text.lower())
    front = next((name for name in FRONTS if plain.startswith(name) and plain != name), "")
    engine = plain.removeprefix(front)
    return f"{front}-{ENGINES.get(engine, engine)}".removeprefix("-")


def known_engine(text: str) -> str:
    """In one spelling, an engine that a user names. Raises UsageError for an unknown one."""
    name = engine_name(text)
    if name.rpartition("-")[2] not in KNOWN_ENGINES:
        raise UsageError(unknown("engine", text, KNOWN_ENGINES))
    return name


def model_name(text: str) -> str:
    """Without the folder or the organisation before it."""
    name = text.rstrip("/").rsplit("/")[-1].lower()
    return MODELS.get(name, name)
