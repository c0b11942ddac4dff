"""Rules over the runs of one document or file: what their numbers are not, though they look like it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from harness.serving.audit.corpus import (
    Audited,
    Corpus,
    found,
    load_of,
    sweeps,
    throughput,
    tokens_per_request,
    tokens_per_slot,
)
from harness.serving.rules.common import EXACT, apart, whole
from harness.serving.schema import Finding, ServingRun

FALLS = 0.9
SHORT_S = 30.0
FULL = 0.6
CHUNKED = 1.5
ONE_ANSWER = 1024  # tokens; a sustained run gives each slot many answers
RISES = 1.2
COUNTED = 1.05
SERVED = 0.95


def throughput_falls(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """More requests in flight cannot make an engine slower by a tenth unless something else changed: a
    preempted batch, another path, a disturbed run. Such a point is explained before it is quoted."""
    for sweep in sweeps(audited.runs):
        points = [(load_of(run), value.value, run.id) for run in sweep if (value := throughput(run))]
        drops = [
            (after[1] / before[1], i)
            for i, (before, after) in enumerate(pairwise(points))
            if after[0] > before[0] and 0 < before[1] and after[1] < FALLS * before[1]
        ]
        if not drops:
            continue
        share, i = min(drops)
        around = points[i : i + 3]
        shown = ", ".join(f"{value:,.6g} tok/s at {load:g}" for load, value, _ in around)
        kind = "prompts at once" if sweep[0].mode == "offline" else "in flight"
        yield found(
            "throughput_falls",
            "suspect",
            f"throughput falls by {1 - share:.0%} as load rises: {shown} {kind}",
            [name for _, _, name in around],
            before=around[0][1],
            after=around[1][1],
            load=around[1][0],
        )


def output_lengths_differ(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """Points of one curve over load are of one workload. Shorter answers end earlier, cost less attention,
    and leave a batch that was never as full as the column says."""
    for sweep in sweeps(audited.runs):
        of, lengths = "a request", {run.id: n for run in sweep if (n := tokens_per_request(run))}
        if not lengths:
            of, lengths = "a request in flight", {run.id: n for run in sweep if (n := tokens_per_slot(run))}
        if lengths and max(lengths.values()) > 1.1 * min(lengths.values()):
            points = ((load_of(run), lengths[run.id]) for run in sweep if run.id in lengths)
            shown = ", ".join(f"{each:.4g} at {load:g}" for load, each in points)
            yield found(
                "output_lengths_differ",
                "suspect",
                f"one table, unequal answers: tokens {of} {shown}",
                list(lengths),
                shortest=min(lengths.values()),
                longest=max(lengths.values()),
            )


def single_wave(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """With no more requests than fit in flight, all start together and the batch only shrinks: the ramp and
    the tail are in the number, a steady state is not."""
    for sweep in sweeps([run for run in audited.runs if run.mode != "offline"]):
        known = {run.id: n for run in sweep if (n := _requests(run))}
        ones = [run for run in sweep if run.id in known and known[run.id] <= 1.01 * load_of(run)]
        if ones:
            shown = ", ".join(f"{known[run.id]:.4g} at {load_of(run):g}" for run in ones)
            text = f"one wave, no steady state: requests {shown} in flight"
        else:
            each = {run.id: n for run in sweep if run.id not in known and (n := tokens_per_slot(run))}
            ones = [run for run in sweep if run.id in each and each[run.id] <= ONE_ANSWER]
            text = (
                (
                    f"a request in flight gave {min(each.values()):.4g} to {max(each.values()):.4g} tokens: "
                    "one answer each, or shorter ones still; no steady state"
                )
                if ones
                else ""
            )
        if ones:
            yield found("single_wave", "suspect", text, [run.id for run in ones], runs=len(ones))


def _requests(run: ServingRun) -> float | None:
    """All that were sent; unknown where the client counts a window's alone."""
    trimmed = run.workload.warmup_s or run.workload.cooldown_s
    return run.workload.num_prompts or (None if trimmed else run.totals.completed)


def short_run(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A few seconds are ramp-up and tail; a pause of half a second is some percent of the number."""
    short = [
        run
        for run in audited.runs
        if run.mode != "offline" and (took := run.totals.duration_s) and took < SHORT_S and throughput(run)
    ]
    if short:
        best = max(short, key=lambda run: throughput(run).value)
        took = [run.totals.duration_s for run in short]
        yield found(
            "short_run",
            "suspect",
            f"{len(short)} of {len(audited.runs)} runs took under {SHORT_S:g} s "
            f"({min(took):g} to {max(took):g}); the fastest of them, {throughput(best).value:,.6g} tok/s, "
            f"{best.totals.duration_s:g} s",
            [run.id for run in short],
            shortest_s=min(took),
            fastest_s=best.totals.duration_s,
        )


def tokens_over_time(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A table's tokens over its seconds are its throughput, within what its digits say."""
    for run in audited.runs:
        tokens, took, out = run.value("tokens"), run.totals.duration_s, throughput(run)
        if tokens and took and out and apart(out.value, tokens / took, took) > EXACT:
            yield found(
                "tokens_over_time",
                "wrong",
                f"{run.id}: {tokens:,.6g} tokens in {took:g} s are {tokens / took:,.6g} tok/s, "
                f"not {out.value:,.6g}",
                [run.id],
                stated=out.value,
                recomputed=tokens / took,
            )


def rate_of_a_request_rises(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """Alone a request is served fastest. Where each of several is served faster than one alone, the first
    was measured cold: compiling, capturing graphs, filling caches."""
    for sweep in sweeps(audited.runs):
        rates = [
            (run, m.value / load_of(run)) for run in sweep if (m := throughput(run)) and run.mode != "offline"
        ]
        if not rates:
            continue
        first, alone = rates[0]
        best, rate = max(rates, key=lambda pair: pair[1])
        if rate > RISES * alone:
            yield found(
                "rate_of_a_request_rises",
                "suspect",
                f"a request alone gets less than one of many: {alone:.4g} tok/s at {load_of(first):g} in "
                f"flight, {rate:.4g} each at {load_of(best):g}; the first is likely cold",
                [first.id, best.id],
                alone=alone,
                among_many=rate,
            )


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
        batch, asked = decoding_batch(run), run.workload.concurrency
        if batch and asked and batch < FULL * asked:
            ttft, tpot = run.value("ttft", "mean"), run.value("tpot", "mean")
            yield found(
                "batch_below_concurrency",
                "suspect",
                f"{run.id}: {asked:g} in flight, but {_few(batch)} decode at a time "
                f"({run.value('throughput', tokens='output'):,.6g} output tok/s x {tpot:.4g} ms)"
                + (
                    f"; the others wait ({ttft / 1e3:.3g} s to the first token) or have ended" if ttft else ""
                ),
                [run.id],
                concurrency=asked,
                batch=batch,
                tpot_ms=tpot,
            )


def counted_in_a_window(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A client that leaves a warm-up and a cool-down out may count requests that lie wholly inside what is
    left, and the tokens of all: then requests, input tokens and the total throughput are too few by
    what its output tokens, over the length asked for, say."""
    for run in audited.runs:
        counted, asked = run.totals, run.workload
        if not counted.completed or not counted.output_tokens or not asked.output_len:
            continue
        each = counted.output_tokens / counted.completed
        if each <= COUNTED * asked.output_len:
            continue
        sent = f" of {asked.num_prompts:,} sent" if asked.num_prompts else ""
        requests = counted.output_tokens / asked.output_len
        text = (
            f"{run.id}: {counted.completed:,} requests counted{sent}, with {counted.output_tokens:,} output "
            f"tokens: {each:,.5g} each where {asked.output_len:g} were asked for; the tokens are of about "
            f"{requests:,.0f}"
        )
        total = run.value("throughput", tokens="total")
        out = run.value("throughput", tokens="output")
        true = out * (1 + asked.input_len / asked.output_len) if out and asked.input_len else None
        if total and true and total < 0.95 * true:
            text += f"; its total, {total:,.6g} tok/s, lacks input tokens: with all about {true:,.6g}"
        yield found(
            "counted_in_a_window",
            "wrong",
            text,
            [run.id],
            counted=counted.completed,
            sent=asked.num_prompts,
            tokens_each=each,
            asked=asked.output_len,
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
                yield found(
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
            yield found(
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
        about = [claim.id for claim in stated if run.id in {one.id for one in corpus.runs_of(claim)}]
        yield found(
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
    throughput_falls,
    output_lengths_differ,
    single_wave,
    short_run,
    tokens_over_time,
    rate_of_a_request_rises,
    batch_below_concurrency,
    counted_in_a_window,
    itl_beside_tpot,
    rate_not_served,
    prefill_left_out,
)
