"""What torch's profiler saw of a call, from made-up events."""

from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from harness.workers.child.profile import summary


def event(name: str, us: float, device: DeviceType = DeviceType.CUDA, note: bool = False) -> SimpleNamespace:
    """One that took so long on its device, and 1000 us of the host."""
    return SimpleNamespace(
        name=name, device_type=device, is_user_annotation=note, self_cpu_time_total=1000.0,
        time_range=SimpleNamespace(elapsed_us=lambda: us),
    )  # fmt: skip


def test_kernels_are_those_of_the_device_the_largest_first_and_none_is_left_out_for_others():
    """Two calls: of kernels below 1 % of the time the total alone tells."""
    events = [event(f"k{i}", 10.0 + i) for i in range(12) for _ in range(2)]
    events += [event("tiny", 2.0), event("range", 500.0, note=True), event("host", 7.0, DeviceType.CPU)]
    of_gpu, of_cpu = summary(events, 2, "cuda"), summary(events, 2, "cpu")
    assert [k["name"] for k in of_gpu["kernels"]] == [f"k{i}" for i in reversed(range(12))]
    assert of_gpu["kernels"][0] == {"name": "k11", "us": 21.0, "count": 1.0}
    assert of_gpu["total_us"] == pytest.approx(sum(10.0 + i for i in range(12)) + 1.0)
    assert of_cpu == {"kernels": [{"name": "host", "us": 500.0, "count": 0.5}], "total_us": 500.0}
