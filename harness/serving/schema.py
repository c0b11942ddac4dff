"""One schema for what serving clients report.

A throughput in tokens per second says nothing by itself: of which tokens, over how many GPUs, with a whole
engine or its decode half. So every metric carries its scope, kind of tokens, unit and statistic.
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
"""What a reader calls each scope but `unknown`."""

Tokens = Literal["output", "input", "total", "none", "unknown"]
Mode = Literal["online", "offline", "unknown"]
Severity = Literal["wrong", "suspect", "note"]


class StrictRecord(BaseModel):
    """A record of files that come from outside."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Finding(StrictRecord):
    """What a rule found in one row, or between several.

    rule:     its name, as in harness/serving/integrity/texts.toml, or that of a reader (`unreadable`, ...)
    severity: `wrong` does not hold, `suspect` needs an explanation, `note` is to be known
    """

    rule: str
    severity: Severity
    message: str


class Metric(StrictRecord):
    """One number that a client reported, or that follows from others of its run.

    name:      `throughput`, `request_throughput`, `goodput`; `ttft`, `tpot`, `itl`, `e2e`; `prefill`,
               `decode_step` (latency of one step); `concurrency`; or the client's own name for anything else
    unit:      `ms` for all latencies, `s` for durations, `tok/s`, `req/s`, `1`, `GiB`, `tokens`
    scope:     what the number is of; `instance` is one engine, however many GPUs it has; `decode_gpu` is
               one of the GPUs that only decode, `prefill_gpu` one of the others
    tokens:    of which tokens; `total` is input and output
    statistic: `total`, `mean`, `median`, `std`, `min`, `max`, `p99` ...
    derived:   how it follows from other numbers of the run; empty: as the client reported it
    label:     how a document labels it, where that leaves its scope or tokens open
    """

    name: str
    value: float
    unit: str
    scope: Scope = "unknown"
    tokens: Tokens = "none"
    statistic: str = "total"
    derived: str = ""
    label: str = ""


class Parallelism(StrictRecord):
    """GPUs of each kind of parallelism; None: not said."""

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
    """What was asked of the engine.

    input_len, output_len: tokens of a request, as asked for (of a range: its mean)
    longest_input_len, longest_output_len: of a range, where the client says no more of it
    range_ratio:           the shortest of a range over its longest
    concurrency:           most requests in flight that the client allows
    request_rate:          requests per second; None: not said; 0: all at once (the clients' `inf`)
    burstiness:            shape of the gamma distribution of the times between requests; 1: Poisson
    ramp_up:               how the rate grows at the start; empty: it does not, or that is not said
    warmup_s, cooldown_s:  time at either end that is not in the numbers
    """

    dataset: str = ""
    input_len: float | None = None
    output_len: float | None = None
    longest_input_len: float | None = None
    longest_output_len: float | None = None
    range_ratio: float | None = None
    concurrency: float | None = None
    request_rate: float | None = None
    burstiness: float | None = None
    ramp_up: str = ""
    num_prompts: int | None = None
    warmup_s: float | None = None
    cooldown_s: float | None = None
    prefix_cached: bool | None = None


class Totals(StrictRecord):
    """What was counted over the whole run, or over the window that the client keeps."""

    duration_s: float | None = None
    completed: int | None = None
    failed: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class RequestSamples(StrictRecord):
    """What a client kept of each request, in its order; a list is empty where it kept none. starts_s: by the
    client's clock."""

    input_lens: tuple[int, ...] = ()
    output_lens: tuple[int, ...] = ()
    ttfts_ms: tuple[float, ...] = ()
    e2es_ms: tuple[float, ...] = ()
    itls_ms: tuple[tuple[float, ...], ...] = ()
    starts_s: tuple[float, ...] = ()


class ServingRun(StrictRecord):
    """One run of one client against one engine: one row.

    client:      the format it came in: `sglang.bench_serving`, `vllm.serve`, `dstack.online` ...
    hardware:    the GPU's (or CPU's) name as given; empty: the file does not say
    engine:      what answered, by what the server or the format itself says; empty: not said
    protocol:    what the client spoke (its `backend`): `vllm` and `openai` are OpenAI's, of all engines
    configuration: name of the documented configuration that it ran (harness/serving/published_documents.py)
    extra:       what the client wrote that has no place here, by its own key: nothing is lost
    notes:       what was repaired or taken for granted in reading this row
    """

    id: str
    client: str
    source: str
    label: str = ""
    date: str = ""
    model: str = ""
    precision: str = ""
    hardware: str = ""
    gpus: int | None = None
    nodes: int | None = None
    engine: str = ""
    protocol: str = ""
    version: str = ""
    image: str = ""
    configuration: str = ""
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)
    parallelism: Parallelism = Parallelism()
    mode: Mode = "unknown"
    workload: OfferedLoad = OfferedLoad()
    totals: Totals = Totals()
    metrics: tuple[Metric, ...] = ()
    samples: RequestSamples = RequestSamples()
    extra: dict[str, Any] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    def metric(self, name: str, statistic: str = "", tokens: str = "", scope: str = "") -> Metric | None:
        """The first metric of that name, and of that statistic, kind of tokens and scope where given."""
        return first(self.metrics, name=name, statistic=statistic, tokens=tokens, scope=scope)

    def value(self, name: str, statistic: str = "", tokens: str = "", scope: str = "") -> float | None:
        """Its value, or None where the run has no such metric."""
        metric = self.metric(name, statistic, tokens, scope)
        return metric.value if metric else None

    def option(self, *names: str) -> str:
        """The value, in small letters, of the first of these options of the server that is on: among its
        flags, or under its name in what the client was told to note (vLLM's --metadata). Empty: none."""
        for name in names:
            value = option(self.flags, f"--{name}") or str(self.extra.get(name.replace("-", "_")) or "")
            if value.lower() not in OFF:
                return value.lower()
        return ""

    @property
    def speculation(self) -> str:
        """`eagle`, `mtp`, `2.84 tokens a step` ...; `none`; empty: not said."""
        said = self.option("speculative-algorithm", "speculative-config", *SPECULATION)
        drafts = self.option("num-speculative-tokens")
        said = said or (drafts and DRAFTED.format(drafts))
        accepted = self.accept_length
        if not said and accepted is not None and (accepted > 1 or not self.drafts):
            return f"{accepted:.3g} tokens a step" if accepted > 1 else "none"
        if not said and (self.drafts or self._count("spec_decode_acceptance_rate") is not None):
            return DRAFTED.format(self.drafts or "some")
        return said or ("none" if self.flags or any(key in self.extra for key in SPECULATION) else "")

    @property
    def drafts(self) -> int | None:
        """Draft tokens that a step verifies of each request; None: not said, or a tree of them."""
        if self.option("speculative-eagle-topk") not in ("", "1"):
            return None
        tokens = self.option("speculative-num-draft-tokens")  # SGLang's, the verified one included
        config = NUM_DRAFTS.search(self.option("speculative-config"))
        said = [str(int(tokens) - 1) if tokens.isdigit() else "", config[1] if config else ""]
        said += map(self.option, ("num-speculative-tokens", "speculative-num-steps"))
        drafted, steps = map(self._count, ("spec_decode_draft_tokens", "spec_decode_num_drafts"))  # vLLM's
        counted = round(drafted / steps) if drafted and steps else None
        return next((int(word) for word in said if word.isdigit()), counted)

    def _count(self, key: str) -> float | None:
        return float(value) if isinstance(value := self.extra.get(key), (int, float)) else None

    @property
    def accept_length(self) -> float | None:
        """Tokens that a request gets of a step: accepted drafts + 1. By its name, by TensorRT-LLM's
        `global_acceptance_rate`, which is that, by vLLM's counts, or by its rate, per cent of the drafts;
        None: not said."""
        length = self.value("accept_length", "mean")
        keys = ("spec_decode_accepted_tokens", "spec_decode_num_drafts", "spec_decode_acceptance_rate")
        taken, steps, rate = map(self._count, keys)
        if length is None and taken is not None and steps:
            return 1 + taken / steps
        return 1 + self.drafts * rate / 100 if length is None and rate is not None and self.drafts else length


def first(metrics: Iterable[Metric], **wanted: str) -> Metric | None:
    """The first that has these values; an empty one stands for any."""
    given = {key: value for key, value in wanted.items() if value}
    return next((m for m in metrics if all(getattr(m, key) == given[key] for key in given)), None)


DRAFTED = "{} tokens drafted"
NUM_DRAFTS = re.compile(r"num_speculative_tokens\W+(\d+)")
OFF = ("", "none", "null", "false", "off", "0")
"""Values of an option that is off."""

SPECULATION = ("spec_decoding", "spec_method", "mtp")
"""InferenceX's keys for speculative decoding: of its files, its API's rows and its first files."""


def option(flags: Iterable[str], name: str) -> str:
    """The value of `--name value` or `--name=value` among a server's flags; empty where it is not there.
    A flag of one role may stand behind `role: `."""
    for flag in flags:
        words = re.split(r"[ =]", flag.split(": ", 1)[-1], maxsplit=1)
        if words[0] == name:
            return words[1].strip() if len(words) > 1 else "1"
    return ""
