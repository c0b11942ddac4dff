"""Rules over what documents claim, held against the rows and claims that it rests on."""

from __future__ import annotations

import re
from collections.abc import Iterator

from harness.serving.audit.corpus import Audited, Corpus, found, printed, same_engine, same_hardware, throughput
from harness.serving.schema import Finding, Metric, ServingRun
from harness.serving.documents import Claim

APART = 1.5  # two rates of a single request of one setup
PEAKS = 1.05
MEMORY = 2**30 / 1e9
SUPERLATIVE = re.compile(r"\b(highest|peak|max(imum)?|best)\b", re.IGNORECASE)


def is_throughput(metric: Metric | None) -> bool:
    return metric is not None and metric.unit == "tok/s"


def row_of(claim: Claim, corpus: Corpus) -> tuple[ServingRun, str] | None:
    """The run whose throughput a claim prints, and of which tokens; None where none or several shapes fit."""
    if not is_throughput(claim.metric) or claim.upper is not None:
        return None
    named = corpus.runs_of(claim)
    fits = []
    for run in named or corpus.rows.values():
        if not named and not (_fits(claim.hardware, run.hardware, same_hardware)
                              and _fits(claim.engine, run.engine, same_engine)):  # fmt: skip
            continue
        fits += [(run, kind) for kind, value in by_kind(run).items() if printed(claim.metric.value, value)]
    fits = list({(run.id, kind): (run, kind) for run, kind in fits}.values())
    return fits[0] if len(fits) == 1 else None


def _fits(said: str, of_run: str, same) -> bool:
    """A claim that does not say is not matched: any number is some row's."""
    return bool(said and of_run) and same(said, of_run)


def by_kind(run: ServingRun) -> dict[str, float]:
    """Its tokens per second by kind; total and output follow from each other and the input's, or from what
    was counted, where the client gives one alone."""
    kinds = {m.tokens: m.value for m in reversed(run.metrics) if m.name == "throughput" and m.unit == "tok/s"}
    counted = run.totals
    if counted.duration_s:
        for kind, tokens in (("output", counted.output_tokens), ("input", counted.input_tokens)):
            if tokens:
                kinds.setdefault(kind, tokens / counted.duration_s)
    if "input" in kinds and "output" in kinds:
        kinds.setdefault("total", kinds["input"] + kinds["output"])
    return {kind: value for kind, value in kinds.items() if kind in ("output", "total", "unknown")}


def total_read_as_output(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """Tokens per second of input and output together are several times those of output alone. A number that
    does not say of which is found among the rows of its hardware and engine."""
    for claim in audited.claims:
        if claim.metric is None or claim.metric.tokens in ("total", "input"):
            continue
        match = row_of(claim, corpus)
        if match and match[1] == "total":
            run, kinds = match[0], by_kind(match[0])
            if "output" not in kinds:
                continue
            into, out, whole = kinds["total"] - kinds["output"], kinds["output"], kinds["total"]
            said = "says output" if claim.metric.tokens == "output" else "does not say of which tokens"
            yield found(
                "total-read-as-output", "wrong" if claim.metric.tokens == "output" else "suspect",
                f"{claim.metric.value:,.6g} tok/s {said}: {run.id} has {into:,.6g} in + {out:,.6g} out = "
                f"{whole:,.6g}; output alone is {out:,.6g}, {whole / out:.3g} times less",
                [claim.id, run.id], claimed=claim.metric.value, input=into, output=out, total=whole,
            )  # fmt: skip


def recomputed(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A number that says what it rests on is computed again from it."""
    for claim in audited.claims:
        if claim.metric is None or not claim.refers_to:
            continue
        values = from_rows(claim, corpus) or from_claims(claim, corpus)
        if not values:
            continue
        about = claim.bound in ("about", "between")
        ends = [(claim.metric.value, min), (claim.upper, max)] if claim.upper is not None else []
        if not ends:
            ends = [(claim.metric.value, None)]
        held, shown = True, []
        for said, end in ends:
            true = end(values.values()) if end else min(values.values(), key=lambda v: abs(v - said))
            how = next(name for name, value in values.items() if value == true)
            held &= printed(said, true, about=about or end is not None)
            shown.append(f"{said:,.6g} is {true:,.6g} ({how})")
        verdict = "holds" if held else "does not hold"
        yield found(
            "recomputed", "note" if held else "wrong", f"{claim.id} {verdict}: {'; '.join(shown)}",
            [claim.id, *claim.refers_to], claimed=claim.metric.value, recomputed=true, holds=held,
        )  # fmt: skip


def from_rows(claim: Claim, corpus: Corpus) -> dict[str, float]:
    """The claim's quantity from each run that it names: how it came -> value."""
    values: dict[str, float] = {}
    for run in corpus.runs_of(claim):
        if is_throughput(claim.metric):
            kinds = by_kind(run)
            wanted = [claim.metric.tokens] if claim.metric.tokens in kinds else list(kinds)
            for kind in wanted:
                if (share := _share(claim.metric.scope, run)) is not None:
                    values[f"{kind} tokens of {run.id}{share[1]}"] = kinds[kind] * share[0]
        elif one := run.metric(claim.metric.name, "" if claim.metric.statistic == "total" else claim.metric.statistic):
            values[f"{one.statistic} {one.name} of {run.id}"] = one.value * _factor(one.unit, claim.metric.unit)
    return values


def _factor(unit: str, wanted: str) -> float:
    return {("ms", "s"): 1e-3, ("s", "ms"): 1e3}.get((unit, wanted), 1.0)


def _share(scope: str, run: ServingRun) -> tuple[float, str] | None:
    if scope == "gpu":
        return (1 / run.gpus, f" / {run.gpus}") if run.gpus else None
    if scope == "decode_node":
        decode = run.parallelism.decode_gpus
        nodes = decode * run.nodes / run.gpus if decode and run.nodes and run.gpus else None
        return (1 / nodes, f" / {nodes:g}") if nodes else None
    return 1.0, ""


def from_claims(claim: Claim, corpus: Corpus) -> dict[str, float]:
    """The claim's quantity from the claims that it names: a share of a GPU, a rate from a latency, a ratio of
    two."""
    others = [one for one in corpus.claims_of(claim) if one.metric]
    values: dict[str, float] = {}
    for one in others:
        gpus = one.gpus or claim.gpus
        if is_throughput(claim.metric) and is_throughput(one.metric):
            if claim.metric.scope == "gpu" and one.metric.scope != "gpu":
                if gpus:
                    values[f"{one.id} / {gpus}"] = one.metric.value / gpus
            else:
                values[one.id] = one.metric.value
        length = one.workload.output_len or claim.workload.output_len
        if is_throughput(claim.metric) and one.metric.unit in ("s", "ms") and length:
            seconds = one.metric.value * _factor(one.metric.unit, "s")
            values[f"{length:g} tokens / {seconds:g} s"] = length / seconds
    alike = [one for one in others if is_throughput(one.metric)]
    if claim.metric.unit in ("1", "%") and len(alike) == 2 and alike[0].metric.scope == alike[1].metric.scope:
        scale = 100.0 if claim.metric.unit == "%" else 1.0
        values[f"{alike[0].id} / {alike[1].id}"] = scale * alike[0].metric.value / alike[1].metric.value
    return values


def single_request_differs(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """One setup serves a lone request at one speed. Two that lie far apart are of a cold and of a warm server,
    and only one of them is the setup's."""
    rates: dict[str, tuple[float, str]] = {}
    for run in audited.runs:
        out = throughput(run)
        if run.workload.concurrency == 1 and out and out.tokens != "total":
            rates[run.id] = (out.value, "at concurrency 1")
    for claim in audited.claims:
        if is_throughput(claim.metric) and claim.kind != "cited" and (
            claim.metric.scope == "request" or claim.workload.concurrency == 1
        ):
            rates.setdefault(claim.id, (claim.metric.value, claim.where))
    if len(rates) > 1:
        slow, fast = min(rates, key=rates.get), max(rates, key=rates.get)
        if rates[fast][0] > APART * rates[slow][0]:
            yield found(
                "single-request-differs", "wrong",
                f"a single request gets {rates[slow][0]:g} tok/s ({rates[slow][1]}) and {rates[fast][0]:g} tok/s "
                f"({rates[fast][1]}), {rates[fast][0] / rates[slow][0]:.2g} times as many: one cold, one warm",
                [slow, fast], slow=rates[slow][0], fast=rates[fast][0],
            )  # fmt: skip


def peaks_differ(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A client counts whole runs, a server's log windows of its own: their peaks are two quantities."""
    peaks = [
        c for c in audited.claims
        if is_throughput(c.metric) and c.kind in ("measured", "derived")
        and (c.metric.statistic == "max" or re.search(r"\bpeak\b", c.quote, re.IGNORECASE))
        and c.metric.scope not in ("gpu", "request")
    ]  # fmt: skip
    for i, one in enumerate(peaks):
        for other in peaks[i + 1 :]:
            values = one.metric.value, other.metric.value
            if one.where == other.where and max(values) > PEAKS * min(values):
                yield found(
                    "peaks-differ", "suspect",
                    f"two peaks of one setup: {values[0]:,.6g} and {values[1]:,.6g} tok/s, "
                    f"{max(values) / min(values) - 1:.1%} apart: of other windows or counters",
                    [one.id, other.id], first=values[0], second=values[1],
                )  # fmt: skip


def up_to(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """`Up to` is the largest of some cases. Without what it is over, and at which shape, it can be neither
    checked nor applied."""
    for claim in audited.claims:
        ratio = claim.metric is not None and claim.metric.unit in ("1", "x", "%")
        if claim.bound != "up to" and not (ratio and claim.kind == "claim" and not claim.refers_to):
            continue
        shape = claim.workload.input_len or claim.workload.output_len or claim.workload.concurrency
        lacks = [
            name
            for name, there in (
                ("what it is over", claim.baseline or not ratio),
                ("its shape or load", shape),
                ("a number behind it", corpus.runs_of(claim)),
            )
            if not there
        ]
        if lacks:
            value = f"{claim.metric.value:g}" if claim.metric else "?"
            value += f" to {claim.upper:g}" if claim.upper is not None else ""
            unit = "x" if claim.metric and claim.metric.unit == "1" else f" {claim.metric.unit}" if claim.metric else ""
            bound = "up to " if claim.bound == "up to" else ""
            yield found(
                "up-to", "suspect", f"{claim.id}: {bound}{value}{unit} without {', '.join(lacks)}",
                [claim.id], claimed=claim.metric.value if claim.metric else None, lacks=len(lacks),
            )  # fmt: skip


def highest_of_total_alone(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """The highest total throughput need not be the highest output throughput: long prompts give many cheap
    tokens. A superlative over total tokens is held against the output of all rows of its hardware and mode."""
    for claim in audited.claims:
        match = row_of(claim, corpus)
        if not match or match[1] != "total" or not SUPERLATIVE.search(claim.quote):
            continue
        run = match[0]
        rivals = [
            (value, other) for other in {r.id: r for r in corpus.rows.values()}.values()
            if other.client == run.client and other.mode == run.mode
            and same_hardware(other.hardware, run.hardware) and bool(other.workload.prefix_cached) == bool(run.workload.prefix_cached)
            and (value := by_kind(other).get("output"))
        ]  # fmt: skip
        own = by_kind(run).get("output")
        best, other = max(rivals, key=lambda pair: pair[0], default=(0.0, run))
        if own and best > 1.01 * own:
            yield found(
                "highest-of-total-alone", "suspect",
                f"{claim.metric.value:,.6g} tok/s is highest by input and output; by output {run.id} has {own:,.6g} "
                f"and {other.id} ({other.engine}, {other.workload.input_len or 0:g}/{other.workload.output_len or 0:g}) {best:,.6g}",
                [claim.id, run.id, other.id], claimed=claim.metric.value, own_output=own, highest_output=best,
            )  # fmt: skip


def memory_label(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """288 GiB is 309 GB: a label that takes one for the other is 7 % wrong about what fits."""
    sizes = {c.id: c for c in audited.claims if c.metric and c.metric.unit in ("GB", "GiB")}
    for one in sizes.values():
        for other in sizes.values():
            ratio = other.metric.value / one.metric.value if one.metric.value else 0
            if one.metric.unit == other.metric.unit == "GB" and abs(ratio / MEMORY - 1) < 0.003:
                yield found(
                    "memory-label", "wrong",
                    f"one memory is given as {one.metric.value:g} GB and as {other.metric.value:g} GB: "
                    f"{one.metric.value:g} GiB = {one.metric.value * MEMORY:.0f} GB",
                    [one.id, other.id], gib=one.metric.value, gb=other.metric.value,
                )  # fmt: skip


RULES = (total_read_as_output, recomputed, single_request_differs, peaks_differ, up_to, highest_of_total_alone,
         memory_label)  # fmt: skip
