"""The implementations of a plug-in's file, for the process that measures.

That process does not import the file: it asks another process, which does. So a plug-in that crashes, or that
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
from typing import Any

from kernels.lazy import torch
from kernels.op import OPS, REPLACED, REQUIREMENTS, Implementation, Prepared, Unsupported, named
from kernels.operands import Operands
from kernels.support import Mistaken, as_support

FACTS = (*Implementation.__annotations__, "version")
"""The attributes of an implementation that the answer to `list` holds."""


class PluginError(Exception):
    """A plug-in cannot be used. The text is one line for its author."""


def describe_error(error: BaseException, skipped: int = 1) -> str:
    """An exception in one line of at most 600 characters, which begins with the innermost three places in a
    user's own code, the last one first: `mine.py:14 in prepare: ValueError: ...`. Its cause follows.
    skipped: how many of the outermost frames are left out. The outermost is the function that caught it"""
    from kernels.triton_runtime import NOT_INTERPRETED

    frames = traceback.extract_tb(error.__traceback__)[skipped:]
    cause = error.__cause__
    if type(error).__name__ == "InterpreterError" and cause:
        # Triton's interpreter raises this error from the one in the kernel, whose lines a user looks for.
        frames += traceback.extract_tb(cause.__traceback__)
        cause = None
    text = _text_of(error)
    if "0 active drivers" in text:  # Triton's words for a machine without a GPU
        text = NOT_INTERPRETED
    users = [frame for frame in reversed(frames) if _is_users(frame.filename)]
    places = ", ".join(f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in users[:3])
    line = ": ".join(filter(None, (places, type(error).__name__, text)))[:400]
    return f"{line}, from {describe_error(cause, 0)}"[:600] if cause else line


def _is_users(file: str) -> bool:
    """Whether a file is a user's own: not the suite's, a package's or Python's, and not generated."""
    suite = [f"{Path(__file__).parents[1] / name}{os.sep}" for name in ("kernels", "harness")]
    return not file.startswith((*suite, sysconfig.get_path("stdlib"), "<")) and "-packages" not in file


def _text_of(error: BaseException) -> str:
    """An exception's text in one line; empty where its own code cannot give it."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return ""


class PluginProcess:
    """A process that imports one plug-in's file and answers for its implementations."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._one_at_a_time = threading.Lock()
        own_socket, its_socket = socket.socketpair()
        python_path = str(Path(__file__).parents[1])
        if os.environ.get("PYTHONPATH"):
            python_path += os.pathsep + os.environ["PYTHONPATH"]
        with its_socket:
            subprocess.Popen(  # it ends when this process does, as its socket then closes
                [sys.executable, "-m", __name__, str(path), str(its_socket.fileno())],
                pass_fds=[its_socket.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": python_path},
                start_new_session=True,
            )
        self._connection = Connection(own_socket.detach())

    def ask(self, method: str, op: str = "", name: str = "", *arguments: object) -> Any:
        """Returns what a method of the implementation `name` of `op` returns. The method `list` needs
        neither: it returns for each implementation its FACTS by name. Raises PluginError."""
        with self._one_at_a_time:  # several threads ask
            try:
                self._connection.send((method, op, name, arguments))
                value, error = self._connection.recv()
            except (OSError, EOFError):
                raise PluginError(f"the process of {self._path} ended while asked for {method}") from None
        if error:
            raise PluginError(error)
        return value


class PluginImplementation(Implementation):
    """Stands for a plug-in's implementation in a process that does not import the plug-in. It has the same
    FACTS; its methods of REQUIREMENTS and REPLACED ask the plug-in's process. Only a worker prepares it."""

    name = "plugin"
    version = ""  # replaces the property of Implementation, which cannot be set

    def __init__(self, process: PluginProcess, facts: Mapping[str, Any]) -> None:
        for fact in FACTS:
            setattr(self, fact, facts[fact])
        for method in (*REQUIREMENTS, *REPLACED):
            setattr(self, method, functools.partial(process.ask, method, self.op, self.name))

    def prepare(self, operands: Operands, out: torch.Tensor | None) -> Prepared:
        raise Unsupported(f"{self.name} is a plug-in's: only its own worker prepares it")


def main() -> None:
    """Answers requests in the plug-in's process until the socket closes. `list` imports the plug-in."""
    path, connection = Path(sys.argv[1]), Connection(int(sys.argv[2]))
    kernels = importlib.import_module("kernels")
    by_name: dict[tuple[str, str], Implementation] = {}
    while True:
        try:
            method, op, name, arguments = connection.recv()
        except EOFError:
            return
        value: Any = None
        error = ""
        try:
            if method == "list":
                rows = kernels.implementations_of(path)
                by_name = {(row.op, row.name): row for row in rows}
                value = [{fact: getattr(row, fact) for fact in FACTS} for row in rows]
            else:
                value = _answer(by_name[op, name], method, arguments)
        except Exception as caught:
            error = str(caught) if isinstance(caught, kernels.PluginError) else describe_error(caught)
            if method in REQUIREMENTS:
                value, error = Mistaken(False, error), ""
        connection.send((value, error))


def _answer(row: Implementation, method: str, arguments: tuple[Any, ...]) -> Any:
    value = getattr(row, method)(*arguments)
    if method in REQUIREMENTS:
        value = as_support(value, named(getattr(row, method)))
    if method == "supports" and value.ok:
        # If one of these raises, the caller answers that this row does not support the case. Raised later,
        # while the memory plan is made, the error would end the whole run.
        (case, _) = arguments
        for bytes_of in (row.layout, row.workspace, row.scratch):
            bytes_of(OPS[row.op].sizes(case.sizes))
    return value


if __name__ == "__main__":
    main()
