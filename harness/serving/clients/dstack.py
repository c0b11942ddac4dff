"""What the tables of formats/dstack.toml cannot say."""

from __future__ import annotations

from harness.serving.clients.format import Draft, mean_length, table_file
from harness.serving.integrity.common import MARGIN
from harness.serving.integrity.latencies import quantile_limits

GPUS = 8  # of one node, in each configuration of its README
SHARED_PREFIX = "generated-shared-prefix"


def online(draft: Draft) -> None:
    """Lengths, which the table has only for random data; the columns of shifted rows; the machine."""
    load, row = draft.load, draft.row
    if draft.value("concurrency") is None:
        message = "no concurrency: so it is not known whether the row is shifted, with p95 of itl under p99"
        row.find("column_shift", "suspect", message)
    isl, osl = row.number("random_input_len"), row.number("random_output_len")
    if load["dataset"] == "random" and (ratio := row.number("random_range_ratio")) is not None:
        load["range_ratio"] = ratio
        isl, osl = mean_length(isl, ratio), mean_length(osl, ratio)
    notes = [f"num_prompts {load['num_prompts']} from dstack's command"]
    shares_prefix = load["dataset"] == SHARED_PREFIX
    if shares_prefix:
        unused = " / ".join("none" if length is None else f"{length:g}" for length in (isl, osl))
        isl, osl = draft.format.more["shared_prefix"]
        where = f"input and output length {isl} / {osl} from dstack's command"
        why = f"({unused}) are defaults that {SHARED_PREFIX} does not use"
        notes = [f"{where}: random_input_len / random_output_len {why}", *notes]
    load |= {"input_len": isl, "output_len": osl, "prefix_cached": shares_prefix}
    _unshift(draft)
    _machine(draft)
    draft.notes += notes


def offline(draft: Draft) -> None:
    """The table has the throughput of requests and of total tokens only. That of output tokens is derived."""
    duration_s, inputs = draft.totals["duration_s"], draft.totals["input_tokens"]
    outputs, total = draft.totals["output_tokens"], draft.row.count("total_num_tokens")
    if outputs is not None and duration_s:
        how = "total_output_tokens / elapsed_time"
        draft.add("throughput", outputs / duration_s, "tok/s", scope="node", tokens="output", derived=how)
    if None not in (total, inputs, outputs) and total != inputs + outputs:
        both = f"input {inputs} and output {outputs} make {inputs + outputs}"
        draft.row.find("total_tokens", "wrong", f"total_num_tokens is {total}, but {both}")
    _machine(draft)


def _machine(draft: Draft) -> None:
    """The machine and the engine, which the table only names: the rest is from dstack's README."""
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
    mean, std, p99 = draft.value("itl"), draft.value("itl", "std"), draft.value("itl", "p99")
    if not (limit and stated and rate and e2e and mean and std and p99):
        return
    follows, largest = rate * e2e / 1e3, limit * (1 + MARGIN)
    _, largest_p99 = quantile_limits(mean, std, 0.99)
    if stated <= largest or not limit / 2 <= follows <= largest or not p99 <= stated <= largest_p99:
        return
    moved = [("itl", "p99"), ("concurrency", "mean")]
    draft.metrics = [metric for metric in draft.metrics if (metric.name, metric.statistic) not in moved]
    how = "request_throughput x mean_e2e_latency_ms"
    draft.add("itl", p99, "ms", scope="request", statistic="p95")
    draft.add("itl", stated, "ms", scope="request", statistic="p99")
    draft.add("concurrency", follows, "1", scope="node", statistic="mean", derived=how)
    message = (
        f"columns are shifted: concurrency {stated:g} is above the limit of {limit:g}; by Little's law it is "
        f"{rate:.6g} req/s x {e2e:.6g} ms = {follows:.5g}. It holds p99 of itl, and p99_itl_ms {p99:g} "
        "is p95"
    )
    draft.row.find("column_shift", "wrong", message)
    draft.notes.append("repaired: p95 and p99 of itl; concurrency was lost, it follows from Little's law")
