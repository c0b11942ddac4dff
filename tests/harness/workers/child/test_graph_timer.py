"""Calls recorded into one graph, on a virtual device (fake_cuda.py)."""

import gc

import pytest

from harness.workers.child.timers import GRAPH_S, MOST_CALLS, EventTimer, GraphTimer
from kernels.op import Unsupported
from tests.support.fake_cuda import GAP_S, Entry, FakeCuda

SAMPLE_S = 0.05


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def timer(cuda) -> GraphTimer:
    return GraphTimer(cuda, cuda.clock)


def entries(cuda: FakeCuda, *device_s: float, **options: object) -> list[Entry]:
    """One for each set of operands, called once before, as the bench does."""
    calls = [Entry(cuda, s, 50e-6, name=f"set {i}", **options) for i, s in enumerate(device_s)]
    for call in calls:
        call()
    return calls


@pytest.mark.parametrize("sets", [1, 3, 64])
@pytest.mark.parametrize("device_s", [2e-6, 40e-6, 3e-3])
def test_one_graph_holds_every_set_as_often_and_its_time_is_the_replay_s_over_its_calls(
    cuda, timer, sets, device_s
):
    calls = entries(cuda, *[device_s] * sets)
    program = timer.program(calls)
    cuda.executed.clear()
    program.step()
    assert cuda.executed == [call.name for call in calls] * (program.calls_per_step // sets)
    enough = program.calls_per_step * (device_s + GAP_S / sets) >= GRAPH_S * (1 - 1e-9)
    assert enough or program.calls_per_step > MOST_CALLS - sets
    assert program.calls_per_step <= max(MOST_CALLS, sets)
    assert program.calls_per_step == sets or (program.calls_per_step - sets) * device_s < GRAPH_S, (
        "no longer than it need be"
    )
    sample = timer.sample(program, SAMPLE_S)
    assert sample.seconds == pytest.approx(device_s + GAP_S / program.calls_per_step, rel=1e-9)
    assert sample.calls % program.calls_per_step == 0
    assert sample.host_seconds == pytest.approx(5e-6 / program.calls_per_step, rel=1e-3)
    assert not program.synchronises


def test_replays_are_queued_behind_the_sleep_too(cuda, timer):
    """A graph of one short call takes the host longer to launch than it runs."""
    program = timer._replaying(entries(cuda, 1e-6), 1)
    assert program.host_s > 1e-6 + GAP_S
    sample = timer.sample(program, SAMPLE_S)
    assert sample.seconds == pytest.approx(1e-6 + GAP_S, rel=1e-9)


class Stubborn(Entry):
    """A library that finds out that it is being captured, and refuses."""

    def __call__(self):
        if self.cuda.capturing is not None:
            raise ValueError("no workspace\nwhile capturing")
        super().__call__()


class Elsewhere(Entry):
    """Launches where a capture must not."""

    def __call__(self):
        with self.cuda.stream(self.cuda.default):
            super().__call__()


class Unseen(Entry):
    """Launches where a capture does not see it."""

    def __call__(self):
        if self.cuda.capturing is None:
            super().__call__()


REFUSED = [
    (Entry, "torch", "RuntimeError: called a synchronizing CUDA operation"),
    (Entry, "library", "RuntimeError: CUDA error: operation not permitted when stream is capturing"),
    (Stubborn, "", "ValueError: no workspace while capturing"),
    (Elsewhere, "", "RuntimeError: CUDA error: operation would make the legacy stream depend on a capture"),
    (Unseen, "", "UserWarning: The CUDA Graph is empty. This usually means that ..."),
]


@pytest.mark.parametrize(("kind", "waits", "reason"), REFUSED)
def test_what_cannot_be_captured_says_why_and_the_eager_calls_go_on(cuda, timer, kind, waits, reason):
    call = kind(cuda, 40e-6, 5e-6, waits=waits)
    call()
    with pytest.raises(Unsupported) as refused:
        timer.program([call])
    assert str(refused.value) == f"cannot be captured into a graph: {reason}"
    assert cuda.current is cuda.default
    assert cuda.debug_mode == 0
    assert cuda.capturing is None
    assert not cuda.captures_underway
    assert len(cuda.released) == (waits != "torch")  # which is found before anything is captured

    eager = EventTimer(cuda, cuda.clock)
    sample = eager.sample(eager.program([call]), SAMPLE_S)
    host_s = 5e-6 if call.waits else 0.0
    assert sample.seconds == pytest.approx(40e-6 + host_s, rel=1e-3)
    # And somebody else's capture. The allocator of pinned memory knows the failed graph, which must live.
    del refused
    gc.collect()
    cuda.pin_memory()
    other = timer.program(entries(cuda, 40e-6))
    assert timer.sample(other, SAMPLE_S).seconds == pytest.approx(40e-6, rel=0.01)
    cuda.pin_memory()


def test_all_captures_share_one_side_stream(cuda, timer):
    """torch keeps a workspace for each stream that it has seen."""
    for _ in range(3):
        timer.program(entries(cuda, 40e-6, 40e-6))
    with pytest.raises(Unsupported):
        timer.program([Stubborn(cuda, 40e-6, 5e-6)])
    assert cuda.streams == [timer.side]


def test_a_call_that_fails_by_itself_is_an_error_and_not_unsupported(cuda, timer):
    with pytest.raises(IndexError):
        timer.program([lambda: [][0]])
    assert cuda.current is cuda.default
