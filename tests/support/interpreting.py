"""Kernels in Triton's interpreter: whether it interprets is settled when Triton is imported, so test files
run as scripts in a process of their own, which prints what they found."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pytest

from harness.paths import ROOT
from kernels.op import Implementation, Op, Prepared
from kernels.triton_runtime import INTERPRETER, interpreter_fits

if TYPE_CHECKING:
    import torch

# Threads of torch's that wait spin: with two, the cases of prefill took 36 s of processor time for 28, and
# several times as long where other processes run.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def run_interpreted(part: str, *scripts: str) -> subprocess.CompletedProcess[str]:
    """That part of test files, one after the other, to the end."""
    if not (support := interpreter_fits()).ok:
        pytest.skip(support.reason)
    path = os.pathsep.join(map(str, filter(None, (ROOT, os.environ.get("PYTHONPATH")))))
    environment = os.environ | INTERPRETER | ONE_THREAD | {"PYTHONPATH": path}
    command = [sys.executable, "-m", __name__, part, *scripts]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done


def found_interpreted(part: str, *scripts: str) -> list[Any]:
    """What they print, an object of JSON a line."""
    done = run_interpreted(part, *scripts)
    assert "RuntimeWarning" not in done.stderr, "computes what it should not:\n" + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


_slow_parts = pytest.mark.parametrize("part", ["rest", "more"])


def each_part(test: Callable[[str], None]) -> Callable[[str], None]:
    """Of a test file's cases those that are slow; tests/kernels/test_interpreted.py has each third one."""
    return pytest.mark.slow(_slow_parts(test))


def wrong_interpreted(script: str, part: str) -> list[Any]:
    """Its cases in which something is wrong, each with what is."""
    found = found_interpreted(part, script)
    assert found
    return [case for case in found if any(case[1:])]


def print_found(interpret: Callable[..., list[str]], cases: Sequence[Any], more: Sequence[Any]) -> None:
    """What a test file does as a script: each case of that part, and its faults. `few`: two; `third`: each
    third one; `rest`: the cases between those."""
    rest = [case for number, case in enumerate(cases) if number % 3]
    for case in {"third": cases[::3], "rest": rest, "more": more, "few": cases[:2]}[sys.argv[1]]:
        print(json.dumps([" ".join(map(str, case)), *interpret(*case)]), flush=True)


def buffers(prepared: Any) -> list[torch.Tensor]:
    """What the launches of a call write and read again, and the output."""
    kept = [*prepared.operands.tensors().values(), *prepared.inputs().values()]
    pointers = {tensor.data_ptr() for tensor in kept}
    given = [value for launch in prepared.launches for value in getattr(launch, "args", ())]
    written = [value for value in given if getattr(value, "is_floating_point", bool)()]
    return [prepared.out, *(tensor for tensor in written if tensor.data_ptr() not in pointers)]


def wrong(
    op: Op,
    row: Implementation,
    prepared: Prepared,
    operands: Any,
    poisoned: Iterable[torch.Tensor],
    extreme: Callable[[Any], None] | None = None,
    fp8: bool | None = None,
) -> list[str]:
    """What is wrong with calls, empty where nothing is: the first, one on the same, which must give the same
    bits, one after other live operands were loaded, and one on these made extreme.

    poisoned: buffers that a call may not read before it has written them
    fp8:      whether it is judged as one that rounds activations to FP8 (default: what the row says)
    """
    import torch

    from harness.workers.child.judge import compare_output
    from kernels.operands import Seeds
    from tests.support.judging import given_to

    sizes, fp8, found, bits = operands.sizes, row.activations == "fp8" if fp8 is None else fp8, [], []
    for live in (0, 0, 1, *([2] if extreme else [])):
        fresh = op.operands(sizes, Seeds(live=live), "cpu", operands.boundary)
        if live == 2:
            extreme(operands)
            extreme(fresh)
        prepared.load(fresh.live_tensors())
        for buffer in poisoned:
            buffer.copy_(torch.tensor(torch.nan))
        prepared.call()
        bits.append(prepared.result().clone())
        reference, shape = op.reference(given_to(op, row, fresh)), tuple(bits[-1].shape)
        found.append(compare_output(bits[-1], reference, op.tolerance(sizes), shape, fp8)["reason"])
    return [*found, "" if torch.equal(bits[0], bits[1]) else "other bits at the second call"]


def patch_once_a_launch() -> None:
    """Triton's interpreter looks through all of its language at each call of a device function, for what the
    launch has replaced already: a quarter of its time."""
    from triton.runtime import interpreter

    patch, language = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    patched: set[str] = set()

    def patch_what_is_left(function: FunctionType) -> Any:
        seen = {id(value) for value in function.__globals__.values()}
        modules = {each.__name__ for each in language if id(each) in seen}
        if modules and modules <= patched:
            return None  # of a call; a launch finds nothing patched
        scope = patch(function)
        patched.update(modules)
        restore = scope.restore

        def all_of_it() -> None:
            patched.clear()
            restore()

        scope.restore = all_of_it
        return scope

    interpreter._patch_lang = patch_what_is_left


if __name__ == "__main__":
    patch_once_a_launch()
    _, part, *scripts = sys.argv
    for script in scripts:
        sys.argv = [script, part]
        runpy.run_path(script, run_name="__main__")
