"""Rules over what documents claim, held against the rows and claims that it rests on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations

from harness.serving.audit.corpus import (
    Audited,
    Corpus,
    claimed_metric,
    load_of,
    new_finding,
    same_engine,
    same_hardware,
    throughput,
)
from harness.serving.audit.rows import RATIO, RESULT, by_kind, is_throughput, row_of
from harness.serving.published.documents import Claim
from harness.serving.schema import Finding, OfferedLoad, ServingRun, Severity

APART = 1.5  # two rates of a single request of one setup
PEAKS = 1.05
MEMORY = 2**30 / 1e9
LIMIT = re.compile(r"\b(ITL|TPOT|TTFT)\b\)? below (\d+) ?ms")
OPTIMAL = re.compile(r"\boptim(al|um)\b", re.IGNORECASE)
SUPERLATIVE = re.compile(r"\b(highest|peak|max(imum)?|best)\b", re.IGNORECASE)


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
            # who cites a number without its kind of tokens hands on a wrong one
            severity: Severity = (
                "wrong" if claim.metric.tokens == "output" or claim.kind == "cited" else "suspect"
            )
            statement = "says output" if claim.metric.tokens == "output" else "does not say of which tokens"
            yield new_finding(
                "total_read_as_output",
                severity,
                f"{claim.metric.value:,.6g} tok/s {statement}: {run.id} has {into:,.6g} in + {out:,.6g} out "
                f"= {whole:,.6g}; output alone is {out:,.6g}, {whole / out:.3g} times less",
                [claim.id, run.id],
                claimed=claim.metric.value,
                input=into,
                output=out,
                total=whole,
            )


def single_request_differs(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """One setup serves a lone request at one speed. Two that lie far apart are of a cold and of a warm
    server, and only one of them is the setup's."""
    setups: dict[tuple[str, ...], list[tuple[float, ServingRun | Claim]]] = {}
    for run in audited.runs:
        out = throughput(run)
        if run.workload.concurrency == 1 and out and out.tokens != "total" and out.value > 0:
            setups.setdefault(_setup(run), []).append((out.value, run))
    for claim in audited.claims:
        metric = claim.metric
        if not is_throughput(metric) or claim.kind == "cited":
            continue
        if metric.scope == "request" or claim.workload.concurrency == 1:
            setups.setdefault(_setup(claim), []).append((metric.value, claim))
    for rates in setups.values():
        (slow, first), (fast, second) = (pick(rates, key=lambda rate: rate[0]) for pick in (min, max))
        if fast <= APART * slow or _other_lengths(first.workload, second.workload):
            continue
        yield new_finding(
            "single_request_differs",
            "wrong",
            f"a single request gets {slow:g} tok/s ({first.id}) and {fast:g} ({second.id}), "
            f"{fast / slow:.2g} times as many: likely one cold, one warm",
            [first.id, second.id],
            slow=slow,
            fast=fast,
        )


def _setup(source: ServingRun | Claim) -> tuple[str, ...]:
    if source.configuration:
        return (source.configuration,)
    return source.hardware, source.engine, getattr(source, "version", ""), str(source.gpus)


def _other_lengths(a: OfferedLoad, b: OfferedLoad) -> bool:
    """Whether both say their lengths, and not the same."""
    pairs = ((a.input_len, b.input_len), (a.output_len, b.output_len))
    return any(None not in pair and pair[0] != pair[1] for pair in pairs)


def peaks_differ(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A client counts whole runs, a server's log windows of its own: their peaks are two quantities."""
    peaks = [
        c
        for c in audited.claims
        if is_throughput(c.metric)
        and c.kind in ("measured", "derived")
        and (c.metric.statistic == "max" or re.search(r"\bpeak\b", c.quote, re.IGNORECASE))
        and c.metric.scope not in ("gpu", "request")
    ]
    for i, peak in enumerate(peaks):
        for other in peaks[i + 1 :]:
            values = claimed_metric(peak).value, claimed_metric(other).value
            if peak.where == other.where and max(values) > PEAKS * min(values):
                yield new_finding(
                    "peaks_differ",
                    "suspect",
                    f"two peaks of one setup: {values[0]:,.6g} and {values[1]:,.6g} tok/s, "
                    f"{max(values) / min(values) - 1:.1%} apart: of other windows or counters",
                    [peak.id, other.id],
                    first=values[0],
                    second=values[1],
                )


def up_to(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """`Up to` is the largest of some cases. Without what it is over, and at which shape, it can be neither
    checked nor applied. A factor that rests on nothing is no better for lacking the words."""
    for claim in audited.claims:
        if claim.metric is None or not RESULT.search(claim.metric.name):
            continue
        ratio = bool(RATIO.search(claim.metric.name))
        if claim.bound != "up to" and not (ratio and claim.kind == "claim"):
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
            value = f"{claim.metric.value:g}"
            value += f" to {claim.upper:g}" if claim.upper is not None else ""
            unit = {"1": "x" if ratio else ""}.get(claim.metric.unit, f" {claim.metric.unit}")
            bound = "up to " if claim.bound == "up to" else ""
            yield new_finding(
                "up_to",
                "suspect",
                f"{claim.id}: {bound}{value}{unit} without {', '.join(lacks)}",
                [claim.id],
                claimed=claim.metric.value,
                lacks=len(lacks),
            )


def highest_of_total_alone(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """The highest total throughput need not be the highest output throughput: long prompts give many cheap
    tokens. A superlative over total tokens is held against all rows of its hardware and mode."""
    for claim in audited.claims:
        match = row_of(claim, corpus)
        if not match or match[1] != "total" or not SUPERLATIVE.search(claim.quote):
            continue
        run = match[0]
        rivals = [
            (value, other)
            for other in corpus.all_rows
            if other.client == run.client
            and other.mode == run.mode
            and same_hardware(other.hardware, run.hardware)
            and bool(other.workload.prefix_cached) == bool(run.workload.prefix_cached)
            and (value := by_kind(other).get("output"))
        ]
        claimed, output = claimed_metric(claim).value, by_kind(run).get("output")
        best, other = max(rivals, key=lambda pair: pair[0], default=(0.0, run))
        lengths = f"{other.workload.input_len or 0:g}/{other.workload.output_len or 0:g}"
        if output and best > 1.01 * output:
            yield new_finding(
                "highest_of_total_alone",
                "suspect",
                f"{claimed:,.6g} tok/s is highest by input and output; by output {run.id} has "
                f"{output:,.6g} and {other.id} ({other.engine}, {lengths}) {best:,.6g}",
                [claim.id, run.id, other.id],
                claimed=claimed,
                own_output=output,
                highest_output=best,
            )


def memory_label(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """288 GiB is 309 GB: a label that takes one for the other is 7 % wrong about what fits."""
    sizes: dict[float, str] = {}
    for claim in audited.claims:
        if claim.metric and claim.metric.unit == "GB":
            sizes |= {float(number): claim.id for number in re.findall(r"(\d+(?:\.\d+)?) GB\b", claim.quote)}
    for small, large in combinations(sorted(sizes), 2):
        if abs(large / small / MEMORY - 1) < 0.003:
            yield new_finding(
                "memory_label",
                "wrong",
                f"one memory is given as {small:g} GB and as {large:g} GB: "
                f"{small:g} GiB = {small * MEMORY:.0f} GB",
                [sizes[small], sizes[large]],
                smaller=small,
                larger=large,
            )


def optimum_is_uneven(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A range that is called optimal has no point that is far below another of it."""
    for claim in audited.claims:
        if claim.metric is None or claim.metric.name != "concurrency" or not OPTIMAL.search(claim.quote):
            continue
        points = {run.id: (load_of(run), m.value) for run in corpus.runs_of(claim) if (m := throughput(run))}
        if not points:
            continue
        low, high = (pick(points.values(), key=lambda point: point[1]) for pick in (min, max))
        if high[1] > APART * low[1]:
            yield new_finding(
                "optimum_is_uneven",
                "wrong",
                f"{claim.metric.value:g} to {claim.upper or claim.metric.value:g} in flight are called "
                f"optimal: {low[1]:,.6g} tok/s at {low[0]:g}, {high[1]:,.6g} at {high[0]:g}",
                [claim.id, *points],
                lowest=low[1],
                highest=high[1],
            )


def limit_not_met(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """So many requests within a latency: rows of the same machine, engine, lengths and load, by whomever,
    should be within it too, or the version that brought it has to be named."""
    for claim in audited.claims:
        limit = LIMIT.search(claim.quote)
        about = audited.configuration(claim.configuration)
        if not limit or claim.metric is None or claim.metric.name != "concurrency" or about is None:
            continue
        name, most = limit[1].lower(), float(limit[2])
        for run in corpus.all_rows:
            load, value = run.workload, run.value(limit[1].lower(), "mean")
            lengths = (load.input_len, load.output_len) == (
                about.workload.input_len,
                about.workload.output_len,
            )
            if (
                value
                and value > most
                and lengths
                and load.concurrency == claim.metric.value
                and load.dataset == about.workload.dataset
                and same_hardware(claim.hardware, run.hardware)
                and same_engine(claim.engine, run.engine)
            ):
                yield new_finding(
                    "limit_not_met",
                    "suspect",
                    f"{claim.id}: {name} below {most:g} ms at {claim.metric.value:g} in flight; {run.id} has "
                    f"{value:.4g} ms there, with {run.engine} {run.version or 'of unknown version'} "
                    f"(the claim's: {about.version or about.image})",
                    [claim.id, run.id],
                    limit_ms=most,
                    measured_ms=value,
                )


RULES = (
    total_read_as_output,
    single_request_differs,
    peaks_differ,
    up_to,
    highest_of_total_alone,
    memory_label,
    optimum_is_uneven,
    limit_not_met,
)
