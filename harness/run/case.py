"""Measuring one case, from operands to rounds: check, time in blocks and rounds, check again."""

from __future__ import annotations

import contextlib
import functools
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import kernels
from harness.machine.monitor.base import Monitor
from harness.plan.entry import Entry
from harness.plan.rotation import Rotation
from harness.statistics.paired import MARGIN
from harness.timing.interleaved import measure
from harness.timing.rounds import Disturbed, Policy, Rounds, Sample
from harness.workers.child.timers.cpu import LONG_S
from harness.workers.process import WorkerFailure, WorkerProcess
from harness.workers.worker import Worker, attempt
from kernels.operands import Seeds
from kernels.vendor import Vendor
from shapes.case import Case

SAMPLE_S = 0.05
SLOW = 4.0  # times the fastest: no choice for production, whatever its third figure
REFERENCE_S = 900.0
# A call on activations that were never seen may take so many times as long as others on the same,
# and so much longer.
AGAIN_TIMES, AGAIN_S = 2.0, 5e-5
# Of a row, by which a call's output may differ from the next one's on equal operands, where in all calls that
# were compared before no bit did.
STALE = 0.05
ASKED = 3  # times, before somebody is blamed for it
# Of reading an answer, which is a view or a copy of it: so much, and such a share of the call.
RESULT_S, RESULT_SHARE = 0.1, 0.5
# Of comparing outputs: a quarter of the time of the samples, or half of it where that is little.
FEW_COMPARING_S, COMPARING_S = 1.0, 30.0
FEW = 0.05
"""Of the work that a reference may take, where a sample of the rows tells enough."""
SAMPLED = ("live", "lengths")
"""Operands on which only what is wrong in all rows is looked for: an answer that was kept."""
NO_KERNELS = (
    "the profiler saw no kernel on the device (it needs the right to read it, and no other tool, such as "
    "DCGM, may read it meanwhile)"
)
ANEW = "preparing anew"
"""The phase between blocks, which is told as measuring."""

Answer = TypeVar("Answer")
MakeRounds = Callable[[Mapping[str, Sample], Policy], Rounds]


Output = dict[str, Any]
"""An entry's output and what is known of it (see bench.Bench.output). It goes to the judge through this
process, not through a file that another worker could read."""

Outputs = tuple[int | None, list[tuple[Entry, Output]]]
"""The digest of a worker's operands, and its entries' outputs."""


def _nothing(*_: object) -> None:
    pass


@dataclass
class Measured:
    """What one case gave to the entries that shared its rounds.

    baseline, rerun: the A/A pair, one entry prepared twice; None where nothing was timed
    phases:       seconds of setup_s by what they were spent on
    """

    case: Case
    entries: list[Entry]
    rotation: Rotation
    rounds: Rounds = field(default_factory=Rounds)
    baseline: Entry | None = None
    rerun: Entry | None = None
    setup_s: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TimingRules:
    """How entries are timed, whatever the case.

    seed:           of operands and orders
    disturbed:      whether rounds that other work disturbed count
    margin:         a difference below it is none
    make_rounds:    of the entries' samples
    """

    seed: int = 0
    disturbed: Disturbed = "prefer"
    margin: float = MARGIN
    make_rounds: MakeRounds = measure


@dataclass(kw_only=True)
class CaseRun:
    """Drives the judge and the workers through one case.

    start_judge: gives it, ready; it starts when it is first asked, as workers do
    ragged:  small cases on which whoever is timed is checked before
    say:     is told each stage, in words; show_rounds: before each block, how many rounds were made, and the
             seconds spent and to spend
    seeds:   of the sets of operands: `first`, on which it is timed, `last` of those that calls rotate over
             where they differ in value, `live`, the first with other live ones, `other`, all different and
             adversarial, and `lengths`, all different but the lengths of sequences
    digests: of the operands that the judge made of them
    samples_s: seconds of each entry's samples
    phases:  seconds of each
    """

    case: Case
    workers: Sequence[Worker]
    start_judge: Callable[[], WorkerProcess]
    monitor: Monitor
    scratch: Path
    say: Callable[[str], None]
    rules: TimingRules = TimingRules()
    ragged: Sequence[Case] = ()
    show_rounds: Callable[[int, float, float], None] = _nothing
    seeds: dict[str, dict[str, int]] = field(init=False)
    digests: dict[str, int] = field(init=False, default_factory=dict)
    samples_s: dict[str, float] = field(init=False, default_factory=lambda: defaultdict(float))
    judging: threading.Lock = field(init=False, default_factory=threading.Lock)
    # For the judge and all workers but one, while nothing is timed. A worker dies with the thread that
    # started it (PR_SET_PDEATHSIG), so they last as long as this.
    pool: ThreadPoolExecutor = field(init=False, default_factory=ThreadPoolExecutor)
    phases: dict[str, float] = field(init=False, default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        seed = self.rules.seed
        # Other commits' kernels may make neither adversarial operands nor others of the same lengths.
        here = not any(worker.entries[0].setting.tree for worker in self.workers)
        self.seeds = {
            "first": seeds_of(Seeds(seed, seed)),
            "live": seeds_of(Seeds(seed, seed + 1)),
            "other": seeds_of(Seeds(seed + 1, seed + 1, adversarial=here)),
        }
        if here and kernels.OPS[self.case.op].lengths:
            self.seeds["lengths"] = seeds_of(Seeds(seed + 2, seed + 2, lengths=seed))

    @functools.cached_property
    def judge(self) -> WorkerProcess:
        return self.start_judge()

    @property
    def living(self) -> list[tuple[Worker, Entry]]:
        """The entries that nothing is against, each with its worker."""
        return [(worker, entry) for worker in self.workers for entry in worker.living]

    @property
    def timed(self) -> list[tuple[Worker, Entry]]:
        return [(worker, entry) for worker, entry in self.living if not entry.interpreted]

    def run(self, rotation: Rotation, budget_s: float, max_s: float, baseline: str) -> Measured:
        """Measures for `budget_s` seconds, or up to `max_s` where one round in each block takes longer.
        Raises WorkerFailure where the judge cannot compute or compare."""
        started = time.perf_counter()
        everyone = [c for worker in self.workers for c in worker.entries if not c.setting.is_rerun]
        measured = Measured(self.case, everyone, rotation, phases=self.phases)
        self.begin(rotation)
        self.say("measuring")
        self._measure(measured, budget_s, max_s, baseline)
        self.end(rotation)
        measured.setup_s = time.perf_counter() - started - measured.rounds.spent_s
        return measured

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """A part of the setting up, of which `say` is told once."""
        if name not in self.phases and name != ANEW:
            self.say(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] += time.perf_counter() - started

    def begin(self, rotation: Rotation) -> None:
        """Computes the references and checks once whoever is timed; who is wrong is out."""
        seed = self.rules.seed
        if rotation.copies > 1 and kernels.OPS[self.case.op].turns:
            self.seeds["last"] = seeds_of(Seeds(seed, seed, turn=rotation.copies - 1))
        timed = [worker for worker in self.workers if any(not c.interpreted for c in worker.living)]
        with self._phase("starting"):
            judge = self.pool.submit(lambda: self.judge)  # it starts beside the workers
            self._side_by_side(timed, lambda worker: attempt(worker.living, worker.ready))
            judge.result()
        for number, case in enumerate(self.ragged):
            with self._phase("checking at ragged sizes"):
                compiling_s = self._check_ragged(timed, case, f"ragged-{number}")
            # A compiler's time, as it is in the case itself.
            self.phases["checking at ragged sizes"] -= compiling_s
            self.phases["preparing ragged sizes"] += compiling_s
        with self._phase("preparing and references"):
            references = self.pool.submit(self._references)
            taken = self._outputs(timed, "first")
            references.result()
        with self._phase("checking"):
            self._judge_all(timed, taken, "first")
        self.judge.pause()

    def end(self, rotation: Rotation) -> None:
        """Checks what timing left, and calls with other operands; asks what ran; checks whoever is
        interpreted."""
        with self._phase("checking again"):
            self._check_timed(rotation.copies)
        with self._phase("profiling"):
            # Side by side: it takes each worker's process 5 s, and a profile is taken of one alone.
            self._side_by_side([s for s in self.workers if s.platform.kind != "cpu"], _start_profiler)
            for worker, entry in self.timed:
                self._profile(worker, entry)
            unseen = [c.name for s, c in self.timed if s.platform.kind != "cpu" and not c.kernels]
            if unseen:
                self.say(f"{NO_KERNELS}: {', '.join(unseen)}")
        with self._phase("checking again"):
            self._check_again(rotation.copies)
        interpreted = [(s, c) for s, c in self.living if c.interpreted]
        if interpreted:
            with self._phase("interpreting"):
                self._check_interpreted(interpreted)

    def close(self) -> None:
        """Ends all of its processes."""
        for worker in self.workers:
            worker.stop()
        if "judge" in vars(self):
            self.judge.kill()
        self.pool.shutdown()

    def _side_by_side(self, workers: Sequence[Worker], action: Callable[[Worker], Answer]) -> list[Answer]:
        """Of each worker what the action gives. A compiler may take long, and most use one core, as the
        interpreter does: the judge and other workers use the rest."""
        others = [self.pool.submit(action, worker) for worker in workers[1:]]
        # In this thread, as a worker may be this process, and torch's threads are each thread's own.
        own = [action(worker) for worker in workers[:1]]
        return own + [other.result() for other in others]

    def _outputs(self, workers: Sequence[Worker], name: str, stage: str = "") -> list[Outputs]:
        """Of all workers, on the named operands."""
        return self._side_by_side(workers, lambda worker: self._outputs_of(worker, name, stage))

    def _outputs_of(self, worker: Worker, name: str, stage: str) -> Outputs:
        """Prepares a worker's entries one after the other, and calls each."""
        digest = attempt(worker.living, worker.open, self.case, self.seeds[name])
        outputs = []
        for entry in worker.living:
            output = self._output(worker, entry, digest, stage=stage)
            if output is not None:
                outputs.append((entry, output))
        return digest, outputs

    def _judge_all(
        self, workers: Sequence[Worker], taken: Sequence[Outputs], name: str, stage: str = ""
    ) -> None:
        for worker, (digest, outputs) in zip(workers, taken, strict=True):
            self._compare_operands(worker, digest, name)
            for entry, output in outputs:
                self._judge(entry, name, output, stage)

    def _references(self) -> None:
        """Of the case's boundary, and of the narrower ones that an entry's own call covers: the suite's
        producer kernels give the same operands bit by bit, so a composed call is judged by what it was
        given, and not by all that rounding to FP8 may explain."""
        for name, seeds in self.seeds.items():
            self._reference(self.case, name, seeds, FEW if name in SAMPLED else 1.0)

    def _reference(self, case: Case, name: str, seeds: dict[str, Any], share: float = 1.0) -> None:
        for boundary in {case.boundary, *(self._judged_at(c) for _, c in self.living)}:
            digest = self.judge.ask(
                "reference",
                REFERENCE_S,
                name=f"{name} {boundary}",
                op=case.op,
                sizes=dict(case.sizes),
                boundary=boundary,
                seeds=seeds,
                share=share,
            )
            if boundary == case.boundary:
                self.digests[name] = digest

    def _check_ragged(self, workers: Sequence[Worker], case: Case, name: str) -> float:
        """A small case of uneven sizes, once in a run, and with its addresses far apart: what is right at the
        sizes of production may be wrong there. Whose sizes it does not fit is not asked. Returns how many
        seconds of it were preparing, of the worker that took longest.

        name: of its reference
        """
        self._reference(case, name, self.seeds["first"])

        def check(worker: Worker) -> float:
            preparing_s = 0.0
            # What compilers write for each size anew would be another program; a plug-in cannot claim that.
            same = [c for c in worker.living if c.impl.plugin or not c.impl.per_size]
            able = [c for c in same if not c.interpreted and c.impl.supports(case, worker.platform).ok]
            digest = attempt(able, worker.open, case, self.seeds["first"]) if able else None
            self._compare_operands(worker, digest, name)
            for entry in able:
                stage = f"at {case.text}: "
                if not entry.alive:  # without operands nobody is to blame
                    if digest is None:
                        entry.status, entry.reason = None, ""
                    continue
                started = time.perf_counter()
                attempt([entry], worker.prepare, entry)
                preparing_s += time.perf_counter() - started
                output = self._output(worker, entry, digest, stage=stage)
                if output is not None:
                    with self.judging:
                        self._judge(entry, name, output, stage)
                if entry.alive and not entry.setting.tree:  # older commits' workers cannot be asked
                    self._check_far(worker, entry, name, stage)
                if not entry.alive and entry.status != "wrong":
                    # It does not run at these sizes, which smoke tells.
                    entry.status, entry.reason = None, ""
            return preparing_s

        return max(self._side_by_side(workers, check), default=0.0)

    def _check_far(self, worker: Worker, entry: Entry, name: str, stage: str) -> None:
        """With operands whose places need more than 32 bits, where memory has room for them."""
        far = attempt([entry], worker.ask, entry, "far")
        if not entry.alive:  # a device that failed answers nobody
            worker.stop()
        if far is None:
            return
        with self.judging:
            report = self._report(entry, name, far)
        entry.check["far"] = report["ok"]
        # No layer's cache in serving is so large: of a library it is worth a note.
        if not report["ok"] and (entry.impl.plugin or not isinstance(entry.impl, Vendor)):
            entry.fail("wrong", f"{stage}with addresses of more than 32 bits: {report['reason']}")

    def _judged_at(self, entry: Entry) -> str:
        return entry.impl.native(self.case.boundary) or self.case.boundary

    def _open(self, worker: Worker, name: str, beside: bool = False) -> None:
        """beside: on a second set, after the first"""
        seeds = [self.seeds["first"]] * beside + [self.seeds[name]]
        digest = attempt(worker.living, worker.open, self.case, *seeds)
        self._compare_operands(worker, digest, name)

    def _compare_operands(self, worker: Worker, digest: int | None, name: str) -> None:
        """A worker that makes others than the judge is of no use."""
        if digest is not None and digest != self.digests[name]:
            for entry in worker.living:
                entry.fail("error", "its worker made other operands than the judge from the same seed")

    def _check(self, worker: Worker, entry: Entry, name: str, *, stage: str = "", **how: Any) -> None:
        """Has the output of a new call judged against the named reference. `stage` says in words when it was
        made; how: see bench.Bench.output."""
        output = self._output(worker, entry, self.digests[name], stage=stage, **how)
        if output is not None:
            self._judge(entry, name, output, stage)

    def _output(
        self, worker: Worker, entry: Entry, operands: int | None, *, stage: str = "", **how: Any
    ) -> Output | None:
        """The output of a new call, if there is one. operands: their digest; who changes them is wrong."""
        if not entry.alive:
            return None
        output: Output | None = attempt([entry], worker.ask, entry, "output", **how)
        if output is None:
            return None
        entry.call_s = output["seconds"]
        if output["digest"] != operands:
            entry.fail("wrong", f"{stage}it changed its operands")
            # The next one gets a new worker, with whole operands.
            worker.stop()
        elif reason := _computes_elsewhere(output):
            entry.fail("wrong", f"{stage}{reason}")
        return output

    def _report(self, entry: Entry, name: str, output: Output) -> dict[str, Any]:
        """The judge's, of an output on the named operands."""
        report: dict[str, Any] = self.judge.ask(
            "judge",
            REFERENCE_S,
            name=f"{name} {self._judged_at(entry)}",
            **{key: output[key] for key in ("output", "shape", "dtype")},
            fp8=entry.impl.activations == "fp8",
            truncates=entry.impl.truncates,
        )
        return report

    def _judge(self, entry: Entry, name: str, output: Output, stage: str = "") -> None:
        report = self._report(entry, name, output)
        if not report["ok"]:
            entry.fail("wrong", f"{stage}{report['reason']}")
        if name not in SAMPLED or not report["ok"]:  # errors of a small sample tell less than those before
            entry.check |= report
        entry.check["ok"] &= entry.status != "wrong"

    def _measure(self, measured: Measured, budget_s: float, max_s: float, baseline_impl: str) -> None:
        timed = self.timed
        if not timed:
            return
        worker, baseline = next(((s, c) for s, c in timed if c.impl.name == baseline_impl), timed[0])
        rerun = next((c for _, c in timed if c.setting.is_rerun), None)
        if rerun is None:
            rerun = replace(baseline, name=f"{baseline.name} (again)", host_s=[])
            timed.append((worker, rerun))

        made, spent_s = 0, 0.0

        def begin_round() -> None:
            nonlocal made
            made += 1
            self.monitor.begin()

        def begin_block(block: int, names: Collection[str]) -> None:
            self.show_rounds(made, spent_s, policy.budget_s)

            def anew(worker: Worker) -> None:
                here = [c for s, c in timed if s is worker and c.alive]
                if here:
                    attempt(here, worker.fresh, measured.rotation)
                for entry in here:
                    if entry.alive and entry.name in names:
                        attempt([entry], worker.prepare, entry)

            with self._phase(ANEW):
                if not block:  # most of it is faulting memory in
                    self._side_by_side(self.workers, anew)
                else:  # the calls made tell whether later blocks need them (see bench.py)
                    for worker in self.workers:
                        anew(worker)
            for worker in self.workers:
                worker.pause()

        def sample(worker: Worker, entry: Entry) -> float:
            nonlocal spent_s
            if entry.alive:
                attempt([entry], worker.ask, entry, "spoil")
            if entry.alive:
                began = time.perf_counter()
                with self.monitor.watching(f"{self.case.key} {entry.name}"):
                    answer = attempt([entry], worker.ask, entry, "sample", at_least=SAMPLE_S)
                took_s = time.perf_counter() - began
                spent_s += took_s
                self.samples_s[entry.name] += took_s
                worker.pause()
                if answer is not None:
                    if answer["host_seconds"] is not None:
                        entry.host_s.append(answer["host_seconds"])
                    return answer["seconds"]
            # Whoever shared its worker is prepared again now, not in a sample of his own.
            for other in (c for s, c in timed if s is worker and c.alive):
                attempt([other], worker.prepare, other)
            worker.pause()
            raise RuntimeError(entry.reason)

        samples = {c.name: functools.partial(sample, s, c) for s, c in timed}
        policy = Policy(
            begin_block=begin_block,
            begin_round=begin_round,
            end_round=self.monitor.end,
            disturbed=self.rules.disturbed,
            margin=self.rules.margin,
            slow=SLOW,
            seed=self.rules.seed,
            baseline=baseline.name,
            rerun=rerun.name,
        )
        # A sample is an untimed call, but a long one, and then timed ones; a fifth more for what is missed.
        samples_s = (max(c.call_s, SAMPLE_S) + (c.call_s < LONG_S) * c.call_s for _, c in timed)
        min_s = 1.2 * policy.opening * sum(samples_s)
        policy = replace(policy, budget_s=min(max_s, max(budget_s, min_s)))
        self.monitor.conditions()  # what was before is not this case's
        rounds = measured.rounds = self.rules.make_rounds(samples, policy)
        measured.conditions = self.monitor.conditions()
        measured.baseline, measured.rerun = baseline, rerun
        for _, entry in timed:
            if entry.name in rounds.dropped:
                entry.fail("error", rounds.dropped[entry.name])
            if rounds.stopped == "disturbed":
                entry.fail("error", _too_disturbed(rounds))
            entry.beaten = rounds.beaten.get(entry.name, "")

    def _of_set(self, which: int, copies: int) -> str:
        """The name of the reference to a set of those that calls rotate over, which is computed if it is not
        there."""
        if not which:
            return "first"
        if which == copies - 1:
            return "last"
        name, seed = f"set {which}", self.rules.seed
        if name not in self.digests:
            self._reference(self.case, name, seeds_of(Seeds(seed, seed, turn=which)))
        return name

    def _check_timed(self, copies: int) -> None:
        """The outputs that the timed calls left and further ones, compared with each other where they were
        made: of those that differ the judge sees the farthest."""
        for worker in self.workers:
            timed = [c for c in worker.living if not c.interpreted]
            if timed and attempt(timed, worker.digest) not in (None, self.digests["first"]):
                self._find_writer(worker, timed)
            for entry in timed:
                # So that all checking takes no longer than measuring.
                samples_s = self.samples_s[entry.name]
                few_s = min(samples_s / 2, FEW_COMPARING_S) if samples_s else FEW_COMPARING_S
                spent = min(max(samples_s / 4, few_s), COMPARING_S)
                seen = attempt([entry], worker.ask, entry, "compared", seconds=spent)
                if seen is None:
                    continue
                if seen["kept"]:
                    entry.fail("wrong", "after timing: its timed calls gave an old answer to new activations")
                for output in seen["outputs"]:
                    if not entry.alive:  # that set may have no reference in the boundary of its call
                        break
                    self._judge(entry, self._of_set(output["set"], copies), output, "after timing: ")
                entry.check |= {key: seen[key] for key in ("calls", "differed", "distance")}
                if not seen["guards"]:
                    entry.fail("wrong", "after timing: it wrote beside its output")

    def _profile(self, worker: Worker, entry: Entry) -> None:
        """What ran in a call. Where a machine's profiler does not work the row keeps its time: that the call
        itself works is checked again after."""
        try:
            profile = worker.ask(entry, "profile")
            entry.kernels, entry.picked = profile["kernels"], profile["picked"]
            entry.ran = profile["ran"]
        except WorkerFailure as failure:
            if failure.fatal:
                entry.fail(failure.status, failure.reason)
            self.say(f"{entry.name} could not be profiled: {failure.reason}")

    def _find_writer(self, worker: Worker, timed: list[Entry]) -> None:
        """Somebody changed the operands that all of a worker's entries were timed on: whoever does it
        alone is wrong, and nobody's time counts."""
        names: list[str] = []
        for entry in timed:
            attempt([entry], worker.open, self.case, self.seeds["first"])
            attempt([entry], worker.ask, entry, "sample", at_least=SAMPLE_S)
            if entry.alive and attempt([entry], worker.digest) != self.digests["first"]:
                entry.fail("wrong", "after timing: it changed its operands")
                names.append(entry.name)
        by = " and ".join(names) or "another of its worker's entries"
        for entry in timed:
            entry.fail("error", f"{by} changed the operands that it was timed on: leave that out")

    def _check_again(self, copies: int) -> None:
        """With other live operands, which a cached answer misses, on the last set alone and on the first;
        with activations that nobody judges, which are as quick as those that were timed; then with other
        operands altogether, which a cached preparation misses, and with others of the same lengths, which
        what was cached by lengths misses."""
        workers = list(dict.fromkeys(worker for worker, _ in self.timed))
        op = kernels.OPS[self.case.op]
        live: dict[str, Any] = {
            "stage": "with other live operands: ",
            "poison": False,
            "scribble": True,
        }
        if copies > 1 and not op.turns:
            self._side_by_side(workers, lambda worker: self._load(worker, "live", copies - 1))
            for worker, entry in self.timed:
                self._check(worker, entry, "live", **live, which=copies - 1)
        self._side_by_side(workers, lambda worker: self._load(worker, "live"))
        for worker, entry in self.timed:
            self._check(worker, entry, "live", **live)
        for worker, entry in self.timed:
            self._check_unseen(worker, entry)
        # Where weights are streamed the others stand on a second set: whoever takes the first set's is wrong.
        beside = copies > 1 and not op.turns
        self._side_by_side(workers, lambda worker: self._open(worker, "other", beside))
        for worker, entry in self.timed:
            stage = "with other stationary operands: "
            self._check(worker, entry, "other", stage=stage, which=int(beside))
        if "lengths" in self.seeds:
            self._side_by_side(workers, lambda worker: self._open(worker, "lengths"))
            for worker, entry in self.timed:
                self._check(worker, entry, "lengths", stage="with other pages of the same lengths: ")

    def _load(self, worker: Worker, name: str, which: int = 0) -> None:
        for entry in worker.living:
            attempt([entry], worker.prepare, entry)
        if worker.living:
            attempt(worker.living, worker.load, self.seeds[name], which)

    def _check_unseen(self, worker: Worker, entry: Entry) -> None:
        """Whoever answers what it has seen quicker than what it has not, each time that it is asked."""
        reason = ""
        for _ in range(ASKED):
            seen = attempt([entry], worker.ask, entry, "unseen")
            if seen is None:
                return
            stale = seen.get("stale", 0.0)  # older commits' workers do not tell
            if stale > STALE and not entry.check.get("differed"):
                entry.fail(
                    "wrong",
                    f"on an activation that it had not seen its output was {stale:.0%} of a row off "
                    "the next one's on the same: it holds something of the call before",
                )
            reason = _keeps_answers(seen)
            if not reason:
                return
        entry.fail("wrong", reason)

    def _check_interpreted(self, interpreted: Sequence[tuple[Worker, Entry]]) -> None:
        """On two sets of operands that share nothing. No time stands on it, and the interpreter is slow: so
        the timed ones' workers make room for it, and it is called no more than that."""
        workers = list(dict.fromkeys(worker for worker, _ in interpreted))
        for worker in self.workers:
            worker.stop()
        for name, stage in (("first", ""), ("other", "with other operands: ")):
            self._judge_all(workers, self._outputs(workers, name, stage), name, stage)


def _start_profiler(worker: Worker) -> None:
    if any(not c.interpreted for c in worker.living):
        with contextlib.suppress(WorkerFailure):  # which the profile itself tells
            worker.start_profiler()


def seeds_of(seeds: Seeds) -> dict[str, Any]:
    """As plain values, those that are not the rule."""
    rule = asdict(Seeds())
    return {name: value for name, value in asdict(seeds).items() if value != rule[name]}


def _keeps_answers(seen: Mapping[str, Any]) -> str:
    """What speaks against calls on activations that were never seen (see bench.Bench.unseen)."""
    if seen["kept"]:
        kept = " and ".join(seen["kept"])
        return f"its output did not change with {kept}, written in place: its calls do not read what is there"
    unseen, again = seen["unseen"], seen["again"]
    # Of a few calls on a busy machine the fastest is luck, and so is which of them it is: medians count too.
    for typical in (min, statistics.median):
        if typical(unseen) <= AGAIN_TIMES * typical(again) + AGAIN_S:
            return ""
    new_s, known_s = statistics.median(unseen), statistics.median(again)
    return (
        f"on activations that it had not seen a call took {new_s * 1e3:.3g} ms, on those that it had "
        f"{known_s * 1e3:.3g} ms: it keeps answers"
    )


def _computes_elsewhere(output: Output) -> str:
    """What is against an output whatever it holds."""
    if output["late"]:
        return "its output changed after its call had returned"
    if not output["guards"]:
        return "it wrote beside its output"
    if output["result_s"] > RESULT_S + RESULT_SHARE * output["seconds"]:
        return f"reading its answer took {output['result_s'] * 1e3:.3g} ms: it is not made in the call"
    return ""


def _too_disturbed(rounds: Rounds) -> str:
    share = f"{len(rounds.disturbed)} of {rounds.made} rounds"
    reason = rounds.disturbed[-1].disturbed
    return f"too disturbed to measure, {share}: {reason} (without --disturbed refuse they count)"
