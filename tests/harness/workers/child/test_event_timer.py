"""Device time by events, on a virtual device that knows what is right (fake_cuda.py)."""

import pytest

from harness.workers.child.timers import MARGIN, MOST_SLEEP, MOST_STEPS, EventTimer, Program
from tests.support.fake_cuda import QUEUE, Entry, FakeCuda

SAMPLE_S = 0.05


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def timer(cuda) -> EventTimer:
    return EventTimer(cuda, cuda.clock)


def prepared(timer: EventTimer, *calls: Entry) -> Program:
    """As the bench does: each was called once before."""
    for call in calls:
        call()
    return timer.program(calls)


SHORT = [(5e-6, host_s) for host_s in (5e-6, 60e-6, 30e-3)]


@pytest.mark.parametrize(
    ("device_s", "host_s"), [*SHORT, (5e-6, 0.5), (80e-6, 80e-6), (3e-3, 30e-3), (0.3, 20e-6)]
)
def test_the_time_is_the_device_s_the_host_s_is_told_apart_and_sleeps_are_bounded(
    cuda, timer, device_s, host_s
):
    """By twice the time asked for and one launch; so a slow launcher gets fewer calls."""
    program = prepared(timer, Entry(cuda, device_s, host_s))
    assert not program.synchronises
    for _ in range(3):
        before, started = cuda.slept_s, cuda.now
        sample = timer.sample(program, SAMPLE_S)
        assert sample.seconds == pytest.approx(device_s, rel=1e-9)
        assert sample.host_seconds == pytest.approx(host_s, rel=1e-9)
        slept = cuda.slept_s - before
        assert slept <= 1.02 * (MOST_SLEEP * SAMPLE_S + MARGIN * host_s)
        assert cuda.now - started <= 1.2 * (slept + sample.seconds * (sample.calls + 1) + host_s) + 0.01
        if host_s < device_s * 3:  # it fills the time asked for and little more
            assert SAMPLE_S * (1 - 1e-9) <= sample.seconds * sample.calls <= 1.05 * SAMPLE_S + device_s


def test_one_untimed_call_comes_first_and_calls_rotate_on_from_turn_to_turn(cuda, timer):
    a, b = (Entry(cuda, s, 5e-6, name=n) for n, s in (("a", 1e-3), ("b", 3e-3)))
    program = prepared(timer, a, b)
    cuda.executed.clear()
    first = timer.sample(program, 3e-3)
    assert cuda.executed == ["a", *(["b", "a"] * first.calls)[: first.calls]]
    timer.sample(program, 3e-3)
    assert cuda.executed == (["a", "b"] * len(cuda.executed))[: len(cuda.executed)]


@pytest.mark.parametrize("waits", ["torch", "library"])
@pytest.mark.parametrize(("device_s", "host_s"), [(5e-6, 20e-6), (3e-3, 20e-6), (0.3, 1e-3), (5e-6, 30e-3)])
def test_who_synchronises_is_found_and_timed_with_its_host_time(cuda, timer, device_s, host_s, waits):
    program = prepared(timer, Entry(cuda, device_s, host_s, waits=waits))
    assert program.synchronises
    before = cuda.slept_s
    sample = timer.sample(program, SAMPLE_S)
    assert cuda.slept_s == before
    assert sample.seconds == pytest.approx(device_s + host_s, rel=1e-3)
    assert sample.host_seconds == pytest.approx(device_s + host_s, rel=0.1)


def test_who_is_slow_at_the_wrong_moment_is_not_taken_for_one_who_waits(cuda, timer):
    """The host is busy in the very call that shows whether it waits: after one by the bench, three alone."""
    busy = Entry(cuda, 5e-6, 10e-6, then=lambda calls: cuda.pause(0.03 if calls == 5 else 0.0))
    program = prepared(timer, busy)
    assert not program.synchronises
    assert timer.sample(program, SAMPLE_S).seconds == pytest.approx(5e-6, rel=1e-9)


def test_who_waits_now_and_then_gets_no_time_rather_than_one_with_host_time(cuda, timer):
    fickle = Entry(cuda, 5e-6, 10e-6, then=lambda calls: calls > 10 and cuda.wait_for_device(flagged=False))
    program = prepared(timer, fickle)
    assert not program.synchronises
    with pytest.raises(RuntimeError, match="longer to launch its calls than the device slept"):
        timer.sample(program, SAMPLE_S)


@pytest.mark.parametrize("launches", [4, 30, 300, 1000])
def test_a_full_queue_shortens_the_batch(cuda, timer, launches):
    program = prepared(timer, Entry(cuda, 5e-6 * launches, 4e-6 * launches, launches))
    assert not program.synchronises
    sample = timer.sample(program, SAMPLE_S)
    assert sample.seconds == pytest.approx(5e-6 * launches, rel=1e-9)
    assert QUEUE // launches // 3 <= program.most_ahead <= QUEUE // launches
    before = cuda.slept_s
    again = timer.sample(program, SAMPLE_S)
    assert again.seconds == pytest.approx(5e-6 * launches, rel=1e-9)
    assert cuda.slept_s - before <= 1.2 * MOST_SLEEP * SAMPLE_S, "what fits is remembered"


def test_a_sample_that_a_busy_host_disturbed_is_thrown_away(cuda, timer):
    disturbed = Entry(cuda, 5e-6, 10e-6, then=lambda calls: cuda.pause(0.0 if calls % 1009 else 0.02))
    program = prepared(timer, disturbed)
    for _ in range(5):
        sample = timer.sample(program, SAMPLE_S)
        assert sample.seconds == pytest.approx(5e-6, rel=1e-9)
        assert sample.host_seconds == pytest.approx(10e-6, rel=1e-9)
    assert program.most_ahead > MOST_STEPS, "one disturbance does not shorten the batches that follow"


@pytest.mark.parametrize("host_s", [100e-6, 5e-3])
def test_a_host_that_became_slower_gets_longer_sleeps(cuda, timer, host_s):
    call = Entry(cuda, 5e-6, 10e-6)
    program = prepared(timer, call)
    call.host_s = host_s
    sample = timer.sample(program, SAMPLE_S)
    assert (sample.seconds, sample.host_seconds) == pytest.approx((5e-6, host_s), rel=1e-9)


@pytest.mark.parametrize("cycles_per_s", [1e8, 1.7e9])
@pytest.mark.parametrize("slow_sleeps", [0, 1, 4])
def test_sleeps_are_as_long_as_meant_whatever_clock_counts_them(cycles_per_s, slow_sleeps):
    cuda = FakeCuda(cycles_per_s, slow_sleeps)
    timer = EventTimer(cuda, cuda.clock)
    assert timer.cycles_per_s == pytest.approx(cycles_per_s, rel=0.01)


def test_a_clock_that_runs_faster_than_when_it_was_calibrated(cuda, timer):
    """Say it was at half its rate then, longer than any number of tries."""
    program = prepared(timer, Entry(cuda, 5e-6, 10e-6))
    cuda.cycles_per_s *= 3
    sample = timer.sample(program, SAMPLE_S)
    assert sample.seconds == pytest.approx(5e-6, rel=1e-9)
    assert timer.cycles_per_s == pytest.approx(cuda.cycles_per_s, rel=0.01)
    assert sample.calls > 5 * MOST_STEPS


@pytest.mark.parametrize(("call_s", "pauses"), [(5e-6, 1), (5e-6, 2), (0.8, 99)])
def test_a_pause_of_the_host_after_a_sample_is_no_work_that_was_left(cuda, call_s, pauses, monkeypatch):
    """It stands between the two readings of its clock that tell such work."""
    timer = EventTimer(cuda, cuda.clock)
    program = prepared(timer, Entry(cuda, call_s, 10e-6))
    rest, left = cuda.synchronize, iter([0.014] * pauses)
    monkeypatch.setattr(cuda, "synchronize", lambda: (rest(), cuda.pause(next(left, 0.0))))
    sample = timer.sample(program, SAMPLE_S)
    assert sample.seconds == pytest.approx(call_s, rel=1e-9)
    assert call_s == 0.8 or next(left, None) is None, "of a long call it is a small part"


@pytest.mark.parametrize(
    ("here", "reason"),
    [(False, "it launches nothing on its stream"), (True, "its work went on for .* ms after")],
)
def test_work_on_a_stream_of_its_own_that_nobody_waits_for_is_no_time(cuda, timer, here, reason):
    """Events on the current stream end before it."""
    aside = cuda.Stream()
    little, much = Entry(cuda, 5e-6, 5e-6), Entry(cuda, 1e-3, 5e-6)

    def call() -> None:
        if here:
            little()
        with cuda.stream(aside):
            much()

    call()
    with pytest.raises(RuntimeError, match=reason):
        timer.sample(timer.program([call]), SAMPLE_S)
