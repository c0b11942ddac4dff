"""`doctor`: its facts, its text, and its advice on machines of all kinds."""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from harness.catalogue.devices import Ceilings
from harness.doctor import advice as advice_module
from harness.doctor import examine, noise
from harness.doctor.advice import advice
from harness.report.doctor_text import doctor_text
from harness.report.terminal import WIDTH
from harness.run.device_lock import device_lock
from harness.statistics.paired import Comparison, compare
from harness.workers.process import WorkerFailure
from kernels import platform
from kernels.platform import Platform, detect
from tests.support.workers_here import WorkerHere

CPU = Platform("cpu", "x86-amx", name="a CPU", features=frozenset({"avx512f"}), memory=1 << 30)
H200 = Platform("cuda", "sm_90", "cuda:1", "NVIDIA H200")

KEYS = {
    *("machine", "devices", "libraries", "ceilings", "datasheet", "instruments", "conditions", "runs here"),
    "what would improve it",
}


# As a user meets it


def test_doctor_says_what_its_workers_measured(here, monkeypatch):
    """With ceilings that are known, and too short to tell anything apart."""
    known = Ceilings({"bf16": 1e9}, read=1e8, copy=1e8, measured="earlier")
    monkeypatch.setattr(examine, "measured", lambda here, threads, monitor: known)
    monkeypatch.setattr("harness.run.ceilings.Worker", WorkerHere)
    monkeypatch.setattr(noise, "clock_differences", functools.partial(noise.clock_differences, seconds=0.2))
    done = here("doctor", "--json", "-")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert set(facts) == KEYS
    assert facts["libraries"]["torch"] != "not installed"
    assert 0 < facts["instruments"]["clock"]["step_s"] < 1e-3
    for workload in ("read", "product"):
        seen = facts["instruments"][workload]
        assert set(seen) == {"ratio", "low", "high", "floor"} and seen["ratio"] > 0
    assert facts["ceilings"] == asdict(known)


def test_a_device_that_is_being_measured_is_left_alone(here, monkeypatch):
    def measuring(*arguments: object) -> None:
        raise AssertionError("that disturbs the run")

    monkeypatch.setattr(examine, "measured", measuring)
    monkeypatch.setattr(examine, "meters", measuring)
    with device_lock(detect("cpu")):
        said = here("doctor", "--device", "cpu").stdout
    assert "- device cpu is being measured by process" in said
    assert "instruments" not in said


# Facts and text


@pytest.fixture
def examined(monkeypatch):
    """What the doctor finds with everything that it measures broken."""

    def broken(*arguments: object) -> None:
        raise WorkerFailure("crashed", "the worker died of SIGILL while in open")

    monkeypatch.setattr(examine, "measured", broken)
    monkeypatch.setattr(examine, "meters", broken)
    monkeypatch.setattr(examine, "advice", lambda here, threads: ["sleep more"])
    return examine.examine(CPU, {"SM clock": "1980 MHz"}, ["it is throttled"])


MACHINE = {
    "device": "a CPU", "platform": "cpu", "arch": "x86-amx", "threads": 4, "cpus": 8, "os": "Linux",
    "driver": "580", "device_memory": 1 << 30, "last_level_cache": 32 << 20,
}  # fmt: skip


def test_text_says_what_was_found(examined, snapshot):
    """Of what cannot be measured: why; of what was: all, in its columns."""
    assert set(examined) == KEYS
    pair = {"ratio": 1.003, "low": 0.996, "high": 1.009, "floor": 0.0}
    rates = {"fp8": 1.4e15, "bf16": 7.7e14}
    clock = {"step_s": 5e-7, "reading_s": 2e-6}
    known = examined | {
        "machine": MACHINE,
        "libraries": {"torch": "2.13.0", "aiter": "not installed", "vllm": "PyPI's vllm 0.1"},
        "ceilings": {"rates": rates, "read": 4.31e12, "reach": 1 << 24, "copy": 950e9, "measured": "now"},
        "datasheet": [],
        "instruments": {"clock": clock, "read": pair, "product": pair | {"floor": None}},
        "conditions": {"software power cap counter": "not readable", "clock": "1 MHz"},
        "runs here": {f"op impl{i}": "timed" for i in range(12)},
        "devices": {f"cuda:{i}": "cuda sm_90 NVIDIA H200" for i in range(8)} | {"cpu": "cpu x86-amx a CPU"},
    }
    unmeasured = ("ceilings", "instruments", "conditions", "what would improve it")
    broken = {name: examined[name] for name in unmeasured}
    texts = (doctor_text(known), doctor_text(known | broken), doctor_text(known | {"conditions": {}}))
    assert max(len(line) for text in texts for line in text.splitlines()) <= WIDTH
    snapshot(Path(__file__).parent / "snapshots" / "doctor.txt", "\n\n=====\n\n".join(texts) + "\n")


# Noise


class Steady:
    """A meter's worker whose turns take what it was told; strict about what it is asked."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)
        self.prepared: list[str] = []

    def ask(self, request: str, deadline: float, **arguments: object) -> float | None:
        if request == "prepare":
            assert set(arguments) == {"workload"}
            self.prepared.append(arguments["workload"])
            return None
        assert (request, set(arguments)) == ("turn", {"at_least"})
        if not self.seconds:
            raise WorkerFailure("crashed", "the worker died")
        time.sleep(0.001)  # a budget is of turns that take time
        return self.seconds[len(self.prepared) % len(self.seconds)]


def test_the_pair_is_prepared_apart_in_every_block():
    one, other = Steady(1.0), Steady(1.02)
    found = noise.clock_differences([one, other], seconds=600)
    assert set(found) == {"read", "product"}
    assert one.prepared == other.prepared == ["read"] * 6 + ["product"] * 6
    assert found["read"].ratio == pytest.approx(1.02)


def test_what_differs_between_preparations_widens_the_interval():
    found = noise.clock_differences([Steady(1.0), Steady(1.0, 1.1)], seconds=600)["read"]
    assert found.low < 1.0 < 1.05 < found.high
    with pytest.raises(WorkerFailure, match="the worker died"):
        noise.clock_differences([Steady(1.0), Steady()], seconds=0.05)


def test_what_is_infinite_has_no_number(monkeypatch):
    """One block says nothing of the spread between blocks: JSON has no infinity."""
    endless = compare([1.0], [1.0], blocks=[0])
    assert endless == Comparison(1.0, 0.0, math.inf, "unclear")

    class Pair:
        def __enter__(self):
            return [Steady(1.0), Steady(1.0)]

        def __exit__(self, *error: object):
            return False

    monkeypatch.setattr(examine, "meters", lambda here, threads, count: Pair())
    monkeypatch.setattr(noise, "clock", lambda worker: {"step_s": 1e-9, "reading_s": 1e-9})
    monkeypatch.setattr(noise, "clock_differences", lambda pair: {"read": endless})
    found = examine._instruments(CPU, 2)
    assert found["read"] == {"ratio": 1.0, "low": 0.0, "high": None, "floor": None}
    assert json.dumps(found, allow_nan=False)


# Advice


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A root whose /proc and /sys say what a test writes there; by default nothing wants improving."""
    monkeypatch.setattr(advice_module, "_libraries", lambda here: [])
    monkeypatch.setattr(advice_module, "unseen", lambda: "")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)

    class Machine:
        def __init__(self, name: str = "machine") -> None:
            self.root = tmp_path / name
            self.has("proc/self/status", "Name:\tpython\nCpus_allowed:\tf\nCpus_allowed_list:\t0-3\n")
            for cpu in range(4):
                self.has(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor", "performance")
                self.has(SIBLINGS.format(cpu), str(cpu))
            self.has(BOOST, "0")
            self.has(NODE.format(0), "0-3")
            self.has(QUOTA, "max 100000")
            self.has(PAGES, "[always] madvise never")

        def has(self, path: str, content: str) -> None:
            file = self.root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content + "\n")

        def advice(self, here: Platform = CPU, threads: int = 4, **ask: object) -> list[str]:
            return advice(here, threads, self.root, **ask)

    return Machine


NODE = "sys/devices/system/node/node{}/cpulist"
GOVERNOR = "sys/devices/system/cpu/cpu2/cpufreq/scaling_governor"
SIBLINGS = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
BOOST = "sys/devices/system/cpu/cpufreq/boost"
NO_TURBO = "sys/devices/system/cpu/intel_pstate/no_turbo"


QUOTA = "sys/fs/cgroup/cpu.max"
PAIRS = {SIBLINGS.format(cpu): f"{cpu % 2},{cpu % 2 + 2}" for cpu in range(4)}
NEIGHBOURS = {SIBLINGS.format(cpu): f"{cpu // 2 * 2},{cpu // 2 * 2 + 1}" for cpu in range(4)}
VIRTUAL = replace(CPU, features=frozenset({"hypervisor"}))
MACHINES: dict[str, tuple[dict[str, str], Platform, int]] = {
    "in order": ({}, CPU, 4),
    "a governor that saves power": ({GOVERNOR: "powersave"}, CPU, 4),
    "boost": ({BOOST: "1"}, CPU, 4),
    "turbo": ({NO_TURBO: "0"}, CPU, 4),
    "threads that share cores": (PAIRS, CPU, 4),
    "threads on two nodes": ({NODE.format(0): "0-1", NODE.format(1): "2-3", NODE.format(2): "4-7"}, CPU, 4),
    "a quota below the threads": ({QUOTA: "150000 100000"}, CPU, 4),
    "a quota below one CPU": ({QUOTA: "50000 100000"}, CPU, 4),
    "a quota of all threads": ({QUOTA: "400000 100000"}, CPU, 4),
    "huge pages on request": ({PAGES: "always [madvise] never"}, CPU, 4),
    "no huge pages": ({PAGES: "always madvise [never]"}, CPU, 4),
    "other CPUs than ours": (
        {"proc/self/status": "Cpus_allowed_list:\t0-1", GOVERNOR: "powersave"}
        | {NODE.format(0): "0-1", NODE.format(1): "2-3"},
        CPU,
        2,
    ),
    "a core for each thread on one node": (
        NEIGHBOURS | {NODE.format(0): "0-3", NODE.format(1): "4-7"},
        CPU,
        2,
    ),
    "a virtual machine": ({}, VIRTUAL, 4),
}


def test_advice_says_what_is_committed(snapshot, monkeypatch, tmp_path, machine):
    lines = []
    for name, (files, here, threads) in MACHINES.items():
        found = machine(name)
        for path, content in files.items():
            found.has(path, content)
        lines += [f"=== {name}", *found.advice(here, threads), ""]
    snapshot(Path(__file__).parent / "snapshots" / "advice.txt", "\n".join(lines))
    assert advice(CPU, 4, tmp_path / "nothing") == [], "of a machine that says nothing"
    pages = machine("pages that are asked for")
    pages.has(PAGES, "always [madvise] never")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    assert pages.advice() == []
    monkeypatch.setattr(advice_module, "unseen", lambda: "NVML: Driver Not Loaded")
    assert pages.advice() == ["NVML: Driver Not Loaded"], "a GPU that is not seen, with the cause"


@pytest.mark.parametrize(("kind", "arch"), [("cuda", "sm_90"), ("rocm", "gfx942")])
def test_a_torch_without_this_gpu_is_the_first_thing_said_and_nothing_is_timed(monkeypatch, kind, arch):
    monkeypatch.setattr(platform, "torch_build", lambda: "cpu")
    monkeypatch.setattr(examine, "advice", lambda here, threads: ["sleep more"])
    found = examine.examine(Platform(kind, arch, "cuda:0", "a GPU"), complaints=["hot"], quick=True)
    wrong, *others = found["what would improve it"]
    assert "is built for CPUs: cuda:0 needs its build for" in wrong
    assert (found["runs here"], others) == ({}, ["hot", "sleep more"])
    monkeypatch.setattr(platform, "torch_build", lambda: kind)
    assert examine.examine(Platform(kind, arch, "cuda:0", "a GPU"), quick=True)["runs here"]


@pytest.mark.parametrize(
    ("persistence", "lines"), [("Enabled", 0), ("Disabled", 1), ("", 0)], ids=["on", "off", "silent"]
)
def test_a_gpu_that_sleeps_between_calls_is_said_so(machine, monkeypatch, persistence, lines):
    """nvidia-smi answers as driver 550 does with --format=csv,noheader."""
    found_here = machine()
    found_here.has(GOVERNOR, "powersave")  # of no weight there

    def smi(*arguments: str) -> tuple[str, str]:
        assert arguments == ("-i", "1", "--query-gpu=persistence_mode", "--format=csv,noheader")
        return persistence, ""

    monkeypatch.setattr(advice_module, "smi", smi)
    found = found_here.advice(H200)
    assert len(found) == lines
    assert all("`nvidia-smi -i 1 -pm 1`" in line for line in found)
    assert found_here.advice(replace(H200, uuid="MIG-1111")) == []


@pytest.mark.parametrize(
    ("beside", "alone", "said"),
    [
        ("8", "8", ""),
        ("0", "8", "beside the installed amdsmi torch counts 0 devices, without it 8, of 8"),
        ("0", "0", "torch counts 0 devices of 8 that the driver shows"),
        ("", "", ""),
    ],
    ids=["alike", "amdsmi hides them", "torch of another build", "no torch"],
)
def test_devices_that_torch_counts_are_those_that_the_driver_shows(machine, monkeypatch, beside, alone, said):
    found_here = machine()
    gpus = {f"cuda:{i}": Platform("rocm", "gfx942", f"cuda:{i}") for i in range(8)}
    monkeypatch.setattr(advice_module, "devices", lambda: gpus | {"cpu": CPU})
    counts = {
        (sys.executable, "-c", advice_module.WITH_AMDSMI): beside,
        (sys.executable, "-c", advice_module.WITHOUT_AMDSMI): alone,
    }
    lines = found_here.advice(gpus["cuda:0"], ask=lambda *command: counts[command])
    assert [line[: len(said)] for line in lines] == ([said] if said else [])


def test_missing_libraries_are_said_once_each(monkeypatch):
    """On a GPU nothing of this machine's libraries can be looked at: the reasons are the platform's."""
    here = Platform("cuda", "sm_90", "cuda:0", "NVIDIA H200")
    monkeypatch.setattr("kernels.platform.version", lambda module: None)
    lines = advice_module._libraries(here)
    assert len({line.split(": ", 1)[1] for line in lines}) == len(lines)
    assert any("torch.bf16" in line and "torch is not installed" in line for line in lines)


def test_a_library_newer_than_what_was_read_is_said_once(monkeypatch):
    monkeypatch.setattr(
        "kernels.platform.version", lambda module: "0.1.24.post1" if module == "aiter" else "0"
    )
    (line,) = advice_module._libraries(Platform("rocm", "gfx942", "cuda:0"))
    assert line.startswith("aiter 0.1.24.post1 is newer than 0.1.20.post1, ") and "doctor --bind" in line
    assert not any("aiter" in line for line in advice_module._libraries(Platform("cuda", "sm_90", "cuda:0")))
