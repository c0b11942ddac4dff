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


def says_what_it_measured(facts):
    assert set(facts) == KEYS
    assert facts["libraries"]["torch"] != "not installed"
    assert 0 < facts["instruments"]["clock"]["step_s"] < 1e-3
    for workload in ("read", "product"):
        seen = facts["instruments"][workload]
        assert set(seen) == {"ratio", "low", "high", "floor"}
        assert seen["ratio"] > 0
    assert facts["what would improve it"] is not None


@pytest.mark.slow
def test_doctor_measures_what_it_says(cli, tmp_path):
    done = cli("doctor", "--json", tmp_path / "facts.json")
    assert (done.returncode, done.stdout) == (0, "")
    facts = json.loads((tmp_path / "facts.json").read_text())
    says_what_it_measured(facts)
    for seen in (facts["instruments"]["read"], facts["instruments"]["product"]):
        assert (seen["low"] or 0.0) <= seen["ratio"] <= (seen["high"] or math.inf), "None: no bound was found"
    assert facts["ceilings"]["rates"]["bf16"] > 1e9
    assert facts["ceilings"]["read"] > 1e8
    assert facts["ceilings"]["copy"] > 1e8
    said = cli("doctor", "--quick").stdout
    assert facts["ceilings"]["measured"] in said, "it is kept"
    assert "instruments" not in said


def test_doctor_says_what_its_workers_measured(here, monkeypatch):
    """With ceilings that are known, and too short to tell anything apart."""
    known = Ceilings({"bf16": 1e9}, read=1e8, copy=1e8, measured="earlier")
    monkeypatch.setattr(examine, "measured", lambda here, threads, monitor: known)
    monkeypatch.setattr("harness.run.ceilings.Worker", WorkerHere)
    monkeypatch.setattr(noise, "clock_differences", functools.partial(noise.clock_differences, seconds=0.2))
    done = here("doctor", "--json", "-")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    says_what_it_measured(facts)
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


def test_text_says_what_was_found(examined, golden):
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
    golden(Path(__file__).parent / "snapshots" / "doctor.txt", "\n\n=====\n\n".join(texts) + "\n")


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
        root = tmp_path

        def has(self, path: str, content: str) -> Path:
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content + "\n")
            return file

        def advice(self, here: Platform = CPU, threads: int = 4, **ask: object) -> list[str]:
            return advice(here, threads, tmp_path, **ask)

    found = Machine()
    found.has("proc/self/status", "Name:\tpython\nCpus_allowed:\tf\nCpus_allowed_list:\t0-3\n")
    for cpu in range(4):
        folder = f"sys/devices/system/cpu/cpu{cpu}"
        found.has(f"{folder}/cpufreq/scaling_governor", "performance")
        found.has(f"{folder}/topology/thread_siblings_list", str(cpu))
    found.has("sys/devices/system/cpu/cpufreq/boost", "0")
    found.has("sys/devices/system/node/node0/cpulist", "0-3")
    found.has("sys/fs/cgroup/cpu.max", "max 100000")
    found.has("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never")
    return found


NODE = "sys/devices/system/node/node{}/cpulist"
GOVERNOR = "sys/devices/system/cpu/cpu2/cpufreq/scaling_governor"
SIBLINGS = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
BOOST = "sys/devices/system/cpu/cpufreq/boost"
NO_TURBO = "sys/devices/system/cpu/intel_pstate/no_turbo"


QUOTA = "sys/fs/cgroup/cpu.max"


@pytest.mark.parametrize(
    ("files", "threads", "wanted"),
    [
        ({}, 4, ""),
        (
            {GOVERNOR: "powersave"},
            4,
            "the frequency governor is powersave: clocks drift less under `cpu",
        ),
        (
            {"sys/devices/system/cpu/cpufreq/boost": "1"},
            4,
            "`echo 0 > /sys/devices/system/cpu/cpufreq/boost`",
        ),
        ({NO_TURBO: "0"}, 4, f"`echo 1 > /{NO_TURBO}`"),
        (
            {SIBLINGS.format(cpu): f"{cpu % 2},{cpu % 2 + 2}" for cpu in range(4)},
            4,
            "4 threads share 2 cores, unbound: run with --threads 2 at most",
        ),
        (
            {NODE.format(0): "0-1", NODE.format(1): "2-3", NODE.format(2): "4-7"},
            4,
            "4 threads span NUMA nodes, and where memory lies changes times: --threads 2 keeps to one node",
        ),
        (
            {QUOTA: "150000 100000"},
            4,
            "may use 1.5 CPUs, so 4 threads are stopped in mid-call: raise its quota, or run with",
        ),
        ({QUOTA: "400000 100000"}, 4, ""),
        ({PAGES: "always [madvise] never"}, 4, "huge ones: set GLIBC_TUNABLES=glibc.malloc.hugetlb=1"),
        ({PAGES: "always madvise [never]"}, 4, f"huge ones: `echo madvise > /{PAGES}`, then set GLIBC_TUN"),
        # Only our own CPUs count.
        (
            {"proc/self/status": "Cpus_allowed_list:\t0-1", GOVERNOR: "powersave"}
            | {NODE.format(0): "0-1", NODE.format(1): "2-3"},
            2,
            "",
        ),
        # As a run has them by default: one on each core, on the node with the most.
        (
            {SIBLINGS.format(cpu): f"{cpu // 2 * 2},{cpu // 2 * 2 + 1}" for cpu in range(4)}
            | {NODE.format(0): "0-3", NODE.format(1): "4-7"},
            2,
            "",
        ),
    ],
)
def test_advice_says_what_to_do(machine, files, threads, wanted):
    for path, content in files.items():
        machine.has(path, content)
    lines = machine.advice(threads=threads)
    if wanted:
        (line,) = lines
        assert wanted in line
    else:
        assert lines == []


def test_advice_of_other_machines(machine, monkeypatch, tmp_path):
    assert advice(CPU, 4, tmp_path / "nothing") == [], "one that says nothing"
    (line,) = machine.advice(Platform("cpu", "x86", features=frozenset({"hypervisor"})))
    assert line.startswith("a virtual machine")
    machine.has(PAGES, "always [madvise] never")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    assert machine.advice() == [], "huge pages that are asked for are enough"
    monkeypatch.setattr(advice_module, "unseen", lambda: "NVML: Driver Not Loaded")
    assert machine.advice() == ["NVML: Driver Not Loaded"], "a GPU that is not seen, with the cause"


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
    machine.has(GOVERNOR, "powersave")  # of no weight there

    def smi(*arguments: str) -> tuple[str, str]:
        assert arguments == ("-i", "1", "--query-gpu=persistence_mode", "--format=csv,noheader")
        return persistence, ""

    monkeypatch.setattr(advice_module, "smi", smi)
    found = machine.advice(H200)
    assert len(found) == lines
    assert all("`nvidia-smi -i 1 -pm 1`" in line for line in found)
    assert machine.advice(replace(H200, uuid="MIG-1111")) == []


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
    gpus = {f"cuda:{i}": Platform("rocm", "gfx942", f"cuda:{i}") for i in range(8)}
    monkeypatch.setattr(advice_module, "devices", lambda: gpus | {"cpu": CPU})
    counts = {
        (sys.executable, "-c", advice_module.WITH_AMDSMI): beside,
        (sys.executable, "-c", advice_module.WITHOUT_AMDSMI): alone,
    }
    lines = machine.advice(gpus["cuda:0"], ask=lambda *command: counts[command])
    assert [line[: len(said)] for line in lines] == ([said] if said else [])


def test_torch_is_asked_without_amdsmi_too(tmp_path, monkeypatch):
    """A torch that counts as ROCm's does: through amdsmi where that can be imported."""
    (tmp_path / "amdsmi.py").touch()
    (tmp_path / "torch.py").write_text(
        "class cuda:\n"
        "    @staticmethod\n"
        "    def device_count():\n"
        "        try:\n"
        "            import amdsmi\n"
        "        except ModuleNotFoundError:\n"
        "            return 8\n"
        "        return 0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    codes = advice_module.WITH_AMDSMI, advice_module.WITHOUT_AMDSMI
    assert [platform.run(sys.executable, "-c", code) for code in codes] == ["0", "8"]


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
