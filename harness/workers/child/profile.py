"""What ran in a call: kernels and their times by torch's profiler (device kernels on a GPU, operators on a
CPU), a fingerprint that tells kernels of one name apart, and a hash of the suite's own code of a row."""

from __future__ import annotations

import ast
import ctypes
import functools
import gc
import hashlib
import inspect
import itertools
import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kernels
from harness.workers.child.timers import Call
from kernels.op import Implementation

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

CALLS = 10
PROFILE_S = 0.2
EVENTS = 5000
"""The average is over CALLS calls, or fewer: for at most PROFILE_S seconds, and EVENTS events, of which torch
reads 10,000 per second."""
SHARE = 0.01  # a kernel with less than this share of the total time is not listed
CODE = ("cubin", "hsaco")  # the names under which Triton keeps machine code


def start(kind: str) -> None:
    """Takes an empty profile: the first one of a process starts CUPTI, which takes 5 s (H200, CUDA 13.0)."""
    from torch.profiler import profile as torch_profiler

    with torch_profiler(activities=_activities(kind)):
        pass


def _activities(kind: str) -> list[Any]:
    from torch.profiler import ProfilerActivity

    return [ProfilerActivity.CPU] if kind == "cpu" else [ProfilerActivity.CPU, ProfilerActivity.CUDA]


def profile(
    calls: Sequence[Call], kind: str, synchronize: Callable[[], None], call_s: float
) -> dict[str, Any]:
    """Profiles calls in rotation, which take about `call_s` seconds each. Returns, per call, {"kernels":
    [{"name", "us", "count"}], "total_us"}: each kernel's own time (on a GPU, without gaps between kernels),
    largest first, and its number of launches. The total includes kernels that are too small to be listed."""
    from torch.profiler import profile as torch_profiler

    activities = _activities(kind)
    rotation = itertools.cycle(calls)
    count = max(1, int(min(CALLS, PROFILE_S / call_s)))
    # The first call under a profiler contains the profiler's own preparation, a small part of a long call.
    if count > 1:
        with torch_profiler(activities=activities) as profiler:
            next(rotation)()
            synchronize()
        count = max(1, min(count, EVENTS // max(1, len(profiler.events()))))
    with torch_profiler(activities=activities) as profiler:
        for _ in range(count):
            next(rotation)()
        synchronize()
    return summary(profiler.events(), count, kind)


def summary(events: Iterable[Any], calls: int, kind: str) -> dict[str, Any]:
    """The result of `profile`, from the profiler's events (torch.autograd.profiler_util.FunctionEvent)."""
    from torch.autograd import DeviceType

    spent, launched = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in events:
        on_device = event.device_type != DeviceType.CPU
        # An annotation spans kernels that have events of their own.
        if on_device == (kind != "cpu") and not event.is_user_annotation:
            spent[event.name] += event.time_range.elapsed_us() if on_device else event.self_cpu_time_total
            launched[event.name] += 1
    total = sum(spent.values())
    kernels = [
        {"name": name, "us": spent[name] / calls, "count": launched[name] / calls}
        for name in sorted(spent, key=lambda name: -spent[name])
        if spent[name] > SHARE * total
    ]
    return {"kernels": kernels, "total_us": total / calls}


def fingerprint(call: Callable[[], None], kind: str, kernels: Collection[str]) -> list[str]:
    """What identifies the code that ran in a call. On a CPU: the implementations that torch's oneDNN chose,
    such as `onednn matmul brg:avx512_core_bf16`, or `onednn none`. On a GPU: a hash of the machine code of
    each Triton kernel of these names, such as `code gemm_kernel 1f03ab`."""
    return _onednn(call) if kind == "cpu" else _triton(call, kernels)


def _onednn(call: Callable[[], None]) -> list[str]:
    import torch

    if not torch.backends.mkldnn.is_available():
        return []
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        log = _printed_by(call)
    return onednn_names(log.splitlines())


def onednn_names(lines: Collection[str]) -> list[str]:
    """Each primitive with its implementation, once, from oneDNN's verbose lines."""
    matches = [re.match(r"onednn_verbose,(?:[^,]*,)*?exec,\w+,(\w+),([^,]+),", line) for line in lines]
    names = dict.fromkeys(f"onednn {match[1]} {match[2]}" for match in matches if match)
    return list(names) or ["onednn none"]


def _printed_by(call: Callable[[], None]) -> str:
    """What a call writes to file descriptor 1, including what C libraries write."""
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)
    stdout = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            call()
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(stdout, 1)
            os.close(stdout)
        file.seek(0)
        return file.read().decode(errors="replace")


def _triton(call: Callable[[], None], kernels: Collection[str]) -> list[str]:
    """Hashes of the Triton kernels that a call launches. A kernel that torch.compile launches does not pass
    JITFunction.run: of its name, all that this process has compiled count, also those for other sizes."""
    if "triton" not in sys.modules:
        return []
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    ran: list[CompiledKernel] = []
    run = JITFunction.run

    def noted(self: JITFunction, *arguments: Any, **options: Any) -> Any:
        compiled = run(self, *arguments, **options)
        if compiled is not None:  # a hook of the compiler may prevent the launch
            ran.append(compiled)
        return compiled

    JITFunction.run = noted
    try:
        call()
    finally:
        JITFunction.run = run
    names_seen = {compiled.metadata.name for compiled in ran}
    # type() and not isinstance(): the latter raises for a weak proxy whose object is gone.
    living = [o for o in gc.get_objects() if issubclass(type(o), CompiledKernel)]
    ran += [compiled for compiled in living if compiled.metadata.name not in names_seen]
    return sorted({_code(compiled) for compiled in ran if compiled.metadata.name in kernels} - {""})


def _code(compiled: CompiledKernel) -> str:
    """`code NAME HASH`; empty where Triton keeps no machine code."""
    code = next((compiled.asm[kind] for kind in CODE if kind in compiled.asm), None)
    return f"code {compiled.metadata.name} {hashlib.sha256(code).hexdigest()[:12]}" if code else ""


PACKAGE = Path(kernels.__file__).parent
CONTRACTS = {"op", "operands", "platform", "sizes", "support", "visibility"}
"""Modules of kernels/ whose code surrounds a call and is not part of it."""


def source_of(implementation: Implementation) -> str:
    """A hash, 12 hexadecimal digits, of the provider's file and of all files of kernels/ that it imports,
    directly or not. Comments, docstrings, layout and the place of a file do not count. Neither does the
    library's own code: `version` stands for it."""
    return _hash(Path(inspect.getfile(type(implementation))))


def jit_source(provider: Path) -> str:
    """A hash of the kernels that a provider compiles: the `*_jit` modules among the files of `source_of`."""
    texts = _texts(path for path in _files(provider) if path.stem.endswith("_jit"))
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:12]


@functools.cache
def _hash(provider: Path) -> str:
    return hashlib.sha256(repr(_texts(_files(provider))).encode()).hexdigest()[:12]


def _texts(files: Iterable[Path]) -> list[str]:
    return sorted(bare(ast.parse(file.read_text("utf-8"))) for file in files)


def _files(provider: Path) -> set[Path]:
    """A provider's file and all in kernels/ that it imports, however far."""
    queue, files = [provider], set[Path]()
    while queue:
        path = queue.pop()
        if path not in files:
            files.add(path)
            queue += _imported(path)
    return files


def _imported(path: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            package, *inner = name.split(".")
            is_contract = len(inner) == 1 and inner[0] in CONTRACTS
            if package == "kernels" and inner and not is_contract:
                file = _file_of(*inner)
                if file.is_file():
                    yield file


def _file_of(first: str, *others: str) -> Path:
    """The file of the module `kernels.FIRST.OTHERS...`, if these words name a module. A plug-in's op is
    imported as `kernels.FIRST` too, but lies elsewhere."""
    folders = getattr(sys.modules.get(f"kernels.{first}"), "__path__", None)
    base = Path(folders[0]) if folders else PACKAGE / first
    return base.joinpath(*others).with_suffix(".py")


def bare(tree: ast.Module) -> str:
    """The code of a module without comments, docstrings and layout, and without imports from kernels/,
    which only say where other code lies."""
    tree = _WithoutOwnImports().visit(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return repr(_fields(tree))


def _fields(node: object) -> object:
    """A syntax tree as lists, without empty fields. What `ast.unparse` and `ast.dump` write of a tree depends
    on the version of Python."""
    if isinstance(node, ast.AST):
        filled = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
        return [type(node).__name__, *((name, _fields(value)) for name, value in filled)]
    return [_fields(element) for element in node] if isinstance(node, list) else repr(node)


class _WithoutOwnImports(ast.NodeTransformer):
    """Removes `from kernels... import ...`."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        return None if (node.module or "").partition(".")[0] == "kernels" else node
