"""`toggle`: real workers under real environments, with a kernel whose time and path a variable decides."""

from __future__ import annotations

import json

import pytest

from harness.results.journal import Journal
from tests.support.command_line import error_line
from tests.support.recorded_verdicts import redo

PROBE = """
import os, time
from kernels.mla_decode.providers.torch_eager import NaiveMlaDecode

class Probe(NaiveMlaDecode):
    op = "mla_decode"
    name = "probe.kernel"

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)
        call = prepared.call
        seconds = 0.001 * float(os.environ.get("PROBE_MS") or 2) * float(os.environ.get("PROBE_TIMES", "1"))

        def timed():
            call()
            time.sleep(seconds)  # not held up by who takes the CPU

        prepared.call = timed
        prepared.picked = lambda: os.environ.get("PROBE_PATH", "")
        return prepared
"""

pytestmark = [pytest.mark.slow, pytest.mark.alone]

TOGGLE = ("toggle", "--op", "mla_decode", "--impl", "probe.kernel", "--boundary", "core")
WHERE = ("--device", "cpu", "--threads", "1", "--cache", "warm", "--case", "batch=1 ctx=5..20")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    path = tmp_path_factory.mktemp("probe") / "probe.py"
    path.write_text(PROBE)
    return path


@pytest.fixture(scope="module")
def factorial(cli, plugin, tmp_path_factory):
    out = tmp_path_factory.mktemp("toggle") / "run"
    done = cli(
        *TOGGLE, *WHERE, "--flag", "PROBE_MS=2,8,", "--flag", "PROBE_PATH=unset,other",
        *("--budget", "12s", "--out", out, "--json", out.parent / "out.json"),
        KERNEL_BENCH_PLUGINS=plugin,
    )  # fmt: skip
    return done, out


def test_each_arm_is_a_cell_with_a_verdict_against_the_plain_one(factorial):
    done, out = factorial
    assert done.returncode == 0, done.stderr
    written = json.loads((out.parent / "out.json").read_text())
    arms = {cell["arm"]: cell for cell in written["cells"]}
    assert next(iter(arms)) == "plain"
    assert len(arms) == 7, "six combinations and the plain arm; its twin is no cell"
    assert arms["PROBE_MS=8, PROBE_PATH=other"]["time_us"] > 1.5 * arms["plain"]["time_us"]
    verdicts = {v["a"]: v["verdict"] for v in written["verdicts"] if v["about"] == "baseline"}
    assert verdicts["probe.kernel @ PROBE_MS=8, PROBE_PATH unset"] == "slower"
    assert verdicts["probe.kernel @ PROBE_MS=, PROBE_PATH unset"] != "slower", "an empty value is a value"
    assert [v["a"] for v in written["verdicts"] if v["about"] == "A/A"] == ["probe.kernel @ plain (again)"]


def test_the_table_tells_what_ran_and_what_the_flags_do(factorial):
    done, _ = factorial
    said = " ".join(done.stdout.split())
    assert "noise floor probe.kernel against itself in other workers" in said
    assert "nothing -> other" in said
    effects = done.stdout[done.stdout.index("effects of the flags on probe.kernel") :]
    line = next(line for line in effects.splitlines() if "PROBE_MS: 2 -> 8" in line)
    assert line.startswith("main") and line.endswith("slower")
    assert "interaction  PROBE_MS=8 with PROBE_PATH=other" in effects
    advice = " ".join(done.stdout[done.stdout.index("recommendation:") :].split())
    assert "PROBE_MS=8, PROBE_PATH unset is slower, 0." in advice


def test_the_record_tells_the_same_again(factorial):
    _, out = factorial
    run = Journal(out).run()
    assert run.flags == {"PROBE_MS": ["2", "8", ""], "PROBE_PATH": [None, "other"]}
    assert run.arms["PROBE_MS=8, PROBE_PATH unset"] == {"PROBE_MS": "8", "PROBE_PATH": None}
    (records,) = Journal(out).finished().values()
    for verdict, again in redo(records):
        assert (verdict.verdict, verdict.ratio) == (again.verdict, pytest.approx(again.ratio))


def test_a_flag_that_helps_is_recommended(cli, plugin, tmp_path):
    done = cli(
        *TOGGLE, *WHERE, "--flag", "PROBE_MS=1,unset", "--set", "PROBE_TIMES=4", "--budget", "6s",
        "--out", tmp_path / "run", KERNEL_BENCH_PLUGINS=plugin,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    advice = done.stdout[done.stdout.index("recommendation:") :].splitlines()[1]
    assert advice.startswith("  probe.kernel: PROBE_TIMES=4, PROBE_MS=1: "), advice
    assert "recorded in" in done.stdout


def test_an_arm_whose_worker_cannot_start_costs_only_itself(cli, plugin, tmp_path):
    done = cli(
        *TOGGLE, *WHERE, "--flag", "PYTHONHOME=/nowhere,unset", "--budget", "4s",
        "--out", tmp_path / "run", KERNEL_BENCH_PLUGINS=plugin,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (records,) = Journal(tmp_path / "run").finished().values()
    cells = {r.arm: r for r in records if r.kind == "cell"}
    broken = cells["PYTHONHOME=/nowhere"]
    assert broken.status == "crashed" and "exit code 1 while in starting" in broken.reason
    assert cells["plain"].status == cells["PYTHONHOME unset"].status == "ok"
    assert "crashed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --flag NAME=value"),
        (("--flag", "A=1\n2"), "no line breaks"),
        (("--flag", "A"), "cannot read --flag 'A'"),
        (("--flag", "OMP_NUM_THREADS=many"), "cannot read OMP_NUM_THREADS='many'"),
    ],
)
def test_mistakes(cli, plugin, arguments, said):
    assert said in error_line(cli(*TOGGLE, *WHERE, *arguments, KERNEL_BENCH_PLUGINS=plugin))


def test_a_stopped_toggle_goes_on(cli, plugin, tmp_path):
    """The plan, its arms and the twin are those of the record."""
    out = tmp_path / "run"
    cases = ("--case", "batch=1,2 ctx=5..20", *WHERE[:-2])
    done = cli(
        *TOGGLE, *cases, "--flag", "PROBE_MS=1,4", "--budget", "4s", "--per-case", "3s", "--out", out,
        KERNEL_BENCH_PLUGINS=plugin,
    )  # fmt: skip
    assert "left out, the budget" in done.stdout
    done = cli("toggle", "--resume", out, "--budget", "9s", KERNEL_BENCH_PLUGINS=plugin)
    assert done.returncode == 0, done.stderr
    finished = Journal(out).finished()
    assert len(finished) == 2
    for records in finished.values():
        assert {r.arm for r in records if r.kind == "cell"} == {"plain", "PROBE_MS=1", "PROBE_MS=4"}
        assert any(r.kind == "verdict" and r.about == "A/A" for r in records)
