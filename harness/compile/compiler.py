"""Compiles many Triton launches in parallel, and reads what each takes: registers, spills, shared memory,
code and matrix instructions. Results are cached until something that matters changes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import re
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import kernels
from harness import files
from harness.catalogue.architectures import architectures
from harness.compile.launches import KernelLaunch, pretended
from harness.errors import one_line
from harness.files import JsonObject
from harness.paths import cache

if TYPE_CHECKING:
    from triton import JITFunction
    from triton.compiler import CompiledKernel

NICENESS = 10  # of the processes that compile
PROGRESS_S = 10.0  # seconds between two lines of progress

# Matrix instructions in the assembly of AMD and NVIDIA.
MATRIX = re.compile(r"\b(?:v_s?mfmac?_\w+|wgmma\.mma_async[\w.:]*|tcgen05\.mma\.[\w.:]*|mma\.sync[\w.:]*)")

# A product [m, k] x [k, n] in Triton's IR.
PRODUCT = re.compile(r"\btt\.dot\b.*: tensor<(?P<m>\d+)x(?P<k>\d+)x(?P<dtype>\w+)> \* tensor<\d+x(?P<n>\d+)x")
DTYPES = {"f8E4M3FN": "fp8", "f8E4M3FNUZ": "fp8", "bf16": "bf16"}  # by Triton's names


@dataclass(frozen=True)
class Product:
    """A product of tiles, [m, k] x [k, n]."""

    m: int
    n: int
    k: int
    dtype: str  # fp8 or bf16; Triton's name for any other


@dataclass
class Resources:
    """What a compiled kernel takes of a GPU. All fields but the last three are keys of `compile --json`."""

    registers: int = 0  # registers of a thread; on CDNA VGPRs and AGPRs together
    spills: int = 0  # registers of a thread that did not fit. On CDNA some of them may have gone to AGPRs
    scratch_bytes: int = 0  # memory of a thread for spilled registers and local arrays
    shared_bytes: int = 0  # of a program
    tensor_columns: int = 0  # columns of tensor memory, of a program
    threads: int = 0  # of a program
    code_bytes: int = 0
    matrix_instructions: list[str] = field(default_factory=list)  # those in the assembly, each once
    products: list[Product] = field(default_factory=list)  # products in the source, each once
    remarks: list[str] = field(default_factory=list)  # remarks of the assembler about what costs speed
    error: str = ""  # why compiling failed, in one line; then all others are empty


def resources_of(compiled: CompiledKernel, log: str) -> Resources:
    """Reads the assembly of a compiled kernel. log: what ptxas printed with -v, on NVIDIA."""
    amd = "amdgcn" in compiled.asm
    text = compiled.asm["amdgcn" if amd else "ptx"]
    counts = _amd(text) if amd else _nvidia(text, log, compiled.asm["cubin"])
    products = [
        Product(int(found["m"]), int(found["n"]), int(found["k"]), DTYPES.get(found["dtype"], found["dtype"]))
        for found in PRODUCT.finditer(compiled.asm["ttir"])
    ]
    return Resources(
        **counts,
        shared_bytes=compiled.metadata.shared,
        tensor_columns=getattr(compiled.metadata, "tmem_size", None) or 0,
        matrix_instructions=sorted(set(MATRIX.findall(text))),
        products=list(dict.fromkeys(products)),
    )


def _amd(text: str) -> JsonObject:
    """The counts in the metadata and the comments of LLVM's assembly."""

    def value(name: str) -> int:
        return int(_match(rf"^\s*(?:- )?{re.escape(name)}[:=]?\s+(?:= )?(\d+)", text)[1])

    return {
        "registers": value("; TotalNumVgprs"),
        "spills": value(".vgpr_spill_count"),
        "scratch_bytes": value(".private_segment_fixed_size"),
        "threads": value(".max_flat_workgroup_size"),
        "code_bytes": value("; codeLenInByte"),
    }


def _nvidia(text: str, log: str, cubin: bytes) -> JsonObject:
    """The counts in PTX, in the log of ptxas and in the machine code."""
    frame, stores = _match(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log).groups()
    threads = [int(n) for n in _match(r"\.(?:max|req)ntid\s+([\d, ]+)", text)[1].split(",")]
    remarks = re.findall(r"Potential Performance Loss: ([^\n]*?)(?: in the function| in function|\n|$)", log)
    return {
        "registers": int(_match(r"Used (\d+) registers", log)[1]),
        "spills": int(stores) // 4,  # a register has four bytes
        "scratch_bytes": int(frame),
        "threads": threads[0],
        "code_bytes": _text_bytes(cubin),
        "remarks": list(dict.fromkeys(remarks)),
    }


def _match(pattern: str, text: str) -> re.Match[str]:
    if match := re.search(pattern, text, re.MULTILINE):
        return match
    raise ValueError(f"nothing in the compiler's output matches {pattern}")


def _text_bytes(elf: bytes) -> int:
    """The bytes of all code sections of an ELF file (64 bits, little-endian; see elf(5))."""
    (headers_at,) = struct.unpack_from("<Q", elf, 40)  # e_shoff
    header_size, header_count = struct.unpack_from("<HH", elf, 58)  # e_shentsize, e_shnum
    executable = 4  # SHF_EXECINSTR
    code_bytes = 0
    for at in range(headers_at, headers_at + header_count * header_size, header_size):
        flags, _, _, size = struct.unpack_from("<QQQQ", elf, at + 8)  # sh_flags, sh_addr, sh_offset, sh_size
        if flags & executable:
            code_bytes += size
    return code_bytes


def compile_launch(kernel: str, arch: str, data: str) -> Resources:
    """Compiles a KernelLaunch in this process, given by its fields. An error is in the result."""
    from triton import knobs

    log = io.StringIO()
    with (
        pretended(architectures()[arch]),
        tempfile.TemporaryDirectory() as empty_folder,
        knobs.cache.scope(),
        knobs.compilation.scope(),
        knobs.nvidia.scope(),
    ):
        # A kernel that Triton finds in its own cache leaves no log of the assembler.
        knobs.cache.dir = empty_folder
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        try:
            with contextlib.redirect_stdout(log):
                compiled = _function(kernel).preload(data)
            return resources_of(compiled, log.getvalue())
        except Exception as error:
            return Resources(error=f"compiling failed: {one_line(error)}")


CompileEach = Callable[[Mapping[str, KernelLaunch]], Iterable[tuple[str, Resources]]]
"""Compiles launches, given by key, and yields each key with its result as soon as it is there."""


def compile_all(
    launches: Sequence[KernelLaunch], compile_each: CompileEach | None = None, where: str = ""
) -> list[Resources]:
    """The resources of each launch, in order. Prints a line of progress, which begins with `where`, every ten
    seconds. compile_each: compiles what the cache does not know; default: on the CPUs of this process"""
    compile_each = compile_each or _compile_here
    keys = [key_of(launch) for launch in launches]
    by_key = dict(zip(keys, launches, strict=True))
    results = {key: cached for key in by_key if (cached := _cached(key)) is not None}
    todo = {key: launch for key, launch in by_key.items() if key not in results}
    shown_at = time.monotonic()
    for count, (key, result) in enumerate(compile_each(todo), 1):
        results[key] = result
        if not result.error:
            # A cache that cannot be written is no error.
            with contextlib.suppress(OSError):
                files.replace(_file(key), json.dumps(asdict(result)))
        if time.monotonic() - shown_at > PROGRESS_S:
            shown_at = time.monotonic()
            print(f"{where}{count} of {len(todo)} configurations compiled", file=sys.stderr, flush=True)
    return [results[key] for key in keys]


def _compile_here(todo: Mapping[str, KernelLaunch]) -> Iterator[tuple[str, Resources]]:
    """Compiles on the CPUs that this process may use. A compiler that dies breaks the pool; each launch
    without a result then gets a pool of its own."""
    if not todo:
        return
    missing = dict(todo)
    with _pool(min(len(os.sched_getaffinity(0)), len(todo))) as pool:
        futures = {pool.submit(compile_launch, x.kernel, x.arch, x.data): key for key, x in todo.items()}
        with contextlib.suppress(BrokenProcessPool):
            for future in as_completed(futures):
                result = future.result()
                del missing[futures[future]]
                yield futures[future], result
    for key, launch in missing.items():
        with _pool(1) as pool:
            try:
                yield key, pool.submit(compile_launch, launch.kernel, launch.arch, launch.data).result()
            except BrokenProcessPool:
                yield key, Resources(error="compiling failed: the compiler died")


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes. If it is left early, what is being compiled is finished and the rest is not begun.
    Processes are spawned, as a forked one would lack torch's threads."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), os.nice, (NICENESS,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _function(kernel: str) -> JITFunction:
    """The function of a kernel `module:name`. Plug-ins are imported first if they may bring the module."""
    module, _, name = kernel.partition(":")
    if module not in sys.modules:
        kernels.import_plugins()
        kernels.load_plugins()
    function: JITFunction = getattr(importlib.import_module(module), name)
    return function


@functools.cache
def _compiler() -> str:
    """What decides a result apart from the launch: the compiler, its variables, and this file's code."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars

    reader = Path(__file__).read_text("utf-8")
    return json.dumps([triton.__version__, sorted(get_cache_invalidating_env_vars().items()), reader])


def key_of(launch: KernelLaunch) -> str:
    """The launch's key in the cache, which changes with everything that decides the result."""
    source = _function(launch.kernel).cache_key  # covers the kernel's source and all that it calls
    return hashlib.sha256(json.dumps([_compiler(), source, launch.arch, launch.data]).encode()).hexdigest()


def _file(key: str) -> Path:
    return cache() / "compile" / f"{key}.json"


def _cached(key: str) -> Resources | None:
    """The cached result; None if there is none, or none that can be read."""
    try:
        entry: JsonObject = json.loads(_file(key).read_bytes())
        return Resources(**entry | {"products": [Product(**product) for product in entry["products"]]})
    except (OSError, ValueError, TypeError, KeyError):
        return None
