"""What is not to be named, or not for certain: causes that the inputs do not show."""

import json
import random
from dataclasses import replace

import pytest

from harness.explain import causes as of
from harness.explain.alone import timed_alone
from harness.explain.inputs import steps_in
from harness.explain.served import Log
from harness.explain.sides import Sides
from shapes.case import Case
from tests.harness.explain.test_planted import explained
from tests.support import written_runs
from tests.support.command_line import error_line
from tests.support.lost_gains import COMBINE, GEMMS, MOE, NEW, SPLIT, World
from tests.support.serving_files import SGLANG_ROW

OTHER = "void another_name_of_new(x)"


@pytest.fixture
def world(tmp_path):
    return World(tmp_path, random.Random("s"))


def named(found, *sure):
    return {cause["name"]: cause["ms"] for cause in found["causes"]
            if cause["sure"] in (sure or ("certain", "likely"))}  # fmt: skip


def swap(world, **changes):
    return world.server(world.swapped(), **changes)


def words(text):
    return " ".join(text.split())


# Other work


def test_traces_of_other_batches_explain_nothing_of_what_clients_saw(here, world):
    world.run()
    layer = {name: 1.3 * us for name, us in world.swapped().items()}
    world.traces(world.server(), world.server(layer, batch=24))
    world.results(0.0)
    found, text, code = explained(world, here)
    assert (named(found), code) == ({}, 1), text
    assert any(note.startswith("the traces cannot be compared: ") for note in found["notes"])


@pytest.mark.parametrize("tokens", [985, 960])
def test_a_few_tokens_less_are_a_note(here, world, tokens):
    world.record(0.0, tokens=(1000, tokens))
    found, text, code = explained(world, here)
    assert (named(found), code) == ({}, 1), text
    assert any(note.startswith("tokens out of a run: 147000 -> ") for note in found["notes"])


def test_other_work_without_a_trace_is_of_no_known_size(here, world):
    world.record(0.0, tokens=(1000, 800))
    found, text, code = explained(world, here)
    assert (named(found), named(found, "certain"), code) == ({of.WORK: None}, {}, 1), text
    assert text.startswith("Likely: The two sides did other work: tokens out of a run: 147000 -> 117600")


def test_other_work_is_not_both_seen_and_not_seen(here, world):
    world.traces(world.server(), swap(world))
    world.results(0.0, completed=150, total_output_tokens=120_000)
    found, *_ = explained(world, here)
    names = [cause["name"] for cause in found["causes"]]
    assert len(names) == len(set(names)) and of.WORK in named(found)


# Logs

UNKNOWN = "WARNING Unknown vLLM environment variable detected: {}"
DEFAULT = "Using default MoE config. Performance might be sub-optimal! Config file not found at E=257.json"


@pytest.mark.parametrize(("name", "base", "is_cause"), [
    ("VLLM_OTHER", True, False), ("VLLM_OTHER", False, True), ("QUICK", True, True),
])  # fmt: skip
def test_a_refusal_is_of_the_change(here, world, name, base, is_cause):
    world.record(0.0, log=UNKNOWN.format(name))
    for path in world.folder.glob("ab/launches/*-base/server.log") if base else ():
        path.write_text(UNKNOWN.format(name))
    found, text, code = explained(world, here)
    assert ([*named(found)], code) == ([of.REFUSED] if is_cause else [], 0 if is_cause else 1), text


def test_a_refusal_in_a_log_alone_leaves_the_kernel_not_called(here, world):
    world.run()
    world.traces(world.server(), world.server())
    world.log(UNKNOWN.format("VLLM_OTHER"))
    found, text, _ = explained(world, here)
    assert [*named(found, "certain")] == [of.CALLS], text
    assert any("VLLM_OTHER" in note for note in found["notes"])


@pytest.mark.parametrize("change", [[], ["--change", "fused_moe=1.5x"]])
def test_a_missed_table_that_need_not_be_of_the_change_is_a_note(here, world, change):
    """Without an op, or where both logs have it."""
    world.record(0.0, log=DEFAULT)
    for path in world.folder.glob("ab/launches/*-base/server.log") if change else ():
        path.write_text(DEFAULT)
    world.args += change
    found, text, code = explained(world, here)
    assert (named(found), code) == ({}, 1), text
    assert any("fused_moe: Using default MoE config" in note for note in found["notes"])


# Not called


def test_swapped_traces_are_asked_about(here, world):
    world.run()
    world.traces(swap(world), world.server())
    assert "and not in after.json: are the traces swapped?" in error_line(here("explain", *world.args))


def test_a_new_kernel_of_another_name_stands_for_that_of_the_run(here, world):
    world.run()
    world.traces(world.server(), swap(world, renamed={NEW: OTHER}))
    found, text, code = explained(world, here)
    assert (text.startswith("Nothing vanished"), named(found), code) == (True, {}, 0), text


def test_half_of_the_calls_of_a_kernel_of_another_name_are_not_certain(here, world):
    """Its old kernels are left, so that it is not guessed."""
    world.run()
    after = world.server(partial=(world.layers // 2, world.swapped()), renamed={NEW: OTHER})
    world.traces(world.server(), after)
    found, text, _ = explained(world, here)
    assert of.CALLS in named(found), text


def test_at_other_shapes_it_is_not_certain_that_a_kernel_is_not_called(here, world):
    world.run(sizes={"batch": 64, "ctx": 1024})
    world.traces(world.server(), world.server())
    found, text, _ = explained(world, here)
    assert [*named(found, "likely")] == [of.CALLS], text
    assert "the run timed other shapes than are served (batch=16 ctx=4096)" in words(text)


@pytest.mark.parametrize("texts", [["mla_decode"], ["mla_decode", "fused_moe"]])
def test_kernels_that_stay_do_not_count_against_the_new_one(here, world, texts):
    """A combine kernel, and the other op of two."""
    factor = (world.layer[SPLIT] + world.layer[COMBINE]) / (0.5 * world.layer[SPLIT] + world.layer[COMBINE])
    layer = {NEW if name == SPLIT else name: us for name, us in world.layer.items()}
    layer |= {NEW: 0.5 * world.layer[SPLIT], MOE: world.layer[MOE] / (1 if len(texts) == 1 else 1.2)}
    world.args += ["--change", f"mla_decode={factor:.4f}x"]
    world.args += ["--change", "fused_moe=1.2x"] if len(texts) > 1 else []
    world.traces(world.server(), world.server(layer))
    found, text, code = explained(world, here)
    assert (text.startswith("Nothing vanished"), named(found), code) == (True, {}, 0), text


def test_without_names_of_a_run_the_part_of_the_calls_is_not_certain(here, world):
    world.args += ["--change", f"mla_decode={world.old_us / world.new_us:.4f}x"]
    world.traces(world.server(), world.server(partial=(world.layers // 2, world.swapped())))
    found, text, _ = explained(world, here)
    assert [*named(found, "likely")] == [of.CALLS], text


def test_an_op_that_is_in_no_trace_is_a_mistake(here, world):
    world.args += ["--change", "mha_prefill=1.5x"]
    world.traces(world.server(), world.server())
    assert "no kernel of mha_prefill in " in error_line(here("explain", *world.args))


# The same server


@pytest.mark.parametrize("more", [{"unread": ["QUICK"]}, {"change": {}}])
def test_servers_that_differ_are_not_the_same(here, world, more):
    world.record(0.3 * world.gain_ms, noise=0.0005, **more)
    found, text, code = explained(world, here)
    assert (named(found), code) == ({}, 1), text
    assert any("but TPOT differs" in note for note in found["notes"])


def test_equal_settings_are_likely_at_most(here, world):
    world.record(0.0, info=lambda name: {"backend": "slow"}, change={"flags": "--quick"})
    found, *_ = explained(world, here)
    assert [*named(found, "likely")] == [of.SAME]
    assert not any(cause["record"] for cause in found["causes"] if cause["name"] == of.SAME)


def test_where_a_variable_differs_the_change_is_without_effect(here, world):
    world.args += ["--change", "fused_moe=1.3x"]
    world.traces(world.server(), world.server())
    world.record(0.0, predicted_ms=0.3 * world.gain_ms)
    found, text, _ = explained(world, here)
    assert next(iter(named(found))) == of.NO_EFFECT, text


# Several tokens of a step


def test_speculation_that_is_not_reported_is_no_stall(here, world):
    world.run()
    world.traces(world.server(), swap(world))
    world.results(0.0, tpot=world.step_ms / 2.5)
    found, text, _ = explained(world, here)
    assert of.STALLS not in named(found), text
    assert any(note.endswith("several tokens a step?") for note in found["notes"])


def test_of_several_predictions_of_one_change_that_of_the_arm_counts(here, world):
    world.record(world.gain_ms)
    path = world.folder / "ab" / "ab.json"
    document = json.loads(path.read_text())
    (prediction,) = document["predictions"]
    document["predictions"] = [
        prediction | {"change": 3 * prediction["change"]},
        prediction | {"of": "quick"},
    ]
    path.write_text(json.dumps(document))
    found, text, code = explained(world, here)
    assert text.startswith("Nothing vanished") and code == 0
    assert found["expected"]["ms"] == pytest.approx(world.gain_ms)


# The sign


def loss(world, observed):
    """Predicted: 10 % of a step longer."""
    world.record(observed * world.step_ms, predicted_ms=-0.1 * world.step_ms)
    path = world.folder / "ab" / "ab.json"
    document = json.loads(path.read_text())
    change = document["predictions"][0]["change"]
    document["predictions"][0] |= {"low": 0.8 * change, "high": 1.2 * change}
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(("observed", "says"), [
    (-0.1, "As predicted, it is a loss: TPOT became "),
    (0.05, "Serving did better than expected: "),
    (-0.3, "The loss is larger than expected: TPOT became "),
])  # fmt: skip
def test_a_loss_that_was_predicted(here, world, observed, says):
    loss(world, observed)
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
    world.run()
    layer = world.swapped()
    layer[MOE] *= 1.08
    world.traces(world.server(), world.server(layer))
    world.record(world.gain_ms, noise=0.05, pairs=8)
    found, text, _ = explained(world, here)
    assert of.SLOWER not in named(found), text


def test_a_small_gain_has_no_idle_device(here, world):
    """Of 3 % of a step, beside a wait that differs by less than launches do."""
    world.new_us = world.old_us - 0.03e3 * world.step_ms / world.layers
    world.run()
    wait = 400 + world.layers + 0.007e3 * world.step_ms
    world.traces(world.server(), swap(world, wait_us=wait))
    found, text, _ = explained(world, here)
    assert of.IDLE not in named(found), text


# Shares and inputs


def test_shares_are_of_what_was_expected(here, world):
    world.run()
    world.traces(world.server(), world.server(partial=(world.layers // 2, world.swapped())))
    found, *_ = explained(world, here)
    first = found["causes"][0]
    assert first["share"] == pytest.approx(first["ms"] / found["expected"]["ms"])


def test_traces_that_are_there_are_not_asked_for(here, world):
    world.traces(world.server(), swap(world))
    world.results(0.0)
    found, *_ = explained(world, here)
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
    assert "results of several concurrencies (1, 16): give those of one load" in error_line(
        here("explain", *files)
    )


def test_a_file_is_not_both_sides(here, world):
    world.results(0.0)
    file = world.folder / "before0.jsonl"
    assert "is both before and after" in error_line(here("explain", "--before", file, "--after", file))


def test_more_than_all_is_all(here, world):
    """The kernel is not called, and the old one takes less than before: more than what is missing."""
    world.run()
    layer = dict(world.layer)
    layer[MOE] -= 0.3 * world.gain_us
    world.traces(world.server(), world.server(layer))
    found, text, _ = explained(world, here)
    assert found["causes"][0]["ms"] > 1.2 * found["missing"]
    assert "that is all of the " in words(text), text


def test_on_a_cpu_nothing_waits_for_the_host(tmp_path):
    world = World(tmp_path, random.Random("cpu"))
    world.run()
    world.traces(world.server(), swap(world, wait_us=400 + 900 * world.gain_ms))
    alone = timed_alone(str(tmp_path / "run"), None)
    steps = steps_in(world.args[-2:], [], alone, Sides(), Log())
    on_cpu = replace(steps, after=replace(steps.after, on_cpu=True))
    named_of = [{cause.name for cause in of.of_step(each) if cause.named} for each in (steps, on_cpu)]
    assert (of.IDLE in named_of[0], of.IDLE in named_of[1]) == (True, False)
