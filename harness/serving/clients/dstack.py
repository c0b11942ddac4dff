"""`dstack.online`, `dstack.offline`: the two tables behind dstack's DeepSeek-R1 articles of March 2025.

Read beside github.com/dstackai/benchmarks, branch deepseek-r1-benchmark: README.md (hardware, versions,
client commands) and the client scripts. The online table is SGLang's bench_serving; the offline one is
vLLM's benchmark_throughput.py, whose `tokens_per_second` counts input and output.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.serving.clients.common import mean_of_range
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document, UnreadableError
from harness.serving.integrity.common import MARGIN
from harness.serving.integrity.latencies import quantile_limits
from harness.serving.schema import Finding, Metric, Mode, OfferedLoad, Scope, ServingRun, Tokens, Totals

NAME = "dstack"
MODEL = "deepseek-ai/DeepSeek-R1"
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
STATISTICS = ("mean", "median", "std", "p99")
ONLINE = (
    *("GPU", "backend", "dataset_name", "max_concurrency", "random_input_len", "random_output_len"),
    *("duration", "completed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "input_throughput", "output_throughput"),
    *(f"{statistic}_{key}_ms" for key in LATENCIES for statistic in STATISTICS),
    "concurrency",
)
OFFLINE = (
    *("GPU", "backend", "input_len", "output_len", "elapsed_time", "num_requests", "total_num_tokens"),
    *("requests_per_second", "tokens_per_second", "total_output_tokens", "total_input_tokens"),
)


def recognises(document: Document) -> bool:
    return document.kind == "csv" and _table(document) is not None


def _table(document: Document) -> tuple[str, ...] | None:
    """The columns of the table that it has more than half of; SGLang's own results have no GPU."""
    header = set(document.header)
    return next(
        (
            columns
            for columns in (ONLINE, OFFLINE)
            if "GPU" in header and len(header & set(columns)) > len(columns) / 2
        ),
        None,
    )


def runs(document: Document) -> list[ServingRun]:
    table = _table(document)
    assert table is not None, "recognised"
    lacking = [name for name in table if name not in document.header]
    if lacking:
        raise UnreadableError(f"cannot read {document.path} as {NAME}: it has no column {', '.join(lacking)}")
    reader = _online if table is ONLINE else _offline
    return [reader(Fields(f"{document.path}:{line}", row, as_text=True)) for line, row in document.content]


def _online(row: Fields) -> ServingRun:
    metrics = [*_throughputs(row, ("input", "output")), *_latencies(row)]
    concurrency = row.number("concurrency")
    if concurrency is not None:
        metrics.append(_metric("concurrency", concurrency, "1", statistic="mean"))
    else:
        message = "no concurrency: whether the row is shifted, and p99 of itl its p95, cannot be told"
        row.findings.append(Finding(rule="column_shift", severity="suspect", message=message))
    limit, dataset = row.number("max_concurrency"), row.text("dataset_name")
    lengths = (row.number("random_input_len"), row.number("random_output_len"))
    ratio = row.number("random_range_ratio") if dataset == "random" else None
    if ratio is not None:
        lengths = (mean_of_range(lengths[0], ratio), mean_of_range(lengths[1], ratio))
    notes = []
    if dataset == SHARED_PREFIX:
        requested = " / ".join("none" if length is None else f"{length:g}" for length in lengths)
        notes.append(
            "input and output length {} / {} from dstack's command: ".format(*SHARED_PREFIX_LENGTHS)
            + f"random_input_len / random_output_len ({requested}) are defaults that {SHARED_PREFIX} does "
            "not use"
        )
        lengths = SHARED_PREFIX_LENGTHS
    run = _base(row, "online").model_copy(
        update={
            "workload": OfferedLoad(
                dataset=dataset,
                input_len=lengths[0],
                output_len=lengths[1],
                range_ratio=ratio,
                concurrency=limit,
                request_rate=row.number("request_rate", infinite=0.0),
                num_prompts=ONLINE_PROMPTS,
                prefix_cached=dataset == SHARED_PREFIX,
            ),
            "totals": Totals(
                duration_s=row.number("duration"),
                completed=row.count("completed"),
                input_tokens=row.count("total_input_tokens"),
                output_tokens=row.count("total_output_tokens"),
            ),
            "metrics": tuple(metrics),
        }
    )
    return _finished(_unshifted(run), row, [*notes, f"num_prompts {ONLINE_PROMPTS} from dstack's command"])


def _offline(row: Fields) -> ServingRun:
    """Of throughput the table has requests and total tokens only; that of output tokens is derived."""
    totals = Totals(
        duration_s=row.number("elapsed_time"),
        completed=row.count("num_requests"),
        input_tokens=row.count("total_input_tokens"),
        output_tokens=row.count("total_output_tokens"),
    )
    metrics = []
    if (value := row.number("requests_per_second")) is not None:
        metrics.append(_metric("request_throughput", value, "req/s"))
    if (value := row.number("tokens_per_second")) is not None:
        metrics.append(_metric("throughput", value, "tok/s", tokens="total"))
    if totals.output_tokens is not None and totals.duration_s:
        value = totals.output_tokens / totals.duration_s
        derived = "total_output_tokens / elapsed_time"
        metrics.append(_metric("throughput", value, "tok/s", tokens="output", derived=derived))
    total, into, out = row.count("total_num_tokens"), totals.input_tokens, totals.output_tokens
    if total is not None and into is not None and out is not None and total != into + out:
        message = f"total_num_tokens is {total}, but input {into} and output {out} make {into + out}"
        row.findings.append(Finding(rule="total_tokens", severity="wrong", message=message))
    run = _base(row, "offline").model_copy(
        update={
            "workload": OfferedLoad(
                input_len=row.number("input_len"),
                output_len=row.number("output_len"),
                num_prompts=totals.completed,
                request_rate=0.0,
            ),
            "totals": totals,
            "metrics": tuple(metrics),
        }
    )
    return _finished(run, row, [])


def _base(row: Fields, mode: Mode) -> ServingRun:
    gpu, backend = row.text("GPU"), row.text("backend")
    hardware, engine = HARDWARE.get(gpu.lower(), gpu), ENGINES.get(backend, backend)
    return ServingRun(
        id=row.where,
        client=f"{NAME}.{mode}",
        source=row.where,
        model=MODEL,
        hardware=hardware,
        gpus=GPUS if gpu.lower() in HARDWARE else None,
        nodes=1,
        engine=engine,
        version=VERSIONS.get((hardware, engine), ""),
        mode=mode,
    )


def _finished(run: ServingRun, row: Fields, notes: list[str]) -> ServingRun:
    taken = f"model, {GPUS} GPUs on one node and the engine's version are from dstack's README"
    if row.text("GPU").lower() == "mi300":
        notes.append("GPU mi300 read as MI300X: the README has no other")
    unknown = row.text("GPU").lower() not in HARDWARE or row.text("backend") not in ENGINES
    if unknown:
        message = f"GPU {row.text('GPU')!r} or backend {row.text('backend')!r} is none of dstack's"
        row.findings.append(Finding(rule="unknown_name", severity="suspect", message=message))
    return run.model_copy(
        update={
            "notes": (*run.notes, taken, *notes),
            "findings": (*row.findings, *run.findings),
            "extra": row.rest(),
        }
    )


def _unshifted(run: ServingRun) -> ServingRun:
    """The run, with ITL's p95 and p99 moved to where they belong if its row is shifted.

    The client that wrote the TensorRT-LLM rows has `p95_itl_ms` before `p99_itl_ms`, the table's header has
    not: so p95 stands under `p99_itl_ms`, p99 under `concurrency`, and concurrency is lost. A row is shifted
    if its concurrency is neither within the client's limit nor what Little's law gives, while the latter is
    within the limit, and if it could be a p99 of ITL above the p95 beside it.
    """
    limit, stated = run.workload.concurrency, run.value("concurrency")
    rate, e2e = run.value("request_throughput"), run.value("e2e", "mean")
    mean, std, last = (run.value("itl", statistic) for statistic in ("mean", "std", "p99"))
    if limit is None or stated is None or rate is None or e2e is None:
        return run
    if mean is None or std is None or last is None:
        return run
    follows = rate * e2e / 1e3
    fits_a_p99 = last <= stated <= quantile_limits(mean, std, 0.99)[1]
    if stated <= limit * (1 + MARGIN) or not limit / 2 <= follows <= limit * (1 + MARGIN) or not fits_a_p99:
        return run
    kept = [
        metric
        for metric in run.metrics
        if metric.name != "concurrency" and (metric.name, metric.statistic) != ("itl", "p99")
    ]
    moved = [
        _metric("itl", last, "ms", scope="request", statistic="p95"),
        _metric("itl", stated, "ms", scope="request", statistic="p99"),
        _metric(
            "concurrency", follows, "1", statistic="mean", derived="request_throughput x mean_e2e_latency_ms"
        ),
    ]
    finding = Finding(
        rule="column_shift",
        severity="wrong",
        message=f"columns are shifted: concurrency {stated:g} is above the limit of {limit:g}; by "
        f"Little's law it is {rate:.6g} req/s x {e2e:.6g} ms = {follows:.5g}. It holds "
        f"p99 of itl, and p99_itl_ms {last:g} is p95",
        numbers={"concurrency": stated, "limit": limit, "follows": follows, "p99_itl_ms": last},
    )
    note = (
        f"repaired: p99_itl_ms {last:g} taken as p95 of itl, concurrency {stated:g} as its p99; "
        f"the true concurrency is lost, {follows:.5g} derived by Little's law"
    )
    return run.model_copy(
        update={"metrics": (*kept, *moved), "findings": (*run.findings, finding), "notes": (*run.notes, note)}
    )


def _throughputs(row: Fields, kinds: tuple[Tokens, ...]) -> Iterator[Metric]:
    if (value := row.number("request_throughput")) is not None:
        yield _metric("request_throughput", value, "req/s")
    for kind in kinds:
        if (value := row.number(f"{kind}_throughput")) is not None:
            yield _metric("throughput", value, "tok/s", tokens=kind)


def _latencies(row: Fields) -> Iterator[Metric]:
    for key, name in LATENCIES.items():
        for statistic in STATISTICS:
            if (value := row.number(f"{statistic}_{key}_ms")) is not None:
                yield _metric(name, value, "ms", scope="request", statistic=statistic)


def _metric(
    name: str,
    value: float,
    unit: str,
    *,
    scope: Scope = "node",
    tokens: Tokens = "none",
    statistic: str = "total",
    derived: str = "",
) -> Metric:
    return Metric(
        name=name, value=value, unit=unit, scope=scope, tokens=tokens, statistic=statistic, derived=derived
    )
