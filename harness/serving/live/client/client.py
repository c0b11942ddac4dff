"""Client that loads the engine: a real one, in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from harness.errors import NothingRan, UsageError
from harness.serving.live.client.load import ClientLoad
from harness.serving.live.engine.launch import OFFLINE
from harness.serving.live.engine.plugin_path import broken_modules, stage
from harness.serving.live.process.client_processes import ClientFailed, Forked, Processes, Separate
from harness.serving.live.process.guarded import how_it_ended
from harness.serving.live.process.launching import words_of

CLIENTS = ("vllm", "sglang")
BENCH_SERVE = Path(__file__).with_name("bench_serve.py")


def require_client(kind: str) -> None:
    """kind: `vllm` (vllm bench serve), `sglang` (sglang.bench_serving), or a command with {url} and {result}
    in it, and, where it wants them, {model} {name} {seed} {input_len} {output_len} {concurrency} {prompts}.

    Raises NothingRan where the client is not installed, UsageError for a command that names no result or
    cannot be read.
    """
    if kind in CLIENTS:
        if importlib.util.find_spec(kind) is None:
            raise NothingRan(
                f"client {kind} is missing in {sys.executable}: install {kind}, or name another with --client"
            )
    elif not ("{url}" in kind and "{result}" in kind):
        known = ", ".join(CLIENTS)
        raise UsageError(
            f"unknown client {kind!r}: one of {known}, or a command with {{url}} and {{result}} in it"
        )
    else:
        words_of(kind, "client")


class Client:
    """A kind of client (see require_client) that loads a model's engines. It may be asked for runs by several
    threads at once, and is closed by whoever made it.

    folder: what is kept between runs stands there
    """

    def __init__(self, kind: str, engine: str, model: Path, folder: Path) -> None:
        require_client(kind)
        self.kind, self.engine, self.model, self.folder = kind, engine, model, folder
        environment = dict(os.environ) | OFFLINE
        if kind == "vllm" and (hidden := broken_modules()):
            site = folder / "client-site"
            stage(site, hidden)
            path = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment |= {"PYTHONPATH": os.pathsep.join(path), "VLLM_PLUGINS": ""}
        self.processes: Processes = Separate(environment, folder)
        if kind == "vllm":  # which takes about ten seconds to import
            program = [sys.executable, str(BENCH_SERVE)]
            self.processes = Forked(program, environment, folder / "client.log", folder)

    def run(
        self,
        url: str,
        name: str,
        load: ClientLoad,
        *,
        seed: int,
        result: Path,
        deadline_s: float,
        watch: Callable[[], None] = lambda: None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """One run; its result, with every request's times, is then in the file `result`, and what the client
        said beside it. Raises ClientFailed.

        watch: called about once a second; may raise
        ended: called when the client has ended, while `pids` still names who can say what it used
        """
        with contextlib.suppress(FileNotFoundError):
            result.unlink()
        command = self._command(url, name, load, seed, result)
        until = time.monotonic() + deadline_s
        with self.processes.begin(command, result.with_suffix(".client.log")) as process:
            while (code := process.wait(1.0)) is None:
                watch()
                if time.monotonic() > until:
                    raise ClientFailed(f"the client took over {deadline_s:g} s (longer: --run-timeout)")
            ended()
            if code != 0:
                watch()
                raise ClientFailed(f"the client {how_it_ended(code)}; {process.last_words()}")
            if not result.exists():
                raise ClientFailed(f"the client left no result in {result}; {process.last_words()}")

    def pids(self) -> list[int]:
        """Of the clients that run now or stay, and of who knows what the one that has just ended used."""
        return self.processes.pids()

    def close(self) -> None:
        """Ends what stays between runs."""
        self.processes.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _command(self, url: str, name: str, load: ClientLoad, seed: int, result: Path) -> list[str]:
        """What begins a run: the arguments alone where a program stays for it."""
        if self.kind == "vllm":
            return self._vllm(url, name, load, seed, result)
        if self.kind == "sglang":
            return self._sglang(url, name, load, seed, result)
        values = {
            "url": url,
            "model": str(self.model),
            "name": name,
            "seed": str(seed),
            "result": str(result),
            **{key: str(value) for key, value in load.facts().items()},
        }
        parts = words_of(self.kind, "client")
        for key, value in values.items():
            parts = tuple(part.replace(f"{{{key}}}", value) for part in parts)
        return list(parts)

    def _vllm(self, url: str, name: str, load: ClientLoad, seed: int, result: Path) -> list[str]:
        return [
            *("--backend", "vllm", "--base-url", url),
            *("--model", name, "--tokenizer", str(self.model), "--dataset-name", "random"),
            *("--random-input-len", str(load.input_len), "--random-output-len", str(load.output_len)),
            *("--num-prompts", str(load.prompts), "--max-concurrency", str(load.concurrency)),
            *("--seed", str(seed), "--ignore-eos", "--temperature", "0", "--disable-tqdm"),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--save-detailed"),
            *("--result-dir", str(result.parent), "--result-filename", result.name),
        ]

    def _sglang(self, url: str, name: str, load: ClientLoad, seed: int, result: Path) -> list[str]:
        backend = {"sglang": "sglang", "tensorrt-llm": "sglang-oai"}.get(self.engine, "vllm")
        return [
            *(sys.executable, "-m", "sglang.bench_serving", "--backend", backend, "--base-url", url),
            *("--model", name, "--tokenizer", str(self.model), "--dataset-name", "random"),
            *("--random-input-len", str(load.input_len), "--random-output-len", str(load.output_len)),
            *("--random-range-ratio", "1.0", "--num-prompts", str(load.prompts)),
            *("--max-concurrency", str(load.concurrency), "--seed", str(seed), "--disable-tqdm"),
            *("--output-details", "--output-file", str(result)),
        ]
