"""Where nothing vanished, where noise hides it, where inputs say nothing, and subsets of the inputs."""

import json
import random
import re

import pytest

from harness.explain import causes as of
from harness.explain.step import decode_step
from harness.serving.ab.record import Record
from harness.serving.ab.result import MOST_LOOKED_AT, effects, pairs_for
from harness.serving.trace import decompose
from shapes.case import Case
from tests.harness.explain.test_planted import explained
from tests.support import written_runs
from tests.support.lost_gains import MOE, NEW, SPLIT, World
from tests.support.traces import decode_steps
from tests.support.traces import text as trace_text


def of_events(folder, events):
    path = folder / "t.json"
    path.write_text(trace_text(events))
    return decode_step(decompose(path))


SEEDS = pytest.mark.parametrize("seed", range(2))


@pytest.fixture
def world(tmp_path, seed):
    return World(tmp_path, random.Random(f"control {seed}"))


def names(found, *sure):
    return [cause["name"] for cause in found["causes"] if cause["sure"] in (sure or ("certain", "likely"))]


def swapped(world, **changes):
    world.run()
    world.traces(world.server(), world.server(world.swapped(), **changes))


@SEEDS
@pytest.mark.parametrize("of_clients", ["", "results", "record"])
def test_nothing_vanished(here, world, of_clients):
    swapped(world)
    if of_clients == "results":
        world.results(world.gain_ms)
    elif of_clients:
        world.record(world.gain_ms)
    found, text, code = explained(world, here)
    assert text.startswith("Nothing vanished: "), text
    assert (names(found), code) == ([], 0), text


@SEEDS
def test_a_gain_that_the_kernel_did_not_make_is_not_its_own(here, world):
    """TPOT fell as expected, though the kernel is in no step."""
    world.run()
    world.traces(world.server(), world.server())
    world.results(world.gain_ms)
    found, text, code = explained(world, here)
    assert text.startswith("What was saved is not the change's own, "), text
    assert of.CALLS in names(found) and code == 1


@SEEDS
@pytest.mark.parametrize("traced", [False, True])
def test_noise_is_no_finding(here, world, traced):
    world.record(0.5 * world.gain_ms, noise=0.15, pairs=4)
    if traced:
        swapped(world)
    found, text, code = explained(world, here)
    assert text.startswith("No finding: the interval of TPOT holds both no change and the "), text
    assert (names(found), names(found, "certain"), code) == ([of.NOISE], [], 1), text
    assert "more pairs would tell" in " ".join(text.split()) or "no number of pairs" in text
    assert found["rest"] == pytest.approx(0)


def test_with_noise_nothing_is_certain(here, tmp_path):
    world = World(tmp_path, random.Random("noise"))
    world.record(0.5 * world.gain_ms, noise=0.15, pairs=4, unread=["QUICK"])
    found, text, code = explained(world, here)
    assert "No finding: " in text and "; besides, nothing installed reads QUICK" in " ".join(text.split())
    assert (names(found, "certain"), code) == ([], 1)


def test_more_pairs_are_those_that_would_tell(here, tmp_path):
    """Launches 1 % apart and 1 % expected: `serving ab --dry-run` says the same number."""
    world = World(tmp_path, random.Random("pairs"))
    world.record(0.005 * world.step_ms, predicted_ms=0.01 * world.step_ms, noise=0.01, pairs=5)
    found, *_ = explained(world, here)
    (noise,) = [cause for cause in found["causes"] if cause["name"] == of.NOISE]
    effect = effects(Record(tmp_path / "ab"), "quick")["tpot"]
    percent = 100 * found["expected"]["ms"] / effect.base
    more = pairs_for(percent, effect.launch_spread, 0.95, MOST_LOOKED_AT) - effect.pairs
    assert f"; {more} more pairs would tell" in noise["says"] and more > 0


@SEEDS
def test_clients_and_a_change_alone_leave_all_unknown(here, world):
    world.args += ["--change", "mla_decode=1.5x"]
    world.results(0.0)
    found, text, code = explained(world, here)
    assert (names(found), code) == ([], 1)
    unknown = {cause["name"]: cause["record"] for cause in found["causes"] if cause["sure"] == "not known"}
    assert set(unknown) == {
        of.CALLS,
        of.UNREAD,
        of.SAME,
        of.NO_EFFECT,
        of.TABLE,
        of.SHAPES,
        of.LESS,
        of.STALLS,
        *of.OF_STEP,
    }
    assert all(unknown.values())
    assert text.startswith("It cannot be told what vanished, as what was expected is not known in ms: ")
    for record in unknown.values():
        assert record in " ".join(text.split())


@SEEDS
def test_a_factor_is_of_the_time_in_the_step_before(here, world):
    """fused_moe=1.5x, which the step then shows: names do not tell the kernels apart."""
    world.args += ["--change", "fused_moe=1.5x"]
    world.traces(world.server(), world.server(world.layer | {MOE: world.layer[MOE] / 1.5}))
    saved = world.layer[MOE] * world.layers / 3e3
    world.results(saved)
    found, text, code = explained(world, here)
    assert text.startswith("Nothing vanished"), text
    assert (names(found), code) == ([], 0)
    assert found["expected"]["ms"] == pytest.approx(saved, rel=0.05)


@SEEDS
def test_what_no_cause_has_is_not_explained(here, world):
    """A quarter of what is missing went to slower kernels, which TPOT does not show whole: the step of the
    traces saved more, so what lies between steps has the rest."""
    world.run()
    layer = world.swapped()
    layer[MOE] += 0.4 * world.gain_us
    world.traces(world.server(), world.server(layer))
    world.results(0.0)
    found, text, code = explained(world, here)
    assert (names(found), code) == ([of.STALLS, of.SLOWER], 0), text


@SEEDS
def test_the_trace_with_the_change_alone_tells_calls(here, world):
    world.run()
    world.trace("before", world.server())
    world.args += ["--trace", str(world.trace("after", world.server()))]
    world.results(0.0)
    found, text, code = explained(world, here)
    assert (names(found), code) == ([of.CALLS], 0), text
    assert NEW.removeprefix("void ")[:20] in text.splitlines()[0]


@SEEDS
def test_the_trace_with_the_change_alone_does_not_tell_where_else_it_went(here, world):
    world.run()
    world.args += ["--trace", str(world.trace("after", world.server(world.swapped())))]
    world.results(0.0)
    found, text, code = explained(world, here)
    assert (names(found), code) == ([], 1), text
    assert text.startswith("It is not known where the gain went: "), text
    assert of.CALLS in names(found, "none seen") and {*of.OF_STEP} <= {*names(found, "not known")}


@SEEDS
def test_traces_of_other_batches_are_not_compared(here, world):
    """24 requests after, and kernels that take longer for it: that is other work, no slower kernel."""
    world.run()
    layer = {name: 1.3 * us for name, us in world.swapped().items()}
    world.traces(world.server(), world.server(layer, batch=24))
    found, text, code = explained(world, here)
    assert (names(found), code) == ([of.WORK], 0), text
    assert "batch=16 ctx=4096 -> batch=24 ctx=4096" in " ".join(text.split())


def test_one_pair_has_the_interval_of_other_servers(here, tmp_path):
    world = World(tmp_path, random.Random("one pair"))
    swapped(world)
    world.results(world.gain_ms, pairs=1)
    found, text, code = explained(world, here)
    assert text.startswith("Nothing vanished") and code == 0
    assert found["observed"]["text"].endswith("1 pair, its interval that of other servers")
    assert found["observed"]["high"] - found["observed"]["low"] == pytest.approx(
        0.068 * world.step_ms, rel=0.05
    )


def test_a_log_that_refuses_the_change_is_named(here, tmp_path):
    world = World(tmp_path, random.Random("refused"))
    world.record(
        0.0, log="WARNING flashinfer_trtllm has no kernel for this linear layer type; using triton\n"
    )
    found, text, code = explained(world, here)
    assert (names(found), code) == ([of.REFUSED], 0), text


def test_hits_in_a_table_say_that_none_was_missed(here, tmp_path):
    world = World(tmp_path, random.Random("hits"))
    swapped(world)
    shape = "M:16, N:2112, K:7168"
    world.log(f"[aiter] shape is {shape}, found padded_{shape} is tuned on cu_num = 304 in x, kernel y!")
    found, *_ = explained(world, here)
    assert of.TABLE in names(found, "none seen")
    world.log("[aiter] import ...")
    assert of.TABLE in names(json.loads(here("explain", *world.args, "--json", "-").stdout), "not known")


def test_a_miss_of_the_served_shape_is_certain(here, tmp_path):
    miss = (
        "[aiter] shape is M:{}, N:2112, K:7168, not found tuned config in /a8w8_blockscale.csv, will use x!"
    )
    sure = {}
    for m in (16, 512):
        world = World(tmp_path / str(m), random.Random("miss"))
        (tmp_path / str(m)).mkdir()
        gemm = next(name for name in world.layer if "2112u" in name)
        world.run("block_scale_gemm", {"m": 16, "n": 2112, "k": 7168}, old=world.layer[gemm], kernel=gemm,
                  new=0.5 * world.layer[gemm])  # fmt: skip
        world.traces(world.server(), world.server())
        world.log(miss.format(m))
        found, text, code = explained(world, here)
        assert (names(found), code) == ([of.TABLE], 0), text
        sure[m] = found["causes"][0]["sure"]
    assert sure == {16: "certain", 512: "likely"}


def test_all_launches_alike_are_the_same_server(here, tmp_path):
    world = World(tmp_path, random.Random("alike"))
    world.record(0.0, change={})
    found, text, code = explained(world, here)
    assert (names(found, "certain"), code) == ([of.SAME], 0), text
    assert "quick and base are launched alike" in " ".join(text.split())


@pytest.mark.parametrize("change", [{"env": {"QUICK": "1"}}, {"image": "quick:1"}])
def test_settings_do_not_show_what_a_variable_or_an_image_does(here, tmp_path, change):
    """Equal settings of the servers are no evidence there."""
    world = World(tmp_path, random.Random("variable"))
    world.record(0.0, info=lambda name: {"backend": "one"}, change=change)
    found, text, code = explained(world, here)
    assert (names(found), code) == ([], 1), text


def test_a_name_of_several_that_is_not_read_is_a_note(here, tmp_path):
    world = World(tmp_path, random.Random("several"))
    world.record(0.0, unread=["ANOTHER"])
    found, text, code = explained(world, here)
    assert (names(found), code) == ([], 1)
    assert "note: nothing installed reads ANOTHER" in text


def test_both_products_of_experts_may_be_launches_of_one_kernel(here, tmp_path):
    """A call takes twice as long alone as a launch in the step: it has two of them."""
    world = World(tmp_path, random.Random("products"))
    took = 2 * world.layer[MOE]
    world.run("fused_moe", {"tokens": 16}, old=took, new=0.6 * took)
    world.traces(world.server(), world.server())
    found, *_ = explained(world, here)
    assert found["expected"]["ms"] == pytest.approx(0.4 * took * world.layers / 2e3, rel=0.01)


@pytest.mark.parametrize("name", ["quick::one_pass_mla_kernel<half, 128>(Params)", NEW.removeprefix("void ")])
def test_a_kernel_is_known_without_its_template_values(here, tmp_path, name):
    world = World(tmp_path, random.Random("stem"))
    world.run()
    after = world.server(partial=(world.layers // 2, world.swapped()), renamed={NEW: name})
    world.traces(world.server(), after)
    found, text, code = explained(world, here)
    assert (names(found), code) == ([of.CALLS], 0), text
    assert re.search(r"The new kernel takes 5[0-3] % of the calls only", " ".join(text.split()))


def test_without_a_run_a_kernel_of_no_known_class_stands_for_those_that_went(here, tmp_path):
    world = World(tmp_path, random.Random("unknown"))
    world.args += ["--change", f"mla_decode={world.old_us / world.new_us:.4f}x"]
    world.traces(world.server(), world.server(world.swapped(), renamed={NEW: "fancy_new_thing"}))
    found, text, code = explained(world, here)
    assert text.startswith("Nothing vanished") and (names(found), code) == ([], 0), text


def test_without_a_run_the_kernels_of_both_traces_tell_how_many_calls_changed(here, tmp_path):
    world = World(tmp_path, random.Random("part"))
    world.args += ["--change", f"mla_decode={world.old_us / world.new_us:.4f}x"]
    world.traces(world.server(), world.server(partial=(world.layers // 2, world.swapped())))
    found, text, code = explained(world, here)
    assert (names(found), code) == ([of.CALLS], 0), text
    # A step that the profiler cut off has the first layers alone.
    assert re.search(r"The new kernel takes 5[0-3] % of the calls only", " ".join(text.split()))


def test_cases_that_are_not_served_do_not_count(here, tmp_path):
    """Of two cases, one is served; the other one saves three times as much."""
    world = World(tmp_path, random.Random("two cases"))
    cases = [Case("mla_decode", {"batch": batch, "ctx": 4096}, "core", "ad hoc", 1.0) for batch in (16, 64)]
    records = []
    for case, us in zip(cases, (world.gain_us, 3 * world.gain_us), strict=True):
        for name, time, kernel in (("old", world.new_us + us, SPLIT), ("new", world.new_us, NEW)):
            ran = {"kernels": [kernel], "kernel_us": [time]}
            records.append(written_runs.cell(case, name, time, 0.002 * time, **ran))
        records.append(written_runs.finished(case))
    written_runs.write(tmp_path / "run", records, cases, baseline="old")
    world.args += ["--run", str(tmp_path / "run")]
    world.traces(world.server(), world.server(world.swapped()))
    found, text, code = explained(world, here)
    assert (names(found), code) == ([of.SHAPES], 0), text
    assert found["causes"][0]["ms"] == pytest.approx(world.gain_ms, rel=0.1)


def test_time_between_steps_counts_only_where_both_traces_show_it(here, tmp_path):
    """Three steps, of which one is followed by another, beside ten."""
    world = World(tmp_path, random.Random("between"), steps=3)
    world.run()
    before = world.trace("before", world.server())
    world.steps = 10
    world.args += ["--trace", str(before), str(world.trace("after", world.server(world.swapped())))]
    found, text, code = explained(world, here)
    assert text.startswith("Nothing vanished") and (names(found), code) == ([], 0), text


def test_another_way_to_launch_is_said(here, tmp_path):
    world = World(tmp_path, random.Random("launch"))
    world.run()
    before = world.server(graphs=True, operators=True)
    wait = 400 + 800 * world.gain_ms
    world.traces(before, world.server(world.swapped(), graphs=False, operators=True, wait_us=wait))
    found, text, code = explained(world, here)
    assert (names(found), code) == ([of.IDLE], 0), text
    assert (
        found["causes"][0]["says"]
        == "The device waits longer for the host: single launches instead of a graph"
    )


def test_servers_that_differ_in_more_are_noted(here, tmp_path):
    world = World(tmp_path, random.Random("differ"))
    world.record(world.gain_ms, info=lambda name: {"backend": name, "chunk": 1 + len(name)})
    found, *_ = explained(world, here)
    assert "setting chunk: 5 -> 6" in found["notes"] and "variable QUICK: None -> 1" in found["notes"]


def test_files_of_one_name_are_told_apart(here, tmp_path):
    world = World(tmp_path, random.Random("names"))
    swapped(world)
    (tmp_path / "other").mkdir()
    moved = (tmp_path / "after.json").rename(tmp_path / "other" / "before.json")
    world.args[-1] = str(moved)
    found, *_ = explained(world, here)
    assert (
        str(moved) in found["observed"]["text"] and str(tmp_path / "before.json") in found["observed"]["text"]
    )


def test_numbers_that_serving_load_calls_wrong_are_noted(here, tmp_path):
    world = World(tmp_path, random.Random("wrong"))
    swapped(world)
    world.results(world.gain_ms, duration=1.0)
    found, *_ = explained(world, here)
    assert any("`serving load` finds its numbers wrong: " in note for note in found["notes"])


@SEEDS
def test_launches_that_differ_a_little_show_no_cause(here, world):
    world.of_launch = 0.01
    swapped(world)
    found, text, code = explained(world, here)
    assert text.startswith("Nothing vanished") and (names(found), code) == ([], 0), text


def test_pauses_and_steps_that_were_cut_off_are_no_idle_time(here, tmp_path):
    world = World(tmp_path, random.Random("pauses"))
    swapped(world, pauses=4)
    found, text, code = explained(world, here)
    assert text.startswith("Nothing vanished") and (names(found), code) == ([], 0), text


def test_a_step_that_was_cut_off_is_not_counted(tmp_path):
    whole = of_events(tmp_path, decode_steps(5, layers=4))
    cut = of_events(tmp_path, [*decode_steps(1, layers=1), *decode_steps(5, layers=4, at=1.8e15)])
    assert (whole.steps, cut.steps) == (5, 5)
    assert cut.ms == pytest.approx(whole.ms, rel=0.03)
    assert cut.calls(["fused_moe_kernel"]) == pytest.approx(whole.calls(["fused_moe_kernel"]))


@SEEDS
def test_a_saving_that_is_a_little_less_in_the_server_is_usual(here, world):
    """By 13 %: replays of a step came within 12 % of it."""
    world.run()
    layer = world.swapped(world.new_us + 0.13 * world.gain_us)
    world.traces(world.server(), world.server(layer))
    found, text, code = explained(world, here)
    assert text.startswith("Nothing vanished") and (names(found), code) == ([], 0), text


def test_an_op_that_became_slower_is_not_the_same(here, tmp_path):
    world = World(tmp_path, random.Random("slower"))
    world.args += ["--change", "fused_moe=1.3x"]
    world.traces(world.server(), world.server(world.layer | {MOE: 1.5 * world.layer[MOE]}))
    found, text, code = explained(world, here)
    assert (names(found), code) == ([of.LESS], 0), text


def test_what_is_named_may_be_too_little(here, tmp_path):
    """A third of the layers lack the kernel; where the other two thirds went needs the trace before."""
    world = World(tmp_path, random.Random("little"))
    world.run()
    after = world.server(world.swapped(), partial=(world.layers // 3, world.layer))
    world.args += ["--trace", str(world.trace("after", after))]
    world.results(0.0)
    found, text, code = explained(world, here)
    assert (names(found), code) == ([of.CALLS], 1), text
    assert found["rest"] == pytest.approx(2 / 3 * found["missing"], rel=0.1)


def test_a_kernel_that_differs_a_little_is_not_slower(here, tmp_path):
    """The largest one by 2.5 %, where the gain itself is small."""
    world = World(tmp_path, random.Random("a little"))
    world.of_launch, world.gain_us = 0.0, 0.1 * world.old_us
    world.new_us = world.old_us - world.gain_us
    world.run()
    layer = world.swapped()
    world.traces(world.server(), world.server(layer | {MOE: 1.025 * layer[MOE]}))
    found, text, _ = explained(world, here)
    assert names(found) == [], text


def test_other_work_that_changed_nothing_is_a_note(here, tmp_path):
    world = World(tmp_path, random.Random("note"))
    swapped(world)
    world.results(world.gain_ms, total_output_tokens=120_000)
    found, text, code = explained(world, here)
    assert text.startswith("Nothing vanished") and (names(found), code) == ([], 0), text
    assert any(note.startswith("tokens out of a run: 147400 -> 120000") for note in found["notes"])


@SEEDS
@pytest.mark.parametrize("is_swapped", [False, True])
def test_traces_without_a_run_or_a_change(here, world, is_swapped):
    """What was expected is in the record alone: the same kernels are the same server."""
    world.variant = False
    world.traces(world.server(), world.server(world.swapped() if is_swapped else None))
    world.record(0.0)
    found, text, code = explained(world, here)
    assert (names(found), code) == ([of.STALLS if is_swapped else of.NO_EFFECT], 0), text
