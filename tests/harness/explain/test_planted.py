"""Gains that vanished for a planted reason: it is named first, with its size, and no other one is named."""

import json
import random
import re
from dataclasses import replace

import pytest

from harness.explain import causes as of
from harness.explain.account import facts
from tests.support.lost_gains import COMBINE, COPY, GEMMS, MOE, NEW, REDUCE, SPLIT, World


def not_called(world):
    world.profiled()
    return [world.gain_ms]


def not_called_and_seen_by_clients(world):
    not_called(world)
    world.results(0.0)
    return [world.gain_ms]


def another_kernel_ran(world):
    """Instead of the new one, and as fast as the old ones."""
    other = {"void flash_fwd_mla_other_kernel(x)" if name == NEW else name: us
             for name, us in world.swapped(world.old_us).items()}  # fmt: skip
    world.profiled(other)
    return [world.gain_ms]


def table_missed(world):
    world.run("fused_moe", {"tokens": 16}, old=world.layer[MOE], new=0.6 * world.layer[MOE])
    world.traces(world.server(), world.server())
    world.log("Using default MoE config. Performance might be sub-optimal! Config file not found at E=257")
    return [0.4 * world.ms(world.layer[MOE])]


def table_missed_without_traces(world):
    log = "Using default MoE config. Performance might be sub-optimal! Config file not found at E=257.json\n"
    world.record(0.0, log=log)
    world.args += ["--change", "fused_moe=1.5x"]
    return [world.gain_ms]


def other_shapes(world):
    world.run(sizes={"batch": 64, "ctx": 1024})
    world.traces(world.server(), world.server(world.swapped(world.old_us - 0.2 * world.gain_us)))
    return [0.8 * world.gain_ms]


def overlapped(world):
    """The old and the new kernel run beside an all-reduce that lasts longer than either."""
    world.layer[SPLIT] += world.layer.pop(COMBINE)
    rest = {name: us for name, us in world.layer.items() if name not in (SPLIT, REDUCE)}
    longer = {REDUCE: 2.5 * world.old_us}
    world.run()
    before = world.server({SPLIT: world.old_us, **longer, **rest}, beside=(SPLIT,))
    world.traces(before, world.server({NEW: world.new_us, **longer, **rest}, beside=(NEW,)))
    return [world.gain_ms]


def half_of_the_layers(world):
    world.run()
    after = world.server(partial=(world.layers // 2, world.swapped()))
    world.traces(world.server(), after)
    return [0.5 * world.gain_ms]


def slower_clock(world):
    world.run()
    after = world.server(world.swapped(), clock=1 + world.draw.uniform(0.06, 0.2))
    world.traces(world.server(), after)
    return [(after.clock - 1) * world.ms(sum(after.layer.values()))]


def slower_neighbours(world):
    layer = world.swapped()
    layer[MOE] += (more := world.draw.uniform(0.6, 0.9) * world.gain_us)
    world.profiled(layer)
    return [world.ms(more)]


def neighbours_slower_by_different_factors(world):
    layer = world.swapped()
    more = 0.8 * world.gain_us / (layer[MOE] + 2 * layer[GEMMS[0]] + 3 * layer[GEMMS[1]])
    for name, factor in ((MOE, 1), (GEMMS[0], 2), (GEMMS[1], 3)):
        layer[name] *= 1 + factor * more
    world.profiled(layer)
    return [0.8 * world.gain_ms]


def all_but_the_largest_neighbour_slower(world):
    """By one factor, which the clock would give the largest, too."""
    world.layer[MOE] *= 2
    layer = world.swapped()
    others = [name for name in layer if name not in (MOE, NEW, REDUCE)]
    more = 0.7 * world.gain_us / sum(layer[name] for name in others)
    world.profiled(layer | {name: layer[name] * (1 + more) for name in others})
    return [0.7 * world.gain_ms]


def kernels_beside(world):
    cost = world.draw.uniform(0.6, 0.9) * world.gain_us
    world.profiled({COPY: cost, **world.swapped()})
    return [world.ms(cost)]


def host_bound(world):
    wait = 400 + 1e3 * world.draw.uniform(0.6, 0.95) * world.gain_ms
    world.profiled(world.swapped(), wait_us=wait)
    return [(wait - 400) / 1e3]


def waits_for_ranks(world):
    layer = world.swapped()
    layer[REDUCE] += (more := world.draw.uniform(0.6, 0.9) * world.gain_us)
    world.profiled(layer)
    return [world.ms(more)]


def less_in_the_step(world):
    slow = world.new_us + world.draw.uniform(0.5, 0.9) * world.gain_us
    world.profiled(world.swapped(slow))
    return [world.ms(slow - world.new_us)]


def another_kernel_before(world):
    """The run's baseline is none that the server ran, and the server's own was faster."""
    world.run()
    faster = {"void other_mla_decode_kernel(x)" if "splitkv" in name else name: us
              for name, us in world.layer.items() if "combine" not in name}  # fmt: skip
    faster["void other_mla_decode_kernel(x)"] = world.new_us + 0.2 * world.gain_us
    world.traces(world.server(faster), world.server(world.swapped()))
    return [0.8 * world.gain_ms]


def name_not_read(world):
    world.record(0.0, unread=["QUICK"])
    return [world.gain_ms]


def name_not_read_and_traced(world):
    world.record(0.0, unread=["QUICK"])
    not_called(world)
    return [world.gain_ms]


def servers_alike(world):
    world.record(0.0, info=lambda name: {"backend": "slow"}, change={"flags": "--quick"})
    return [world.gain_ms]


def other_accept_length(world):
    world.profiled(world.swapped())
    tokens = 2.5
    step = world.step_ms
    saved = step / tokens - (step - world.gain_ms) / (tokens * (step - world.gain_ms) / step)
    world.results(saved, tpot=step / tokens, accept_length=tokens * (step - world.gain_ms) / step)
    for number in range(6):
        path = world.folder / f"before{number}.jsonl"
        path.write_text(path.read_text().replace('"backend"', f'"accept_length": {tokens}, "backend"'))
    return [world.gain_ms / tokens]


def other_accept_length_without_traces(world):
    """2 tokens of a step instead of 2.5, of a step that is as much shorter as was predicted."""
    world.record(world.step_ms - 1.25 * (world.step_ms - world.gain_ms), accepted=(2.5, 2.0))
    return [0.25 * (world.step_ms - world.gain_ms)]


def stalls(world):
    world.profiled(world.swapped())
    world.results(0.0)
    return [world.gain_ms]


def prediction_too_large(world):
    """Three times what the op can save in the step that was served."""
    world.profiled(world.swapped())
    world.record(world.gain_ms, predicted_ms=3 * world.gain_ms)
    return [2 * world.gain_ms]


def half_and_beside(world):
    """Two causes: half of the layers, and copies that take less than that."""
    world.run()
    layer = {COPY: 0.25 * world.gain_us}
    after = world.server({**layer, **world.layer}, partial=(world.layers // 2, {**layer, **world.swapped()}))
    world.traces(world.server(), after)
    return [0.5 * world.gain_ms, 0.25 * world.gain_ms]


def idle_and_neighbours(world):
    layer = world.swapped()
    layer[GEMMS[0]] += 0.3 * world.gain_us
    world.profiled(layer, wait_us=400 + 550 * world.gain_ms)
    return [0.55 * world.gain_ms, 0.3 * world.gain_ms]


def small_gain(world):
    """Of 3 % of a step."""
    world.gain_us = 0.03e3 * world.step_ms / world.layers
    world.new_us = world.old_us - world.gain_us
    not_called(world)
    return [world.gain_ms]


def half_and_faster_neighbours(world):
    """What other kernels save is a negative part."""
    layer = world.swapped(), dict(world.layer)
    for each in layer:
        each[MOE] -= 0.15 * world.gain_us
    world.profiled(layer[1], partial=(world.layers // 2, layer[0]))
    return [0.5 * world.gain_ms, -0.15 * world.gain_ms]


def less_in_the_step_and_less_waiting(world):
    world.run()
    slow = world.new_us + 0.8 * world.gain_us
    before, after = world.server(wait_us=1000), world.server(world.swapped(slow))
    world.traces(before, replace(after, wait_us=1000 - 300 * world.gain_ms))
    return [0.8 * world.gain_ms, -0.3 * world.gain_ms]


PLANTED = {
    not_called: [of.NOT_CALLED], not_called_and_seen_by_clients: [of.NOT_CALLED],
    another_kernel_ran: [of.NOT_CALLED], table_missed: [of.TABLE_MISSED],
    table_missed_without_traces: [of.TABLE_MISSED], other_shapes: [of.OTHER_SHAPES],
    overlapped: [of.OVERLAP], half_of_the_layers: [of.NOT_CALLED], slower_clock: [of.CLOCKS],
    slower_neighbours: [of.OTHER_KERNELS], neighbours_slower_by_different_factors: [of.OTHER_KERNELS],
    all_but_the_largest_neighbour_slower: [of.OTHER_KERNELS], kernels_beside: [of.KERNELS_BESIDE],
    host_bound: [of.IDLE], waits_for_ranks: [of.RANK_WAITS], less_in_the_step: [of.LESS_IN_STEP],
    another_kernel_before: [of.OTHER_BASE], name_not_read: [of.NOT_READ],
    name_not_read_and_traced: [of.NOT_READ], servers_alike: [of.SAME_SERVER],
    other_accept_length: [of.OTHER_WORK], other_accept_length_without_traces: [of.OTHER_WORK],
    stalls: [of.STALLS], prediction_too_large: [of.PREDICTION],
    half_and_beside: [of.NOT_CALLED, of.KERNELS_BESIDE],
    idle_and_neighbours: [of.IDLE, of.OTHER_KERNELS], small_gain: [of.NOT_CALLED],
    half_and_faster_neighbours: [of.NOT_CALLED, of.OTHER_KERNELS],
    less_in_the_step_and_less_waiting: [of.LESS_IN_STEP, of.IDLE],
}  # fmt: skip


def explained(world, here):
    """The account as JSON has it, the text, and the exit code. To write JSON would take a second command,
    which reads all traces anew."""
    told = []

    def kept(made):
        told.append(facts(made))
        return told[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.explain.account.facts", kept)
        done = here("explain", *world.args)
    assert not done.stderr
    return json.loads(json.dumps(told[0])), done.stdout, done.returncode


def names(found, *sure):
    return [cause["name"] for cause in found["causes"] if cause["sure"] in (sure or ("certain", "likely"))]


def found_in(world, here, wanted, code, says=""):
    """What is named, the exit code, and a pattern that the text has."""
    found, text, exit_code = explained(world, here)
    assert (names(found), exit_code) == (wanted, code), text
    assert re.search(says, " ".join(text.split())), text
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__)
def test_the_planted_cause_is_named_first_and_no_other(here, tmp_path, planted, seed):
    world = World(tmp_path, random.Random(f"{planted.__name__} {seed}"))
    planted_ms = planted(world)
    found, text, code = explained(world, here)
    named = [cause for cause in found["causes"] if cause["sure"] in ("certain", "likely")]
    assert [cause["name"] for cause in named] == PLANTED[planted], text
    assert code == 0
    first = text.splitlines()[0]
    assert not first.startswith(("Nothing vanished", "No finding", "It ")), text
    # Of the step: a kernel's gap that went, and its launch; of the cause itself: a step that was cut off.
    noise = 0.012 * world.step_ms
    for cause, ms in zip(named, planted_ms, strict=True):
        assert cause["ms"] == pytest.approx(ms, abs=noise + 0.1 * abs(ms)), text
    sizes = sum(cause["ms"] for cause in named)
    assert sizes + found["rest"] == pytest.approx(found["missing"])
    assert abs(found["rest"]) < 0.25 * found["missing"], text
