"""What the tables of formats/vllm.toml cannot say."""

from __future__ import annotations

import math

from harness.serving.clients.format import Draft
from harness.serving.schema import RequestSamples

DEGREES = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp"}


def lists_and_metadata(draft: Draft) -> None:
    """Means that stand only in the client's lists, and the parallelism among --metadata."""
    row = draft.row
    _zeros_in_mean(draft)
    queued = row.numbers("queue_times", scale=1e3)  # has an entry for each failed request too
    complete = queued if not draft.totals.get("failed") else ()
    for name, key, values in (
        ("e2e", "latencies", draft.samples.e2es_ms), ("client_queue_time", "queue_times", complete),
    ):  # fmt: skip
        if values and draft.value(name) is None:
            mean = sum(values) / len(values)
            draft.add(name, mean, "ms", scope="request", statistic="mean", derived=f"mean of {key}")
    given = {key: str(row.values[key]) for key in DEGREES if str(row.values.get(key)).isdecimal()}
    draft.parallelism = {DEGREES[key]: int(row.take(key)) for key in given}
    if given:
        draft.notes.append("from --metadata: " + ", ".join(f"{key} {value}" for key, value in given.items()))


def _zeros_in_mean(draft: Draft) -> None:
    """A finding if the client's mean TTFT counts requests that returned nothing as 0."""
    every, answered, mean = draft.row.values.get("ttfts"), draft.samples.ttfts_ms, draft.value("ttft")
    if not isinstance(every, list) or not mean or not 0 < len(answered) < len(every):
        return
    of_answered, of_every = sum(answered) / len(answered), sum(answered) / len(every)
    if math.isclose(mean, of_every, rel_tol=0.01) and not math.isclose(mean, of_answered, rel_tol=0.01):
        draft.row.find(
            "samples", "wrong", f"mean ttft {mean:g} ms counts {len(every) - len(answered)} of {len(every)} "
            f"requests that returned nothing as 0: of those that answered it is {of_answered:g} ms",
            mean=mean, of_answered=of_answered,
        )  # fmt: skip


def passes(draft: Draft) -> None:
    times = draft.row.numbers("latencies", scale=1e3)
    percentiles = draft.row.inside("percentiles")
    for key in percentiles.values:
        draft.add("batch_latency", percentiles.number(key, scale=1e3), "ms", statistic=f"p{key}")
    if times:
        for statistic, value in (("min", min(times)), ("max", max(times))):
            how = f"{statistic} of latencies"
            draft.add("batch_latency", value, "ms", statistic=statistic, derived=how)
    draft.samples = RequestSamples(e2es_ms=times)
    draft.extra = {"latencies_ms": list(times)}
