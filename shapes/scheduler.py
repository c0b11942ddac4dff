"""Scheduler of a serving workload, simulated: what its steps see.

Time is counted in steps, not seconds. A client keeps `concurrency` requests open and sends the next
one the moment an answer ends; the engine lets them in first come, first served. KV memory has no
limit here: where it runs out, an engine decodes smaller batches than these.

The convention throughout: the first token of an answer comes from the prefill of its prompt, so a
request decodes osl - 1 times, and the attention of its j-th decode sees isl + j cached tokens (the
token being decoded included): 3200 in and 800 out see 3201 to 3999. A chunk of a prompt is (new, prefix):
its tokens, and those of the same prompt that earlier steps cached.
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
    """A load and the scheduler that serves it.

    isl, osl:      tokens in and out of a request, at most (see range_ratio)
    concurrency:   requests open at a time; num_prompts for an offline batch
    policy:        prefill_first  a step prefills waiting prompts if there are any, else it decodes
                                  (SGLang's default; vLLM V0 without chunked prefill)
                   mixed          every step decodes, and prompt chunks fill its budget (vLLM V1)
                   disaggregated  prompts are prefilled elsewhere; all steps decode
    token_budget:  tokens of one step: of prompts under prefill_first (SGLang's
                   --chunked-prefill-size), of all under mixed (vLLM's --max-num-batched-tokens)
    max_running:   requests the engine lets in at a time (vLLM's --max-num-seqs); None: no limit
    range_ratio:   lengths are uniform between range_ratio * length and length, as SGLang's
                   bench_serving draws them for --random-range-ratio; 1: all alike
    arrival_steps: steps between the sending of one request and the next, at least
    whole_prompts: no prompt is split over steps unless it alone exceeds the budget (vLLM V0 without
                   chunked prefill); else the last one of a step fills the budget
    steady:        leave out the ramp before all places are taken first, and the drain after the last
                   request was let in
    """

    isl: int
    osl: int
    concurrency: int
    num_prompts: int
    policy: str = "prefill_first"
    token_budget: int = 8192
    max_running: int | None = None
    range_ratio: float = 1.0
    arrival_steps: float = 0.0
    whole_prompts: bool = False
    steady: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("isl", "osl", "concurrency", "num_prompts", "token_budget"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} of a workload must be at least 1")
        if self.max_running is not None and self.max_running < 1:
            raise ValueError(f"max_running={self.max_running} of a workload must be at least 1")
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
        """Requests in the engine at a time, at most."""
        return min(self.concurrency, self.num_prompts, self.max_running or self.num_prompts)

    def on_rank(self, dp: int) -> Workload:
        """The share of one of `dp` data-parallel ranks, each with a scheduler of its own."""
        return replace(
            self,
            concurrency=-(-self.concurrency // dp),
            num_prompts=-(-self.num_prompts // dp),
            arrival_steps=self.arrival_steps * dp,
        )

    def requests(self) -> list[tuple[int, int]]:
        """(tokens in, tokens out) of each request; a function of the workload alone."""
        draw = random.Random(self.seed)

        def length(most: int) -> int:
            return draw.randint(max(int(most * self.range_ratio), 1), most)

        return [(length(self.isl), length(self.osl)) for _ in range(self.num_prompts)]


class Phase(NamedTuple):
    """Consecutive steps between which nobody comes or goes.

    steps:   how many
    lengths: cached tokens of each decoding request in the first of the steps; each grows by one a
             step; empty where the steps only prefill
    prefill: prompt tokens in each of the steps
    chunks:  the prompt chunks of the first of the steps as (new, prefix); of more steps than one, there is
             a single chunk, whose prefix grows by its new tokens a step
    """

    steps: int
    lengths: tuple[int, ...]
    prefill: int
    chunks: tuple[tuple[int, int], ...] = ()


@dataclass
class _Prompt:
    left: int
    isl: int
    osl: int


class _Answer(NamedTuple):
    """A decoding request by the decode count: it sees offset + count tokens, and ends at `end`."""

    offset: int
    end: int


def simulate(workload: Workload) -> Iterator[Phase]:
    """Runs the workload from the first request to the last, advancing over like steps at once."""
    queue = deque(workload.requests())
    prompts: deque[_Prompt] = deque()
    answers: list[_Answer] = []
    clock = 0  # steps so far
    count = 0  # decode steps so far
    ramped = False

    def start(isl: int, osl: int) -> None:
        if osl > 1:
            answers.append(_Answer(isl + 1 - count, count + osl - 1))

    while queue or prompts or answers:
        open_requests = len(prompts) + len(answers)
        room = queue and open_requests < workload.places
        arrival = (workload.num_prompts - len(queue)) * workload.arrival_steps
        if room and arrival <= clock:
            isl, osl = queue.popleft()
            if workload.policy == "disaggregated":
                start(isl, osl)
            else:
                prompts.append(_Prompt(isl, isl, osl))
            continue

        ramped = ramped or open_requests == workload.places
        decoding = answers if workload.policy != "prefill_first" or not prompts else []
        budget = workload.token_budget - (len(decoding) if workload.policy == "mixed" else 0)
        limits = []
        if decoding:
            limits.append(min(answer.end for answer in decoding) - count)
        if prompts:
            limits.append(max(1, prompts[0].left // budget))
        if room:
            limits.append(math.ceil(arrival - clock))
        steps = min(limits)

        taken = _take(prompts, budget * steps, workload.whole_prompts)
        prefilled = sum(tokens for _, tokens, _ in taken)
        if (decoding or taken) and (not workload.steady or (ramped and queue)):
            lengths = tuple(answer.offset + count for answer in decoding)
            chunks = tuple((tokens // steps, prefix) for _, tokens, prefix in taken)
            yield Phase(steps, lengths, prefilled // steps, chunks)

        clock += steps
        if decoding:
            count += steps
            answers = [answer for answer in answers if answer.end > count]
        for prompt, _, _ in taken:
            if not prompt.left:
                start(prompt.isl, prompt.osl)


def _take(prompts: deque[_Prompt], budget: int, whole: bool) -> list[tuple[_Prompt, int, int]]:
    """Takes prompt tokens in order until the budget is spent; finished prompts leave the queue.

    Gives each prompt with the tokens taken from it, and those taken before.
    """
    taken: list[tuple[_Prompt, int, int]] = []
    while prompts and budget:
        prompt = prompts[0]
        if whole and taken and prompt.left > budget:
            break
        tokens = min(prompt.left, budget)
        taken.append((prompt, tokens, prompt.isl - prompt.left))
        prompt.left -= tokens
        budget -= tokens
        if not prompt.left:
            prompts.popleft()
    return taken
