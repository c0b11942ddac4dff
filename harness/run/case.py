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
from harness.plan.contender import Contender
from harness.plan.rotation import Rotation
from harness.statistics.paired import MARGIN
from harness.timing.interleaved import measure
from harness.timing.rounds import Disturbed, Policy, Rounds, Turn
from harness.workers.child.timers.cpu import LONG_S
from harness.workers.process import Worker, WorkerFailure
from harness.workers.station import Station, attempt
from kernels.operands import Seeds
from kernels.vendor import Vendor
from shapes.case import Case

TURN_S = 0.05
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
# Of comparing outputs: a quarter of the time of the turns, or half of it where that is little.
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
MakeRounds = Callable[[Mapping[str, Turn], Policy], Rounds]


Output = dict[str, Any]
"""A contender's output and what is known of it (see bench.Bench.output). It goes to the judge through this
process, not through a file that another worker could read."""

Outputs = tuple[int | None, list[tuple[Contender, Output]]]
"""The digest of a station's operands, and its contenders' outputs."""


def _nothing(*_: object) -> None:
    pass


@dataclass
class Measured:
    """What one case gave to the contenders that shared its rounds.

    anchor, twin: the A/A pair, one contender prepared twice; None where nothing was timed
    phases:       seconds of setup_s by what they were spent on
    """

    case: Case
    contenders: list[Contender]
    rotation: Rotation
    rounds: Rounds = field(default_factory=Rounds)
    anchor: Contender | None = None
    twin: Contender | None = None
    setup_s: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TimingRules:
    """How contenders are timed, whatever the case.

    seed:           of operands and orders
    disturbed:      whether rounds that other work disturbed count
    margin:         a difference below it is none
    make_rounds:    of the contenders' turns
    """

    seed: int = 0
    disturbed: Disturbed = "prefer"
    margin: float = MARGIN
    make_rounds: MakeRounds = measure


@dataclass(kw_only=True)
class CaseRun:
    """Drives the judge and the stations through one case.

    start_judge: gives it, ready; it starts when it is first asked, as stations do
    ragged:  small cases on which whoever is timed is checked before
    say:     is told each stage, in words; show_rounds: before each block, how many rounds were made, and the
             seconds spent and to spend
    seeds:   of the sets of operands: `first`, on which it is timed, `last` of those that calls rotate over
             where they differ in value, `live`, the first with other live ones, `other`, all different and
             adversarial, and `lengths`, all different but the lengths of sequences
    digests: of the operands that the judge made of them
    turns_s: seconds of each contender's turns
    phases:  seconds of each
    """

    case: Case
    stations: Sequence[Station]
    start_judge: Callable[[], Worker]
    monitor: Monitor
    scratch: Path
    say: Callable[[str], None]
    rules: TimingRules = TimingRules()
    ragged: Sequence[Case] = ()
    show_rounds: Callable[[int, float, float], None] = _nothing
    seeds: dict[str, dict[str, int]] = field(init=False)
    digests: dict[str, int] = field(init=False, default_factory=dict)
    turns_s: dict[str, float] = field(init=False, default_factory=lambda: defaultdict(float))
    judging: threading.Lock = field(init=False, default_factory=threading.Lock)
    # For the judge and all stations but one, while nothing is timed. A worker dies with the thread that
    # started it (PR_SET_PDEATHSIG), so they last as long as this.
    pool: ThreadPoolExecutor = field(init=False, default_factory=ThreadPoolExecutor)
    phases: dict[str, float] = field(init=False, default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        seed = self.rules.seed
        # Other commits' kernels may make neither adversarial operands nor others of the same lengths.
        here = not any(station.contenders[0].arm.tree for station in self.stations)
        self.seeds = {
            "first": seeds_of(Seeds(seed, seed)),
            "live": seeds_of(Seeds(seed, seed + 1)),
            "other": seeds_of(Seeds(seed + 1, seed + 1, adversarial=here)),
        }
        if here and kernels.OPS[self.case.op].lengths:
            self.seeds["lengths"] = seeds_of(Seeds(seed + 2, seed + 2, lengths=seed))

    @functools.cached_property
    def judge(self) -> Worker:
        return self.start_judge()

    @property
    def living(self) -> list[tuple[Station, Contender]]:
        """The contenders that nothing is against, each with its station."""
        return [(station, contender) for station in self.stations for contender in station.living]

    @property
    def timed(self) -> list[tuple[Station, Contender]]:
        return [(station, contender) for station, contender in self.living if not contender.interpreted]

    def run(self, rotation: Rotation, budget_s: float, max_s: float, baseline: str) -> Measured:
        """Measures for `budget_s` seconds, or up to `max_s` where one round in each block takes longer.
        Raises WorkerFailure where the judge cannot compute or compare."""
        started = time.perf_counter()
        everyone = [c for station in self.stations for c in station.contenders if not c.arm.is_twin]
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
        timed = [station for station in self.stations if any(not c.interpreted for c in station.living)]
        with self._phase("starting"):
            judge = self.pool.submit(lambda: self.judge)  # it starts beside the workers
            self._side_by_side(timed, lambda station: attempt(station.living, station.ready))
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
            self._side_by_side([s for s in self.stations if s.platform.kind != "cpu"], _start_profiler)
            for station, contender in self.timed:
                self._profile(station, contender)
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
        for station in self.stations:
            station.stop()
        if "judge" in vars(self):
            self.judge.kill()
        self.pool.shutdown()

    def _side_by_side(self, stations: Sequence[Station], action: Callable[[Station], Answer]) -> list[Answer]:
        """Of each station what the action gives. A compiler may take long, and most use one core, as the
        interpreter does: the judge and other stations use the rest."""
        others = [self.pool.submit(action, station) for station in stations[1:]]
        # In this thread, as a station may be this process, and torch's threads are each thread's own.
        own = [action(station) for station in stations[:1]]
        return own + [other.result() for other in others]

    def _outputs(self, stations: Sequence[Station], name: str, stage: str = "") -> list[Outputs]:
        """Of all stations, on the named operands."""
        return self._side_by_side(stations, lambda station: self._outputs_of(station, name, stage))

    def _outputs_of(self, station: Station, name: str, stage: str) -> Outputs:
        """Prepares a station's contenders one after the other, and calls each."""
        digest = attempt(station.living, station.open, self.case, self.seeds[name])
        outputs = []
        for contender in station.living:
            output = self._output(station, contender, digest, stage=stage)
            if output is not None:
                outputs.append((contender, output))
        return digest, outputs

    def _judge_all(
        self, stations: Sequence[Station], taken: Sequence[Outputs], name: str, stage: str = ""
    ) -> None:
        for station, (digest, outputs) in zip(stations, taken, strict=True):
            self._compare_operands(station, digest, name)
            for contender, output in outputs:
                self._judge(contender, name, output, stage)

    def _references(self) -> None:
        """Of the case's boundary, and of the narrower ones that a contender's own call covers: the suite's
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

    def _check_ragged(self, stations: Sequence[Station], case: Case, name: str) -> float:
        """A small case of uneven sizes, once in a run, and with its addresses far apart: what is right at the
        sizes of production may be wrong there. Whose sizes it does not fit is not asked. Returns how many
        seconds of it were preparing, of the station that took longest.

        name: of its reference
        """
        self._reference(case, name, self.seeds["first"])

        def check(station: Station) -> float:
            preparing_s = 0.0
            # What compilers write for each size anew would be another program; a plug-in cannot claim that.
            same = [c for c in station.living if c.impl.plugin or not c.impl.per_size]
            able = [c for c in same if not c.interpreted and c.impl.supports(case, station.platform).ok]
            digest = attempt(able, station.open, case, self.seeds["first"]) if able else None
            self._compare_operands(station, digest, name)
            for contender in able:
                stage = f"at {case.text}: "
                if not contender.alive:  # without operands nobody is to blame
                    if digest is None:
                        contender.status, contender.reason = None, ""
                    continue
                started = time.perf_counter()
                attempt([contender], station.prepare, contender)
                preparing_s += time.perf_counter() - started
                output = self._output(station, contender, digest, stage=stage)
                if output is not None:
                    with self.judging:
                        self._judge(contender, name, output, stage)
                if contender.alive and not contender.arm.tree:  # older commits' workers cannot be asked
                    self._check_far(station, contender, name, stage)
                if not contender.alive and contender.status != "wrong":
                    # It does not run at these sizes, which smoke tells.
                    contender.status, contender.reason = None, ""
            return preparing_s

        return max(self._side_by_side(stations, check), default=0.0)

    def _check_far(self, station: Station, contender: Contender, name: str, stage: str) -> None:
        """With operands whose places need more than 32 bits, where memory has room for them."""
        far = attempt([contender], station.ask, contender, "far")
        if not contender.alive:  # a device that failed answers nobody
            station.stop()
        if far is None:
            return
        with self.judging:
            report = self._report(contender, name, far)
        contender.check["far"] = report["ok"]
        # No layer's cache in serving is so large: of a library it is worth a note.
        if not report["ok"] and (contender.impl.plugin or not isinstance(contender.impl, Vendor)):
            contender.fail("wrong", f"{stage}with addresses of more than 32 bits: {report['reason']}")

    def _judged_at(self, contender: Contender) -> str:
        return contender.impl.native(self.case.boundary) or self.case.boundary

    def _open(self, station: Station, name: str, beside: bool = False) -> None:
        """beside: on a second set, after the first"""
        seeds = [self.seeds["first"]] * beside + [self.seeds[name]]
        digest = attempt(station.living, station.open, self.case, *seeds)
        self._compare_operands(station, digest, name)

    def _compare_operands(self, station: Station, digest: int | None, name: str) -> None:
        """A station that makes others than the judge is of no use."""
        if digest is not None and digest != self.digests[name]:
            for contender in station.living:
                contender.fail("error", "its worker made other operands than the judge from the same seed")

    def _check(
        self, station: Station, contender: Contender, name: str, *, stage: str = "", **how: Any
    ) -> None:
        """Has the output of a new call judged against the named reference. `stage` says in words when it was
        made; how: see bench.Bench.output."""
        output = self._output(station, contender, self.digests[name], stage=stage, **how)
        if output is not None:
            self._judge(contender, name, output, stage)

    def _output(
        self, station: Station, contender: Contender, operands: int | None, *, stage: str = "", **how: Any
    ) -> Output | None:
        """The output of a new call, if there is one. operands: their digest; who changes them is wrong."""
        if not contender.alive:
            return None
        output: Output | None = attempt([contender], station.ask, contender, "output", **how)
        if output is None:
            return None
        contender.call_s = output["seconds"]
        if output["digest"] != operands:
            contender.fail("wrong", f"{stage}it changed its operands")
            # The next one gets a new worker, with whole operands.
            station.stop()
        elif reason := _computes_elsewhere(output):
            contender.fail("wrong", f"{stage}{reason}")
        return output

    def _report(self, contender: Contender, name: str, output: Output) -> dict[str, Any]:
        """The judge's, of an output on the named operands."""
        report: dict[str, Any] = self.judge.ask(
            "judge",
            REFERENCE_S,
            name=f"{name} {self._judged_at(contender)}",
            **{key: output[key] for key in ("output", "shape", "dtype")},
            fp8=contender.impl.activations == "fp8",
            truncates=contender.impl.truncates,
        )
        return report

    def _judge(self, contender: Contender, name: str, output: Output, stage: str = "") -> None:
        report = self._report(contender, name, output)
        if not report["ok"]:
            contender.fail("wrong", f"{stage}{report['reason']}")
        if name not in SAMPLED or not report["ok"]:  # errors of a small sample tell less than those before
            contender.check |= report
        contender.check["ok"] &= contender.status != "wrong"

    def _measure(self, measured: Measured, budget_s: float, max_s: float, baseline: str) -> None:
        timed = self.timed
        if not timed:
            return
        station, anchor = next(((s, c) for s, c in timed if c.impl.name == baseline), timed[0])
        twin = next((c for _, c in timed if c.arm.is_twin), None)
        if twin is None:
            twin = replace(anchor, name=f"{anchor.name} (again)", host_s=[])
            timed.append((station, twin))

        made, spent_s = 0, 0.0

        def begin_round() -> None:
            nonlocal made
            made += 1
            self.monitor.begin()

        def begin_block(block: int, names: Collection[str]) -> None:
            self.show_rounds(made, spent_s, policy.budget_s)

            def anew(station: Station) -> None:
                here = [c for s, c in timed if s is station and c.alive]
                if here:
                    attempt(here, station.fresh, measured.rotation)
                for contender in here:
                    if contender.alive and contender.name in names:
                        attempt([contender], station.prepare, contender)

            with self._phase(ANEW):
                if not block:  # most of it is faulting memory in
                    self._side_by_side(self.stations, anew)
                else:  # the calls made tell whether later blocks need them (see bench.py)
                    for station in self.stations:
                        anew(station)
            for station in self.stations:
                station.pause()

        def turn(station: Station, contender: Contender) -> float:
            nonlocal spent_s
            if contender.alive:
                attempt([contender], station.ask, contender, "spoil")
            if contender.alive:
                began = time.perf_counter()
                with self.monitor.watching(f"{self.case.key} {contender.name}"):
                    answer = attempt([contender], station.ask, contender, "turn", at_least=TURN_S)
                took_s = time.perf_counter() - began
                spent_s += took_s
                self.turns_s[contender.name] += took_s
                station.pause()
                if answer is not None:
                    if answer["host_seconds"] is not None:
                        contender.host_s.append(answer["host_seconds"])
                    return answer["seconds"]
            # Whoever shared its worker is prepared again now, not in a turn of his own.
            for other in (c for s, c in timed if s is station and c.alive):
                attempt([other], station.prepare, other)
            station.pause()
            raise RuntimeError(contender.reason)

        turns = {c.name: functools.partial(turn, s, c) for s, c in timed}
        policy = Policy(
            begin_block=begin_block,
            begin_round=begin_round,
            end_round=self.monitor.end,
            disturbed=self.rules.disturbed,
            margin=self.rules.margin,
            slow=SLOW,
            seed=self.rules.seed,
            anchor=anchor.name,
            twin=twin.name,
        )
        # A turn is an untimed call, but a long one, and then timed ones; a fifth more for what is missed.
        turns_s = (max(c.call_s, TURN_S) + (c.call_s < LONG_S) * c.call_s for _, c in timed)
        min_s = 1.2 * policy.opening * sum(turns_s)
        policy = replace(policy, budget_s=min(max_s, max(budget_s, min_s)))
        self.monitor.conditions()  # what was before is not this case's
        rounds = measured.rounds = self.rules.make_rounds(turns, policy)
        measured.conditions = self.monitor.conditions()
        measured.anchor, measured.twin = anchor, twin
        for _, contender in timed:
            if contender.name in rounds.dropped:
                contender.fail("error", rounds.dropped[contender.name])
            if rounds.stopped == "disturbed":
                contender.fail("error", _too_disturbed(rounds))
            contender.beaten = rounds.beaten.get(contender.name, "")

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
        for station in self.stations:
            timed = [c for c in station.living if not c.interpreted]
            if timed and attempt(timed, station.digest) not in (None, self.digests["first"]):
                self._find_writer(station, timed)
            for contender in timed:
                # So that all checking takes no longer than measuring.
                turns_s = self.turns_s[contender.name]
                few_s = min(turns_s / 2, FEW_COMPARING_S) if turns_s else FEW_COMPARING_S
                spent = min(max(turns_s / 4, few_s), COMPARING_S)
                seen = attempt([contender], station.ask, contender, "compared", seconds=spent)
                if seen is None:
                    continue
                if seen["kept"]:
                    contender.fail(
                        "wrong", "after timing: its timed calls gave an old answer to new activations"
                    )
                for output in seen["outputs"]:
                    if not contender.alive:  # that set may have no reference in the boundary of its call
                        break
                    self._judge(contender, self._of_set(output["set"], copies), output, "after timing: ")
                contender.check |= {key: seen[key] for key in ("calls", "differed", "distance")}
                if not seen["guards"]:
                    contender.fail("wrong", "after timing: it wrote beside its output")

    def _profile(self, station: Station, contender: Contender) -> None:
        """What ran in a call. Where a machine's profiler does not work the row keeps its time: that the call
        itself works is checked again after."""
        try:
            profile = station.ask(contender, "profile")
            contender.kernels, contender.picked = profile["kernels"], profile["picked"]
            contender.ran = profile["ran"]
        except WorkerFailure as failure:
            if failure.fatal:
                contender.fail(failure.status, failure.reason)
            self.say(f"{contender.name} could not be profiled: {failure.reason}")

    def _find_writer(self, station: Station, timed: list[Contender]) -> None:
        """Somebody changed the operands that all of a worker's contenders were timed on: whoever does it
        alone is wrong, and nobody's time counts."""
        names: list[str] = []
        for contender in timed:
            attempt([contender], station.open, self.case, self.seeds["first"])
            attempt([contender], station.ask, contender, "turn", at_least=TURN_S)
            if contender.alive and attempt([contender], station.digest) != self.digests["first"]:
                contender.fail("wrong", "after timing: it changed its operands")
                names.append(contender.name)
        by = " and ".join(names) or "another of its worker's contenders"
        for contender in timed:
            contender.fail("error", f"{by} changed the operands that it was timed on: leave that out")

    def _check_again(self, copies: int) -> None:
        """With other live operands, which a cached answer misses, on the last set alone and on the first;
        with activations that nobody judges, which are as quick as those that were timed; then with other
        operands altogether, which a cached preparation misses, and with others of the same lengths, which
        what was cached by lengths misses."""
        stations = list(dict.fromkeys(station for station, _ in self.timed))
        op = kernels.OPS[self.case.op]
        live: dict[str, Any] = {
            "stage": "with other live operands: ",
            "poison": False,
            "scribble": True,
        }
        if copies > 1 and not op.turns:
            self._side_by_side(stations, lambda station: self._load(station, "live", copies - 1))
            for station, contender in self.timed:
                self._check(station, contender, "live", **live, which=copies - 1)
        self._side_by_side(stations, lambda station: self._load(station, "live"))
        for station, contender in self.timed:
            self._check(station, contender, "live", **live)
        for station, contender in self.timed:
            self._check_unseen(station, contender)
        # Where weights are streamed the others stand on a second set: whoever takes the first set's is wrong.
        beside = copies > 1 and not op.turns
        self._side_by_side(stations, lambda station: self._open(station, "other", beside))
        for station, contender in self.timed:
            stage = "with other stationary operands: "
            self._check(station, contender, "other", stage=stage, which=int(beside))
        if "lengths" in self.seeds:
            self._side_by_side(stations, lambda station: self._open(station, "lengths"))
            for station, contender in self.timed:
                self._check(station, contender, "lengths", stage="with other pages of the same lengths: ")

    def _load(self, station: Station, name: str, which: int = 0) -> None:
        for contender in station.living:
            attempt([contender], station.prepare, contender)
        if station.living:
            attempt(station.living, station.load, self.seeds[name], which)

    def _check_unseen(self, station: Station, contender: Contender) -> None:
        """Whoever answers what it has seen quicker than what it has not, each time that it is asked."""
        reason = ""
        for _ in range(ASKED):
            seen = attempt([contender], station.ask, contender, "unseen")
            if seen is None:
                return
            stale = seen.get("stale", 0.0)  # older commits' workers do not tell
            if stale > STALE and not contender.check.get("differed"):
                contender.fail(
                    "wrong",
                    f"on an activation that it had not seen its output was {stale:.0%} of a row off "
                    "the next one's on the same: it holds something of the call before",
                )
            reason = _keeps_answers(seen)
            if not reason:
                return
        contender.fail("wrong", reason)

    def _check_interpreted(self, interpreted: Sequence[tuple[Station, Contender]]) -> None:
        """On two sets of operands that share nothing. No time stands on it, and the interpreter is slow: so
        the timed ones' workers make room for it, and it is called no more than that."""
        stations = list(dict.fromkeys(station for station, _ in interpreted))
        for station in self.stations:
            station.stop()
        for name, stage in (("first", ""), ("other", "with other operands: ")):
            self._judge_all(stations, self._outputs(stations, name, stage), name, stage)


def _start_profiler(station: Station) -> None:
    if any(not c.interpreted for c in station.living):
        with contextlib.suppress(WorkerFailure):  # which the profile itself tells
            station.start_profiler()


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
