"""What an engine runs for each shape that a deployment calls, and what a tuned table holds for it."""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import kernels
from harness.catalogue.architectures import architectures
from harness.catalogue.devices import Ceilings, known_devices
from harness.errors import UsageError
from kernels import engines
from kernels.defects import known_defects
from kernels.engines import EngineDefault
from kernels.engines.deploy import TABLES, columns, deployed, known_settings
from kernels.op import DTYPES
from kernels.tables import Entry, Found, Problem, Target
from kernels.tables.files import TableError
from kernels.tables.lookup import LIBRARIES, Lookups
from kernels.vendor import READ_TO
from shapes.case import Size
from shapes.deployment import Call, Deployment, served, sweep
from shapes.models import ModelConfig
from shapes.scheduler import Workload

MOST_ROWS = 16384
"""Of experts for which picks are drawn, which takes seconds for many more. With more rows the products bound
the experts and not the reading of their weights, so their time grows as the rows do."""


@dataclass(frozen=True)
class EngineRequest:
    """A deployment that is asked about.

    arch:     an architecture or a device: gfx942, MI325X
    tp, ep, dp_attention, kv: how the model is served (see kernels.engines.deploy)
    workload: what is served; None means the sweep of shapes.deployment
    given:    the variables and flags that are set for the engine
    paths:    where the files of a library lie, by its name
    triton:   the version of Triton beside the engine; empty means the one that its release comes with
    ops:      which ops are shown; empty means all
    """

    engine: str
    arch: str
    model: ModelConfig
    tp: int = 8
    ep: int = 1
    dp_attention: bool = False
    kv: str = "bf16"
    workload: Workload | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)
    triton: str = ""
    ops: Sequence[str] = ()


@dataclass(frozen=True)
class Shape:
    """A shape that a deployment calls.

    share:   the part of the time of all steps that its calls take at the limits of the device, 0..1
    choice:  what the engine runs for it; None where that is not known
    found:   what the tuned table of that kernel holds; None where no table decides
    defects: known defects of what runs
    """

    call: Call
    sizes: Mapping[str, Size]
    share: float
    choice: EngineDefault | None
    found: Found | None
    defects: tuple[str, ...]

    @property
    def row(self) -> str:
        return self.choice.row if self.choice else ""

    @property
    def decided_in(self) -> str:
        return f"{self.choice.file}:{self.choice.line}" if self.choice else ""

    @property
    def why(self) -> str:
        return self.choice.why if self.choice else "the engine's choice is not known"

    @property
    def table(self) -> str:
        return self.found.table if self.found else ""

    @property
    def entry(self) -> Entry | None:
        return self.found.entry if self.found else None

    @property
    def fallback(self) -> str:
        return self.found.fallback if self.found else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is odd about the look-up."""
        return self.found.notes if self.found else ()

    @property
    def state(self) -> str:
        """`tuned`, `fallback`, `no table`, or `no row` where none of the suite does what the engine does."""
        if not self.row:
            return "no row"
        if self.found is None:
            return "no table"
        return "tuned" if self.entry else "fallback"

    @property
    def tokens(self) -> int:
        """Tokens of the step, by which a table is asked. Prompts of different lengths count as one token
        each."""
        if self.call.op == "mha_prefill":
            new = str(self.sizes["new"])
            return int(self.sizes["batch"]) * (int(new) if new.isdecimal() else 1)
        return next((int(self.sizes[name]) for name in ("m", "tokens", "batch") if name in self.sizes), 0)

    def facts(self) -> dict[str, Any]:
        """The object of JSON."""
        return {
            "op": self.call.op,
            "sizes": dict(self.sizes),
            "share": round(self.share, 6),
            "row": self.row or None,
            "decided_in": self.decided_in or None,
            "table": self.table or None,
            "entry": asdict(self.entry) if self.entry else None,
            "fallback": self.fallback or None,
            "defects": list(self.defects),
            "step": self.call.step,
            "place": self.call.place,
            "why": self.why,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class EngineView:
    """The answer to a request.

    device:    the name of the device's data sheet
    problems:  what cannot work in the tables that were asked
    libraries: the version of each library whose tables were asked, or where it lies
    tables:    the tables themselves
    """

    request: EngineRequest
    target: Target
    device: str
    shapes: Sequence[Shape]
    problems: Sequence[Problem]
    notes: Sequence[str]
    libraries: Mapping[str, str]
    tables: Lookups

    @property
    def release(self) -> str:
        return f"{self.request.engine} {engines.defaults(self.request.engine)[0].version}"

    def facts(self) -> dict[str, Any]:
        """The object of JSON."""
        asked = self.request
        return {
            "engine": self.release,
            "arch": self.target.arch,
            "device": self.device,
            "model": asked.model.name,
            "tp": asked.tp,
            "ep": asked.ep,
            "dp_attention": asked.dp_attention,
            "kv": asked.kv,
            "with": dict(asked.given),
            "libraries": dict(self.libraries),
            "shapes": [shape.facts() for shape in self.shapes],
            "problems": [str(problem) for problem in self.problems],
            "notes": list(self.notes),
        }


def engine_view(request: EngineRequest) -> EngineView:
    """Raises UsageError for a deployment that cannot be, and where a library's files cannot be read."""
    device = _device(request)
    arch, ops = device["arch"], list(request.ops or kernels.OPS)
    workload, longest = request.workload, request.model.max_position_embeddings
    if workload and workload.isl + workload.osl > longest:
        raise UsageError(f"isl + osl of a workload must be at most {longest} tokens for {request.model.name}")
    try:
        deployment = _deployed(request, arch)
        calls = served(deployment, workload) if workload else sweep(deployment)
        shares = _shares(calls, arch, device)  # sizes that no kernel takes are found here
    except ValueError as error:
        raise UsageError(str(error)) from None
    units = request.given.get("CU_NUM", str(device["units"]))
    if not units.isdecimal():
        raise UsageError(f"CU_NUM={units} is no number of compute units")
    target = Target(arch, int(units), device["driver"], request.triton or engines.triton(request.engine))
    tables = Lookups(target, request.paths, request.given, *columns(request.engine, deployment))
    try:
        for name in request.paths:
            tables.files(name)  # a wrong path is an error, even if no shape asks that library
        shapes = [
            _shape(request, arch, call, share, tables)
            for call, share in zip(calls, shares, strict=True)
            if call.op in ops
        ]
        problems = tables.problems()
    except TableError as error:
        raise UsageError(str(error)) from None
    libraries = {
        name: files.version or f"version unknown, {files.path}" for name, files in tables.asked.items()
    }
    notes = [*_without_effect(request, arch, ops, shapes), *_unread(request, arch, libraries)]
    return EngineView(request, target, device["name"], shapes, problems, notes, libraries, tables)


def _device(request: EngineRequest) -> Mapping[str, Any]:
    """The data sheet of the device that is meant, with its `units` and the name that its `driver` gives. An
    architecture stands for its usual device. Raises UsageError."""
    known, usual = engines.archs(request.engine), architectures()
    devices = [entry for entry in known_devices() if entry["arch"] in known]
    name = usual[request.arch].device if request.arch in usual else request.arch
    named = [entry for entry in devices if entry["name"].lower() == name.lower()]
    if meant := named or [entry for entry in devices if entry["arch"] == request.arch]:
        maker = "AMD Instinct" if meant[0]["arch"].startswith("gfx") else "NVIDIA"
        units = usual[meant[0]["arch"]].units if meant[0]["arch"] in usual else 0
        return {"units": units, "driver": f"{maker} {meant[0]['name']}"} | meant[0]
    if request.arch in known:
        return {"arch": request.arch, "name": request.arch, "units": 0, "driver": ""}
    raise UsageError(
        f"what {request.engine} runs on {request.arch!r} is not known; --arch takes {', '.join(known)}, "
        f"or {', '.join(entry['name'] for entry in devices)}"
    )


def _shares(calls: Sequence[Call], arch: str, device: Mapping[str, Any]) -> list[float]:
    """The part of the time that each call has of all steps, where each takes the least time that the data
    sheet allows, or the time of its bytes where there is no data sheet. All steps of a sweep count alike."""
    rates = {dtype: rate * 1e12 for dtype, rate in device.get("tflops", {}).items()}
    limits = Ceilings(rates or dict.fromkeys(DTYPES, math.inf), device.get("tbps", 1.0) * 1e12)
    times = [call.times * _least_s(call, arch, limits) for call in calls]
    steps: dict[str, float] = defaultdict(float)
    for call, seconds in zip(calls, times, strict=True):
        steps[call.step] += seconds
    return [seconds / steps[call.step] / len(steps) for call, seconds in zip(calls, times, strict=True)]


def _least_s(call: Call, arch: str, limits: Ceilings) -> float:
    """Seconds of a call at the device's limits. All experts are taken to be picked equally often."""
    op, sizes, times = kernels.OPS[call.op], call.sizes, 1.0
    if call.rows:
        times = max(call.rows, MOST_ROWS) / MOST_ROWS
        sizes = sizes | {"tokens": min(call.rows, MOST_ROWS), "routing": "balanced"}
    return times * limits.min_time(op.work(op.sizes({**op.defaults(arch), **sizes})))


def _deployed(request: EngineRequest, arch: str) -> Deployment:
    """Raises ValueError."""
    how = request.tp, request.ep, request.dp_attention, request.kv
    return deployed(request.engine, arch, request.model, *how, request.given)


def _chosen(request: EngineRequest, arch: str, op: str, sizes: Mapping[str, Size]) -> EngineDefault | None:
    sizes = {**sizes, "heads/tp": request.model.num_attention_heads // request.tp}
    return engines.default(request.engine, op, arch, sizes, request.given)


def _shape(request: EngineRequest, arch: str, call: Call, share: float, tables: Lookups) -> Shape:
    op = kernels.OPS[call.op]
    sizes = op.case({**op.defaults(arch), **call.sizes}).sizes
    choice = _chosen(request, arch, call.op, sizes)
    if call.op == "mha_prefill" and not (choice and choice.row):  # an engine may cast q, k and v
        cast = op.case({**sizes, "dtype": "fp8"}).sizes
        if (other := _chosen(request, arch, call.op, cast)) and other.row:
            sizes, choice = cast, other
    row = choice.row if choice else ""
    found = tables.find(call.op, row, sizes) if row else None
    return Shape(call, sizes, share, choice, found, _defects(call.op, row, sizes, arch, tables))


def _defects(op: str, name: str, sizes: Mapping[str, Size], arch: str, tables: Lookups) -> tuple[str, ...]:
    """Known defects of a row in the version of its library that was asked, or, where that is not known, in
    the newest that was read."""
    row = next((each for each in kernels.implementations(op) if each.name == name), None)
    if row is None:
        return ()
    package = row.library or row.provider
    version = tables.files(package).version if package in LIBRARIES else ""
    if not version[:1].isdigit():
        version = READ_TO.get(package, ("",))[0]
    return tuple(
        f"{defect.issue}: {defect.symptom}"
        for defect in known_defects(row, kernels.OPS[op].sizes(sizes), arch, version)
    )


def _without_effect(
    request: EngineRequest, arch: str, ops: Sequence[str], shapes: Sequence[Shape]
) -> Iterator[str]:
    """A line for each setting without which the engine runs the same."""
    known = known_settings(request.engine, ops, arch)
    spelled = {_spelled(name): name for name in known}
    for name in request.given:
        if name in TABLES[request.engine]:
            continue
        rest = {other: value for other, value in request.given.items() if other != name}
        without = replace(request, given=rest)
        if name not in known:
            near = difflib.get_close_matches(_spelled(name), spelled, 1, 0.8)
            meant = f"; did you mean {as_given(spelled[near[0]])}?" if near else ""
            yield f"{as_given(name)}: nothing that is recorded of {request.engine} reads it on {arch}{meant}"
        elif _deployed(without, arch) == _deployed(request, arch) and all(
            _chosen(without, arch, shape.call.op, shape.sizes) == shape.choice for shape in shapes
        ):
            yield f"{as_given(name, request.given[name])} changes nothing here"


def _unread(request: EngineRequest, arch: str, libraries: Mapping[str, str]) -> Iterator[str]:
    """A line for each given library that nothing asks, and one where the tables are those of another release
    than the one whose choices are known."""
    for name in request.paths:
        if name not in libraries:
            yield f"--{name}: {unasked(request, name, arch)}"
    read = engines.defaults(request.engine)[0].version
    other = libraries.get(request.engine, read)
    if not other.startswith(read):
        yield f"what {request.engine} runs was read in {read}; the tables are those of {other}"


def unasked(request: EngineRequest, library: str, arch: str) -> str:
    """Says that no kernel of the deployment looks into a library's tables, and what to do. Only vLLM has to
    be told to use AITER: SGLang's images for AMD do."""
    text = f"nothing that {request.engine} runs here looks into tables of {library}"
    off = request.engine == "vllm" and request.given.get("VLLM_ROCM_USE_AITER") != "1"
    if library == "aiter" and arch.startswith("gfx") and off:
        return f"{text}; give --with VLLM_ROCM_USE_AITER=1"
    return text


def _spelled(name: str) -> str:
    """The name as a flag is spelled, so that a flag and a variable of one name are alike."""
    return name.lower().replace("_", "-")


def as_given(name: str, value: str = "") -> str:
    """A variable or a flag as --with takes it."""
    written = f"--{name}" if name.islower() else name
    return f"{written}={value}" if value else written
