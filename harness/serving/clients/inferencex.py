"""What the table of formats/inferencex.toml cannot express."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from harness.serving.clients.fields import Fields, real
from harness.serving.clients.format import Draft, Rule
from harness.serving.schema import Scope, Tokens

KINDS: dict[str, Tokens] = {
    "tput_per_gpu": "total", "output_tput_per_gpu": "output", "input_tput_per_gpu": "input",
}  # fmt: skip
LATENCIES = Rule(latencies={"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e"})
LEAST, MOST = 0.5, 1.1  # of the longest length: a mean output length beyond these is suspect
TOLERANCE = 1e-3  # rows of the API are rounded to two decimals


def complete(draft: Draft) -> None:
    """The GPUs, the machine, throughputs by what they are divided by, latencies, lengths, parallelism."""
    row, about = draft.row, draft.about
    numbers = row.inside("metrics") if "metrics" in row.values else row
    disagg, multinode = row.flag("disagg"), row.flag("is_multinode")
    # Numbers of several nodes are over the GPUs of each role, too (formats/inferencex.toml).
    is_disaggregated = bool(disagg or multinode)
    if disagg is not None or multinode is not None:
        draft.extra["disagg"] = is_disaggregated
    prefill, decode = row.count("num_prefill_gpu"), row.count("num_decode_gpu")
    about["gpus"] = _gpus(draft, is_disaggregated, prefill, decode)
    about["source"] = row.text("run_url") or row.where
    about["hardware"] = row.text("hw") or row.text("hardware") or row.text("device")
    _throughputs(draft, numbers, is_disaggregated, prefill, decode)
    draft.metrics += LATENCIES.read_latencies(numbers, "{statistic}_{latency}", scale=1e3)
    _load(draft)
    _examine_speeds(draft, numbers)
    _parallelism(draft, is_disaggregated, prefill, decode)


def _gpus(draft: Draft, is_disaggregated: bool, prefill: int | None, decode: int | None) -> int | None:
    """The GPUs by which the per-GPU numbers were divided; None if the file does not tell them.
    prefill, decode: the GPUs of each, if the file says them"""
    row = draft.row
    if num_gpus := row.count("num_gpus"):
        return num_gpus
    if is_disaggregated:
        return (prefill + decode or None) if prefill is not None and decode is not None else None
    if prefill and decode and prefill != decode:
        both = f"{prefill} GPUs prefill and {decode} decode, though the engine is not disaggregated"
        message = f"{both}: the file does not tell by which its numbers were divided"
        row.find("denominator", "suspect", message)
        return None
    if prefill and decode:
        note = "num_prefill_gpu and num_decode_gpu are the same GPUs: the engine is not disaggregated"
        draft.notes.append(note)
        return prefill
    tp = row.count("tp")
    if not tp:
        return None
    draft.notes.append("GPUs: tp x pp x pcp_size, by which the per-GPU numbers were divided")
    return math.prod([tp, row.count("pp") or 1, row.count("pcp_size") or 1])


def _parallelism(draft: Draft, is_disaggregated: bool, prefill: int | None, decode: int | None) -> None:
    """Parallelism that prefill and decode have in common. If it differs, both are in `extra`."""
    row = draft.row
    for kind, read in (("tp", row.count), ("pp", row.count), ("ep", row.count), ("dp_attention", row.flag)):
        value: Any = read(kind)
        if value is None and f"decode_{kind}" in row.values:
            if row.values.get(f"prefill_{kind}") == row.values[f"decode_{kind}"]:
                value = read(f"decode_{kind}")
            elif kind != "dp_attention":
                _examine_unlike_degrees(draft, kind, is_disaggregated)
        draft.parallelism[kind] = value
    if is_disaggregated:
        draft.parallelism |= {"prefill_gpus": prefill, "decode_gpus": decode}


def _examine_unlike_degrees(draft: Draft, kind: str, is_disaggregated: bool) -> None:
    """Checks that prefill and decode can have different degrees of a kind of parallelism."""
    row, gpus = draft.row, draft.about["gpus"]
    copy = Fields(row.where, row.values, findings=row.findings)  # so that both numbers stay in row.rest()
    prefill, decode = copy.count(f"prefill_{kind}"), copy.count(f"decode_{kind}")
    both = f"{kind} of prefill and decode are {prefill} and {decode}"
    if gpus and max(prefill or 0, decode or 0) > gpus:
        row.find("plausible", "wrong", f"{both}, over {gpus} GPUs")
    if not is_disaggregated and prefill is not None and decode is not None:
        row.find("denominator", "suspect", f"{both}, though the engine is not disaggregated")


def _load(draft: Draft) -> None:
    """Mean lengths, if the latencies tell that of the output: the mean input is the same share of the longest
    input, as both are drawn alike. If they do not tell it, only the longest lengths are known."""
    load = draft.load
    isl, osl = load["longest_input_len"], load["longest_output_len"]
    if not isl or not osl:
        return
    e2e, ttft, tpot = draft.value("e2e"), draft.value("ttft"), draft.value("tpot")
    out = 0.0  # mean output tokens; 0: not known
    if e2e is not None and ttft is not None and tpot:
        out = 1 + (e2e - ttft) / tpot
        if out < LEAST * osl or out - 1 > MOST * osl:
            message = f"osl is {osl:g}, but 1 + (E2E - TTFT) / TPOT are {out:.4g} tokens"
            draft.row.find("output_length", "suspect", message)
    if not 1 < out < osl + 1:
        draft.notes.append("isl and osl are the longest lengths; from which on they are drawn is not said")
        return
    load |= {"input_len": round(isl * out / osl), "output_len": round(out)}
    draft.notes.append(
        f"lengths: the longest are {isl:g} / {osl:g}; means are {out / osl:.3g} of them, by "
        "1 + (E2E - TTFT) / TPOT output tokens"
    )


def _examine_speeds(draft: Draft, numbers: Fields) -> None:
    """Checks that `*_intvty` is 1 / `*_tpot`."""
    for statistic in ("mean", "median", "p99"):
        tpot = real(numbers.values.get(f"{statistic}_tpot"))
        speed = real(numbers.values.get(f"{statistic}_intvty"))
        if tpot and speed and not math.isclose(tpot * speed, 1, rel_tol=0.01):
            message = f"{statistic}_intvty is {speed:g}, but 1 / {statistic}_tpot is {1 / tpot:.5g}"
            numbers.find("intvty", "suspect", message)


def _throughputs(
    draft: Draft, numbers: Fields, is_disaggregated: bool, prefill: int | None, decode: int | None
) -> None:
    values = {key: numbers.number(key) for key in KINDS}
    scopes: dict[str, Scope] = dict.fromkeys(KINDS, "gpu")
    if is_disaggregated:
        input_scope, output_scope, note = _denominators(values, prefill, decode)
        scopes |= {"input_tput_per_gpu": input_scope, "output_tput_per_gpu": output_scope}
        draft.notes.append(note)
        if input_scope == "unknown" and None not in values.values():
            numbers.find("denominator", "suspect", note)
    for key, value in values.items():
        draft.add("throughput", value, "tok/s", scope=scopes[key], tokens=KINDS[key])


def _denominators(
    values: Mapping[str, float | None], prefill: int | None, decode: int | None
) -> tuple[Scope, Scope, str]:
    """The scopes of input and output throughput, with which they add up to the total, and a note on them."""
    total, inputs, outputs = (values[f"{kind}tput_per_gpu"] for kind in ("", "input_", "output_"))
    if total is None or outputs is None or inputs is None or prefill is None or decode is None:
        note = "the file does not tell over how many GPUs input and output throughput are taken"
        return "unknown", "unknown", note
    of_roles, of_all = inputs * prefill + outputs * decode, total * (prefill + decode)
    if prefill and decode and math.isclose(of_roles, of_all, rel_tol=TOLERANCE):
        note = f"input is over the {prefill} GPUs of prefill, output over the {decode} of decode"
        return "prefill_gpu", "decode_gpu", f"{note}, total over all"
    if math.isclose(inputs + outputs, total, rel_tol=TOLERANCE):
        return "gpu", "gpu", "input, output and total are all over all GPUs"
    note = f"input {inputs:g} and output {outputs:g} tok/s add up to the total of {total:g}"
    return "unknown", "unknown", f"{note} neither over {prefill} + {decode} GPUs nor over all"
