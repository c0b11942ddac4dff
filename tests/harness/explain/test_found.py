"""What is named in made-up servers and what is not, as the inputs do not show it."""

import json
import random

import pytest

from harness.explain import causes as of
from harness.explain.step import ChangedOp, DecodeStep, Kernel, KernelSwap
from tests.harness.explain.test_planted import found_in, names
from tests.support.lost_gains import COMBINE, MOE, NEW, SPLIT, World

NOTHING, LIKELY = "^Nothing vanished: ", "^Likely: "
ALIEN = "WARNING Unknown vLLM environment variable detected: VLLM_OTHER"
OWN = ALIEN.replace("VLLM_OTHER", "QUICK")
NO_KERNEL = "WARNING x has no kernel for this linear layer type; using triton"
DEFAULT = "Using default MoE config. Performance might be sub-optimal! Config file not found at E=257.json"
HALF = "The new kernel takes 5[0-3] % of the calls only"
"""A step that the profiler cut off has the first layers alone."""


@pytest.fixture
def world(tmp_path):
    return World(tmp_path, random.Random("s"))


def one_backend(name):
    return {"backend": "one"}


def half_of_the_layers(world, **changes):
    return world.server(partial=(world.layers // 2, world.swapped()), **changes)


def of_experts(world, factor):
    """The layer with experts that are so much faster."""
    return world.layer | {MOE: world.layer[MOE] / factor}


@pytest.mark.parametrize(("record", "base_log", "words", "wanted", "code", "says"), [
    ({"log": NO_KERNEL}, "", "", [of.REFUSED], 0, ""),
    ({"log": ALIEN}, "", "", [of.REFUSED], 0, ""),
    ({"log": OWN}, OWN, "", [of.REFUSED], 0, ""),
    ({"log": ALIEN}, ALIEN, "", [], 1, ""),
    ({"log": DEFAULT}, "", "", [], 1, "note: .*fused_moe: Using default"),
    ({"log": DEFAULT}, DEFAULT, "--change fused_moe=1.5x", [], 1, "note: .*fused_moe: Using default"),
    ({"change": {}}, "", "", [of.SAME_SERVER], 0, "quick and base are launched alike"),
    ({"info": one_backend, "change": {"flags": "--quick"}}, "", "", [of.SAME_SERVER], 0, LIKELY),
    # Settings do not show what a variable or an image does.
    ({"info": one_backend}, "", "", [], 1, ""),
    ({"info": one_backend, "change": {"image": "quick:1"}}, "", "", [], 1, ""),
    ({"unread": ["ANOTHER"]}, "", "", [], 1, "note: nothing installed reads ANOTHER"),
    ({"unread": ["QUICK"], "saved": 0.3, "noise": 0.0005}, "", "", [], 1, "note: .*but TPOT differs"),
    ({"change": {}, "saved": 0.3, "noise": 0.0005}, "", "", [], 1, "note: .*but TPOT differs"),
    ({"tokens": (1000, 985)}, "", "", [], 1, "note: tokens out of a run: 147000 -> "),
    ({"tokens": (1000, 960)}, "", "", [], 1, "note: tokens out of a run: 147000 -> "),
    ({"tokens": (1000, 800)}, "", "", [of.OTHER_WORK], 1, LIKELY + "The two sides did other work: tokens"),
])  # fmt: skip
def test_of_a_record(here, world, record, base_log, words, wanted, code, says):
    """saved: the part of the gain that TPOT shows."""
    world.record(**{"saved_ms": record.pop("saved", 0.0) * world.gain_ms, **record})
    for path in world.folder.glob("ab/launches/*-base/server.log"):
        path.write_text(base_log)
    world.args += words.split()
    found_in(world, here, wanted, code, says)


@pytest.mark.parametrize(("after", "wanted", "says"), [
    (lambda w: w.server(w.swapped()), [], NOTHING),
    (lambda w: w.server(w.swapped(), pauses=4), [], NOTHING),
    (lambda w: w.server(w.swapped(), renamed={NEW: "void another_name_of_new(x)"}), [], NOTHING),
    # By 13 % less than alone: replays of a step came within 12 % of it.
    (lambda w: w.server(w.swapped(w.new_us + 0.13 * w.gain_us)), [], NOTHING),
    (lambda w: half_of_the_layers(w, renamed={NEW: "quick::one_pass_mla_kernel<half>(P)"}), [of.NOT_CALLED],
     HALF),
    (lambda w: half_of_the_layers(w, renamed={NEW: NEW.removeprefix("void ")}), [of.NOT_CALLED], HALF),
    # The old kernels are left, so that it is not guessed.
    (lambda w: half_of_the_layers(w, renamed={NEW: "void another_name(x)"}),
     [of.KERNELS_BESIDE, of.NOT_CALLED], ""),
    # That is other work, no slower kernel.
    (lambda w: w.server({name: 1.3 * us for name, us in w.swapped().items()}, batch=24), [of.OTHER_WORK],
     "batch=16 ctx=4096 -> batch=24 ctx=4096"),
])  # fmt: skip
def test_of_traces_and_a_run(here, world, after, wanted, says):
    world.run()
    world.traces(world.server(), after(world))
    found_in(world, here, wanted, 0, says)


@pytest.mark.parametrize(("change", "after", "wanted", "says"), [
    ("mla_decode={mla:.4f}x", lambda w: w.server(w.swapped(), renamed={NEW: "fancy_new_thing"}), [], NOTHING),
    ("mla_decode={mla:.4f}x", lambda w: half_of_the_layers(w), [of.NOT_CALLED], LIKELY + HALF),
    ("fused_moe=1.5x", lambda w: w.server(of_experts(w, 1.5)), [], NOTHING),
    ("fused_moe=1.3x", lambda w: w.server(of_experts(w, 1 / 1.5)), [of.LESS_IN_STEP], ""),
    ("mla_decode={mla:.4f}x --change fused_moe=1.2x", lambda w: w.server(
        {NEW if name == SPLIT else name: us for name, us in of_experts(w, 1.2).items() if name != COMBINE}
        | {NEW: w.new_us}), [], NOTHING),
])  # fmt: skip
def test_of_traces_and_a_change(here, world, change, after, wanted, says):
    world.args += ["--change", *change.format(mla=world.old_us / world.new_us).split()]
    world.traces(world.server(), after(world))
    found_in(world, here, wanted, 0, says)


@pytest.mark.parametrize(("seen", "wanted", "says"), [
    (lambda w: w.results(w.gain_ms), [], NOTHING),
    (lambda w: w.record(w.gain_ms), [], NOTHING),
    (lambda w: w.results(w.gain_ms, total_output_tokens=120_000), [], "note: tokens out of a run: "),
    (lambda w: w.results(w.gain_ms, duration=1.0), [], "note: `serving load` finds its numbers wrong: "),
])  # fmt: skip
def test_what_clients_see_of_a_gain_that_is_there(here, world, seen, wanted, says):
    world.profiled(world.swapped())
    seen(world)
    found_in(world, here, wanted, 0, says)


@pytest.mark.parametrize(("swaps", "wanted"), [(False, of.NO_EFFECT), (True, of.STALLS)])
def test_traces_without_a_run_or_a_change(here, world, swaps, wanted):
    """What was expected is in the record alone: the same kernels are the same server."""
    world.variant = False
    world.traces(world.server(), world.server(world.swapped() if swaps else None))
    world.record(0.0)
    found_in(world, here, [wanted], 0, "")


def test_kernels_that_stay_do_not_count_against_the_new_one(here, world):
    """A combine kernel."""
    new_us = 0.5 * world.layer[SPLIT]
    factor = world.old_us / (new_us + world.layer[COMBINE])
    world.args += ["--change", f"mla_decode={factor:.4f}x"]
    layer = {NEW if name == SPLIT else name: us for name, us in world.layer.items()}
    world.traces(world.server(), world.server(layer | {NEW: new_us}))
    found_in(world, here, [], 0, NOTHING)


def test_launches_that_differ_a_little_show_no_cause(here, world):
    world.of_launch = 0.01
    world.profiled(world.swapped())
    found_in(world, here, [], 0, NOTHING)


def test_kernels_without_calls_tell_nothing_of_the_clock():
    """An operator's stretch that goes on from the step before has none."""
    kernels = {name: Kernel(name, "norm", calls, 1.0, 1.0) for name, calls in (("a", 0.0), ("b", 2.0))}
    step = DecodeStep(
        file="t",
        steps=1,
        kernels=kernels,
        idle_ms=0.0,
        half_width_ms={},
        until_next=True,
        launch="",
        on_cpu=True,
    )
    changed = ChangedOp(swap=KernelSwap(), before=(), after=(), run_names=(), calls=1.0, new_part=None)
    assert of._clock(step, step, changed) == (1.0, {"b": 1.0})


def test_time_between_steps_counts_only_where_both_traces_show_it(here, world):
    """Three steps, of which one is followed by another, beside ten."""
    world.run()
    world.steps = 3
    before = world.trace("before", world.server())
    world.steps = 10
    world.args += ["--trace", str(before), str(world.trace("after", world.server(world.swapped())))]
    found_in(world, here, [], 0, NOTHING)


@pytest.mark.parametrize(("swaps", "wanted", "says"), [
    (False, [of.NOT_CALLED], "^The new kernel was not called: quick::one_pass"),
    (True, [], "^It is not known where the gain went: .* none seen: not called"),
])  # fmt: skip
def test_the_trace_with_the_change_alone_tells_calls(here, world, swaps, wanted, says):
    """It does not tell where else the gain went."""
    world.run()
    after = world.server(world.swapped() if swaps else None)
    world.args += ["--trace", str(world.trace("after", after))]
    world.results(0.0)
    found = found_in(world, here, wanted, int(swaps), says)
    assert {*of.OF_STEP} <= {*names(found, "not known")}


def test_traces_of_other_batches_explain_nothing_of_what_clients_saw(here, world):
    world.profiled(world.swapped(1.3 * world.new_us), batch=24)
    world.results(0.0)
    found_in(world, here, [], 1, "note: the traces cannot be compared: ")


def test_what_no_cause_has_is_not_explained(here, world):
    """A part of what is missing went to slower kernels, which TPOT does not show whole: the step of the
    traces saved more, so what lies between steps has the rest."""
    layer = world.swapped()
    layer[MOE] += 0.4 * world.gain_us
    world.profiled(layer)
    world.results(0.0)
    found_in(world, here, [of.STALLS, of.OTHER_KERNELS], 0, "")


def test_another_way_to_launch_is_said(here, world):
    world.run()
    before = world.server(graphs=True, operators=True)
    wait = 400 + 800 * world.gain_ms
    world.traces(before, world.server(world.swapped(), graphs=False, operators=True, wait_us=wait))
    says = "The device waits longer for the host: single launches instead of a graph"
    found_in(world, here, [of.IDLE], 0, says)


def test_a_refusal_in_a_log_alone_leaves_the_kernel_not_called(here, world):
    world.profiled()
    world.log(ALIEN)
    found_in(world, here, [of.NOT_CALLED], 0, "note: .*VLLM_OTHER")


def test_at_other_shapes_it_is_not_certain_that_a_kernel_is_not_called(here, world):
    world.run(sizes={"batch": 64, "ctx": 1024})
    world.traces(world.server(), world.server())
    says = LIKELY + r".*the run timed other shapes than are served \(batch=16 ctx=4096\)"
    found_in(world, here, [of.NOT_CALLED], 0, says)


def test_of_several_predictions_of_one_change_that_of_the_arm_counts(here, world):
    world.record(world.gain_ms)
    path = world.folder / "ab" / "ab.json"
    document = json.loads(path.read_text())
    (old,) = document["predictions"]
    document["predictions"] = [old | {"change": 3 * old["change"]}, old | {"of": "quick"}]
    path.write_text(json.dumps(document))
    found = found_in(world, here, [], 0, NOTHING)
    assert found["expected"]["ms"] == pytest.approx(world.gain_ms)
