"""Recomputation of documents' numbers from what they rest on."""

from __future__ import annotations

from collections.abc import Iterator

from harness.serving.audit.corpus import Audited, Corpus, claimed_metric, new_finding, printed
from harness.serving.audit.rows import RESULT, by_kind, is_throughput, share_of
from harness.serving.published.documents import Claim
from harness.serving.schema import Finding

SETTINGS = ("concurrency",)
"""What a client was told, not what came of it."""


def recomputed(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A number that says what it rests on is computed again from it."""
    for claim in audited.claims:
        if claim.metric is None or claim.metric.name in SETTINGS or not RESULT.search(claim.metric.name):
            continue
        ways = [values for values in (*from_rows(claim, corpus), from_claims(claim, corpus)) if values]
        checked = [_checked(claim, values) for values in ways]
        if not checked:
            continue
        holds, true, shown = max(checked, key=lambda check: check[0])
        verdict = "holds" if holds else "does not hold"
        yield new_finding(
            "recomputed",
            "note" if holds else "wrong",
            f"{claim.id} {verdict}: {shown}",
            [claim.id, *claim.refers_to],
            claimed=claim.metric.value,
            recomputed=true,
            holds=holds,
        )


def _checked(claim: Claim, values: dict[str, float]) -> tuple[bool, float, str]:
    """Whether a claim prints one of the values, of a range the least and the most; what it is; in words."""
    claimed = claimed_metric(claim).value
    if claim.upper is None:
        true_by_number = {claimed: min(values.values(), key=lambda v: abs(v - claimed))}
    else:
        true_by_number = {claimed: min(values.values()), claim.upper: max(values.values())}
    about = claim.upper is not None or claim.bound == "about"
    holds = all(printed(number, true, about=about) for number, true in true_by_number.items())
    names = {value: name for name, value in values.items()}
    shown = "; ".join(
        f"{number:,.6g} is {true:,.6g} ({names[true]})" for number, true in true_by_number.items()
    )
    return holds, true_by_number[claimed], shown


def from_rows(claim: Claim, corpus: Corpus) -> list[dict[str, float]]:
    """The claim's quantity from all runs that it names, how it came -> value; once for each kind of tokens
    that it may mean."""
    runs, claimed = corpus.runs_of(claim), claimed_metric(claim)
    if not is_throughput(claimed):
        statistic = "" if claimed.statistic == "total" else claimed.statistic
        metrics = [(run, m) for run in runs if (m := run.metric(claimed.name, statistic))]
        unit = claimed.unit
        return [
            {f"{m.statistic} {m.name} of {run.id}": m.value * _factor(m.unit, unit) for run, m in metrics}
        ]
    kind = claimed.tokens
    ways = []
    for tokens in (kind,) if kind in ("output", "total") else ("unknown", "output", "total"):
        values = {}
        for run in runs:
            kinds, share = by_kind(run), share_of(claimed.scope, run)
            if tokens in kinds and share:
                values[f"{tokens} tokens of {run.id}{share[1]}"] = kinds[tokens] * share[0]
        ways.append(values)
    return ways


def _factor(unit: str, wanted: str) -> float:
    return {("ms", "s"): 1e-3, ("s", "ms"): 1e3}.get((unit, wanted), 1.0)


def from_claims(claim: Claim, corpus: Corpus) -> dict[str, float]:
    """The claim's quantity from the claims that it names: a share of a GPU, a rate from a latency, a ratio of
    two."""
    claimed = claimed_metric(claim)
    others = [(other, other.metric) for other in corpus.claims_of(claim) if other.metric]
    values: dict[str, float] = {}
    for other, metric in others:
        gpus = other.gpus or claim.gpus
        if is_throughput(claimed) and is_throughput(metric):
            if claimed.scope == "gpu" and metric.scope != "gpu":
                if gpus:
                    values[f"{other.id} / {gpus}"] = metric.value / gpus
            else:
                values[other.id] = metric.value
        length = other.workload.output_len or claim.workload.output_len
        if is_throughput(claimed) and metric.unit in ("s", "ms") and length:
            seconds = metric.value * _factor(metric.unit, "s")
            values[f"{length:g} tokens / {seconds:g} s"] = length / seconds
    if claimed.unit in ("1", "%") and len(claim.refers_to) == 2:
        values |= _ratio(claim, [other for other, _ in others], corpus)
    return values


def _ratio(claim: Claim, others: list[Claim], corpus: Corpus) -> dict[str, float]:
    """Of two throughputs of one scope: the claims that it names, or one and a run brought to its scope."""
    values = {other.id: other.metric.value for other in others if is_throughput(other.metric)}
    scopes = {other.metric.scope for other in others if is_throughput(other.metric)}
    for reference in claim.refers_to:
        run = corpus.rows.get(reference)
        if (
            run
            and len(scopes) == 1
            and (share := share_of(next(iter(scopes)), run))
            and "output" in by_kind(run)
        ):
            values[reference] = by_kind(run)["output"] * share[0]
    if len(values) < 2 or len(scopes) != 1:
        return {}
    a, b = (values[reference] for reference in claim.refers_to)
    return {f"{a:,.6g} / {b:,.6g}": (100.0 if claimed_metric(claim).unit == "%" else 1.0) * a / b}


RULES = (recomputed,)
