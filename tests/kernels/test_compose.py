"""Wider boundaries and rotating sets, for every op that has them: what the harness builds on."""

import json
from typing import ClassVar

import pytest
import torch

import kernels
from kernels.compose import bind
from kernels.fused_moe.providers.torch_eager import naive
from kernels.operands import Seeds
from kernels.platform import detect
from shapes.suites import suite
from tests.support.command_line import undisturbed
from tests.support.composed import innermost
from tests.support.workers_here import run_here

WIDE = [
    (op.name, wide, narrow)
    for op in kernels.OPS.values()
    for narrow, wide in zip(op.boundaries, op.boundaries[1:], strict=False)
]


def smoke(op_name: str):
    """An op, and the sizes of its cases in the suite `smoke`."""
    op = kernels.OPS[op_name]
    return op, [op.sizes(case.sizes) for case in suite("smoke").cases(op_name)]


@pytest.mark.parametrize(("op_name", "wide", "narrow"), WIDE)
def test_producer_kernels_give_what_the_judge_takes_for_granted(op_name, wide, narrow):
    """A composed call is judged by the narrower boundary's own operands of the same seeds."""
    op, all_sizes = smoke(op_name)
    for sizes in all_sizes:
        outer = op.make(sizes, Seeds(3, 4), "cpu", wide)
        assert outer.boundary == wide
        inner = outer.narrowed()
        assert inner.boundary == narrow
        op.step(outer, inner.live_tensors())()
        own = op.make(sizes, Seeds(3, 4), "cpu", narrow)
        assert set(inner.tensors()) == set(own.tensors())
        produced, made = by_expert(inner.tensors()), by_expert(own.tensors())
        for name in made:
            if name == "topk_weights":  # normalised in another order of sums
                torch.testing.assert_close(produced[name], made[name], rtol=1e-6, atol=0)
            else:
                assert torch.equal(produced[name].view(torch.uint8), made[name].view(torch.uint8)), (
                    sizes,
                    name,
                )


def by_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with each token's picks sorted by expert, as their order means nothing."""
    if "topk_ids" not in tensors:
        return tensors
    # Experts of other ranks may have the same id; picks of these are sorted by weight, which is below 8.
    order = (tensors["topk_ids"] + tensors["topk_weights"] / 8).argsort(-1)
    return tensors | {name: tensors[name].gather(1, order) for name in ("topk_ids", "topk_weights")}


@pytest.mark.parametrize(("op_name", "wide", "narrow"), WIDE)
def test_nothing_that_a_wider_call_must_produce_is_there(op_name, wide, narrow):
    op, all_sizes = smoke(op_name)
    outer, inner = (op.make(all_sizes[0], Seeds(), "cpu", boundary) for boundary in (wide, narrow))
    produced = set(inner.live_tensors()) - set(outer.live_tensors())
    assert produced
    assert not produced & set(outer.tensors())


@pytest.mark.parametrize("op_name", kernels.OPS)
def test_sets_that_calls_rotate_over(op_name):
    """They are a function of the seeds, and hold other values just where the op says so."""
    op, all_sizes = smoke(op_name)
    for boundary in op.boundaries:
        first = op.make(all_sizes[1], Seeds(1, 2), "cpu", boundary)
        third = op.make(all_sizes[1], Seeds(1, 2, turn=2), "cpu", boundary)
        turned = first.turned(2)
        assert turned.digest() == third.digest()
        assert (third.digest() != first.digest()) == op.turns


class Recording(naive):
    """Records in `seen` on which operands it is prepared, and after which first call."""

    seen: ClassVar[list] = []

    def prepare(self, operands, out):
        self.seen.append(operands.copy())
        return super().prepare(operands, out)

    def prepare_turn(self, first, operands, out):
        self.seen.append(first)
        return super().prepare_turn(first, operands, out)


def test_a_composed_call_is_prepared_on_what_it_will_read_and_beside_the_first():
    op, all_sizes = smoke("fused_moe")
    sizes = all_sizes[0]
    outer, core = (op.make(sizes, Seeds(3, 4), "cpu", boundary) for boundary in ("with_routing", "core"))
    out = op.empty_output(sizes, "cpu")
    first = bind(op, Recording(), outer, out)
    assert torch.equal(Recording.seen[0].x_q.view(torch.uint8), core.x_q.view(torch.uint8))
    bind(op, Recording(), outer.turned(1), out, first)
    assert Recording.seen[1] is innermost(first)


CHEAT = """
from kernels.fused_moe.providers.torch_eager import naive

class FirstRouting(naive):
    name = "wrong.first_routing"
    op = "fused_moe"

    def prepare_turn(self, first, operands, out):
        ids = first.operands.topk_ids
        return super().prepare(operands.replaced(topk_ids=ids), out)
"""
OFF_BY_ONE = """
from kernels.block_scale_gemm.providers.torch_eager import naive

class OffByOne(naive):
    name = "wrong.one_block_of_k"
    op = "block_scale_gemm"

    def prepare(self, operands, out):
        scale = operands.b_scale.clone()
        scale[:, 5] = scale[:, 6]
        return super().prepare(operands.replaced(b_scale=scale), out)
"""


@pytest.mark.parametrize(("source", "op", "boundary", "case", "reason"), [
    # The judge asks for a turn of the routing after timing.
    (CHEAT, "fused_moe", "core", "tokens=1 experts=16 topk=2 hidden=256 inter=128", "after timing: "),
    # Rounding to FP8 would explain the wrong scale of one block; the call was given what was rounded.
    (OFF_BY_ONE, "block_scale_gemm", "with_quant", "m=8 n=256 k=7168", ""),
])  # fmt: skip
def test_what_cheats_on_turns_or_on_the_boundary_is_wrong(tmp_path, source, op, boundary, case, reason):
    plugin = tmp_path / "wrong.py"
    plugin.write_text(source)
    done = run_here(
        *("--op", op, "--device", "cpu", "--threads", "1", "--boundary", boundary, "--case", case),
        *("--impl", "wrong.*,torch.naive", "--baseline", "torch.naive", "--budget", "1s"),
        *("--json", "-", "--quiet", "--out", tmp_path / "run"),
        plugin=plugin,
    )
    assert done.returncode == 1, done.stderr
    right, wrong = sorted(json.loads(done.stdout)["cells"], key=lambda cell: cell["status"])
    assert (right["impl"], right["status"], wrong["status"]) == ("torch.naive", "ok", "wrong")
    assert wrong["reason"].startswith(reason)
    assert right["rotation"]["copies"] > 1 or not kernels.OPS[op].turns
    composed = "core call after the suite's own quantise" if boundary == "with_quant" else ""
    assert undisturbed(right["reason"]) == composed


def test_which_rows_join_which_boundary():
    cpu, op = detect("cpu"), kernels.OPS["fused_moe"]
    found = {i.name: i for i in kernels.implementations("fused_moe")}
    case = {b: op.case({"tokens": 4}, boundary=b) for b in op.boundaries}
    naive, vllm = found["torch.naive"], found["vllm.amx"]
    assert all(naive.supports(case[b], cpu).ok for b in op.boundaries)
    assert naive.composition("core") == ""
    assert naive.composition("with_routing") == "core call after the suite's own routing and quantise"
    assert vllm.composition("with_routing") == "with_quant call after the suite's own routing"
    if vllm.available(cpu).ok:
        assert "more than core" in vllm.supports(case["core"], cpu).reason
        assert vllm.supports(case["with_quant"], cpu).ok
