"""What is audited here: the published documents and their raw files; and how findings are picked out."""

from __future__ import annotations

from dataclasses import replace

from harness.serving.audit import Audited, audit
from harness.serving.audit.corpus import Corpus
from harness.serving.audit.select import of_document
from harness.serving.published.index import published_corpus, published_documents, raw_files

ALL = {one.id: of_document(one) for one in published_documents()}
RAW = {name: Audited(name, runs=tuple(runs)) for name, runs in raw_files().items()}
CORPUS = published_corpus()
MI350X, MOAI, ARTICLE = ALL["mi350x"], ALL["moai"], ALL["dstack-article"]
ONLINE = RAW["dstack/online_results.csv"]


def of(rule: str, audited: Audited, about: str = "", corpus: Corpus = CORPUS):
    """The findings of a rule, those that a run or claim is among the subjects of."""
    return [one for one in audit(audited, corpus) if one.rule == rule and about in ("", *one.subjects)]


def one(rule: str, audited: Audited, about: str = "", corpus: Corpus = CORPUS):
    """The only one, or the only one that is first of all about it."""
    found = of(rule, audited, about, corpus)
    (only,) = [f for f in found if f.subjects[:1] == (about,)] or found
    return only


def with_run(audited: Audited, name: str, **changes) -> Audited:
    assert any(run.id == name for run in audited.runs)
    return replace(
        audited, runs=tuple(r.model_copy(update=changes) if r.id == name else r for r in audited.runs)
    )


def with_claim(audited: Audited, name: str, **changes) -> Audited:
    assert any(claim.id == name for claim in audited.claims)
    claims = tuple(c.model_copy(update=changes) if c.id == name else c for c in audited.claims)
    return replace(audited, claims=claims)


def metric_of(audited: Audited, name: str, **changes) -> Audited:
    claim = next(claim for claim in audited.claims if claim.id == name)
    return with_claim(audited, name, metric=claim.metric.model_copy(update=changes))
