"""Each shape that a deployment calls: what the engine runs for it, and what a tuned table holds."""

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
from kernels.tables import Found, Problem, Target
from kernels.tables.files import TableError
from kernels.tables.lookup import LIBRARIES, Lookups
from kernels.vendor import READ_TO
from shapes.case import Size
from shapes.deployment import Call, Deployment, served, sweep
from shapes.models import ModelConfig
from shapes.scheduler import Workload

ROWS = 16384
"""With more, products bound the experts and not their weights; to draw so many picks takes seconds."""


@dataclass(frozen=True)
class EngineRequest:
    """model, tp, ep, dp_attention, kv: how the model is served (kernels.engines.deploy)
    arch:     an architecture or a device: gfx942, MI325X
    workload: None: the sweep of shapes.deployment
    given:    variables and flags of the engine
    paths:    library -> where its files lie
    triton:   its version beside the engine; empty: what comes with its release
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
    """share: of the time of the deployment's steps, each call at the limits of the device
    entry:   what the engine runs; None: not known
    found:   what its table holds; None: no table decides
    defects: known ones of what runs
    """

    call: Call
    sizes: Mapping[str, Size]
    share: float
    entry: EngineDefault | None
    found: Found | None
    defects: tuple[str, ...]

    @property
    def row(self) -> str:
        return self.entry.row if self.entry else ""

    @property
    def decided_in(self) -> str:
        return f"{self.entry.file}:{self.entry.line}" if self.entry else ""

    @property
    def state(self) -> str:
        """`tuned`, `fallback`, `no table`, or `no row` where the suite has none that does the same."""
        if not self.row:
            return "no row"
        if self.found is None:
            return "no table"
        return "tuned" if self.found.entry else "fallback"

    @property
    def tokens(self) -> int:
        """Of the step: what a table is asked by; where sequences differ in length, how many there are."""
        if self.call.op == "mha_prefill":
            new = str(self.sizes["new"])
            return int(self.sizes["batch"]) * (int(new) if new.isdecimal() else 1)
        return next((int(self.sizes[name]) for name in ("m", "tokens", "batch") if name in self.sizes), 0)

    def facts(self) -> dict[str, Any]:
        """As JSON has them."""
        entry = self.found and self.found.entry
        return {
            "op": self.call.op,
            "sizes": dict(self.sizes),
            "share": round(self.share, 6),
            "row": self.row or None,
            "decided_in": self.decided_in or None,
            "table": self.found.table if self.found else None,
            "entry": asdict(entry) if entry else None,
            "fallback": (self.found.fallback or None) if self.found else None,
            "defects": list(self.defects),
            "step": self.call.step,
            "place": self.call.place,
            "why": self.entry.why if self.entry else "the engine's choice is not known",
            "notes": list(self.found.notes) if self.found else [],
        }


@dataclass(frozen=True)
class EngineView:
    """device:    by the name of its data sheet
    problems:  what in the asked tables cannot work
    libraries: that were asked -> their version, or where they lie
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
        """As JSON has them."""
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
    """Raises UsageError, also where a library's files cannot be read."""
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
            tables.files(name)  # one that cannot be read is said, too, where no shape asks it
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
    notes = [*_idle(request, arch, ops, shapes), *_notes(request, arch, libraries)]
    return EngineView(request, target, device["name"], shapes, problems, notes, libraries, tables)


def _device(request: EngineRequest) -> Mapping[str, Any]:
    """The data sheet of the device that is meant, with `units` and `driver`. Raises UsageError."""
    known = engines.archs(request.engine)
    devices = [entry for entry in known_devices() if entry["arch"] in known]
    usual = architectures()
    named = [entry for entry in devices if entry["name"].lower() == request.arch.lower()]
    of_arch = [entry for entry in devices if entry["arch"] == request.arch]
    of_arch.sort(key=lambda entry: request.arch in usual and entry["name"] != usual[request.arch].device)
    if meant := next(iter([*named, *of_arch]), None):
        maker = "AMD Instinct" if meant["arch"].startswith("gfx") else "NVIDIA"
        units = usual[meant["arch"]].units if meant["arch"] in usual else 0
        return {"units": units, "driver": f"{maker} {meant['name']}"} | meant
    if request.arch in known:
        return {"arch": request.arch, "name": request.arch, "units": 0, "driver": ""}
    raise UsageError(
        f"no defaults of {request.engine} for {request.arch!r}; --arch takes {', '.join(known)}, "
        f"or {', '.join(entry['name'] for entry in devices)}; "
        f"read at {request.engine} {engines.defaults(request.engine)[0].version}"
    )


def _shares(calls: Sequence[Call], arch: str, device: Mapping[str, Any]) -> list[float]:
    """Of all steps' time, each call taking the least that the data sheet allows: by bytes alone where there
    is none. Each step of a sweep counts alike."""
    rates = {dtype: rate * 1e12 for dtype, rate in device.get("tflops", {}).items()}
    limits = Ceilings(rates or dict.fromkeys(DTYPES, math.inf), device.get("tbps", 1.0) * 1e12)
    times = [call.times * _least_s(call, arch, limits) for call in calls]
    steps: dict[str, float] = defaultdict(float)
    for call, seconds in zip(calls, times, strict=True):
        steps[call.step] += seconds
    return [seconds / steps[call.step] / len(steps) for call, seconds in zip(calls, times, strict=True)]


def _least_s(call: Call, arch: str, limits: Ceilings) -> float:
    """Seconds of a call at the device's limits. Experts are taken as evenly picked; beyond ROWS rows, where
    products bound them, their time goes by rows."""
    op, sizes, times = kernels.OPS[call.op], call.sizes, 1.0
    if call.rows:
        times = max(call.rows, ROWS) / ROWS
        sizes = sizes | {"tokens": min(call.rows, ROWS), "routing": "balanced"}
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
    entry = _chosen(request, arch, call.op, sizes)
    if call.op == "mha_prefill" and not (entry and entry.row):  # an engine may cast q, k and v
        cast = op.case({**sizes, "dtype": "fp8"}).sizes
        if (other := _chosen(request, arch, call.op, cast)) and other.row:
            sizes, entry = cast, other
    found = tables.find(call.op, entry.row, sizes) if entry and entry.row else None
    return Shape(call, sizes, share, entry, found, _defects(call.op, entry, sizes, arch, tables))


def _defects(
    op: str, entry: EngineDefault | None, sizes: Mapping[str, Size], arch: str, tables: Lookups
) -> tuple[str, ...]:
    row = next((each for each in kernels.implementations(op) if entry and each.name == entry.row), None)
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


def _idle(request: EngineRequest, arch: str, ops: Sequence[str], shapes: Sequence[Shape]) -> Iterator[str]:
    """Settings without which the engine runs the same."""
    known = known_settings(request.engine, ops, arch)
    spelled = {_spelled(name): name for name in known}
    for name in request.given:
        if name in TABLES[request.engine]:
            continue
        rest = {other: value for other, value in request.given.items() if other != name}
        without = replace(request, given=rest)
        if name not in known:
            near = difflib.get_close_matches(_spelled(name), spelled, 1, 0.8)
            meant = f"; {dashed(spelled[near[0]])} is meant?" if near else ""
            yield f"{dashed(name)}: nothing recorded of {request.engine} reads it on {arch}{meant}"
        elif _deployed(without, arch) == _deployed(request, arch) and all(
            _chosen(without, arch, shape.call.op, shape.sizes) == shape.entry for shape in shapes
        ):
            yield f"{dashed(name)}={request.given[name]} changes nothing here"


def _notes(request: EngineRequest, arch: str, libraries: Mapping[str, str]) -> Iterator[str]:
    for name in request.paths:
        if name not in libraries:
            yield f"--{name}: {unasked(request, name, arch)}"
    read = engines.defaults(request.engine)[0].version
    other = libraries.get(request.engine, read)
    if not other.startswith(read):
        yield f"what {request.engine} runs was read in {read}; the tables are those of {other}"


def unasked(request: EngineRequest, library: str, arch: str) -> str:
    """That no shape's kernel looks into a library's tables, and what to do. SGLang's AMD images have AITER
    on, so that only vLLM is told to switch it on."""
    text = f"nothing that {request.engine} runs here looks into tables of {library}"
    off = request.engine == "vllm" and request.given.get("VLLM_ROCM_USE_AITER") != "1"
    if library == "aiter" and arch.startswith("gfx") and off:
        return f"{text}; give --with VLLM_ROCM_USE_AITER=1"
    return text


def _spelled(name: str) -> str:
    """What a flag and a variable of one name have in common."""
    return name.lower().replace("_", "-")


def dashed(name: str) -> str:
    """The name of a variable, or of a flag as it is written."""
    return f"--{name}" if name.islower() else name
