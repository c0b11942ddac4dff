"""What the monitor of an AMD GPU takes for a disturbance, with a made-up AMD SMI."""

import pytest

from harness.machine.monitor.amd import RESIDENCIES, open_amd
from kernels.platform import Platform
from tests.support.fake_amdsmi import FakeAmdSmi, Handle

MI300X = Platform("rocm", "gfx942", "cuda:0", "MI300X")


class Bench:
    """A device, its monitor, and our workers."""

    def __init__(self, smi: FakeAmdSmi, workers: tuple[int, ...] = (11,)) -> None:
        self.smi = smi
        self.workers = list(workers)
        self.monitor = open_amd(MI300X, lambda: self.workers, smi, {})

    def round(self, *samples: dict[str, object]) -> str:
        """Runs a round. Each sample sets metrics and adds to counters; it takes a thousand steps."""
        self.monitor.begin()
        for sample in samples or ({},):
            self.smi.metrics["accumulation_counter"] += 1000
            for key, value in sample.items():
                if key.endswith("_acc"):
                    self.smi.metrics[key] += value
                else:
                    self.smi.metrics[key] = value
            self.monitor.sample("product")
        return self.monitor.end()


@pytest.fixture
def bench() -> Bench:
    return Bench(FakeAmdSmi())


def clocks(megahertz: int) -> dict[str, object]:
    return {"current_gfxclk": megahertz, "current_gfxclks": [2100, megahertz, 0, "N/A"]}


def test_a_quiet_round_and_what_is_recorded_of_it(bench):
    assert bench.round({}, clocks(1900)) == ""
    read = bench.monitor.take_conditions()
    assert read["gfx_clock_mhz"] == {"min": 1900, "median": 1997.5, "max": 2095}
    assert read["hotspot_c"]["median"] == 58
    assert read["power_w"]["median"] == 640
    assert read["memory_clock_mhz"]["median"] == 1300
    assert read["samples"] == 2
    assert read["slowed_by"] == {}
    assert "not_read" not in read


@pytest.mark.parametrize(("sample", "said", "least"), [
    (clocks(1400), "GFX clock 1400 MHz, 67% of the 2100 MHz before", 1400),  # the clock of the slowest die
    ({"average_gfx_activity": 3} | clocks(132), "", 2100),  # an idle device's clock means nothing
    ({"ppt_residency_acc": 800} | clocks(1300), "", 1300),  # the power limit does not disturb
])  # fmt: skip
def test_a_clock_below_three_quarters_of_the_highest(bench, sample, said, least):
    bench.round(clocks(2100))
    assert bench.round(sample) == said
    read = bench.monitor.take_conditions()
    assert read["gfx_clock_mhz"]["min"] == least
    assert read.get("idle_samples", 0) == ("average_gfx_activity" in sample)
    limited = "ppt_residency_acc" in sample
    assert read["slowed_by"] == ({"package power limit": 0.5} if limited else {})
    assert read["package_power_limit_percent"]["max"] == pytest.approx(80 if limited else 0)


@pytest.mark.parametrize(("counter", "said"), [
    ("prochot_residency_acc", "processor hot for 25% of the round"),
    ("socket_thm_residency_acc", "socket thermal slowdown for 25% of the round"),
    ("vr_thm_residency_acc", "voltage regulator thermal slowdown for 25% of the round"),
    ("hbm_thm_residency_acc", "HBM thermal slowdown for 25% of the round"),
])  # fmt: skip
def test_slowdowns_are_counted_over_the_round(bench, counter, said):
    assert bench.round({}, {counter: 500}) == said
    assert bench.round({}, {counter: 10}) == ""
    assert bench.round({}) == ""


def test_an_older_device_reports_only_that_it_throttles(bench):
    bench.smi.metrics |= dict.fromkeys(RESIDENCIES, "N/A") | {"throttle_status": True}
    bench.smi.metrics |= {"current_gfxclks": ["N/A"] * 8, "current_socket_power": "N/A"}
    bench.smi.metrics["average_socket_power"] = 300
    assert bench.round({"current_gfxclk": 1700}) == ""
    read = bench.monitor.take_conditions()
    assert read["slowed_by"] == {"throttled, cause not told": 1}
    assert read["gfx_clock_mhz"]["max"] == 1700
    assert read["power_w"]["max"] == 300
    assert read["not_read"] == {"slowdown counters": "the device does not tell them"}


def test_what_cannot_be_read_is_recorded():
    smi = FakeAmdSmi(absent=("amdsmi_get_gpu_process_list",))
    smi.refused["amdsmi_get_gpu_metrics_info"] = 2
    bench = Bench(smi)
    smi.metrics["accumulation_counter"] = 0
    assert bench.round({}) == ""
    assert bench.monitor.take_conditions() == {
        "not_read": {
            "GPU metrics": "AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported",
            "processes": "this amdsmi has no amdsmi_get_gpu_process_list",
        }
    }
    assert bench.monitor.current_values()["GPU metrics"].startswith(
        "not readable: AMDSMI_STATUS_NOT_SUPPORTED"
    )


def test_a_foreign_process_that_runs_between_our_samples():
    smi = FakeAmdSmi()
    smi.process(900, 0, 2 << 30, "sglang")
    bench = Bench(smi)
    assert bench.monitor.complaints() == [
        "process 900 (sglang) is on cuda:0 and holds 2.0 GiB",
        "cuda:0 is 100 % busy",
    ]
    smi.process(11, 0)
    assert bench.round({}) == ""
    smi.processes[0]["cu_occupancy"] = 38
    assert bench.round({}) == "process 900, not ours, ran on cuda:0 (38 compute units)"


def test_unknown_facts_about_a_process_are_left_out():
    smi = FakeAmdSmi()
    smi.process(900, "N/A", held="N/A", name="trainer")
    smi.process(901, "N/A", held="N/A", name="N/A")
    bench = Bench(smi)
    assert bench.monitor.complaints()[:2] == [
        "process 900 (trainer) is on cuda:0",
        "process 901 is on cuda:0",
    ]
    assert bench.round({}) == ""
    assert bench.monitor.take_conditions()["not_read"] == {"compute units by process": "not told"}


@pytest.mark.parametrize(("environment", "device", "node"), [
    ({}, "cuda:0", 1),
    ({}, "cuda:2", 5),
    ({"ROCR_VISIBLE_DEVICES": "2,0"}, "cuda:0", 5),
    ({"ROCR_VISIBLE_DEVICES": "GPU-3"}, "cuda:0", 3),
    ({"HIP_VISIBLE_DEVICES": "1"}, "cuda:0", 3),
    ({"CUDA_VISIBLE_DEVICES": "1"}, "cuda:0", 3),
    ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, "cuda:0", 5),
    ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "1"}, "cuda:0", 5),
])  # fmt: skip
def test_torch_numbers_visible_devices_in_the_order_of_the_kernel_driver(environment, device, node):
    smi = FakeAmdSmi(nodes=(5, 1, 3))
    monitor = open_amd(Platform("rocm", "gfx942", device), list, smi, environment)
    monitor.begin()
    monitor.sample()
    assert smi.asked == {node}


def test_devices_that_this_container_was_not_given_are_not_counted(monkeypatch):
    """An older library cannot tell them."""
    smi = FakeAmdSmi(nodes=(5, 1, 3))
    told = smi.amdsmi_get_gpu_kfd_info

    def some(processor_handle: Handle) -> dict[str, object]:
        return told(processor_handle) | ({"node_id": "N/A"} if processor_handle.value == 1 else {})

    monkeypatch.setattr(smi, "amdsmi_get_gpu_kfd_info", some)
    open_amd(MI300X, list, smi, {}).begin()
    older = FakeAmdSmi((5, 1), absent=("amdsmi_get_gpu_kfd_info", "amdsmi_get_gpu_enumeration_info"))
    open_amd(MI300X, list, older, {}).begin()
    assert (smi.asked, older.asked) == ({3}, {5})
