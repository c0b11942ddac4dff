"""inference-perf's `stage_N_lifecycle_metrics.json` (one load) and `summary_lifecycle_metrics.json` (all
stages together): one run each.

Read in kubernetes-sigs/inference-perf, inference_perf/reportgen/base.py of 0.7.0, and in files of 2025. Times
are in s, of successful requests. What the words mean there:

- `time_per_output_token` is (last - first token) / (tokens - 1) of each request, and `inter_token_latency`
  each time between two tokens; tokens of one piece of a stream share its time;
- `normalized_time_per_output_token` is request_latency / tokens. Kept under its own name;
- tokens are the client's count of the answer's text, special tokens included, unless it was told to take the
  server's (`use_server_output_tokens`, which the file does not say). From 0.6 on the file has both;
- before 0.6 each piece of a stream was tokenised with the special tokens that open a text (issue 564): with
  one token a piece two were counted, ITL is half of what it was, and in the files of 2025 TPOT too;
- rates are over the time from the first request sent to the last one ended, failed ones too. Files before
  0.5 do not state it: it is taken from the rate of requests;
- `requested_rate` of a stage with a concurrency is its number of requests, and no rate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from harness.serving.clients.format import GOODPUT, STATISTIC, Draft, Format, One, Several

EARLIEST_S = -0.1  # a request is sent no earlier, whatever its timer's grain
LATENCIES = {
    "request_latency": "e2e", "time_to_first_token": "ttft", "time_per_output_token": "tpot",
    "inter_token_latency": "itl", "normalized_time_per_output_token": "normalized_time_per_output_token",
}  # fmt: skip
KINDS = ("input", "output", "total")


def has_stage(row: Mapping[str, Any]) -> bool:
    successes = row.get("successes")
    parts = isinstance(successes, Mapping) and bool({"latency", "throughput"} & set(successes))
    return parts and "load_summary" in row


def counts_and_delays(draft: Draft) -> None:
    row, totals, load = draft.row, draft.totals, draft.load
    successes, delays = row.inside("successes"), row.inside("load_summary").inside("schedule_delay")
    # From when a request was due to when it was sent; a little below 0 where it was early.
    for key in (key for key in delays.values if re.fullmatch(STATISTIC, key)):
        value = delays.number(key, scale=1e3, least=EARLIEST_S)
        draft.add("schedule_delay", value, "ms", scope="request", statistic=key)
    # In 0.6 and before `prompt_len`; `output_len` is the client's count, `output_tokens` the server's.
    into = "prompt_tokens" if "prompt_tokens" in successes.values else "prompt_len"
    draft.metrics += Several(f"successes.{into}", "input_len", "tokens", "input").read(row)
    draft.metrics += Several("successes.output_len", "output_len", "tokens", "output").read(row)
    completed, stated = totals["completed"], totals["duration_s"]
    per_second = draft.value("request_throughput", "total")
    if stated is None and completed and per_second:
        totals["duration_s"] = completed / per_second
        draft.notes.append("the duration is not in the file: taken as successful requests / requests_per_sec")

    def counted(kind: str) -> int | None:
        mean = draft.value(f"{kind}_len", tokens=kind)
        return None if completed is None or mean is None else round(completed * mean)

    by_client, by_server = counted("output"), successes.inside("output_tokens").count("total")
    by_rate = (draft.value("throughput", "total", "output") or 0.0) * (totals["duration_s"] or 0.0)
    counts = [count for count in (by_client, by_server) if count is not None]
    totals["output_tokens"] = min(counts, key=lambda count: abs(count - by_rate)) if counts else None
    totals["input_tokens"] = counted("input")
    if load["concurrency"]:
        load["request_rate"] = None
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


FORMATS = (
    Format(
        name="inference-perf", is_one=has_stage, fixed={"mode": "online"},
        metrics=(
            *(One(f"successes.throughput.{kind}_tokens_per_sec", "throughput", "tok/s", kind)  # type: ignore[arg-type]
              for kind in KINDS),
            One("successes.throughput.requests_per_sec", "request_throughput", "req/s"),
            One("load_summary.achieved_rate", "sent_rate", "req/s"),
            *(One(f"successes.goodput_metrics.{rule.path}", "goodput", "req/s") for rule in GOODPUT),
            *(Several(f"successes.latency.{key}", name, scale=1e3) for key, name in LATENCIES.items()),
        ),
        load={"concurrency": "load_summary.concurrency", "request_rate": "load_summary.requested_rate",
              "num_prompts": "load_summary.count"},
        totals={"duration_s": "benchmark_time_seconds", "completed": "successes.count",
                "failed": "failures.count"},
        odd=counts_and_delays, wanted=("successes.latency", "successes.throughput"),
    ),
)  # fmt: skip
