"""What the table of formats/inference_perf.toml cannot say."""

from __future__ import annotations

import re

from harness.serving.clients.format import STATISTIC, Draft, Rule
from harness.serving.schema import Tokens

EARLIEST_S = -0.1  # a request is sent no earlier than that before its time, whatever its timer's grain


def counts_and_delays(draft: Draft) -> None:
    row, totals, load = draft.row, draft.totals, draft.load
    successes, delays = row.inside("successes"), row.inside("load_summary").inside("schedule_delay")
    # From when a request was due to when it was sent; a little below 0 if it was early.
    for key in (key for key in delays.values if re.fullmatch(STATISTIC, key)):
        value = delays.number(key, scale=1e3, least=EARLIEST_S)
        draft.add("schedule_delay", value, "ms", scope="request", statistic=key)
    # In 0.6 and before `prompt_len`; `output_len` is the client's count, `output_tokens` the server's.
    into = "prompt_tokens" if "prompt_tokens" in successes.values else "prompt_len"
    lengths: tuple[tuple[str, Tokens], ...] = ((into, "input"), ("output_len", "output"))
    for key, side in lengths:
        rule = Rule(name=f"{side}_len", unit="tokens", tokens=side, scope="request", object=True)
        draft.metrics += rule.read(successes, key)
    completed, per_second = totals["completed"], draft.value("request_throughput", "total")
    if totals["duration_s"] is None and completed and per_second:
        totals["duration_s"] = completed / per_second
        draft.notes.append("the duration is not in the file: taken as successful requests / requests_per_sec")
    counted: dict[str, int | None] = {}
    for side in ("input", "output"):
        mean = draft.value(f"{side}_len", tokens=side)
        counted[side] = None if completed is None or mean is None else round(completed * mean)
    by_client, by_server = counted["output"], successes.inside("output_tokens").count("total")
    by_rate = (draft.value("throughput", "total", "output") or 0.0) * (totals["duration_s"] or 0.0)
    counts = [count for count in (by_client, by_server) if count is not None]
    totals["output_tokens"] = min(counts, key=lambda count: abs(count - by_rate), default=None)
    totals["input_tokens"] = counted["input"]
    if load["concurrency"]:
        load["request_rate"] = None
    cached = successes.inside("prompt_tokens").count("cached")
    load["prefix_cached"] = None if cached is None else cached > 0
    if by_server is None:
        draft.notes.insert(
            0, "of a version before 0.6, which may have counted a token too many in each piece of a stream: "
            "then ITL, and in 2025 TPOT, are too short",
        )  # fmt: skip
    elif by_client and by_client != by_server:
        draft.notes.append(
            f"output tokens: {by_client} by the client's count, {by_server} by the server's; which of them "
            "TPOT and throughput rest on the file does not say; taken: the one that its throughput fits"
        )
    draft.notes.insert(
        0, "`itl`: tokens of one piece of a stream share its time, so its median may be next to nothing"
    )
