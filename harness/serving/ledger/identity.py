"""Whether a serving run is of the setting that a ledger's row speaks of: the same machine, engine, model and
load. What is not known is not alike, unless the user takes it to be."""

from __future__ import annotations

import math
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


EAGER = ("--disable-cuda-graph", "--enforce-eager")
SPECULATION = ("spec_decoding", "spec_method", "mtp")
"""InferenceX's keys, of its files, its API's rows and its first files."""


def _speculation(run: ServingRun) -> str:
    """`eagle`, `mtp` ..., empty where nothing says that there is any."""
    named = option(run.flags, "--speculative-algorithm") or option(run.flags, "--speculative-config")
    said = [named, *(str(run.extra.get(key) or "") for key in SPECULATION)]
    kinds = [kind.lower() for kind in said if kind.lower() not in ("", "none", "false", "off")]
    accepted = run.value("accept_length", "mean") or 1.0
    return kinds[0] if kinds else f"{accepted:g} tokens a step" if accepted > 1 else ""


def _dp_attention(run: ServingRun) -> str:
    return "on" if run.parallelism.dp_attention or option(run.flags, "--enable-dp-attention") else ""


def _disaggregation(run: ServingRun) -> str:
    apart = run.parallelism.disaggregated or run.extra.get("disagg") is True
    return "on" if apart or option(run.flags, "--disaggregation-mode") not in ("", "null") else ""


FEATURES: dict[str, Callable[[ServingRun], str]] = {
    "speculative decoding": _speculation,
    "DP attention": _dp_attention,
    "disaggregation": _disaggregation,
}
"""What makes another engine of one, each as a run has it; empty where nothing says that there is any."""


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
        workload=setting.workload,
        input_len=_number(setting.workload.input_len),
        output_len=_number(setting.workload.output_len),
        failed="none",
        window="the whole run",
    )


def _of_run(run: ServingRun) -> dict[str, str]:
    quantity = quantity_of_run(run, Metric(name="", value=0, unit=""))
    failed = run.totals.failed
    if failed is None and run.totals.completed is not None and run.workload.num_prompts is not None:
        failed = max(run.workload.num_prompts - run.totals.completed, 0)
    load = run.workload
    window = f"without the first {load.warmup_s or 0:g} s and the last {load.cooldown_s or 0:g} s"
    precision, _, cache = quantity.weights.partition(", ")
    return _identity(
        hardware=run.hardware,
        gpus=quantity.all_gpus,
        engine=run.engine,
        version=run.version,
        model=quantity.model,
        precision=precision,
        cache=cache.removesuffix(" cache") or ("auto" if run.flags else UNKNOWN),
        parallelism=run.parallelism,
        features={name: of_run(run) or "none" for name, of_run in FEATURES.items()},
        launch="eager" if any(option(run.flags, name) for name in EAGER) else "graph",
        recv_interval=option(run.flags, "--scheduler-recv-interval") or "1",
        workload=load,
        input_len=quantity.input_length,
        output_len=quantity.output_length,
        failed=f"{failed} of {(run.totals.completed or 0) + failed}" if failed else "none",
        window=window if quantity.trimmed else "the whole run",
    )


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
    workload: OfferedLoad,
    input_len: str,
    output_len: str,
    failed: str,
    window: str,
) -> dict[str, str]:
    """By the names of FIELDS, in one spelling each."""
    rate = workload.request_rate
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
        "expert parallelism": _number(parallelism.ep),
        "data parallelism": _number(parallelism.dp),
        **features,
        "launch of decode steps": launch,
        "steps between looks": recv_interval,
        "input length": input_len,
        "output length": output_len,
        "range of lengths": _number(workload.range_ratio),
        "concurrency": _number(workload.concurrency),
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
    "expert parallelism": _same,
    "data parallelism": _same,
    **dict.fromkeys(FEATURES, _same),
    "launch of decode steps": _same,
    "steps between looks": _same,
    "input length": _lengths,
    "output length": _lengths,
    "range of lengths": _same,
    "concurrency": _same,
    "request rate": _same,
    "burstiness": _same,
    "ramp-up": _same,
    "failed requests": _same,
    "accounting window": _same,
}
"""What says whether two runs are of one setting, and when two values agree."""
