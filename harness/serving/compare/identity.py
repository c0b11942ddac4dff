"""The identity of serving runs: the fields that decide whether two results are alike.

Used by `serving compare`, `serving observe` and `--calibrate`. A value that a run does not say is UNKNOWN,
and UNKNOWN is alike to nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.errors import UsageError
from harness.serving.names import engine_name, hardware_name, known_engine, model_name
from harness.serving.schema import DRAFTED, OFF, OfferedLoad, Parallelism, ServingRun, StrictRecord
from shapes.names import unknown

UNKNOWN = ""
LENGTH_TOLERANCE = 0.02  # of a mean length: stop tokens and chat templates differ by as much
FIRST_WAVE = 10  # prompts for each place in flight, from which on the burst at the start matters little
NODE = 8  # GPUs of a node of the machines here
UP_TO = "up to "  # before a length of which only the longest is known
NO_HITS = "no hits"  # a plain setting's prefix caching: on or off, but no prompt is found in the cache
SNAPSHOT = re.compile(r"-\d{4}$")  # the end of a model's name: later weights of the same layers
TAG = re.compile(r":v?(\d+(?:\.\w+)+)")  # the version at the beginning of an image's tag
CONVERTS = ("trtllm",)  # engines that convert a checkpoint before they serve it
DRAWN = ("random", "synthetic", "custom")  # data sets whose lengths are those asked for
CACHES = {"auto": "bfloat16", "bf16": "bfloat16", "fp8_e4m3": "fp8"}  # `auto` is DeepSeek's own
CHECKPOINT_FP8 = re.compile(r"deepseek-(r1|v3)", re.IGNORECASE)
"""Models whose FP8 checkpoints have a scale for each block of 128 x 128 (DeepSeek-V3, arXiv 2412.19437)."""


def _is_same_length(a: str, b: str) -> bool:
    """Whether two lengths are alike: means within LENGTH_TOLERANCE; a mean from half of the longest length to
    all of it, if one side gives only the longest; the same longest, if both give only that."""
    if a.startswith(UP_TO) and b.startswith(UP_TO):
        return a == b
    for mean, other in ((a, b), (b, a)):
        if other.startswith(UP_TO):
            longest = float(other.removeprefix(UP_TO))
            return longest / 2 <= float(mean) <= longest
    return math.isclose(float(a), float(b), rel_tol=LENGTH_TOLERANCE)


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.6g}"


def all_gpus(run: ServingRun) -> int | None:
    """GPUs of all roles, also those that prefill; None if the run does not say it."""
    if run.gpus:
        return run.gpus
    return (run.parallelism.prefill_gpus or 0) + (run.parallelism.decode_gpus or 0) or None


def is_trimmed(run: ServingRun) -> bool:
    """Whether the client leaves time at either end out of its numbers."""
    return bool(run.workload.warmup_s or run.workload.cooldown_s)


def length(run: ServingRun, side: str) -> float | None:
    """Mean tokens of a request, `input` or `output`: as served by whole requests, otherwise as asked."""
    requested = getattr(run.workload, f"{side}_len")
    tokens = getattr(run.totals, f"{side}_tokens")
    if is_trimmed(run) or not tokens or not run.totals.completed:
        return requested
    served = tokens / run.totals.completed
    is_close = requested is not None and abs(served - requested) <= LENGTH_TOLERANCE * requested
    return requested if is_close else served


def _length_text(run: ServingRun, side: str) -> str:
    mean = length(run, side)
    longest = getattr(run.workload, f"longest_{side}_len")
    if mean is None and longest is not None:
        return f"{UP_TO}{longest:.6g}"
    return _number(mean)


def _model(run: ServingRun) -> str:
    return run.model or run.option("model", "model-path")


def _precision(run: ServingRun) -> str:
    """How weights are multiplied: as reported, or, if that is `fp8` or nothing, by the server's flags."""
    reported = run.precision.partition(", ")[0].lower()  # as `FP8, FP8 cache`
    if reported not in ("", "fp8") or not (run.flags or run.environment):
        return reported or run.option("quantization")
    flag = run.option("quantization") or run.option("dtype")
    if flag not in ("", "auto", "fp8"):
        return flag
    if CHECKPOINT_FP8.search(_model(run)) and engine_name(run.engine) not in CONVERTS:
        return "fp8 block-scale"
    return reported or flag.replace("auto", UNKNOWN)


def _cache(run: ServingRun) -> str:
    reported = run.precision.partition(", ")[2].removesuffix(" cache").lower()
    cache = reported or run.option("kv-cache-dtype") or ("auto" if run.flags else UNKNOWN)
    return CACHES.get(cache, cache)


def _window(run: ServingRun) -> str:
    """The part of the run that the client's numbers are of."""
    if not is_trimmed(run):
        return "the whole run"
    first_s, last_s = run.workload.warmup_s or 0, run.workload.cooldown_s or 0
    return f"without the first {first_s:g} s and the last {last_s:g} s"


def _range(run: ServingRun) -> str:
    """How far the lengths of requests differ."""
    load = run.workload
    if load.range_ratio is None and load.dataset and not load.dataset.startswith(DRAWN):
        return f"that of {load.dataset}"
    return _number(load.range_ratio)


def _prompts_for_each_place(run: ServingRun) -> str:
    """How many prompts follow each other in each of the places in flight."""
    in_flight = _most_in_flight(run)
    sent = run.workload.num_prompts or run.totals.completed
    return f"{sent / in_flight:.3g}" if sent and in_flight and not run.workload.request_rate else UNKNOWN


def is_sglang(run: ServingRun) -> bool:
    """Whether SGLang computes, also behind a front as in `dynamo-sglang`."""
    return engine_name(run.engine).endswith("sglang")


def _steps_between_looks(run: ServingRun) -> str:
    """Decode steps from one look for new requests to the next. Only SGLang has an option for it."""
    has_no_option = run.flags or (run.engine and not is_sglang(run))
    return run.option("scheduler-recv-interval") or ("1" if has_no_option else UNKNOWN)


def _most_in_flight(run: ServingRun) -> float | None:
    """Requests that can be in flight: the least of the client's limit, the server's limit and the number of
    prompts. Where requests come at a rate, only the client's limit counts."""
    load = run.workload
    client_limit = load.concurrency
    if not client_limit or load.request_rate or load.ramp_up:
        return client_limit
    limits = [client_limit]
    if load.num_prompts:
        limits.append(load.num_prompts)
    server_limit = run.option("max-running-requests", "max-num-seqs", "max-batch-size")
    # vLLM limits each data-parallel rank, SGLang all of them together.
    is_of_all_ranks = (run.parallelism.dp or 1) == 1 or is_sglang(run)
    if server_limit.isdecimal() and is_of_all_ranks:
        limits.append(int(server_limit))
    return min(limits)


def _load(run: ServingRun) -> str:
    """How requests come: all at once, so many in flight, at a rate, or up to so many in flight at a rate."""
    load = run.workload
    in_flight = _most_in_flight(run)
    at_once = UNKNOWN if load.num_prompts is None else f"{load.num_prompts} prompts at once"
    if run.mode == "offline":
        return at_once
    parts = []
    if in_flight == load.concurrency and in_flight:
        parts.append(f"{in_flight:g} in flight")
    elif in_flight:
        parts.append(f"{in_flight:g} in flight of {load.concurrency:g} allowed")
    if load.ramp_up:
        parts.append(f"{load.ramp_up} at the start")
    elif load.request_rate:
        bursts = "" if load.burstiness in (None, 1) else f" of burstiness {load.burstiness:g}"
        parts.append(f"{load.request_rate:g} requests a second{bursts}")
    if not parts and load.request_rate == 0:
        return at_once
    return ", ".join(parts) or UNKNOWN


def _hardware(run: ServingRun) -> str:
    """The machine as the file or a note of its user names it; a number of machines is no name."""
    if run.hardware:
        return hardware_name(run.hardware)
    notes = [str(run.extra.get(key) or "") for key in ("hardware", "gpu", "gpu_type", "accelerator")]
    return hardware_name(next((note for note in notes if note and not note.isdecimal()), ""))


def _context_parallelism(run: ServingRun) -> str:
    degree = run.option("dcp-size", "decode-context-parallel-size")
    return "none" if degree in ("", "1") else degree


def _version(run: ServingRun) -> str:
    version = run.version or str(run.extra.get("version") or "")
    if not version and (tag := TAG.search(run.image)):
        version = tag[1]
    return re.sub(r"^v(?=\d)", "", version).split("+")[0]


def _expert_parallelism(run: ServingRun) -> str:
    """The degree. vLLM's switch makes it tensor times data parallelism; `on` if these are not known."""
    parallelism = run.parallelism
    if parallelism.ep is not None or not run.option("enable-expert-parallel"):
        return _number(parallelism.ep)
    return _number(parallelism.tp * (parallelism.dp or 1)) if parallelism.tp else "on"


def _prefix_caching(run: ServingRun) -> str:
    """`hits`: prompts were found in the cache; `on`: they may have been; `off`."""
    if run.workload.prefix_cached:
        return "hits"
    noted_off = str(run.extra.get("enable_prefix_caching", True)).lower() in OFF
    switched_off = run.option("disable-radix-cache", "no-enable-prefix-caching")
    if run.workload.prefix_cached is False or noted_off or switched_off:
        return "off"
    server_info = run.extra.get("server_info")
    reported_on = isinstance(server_info, Mapping) and server_info.get("disable_radix_cache") is False
    return "on" if reported_on or run.option("enable-prefix-caching") else UNKNOWN


def _switch(run: ServingRun, is_on: bool | None, *options: str) -> str:
    """`on` or `none` of a feature. is_on: what the run says of it, or None. options: those of the server that
    turn it on. A run that gives its server's flags, or notes one of these options as off, has it off."""
    if is_on or run.option(*options):
        return "on"
    is_noted_off = any(name.replace("-", "_") in run.extra for name in options)
    return "none" if is_on is False or run.flags or is_noted_off else UNKNOWN


def _dp_attention(run: ServingRun) -> str:
    is_on = run.parallelism.dp_attention
    if not is_on and run.parallelism.dp == 1:
        is_on = False
    return _switch(run, is_on, "enable-dp-attention")


def _launch(run: ServingRun) -> str:
    """`eager`, `graph`, or graphs only of batches smaller than what is in flight."""
    if run.option("disable-cuda-graph", "enforce-eager"):
        return "eager"
    largest, in_flight = run.option("cuda-graph-max-bs"), _most_in_flight(run)
    if largest.isdecimal() and in_flight and int(largest) < in_flight:
        return f"graph up to a batch of {largest}"
    return "graph" if run.flags or "enforce_eager" in run.extra else UNKNOWN


def _failed(run: ServingRun) -> str:
    sent, completed, failed = run.workload.num_prompts, run.totals.completed, run.totals.failed
    if failed is None and completed is not None and sent is not None and not is_trimmed(run):
        failed = max(sent - completed, 0)
    if failed is None:
        return UNKNOWN
    return f"{failed} of {(completed or 0) + failed}" if failed else "none"


def _is_same_precision(a: str, b: str) -> bool:
    """Whether two precisions agree. A mere `fp8` agrees with FP8 of any scales."""
    if "fp8" in (a, b):
        return a.startswith("fp8") and b.startswith("fp8")
    return a == b


@dataclass(frozen=True)
class Field:
    """One field of the identity.

    of:     its value for a run, in one spelling
    why:    why results that differ in it are not compared; empty: they are, and the difference is named
    needed: whether both sides have to say it, unless the user assumes it
    agree:  whether two known values are alike
    """

    of: Callable[[ServingRun], str]
    why: str = ""
    needed: bool = False
    agree: Callable[[str, str], bool] = str.__eq__


NO_FACTOR = "differs, and no factor mends that"
FIELDS: dict[str, Field] = {
    "hardware": Field(_hardware, needed=True),
    "GPUs": Field(lambda run: _number(all_gpus(run))),
    "nodes": Field(lambda run: _number(run.nodes)),
    "engine": Field(lambda run: engine_name(run.engine), needed=True),
    "version": Field(_version),
    "model": Field(lambda run: SNAPSHOT.sub("", model_name(_model(run))),
                   why="another model is another work", needed=True),
    "precision": Field(_precision, "other products, of another accuracy", agree=_is_same_precision),
    "KV cache": Field(_cache, "decode reads another number of bytes a token, of another accuracy"),
    "tensor parallelism": Field(lambda run: _number(run.parallelism.tp)),
    "pipeline parallelism": Field(lambda run: _number(run.parallelism.pp)),
    "expert parallelism": Field(_expert_parallelism),
    "data parallelism": Field(lambda run: _number(run.parallelism.dp)),
    "DP attention": Field(_dp_attention),
    # `disaggregated` is False also where the run does not say it.
    "disaggregation": Field(lambda run: _switch(run, run.parallelism.disaggregated or None,
                                                "disaggregation-mode", "disagg")),
    "context parallelism": Field(_context_parallelism),
    "speculative decoding": Field(lambda run: run.speculation, "a step gives another number of tokens"),
    # A cache that is on, without known hits, is treated as one without hits.
    "prefix caching": Field(_prefix_caching, "cached prompts are not computed",
                            agree=lambda a, b: a == b or (NO_HITS in (a, b) and "hits" not in (a, b))),
    "launch of decode steps": Field(_launch),
    "steps between looks": Field(_steps_between_looks),
    "tokens of a prefill step": Field(lambda run: run.option("chunked-prefill-size",
                                                             "max-num-batched-tokens")),
    "mode": Field(lambda run: run.mode.replace("unknown", UNKNOWN),
                  "a batch known from the start and requests as they come are different jobs", needed=True),
    "input length": Field(lambda run: _length_text(run, "input"), f"prefill's share of the time {NO_FACTOR}",
                          needed=True, agree=_is_same_length),
    "output length": Field(lambda run: _length_text(run, "output"), f"decode's share of the time {NO_FACTOR}",
                           needed=True, agree=_is_same_length),
    "range of lengths": Field(_range),
    "load": Field(_load, "the batch that the engine decodes differs", needed=True),
    "prompts for each place": Field(_prompts_for_each_place,
                                    agree=lambda a, b: round(float(a)) == round(float(b))
                                    or min(float(a), float(b)) >= FIRST_WAVE),
    "dataset": Field(lambda run: run.workload.dataset,
                     "prompts decide expert routing, prefix cache hits, and where answers end"),
    "failed requests": Field(_failed),
    "accounting window": Field(_window, "one leaves its ramp-up and its tail out, the other counts them"),
}  # fmt: skip
"""In the order of the messages."""
SERVER = ("prefix caching", "speculative decoding", "precision", "KV cache")
"""Settings of the server that the user may let differ with `--despite`."""
OPTIONAL = ("dataset", "prefix caching", "nodes")  # fields that no run has to say to be of a setting


def of_run(run: ServingRun) -> dict[str, str]:
    """A run's identity, by the names of FIELDS."""
    return {name: field.of(run) for name, field in FIELDS.items()}


class Setting(StrictRecord):
    """Where a change was made, or what a prediction is for: the machine, the engine, the load.

    precision:      of the weights' products, for example `fp8 block-scale`
    kv_cache:       the dtype of the cache
    plain:          no speculative decoding unless there are drafts, no DP attention, no disaggregation
    drafts:         draft tokens that a step verifies for each request
    launch:         of decode steps: graph or eager
    recv_interval:  SGLang's scheduler-recv-interval
    prefill_tokens: the most of one step
    """

    hardware: str = ""
    gpus: int | None = None
    engine: str = ""
    version: str = ""
    model: str = ""
    precision: str = ""
    kv_cache: str = ""
    plain: bool | None = None
    drafts: int | None = None
    launch: str = ""
    recv_interval: int | None = None
    prefill_tokens: int | None = None
    parallelism: Parallelism = Parallelism()
    workload: OfferedLoad = OfferedLoad()
    client: str = ""
    note: str = ""


def of_setting(setting: Setting) -> dict[str, str]:
    """A setting's identity. If the setting is plain, no prefix hits are known."""
    fields_of_runs = setting.model_dump(include={*ServingRun.model_fields})
    values = of_run(ServingRun(id="", source="", mode="online", **fields_of_runs))
    for feature in ("speculative decoding", "DP attention", "disaggregation", "context parallelism"):
        values[feature] = "none" if setting.plain else UNKNOWN
    if setting.plain and setting.drafts:
        values["speculative decoding"] = DRAFTED.format(setting.drafts)
    is_one_node = setting.plain and setting.gpus is not None and setting.gpus <= NODE
    return values | {
        "prefix caching": NO_HITS if setting.plain else UNKNOWN,
        "KV cache": CACHES.get(setting.kv_cache, setting.kv_cache),
        "nodes": "1" if is_one_node else UNKNOWN,
        "expert parallelism": _number(setting.parallelism.ep),
        "launch of decode steps": setting.launch,
        "steps between looks": _number(setting.recv_interval),
        "tokens of a prefill step": _number(setting.prefill_tokens),
        "failed requests": "none",
    }


@dataclass(frozen=True)
class Difference:
    """A field that is not known to be alike, with its values on both sides, `a` and `b`."""

    name: str
    a: str
    b: str

    @property
    def is_known(self) -> bool:
        """Whether both sides say their value, so that they do differ."""
        return UNKNOWN not in (self.a, self.b)


def unlike(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[Difference]:
    """The fields of two identities that are not known to be alike."""
    for name, field in FIELDS.items():
        if UNKNOWN in (a[name], b[name]) or not field.agree(a[name], b[name]):
            yield Difference(name, a[name], b[name])


def require_names(option: str, names: Collection[str], known: Sequence[str]) -> None:
    """Raises UsageError for a name that is not among the known ones."""
    for name in names:
        if name not in known:
            raise UsageError(unknown("property", name, known, of=option))


def differences(setting: Setting, run: ServingRun, assumed: Collection[str] = ()) -> list[Difference]:
    """What may keep a run from being of the setting: known differences, and what either side does not say. In
    each the setting is side `a`, the run side `b`.

    assumed: names of FIELDS that are assumed to be alike if they are not known; `all`: each
    """
    taken_alike = {*OPTIONAL, *(FIELDS if "all" in assumed else assumed)}
    of_its_run = of_run(run)
    # A setting with drafts says how many, and a run may name its drafting in any words.
    if setting.drafts and of_its_run["speculative decoding"] not in ("none", UNKNOWN):
        of_its_run["speculative decoding"] = DRAFTED.format(run.drafts or setting.drafts)
    found = []
    for difference in unlike(of_setting(setting), of_its_run):
        # What the setting leaves open the run may leave open, too, except what every comparison needs.
        must_be_said = bool(difference.a) or FIELDS[difference.name].needed
        if difference.is_known or (must_be_said and difference.name not in taken_alike):
            found.append(difference)
    return found


def in_words(found: Collection[Difference]) -> str:
    """A run's differences from a ledger's row (`a`), then what either does not say."""
    known = [f"{field.name} {field.b}, not {field.a}" for field in found if field.is_known]
    return "; ".join([*known, *unsaid(found, "the row", "the run")])


def unsaid(found: Iterable[Difference], a: str, b: str) -> list[str]:
    """A line for what only one side says, with its value, and one for what neither says. a, b: their names"""
    by_beginning: dict[str, list[str]] = {}
    for difference in found:
        if difference.is_known:
            continue
        field = difference.name
        if said := difference.a or difference.b:
            beginning = f"{b if difference.a else a} does not say, as the other does,"
            field += f" ({said})"
        else:
            beginning = "neither says"
        by_beginning.setdefault(beginning, []).append(field)
    return [f"{beginning} its {', '.join(fields)}" for beginning, fields in by_beginning.items()]


def with_engine(run: ServingRun, name: str) -> ServingRun:
    """The run with the engine that the user names; a note if its file says another. Raises UsageError."""
    if not name:
        return run
    update: dict[str, object] = {"engine": known_engine(name)}
    if run.engine and engine_name(run.engine) != update["engine"]:
        update["notes"] = (*run.notes, f"--engine: {update['engine']}; the file says {run.engine}")
    return run.model_copy(update=update)
