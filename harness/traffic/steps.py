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


@dataclass(frozen=True)
class Step:
    """Equal steps of one rank.

    phase:    its `lengths` are empty where the contexts of the requests are not known
    decoding: requests that decode; tokens: query tokens of all of them
    """

    count: int
    phase: Phase
    decoding: int = 0
    tokens: int = 0

    @property
    def q(self) -> int:
        """Query tokens of each of them, the rounded mean."""
        return round(self.tokens / self.decoding)


@dataclass
class Traffic:
    """What files say."""

    drafts: int | None = None
    """Draft tokens a step, as the user says; None: not said."""
    drafts_read: bool = False
    """Whether a file has steps that verify drafts."""
    dp: int = 1
    """Groups of ranks over which a client's requests are spread; logs and traces are of one group."""
    steps: list[Step] = field(default_factory=list)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(op, sizes) that a file itself has -> calls."""
    read: list[str] = field(default_factory=list)
    """A line for each file."""
    notes: dict[str, None] = field(default_factory=dict)
    """What a reader must know of these files, each once and in order."""
    left_out: Counter[str] = field(default_factory=Counter)
    """What was not taken, with the reason -> how often."""
    load: dict[str, float] = field(default_factory=dict)
    """isl, osl, concurrency and range_ratio of a client's load; empty where no file says them."""

    def note(self, text: str) -> None:
        self.notes[text] = None

    def q(self, evidence: str, said: int | None = None, accepted: float = 0.0) -> int:
        """Query tokens of a step. Raises UsageError where neither the file nor the user says the drafts, and
        where they differ.

        said: the drafts that the file says; None: it says only that there are some
        accepted: tokens that a request gets of a step, as the file says; 0: not said
        """
        drafts = said if self.drafts is None else self.drafts
        if drafts is None:
            raise UsageError(
                f"{evidence}, which does not say how many tokens a step verifies: give --drafts N"
            )
        if said not in (None, drafts):
            raise UsageError(f"{evidence}, as with --drafts {said}, not {drafts}")
        if (said is None and not drafts) or accepted > 1 + drafts:
            raise UsageError(f"{evidence}, which is not of --drafts {drafts}")
        self.drafts_read = True
        return 1 + drafts

    def add(
        self,
        count: int,
        decoding: int = 0,
        q: float = 1,
        ctx: float | None = None,
        chunks: tuple[tuple[int, int], ...] = (),
        prompt: int | None = None,
    ) -> None:
        """Adds steps. ctx: mean tokens of a decoding request; prompt: prompt tokens, by default those of the
        chunks (new, prefix)."""
        if decoding and not 1 <= round(q) <= MOST_QUERIES:
            why = f"steps of {q:.3g} tokens a decoding request; mla_decode takes 1 to {MOST_QUERIES}"
            self.left_out[why] += count
            return
        lengths = (max(round(ctx), round(q)),) * decoding if ctx else ()
        prompt = sum(new for new, _ in chunks) if prompt is None else prompt
        tokens = round(q * decoding)
        if decoding and tokens % decoding:
            self.note("requests of a step have different numbers of query tokens: mla_decode has their "
                      "rounded mean")  # fmt: skip
        if decoding or prompt:
            self.steps.append(Step(count, Phase(1, lengths, prompt, chunks), decoding, tokens))
        else:
            self.left_out["steps without tokens"] += count

    def count(self) -> int:
        return sum(step.count * step.phase.steps for step in self.steps)


def even_chunks(batch: int, new: int, prefix: int, span: str = "") -> tuple[tuple[int, int], ...]:
    """(new, prefix) of `batch` prompts of `new` tokens together, of equal lengths or spread over a span."""
    lengths = spread(parse_span(span or str(new // batch), least=0), batch, 0)
    return tuple((max(length, 1), prefix // batch) for length in lengths)


def cases_of(traffic: Traffic, deployment: Deployment) -> list[Case]:
    """The cases, whose weights are calls in the mean step; where only shapes are known, each has their count.
    Raises UsageError where there are none."""
    place = f"{deployment.model.name} {deployment.parallel.text} traffic"
    own = {op for op, _ in traffic.calls}
    steps = traffic.count()
    cases = [
        Case(call.op, call.sizes, place=f"{place} {call.place}", weight=call.times)
        for call in _calls(traffic, deployment)
        if call.op not in own
    ]
    for op in sorted(own):
        if steps:
            traffic.note(f"{op}: the shapes are those in the files themselves, not computed from steps")
    for (op, text), calls in traffic.calls.items():
        sizes: dict[str, Size] = {**parse(text)[0]}
        if op == "fused_moe":
            sizes |= _experts(sizes, deployment.model, traffic)
        cases.append(Case(op, sizes, place=f"{place}, in the file", weight=calls / (steps or 1)))
    if not cases:
        reasons = [f"{what}: {count}" for what, count in traffic.left_out.items()]
        raise UsageError("; ".join(["no shape in these files", *reasons, *traffic.notes]))
    if traffic.drafts is not None and not traffic.drafts_read:
        traffic.note(f"--drafts {traffic.drafts} changed nothing: no file leaves the tokens of a step open")
    places = {(case.op, case.text): case.place for case in reversed(cases)}
    return [replace(case, place=places[case.op, case.text]) for case in merge(cases)]


def _experts(sizes: Mapping[str, Size], model: ModelConfig, traffic: Traffic) -> dict[str, Size]:
    """Sizes that a file leaves out: it has the experts of a rank."""
    local = int(sizes["experts"])
    ranks, rest = divmod(model.n_routed_experts, local)
    if rest or (int(sizes["topk"]), int(sizes["hidden"])) != (model.num_experts_per_tok, model.hidden_size):
        traffic.note(
            f"fused_moe: {local} experts are not {model.name}'s: taken as all, routed without groups"
        )
        return {"groups": 1, "group_topk": 1}
    return {"experts": model.n_routed_experts, "ep": ranks, "groups": model.n_group,
            "group_topk": model.topk_group}  # fmt: skip


def _calls(traffic: Traffic, deployment: Deployment) -> list[Call]:
    steps, total = traffic.steps, traffic.count()
    if not steps:
        return []
    # By tokens alone, a phase has as many lengths as tokens.
    by_tokens = [
        Phase(step.count * step.phase.steps, (0,) * step.tokens, step.phase.prefill) for step in steps
    ]
    unknown = [not step.phase.lengths for step in steps if step.decoding]
    if any(unknown) and not all(unknown):
        traffic.note("the contexts of decoding requests are not in all steps; the others stand for those")
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
    found = [*(("read", text) for text in traffic.read), *(("note", note) for note in traffic.notes)]
    return found + [("left out", f"{count} x {what}") for what, count in traffic.left_out.items()]


def record(traffic: Traffic, deployment: Deployment, cases: list[Case]) -> dict[str, object]:
    """The object of a cases file: see shapes.suites.cases_file."""
    rows = [
        {"op": case.op, "sizes": text_of(case.sizes), "place": case.place, "weight": round(case.weight, 6)}
        for case in cases
    ]
    return {
        "deployment": deployment.text,
        "sources": [": ".join(line) for line in lines(traffic)],
        "load": traffic.load,
        "cases": rows,
    }
