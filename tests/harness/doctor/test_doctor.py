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


def test_a_place_that_cannot_be_written_is_one_line(here, tmp_path):
    done = here("doctor", "--quick", "--json", tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: cannot write {tmp_path}: Is a directory\n"


def test_a_device_that_is_not_here_is_one_line(here):
    done = here("doctor", "--device", "cuda:77")
    assert done.returncode == 2
    assert done.stderr.startswith("error: no device 'cuda:77'; devices here: ")
    assert len(done.stderr.splitlines()) == 1


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


def test_what_cannot_be_measured_says_why(examined):
    assert set(examined) == KEYS
    assert examined["ceilings"] == {"problem": "the worker died of SIGILL while in open"}
    assert examined["instruments"] == examined["ceilings"]
    assert "not measured        the worker died of SIGILL while in open" in doctor_text(examined)


def test_conditions_and_complaints_are_shown(examined):
    assert examined["conditions"] == {"SM clock": "1980 MHz"}
    assert examined["what would improve it"] == ["it is throttled", "sleep more"]
    said = doctor_text(examined)
    assert "conditions\n  SM clock            1980 MHz\n" in said
    assert said.endswith("what would improve it\n  - it is throttled\n  - sleep more")
    assert "conditions" not in doctor_text(examined | {"conditions": {}}), "nothing to say, nothing said"


def test_text_says_what_was_measured(examined):
    ceilings = {
        "rates": {"fp8": 1.4e15, "bf16": 7.7e14},
        "read": 4.31e12,
        "copy": 950e9,
        "measured": "2026-11-21 20:15:31Z",
    }
    pair = {"ratio": 1.003, "low": 0.996, "high": 1.009, "floor": 0.0}
    found = {
        "clock": {"step_s": 5e-7, "reading_s": 2e-6},
        "read": pair,
        "product": pair | {"floor": None},
    }
    text = doctor_text(examined | {"ceilings": ceilings, "instruments": found})
    lines = text.splitlines()
    assert "  read                4.31 TB/s" in lines
    assert "  copy                950 GB/s, read plus written" in lines
    assert "  fp8 product         1400 TFLOPS" in lines
    assert "  bf16 product        770 TFLOPS" in lines
    assert "  clock               steps of 500 ns; 2 us a reading" in lines
    same = "two preparations of the same {} differ by 0.3% (-0.4% .. +0.9%)"
    assert f"  noise of a read     {same.format('read')}" in lines
    assert f"noise of a product {same.format('product')}: disturbed" in " ".join(text.split())


def test_text_keeps_its_columns(examined):
    long = {f"op impl{i}": "timed" for i in range(40)}
    for line in doctor_text(examined | {"runs here": long}).splitlines():
        assert len(line) <= WIDTH
        assert not line.startswith(" ") or line.startswith(("  ", " " * 22))


def test_devices_that_are_alike_are_named_once(examined):
    devices = {f"cuda:{i}": "cuda sm_90 NVIDIA H200" for i in range(8)} | {"cpu": "cpu x86-amx a CPU"}
    said = "all devices         cuda:0 to cuda:7: cuda sm_90 NVIDIA H200; cpu: cpu x86-amx a CPU"
    assert said in " ".join(doctor_text(examined | {"devices": devices}).split("\n"))


def test_a_long_label_stands_apart_from_its_text(examined):
    text = doctor_text(
        examined | {"conditions": {"software power cap counter": "not readable", "clock": "1 MHz"}}
    )
    assert "  software power cap counter  not readable\n  clock                       1 MHz\n" in text


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


def test_a_worker_that_dies_gives_no_noise():
    class Dying(Steady):
        def ask(self, request: str, deadline: float, **arguments: object) -> float | None:
            if request == "turn":
                raise WorkerFailure("crashed", "the worker died")
            return super().ask(request, deadline, **arguments)

    with pytest.raises(WorkerFailure, match="the worker died"):
        noise.clock_differences([Steady(1.0), Dying(1.0)], seconds=0.05)


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


def test_a_machine_in_order_gets_no_advice(machine):
    assert machine.advice() == []


def test_a_machine_that_says_nothing_gets_no_advice(machine, tmp_path):
    assert advice(CPU, 4, tmp_path / "nothing") == []


GOVERNOR = "sys/devices/system/cpu/cpu2/cpufreq/scaling_governor"
SIBLINGS = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
PAGES = "sys/kernel/mm/transparent_hugepage/enabled"


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({GOVERNOR: "powersave"}, "the frequency governor is powersave: clocks drift less under `cpupower"),
        ({"sys/devices/system/cpu/cpufreq/boost": "1"}, "`echo 0 > /sys/devices/system/cpu/cpufreq/boost`"),
        (
            {"sys/devices/system/cpu/intel_pstate/no_turbo": "0"},
            "`echo 1 > /sys/devices/system/cpu/intel_pstate/no_turbo`",
        ),
        (
            {SIBLINGS.format(cpu): f"{cpu % 2},{cpu % 2 + 2}" for cpu in range(4)},
            "4 threads share 2 cores, unbound: run with --threads 2 at most",
        ),
        (
            {
                "sys/devices/system/node/node0/cpulist": "0-1",
                "sys/devices/system/node/node1/cpulist": "2-3",
                "sys/devices/system/node/node2/cpulist": "4-7",
            },
            "4 threads span NUMA nodes, and where memory lies changes times: --threads 2 keeps to one node",
        ),
        (
            {"sys/fs/cgroup/cpu.max": "150000 100000"},
            "may use 1.5 CPUs, so 4 threads are stopped in mid-call: raise its quota, or run with",
        ),
        ({PAGES: "always [madvise] never"}, "huge ones: set GLIBC_TUNABLES=glibc.malloc.hugetlb=1"),
        ({PAGES: "always madvise [never]"}, f"huge ones: `echo madvise > /{PAGES}`, then set GLIBC_TUNABLES"),
    ],
    ids=["governor", "boost", "turbo", "siblings", "nodes", "quota", "huge pages", "no huge pages"],
)
def test_advice_says_what_to_do(machine, files, wanted):
    for path, content in files.items():
        machine.has(path, content)
    (line,) = machine.advice()
    assert wanted in line


def test_only_our_own_cpus_count(machine):
    machine.has("proc/self/status", "Cpus_allowed_list:\t0-1")
    machine.has(GOVERNOR, "powersave")
    machine.has("sys/devices/system/node/node0/cpulist", "0-1")
    machine.has("sys/devices/system/node/node1/cpulist", "2-3")
    assert machine.advice(threads=2) == []


def test_threads_that_have_a_core_each_on_one_node_are_in_order(machine):
    """As a run has them by default: one on each core, on the node with the most."""
    for cpu in range(4):
        machine.has(SIBLINGS.format(cpu), f"{cpu // 2 * 2},{cpu // 2 * 2 + 1}")
    machine.has("sys/devices/system/node/node0/cpulist", "0-3")
    machine.has("sys/devices/system/node/node1/cpulist", "4-7")
    assert machine.advice(threads=2) == []


def test_a_quota_of_all_threads_is_none(machine):
    machine.has("sys/fs/cgroup/cpu.max", "400000 100000")
    assert machine.advice() == []


def test_a_gpu_that_is_not_seen_is_said_with_the_cause(machine, monkeypatch):
    monkeypatch.setattr(advice_module, "unseen", lambda: "NVML: Driver Not Loaded")
    assert machine.advice() == ["NVML: Driver Not Loaded"]


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


def test_huge_pages_that_are_asked_for_are_enough(machine, monkeypatch):
    machine.has(PAGES, "always [madvise] never")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    assert machine.advice() == []


def test_a_virtual_machine_is_said_so(machine):
    (line,) = machine.advice(Platform("cpu", "x86", features=frozenset({"hypervisor"})))
    assert line.startswith("a virtual machine")


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
