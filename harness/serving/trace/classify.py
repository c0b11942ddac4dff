"""Op classes by names of kernels, and steps and phases by annotations: the rules of trace_rules.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from harness.files import JsonObject
from harness.paths import DATA

Phase = Literal["prefill", "decode", "mixed", "training", "other"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "mixed", "training", "other")
DECODE_ATTENTION = "decode_attention"
"""The class of a rule for attention of decode, which is latent (MLA) or not, depending on the model."""


@dataclass(frozen=True)
class KernelRule:
    """A rule that gives a kernel its class."""

    op_class: str  # a name of harness/catalogue/op_classes.json, or DECODE_ATTENTION
    library: str
    name_pattern: re.Pattern[str]  # fits the kernel's name
    op_pattern: re.Pattern[str] | None  # fits the name of the operator that launches it, if the rule asks
    step_phase: str
    """The phase of a step that has such a kernel: prefill, decode, training; `either` for attention that
    serves both; empty for all other kernels."""
    is_sampling: bool  # whether the kernel ends a step


@dataclass(frozen=True)
class StepRule:
    """A rule for annotations. evidence: in words; engine: the one that writes it, empty for torch"""

    evidence: str
    pattern: re.Pattern[str]
    engine: str


UNKNOWN = KernelRule("unknown", "", re.compile(""), None, "", False)


@cache
def trace_rules() -> JsonObject:
    return json.loads((DATA / "trace_rules.json").read_bytes())


@cache
def kernel_rules() -> tuple[KernelRule, ...]:
    """The rules, in the order in which they are tried."""
    rules = []
    for row in trace_rules()["kernels"]:
        phase = row.get("sign", "either" if row["class"] == "attention" else "")
        name, op = re.compile(row["pattern"], re.IGNORECASE), re.compile(row["op"]) if "op" in row else None
        rules.append(KernelRule(row["class"], row["library"], name, op, phase, row.get("sampling", False)))
    return tuple(rules)


@cache
def rule_of(name: str, op: str = "") -> KernelRule:
    """The first rule that fits the name of a kernel and of the operator that launched it, or UNKNOWN."""
    for rule in kernel_rules():
        if rule.name_pattern.search(name) and (rule.op_pattern is None or rule.op_pattern.search(op)):
            return rule
    return UNKNOWN


def attention_class(op_class: str, phase: Phase, latent: bool) -> str:
    """The class of a kernel by the class of its rule. latent: whether the model has latent attention (MLA)"""
    decode_class = "mla_decode" if latent else "mha_decode"
    if op_class == DECODE_ATTENTION or (op_class == "attention" and phase == "decode"):
        return decode_class
    if op_class == "attention" and phase in ("prefill", "training"):
        return "mha_prefill"
    return op_class


@cache
def step_rules() -> tuple[StepRule, ...]:
    """The rules of engines first, those of torch's own steps last."""
    rows = trace_rules()["steps"]
    return tuple(StepRule(row["says"], re.compile(row["pattern"]), row.get("engine", "")) for row in rows)


@lru_cache(maxsize=4096)
def step_rule(annotation: str) -> StepRule | None:
    """The rule that fits an annotation; None if it marks no step."""
    return next((rule for rule in step_rules() if rule.pattern.search(annotation)), None)


def annotated_phase(annotation: str) -> Phase | None:
    """The phase that an annotation names; None if it only marks the step."""
    rule = step_rule(annotation)
    match = rule.pattern.search(annotation) if rule else None
    groups = match.groupdict() if match else {}
    if "mode" in groups:
        return trace_rules()["modes"].get(groups["mode"], "other")
    if "prefill" not in groups:
        return None
    has_prefill, has_decode = int(groups["prefill"]) > 0, int(groups["decode"]) > 0  # numbers of requests
    if has_prefill:
        return "mixed" if has_decode else "prefill"
    return "decode" if has_decode else "other"


def engine_of(operators: Iterable[str], annotations: Iterable[str]) -> str:
    """The engine that ran a trace, by the operators that it adds to torch, or by its annotations of steps;
    empty if nothing tells. SGLang may use vLLM's operators too, so it is tried first."""
    namespaces = {name.partition("::")[0] for name in operators}
    for row in trace_rules()["engines"]:
        if not namespaces.isdisjoint(row["namespaces"]):
            return row["engine"]
    for annotation in annotations:
        rule = step_rule(annotation)
        if rule and rule.engine:
            return rule.engine
    return ""
