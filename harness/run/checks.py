"""Checks of a case's entries, before they are timed and after, by a judge in a process of its own.

Before: the judge computes references, each entry is called once and its output compared, also at small uneven
sizes. After: the outputs that timed calls left and those of further calls are compared with each other; then
each entry gets other live operands, which a cached answer misses, other operands altogether, which a cached
preparation misses, and others of the same lengths, which a cache by lengths misses.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import kernels
from harness.plan.entry import Entry
from harness.plan.memory import Rotation
from harness.workers.child.outputs import SPOILT
from harness.workers.process import WorkerFailure, WorkerProcess, start_judge
from harness.workers.worker import Worker, attempt
from kernels.operands import Seeds
from kernels.platform import Platform
from kernels.vendor import Vendor
from shapes.case import Case

SAMPLE_S = 0.05  # seconds of one timed sample
REFERENCE_S = 900.0  # the deadline of a request to the judge, in seconds

FEW_COMPARING_S = 1.0
COMPARING_S = 30.0
"""Comparing the outputs of an entry takes a quarter of the time of its samples. Where that is less than
FEW_COMPARING_S, it takes up to FEW_COMPARING_S, but no more than half of that time. It never takes more than
COMPARING_S."""

SAMPLED = ("live", "lengths")
"""Operands for which only some rows of the output are compared. They show an answer that was kept from other
operands, and such an answer is wrong in all rows."""
FEW = 0.05  # the share of a whole reference's work that the reference to these rows may take

NO_KERNELS = (
    "the profiler saw no kernel on the device (it needs the right to read it, and no other tool, such as "
    "DCGM, may read it meanwhile)"
)

RETURNS = (
    "; its call() returns a tensor, which is not read: write the output to `out`, or give it by result()"
)

PREPARING_ANEW = "preparing anew"  # the phase between two blocks of rounds

Answer = TypeVar("Answer")

Output = dict[str, Any]  # an entry's output and what is known of it (see bench.Bench.output)


@dataclass(kw_only=True)
class CaseChecks:
    """The checks of the entries of one case. What is wrong is written down against an entry."""

    case: Case
    workers: Sequence[Worker]
    say: Callable[[str], None]  # shows the name of each phase as it begins
    seed: int = 0
    ragged: Sequence[Case] = ()  # small cases of uneven sizes, at which the timed entries are checked before

    def __post_init__(self) -> None:
        self.digests: dict[str, int] = {}  # digests of the operands that the judge made, by the same names
        self.phases: dict[str, float] = defaultdict(float)  # seconds spent in each phase
        self.judging = threading.Lock()  # held while the judge works: workers are checked side by side
        # Runs the judge and workers at the same time, while nothing is timed. A worker dies with the thread
        # that started it (PR_SET_PDEATHSIG), so the threads last as long as this object.
        self.pool = ThreadPoolExecutor()
        seed = self.seed
        # Kernels of older commits may not be able to make adversarial operands, or others of the same
        # lengths.
        is_current = not any(worker.entries[0].setting.tree for worker in self.workers)
        # The seeds of sets of operands: `first`, on which entries are timed; `last`, of the sets that calls
        # rotate over, where these differ in value; `live`, the first with other live operands; `other`, of
        # other values throughout, and adversarial; `lengths`, of other values except for sequences' lengths.
        self.seeds = {
            "first": seeds_of(Seeds(seed, seed)),
            "live": seeds_of(Seeds(seed, seed + 1)),
            "other": seeds_of(Seeds(seed + 1, seed + 1, adversarial=is_current)),
        }
        if is_current and kernels.OPS[self.case.op].lengths:
            self.seeds["lengths"] = seeds_of(Seeds(seed + 2, seed + 2, lengths=seed))

    @functools.cached_property
    def judge(self) -> WorkerProcess:
        worker = self.workers[0]
        log = worker.log.with_name("judge.log")
        return start_judge(worker.platform, worker.threads, worker.deadlines.prepare, log)

    @property
    def living(self) -> list[tuple[Worker, Entry]]:
        """The entries that nothing is known against, each with its worker."""
        return [(worker, entry) for worker in self.workers for entry in worker.living]

    @property
    def timed(self) -> list[tuple[Worker, Entry]]:
        return [(worker, entry) for worker, entry in self.living if not entry.interpreted]

    @property
    def timed_workers(self) -> list[Worker]:
        return list(dict.fromkeys(worker for worker, _ in self.timed))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds of the `with` block to a phase. The first time the name of the phase is shown."""
        if name not in self.phases and name != PREPARING_ANEW:
            self.say(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] += time.perf_counter() - started

    def before(self, rotation: Rotation) -> None:
        """Computes the references and checks each entry that will be timed. Raises WorkerFailure where the
        judge cannot compute or compare."""
        if rotation.copies > 1 and kernels.OPS[self.case.op].turns:
            self.seeds["last"] = seeds_of(Seeds(self.seed, self.seed, turn=rotation.copies - 1))
        timed = self.timed_workers
        with self.phase("starting"):
            judge = self.pool.submit(lambda: self.judge)  # it starts beside the workers
            self.side_by_side(timed, lambda worker: attempt(worker.living, worker.living_process))
            judge.result()
        for number, case in enumerate(self.ragged):
            with self.phase("checking at ragged sizes"):
                preparing_s = self._check_ragged(timed, case, f"ragged-{number}")
            # Preparing for these sizes (mostly compiling) counts as preparation, as in the case itself.
            self.phases["checking at ragged sizes"] -= preparing_s
            self.phases["preparing ragged sizes"] += preparing_s
        with self.phase("preparing and references"):
            references = self.pool.submit(self._references)
            called = self.side_by_side(timed, self._first_outputs)
            references.result()
        with self.phase("checking"):
            for worker, digest, outputs in called:
                self._compare_operands(worker, digest, "first")
                for entry, output in outputs:
                    self._judge(entry, "first", output)
        self.judge.pause()

    def after(self, rotation: Rotation, profiled: bool = True) -> None:
        """Checks what timing left, calls the entries with other operands, asks what ran in their calls where
        `profiled`, and checks the interpreted entries. Raises WorkerFailure as `before` does."""
        with self.phase("checking again"):
            self.side_by_side(self.workers, lambda worker: self._check_timed(worker, rotation.copies))
        if profiled:
            with self.phase("profiling"):
                self._profile_all()
        with self.phase("checking again"):
            self._check_again(rotation.copies)
        interpreted = [(worker, entry) for worker, entry in self.living if entry.interpreted]
        if interpreted:
            with self.phase("interpreting"):
                self._check_interpreted(interpreted)

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        if "judge" in vars(self):
            self.judge.kill()
        self.pool.shutdown()

    def side_by_side(self, workers: Sequence[Worker], action: Callable[[Worker], Answer]) -> list[Answer]:
        """The action's result for each worker. They work at the same time, because compilers and the
        interpreter take long and mostly use one core."""
        others = [self.pool.submit(action, worker) for worker in workers[1:]]
        # The first action runs in this thread: its worker may be this process (run/single.py), where torch's
        # threads belong to the thread that first used them.
        answers = [action(worker) for worker in workers[:1]]
        answers += [other.result() for other in others]
        return answers

    # References and outputs

    def _references(self) -> None:
        for name, seeds in self.seeds.items():
            self._reference(self.case, name, seeds, FEW if name in SAMPLED else 1.0)

    def _reference(self, case: Case, name: str, seeds: dict[str, Any], share: float = 1.0) -> None:
        """Computes the reference of the case's boundary, and of the narrower ones that entries cover with a
        call of their own. The suite's producer kernels give them the same operands bit by bit, so such a
        call is judged by what it was given, and not by all that rounding to FP8 might explain."""
        boundaries = {case.boundary} | {self._judged_at(entry) for _, entry in self.living}
        for boundary in boundaries:
            about = {"name": f"{name} {boundary}", "case": replace(case, boundary=boundary)}
            digest = self.judge.ask("reference", REFERENCE_S, **about, seeds=seeds, share=share)
            if boundary == case.boundary:
                self.digests[name] = digest

    def _judged_at(self, entry: Entry) -> str:
        return entry.impl.native(self.case.boundary) or self.case.boundary

    def _first_outputs(self, worker: Worker) -> tuple[Worker, int | None, list[tuple[Entry, Output]]]:
        """Prepares the entries of a worker one after the other, and calls each on the operands `first`.
        Returns the worker, the digest of these operands, and the outputs."""
        digest = attempt(worker.living, worker.open, self.case, self.seeds["first"])
        outputs = []
        for entry in worker.living:
            output = self._output(worker, entry, digest)
            if output is not None:
                outputs.append((entry, output))
        return worker, digest, outputs

    def _compare_operands(self, worker: Worker, digest: int | None, name: str) -> None:
        if digest is not None and digest != self.digests[name]:
            for entry in worker.living:
                entry.fail("error", "its worker made other operands than the judge from the same seed")

    def _output(
        self, worker: Worker, entry: Entry, operands: int | None, stage: str = "", **how: Any
    ) -> Output | None:
        """The output of a new call, if there is one. Arguments as for `_call`."""
        if not entry.alive:
            return None
        return attempt([entry], self._call, worker, entry, operands, stage, **how)

    def _call(
        self, worker: Worker, entry: Entry, operands: int | None, stage: str = "", **how: Any
    ) -> Output:
        """Makes a call and returns its output. Writes down against the entry what is wrong with the output
        whatever values it has. Raises WorkerFailure where there is no output.

        operands: the digest that the operands must still have
        stage:    when the call is made, in words
        how:      the arguments of bench.Bench.output
        """
        output: Output = worker.ask(entry, "output", **how)
        entry.call_s = output["seconds"]
        if output["digest"] != operands:
            entry.fail("wrong", f"{stage}it changed its operands")
            # The next entry gets a new worker, with whole operands.
            worker.stop()
        elif output["late"]:
            entry.fail("wrong", f"{stage}its output changed after its call had returned")
        elif not output["guards"]:
            entry.fail("wrong", f"{stage}it wrote beside its output")
        return output

    def _report(self, entry: Entry, name: str, output: Output) -> Any:
        """The judge's report, a dictionary, of an output on the named operands."""
        reference = f"{name} {self._judged_at(entry)}"
        packed = {key: output[key] for key in ("output", "shape", "dtype")}
        packed["fp8"] = entry.impl.activations == "fp8"
        packed["truncates"] = entry.impl.truncates
        with self.judging:
            return self.judge.ask("judge", REFERENCE_S, name=reference, **packed)

    def _judge(self, entry: Entry, name: str, output: Output, stage: str = "") -> None:
        report = self._report(entry, name, output)
        if not report["ok"]:
            hint = RETURNS if output.get("ignored") else ""
            entry.fail("wrong", f"{stage}{report['reason']}{hint}")
        if name not in SAMPLED or not report["ok"]:  # errors over few rows do not replace those over all
            entry.check |= report
        entry.check["ok"] &= entry.status != "wrong"

    # Before timing

    def _check_ragged(self, workers: Sequence[Worker], case: Case, name: str) -> float:
        """Checks the entries once in a run at a small case of uneven sizes, also with addresses far apart:
        what is right at the sizes of production may be wrong there. Only a wrong output counts: a failure at
        these sizes need not occur at the case's. Returns the seconds of preparing of the worker that took
        longest.

        name: the name of this case's reference
        """
        self._reference(case, name, self.seeds["first"])

        def check(worker: Worker) -> float:
            able = [entry for entry in worker.living if _can_check_ragged(entry, case, worker.platform)]
            digest = attempt([], worker.open, case, self.seeds["first"]) if able else None
            if digest is None:
                return 0.0
            self._compare_operands(worker, digest, name)
            preparing_s = 0.0
            stage = f"at {case.text}: "
            for entry in able:
                if not entry.alive:
                    continue
                started = time.perf_counter()
                try:
                    worker.prepare(entry)
                except WorkerFailure:
                    continue
                finally:
                    preparing_s += time.perf_counter() - started
                output = attempt([], self._call, worker, entry, digest, stage)
                if output is not None:
                    self._judge(entry, name, output, stage)
                    # Kernels of older commits have no operands at such offsets.
                    if entry.alive and not entry.setting.tree:
                        self._check_far(worker, entry, name, stage)
            return preparing_s

        return max(self.side_by_side(workers, check), default=0.0)

    def _check_far(self, worker: Worker, entry: Entry, name: str, stage: str) -> None:
        """Checks an entry with operands at offsets of more than 32 bits, where memory has room for them."""
        try:
            far = worker.ask(entry, "far")
        except WorkerFailure:
            worker.stop()  # a device that failed answers no further request
            return
        if far is None:
            return
        report = self._report(entry, name, far)
        entry.check["far"] = report["ok"]
        # No layer's cache is so large in serving; a library's row keeps its time and gets a note.
        if not report["ok"] and (entry.impl.plugin or not isinstance(entry.impl, Vendor)):
            entry.fail("wrong", f"{stage}with addresses of more than 32 bits: {report['reason']}")

    # After timing

    def _check_timed(self, worker: Worker, copies: int) -> None:
        """Compares the outputs that a worker's timed calls left, and those of further calls, with each
        other. Of those that differ the judge sees the farthest."""
        timed = [entry for entry in worker.living if not entry.interpreted]
        if timed and attempt(timed, worker.request, "digest") not in (None, self.digests["first"]):
            self._find_writer(worker, timed)
        for entry in timed:
            seconds = comparing_s(entry.samples_s)
            seen = attempt([entry], worker.ask, entry, "compared", seconds=seconds)
            if seen is None:
                continue
            if seen["kept"]:
                entry.fail("wrong", "after timing: its calls gave an old answer to new activations")
            for output in seen["outputs"]:
                if entry.alive:  # references are computed only in the boundaries of living entries
                    name = self._reference_to_set(output["set"], copies)
                    self._judge(entry, name, output, "after timing: ")
            entry.check |= {key: seen[key] for key in ("calls", "differed", "distance")}
            if not seen["guards"]:
                entry.fail("wrong", "after timing: it wrote beside its output")

    def _find_writer(self, worker: Worker, timed: list[Entry]) -> None:
        """Finds which entries change their operands, where those that a worker's entries were timed on were
        changed: each entry is sampled alone on new operands. An entry that changes them is wrong; the times
        of the others do not count."""
        names: list[str] = []
        for entry in timed:
            attempt([entry], worker.open, self.case, self.seeds["first"])
            attempt([entry], worker.ask, entry, "sample", at_least_s=SAMPLE_S)
            if entry.alive and attempt([entry], worker.request, "digest") != self.digests["first"]:
                entry.fail("wrong", "after timing: it changed its operands")
                names.append(entry.name)
        by = " and ".join(names) or "another of its worker's entries"
        for entry in timed:
            entry.fail("error", f"{by} changed the operands that it was timed on: leave that out")

    def _reference_to_set(self, which: int, copies: int) -> str:
        """The name of the reference to one of the sets that calls rotate over. The reference is computed if
        it is missing."""
        if which == 0:
            return "first"
        if which == copies - 1:
            return "last"
        name = f"set {which}"
        with self.judging:
            if name not in self.digests:
                self._reference(self.case, name, seeds_of(Seeds(self.seed, self.seed, turn=which)))
        return name

    def _profile_all(self) -> None:
        on_gpu = self.workers[0].platform.kind != "cpu"
        if on_gpu:  # It takes 5 s in each process. Where it fails, taking a profile fails with the reason.
            self.side_by_side(
                self.timed_workers, lambda worker: attempt([], worker.request, "start_profiler")
            )
        for worker, entry in self.timed:
            self._profile(worker, entry)
        unseen = [entry.name for _, entry in self.timed if not entry.kernels]
        if on_gpu and unseen:
            self.say(f"{NO_KERNELS}: {', '.join(unseen)}")

    def _profile(self, worker: Worker, entry: Entry) -> None:
        """Notes what ran in a call. Where the profiler does not work the entry keeps its time: whether the
        call itself works is checked afterwards."""
        try:
            profile = worker.ask(entry, "profile")
            entry.kernels, entry.picked = profile["kernels"], profile["picked"]
            entry.ran = profile["ran"]
        except WorkerFailure as failure:
            if failure.fatal:
                entry.fail(failure.status, failure.reason)
            self.say(f"{entry.name} could not be profiled: {failure.reason}")

    def _check_again(self, copies: int) -> None:
        """Checks the timed entries on new operands: with other live operands on the first set and, where the
        sets are copies, on the last one too; a user's own entry with each live operand changed alone; with
        other operands; and with other operands of the same lengths."""
        # Where the sets are copies of each other, an entry that always reads the first set would not be
        # found. So other operands are put on a further set.
        has_copies = copies > 1 and not kernels.OPS[self.case.op].turns
        sets = [copies - 1, 0] if has_copies else [0]

        def check(worker: Worker) -> None:
            for which in sets:
                for entry in worker.living:
                    attempt([entry], worker.prepare, entry)
                if worker.living:
                    attempt(worker.living, worker.load, self.seeds["live"], which)
                self._check_each(worker, "live", "with other live operands: ", set_index=which, fill=SPOILT)
            for entry in worker.living:
                if entry.impl.plugin and not entry.interpreted:
                    self._check_reading(worker, entry)
            self._open(worker, "other", has_copies)
            beside_first = 1 if has_copies else 0
            self._check_each(worker, "other", "with other operands: ", set_index=beside_first)
            if "lengths" in self.seeds:
                self._open(worker, "lengths")
                self._check_each(worker, "lengths", "with other pages of the same lengths: ")

        self.side_by_side(self.timed_workers, check)

    def _check_each(
        self, worker: Worker, name: str, stage: str, *, interpreted: bool = False, **how: Any
    ) -> None:
        """Checks a worker's timed entries, or its interpreted ones, with a new call on the named operands.

        Arguments as for `_call`.
        """
        for entry in worker.living:
            if entry.interpreted == interpreted:
                output = self._output(worker, entry, self.digests[name], stage, **how)
                if output is not None:
                    self._judge(entry, name, output, stage)

    def _open(self, worker: Worker, name: str, beside_first: bool = False) -> None:
        """Opens the named operands. beside_first: on a second set, after `first`"""
        names = ["first", name] if beside_first else [name]
        seeds = [self.seeds[name] for name in names]
        digest = attempt(worker.living, worker.open, self.case, *seeds)
        self._compare_operands(worker, digest, name)

    def _check_reading(self, worker: Worker, entry: Entry) -> None:
        """Checks that the output of an entry changes with each live operand. Where it does not, the entry
        converted or cached that operand when it was loaded, outside the timed call."""
        unread = attempt([entry], worker.ask, entry, "unread")
        if unread:
            names = " and ".join(unread)
            entry.fail(
                "wrong",
                f"its output did not change with {names}, written in place: "
                "its calls do not read what is there",
            )

    def _check_interpreted(self, interpreted: Sequence[tuple[Worker, Entry]]) -> None:
        """Checks interpreted entries on two sets of operands that share nothing. They have no time and the
        interpreter is slow, so they are called no more often; the timed entries' workers make room for
        theirs."""
        workers = list(dict.fromkeys(worker for worker, _ in interpreted))
        for worker in self.workers:
            worker.stop()

        def check(worker: Worker) -> None:
            for name, stage in (("first", ""), ("other", "with other operands: ")):
                self._open(worker, name)
                self._check_each(worker, name, stage, interpreted=True)

        self.side_by_side(workers, check)


def _can_check_ragged(entry: Entry, case: Case, platform: Platform) -> bool:
    if entry.interpreted or not entry.impl.supports(case, platform).ok:
        return False
    # A compiler that writes a program for each size would write another one at this case.
    return bool(entry.impl.plugin) or not entry.impl.per_size


def comparing_s(samples_s: float) -> float:
    """Seconds for comparing the outputs of an entry. samples_s: the seconds that its samples took, which
    checking must not exceed"""
    if not samples_s:
        return FEW_COMPARING_S
    at_least_s = min(samples_s / 2, FEW_COMPARING_S)
    return min(max(samples_s / 4, at_least_s), COMPARING_S)


def seeds_of(seeds: Seeds) -> dict[str, Any]:
    """The fields of seeds that differ from the default, as plain values."""
    default = asdict(Seeds())
    return {name: value for name, value in asdict(seeds).items() if value != default[name]}
