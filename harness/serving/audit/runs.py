"""Rules over what a number of a single run is of: which batch, window, tokens and GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from harness.serving.audit.corpus import Audited, Corpus, new_finding, tokens_per_request
from harness.serving.integrity.common import whole
from harness.serving.schema import Finding, ServingRun

FULL = 0.6
CHUNKED = 1.5
COUNTED = 1.05
SERVED = 0.95


def decoding_batch(run: ServingRun) -> float | None:
    """Requests that decode at a time, by Little's law over decode alone: output tokens per second times TPOT
    (of the tokens after the first)."""
    out, tpot, length = (
        run.metric("throughput", tokens="output"),
        run.value("tpot", "mean"),
        tokens_per_request(run),
    )
    rate = whole(run, out) if out else None
    return rate * (length - 1) / length * tpot / 1e3 if rate and tpot and length else None


def _few(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def batch_below_concurrency(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """`concurrency 128` is what the client allows. Requests that queue or prefill do not decode: the TPOT
    beside it is that of a smaller batch, and no TPOT at 128."""
    for run in audited.runs:
        batch, concurrency = decoding_batch(run), run.workload.concurrency
        if batch and concurrency and batch < FULL * concurrency:
            ttft, tpot = run.value("ttft", "mean"), run.value("tpot", "mean")
            yield new_finding(
                "batch_below_concurrency",
                "suspect",
                f"{run.id}: {concurrency:g} in flight, but {_few(batch)} decode at a time "
                f"({run.value('throughput', tokens='output'):,.6g} output tok/s x {tpot:.4g} ms)"
                + (
                    f"; the others wait ({ttft / 1e3:.3g} s to the first token) or have ended" if ttft else ""
                ),
                [run.id],
                concurrency=concurrency,
                batch=batch,
                tpot_ms=tpot,
            )


def counted_in_a_window(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A client that leaves a warm-up and a cool-down out may count requests that lie wholly inside what is
    left, and the tokens of all: then requests, input tokens and the total throughput are too few by
    what its output tokens, over the length asked for, say."""
    for run in audited.runs:
        counted, load = run.totals, run.workload
        if not counted.completed or not counted.output_tokens or not load.output_len:
            continue
        each = counted.output_tokens / counted.completed
        if each <= COUNTED * load.output_len:
            continue
        sent = f" of {load.num_prompts:,} sent" if load.num_prompts else ""
        requests = counted.output_tokens / load.output_len
        text = (
            f"{run.id}: {counted.completed:,} requests counted{sent}, with {counted.output_tokens:,} output "
            f"tokens: {each:,.5g} each where {load.output_len:g} were asked for; the tokens are of about "
            f"{requests:,.0f}"
        )
        total = run.value("throughput", tokens="total")
        out = run.value("throughput", tokens="output")
        true = out * (1 + load.input_len / load.output_len) if out and load.input_len else None
        if total and true and total < 0.95 * true:
            text += f"; its total, {total:,.6g} tok/s, lacks input tokens: with all about {true:,.6g}"
        yield new_finding(
            "counted_in_a_window",
            "wrong",
            text,
            [run.id],
            counted=counted.completed,
            sent=load.num_prompts,
            tokens_each=each,
            asked=load.output_len,
            total=total,
            total_with_all_input=true,
        )


def itl_beside_tpot(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A server that streams every tenth token has gaps between chunks, not tokens: its inter-token latency
    is ten times its time per output token, and beside another's looks ten times slower."""
    for run in audited.runs:
        for statistic in ("mean", "median"):
            itl, tpot = run.value("itl", statistic), run.value("tpot", statistic)
            if itl and tpot and itl > CHUNKED * tpot:
                yield new_finding(
                    "itl_beside_tpot",
                    "suspect",
                    f"{run.id}: ITL {itl:g} ms is {itl / tpot:.3g} times TPOT {tpot:g} ms: chunks of about "
                    f"{itl / tpot:.0f} tokens; not another's ITL, nor TPOT",
                    [run.id],
                    itl_ms=itl,
                    tpot_ms=tpot,
                    ratio=itl / tpot,
                )
                break


def rate_not_served(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """Where the server finishes fewer requests a second than are offered, the limit of requests in flight
    is what runs: the rate in the command is no property of the result."""
    for run in audited.runs:
        offered, length = run.workload.request_rate, run.workload.output_len
        out = run.value("throughput", tokens="output")
        served = run.value("request_throughput") or (out / length if out and length else None)
        if offered and served and served < SERVED * offered:
            yield new_finding(
                "rate_not_served",
                "note",
                f"{run.id}: {offered:g} requests a second offered, {served:.4g} served",
                [run.id],
                offered=offered,
                served=served,
            )


def prefill_left_out(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """Tokens over decode nodes alone leave out the GPUs that prefill, without which none of them would be:
    beside an aggregated server's number they flatter by all nodes over decode nodes."""
    stated = [c for c in audited.claims if c.metric and c.metric.scope == "decode_node" and c.kind != "cited"]
    for run in audited.runs:
        split, out = run.parallelism, run.metric("throughput", tokens="output")
        if not (out and split.prefill_gpus and split.decode_gpus and out.scope in ("cluster", "instance")):
            continue
        gpus = run.gpus or split.prefill_gpus + split.decode_gpus
        nodes = split.decode_gpus * run.nodes / gpus if run.nodes else None
        decode = f"{out.value / nodes:,.5g} a decode node, " if nodes else ""
        about = [claim.id for claim in stated if run.id in {source.id for source in corpus.runs_of(claim)}]
        yield new_finding(
            "prefill_left_out",
            "wrong" if about else "note",
            f"{run.id}: {out.value:,.6g} output tok/s are {decode}{out.value / split.decode_gpus:,.5g} a "
            f"decode GPU, but {out.value / gpus:,.5g} a GPU over all {gpus}, "
            f"{split.prefill_gpus} of prefill with them",
            [run.id, *about],
            per_gpu=out.value / gpus,
            per_decode_gpu=out.value / split.decode_gpus,
            per_decode_node=out.value / nodes if nodes else None,
            gpus=gpus,
        )


RULES = (
    batch_below_concurrency,
    counted_in_a_window,
    itl_beside_tpot,
    rate_not_served,
    prefill_left_out,
)
