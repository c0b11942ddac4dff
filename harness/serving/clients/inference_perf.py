"""What the table of formats/inference_perf.toml cannot express."""

from __future__ import annotations

import re

from harness.serving.clients.format import STATISTIC, Draft, Rule
from harness.serving.schema import Tokens

EARLIEST_S = -0.1  # a request is sent no earlier than this before its time, whatever the grain of its timer


def complete(draft: Draft) -> None:
    """Delays of requests, lengths, the duration, tokens and the cache."""
    row, totals, load = draft.row, draft.totals, draft.load
    successes, delays = row.inside("successes"), row.inside("load_summary").inside("schedule_delay")
    # From the time for which a request was due to when it was sent; slightly negative if it was early.
    for statistic in [key for key in delays.values if re.fullmatch(STATISTIC, key)]:
        value = delays.number(statistic, scale=1e3, least=EARLIEST_S)
        draft.add("schedule_delay", value, "ms", scope="request", statistic=statistic)
    # `prompt_len` is of 0.6 and before.
    prompts = "prompt_tokens" if "prompt_tokens" in successes.values else "prompt_len"
    lengths: tuple[tuple[str, Tokens], ...] = ((prompts, "input"), ("output_len", "output"))
    for key, side in lengths:
        rule = Rule(name=f"{side}_len", unit="tokens", tokens=side, scope="request", object=True)
        draft.metrics += rule.read(successes, key)
    completed, per_second = totals["completed"], draft.value("request_throughput", "total")
    if totals["duration_s"] is None and completed and per_second:
        totals["duration_s"] = completed / per_second
        draft.notes.append("the duration is not in the file: taken as successful requests / requests_per_sec")
    for side in ("input", "output"):
        mean = draft.value(f"{side}_len", tokens=side)
        totals[f"{side}_tokens"] = None if completed is None or mean is None else round(completed * mean)
    # `output_len` is by the client's count, `output_tokens` by the server's: the nearer to the rate is taken.
    by_client, by_server = totals["output_tokens"], successes.inside("output_tokens").count("total")
    by_throughput = (draft.value("throughput", "total", "output") or 0.0) * (totals["duration_s"] or 0.0)
    counts = [count for count in (by_client, by_server) if count is not None]
    totals["output_tokens"] = min(counts, key=lambda count: abs(count - by_throughput), default=None)
    if load["concurrency"]:
        load["request_rate"] = None
    cached = successes.inside("prompt_tokens").count("cached")
    load["prefix_cached"] = None if cached is None else cached > 0
    if by_server is None:
        note = "of a version before 0.6, which may have counted a token too many in each piece of a stream"
        draft.notes.insert(0, f"{note}: then ITL, and in 2025 TPOT, are too short")
    elif by_client and by_client != by_server:
        note = f"output tokens: {by_client} by the client's count, {by_server} by the server's"
        why = "the file does not say which of them TPOT and throughput rest on"
        draft.notes.append(f"{note}; {why}; taken: the one that its throughput fits")
