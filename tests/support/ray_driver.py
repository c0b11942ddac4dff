"""`python -m tests.support.ray_driver ADDRESS FOLDER CASES [NAME=VALUE...]`: a made-up run on a Ray cluster
whose agents only sleep. Prints what a driver logs; the values are for names of
harness.cluster.ray_cluster."""

import sys
import time
from pathlib import Path

from harness.cluster import driver, ray_cluster
from harness.cluster.agent import Answer, CaseOrder, Device, OpenedDevice, Order
from harness.cluster.execute import RunJob
from harness.cluster.ray_cluster import PoolGone
from harness.errors import HarnessError
from harness.results.journal import Journal
from harness.results.schema import DeviceUsed
from harness.run.device import DeviceFacts
from harness.run.execute import RunCases
from harness.run.plan import Request, RunPlan
from kernels.platform import named
from kernels.triton_runtime import CPU
from tests.support.simulated_pool import PROVENANCE, made_up_run, records

CASE_S = 0.6


class SleepingAgent:
    """As harness.cluster.ray_cluster.RayAgent, but it measures nothing. When it begins a case it writes a
    file beside `hold`; while the file `hold` is there it finishes none."""

    hold = Path()

    def __init__(self) -> None:
        import ray

        self.name = ray.get_runtime_context().get_node_id()[:6]

    def answer(self, id: str, order: Order) -> Answer:
        if isinstance(order, Device):
            facts = DeviceFacts(named("cpu"), PROVENANCE, None)
            used = DeviceUsed(name=self.name, type=order.type, host=self.name)
            return Answer(id, OpenedDevice(used, facts, CPU))
        assert isinstance(order, CaseOrder)
        self.hold.with_name(f"{self.name}.begun").touch()
        time.sleep(CASE_S)
        while self.hold.exists():
            time.sleep(0.05)
        return Answer(id, records(order, self.name, 3))

    def beat(self) -> None:
        pass


def main() -> int:
    address, folder, cases = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    for setting in sys.argv[4:]:
        name, _, value = setting.partition("=")
        setattr(driver if name == "LOOK_S" else ray_cluster, name, float(value))
    SleepingAgent.hold = folder.with_name(f"{folder.name}.hold")
    journal = (
        Journal(folder) if (folder / "run.json").exists() else Journal.create(folder, made_up_run(cases))
    )
    plan = RunPlan.of(journal.run(), Request())
    try:
        pool = ray_cluster.RayPool(address, agent=SleepingAgent)
        with (driving := driver.Driver(pool, lambda line: print(line, flush=True))):
            (type,) = driving.open()
            print("opened", flush=True)
            job = RunJob("run", type, 0, RunCases(plan, journal, lambda case, _: None), 0)
            driving.add([job])
            driving.run()
    except PoolGone as gone:
        print(f"error: {gone}", flush=True)
        return 1
    except HarnessError as error:
        print(f"error: {error}", flush=True)
        return error.exit_code
    print(f"left: {len(job.run.left)}", flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
