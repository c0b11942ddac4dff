"""Compiler of many Triton launches: in parallel, each once, cached until something that matters changes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import kernels
from harness import files
from harness.catalogue.architectures import architectures
from harness.compile import resources
from harness.compile.launches import KernelLaunch
from harness.compile.pretend_driver import pretended
from harness.compile.resources import Resources, resources_of
from harness.errors import one_line
from harness.paths import cache

if TYPE_CHECKING:
    from triton import JITFunction

NICE = 10


def compile_launch(kernel: str, arch: str, data: str) -> Resources:
    """Compiles what `KernelLaunch` describes, in this process."""
    from triton import knobs

    log = io.StringIO()
    with (
        pretended(architectures()[arch]),
        tempfile.TemporaryDirectory() as cache,
        knobs.cache.scope(),
        knobs.compilation.scope(),
        knobs.nvidia.scope(),
    ):
        # What Triton finds in its own cache leaves no log of the assembler.
        knobs.cache.dir, knobs.compilation.always_compile, knobs.nvidia.dump_ptxas_log = cache, True, True
        try:
            with contextlib.redirect_stdout(log):
                compiled = _function(kernel).preload(data)
            return resources_of(compiled, log.getvalue())
        except Exception as error:
            return Resources(error=f"compiling failed: {one_line(error)}")


CompileEach = Callable[[Mapping[str, KernelLaunch]], Iterable[tuple[str, Resources]]]
"""Compiles launches; gives each key with what came of it, as they are finished."""


def compile_all(
    launches: Sequence[KernelLaunch],
    done: Callable[[int, int], None] | None = None,
    compile_each: CompileEach | None = None,
) -> list[Resources]:
    """Resources of each launch, in order.

    done:         called with how many compilations of how many are over
    compile_each: on other machines, say; default: on the CPUs that this process may use
    """
    keys = [key_of(launch) for launch in launches]
    wanted = dict(zip(keys, launches, strict=True))
    results = {key: known for key in wanted if (known := recall(key)) is not None}
    todo = {key: launch for key, launch in wanted.items() if key not in results}
    for i, (key, result) in enumerate((compile_each or _compiled)(todo), 1):
        results[key] = result
        if not result.error:
            _remember(key, result)
        if done:
            done(i, len(todo))
    return [results[key] for key in keys]


def _compiled(todo: Mapping[str, KernelLaunch]) -> Iterator[tuple[str, Resources]]:
    """As they are finished. A compiler that dies takes its pool along: who was left is compiled alone."""
    if not todo:
        return
    left = dict(todo)
    with _pool(min(len(os.sched_getaffinity(0)), len(todo))) as pool:
        futures = {_submit(pool, launch): key for key, launch in todo.items()}
        with contextlib.suppress(BrokenProcessPool):
            for future in as_completed(futures):
                result = future.result()
                del left[futures[future]]
                yield futures[future], result
    for key, launch in left.items():
        with _pool(1) as pool:
            try:
                yield key, _submit(pool, launch).result()
            except BrokenProcessPool:
                yield key, Resources(error="compiling failed: the compiler died")


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Stopped early, it ends with what is being compiled. Not forked: torch's threads would be missing."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), os.nice, (NICE,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, launch: KernelLaunch) -> Future[Resources]:
    return pool.submit(compile_launch, launch.kernel, launch.arch, launch.data)


def _function(kernel: str) -> JITFunction:
    module, _, name = kernel.partition(":")
    if module not in sys.modules:
        kernels.import_plugins()
        kernels.load_plugins()
    function: JITFunction = getattr(importlib.import_module(module), name)
    return function


def _folder() -> Path:
    return cache() / "compile"


@functools.cache
def _compiler() -> str:
    """What of the compiler and of what is read from it decides a result."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars

    reader = Path(resources.__file__).read_text()
    return json.dumps([triton.__version__, sorted(get_cache_invalidating_env_vars().items()), reader])


def key_of(launch: KernelLaunch) -> str:
    """Of the cache: changes with everything that decides what compiling gives."""
    source = _function(launch.kernel).cache_key  # of its source and of all that it calls
    return hashlib.sha256(json.dumps([_compiler(), source, launch.arch, launch.data]).encode()).hexdigest()


def recall(key: str) -> Resources | None:
    """What the cache knows."""
    try:
        return Resources.read(json.loads((_folder() / f"{key}.json").read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _remember(key: str, result: Resources) -> None:
    """A cache that cannot be written is no cache, and no error."""
    with contextlib.suppress(OSError):
        files.replace(_folder() / f"{key}.json", json.dumps(asdict(result)))
