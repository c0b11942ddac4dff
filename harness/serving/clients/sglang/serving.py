"""`sglang.bench_serving`: one JSON object a run, appended to a JSONL file.

Read in sglang/bench_serving.py of the wheels 0.4.3, 0.4.6.post5, 0.4.9.post2, 0.5.3 and 0.5.9, and
sglang/benchmark/serving.py of 0.5.23. Times in the lists are seconds, `*_ms` milliseconds. What changed:

- by 0.4.6: accept_length, p95_itl_ms. By 0.5.9: tag, server_info, total_throughput, p90_e2e_latency_ms,
  max_output_tokens_per_s, max_concurrent_requests. By 0.5.23: p90 and p95 of all; with --goodput
  goodput_slos_ms, request_goodput and slo_attainment (a share of the requests sent).
- input_lens, output_lens, ttfts, itls, generated_texts and errors only with --output-details (by 0.4.6).
- random_input_len, random_output_len and random_range_ratio are written whatever the data set; they hold for
  `random` and `random-ids` only, whose lengths are uniform from the ratio times the length to the length
  (of which the workload gives the mean).
- concurrency is the sum of all end-to-end times over the duration: the mean. max_concurrent_requests counts
  all that touched one second, more than were ever in flight at once: no concurrency.
"""

from __future__ import annotations

from harness.serving.clients import common
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document, keys_of, objects
from harness.serving.clients.sglang.server_info import described, without_secrets
from harness.serving.schema import OfferedLoad, ServingRun, Tokens, Totals

NAME = "sglang.bench_serving"
KEYS = {
    "dataset_name",
    "sharegpt_output_len",
    "random_range_ratio",
    "input_throughput",
    "total_output_tokens_retokenized",
    "mean_e2e_latency_ms",
    "median_e2e_latency_ms",
}
LATENCIES = {"e2e_latency": "e2e", "ttft": "ttft", "tpot": "tpot", "itl": "itl"}
THROUGHPUTS: dict[str, Tokens] = {
    "input_throughput": "input",
    "output_throughput": "output",
    "total_throughput": "total",
}
WANTED = ("duration", "completed", "output_throughput", "mean_ttft_ms", "mean_tpot_ms")


def recognises(document: Document) -> bool:
    return any(len(KEYS & keys) >= 3 for keys in keys_of(document))


def runs(document: Document) -> list[ServingRun]:
    return [_run(Fields(where, row)) for where, row in objects(document)]


def _run(row: Fields) -> ServingRun:
    samples, failed = common.requests(row)
    server = described(row)
    metrics = (
        *common.throughputs(row, THROUGHPUTS),
        *common.single(row, "request_throughput", "request_throughput", "req/s"),
        *common.single(row, "request_goodput", "goodput", "req/s"),
        *common.single(row, "slo_attainment", "slo_attainment", "1"),
        *common.single(row, "concurrency", "concurrency", "1", statistic="mean"),
        *common.single(row, "accept_length", "accept_length", "1", statistic="mean"),
        *common.peaks(row),
        *common.of_keys(row, LATENCIES),
    )
    workload = _workload(row)
    totals = Totals(
        duration_s=row.number("duration"),
        completed=row.count("completed"),
        failed=row.count("failed") if "failed" in row.values else failed,
        input_tokens=row.count("total_input_tokens"),
        output_tokens=row.count("total_output_tokens"),
    )
    label = row.text("tag")
    notes = common.without_bulk(row)
    if server.get("gpus"):
        notes += ("gpus from server_info: the world size of its parallelism",)
    run = ServingRun(
        id=row.where,
        client=NAME,
        source=row.where,
        label=label,
        mode="online",
        workload=workload,
        totals=totals,
        metrics=metrics,
        samples=samples,
        notes=notes,
        extra=without_secrets(row.rest()),
        protocol=common.protocol(row),
        **{"engine": common.engine(common.protocol(row)), **server},
        findings=tuple(row.findings),
    )
    return common.measured(run, row, WANTED)


def _workload(row: Fields) -> OfferedLoad:
    dataset = row.text("dataset_name")
    into = out = ratio = None
    if dataset in ("random", "random-ids"):
        ratio = row.number("random_range_ratio")
        into = common.mean_of_range(row.number("random_input_len"), ratio)
        out = common.mean_of_range(row.number("random_output_len"), ratio)
    elif dataset == "sharegpt":
        out = row.number("sharegpt_output_len")
    return OfferedLoad(
        dataset=dataset,
        input_len=into,
        output_len=out,
        range_ratio=ratio,
        concurrency=row.number("max_concurrency"),
        request_rate=common.request_rate(row),
        num_prompts=row.count("num_prompts"),
    )
