"""Named suites: which cases of an op a workload asks for, and how often.

A suite has a function for each op that it has cases for. Listing suites calls none of them, and what
only they need (model data, the simulation) they import themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shapes.attention import Parallel, mla_decode_sizes
from shapes.case import Case, merge
from shapes.lengths import span_text
from shapes.workloads import Documented, documented

R1 = "deepseek-r1"


@dataclass(frozen=True)
class Suite:
    """name, one line on what it holds and whence, and op -> function that makes the op's cases."""

    name: str
    description: str
    by_op: Mapping[str, Callable[[], list[Case]]]

    def cases(self, op: str) -> list[Case]:
        """Weights are shares of the suite's decode steps and sum to 1; empty if the op has no cases."""
        cases = self.by_op.get(op, list)()
        total = sum(case.weight for case in cases)
        return [replace(case, weight=case.weight / total) for case in merge(cases)]


@functools.cache
def suites() -> dict[str, Suite]:
    """All suites by name; the general ones first, then one for each documented workload."""
    general = [
        Suite(
            "smoke",
            "seconds on any machine: short ragged contexts, pages of 1, 16 and 64 tokens",
            {"mla_decode": _smoke_mla_decode},
        ),
        *(
            Suite(
                f"r1-tp{tp}",
                f"{R1} tp{tp}: 3200 in, 800 out at concurrency 1 to 128, one case each (AMD's sweep)",
                {"mla_decode": functools.partial(_sweep_mla_decode, Parallel(tp=tp))},
            )
            for tp in (8, 4)
        ),
        Suite(
            "r1-dp-ep8",
            f"{R1} dp8 ep8: DeepSeek's production (deepseek-ai/open-infra-index day 6, and profile-data), "
            "and 3200 in, 800 out at concurrency 128 (dstack, H200) to 1024",
            {"mla_decode": _dp_mla_decode},
        ),
    ]
    served = [
        Suite(
            name,
            f"{R1} {run.parallel.text}: {run.workload.isl} in, {run.workload.osl} out; {run.source}",
            {"mla_decode": functools.partial(_served_mla_decode, run)},
        )
        for name, run in documented().items()
    ]
    return {suite.name: suite for suite in general + served}


def suite(name: str) -> Suite:
    """The suite of this name; raises ValueError with one line that lists the suites."""
    if name not in suites():
        raise ValueError(f"unknown suite {name!r}; suites: {', '.join(suites())}")
    return suites()[name]


def _mla_decode(parallel: Parallel, batch: int, ctx: str, weight: float = 1.0, kv: str = "bf16") -> Case:
    from shapes.models import model

    sizes = mla_decode_sizes(model(R1), parallel, batch, ctx, kv=kv)
    return Case("mla_decode", sizes, place=f"{R1} {parallel.text} decode", weight=weight)


def _smoke_mla_decode() -> list[Case]:
    """Below 0.2 million KV values each; page ends, one token, one request and a page of one token."""
    chosen = [(4, "1..120", 1), (2, "40..150", 16), (1, "130", 64), (4, "17..65", 64), (2, "64..128", 16)]
    return [
        Case(
            "mla_decode",
            {"batch": batch, "ctx": ctx, "heads": 16, "page": page, "kv": "bf16"},
            place="smoke",
        )
        for batch, ctx, page in chosen
    ]


def _seen(isl: int, osl: int) -> str:
    """Tokens a request attends to from its first to its last decode step (see shapes.serving)."""
    return span_text(isl + 1, isl + osl - 1)


def _sweep_mla_decode(parallel: Parallel) -> list[Case]:
    """A full batch whose requests are at all stages of their answers, the most served batches first."""
    ctx = _seen(3200, 800)
    return [_mla_decode(parallel, batch, ctx) for batch in (64, 128, 32, 16, 8, 4, 2, 1)]


def _dp_mla_decode() -> list[Case]:
    """4989: mean tokens cached per output token in a day of DeepSeek's service (open-infra-index, day 6; how
    they spread is not published). 128 requests a GPU, 4K prompts: its decode profile, said to match the
    service closely (profile-data)."""
    parallel = Parallel(dp=8, ep=8)
    production = [_mla_decode(parallel, 128, ctx) for ctx in ("4989", "4096")]
    return production + [
        _mla_decode(parallel, parallel.share(concurrency), _seen(3200, 800))
        for concurrency in (1024, 512, 256, 128)
    ]


def _served_mla_decode(run: Documented) -> list[Case]:
    from shapes.bins import decode_bins

    return [
        _mla_decode(run.parallel, bin_.batch, bin_.ctx, bin_.weight, run.kv)
        for bin_ in decode_bins(run.on_rank)
    ]
