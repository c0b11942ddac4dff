"""Identity of serving runs: what decides whether two results are alike, by name, and what differs.

`serving compare`, `serving observe`, `serving ab` and `--calibrate` all ask here. A value that a run does not
say is UNKNOWN, which is like nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.catalogue.flags import catalogue
from harness.errors import UsageError
from harness.serving.names import engine_name, hardware_name, known_engine, model_name
from harness.serving.schema import OFF, OfferedLoad, Parallelism, ServingRun, StrictRecord

UNKNOWN = ""
LENGTH_TOLERANCE = 0.02  # of a mean length: stop tokens and chat templates add as much
FIRST_WAVE = 10  # prompts for each place from which on those that come at once at the start are few
UP_TO = "up to "
"""Before a length of which only the longest is known."""
SNAPSHOT = re.compile(r"-\d{4}$")
"""End of a model's name: later weights of the same layers."""
CHECKPOINT_FP8 = re.compile(r"deepseek-(r1|v3)", re.IGNORECASE)
"""Models whose checkpoint is FP8 with a scale a block of 128 x 128 (DeepSeek-V3 report, arXiv 2412.19437)."""
CONVERTS = ("trtllm",)
"""Engines whose weights are what a conversion made of a checkpoint."""
CACHES = {"auto": "bfloat16", "bf16": "bfloat16", "fp8_e4m3": "fp8"}
"""Spellings of a cache's dtype; `auto` is DeepSeek's own."""
TAG = re.compile(r":v?(\d+(?:\.\w+)+)")
"""Version in the tag of a container's image, where the tag begins with it."""
RELEASE = re.compile(r"\d+(?:\.\d+)+")
DRAWN = ("random", "synthetic", "custom")
"""Data sets whose lengths are those that the user asks for; others have their own."""

NO_HITS = "no hits"
NODE = 8  # GPUs that a node has, of the machines here

Agree = Callable[[str, str], bool]


def _same(a: str, b: str) -> bool:
    return a == b


def _lengths(a: str, b: str) -> bool:
    """Means within LENGTH_TOLERANCE. Of a side whose longest alone is known, the same longest, or a mean that
    lengths up to it can have."""
    if a.startswith(UP_TO) and b.startswith(UP_TO):
        return a == b
    for mean, longest in ((a, b), (b, a)):
        if longest.startswith(UP_TO):
            return float(longest.removeprefix(UP_TO)) / 2 <= float(mean) <= float(longest.removeprefix(UP_TO))
    return math.isclose(float(a), float(b), rel_tol=LENGTH_TOLERANCE)


def _precisions(a: str, b: str) -> bool:
    """A mere `fp8` may have any scales."""
    return a == b or (a[:3] == b[:3] and "fp8" in (a, b))


def _caching(a: str, b: str) -> bool:
    """A cache that is on, and that nobody knows to have held a prompt, is like one without hits."""
    return a == b or (NO_HITS in (a, b) and "hits" not in (a, b))


def _prompts(a: str, b: str) -> bool:
    return round(float(a)) == round(float(b)) or min(float(a), float(b)) >= FIRST_WAVE


@dataclass(frozen=True)
class Field:
    """One part of the identity.

    why:    why results that differ in it are not compared; empty: they are, and the difference is named
    needed: whether it has to be known, or assumed, of both
    agree:  whether two known values are alike
    """

    why: str = ""
    needed: bool = False
    agree: Agree = _same


WORK = "no factor mends that"
FIELDS: dict[str, Field] = {
    "hardware": Field(needed=True),
    "GPUs": Field(),
    "nodes": Field(),
    "engine": Field(needed=True),
    "version": Field(),
    "model": Field("another model is another work", needed=True),
    "precision": Field("other products, of another accuracy", agree=_precisions),
    "KV cache": Field("decode reads another number of bytes a token, of another accuracy"),
    "tensor parallelism": Field(),
    "pipeline parallelism": Field(),
    "expert parallelism": Field(),
    "data parallelism": Field(),
    "DP attention": Field(),
    "disaggregation": Field(),
    "context parallelism": Field(),
    "speculative decoding": Field("a step gives another number of tokens"),
    "prefix caching": Field("cached prompts are not computed", agree=_caching),
    "launch of decode steps": Field(),
    "steps between looks": Field(),
    "tokens of a prefill step": Field(),
    "mode": Field("a batch known from the start and requests as they come are different jobs", needed=True),
    "input length": Field(f"prefill's share of the time differs; {WORK}", needed=True, agree=_lengths),
    "output length": Field(f"the share of decode and the cache's length differ; {WORK}", True, _lengths),
    "range of lengths": Field(),
    "load": Field("the batch that the engine decodes differs", needed=True),
    "prompts for each place": Field(agree=_prompts),
    "dataset": Field("prompts decide expert routing, prefix cache hits, and where answers end"),
    "failed requests": Field(),
    "accounting window": Field("one leaves its ramp-up and its tail out, the other counts them"),
}
"""In the order in which they are told."""
SERVER = ("prefix caching", "speculative decoding", "precision", "KV cache")
"""Those that are a choice of the server's, so that a user may want to compare them."""
PLAIN = ("speculative decoding", "DP attention", "disaggregation", "context parallelism")
OPTIONAL = ("dataset", "prefix caching", "nodes")
"""A run need not say them to be of a ledger's row."""


class Setting(StrictRecord):
    """Where a change was made, or what a prediction is of: the machine, the engine, the load.

    precision: of the weights' products, as `fp8 block-scale`; kv_cache: the dtype of the cache
    plain:     whether there is neither speculative decoding, nor attention over data-parallel ranks, nor
               prefill on other GPUs than decode
    launch:    of decode steps, graph or eager; recv_interval: decode steps between two looks for requests
    prefill_tokens: of one step, at most
    """

    hardware: str = ""
    gpus: int | None = None
    engine: str = ""
    version: str = ""
    model: str = ""
    precision: str = ""
    kv_cache: str = ""
    plain: bool | None = None
    launch: str = ""
    recv_interval: int | None = None
    prefill_tokens: int | None = None
    parallelism: Parallelism = Parallelism()
    workload: OfferedLoad = OfferedLoad()
    client: str = ""
    note: str = ""


def of_run(run: ServingRun) -> dict[str, str]:
    """A run's identity: by the names of FIELDS, in one spelling each, UNKNOWN where it does not say it."""
    load, parallel = run.workload, run.parallelism
    precision, cache = weights_and_cache(run)
    model = run.model or run.option("model", "model-path")
    flags = bool(run.flags)
    eager = run.option("disable-cuda-graph", "enforce-eager")
    engine = engine_name(run.engine)
    context = run.option("dcp-size", "decode-context-parallel-size")
    places = _places(run)
    sent = load.num_prompts or run.totals.completed
    each = f"{sent / places:.3g}" if sent and places and not load.request_rate else UNKNOWN
    window = f"without the first {load.warmup_s or 0:g} s and the last {load.cooldown_s or 0:g} s"
    return {
        "model": SNAPSHOT.sub("", model_name(model)),
        "mode": UNKNOWN if run.mode == "unknown" else run.mode,
        "input length": length_text(run, "input"),
        "output length": length_text(run, "output"),
        "load": _load(run),
        "dataset": load.dataset,
        "prefix caching": _prefix_caching(run),
        "speculative decoding": run.speculation,
        "precision": precision.lower(),
        "KV cache": CACHES.get(cache.lower(), cache.lower()),
        "accounting window": window if is_trimmed(run) else "the whole run" if run.client else UNKNOWN,
        "hardware": hardware_name(run.hardware or _noted_hardware(run)),
        "engine": engine,
        "version": _version(run),
        "GPUs": _number(all_gpus(run)),
        "nodes": _number(run.nodes),
        "tensor parallelism": _number(parallel.tp),
        "pipeline parallelism": _number(parallel.pp),
        "expert parallelism": _expert_parallelism(run),
        "data parallelism": _number(parallel.dp),
        "DP attention": _dp_attention(run),
        "disaggregation": _disaggregation(run),
        "context parallelism": "none" if context in ("", "1") else context,
        "launch of decode steps": "eager" if eager else _graphs(run),
        "steps between looks": run.option("scheduler-recv-interval")
        or ("1" if flags or engine not in ("", "sglang") else UNKNOWN),
        "tokens of a prefill step": run.option("chunked-prefill-size", "max-num-batched-tokens"),
        "range of lengths": _number(load.range_ratio)
        or (f"that of {load.dataset}" if load.dataset and not load.dataset.startswith(DRAWN) else UNKNOWN),
        "prompts for each place": each,
        "failed requests": _failed(run),
    }


def of_setting(setting: Setting) -> dict[str, str]:
    """A setting's identity. A plain one computes every prompt."""
    names = ("hardware", "gpus", "engine", "version", "model", "precision", "parallelism", "workload")
    about = {name: getattr(setting, name) for name in names}
    said = of_run(ServingRun(id="", client="row", source="", mode="online", **about))
    plain = dict.fromkeys(PLAIN, "none") | {"prefix caching": NO_HITS}
    is_one_node = setting.plain and setting.gpus is not None and setting.gpus <= NODE
    return said | {
        **(plain if setting.plain else dict.fromkeys(plain, UNKNOWN)),
        "KV cache": CACHES.get(setting.kv_cache.lower(), setting.kv_cache.lower()),
        "nodes": "1" if is_one_node else UNKNOWN,
        "expert parallelism": _number(setting.parallelism.ep),
        "launch of decode steps": setting.launch,
        "steps between looks": _number(setting.recv_interval),
        "tokens of a prefill step": _number(setting.prefill_tokens),
        "failed requests": "none",
    }


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.6g}"


def all_gpus(run: ServingRun) -> int | None:
    """GPUs of every role: those that prefill too."""
    split = (run.parallelism.prefill_gpus or 0) + (run.parallelism.decode_gpus or 0)
    return run.gpus or split or None


def is_trimmed(run: ServingRun) -> bool:
    """Whether the client leaves time at either end out of its numbers."""
    return bool(run.workload.warmup_s or run.workload.cooldown_s)


def length(run: ServingRun, side: str) -> float | None:
    """Mean tokens of a request as served, where the totals are of whole requests; else as asked for. side:
    `input` or `output`"""
    requested = getattr(run.workload, f"{side}_len")
    tokens, completed = getattr(run.totals, f"{side}_tokens"), run.totals.completed
    if is_trimmed(run) or not tokens or not completed:
        return requested
    served = tokens / completed
    close = requested is not None and abs(served - requested) <= LENGTH_TOLERANCE * requested
    return requested if close else served


def length_text(run: ServingRun, side: str) -> str:
    mean, longest = length(run, side), getattr(run.workload, f"longest_{side}_len")
    if mean is not None:
        return f"{mean:.6g}"
    return UNKNOWN if longest is None else f"{UP_TO}{longest:.6g}"


def weights_and_cache(run: ServingRun) -> tuple[str, str]:
    """How weights are multiplied, and the cache's dtype. A mere `fp8` is made out from the server's flags,
    where they are known."""
    said, _, of_cache = run.precision.partition(", ")
    cache = of_cache.removesuffix(" cache") or run.option("kv-cache-dtype") or ("auto" if run.flags else "")
    if said.lower() not in ("", "fp8") or not (run.flags or run.environment):
        return said or run.option("quantization"), cache
    flag = run.option("quantization") or run.option("dtype")
    if flag in ("", "auto", "fp8"):
        model = run.model or run.option("model", "model-path")
        as_is = CHECKPOINT_FP8.search(model) and engine_name(run.engine) not in CONVERTS
        return ("fp8 block-scale" if as_is else said or flag.removesuffix("auto")), cache
    return flag, cache


def _places(run: ServingRun) -> float | None:
    """Requests that can be in flight: by the client's limit, the server's, and how many there are."""
    load = run.workload
    limit = load.concurrency
    if not limit or load.request_rate or load.ramp_up:
        return limit
    # vLLM's limit is one of each data-parallel rank, SGLang's of them all.
    is_whole = (run.parallelism.dp or 1) == 1 or engine_name(run.engine) == "sglang"
    server = run.in_flight_limit if is_whole else None
    return min(limit, server or limit, load.num_prompts or limit)


def _load(run: ServingRun) -> str:
    load, places = run.workload, _places(run)
    prompts = UNKNOWN if load.num_prompts is None else f"{load.num_prompts} prompts at once"
    if run.mode == "offline":
        return prompts
    rate = f"{load.request_rate:g} requests a second" if load.request_rate else ""
    if rate and load.burstiness not in (None, 1):
        rate += f" of burstiness {load.burstiness:g}"
    rate = f"{load.ramp_up} at the start" if load.ramp_up else rate
    flight = f"{places:g} in flight" if places else ""
    if flight and places != load.concurrency:
        flight += f" of {load.concurrency:g} allowed"
    if not (rate or flight):
        return prompts if load.request_rate == 0 else UNKNOWN
    return ", ".join(filter(None, (flight, rate)))


def _noted_hardware(run: ServingRun) -> str:
    """The machine, as a user had the client note it; a number there is how many of them there are."""
    said = (str(run.extra.get(key) or "") for key in ("hardware", "gpu", "gpu_type", "accelerator"))
    return next((text for text in said if text and not text.isdecimal()), "")


def _version(run: ServingRun) -> str:
    of_image = TAG.search(run.image)
    said = run.version or str(run.extra.get("version") or "") or (of_image[1] if of_image else "")
    return re.sub(r"^v(?=\d)", "", said).split("+")[0]


def _expert_parallelism(run: ServingRun) -> str:
    parallel = run.parallelism
    if parallel.ep is not None or not run.option("enable-expert-parallel"):
        return _number(parallel.ep)
    return _number(parallel.tp * (parallel.dp or 1)) if parallel.tp else "on"


def _prefix_caching(run: ServingRun) -> str:
    """`hits`: prompts were found in the cache; `on`: they may have been; `off`."""
    if run.workload.prefix_cached:
        return "hits"
    info = run.extra.get("server_info")
    is_on = isinstance(info, Mapping) and info.get("disable_radix_cache") is False
    return run.prefix_caching or ("on" if is_on or run.option("enable-prefix-caching") else UNKNOWN)


def _unsaid(run: ServingRun, *keys: str) -> str:
    """`none` where the run has its server's flags or one of the keys, and so would say it; else unknown."""
    return "none" if run.flags or any(key in run.extra for key in keys) else UNKNOWN


def _dp_attention(run: ServingRun) -> str:
    parallel = run.parallelism
    if parallel.dp_attention or run.option("enable-dp-attention"):
        return "on"
    return "none" if parallel.dp_attention is False or parallel.dp == 1 else _unsaid(run)


def _disaggregation(run: ServingRun) -> str:
    apart = run.parallelism.disaggregated or run.extra.get("disagg") is True
    return "on" if apart or run.option("disaggregation-mode") else _unsaid(run, "disagg")


def _graphs(run: ServingRun) -> str:
    """Of decode steps: graphs, at least of batches up to a number that is below what is in flight."""
    most, places = run.option("cuda-graph-max-bs"), _places(run)
    if most.isdecimal() and places and int(most) < places:
        return f"graph up to a batch of {most}"
    return "graph" if run.flags or "enforce_eager" in run.extra else UNKNOWN


def _failed(run: ServingRun) -> str:
    totals, sent = run.totals, run.workload.num_prompts
    failed = totals.failed
    if failed is None and totals.completed is not None and sent is not None and not is_trimmed(run):
        failed = max(sent - totals.completed, 0)
    if failed is None:
        return UNKNOWN
    return f"{failed} of {(totals.completed or 0) + failed}" if failed else "none"


# Differences


@dataclass(frozen=True)
class Difference:
    """name: of FIELDS; row, run: what the one and the other side says, UNKNOWN where it does not"""

    name: str
    row: str
    run: str

    @property
    def is_known(self) -> bool:
        return UNKNOWN not in (self.row, self.run)


def unlike(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[Difference]:
    """Of two identities, the fields that are not known to be alike."""
    for name, field in FIELDS.items():
        if UNKNOWN in (a[name], b[name]) or not field.agree(a[name], b[name]):
            yield Difference(name, a[name], b[name])


def differences(setting: Setting, run: ServingRun, assumed: Collection[str] = ()) -> list[Difference]:
    """What keeps a run from being of the setting. assumed: names of FIELDS of which what is not known is
    taken to be alike; `all`: of each. What is known to differ always counts."""
    return [
        each
        for each in unlike(of_setting(setting), of_run(run))
        if each.is_known
        or (
            ((each.row != UNKNOWN or FIELDS[each.name].needed) and each.name not in OPTIONAL)
            and not is_assumed(each.name, assumed)
        )
    ]


def is_assumed(name: str, assumed: Collection[str]) -> bool:
    return "all" in assumed or name in assumed


def require_names(option: str, names: Collection[str], known: Sequence[str]) -> None:
    """Raises UsageError for a name that is none of the known ones."""
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {name!r} names nothing; there are: {', '.join(known)}")


def require_alike(setting: Setting, runs: Collection[ServingRun], assumed: Collection[str] = ()) -> None:
    """Raises UsageError, with all that differs, where a run is not of the setting."""
    for run in runs:
        found = differences(setting, run, assumed)
        if found:
            hint = "" if all(each.is_known for each in found) else "; --assume NAME takes it to be alike"
            raise UsageError(f"{run.id} is no run of this row: {text(found)}{hint}")


def require_pair(before: ServingRun, after: ServingRun) -> None:
    """Raises UsageError where two runs differ in more than a change of kernels makes: in any field but the
    build of one release."""
    found = [each for each in unlike(of_run(before), of_run(after)) if each.is_known]
    releases = [RELEASE.match(_version(run)) for run in (before, after)]
    if all(releases) and len({match[0] for match in releases if match}) == 1:
        found = [each for each in found if each.name != "version"]
    if found:
        raise UsageError(
            f"{before.id} and {after.id} differ in more than the row's change: "
            + "; ".join(f"{each.name} {each.row} before, {each.run} after" for each in found)
        )


def text(found: Collection[Difference]) -> str:
    """What differs first, then what either does not say, with what the other says."""
    parts = [f"{each.name} {each.run}, not {each.row}" for each in found if each.is_known]
    for who in ("row", "run"):
        unsaid = [each for each in found if getattr(each, who) == UNKNOWN]
        names = [f"{each.name} ({each.row or each.run or 'nor does the run'})" for each in unsaid]
        if names:
            parts.append(f"the {who} does not say its {', '.join(names)}")
            found = [each for each in found if each not in unsaid]
    return "; ".join(parts)


def assumptions(setting: Setting, runs: Collection[ServingRun], assumed: Collection[str]) -> tuple[str, ...]:
    """Of what was taken to be alike, what a run or the row does not say."""
    needed = [each.name for run in runs for each in differences(setting, run)]
    return tuple(name for name in FIELDS if name in needed and is_assumed(name, assumed))


def with_engine(run: ServingRun, name: str) -> ServingRun:
    """The run with the engine that the user names, noted where its file says another. Raises UsageError for a
    name that is no engine's."""
    engine = known_engine(name)
    notes = run.notes
    if run.engine and engine_name(run.engine) != engine:
        notes = (*notes, f"--engine: {engine}; the file says {run.engine}")
    return run.model_copy(update={"engine": engine, "notes": notes})


# Settings of the server


STATE = re.compile(
    r"(host|pid|ports?|.*_ports?|.*_ids?|.*_addr|.*_dir|.*_folder|.*_file|.*_keyfile.*|.*_paths?|.*url|uuid|date|.*time"
    r"|.*timestamp|log_.*|.*_log|api_key|admin_api_key|random_seed|seed|status|label|tag|backend|endpoint_type|model"
    r"|served_model_name|trust_remote_code|internal_states|spec_decode_.*|rtfx|total_.*|num_.*_tokens|sharegpt_.*"
    r"|random_.*|recipe_fingerprint|.*_intvty|latencies_ms)"
)
"""Names of what a server or client writes that is no setting: where things are, and what was measured."""
MODEL_PATHS = ("model_path", "tokenizer_path", "speculative_draft_model_path")
NESTED = ("server_info", "engine", "world_info")
"""Objects of `extra` that hold a server's settings: SGLang's, TensorRT-LLM's."""
NOTED = ("vllm.serve", "inferencex")
"""Clients that keep a server's settings beside their own keys."""


def server_settings(run: ServingRun) -> dict[str, str]:
    """The server's settings by name: of its flags, of what it said of itself, of what its user noted. What is
    off is left out."""
    found: dict[str, Any] = {}
    for flag in run.flags:
        role, _, option = flag.rpartition(": ") if not flag.startswith("-") else ("", "", flag)
        name, _, value = option.removeprefix("--").replace("=", " ", 1).partition(" ")
        found[(f"{role}: " if role else "") + name.replace("-", "_")] = value or "on"
    if run.client in NOTED:
        found |= {key: v for key, v in run.extra.items() if isinstance(v, str | bool | int)}
    for key in NESTED:
        found |= _flat(run.extra.get(key))
    named = {name: str(value).strip() for name, value in found.items()}
    settings = {}
    for name, value in named.items():
        last = name.rpartition(".")[2].rpartition(": ")[2]
        if last in MODEL_PATHS:
            value = model_name(value)
        elif STATE.fullmatch(last):
            continue
        if value.lower() not in OFF:
            settings[name] = {"True": "on", "true": "on"}.get(value, value)
    return settings


def _flat(value: object, name: str = "") -> dict[str, Any]:
    """Scalars in nested objects and lists, by joined names."""
    if isinstance(value, Mapping):
        items = [(str(key), inner) for key, inner in value.items() if not STATE.fullmatch(str(key))
                 or str(key) in MODEL_PATHS]  # fmt: skip
    elif isinstance(value, list):
        items = [(str(index), inner) for index, inner in enumerate(value)]
    else:
        return {name: value} if name else {}
    return {k: v for key, inner in items for k, v in _flat(inner, f"{name}.{key}" if name else key).items()}


def beside(a: Sequence[ServingRun], b: Sequence[ServingRun]) -> Iterator[str]:
    """What differs between two sides beside the fields of the identity, a line for each kind."""
    for what in ("image", "client", "protocol", "weights"):
        sides = [[model_name(run.model) if what == "weights" else getattr(run, what).lower() for run in runs]
                 for runs in (a, b)]  # fmt: skip
        known = [list(dict.fromkeys(filter(None, side))) for side in sides]
        if all(known) and len({*known[0], *known[1]}) > 1:
            yield f"{what}: {' or '.join(known[0])} against {' or '.join(known[1])}"
    settings = [[server_settings(run) for run in runs] for runs in (a, b)]
    variables = [[run.environment for run in runs] for runs in (a, b)]
    unread = {name for name, flag in catalogue().items() if flag.read == "never"}
    for kind, mappings, skipped in (
        ("flags that differ", settings, set()),
        ("environment that differs", variables, unread),
    ):
        if all(any(side) for side in mappings) and (lines := _that_differ(mappings[0], mappings[1], skipped)):
            yield f"{kind}: {', '.join(lines)}"


def _that_differ(
    a: Sequence[Mapping[str, str]], b: Sequence[Mapping[str, str]], skipped: Collection[str]
) -> list[str]:
    """`max_running_requests 4 | 64` for each name whose value is not the same in all mappings."""
    lines = []
    for name in dict.fromkeys(name for mapping in (*a, *b) for name in mapping):
        sides = [
            list(dict.fromkeys(mapping.get(name, "unset") or "empty" for mapping in side)) for side in (a, b)
        ]
        if len({*sides[0], *sides[1]}) > 1 and name not in skipped:
            lines.append(f"{name} {' or '.join(sides[0])} | {' or '.join(sides[1])}")
    return lines
