"""A worker's device: torch's own must be the one that the run locked, watches and plans memory for."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import kernels
from harness.plan.entry import Entry
from harness.plan.memory import Rotation
from harness.plan.settings import Setting
from harness.run import ceilings
from harness.serving.replay.child import Rank
from harness.workers import environment
from harness.workers import process as process_module
from harness.workers import worker as worker_module
from harness.workers.child.bench import Bench
from harness.workers.child.device import other_device
from harness.workers.child.judge import Judge
from harness.workers.child.meter import Meter
from harness.workers.environment import worker_environment
from harness.workers.process import WorkerProcess
from harness.workers.worker import Deadlines, Worker
from kernels.platform import Platform

GIB = 1 << 30
UUID = "11223344-5566-7788-99aa-bbccddeeff01"
H100 = SimpleNamespace(
    major=9, minor=0, name="NVIDIA H100 80GB HBM3", total_memory=85017755648, uuid=UUID.upper()
)
PLANNED = Platform("cuda", "sm_90", "cuda:0", H100.name, memory=81559 << 20, uuid=f"GPU-{UUID}")
SLICE = Platform("cuda", "sm_90", "cuda:0", f"{H100.name} MIG 1g.10gb", memory=9984 << 20, uuid="MIG-77")
MI300X = SimpleNamespace(
    gcnArchName="gfx942:sramecc+:xnack-",
    name="AMD Radeon Graphics",
    total_memory=192 * GIB,
    uuid="30303030-3030-3030-3030-303030306162",
)
AMD = Platform(
    "rocm", "gfx942", "cuda:0", "AMD Instinct MI300X", memory=192 * GIB, uuid="GPU-00000000000000ab"
)


def like(gpu: SimpleNamespace, **facts: object) -> SimpleNamespace:
    return SimpleNamespace(**(vars(gpu) | facts))


OLD = SimpleNamespace(major=9, minor=0, name=H100.name, total_memory=H100.total_memory)
RERUN = UUID.replace("1", "2")
T4 = like(H100, name="Tesla T4", major=7, minor=5, total_memory=15 * GIB, uuid=RERUN)


@pytest.mark.parametrize(("gpu", "planned", "said"), [
    (H100, PLANNED, ""),
    (OLD, PLANNED, ""),
    (H100, Platform("cuda", "sm_90", "cuda:0", H100.name), ""),
    (like(OLD, name=SLICE.name, total_memory=9900 << 20), SLICE, ""),
    (like(H100, name=SLICE.name, total_memory=9900 << 20, uuid="of its GPU"), SLICE, ""),
    (like(OLD, name=SLICE.name), replace(SLICE, name=f"{H100.name} MIG-77", memory=0), ""),
    (MI300X, AMD, ""),
    (like(MI300X, uuid="00000000-0000-0000-0000-000000000000"), AMD, ""),
    (
        T4,
        PLANNED,
        f"it is sm_75, Tesla T4, gpu-{RERUN}, 15.0 GiB, to the driver sm_90, {H100.name}, GPU-{UUID}",
    ),
    (like(H100, uuid=RERUN), PLANNED, "to torch it is gpu-22223344"),
    (H100, SLICE, "to torch it is 79.2 GiB, to the driver 9.8 GiB"),
    (like(OLD, total_memory=60 * GIB), PLANNED, "to torch it is 60.0 GiB, to the driver 79.6 GiB"),
    (like(OLD, total_memory=9900 << 20), PLANNED, "to torch it is 9.7 GiB, to the driver 79.6 GiB"),
    (like(MI300X, uuid="30303030-3030-3030-3030-303030306163"), AMD, "gpu-00000000000000ac, to the"),
    (like(MI300X, gcnArchName="gfx950"), AMD, "to torch it is gfx950, to the driver gfx942"),
])  # fmt: skip
def test_another_device_is_refused_in_one_line(monkeypatch, gpu, planned, said):
    """What torch only calls a little otherwise is the device."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    line = other_device(gpu, planned.identity)
    assert said in line
    assert line.endswith("; name it by its UUID in CUDA_VISIBLE_DEVICES" if said else "")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    other = other_device(gpu, planned.identity)
    assert other.endswith("; unset CUDA_DEVICE_ORDER=FASTEST_FIRST" if said else "")
    assert bool(other) is bool(line) is bool(said)


@pytest.mark.parametrize(
    "ready",
    [
        lambda facts: Bench().hello("cuda", "cuda:0", 1, **facts),
        lambda facts: Judge().hello("cuda", "cuda:0", 1, **facts),
        lambda facts: Rank().hello("cuda", "cuda:0", 1, **facts),
        lambda facts: Meter().hello("cuda", "cuda:0", 1, **facts),
    ],
    ids=["bench", "judge", "replay", "meter"],
)
def test_no_worker_starts_on_another_device(monkeypatch, ready):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: like(H100, name="Tesla T4"))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    with pytest.raises(
        RuntimeError, match="cuda:0 is not the device that was planned for: to torch it is Tes"
    ):
        ready({"planned": PLANNED.identity})


def test_the_parent_tells_every_worker_what_it_planned(monkeypatch, tmp_path):
    """The run's, the judge's and the meter's."""
    asked = []

    def ask(request: str, deadline: float, **arguments: object) -> dict[str, str]:
        if request == "hello":
            asked.append((arguments["planned"], arguments["threads"]))
        return {"pinned": ""}

    process = SimpleNamespace(ask=ask, kill=list)
    process.hello = functools.partial(WorkerProcess.hello, process)
    for module in (worker_module, process_module, ceilings):
        monkeypatch.setattr(module, "WorkerProcess", lambda *arguments: process)
    impl = kernels.implementations("mla_decode")[0]
    row = Entry("a row", impl, Setting({"OMP_NUM_THREADS": "3"}), "eager")
    Worker([row], PLANNED, 1, Deadlines(), tmp_path).start()
    process_module.start_judge(PLANNED, 1, 1.0, tmp_path)
    with ceilings.meters(PLANNED, 1, 1):
        pass
    assert asked == [(PLANNED.identity, threads) for threads in (3, 1, 1)]


def test_a_new_worker_is_brought_to_where_the_lost_one_was(monkeypatch, tmp_path):
    process = Mock(alive=True, facts={"pinned": ""})
    process.ask.return_value = {"seconds": 1.0, "synchronises": False, "source": ""}
    process.hello = lambda platform, threads, deadline: process.ask("hello", deadline)
    monkeypatch.setattr(worker_module, "WorkerProcess", lambda *_: process)
    impl = kernels.implementations("mla_decode")[0]
    row, slow = (Entry(name, impl, Setting(), "eager", name == "slow") for name in ("row", "slow"))
    subject = Worker([row, slow], Platform("cpu", "x86"), 1, Deadlines(9.0, 1.0), tmp_path)
    subject.open(kernels.OPS["mla_decode"].case({"batch": 1, "ctx": 64}), {})
    for _ in range(2):
        subject.fresh(Rotation("serving", 2, 0, 0, True))
    subject.load({})
    for of in (row, slow):
        subject.ask(of, "sample")
    process.alive = False
    subject.ask(row, "sample")
    asked = " ".join(
        f"{name}:{deadline:g}" for name, deadline in (of.args for of in process.ask.call_args_list)
    )
    first, again = "hello:9 open:9 fresh:9 fresh:9 load:9", "hello:9 open:9 fresh:9 load:9"
    assert asked == f"{first} prepare:9 sample:1 prepare:9 sample:9 {again} prepare:9 sample:1"


@pytest.mark.parametrize(
    ("threads", "given", "bound"), [(2, {}, True), (3, {}, False), (2, {"OMP_PLACES": "cores"}, False)]
)
def test_threads_are_bound_where_each_has_a_core_and_nobody_else_binds_them(
    monkeypatch, threads, given, bound
):
    monkeypatch.setattr(environment, "cores", lambda: [[0], [2]])
    monkeypatch.setattr(environment.os, "environ", {})
    found = environment.thread_environment(Platform("cpu", "x86"), threads, given)
    assert found.pop("OMP_NUM_THREADS") == str(threads)
    assert found == ({"OMP_PROC_BIND": "close", "OMP_PLACES": "{0},{2}"} if bound else {})


def test_cuda_numbers_gpus_as_the_driver_does(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert worker_environment({})["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert worker_environment({})["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [environment.worker_threads(asked) for asked in (None, 5)] == [3, 5]
    folders = {environment.cache_environment("x" * n)["TRITON_CACHE_DIR"].split("/")[-2] for n in (90, 91)}
    assert [*map(len, folders)] == [53, 53], "as long as a folder's name may be, and each its own"
