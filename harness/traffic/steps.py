"""The steps that files tell of, as cases of the ops."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from harness.errors import UsageError
from shapes.bins import reduce_chunks, reduce_phases, reduce_tokens
from shapes.case import MOST_QUERIES, Case, Size, merge, parse, text_of
from shapes.deployment import Call, Deployment, mean_step
from shapes.lengths import parse_span, spread
from shapes.models import ModelConfig
from shapes.scheduler import Phase

Calls = Counter[tuple[str, str]]  # (op, sizes as text) -> how many calls have them


@dataclass(frozen=True)
class Step:
    """Equal steps of one rank: `count` times the `phase.steps` steps of a phase."""

    count: int
    phase: Phase  # its `lengths` are empty where the contexts of the requests are not known
    decoding: int = 0  # requests that decode
    tokens: int = 0  # query tokens of all of them

    @property
    def q(self) -> int:
        """Query tokens of a request that decodes, the rounded mean."""
        return round(self.tokens / self.decoding)


@dataclass
class Traffic:
    """What files say."""

    drafts: int | None = None  # draft tokens of a request in a step, as the user says; None: not said
    drafts_read: bool = False  # whether a file has steps that verify drafts
    dp: int = 1  # groups of ranks over which a client's requests spread; logs and traces are of one group
    steps: list[Step] = field(default_factory=list)
    calls: Calls = field(default_factory=Counter)  # those whose sizes a file itself has
    read: list[str] = field(default_factory=list)  # a line on each file that was read
    notes: dict[str, None] = field(default_factory=dict)  # what a reader must know, each once and in order
    left_out: Counter[str] = field(default_factory=Counter)  # what was not taken, with the reason
    load: dict[str, float] = field(default_factory=dict)
    """isl, osl (tokens), concurrency and range_ratio of a client's load; empty where no file says them."""

    def note(self, text: str) -> None:
        self.notes[text] = None

    def query_tokens(self, evidence: str, said: int | None = None, accepted: float = 0.0) -> int:
        """Query tokens of a request in a step: its own and its drafts. Raises UsageError where neither the
        file nor the user says the drafts, and where the two differ.

        evidence: the beginning of the error's text: what the file has
        said:     the drafts that the file says; None: it says only that there are some
        accepted: tokens that a step gives a request, as the file says; 0: not said
        """
        drafts = said if self.drafts is None else self.drafts
        if drafts is None:
            raise UsageError(
                f"{evidence}, which does not say how many tokens a step verifies: give --drafts N"
            )
        if said is not None and said != drafts:
            raise UsageError(f"{evidence}, as with --drafts {said}, not {drafts}")
        if (said is None and not drafts) or accepted > 1 + drafts:
            raise UsageError(f"{evidence}, which is not of --drafts {drafts}")
        self.drafts_read = True
        return 1 + drafts

    def add(
        self, count: int, decoding: int = 0, tokens: int | None = None, context: float | None = None,
        chunks: tuple[tuple[int, int], ...] = (), prompt: int | None = None,
    ) -> None:  # fmt: skip
        """Adds equal steps; notes as left out what `mla_decode` cannot take.

        count:    the number of steps
        decoding: requests that decode
        tokens:   query tokens of all of them, by default one of each
        context:  cached tokens of all of them; None: not known
        chunks:   (new, prefix) of each prompt
        prompt:   prompt tokens, by default the new ones of the chunks
        """
        if tokens is None or not decoding:
            tokens = decoding
        q = tokens / decoding if decoding else 1
        if not 1 <= round(q) <= MOST_QUERIES:
            why = f"steps of {q:.3g} tokens a decoding request; mla_decode takes 1 to {MOST_QUERIES}"
            self.left_out[why] += count
            return
        lengths: tuple[int, ...] = ()
        if decoding and context:  # requests are taken as equally long
            lengths = (max(round(context / decoding), round(q)),) * decoding
        if prompt is None:
            prompt = sum(new for new, _ in chunks)
        if decoding and tokens % decoding:
            self.note("requests of a step have different numbers of query tokens: mla_decode has their "
                      "rounded mean")  # fmt: skip
        if decoding or prompt:
            self.steps.append(Step(count, Phase(1, lengths, prompt, chunks), decoding, tokens))
        else:
            self.left_out["steps without tokens"] += count

    def step_count(self) -> int:
        return sum(step.count * step.phase.steps for step in self.steps)


def even_chunks(batch: int, new: int, prefix: int, span: str = "") -> tuple[tuple[int, int], ...]:
    """(new, prefix) of each of `batch` prompts, which have `new` and `prefix` tokens together; none without
    new tokens. span: `LEAST..MOST`, over which prompts' new tokens spread; empty: all have as many"""
    if not (batch and new):
        return ()
    lengths = spread(parse_span(span or str(new // batch), least=0), batch, 0)
    return tuple((max(length, 1), prefix // batch) for length in lengths)


def cases_of(traffic: Traffic, deployment: Deployment) -> list[Case]:
    """The cases of all ops. Their weights are calls in the mean step, or the number of calls where the files
    have no steps. Raises UsageError where there are no cases."""
    place = f"{deployment.model.name} {deployment.parallel.text} traffic"
    ops_in_files = {op for op, _ in traffic.calls}
    steps = traffic.step_count()
    cases = [
        Case(call.op, call.sizes, place=f"{place} {call.place}", weight=call.times)
        for call in _calls_of_steps(traffic, deployment)
        if call.op not in ops_in_files
    ]
    if steps:
        for op in sorted(ops_in_files):
            traffic.note(f"{op}: the shapes are those in the files themselves, not computed from steps")
    for (op, text), calls in traffic.calls.items():
        sizes: dict[str, Size] = {**parse(text)[0]}
        if op == "fused_moe":
            sizes |= _routing_sizes(sizes, deployment.model, traffic)
        cases.append(Case(op, sizes, place=f"{place}, in the file", weight=calls / (steps or 1)))
    if not cases:
        reasons = [f"{what}: {count}" for what, count in traffic.left_out.items()]
        raise UsageError("; ".join(["no shape in these files", *reasons, *traffic.notes]))
    if traffic.drafts is not None and not traffic.drafts_read:
        traffic.note(f"--drafts {traffic.drafts} changed nothing: no file leaves the tokens of a step open")
    # Equal cases become one, which is of the place of the first.
    places = {(case.op, case.text): case.place for case in reversed(cases)}
    return [replace(case, place=places[case.op, case.text]) for case in merge(cases)]


def _routing_sizes(sizes: Mapping[str, Size], model: ModelConfig, traffic: Traffic) -> dict[str, Size]:
    """All experts, their ranks and groups. A file has the experts of one rank alone. If they can be a rank's
    part of the model's, the model says the rest; else they are taken as all experts, without groups."""
    local = int(sizes["experts"])
    ranks, remainder = divmod(model.n_routed_experts, local)
    is_topk = int(sizes["topk"]) == model.num_experts_per_tok
    if remainder or not is_topk or int(sizes["hidden"]) != model.hidden_size:
        text = f"fused_moe: {local} experts are not {model.name}'s"
        traffic.note(f"{text}: taken as all, routed without groups")
        return {"groups": 1, "group_topk": 1}
    return {"experts": model.n_routed_experts, "ep": ranks, "groups": model.n_group,
            "group_topk": model.topk_group}  # fmt: skip


def _calls_of_steps(traffic: Traffic, deployment: Deployment) -> list[Call]:
    """The calls of the mean step; none where the files have no steps."""
    steps, total = traffic.steps, traffic.step_count()
    if not steps:
        return []
    # `reduce_tokens` counts one token for each length. With drafts a request has several: it gets as many.
    by_tokens = [
        Phase(step.count * step.phase.steps, (0,) * step.tokens, step.phase.prefill) for step in steps
    ]
    has_contexts = {bool(step.phase.lengths) for step in steps if step.decoding}
    if len(has_contexts) > 1:
        traffic.note("some steps do not say the contexts of decoding requests; those that do stand for all")
    by_q: dict[int, list[Phase]] = defaultdict(list)
    for step in steps:
        if step.decoding:
            by_q[step.q] += [step.phase] * step.count
    decodes = []
    for q, phases in by_q.items():
        share = sum(phase.steps for phase in phases) / total
        decodes += [(bin_._replace(weight=bin_.weight * share), q) for bin_ in reduce_phases(phases)]
    if by_q and not decodes:
        traffic.note("mla_decode has no case: these files do not say the contexts of requests")
    prefilling = [step.phase for step in steps if step.phase.chunks for _ in range(step.count)]
    share = sum(phase.steps for phase in prefilling) / total
    prefills = [bin_._replace(weight=bin_.weight * share) for bin_ in reduce_chunks(prefilling)]
    return mean_step(deployment, reduce_tokens(by_tokens), decodes, prefills)


def lines(traffic: Traffic) -> list[tuple[str, str]]:
    """What was read, and what was not: (label, text)."""
    read = [("read", text) for text in traffic.read]
    notes = [("note", note) for note in traffic.notes]
    return read + notes + [("left out", f"{count} x {what}") for what, count in traffic.left_out.items()]


def record(traffic: Traffic, deployment: Deployment, cases: list[Case]) -> dict[str, object]:
    """The object of a cases file: see shapes.suites.cases_file."""
    rows = [
        {"op": case.op, "sizes": text_of(case.sizes), "place": case.place, "weight": round(case.weight, 6)}
        for case in cases
    ]
    sources = [": ".join(line) for line in lines(traffic)]
    return {"deployment": deployment.text, "sources": sources, "load": traffic.load, "cases": rows}
