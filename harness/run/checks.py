"""Checks of a case's entries. The judge, a process of its own, computes references and compares outputs.

Before timing, each entry is called once at small uneven sizes and once at the case's sizes.

After timing, the outputs that the timed calls left, and those of further calls, are compared with each other.
Then each entry is called on other operands (`CaseChecks.seeds`). Other live ones show an entry that returns a
cached answer; others altogether, one that cached what it prepared; those of the same lengths, one that caches
by lengths.
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

FEW_ROWS = ("live", "lengths")
"""Names of the operands for which only a few rows of the output are compared. They are there to find an entry
that gives the answer to earlier operands, and such an answer is wrong in every row."""
FEW_ROWS_SHARE = 0.05  # the share of a whole reference's work that the reference to a few rows may take

NO_KERNELS = (
    "the profiler saw no kernel on the device (it needs the right to read it, and no other tool, such as "
    "DCGM, may read it meanwhile)"
)

UNREAD = "; its call() returns a tensor, which is not read: write the output to `out`, or give it by result()"

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
    ragged: Sequence[Case] = ()  # small cases of uneven sizes, at which entries are checked before timing

    def __post_init__(self) -> None:
        self.digests: dict[str, int] = {}  # of the operands that the judge made, by the names of `seeds`
        self.wrong_at_ragged: dict[str, str] = {}  # entries that were wrong at a ragged case, with the reason
        self.phases: dict[str, float] = defaultdict(float)  # seconds spent in each phase
        self.judging = threading.Lock()  # held while the judge works: workers are checked side by side
        # Runs the judge and workers at the same time, while nothing is timed. A worker dies with the thread
        # that started it (PR_SET_PDEATHSIG), so the threads last as long as this object.
        self.pool = ThreadPoolExecutor()
        seed = self.seed
        # Kernels of older commits may be unable to make adversarial operands, or others of the same lengths.
        has_older = any(worker.entries[0].setting.tree for worker in self.workers)
        # The sets of operands by name, with their seeds; `other` has other values throughout. `before` adds
        # `last`, the last of the sets that calls rotate over, where these differ in value.
        self.seeds = {
            "first": seeds_of(Seeds(stationary=seed, live=seed)),  # entries are timed on them
            "live": seeds_of(Seeds(stationary=seed, live=seed + 1)),  # the same with other live operands
            "other": seeds_of(Seeds(stationary=seed + 1, live=seed + 1, adversarial=not has_older)),
        }
        if kernels.OPS[self.case.op].lengths and not has_older:  # other values, sequences of the same lengths
            self.seeds["lengths"] = seeds_of(Seeds(stationary=seed + 2, live=seed + 2, lengths=seed))

    @functools.cached_property
    def judge(self) -> WorkerProcess:
        """The judge's process, which starts when it is first asked for."""
        worker = self.workers[0]
        log = worker.log.with_name("judge.log")
        return start_judge(worker.platform, worker.threads, worker.deadlines.prepare, log)

    @property
    def living(self) -> list[tuple[Worker, Entry]]:
        """The entries that have not failed, each with its worker."""
        return [(worker, entry) for worker in self.workers for entry in worker.living]

    @property
    def timed(self) -> list[tuple[Worker, Entry]]:
        """Of the living entries those that are timed, each with its worker."""
        return [(worker, entry) for worker, entry in self.living if not entry.interpreted]

    @property
    def timed_workers(self) -> list[Worker]:
        return list(dict.fromkeys(worker for worker, _ in self.timed))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds of the `with` block to a phase. Shows its name when it first begins."""
        if name not in self.phases and name != PREPARING_ANEW:
            self.say(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] += time.perf_counter() - started

    def before(self, rotation: Rotation) -> None:
        """Computes references and checks what will be timed. Raises WorkerFailure if the judge fails."""
        if rotation.copies > 1 and kernels.OPS[self.case.op].turns:
            self.seeds["last"] = self._seeds_of_set(rotation.copies - 1)
        timed = self.timed_workers
        with self.phase("starting"):
            starting_judge = self.pool.submit(lambda: self.judge)  # it starts beside the workers
            self.side_by_side(timed, lambda worker: attempt(worker.living, worker.living_process))
            starting_judge.result()
        for number, case in enumerate(self.ragged):
            check_ragged = functools.partial(self._check_ragged, case=case, name=f"ragged-{number}")
            with self.phase("checking at ragged sizes"):
                self._reference(case, f"ragged-{number}", self.seeds["first"])
                preparing_s = max(self.side_by_side(timed, check_ragged), default=0.0)
            # Preparing for these sizes (mostly compiling) counts as preparation, as in the case itself.
            self.phases["checking at ragged sizes"] -= preparing_s
            self.phases["preparing ragged sizes"] += preparing_s
        with self.phase("preparing and references"):
            computing_references = self.pool.submit(self._references)
            first_outputs = self.side_by_side(timed, self._first_outputs)
            computing_references.result()
        with self.phase("checking"):
            for worker, digest, outputs in first_outputs:
                self._compare_operands(worker, digest, "first")
                for entry, output in outputs:
                    self._judge(entry, "first", output)
        self.judge.pause()

    def after(self, rotation: Rotation, profiled: bool = True) -> None:
        """Checks the outputs that timing left, notes what ran in calls where `profiled`, calls timed entries
        on other operands, and checks interpreted ones. Raises WorkerFailure if the judge fails."""
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
        if "judge" in vars(self):  # The cached property has its value here once the judge was started.
            self.judge.kill()
        self.pool.shutdown()

    def side_by_side(self, workers: Sequence[Worker], action: Callable[[Worker], Answer]) -> list[Answer]:
        """The action's result for each worker. They work at the same time: compilers mostly use one core."""
        others = [self.pool.submit(action, worker) for worker in workers[1:]]
        # The first action runs in this thread: its worker may be this process (run/single.py), where torch's
        # threads belong to the thread that first used them.
        answers = [action(worker) for worker in workers[:1]]
        answers += [other.result() for other in others]
        return answers

    # References and outputs

    def _references(self) -> None:
        for name, seeds in self.seeds.items():
            self._reference(self.case, name, seeds, share=FEW_ROWS_SHARE if name in FEW_ROWS else 1.0)

    def _reference(self, case: Case, name: str, seeds: dict[str, Any], share: float = 1.0) -> None:
        """Computes references to the named operands, one in each boundary that entries are judged at (see
        `_judged_at`). share: the share of a whole reference's work that each may take"""
        boundaries = {case.boundary} | {self._judged_at(entry) for _, entry in self.living}
        for boundary in boundaries:
            about = {"name": f"{name} {boundary}", "case": replace(case, boundary=boundary)}
            digest = self.judge.ask("reference", REFERENCE_S, **about, seeds=seeds, share=share)
            if boundary == case.boundary:
                self.digests[name] = digest

    def _judged_at(self, entry: Entry) -> str:
        """The boundary of the reference that an entry's output is compared with. An entry that covers less
        than the case's boundary gets its operands from the suite's kernels, such as the one that rounds to
        FP8. Its reference then gets the same operands, so that rounding them excuses no error."""
        return entry.impl.native(self.case.boundary) or self.case.boundary

    def _first_outputs(self, worker: Worker) -> tuple[Worker, int | None, list[tuple[Entry, Output]]]:
        """Prepares and calls each entry on the operands `first`. Returns worker, their digest, outputs."""
        digest = attempt(worker.living, worker.open, self.case, self.seeds["first"])
        outputs = []
        for entry in worker.living:
            if output := self._output(worker, entry, digest):
                outputs.append((entry, output))
        return worker, digest, outputs

    def _compare_operands(self, worker: Worker, digest: int | None, name: str) -> None:
        """Compares the digest of a worker's operands, if it has any, with the judge's of this name."""
        if digest is not None and digest != self.digests[name]:
            for entry in worker.living:
                entry.fail("error", "its worker made other operands than the judge from the same seed")

    def _output(
        self, worker: Worker, entry: Entry, digest: int | None, stage: str = "", **arguments: Any
    ) -> Output | None:
        """The output of a new call; None where the entry has failed or fails. Arguments as for `_call`."""
        if not entry.alive:
            return None
        return attempt([entry], self._call, worker, entry, digest, stage, **arguments)

    def _call(
        self, worker: Worker, entry: Entry, digest: int | None, stage: str = "", **arguments: Any
    ) -> Output:
        """Makes a call and returns its output. The entry fails where the call changed its operands, wrote
        beside its output, or wrote after it had returned. Raises WorkerFailure where there is no output.

        digest:    of the operands before the call, which has to leave them as they were
        stage:     when the call is made: a reason begins with it, such as `after timing: `
        arguments: `set_index` and `fill` of bench.Bench.output
        """
        output: Output = worker.ask(entry, "output", **arguments)
        entry.call_s = output["seconds"]
        if output["digest"] != digest:
            entry.fail("wrong", f"{stage}it changed its operands")
            # The next entry gets a new worker, with whole operands.
            worker.stop()
        elif output["late"]:
            entry.fail("wrong", f"{stage}its output changed after its call had returned")
        elif not output["guards"]:
            entry.fail("wrong", f"{stage}it wrote beside its output")
        return output

    def _report(self, entry: Entry, name: str, output: Output) -> dict[str, Any]:
        """The judge's report of an output on the named operands (see judge.Judge.judge)."""
        tensor = {key: output[key] for key in ("output", "shape", "dtype")}
        tolerance = {"fp8": entry.impl.activations == "fp8", "truncates": entry.impl.truncates}
        reference = f"{name} {self._judged_at(entry)}"
        with self.judging:
            report = self.judge.ask("judge", REFERENCE_S, name=reference, **tensor, **tolerance)
        return dict(report)

    def _judge(self, entry: Entry, name: str, output: Output, stage: str = "") -> None:
        """Has an output on the named operands judged. A wrong entry fails; its `check` gets the report."""
        report = self._report(entry, name, output)
        if not report["ok"]:
            hint = UNREAD if output.get("ignored") else ""
            entry.fail("wrong", f"{stage}{report['reason']}{hint}")
        # Errors over a few rows do not replace those over all rows, unless they show that the entry is wrong.
        if name not in FEW_ROWS or not report["ok"]:
            entry.check |= report
        if entry.status == "wrong":  # also for another reason than this report's
            entry.check["ok"] = False

    # Before timing

    def _check_ragged(self, worker: Worker, case: Case, name: str) -> float:
        """Checks a worker's entries at a small case of uneven sizes, where an entry may be wrong though it is
        right at the sizes of production. Only a wrong output counts against it: another failure need not
        occur at the sizes that are timed. Returns the seconds of preparing. name: of the case's reference"""
        able = [entry for entry in worker.living if _can_check_ragged(entry, case, worker.platform)]
        if not able:
            return 0.0
        digest = attempt([], worker.open, case, self.seeds["first"])
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
            if output is None:
                continue
            self._judge(entry, name, output, stage)
            if entry.alive and not entry.setting.tree:  # Kernels of older commits have no such operands.
                self._check_far(worker, entry, name, stage)
            if entry.status == "wrong":
                self.wrong_at_ragged[entry.name] = entry.reason
        return preparing_s

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
        # No layer's cache is so large in serving. So a library's row keeps its time, and gets a note.
        is_library = isinstance(entry.impl, Vendor) and not entry.impl.plugin
        if not report["ok"] and not is_library:
            entry.fail("wrong", f"{stage}with addresses of more than 32 bits: {report['reason']}")

    # After timing

    def _check_timed(self, worker: Worker, copies: int) -> None:
        """Compares the outputs that the timed calls of a worker's entries left, and those of further calls,
        with each other (see bench.Bench.compared). The judge gets the first outputs and the farthest one."""
        timed = [entry for entry in worker.living if not entry.interpreted]
        digest = attempt(timed, worker.request, "digest") if timed else None
        if digest is not None and digest != self.digests["first"]:
            self._find_writers(worker, timed)
        for entry in timed:
            seconds = comparing_s(entry.samples_s)
            compared = attempt([entry], worker.ask, entry, "compared", seconds=seconds)
            if compared is None:
                continue
            if compared["stale"]:
                entry.fail("wrong", "after timing: its calls gave an old answer to new activations")
            for output in compared["outputs"]:
                if entry.alive:  # references are computed only in the boundaries of living entries
                    name = self._reference_to_set(output["set"], copies)
                    self._judge(entry, name, output, "after timing: ")
            for key in ("calls", "differed", "distance"):
                entry.check[key] = compared[key]
            if not compared["guards"]:
                entry.fail("wrong", "after timing: it wrote beside its output")

    def _find_writers(self, worker: Worker, timed: list[Entry]) -> None:
        """Finds which of a worker's timed entries changed the operands that all were timed on, by sampling
        each alone on new operands. An entry that changes them is wrong, and no times of the others count."""
        writers: list[str] = []
        for entry in timed:
            attempt([entry], worker.open, self.case, self.seeds["first"])
            attempt([entry], worker.ask, entry, "sample", at_least_s=SAMPLE_S)
            if entry.alive and attempt([entry], worker.request, "digest") != self.digests["first"]:
                entry.fail("wrong", "after timing: it changed its operands")
                writers.append(entry.name)
        culprits = " and ".join(writers) or "another of its worker's entries"
        for entry in timed:
            entry.fail("error", f"{culprits} changed the operands that it was timed on: leave that out")

    def _seeds_of_set(self, set_index: int) -> dict[str, Any]:
        """The seeds of one of the sets that calls rotate over."""
        return seeds_of(Seeds(stationary=self.seed, live=self.seed, turn=set_index))

    def _reference_to_set(self, set_index: int, copies: int) -> str:
        """The name of the reference to one of the sets that calls rotate over, computed if it is missing."""
        if set_index == 0:
            return "first"
        if set_index == copies - 1:
            return "last"
        name = f"set {set_index}"
        with self.judging:
            if name not in self.digests:
                self._reference(self.case, name, self._seeds_of_set(set_index))
        return name

    def _profile_all(self) -> None:
        """Notes of each timed entry what ran in a call."""
        on_gpu = self.workers[0].platform.kind != "cpu"
        if on_gpu:  # Starting takes 5 s in each process. Where it fails, each profile fails with the reason.
            self.side_by_side(
                self.timed_workers, lambda worker: attempt([], worker.request, "start_profiler")
            )
        for worker, entry in self.timed:
            self._profile(worker, entry)
        unseen = [entry.name for _, entry in self.timed if not entry.kernels]
        if on_gpu and unseen:
            self.say(f"{NO_KERNELS}: {', '.join(unseen)}")

    def _profile(self, worker: Worker, entry: Entry) -> None:
        """Notes of an entry what ran in a call. Where the profiler fails, the entry keeps its time:
        `_check_again` shows whether the call itself works."""
        try:
            profile = worker.ask(entry, "profile")
            entry.kernels = profile["kernels"]
            entry.picked = profile["picked"]
            entry.ran = profile["ran"]
        except WorkerFailure as failure:
            if failure.fatal:
                entry.fail(failure.status, failure.reason)
            self.say(f"{entry.name} could not be profiled: {failure.reason}")

    def _check_again(self, copies: int) -> None:
        """Checks the timed entries on other operands."""
        # Where the sets are copies of each other (not Op.turns), an entry that reads one set in every call is
        # right on all. It shows where sets differ: other live operands are put on the last set, before the
        # first one gets them too; and `other` is set 1, beside `first` as set 0.
        has_copies = copies > 1 and not kernels.OPS[self.case.op].turns
        sets = [copies - 1, 0] if has_copies else [0]

        def check(worker: Worker) -> None:
            for set_index in sets:
                for entry in worker.living:
                    attempt([entry], worker.prepare, entry)
                if worker.living:
                    attempt(worker.living, worker.load, self.seeds["live"], set_index)
                stage = "with other live operands: "
                self._check_each(worker, "live", stage, set_index=set_index, fill=SPOILT)
            for entry in worker.living:
                if entry.impl.plugin and not entry.interpreted:
                    self._check_reading(worker, entry)
            self._open(worker, "other", beside_first=has_copies)
            self._check_each(worker, "other", "with other operands: ", set_index=1 if has_copies else 0)
            if "lengths" in self.seeds:
                self._open(worker, "lengths")
                self._check_each(worker, "lengths", "with other pages of the same lengths: ")

        self.side_by_side(self.timed_workers, check)

    def _check_each(
        self, worker: Worker, name: str, stage: str, *, interpreted: bool = False, **arguments: Any
    ) -> None:
        """Checks a worker's timed entries, or its interpreted ones, with a new call on the named operands.
        The stage and the further arguments are those of `_call`."""
        for entry in worker.living:
            if entry.interpreted == interpreted:
                output = self._output(worker, entry, self.digests[name], stage, **arguments)
                if output is not None:
                    self._judge(entry, name, output, stage)

    def _open(self, worker: Worker, name: str, beside_first: bool = False) -> None:
        """Has a worker make the named operands, as set 0, or as set 1 with `first` as set 0."""
        names = ["first", name] if beside_first else [name]
        seeds = [self.seeds[name] for name in names]
        digest = attempt(worker.living, worker.open, self.case, *seeds)
        self._compare_operands(worker, digest, name)

    def _check_reading(self, worker: Worker, entry: Entry) -> None:
        """Checks that the output of an entry changes with each live operand. Where it does not, the entry
        converted or cached that operand when it was loaded, outside the timed call."""
        unread = attempt([entry], worker.ask, entry, "unread")
        if unread:
            change = f"its output did not change with {' and '.join(unread)}, written in place"
            entry.fail("wrong", f"{change}: its calls do not read what is there")

    def _check_interpreted(self, interpreted: Sequence[tuple[Worker, Entry]]) -> None:
        """Checks interpreted entries, which are slow, on only two sets of operands; these share nothing."""
        workers = list(dict.fromkeys(worker for worker, _ in interpreted))
        for worker in self.workers:
            worker.stop()  # This frees the memory of the timed entries.

        def check(worker: Worker) -> None:
            for name, stage in (("first", ""), ("other", "with other operands: ")):
                self._open(worker, name)
                self._check_each(worker, name, stage, interpreted=True)

        self.side_by_side(workers, check)


def _can_check_ragged(entry: Entry, case: Case, platform: Platform) -> bool:
    if entry.interpreted or not entry.impl.supports(case, platform).ok:
        return False
    # A row that is compiled for each size runs another program at this case than the timed one. So the
    # suite's own rows of this kind are not checked here; plug-ins of this kind are.
    return bool(entry.impl.plugin) or not entry.impl.per_size


def comparing_s(samples_s: float) -> float:
    """The seconds in which the outputs of an entry are compared: a quarter of those that its samples took,
    from 1 s to 30 s, but at most half of them, so that checking takes less time than measuring."""
    if not samples_s:  # the budget ended before its first sample
        return 1.0
    return min(max(samples_s / 4, 1.0), samples_s / 2, 30.0)


def seeds_of(seeds: Seeds) -> dict[str, Any]:
    """The fields of seeds that differ from the default, as plain values."""
    default = asdict(Seeds())
    return {name: value for name, value in asdict(seeds).items() if value != default[name]}
