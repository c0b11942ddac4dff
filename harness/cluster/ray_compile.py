"""Compiling on the CPU slots of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.cluster.ray_cluster import Head, join
from harness.compile.compiler import CompileEach, compile_launch
from harness.compile.launches import KernelLaunch
from harness.compile.resources import Resources
from harness.errors import UsageError
from kernels.platform import version

PROBE_S = 120.0


def compile_on(address: str) -> CompileEach:
    """What compiles each launch there. Raises UsageError where a node has another Triton, NothingRan or
    UsageError where there is no cluster.

    address: as `harness.cluster.ray_cluster.join` takes it
    """
    ray = join(address)
    head = Head(ray)
    _require_same_triton(ray)

    def compile_each(todo: Mapping[str, KernelLaunch]) -> Iterator[tuple[str, Resources]]:
        task = ray.remote(compile_launch).options(num_cpus=1, max_retries=2)
        keys = {task.remote(launch.kernel, launch.arch, launch.data): key for key, launch in todo.items()}
        while keys:
            head.answers()
            ready, _ = ray.wait(list(keys), num_returns=1, timeout=2)
            for ref in ready:
                key = keys.pop(ref)
                try:
                    yield key, ray.get(ref)
                except ray.exceptions.RayError as error:
                    yield key, Resources(error=f"compiling failed: its node gave {type(error).__name__}")

    return compile_each


def _require_same_triton(ray: Any) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ours, task = version("triton"), ray.remote(_triton)
    answers = {
        node["NodeManagerHostname"]: task.options(
            num_cpus=1, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU")
    }
    for host, answer in answers.items():
        try:
            theirs = ray.get(answer, timeout=PROBE_S)
        except ray.exceptions.RayError as error:
            raise UsageError(f"{host} does not answer: {type(error).__name__}; are its CPUs taken?") from None
        if theirs != ours:
            raise UsageError(f"{host} has triton {theirs or 'missing'}, this machine {ours}: make them alike")


def _triton() -> str | None:
    return version("triton")
