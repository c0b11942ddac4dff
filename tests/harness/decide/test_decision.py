"""A decision from recorded runs: what is compared with what, what is taken, and what is said of the rest."""

import json
import shlex
import sys
from pathlib import Path

import pytest

import kernels
from harness.cli.run import run as run_command
from harness.cli.run import toggle
from harness.decide.decision import Choice, Decision
from harness.decide.measured import read_measured
from harness.decide.text import answer, facts, notes, snippet, to_measure
from harness.decide.worth import decision_and_worth
from harness.errors import UsageError
from harness.page.decision import decision_page
from harness.page.html import html
from shapes.case import parse
from tests.support.decision_runs import CUDA, DEVICE, PLACE, cases_file, gemm, mla, moe, run
from tests.support.decision_worlds import ENGINE, set_rules
from tests.support.written_runs import cell, finished, write

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture(autouse=True)
def rules(monkeypatch):
    set_rules(monkeypatch)


def made(
    *folders: Path, given: dict[str, str] | None = None, margin: float = 0.01, **told: object
) -> Decision:
    measured = read_measured([*map(str, folders)])
    return decision_and_worth(ENGINE, measured, told, given or {}, margin)[0]


def by_value(decision: Decision) -> dict[str, Choice]:
    """The choices by the value of their flag."""
    return {next(iter(each.settings.values())): each for each in decision.choices}


FASTER = {"mla.default": 100.0, "mla.a": 80.0, "mla.b": 90.0}
A, B = {"attention-backend": "A"}, {"attention-backend": "B"}
X = {"plain": {}, "X=1": {"X": "1"}, "X=0": {"X": "0"}}
TABLE = {"AITER_CONFIG_FMOE": "/t.csv"}


@pytest.mark.parametrize(("times", "facts", "given", "chosen"), [
    # What the user set stays.
    ([(mla(64), FASTER)], {}, B, {}),
    # The default's rerun lies 8 % apart, so 5 % are no evidence.
    ([(mla(64), {"mla.default": 100.0, "mla.a": 95.0})], {"apart": 0.08}, {}, {}),
    ([(mla(64), {"mla.default": 100.0, "mla.a": 95.0})], {}, {}, A),
    # A row that was timed eagerly alone is no pair of one in a graph; with quantising goes before core.
    ([(mla(64), {"mla.default": 100.0, "mla.a eager": 10.0})], {}, {}, {}),
    ([(mla(64), {"mla.default": 10.0, "mla.default eager": 99.0, "mla.a eager": 50.0, "mla.b": 9.0})],
     {}, {}, B),
    ([(mla(64), {"mla.default eager": 100.0, "mla.a eager": 80.0})], {}, {}, A),
    ([(gemm(64), {"gemm.default": 100.0, "gemm.a": 80.0}),
      (gemm(64, boundary="core"), {"gemm.default": 100.0, "gemm.a": 120.0})], {}, {}, {"VLLM_GEMM": "1"}),
    # The variable loses on the experts what it gains, unless a flag gives them another row.
    ([(mla(64), {"mla.default": 100.0, "mla.both": 60.0}),
      (moe(64), {"moe.default": 100.0, "moe.both": 130.0, "moe.c": 100.0})],
     {}, {}, {"VLLM_BOTH": "1", "moe-backend": "C"}),
    # The engine's variable makes it run the library, whose table a run of `toggle` measured.
    ([(moe(64), {"moe.default": 99.0, "moe.both": 90.0, "moe.default under T": 99, "moe.both under T": 60})],
     {"settings": {"plain": {}, "T": TABLE}}, {}, {"VLLM_BOTH": "1"} | TABLE),
    ([(mla(64), {"mla.default under X=1": 100.0, "mla.a under X=1": 80.0})],
     {"settings": {"X=1": {"X": "1"}}}, {"X": "1"}, A),
])  # fmt: skip
def test_what_is_chosen(tmp_path, times, facts, given, chosen):
    assert made(run(tmp_path / "run", times, **facts), given=given).chosen == chosen


def test_the_choice_that_saves_most_is_taken(tmp_path):
    found = made(run(tmp_path / "run", [(mla(64), FASTER)]))
    assert found.chosen == A
    assert found.gain and found.gain.comparison
    assert found.gain.comparison.ratio == pytest.approx(1.25, rel=1e-3)
    assert found.gain.share == pytest.approx(0.2, rel=1e-2)
    verdicts = {name: each.comparison.verdict for name, each in by_value(found).items() if each.is_complete}
    assert verdicts == {"A": "faster", "B": "faster"}


def test_calls_of_a_case_decide_which_choice_saves_most(tmp_path):
    """At batch 1, which is called far more often, the other row is faster."""
    few = {"mla.default": 50.0, "mla.a": 45.0, "mla.b": 30.0}
    folder = run(tmp_path / "run", [(mla(1), few), (mla(64), FASTER)])
    for calls, backend in ((20, B), (0.1, A)):
        file = cases_file(tmp_path / "cases.json", (mla(1), calls), (mla(64), 1))
        assert made(folder, cases=file).chosen == backend


def test_what_is_not_told_from_the_default_is_left(tmp_path):
    found = made(run(tmp_path / "run", [(mla(64), {"mla.default": 100.0, "mla.a": 98.8})], apart=0.02))
    assert not found.chosen
    assert found.gain is None
    assert answer(found, None).startswith("Not told from the default: leave it.")
    assert any(label == "not told" and "--attention-backend A" in text for label, text in notes(found, None))


def test_a_clear_gain_below_the_margin_is_left(tmp_path):
    times = [
        (mla(64), {"mla.default": 10.0, "mla.a": 9.0}),
        (moe(64), {"moe.default": 990.0, "moe.a": 995.0}),
    ]
    file = cases_file(tmp_path / "cases.json", (mla(64), 1), (moe(64), 1))
    folder = run(tmp_path / "run", times)
    found = made(folder, cases=file)
    assert not found.chosen
    assert answer(found, None).startswith("Leave it: --attention-backend A makes mla_decode 1.11")
    share = 1 / 1000
    assert made(folder, cases=file, margin=1.1 * share).chosen == {}
    assert made(folder, cases=file, margin=0.9 * share).chosen == A


def test_a_choice_that_saves_a_part_of_the_margin_is_no_part_of_a_launch(tmp_path):
    times = [
        (mla(64), {"mla.default": 100.0, "mla.a": 80.0}),
        (moe(64), {"moe.default": 1.0, "moe.a": 0.9}),
    ]
    file = cases_file(tmp_path / "cases.json", (mla(64), 1), (moe(64), 1))
    found = made(run(tmp_path / "run", times), cases=file)
    assert found.chosen == A
    assert by_value(found)["A"].is_clear


def test_what_is_set_and_decides_nothing_is_said(tmp_path):
    found = made(run(tmp_path / "run", [(mla(64), FASTER)]), given={"VLLM_BOHT": "1"})
    text = "VLLM_BOHT decides nothing that is known of vllm here; did you mean VLLM_BOTH?"
    assert ("note", text) in [*notes(found, None)]


def test_a_row_that_was_measured_in_another_run_is_no_pair(tmp_path):
    """The default is in both runs, so each row is compared within its own."""
    one = run(tmp_path / "one", [(mla(64), {"mla.default": 100.0, "mla.a": 80.0})])
    two = run(tmp_path / "two", [(mla(64), {"mla.default": 50.0, "mla.b": 45.0})])
    found = made(one, two)
    ratios = {name: each.comparison.ratio for name, each in by_value(found).items() if each.is_complete}
    assert ratios == pytest.approx({"A": 1.25, "B": 1.111}, rel=1e-3)
    alone = made(one, run(tmp_path / "three", [(mla(64), {"mla.b": 45.0})]))
    assert by_value(alone)["A"].is_complete
    assert [*by_value(alone)["B"].missing.values()] == [
        "mla.b was not measured beside the default in one run, boundary and launch mode"
    ]


def test_a_choice_with_a_case_that_was_not_measured_is_not_taken(tmp_path):
    times = [(mla(64), FASTER), (mla(1), {"mla.default": 50.0, "mla.b": 45.0, "mla.a": None})]
    found = made(run(tmp_path / "run", times))
    assert found.chosen == B
    assert [*by_value(found)["A"].missing.values()] == ["mla.a is unsupported: needs cuda"]
    assert not by_value(found)["A"].is_complete


def test_more_rounds_are_not_asked_for_where_nothing_can_be_saved(tmp_path):
    found = made(run(tmp_path / "run", [(mla(64), {"mla.default": 100.0, "mla.a": 99.97})]))
    said = answer(found, None)
    assert said.startswith("Leave it: the best of 1 choice is --attention-backend A with 1.000")
    assert said.endswith(" in mla_decode, which cannot save 1.0%.")
    assert "not told" not in dict(notes(found, None))


def test_the_default_is_not_measured_again_beside_rows_that_cannot_run(tmp_path):
    """As on a node without the engine."""
    unable = dict.fromkeys(("moe.a", "moe.b", "moe.c", "moe.both"))
    found = made(run(tmp_path / "run", [(moe(8), {"moe.default": 50.0, **unable})]))
    assert found.choices and not [*to_measure(found)]


def test_a_launch_that_also_swaps_rows_without_times_says_so(tmp_path):
    times = [
        (mla(64), {"mla.default": 100.0, "mla.both": 60.0}),
        (moe(64), {"moe.a": 30.0}),
    ]
    found = made(run(tmp_path / "run", times))
    assert found.chosen == {"VLLM_BOTH": "1"}
    swapped = "this launch also swaps rows of fused_moe in cases without times: moe.default -> moe.both"
    assert ("not compared", swapped) in [*notes(found, None)]


def test_one_block_of_rounds_tells_nothing(tmp_path):
    """Its interval is infinite, which JSON has not."""
    case = mla(64)
    rows = [cell(case, name, us, 0.1, **CUDA) for name, us in (("mla.default", 100.0), ("mla.a", 50.0))]
    for row in rows:
        row.samples.block = [0] * len(row.samples.block)
        row.samples.round = [*range(len(row.samples.block))]
    folder = write(tmp_path / "run", [*rows, finished(case)], [case], provenance={"machine": DEVICE})
    found = made(folder)
    assert found.chosen == {}
    (choice,) = (each for each in facts(found, None)["choices"] if each["ratio"])
    assert (choice["verdict"], choice["low"], choice["high"]) == ("unclear", 0.0, None)
    json.dumps(facts(found, None), allow_nan=False)
    assert '"high":null' in html(decision_page(found, None), "Made by a test").replace(" ", "")


def test_what_is_missing_is_measured_by_commands_that_can_be_run(tmp_path):
    """A variable by `toggle`, beside the default; rows by `run`."""
    settings = {"plain": {}, "X=1": {"X": "1"}}
    times = [
        (mla(64), {"mla.default": 100.0, "mla.default under X=1": 70.0}),
        (mla(1), {"mla.default": 100.0, "mla.default under X=1": None}),
        (moe(8), {"moe.a": 10.0}),
    ]
    lines = [shlex.split(line) for line in to_measure(made(run(tmp_path / "run", times, settings=settings)))]
    assert [(words[3], words[words.index("--op") + 1]) for words in lines] == [
        ("toggle", "mla_decode"), ("run", "fused_moe")
    ]  # fmt: skip
    assert lines[0][4:6] == ["--flag", "X=1"]
    for words, command in zip(lines, (toggle, run_command), strict=True):
        given = command.make_context(words[3], words[4:]).params
        assert all(kernels.OPS[given["op"]].sizes(sizes) for text in given["case"] for sizes in parse(text))


def test_a_measured_variable_is_a_choice(tmp_path):
    times = [(mla(64), {"mla.default": 100.0, "mla.default under X=1": 70.0, "mla.default under X=0": 100.0})]
    facts = {"settings": X, "flags": {"X": ["1", "0"]}}
    folder = run(tmp_path / "run", times, **facts, created="2026-01-01")
    found = made(folder)
    assert found.chosen == {"X": "1"}
    assert made(folder, given={"X": "1"}).chosen == {}  # it is set already
    assert "export X=1" in [*snippet(found)]
    assert not any("--X" in line for line in snippet(found))
    # A plain run that is newer does not hide it.
    plain = run(tmp_path / "plain", [(mla(64), {"mla.default": 100.0})], created="2026-02-01")
    assert made(folder, plain).chosen == {"X": "1"}


def test_why_a_default_has_no_time(tmp_path):
    found = made(run(tmp_path / "run", [(mla(64), {"mla.a": 80.0})]))
    assert (found.choices, [*found.undecided.values()]) == ([], ["mla.default was not measured"])
    times = [(mla(64), {"mla.default under X=1": 100.0, "mla.a under X=1": 80.0})]
    found = made(run(tmp_path / "alone", times, settings={"X=1": {"X": "1"}}))
    why = "mla.default was timed under X=1 alone: --with takes what is set as given"
    assert [*found.undecided.values()] == [why]


def test_a_table_of_tuned_configurations_is_a_file_to_use(tmp_path):
    name, path = "AITER_CONFIG_FMOE", "/tuned/fmoe.csv"
    settings = {"plain": {}, f"{name}={path}": {name: path}}
    times = [(moe(64), {"moe.default": 100.0, f"moe.default under {name}={path}": 70.0})]
    found = made(run(tmp_path / "run", times, settings=settings, flags={name: [None, path]}))
    assert facts(found, None)["files"] == {name: path}
    assert facts(found, None)["variables"] == {name: path}


def test_crossovers_and_regret(tmp_path):
    times = [
        (mla(4), {"mla.default": 10.0, "mla.a": 8.0, "mla.b": 10.0}),
        (mla(64), {"mla.default": 100.0, "mla.a": 110.0, "mla.b": 90.0}),
    ]
    found = made(run(tmp_path / "run", times))
    (crossover,) = found.crossovers
    assert (crossover.faster_below, crossover.faster_above) == ("mla.a", "mla.b")
    assert (crossover.below, crossover.above, crossover.told) == (4, 64, True)
    # log(10/8) and log(110/90) to either side, on a line in logarithms
    assert crossover.at == pytest.approx(4 * 16 ** (0.2231 / (0.2231 + 0.2007)), rel=1e-3)
    by_batch = {each.case.sizes["batch"]: each for each in found.cases}
    assert found.chosen == B  # the larger case takes more time
    assert by_batch[4].fastest.new.cell.impl == "mla.a"
    assert (by_batch[4].clear, by_batch[64].clear) == (True, False)
    assert found.regret == pytest.approx(100 / 98 - 1, rel=1e-2)
    assert found.regret > 0


def test_times_of_several_sessions_are_not_added(tmp_path):
    """In the older session all took half as long: B gains more there, though it saves fewer microseconds."""
    old = run(
        tmp_path / "old",
        [(mla(64), {"mla.default": 50.0, "mla.a": 40.0, "mla.b": 39.0})],
        created="2026-01-01",
    )
    new = run(tmp_path / "new", [(mla(64), {"mla.default": 100.0, "mla.a": 80.0})], created="2026-02-01")
    found = made(old, new)
    assert found.chosen == B
    assert found.regret == pytest.approx(0, abs=1e-3)
    assert found.gain and found.gain.share == pytest.approx(1 - 39 / 50, rel=1e-2)
    (note,) = found.launches.measured.notes
    assert note == "cases in several runs: 1; the newest run that has both rows counts"


def test_a_pair_of_another_session_counts_with_the_time_of_the_reference(tmp_path):
    """The newest run has the default at both sizes; that of A at the small one is of a session ten times as
    slow, which must not outweigh the large one."""
    newest = [(mla(1), {"mla.default": 10.0}), (mla(64), {"mla.default": 100.0, "mla.a": 120.0})]
    new = run(tmp_path / "new", newest, created="2026-02-01")
    slow = run(tmp_path / "old", [(mla(1), {"mla.default": 1000.0, "mla.a": 500.0})], created="2026-01-01")
    assert by_value(made(new, slow))["A"].comparison.ratio == pytest.approx(110 / 125, rel=1e-2)


def test_no_case_is_called_clear_within_the_noise(tmp_path):
    times = [(mla(64), {"mla.default": 100.0, "mla.a": 80.0, "mla.b": 79.0, "other.kernel": 78.0})]
    (case,) = made(run(tmp_path / "run", times, apart=0.08)).cases
    assert (case.clear, case.no_flag is None) == (False, False)  # 78 is clear of 100, not 79 of 80
    (case,) = made(run(tmp_path / "noisy", times, apart=0.4)).cases
    assert case.no_flag is None


def test_the_newest_run_that_has_both_rows_counts(tmp_path):
    old = run(tmp_path / "old", [(mla(64), {"mla.default": 100.0, "mla.a": 50.0})], created="2026-01-01")
    new = run(tmp_path / "new", [(mla(64), {"mla.default": 100.0, "mla.a": 80.0})], created="2026-02-01")
    for folders in ((old, new), (new, old)):
        assert by_value(made(*folders))["A"].comparison.ratio == pytest.approx(1.25, rel=1e-3)


def test_times_of_warm_caches_do_not_count_beside_those_of_serving(tmp_path):
    serving = run(tmp_path / "one", [(mla(64), {"mla.default": 100.0, "mla.a": 110.0})], created="2026-01-01")
    warm = run(tmp_path / "two", [(mla(64), FASTER)], created="2026-02-01", cache="warm")
    found = made(serving, warm)
    assert found.chosen == {}
    assert [note.rpartition("/")[2] for note in found.launches.measured.notes] == [
        "two has warm caches, others serving: not used"
    ]
    assert made(warm).launches.measured.notes == ["times are of warm caches, which no server has"]


def test_confidence_is_shared_among_the_choices_that_are_not_clear(tmp_path):
    times = [(mla(64), {"mla.default": 100.0, "mla.a": 80.0, "mla.b": 100.02, "mla.both": 99.98})]
    confidences = {
        name: each.confidence for name, each in by_value(made(run(tmp_path / "run", times))).items()
    }
    assert confidences["A"] == pytest.approx(1 - 0.05 / 3)
    assert confidences["B"] == confidences["1"] == pytest.approx(1 - 0.05 / 2)


def test_a_launch_with_which_the_server_fails_is_never_taken(tmp_path, monkeypatch):
    """Also where it fails in an op that no run has."""
    fails = {"row": "", "why": "no such kernel: the server fails", "fails": True}
    set_rules(monkeypatch, moe_both=fails)
    times = [(mla(64, PLACE, ctx="3201..3999"), {"mla.default": 100.0, "mla.both": 60.0, "mla.a": 80.0})]
    found = made(run(tmp_path / "run", times, suite="r1-tp8"))
    assert found.chosen == A
    assert ("fails", "VLLM_BOTH=1: no such kernel: the server fails") in [*notes(found, None)]


def test_a_launch_that_may_change_an_op_without_a_run_says_so(tmp_path):
    found = made(run(tmp_path / "run", [(mla(64), {"mla.default": 100.0, "mla.both": 60.0})]))
    text = "this launch may also swap rows of fused_moe, of which there is no run: VLLM_BOTH"
    assert ("not compared", text) in [*notes(found, None)]


def test_what_was_measured_of_a_step_is_not_the_step(tmp_path):
    """One product of a step has times: what it saves is a small part of the step."""
    times = [(gemm(64, PLACE), {"gemm.default": 10.0, "gemm.a": 8.0})]
    found = made(run(tmp_path / "run", times, suite="r1-tp8"))
    (choice,) = found.choices
    assert choice.comparison.ratio == pytest.approx(1.25, rel=1e-3)
    assert choice.share == pytest.approx(0.2 * found.mix.covered, rel=1e-2)
    assert found.chosen == {}


def test_lines_of_the_shell_are_quoted(tmp_path):
    value = "/my tables/$1.csv"
    settings = {"plain": {}, "a": {"AITER_CONFIG_FMOE": value}}
    times = [(moe(64), {"moe.default": 100.0, "moe.default under a": 70.0})]
    lines = [*snippet(made(run(tmp_path / "run", times, settings=settings)))]
    assert f"export AITER_CONFIG_FMOE='{value}'" in lines
    arm = "\n".join(line.removeprefix("# ") for line in lines[lines.index("# [arms.decided]") :])
    assert tomllib.loads(arm) == {"arms": {"decided": {"env": {"AITER_CONFIG_FMOE": value}}}}


def test_settings_that_change_the_calls_are_no_choice(tmp_path, monkeypatch):
    flags = ("--moe-backend A", "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=1", "--block-size 16")
    set_rules(
        monkeypatch, {"fused_moe": {"": "moe.default", **{flag: f"moe.{i}" for i, flag in enumerate(flags)}}}
    )
    times = [(moe(64), {"moe.default": 100.0, "moe.0": 90.0, "moe.1": 50.0, "moe.2": 50.0})]
    assert made(run(tmp_path / "run", times)).chosen == {"moe-backend": "A"}


def test_a_row_for_which_there_is_no_flag_is_named(tmp_path):
    found = made(run(tmp_path / "run", [(mla(64), FASTER | {"other.kernel": 40.0})]))
    (case,) = found.cases
    assert case.no_flag and case.no_flag.cell.impl == "other.kernel"
    assert found.chosen == A


def test_runs_of_two_machines_are_refused(tmp_path):
    one = run(tmp_path / "one", [(mla(64), FASTER)])
    other = DEVICE | {"device": "NVIDIA H100 80GB HBM3"}
    two = run(tmp_path / "two", [(mla(1), FASTER)], provenance={"machine": other})
    with pytest.raises(UsageError, match=r"of several machines: NVIDIA H200 .*; NVIDIA H100"):
        read_measured([str(one), str(two)])


def test_a_models_suite_is_weighed_by_its_calls(tmp_path):
    """Without a word of the user: the places name the model, the load is the suites'."""
    times = [(mla(batch, PLACE, ctx="3201..3999"), FASTER) for batch in (64, 32, 1)]
    found = made(run(tmp_path / "run", times, suite="r1-tp8"))
    assert found.mix.counts_calls
    assert found.mix.text == "deepseek-r1 tp8, 3200 tokens in, 800 out, 64 in flight"
    assert sum(each.decode for each in found.mix.cases) == pytest.approx(61, rel=0.05)  # layers
    assert 0 < found.mix.covered < 0.5
    commands = [*to_measure(found)]
    assert any("--op fused_moe" in line and "--suite r1-tp8" in line for line in commands)


@pytest.mark.parametrize(("facts", "why"), [
    ({"op": "softmax"}, "is of softmax, which no engine's rules name"),
    ({"trees": {"plain": "abc"}}, "compares revisions"),
])  # fmt: skip
def test_runs_that_are_not_used(tmp_path, facts, why):
    one = run(tmp_path / "one", [(mla(64), FASTER)])
    two = run(tmp_path / "two", [(mla(64), {"mla.default": 1.0})], **facts)
    measured = read_measured([str(one), str(two)])
    assert measured.notes == [f"{two} {why}: not used"]
    assert [sheet.folder for sheets in measured.sheets.values() for sheet in sheets] == [one]


@pytest.mark.parametrize("is_configured", [False, True])
def test_rows_that_are_no_pair(tmp_path, is_configured):
    """Rows without common rounds, and one of a configuration that was asked for."""
    case = mla(64)
    rows = [cell(case, name, us, 0.1, **CUDA) for name, us in (("mla.default", 100.0), ("mla.a", 50.0))]
    if is_configured:
        rows[1] = rows[1].model_copy(update={"config": {"x": 1}})
    else:
        rows[1].samples.block = [block + 10 for block in rows[1].samples.block]
    folder = write(tmp_path / "run", [*rows, finished(case)], [case], provenance={"machine": DEVICE})
    assert not made(folder).compared
