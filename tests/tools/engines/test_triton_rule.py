"""do_bench's rule on another clock: call for call what triton's own does."""

from __future__ import annotations

import pytest

from tools.engines import triton_rule

testing = pytest.importorskip("triton.testing")


class Device:
    """A device whose clock moves by what calls take, seconds, and nothing else. It is the driver too."""

    def __init__(self, call_s: float, clear_s: float) -> None:
        self.now, self.calls, self.did = 0.0, 0, ""
        self.call_s, self.clear_s = call_s, clear_s
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.now

            def elapsed_time(self, later: Event) -> float:
                return 1e3 * (later.at - self.at)

        self.Event = Event

    def call(self) -> None:
        # Every third call is slower, so that quantiles differ.
        self.did += "c"
        self.calls += 1
        self.now += self.call_s * (1.0 if self.calls % 3 else 1.5)

    def clear_cache(self, cache: object = None) -> None:
        self.did += "-"
        self.now += self.clear_s

    def synchronize(self) -> None:
        pass

    def get_device_interface(self) -> Device:
        return self

    def get_empty_cache_for_benchmark(self) -> None:
        pass


@pytest.mark.parametrize("call_s", [1e-5, 1.3e-3, 0.04, 0.7])
@pytest.mark.parametrize("clear_s", [1e-6, 8e-3])
def test_the_rule_is_tritons(monkeypatch, call_s, clear_s):
    theirs, ours = Device(call_s, clear_s), Device(call_s, clear_s)
    monkeypatch.setattr(testing.runtime.driver, "_active", theirs)
    expected = testing.do_bench(theirs.call, return_mode="all")
    times = triton_rule.do_bench(ours.call, ours.clear_cache, clock=lambda: ours.now)
    assert [1e3 * s for s in times] == pytest.approx(expected)
    assert ours.did == theirs.did
    assert 1e3 * triton_rule.median(times) == pytest.approx(testing.do_bench(theirs.call, quantiles=[0.5]))


@pytest.mark.parametrize(
    ("last_level", "size"), [(32 << 20, 64 << 20), (480 << 20, 256 << 20), (0, 256 << 20)]
)
def test_the_buffer_is_no_larger_than_tritons(last_level, size):
    clear = triton_rule.cache_clearer(last_level)
    assert clear.__self__.nbytes == size
