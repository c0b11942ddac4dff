"""A real Ray cluster on this machine with agents that only sleep: nodes, agents, drivers and the head are
killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.results.journal import Journal
from harness.results.schema import CaseDone
from tests.support.paths import ROOT
from tests.support.ray_nodes import RayNodes

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")]

CASES = 30
QUICK = ["LOOK_S=0.5", "BEAT_S=0.5", "HANG_S=600", "START_S=600"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A head without a device, and a node that has one."""
    nodes = RayNodes()
    try:
        nodes.start("head")
        nodes.start("a", "core", 0)
        yield nodes
    finally:
        nodes.close()


@pytest.fixture
def drive(nodes: RayNodes, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts drivers of made-up runs. They are killed when the test ends."""
    drivers: list[subprocess.Popen[str]] = []

    def start(settings: list[str] = QUICK, name: str = "run", cases: int = CASES):
        command = [sys.executable, "-m", "tests.support.ray_driver", nodes.address, str(tmp_path / name)]
        drivers.append(
            subprocess.Popen(
                [*command, str(cases), *settings], cwd=ROOT, env=nodes.environment, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        return drivers[-1]

    yield start
    for driver in drivers:
        if driver.poll() is None:
            driver.kill()
        driver.communicate()


def finished(folder: Path) -> list[str]:
    try:
        return [r.case for r in Journal(folder).lines.records() if isinstance(r, CaseDone)]
    except Exception:  # it is not begun
        return []


def ends(driver: subprocess.Popen[str]) -> list[str]:
    """The lines that a driver has printed when it ends."""
    output, errors = driver.communicate(timeout=900)
    assert "Traceback" not in errors, errors
    return output.splitlines()


def begun(place: Path) -> int:
    """The number of nodes on which a case was begun."""
    return len(list(place.glob("*.begun")))


def until(condition: Callable[[], bool]) -> None:
    """Waits until a condition is true, for half an hour at most."""
    ends_s = time.monotonic() + 1800
    while not condition():
        assert time.monotonic() < ends_s, "it never came true"
        time.sleep(0.05)


def whole(folder: Path, cases: int = CASES) -> None:
    assert Counter(finished(folder)) == Counter(f"case {i}" for i in range(cases))


def test_a_node_joins_late_is_killed_in_a_case_and_comes_back(nodes, drive, tmp_path):
    """This test comes first: it needs that the second node is not there yet."""
    driver, hold = drive(), tmp_path / "run.hold"
    until(lambda: len(finished(tmp_path / "run")) > 3)
    for nodes_begun in (2, 3):
        hold.touch()
        nodes.start("b", "core", 1)
        until(lambda: begun(tmp_path) == nodes_begun)  # noqa: B023 - called at once
        if nodes_begun == 2:
            nodes.kill("b")
        hold.unlink()
    lines = ends(driver)
    assert driver.returncode == 0
    whole(tmp_path / "run")
    assert len(Journal(tmp_path / "run").devices()) == 2, "the first b finished nothing"
    # Where Ray sees late that the node died, an agent is started there once more, and the node is left out.
    left_out = {line for line in lines if line.startswith("left out: ")}
    assert all(line.endswith(": its agent is gone (its node died)") for line in left_out), lines
    lost = {line for line in lines if ": its agent is gone" in line} - left_out
    assert lost and all(line.endswith(": given to another device") for line in lost), lines
    joined = {line for line in lines if line.endswith(" has joined")}
    assert {*lines} - lost - left_out == {"opened", "left: 0"} | joined


@pytest.mark.parametrize(("sign", "said"), [
    (signal.SIGSTOP, ": no sign of life for 20 s, in case "), (signal.SIGKILL, ": its agent is gone "),
], ids=["stops answering", "is killed"])  # fmt: skip
def test_an_agent_that_fails_in_a_case_is_replaced(nodes, drive, tmp_path, sign, said):
    driver, hold = drive([*QUICK, "HANG_S=20"]), tmp_path / "run.hold"
    until(lambda: len(finished(tmp_path / "run")) > 4)
    hold.touch()
    until(lambda: begun(tmp_path) == 2)
    until(lambda: bool(nodes.agents("b")))
    agents = nodes.agents("b")  # those of an earlier driver, too, that have not ended
    for agent in agents:
        os.kill(agent, sign)
    hold.unlink()
    try:
        lines = ends(driver)
    finally:
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):  # Ray has done it
                os.kill(agent, signal.SIGKILL)
    whole(tmp_path / "run")
    assert any(said in line for line in lines), lines


def test_a_second_driver_waits_for_no_device_of_another_and_goes_on_where_that_was_killed(drive, tmp_path):
    first, hold = drive(), tmp_path / "run.hold"
    until(lambda: len(finished(tmp_path / "run")) > 6)
    hold.touch()
    until(lambda: begun(tmp_path) == 2)
    second = drive(["LOOK_S=0.5", "START_S=4"], "second")
    lines = ends(second)
    assert second.returncode == 3
    assert lines[-1].startswith("error: no device can be measured: ")
    assert "another driver has the device" in lines[-1]
    first.kill()
    first.wait()
    hold.unlink()
    before = finished(tmp_path / "run")
    assert 6 < len(before) < CASES
    assert ends(drive())[-1] == "left: 0"
    whole(tmp_path / "run")
    assert finished(tmp_path / "run")[: len(before)] == before


def test_a_head_that_is_gone_ends_it_in_one_line(nodes, drive, tmp_path):
    """This test comes last, because it ends the cluster. The driver looks for devices once: if the head died
    while it answers a look, Ray would wait for a minute and then end the process."""
    driver = drive(["LOOK_S=600", *QUICK[1:]], cases=200)
    until(lambda: len(finished(tmp_path / "run")) > 6)
    nodes.kill("head")
    lines = ends(driver)
    assert driver.returncode == 1
    assert lines[-1] == f"error: the cluster's head at {nodes.address} is gone"
    kept = finished(tmp_path / "run")
    assert 6 < len(kept) == len(set(kept)) < 200
