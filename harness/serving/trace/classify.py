"""Classification by name: kernels and operators to op classes, annotations to steps. The rules are data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from harness.files import JsonObject
from harness.paths import DATA
from harness.serving.op_classes import OP_CLASSES

Phase = Literal["prefill", "decode", "mixed", "training", "other"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "mixed", "training", "other")
Sign = Literal["prefill", "decode", "training", "either", ""]


@dataclass(frozen=True)
class KernelRule:
    """op_class:  of harness/serving/op_classes.py, or `decode_attention`, which needs to know the model
    library:   whose kernels these are
    sign:      of which phase a step with such a kernel is; `either`: attention that says nothing
    sampling:  ends a step
    """

    op_class: str
    library: str
    pattern: re.Pattern[str]
    op: re.Pattern[str] | None
    sign: Sign
    sampling: bool


@dataclass(frozen=True)
class StepRule:
    """says: the evidence, in words; engine: whose annotation it is, empty where it is of none"""

    says: str
    pattern: re.Pattern[str]
    engine: str


UNKNOWN = KernelRule("unknown", "", re.compile(""), None, "", False)
DECODE_ATTENTION = "decode_attention"


@cache
def trace_rules() -> JsonObject:
    return json.loads((DATA / "trace_rules.json").read_text())


@cache
def kernel_rules() -> tuple[KernelRule, ...]:
    """In the order in which they are tried."""
    rules = []
    for row in trace_rules()["kernels"]:
        if row["class"] not in (*OP_CLASSES, DECODE_ATTENTION):
            raise ValueError(f"trace_rules.json: no class {row['class']}")
        op = re.compile(row["op"]) if "op" in row else None
        sign = row.get("sign", "either" if row["class"] == "attention" else "")
        pattern = re.compile(row["pattern"], re.IGNORECASE)
        rules.append(KernelRule(row["class"], row["library"], pattern, op, sign, row.get("sampling", False)))
    return tuple(rules)


@cache
def rule_of(name: str, op: str = "") -> KernelRule:
    """The first rule that a kernel's name fits, and the name of the operator that launched it where the rule
    asks for one; UNKNOWN where none does."""
    return next(
        (
            rule
            for rule in kernel_rules()
            if rule.pattern.search(name) and (rule.op is None or rule.op.search(op))
        ),
        UNKNOWN,
    )


@cache
def engine_namespaces() -> dict[str, frozenset[str]]:
    """Of the operators that an engine adds to torch; SGLang, which may use vLLM's too, first."""
    return {row["engine"]: frozenset(row["namespaces"]) for row in trace_rules()["engines"]}


@cache
def step_rules() -> tuple[StepRule, ...]:
    """Engines first, torch's own steps last."""
    return tuple(
        StepRule(row["says"], re.compile(row["pattern"]), row.get("engine", ""))
        for row in trace_rules()["steps"]
    )


def step_rule(annotation: str) -> int | None:
    """The number of the rule that an annotation fits; None where it marks no step."""
    return next((i for i, rule in enumerate(step_rules()) if rule.pattern.search(annotation)), None)


@lru_cache(maxsize=4096)
def marks_step(annotation: str) -> bool:
    return step_rule(annotation) is not None


def annotated_phase(annotation: str) -> Phase | None:
    """The phase that an annotation names; None where it only marks the step."""
    number = step_rule(annotation)
    match = step_rules()[number].pattern.search(annotation) if number is not None else None
    groups = match.groupdict() if match else {}
    if "mode" in groups:
        return trace_rules()["modes"].get(groups["mode"], "other")
    if "prefill" in groups:
        prefill, decode = int(groups["prefill"]) > 0, int(groups["decode"]) > 0
        return "mixed" if prefill and decode else "prefill" if prefill else "decode" if decode else "other"
    return None


def attention_class(op_class: str, phase: Phase, latent: bool) -> str:
    """Where only the step or the model tells which attention a kernel computes. latent: the model has MLA."""
    of_decode = "mla_decode" if latent else "mha_decode"
    if op_class == DECODE_ATTENTION:
        return of_decode
    if op_class == "attention":
        return {"decode": of_decode, "prefill": "mha_prefill", "training": "mha_prefill"}.get(
            phase, "attention"
        )
    return op_class


def engine_of(operators: Iterable[str], annotations: Iterable[str]) -> str:
    """The engine that ran a trace, by the operators that it adds to torch, else by its annotations of steps;
    empty where nothing tells."""
    namespaces = {name.partition("::")[0] for name in operators}
    by_operator = [engine for engine, own in engine_namespaces().items() if own & namespaces]
    numbers = map(step_rule, annotations)
    by_step = [step_rules()[number].engine for number in numbers if number is not None]
    return next(filter(None, [*by_operator, *by_step]), "")
