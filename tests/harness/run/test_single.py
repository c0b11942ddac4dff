"""A benchmark of one kernel: disturbed samples are made again, and a refused kernel starts no process."""

import itertools

import pytest

from harness.machine.device import choose_device
from harness.run import single
from harness.timing.rounds import ENOUGH_ROUNDS
from tests.support.scripted_monitor import WHO, Scripted


class Worker:
    """A worker whose samples take 1, 2, 3 and so on seconds per call."""

    platform, threads = choose_device("cpu"), 1

    def __init__(self):
        self.seconds = itertools.count(1)

    def ask(self, entry, request, at_least_s):
        return {"seconds": next(self.seconds)}


def benchmark_of(folder, kernel, op="mla_decode", **how):
    how = {"cache": "warm", "launch": None} | how
    return single.benchmark(choose_device("cpu"), op, kernel, folder / "worker.log", **how)


def benchmark(monkeypatch, tmp_path, reasons):
    monitor = Scripted(reasons)
    monkeypatch.setattr(single, "monitor_for", lambda platform, pids: monitor)
    made = benchmark_of(tmp_path, "torch.sdpa", case="batch=1 ctx=4 heads=4")
    made.worker = Worker()
    return made, monitor


@pytest.mark.parametrize(("reasons", "samples", "said"), [
    (["", "heat", WHO, "", ""], [1, 4, 5], f"2 of 5 samples: {WHO}"),  # made again; the last reason
    ([""] * 3, [1, 2, 3], None),
    ([WHO] * 99, [ENOUGH_ROUNDS, ENOUGH_ROUNDS + 1], f"31 of 31 samples: {WHO}"),  # they count
])  # fmt: skip
def test_a_disturbed_sample_is_made_again_unless_most_are(monkeypatch, tmp_path, reasons, samples, said):
    made, monitor = benchmark(monkeypatch, tmp_path, reasons)
    assert [made.sample() for _ in samples] == samples
    assert monitor.log == ["begin", "sample", "end"] * samples[-1]
    assert made.facts(None).get("disturbed") == said


@pytest.mark.parametrize(
    ("kernel", "reason"), [("flashmla", "needs cuda; this "), ("torch.naive", "it is interpreted ")]
)
def test_no_judge_is_started_for_a_refused_kernel(monkeypatch, tmp_path, kernel, reason):
    def start(*arguments):
        raise AssertionError("a judge was started")

    monkeypatch.setattr("harness.run.checks.start_judge", start)
    monkeypatch.setattr(single.Implementation, "interpreted", lambda *_: True)
    made = benchmark_of(tmp_path, kernel, case="batch=1 ctx=4 heads=4")
    made.begin()
    made.close()
    assert (made.entry.status, made.entry.reason[: len(reason)]) == ("unsupported", reason)


def test_a_benchmark_has_its_own_boundary_and_launch(tmp_path):
    how = {"op": "block_scale_gemm", "case": "m=1 n=512 k=256"}
    for boundary in (None, "with_quant"):
        found = benchmark_of(tmp_path, "torch.bf16", boundary=boundary, launch="eager", **how)
        assert found.case.boundary == (boundary or "core")
    found.entry.check, found.entry.picked, found.entry.ran = {"ok": True}, "tuned", ["a hash"]
    found.entry.kernels = [{"name": "sum", "us": 0.5}]
    impl, here = found.entry.impl, choose_device("cpu")
    assert {*found.facts(1e-6)} - {*found.facts(None)} == {"tflops", "gbps"}
    assert found.facts(1e-6) == {
        "op": "block_scale_gemm", "case": found.case.text, "boundary": "with_quant",
        "implementation": "torch.bf16", "version": impl.version, "device": here.name, "arch": here.arch,
        "launch": "eager", "cache": "warm", "check": {"ok": True}, "kernels": ["sum"], "ran": ["a hash"],
        "picked": "tuned", "tflops": pytest.approx(0.262144), "gbps": pytest.approx(132.64),
    }  # fmt: skip
    with pytest.raises(single.UsageError, match="--launch graph needs a GPU"):
        benchmark_of(tmp_path, "torch.bf16", launch="graph", **how)
