"""One schema for what serving clients report.

A throughput in tokens per second may be of any kind of tokens, over any number of GPUs, of a whole engine or
of its decode half. So each metric has its scope, kind of tokens, unit and statistic.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

Scope = Literal[
    "request", "gpu", "prefill_gpu", "decode_gpu", "node", "decode_node", "instance", "cluster", "unknown"
]
SCOPES = {
    scope: scope.replace("gpu", "GPU").replace("_", " ") for scope in get_args(Scope) if scope != "unknown"
}
"""Each scope except `unknown`, in words for a reader."""

Tokens = Literal["output", "input", "total", "none", "unknown"]
Mode = Literal["online", "offline", "unknown"]
Severity = Literal["wrong", "suspect", "note"]


class StrictRecord(BaseModel):
    """A record of a file that comes from outside."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LenientRecord(StrictRecord):
    """A record of which a file may have keys that nothing reads, because another version wrote it."""

    model_config = ConfigDict(extra="ignore")


class Finding(StrictRecord):
    """What a rule found in one row, or between several."""

    rule: str  # its name, as in harness/serving/integrity/texts.toml, or that of a reader (`unreadable`, ...)
    severity: Severity
    """`wrong`: it does not hold; `suspect`: it needs an explanation; `note`: a reader has to know it."""
    message: str


class Metric(StrictRecord):
    """One number that a client reported, or that follows from other numbers of its run."""

    name: str
    """`throughput`, `request_throughput`, `goodput`; `ttft`, `tpot`, `itl`, `e2e`; `prefill`, `decode_step`
    (latency of one step); `concurrency`; or the client's own name for anything else."""
    value: float
    unit: str  # `ms` for all latencies, `s` for durations, `tok/s`, `req/s`, `1`, `GiB`, `tokens`
    scope: Scope = "unknown"
    """`instance` is one engine, however many GPUs it has; `decode_gpu` is one of the GPUs that only decode,
    `prefill_gpu` one of the others."""
    tokens: Tokens = "none"  # the kind of tokens; `total` is input and output
    statistic: str = "total"  # `total`, `mean`, `median`, `std`, `min`, `max`, `p99` ...
    derived: str = ""  # how it follows from other numbers of the run; empty: the client reported it
    label: str = ""  # what a document calls it, if that leaves its scope or tokens open


class Parallelism(StrictRecord):
    """The number of GPUs of each kind of parallelism; None: not said."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    dp_attention: bool | None = None
    prefill_gpus: int | None = None
    decode_gpus: int | None = None

    @property
    def disaggregated(self) -> bool:
        return bool(self.prefill_gpus or self.decode_gpus)


class OfferedLoad(StrictRecord):
    """The load that the client was asked for."""

    dataset: str = ""
    input_len: float | None = None  # tokens of a request, as asked for; the mean of a range
    output_len: float | None = None
    longest_input_len: float | None = None  # the longest of a range, if the client says nothing else of it
    longest_output_len: float | None = None
    range_ratio: float | None = None  # the shortest of a range over its longest
    concurrency: float | None = None  # most requests in flight that the client allows
    request_rate: float | None = None  # a second; None: not said; 0: all at once (the clients' `inf`)
    burstiness: float | None = None  # shape of the gamma distribution of times between requests; 1: Poisson
    ramp_up: str = ""  # how the rate grows at the start; empty: it does not, or that is not said
    num_prompts: int | None = None
    warmup_s: float | None = None  # time at either end that is not in the numbers
    cooldown_s: float | None = None
    prefix_cached: bool | None = None


class Totals(StrictRecord):
    """Counts over the whole run, or over the window that the client keeps."""

    duration_s: float | None = None
    completed: int | None = None
    failed: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class RequestSamples(StrictRecord):
    """What a client kept of each request, in its order, or empty lists. starts_s: by the client's clock"""

    input_lens: tuple[int, ...] = ()
    output_lens: tuple[int, ...] = ()
    ttfts_ms: tuple[float, ...] = ()
    e2es_ms: tuple[float, ...] = ()
    itls_ms: tuple[tuple[float, ...], ...] = ()
    starts_s: tuple[float, ...] = ()


class ServingRun(StrictRecord):
    """One run of one client against one engine: one row."""

    id: str
    client: str  # the format of the file: `sglang.bench_serving`, `vllm.serve`, `dstack.online` ...
    source: str
    label: str = ""
    date: str = ""
    model: str = ""
    precision: str = ""
    hardware: str = ""  # the name of the GPU or CPU as given; empty: not said
    gpus: int | None = None
    nodes: int | None = None
    engine: str = ""  # by its own report or by the format; empty: not said
    protocol: str = ""
    """The client's `backend`: `vllm` and `openai` are OpenAI's protocol, which all engines speak."""
    version: str = ""
    image: str = ""
    configuration: str = ""  # the name of the one that it ran (harness/serving/published_documents.py)
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)
    parallelism: Parallelism = Parallelism()
    mode: Mode = "unknown"
    workload: OfferedLoad = OfferedLoad()
    totals: Totals = Totals()
    metrics: tuple[Metric, ...] = ()
    samples: RequestSamples = RequestSamples()
    extra: dict[str, Any] = Field(default_factory=dict)  # what has no place here, by the client's own key
    notes: tuple[str, ...] = ()  # what was repaired or assumed in reading this row
    findings: tuple[Finding, ...] = ()

    def metric(self, name: str, statistic: str = "", tokens: str = "", scope: str = "") -> Metric | None:
        """The first metric of that name, and, if given, of that statistic, kind of tokens and scope."""
        return first(self.metrics, name=name, statistic=statistic, tokens=tokens, scope=scope)

    def value(self, name: str, statistic: str = "", tokens: str = "", scope: str = "") -> float | None:
        """The value of that metric; None if the run has no such metric."""
        metric = self.metric(name, statistic, tokens, scope)
        return metric.value if metric else None

    def reported_ms(self, name: str, statistic: str = "mean") -> float | None:
        """A latency in ms if the client reported it; None if it lacks or only follows from other numbers."""
        reported = (metric for metric in self.metrics if not metric.derived)
        metric = first(reported, name=name, statistic=statistic, unit="ms")
        return metric.value if metric else None

    def whole_throughput(self, metric: Metric | None) -> float | None:
        """A throughput of the whole engine; None if its scope does not tell by what it was divided."""
        if metric is None:
            return None
        counts = {"gpu": self.gpus, "node": self.nodes, "instance": 1, "cluster": 1}
        counts |= {"prefill_gpu": self.parallelism.prefill_gpus, "decode_gpu": self.parallelism.decode_gpus}
        count = counts.get(metric.scope)
        return metric.value * count if count else None

    @property
    def mean_output_length(self) -> float | None:
        """Mean output tokens of a request: as counted, else as asked for, else from the rates."""
        if self.totals.output_tokens and self.totals.completed:
            return self.totals.output_tokens / self.totals.completed
        if self.workload.output_len is not None:
            return self.workload.output_len
        requests = self.metric("request_throughput")
        if requests is None or requests.derived or not requests.value:
            return None
        tokens = self.value("throughput", "total", "output", requests.scope)
        return None if tokens is None else tokens / requests.value

    @property
    def has_equal_lengths(self) -> bool:
        """Whether all requests had the same output length: by their list, or because the mean is exactly the
        whole number that was asked for, which different lengths give only by chance."""
        lengths, totals, requested = self.samples.output_lens, self.totals, self.workload.output_len or 0
        if lengths:
            return min(lengths) == max(lengths)
        if not totals.output_tokens or not totals.completed:
            return False
        is_whole = requested == int(requested)  # a fraction is a mean over a data set (trtllm-bench)
        return totals.completed == 1 or (is_whole and totals.output_tokens == totals.completed * requested)

    def option(self, *names: str) -> str:
        """The value, in small letters, of the first of these options of the server that is on. It is looked
        for among the server's flags, then in what the user had the client note (vLLM's --metadata)."""
        for name in names:
            value = option(self.flags, f"--{name}") or str(self.extra.get(name.replace("-", "_")) or "")
            if value.lower() not in OFF:
                return value.lower()
        return ""

    @property
    def speculation(self) -> str:
        """`eagle`, `mtp`, `2.84 tokens a step` ...; `none`; empty: not said."""
        if named := self.option("speculative-algorithm", "speculative-config", *SPECULATION):
            return named
        if drafted := self.option("num-speculative-tokens"):
            return DRAFTED.format(drafted)
        accepted = self.accept_length
        if accepted is not None and accepted > 1:
            return f"{accepted:.3g} tokens a step"
        if accepted is not None and not self.drafts:
            return "none"
        if self.drafts or self._count("spec_decode_acceptance_rate") is not None:
            return DRAFTED.format(self.drafts or "some")
        is_said_off = self.flags or any(key in self.extra for key in SPECULATION)
        return "none" if is_said_off else ""

    @property
    def drafts(self) -> int | None:
        """Draft tokens that a step verifies for each request; None: not said, or they form a tree."""
        if self.option("speculative-eagle-topk") not in ("", "1"):
            return None
        tokens = self.option("speculative-num-draft-tokens")
        if tokens.isdigit():  # SGLang's, with the token that is verified with them
            return int(tokens) - 1
        config = NUM_DRAFTS.search(self.option("speculative-config"))
        named = config[1] if config else ""
        for number in (named, self.option("num-speculative-tokens"), self.option("speculative-num-steps")):
            if number.isdigit():
                return int(number)
        drafted = self._count("spec_decode_draft_tokens")  # vLLM's counts
        steps = self._count("spec_decode_num_drafts")
        return round(drafted / steps) if drafted and steps else None

    def _count(self, key: str) -> float | None:
        value = self.extra.get(key)
        return float(value) if isinstance(value, (int, float)) else None

    @property
    def accept_length(self) -> float | None:
        """Tokens that a request gets of a step: accepted drafts + 1; None: not said. The source is the value
        of that name, TensorRT-LLM's `global_acceptance_rate` (the same), vLLM's counts, or the rate of
        accepted drafts in per cent."""
        length = self.value("accept_length", "mean")
        if length is not None:
            return length
        accepted, steps = self._count("spec_decode_accepted_tokens"), self._count("spec_decode_num_drafts")
        if accepted is not None and steps:
            return 1 + accepted / steps
        rate = self._count("spec_decode_acceptance_rate")
        return 1 + self.drafts * rate / 100 if rate is not None and self.drafts else None


def first(metrics: Iterable[Metric], **fields: str) -> Metric | None:
    """The first metric with these values; an empty value matches any."""
    for metric in metrics:
        if all(value in ("", getattr(metric, key)) for key, value in fields.items()):
            return metric
    return None


DRAFTED = "{} tokens drafted"
NUM_DRAFTS = re.compile(r"num_speculative_tokens\W+(\d+)")
OFF = ("", "none", "null", "false", "off", "0")  # values of an option that is off

SPECULATION = ("spec_decoding", "spec_method", "mtp")
"""InferenceX's keys for speculative decoding: of its files, its API's rows and its first files."""


def option(flags: Iterable[str], name: str) -> str:
    """The value of `--name value` or `--name=value` among flags (after `role: `, if any); empty: none."""
    for flag in flags:
        words = re.split(r"[ =]", flag.split(": ", 1)[-1], maxsplit=1)
        if words[0] == name:
            return words[1].strip() if len(words) > 1 else "1"
    return ""
