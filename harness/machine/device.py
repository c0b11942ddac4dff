"""The device that a command names, and where a measurement is from: machine, versions, code, variables."""

from __future__ import annotations

import os
import platform as host
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness.catalogue.devices import known_type, part_of
from harness.catalogue.flags import catalogue
from harness.errors import UsageError
from harness.files import JsonObject
from harness.paths import ROOT, portable
from kernels.gpus import smi
from kernels.platform import BUILDS, Platform, detect, devices, run, unseen, version


def choose_device(name: str | None = None) -> Platform:
    """The platform of the device that a command names: `cpu`, `cuda`, `cuda:1`, or a name such as `MI300X` or
    `gfx942` for the first such GPU here. Without a name: the first GPU, or the CPU where there is none, and a
    line on stderr if a GPU cannot be used. Raises UsageError, which lists the devices."""
    try:
        platform = detect(_name_for_torch(name) if name else name)
    except LookupError as error:
        raise UsageError(str(error)) from None
    if name is None and (why := unseen()):
        effect = "some GPUs cannot be used" if platform.memory else "not all of the GPU is known"
        if platform.kind == "cpu":
            effect = "the CPU is measured, as no GPU can be"
        print(f"note: {effect}: {why}", file=sys.stderr)
    return platform


def _name_for_torch(name: str) -> str:
    """torch's name, such as `cuda:1`, of the first device that a name in any capitals means: torch's name, a
    GPU's type or architecture, or words of its product's name. For a part of a GPU these words have to end
    with those for the part. A name that means no device is returned as it is."""
    asked = name.lower()
    # By device, two reasons to prefer another one: the name is not the device's type; it is a part of a GPU.
    ranks: dict[str, tuple[bool, bool]] = {}
    for gpu in devices().values():
        type, part = known_type(gpu.name).lower(), part_of(gpu.name).lower()
        is_word_of_name = re.search(rf"(?<![a-z0-9]){re.escape(asked)}(?![a-z0-9])", gpu.name.lower())
        is_meant = asked in (type, gpu.arch) or (is_word_of_name and asked.endswith(part))
        if asked == gpu.device or (is_meant and gpu.kind != "cpu"):
            ranks[gpu.device] = (asked != type, part != "")
    return min(ranks, key=ranks.__getitem__) if ranks else name  # of equal ranks the first device


def torch_advice(here: Platform) -> str:
    """Says what to do where the installed torch was not built for this device; empty where it was."""
    wrong = here.other_build()
    how = f"install PyTorch's build for {BUILDS[here.kind]} in its place, or measure the CPU: --device cpu"
    return f"{wrong}; {how}" if wrong else ""


LIBRARIES = [
    "torch", "triton", "vllm", "aiter", "flashinfer", "flash_mla", "deep_gemm", "cudnn", "flash_attn",
    "flash_attn_interface", "flash_attn.cute", "sglang", "sgl_kernel", "triton_kernels", "numpy", "scipy",
    "pandas", "pydantic",
]  # fmt: skip
"""Modules whose versions a record has."""
STEERING = re.compile(
    r"^(AITER|AMD|AMDGCN|CUDA|CK|DG|DNNL|FLASHINFER|GOMP|GPU|HIP|HSA|KERNEL_BENCH|KMP|MALLOC|MIOPEN|MKL|NCCL|NVIDIA|OMP|ONEDNN|"
    r"PYTORCH|ROCM|ROCR|SGL|SGLANG|TORCH|TORCHINDUCTOR|TRITON|TRTLLM|VLLM)_|^(LD_PRELOAD|ENABLE_CK|GLIBC_TUNABLES)$"
)
"""Variables, besides those of the catalogue, that change kernels, their libraries or their threads."""


def surroundings(platform: Platform | None = None) -> JsonObject:
    """The machine, the versions, the variables that change kernels, the commit of this checkout, and whether
    any file outside results/ differs from it."""
    platform = platform or detect()
    steering = {name: value for name, value in sorted(os.environ.items()) if steers(name)}
    steering.pop("KERNEL_BENCH_LOCKS", None)  # agents of a cluster get it, but it changes no kernel
    commit = run("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changed = run("git", "-C", str(ROOT), "status", "--porcelain", "--", ".", ":!results")
    return {
        "machine": {
            "host": socket.gethostname(),
            "platform": platform.kind,
            "arch": platform.arch,
            "device": platform.name,
            "device_id": platform.device,
            "uuid": platform.uuid,
            "device_memory": platform.memory,
            "last_level_cache": platform.last_level,
            "driver": driver(platform),
            "cpus": os.cpu_count(),
            "os": host.platform(),
        },
        "versions": {"python": host.python_version()}
        | {module: release for module in LIBRARIES if (release := version(module))},
        "git": {"commit": commit, "dirty": bool(changed)},
        "environment": {name: portable(value) for name, value in steering.items()},
    }


def steers(variable: str) -> bool:
    """Whether a variable may change a kernel, so that a record names it."""
    return bool(STEERING.match(variable)) or variable in catalogue()


def driver(platform: Platform) -> str:
    """The version of the GPU's driver, as the kernel module or else nvidia-smi tells it; empty if unknown."""
    if platform.kind == "cpu":
        return ""
    module = Path("/sys/module", {"cuda": "nvidia", "rocm": "amdgpu"}[platform.kind], "version")
    if module.exists():
        return module.read_text("utf-8").strip()
    if platform.kind != "cuda":
        return ""
    answer = smi("--query-gpu=driver_version", "--format=csv,noheader")[0].split("\n")[0]
    return answer if re.fullmatch(r"[\d.]+", answer) else ""  # where nvidia-smi fails it prints the reason


def differing(
    a: JsonObject, b: JsonObject, machine: Iterable[str], groups: Iterable[str] = ("versions",)
) -> Iterator[tuple[str, Any, Any]]:
    """Yields the facts in which two provenances differ: the name, the value in `a` and the value in `b`, None
    where it is missing. machine: names of the machine's facts; groups: parts that are compared as a whole"""
    for group in ("machine", *groups):
        of_a, of_b = a.get(group, {}), b.get(group, {})
        for name in machine if group == "machine" else sorted(of_a | of_b):
            if of_a.get(name) != of_b.get(name):
                yield name, of_a.get(name), of_b.get(name)
