"""Numbers of documents, computed again from what they rest on."""

from __future__ import annotations

from collections.abc import Iterator

from harness.serving.audit.corpus import Audited, Corpus, found, printed
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
        ways = [one for one in (*from_rows(claim, corpus), from_claims(claim, corpus)) if one]
        checked = [_checked(claim, values) for values in ways]
        if not checked:
            continue
        held, true, shown = max(checked, key=lambda one: one[0])
        verdict = "holds" if held else "does not hold"
        yield found(
            "recomputed",
            "note" if held else "wrong",
            f"{claim.id} {verdict}: {shown}",
            [claim.id, *claim.refers_to],
            claimed=claim.metric.value,
            recomputed=true,
            holds=held,
        )


def _checked(claim: Claim, values: dict[str, float]) -> tuple[bool, float, str]:
    """Whether a claim prints one of the values, of a range the least and the most; what it is; in words."""
    spread = claim.upper is not None
    said = (
        {claim.metric.value: min(values.values()), claim.upper: max(values.values())}
        if spread
        else {claim.metric.value: min(values.values(), key=lambda v: abs(v - claim.metric.value))}
    )
    about = spread or claim.bound == "about"
    held = all(printed(one, true, about=about) for one, true in said.items())
    names = {value: name for name, value in values.items()}
    shown = "; ".join(f"{one:,.6g} is {true:,.6g} ({names[true]})" for one, true in said.items())
    return held, said[claim.metric.value], shown


def from_rows(claim: Claim, corpus: Corpus) -> list[dict[str, float]]:
    """The claim's quantity from all runs that it names, how it came -> value; once for each kind of tokens
    that it may mean."""
    runs = corpus.runs_of(claim)
    if not is_throughput(claim.metric):
        statistic = "" if claim.metric.statistic == "total" else claim.metric.statistic
        metrics = [(run, m) for run in runs if (m := run.metric(claim.metric.name, statistic))]
        unit = claim.metric.unit
        return [
            {f"{m.statistic} {m.name} of {run.id}": m.value * _factor(m.unit, unit) for run, m in metrics}
        ]
    kind = claim.metric.tokens
    ways = []
    for tokens in (kind,) if kind in ("output", "total") else ("unknown", "output", "total"):
        values = {}
        for run in runs:
            kinds, share = by_kind(run), share_of(claim.metric.scope, run)
            if tokens in kinds and share:
                values[f"{tokens} tokens of {run.id}{share[1]}"] = kinds[tokens] * share[0]
        ways.append(values)
    return ways


def _factor(unit: str, wanted: str) -> float:
    return {("ms", "s"): 1e-3, ("s", "ms"): 1e3}.get((unit, wanted), 1.0)


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
    if claim.metric.unit in ("1", "%") and len(claim.refers_to) == 2:
        values |= _ratio(claim, others, corpus)
    return values


def _ratio(claim: Claim, others: list[Claim], corpus: Corpus) -> dict[str, float]:
    """Of two throughputs of one scope: the claims that it names, or one and a run brought to its scope."""
    values = {one.id: one.metric.value for one in others if is_throughput(one.metric)}
    scopes = {one.metric.scope for one in others if is_throughput(one.metric)}
    for one in claim.refers_to:
        run = corpus.rows.get(one)
        if (
            run
            and len(scopes) == 1
            and (share := share_of(next(iter(scopes)), run))
            and "output" in by_kind(run)
        ):
            values[one] = by_kind(run)["output"] * share[0]
    if len(values) < 2 or len(scopes) != 1:
        return {}
    a, b = (values[one] for one in claim.refers_to)
    return {f"{a:,.6g} / {b:,.6g}": (100.0 if claim.metric.unit == "%" else 1.0) * a / b}


RULES = (recomputed,)
