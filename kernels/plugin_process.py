"""Implementations of a plug-in, as the process that measures sees them: what they say of themselves is asked
of a process of the plug-in's own, so that nothing of it runs here. Requests and answers are lines of JSON."""

from __future__ import annotations

import functools
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.op import OPS, REQUIREMENTS, Implementation, Prepared, Unsupported
from kernels.operands import Operands
from kernels.platform import Platform
from kernels.support import Support, as_support

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance

FACTS = (
    "name", "requires", "op", "library", "runtime", "boundaries", "activations", "truncates", "allocates",
    "captures", "shared_layout", "rebinds", "version",
)  # fmt: skip


class PluginProcess:
    """Answers of one plug-in's file. Raises what `failure` makes of one line where it cannot be imported or
    does not answer."""

    def __init__(self, path: Path, failure: type[Exception]) -> None:
        self.path, self.failure = path, failure
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
        self.stream = ours.makefile("rw", encoding="utf-8")

    def ask(self, request: str, **arguments: Any) -> Any:
        with self.asking:  # stations ask side by side
            try:
                self.stream.write(json.dumps([request, arguments]) + "\n")
                self.stream.flush()
                line = self.stream.readline()
            except OSError:
                line = ""
        if not line:
            raise self.failure(f"the process of {self.path} ended while it was asked for {request}")
        answer = json.loads(line)
        if "error" in answer:
            raise self.failure(answer["error"])
        return answer["value"]

    def implementations(self) -> list[PluginImplementation]:
        return [PluginImplementation(self, facts) for facts in self.ask("list")]


class PluginImplementation(Implementation):
    """What a plug-in's implementation says of itself; only a worker prepares it."""

    name = "plugin"
    requires = ""

    def __init__(self, process: PluginProcess, facts: Mapping[str, Any]) -> None:
        self.process = process
        self.plugin = str(process.path)
        self.facts = facts
        for fact in FACTS:
            if fact != "version":
                value = facts[fact]
                setattr(self, fact, tuple(value) if isinstance(value, list) else value)

    @property
    def version(self) -> str:
        return str(self.facts["version"])

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self.process.ask(method, name=self.name, op=self.op, arguments=[_plain(a) for a in arguments])

    def available(self, platform: Platform) -> Support:
        return Support(*self._ask("available", platform))

    def fits(self, sizes: DataclassInstance) -> Support:
        return Support(*self._ask("fits", sizes))

    @functools.cache  # noqa: B019 - as long as the process
    def interpreted(self, platform: Platform) -> bool:
        return bool(self._ask("interpreted", platform))

    def environment(self, platform: Platform) -> dict[str, str]:
        return dict(self._ask("environment", platform))

    def interpreted_s(self, sizes: DataclassInstance) -> float:
        return float(self._ask("interpreted_s", sizes))

    def layout(self, sizes: DataclassInstance) -> int:
        return int(self._ask("layout", sizes))

    def workspace(self, sizes: DataclassInstance) -> int:
        return int(self._ask("workspace", sizes))

    def scratch(self, sizes: DataclassInstance) -> int:
        return int(self._ask("scratch", sizes))

    def prepare(self, operands: Operands, out: torch.Tensor | None) -> Prepared:
        raise Unsupported(f"{self.name} is a plug-in's: only its own worker prepares it")


def _plain(value: Platform | DataclassInstance) -> dict[str, Any]:
    facts = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Platform):
        facts["features"] = sorted(value.features)
        return {"platform": facts}
    return {"sizes": asdict(value)}


def _read(value: Mapping[str, Any], op: str) -> Any:
    if "platform" in value:
        facts = dict(value["platform"])
        return Platform(**{**facts, "features": frozenset(facts["features"])})
    return OPS[op].sizes(value["sizes"])


def main() -> None:
    """The plug-in's process: imports it, then answers."""
    path, descriptor = Path(sys.argv[1]), int(sys.argv[2])
    kernels = importlib.import_module("kernels")
    stream = socket.socket(fileno=descriptor).makefile("rw", encoding="utf-8")
    known: dict[tuple[str, str], Implementation] = {}
    for line in stream:
        request, arguments = json.loads(line)
        try:
            if request == "list":
                found = kernels.implementations_of(path)
                known = {(i.op, i.name): i for i in found}
                value: Any = [{fact: getattr(i, fact) for fact in FACTS} for i in found]
            else:
                implementation = known[arguments["op"], arguments["name"]]
                read = [_read(a, arguments["op"]) for a in arguments["arguments"]]
                value = getattr(implementation, request)(*read)
                if request in REQUIREMENTS:
                    support = as_support(value, f"{type(implementation).__name__}.{request}()")
                    value = (support.ok, support.reason)
            answer = {"value": value}
        except Exception as error:
            answer = {"error": " ".join(str(error).split()) or type(error).__name__}
        stream.write(json.dumps(answer) + "\n")
        stream.flush()


if __name__ == "__main__":
    main()
