"""Makes the records of a case from its rounds: cells, and verdicts between them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import kernels
from harness.catalogue.devices import Ceilings, peaks
from harness.files import finite
from harness.plan.entry import ConfigSearch, Entry
from harness.plan.memory import Rotation
from harness.results.schema import CaseDone, Cell, DisturbedRound, Record, Run, Samples, Verdict
from harness.statistics.intervals import interval
from harness.statistics.multiple import JointVerdict, joint_verdicts
from harness.statistics.paired import compare
from harness.timing.rounds import Round, Rounds
from harness.workers.child.outputs import LEAST_CALLS
from kernels.defects import known_defects
from kernels.op import Work
from kernels.platform import Platform
from shapes.case import Case


@dataclass
class Group:
    """Entries of a case that memory holds at once and that are timed in the same rounds, with the results."""

    case: Case
    entries: list[Entry]
    rotation: Rotation
    rounds: Rounds = field(default_factory=Rounds)
    baseline: Entry | None = None
    rerun: Entry | None = None  # the baseline prepared a second time; both are None where nothing was timed
    baseline_impl: str = ""  # the baseline's implementation; where it failed, another entry takes its place
    setup_s: float = 0.0  # seconds for everything but samples
    phases: Mapping[str, float] = field(default_factory=dict)  # the parts of `setup_s`, in seconds
    conditions: dict[str, Any] = field(default_factory=dict)  # see schema.CaseDone.conditions


def build_records(
    case: Case, groups: Sequence[Group], platform: Platform, run: Run, search: ConfigSearch | None = None
) -> tuple[list[Record], CaseDone]:
    """The cells and verdicts of a case that was measured in groups, and the record that it is finished.
    search: how the configurations were found, in a race"""
    cells: dict[str, Cell] = {}
    verdicts: list[Record] = []
    phases: dict[str, float] = defaultdict(float)
    numbered: list[Group] = []  # the groups, with blocks whose numbers are unique in the case
    next_block = 0
    for group in groups:
        rounds = group.rounds.numbered(next_block)
        next_block = max(next_block, rounds.next_block)
        numbered.append(replace(group, rounds=rounds))
        cells_of_group, verdicts_of_group = build_cells(numbered[-1], platform, run)
        for name, cell in cells_of_group.items():
            # The baseline is in every group. Its cell is that of the first group, with the samples of all.
            if name in cells:
                cells[name].samples.add(cell.samples)
                cells[name].eliminations.add(cell.eliminations)
            else:
                cells[name] = cell
        verdicts += verdicts_of_group
        for phase, seconds in group.phases.items():
            phases[phase] += seconds
    timed = [group for group in numbered if group.baseline is not None]
    done = CaseDone(
        case=case.key,
        measured_s=sum(group.rounds.spent_s for group in numbered),
        setup_s=sum(group.setup_s for group in groups),
        rounds=sum(len(group.rounds.rounds) for group in numbered),
        blocks=min((len(set(group.rounds.blocks)) for group in timed), default=0),
        eliminations=sum(len(group.rounds.eliminations) for group in numbered),
        stopped=", ".join(dict.fromkeys(group.rounds.stopped for group in timed)),
        disturbed=[record for group in timed for record in _disturbed(group.rounds)],
        conditions=[group.conditions for group in timed],
        phases=phases,
        search=search,
    )
    return [*cells.values(), *verdicts], done


def _disturbed(rounds: Rounds) -> list[DisturbedRound]:
    return [
        DisturbedRound(
            block=r.block,
            round=r.index,
            reason=r.disturbed,
            counted=r.use != "left out",
            seconds=dict(r.seconds) if r.use == "left out" else {},
        )
        for r in rounds.made
        if r.disturbed
    ]


def build_cells(group: Group, platform: Platform, run: Run) -> tuple[dict[str, Cell], list[Verdict]]:
    """The cells of a group by the names of its entries, without reruns, and the verdicts between them."""
    op = kernels.OPS[group.case.op]
    work = op.work(op.sizes(group.case.sizes), group.case.boundary)
    cells = {
        entry.name: _cell(entry, group, platform, work, run)
        for entry in group.entries
        if not entry.setting.is_rerun
    }
    timed = [name for name, cell in cells.items() if cell.status == "ok" and cell.samples.seconds]
    return cells, _verdicts(group, timed, run.confidence, run.margin)


def _cell(entry: Entry, group: Group, platform: Platform, work: Work, run: Run) -> Cell:
    """The cell of an entry, with a time where the entry is right and has samples."""
    case, rotation = group.case, group.rotation
    cell = Cell(
        op=case.op,
        case=case.key,
        boundary=case.boundary,
        impl=entry.impl.name,
        platform=platform.kind,
        arch=platform.arch,
        setting=entry.setting.name,
        launch=entry.launch,
        cache=rotation.mode,
        status=entry.status or ("checked" if entry.interpreted else "ok"),
        reason=_failure(entry, group, platform) or entry.beaten or _note(entry, group),
        check=entry.check,
        kernels=[kernel["name"] for kernel in entry.kernels],
        kernel_us=[kernel["us"] for kernel in entry.kernels],
        picked=entry.picked,
        ran=entry.ran,
        host_us=statistics.median(entry.host_s) * 1e6 if entry.host_s else None,
        synchronises=entry.synchronises,
        config=entry.config,
        setup_s=entry.setup_s or None,
        pinned=entry.pinned,
        place=case.place,
        weight=case.weight,
        version=entry.impl.version,
        source=entry.source,
        rotation=asdict(rotation),
    )
    cell.eliminations = _samples(group.rounds.eliminations, entry.name)
    if cell.status != "ok":
        return cell
    # The time of an entry that lost in the eliminations of a race rests on their samples: it has no others.
    samples = cell.eliminations if entry.beaten else _samples(group.rounds.rounds, entry.name)
    if not samples.seconds:
        cell.status = "error"
        cell.reason = "the budget ended before its first undisturbed round"
        return cell
    if not entry.beaten:
        cell.samples = samples
    logs = ((block, math.log(s)) for block, s in zip(samples.block, samples.seconds, strict=True))
    over_blocks = interval(logs, run.confidence)
    time_s = math.exp(over_blocks.mean)
    from_memory = replace(work, bytes=_bytes_from_memory(group, work))
    limit = peaks(platform)
    min_s = limit.min_time(from_memory) if limit else 0.0
    if time_s < min_s:
        cell.status = "impossible"
        cell.reason = f"{time_s * 1e6:.3g} us; the datasheet's peaks allow no less than {min_s * 1e6:.3g} us"
        return cell
    cell.time_us = time_s * 1e6
    if over_blocks.groups > 1:
        cell.low_us = math.exp(over_blocks.low) * 1e6
        cell.high_us = math.exp(over_blocks.high) * 1e6
    cell.tflops = work.flops / time_s / 1e12
    cell.gbps = work.bytes / time_s / 1e9
    if ceilings := Ceilings.recorded(run.ceilings):
        cell.percent_of_ceiling = 100 * ceilings.min_time(from_memory) / time_s
    return cell


def _bytes_from_memory(group: Group, work: Work) -> float:
    """The bytes that a call has to read from memory, and not from the cache: all in mode `cold`, those that a
    serving step streams in mode `serving`, none in mode `warm` or where the sets do not exceed the cache."""
    rotation = group.rotation
    if rotation.mode == "warm" or not rotation.enough:
        return 0.0
    if rotation.mode == "cold":
        return work.bytes
    op = kernels.OPS[group.case.op]
    return op.streamed_bytes(op.sizes(group.case.sizes))


def _failure(entry: Entry, group: Group, platform: Platform) -> str:
    """Why an entry failed, with known defects of its library that may be the cause; empty if it did not."""
    if entry.status not in ("wrong", "crashed", "timeout"):
        return entry.reason
    sizes = kernels.OPS[group.case.op].sizes(group.case.sizes)
    known = known_defects(entry.impl, sizes, platform.arch)
    return "; ".join([entry.reason, *map(str, known)])


def _note(entry: Entry, group: Group) -> str:
    """Remarks on an entry that is right."""
    notes = [entry.impl.composition(group.case.boundary)]
    if any(r.disturbed and entry.name in r.seconds for r in group.rounds.rounds):
        notes.append("disturbed")
    notes.append(entry.picked)
    if entry.interpreted:
        notes.append("right when interpreted; not timed")
    calls = entry.check.get("calls")
    if calls is not None and calls < LEAST_CALLS:  # too few to show a race
        notes.append(f"only {calls} calls compared")
    if entry.check.get("far") is False:
        notes.append("timed, though wrong on caches of more than 2^32 values")
    if entry.synchronises:
        notes.append("waits for the device: its time holds the host's")
    return "; ".join(filter(None, notes))


def _verdicts(group: Group, timed: Collection[str], confidence: float, margin: float) -> list[Verdict]:
    """The verdicts on the A/A pair, on each timed entry against the baseline, and on the winner against the
    runner-up. Where the baseline's cell has no samples, the A/A pair has no verdict, because a reader of the
    records could not compute it again. timed: names of the entries whose cells have a time"""
    baseline, rerun, rounds = group.baseline, group.rerun, group.rounds
    if baseline is None or rerun is None:
        return []
    verdicts = []
    if baseline.name in timed:
        pair = (rounds.series(rerun.name), rounds.series(baseline.name))
        same_thing_twice = compare(*pair, blocks=rounds.blocks, margin=margin, confidence=confidence)
        judged = JointVerdict(rerun.name, baseline.name, "A/A", 0.0, confidence, same_thing_twice)
        # The rerun has no cell, so its samples are kept here.
        verdicts = [_verdict(group.case.key, judged, margin, _samples(rounds.rounds, rerun.name))]
    lasting = rounds.lasting({*timed, baseline.name, rerun.name})
    series = {name: rounds.series(name) for name in lasting}
    joint = joint_verdicts(
        series, rounds.blocks, timed, baseline.name, rerun=rerun.name, confidence=confidence, margin=margin
    )
    return verdicts + [_verdict(group.case.key, verdict, margin) for verdict in joint]


def _verdict(case: str, judged: JointVerdict, margin: float, samples: Samples | None = None) -> Verdict:
    compared = judged.comparison
    return Verdict(
        case=case,
        a=judged.a,
        b=judged.b,
        ratio=finite(compared.ratio),
        low=finite(compared.low),
        high=finite(compared.high),
        noise=finite(judged.noise),
        margin=margin,
        verdict=compared.verdict,
        confidence=judged.confidence,
        about=judged.about,
        samples=samples or Samples(),
    )


def _samples(of_rounds: Iterable[Round], name: str) -> Samples:
    rounds = [r for r in of_rounds if name in r.seconds]
    return Samples(
        block=[r.block for r in rounds],
        round=[r.index for r in rounds],
        seconds=[r.seconds[name] for r in rounds],
    )
