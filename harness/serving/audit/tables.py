"""Rules over what a document sets side by side: one table or section, one kind of number."""

from __future__ import annotations

from collections.abc import Iterator

from harness.serving.audit.corpus import Audited, Corpus, claimed_metric, new_finding
from harness.serving.audit.rows import is_throughput, sourced
from harness.serving.compare.alike import UNKNOWN, compare, conditions
from harness.serving.compare.quantity import Quantity, quantity_of_claim, quantity_of_run
from harness.serving.published.documents import Claim
from harness.serving.schema import SCOPES, Finding, Severity

ASPECTS = {
    "scope": "one GPU, one node and a cluster are not one denominator",
    "tokens": "input tokens cost a fraction of output tokens",
    "mode": "a batch given at once is not requests as they come",
    "lengths": "the shares of prefill and decode differ",
    "load": "another batch",
    "end to end": "decode alone is not what a user is served",
}


def table_mixes(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """Numbers in one table are read as one quantity. Each is brought to what its own source says it is, and
    aspects in which they differ, or that are open, are named."""
    tables: dict[str, list[Claim]] = {}
    for claim in audited.claims:
        if is_throughput(claim.metric):
            tables.setdefault(claim.where, []).append(claim)
    for where, claims in tables.items():
        if len(claims) < 2:
            continue
        seen = {claim.id: circumstances(claim, audited, corpus) for claim in claims}
        for aspect, why in ASPECTS.items():
            groups: dict[str, list[Claim]] = {}
            for claim in claims:
                groups.setdefault(seen[claim.id][aspect], []).append(claim)
            known = [name for name in groups if name != UNKNOWN]
            if len(known) < (1 if aspect in ("tokens", "lengths") else 2) or len(groups) < 2:
                continue
            shown = "; ".join(f"{name}: {_values(group)}" for name, group in groups.items())
            severity = _severity(aspect, groups, audited)
            yield new_finding(
                f"table_mixes_{aspect.replace(' ', '_')}",
                severity,
                f"{where}: {shown}; {why}",
                [claim.id for claim in claims],
                kinds=len(known),
                claims=len(claims),
            )


def _severity(aspect: str, groups: dict[str, list[Claim]], audited: Audited) -> Severity:
    """Wrong where unlike setups stand in one table and not each says what it is; less where a reader is told,
    or all is one setup's own."""
    claims = [claim for group in groups.values() for claim in group]
    if all(_is_known(claim, aspect, audited) for claim in claims):
        return "note"
    one_setup = len({(claim.hardware, claim.engine, claim.kind == "cited") for claim in claims}) == 1
    return (
        "suspect"
        if one_setup or aspect == "load" or len([name for name in groups if name != UNKNOWN]) < 2
        else "wrong"
    )


def _is_known(claim: Claim, aspect: str, audited: Audited) -> bool:
    """Whether a claim itself says what it is, so that its reader is warned."""
    metric = claimed_metric(claim)
    known = conditions(quantity_of_claim(claim, metric, audited.configuration(claim.configuration)))
    aspects_ = {
        "scope": metric.scope,
        "tokens": metric.tokens,
        "mode": claim.mode,
        "load": known["load"],
        "lengths": known["output length"],
        "end to end": "said" if is_decode_alone(claim) else UNKNOWN,
    }
    return aspects_[aspect] != UNKNOWN


def _values(claims: list[Claim]) -> str:
    return ", ".join(
        f"{claimed_metric(c).value:,.6g}" + (f"-{c.upper:,.6g}" if c.upper else "") for c in claims
    )


def circumstances(claim: Claim, audited: Audited, corpus: Corpus) -> dict[str, str]:
    """What a claim's number is of, as far as its row, its source or the claim itself says."""
    quantity = sourced(claim, corpus, audited.configuration(claim.configuration))
    served = quantity.client or corpus.runs_of(claim)
    part = "decode alone" if is_decode_alone(claim) else "end to end" if served else UNKNOWN
    return {**aspects(quantity), "end to end": part}


def aspects(quantity: Quantity) -> dict[str, str]:
    known = conditions(quantity)
    lengths = f"{known['input length']}/{known['output length']}"
    return {
        "scope": scope_of(quantity),
        "tokens": quantity.metric.tokens if quantity.metric.tokens != "none" else UNKNOWN,
        "mode": known["mode"],
        "lengths": UNKNOWN if lengths == f"{UNKNOWN}/{UNKNOWN}" else lengths,
        "load": known["load"],
    }


def is_decode_alone(claim: Claim) -> bool:
    """As its quote or its notes say."""
    text = " ".join((claim.quote, *claim.notes)).lower()
    return "decoding-only" in text or "decode-only" in text or "decode only" in text


def scope_of(quantity: Quantity) -> str:
    """A scope with its GPUs, where they are known: one node of eight is `8 GPUs`, as an instance on them."""
    scope, gpus = quantity.metric.scope, quantity.all_gpus
    if scope in ("instance", "cluster") or (scope == "node" and quantity.nodes in (None, 1)):
        return f"of {gpus} GPUs" if gpus else f"of one {SCOPES[scope]}"
    return f"of one {SCOPES[scope]}" if scope in SCOPES else UNKNOWN


def open_circumstances(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A throughput whose scope, tokens, lengths, mode or load its document does not say cannot be set beside
    any other, unless its source says more."""
    stated: dict[str, dict[str, str]] = {}
    sources: dict[str, dict[str, str]] = {}
    for claim in audited.claims:
        if is_throughput(claim.metric):
            about = audited.configuration(claim.configuration)
            stated[claim.id] = aspects(quantity_of_claim(claim, claim.metric, about))
            sources[claim.id] = aspects(sourced(claim, corpus, about))
    for run in audited.runs:
        for metric in run.metrics:
            if is_throughput(metric) and metric.tokens != "input":
                stated[run.id] = sources[run.id] = aspects(quantity_of_run(run, metric))
    for aspect in ("scope", "tokens", "lengths", "mode", "load"):
        open_ = [name for name, known in stated.items() if UNKNOWN in known[aspect]]
        if open_:
            elsewhere = sum(UNKNOWN not in sources[name][aspect] for name in open_)
            shown = ", ".join(open_[:4]) + (f" and {len(open_) - 4} more" if len(open_) > 4 else "")
            text = f"{aspect} not said of {len(open_)} of {len(stated)} throughputs: {shown}"
            text += f"; for {elsewhere} a source or row says it" if elsewhere else ""
            yield new_finding(
                "circumstances_unknown",
                "suspect",
                text,
                open_,
                unknown=len(open_),
                of=len(stated),
                elsewhere=elsewhere,
            )


def unlike_runs(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """Runs of one file are plotted together. Those of other modes, kinds of tokens, windows, precisions or
    models stand on no common axis."""
    quantities = [quantity_of_run(run, run.metrics[0]) for run in audited.runs if run.metrics]
    for aspect in ("mode", "model", "precision", "accounting window"):
        values: dict[str, int] = {}
        for quantity in quantities:
            name = conditions(quantity)[aspect]
            if aspect == "accounting window" and quantity.trimmed:
                name = "a trimmed window"
            values[name] = values.get(name, 0) + 1
        known = {name: n for name, n in values.items() if name != UNKNOWN}
        if len(known) > 1:
            shown = ", ".join(f"{name} ({n})" for name, n in known.items())
            yield new_finding(
                "unlike_runs",
                "suspect",
                f"{aspect} differs among the runs: {shown}",
                kinds=len(known),
            )


def cited_from_another_mode(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """What a batch given at once reached says little of requests as they come, and the other way round."""
    own_modes = {run.mode for run in audited.runs} | {each.mode for each in audited.configurations}
    own_modes -= {"unknown"}
    for claim in audited.claims:
        if claim.kind != "cited" or len(own_modes) != 1:
            continue
        modes = {run.mode for run in corpus.runs_of(claim)} | {each.mode for each in corpus.claims_of(claim)}
        modes -= {"unknown"}
        if modes and not modes & own_modes:
            yield new_finding(
                "cited_from_another_mode",
                "suspect",
                f"{claim.id}: from {', '.join(sorted(modes))} runs, beside {', '.join(own_modes)} ones of "
                "its own",
                [claim.id, *claim.refers_to],
            )


def compared_unlike(audited: Audited, corpus: Corpus) -> Iterator[Finding]:
    """A sentence that sets two numbers beside each other, or divides one by the other, holds if they are
    alike: they are compared as `serving compare` does."""
    for claim in audited.claims:
        sides = [side for name in claim.refers_to if (side := _side(name, audited, corpus))]
        divides = claim.metric is not None and claim.metric.unit in ("1", "%")
        if len(sides) != 2 or len(claim.refers_to) != 2 or not (claim.baseline or divides):
            continue
        compared = compare(sides[0], sides[1])
        if compared.verdict == "refused":
            reasons = "; ".join(
                f"{reason.aspect} {reason.a} against {reason.b}" for reason in compared.reasons
            )
            yield new_finding(
                "compared_unlike",
                "wrong"
                if any(UNKNOWN not in (reason.a, reason.b) for reason in compared.reasons)
                else "suspect",
                f"{claim.id} sets {sides[0].id} ({compared.a.text}) beside "
                f"{sides[1].id} ({compared.b.text}): {reasons}",
                [claim.id, *claim.refers_to],
                reasons=len(compared.reasons),
            )


def _side(name: str, audited: Audited, corpus: Corpus) -> Quantity | None:
    """What a claim refers to, as a quantity: a run's output throughput, or another claim's number."""
    if name in corpus.rows:
        run = corpus.rows[name]
        out = run.metric("throughput", tokens="output") or run.metric("throughput")
        return quantity_of_run(run, out) if out else None
    other = corpus.claims.get(name)
    if other is None or not is_throughput(other.metric):
        return None
    return sourced(other, corpus, audited.configuration(other.configuration))


RULES = (table_mixes, open_circumstances, unlike_runs, cited_from_another_mode, compared_unlike)
