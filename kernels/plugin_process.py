"""The implementations of a plug-in's file, as the process that measures sees them.

What they say of themselves is asked of a process that imports the plug-in. So a plug-in that crashes, or that
imports a GPU library, does not disturb the measuring process. Requests and answers are pickled.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
import subprocess
import sys
import sysconfig
import threading
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.op import OPS, REPLACED, REQUIREMENTS, Implementation, Prepared, Unsupported, named
from kernels.operands import Operands
from kernels.support import Mistaken, as_support

if TYPE_CHECKING:
    import torch

FACTS = (*Implementation.__annotations__, "version")
"""The attributes of an implementation that are read when the plug-in is imported."""


class PluginError(Exception):
    """A plug-in that cannot be used; one line for its author."""


def told(error: BaseException, skipped: int = 1) -> str:
    """An exception in one line, behind the places of a user's own code that it went through, the last one
    first: `mine.py:14 in prepare: ValueError: ...`; then the same of its cause.

    skipped: the outermost frames that are left out; the first one is where it was caught"""
    from kernels.triton_runtime import NOT_INTERPRETED

    suite = [f"{Path(__file__).parents[1] / name}{os.sep}" for name in ("kernels", "harness")]
    others = (*suite, sysconfig.get_path("stdlib"), "<")
    frames = traceback.extract_tb(error.__traceback__)[skipped:]
    cause = error.__cause__
    if type(error).__name__ == "InterpreterError" and cause:  # of Triton
        frames += traceback.extract_tb(cause.__traceback__)
        cause = None
    own = [f for f in reversed(frames) if not f.filename.startswith(others) and "-packages" not in f.filename]
    text = _text_of(error)
    if "0 active drivers" in text:  # of Triton, where there is no GPU
        text = NOT_INTERPRETED
    places = ", ".join(f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in own[:3])
    line = ": ".join(filter(None, (places, type(error).__name__, text)))[:400]
    return f"{line}, from {told(cause, 0)}"[:600] if cause else line


def _text_of(error: BaseException) -> str:
    """An exception's text in one line; empty where its own code cannot give it."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return ""


class PluginProcess:
    """A process that imports one plug-in's file and answers for its implementations."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asking = threading.Lock()
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[1])
        search = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            subprocess.Popen(  # it ends when this process does, as its socket then closes
                [sys.executable, "-m", __name__, str(path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": search},
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())

    def ask(self, method: str, op: str = "", name: str = "", *arguments: object) -> Any:
        """What a method of an implementation returns; the facts of all implementations for `list`. Raises
        PluginError."""
        with self.asking:  # several threads ask
            try:
                self.connection.send((method, op, name, arguments))
                value, error = self.connection.recv()
            except (OSError, EOFError):
                raise PluginError(f"the process of {self.path} ended while asked for {method}") from None
        if error:
            raise PluginError(error)
        return value


class PluginImplementation(Implementation):
    """What a plug-in's implementation says of itself: its methods of REQUIREMENTS and REPLACED ask its
    process. Only a worker can prepare it."""

    name = "plugin"
    requires = ""
    version = ""

    def __init__(self, process: PluginProcess, facts: Mapping[str, Any]) -> None:
        for fact in FACTS:
            setattr(self, fact, facts[fact])
        for method in (*REQUIREMENTS, *REPLACED):
            setattr(self, method, functools.partial(process.ask, method, self.op, self.name))

    def prepare(self, operands: Operands, out: torch.Tensor | None) -> Prepared:
        raise Unsupported(f"{self.name} is a plug-in's: only its own worker prepares it")


def main() -> None:
    """Runs in the plug-in's process: imports the plug-in, then answers until the socket closes."""
    path, connection = Path(sys.argv[1]), Connection(int(sys.argv[2]))
    kernels = importlib.import_module("kernels")
    known: dict[tuple[str, str], Implementation] = {}
    while True:
        try:
            method, op, name, arguments = connection.recv()
        except EOFError:
            return
        value: Any = None
        error = ""
        try:
            if method == "list":
                found = kernels.implementations_of(path)
                known = {(i.op, i.name): i for i in found}
                value = [{fact: getattr(i, fact) for fact in FACTS} for i in found]
            else:
                implementation = known[op, name]
                value = getattr(implementation, method)(*arguments)
                if method in REQUIREMENTS:
                    value = as_support(value, named(getattr(implementation, method)))
                if method == "supports" and value.ok:  # where the memory plan would fail, this row alone does
                    for answer in ("layout", "workspace", "scratch"):
                        getattr(implementation, answer)(OPS[op].sizes(arguments[0].sizes))
        except Exception as caught:
            error = str(caught) if isinstance(caught, kernels.PluginError) else told(caught)
            if method in REQUIREMENTS:
                value, error = Mistaken(False, error), ""
        connection.send((value, error))


if __name__ == "__main__":
    main()
