"""`doctor`: its facts, its text, and its advice on machines of all kinds."""

import contextlib
import functools
import itertools
import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from harness.catalogue.devices import Ceilings
from harness.doctor import examine
from harness.doctor.examine import advice
from harness.report.doctor_text import doctor_text
from harness.report.terminal import WIDTH
from harness.run.device import device_lock
from harness.statistics.paired import Comparison, compare
from harness.workers.process import WorkerFailure
from kernels import platform
from kernels.platform import Platform, detect
from tests.support.workers_here import WorkerHere

CPU = Platform("cpu", "x86-amx", name="a CPU", features=frozenset({"avx512f"}), memory=1 << 30)
H200 = Platform("cuda", "sm_90", "cuda:1", "NVIDIA H200")


def test_doctor_says_what_its_workers_measured(here, monkeypatch):
    """The ceilings are made up, and the samples are few."""
    known = Ceilings({"bf16": 1e9}, read=1e8, copy=1e8, measured="earlier")
    monkeypatch.setattr(examine, "measured", lambda here, threads, monitor: known)
    monkeypatch.setattr("harness.run.ceilings.WorkerProcess", WorkerHere)
    monkeypatch.setattr(examine, "self_comparisons", functools.partial(examine.self_comparisons, seconds=0.2))
    done = here("doctor", "--json", "-")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["libraries"]["torch"] != "not installed"
    assert facts["runs here"]["mla_decode torch.sdpa"] == "timed"
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
    assert "- device cpu is being measured by `" in said
    assert "instruments" not in said


MACHINE = {
    "device": "a CPU", "platform": "cpu", "arch": "x86-amx", "threads": 4, "cpus": 8, "os": "Linux",
    "driver": "580", "device_memory": 1 << 30, "last_level_cache": 32 << 20,
}  # fmt: skip


def test_text_says_what_was_found(monkeypatch, snapshot):
    """It gives what was measured, in columns, and why the rest was not."""

    def broken(*arguments: object) -> None:
        raise WorkerFailure("crashed", "the worker died of SIGILL while in open")

    monkeypatch.setattr(examine, "measured", broken)
    monkeypatch.setattr(examine, "meters", broken)
    monkeypatch.setattr(examine, "advice", lambda here, threads: ["sleep more"])
    examined = examine.examine(CPU, {"SM clock": "1980 MHz"}, ["it is throttled"])
    assert examined["machine"].keys().isdisjoint(("last_level_cache", "uuid")), (
        "what is not known is not told"
    )
    pair = {"ratio": 1.003, "low": 0.996, "high": 1.009, "floor": 0.0}
    rates = {"fp8": 1.4e15, "bf16": 7.7e14}
    clock = {"step_s": 5e-7, "reading_s": 2e-6}
    known = examined | {
        "machine": MACHINE,
        "libraries": {"torch": "2.13.0", "aiter": "not installed", "vllm": "PyPI's vllm 0.1"},
        "ceilings": {"rates": rates, "read": 4.31e12, "reach": 1 << 24, "copy": 950e9, "measured": "now"},
        "datasheet": [],
        "instruments": {"clock": clock, "read": pair, "product": pair | {"floor": None}},
        "conditions": {
            "software power cap counter": "not readable",
            "others_percent": "12",
            "clock_mhz": "none",
        },
        "runs here": {f"op impl{i}": "timed" for i in range(12)},
        "devices": {f"cuda:{i}": "cuda sm_90 NVIDIA H200" for i in range(8)} | {"cpu": "cpu x86-amx a CPU"},
    }
    unmeasured = ("ceilings", "instruments", "conditions", "what would improve it")
    broken = {name: examined[name] for name in unmeasured}
    alone = {"conditions": {}, "devices": {"cpu": "cpu x86-amx a CPU"}}
    texts = (doctor_text(known), doctor_text(known | broken), doctor_text(known | alone))
    assert max(len(line) for text in texts for line in text.splitlines()) <= WIDTH
    snapshot(Path(__file__).parent / "snapshots" / "doctor.txt", "\n\n=====\n\n".join(texts) + "\n")
    monkeypatch.setattr("harness.report.doctor_text.line_width", lambda: 70)  # of a narrow terminal
    assert 60 < max(map(len, doctor_text(known).splitlines())) <= 70


class Steady:
    """A meter's worker whose samples take the given seconds. It checks what it is asked."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)
        self.prepared: list[str] = []

    def ask(self, request: str, deadline: float, **arguments: object) -> object:
        if request == "clock":
            return {"step_s": 1e-9, "reading_s": 1e-9}
        if request == "prepare":
            assert set(arguments) == {"workload"}
            self.prepared.append(arguments["workload"])
            return None
        assert (request, set(arguments)) == ("sample", {"at_least_s"})
        if not self.seconds:
            raise WorkerFailure("crashed", "the worker died")
        time.sleep(0.001)  # only samples that take time use up a budget
        return self.seconds[len(self.prepared) % len(self.seconds)]


def test_the_pair_is_prepared_apart_in_every_block():
    """A difference between preparations widens the interval."""
    one, other = Steady(1.0), Steady(1.02)
    found = examine.self_comparisons([one, other], seconds=600)
    assert set(found) == {"read", "product"}
    assert one.prepared == other.prepared == ["read"] * 6 + ["product"] * 6
    assert found["read"].ratio == pytest.approx(1.02)
    found = examine.self_comparisons([Steady(1.0), Steady(1.0, 1.1)], seconds=600)["read"]
    assert found.low < 1.0 < 1.05 < found.high
    with pytest.raises(WorkerFailure, match="the worker died"):
        examine.self_comparisons([Steady(1.0), Steady()], seconds=0.05)


def test_what_is_infinite_has_no_number(monkeypatch):
    """One block gives no spread between blocks, so the interval is infinite, which JSON has no number for."""
    endless = compare([1.0], [1.0], blocks=[0])
    assert endless == Comparison(1.0, 0.0, math.inf, "unclear")
    pair = contextlib.nullcontext([Steady(1.0), Steady(1.0)])
    monkeypatch.setattr(examine, "meters", lambda here, threads, count: pair)
    monkeypatch.setattr(examine, "self_comparisons", lambda pair: {"read": endless})
    found = examine._instruments(CPU, 2)
    assert found["read"] == {"ratio": 1.0, "low": 0.0, "high": None, "floor": None}
    assert json.dumps(found, allow_nan=False)


SYSTEM = "sys/devices/system"
NODE, NEXT, THIRD = (f"{SYSTEM}/node/node{node}/cpulist" for node in range(3))
GOVERNORS = [f"{SYSTEM}/cpu/cpu{cpu}/cpufreq/scaling_governor" for cpu in range(4)]
SIBLINGS = [f"{SYSTEM}/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in range(4)]
PAGES, QUOTA = "sys/kernel/mm/transparent_hugepage/enabled", "sys/fs/cgroup/cpu.max"
OURS = "proc/self/status"
SLOW = {GOVERNORS[2]: "powersave"}
QUIET = {
    OURS: "Name:\tpython\nCpus_allowed:\tf\nCpus_allowed_list:\t0-3",
    NODE: "0-3",
    QUOTA: "max 100000",
    PAGES: "[always] madvise never",
    **dict.fromkeys(GOVERNORS, "performance"),
    **{file: str(cpu) for cpu, file in enumerate(SIBLINGS)},
}
PAIRS = dict(zip(SIBLINGS, ("0,2", "1,3", "0,2", "1,3"), strict=True))
NEIGHBOURS = dict(zip(SIBLINGS, ("0,1", "0,1", "2,3", "2,3"), strict=True))
VIRTUAL = replace(CPU, features=frozenset({"hypervisor"}))
MACHINES: dict[str, tuple[dict[str, str], Platform, int]] = {
    "in order": ({}, CPU, 4),
    "a governor that saves power": (SLOW, CPU, 4),
    "threads that share cores": (PAIRS, CPU, 4),
    "threads on two nodes": ({NODE: "0-2", NEXT: "3", THIRD: "4-7"}, CPU, 4),
    "a quota below the threads": ({QUOTA: "150000 100000"}, CPU, 4),
    "a quota below one CPU": ({QUOTA: "50000 100000"}, CPU, 4),
    "a quota of all threads": ({QUOTA: "400000 100000"}, CPU, 4),
    "huge pages on request": ({PAGES: "always [madvise] never"}, CPU, 4),
    "no huge pages": ({PAGES: "always madvise [never]"}, CPU, 4),
    "other CPUs than ours": (SLOW | {OURS: "Cpus_allowed_list:\t0-1", NODE: "0-1", NEXT: "2-3"}, CPU, 2),
    "a core for each thread on one node": (NEIGHBOURS | {NODE: "0-3", NEXT: "4-7"}, CPU, 2),
    "a virtual machine": ({}, VIRTUAL, 4),
}


@pytest.fixture
def advised(monkeypatch, tmp_path):
    """The advice for a machine with these files in /proc and /sys. By default there is nothing to improve."""
    monkeypatch.setattr(examine, "_libraries", lambda here: [])
    monkeypatch.setattr(examine, "unseen", lambda: "")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    numbers = itertools.count()

    def said(files: dict[str, str], here: Platform = CPU, threads: int = 4) -> list[str]:
        root = tmp_path / str(next(numbers))
        for path, content in (QUIET | files).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content + "\n")
        return advice(here, threads, root)

    return said


def test_advice_says_what_is_committed(snapshot, monkeypatch, tmp_path, advised):
    lines = [line for name, given in MACHINES.items() for line in (f"=== {name}", *advised(*given), "")]
    snapshot(Path(__file__).parent / "snapshots" / "advice.txt", "\n".join(lines))
    assert advice(CPU, 4, tmp_path / "nothing") == [], "of a machine that says nothing"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    assert advised({PAGES: "always [madvise] never"}) == [], "they are asked for"
    monkeypatch.setattr(examine, "unseen", lambda: "NVML: Driver Not Loaded")
    assert advised({}) == ["NVML: Driver Not Loaded"], "a GPU that is not seen, with the cause"


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


@pytest.mark.parametrize(("persistence", "lines"), [("Enabled", 0), ("Disabled", 1), ("", 0)])
def test_a_gpu_that_sleeps_between_calls_is_said_so(advised, monkeypatch, persistence, lines):
    """nvidia-smi answers as with driver 550. The governor of the CPU does not matter for a GPU."""

    def smi(*arguments: str) -> tuple[str, str]:
        assert arguments == ("-i", "1", "--query-gpu=persistence_mode", "--format=csv,noheader")
        return persistence, ""

    monkeypatch.setattr(examine, "smi", smi)
    found = advised(SLOW, H200)
    assert len(found) == lines
    assert all("`nvidia-smi -i 1 -pm 1`" in line for line in found)
    assert advised(SLOW, replace(H200, uuid="MIG-1111")) == []


def test_missing_libraries_and_newer_ones_than_were_read_are_said_once_each(monkeypatch):
    """The platform is not this machine, so the libraries here do not matter."""
    monkeypatch.setattr("kernels.platform.version", lambda module: None)
    lines = examine._libraries(H200)
    assert len({line.split(": ", 1)[1] for line in lines}) == len(lines)
    assert any("torch.bf16" in line and "torch is not installed" in line for line in lines)
    there = {"aiter": "0.1.24.post1"}
    monkeypatch.setattr("kernels.platform.version", lambda module: there.get(module, "0"))
    (line,) = examine._libraries(Platform("rocm", "gfx942", "cuda:0"))
    assert line.startswith("aiter 0.1.24.post1 is newer than 0.1.20.post1, ") and "doctor --bind" in line
    assert not any("aiter" in line for line in examine._libraries(H200))
