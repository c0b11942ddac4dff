"""`dstack.online`, `dstack.offline`: the two tables behind dstack's DeepSeek-R1 articles of March 2025.

Read beside github.com/dstackai/benchmarks, branch deepseek-r1-benchmark: README.md (hardware, versions,
client commands) and the client scripts. The online table is SGLang's bench_serving; the offline one is
vLLM's benchmark_throughput.py, whose `tokens_per_second` counts input and output.
"""

from __future__ import annotations

from harness.serving.clients.format import COUNTS, Draft, Format, Latencies, One, mean_of_range, rates
from harness.serving.integrity.common import MARGIN
from harness.serving.integrity.latencies import quantile_limits

GPUS = 8  # of one node, in every configuration of its README
HARDWARE = {"mi300x": "MI300X", "mi300": "MI300X", "h200": "H200"}
ENGINES = {"vllm": "vllm", "sglang": "sglang", "trt-llm": "tensorrt-llm"}
VERSIONS = {  # README.md, "Click to see ... details"
    ("H200", "sglang"): "0.4.3.post2",
    ("MI300X", "sglang"): "0.4.2.post4",
    ("H200", "tensorrt-llm"): "0.17.post1.dev",
    ("H200", "vllm"): "0.7.4.dev181+gf35f8e22",
    ("MI300X", "vllm"): "0.7.3.dev138+g21f6ca217",
}
ONLINE_PROMPTS = 500  # README.md, --num-prompts of all online commands
SHARED_PREFIX = "generated-shared-prefix"
SHARED_PREFIX_LENGTHS = (2000 + 1200, 800)  # README.md: --gsp-system-prompt-len, -question-len, -output-len
LATENCIES = {"e2e_latency": "e2e", "ttft": "ttft", "tpot": "tpot", "itl": "itl"}
TABLE = {"model": "deepseek-ai/DeepSeek-R1", "nodes": 1}


def online(draft: Draft) -> None:
    load, row = draft.load, draft.row
    if draft.value("concurrency") is None:
        message = "no concurrency: whether the row is shifted, and p99 of itl its p95, cannot be told"
        row.find("column_shift", "suspect", message)
    dataset = load["dataset"]
    lengths = (row.number("random_input_len"), row.number("random_output_len"))
    if dataset == "random" and (ratio := row.number("random_range_ratio")) is not None:
        load["range_ratio"] = ratio
        lengths = (mean_of_range(lengths[0], ratio), mean_of_range(lengths[1], ratio))
    notes = [f"num_prompts {ONLINE_PROMPTS} from dstack's command"]
    if dataset == SHARED_PREFIX:
        requested = " / ".join("none" if length is None else f"{length:g}" for length in lengths)
        into, out = lengths = SHARED_PREFIX_LENGTHS
        notes.insert(
            0, f"input and output length {into} / {out} from dstack's command: random_input_len / "
            f"random_output_len ({requested}) are defaults that {SHARED_PREFIX} does not use",
        )  # fmt: skip
    load |= {"input_len": lengths[0], "output_len": lengths[1], "prefix_cached": dataset == SHARED_PREFIX}
    _unshift(draft)
    _machine(draft)
    draft.notes += notes


def offline(draft: Draft) -> None:
    """Of throughput the table has requests and total tokens only; that of output tokens is derived."""
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
    row, about = draft.row, draft.about
    gpu, backend = row.text("GPU"), row.text("backend")
    about["hardware"], about["engine"] = HARDWARE.get(gpu.lower(), gpu), ENGINES.get(backend, backend)
    about["version"] = VERSIONS.get((about["hardware"], about["engine"]), "")
    about["gpus"] = GPUS if gpu.lower() in HARDWARE else None
    draft.notes.append(f"model, {GPUS} GPUs on one node and the engine's version are from dstack's README")
    if gpu.lower() == "mi300":
        draft.notes.append("GPU mi300 read as MI300X: the README has no other")
    if gpu.lower() not in HARDWARE or backend not in ENGINES:
        row.find("unknown_name", "suspect", f"GPU {gpu!r} or backend {backend!r} is none of dstack's")


def _unshift(draft: Draft) -> None:
    """Moves ITL's p95 and p99 to where they belong if the row is shifted.

    The client that wrote the TensorRT-LLM rows has `p95_itl_ms` before `p99_itl_ms`, the table's header has
    not: so p95 stands under `p99_itl_ms`, p99 under `concurrency`, and concurrency is lost. A row is shifted
    if its concurrency is neither within the client's limit nor what Little's law gives, while the latter is
    within the limit, and if it could be a p99 of ITL above the p95 beside it.
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
    numbers = {"concurrency": stated, "limit": limit, "follows": follows, "p99_itl_ms": last}
    draft.row.find("column_shift", "wrong", message, **numbers)
    draft.notes.append(
        f"repaired: p99_itl_ms {last:g} taken as p95 of itl, concurrency {stated:g} as its p99; "
        f"the true concurrency is lost, {follows:.5g} derived by Little's law"
    )


ONLINE = (
    "GPU", "backend", "dataset_name", "max_concurrency", "random_input_len", "random_output_len", "duration",
    "completed", "total_input_tokens", "total_output_tokens", "request_throughput", "input_throughput",
    "output_throughput", "concurrency",
)  # fmt: skip
OFFLINE = (
    "GPU", "backend", "input_len", "output_len", "elapsed_time", "num_requests", "total_num_tokens",
    "requests_per_second", "tokens_per_second", "total_output_tokens", "total_input_tokens",
)  # fmt: skip
STATISTICS = ("mean", "median", "std", "p99")
ALL_ONLINE = frozenset({*ONLINE, *(f"{statistic}_{key}_ms" for key in LATENCIES for statistic in STATISTICS)})
FORMATS = (
    Format(
        name="dstack.online", own=ALL_ONLINE, at_least=len(ALL_ONLINE) // 2 + 1, needs=frozenset({"GPU"}),
        complete=True, fixed=TABLE | {"mode": "online"},
        metrics=(
            One("request_throughput", "request_throughput", "req/s", scope="node"),
            *rates("node", input_throughput="input", output_throughput="output"),
            Latencies(LATENCIES),
            One("concurrency", "concurrency", "1", statistic="mean", scope="node"),
        ),
        load={"dataset": "dataset_name", "concurrency": "max_concurrency", "request_rate": "request_rate"},
        fixed_load={"num_prompts": ONLINE_PROMPTS},
        totals={name: key for name, key in COUNTS.items() if name != "failed"}, odd=online,
    ),
    Format(
        name="dstack.offline", own=frozenset(OFFLINE), at_least=len(OFFLINE) // 2 + 1,
        needs=frozenset({"GPU"}), complete=True, fixed=TABLE | {"mode": "offline"},
        metrics=(
            One("requests_per_second", "request_throughput", "req/s", scope="node"),
            *rates("node", tokens_per_second="total"),
        ),
        load={"input_len": "input_len", "output_len": "output_len", "num_prompts": "num_requests"},
        fixed_load={"request_rate": 0.0},
        totals=COUNTS | {"duration_s": "elapsed_time", "completed": "num_requests"}, odd=offline,
    ),
)  # fmt: skip
