"""A campaign on simulated devices: its order, time, folder and archive, and how it is resumed."""

import io
import json
import re
import shutil
import zipfile
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.campaign import execute
from harness.campaign.execute import CommandDone, CommandJob, JobMaker, pack, run_campaign
from harness.campaign.plan import Step, steps_of
from harness.cli.campaign import read_step
from harness.cli.campaign_display import CampaignTables
from harness.cluster.ray_cluster import PoolGone
from harness.errors import FAILED, NOTHING_RAN, OK, UsageError
from harness.page.assemble import inputs
from harness.paths import ROOT, option_words
from harness.results import load
from harness.results.journal import Journal
from harness.results.read import run_folders
from kernels.platform import named
from tests.support.simulated_pool import SimulatedPool, pool, records

HERE = Path(__file__).parent
SPEC = (HERE / "spec.toml").read_text()


class Shown:
    """What a display was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.begun: list[str] = []
        self.cases: list[str] = []
        self.outcome: execute.CampaignOutcome | None = None
        self.log = self.lines.append
        self.begin = lambda driver, counts: setattr(self, "counts", dict(counts))
        self.task = lambda task, device, driver: self.begun.append(task.job)
        self.case = lambda run, case, records: self.cases.append(f"{run.id}: {case.key}")
        self.command = lambda step, code, output: self.cases.append(step)
        self.finish = lambda outcome: setattr(self, "outcome", outcome)


Campaign = Callable[..., tuple[int, Shown]]


@pytest.fixture
def campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Campaign:
    (tmp_path / "spec.toml").write_text(SPEC)

    def run(
        pool: SimulatedPool, budget_s: float = 1e5, resume: bool = False, name: str = "here", to=Shown, **more
    ):
        monkeypatch.setattr(execute, "Driver", lambda *a, **k: Driver(*a, **k, clock=pool.clock))
        monkeypatch.setattr(execute.time, "monotonic", pool.clock)
        shown = to()
        folder = tmp_path / name
        goes_on = str(folder) if resume else None
        request = execute.CampaignRequest(
            str(tmp_path / "spec.toml"), f"{budget_s}s", resume=goes_on, threads=3
        )
        return run_campaign(pool, request, folder, pool.now, read_step, shown, **more), shown

    Driver = execute.Driver
    return run


def campaigns() -> dict[str, tuple[SimulatedPool, float]]:
    """By name: the pool, and the budget in seconds."""
    return {
        "the most valuable first, ops in turn": (pool("a"), 1e5),
        # What is running then is cut off.
        "cases take longer than expected": (pool("a", lambda device, case: 47.0), 300.0),
        "two devices, calibrated before and after": (pool("ab"), 1e5),
        "two join late and are calibrated, too": (pool("abc", joins={"b": 60.0, "c": 90.0}), 1e5),
        "time is kept for the last calibration": (pool("ab"), 120.0),
        "types have folders of their own": (
            SimulatedPool({"a": "epyc", "b": "xeon", "c": "xeon"}, lambda device, case: 10.0),
            1e5,
        ),
    }


def test_it_concludes_from_its_own_runs(campaign, tmp_path):
    """On an H200 it is written to results/h200, where runs of earlier commits lie."""
    shutil.copytree(ROOT / "results/epyc-zen4-2core/mla_decode-smoke", tmp_path / "here" / "earlier")
    told: list[tuple[Path, list[Path]]] = []
    campaign(pool("a"), conclude=lambda *what: told.append(what))
    ((folder, runs),) = told
    assert folder == tmp_path / "here"
    assert {*runs} == {*run_folders(folder)} - {folder / "earlier"}


def test_what_becomes_of_campaigns_is_as_committed(campaign, tmp_path, snapshot):
    (tmp_path / "spec.toml").write_text(
        SPEC + '[[step]]\nname = "elsewhere"\ncommand = "run"\nops = ["mla_decode"]\ndevices = ["H300"]\n'
    )
    lines = []
    for name, (devices, budget_s) in campaigns().items():
        code, shown = campaign(devices, budget_s, name=name)
        assert devices.now <= budget_s and devices.openings[-1].threads == 3
        told = f"{dict(shown.counts)}: exit code {code} after {devices.now:g} s"
        lines += [f"=== {name}", told, *shown.lines, f"begun: {', '.join(shown.begun)}"]
        lines += [f"{step.name}: {step.done} of {step.cases}" for step in shown.outcome.jobs]
        for folder in run_folders(tmp_path / name):
            made = sorted(f"{c.device} {c.when}" for c in Journal(folder).calibrations())
            lines.append(f"{folder.relative_to(tmp_path / name)} calibrated: {', '.join(made)}")
            frame = load(folder)
            assert not frame.duplicated(["case", "impl"]).any()
        lines.append("")
    snapshot(HERE / "snapshots" / "campaigns.txt", "\n".join(lines))
    (done,) = (tmp_path / "the most valuable first, ops in turn").glob("doctor/done.json")
    told = json.loads(done.read_text())
    assert (told["code"], told["arguments"]) == (0, ["-m", "harness", "doctor"])


@pytest.mark.parametrize(("code", "is_done"), [(0, True), (1, True), (None, False)])
def test_a_command_that_was_killed_at_its_time_is_not_done(tmp_path, code, is_done):
    """It has longer in a longer campaign. What it had written by then is kept."""
    by: Any = SimpleNamespace(used=SimpleNamespace(name="a"), facts=SimpleNamespace(provenance={}))
    job = CommandJob("doctor", "cpu", 0, tmp_path, ["-m", "harness", "doctor"], 10.0, lambda *_: None)
    job.take(job.waiting[0], CommandDone(code, "said", {"out.txt": b"1"}), by, 10.0)
    assert (tmp_path / "out.txt").read_bytes() == b"1"
    again = replace(job, waiting=deque())
    assert (again.done, len(again.waiting)) == ((1, 0) if is_done else (0, 1))


def test_what_was_killed_goes_on_and_measures_the_rest(campaign, tmp_path):
    _, first = campaign(pool("a"), budget_s=200.0)
    assert 3 < len(first.cases) < 20
    assert not (tmp_path / "here/mla_decode-r1-tp8-2").exists(), "nothing of it was measured"
    _, then = campaign(pool("a"), resume=True)
    assert Counter([*first.cases, *then.cases]).most_common(1)[0][1] == 1
    assert len(first.cases) + len(then.cases) == 1 + 6 + 6 + 8 + 8
    assert load(tmp_path / "here").groupby(["run", "case"]).ngroups == 28
    with pytest.raises(UsageError, match="holds a campaign: --resume "):
        campaign(pool("a"))


def test_where_the_cluster_is_gone_it_says_how_to_go_on(campaign, tmp_path, monkeypatch):
    devices = pool("a")
    wait = devices.wait

    def gone(timeout_s: float) -> Any:
        if len(devices.measured) == 3:
            raise PoolGone("its head is gone")
        return wait(timeout_s)

    monkeypatch.setattr(devices, "wait", gone)
    said = f"its head is gone; finished cases are recorded, --resume {tmp_path / 'here'} measures the rest"
    with pytest.raises(PoolGone, match=f"^{re.escape(said)}$"):
        campaign(devices)
    assert load(tmp_path / "here").groupby(["run", "case"]).ngroups == 2


def crashing(*given: Any, status: str = "crashed") -> list[Any]:
    made = records(*given)
    return [made[0].model_copy(update={"status": status, "time_us": None}), *made[1:]]


def test_what_it_prints_is_as_committed(campaign, tmp_path, monkeypatch, snapshot):
    ends = {"batch=4 ": "crashed", "batch=2 ": "checked", "batch=1 ": "unsupported"}

    def some_crash(*given: Any) -> list[Any]:
        status = next((ends[of] for of in ends if of in given[0].plan.record.cases[0].key), "")
        return crashing(*given, status=status) if status else records(*given)

    monkeypatch.setattr("tests.support.simulated_pool.records", some_crash)
    monkeypatch.setattr(execute, "pack", lambda *given: pack(*given, most=pack(*given).size - 1))
    monkeypatch.setattr("harness.report.terminal.WIDTH", 400)  # the folder is as long as it likes
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    devices = pool("ab", lambda device, case: 47.0, slower={"b": 1.3})
    _, shown = campaign(devices, 600.0, to=lambda: CampaignTables(False, 600.0))
    for code in (None, 1):
        shown.command("doctor", code, "two lines,\nof which this\n\n")
    campaign(pool("a"), 60.0, name="of one device", to=lambda: CampaignTables(False, 60.0))
    campaign(pool("a"), 20.0, name="too short", to=lambda: CampaignTables(False, 20.0))
    text = f"{err.getvalue()}\n{out.getvalue()}".replace(str(tmp_path), "FOLDER")
    snapshot(HERE / "snapshots" / "printed.txt", text)


def test_what_broke_stays_recorded_until_it_is_measured_again(campaign, tmp_path, monkeypatch):
    """Records of broken cases stay where a resumed campaign has no time to measure them again."""
    monkeypatch.setattr("tests.support.simulated_pool.records", crashing)
    code, _ = campaign(pool("a"))
    before = load(tmp_path / "here")
    assert code == 1 and (before["status"] == "crashed").sum() == 28
    told: list[list[Path]] = []
    code, shown = campaign(
        pool("a"), budget_s=30.0, resume=True, conclude=lambda folder, runs: told.append(runs)
    )
    assert code == 1 and sum(step.statuses.get("crashed", 0) for step in shown.outcome.jobs) == 28
    assert [*map(sorted, told)] == [sorted(run_folders(tmp_path / "here"))]
    assert len(load(tmp_path / "here")) == len(before)
    monkeypatch.setattr("tests.support.simulated_pool.records", records)
    campaign(pool("a"), resume=True)
    assert set(load(tmp_path / "here")["status"]) == {"ok"}


def test_a_case_that_its_device_could_not_do_fails_it(campaign):
    """No row records the failure, and all rows that there are have the status ok."""

    def takes(device: str, case: str) -> float | str:
        return "fails" if "batch=128" in case else 10.0

    code, shown = campaign(pool("a", takes))
    assert code == 1
    assert shown.outcome and all({*step.statuses} <= {"ok", "done"} for step in shown.outcome.jobs)


def test_a_whole_command_has_its_share_or_the_least_that_is_worth_starting_it(tmp_path):
    for share, budget_s, given_s in ((None, 3600, 60), (0.1, 3600, 360), (0.1, 120, 30)):
        assert Step("x", "doctor", 0, "", (), share=share).wall_s(budget_s) == pytest.approx(given_s)
    given = {"seed": 0, "budget": "{budget}", "quiet": False, "json": True, "case": ["a", "b"]}
    options = option_words(given)
    assert options == ["--seed", "0", "--budget", "{budget}", "--json", "--case", "a", "--case", "b"]
    step = Step("x", "doctor", 0, "", options[2:4])
    types = {"cpu": [SimpleNamespace(facts=None)]}
    whole = JobMaker(types, [], 1e3, read_step, tmp_path, True, Shown())
    (job,) = whole.jobs(step, "x", "cpu")
    order = job.order(job.waiting[0], 1e3)
    assert (order.arguments[-1], job.wall_s, order.deadline_s) == ("48s", 60.0, 120.0), "most is measuring"
    job.folder.mkdir()
    for code, statuses in ((OK, {"ok": 1}), (FAILED, {"error": 1}), (NOTHING_RAN, {})):
        job.file.write_text(json.dumps({"code": code}))
        assert job.statuses == statuses


@pytest.mark.parametrize("command", ["run", "tune"])
def test_a_step_that_was_begun_goes_on_with_its_own_plan(tmp_path, command):
    """What a run's plan decides is not given again; how long its cases are measured is."""
    options = "--op mla_decode --impl torch.* --suite smoke --launch eager --per-case 5s"
    read = read_step(Step("x", command, 0, "mla_decode", options.split()))
    request = read if command == "tune" else read(named("cpu"))
    assert execute._into(request, tmp_path) == replace(request, out=str(tmp_path))
    (tmp_path / "run.json").touch()
    planned = {"impl": None, "suite": None, "launch": None}
    assert execute._into(request, tmp_path) == replace(request, **planned, resume=str(tmp_path), retry=True)


def test_its_archive_is_read_as_the_folder_it_was_and_leaves_the_last_steps_out(campaign, tmp_path):
    _, shown = campaign(pool("a"))
    archive = shown.outcome.archive
    assert archive.file == tmp_path / "here.zip" and archive.left_out == []
    assert archive.size == archive.file.stat().st_size
    carried = tmp_path / "elsewhere" / "carried.zip"
    carried.parent.mkdir()
    carried.write_bytes(archive.file.read_bytes())
    there, here = load(carried), load(tmp_path / "here")
    assert len(there) == len(here) > 50 and (there["time_us"] == here["time_us"]).all()
    assert run_folders(carried / "mla_decode-smoke") == [carried / "mla_decode-smoke"]
    assert len(inputs([str(carried)])) == len(run_folders(tmp_path / "here")) == 4

    names = [step.name for step in shown.outcome.jobs]
    (tmp_path / "here" / "mine.txt").write_text("of no step")
    for most, left_out in ((archive.size, []), (archive.size - 1, names[-1:]), (1, names[::-1])):
        small = pack(tmp_path / "here", names, most)
        assert small.left_out == left_out
        with zipfile.ZipFile(small.file) as packed:
            folders = {name.partition("/")[0] for name in packed.namelist()}
        assert folders == {"campaign.json", "SHA256SUMS", *names} - {*left_out}
    files = {"a/x": "a", "h200/a-2/x": "a-2", "a-triton.split_kv/x": "a", "ab/x": "", "tuned/x": "tuned"}
    assert {name: execute.step_of(name, ["a", "a-2"]) for name in files} == files
    carried.write_bytes(carried.read_bytes()[:-200])
    with pytest.raises(UsageError, match="cannot read "):
        load(carried)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "rocm"])
def test_default_campaigns_are_what_their_commands_take(kind: str):
    made = steps_of(None, [kind])
    for step in made:
        read_step(step)
        assert step.is_for("a type", kind) and not step.is_for("a type", "another")
    if kind != "cpu":  # what users ask for comes before what proves the suite
        assert [step.command for step in made][:5] == ["run"] * 4 + ["doctor"]
    # In all boundaries they would take 11 of 25 minutes on a GPU, and the model's own cases the rest.
    assert all("core" in step.arguments for step in made if step.name.endswith("-smoke"))
    assert {step.op for step in made if step.command == "run"} == {
        "block_scale_gemm", "fused_moe", "mla_decode", "mha_prefill",
    }  # fmt: skip


@pytest.mark.parametrize(("text", "said"), [
    ("", "step: is missing"),
    ("step = 3", "step: "),
    ("[[step]]\ncommand = 'fly'", "step.0.command: "),
    ("[[step]]\ncommand = 'run'\nsuite = 'smoke'\nop = 'x'", "step.0.suite: no such key (and 1 more)"),
    ("[[step]]\ncommand = 'run'\nops = ['mla']", "unknown op 'mla'; did you mean mla_decode"),
    ("[[step]]\ncommand = 'run'\nrepeats = 0", "step.0.repeats: "),
    ("[[step]]\ncommand = 'run'\nname = '../up'", "step.0.name: "),
    ("[[step]]\ncommand = 'run'\nshare = 0.1", "leave out share"),
    ("[[step]]\ncommand = 'doctor'\nops = ['mla_decode']", "doctor takes no ops"),
    ("[[step]]\ncommand = 'run'\noptions = { out = 'x' }", "leave out the option out"),
    ("[[step]]\ncommand = 'run'\noptions = { suit = 'smoke' }", "step block_scale_gemm-smoke: No"),
    ("[[step]]\ncommand = 'run'\n[[step]]\ncommand = 'run'", "two steps are called"),
    ("[[step]\ncommand", "cannot read "),
    ("[[step]]\ncommand = 'doctor'\nexpected = 'soon'", "cannot read expected 'soon'"),
])  # fmt: skip
def test_a_mistake_in_a_file_is_one_line(tmp_path, text: str, said: str):
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        for step in steps_of(str(file), ()):
            read_step(step)
    assert said in str(error.value) and "\n" not in str(error.value)
