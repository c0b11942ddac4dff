"""Commands on a real Ray cluster whose nodes are on this machine and have devices of different types."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from harness.results import load
from harness.results.journal import Journal
from tests.support.command_line import error_line
from tests.support.paths import ROOT, SUPPORT
from tests.support.ray_nodes import RayNodes

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")]

TINY = ["--impl", "torch.naive,torch.sdpa", "--case", "batch=1 ctx=64 heads=2", "--per-case", "1s"]
SPEC = """
[[step]]
name = "doctor"
command = "doctor"
options = { quick = true, json = "{out}/doctor.json" }

[[step]]
name = "everywhere"
command = "run"
ops = ["mla_decode"]
options = { impl = "torch.naive", case = ["batch=1 ctx=64 heads=2"], per-case = "1s" }

[[step]]
name = "again"
command = "doctor"
devices = ["right"]
options = { quick = true, json = "{out}/doctor.json" }
"""

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A head, and a node of each type. With one core the second node has its own folder of locks."""
    nodes = RayNodes()
    try:
        nodes.start("head")
        nodes.start("left", "left", 0)
        alone = {} if (os.cpu_count() or 1) > 1 else {"KERNEL_BENCH_LOCKS": str(nodes.temporary)}
        nodes.start("right", "right", 1, **alone)
        yield nodes
    finally:
        nodes.close()


@pytest.fixture
def command(cli, nodes: RayNodes) -> Command:
    return lambda *words: cli(*words, "--cluster", nodes.address, RAY_AUTH_MODE="disabled")


def test_a_run_on_one_type(command, tmp_path):
    done = command("run", "--op", "mla_decode", *TINY, "--device", "left", "--out", tmp_path / "run",
                   "--json", "-")  # fmt: skip
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert len(cells) == 2 and {cell["status"] for cell in cells} == {"ok"}
    frame = load(tmp_path / "run")
    assert frame["device"].nunique() == 1 and frame["host"].nunique() == 1
    (device,) = Journal(tmp_path / "run").devices()
    assert (device.type, device.cpus) == ("left", [0])
    # Ray would begin its lines so. A note of what else runs on the machine may name its processes too.
    assert "Traceback" not in done.stderr and "\n(raylet" not in done.stderr


@pytest.mark.parametrize(("words", "code", "said"), [
    ([], 2, "several types of devices: choose --device "),
    (["--device", "middle"], 3, "no device can be measured: there is none"),
    (["--cluster", "127.0.0.1:9"], 2, "no Ray cluster at '127.0.0.1:9': "),
])  # fmt: skip
def test_a_mistake_is_one_line(cli, nodes, tmp_path, words, code, said):
    cluster = ("--cluster", nodes.address, *words)
    done = cli(
        "run", "--op", "mla_decode", *TINY, *cluster, "--out", tmp_path / "run", RAY_AUTH_MODE="disabled"
    )
    assert said in error_line(done, code)
    assert not (tmp_path / "run").exists()


def test_a_campaign_on_both(command, tmp_path):
    (tmp_path / "both.toml").write_text(SPEC)
    done = command("campaign", tmp_path / "both.toml", "--budget", "10m", "--out", tmp_path / "here")
    assert done.returncode == 0, done.stdout + done.stderr
    here = tmp_path / "here"
    assert {path.name for path in here.iterdir()} == {"campaign.json", "left", "right"}
    for type in ("left", "right"):
        facts = json.loads((here / type / "doctor" / "doctor.json").read_text())
        assert facts["machine"]["platform"] == "cpu"
        frame = load(here / type / "mla_decode-everywhere")
        assert list(frame["status"]) == ["ok", "ok"], "the baseline and it"
    assert list(here.glob("*/again")) == [here / "right" / "again"]
    assert len(load(tmp_path / "here.zip")) == len(load(here))
    again = command("campaign", "--resume", here, "--budget", "2m")
    assert again.returncode == 0 and "batch=1" not in again.stdout, "nothing was left to do"


def test_kernels_are_compiled_on_its_cores(command, tmp_path):
    """With the op and the target that have the fewest configurations."""
    done = command("compile", "--op", "mha_prefill", "--target", "gfx950", "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["compiles"]
    assert rows and all(row["ok"] for row in rows)


def test_configurations_are_raced_on_a_device_and_stored_here(cli, nodes, tmp_path):
    done = cli(
        *("tune", "--op", "block_scale_gemm", "--impl", "plugin.chunked", "--device", "left"),
        *("--case", "m=4 n=512 k=256", "--budget", "5m", "--per-case", "1s", "--cluster", nodes.address),
        *("--out", tmp_path / "tuned", "--journal", tmp_path / "run", "--json", tmp_path / "rows.json"),
        RAY_AUTH_MODE="disabled", KERNEL_BENCH_PLUGINS=SUPPORT / "chunked_kernels.py",
        KERNEL_BENCH_TUNED=tmp_path, FAULTS="",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (device,) = Journal(tmp_path / "run").devices()
    assert device.type == "left"
    frame = load(tmp_path / "run")
    assert len(frame) > 2 and frame["config"].notna().all()
    (row,) = json.loads((tmp_path / "rows.json").read_text())["tuned"]
    stored = tmp_path / "tuned" / "cpu" / "plugin.chunked.json"
    assert stored.exists() == (row["config"] is not None), "only with a verdict"


LISTENING = """
import os
from harness.cluster.ray_cluster import RayPool
from tests.support.sockets import listening

pool = RayPool("auto")
print(len(pool.devices()), *sorted(set(listening(os.getpid()))))
pool.close()
"""


def test_a_ray_that_is_started_here_listens_to_this_machine_alone(nodes):
    environment = {name: value for name, value in nodes.environment.items() if name != "RAY_AUTH_MODE"}
    done = subprocess.run(
        [sys.executable, "-c", LISTENING], cwd=ROOT, capture_output=True, text=True, check=False,
        env=environment | {"KERNEL_BENCH_LOCKS": str(nodes.temporary)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "127.0.0.1"]
