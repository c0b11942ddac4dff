"""The corpus: an audited document or file, and all rows and claims that its numbers can be held against."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.serving.published.documents import Claim, Configuration, PublishedDocument
from harness.serving.schema import Finding, Metric, ServingRun, Severity


@dataclass(frozen=True)
class Audited:
    """A published document, or a user's file: which has runs alone."""

    name: str
    title: str = ""
    date: str = ""
    configurations: tuple[Configuration, ...] = ()
    runs: tuple[ServingRun, ...] = ()
    claims: tuple[Claim, ...] = ()

    def configuration(self, name: str) -> Configuration | None:
        return next(
            (configuration for configuration in self.configurations if configuration.name == name), None
        )


@dataclass(frozen=True)
class Corpus:
    """All that is known beside what is audited.

    rows:   runs by the id that `refers_to` writes: of documents, and `dstack.online:LINE`
    claims: of all documents, by id
    """

    rows: dict[str, ServingRun]
    claims: dict[str, Claim]

    @property
    def all_rows(self) -> list[ServingRun]:
        """Each once, though two names may lead to it."""
        return list({run.id: run for run in self.rows.values()}.values())

    def runs_of(self, claim: Claim, seen: frozenset[str] = frozenset()) -> list[ServingRun]:
        """The runs that a claim rests on, through other claims too, in its order."""
        runs: list[ServingRun] = []
        for reference in claim.refers_to:
            if reference in self.rows:
                runs.append(self.rows[reference])
            elif reference in self.claims and reference not in seen:
                runs += self.runs_of(self.claims[reference], seen | {reference})
        return list({run.id: run for run in runs}.values())

    def claims_of(self, claim: Claim) -> list[Claim]:
        return [self.claims[reference] for reference in claim.refers_to if reference in self.claims]


def corpus(documents: Iterable[PublishedDocument], raw: Iterable[ServingRun]) -> Corpus:
    """raw: runs of files, known by their client and their line too."""
    documents = list(documents)
    rows = {run.id: run for document in documents for run in document.runs}
    for run in raw:
        rows[run.id] = run
        if line := re.search(r":(\d+)$", run.source):
            rows[f"{run.client}:{line[1]}"] = run
    return Corpus(rows, {claim.id: claim for document in documents for claim in document.claims})


def new_finding(
    rule: str, severity: Severity, message: str, subjects: Sequence[str] = (), **numbers: float | None
) -> Finding:
    """A finding; numbers that are not known are left out."""
    kept = {name: float(value) for name, value in numbers.items() if value is not None}
    return Finding(rule=rule, severity=severity, message=message, numbers=kept, subjects=tuple(subjects))


def claimed_metric(claim: Claim) -> Metric:
    """The number of a claim that has one."""
    assert claim.metric is not None
    return claim.metric


def step_of(value: float) -> float:
    """What the last digit of a printed number counts: 1 of 2656, 0.01 of 22.05, 1000 of 17000."""
    text = f"{value:.10g}"
    if "e" in text:
        return 10 ** (int(text.split("e")[1]) - len(text.split("e")[0].replace(".", "")) + 1)
    if "." in text:
        return 10.0 ** -len(text.split(".")[1])
    return 10.0 ** (len(text) - len(text.rstrip("0"))) if value else 1.0


def printed(value: float, true: float, *, about: bool = False) -> bool:
    """Whether a number is how a text may print a true one: rounded at its last digit, or cut there; with
    `about` also within a percent."""
    step = step_of(value)
    rounded = abs(value - true) <= 0.5 * step * (1 + 1e-9)
    return rounded or 0 <= true - value < step or (about and abs(value - true) <= 0.01 * abs(true))


def same_hardware(a: str, b: str) -> bool:
    """Whether two names are of one GPU: `mi300` and `8x AMD Instinct MI300X` are."""
    models = [set(re.findall(r"\b(?:mi|gh|gb|h|b)\d{2,3}", name.lower())) for name in (a, b)]
    return bool(models[0] & models[1])


def same_engine(a: str, b: str) -> bool:
    plain = [re.sub(r"[^a-z]", "", name.lower()).replace("tensorrt", "trt") for name in (a, b)]
    return bool(plain[0] and plain[1]) and (plain[0] in plain[1] or plain[1] in plain[0])


def throughput(run: ServingRun, tokens: str = "") -> Metric | None:
    """Its tokens per second: output where it says so, else whatever it gives."""
    order = (tokens,) if tokens else ("output", "unknown", "total")
    return next((m for kind in order if (m := run.metric("throughput", tokens=kind))), None)


def load_of(run: ServingRun) -> float:
    """Requests in flight, or of an offline run those given at once; 0: not known."""
    return (run.workload.num_prompts if run.mode == "offline" else run.workload.concurrency) or 0.0


def tokens_per_request(run: ServingRun) -> float | None:
    """Output tokens of a request: counted where the totals are of whole requests, else as asked for."""
    counted = run.totals
    trimmed = run.workload.warmup_s or run.workload.cooldown_s
    if counted.output_tokens and counted.completed and not trimmed:
        return counted.output_tokens / counted.completed
    return run.workload.output_len


def sweeps(runs: Sequence[ServingRun]) -> Iterator[list[ServingRun]]:
    """Runs of one set-up and one workload that differ in their load alone, by rising load."""
    groups: dict[tuple[object, ...], list[ServingRun]] = {}
    for run in runs:
        load = run.workload
        if load_of(run):
            key = (run.model, run.precision, run.hardware, run.gpus, run.parallelism, run.engine,
                   run.version, run.configuration, run.flags, run.mode, run.client, load.dataset,
                   load.input_len, load.output_len, load.prefix_cached, load.request_rate)  # fmt: skip
            groups.setdefault(key, []).append(run)
    yield from (sorted(group, key=load_of) for group in groups.values() if len(group) > 1)


def tokens_per_slot(run: ServingRun) -> float | None:
    """Tokens that a run gave, of whichever kind, for each request in flight: all that is known where a table
    has neither lengths nor a number of requests."""
    tokens, load = run.value("tokens"), load_of(run)
    return tokens / load if tokens and load else None
