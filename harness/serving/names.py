"""Names of op classes, and one spelling for the several names of machines, engines and models."""

from __future__ import annotations

import functools
import json
import re

from harness.catalogue.devices import known_devices, known_type
from harness.errors import UsageError
from harness.files import JsonObject
from harness.paths import DATA
from shapes.names import unknown

OP_CLASSES: dict[str, dict[str, str]] = json.loads((DATA / "op_classes.json").read_bytes())["classes"]
"""Op classes, into which a step's time is split: what each is, and its colour in charts. Traces, the model,
replay and the ledger use these names, so that their shares can be compared."""
COMMUNICATION = ("all_reduce", "all_to_all")
ENGINES = {"tensorrtllm": "trtllm", "trt": "trtllm", "sgl": "sglang"}
"""Other spellings of engines, without dashes and blanks."""
KNOWN_ENGINES = ("sglang", "vllm", "trtllm", "lmdeploy", "tgi", "atom")
FRONTS = ("dynamo", "moreh", "mori")
"""Programs that serve with an engine of others. InferenceX and the documents write `dynamo-sglang`."""
MODELS = {"dsr1": "deepseek-r1"}  # InferenceX's short names
MAKERS = re.compile(r"\b(nvidia|amd|instinct|intel)\b", re.IGNORECASE)


@functools.cache
def hardware_name(text: str) -> str:
    """A machine's name in small letters, without its maker; the data sheet's name if there is a sheet."""
    return " ".join(MAKERS.sub("", known_type(text)).split()).lower()


def data_sheet(hardware: str) -> JsonObject:
    """The data sheet of a machine, named as `hardware_name` does; empty if there is none."""
    return next((entry for entry in known_devices() if hardware_name(entry["name"]) == hardware), {})


def engine_name(text: str) -> str:
    """An engine in one spelling: `trtllm`, or `dynamo-trtllm` if it has a front."""
    plain = re.sub(r"[-_ ]", "", text.lower())
    front = next((name for name in FRONTS if plain.startswith(name) and plain != name), "")
    engine = plain.removeprefix(front)
    return f"{front}-{ENGINES.get(engine, engine)}".removeprefix("-")


def known_engine(text: str) -> str:
    """An engine that a user names, in one spelling. Raises UsageError for an unknown one."""
    name = engine_name(text)
    if name.rpartition("-")[2] not in KNOWN_ENGINES:
        raise UsageError(unknown("engine", text, KNOWN_ENGINES))
    return name


def model_name(text: str) -> str:
    """A model's name without the folder or the organisation before it."""
    name = text.rstrip("/").rsplit("/")[-1].lower()
    return MODELS.get(name, name)
