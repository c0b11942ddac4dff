"""A quantity: one number with all that it depends on, whether a client wrote it or a document claims it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from harness.serving.published.documents import Claim, Configuration
from harness.serving.schema import Metric, Mode, OfferedLoad, Parallelism, ServingRun, Totals

LENGTH_TOLERANCE = 0.02  # of a mean length: what stop tokens and templates add
CHECKPOINT_FP8 = re.compile(r"deepseek-(r1|v3)", re.IGNORECASE)
"""Models whose checkpoint is FP8 with a scale a block of 128 x 128 (DeepSeek-V3 report, arXiv 2412.19437)."""

SNAPSHOT = re.compile(r"-\d{4}$")
"""Of a model's name: later weights of the same layers."""
UP_TO = "up to "
"""Before a length of which the longest alone is known."""

WHERE = ("--model", "--model-path", "--host", "--port", "--served-model-name", "--trust-remote-code")
CONVERTS = re.compile(r"tensorrt|trt", re.IGNORECASE)
"""Engines whose weights are what a conversion made of a checkpoint."""


@dataclass(frozen=True)
class Quantity:
    """A metric in its circumstances.

    counted: the client's own totals, from which lengths follow; none of a claim
    others:  the other metrics of its run
    bound:   `up to` and the like: the number is no mean of anything
    """

    id: str
    metric: Metric
    hardware: str = ""
    gpus: int | None = None
    nodes: int | None = None
    engine: str = ""
    version: str = ""
    image: str = ""
    client: str = ""
    model: str = ""
    precision: str = ""
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    parallelism: Parallelism = field(default_factory=Parallelism)
    mode: Mode = "unknown"
    workload: OfferedLoad = field(default_factory=OfferedLoad)
    counted: Totals = field(default_factory=Totals)
    others: tuple[Metric, ...] = ()
    bound: str = "exactly"

    @property
    def all_gpus(self) -> int | None:
        """Of every role: those that prefill too."""
        split = (self.parallelism.prefill_gpus or 0) + (self.parallelism.decode_gpus or 0)
        return self.gpus or split or None

    @property
    def trimmed(self) -> bool:
        """Whether the client leaves time at either end out of its numbers."""
        return bool(self.workload.warmup_s or self.workload.cooldown_s)

    @property
    def input_len(self) -> float | None:
        return self._length(self.workload.input_len, self.counted.input_tokens)

    @property
    def output_len(self) -> float | None:
        return self._length(self.workload.output_len, self.counted.output_tokens)

    @property
    def input_length(self) -> str:
        return _length_text(self.input_len, self.workload.longest_input_len)

    @property
    def output_length(self) -> str:
        return _length_text(self.output_len, self.workload.longest_output_len)

    def _length(self, requested: float | None, tokens: int | None) -> float | None:
        """Tokens of a request as served, where the totals are of whole requests; else as asked for."""
        if self.trimmed or not tokens or not self.counted.completed:
            return requested
        served = tokens / self.counted.completed
        close = requested is not None and abs(served - requested) <= LENGTH_TOLERANCE * requested
        return requested if close else served

    @property
    def weights(self) -> str:
        """How weights are multiplied, with a cache other than the engine's default named; empty: unknown. A
        mere `fp8` is made out from the server's flags, where they are known."""
        if self.precision.lower() not in ("", "fp8") or not (self.flags or self.environment):
            return self.precision
        precision = option(self.flags, "--quantization") or option(self.flags, "--dtype")
        if precision in ("", "auto"):
            as_is = CHECKPOINT_FP8.search(self.model) and not CONVERTS.search(self.engine)
            precision = "fp8 block-scale" if as_is else self.precision
        cache = option(self.flags, "--kv-cache-dtype")
        return f"{precision}, {cache} cache" if precision and cache not in ("", "auto") else precision


def option(flags: tuple[str, ...], name: str) -> str:
    """The value of `--name value` or `--name=value` among a server's flags; empty where it is not there.
    A flag of one role may stand behind `role: `."""
    for flag in flags:
        words = re.split(r"[ =]", flag.split(": ", 1)[-1], maxsplit=1)
        if words[0] == name:
            return words[1].strip() if len(words) > 1 else "1"
    return ""


def _length_text(mean: float | None, longest: float | None) -> str:
    """Empty where neither is known."""
    if mean is not None:
        return f"{mean:.6g}"
    return "" if longest is None else f"{UP_TO}{longest:.6g}"


def matters(flag: str) -> bool:
    """Whether a server's flag is more than where things are."""
    return re.split(r"[ =]", flag.split(": ", 1)[-1], maxsplit=1)[0] not in WHERE


def quantity_of_run(run: ServingRun, metric: Metric) -> Quantity:
    return Quantity(
        metric=metric,
        counted=run.totals,
        others=run.metrics,
        **{name: getattr(run, name) for name in SHARED},
        model=run.model or option(run.flags, "--model"),
        precision=run.precision,
        client=run.client,
    )


def quantity_of_claim(claim: Claim, metric: Metric, configuration: Configuration | None = None) -> Quantity:
    """What a claim leaves open is its configuration's, where it names one."""
    values = {name: getattr(claim, name, None) for name in SHARED}
    if configuration is not None:
        for name in SHARED:
            if name not in ("id", "workload") and values[name] in (
                None,
                "",
                "unknown",
                (),
                {},
                Parallelism(),
            ):
                values[name] = getattr(configuration, name)
    return Quantity(metric=metric, bound=claim.bound, **{k: v for k, v in values.items() if v is not None})


SHARED = ("id", "hardware", "gpus", "nodes", "engine", "version", "image", "flags", "environment",
          "parallelism", "mode", "workload")  # fmt: skip
