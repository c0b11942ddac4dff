"""InferenceX (earlier InferenceMAX) of SemiAnalysis: `agg_*.json`, and the rows of its site's API.

Read in SemiAnalysisAI/InferenceX, utils/process_result.py of 2026-08-21 (843c6254), and InferenceX-app's
packages/db/data/supplemental-bmk.json. The client underneath is vLLM's old benchmark_serving.py: its `*_ms`
keys lose the suffix and come in **seconds**; all throughputs are per GPU:

- of one node: over tp x pp x pcp_size GPUs (older files: over tp);
- of several nodes: `tput_per_gpu` over all GPUs, `output_tput_per_gpu` over those that decode,
  `input_tput_per_gpu` over those that prefill. Forks divide all three by all GPUs. Which it was follows
  from the three numbers; where it does not, the scope is `unknown`.

isl and osl are the longest lengths: the client draws from --random-range-ratio of them on, which no file says
(its scripts give 0.8). The mean of the output follows from the mean latencies, E2E = TTFT + (n - 1) TPOT.

The API's rows nest the numbers under `metrics`, and write the GPUs of an aggregated engine twice, as
num_prefill_gpu and as num_decode_gpu. `*_intvty` is 1 / `*_tpot`, statistic by statistic (that of `std`
means nothing), and stays in `extra`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.serving.clients.common import of_keys
from harness.serving.clients.fields import Fields, real
from harness.serving.clients.files import Document, objects
from harness.serving.schema import Finding, Metric, OfferedLoad, Parallelism, Scope, ServingRun, Tokens

NAME = "inferencex"
NUMBERS = {"tput_per_gpu", "output_tput_per_gpu", "input_tput_per_gpu"}
SETTINGS = {"framework", "precision", "isl", "osl", "conc"}
LATENCIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e"}
KINDS: dict[str, Tokens] = {
    "tput_per_gpu": "total",
    "output_tput_per_gpu": "output",
    "input_tput_per_gpu": "input",
}
SHORTEST, LONGER = 0.5, 1.1  # mean over longest: of lengths drawn from 0 on; beyond what means tell
SPEEDS = ("mean", "median", "p99")
TOLERANCE = 1e-3  # rows of the API are rounded to two decimals


def recognises(document: Document) -> bool:
    rows = document.rows() if document.kind in ("json", "jsonl") else []
    return bool(rows) and all(_is_one(row) for row in rows)


def runs(document: Document) -> list[ServingRun]:
    return [_run(Fields(where, row)) for where, row in objects(document)]


def _is_one(row: Any) -> bool:
    if not isinstance(row, Mapping):
        return False
    numbers = row["metrics"] if isinstance(row.get("metrics"), Mapping) else row
    return bool(NUMBERS & set(numbers)) and len(SETTINGS & set(row)) >= 3


def _run(row: Fields) -> ServingRun:
    numbers = row.inside("metrics") if "metrics" in row.values else row
    said = _either(_flag(row, "disagg"), _flag(row, "is_multinode"))
    apart = said or False
    prefill, decode = row.count("num_prefill_gpu"), row.count("num_decode_gpu")
    gpus, note = _gpus(row, apart, prefill, decode)
    throughputs, notes = _throughputs(numbers, apart, prefill, decode)
    latencies = of_keys(numbers, LATENCIES, suffix="", scale=1e3)
    load, of_lengths = _load(row, latencies)
    _examine_speeds(numbers)
    return ServingRun(
        id=row.where,
        client=NAME,
        source=row.text("run_url") or row.where,
        date=row.text("date"),
        model=row.text("model"),
        precision=row.text("precision"),
        hardware=row.text("hw") or row.text("hardware") or row.text("device"),
        gpus=gpus,
        engine=row.text("framework"),
        image=row.text("image"),
        parallelism=_parallelism(row, apart, prefill, decode),
        mode="online",
        workload=load.model_copy(update={"concurrency": row.number("conc")}),
        metrics=(*throughputs, *latencies),
        extra=row.rest() | ({} if said is None else {"disagg": apart}),
        notes=tuple(text for text in (note, *notes, of_lengths) if text),
        findings=tuple(row.findings),
    )


def _load(row: Fields, latencies: Sequence[Metric]) -> tuple[OfferedLoad, str]:
    """With the longest lengths, and their means where the latencies tell that of the output: prompts are
    drawn alike."""
    isl, osl = row.number("isl"), row.number("osl")
    load = OfferedLoad(dataset="random", longest_input_len=isl, longest_output_len=osl)
    means = {metric.name: metric.value for metric in latencies if metric.statistic == "mean"}
    e2e, ttft, tpot = (means.get(name) for name in ("e2e", "ttft", "tpot"))
    if not isl or not osl:
        return load, ""
    if e2e is None or ttft is None or not tpot or not 0 < (e2e - ttft) / tpot < osl:
        if e2e is not None and ttft is not None and tpot and (e2e - ttft) / tpot > LONGER * osl:
            out = 1 + (e2e - ttft) / tpot
            _off(row, "output_length", f"osl is {osl:g}, but 1 + (E2E - TTFT) / TPOT are {out:.4g} tokens")
        return load, "isl and osl are the longest lengths; from which on they are drawn is not said"
    out = 1 + (e2e - ttft) / tpot
    if out < SHORTEST * osl:
        _off(row, "output_length", f"osl is {osl:g}, but 1 + (E2E - TTFT) / TPOT are {out:.4g} tokens")
    note = (
        f"lengths: the longest are {isl:g} / {osl:g}; means are {out / osl:.3g} of them, by "
        "1 + (E2E - TTFT) / TPOT output tokens"
    )
    return load.model_copy(update={"input_len": round(isl * out / osl), "output_len": round(out)}), note


def _examine_speeds(numbers: Fields) -> None:
    """`*_intvty` is 1 / `*_tpot`."""
    for statistic in SPEEDS:
        tpot, speed = (real(numbers.values.get(f"{statistic}_{key}")) for key in ("tpot", "intvty"))
        if not tpot or not speed:
            continue
        if not math.isclose(tpot * speed, 1, rel_tol=0.01):
            _off(
                numbers,
                "intvty",
                f"{statistic}_intvty is {speed:g}, but 1 / {statistic}_tpot is {1 / tpot:.5g}",
            )


def _off(row: Fields, rule: str, message: str) -> None:
    row.findings.append(Finding(rule=rule, severity="suspect", message=f"{row.where}: {message}"))


def _either(a: bool | None, b: bool | None) -> bool | None:
    """Whether one of the two is; None where neither is said."""
    return None if a is None and b is None else bool(a or b)


def _flag(row: Fields, key: str) -> bool | None:
    """A truth value, which some rows have as text."""
    raw = row.take(key)
    if raw is None or raw == "":
        return None
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in ("true", "false"):
        return raw.lower() == "true"
    row.leave_out(key, f"is {str(raw)[:40]!r}, not true or false")
    return None


def _gpus(row: Fields, apart: bool, prefill: int | None, decode: int | None) -> tuple[int | None, str]:
    stated = row.count("num_gpus")
    if stated:
        return stated, ""
    if apart:
        if prefill is None or decode is None:
            return None, ""
        return prefill + decode or None, ""
    if prefill and prefill == decode:
        return (
            prefill,
            "num_prefill_gpu and num_decode_gpu are the same GPUs: the engine is not disaggregated",
        )
    tp = row.count("tp")
    if not tp:
        return None, ""
    parts = [tp, row.count("pp") or 1, row.count("pcp_size") or 1]
    return math.prod(parts), "GPUs: tp x pp x pcp_size, by which the per-GPU numbers were divided"


def _parallelism(row: Fields, apart: bool, prefill: int | None, decode: int | None) -> Parallelism:
    """Sizes that prefill and decode have in common; where they differ, both are in `extra`."""
    unlike = Fields(row.where, row.values, findings=row.findings)  # read for its findings only

    def common(key: str, read: Any) -> Any:
        value = read(key)
        if value is not None or f"decode_{key}" not in row.values:
            return value
        sides = [row.values.get(f"{side}_{key}") for side in ("prefill", "decode")]
        if sides[0] == sides[1]:
            return read(f"decode_{key}")
        if read == row.count:
            for side in ("prefill", "decode"):
                unlike.count(f"{side}_{key}")
        return None

    return Parallelism(
        tp=common("tp", row.count),
        pp=common("pp", row.count),
        ep=common("ep", row.count),
        dp_attention=common("dp_attention", lambda key: _flag(row, key)),
        prefill_gpus=prefill if apart else None,
        decode_gpus=decode if apart else None,
    )


def _throughputs(
    numbers: Fields, apart: bool, prefill: int | None, decode: int | None
) -> tuple[list[Metric], list[str]]:
    values = {key: numbers.number(key) for key in KINDS}
    scopes: dict[str, Scope] = dict.fromkeys(KINDS, "gpu")
    notes = []
    if apart:
        inside, note = _denominators(values, prefill, decode)
        scopes |= dict(zip(("input_tput_per_gpu", "output_tput_per_gpu"), inside, strict=True))
        notes.append(note)
        if "unknown" in inside and None not in values.values():
            message = f"{numbers.where}: {note}"
            numbers.findings.append(Finding(rule="denominator", severity="suspect", message=message))
    return [
        Metric(name="throughput", value=value, unit="tok/s", scope=scopes[key], tokens=KINDS[key])
        for key, value in values.items()
        if value is not None
    ], notes


def _denominators(
    values: Mapping[str, float | None], prefill: int | None, decode: int | None
) -> tuple[tuple[Scope, Scope], str]:
    """Scopes of input and output throughput, from what adds up to the total."""
    total, out, into = (values[key] for key in KINDS)
    if total is None or out is None or into is None or prefill is None or decode is None:
        return ("unknown", "unknown"), "over which GPUs input and output throughput are is not to be told"
    if prefill and decode and _near(into * prefill + out * decode, total * (prefill + decode)):
        return ("prefill_gpu", "decode_gpu"), (
            f"input is over the {prefill} GPUs of prefill, output over the {decode} of decode, total over all"
        )
    if _near(into + out, total):
        return ("gpu", "gpu"), "input, output and total are all over all GPUs"
    return ("unknown", "unknown"), (
        f"input {into:g} and output {out:g} tok/s add up to the total of {total:g} neither over "
        f"{prefill} + {decode} GPUs nor over all"
    )


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=TOLERANCE)
