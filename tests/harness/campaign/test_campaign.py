"""A campaign on devices that are not there: its order, time, folder and archive, and how it goes on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.campaign import execute
from harness.campaign.archive import pack
from harness.campaign.execute import CampaignOutcome, CampaignRequest, run_campaign
from harness.campaign.spec import DEFAULTS, load_spec, steps, steps_of
from harness.cli.campaign import StepCommands
from harness.errors import UsageError
from harness.page.inputs import inputs
from harness.results import load
from harness.results.journal import Journal
from harness.results.read import run_folders
from harness.results.schema import Calibration
from tests.support.simulated_pool import SimulatedPool, records

SPEC = """
[[step]]
name = "doctor"
command = "doctor"
expected = "30s"

[[step]]
command = "run"
ops = ["mla_decode", "mha_prefill"]
options = { suite = "smoke", impl = "torch.*" }

[[step]]
command = "run"
ops = ["mla_decode"]
options = { suite = "r1-tp8", impl = "torch.*", per-case = "10s" }
repeats = 2
"""


class Shown:
    """What a display was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.begun: list[str] = []
        self.cases: list[str] = []
        self.outcome: CampaignOutcome | None = None
        self.log = self.lines.append

    def begin(self, driver: Any, counts: Any) -> None:
        self.counts = dict(counts)

    def task(self, task: Any, device: str, driver: Any) -> None:
        self.begun.append(task.lane)

    def case(self, step: str, run: Any, case: Any, records: Sequence[Any]) -> None:
        self.cases.append(f"{step}: {case.key}")

    def command(self, step: str, code: int | None, output: str) -> None:
        self.cases.append(step)

    def end(self, outcome: CampaignOutcome) -> None:
        self.outcome = outcome


Campaign = Callable[..., tuple[int, Shown]]


@pytest.fixture
def campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Campaign:
    (tmp_path / "spec.toml").write_text(SPEC)

    def run(pool: SimulatedPool, budget_s: float = 1e5, resume: bool = False, file: str = "spec.toml"):
        shown = Shown()
        monkeypatch.setattr(execute, "Driver", lambda *a, **k: Driver(*a, **k, clock=pool.clock))
        monkeypatch.setattr(execute.time, "monotonic", pool.clock)
        request = CampaignRequest(str(tmp_path / file), budget_s, tmp_path / "here", resume, pool.now)
        return run_campaign(pool, request, StepCommands(), shown), shown

    Driver = execute.Driver
    return run


def ten_seconds(device: str, case: str) -> float:
    return 10.0


def test_the_most_valuable_first_and_ops_in_turn(campaign, tmp_path):
    code, shown = campaign(SimulatedPool({"a": "cpu"}, ten_seconds))
    assert code == 0 and shown.counts == {"cpu": 1}
    assert shown.begun[0] == "doctor"
    smoke = shown.begun[1:12]
    assert Counter(smoke) == {"mla_decode-smoke": 5, "mha_prefill-smoke": 6}
    assert smoke[:4] == ["mla_decode-smoke", "mha_prefill-smoke"] * 2
    assert Counter(shown.begun[12:]) == {"mla_decode-r1-tp8-1": 8, "mla_decode-r1-tp8-2": 8}
    assert [(step.name, step.done) for step in shown.outcome.steps] == [
        ("doctor", 1), ("mla_decode-smoke", 5), ("mha_prefill-smoke", 6),
        ("mla_decode-r1-tp8-1", 8), ("mla_decode-r1-tp8-2", 8),
    ]  # fmt: skip
    names = {path.name for path in (tmp_path / "here").iterdir()}
    assert names == {"campaign.json", *(step.name for step in shown.outcome.steps)}
    assert json.loads((tmp_path / "here/doctor/done.json").read_text())["code"] == 0


def test_it_ends_in_time_whatever_cases_take(campaign):
    """Longer than expected, that is; what is running then is cut off."""
    pool = SimulatedPool({"a": "cpu"}, lambda d, c: 47.0)
    code, shown = campaign(pool, budget_s=300.0)
    assert code == 0 and pool.now <= 300.0
    assert 0 < sum(step.done for step in shown.outcome.steps) < 10


def test_what_was_killed_goes_on_and_measures_the_rest(campaign, tmp_path):
    _, first = campaign(SimulatedPool({"a": "cpu"}, ten_seconds), budget_s=200.0)
    assert 3 < len(first.cases) < 20
    assert not (tmp_path / "here/mla_decode-r1-tp8-2").exists(), "nothing of it was measured"
    _, then = campaign(SimulatedPool({"a": "cpu"}, ten_seconds), resume=True)
    assert Counter([*first.cases, *then.cases]).most_common(1)[0][1] == 1
    assert len(first.cases) + len(then.cases) == 1 + 5 + 6 + 8 + 8
    assert load(tmp_path / "here").groupby(["run", "case"]).ngroups == 27
    with pytest.raises(UsageError, match="holds a campaign: --resume "):
        campaign(SimulatedPool({"a": "cpu"}, ten_seconds))


def test_types_of_devices_have_folders_of_their_own(campaign, tmp_path):
    pool = SimulatedPool({"a": "epyc", "b": "xeon", "c": "xeon"}, ten_seconds)
    code, shown = campaign(pool)
    assert code == 0 and shown.counts == {"epyc": 1, "xeon": 2}
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"campaign.json", "epyc", "xeon"}
    frame = load(tmp_path / "here")
    assert set(frame["device"]) == {"a", "b", "c"}
    assert Counter(frame.groupby(["run", "case", "impl", "device"]).size()) == {1: len(frame)}
    assert set(frame[frame["run"].str.contains("smoke")]["op"]) == {"mla_decode", "mha_prefill"}


def test_time_is_kept_for_the_last_calibration(campaign, tmp_path):
    _, shown = campaign(SimulatedPool(dict.fromkeys("ab", "cpu"), ten_seconds), budget_s=120.0)
    (folder,) = [f for f in run_folders(tmp_path / "here") if f.name == "mha_prefill-smoke"]
    assert {c.when for c in Journal(folder).calibrations()} == {"first", "last"}
    assert any(step.done < step.cases for step in shown.outcome.steps)


def test_a_step_for_devices_that_are_not_there_says_so(campaign, tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC + 'devices = ["H300"]\n')
    _, shown = campaign(SimulatedPool({"a": "cpu"}, ten_seconds))
    assert "left out: mla_decode-r1-tp8-1: of H300 there is none, but cpu" in shown.lines


@pytest.mark.parametrize(("devices", "joins"), [("ab", {}), ("abc", {"b": 60.0, "c": 90.0})])
def test_devices_of_a_type_are_calibrated_before_and_after(campaign, tmp_path, devices, joins):
    campaign(SimulatedPool(dict.fromkeys(devices, "cpu"), ten_seconds, joins=joins))
    name = "mla_decode-r1-tp8-2" if joins else "mha_prefill-smoke"
    (folder,) = [folder for folder in run_folders(tmp_path / "here") if folder.name == name]
    made = Journal(folder).calibrations()
    seen = Counter((c.device, c.when) for c in made)
    assert seen == {(device, when): 1 for device in devices for when in ("first", "last")}
    assert all(isinstance(c, Calibration) and c.time_us == 1000.0 for c in made)


def test_what_broke_stays_recorded_until_it_is_measured_again(campaign, tmp_path, monkeypatch):
    """A resume that reaches none of it takes nothing away."""
    crash = {"status": "crashed", "time_us": None}

    def crashing(*given: Any) -> list[Any]:
        made = records(*given)
        return [made[0].model_copy(update=crash), *made[1:]]

    monkeypatch.setattr("tests.support.simulated_pool.records", crashing)
    code, _ = campaign(SimulatedPool({"a": "cpu"}, ten_seconds))
    before = load(tmp_path / "here")
    assert code == 1 and (before["status"] == "crashed").sum() == 27
    campaign(SimulatedPool({"a": "cpu"}, ten_seconds), budget_s=30.0, resume=True)
    assert len(load(tmp_path / "here")) == len(before)


def test_its_archive_is_read_as_the_folder_it_was_and_leaves_the_last_steps_out(campaign, tmp_path):
    _, shown = campaign(SimulatedPool({"a": "cpu"}, ten_seconds))
    archive = shown.outcome.archive
    assert archive.file == tmp_path / "here.zip" and archive.left_out == []
    assert archive.size == archive.file.stat().st_size
    carried = tmp_path / "elsewhere" / "carried.zip"
    carried.parent.mkdir()
    carried.write_bytes(archive.file.read_bytes())
    there, here = load(carried), load(tmp_path / "here")
    assert len(there) == len(here) > 50 and (there["time_us"] == here["time_us"]).all()
    assert run_folders(carried / "mla_decode-smoke") == [carried / "mla_decode-smoke"]
    assert len(inputs([str(carried)]).runs) == len(run_folders(tmp_path / "here")) == 4

    names = [step.name for step in shown.outcome.steps]
    small = pack(tmp_path / "here", names, most=int(0.7 * archive.size))
    assert small.size <= 0.7 * archive.size and small.left_out == names[::-1][: len(small.left_out)] != []
    assert len(load(small.file)) < len(here)
    carried.write_bytes(carried.read_bytes()[:-200])
    with pytest.raises(UsageError, match="cannot read "):
        load(carried)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "rocm"])
def test_default_campaigns_are_what_their_commands_take(kind: str):
    commands = StepCommands()
    made = steps(load_spec(DEFAULTS / f"{kind}.toml"))
    for step in made:
        commands.check(step)
    if kind != "cpu":  # what users ask for comes before what proves the suite
        assert [step.command for step in made][:5] == ["run"] * 4 + ["doctor"]
    assert {step.op for step in made if step.command == "run"} == {
        "block_scale_gemm", "fused_moe", "mla_decode", "mha_prefill",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "step: is missing"),
        ("step = 3", "step: "),
        ("[[step]]\ncommand = 'fly'", "step.0.command: "),
        ("[[step]]\ncommand = 'run'\nsuite = 'smoke'", "step.0.suite: no such key"),
        ("[[step]]\ncommand = 'run'\nops = ['mla']", "unknown op 'mla'; ops: "),
        ("[[step]]\ncommand = 'run'\nrepeats = 0", "step.0.repeats: "),
        ("[[step]]\ncommand = 'run'\nname = '../up'", "step.0.name: "),
        ("[[step]]\ncommand = 'run'\nshare = 0.1", "leave out share"),
        ("[[step]]\ncommand = 'doctor'\nops = ['mla_decode']", "doctor takes no ops"),
        ("[[step]]\ncommand = 'run'\noptions = { out = 'x' }", "leave out the option out"),
        ("[[step]]\ncommand = 'run'\noptions = { suit = 'smoke' }", "step block_scale_gemm-smoke: No"),
        ("[[step]]\ncommand = 'run'\n[[step]]\ncommand = 'run'", "two steps are called"),
        ("[[step]\ncommand", "cannot read "),
        ("[[step]]\ncommand = 'doctor'\nexpected = 'soon'", "cannot read expected 'soon'"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_one_line(tmp_path, text: str, said: str):
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        for step in steps_of(str(file), ()):
            StepCommands().check(step)
    assert said in str(error.value) and "\n" not in str(error.value)
