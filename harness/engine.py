"""What an engine runs for each shape of a deployment, by tuned tables; how two versions of these differ."""

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
from kernels.engines.deploy import TABLES, deployed, known_settings, topk_columns
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

MOST_TOKENS = 16384
"""The most tokens for which the experts' work is computed; for many more it takes seconds. The time of a call
with more tokens is that of its products, and not of reading weights, so it grows with the tokens."""

NO_TABLE = Found("", None)  # the look-up of a kernel that no table decides
TOKENS = {"block_scale_gemm": "m", "fused_moe": "tokens", "mla_decode": "batch"}  # op -> size with the tokens


@dataclass(frozen=True)
class EngineRequest:
    """The deployment that a command asks about; how a model is served: see kernels.engines.deploy."""

    engine: str  # sglang or vllm
    arch: str  # an architecture or a device: gfx942, MI325X
    model: ModelConfig
    tp: int = 8
    ep: int = 1
    dp_attention: bool = False
    kv: str = "bf16"
    drafts: int = 0  # draft tokens of each request that a decode step verifies
    workload: Workload | None = None  # what is served; None: the sweep of shapes.deployment
    cases: str | None = None  # a file (shapes.suites.cases_file) whose cases replace a workload's calls
    given: Mapping[str, str] = field(default_factory=dict)  # variables and flags that are set for the engine
    paths: Mapping[str, Path] = field(default_factory=dict)  # library -> the folder or file that holds it
    triton: str = ""  # the version of Triton beside the engine; empty: that of the engine's release
    ops: Sequence[str] = ()  # the ops that are shown; empty: all

    def deployed(self, arch: str) -> Deployment:
        """How the model is split over ranks on an architecture. Raises ValueError where it cannot be."""
        split = deployed(
            self.engine, arch, self.model, self.tp, self.ep, self.dp_attention, self.kv, self.given
        )
        return replace(split, drafts=self.drafts)


@dataclass(frozen=True)
class Shape:
    """A shape that a deployment calls."""

    call: Call
    sizes: Mapping[str, Size]
    share: float  # the part of the time of all steps that its calls take at the limits of the device, 0..1
    choice: EngineDefault | None  # what the engine runs for it; None: unknown
    found: Found  # what the tuned table of that kernel holds, or NO_TABLE
    defects: tuple[str, ...]  # known defects of what runs

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
        one token; 0 of an op that is not the suite's."""
        sizes = self.sizes
        if self.call.op == "mha_prefill":
            new = str(sizes["new"])
            return int(sizes["batch"]) * (int(new) if new.isdecimal() else 1)
        return int(sizes.get(TOKENS.get(self.call.op, ""), 0))

    def facts(self) -> dict[str, Any]:
        found = self.found
        return {
            "op": self.call.op, "sizes": dict(self.sizes), "share": round(self.share, 6),
            "row": self.row or None, "decided_in": self.decided_in or None, "table": found.table or None,
            "entry": asdict(found.entry) if found.entry else None, "fallback": found.fallback or None,
            "defects": list(self.defects), "step": self.call.step, "place": self.call.place,
            "why": self.why, "notes": list(found.notes),
        }  # fmt: skip


@dataclass(frozen=True)
class EngineView:
    """What an engine runs for a deployment."""

    request: EngineRequest
    target: Target
    device: str  # the name of the device's data sheet
    shapes: Sequence[Shape]
    problems: Sequence[Problem]  # what is wrong with the tables that were read
    notes: Sequence[str]
    libraries: Mapping[str, str]  # library whose tables were read -> its version, or where it lies
    tables: Lookups

    @property
    def release(self) -> str:
        return f"{self.request.engine} {engines.defaults(self.request.engine)[0].version}"

    def facts(self) -> dict[str, Any]:
        request = self.request
        return {
            "engine": self.release, "arch": self.target.arch, "device": self.device,
            "model": request.model.name, "tp": request.tp, "ep": request.ep,
            "dp_attention": request.dp_attention, "kv": request.kv, "drafts": request.drafts,
            "with": dict(request.given), "libraries": dict(self.libraries),
            "shapes": [shape.facts() for shape in self.shapes],
            "problems": [str(problem) for problem in self.problems], "notes": list(self.notes),
        }  # fmt: skip


def engine_view(request: EngineRequest) -> EngineView:
    """What the engine runs for a request. Raises UsageError, also where a library's files cannot be read."""
    device = _device(request)
    arch = device["arch"]
    try:
        deployment = request.deployed(arch)
        calls = _calls(request, deployment)
        call_shares = shares(calls, request)  # raises ValueError for sizes that no kernel takes
    except ValueError as error:
        raise UsageError(str(error)) from None
    left_out = [f"{request.model.name}, not modelled: {line}" for line in request.model.not_modelled]
    if not calls:
        raise UsageError("; ".join([f"{request.model.name} has no call of an op here", *left_out]))
    units = request.given.get("CU_NUM", str(device["units"]))
    if not units.isdecimal():
        raise UsageError(f"CU_NUM={units} is no number of compute units")
    triton = request.triton or engines.facts(request.engine)["triton"]
    target = Target(engines.kind(arch), arch, int(units), device["driver"], triton=triton)
    tables = Lookups(target, request.paths, request.given, *topk_columns(request.engine, deployment))
    try:
        for name in request.paths:
            tables.files(name)  # a wrong path is an error, even if no shape asks that library
        shapes = [
            _shape(request, arch, call, share, tables)
            for call, share in zip(calls, call_shares, strict=True)
            if call.op in (request.ops or kernels.OPS)
        ]
        problems = tables.problems()
    except TableError as error:
        raise UsageError(str(error)) from None
    libraries = {
        name: files.version or f"version unknown, {files.path}" for name, files in tables.asked.items()
    }
    notes = [*left_out, *_notes_on_settings(request, arch, shapes)]
    notes += [*_notes_on_libraries(request, arch, libraries), *_notes_on_model(request, tables)]
    return EngineView(request, target, device["name"], shapes, problems, notes, libraries, tables)


def _calls(request: EngineRequest, deployment: Deployment) -> list[Call]:
    """The calls of the file of cases, else of the workload or the sweep. Raises UsageError or ValueError."""
    workload, longest = request.workload, request.model.max_position_embeddings
    if workload and longest and workload.isl + workload.osl > longest:
        raise UsageError(f"isl + osl of a workload must be at most {longest} tokens for {request.model.name}")
    if not request.cases:
        return served(deployment, workload) if workload else sweep(deployment)
    file = cases_file(request.cases)
    if file.deployment not in ("", deployment.text):
        raise UsageError(
            f"{request.cases} has shapes of {file.deployment}, not of {deployment.text}: give the options "
            "that `shapes from` got"
        )
    return [
        Call(case.op, {**case.sizes}, "", case.weight, case.place, rows=int(case.sizes.get("tokens", 0)))
        for case in file.cases
    ]


def _device(request: EngineRequest) -> Mapping[str, Any]:
    """The data sheet of the request's device, with its compute `units` and its name by the `driver`. That
    of an architecture is its usual device's, or has no figures. Raises UsageError."""
    arch, known = named_architecture(request.arch), engines.archs(request.engine)
    if arch not in known:
        raise UsageError(
            f"what {request.engine} runs on {arch} is not known; --arch takes {', '.join(known)}, or a GPU"
        )
    if sheet := named_sheet(request.arch):
        maker = "AMD Instinct" if arch.startswith("gfx") else "NVIDIA"
        usual = architectures().get(arch)
        return {"units": usual.units if usual else 0, "driver": f"{maker} {sheet['name']}"} | sheet
    return {"arch": arch, "name": arch, "units": 0, "driver": ""}


def shares(calls: Sequence[Call], request: EngineRequest) -> list[float]:
    """The part of the time of all steps that each call takes, 0..1. The time of a call is the least that the
    device's data sheet allows. All steps of a sweep count alike. Raises UsageError."""
    device = _device(request)
    rates = {dtype: tflops * 1e12 for dtype, tflops in device.get("tflops", {}).items()}
    # Without a data sheet the bytes that a call reads decide alone.
    limits = Ceilings(rates or dict.fromkeys(DTYPES, math.inf), device.get("tbps", 1.0) * 1e12)
    calls_s = [call.times * _least_s(call, device["arch"], limits) for call in calls]
    steps_s: dict[str, float] = defaultdict(float)
    for call, call_s in zip(calls, calls_s, strict=True):
        steps_s[call.step] += call_s
    return [call_s / steps_s[call.step] / len(steps_s) for call, call_s in zip(calls, calls_s, strict=True)]


def _least_s(call: Call, arch: str, limits: Ceilings) -> float:
    """Seconds of a call at the device's limits, if all experts are picked equally often."""
    op, sizes, scale = kernels.OPS[call.op], call.sizes, 1.0
    if call.rows:  # a call of the experts, whose work is that of the tokens that picked one of them
        tokens = min(call.rows, MOST_TOKENS)
        scale = call.rows / tokens  # above MOST_TOKENS the time grows with the tokens
        sizes = sizes | {"tokens": tokens, "routing": "balanced"}
    return scale * limits.min_time(op.work(op.sizes({**op.defaults(arch), **sizes})))


def _choice(request: EngineRequest, arch: str, op: str, sizes: Mapping[str, Size]) -> EngineDefault | None:
    """What the engine runs for these sizes; None where that is unknown. Some rules ask for `heads/tp`."""
    heads_of_rank = {"heads/tp": request.model.num_attention_heads // request.tp}
    whole_sizes = asdict(kernels.OPS[op].sizes(sizes)) | heads_of_rank
    return engines.default(request.engine, op, arch, whole_sizes, request.given)


def _shape(request: EngineRequest, arch: str, call: Call, share: float, tables: Lookups) -> Shape:
    """What the engine runs for a call, and what its table holds. share: see Shape"""
    op = kernels.OPS[call.op]
    sizes = op.case({**op.defaults(arch), **call.sizes}).sizes
    choice = _choice(request, arch, call.op, sizes)
    if call.op == "mha_prefill" and not (choice and choice.row):
        # The engine may have a row for FP8 alone: it then casts q, k and v before the call.
        fp8_sizes = op.case({**sizes, "dtype": "fp8"}).sizes
        fp8_choice = _choice(request, arch, call.op, fp8_sizes)
        if fp8_choice and fp8_choice.row:
            sizes, choice = fp8_sizes, fp8_choice
    if not (choice and choice.row):
        return Shape(call, sizes, share, choice, NO_TABLE, ())
    found = tables.find(call.op, choice.row, sizes) or NO_TABLE
    return Shape(call, sizes, share, choice, found, _defects(call.op, choice.row, sizes, arch, tables))


def _defects(op: str, name: str, sizes: Mapping[str, Size], arch: str, tables: Lookups) -> tuple[str, ...]:
    """Defects of a row in the version of its library that was read; else in the newest it was written for."""
    row = next(row for row in kernels.implementations(op) if row.name == name)
    package = row.library or row.provider
    version = tables.files(package).version if package in LIBRARIES else ""
    if not version[:1].isdigit():
        version = next(iter(releases_read(package)), "")
    defects = known_defects(row, kernels.OPS[op].sizes(sizes), arch, version)
    return tuple(f"{defect.issue}: {defect.symptom}" for defect in defects)


def _notes_on_settings(request: EngineRequest, arch: str, shapes: Sequence[Shape]) -> Iterator[str]:
    """A line for each setting that changes nothing, or of which it is not known what it changes."""
    known = known_settings(request.engine, list(kernels.OPS), arch)
    for name, value in request.given.items():
        if name in TABLES[request.engine]:
            continue
        if name not in known:
            meant = "".join(f"; did you mean {as_given(nearest)}?" for nearest in near(name, known, 0.8)[:1])
            yield (
                f"{as_given(name)}: what {request.engine} does with it on {arch} is not recorded, so it "
                f"changed nothing here, and rows may be wrong{meant}"
            )
            continue
        others = {other: value for other, value in request.given.items() if other != name}
        without = replace(request, given=others)
        is_split_alike = without.deployed(arch) == request.deployed(arch)
        if is_split_alike and all(
            _choice(without, arch, shape.call.op, shape.sizes) == shape.choice for shape in shapes
        ):
            yield f"{as_given(name, value)} changes nothing here"


def _notes_on_libraries(request: EngineRequest, arch: str, libraries: Mapping[str, str]) -> Iterator[str]:
    """A line for each library of the request that no shape asks, and one where the engine's tables are of
    another release than its recorded choices. libraries: those that some shape asks, with their versions"""
    for name in request.paths:
        if name not in libraries:
            yield f"--{name}: {_unasked(request, name, arch)}"
    version = engines.defaults(request.engine)[0].version
    of_tables = libraries.get(request.engine, version)
    if not of_tables.startswith(version):
        yield f"what {request.engine} runs was read in {version}; the tables are those of {of_tables}"


def _notes_on_model(request: EngineRequest, tables: Lookups) -> Iterator[str]:
    """Lines on what was recorded for DeepSeek-R1 alone; none for a model of the same sizes."""
    r1 = model("deepseek-r1")
    if request.model == replace(r1, name=request.model.name, source=request.model.source):
        return
    yield f"what {request.engine} runs was read for DeepSeek-R1; other shapes may run another row"
    for name, files in tables.asked.items():
        if files.path.parent == RECORDED:
            recorded = f"tables of {name} were recorded for DeepSeek-R1's shapes"
            yield f"{recorded}: a miss of another shape may be none; give --{name} PATH"


def _unasked(request: EngineRequest, library: str, arch: str) -> str:
    """Says that no kernel of the deployment looks into a library's tables, and what to do. vLLM does not use
    AITER unless a variable says so; SGLang's images for AMD set theirs."""
    text = f"nothing that {request.engine} runs here looks into tables of {library}"
    is_off = request.engine == "vllm" and request.given.get("VLLM_ROCM_USE_AITER") != "1"
    if library == "aiter" and arch.startswith("gfx") and is_off:
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
    asked: int  # the number of shapes whose kernels look into this library's tables
    changes: Sequence[tuple[Shape, Shape]]  # shapes that run something else, the largest share of time first

    def facts(self) -> dict[str, Any]:
        changes = []
        for shape_before, shape_after in self.changes:
            before, after = shape_before.facts(), shape_after.facts()
            change = {name: after[name] for name in ("op", "sizes", "share", "row", "place", "step")}
            change["a"] = {"entry": before["entry"], "fallback": before["fallback"]}
            change["b"] = {"entry": after["entry"], "fallback": after["fallback"]}
            changes.append(change)
        a, b = self.before.libraries[self.library], self.after.libraries[self.library]
        return {"library": self.library, "a": a, "b": b, "asked": self.asked, "changes": changes}


def changes(request: EngineRequest, a: Path, b: Path) -> Changes:
    """Compares two versions of a library, a before b. Raises UsageError, also where no shape asks it."""
    package = _package(a)
    before = engine_view(replace(request, paths={**request.paths, package: a}))
    after = engine_view(replace(request, paths={**request.paths, package: b}))
    pairs = [
        (old, new)
        for old, new in zip(before.shapes, after.shapes, strict=True)
        if new.asks_table and before.tables.library_of(new.row) == package
    ]
    if not pairs:
        raise UsageError(_unasked(request, package, before.target.arch))
    changed = [(old, new) for old, new in pairs if old.runs != new.runs]
    changed.sort(key=lambda pair: -pair[1].share)
    return Changes(package, before, after, len(pairs), changed)


def _package(path: Path) -> str:
    """The library that lies there. Raises UsageError."""
    for package in LIBRARIES:
        with contextlib.suppress(TableError):
            Files(package, path)
            return package
    raise UsageError(
        f"{path} holds none of {', '.join(LIBRARIES)}: give two checkouts, wheels or site-packages"
    )
