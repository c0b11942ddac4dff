"""Rules over sentences that rank or describe a trend: each is held against every row that it speaks of."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from harness.serving.audit.corpus import Audited, Corpus, load_of, new_finding, same_engine, same_hardware
from harness.serving.published.documents import Claim, Ranking, Setup
from harness.serving.schema import Finding, Mode, ServingRun, Severity

EVEN = 0.01
"""Nearer than that, neither is better: repeated serving runs differ by a percent or more."""
STABLE = 0.25
PLATEAU = 0.10
SHOWN = 3

Point = tuple[Mode, float, float]  # mode, load, output length
Row = tuple[Point, float, ServingRun]


def ranked(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """`A outperformed B` is true of the points where it is, and of no others: each point is looked up. Of a
    `highest` without limits only the largest of either side."""
    for claim in audited.claims:
        if claim.comparison is None:
            continue
        holding: list[tuple[float, str]] = []
        failed: list[tuple[float, str]] = []
        even = 0
        for where, better, text in _held_against(claim, claim.comparison, corpus):
            even += abs(better - 1) <= EVEN
            if abs(better - 1) > EVEN:
                (holding if better > 1 else failed).append((better, f"{where}: {text}"))
        count = len(holding) + len(failed) + even
        if not count:
            continue
        failed.sort()
        text = f"{claim.id}: {_name(claim.comparison.better)} is ahead at {len(holding)} of {count} points"
        text += f", even at {even}" if even else ""
        if failed:
            rest = f", and {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""
            text += f"; not at {'; '.join(where for _, where in failed[:SHOWN])}{rest}"
        severity: Severity = "note"
        if failed or even > len(holding):
            severity = "wrong" if 2 * len(failed) > count else "suspect"
        yield new_finding(
            "ranked",
            severity,
            text,
            [claim.id],
            holds=len(holding),
            fails=len(failed),
            even=even,
            points=count,
        )


def _held_against(claim: Claim, ranking: Ranking, corpus: Corpus) -> Iterator[tuple[str, float, str]]:
    """(where, how many times better, the numbers) for each point and rival."""
    unlimited = (None, None) == ranking.concurrency == ranking.output_len == ranking.batch
    for metric in ranking.metrics:
        for rival in ranking.than:
            # a ranking of engines that names no machine is of those on one
            setup_ours = Setup(
                hardware=ranking.better.hardware or rival.hardware,
                engine=ranking.better.engine or rival.engine,
            )
            our_points, their_points = (
                [row for row in points(claim, setup, metric, corpus) if _within(ranking, row[0])]
                for setup in (setup_ours, rival)
            )
            their_points = [row for row in their_points if row not in our_points]
            pairs: list[tuple[Row, Row]] = []
            if unlimited and claim.metric is not None and metric == "throughput":
                if our_points and their_points:
                    highest, theirs = (
                        max(rows, key=lambda row: row[1]) for rows in (our_points, their_points)
                    )
                    pairs = [(highest, theirs)]
            else:
                pairs = [
                    (a, b)
                    for a in our_points
                    for b in their_points
                    if a[0] == b[0] and (setup_ours.hardware or _one_machine(a, b))
                ]
            for (_, a, _), (point, b, run) in pairs:
                better = a / b if metric == "throughput" else b / a
                text = f"{a:,.5g} against {b:,.5g} of {run.engine} {run.hardware}"
                yield f"{metric} at {_place(point)}", better, text


def _one_machine(a: Row, b: Row) -> bool:
    return a[2].hardware == b[2].hardware


def trends(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """`Stable`, `rises`, `plateaus` are numbers too: the largest change between neighbouring points."""
    for claim in audited.claims:
        trend = claim.trend
        if trend is None:
            continue
        broken, looked = [], 0
        for setup in trend.of:
            for metric in trend.metrics:
                for line in _lines(claim, setup, metric, trend.over, corpus):
                    kept = [(x, y) for x, y in line if trend.beyond is None or x >= trend.beyond]
                    if len(kept) < 2:
                        continue
                    looked += 1
                    if why := _breaks(trend.says, kept):
                        broken.append(f"{metric} of {_name(setup)} {why}")
        if looked:
            holding = looked - len(broken)
            text = f"{claim.id}: {trend.says!r} over {trend.over} holds in {holding} of {looked} series"
            text += f"; not {'; '.join(broken[:SHOWN])}" if broken else ""
            yield new_finding(
                "trends", "suspect" if broken else "note", text, [claim.id], series=looked, breaks=len(broken)
            )


def _breaks(says: str, line: list[tuple[float, float]]) -> str:
    """Why a series is not as said; empty where it is."""
    ends = f"from {line[0][1]:,.5g} at {line[0][0]:g} to {line[-1][1]:,.5g} at {line[-1][0]:g}"
    values = [y for _, y in line]
    if says == "stable" and max(values) > (1 + STABLE) * min(values):
        return f"goes {ends}, {max(values) / min(values):.3g} times between its least and its most"
    if says == "plateaus" and max(values) > (1 + PLATEAU) * values[0]:
        return f"still goes {ends}, {max(values) / values[0] - 1:.0%} up"
    if says == "rises" and any(after < (1 - EVEN) * before for before, after in pairwise(values)):
        return f"goes {ends}, not always up"
    if says == "falls" and any(after > (1 + EVEN) * before for before, after in pairwise(values)):
        return f"goes {ends}, not always down"
    return ""


def points(claim: Claim, setup: Setup, metric: str, corpus: Corpus) -> list[Row]:
    """The metric of each row of a setup that a claim speaks of: the clients' means, throughput of output."""
    rows: list[Row] = []
    for run in corpus.all_rows:
        if not _of(setup, run) or not _spoken_of(claim, run):
            continue
        value = run.value(metric, tokens="output") if metric == "throughput" else run.value(metric, "mean")
        if metric == "e2e" and value is None and run.mode == "offline" and run.totals.duration_s:
            value = run.totals.duration_s * 1e3
        load = load_of(run)
        if value and load:
            rows.append(((run.mode, load, run.workload.output_len or 0.0), value, run))
    return rows


def _of(setup: Setup, run: ServingRun) -> bool:
    return (
        run.client.startswith("dstack")
        and (not setup.hardware or same_hardware(setup.hardware, run.hardware))
        and (not setup.engine or same_engine(setup.engine, run.engine))
    )


def _spoken_of(claim: Claim, run: ServingRun) -> bool:
    ranking = claim.comparison
    mode = claim.mode
    if mode == "unknown" and ranking and ranking.batch != (None, None):
        mode = "offline"
    if mode == "unknown" and ranking and ranking.concurrency != (None, None):
        mode = "online"
    return mode in ("unknown", run.mode) and bool(claim.workload.prefix_cached) == bool(
        run.workload.prefix_cached
    )


def _within(ranking: Ranking, point: Point) -> bool:
    mode, load, length = point
    loads = ranking.batch if mode == "offline" else ranking.concurrency
    return _between(load, loads) and _between(length, ranking.output_len)


def _between(value: float, ends: tuple[float | None, float | None]) -> bool:
    return (ends[0] is None or value >= ends[0]) and (ends[1] is None or value <= ends[1])


def _lines(
    claim: Claim, setup: Setup, metric: str, over: str, corpus: Corpus
) -> list[list[tuple[float, float]]]:
    """Series of (what it goes over, value), one for each mode and each value of what is held; E2E over output
    length is that of a token."""
    series: dict[tuple[Mode, float], list[tuple[float, float]]] = {}
    fixed = claim.workload.concurrency if over == "output_len" else None
    for (mode, load, length), value, _ in points(claim, setup, metric, corpus):
        if fixed and load != fixed:
            continue
        if metric == "e2e" and over == "output_len":
            value /= length or 1.0
        if over == "output_len":
            series.setdefault((mode, load), []).append((length, value))
        elif (over == "batch") == (mode == "offline"):
            series.setdefault((mode, length), []).append((load, value))
    return [sorted(line) for line in series.values()]


def _place(point: Point) -> str:
    mode, load, length = point
    return f"{load:g} {'prompts' if mode == 'offline' else 'in flight'}, {length:g} out"


def _name(setup: Setup) -> str:
    return " ".join(filter(None, (setup.engine, setup.hardware))) or "any"


RULES = (ranked, trends)
