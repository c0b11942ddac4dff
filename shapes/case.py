"""A case: an op at concrete sizes, with a boundary and its place in a model."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

Size = int | str


def text_of(sizes: Mapping[str, Size]) -> str:
    """`{"batch": 64, "ctx": "3200..3999"}` -> `batch=64 ctx=3200..3999`."""
    return " ".join(f"{name}={value}" for name, value in sizes.items())


@dataclass(frozen=True)
class Case:
    """One op at concrete sizes."""

    op: str
    sizes: Mapping[str, Size]  # the sizes that the op's `Sizes` reads: plain integers and words without units
    boundary: str = "core"  # what the timed call covers: `core`, `with_quant` or `with_routing`
    place: str = "ad hoc"  # where it occurs in a model, as a text for people: `deepseek-r1 tp8 decode`
    weight: float = 1.0  # how often the workload of its suite calls it, relative to the other cases of the op

    @property
    def text(self) -> str:
        return text_of(self.sizes)

    @property
    def key(self) -> str:
        """The name of the case within a run. Cases with equal keys are the same measurement."""
        return f"{self.op} {self.text} {self.boundary}"


def merge(cases: Iterable[Case]) -> list[Case]:
    """Replaces cases with equal keys by one that has the sum of their weights, and keeps the order."""
    merged: dict[str, Case] = {}
    for case in cases:
        known = merged.get(case.key)
        merged[case.key] = replace(known, weight=known.weight + case.weight) if known else case
    return list(merged.values())


REQUESTS = re.compile(r"(?P<count>\d*)q(?P<new>\d+k?)(?:s(?P<total>\d+k?))?")
"""Equal requests in vLLM's short form (benchmarks/attention_benchmarks/batch_spec.py): 16q4s4k is 16 requests
of 4096 tokens each, 4 of which are new; without `s` all are new. A batch joins several by `_`."""
MOST_QUERIES = 8
"""The most query tokens of a request in a decode step. A request with more new tokens prefills."""


def _sizes_of_batch(spec: str, op: str) -> list[dict[str, str]]:
    """The sizes that the requests of a batch in the short form (`2q2k_32q1s1k`) have in an op, one dict for
    each kind of request. Raises ValueError."""
    requests = []
    for text in spec.split("_"):
        match = REQUESTS.fullmatch(text)
        if not match:
            raise ValueError(f"cannot read {text!r} in {spec!r}; write requests as 16q4s4k or 2q2k_32q1s1k")
        count = int(match["count"] or 1)
        new = _tokens(match["new"])
        total = _tokens(match["total"] or match["new"])
        if count == 0 or new == 0 or total < new:
            raise ValueError(f"{text!r} has no request, no new token, or more new tokens than in all")
        requests.append((count, new, total))
    tokens = sum(count * new for count, new, _ in requests)
    if op == "block_scale_gemm":
        raise ValueError(f"{spec!r} has m={tokens} but no n and k; write m={tokens} n=2112 k=7168")
    if op == "fused_moe":
        return [{"tokens": str(tokens)}]
    if op not in ("mla_decode", "mha_prefill"):
        raise ValueError(
            f"{spec!r} is a batch of requests: say which op has it, --op mla_decode or mha_prefill"
        )
    sizes = []
    for count, new, total in requests:
        decodes = new == 1 or (new <= MOST_QUERIES and total > new)
        if decodes and op == "mla_decode":
            query = {"q": str(new)} if new > 1 else {}
            sizes.append({"batch": str(count), "ctx": str(total), **query})
        elif not decodes and op == "mha_prefill":
            sizes.append({"batch": str(count), "new": str(new), "prefix": str(total - new)})
    if not sizes:
        raise ValueError(
            f"{spec!r} has no requests that {'decode' if op == 'mla_decode' else 'prefill'}; up to "
            f"{MOST_QUERIES} new tokens, not all of a request's, decode"
        )
    return sizes


def _tokens(text: str) -> int:
    """`4k` -> 4096"""
    return int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)


def parse(text: str, op: str = "") -> list[dict[str, str]]:
    """The sizes of each combination of the listed values: two for `batch=1,16 ctx=4096`. The first word may
    be a batch as in REQUESTS, whose sizes depend on the op: `16q4s4k heads=8`. Raises ValueError."""
    first_word, _, others = text.strip().partition(" ")
    if re.match(r"\d*q\d[^=]*$", first_word):
        other_sizes = parse(others) if others.strip() else [{}]
        combinations = []
        for sizes, other in itertools.product(_sizes_of_batch(first_word, op), other_sizes):
            for name in other:
                if name in sizes or name == "q":  # a batch always says q; 1 is left out of its sizes
                    raise ValueError(f"size {name!r} stands twice in case {text!r}: {first_word} says it")
            combinations.append(sizes | other)
        return combinations
    with_spaces = re.sub(r"[,;]\s*(?=\w+=)", " ", text)
    if with_spaces != text:
        raise ValueError(f"sizes are separated by spaces, not {text!r}; write {with_spaces!r}")
    axes: dict[str, list[str]] = {}
    for word in text.split():
        name, equals, values = word.partition("=")
        if not (name and equals and all(values.split(","))):
            raise ValueError(f"cannot read {word!r} in case {text!r}; write name=value[,value...]")
        if name in axes:
            raise ValueError(f"size {name!r} stands twice in case {text!r}")
        axes[name] = values.split(",")
    if not axes:
        raise ValueError("an empty case; write for example 'batch=64 ctx=4096 heads=16'")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
