"""An agent: the device that it holds, the cases that it measures, the commands that it runs."""

import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from harness.campaign.execute import CommandDone, CommandOrder
from harness.campaign.execute import _environment as command_environment
from harness.cluster.agent import Agent, CaseOrder, Device, OpenedDevice, Order, ThisMachine, _ranges
from harness.cluster.ray_cluster import THREADS_ASKED, _environment
from harness.errors import NothingRan
from harness.machine.cpu_threads import ALLOWED
from harness.plan.select import choose_cases
from harness.results.schema import CaseDone, Cell
from harness.run.case import CaseMeasurer
from harness.run.device import device_lock
from harness.run.folder import planned_case
from harness.run.plan import Request, RunPlan
from kernels import OPS
from kernels.platform import Platform, detect
from tests.support.paths import ROOT
from tests.support.simulated_pool import made_up_run
from tests.support.workers_here import captured_here


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent()
    yield agent
    agent.release()


def obey(agent: Agent, order: Order) -> Any:
    return order.obey(agent)


def order_of(opened: OpenedDevice) -> CaseOrder:
    case = planned_case(choose_cases(OPS["mla_decode"], None, ["batch=1 ctx=64 heads=2"], "core", "")[0])
    run = made_up_run(1, ("torch.naive",)).model_copy(
        update={"cases": [case], "provenance": opened.facts.provenance, "per_case_s": 0.5}
    )
    return CaseOrder(RunPlan.of(run, Request(disturbed="keep")), 0.5, 1.0)


MINE = Device("mine", "mine", devices_on_machine=4, device="cpu")


def test_it_holds_its_device_and_measures_a_case_whole(agent, monkeypatch):
    made = Mock(wraps=CaseMeasurer)
    monkeypatch.setattr("harness.cluster.agent.CaseMeasurer", made)
    with captured_here():
        opened = obey(agent, MINE)
        assert isinstance(opened, OpenedDevice)
        assert opened.used.type == "mine" and opened.used.cpus == sorted(ALLOWED)
        assert opened.used.name == f"{opened.used.host}/cpu{_ranges(sorted(ALLOWED))}"
        with pytest.raises(NothingRan, match="is being measured by `"), device_lock(detect("cpu")):
            pass
        order = order_of(opened)
        records = obey(agent, order)
    assert isinstance(records, list) and made.call_args.args[-1] == 0.25
    assert {r.status for r in records if isinstance(r, Cell)} == {"ok"}
    (done,) = [r for r in records if isinstance(r, CaseDone)]
    assert (done.case, done.device) == (order.plan.record.cases[0].key, opened.used.name)
    assert records[-1] is done
    agent.release()
    with device_lock(detect("cpu")):
        pass


def test_a_command_has_the_device_meanwhile_and_its_files_come_back(agent, monkeypatch):
    with captured_here():
        opened = obey(agent, MINE)
    assert isinstance(opened, OpenedDevice)
    script = (
        "import pathlib, sys; from harness.run.device import device_lock; "
        "from kernels.platform import detect; print('held before')\n"
        "with device_lock(detect('cpu')): (pathlib.Path(sys.argv[1]) / 'a.txt').write_text('1')\n"
        "sys.exit(3)"
    )
    done = obey(agent, CommandOrder(["-c", script, "{out}"], 60))
    assert done == CommandDone(3, "held before\n", {"a.txt": b"1"})
    long = obey(agent, CommandOrder(["-c", "print('a' * 5000 + ' the end')"], 60))
    assert isinstance(long, CommandDone) and long.output.endswith("a the end\n") and len(long.output) == 4000
    with captured_here(), device_lock(detect("cpu")), pytest.raises(NothingRan, match="is being measured"):
        obey(agent, order_of(opened))
    with captured_here():
        assert isinstance(obey(agent, order_of(opened)), list), "it takes it again for the next case"
    with pytest.raises(NothingRan), device_lock(detect("cpu")):
        pass

    # One is killed at its deadline with all that it started.
    script = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(600)']); print(child.pid, flush=True); time.sleep(600)"
    )
    done = obey(agent, CommandOrder(["-c", script], 3))
    assert isinstance(done, CommandDone) and done.code is None
    assert not Path(f"/proc/{done.output.strip()}/exe").exists()

    started: list[subprocess.Popen] = []

    def interrupted(process: subprocess.Popen, **_: object) -> None:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr("subprocess.Popen.communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        obey(agent, CommandOrder(["-c", "import time; time.sleep(600)"], 60))
    assert started[0].wait(60) == -signal.SIGKILL, "it goes with its agent"


def test_an_agent_and_its_commands_are_shown_their_device_alone(agent, monkeypatch):
    """Variables of the driver's environment that choose devices have no effect."""
    for platform, shown in (
        (Platform("cuda", "sm_90", "cuda:1", uuid="GPU-11"), {"CUDA_VISIBLE_DEVICES": "GPU-11"}),
        (Platform("rocm", "gfx942", "cuda:1", uuid="GPU-22"), {"ROCR_VISIBLE_DEVICES": "GPU-22"}),
        (Platform("cuda", "sm_90", "cuda:0", uuid="MIG-33"), {"CUDA_VISIBLE_DEVICES": "MIG-33"}),
        (detect("cpu"), {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "4"}),
    ):
        agent.platform, agent.device = platform, Device("mine", "mine", threads=4)
        assert shown.items() <= command_environment(agent).items()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("GPU_DEVICE_ORDINAL", "0")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    variables = _environment()
    assert (
        not {"CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"} & {*variables}
        and variables["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    )
    assert variables["PYTHONPATH"].split(":")[0] == str(ROOT) and THREADS_ASKED not in variables
    monkeypatch.setattr("harness.cluster.agent.choose_device", lambda _: detect("cpu"))
    with pytest.raises(NothingRan, match="a device of type H200 is a GPU, but its agent sees none"):
        obey(agent, Device("gpu0", "H200", is_gpu=True))
    assert [_ranges(cores) for cores in ([0], [0, 1, 2, 8], [1, 3, 4], [])] == ["0", "0-2,8", "1,3-4", ""]


def test_on_this_machine_alone_an_order_is_obeyed_until_its_deadline(monkeypatch):
    """A campaign ends in time and its device is free then, even if a case would never end."""
    here = ThisMachine("mine", "cpu")
    (device,) = here.devices()
    assert (device.type, device.device) == ("mine", "cpu")
    with captured_here():
        here.send(device.id, device)
    (opened,) = here.wait(0.0)
    assert isinstance(opened.result, OpenedDevice) and opened.device == device.id, opened.error
    monkeypatch.setattr(CaseMeasurer, "measure", lambda *_: signal.pause())
    before = signal.getsignal(signal.SIGALRM)
    here.send(device.id, replace(order_of(opened.result), deadline_s=0.01))
    assert here.wait(0.0) == [] and signal.getsignal(signal.SIGALRM) is before
    here.send(device.id, CommandOrder(["-c", "import time; time.sleep(600)"], 0.01))
    assert [answer.result for answer in here.wait(0.0)] == [CommandDone(None, "", {})], "it is killed alone"
    here.stop(device.id)
    with device_lock(detect("cpu")):
        here.send(device.id, device)
    (said,) = here.wait(0.0)
    assert said.result is None and not said.lost
    assert said.error.startswith("device cpu is being measured by `")
    here.close()
