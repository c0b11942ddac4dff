"""The callables: real kernels on buffers of their own, and a known handicap."""

from __future__ import annotations

import pytest

from tools import control_kernels
from tools.engines.callables import KERNELS, callables, prepare


@pytest.mark.parametrize("baseline", KERNELS)
def test_five_callables_of_which_three_are_one_kernel(baseline):
    names = callables(baseline)
    assert names == [baseline, f"{baseline} again", f"{baseline} +2%", *names[3:]]
    assert {*names[3:], baseline} == set(KERNELS)
    assert callables(baseline, quick=True) == names[:3]


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_is_prepared_in_buffers_of_its_own(kernel):
    first, second = (prepare(name).__self__ for name in callables(kernel)[:2])
    assert first.out.data_ptr() != second.out.data_ptr()
    assert first.out.equal(second.out)
    for name, tensor in first.operands.tensors().items():
        other = second.operands.tensors()[name]
        assert tensor.data_ptr() != other.data_ptr()
        assert tensor.shape == other.shape


def test_the_handicap_is_two_percent_of_the_call_itself(monkeypatch):
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-6
        return now[0]

    def call() -> None:
        now[0] += took

    monkeypatch.setattr(control_kernels.time, "perf_counter", clock)
    slower = control_kernels.slower_on_cpu(call)
    for took in (1.0, 3.0, 0.5):
        started = now[0]
        slower()
        assert now[0] - started == pytest.approx(1.02 * took, rel=1e-4)
