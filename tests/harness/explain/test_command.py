"""`python -m harness explain` as users call it: subsets of inputs, JSON, mistakes."""

import json
import random

import pytest

from harness.explain import causes as of
from harness.explain.alone import timed_alone
from shapes.case import Case
from tests.support import written_runs
from tests.support.command_line import error_line
from tests.support.lost_gains import World
from tests.support.paths import ROOT

RECORD = ROOT / "results" / "epyc-zen3-2core" / "serving-ab"
RUN = ROOT / "results" / "h200" / "mla_decode-b64"
TOGGLED = ROOT / "results" / "epyc-zen4-2core" / "toggle" / "onednn"
TRACES = ROOT / "tests" / "data" / "serving" / "traces"
GRAPH = TRACES / "vllm_rocm_decode_graph.json.gz"


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path, random.Random("command"))
    world.profiled()
    world.results(0.0)
    return world


@pytest.mark.parametrize(("words", "says"), [
    (["--ab", RECORD, "--before", "a", "--after", "b"], "give --ab, or --before and --after, not both"),
    (["--before", "a"], "--before and --after go together: results are paired in order"),
    (["--trace", "a", "b", "c"], "--trace takes one trace of each server, BEFORE AFTER"),
    (["--trace", GRAPH, GRAPH], "--trace takes one trace of each server, BEFORE AFTER"),
    (["--arm", "x"], "--arm is of --ab, and --rows is of --run"),
    (["--rows", "a,b"], "--arm is of --ab, and --rows is of --run"),
    (["--run", RUN, "--rows", "a"], "--rows takes two names, BEFORE,AFTER, not 'a'"),
    (["--run", RUN, "--rows", "flashmla,flashml"], "unknown row 'flashml' of"),
    (["--run", RUN, "--rows", "flashmla,flashmla"], "has no case that both flashmla and flashmla were"),
    (["--run", RUN, "--change", "fused_moe=2x"], "timed mla_decode, which is not the op of --change"),
    (["--change", "mla=2x"], "unknown op 'mla'"),
    (["--change", "mla_decode@prefill=2x"], "explain is of decode steps: a change of prefill"),
    (["--ab", RECORD, "--arm", "two"], "unknown --arm 'two' of"),
    (["--ab", RUN], "is no record of `serving ab`"),
    (["--run", "nowhere"], "no run at 'nowhere'"),
    (["--log", "nowhere"], "cannot read nowhere: No such file or directory"),
    (["--trace", TRACES / "vllm_b200_prefill.json.gz"], "has no decode steps; it has: prefill"),
    (["--trace", RECORD / "ab.json"], "cannot read"),
    (["before.json"], "unexpected extra argument (before.json)"),
])  # fmt: skip
def test_mistakes_are_one_line(here, words, says):
    assert says in error_line(here("explain", *words))


def test_runs_that_make_no_pairs_are_refused(here, world):
    words = [word for word in world.args if not word.endswith("after5.jsonl")]
    assert "6 runs before and 5 after: they are paired in order" in error_line(here("explain", *words))


@pytest.mark.parametrize("words", [[], ["--change", "fused_moe=2x"], ["--log", ROOT / "README.md"]])
def test_nothing_to_compare(here, words):
    assert "nothing to compare: neither what was expected nor" in error_line(here("explain", *words), 3)


def parts(args):
    """The options of a world with their words."""
    found = []
    for word in args:
        if word.startswith("--"):
            found.append([])
        found[-1].append(word)
    return found


@pytest.mark.parametrize("left", range(1, 16))
def test_any_subset_of_the_inputs_is_taken(here, world, left):
    """Of the run, the traces, the results (both sides) and a log. What is there is not said to be unknown."""
    world.log("ready")
    run, traces, before, after, log = parts(world.args)
    kinds = [run, traces, [*before, *after], log]
    given = [kind for number, kind in enumerate(kinds) if left >> number & 1]
    done = here("explain", *(word for kind in given for word in kind), "--json", "-")
    if not (traces in given or kinds[2] in given or run in given):
        assert done.returncode == 3
        return
    if done.returncode == 3:
        assert "nothing to compare" in done.stderr and traces not in given and kinds[2] not in given
        return
    found = json.loads(done.stdout)
    known = {cause["name"] for cause in found["causes"] if cause["sure"] != "not known"}
    assert (found["observed"] is not None) == (traces in given or kinds[2] in given)
    assert (of.OTHER_WORK in known) == (kinds[2] in given)
    assert (of.IDLE in known) == (traces in given)
    assert (of.TABLE_MISSED in known) == (log in given)
    assert (of.NOT_CALLED in known) == (run in given and traces in given)
    assert found["of"] == ("TPOT" if kinds[2] in given or traces not in given else "a decode step")
    if traces in given and run in given:
        assert found["says"].startswith("The new kernel was not called: ") and done.returncode == 0


def test_json_has_all_of_it(here, world, tmp_path):
    out = tmp_path / "account.json"
    done = here("explain", *world.args, "--json", out)
    assert (done.returncode, done.stdout) == (0, "")
    found = json.loads(out.read_text())
    assert set(found) == {"says", "of", "expected", "observed", "causes", "notes", "code", "missing", "rest"}
    assert found["missing"] == pytest.approx(found["expected"]["ms"] - found["observed"]["ms"])
    first = found["causes"][0]
    assert set(first) == {"name", "sure", "ms", "says", "evidence", "share", "record"}
    assert (first["name"], first["sure"], first["record"]) == (of.NOT_CALLED, "certain", "")
    assert first["share"] == pytest.approx(1, abs=0.1) and first["evidence"]
    assert all(cause["record"] for cause in found["causes"] if cause["sure"] == "not known")
    assert found["causes"][-1]["sure"] == "not known"


def test_options_may_be_repeated_instead(here, world):
    words = []
    for option, *values in parts(world.args):
        words += [word for value in values for word in (option, value)]
    assert here("explain", *words).stdout == here("explain", *world.args).stdout


def test_the_first_line_names_cause_evidence_and_size(here, world):
    text = here("explain", *world.args).stdout
    first, rest = " ".join(text.partition("\n\n")[0].split()), " ".join(text.split())
    assert first.startswith(
        "The new kernel was not called: quick::one_pass_mla_kernel<__nv_bfloat16>(x) is in no "
    )
    assert first.endswith(" ms that were expected are missing.") and "after.json; all of the " in first
    assert f"{world.layers} calls of flash_fwd_splitkv_mla_kernel<__nv_bfloat16>(x) are left" in rest
    assert f"expected: {world.gain_ms:.3g} ms (" in rest or f"expected: {world.gain_ms:.2g}" in rest


def test_the_recorded_ab_has_no_expectation(here):
    done = here("explain", "--ab", RECORD)
    assert done.returncode == 1
    assert done.stdout.startswith(
        "It cannot be told what vanished, as what was expected is not known in ms: "
    )
    assert "observed: 9.97 ms (6.41 to 12.5) less of TPOT: TPOT 19.37 -> 9.361 ms, 3 pairs" in done.stdout
    assert "none seen: other work" in done.stdout


def test_a_recorded_trace_beside_itself_moved_shows_the_same_kernels(here, tmp_path):
    """gpt-oss in one graph: the same step twice."""
    copied = tmp_path / "after.json.gz"
    copied.write_bytes(GRAPH.read_bytes())
    done = here("explain", "--change", "fused_moe=1.3x", "--trace", GRAPH, copied)
    text = " ".join(done.stdout.split())
    assert text.startswith("Likely: The same kernels run as fast as without the change: _matmul_ogs_NNT_")
    assert "all of the 1.62 ms that were expected are missing" in text
    assert "24 x 157 us -> 24 x 157 us a step" in text and done.returncode == 0


def test_rows_are_implementations_entries_or_settings():
    fastest = timed_alone(str(RUN), None)
    assert (fastest.before, fastest.after, fastest.op) == ("torch.sdpa", "flashmla", "mla_decode")
    named = timed_alone(str(RUN), ("flashinfer.fa3", "flashmla"))
    assert named.saving_us() == pytest.approx(86.3 - 71.0, abs=0.1)
    assert len(named.old) == 1 and "flashinfer" in named.old[0] and "flashinfer" not in named.new[0]
    toggled = timed_alone(str(TOGGLED), ("plain", "ONEDNN_MAX_CPU_ISA=AVX2"))
    assert (toggled.before, toggled.after) == ("torch.bf16", "torch.bf16 @ ONEDNN_MAX_CPU_ISA=AVX2")
    assert toggled.saving_us() == pytest.approx(3430.6 - 30673.7, rel=1e-3)
    of_settings = timed_alone(str(TOGGLED), None)
    assert of_settings.before == "torch.bf16" and of_settings.after.startswith("torch.bf16 @ ")


def test_a_run_in_which_nothing_is_faster_asks_for_rows(tmp_path):
    case = Case("mla_decode", {"batch": 1, "ctx": 64}, "core", "ad hoc", 1.0)
    cells = [written_runs.cell(case, name, us) for name, us in (("old", 5.0), ("other", 6.0))]
    run = written_runs.write(tmp_path / "run", [*cells, written_runs.finished(case)], [case], baseline="old")
    with pytest.raises(Exception, match="has nothing faster than old: name two rows with --rows"):
        timed_alone(str(run), None)


def test_the_model_says_what_is_expected_where_files_say_machine_and_load(here, tmp_path):
    """InferenceX's file of an H200: as `what-if` says for it, and nothing changed."""
    file = ROOT / "tests" / "data" / "serving" / "inferencex_agg.json"
    copied = tmp_path / "after.json"
    copied.write_bytes(file.read_bytes())
    done = here("explain", "--change", "fused_moe=1.3x", "--before", file, "--after", copied, "--json", "-")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and found["says"].startswith("It is not known where the gain went: ")
    load = ("--lengths", "1024/1024", "--concurrency", "64", "--calibrate", file, "--hardware", "H200")
    what_if = ("serving", "what-if", "fused_moe=1.3x", *load, "--json", "-")
    predicted = json.loads(here(*what_if).stdout)["workloads"][0]["changes"]
    (tpot,) = [each for each in predicted if each["quantity"] == "tpot"]
    assert found["expected"]["ms"] == pytest.approx(-tpot["change"], rel=0.02)
    assert found["expected"]["low"] == pytest.approx(-tpot["high"], rel=0.02)


def test_backends_that_a_log_says_are_evidence(here, world):
    world.log("INFO Using TRITON_MLA attention backend out of potential backends: [...]")
    found = json.loads(here("explain", *world.args, "--json", "-").stdout)
    assert any(line.startswith("the log says: Using TRITON_MLA attention backend") for line in
               found["causes"][0]["evidence"])  # fmt: skip


@pytest.mark.parametrize(
    ("change", "ms"), [("fused_moe=saved:20us", 24 * 0.02), ("fused_moe:w13=1.3x", None)]
)
def test_a_saving_is_of_each_call_and_a_part_is_not_in_a_trace(here, tmp_path, change, ms):
    copied = tmp_path / "after.json.gz"
    copied.write_bytes(GRAPH.read_bytes())
    found = json.loads(here("explain", "--change", change, "--trace", GRAPH, copied, "--json", "-").stdout)
    expected = found["expected"]
    assert (expected and expected["ms"]) == (ms and pytest.approx(ms))
