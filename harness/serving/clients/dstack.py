"""What the tables of formats/dstack.toml cannot say."""

from __future__ import annotations

from harness.serving.clients.format import Draft, mean_of_range, table_file
from harness.serving.integrity.common import MARGIN
from harness.serving.integrity.latencies import quantile_limits

GPUS = 8  # of one node, in each configuration of its README
SHARED_PREFIX = "generated-shared-prefix"


def online(draft: Draft) -> None:
    load, row = draft.load, draft.row
    if draft.value("concurrency") is None:
        message = "no concurrency: so it is not known whether the row is shifted, with p95 of itl under p99"
        row.find("column_shift", "suspect", message)
    into, out = row.number("random_input_len"), row.number("random_output_len")
    if load["dataset"] == "random" and (ratio := row.number("random_range_ratio")) is not None:
        load["range_ratio"] = ratio
        into, out = mean_of_range(into, ratio), mean_of_range(out, ratio)
    asked = [f"num_prompts {load['num_prompts']} from dstack's command"]
    if load["dataset"] == SHARED_PREFIX:
        requested = " / ".join("none" if length is None else f"{length:g}" for length in (into, out))
        into, out = draft.format.more["shared_prefix"]
        asked.insert(
            0, f"input and output length {into} / {out} from dstack's command: random_input_len / "
            f"random_output_len ({requested}) are defaults that {SHARED_PREFIX} does not use",
        )  # fmt: skip
    load |= {"input_len": into, "output_len": out, "prefix_cached": load["dataset"] == SHARED_PREFIX}
    _unshift(draft)
    _machine(draft)
    draft.notes += asked


def offline(draft: Draft) -> None:
    """The table has the throughput of requests and of total tokens only. That of output tokens is derived."""
    duration, into, out = (draft.totals[name] for name in ("duration_s", "input_tokens", "output_tokens"))
    if out is not None and duration:
        how = "total_output_tokens / elapsed_time"
        draft.add("throughput", out / duration, "tok/s", scope="node", tokens="output", derived=how)
    total = draft.row.count("total_num_tokens")
    if total is not None and into is not None and out is not None and total != into + out:
        message = f"total_num_tokens is {total}, but input {into} and output {out} make {into + out}"
        draft.row.find("total_tokens", "wrong", message)
    _machine(draft)


def _machine(draft: Draft) -> None:
    row, about, known = draft.row, draft.about, table_file("dstack_readme")
    gpu, backend = row.text("GPU"), row.text("backend")
    about["hardware"] = known["hardware"].get(gpu.lower(), gpu)
    about["engine"] = known["engines"].get(backend, backend)
    about["version"] = known["versions"].get(f"{about['engine']} on {about['hardware']}", "")
    about["gpus"] = GPUS if gpu.lower() in known["hardware"] else None
    draft.notes.append(f"model, {GPUS} GPUs on one node and the engine's version are from dstack's README")
    if gpu.lower() == "mi300":
        draft.notes.append("GPU mi300 read as MI300X: the README has no other")
    if gpu.lower() not in known["hardware"] or backend not in known["engines"]:
        row.find("unknown_name", "suspect", f"GPU {gpu!r} or backend {backend!r} is none of dstack's")


def _unshift(draft: Draft) -> None:
    """Moves ITL's p95 and p99 to their places if the row is shifted.

    The client that wrote the TensorRT-LLM rows has `p95_itl_ms` before `p99_itl_ms`; the table's header does
    not. So p95 is under `p99_itl_ms`, p99 under `concurrency`, and the concurrency is lost. A row counts as
    shifted if its concurrency fits neither the client's limit nor Little's law, if the latter fits the limit,
    and if the value could be a p99 of ITL above the p95 beside it.
    """
    limit, stated = draft.load["concurrency"], draft.value("concurrency")
    rate, e2e = draft.value("request_throughput", "total"), draft.value("e2e")
    mean, std, last = (draft.value("itl", statistic) for statistic in ("mean", "std", "p99"))
    if not (limit and stated and rate and e2e and mean and std and last):
        return
    follows = rate * e2e / 1e3
    fits_a_p99 = last <= stated <= quantile_limits(mean, std, 0.99)[1]
    if stated <= limit * (1 + MARGIN) or not limit / 2 <= follows <= limit * (1 + MARGIN) or not fits_a_p99:
        return
    moved = [("itl", "p99"), ("concurrency", "mean")]
    draft.metrics = [metric for metric in draft.metrics if (metric.name, metric.statistic) not in moved]
    how = "request_throughput x mean_e2e_latency_ms"
    draft.add("itl", last, "ms", scope="request", statistic="p95")
    draft.add("itl", stated, "ms", scope="request", statistic="p99")
    draft.add("concurrency", follows, "1", scope="node", statistic="mean", derived=how)
    message = (
        f"columns are shifted: concurrency {stated:g} is above the limit of {limit:g}; by Little's law it is "
        f"{rate:.6g} req/s x {e2e:.6g} ms = {follows:.5g}. It holds p99 of itl, and p99_itl_ms {last:g} "
        "is p95"
    )
    draft.row.find("column_shift", "wrong", message)
    draft.notes.append("repaired: p95 and p99 of itl; concurrency was lost, it follows from Little's law")
