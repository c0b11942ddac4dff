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
    """A rule that gives a kernel its class.

    op_class: a name of harness/catalogue/op_classes.json, or DECODE_ATTENTION
    pattern:  of a kernel's name
    op:       of the operator that launches it, if the rule asks for one
    sign:     the phase of a step that has such a kernel: prefill, decode, training; `either` for attention
              that serves both; empty for all other kernels
    sampling: whether the kernel ends a step
    """

    op_class: str
    library: str
    pattern: re.Pattern[str]
    op: re.Pattern[str] | None
    sign: str
    sampling: bool


@dataclass(frozen=True)
class StepRule:
    """A rule for annotations. says: the evidence, in words; engine: the one that writes it, if not torch"""

    says: str
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
        op = re.compile(row["op"]) if "op" in row else None
        sign = row.get("sign", "either" if row["class"] == "attention" else "")
        pattern = re.compile(row["pattern"], re.IGNORECASE)
        rules.append(KernelRule(row["class"], row["library"], pattern, op, sign, row.get("sampling", False)))
    return tuple(rules)


@cache
def rule_of(name: str, op: str = "") -> KernelRule:
    """The first rule that fits the name of a kernel and of the operator that launched it, or UNKNOWN."""
    for rule in kernel_rules():
        if rule.pattern.search(name) and (rule.op is None or rule.op.search(op)):
            return rule
    return UNKNOWN


def attention_class(op_class: str, phase: Phase, latent: bool) -> str:
    """The class of a kernel; the phase tells which attention it is, and `latent` (MLA) which of decode's."""
    of_decode = "mla_decode" if latent else "mha_decode"
    if op_class == DECODE_ATTENTION:
        return of_decode
    if op_class == "attention":
        known = {"decode": of_decode, "prefill": "mha_prefill", "training": "mha_prefill"}
        return known.get(phase, "attention")
    return op_class


@cache
def step_rules() -> tuple[StepRule, ...]:
    """The rules of engines first, those of torch's own steps last."""
    return tuple(
        StepRule(row["says"], re.compile(row["pattern"]), row.get("engine", ""))
        for row in trace_rules()["steps"]
    )


@lru_cache(maxsize=4096)
def step_rule(annotation: str) -> StepRule | None:
    """The rule that fits an annotation; None if it marks no step."""
    return next((rule for rule in step_rules() if rule.pattern.search(annotation)), None)


def annotated_phase(annotation: str) -> Phase | None:
    """The phase that an annotation names; None if it only marks the step."""
    rule = step_rule(annotation)
    groups = rule.pattern.search(annotation).groupdict() if rule else {}  # type: ignore[union-attr]
    if "mode" in groups:
        return trace_rules()["modes"].get(groups["mode"], "other")
    if "prefill" in groups:
        prefill, decode = int(groups["prefill"]) > 0, int(groups["decode"]) > 0
        return "mixed" if prefill and decode else "prefill" if prefill else "decode" if decode else "other"
    return None


def engine_of(operators: Iterable[str], annotations: Iterable[str]) -> str:
    """The engine that ran a trace, by the operators that it adds to torch, or by its annotations of steps;
    empty if nothing tells. SGLang may use vLLM's operators too, so it is tried first."""
    namespaces = {name.partition("::")[0] for name in operators}
    for row in trace_rules()["engines"]:
        if namespaces & {*row["namespaces"]}:
            return row["engine"]
    rules = map(step_rule, annotations)
    return next((rule.engine for rule in rules if rule and rule.engine), "")
