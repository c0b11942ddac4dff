"""What the tables of formats/vllm.toml cannot express."""

from __future__ import annotations

import math

from harness.serving.clients.format import Draft
from harness.serving.schema import RequestSamples

DEGREES = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp"}


def serve(draft: Draft) -> None:
    """Means that only the client's lists tell, and the parallelism among --metadata."""
    row = draft.row
    _zeros_in_mean(draft)
    lists = [("e2e", "latencies", draft.samples.e2es_ms)]
    queued = row.numbers("queue_times", scale=1e3)  # it has an entry for each failed request, too
    if not draft.totals.get("failed"):
        lists.append(("client_queue_time", "queue_times", queued))
    for name, key, values in lists:
        if values and draft.value(name) is None:
            mean = sum(values) / len(values)
            draft.add(name, mean, "ms", scope="request", statistic="mean", derived=f"mean of {key}")
    keys = [key for key in DEGREES if str(row.values.get(key)).isdecimal()]
    draft.parallelism = {DEGREES[key]: int(row.take(key)) for key in keys}
    if keys:
        draft.notes.append("from --metadata: " + ", ".join(f"{key} {row.values[key]}" for key in keys))


def _zeros_in_mean(draft: Draft) -> None:
    """Adds a finding if the client's mean TTFT counts requests that returned nothing as 0."""
    listed, answered, mean = draft.row.values.get("ttfts"), draft.samples.ttfts_ms, draft.value("ttft")
    if not isinstance(listed, list) or not mean or not 0 < len(answered) < len(listed):
        return
    of_answered, of_all = sum(answered) / len(answered), sum(answered) / len(listed)
    if math.isclose(mean, of_all, rel_tol=0.01) and not math.isclose(mean, of_answered, rel_tol=0.01):
        zeros = f"{len(listed) - len(answered)} of {len(listed)} requests that returned nothing as 0"
        why = f"of those that answered it is {of_answered:g} ms"
        draft.row.find("samples", "wrong", f"mean ttft {mean:g} ms counts {zeros}: {why}")


def latency(draft: Draft) -> None:
    """Quantiles, extremes and the list of the batch's latencies."""
    times = draft.row.numbers("latencies", scale=1e3)
    percentiles = draft.row.inside("percentiles")
    for key in percentiles.values:
        draft.add("batch_latency", percentiles.number(key, scale=1e3), "ms", statistic=f"p{key}")
    if times:
        draft.add("batch_latency", min(times), "ms", statistic="min", derived="min of latencies")
        draft.add("batch_latency", max(times), "ms", statistic="max", derived="max of latencies")
    draft.samples = RequestSamples(e2es_ms=times)
    draft.extra = {"latencies_ms": list(times)}
