"""Whether a serving run is of the setting that a ledger's row speaks of: the same machine, engine, model and
load. What is not known is not alike, unless the user takes it to be."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from harness.errors import UsageError
from harness.serving.compare.quantity import LENGTH_TOLERANCE, SNAPSHOT, UP_TO, option, quantity_of_run
from harness.serving.ledger.ledger import Setting
from harness.serving.names import engine_name, hardware_name, model_name
from harness.serving.schema import Metric, OfferedLoad, Parallelism, ServingRun

UNKNOWN = ""
NEEDED = ("hardware", "engine", "model", "input length", "output length", "concurrency")
"""What a row has to say, or else no run is known to be of it."""

CACHES = {"auto": "bfloat16", "bf16": "bfloat16", "fp8_e4m3": "fp8"}
"""Spellings of a cache's dtype; `auto` is DeepSeek's own."""


OFF = ("", "none", "null", "false", "off", "0")
SPECULATION = ("spec_decoding", "spec_method", "mtp")
"""InferenceX's keys, of its files, its API's rows and its first files."""

TAG = re.compile(r":v?(\d+(?:\.\w+)+)")
"""Of a container's image: its version, where the tag begins with it."""

RELEASE = re.compile(r"\d+(?:\.\d+)+")

DRAWN = ("random", "synthetic", "custom")
"""Data sets whose lengths are as the user asks for them; others have their own."""

FIRST_WAVE = 10
"""Prompts for each place from which on those that come at once at the start are a tenth at most."""


def _option(run: ServingRun, *names: str) -> str:
    """The value of a server's option: among its flags, or under its name among what the client was told to
    write down (vLLM's --metadata). Empty where it is off, or not there."""
    for name in names:
        said = option(run.flags, f"--{name}") or str(run.extra.get(name.replace("-", "_")) or "")
        if said.lower() not in OFF:
            return said.lower()
    return ""


def _unsaid(run: ServingRun, *keys: str) -> str:
    """`none` where the run has its server's flags or one of the keys, and so would say it; else unknown."""
    return "none" if run.flags or any(key in run.extra for key in keys) else UNKNOWN


def _speculation(run: ServingRun) -> str:
    """`eagle`, `mtp` ..., none, or unknown."""
    named = _option(run, "speculative-algorithm", "speculative-config", *SPECULATION)
    accepted = run.value("accept_length", "mean")
    if named or accepted is None:
        return named or _unsaid(run, *SPECULATION)
    return f"{accepted:g} tokens a step" if accepted > 1 else "none"


def _dp_attention(run: ServingRun) -> str:
    parallel = run.parallelism
    if parallel.dp_attention or _option(run, "enable-dp-attention"):
        return "on"
    return "none" if parallel.dp_attention is False or parallel.dp == 1 else _unsaid(run)


def _disaggregation(run: ServingRun) -> str:
    apart = run.parallelism.disaggregated or run.extra.get("disagg") is True
    return "on" if apart or _option(run, "disaggregation-mode") else _unsaid(run, "disagg")


def _context_parallelism(run: ServingRun) -> str:
    degree = _option(run, "dcp-size", "decode-context-parallel-size")
    return degree if degree not in ("", "1") else "none"


def _launch(run: ServingRun) -> str:
    if _option(run, "disable-cuda-graph", "enforce-eager"):
        return "eager"
    return "graph" if run.flags or "enforce_eager" in run.extra else UNKNOWN


def _looks(run: ServingRun) -> str:
    """Of SGLang's scheduler; the others have no such option."""
    others = run.engine and engine_name(run.engine) != "sglang"
    return _option(run, "scheduler-recv-interval") or ("1" if run.flags or others else UNKNOWN)


FEATURES: dict[str, Callable[[ServingRun], str]] = {
    "speculative decoding": _speculation,
    "DP attention": _dp_attention,
    "disaggregation": _disaggregation,
    "context parallelism": _context_parallelism,
}
"""What makes another engine of one, each as a run has it: a kind, none, or unknown. Of the last, which few
have, all that say nothing have none."""


@dataclass(frozen=True)
class Difference:
    """name: of FIELDS; row, run: what each says, UNKNOWN where it does not"""

    name: str
    row: str
    run: str

    @property
    def is_known(self) -> bool:
        return UNKNOWN not in (self.row, self.run)


def differences(setting: Setting, run: ServingRun, assumed: Collection[str] = ()) -> list[Difference]:
    """What keeps a run from being of the setting. assumed: names of FIELDS of which what is not known is
    taken to be alike; `all`: of each. What is known to differ always counts."""
    row, seen = _of_setting(setting), _of_run(run)
    return [
        Difference(name, row[name], seen[name])
        for name, agree in FIELDS.items()
        if (row[name] != UNKNOWN or name in NEEDED)
        and not (UNKNOWN in (row[name], seen[name]) and ("all" in assumed or name in assumed))
        and (UNKNOWN in (row[name], seen[name]) or not agree(row[name], seen[name]))
    ]


def require_alike(setting: Setting, runs: Collection[ServingRun], assumed: Collection[str] = ()) -> None:
    """Raises UsageError, with all that differs, where a run is not of the setting, and for names in
    `assumed` that are no field's."""
    for name in assumed:
        if name not in (*FIELDS, "all"):
            raise UsageError(f"--assume {name!r} names nothing; there are: all, {', '.join(FIELDS)}")
    for run in runs:
        unlike = differences(setting, run, assumed)
        if unlike:
            hint = "" if all(each.is_known for each in unlike) else "; --assume NAME takes it to be alike"
            raise UsageError(f"{run.id} is no run of this row: {text(unlike)}{hint}")


def require_one_release(runs: Collection[ServingRun]) -> None:
    """Raises UsageError where runs before and after a change are of several releases of their engine, which
    differ in more than a kernel. Builds of one release may be what the change is."""
    releases = {match[0]: run for run in runs if (match := RELEASE.match(_version(run)))}
    if len(releases) > 1:
        (a, first), (b, other), *_ = releases.items()
        raise UsageError(
            f"{first.id} is of {first.engine or 'the engine'} {a}, {other.id} of {b}: between two releases "
            "more differs than the row's change"
        )


def text(unlike: Collection[Difference]) -> str:
    """What differs first, then what either does not say, with what the other says."""
    parts = [f"{each.name} {each.run}, not {each.row}" for each in unlike if each.is_known]
    for who in ("row", "run"):
        unsaid = [each for each in unlike if getattr(each, who) == UNKNOWN]
        names = [f"{each.name} ({each.row or each.run or 'nor does the run'})" for each in unsaid]
        if names:
            parts.append(f"the {who} does not say its {', '.join(names)}")
            unlike = [each for each in unlike if each not in unsaid]
    return "; ".join(parts)


def assumptions(setting: Setting, runs: Collection[ServingRun], assumed: Collection[str]) -> tuple[str, ...]:
    """Of what was taken to be alike, what a run or the row does not say."""
    needed = [each.name for run in runs for each in differences(setting, run)]
    return tuple(name for name in FIELDS if name in needed and ("all" in assumed or name in assumed))


def _of_setting(setting: Setting) -> dict[str, str]:
    return _identity(
        hardware=setting.hardware,
        gpus=setting.gpus,
        engine=setting.engine,
        version=setting.version,
        model=setting.model,
        precision=setting.precision,
        cache=setting.kv_cache,
        parallelism=setting.parallelism,
        features=dict.fromkeys(FEATURES, "none" if setting.plain else UNKNOWN),
        launch=setting.launch,
        recv_interval=_number(setting.recv_interval),
        prefill_tokens=_number(setting.prefill_tokens),
        mode="online",
        expert_parallelism=_number(setting.parallelism.ep),
        lengths=_number(setting.workload.range_ratio),
        prompts=setting.workload.num_prompts,
        workload=setting.workload,
        input_len=_number(setting.workload.input_len),
        output_len=_number(setting.workload.output_len),
        failed="none",
        window="the whole run",
    )


def _of_run(run: ServingRun) -> dict[str, str]:
    quantity = quantity_of_run(run, Metric(name="", value=0, unit=""))
    load, parallel, totals = run.workload, run.parallelism, run.totals
    window = f"without the first {load.warmup_s or 0:g} s and the last {load.cooldown_s or 0:g} s"
    precision, _, cache = quantity.weights.partition(", ")
    known = cache.removesuffix(" cache") or _option(run, "kv-cache-dtype")
    all_experts = _number(math.prod((parallel.tp, parallel.dp or 1))) if parallel.tp else "on"
    spread = all_experts if _option(run, "enable-expert-parallel") else UNKNOWN
    drawn = not load.dataset or load.dataset.startswith(DRAWN)
    return _identity(
        hardware=run.hardware or _written_down(run),
        gpus=quantity.all_gpus,
        engine=run.engine,
        version=_version(run),
        model=quantity.model,
        precision=precision or _option(run, "quantization"),
        cache=known or ("auto" if run.flags else UNKNOWN),
        parallelism=parallel,
        features={name: of_run(run) for name, of_run in FEATURES.items()},
        launch=_launch(run),
        recv_interval=_looks(run),
        prefill_tokens=_option(run, "chunked-prefill-size", "max-num-batched-tokens"),
        mode=UNKNOWN if run.mode == "unknown" else run.mode,
        expert_parallelism=_number(parallel.ep) or spread,
        lengths=_number(load.range_ratio) or (UNKNOWN if drawn else f"that of {load.dataset}"),
        prompts=load.num_prompts or totals.completed,
        workload=load,
        input_len=quantity.input_length,
        output_len=quantity.output_length,
        failed=_failed(run),
        window=window if quantity.trimmed else "the whole run",
    )


def _written_down(run: ServingRun) -> str:
    """The machine, as a user had the client write it down; a number there is how many of them there are."""
    said = (str(run.extra.get(key) or "") for key in ("hardware", "gpu", "gpu_type", "accelerator"))
    return next((text for text in said if text and not text.isdecimal()), "")


def _version(run: ServingRun) -> str:
    of_image = TAG.search(run.image)
    said = run.version or str(run.extra.get("version") or "") or (of_image[1] if of_image else "")
    return said.removeprefix("v").split("+")[0]


def _failed(run: ServingRun) -> str:
    totals, sent = run.totals, run.workload.num_prompts
    failed = totals.failed
    if failed is None and totals.completed is not None and sent is not None:
        failed = max(sent - totals.completed, 0)
    if failed is None:
        return UNKNOWN
    return f"{failed} of {(totals.completed or 0) + failed}" if failed else "none"


def _identity(
    *,
    hardware: str,
    gpus: int | None,
    engine: str,
    version: str,
    model: str,
    precision: str,
    cache: str,
    parallelism: Parallelism,
    features: Mapping[str, str],
    launch: str,
    recv_interval: str,
    prefill_tokens: str,
    mode: str,
    expert_parallelism: str,
    lengths: str,
    prompts: int | None,
    workload: OfferedLoad,
    input_len: str,
    output_len: str,
    failed: str,
    window: str,
) -> dict[str, str]:
    """By the names of FIELDS, in one spelling each."""
    rate, places = workload.request_rate, workload.concurrency
    all_at_once = rate == 0
    burstiness = "none" if all_at_once else _number(workload.burstiness)
    return {
        "hardware": hardware_name(hardware),
        "GPUs": _number(gpus),
        "engine": engine_name(engine),
        "version": version.removeprefix("v").split("+")[0],
        "model": SNAPSHOT.sub("", model_name(model)),
        "precision": precision.lower(),
        "KV cache": CACHES.get(cache.lower(), cache.lower()),
        "tensor parallelism": _number(parallelism.tp),
        "pipeline parallelism": _number(parallelism.pp),
        "expert parallelism": expert_parallelism,
        "data parallelism": _number(parallelism.dp),
        **features,
        "launch of decode steps": launch,
        "steps between looks": recv_interval,
        "tokens of a prefill step": prefill_tokens,
        "mode": mode,
        "input length": input_len,
        "output length": output_len,
        "range of lengths": lengths,
        "concurrency": _number(places),
        "prompts for each place": f"{prompts / places:.3g}" if prompts and places and not rate else UNKNOWN,
        "request rate": "all at once" if all_at_once else _number(rate),
        "burstiness": burstiness,
        "ramp-up": workload.ramp_up or "none",
        "failed requests": failed,
        "accounting window": window,
    }


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.6g}"


def _same(row: str, run: str) -> bool:
    return row == run


def _lengths(row: str, run: str) -> bool:
    """Within what stop tokens and templates add; of a run that says its longest alone, a mean that lengths up
    to it can have."""
    longest = float(run.removeprefix(UP_TO))
    if run.startswith(UP_TO):
        return longest / 2 <= float(row) <= longest
    return math.isclose(float(row), longest, rel_tol=LENGTH_TOLERANCE)


def _precisions(row: str, run: str) -> bool:
    """A mere `fp8` may be any of its scales."""
    return row == run or (row[:3] == run[:3] and "fp8" in (row, run))


def _prompts(row: str, run: str) -> bool:
    """The first come all at once: how many they are among all weighs in the means, unless they are few."""
    return round(float(row)) == round(float(run)) or min(float(row), float(run)) >= FIRST_WAVE


Agree = Callable[[str, str], bool]
FIELDS: dict[str, Agree] = {
    "hardware": _same,
    "GPUs": _same,
    "engine": _same,
    "version": _same,
    "model": _same,
    "precision": _precisions,
    "KV cache": _same,
    "tensor parallelism": _same,
    "pipeline parallelism": _same,
    "expert parallelism": _same,
    "data parallelism": _same,
    **dict.fromkeys(FEATURES, _same),
    "launch of decode steps": _same,
    "steps between looks": _same,
    "tokens of a prefill step": _same,
    "mode": _same,
    "input length": _lengths,
    "output length": _lengths,
    "range of lengths": _same,
    "concurrency": _same,
    "prompts for each place": _prompts,
    "request rate": _same,
    "burstiness": _same,
    "ramp-up": _same,
    "failed requests": _same,
    "accounting window": _same,
}
"""What says whether two runs are of one setting, and when two values agree."""
