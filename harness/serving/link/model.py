"""The model of a system: kernel times, structure and constants, ready to predict."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.catalogue.devices import known_devices
from harness.errors import UsageError
from harness.serving.clients.load import load as load_runs
from harness.serving.compare.identity import UNKNOWN, Setting, differences, length, text, with_engine
from harness.serving.link.calibration import PRIOR, T90, Constants, Measured, Point, Served
from harness.serving.link.kernel_times import (
    TABLES,
    AssumedTables,
    MeasuredTimes,
    MissingTable,
    Tables,
    is_run,
    of_engine,
    read_measured_times,
    read_tables,
)
from harness.serving.link.load import MEMORY_SHARE, PREFILL_TOKENS, WARM_FROM, KernelSums, Load, kernel_sums
from harness.serving.link.structure import Structure, structure
from harness.serving.names import data_sheet, engine_name, hardware_name, model_name
from harness.serving.schema import Parallelism, ServingRun
from shapes.attention import Parallel
from shapes.names import unknown

HARDWARE, ENGINE = "h200", "sglang"  # the defaults
ENGINES = ("sglang", "vllm", "trtllm", "atom")
"""The engines of the stored series. How other engines call the kernels is not known."""
RANGE_RATIO = 0.8  # the range of lengths if nothing says it: InferenceX's
SAME_LAYERS = re.compile(r"deepseek-(r1|v3|v3\.1)(-base|-\d{4}|-terminus)?")
"""Models with DeepSeek-R1's layers and sizes: not distilled ones, and not V3.2 (sparse attention)."""
ACCEPTED = {1: (1.8, 1.9), 2: (2.2, 2.6), 3: (2.4, 3.0)}
"""By number of drafts, the least and the largest published accept length of R1 and V3: DeepSeek-V3's report,
SGLang's pull requests 3582, 10281, 16974 and 28471, vLLM's 12755. Random tokens without a chat template give
others."""
UNTOLD = 0.7
"""Deviation of the logarithm of an accept length that the points do not tell. InferenceX's and ATOM's own
runs of one system differ by a factor of 2 (InferenceX's pull request 1628)."""
CACHED = 0.4
"""If TTFT is below this share of the time of the prompt's prefill kernels, prompts were found in a cache."""
FAR = 5.0  # the largest plausible factor between the measured TPOT and that of the kernels' times; 4 was seen


@dataclass(frozen=True, kw_only=True)
class System:
    """The system that a prediction is asked for.

    hardware, engine: empty: those of the tables, or h200 and sglang
    tp, ep:           tensor and expert parallelism; ep is 1 or tp
    kv:               dtype of the cache, bfloat16 or fp8
    times:            paths of a set of AIConfigurator's tables and of runs of this suite, which are used
                      first. Times that they lack are from this project's tables, or assumed from data sheets
    calibrate:        files of results of this server; without any the constants are those of other systems
    warm:             whether the server has served before, so that its first wave is not cold
    drafts:           tokens that the MTP layer drafts for a request in a step; None: as results tell, or 0
    accept_length:    tokens that a request gets of a step: accepted drafts + 1; None: not known
    """

    hardware: str = ""
    engine: str = ""
    tp: int = 8
    ep: int = 1
    kv: str = "bfloat16"
    times: tuple[str, ...] = ()
    calibrate: tuple[str, ...] = ()
    warm: bool = False
    drafts: int | None = None
    accept_length: float | None = None


@dataclass(frozen=True)
class Link:
    """A model to predict with.

    system:        with its hardware and engine named
    constants:     fitted to own points, or those of other systems
    accept_length: that of loads which say none
    notes:         a line for each assumption
    """

    system: System
    structure: Structure
    constants: Constants = PRIOR
    memory_gb: float | None = None
    accept_length: float = 1.0
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        return self.structure.parallel.tp

    @property
    def unsure(self) -> float:
        """Deviation of the logarithm of the accept length."""
        return unsureness(self.system, calibrated=bool(self.system.calibrate))

    @property
    def in_server(self) -> dict[str, float]:
        """By phase, the factor between a kernel's time in the server (decode steps, stalls) and alone."""
        return dict(zip(("decode", "prefill"), map(float, self.constants.tpot.mean[1:]), strict=True))

    @property
    def setting(self) -> Setting:
        """The identity of the system, without a load."""
        parallel = self.structure.parallel
        return Setting(
            hardware=self.system.hardware, gpus=self.gpus, engine=self.system.engine, model="DeepSeek-R1",
            precision="fp8 block-scale", kv_cache=self.system.kv, plain=True, launch="graph",
            drafts=self.system.drafts or None,
            parallelism=Parallelism(tp=parallel.tp, pp=1, ep=parallel.ep, dp=parallel.dp), note=parallel.text,
        )  # fmt: skip

    def sums(self, load: Load) -> KernelSums:
        warm_from = 0.0 if self.system.warm else WARM_FROM.get(self.system.engine, math.inf)
        cold = max(1 - load.mean_isl / warm_from, 0.0) if warm_from else 0.0
        load = load if load.accept_length else replace(load, accept_length=self.accept_length)
        return kernel_sums(self.structure, load, self.memory_gb, cold)

    def served(self, load: Load) -> Served:
        return self.constants.served(self.sums(load))

    def measured(self, points: Sequence[Point]) -> list[Measured]:
        return [Measured(each, self.sums(each.load)) for each in points]


def link(system: System | None = None) -> Link:
    """The model of a system. Raises UsageError without times for it, or for another system's."""
    system = system or System()
    runs = [path for path in system.times if is_run(path)]
    sets = [path for path in system.times if path not in runs]
    if len(sets) > 1:
        raise UsageError(f"--times names more than one set of tables: {', '.join(sets)}; give one")
    tables = read_tables(Path(sets[0])) if sets else None
    served = [run for name in system.calibrate for run in load_runs(name)]
    system, told = _told(system, served)
    model = uncalibrated(system, tables, read_measured_times(runs) if runs else None)
    if not system.calibrate:
        note = "not calibrated: the constants are those of other servers; --calibrate takes results of yours"
        return replace(model, notes=(*model.notes, note))
    points, notes = own_points(served, model.setting, engine_given=bool(system.engine))
    measured = model.measured(points)
    for each in measured:
        require_plausible(each, model.served(each.point.load).tpot.value)
    return replace(model, constants=model.constants.fitted(measured), notes=(*model.notes, *told, *notes))


def _told(system: System, runs: Sequence[ServingRun]) -> tuple[System, list[str]]:
    """The system with the drafts and the accept length that its runs tell, if the user gave none."""
    speculate = [run for run in runs if run.speculation not in (UNKNOWN, "none")]
    drafts, lengths = {run.drafts for run in speculate}, [run.accept_length for run in speculate]
    known, notes = [length for length in lengths if length], []
    if system.drafts is None and len(drafts) == 1 and (told := drafts.pop()):
        system, notes = replace(system, drafts=told), [f"the points tell --drafts {told}"]
    if system.drafts and system.accept_length is None and known:
        mean = sum(known) / len(known)
        system = replace(system, accept_length=mean)
        notes.append(f"the points tell an accept length of {mean:.3g}; --accept-length gives another")
    return system, notes


def accepted(system: System) -> tuple[float, str]:
    """The accept length for predictions, and a note on it. Raises UsageError."""
    drafts, length = system.drafts or 0, system.accept_length
    if length is not None and not drafts:
        raise UsageError("--accept-length needs --drafts N, the tokens that a step drafts")
    if length is not None and not 1 <= length <= 1 + drafts:
        raise UsageError(f"accept length {length:g}: steps with --drafts {drafts} give 1 to {1 + drafts}")
    if not drafts or length is not None:
        return length or 1.0, ""
    if drafts not in ACCEPTED and not system.calibrate:
        raise UsageError(f"--drafts {drafts}: no accept length of so many is published; give --accept-length")
    low, high = ACCEPTED.get(drafts, (1.0, 1.0 + drafts))
    off = 100 * (math.sqrt(high / low) - 1)
    published = f"{low:g} to {high:g}, as published with --drafts {drafts}"
    note = f"{published}, +-{off:.0f} % of TPOT; give --accept-length"
    if system.calibrate:
        note = "the points do not tell it, so that their constants hold it, and it is taken as theirs"
    return math.sqrt(low * high), f"accept length unknown: {note}"


def unsureness(system: System, *, calibrated: bool) -> float:
    """Deviation of the logarithm of the accept length; 0 if it is known."""
    if not system.drafts or system.accept_length is not None:
        return 0.0
    low, high = ACCEPTED.get(system.drafts, (1.0, 1.0))
    return UNTOLD if calibrated else math.log(high / low) / 2 / T90


def uncalibrated(system: System, tables: Tables | None = None, runs: MeasuredTimes | None = None) -> Link:
    """The model with the constants of other systems."""
    hardware = hardware_name(system.hardware or (tables.device if tables else HARDWARE))
    engine = engine_name(system.engine or (tables.engine if tables else ENGINE))
    if not (data_sheet(hardware) or tables or runs):
        known = [entry["name"] for entry in known_devices()]
        raise UsageError(f"{unknown('machine', system.hardware, known)}; others need --times")
    if not tables and engine.rpartition("-")[2] not in ENGINES:
        named = unknown("engine", system.engine, ENGINES)
        raise UsageError(f"{named}; others need --times with AIConfigurator's tables of them")
    if engine == "trtllm" and data_sheet(hardware).get("arch", "").startswith("gfx"):
        raise UsageError(f"TensorRT-LLM does not run on {hardware}")
    try:
        parallel = Parallel(tp=system.tp, ep=system.ep)
    except ValueError as error:
        raise UsageError(str(error)) from None
    length, note = accepted(system)
    if tables is None:
        folder = next(TABLES.glob(f"{hardware}-{engine}-*"), None)
        tables = read_tables(folder) if folder else Tables(hardware, engine, "", "no tables of its own", {})
    _require_same(hardware, engine, tables, runs)
    tables = of_engine(tables, engine, hardware)
    fallback = AssumedTables.of(hardware, engine) if data_sheet(hardware) else None
    built = structure(tables, parallel, kv=system.kv, measured_times=runs, assumed=fallback,
                      drafts=system.drafts or 0)  # fmt: skip
    memory_gb = data_sheet(hardware).get("memory_gib", 0.0) * 2**30 / 1e9
    notes = list(tables.notes)
    if built.assumed:
        notes.append(f"assumed from data sheets and the H200's tables: times of {', '.join(built.assumed)}")
        notes += fallback.fitted if fallback else []
    with contextlib.suppress(MissingTable):  # at a usual size, for R1's 128 heads
        own, usual = (tables.mla_decode(64, 4096, 128 // system.tp, kv) for kv in (system.kv, "bfloat16"))
        if own > 2 * usual:
            slow = f"mla_decode takes {own / usual:.1f} times as long with an FP8 cache as with one in bf16"
            notes.append(f"{slow}, in {tables.where}: an engine whose kernel is better is faster than this")
    if runs:
        notes.append(f"measured in {runs.where}: {', '.join(runs.ops())}, where near the step's sizes")
    if memory_gb and built.weights_gb > memory_gb * MEMORY_SHARE:
        room = f"the {MEMORY_SHARE:.0%} of each {hardware}'s {memory_gb:.1f} GB for them and the cache"
        fits_not = f"weights take {built.weights_gb:.1f} GB, more than {room}"
        notes.insert(0, f"this does not fit: {fits_not}; predicted as if it did")
        memory_gb = 0.0
    resolved = replace(system, hardware=hardware, engine=engine)
    constants = PRIOR.unsure(unsureness(system, calibrated=bool(system.calibrate)))
    notes += [note] if note else []
    return Link(resolved, built, constants, memory_gb or None, length, tuple(dict.fromkeys(notes)))


def _require_same(hardware: str, engine: str, tables: Tables, runs: MeasuredTimes | None) -> None:
    """Raises UsageError for times of another machine or engine."""
    for times in (tables, runs) if runs else (tables,):
        if (device := hardware_name(times.device)) != hardware:
            raise UsageError(
                f"times in {times.where} are of {times.device}, not {hardware}: kernels of one machine are "
                f"not linked to serving of another; give --hardware {device}, or times of {hardware}"
            )
    if engine_name(tables.engine) != engine:
        why = f"times in {tables.where} are of kernels as {tables.engine} calls them, not {engine}"
        raise UsageError(f"{why}: give --engine {engine_name(tables.engine)}, or tables of {engine}")


# A user's own points


def own_points(
    runs: Sequence[ServingRun], setting: Setting, *, engine_given: bool
) -> tuple[tuple[Point, ...], list[str]]:
    """The points of all runs, and notes on them, a line each.

    setting:      the system to which the points must belong
    engine_given: whether the user named the engine, which then replaces the name in a file

    Raises UsageError for a run of another system, with failed requests, without a closed loop, lengths or
    TPOT, with TTFTs that were not measured, or with an accept length that its drafts cannot give.
    """
    if engine_given:
        runs = [with_engine(run, setting.engine) for run in runs]
    notes = [f"{run.id}: {note}" for run in runs for note in run.notes if note.startswith("--engine")]
    unsaid: list[str] = []
    for run in runs:
        notes += [f"{run.id}: {found.message}" for found in run.findings if found.severity != "note"]
        workload = run.workload.model_copy(update={"request_rate": 0.0, "ramp_up": ""})
        is_alike = SAME_LAYERS.fullmatch(model_name(run.model))
        model = run.model if is_alike else setting.model
        wanted = setting.model_copy(update={"workload": workload, "model": model})
        # The load is the run's own. Lengths are as they were served.
        unlike = [d for d in differences(wanted, run, ["all"]) if not d.name.endswith("length")]
        if unlike:
            is_engine = any(each.name == "engine" for each in unlike)
            hint = "; --engine says it where a file is wrong" if is_engine else ""
            if not setting.drafts and any(each.name == "speculative decoding" for each in unlike):
                hint = "; --drafts N says how many tokens a step drafts"
            raise UsageError(f"{run.id} does not calibrate this: {text(unlike)}{hint}")
        if (accepted := run.accept_length) and not 1 <= accepted <= 1 + (setting.drafts or 0):
            of = f"--drafts {setting.drafts or 0}"
            raise UsageError(f"{run.id} does not calibrate this: accept length {accepted:.3g} with {of}")
        severe = (each for each in run.findings if each.severity == "wrong" or each.rule == "prefix_cache")
        if bad := next(severe, None):
            raise UsageError(f"{run.id} cannot calibrate: {bad.message}")
        unsaid += [d.name for d in differences(wanted, run) if d.run == UNKNOWN]
        unsaid += ["range of lengths"] if _range(run) is None else []
        unsaid += [] if run.value("ttft", "mean") else ["TTFT"]
        unsaid += [] if _count(run, "chunked-prefill-size") else ["tokens of a prefill step"]
    points = tuple(dict.fromkeys(map(point_of, runs)))
    of_lengths: dict[str, list[str]] = {}
    for load in sorted((point.load for point in points), key=lambda load: load.concurrency):
        of_lengths.setdefault(f"{load.isl} in, {load.osl} out", []).append(str(load.concurrency))
    notes += [f"calibrated on {len(c)} at {n}: {', '.join(c)} in flight" for n, c in of_lengths.items()]
    if unsaid:
        notes.append(f"the points do not say their {', '.join(dict.fromkeys(unsaid))}: taken as given here")
    return points, notes


def _range(run: ServingRun) -> float | None:
    """The shortest length over the longest, as the run says it or as its mean tells; None if neither does."""
    load = run.workload
    if load.range_ratio is None and load.output_len and load.longest_output_len:
        return max(round(2 * load.output_len / load.longest_output_len - 1, 2), 0.0)
    return load.range_ratio


def _count(run: ServingRun, option: str) -> int:
    """A number among the server's options; 0 if it is not given, or is no number."""
    said = run.option(option)
    return int(said) if said.isdigit() else 0


def point_of(run: ServingRun) -> Point:
    """A client's run as a point. Raises UsageError if it does not say enough."""
    ratio = _range(run)
    ratio = RANGE_RATIO if ratio is None else ratio
    asked, to_longest = run.workload, 2 / (1 + ratio)
    wanted = {
        "input length": (length(run, "input") or 0) * to_longest or asked.longest_input_len,
        "output length": (length(run, "output") or 0) * to_longest or asked.longest_output_len,
        "concurrency": asked.concurrency, "mean TPOT": run.value("tpot", "mean"),
        "mean TTFT": run.value("ttft", "mean"),
    }  # fmt: skip
    is_found = any(found.severity != "note" for found in run.findings)
    if lacks := [name for name, value in wanted.items() if not value and (name != "mean TTFT" or is_found)]:
        why = [f"; {found.message}" for found in run.findings if found.severity != "note"]
        raise UsageError(f"{run.id} does not say its {', '.join(lacks)}: cannot calibrate{''.join(why[:1])}")
    isl, osl, concurrency, tpot, ttft = (float(value or 0) for value in wanted.values())
    of_run = Load(
        round(isl), round(osl), concurrency=round(concurrency), range_ratio=ratio,
        prefill_tokens=_count(run, "chunked-prefill-size") or PREFILL_TOKENS,
        waves=max(1, round((asked.num_prompts or 10 * concurrency) / concurrency)),
        recv_interval=_count(run, "scheduler-recv-interval") or 1, accept_length=run.accept_length,
    )  # fmt: skip
    return Point(of_run, tpot, ttft or None, run.value("ttft", "median") or None)


def require_plausible(measured: Measured, expected_tpot_ms: float) -> None:
    """Raises UsageError for a point whose TPOT does not fit the system that it names."""
    point = measured.point
    load = point.load
    where = f"a point of {load.isl} in, {load.osl} out, {load.concurrency} in flight"
    if not 1 / FAR < point.tpot_ms / expected_tpot_ms < FAR:
        raise UsageError(
            f"{where} has a TPOT of {point.tpot_ms:g} ms, and its kernels' times make it "
            f"{expected_tpot_ms:.3g}: no constant brings them together; other units?"
        )
    ttft, prefill = point.ttft_median_ms or point.ttft_ms or math.inf, measured.sums.prefill.ms(1)
    if ttft < CACHED * prefill:
        raise UsageError(
            f"{where} has a TTFT of {ttft:.3g} ms, and the kernels of one prefill take {prefill:.3g}: its "
            "prompts were found in a cache (prefix caching); flush it, or take prompts of another seed"
        )
