"""First contact with a GPU: in under nine minutes what only hardware can tell, the most telling first.

    python tools/first_contact.py OUT [STEP ...] [--within SECONDS]

runs all steps, or those that are named, each with a limit of its own; none stops the next. OUT gets
`log.txt`, `machine.txt`, `timers.jsonl` and `runs.tgz`, which holds every run's records. results/OWED.md says
what to carry. The exit code is 2 for a step that is not there, and 3 where no GPU is.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Step:
    """limit_s: after which it is stopped"""

    name: str
    limit_s: float
    command: list[str]


# Of each step its name, the seconds after which it is stopped, and what Python is given. `large` takes the
# most memory of suite r1-tp8; `table` is of cases that results/published/kernel-tables has too; `pairs` are
# of equal rows, and of some that are slower by a known share.
STEPS = """
timers 60 tools/first_contact.py OUT --timers ''

profiler 40 tools/first_contact.py OUT --timers profil

mla-small 60 -m harness run --op mla_decode --impl torch.sdpa,torch.naive,triton.* --launch both
    --case 'batch=1 ctx=130 heads=16 page=64 kv=bf16' --budget 8s --per-case 4s --out RUNS/mla-small

gemm 70 -m harness run --op block_scale_gemm --impl torch.bf16,cublaslt,triton.*,deepgemm
    --case 'm=64,4096 n=4608 k=7168' --budget 10s --per-case 4s --out RUNS/gemm

mla 70 -m harness run --op mla_decode --impl torch.sdpa,triton.*,flashmla,flashinfer.*
    --case 'batch=64 ctx=3201..3999 heads=16 page=64 kv=bf16' --budget 8s --out RUNS/mla

prefill 70 -m harness run --op mha_prefill --impl torch.sdpa*,triton.*,flashinfer.*,cudnn
    --case 'batch=4 new=3200 heads=16' --budget 8s --out RUNS/prefill

moe 180 -m harness run --op fused_moe --impl torch.bf16,triton.*,deepgemm.*
    --case 'tokens=64 inter=256' --budget 8s --per-case 4s --out RUNS/moe

large 120 -m harness run --op block_scale_gemm --impl torch.bf16,torch.naive,triton.* --boundary core
    --case 'm=128000 n=4608 k=7168' --budget 4s --out RUNS/large

table 120 -m harness run --op block_scale_gemm --impl torch.bf16,deepgemm,flashinfer.* --boundary with_quant
    --case 'm=64,4096 n=7168 k=2048' --budget 8s --per-case 4s --out RUNS/table

pairs 100 -m harness run --op block_scale_gemm --impl torch.bf16,control.* --boundary core
    --case 'm=8192 n=2112 k=7168' --budget 12s --out RUNS/pairs

doctor 60 -m harness doctor --json OUT/doctor.json

check 100 -m harness check --op block_scale_gemm --impl triton.split_k --case 'm=16384 n=7168 k=2048'

toggle 80 -m harness toggle --op mla_decode --impl triton.split_kv --force
    --flag CUDA_DEVICE_MAX_CONNECTIONS=unset,1 --budget 6s --out RUNS/toggle
    --case 'batch=1 ctx=130 heads=16 page=64 kv=bf16'

tune 120 -m harness tune --op mla_decode --impl triton.split_kv --keep 4 --budget 8s
    --case 'batch=64 ctx=3201..3999 heads=16 page=64 kv=bf16' --out RUNS/tuned --journal RUNS/tune
"""


def steps(out: Path, runs: Path) -> list[Step]:
    made = []
    for step in STEPS.strip().split("\n\n"):
        name, limit_s, *words = shlex.split(step)
        placed = [re.sub(r"^OUT\b", str(out), re.sub(r"^RUNS\b", str(runs), word)) for word in words]
        made.append(Step(name, float(limit_s), [sys.executable, *placed]))
    return made


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description="What only a GPU can tell, in nine minutes.")
    parser.add_argument("out", type=Path)
    parser.add_argument("step", nargs="*", default=[])
    parser.add_argument("--within", type=float, default=540, metavar="SECONDS")
    parser.add_argument(
        "--timers", metavar="PART", help="no step: only timers so called, '' for all, in this process"
    )
    asked = parser.parse_args()
    folder, names = asked.out.resolve(), asked.step
    runs = folder.parent / "first-contact-runs"
    known = steps(folder, runs)
    if unknown := set(names) - {step.name for step in known}:
        there = ", ".join(step.name for step in known)
        parser.error(f"no step {', '.join(sorted(unknown))}; steps: {there}")
    if reason := without_gpu():
        print(f"error: {reason}", file=sys.stderr)
        sys.exit(3)
    folder.mkdir(parents=True, exist_ok=True)
    if asked.timers is not None:
        timers(folder / "timers.jsonl", asked.timers)
        return
    runs.mkdir(exist_ok=True)
    variables = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "KERNEL_BENCH_PLUGINS": str(ROOT / "tools" / "control_kernels.py"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    (folder / "machine.txt").write_text(machine())
    with (folder / "log.txt").open("a") as log:
        for step in known:
            left_s = asked.within - (time.monotonic() - began)
            if (names and step.name not in names) or left_s < 15:
                continue
            started = time.monotonic()
            log.write(f"\n==== {step.name}: {' '.join(step.command[1:])}\n")
            log.flush()
            code = call(step, min(step.limit_s, left_s), variables, log)
            line = (
                f"[{time.monotonic() - began:5.0f} s] {step.name}: {time.monotonic() - started:.0f} s, {code}"
            )
            print(line, flush=True)
            log.write(line + "\n")
    with tarfile.open(folder / "runs.tgz", "w:gz") as archive:
        archive.add(runs, "runs")


def without_gpu() -> str:
    """Why nothing of this can run here; empty where a GPU can be used."""
    sys.path.insert(0, str(ROOT))
    from kernels.platform import detect, unseen

    if detect().kind != "cpu":
        return ""
    why = unseen()
    return f"no GPU here{f': {why}' if why else ''}; this is what only a GPU can tell"


class Peak(threading.Thread):
    """The most device memory that was in use, by nvidia-smi, while a step ran."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over, self.mebibytes = threading.Event(), 0

    def run(self) -> None:
        while not self.over.wait(0.1):
            used = printed("nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits").split()
            self.mebibytes = max([self.mebibytes, *(int(word) for word in used if word.isdigit())])


def call(step: Step, limit_s: float, variables: dict[str, str], log: Any) -> str:
    """How it ended, and the most device memory in use. Stopped as a user would stop it, so that its workers
    end too."""
    peak = Peak()
    peak.start()
    try:
        return f"{ended(step, limit_s, variables, log)}, {peak.mebibytes} MiB at most"
    finally:
        peak.over.set()


def ended(step: Step, limit_s: float, variables: dict[str, str], log: Any) -> str:
    process = subprocess.Popen(step.command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT)
    try:
        return f"exit code {process.wait(limit_s)}"
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return f"stopped after {limit_s:.0f} s"


def machine() -> str:
    commands = (
        "nvidia-smi",
        "nvidia-smi -q -d CLOCK,PERFORMANCE,POWER,COMPUTE",
        "nvcc --version",
        f"{sys.executable} --version",
        f"{sys.executable} -m pip list",
        "lscpu",
        "free -g",
        "df -h /tmp /dev/shm",
    )
    return "\n".join(f"==== {command}\n{printed(command)}" for command in commands)


def printed(command: str) -> str:
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30, check=False)
        return done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}\n"


def timers(file: Path, part: str) -> None:
    """What the timers rest on, one JSON object a line: the gap between events, the sleep, calls of every
    awkward kind in eager mode and in a graph, what few calls in a sample cost, false alarms, whether reading
    clocks through NVML changes a time, and what profiling costs. part: of the names of those to measure"""
    import torch

    from harness.workers.child.timers.base import Call, Timer
    from harness.workers.child.timers.events import EventTimer
    from harness.workers.child.timers.graph import GraphTimer

    cuda = torch.cuda

    def tried(what: str, action: Callable[[], dict[str, Any]]) -> None:
        if part not in what:
            return
        started = time.perf_counter()
        try:
            facts = action()
        except Exception as error:
            facts = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        line = {"what": what, "s": round(time.perf_counter() - started, 2), **facts}
        with file.open("a") as lines:
            lines.write(json.dumps(line, default=str) + "\n")
        print(json.dumps(line, default=str), flush=True)

    x, host = torch.rand(1 << 16, device="cuda"), torch.rand(1 << 16)
    y, big, side = torch.zeros_like(x), torch.rand(1 << 28, device="cuda"), cuda.Stream()

    def tiny() -> None:
        torch.add(x, 1, out=y)

    def slow_host() -> None:
        until = time.perf_counter() + 60e-6
        while time.perf_counter() < until:
            pass
        tiny()

    def read() -> None:
        big.sum()

    def many() -> None:
        for _ in range(20):
            tiny()

    def forks() -> None:
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            tiny()
        cuda.current_stream().wait_stream(side)

    def unjoined() -> None:
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            big.add_(1)

    def item() -> None:
        float(x[0])

    def synchronises() -> None:
        cuda.synchronize()
        tiny()

    def pins() -> None:
        host.pin_memory()
        tiny()

    def copies() -> None:
        host.cuda()
        tiny()

    def on_default() -> None:
        with cuda.stream(cuda.default_stream()):
            tiny()

    def allocates() -> torch.Tensor:
        return x + 1

    def device() -> dict[str, Any]:
        p = cuda.get_device_properties(0)
        return {
            "name": p.name,
            "sms": p.multi_processor_count,
            "l2": p.L2_cache_size,
            "memory": p.total_memory,
            "uuid": str(getattr(p, "uuid", "")),
            "torch": torch.__version__,
            "context_bytes": p.total_memory - cuda.mem_get_info()[0] - cuda.memory_reserved(),
        }

    def events() -> dict[str, Any]:
        recorded = [cuda.Event(enable_timing=True) for _ in range(2000)]
        for event in recorded:
            event.record()
        cuda.synchronize()
        gaps = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(recorded)]
        return {
            "us_min": min(gaps),
            "us_median": statistics.median(gaps),
            "zero": sum(gap <= 0 for gap in gaps),
            "smallest": sorted({round(gap, 3) for gap in gaps})[:6],
        }

    tried("device", device)
    tried("events with nothing between", events)
    eager, graph = EventTimer(), GraphTimer()

    def slept() -> dict[str, Any]:
        ratios = [round(eager._sleep_s(eager._cycles(s)) / s, 4) for s in (1e-3, 1e-2, 5e-2)]
        return {"cycles_per_s": eager.cycles_per_s, "ratio_at_1_10_50_ms": ratios}

    tried("sleep", slept)

    def turn(timer: Timer, call: Call) -> Callable[[], dict[str, Any]]:
        def timed() -> dict[str, Any]:
            call()
            program = timer.program([call])
            started = time.perf_counter()
            taken = [timer.turn(program, 0.05) for _ in range(3)]
            return asdict(taken[-1]) | {
                "us": [round(t.seconds * 1e6, 3) for t in taken],
                "host_us": round((taken[-1].host_seconds or 0) * 1e6, 3),
                "most": program.most,
                "synchronises": program.synchronises,
                "took_s": round(time.perf_counter() - started, 4),
            }

        return timed

    for call in (tiny, slow_host, read, many, forks, unjoined, item, synchronises, copies, allocates):
        tried(f"eager {call.__name__}", turn(eager, call))

    def after() -> dict[str, Any]:
        gc.collect()
        cuda.empty_cache()
        torch.zeros(1000).pin_memory()
        on_default = cuda.current_stream() == cuda.default_stream()
        return {"on_default": on_default, "sync_debug": cuda.get_sync_debug_mode()}

    for call in (
        tiny,
        read,
        many,
        forks,
        item,
        synchronises,
        pins,
        copies,
        unjoined,
        on_default,
        allocates,
        tiny,
    ):
        tried(f"graph {call.__name__}", turn(graph, call))
        tried("   afterwards", after)

    def by_steps() -> dict[str, Any]:
        program, found = eager.program([tiny]), {}
        for steps in (1, 2, 8, 64, 400):
            sleep_s = 1.5 * steps * program.host_s + 3e-4
            samples = [eager._sample(program, steps, sleep_s) for _ in range(30)]
            hidden = [s.device_s / steps for s in samples if s.hidden]
            found[steps] = round(statistics.median(hidden) * 1e6, 3) if hidden else None
        return {"us_by_steps": found}

    tried("time of a call by steps in a sample", by_steps)

    def alarms() -> dict[str, Any]:
        program, errors, turns = eager.program([tiny]), [], 0
        until = time.perf_counter() + 4
        while time.perf_counter() < until:
            turns += 1
            try:
                eager.turn(program, 0.05)
            except RuntimeError as error:
                errors.append(str(error))
        return {"turns": turns, "errors": errors[:3], "most": program.most}

    tried("false alarms", alarms)

    def watched() -> dict[str, Any]:
        """The same turns with and without a thread that reads NVML as the monitor does, in turn."""
        import pynvml as nvml

        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        asked = {
            "clock": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "reasons": lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            "temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "power": lambda: nvml.nvmlDeviceGetPowerUsage(handle),
            "violation": lambda: nvml.nvmlDeviceGetViolationStatus(handle, 0).violationTime,
            "processes": lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
            "utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "free_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).free / 2**30,
        }
        costs = {}
        for name, ask in asked.items():
            started = time.perf_counter()
            try:
                value = ask()
            except nvml.NVMLError as error:
                value = str(error)
            costs[name] = [value, round((time.perf_counter() - started) * 1e6)]
        program = graph.program([tiny])
        seen: dict[bool, list[float]] = {False: [], True: []}
        for n in range(40):
            over = threading.Event()

            def look(over: threading.Event = over) -> None:
                while not over.wait(0.02):
                    for name in ("clock", "reasons", "temperature", "power"):
                        asked[name]()

            thread = threading.Thread(target=look)
            if n % 2:
                thread.start()
            seen[bool(n % 2)].append(graph.turn(program, 0.05).seconds)
            over.set()
            if n % 2:
                thread.join()
        us = {str(k): round(statistics.median(v) * 1e6, 4) for k, v in seen.items()}
        return {"value_and_us": costs, "us_watched": us}

    tried("reading NVML meanwhile", watched)

    def profiled() -> dict[str, Any]:
        """Seconds of each stage, of a first and a second profile of ten calls; and of preparing a graph of
        256 calls before, between and after."""
        from torch.profiler import ProfilerActivity, profile

        found: dict[str, Any] = {}

        def timed(name: str, action: Callable[[], Any]) -> Any:
            started = time.perf_counter()
            result = action()
            found[name] = round(time.perf_counter() - started, 3)
            return result

        timed("graph before", lambda: graph.program([tiny]))
        for turn in ("first", "second"):
            profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            timed(f"{turn} begin", profiler.__enter__)
            timed(f"{turn} calls", lambda: [tiny() for _ in range(10)])
            timed(f"{turn} rest", cuda.synchronize)
            timed(f"{turn} end", lambda profiler=profiler: profiler.__exit__(None, None, None))
            found[f"{turn} events"] = len(timed(f"{turn} read", profiler.events))
            timed(f"graph after {turn}", lambda: graph.program([tiny]))
        timed("objects", lambda: sum(1 for _ in gc.get_objects()))
        return found

    tried("profiling", profiled)
    tried("memory", lambda: {"reserved": cuda.memory_reserved(), "free": cuda.mem_get_info()[0]})


if __name__ == "__main__":
    main()
