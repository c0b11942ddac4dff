"""A simulation of the scheduler of a serving workload: the batches and chunks of its steps.

Time is counted in steps, not seconds. A client keeps `concurrency` requests open and sends the next one as
soon as an answer ends; the engine admits them in the order of arrival. KV memory is unlimited: an engine that
runs out of it decodes smaller batches than these.

The prefill of a prompt makes the first token of its answer. So a request decodes osl - 1 times, and the
attention of its j-th decode reads isl + j cached tokens, with the token that is being decoded: with 3200 in
and 800 out it reads 3201 to 3999. A chunk of a prompt is (new, prefix): its tokens, and the tokens of the
same prompt that earlier steps cached.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

POLICIES = ("prefill_first", "mixed", "disaggregated")


@dataclass(frozen=True)
class Workload:
    """A load and the scheduler that serves it."""

    isl: int  # the most tokens of a prompt (see range_ratio)
    osl: int  # the most tokens of an answer (see range_ratio)
    concurrency: int  # requests that are open at a time; num_prompts for an offline batch
    num_prompts: int
    policy: str = "prefill_first"
    """prefill_first: a step prefills waiting prompts if there are any, else it decodes (SGLang's default;
    vLLM V0 without chunked prefill). mixed: every step decodes, and prompt chunks fill its budget (vLLM V1).
    disaggregated: prompts are prefilled elsewhere, and all steps decode."""
    token_budget: int = 8192
    """The most tokens of one step: of prompts with prefill_first (SGLang's --chunked-prefill-size), of all
    with mixed (vLLM's --max-num-batched-tokens)."""
    max_running: int | None = None
    """The most requests in the engine at a time (vLLM's --max-num-seqs); None: no limit."""
    range_ratio: float = 1.0
    """Lengths are uniform between range_ratio * length and length (--random-range-ratio of SGLang's
    bench_serving); 1 makes all equal."""
    arrival_steps: float = 0.0  # the least number of steps between the sending of two requests
    whole_prompts: bool = False
    """Whether a prompt is split over steps only if it alone exceeds the budget (vLLM V0 without chunked
    prefill); else the last prompt of a step fills the budget."""
    steady: bool = False
    """Whether steps before all places are taken, and after the last request was admitted, are left out."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("isl", "osl", "concurrency", "num_prompts", "token_budget", "max_running"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} of a workload must be at least 1")
        if self.arrival_steps < 0:
            raise ValueError(f"arrival_steps={self.arrival_steps} of a workload must not be negative")
        if self.policy not in POLICIES:
            raise ValueError(f"unknown policy {self.policy!r}; policies: {', '.join(POLICIES)}")
        if not 0 < self.range_ratio <= 1:
            raise ValueError(f"range_ratio={self.range_ratio} must be above 0 and at most 1")
        if self.policy == "mixed" and self.token_budget < self.places:
            raise ValueError(
                f"token_budget={self.token_budget} must be at least the {self.places} requests of a step"
            )

    @property
    def places(self) -> int:
        """The most requests in the engine at a time."""
        return min(self.concurrency, self.num_prompts, self.max_running or self.num_prompts)

    def on_rank(self, dp: int) -> Workload:
        """The share of one of `dp` data-parallel ranks, each of which has its own scheduler."""
        open_requests, prompts = math.ceil(self.concurrency / dp), math.ceil(self.num_prompts / dp)
        arrival_steps = self.arrival_steps * dp
        return replace(self, concurrency=open_requests, num_prompts=prompts, arrival_steps=arrival_steps)

    def requests(self) -> list[tuple[int, int]]:
        """(tokens in, tokens out) of each request; equal workloads give equal requests."""
        draw = random.Random(self.seed)

        def length(most: int) -> int:
            return draw.randint(max(int(most * self.range_ratio), 1), most)

        return [(length(self.isl), length(self.osl)) for _ in range(self.num_prompts)]


class Phase(NamedTuple):
    """Consecutive steps between which no request begins or ends."""

    steps: int
    lengths: tuple[int, ...]
    """Cached tokens of each decoding request, if any, in the first step; they grow by one a step."""
    prefill: int  # the prompt tokens of each step
    chunks: tuple[tuple[int, int], ...] = ()
    """The prompt chunks of the first step, (new, prefix). If there is more than one step, there is only one
    chunk, and its prefix grows by its new tokens each step."""


@dataclass
class _Prompt:
    left: int  # the prompt tokens that are not prefilled yet
    isl: int
    osl: int


class _Answer(NamedTuple):
    """A decoding request. When the engine has made `count` decode steps, it reads offset + count tokens."""

    offset: int
    end: int  # the number of decode steps of the engine after which it is complete


class _Chunk(NamedTuple):
    """The part of a prompt that the steps of a phase prefill."""

    prompt: _Prompt
    tokens: int
    prefix: int  # the tokens of the prompt that were prefilled before


def simulate(workload: Workload) -> Iterator[Phase]:
    """Runs the workload from the first request to the last; steps that are alike become one phase."""
    queue = deque(workload.requests())
    prompts: deque[_Prompt] = deque()
    answers: list[_Answer] = []
    clock = 0  # steps so far
    count = 0  # decode steps so far
    ramped = False
    while queue or prompts or answers:
        open_requests = len(prompts) + len(answers)
        has_room = bool(queue) and open_requests < workload.places
        arrival = (workload.num_prompts - len(queue)) * workload.arrival_steps  # of the next request
        if has_room and arrival <= clock:
            isl, osl = queue.popleft()
            if workload.policy == "disaggregated":
                answers += _begun(isl, osl, count)
            else:
                prompts.append(_Prompt(isl, isl, osl))
            continue

        ramped = ramped or open_requests == workload.places
        decoding = [] if workload.policy == "prefill_first" and prompts else answers
        budget = workload.token_budget  # of prompt tokens in a step
        if workload.policy == "mixed":
            budget -= len(decoding)
        limits = []  # how many steps are alike at most
        if decoding:  # those until an answer ends
            limits.append(min(answer.end for answer in decoding) - count)
        if prompts:  # those that the first prompt fills alone; at least one
            limits.append(max(1, prompts[0].left // budget))
        if has_room:  # those until the next request arrives
            limits.append(math.ceil(arrival - clock))
        steps = min(limits)

        taken = _take(prompts, budget * steps, workload.whole_prompts)
        is_steady = ramped and queue
        if (decoding or taken) and (is_steady or not workload.steady):
            lengths = tuple(answer.offset + count for answer in decoding)
            prefilled = sum(chunk.tokens for chunk in taken)
            chunks = tuple((chunk.tokens // steps, chunk.prefix) for chunk in taken)
            yield Phase(steps, lengths, prefilled // steps, chunks)

        clock += steps
        if decoding:
            count += steps
            answers = [answer for answer in answers if answer.end > count]
        for chunk in taken:
            if not chunk.prompt.left:
                answers += _begun(chunk.prompt.isl, chunk.prompt.osl, count)


def _begun(isl: int, osl: int, count: int) -> list[_Answer]:
    """The answer that decodes after `count` decode steps; none where the prefill makes its only token."""
    return [_Answer(isl + 1 - count, count + osl - 1)] if osl > 1 else []


def _take(prompts: deque[_Prompt], budget: int, whole: bool) -> list[_Chunk]:
    """Takes prompt tokens in order until the budget is spent. Finished prompts leave the queue."""
    taken: list[_Chunk] = []
    while prompts and budget:
        prompt = prompts[0]
        if whole and taken and prompt.left > budget:
            break
        tokens = min(prompt.left, budget)
        taken.append(_Chunk(prompt, tokens, prompt.isl - prompt.left))
        prompt.left -= tokens
        budget -= tokens
        if not prompt.left:
            prompts.popleft()
    return taken
