"""The load that a prediction is of: a fixed number of requests in flight, each followed by the next."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import UsageError

PREFILL_TOKENS = 16384
"""Of one prefill step where nothing says it: SGLang's --chunked-prefill-size on GPUs of 160 GB and more."""


@dataclass(frozen=True)
class Load:
    """A closed loop of requests.

    isl, osl:       tokens in and out, at most
    range_ratio:    lengths are uniform from range_ratio * length to length (InferenceX: 0.8); 1: all alike,
                    then requests stay in step with each other
    prefill_tokens: of one step (SGLang's --chunked-prefill-size)
    waves:          prompts for each place, of which the first come all at once
    recv_interval:  decode steps between two looks for new requests (SGLang's --scheduler-recv-interval)

    Raises UsageError for a number that no load has.
    """

    isl: int
    osl: int
    concurrency: int
    range_ratio: float = 0.8
    prefill_tokens: int = PREFILL_TOKENS
    waves: int = 10
    recv_interval: int = 1

    def __post_init__(self) -> None:
        least_of = {"isl": 1, "osl": 2, "concurrency": 1, "prefill_tokens": 1, "waves": 1, "recv_interval": 1}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)} must be at least {least}")
        if not 0 <= self.range_ratio <= 1:
            raise UsageError(f"range_ratio={self.range_ratio} must be from 0 to 1")

    @property
    def lengths(self) -> tuple[int, int]:
        return self.isl, self.osl

    @property
    def mean_isl(self) -> float:
        return self.isl * (1 + self.range_ratio) / 2

    @property
    def mean_osl(self) -> float:
        return max(self.osl * (1 + self.range_ratio) / 2, 2.0)

    @property
    def mean_context(self) -> float:
        """Cached tokens of a decoding request, over its life."""
        return self.mean_isl + self.mean_osl / 2

    @property
    def most_together(self) -> float:
        """Prompts that one prefill step takes."""
        return max(self.prefill_tokens / self.mean_isl, 1.0)
