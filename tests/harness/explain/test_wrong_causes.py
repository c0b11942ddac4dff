"""What is not to be named, or not for certain; signs, noise, tables and shares."""

import json
import random
from dataclasses import replace

import pytest

from harness.explain import causes as of
from harness.explain.alone import timed_alone
from harness.explain.inputs import steps_in
from harness.explain.served import Log
from harness.explain.sides import Sides
from harness.explain.step import decode_step
from harness.serving.ab.effect import pairs_for
from harness.serving.ab.record import Record
from harness.serving.ab.result import effects
from harness.serving.trace import decompose
from shapes.case import Case
from tests.harness.explain.test_planted import explained, found_in, names
from tests.support import written_runs
from tests.support.command_line import error_line
from tests.support.lost_gains import GEMMS, MOE, NEW, SPLIT, World
from tests.support.serving_files import SGLANG_ROW
from tests.support.traces import decode_steps
from tests.support.traces import text as trace_text


@pytest.fixture
def world(tmp_path):
    return World(tmp_path, random.Random("s"))


def swap(world, **changes):
    return world.server(world.swapped(), **changes)


def of_events(folder, events):
    path = folder / "t.json"
    path.write_text(trace_text(events))
    return decode_step(decompose(path))


def words(text):
    return " ".join(text.split())


# Other work


def test_other_work_is_not_both_seen_and_not_seen(here, world):
    world.traces(world.server(), swap(world))
    world.results(0.0, completed=150, total_output_tokens=120_000)
    found, _, _ = explained(world, here)
    every = [cause["name"] for cause in found["causes"]]
    assert len(every) == len(set(every)) and of.OTHER_WORK in names(found)


# Not called


def test_swapped_traces_are_asked_about(here, world):
    world.run()
    world.traces(swap(world), world.server())
    assert "and not in after.json: are the traces swapped?" in error_line(here("explain", *world.args))


def test_an_op_that_is_in_no_trace_is_a_mistake(here, world):
    world.args += ["--change", "mha_prefill=1.5x"]
    world.traces(world.server(), world.server())
    assert "no kernel of mha_prefill in " in error_line(here("explain", *world.args))


# The same server


def test_where_a_variable_differs_the_change_is_without_effect(here, world):
    world.args += ["--change", "fused_moe=1.3x"]
    world.traces(world.server(), world.server())
    world.record(0.0, predicted_ms=0.3 * world.gain_ms)
    found, text, _ = explained(world, here)
    assert names(found)[0] == of.NO_EFFECT, text


# Several tokens of a step


def test_speculation_that_is_not_reported_is_no_stall(here, world):
    world.profiled(world.swapped())
    world.results(0.0, tpot=world.step_ms / 2.5)
    found, text, _ = explained(world, here)
    assert of.STALLS not in names(found), text
    assert any(note.endswith("several tokens a step?") for note in found["notes"])


# The sign


@pytest.mark.parametrize(("observed", "says"), [
    (-0.1, "As predicted, it is a loss: TPOT became "),
    (0.05, "Serving did better than expected: "),
    (-0.3, "The loss is larger than expected: TPOT became "),
])  # fmt: skip
def test_a_loss_that_was_predicted(here, world, observed, says):
    world.record(observed * world.step_ms, predicted_ms=-0.1 * world.step_ms)
    _, text, code = explained(world, here)
    assert text.startswith(says) and "-" not in words(text.partition("\n\n")[0]), text
    assert code == (0 if observed == -0.1 else 1)


def test_causes_of_the_sign_of_what_is_missing_come_first(here, world):
    """A loss is expected and does not come, as the step waits less; other kernels became slower."""
    world.run(new=1.3 * world.old_us)
    world.args += ["--rows", "old,new"]
    layer = world.swapped(1.3 * world.old_us)
    layer[GEMMS[0]] += 0.2 * world.old_us
    wait = 400 - 0.6 * world.old_us * world.layers
    world.traces(world.server(wait_us=2000), world.server(layer, wait_us=1600 + wait))
    found, text, _ = explained(world, here)
    assert found["missing"] < 0 and found["causes"][0]["ms"] < 0, text
    assert "became less" not in text and "better than expected" in words(text), text


def test_an_expected_interval_with_zero_is_no_certain_gain(here, world):
    world.record(0.0)
    path = world.folder / "ab" / "ab.json"
    document = json.loads(path.read_text())
    document["predictions"][0]["high"] = 1.0
    path.write_text(json.dumps(document))
    found, text, code = explained(world, here)
    assert text.startswith("No finding: no gain was expected with certainty, "), text
    assert code == 1 and {cause["share"] for cause in found["causes"]} == {None}


# Noise of launches


def test_the_launch_spread_of_the_ab_hides_small_causes(here, world):
    layer = world.swapped()
    layer[MOE] *= 1.08
    world.profiled(layer)
    world.record(world.gain_ms, noise=0.05, pairs=8)
    found, text, _ = explained(world, here)
    assert of.OTHER_KERNELS not in names(found), text


def test_a_small_gain_has_no_idle_device(here, world):
    """Of 3 % of a step, beside a wait that differs by less than launches do."""
    world.new_us = world.old_us - 0.03e3 * world.step_ms / world.layers
    wait = 400 + world.layers + 0.007e3 * world.step_ms
    world.profiled(world.swapped(), wait_us=wait)
    found, text, _ = explained(world, here)
    assert of.IDLE not in names(found), text


# Shares and inputs


def test_traces_that_are_there_are_not_asked_for(here, world):
    world.traces(world.server(), swap(world))
    world.results(0.0)
    found, _, _ = explained(world, here)
    assert not any("--trace" in cause["record"] for cause in found["causes"])


def test_weights_count_whatever_they_sum_to(tmp_path):
    cases = [Case("mla_decode", {"batch": batch, "ctx": 64}, "core", "ad hoc", weight)
             for batch, weight in ((1, 0.5), (64, 1.5))]  # fmt: skip
    records = []
    for case, times in zip(cases, ((10.0, 8.0, 1.0), (40.0, 20.0, 38.0)), strict=True):
        records += [written_runs.cell(case, name, us, kernels=[name], kernel_us=[us])
                    for name, us in zip(("old", "new", "other"), times, strict=True)]  # fmt: skip
        records.append(written_runs.finished(case))
    run = timed_alone(str(written_runs.write(tmp_path / "run", records, cases, baseline="old")), None)
    assert run.after == "new" and run.saving_us() == pytest.approx((0.5 * 2 + 1.5 * 20) / 2)
    assert run.kernel_us["new"] == pytest.approx((0.5 * 8 + 1.5 * 20) / 2)


def test_a_sweep_is_no_pairs(here, tmp_path):
    for side in ("before", "after"):
        rows = [json.dumps(SGLANG_ROW | {"max_concurrency": each}) for each in (1, 16)]
        (tmp_path / f"{side}.jsonl").write_text("\n".join(rows) + "\n")
    files = ("--before", tmp_path / "before.jsonl", "--after", tmp_path / "after.jsonl")
    said = "results of several concurrencies (1, 16): give those of one load"
    assert said in error_line(here("explain", *files))


def test_a_file_is_not_both_sides(here, world):
    world.results(0.0)
    file = world.folder / "before0.jsonl"
    assert "is both before and after" in error_line(here("explain", "--before", file, "--after", file))


def test_more_than_all_is_all(here, world):
    """The kernel is not called, and the old one takes less than before: more than what is missing."""
    layer = dict(world.layer)
    layer[MOE] -= 0.3 * world.gain_us
    world.profiled(layer)
    found, text, _ = explained(world, here)
    assert found["causes"][0]["ms"] > 1.2 * found["missing"]
    assert "that is all of the " in words(text), text


def test_on_a_cpu_nothing_waits_for_the_host(tmp_path):
    world = World(tmp_path, random.Random("cpu"))
    world.profiled(world.swapped(), wait_us=400 + 900 * world.gain_ms)
    alone = timed_alone(str(tmp_path / "run"), None)
    steps = steps_in(world.args[-2:], [], alone, Sides(), Log())
    on_cpu = replace(steps, after=replace(steps.after, on_cpu=True))
    named_of = [{cause.name for cause in of.step_causes(each) if cause.is_seen} for each in (steps, on_cpu)]
    assert (of.IDLE in named_of[0], of.IDLE in named_of[1]) == (True, False)


# Noise, tables, shapes and steps


def test_a_gain_that_the_kernel_did_not_make_is_not_its_own(here, world):
    """TPOT fell as expected, though the kernel is in no step."""
    world.profiled()
    world.results(world.gain_ms)
    found, text, code = explained(world, here)
    assert text.startswith("What was saved is not the change's own, "), text
    assert of.NOT_CALLED in names(found) and code == 1


@pytest.mark.parametrize("traced", [False, True])
def test_noise_is_no_finding(here, world, traced):
    world.record(0.5 * world.gain_ms, noise=0.15, pairs=4)
    if traced:
        world.profiled(world.swapped())
    found, text, code = explained(world, here)
    assert text.startswith("No finding: the interval of TPOT holds both no change and the "), text
    assert (names(found), names(found, "certain"), code) == ([of.NOISE], [], 1), text
    assert "more pairs would tell" in " ".join(text.split()) or "no number of pairs" in text
    assert found["rest"] == pytest.approx(0)


def test_with_noise_nothing_is_certain(here, world):
    world.record(0.5 * world.gain_ms, noise=0.15, pairs=4, unread=["QUICK"])
    found, text, code = explained(world, here)
    assert "No finding: " in text and "; besides, nothing installed reads QUICK" in " ".join(text.split())
    assert (names(found, "certain"), code) == ([], 1)


def test_more_pairs_are_those_that_would_tell(here, world):
    """Launches 1 % apart and 1 % expected: `serving ab --dry-run` says the same number."""
    world.record(0.005 * world.step_ms, predicted_ms=0.01 * world.step_ms, noise=0.01, pairs=5)
    found, _, _ = explained(world, here)
    (noise,) = [cause for cause in found["causes"] if cause["name"] == of.NOISE]
    effect = effects(Record(world.folder / "ab"), "quick")["tpot"]
    percent = 100 * found["expected"]["ms"] / effect.base
    more = pairs_for(percent, effect.launch_spread, 0.95) - effect.pairs
    assert f"; {more} more pairs would tell" in noise["says"] and more > 0


def test_clients_and_a_change_alone_leave_all_unknown(here, world):
    world.args += ["--change", "mla_decode=1.5x"]
    world.results(0.0)
    found, text, code = explained(world, here)
    assert (names(found), code) == ([], 1)
    unknown = {cause["name"]: cause["record"] for cause in found["causes"] if cause["sure"] == "not known"}
    of_op = {*of.OF_OP} - {of.REFUSED, of.OTHER_BASE}
    assert set(unknown) == {*of_op, of.STALLS, *of.OF_STEP}
    assert all(unknown.values())
    assert text.startswith("It cannot be told what vanished, as what was expected is not known in ms: ")
    for record in unknown.values():
        assert record in " ".join(text.split())


def test_one_pair_has_the_interval_of_other_servers(here, world):
    world.profiled(world.swapped())
    world.results(world.gain_ms, pairs=1)
    found, text, code = explained(world, here)
    assert text.startswith("Nothing vanished") and code == 0
    assert found["observed"]["text"].endswith("1 pair, its interval that of other servers")
    width_ms = found["observed"]["high"] - found["observed"]["low"]
    assert width_ms == pytest.approx(0.068 * world.step_ms, rel=0.05)


def test_hits_in_a_table_say_that_none_was_missed(here, world):
    world.profiled(world.swapped())
    shape = "M:16, N:2112, K:7168"
    world.log(f"[aiter] shape is {shape}, found padded_{shape} is tuned on cu_num = 304 in x, kernel y!")
    found, _, _ = explained(world, here)
    assert of.TABLE_MISSED in names(found, "none seen")
    world.log("[aiter] import ...")
    found = json.loads(here("explain", *world.args, "--json", "-").stdout)
    assert of.TABLE_MISSED in names(found, "not known")


def test_a_miss_of_the_served_shape_is_certain(here, tmp_path):
    miss = "[aiter] shape is M:{}, N:2112, K:7168, not found tuned config in /a8w8_blockscale.csv, will use x"
    sure = {}
    for m in (16, 512):
        world = World(tmp_path / str(m), random.Random("miss"))
        (tmp_path / str(m)).mkdir()
        gemm = next(name for name in world.layer if "2112u" in name)
        world.run("block_scale_gemm", {"m": 16, "n": 2112, "k": 7168}, old=world.layer[gemm], kernel=gemm,
                  new=0.5 * world.layer[gemm])  # fmt: skip
        world.traces(world.server(), world.server())
        world.log(miss.format(m))
        found = found_in(world, here, [of.TABLE_MISSED], 0)
        sure[m] = found["causes"][0]["sure"]
    assert sure == {16: "certain", 512: "likely"}


def test_both_products_of_experts_may_be_launches_of_one_kernel(here, world):
    """A call takes twice as long alone as a launch in the step: it has two of them."""
    took = 2 * world.layer[MOE]
    world.run("fused_moe", {"tokens": 16}, old=took, new=0.6 * took)
    world.traces(world.server(), world.server())
    found, _, _ = explained(world, here)
    assert found["expected"]["ms"] == pytest.approx(0.4 * took * world.layers / 2e3, rel=0.01)


def test_cases_that_are_not_served_do_not_count(here, world):
    """Of two cases, one is served; the other one saves three times as much."""
    cases = [Case("mla_decode", {"batch": batch, "ctx": 4096}, "core", "ad hoc", 1.0) for batch in (16, 64)]
    records = []
    for case, us in zip(cases, (world.gain_us, 3 * world.gain_us), strict=True):
        for name, time, kernel in (("old", world.new_us + us, SPLIT), ("new", world.new_us, NEW)):
            ran = {"kernels": [kernel], "kernel_us": [time]}
            records.append(written_runs.cell(case, name, time, 0.002 * time, **ran))
        records.append(written_runs.finished(case))
    written_runs.write(world.folder / "run", records, cases, baseline="old")
    world.args += ["--run", str(world.folder / "run")]
    world.traces(world.server(), world.server(world.swapped()))
    found = found_in(world, here, [of.OTHER_SHAPES], 0)
    assert found["causes"][0]["ms"] == pytest.approx(world.gain_ms, rel=0.1)


def test_servers_that_differ_in_more_are_noted(here, world):
    world.record(world.gain_ms, info=lambda name: {"backend": name, "chunk": 1 + len(name)})
    found, _, _ = explained(world, here)
    assert "setting chunk: 5 -> 6" in found["notes"] and "variable QUICK: None -> 1" in found["notes"]


def test_files_of_one_name_are_told_apart(here, world):
    world.profiled(world.swapped())
    (world.folder / "other").mkdir()
    moved = (world.folder / "after.json").rename(world.folder / "other" / "before.json")
    world.args[-1] = str(moved)
    said = explained(world, here)[0]["observed"]["text"]
    assert str(moved) in said and str(world.folder / "before.json") in said


def test_a_step_that_was_cut_off_is_not_counted(tmp_path):
    whole = of_events(tmp_path, decode_steps(5, layers=4))
    cut = of_events(tmp_path, [*decode_steps(1, layers=1), *decode_steps(5, layers=4, at=1.8e15)])
    assert (whole.steps, cut.steps) == (5, 5)
    assert cut.ms == pytest.approx(whole.ms, rel=0.03)
    assert cut.calls_of(["fused_moe_kernel"]) == pytest.approx(whole.calls_of(["fused_moe_kernel"]))


def test_what_is_named_may_be_too_little(here, world):
    """A third of the layers lack the kernel; where the other two thirds went needs the trace before."""
    world.run()
    after = world.server(world.swapped(), partial=(world.layers // 3, world.layer))
    world.args += ["--trace", str(world.trace("after", after))]
    world.results(0.0)
    found = found_in(world, here, [of.NOT_CALLED], 1)
    assert found["rest"] == pytest.approx(2 / 3 * found["missing"], rel=0.1)


def test_a_kernel_that_differs_a_little_is_not_slower(here, world):
    """The largest one by 2.5 %, where the gain itself is small."""
    world.of_launch, world.gain_us = 0.0, 0.1 * world.old_us
    world.new_us = world.old_us - world.gain_us
    layer = world.swapped()
    world.profiled(layer | {MOE: 1.025 * layer[MOE]})
    found, text, _ = explained(world, here)
    assert names(found) == [], text
