"""What the monitor of an NVIDIA GPU takes for a disturbance, with a made-up NVML."""

import threading

import pytest

from harness.machine.monitor import base
from harness.machine.monitor.nvidia import NvidiaMonitor, open_nvidia
from kernels.platform import Platform
from tests.support.fake_nvml import FakeNvml

H100 = Platform("cuda", "sm_90", "cuda:0", "H100", uuid="GPU-aa")
IDLE, POWER, HW, SW_THERMAL, HW_THERMAL, BRAKE = 0x1, 0x4, 0x8, 0x20, 0x40, 0x80


class Bench:
    """A device, its monitor, our workers, and the time."""

    def __init__(self, nvml: FakeNvml, workers: tuple[int, ...] = (11, 12)) -> None:
        self.nvml = nvml
        self.workers = list(workers)
        self.now = 1000.0
        nvml.nvmlInit()
        self.monitor = NvidiaMonitor(H100, lambda: self.workers, nvml, nvml.handles[0])
        self.monitor.clock = self.monitor.wall = lambda: self.now

    def ran(self, percent: dict[int, int]) -> None:
        """Process -> per cent of the SMs' time. There are two samples, of which the higher one counts."""
        at = int(self.now * 1e6)
        self.nvml.samples += [(pid, at, n) for pid, most in percent.items() for n in (most, min(5, most))]

    def round(self, *samples: dict[str, object], ran=None, work="product") -> str:
        """Runs a round of a second. Each sample sets what NVML then answers, or advances a counter: (policy,
        nanoseconds)."""
        self.monitor.begin()
        self.now += 1.0
        self.ran(ran or {})
        for sample in samples or ({},):
            for name, value in sample.items():
                if name == "sm":
                    self.nvml.clocks[1] = value
                elif name == "counted":
                    self.nvml.violations[value[0]] += value[1]
                else:
                    setattr(self.nvml, name, value)
            self.monitor.sample(work)
        return self.monitor.end()


@pytest.fixture
def bench() -> Bench:
    return Bench(FakeNvml())


def test_a_quiet_round_and_what_is_recorded_of_it(bench):
    assert bench.round({"sm": 1980}, {"sm": 1755}, {"sm": 1830}) == ""
    assert bench.monitor.take_conditions() == {
        "memory_clock_mhz": {"min": 2619, "median": 2619, "max": 2619},
        "power_w": {"min": 512.345, "median": 512.345, "max": 512.345},
        "sm_clock_mhz": {"min": 1755, "median": 1830, "max": 1980},
        "software_power_cap_percent": {"min": 0, "median": 0, "max": 0},
        "temperature_c": {"min": 61, "median": 61, "max": 61},
        "thermal_slowdown_percent": {"min": 0, "median": 0, "max": 0},
        "samples": 3,
        "slowed_by": {},
    }
    assert bench.monitor.take_conditions() == {}


def test_a_sample_is_read_while_its_calls_run(bench, monkeypatch):
    """After the calls the device is idle. A sample that is too short is read after them."""
    looked = threading.Event()
    read_now = bench.monitor._read
    monkeypatch.setattr(bench.monitor, "_read", lambda: (read_now(), looked.set())[0])
    bench.monitor.begin()
    with bench.monitor.watching("product"):
        assert looked.wait(60)
        bench.nvml.reasons = IDLE
    read = bench.monitor.take_conditions()
    assert read["samples"] >= 1

    monkeypatch.setattr(base, "READ_EVERY_S", 60)
    with bench.monitor.watching("product"):
        pass
    assert bench.monitor.take_conditions()["idle_samples"] == 1


def test_a_clock_is_compared_with_the_same_work_unless_the_power_cap_lowers_it(bench, monkeypatch):
    """The reasons and the clock take a millisecond each, in which a sample's work may end."""
    bench.round({"sm": 1980})
    assert bench.round({"sm": 1200}, work="a heavier product") == ""
    bits = iter([POWER, 0])
    monkeypatch.setattr(bench.nvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda handle: next(bits))
    assert bench.round({"sm": 1200}) == ""


@pytest.mark.parametrize(("sample", "said"), [
    ({"sm": 1485}, ""),
    ({"sm": 1484}, "SM clock 1484 MHz, 75% of the 1980 MHz before"),
    ({"sm": 345, "reasons": IDLE | HW}, ""),  # an idle device's clock means nothing
    ({"reasons": HW}, "hardware slowdown seen"),
    ({"reasons": SW_THERMAL | POWER}, "software thermal slowdown seen"),
    ({"reasons": HW_THERMAL}, "hardware thermal slowdown seen"),
    ({"reasons": BRAKE}, "hardware power brake seen"),
    ({"counted": (1, 9_000_000)}, ""),
    ({"counted": (1, 300_000_000)}, "thermal slowdown for 30% of the round"),  # between the samples
])  # fmt: skip
def test_one_sample_or_the_counter_shows_what_slowed_it(bench, sample, said):
    quiet = {"sm": 1980, "reasons": 0}
    assert bench.round(quiet) == ""
    assert bench.round(quiet, sample, quiet) == said
    read = bench.monitor.take_conditions()
    rests = sample.get("reasons", 0) & IDLE
    assert read.get("idle_samples", 0) == rests
    assert read["sm_clock_mhz"]["min"] == (1980 if rests else sample.get("sm", 1980))
    assert bench.round(quiet) == "" and "idle_samples" not in bench.monitor.take_conditions()


def test_a_power_cap_is_recorded_and_no_disturbance(bench):
    bench.round({"sm": 1980})
    assert bench.round({"sm": 1200, "reasons": POWER, "counted": (0, 900_000_000)}) == ""
    read = bench.monitor.take_conditions()
    assert read["slowed_by"] == {"software power cap": 0.5}
    assert read["software_power_cap_percent"]["max"] == pytest.approx(90)
    assert read["sm_clock_mhz"]["min"] == 1200


def test_what_cannot_be_read_is_said_and_the_rest_is_judged() -> None:
    """A MIG device answers so."""
    nvml = FakeNvml()
    for what in ("ClockInfo", "ViolationStatus", "ProcessUtilization", "UtilizationRates"):
        nvml.refused[f"nvmlDeviceGet{what}"] = 3
    bench = Bench(nvml)
    assert bench.round({"reasons": HW_THERMAL}) == "hardware thermal slowdown seen"
    unread = bench.monitor.take_conditions()["not_read"]
    for quantity in ("sm_clock_mhz", "memory_clock_mhz", "thermal slowdown counter", "process utilisation"):
        assert unread[quantity] == "Not Supported"
    shown = bench.monitor.current_values()
    assert shown["sm_clock_mhz"] == "not readable: Not Supported"
    assert (shown["temperature_c"], shown["power_w"]) == ("61", "512.3")
    assert shown["slowed by"] == "hardware thermal slowdown"


def test_older_drivers_and_libraries_have_fewer_functions():
    """A clock is not judged if it is unknown whether the device is idle."""
    nvml = FakeNvml(absent=("nvmlDeviceGetViolationStatus",))
    newer = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetTemperatureV")
    nvml.refused |= dict.fromkeys(newer, 13)
    bench = Bench(nvml)
    assert bench.round({"reasons": SW_THERMAL}) == "software thermal slowdown seen"
    read = bench.monitor.take_conditions()
    assert read["temperature_c"]["max"] == 61
    assert read["not_read"]["thermal slowdown counter"] == "nvidia-ml-py has no nvmlDeviceGetViolationStatus"
    nvml.refused["nvmlDeviceGetCurrentClocksThrottleReasons"] = 3
    assert bench.round({"sm": 1980}, {"sm": 345}) == ""
    read = bench.monitor.take_conditions()
    assert read["sm_clock_mhz"]["min"] == 345
    assert "samples" not in read


@pytest.mark.parametrize(("before", "present", "ran", "foreign"), [
    ([900], [11, 12], {11: 70, 12: 60, 900: 34}, 900),
    ([], [11, 901], {901: 50}, 901),
    # In a container our 11 and 12 are the host's 5011 and 5012; 900 was there before us.
    ([900], [5011, 5012], {5011: 40, 5012: 40}, None),
    ([900], [5011, 5012], {5011: 40, 900: 40}, 900),
    ([900], [5011, 5012], {5011: 40, 5012: 40, 5013: 40}, "one more"),
])  # fmt: skip
def test_a_foreign_process_that_ran_in_the_round(before, present, ran, foreign):
    nvml = FakeNvml()
    nvml.processes = dict.fromkeys(before, 2 << 30)
    bench = Bench(nvml)
    bench.ran({900: 80})  # before the round: it does not count
    bench.now += 1.0
    nvml.processes |= dict.fromkeys(present, 1)
    said = {None: "", "one more": "3 processes ran on cuda:0: 1 more than we have"}
    one = f"process {foreign}, not ours, ran on cuda:0 ({ran.get(foreign)} % of the SMs' time)"
    assert bench.round(ran=ran) == said.get(foreign, one)


def test_an_idle_foreign_context_is_reported_before_and_does_not_disturb():
    nvml = FakeNvml()
    nvml.processes = {900: 3 << 29, 200_000: None}
    nvml.utilisation = 37
    bench = Bench(nvml, workers=())
    assert bench.monitor.complaints() == [
        "process 900 (python3) is on cuda:0 and holds 1.5 GiB",
        "process 200000 is on cuda:0",
        "cuda:0 is 37 % busy",
    ]
    nvml.utilisation = base.BUSY
    assert len(bench.monitor.complaints()) == 2
    bench.workers = [11]
    assert bench.round(ran={11: 90, 900: 0}) == ""


def test_a_worker_that_died_in_the_round_was_ours(bench):
    bench.nvml.processes = {11: 1, 12: 1}
    bench.monitor.begin()
    bench.now += 1.0
    bench.ran({11: 40, 12: 40})
    bench.workers.remove(12)
    assert bench.monitor.end() == ""


@pytest.mark.parametrize(("mode", "name"), [(2, "prohibited"), (3, "exclusive-process")])
def test_a_device_that_one_process_has_to_itself(bench: Bench, mode: int, name: str) -> None:
    assert bench.monitor.blocked() == ""
    bench.nvml.mode = mode
    assert bench.monitor.blocked().startswith(f"cuda:0 is in {name} mode and our workers must share it: ")


@pytest.mark.parametrize("uuid", ["GPU-bb", "MIG-7"])
def test_a_device_is_watched_by_its_uuid_whatever_its_number(uuid: str) -> None:
    nvml = FakeNvml(("GPU-aa", "GPU-bb", "MIG-7"))
    monitor = open_nvidia(Platform("cuda", "sm_90", "cuda:0", uuid=uuid), list, nvml)
    monitor.begin()
    monitor.sample()
    assert nvml.asked == {uuid}
    others = "cuda:0 is a MIG slice: what runs on the other slices of its GPU is not seen"
    assert monitor.complaints() == ([others] if uuid.startswith("MIG-") else [])
