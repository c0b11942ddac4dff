"""What a serving engine runs for each shape that a deployment calls, what the tuned tables of its libraries
hold for it, and what two versions of a library hold differently."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import kernels
from harness.catalogue.architectures import architectures, named_architecture, named_sheet
from harness.catalogue.devices import Ceilings
from harness.errors import UsageError
from kernels import engines
from kernels.defects import known_defects
from kernels.engines import EngineDefault
from kernels.engines.deploy import TABLES, columns, deployed, known_settings
from kernels.op import DTYPES
from kernels.tables import Found, Problem
from kernels.tables.files import RECORDED, Files, TableError
from kernels.tables.lookup import LIBRARIES, Lookups
from kernels.tuning import Target
from kernels.vendor import releases_read
from shapes.case import Size
from shapes.deployment import Call, Deployment, served, sweep
from shapes.models import ModelConfig, model
from shapes.names import near
from shapes.scheduler import Workload
from shapes.suites import cases_file

MOST_ROWS = 16384
"""The most rows of experts for which picks are drawn, as drawing many more takes seconds. Beyond it the
products and not the reading of the weights bound the experts, so their time grows with the rows."""

NO_TABLE = Found("", None)
"""The look-up of a kernel that no table decides."""


@dataclass(frozen=True)
class EngineRequest:
    """The deployment that a command asks about."""

    engine: str
    """sglang or vllm."""
    arch: str
    """An architecture or a device: gfx942, MI325X."""
    model: ModelConfig
    # How the model is served: see kernels.engines.deploy.
    tp: int = 8
    ep: int = 1
    dp_attention: bool = False
    kv: str = "bf16"
    drafts: int = 0
    """The draft tokens of each request that a decode step verifies."""
    workload: Workload | None = None
    """What is served; None means the sweep of shapes.deployment."""
    cases: str | None = None
    """A file of cases (shapes.suites.cases_file), which takes the place of calls of a workload."""
    given: Mapping[str, str] = field(default_factory=dict)
    """The variables and flags that are set for the engine."""
    paths: Mapping[str, Path] = field(default_factory=dict)
    """Library -> the folder or file that holds it."""
    triton: str = ""
    """The version of Triton beside the engine; empty means the one that its release comes with."""
    ops: Sequence[str] = ()
    """The ops that are shown; empty means all."""

    def deployed(self, arch: str) -> Deployment:
        """Raises ValueError."""
        how = self.tp, self.ep, self.dp_attention, self.kv
        return replace(deployed(self.engine, arch, self.model, *how, self.given), drafts=self.drafts)


@dataclass(frozen=True)
class Shape:
    """A shape that a deployment calls."""

    call: Call
    sizes: Mapping[str, Size]
    share: float
    """The part of the time of all steps that its calls take at the limits of the device, 0..1."""
    choice: EngineDefault | None
    """What the engine runs for it; None where that is unknown."""
    found: Found
    """What the tuned table of that kernel holds, or NO_TABLE."""
    defects: tuple[str, ...]
    """Known defects of what runs."""

    @property
    def row(self) -> str:
        """The implementation of this suite; empty where none does what the engine does."""
        return self.choice.row if self.choice else ""

    @property
    def decided_in(self) -> str:
        """The file and line of the engine that decides it; empty if unknown."""
        return f"{self.choice.file}:{self.choice.line}" if self.choice else ""

    @property
    def why(self) -> str:
        return self.choice.why if self.choice else "the engine's choice is not known"

    @property
    def asks_table(self) -> bool:
        return self.found is not NO_TABLE

    @property
    def state(self) -> str:
        """`tuned`, `fallback`, `no table` or `no row`."""
        if not self.row:
            return "no row"
        if not self.asks_table:
            return "no table"
        return "tuned" if self.found.entry else "fallback"

    @property
    def runs(self) -> str:
        """The kernel of the table's entry, or what runs after a miss."""
        return self.found.entry.kernel if self.found.entry else f"miss: {self.found.fallback}"

    @property
    def tokens(self) -> int:
        """The tokens of the step, by which a table is searched. A prompt whose length is a range counts as
        one token."""
        if self.call.op == "mha_prefill":
            new = str(self.sizes["new"])
            return int(self.sizes["batch"]) * (int(new) if new.isdecimal() else 1)
        return next((int(self.sizes[name]) for name in ("m", "tokens", "batch") if name in self.sizes), 0)

    def facts(self) -> dict[str, Any]:
        return {
            "op": self.call.op,
            "sizes": dict(self.sizes),
            "share": round(self.share, 6),
            "row": self.row or None,
            "decided_in": self.decided_in or None,
            "table": self.found.table or None,
            "entry": asdict(self.found.entry) if self.found.entry else None,
            "fallback": self.found.fallback or None,
            "defects": list(self.defects),
            "step": self.call.step,
            "place": self.call.place,
            "why": self.why,
            "notes": list(self.found.notes),
        }


@dataclass(frozen=True)
class EngineView:
    request: EngineRequest
    target: Target
    device: str
    """The name of the device's data sheet."""
    shapes: Sequence[Shape]
    problems: Sequence[Problem]
    """What is wrong with the tables that were read."""
    notes: Sequence[str]
    libraries: Mapping[str, str]
    """Library whose tables were read -> its version, or where it lies."""
    tables: Lookups

    @property
    def release(self) -> str:
        return f"{self.request.engine} {engines.defaults(self.request.engine)[0].version}"

    def facts(self) -> dict[str, Any]:
        asked = self.request
        return {
            "engine": self.release,
            "arch": self.target.arch,
            "device": self.device,
            "model": asked.model.name,
            **{name: getattr(asked, name) for name in ("tp", "ep", "dp_attention", "kv", "drafts")},
            "with": dict(asked.given),
            "libraries": dict(self.libraries),
            "shapes": [shape.facts() for shape in self.shapes],
            "problems": [str(problem) for problem in self.problems],
            "notes": list(self.notes),
        }


def engine_view(request: EngineRequest) -> EngineView:
    """Raises UsageError for an impossible deployment, and where a library's files cannot be read."""
    device = _device(request)
    arch, ops = device["arch"], list(request.ops or kernels.OPS)
    workload, longest = request.workload, request.model.max_position_embeddings
    if workload and longest and workload.isl + workload.osl > longest:
        raise UsageError(f"isl + osl of a workload must be at most {longest} tokens for {request.model.name}")
    try:
        deployment = request.deployed(arch)
        if request.cases:
            file = cases_file(request.cases)
            if file.deployment not in ("", deployment.text):
                raise UsageError(
                    f"{request.cases} has shapes of {file.deployment}, not of {deployment.text}: give the "
                    "options that `shapes from` got"
                )
            calls = [
                Call(each.op, {**each.sizes}, "", each.weight, each.place, int(each.sizes.get("tokens", 0)))
                for each in file.cases
            ]
        else:
            calls = served(deployment, workload) if workload else sweep(deployment)
        parts = shares(calls, request)  # this finds sizes that no kernel takes
    except ValueError as error:
        raise UsageError(str(error)) from None
    left_out = [f"{request.model.name}, not modelled: {line}" for line in request.model.not_modelled]
    if not calls:
        raise UsageError("; ".join([f"{request.model.name} has no call of an op here", *left_out]))
    units = request.given.get("CU_NUM", str(device["units"]))
    if not units.isdecimal():
        raise UsageError(f"CU_NUM={units} is no number of compute units")
    triton = request.triton or engines.triton(request.engine)
    target = Target(engines.kind(arch), arch, int(units), device["driver"], triton=triton)
    tables = Lookups(target, request.paths, request.given, *columns(request.engine, deployment))
    try:
        for name in request.paths:
            tables.files(name)  # a wrong path is an error, even if no shape asks that library
        shapes = [
            _shape(request, arch, call, share, tables)
            for call, share in zip(calls, parts, strict=True)
            if call.op in ops
        ]
        problems = tables.problems()
    except TableError as error:
        raise UsageError(str(error)) from None
    libraries = {
        name: files.version or f"version unknown, {files.path}" for name, files in tables.asked.items()
    }
    notes = [*left_out, *_without_effect(request, arch, shapes), *_unread(request, arch, libraries)]
    r1 = model("deepseek-r1")
    if replace(request.model, name=r1.name, source=r1.source) != r1:
        notes.append(f"what {request.engine} runs was read for DeepSeek-R1; other shapes may run another row")
        text = "were recorded for DeepSeek-R1's shapes: a miss of another shape may be none; give"
        recorded = [name for name, files in tables.asked.items() if files.path.parent == RECORDED]
        notes += [f"tables of {name} {text} --{name} PATH" for name in recorded]
    return EngineView(request, target, device["name"], shapes, problems, notes, libraries, tables)


def _device(request: EngineRequest) -> Mapping[str, Any]:
    """The data sheet of the device, with its number of compute `units` and the name that its `driver` gives.
    An architecture stands for its usual device. Raises UsageError."""
    known, usual, arch = engines.archs(request.engine), architectures(), named_architecture(request.arch)
    if arch not in known:
        raise UsageError(
            f"what {request.engine} runs on {arch} is not known; --arch takes {', '.join(known)}, or a GPU"
        )
    if sheet := named_sheet(request.arch):
        maker = "AMD Instinct" if arch.startswith("gfx") else "NVIDIA"
        units = usual[arch].units if arch in usual else 0
        return {"units": units, "driver": f"{maker} {sheet['name']}"} | sheet
    return {"arch": arch, "name": arch, "units": 0, "driver": ""}


def shares(calls: Sequence[Call], request: EngineRequest) -> list[float]:
    """The part of the time of all steps that each call takes, at the least time that the data sheet allows;
    without a data sheet the time of reading its bytes counts. All steps of a sweep count alike. Raises
    UsageError."""
    device = _device(request)
    rates = {dtype: rate * 1e12 for dtype, rate in device.get("tflops", {}).items()}
    limits = Ceilings(rates or dict.fromkeys(DTYPES, math.inf), device.get("tbps", 1.0) * 1e12)
    times = [call.times * _least_s(call, device["arch"], limits) for call in calls]
    steps: dict[str, float] = defaultdict(float)
    for call, seconds in zip(calls, times, strict=True):
        steps[call.step] += seconds
    return [seconds / steps[call.step] / len(steps) for call, seconds in zip(calls, times, strict=True)]


def _least_s(call: Call, arch: str, limits: Ceilings) -> float:
    """Seconds of a call at the device's limits, if all experts are picked equally often."""
    op, sizes, times = kernels.OPS[call.op], call.sizes, 1.0
    if call.rows:
        times = max(call.rows, MOST_ROWS) / MOST_ROWS
        sizes = sizes | {"tokens": min(call.rows, MOST_ROWS), "routing": "balanced"}
    return times * limits.min_time(op.work(op.sizes({**op.defaults(arch), **sizes})))


def _chosen(request: EngineRequest, arch: str, op: str, sizes: Mapping[str, Size]) -> EngineDefault | None:
    every = asdict(kernels.OPS[op].sizes(sizes)) | {
        "heads/tp": request.model.num_attention_heads // request.tp
    }
    return engines.default(request.engine, op, arch, every, request.given)


def _shape(request: EngineRequest, arch: str, call: Call, share: float, tables: Lookups) -> Shape:
    op = kernels.OPS[call.op]
    sizes = op.case({**op.defaults(arch), **call.sizes}).sizes
    choice = _chosen(request, arch, call.op, sizes)
    if call.op == "mha_prefill" and not (choice and choice.row):  # an engine may cast q, k and v
        cast = op.case({**sizes, "dtype": "fp8"}).sizes
        if (other := _chosen(request, arch, call.op, cast)) and other.row:
            sizes, choice = cast, other
    if not (choice and choice.row):
        return Shape(call, sizes, share, choice, NO_TABLE, ())
    found = tables.find(call.op, choice.row, sizes) or NO_TABLE
    return Shape(call, sizes, share, choice, found, _defects(call.op, choice.row, sizes, arch, tables))


def _defects(op: str, name: str, sizes: Mapping[str, Size], arch: str, tables: Lookups) -> tuple[str, ...]:
    """Known defects of a row in the version of its library that was read here. If the version is unknown, the
    newest version for which the row was written counts."""
    row = next(each for each in kernels.implementations(op) if each.name == name)
    package = row.library or row.provider
    version = tables.files(package).version if package in LIBRARIES else ""
    if not version[:1].isdigit():
        version = next(iter(releases_read(package)), "")
    known = known_defects(row, kernels.OPS[op].sizes(sizes), arch, version)
    return tuple(f"{defect.issue}: {defect.symptom}" for defect in known)


def _without_effect(request: EngineRequest, arch: str, shapes: Sequence[Shape]) -> Iterator[str]:
    """A line for each setting without which the engine runs the same."""
    known = known_settings(request.engine, list(kernels.OPS), arch)
    for name in request.given:
        if name in TABLES[request.engine]:
            continue
        rest = {other: value for other, value in request.given.items() if other != name}
        without = replace(request, given=rest)
        if name not in known:
            meant = "".join(f"; did you mean {as_given(each)}?" for each in near(name, known, 0.8)[:1])
            yield (
                f"{as_given(name)}: what {request.engine} does with it on {arch} is not recorded, so it "
                f"changed nothing here, and rows may be wrong{meant}"
            )
        elif without.deployed(arch) == request.deployed(arch) and all(
            _chosen(without, arch, shape.call.op, shape.sizes) == shape.choice for shape in shapes
        ):
            yield f"{as_given(name, request.given[name])} changes nothing here"


def _unread(request: EngineRequest, arch: str, libraries: Mapping[str, str]) -> Iterator[str]:
    """A line for each given library that no shape asks, and one where the engine's tables are of another
    release than its recorded choices."""
    for name in request.paths:
        if name not in libraries:
            yield f"--{name}: {_unasked(request, name, arch)}"
    read = engines.defaults(request.engine)[0].version
    other = libraries.get(request.engine, read)
    if not other.startswith(read):
        yield f"what {request.engine} runs was read in {read}; the tables are those of {other}"


def _unasked(request: EngineRequest, library: str, arch: str) -> str:
    """Says that no kernel of the deployment looks into a library's tables, and what to do. vLLM does not use
    AITER unless a variable says so; SGLang's images for AMD set theirs."""
    text = f"nothing that {request.engine} runs here looks into tables of {library}"
    off = request.engine == "vllm" and request.given.get("VLLM_ROCM_USE_AITER") != "1"
    if library == "aiter" and arch.startswith("gfx") and off:
        return f"{text}; give --with VLLM_ROCM_USE_AITER=1"
    return text


def as_given(name: str, value: str = "") -> str:
    """A variable or a flag as --with takes it."""
    written = f"--{name}" if name.islower() else name
    return f"{written}={value}" if value else written


@dataclass(frozen=True)
class Changes:
    """What two versions of one library hold differently."""

    library: str
    before: EngineView
    after: EngineView
    asked: int
    """The number of shapes whose kernels look into this library's tables."""
    changes: Sequence[tuple[Shape, Shape]]
    """The shapes that run something else, before and after; the largest shares of the time first."""

    def facts(self) -> dict[str, Any]:
        changes = []
        for pair in self.changes:
            before, after = (shape.facts() for shape in pair)
            change = {name: after[name] for name in ("op", "sizes", "share", "row", "place", "step")}
            for name, shape in (("a", before), ("b", after)):
                change[name] = {"entry": shape["entry"], "fallback": shape["fallback"]}
            changes.append(change)
        a, b = (view.libraries[self.library] for view in (self.before, self.after))
        return {"library": self.library, "a": a, "b": b, "asked": self.asked, "changes": changes}


def changes(request: EngineRequest, a: Path, b: Path) -> Changes:
    """Compares the library that lies at both paths. Raises UsageError, also where no shape asks it."""
    package = _package(a)
    before, after = (engine_view(replace(request, paths={**request.paths, package: path})) for path in (a, b))
    pairs = [
        (was, now)
        for was, now in zip(before.shapes, after.shapes, strict=True)
        if now.asks_table and before.tables.library_of(now.row) == package
    ]
    if not pairs:
        raise UsageError(_unasked(request, package, before.target.arch))
    changed = [(was, now) for was, now in pairs if was.runs != now.runs]
    return Changes(package, before, after, len(pairs), sorted(changed, key=lambda pair: -pair[1].share))


def _package(path: Path) -> str:
    """The library that lies there. Raises UsageError."""
    for package in LIBRARIES:
        with contextlib.suppress(TableError):
            Files(package, path)
            return package
    raise UsageError(
        f"{path} holds none of {', '.join(LIBRARIES)}: give two checkouts, wheels or site-packages"
    )
