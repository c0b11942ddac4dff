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
from harness.serving.compare.identity import UNKNOWN, Setting, differences, in_words, length, with_engine
from harness.serving.link import kernel_times
from harness.serving.link.calibration import PRIOR, T90, Constants, ModelledPoint, Point, Served
from harness.serving.link.kernel_times import MeasuredTimes, Tables
from harness.serving.link.load import MEMORY_SHARE, PREFILL_TOKENS, WARM_FROM, KernelSums, Load, kernel_sums
from harness.serving.link.structure import R1, Structure, structure
from harness.serving.names import data_sheet, engine_name, hardware_name, model_name
from harness.serving.schema import Parallelism, ServingRun
from shapes.attention import Parallel
from shapes.linears import linears
from shapes.names import unknown

ENGINES = ("sglang", "vllm", "trtllm", "atom")  # of the stored series; how others call kernels is not known
RANGE_RATIO = 0.8  # the range of lengths if nothing says it: InferenceX's
SAME_LAYERS = re.compile(r"deepseek-(r1|v3|v3\.1)(-base|-\d{4}|-terminus)?")
"""Models with DeepSeek-R1's layers and sizes: not distilled ones, and not V3.2 (sparse attention)."""
ACCEPTED = {1: (1.8, 1.9), 2: (2.2, 2.6), 3: (2.4, 3.0)}
"""By number of drafts, the least and the largest published accept length of R1 and V3: DeepSeek-V3's report,
SGLang's pull requests 3582, 10281, 16974 and 28471, vLLM's 12755. Random tokens without a chat template give
others."""
UNSAID_DEVIATION = 0.7
"""Deviation of the logarithm of an accept length that the points do not say. InferenceX's and ATOM's own
runs of one system differ by a factor of 2 (InferenceX's pull request 1628)."""
CACHED_SHARE = 0.4
"""If TTFT is below this share of the time of the prompt's prefill kernels, prompts were found in a cache."""
MOST_APART = 5.0  # plausible factor between the measured TPOT and that of the kernels' times; 4 was seen


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

    system:           with its hardware and engine named
    constants:        fitted to own points, or those of other systems
    accept_length:    that of loads which say none
    length_deviation: that of the logarithm of the accept length
    notes:            a line for each assumption
    """

    system: System
    structure: Structure
    constants: Constants = PRIOR
    memory_gb: float | None = None
    accept_length: float = 1.0
    length_deviation: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        return self.structure.parallel.tp

    @property
    def in_server(self) -> dict[str, float]:
        """By phase, the factor between a kernel's time in the server (decode steps, stalls) and alone."""
        _, k, p = self.constants.tpot.mean.tolist()
        return {"decode": k, "prefill": p}

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
        """The kernel times of a load; it gets the accept length of this system if it says none."""
        cold = 0.0 if self.system.warm else 1.0
        if compiled_from := WARM_FROM.get(self.system.engine):
            cold *= max(1 - load.mean_isl / compiled_from, 0.0)
        load = load if load.accept_length else replace(load, accept_length=self.accept_length)
        return kernel_sums(self.structure, load, self.memory_gb, cold)

    def served(self, load: Load) -> Served:
        return self.constants.served(self.sums(load))

    def modelled(self, points: Sequence[Point]) -> list[ModelledPoint]:
        return [ModelledPoint(point, self.sums(point.load)) for point in points]


def link(system: System | None = None) -> Link:
    """The model of a system. Raises UsageError without times for it, or for another system's."""
    system = system or System()
    run_paths = [path for path in system.times if kernel_times.is_run(path)]
    table_paths = [path for path in system.times if path not in run_paths]
    if len(table_paths) > 1:
        raise UsageError(f"--times names more than one set of tables: {', '.join(table_paths)}; give one")
    tables = kernel_times.read_tables(Path(table_paths[0])) if table_paths else None
    own_runs = [run for path in system.calibrate for run in load_runs(path)]
    system, draft_notes = _with_drafts_of_runs(system, own_runs)
    model = uncalibrated(system, tables, kernel_times.read_measured_times(run_paths) if run_paths else None)
    if not system.calibrate:
        note = "not calibrated: the constants are those of other servers; --calibrate takes results of yours"
        return replace(model, notes=(*model.notes, note))
    points, point_notes = own_points(own_runs, model.setting, engine_given=bool(system.engine))
    modelled = model.modelled(points)
    for modelled_point in modelled:
        require_plausible(modelled_point, model.served(modelled_point.point.load).tpot.value)
    constants = model.constants.fitted(modelled)
    return replace(model, constants=constants, notes=(*model.notes, *draft_notes, *point_notes))


def _with_drafts_of_runs(system: System, runs: Sequence[ServingRun]) -> tuple[System, list[str]]:
    """The system with the drafts and the accept length of its runs, if the user gave none; notes on them."""
    speculating = [run for run in runs if run.speculation not in (UNKNOWN, "none")]
    drafts = {run.drafts for run in speculating}
    lengths = [run.accept_length for run in speculating if run.accept_length]
    notes = []
    if system.drafts is None and len(drafts) == 1 and all(drafts):
        system = replace(system, drafts=drafts.pop())
        notes.append(f"the points tell --drafts {system.drafts}")
    if system.drafts and system.accept_length is None and lengths:
        mean = sum(lengths) / len(lengths)
        system = replace(system, accept_length=mean)
        notes.append(f"the points tell an accept length of {mean:.3g}; --accept-length gives another")
    return system, notes


def accept_length_of(system: System) -> tuple[float, list[str]]:
    """The accept length for predictions, and a note on it if it is a guess. Raises UsageError."""
    drafts, given = system.drafts or 0, system.accept_length
    if given is not None and not drafts:
        raise UsageError("--accept-length needs --drafts N, the tokens that a step drafts")
    if given is not None and not 1 <= given <= 1 + drafts:
        raise UsageError(f"accept length {given:g}: steps with --drafts {drafts} give 1 to {1 + drafts}")
    if given is not None or not drafts:
        return given or 1.0, []
    if drafts not in ACCEPTED and not system.calibrate:
        raise UsageError(f"--drafts {drafts}: no accept length of so many is published; give --accept-length")
    low, high = ACCEPTED.get(drafts, (1.0, 1.0 + drafts))
    if system.calibrate:
        note = "the points do not tell it; predictions hold for one like theirs"
    else:
        error = f"+-{100 * (math.sqrt(high / low) - 1):.0f} % of TPOT"
        note = f"{low:g} to {high:g}, as published with --drafts {drafts}, {error}; give --accept-length"
    return math.sqrt(low * high), [f"accept length unknown: {note}"]


def accept_length_deviation(system: System, *, calibrated: bool) -> float:
    """Deviation of the logarithm of the accept length; 0 if it is known. Points that do not tell it may have
    any (`calibrated`); without points it is a published one."""
    if not system.drafts or system.accept_length is not None:
        return 0.0
    low, high = ACCEPTED.get(system.drafts, (1.0, 1.0))
    return UNSAID_DEVIATION if calibrated else math.log(high / low) / 2 / T90


def uncalibrated(system: System, tables: Tables | None = None, own: MeasuredTimes | None = None) -> Link:
    """The model with the constants of other systems. Raises UsageError for a system without times.

    tables: the user's; without any, those of this project are used, or assumed ones
    own:    times from runs of the user
    """
    hardware = hardware_name(system.hardware or (tables.device if tables else "h200"))
    engine = engine_name(system.engine or (tables.engine if tables else "sglang"))
    sheet = data_sheet(hardware)
    if not (sheet or tables or own):
        known = [entry["name"] for entry in known_devices()]
        raise UsageError(f"{unknown('machine', system.hardware, known)}; others need --times")
    if not tables and engine.rpartition("-")[2] not in ENGINES:
        why = unknown("engine", system.engine, ENGINES)
        raise UsageError(f"{why}; others need --times with AIConfigurator's tables of them")
    if engine == "trtllm" and sheet.get("arch", "").startswith("gfx"):
        raise UsageError(f"TensorRT-LLM does not run on {hardware}")
    try:
        parallel = Parallel(tp=system.tp, ep=system.ep)
        linears(R1, parallel)
    except ValueError as error:
        raise UsageError(str(error)) from None
    accept_length, accept_notes = accept_length_of(system)
    if tables is None:
        folder = next(kernel_times.TABLES.glob(f"{hardware}-{engine}-*"), None)
        none = Tables(hardware, engine, "", "no tables of its own", {})
        tables = kernel_times.read_tables(folder) if folder else none
    _require_same(hardware, engine, tables, own)
    tables = kernel_times.of_engine(tables, engine, hardware)
    assumed = kernel_times.AssumedTables.scaled_to(hardware, engine) if sheet else None
    surfaces, drafts = own.surfaces if own else None, system.drafts or 0
    step = structure(tables, parallel, kv=system.kv, own=surfaces, assumed=assumed, drafts=drafts)
    notes = _time_notes(system, tables, own, step, assumed.notes_on_fits if assumed else [])
    memory_gb = sheet.get("memory_gib", 0.0) * 2**30 / 1e9
    if memory_gb and step.weights_gb > memory_gb * MEMORY_SHARE:
        room = f"the {MEMORY_SHARE:.0%} of each {hardware}'s {memory_gb:.1f} GB for them and the cache"
        excess = f"weights take {step.weights_gb:.1f} GB, more than {room}"
        notes.insert(0, f"this does not fit: {excess}; predicted as if it did")
        memory_gb = 0.0
    notes += accept_notes
    deviation = accept_length_deviation(system, calibrated=bool(system.calibrate))
    constants = PRIOR.with_unsure_accept_length(deviation)
    system = replace(system, hardware=hardware, engine=engine)
    notes = list(dict.fromkeys(notes))
    return Link(system, step, constants, memory_gb or None, accept_length, deviation, tuple(notes))


def _time_notes(
    system: System, tables: Tables, own: MeasuredTimes | None, step: Structure, of_fits: Sequence[str]
) -> list[str]:
    """Where the kernel times come from, a line each. of_fits: notes on what assumed times were fitted to"""
    notes = list(tables.notes)
    if step.assumed:
        notes.append(f"assumed from data sheets and the H200's tables: times of {', '.join(step.assumed)}")
        notes += of_fits
    with contextlib.suppress(kernel_times.MissingTable):
        heads = 128 // system.tp  # of R1's 128; batch and context are usual ones
        us, bf16_us = (tables.mla_decode(64, 4096, heads, kv) for kv in (system.kv, "bfloat16"))
        if us > 2 * bf16_us:
            slow = f"mla_decode takes {us / bf16_us:.1f} times as long with an FP8 cache as with one in bf16"
            notes.append(f"{slow}, in {tables.source}: an engine whose kernel is better is faster than this")
    if own:
        ops = sorted({op for op, _ in own.surfaces})
        notes.append(f"measured in {own.source}: {', '.join(ops)}, where near the step's sizes")
    return notes


def _require_same(hardware: str, engine: str, tables: Tables, own: MeasuredTimes | None) -> None:
    """Raises UsageError for times of another machine or engine."""
    for times in (tables, own) if own else (tables,):
        device = hardware_name(times.device)
        if device != hardware:
            raise UsageError(
                f"times in {times.source} are of {times.device}, not {hardware}: kernels of one machine are "
                f"not linked to serving of another; give --hardware {device}, or times of {hardware}"
            )
    if engine_name(tables.engine) != engine:
        why = f"times in {tables.source} are of kernels as {tables.engine} calls them, not {engine}"
        raise UsageError(f"{why}: give --engine {engine_name(tables.engine)}, or tables of {engine}")


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
        notes += [f"{run.id}: {finding.message}" for finding in run.findings if finding.severity != "note"]
        has_same_layers = SAME_LAYERS.fullmatch(model_name(run.model))
        # The setting has no load, so that any is right, except that it must be a closed loop (no rate).
        expected = setting.model_copy(update={
            "workload": run.workload.model_copy(update={"request_rate": 0.0, "ramp_up": ""}),
            "model": run.model if has_same_layers else setting.model,
        })  # fmt: skip
        _require_calibrating(run, expected)
        unsaid += [diff.name for diff in differences(expected, run) if diff.b == UNKNOWN]
        if _range(run) is None:
            unsaid.append("range of lengths")
        if not run.value("ttft", "mean"):
            unsaid.append("TTFT")
        if not _count(run, "chunked-prefill-size"):
            unsaid.append("tokens of a prefill step")
    points = tuple(dict.fromkeys(map(point_of, runs)))
    in_flight: dict[str, list[str]] = {}  # by lengths
    for load in sorted((point.load for point in points), key=lambda load: load.concurrency):
        in_flight.setdefault(f"{load.isl} in, {load.osl} out", []).append(str(load.concurrency))
    for lengths, counts in in_flight.items():
        notes.append(f"calibrated on {len(counts)} at {lengths}: {', '.join(counts)} in flight")
    if unsaid:
        notes.append(f"the points do not say their {', '.join(dict.fromkeys(unsaid))}: taken as given here")
    return points, notes


def _require_calibrating(run: ServingRun, expected: Setting) -> None:
    """Raises UsageError for a run that is not of the expected setting, or that is itself wrong."""
    # A point takes the lengths that were served, which may differ from those that were asked for.
    unlike = [diff for diff in differences(expected, run, ["all"]) if not diff.name.endswith("length")]
    names = [diff.name for diff in unlike]
    drafts = expected.drafts or 0
    if unlike:
        hint = "; --engine says it where a file is wrong" if "engine" in names else ""
        if "speculative decoding" in names and not drafts:
            hint = "; --drafts N says how many tokens a step drafts"
        raise UsageError(f"{run.id} does not calibrate this: {in_words(unlike)}{hint}")
    if run.accept_length and not 1 <= run.accept_length <= 1 + drafts:
        why = f"accept length {run.accept_length:.3g} with --drafts {drafts}"
        raise UsageError(f"{run.id} does not calibrate this: {why}")
    for finding in run.findings:
        if finding.severity == "wrong" or finding.rule == "prefix_cache":
            raise UsageError(f"{run.id} cannot calibrate: {finding.message}")


def _range(run: ServingRun) -> float | None:
    """The shortest length over the longest, as the run says it or as its mean tells; None if neither does."""
    load = run.workload
    if load.range_ratio is None and load.output_len and load.longest_output_len:
        return max(round(2 * load.output_len / load.longest_output_len - 1, 2), 0.0)
    return load.range_ratio


def _count(run: ServingRun, option: str) -> int:
    """A number among the server's options; 0 if it is not given, or is no number."""
    value = run.option(option)
    return int(value) if value.isdigit() else 0


def point_of(run: ServingRun) -> Point:
    """A client's run as a point. Raises UsageError if it does not say enough."""
    known_ratio, asked = _range(run), run.workload
    ratio = RANGE_RATIO if known_ratio is None else known_ratio
    to_longest = 2 / (1 + ratio)  # the longest length over the mean one
    isl = (length(run, "input") or 0) * to_longest or asked.longest_input_len
    osl = (length(run, "output") or 0) * to_longest or asked.longest_output_len
    concurrency, tpot_ms, ttft_ms = asked.concurrency, run.value("tpot", "mean"), run.value("ttft", "mean")
    flaws = [finding.message for finding in run.findings if finding.severity != "note"]
    # A point may do without a TTFT that was not reported, but not without one that was left out as wrong.
    has_needed_ttft = bool(ttft_ms) or not flaws
    if not (isl and osl and concurrency and tpot_ms and has_needed_ttft):
        said = {"input length": isl, "output length": osl, "concurrency": concurrency}
        said |= {"mean TPOT": tpot_ms, "mean TTFT": has_needed_ttft}
        lacking = ", ".join(name for name, value in said.items() if not value)
        why = f"; {flaws[0]}" if flaws else ""
        raise UsageError(f"{run.id} does not say its {lacking}: cannot calibrate{why}")
    load = Load(
        round(isl), round(osl), concurrency=round(concurrency), range_ratio=ratio,
        prefill_tokens=_count(run, "chunked-prefill-size") or PREFILL_TOKENS,
        waves=max(1, round((asked.num_prompts or 10 * concurrency) / concurrency)),
        recv_interval=_count(run, "scheduler-recv-interval") or 1, accept_length=run.accept_length,
    )  # fmt: skip
    return Point(load, tpot_ms, ttft_ms or None, run.value("ttft", "median") or None)


def require_plausible(modelled: ModelledPoint, expected_tpot_ms: float) -> None:
    """Raises UsageError for a point whose TPOT or TTFT does not fit the system that it names."""
    point, load = modelled.point, modelled.point.load
    where = f"a point of {load.isl} in, {load.osl} out, {load.concurrency} in flight"
    if not 1 / MOST_APART < point.tpot_ms / expected_tpot_ms < MOST_APART:
        raise UsageError(
            f"{where} has a TPOT of {point.tpot_ms:g} ms, and its kernels' times make it "
            f"{expected_tpot_ms:.3g}: no constant brings them together; other units?"
        )
    ttft_ms = point.ttft_median_ms or point.ttft_ms or math.inf
    prefill_ms = modelled.sums.prefill.ms(1)
    if ttft_ms < CACHED_SHARE * prefill_ms:
        raise UsageError(
            f"{where} has a TTFT of {ttft_ms:.3g} ms, and the kernels of one prefill take {prefill_ms:.3g}: "
            "its prompts were found in a cache (prefix caching); flush it, or take prompts of another seed"
        )
