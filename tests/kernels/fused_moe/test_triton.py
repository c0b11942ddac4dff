"""The Triton MoE kernels are right in the interpreter.

As in mla_decode/test_triton.py, the interpreted cases run in a process of their own: this file as a script.
"""

import itertools
import json
import math
import sys
from typing import Any

import pytest

import kernels
from kernels.compose import bind
from kernels.fused_moe import layouts
from kernels.fused_moe.operands import FusedMoeSizes
from kernels.fused_moe.routing import Router, router
from kernels.fused_moe.triton import grouped
from kernels.operands import Seeds
from shapes.case import parse
from tests.support.composed import innermost
from tests.support.interpreting import buffers, each_part, print_found, wrong, wrong_interpreted

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


OP = kernels.OPS["fused_moe"]
IMPLEMENTATION = next(i for i in kernels.implementations(OP.name) if i.name == "triton.grouped")

SMALL = "experts=16 topk=4 hidden=256 inter=128"
WIDE = "experts=8 topk=4 hidden=256 inter=256"
DEEP = "experts=8 topk=2 hidden=1152 inter=128"  # nine blocks of K, which two splits cannot share evenly
PAIRWISE = {"rows": 16, "sort": False, "fuse": False, "down": 1024}
BY_TOKEN = PAIRWISE | {"by_token": True, "down": 128}

# Sizes, boundary, and the configuration, None for the interpreter's default.
CASES: list[tuple[str, str, dict[str, Any] | None]] = [
    (f"tokens=1 {SMALL}", "core", None),
    (f"tokens=20 {SMALL} routing=one scales=ue8m0", "with_quant", None),
    ("tokens=3 experts=20 topk=3 hidden=384 inter=128 fp8=e4m3fnuz shared=1", "with_routing", None),
    # Each tile has one pair, and K is split. A token's picks are added up by the down product or after it.
    (f"tokens=1 {DEEP}", "core", PAIRWISE | {"columns": 64, "swap": True}),
    (f"tokens=1 {DEEP} scales=ue8m0", "core", BY_TOKEN),
    ("tokens=1 experts=1 topk=1 hidden=128 inter=128", "core", PAIRWISE),
    # Sorted pairs: transposed tiles, several adjacent tiles of an expert, chiplets, and SiLU as a launch.
    (f"tokens=20 {SMALL} routing=one", "core", {"rows": 16, "swap": True, "chiplets": 8}),
    ("tokens=9 experts=4 topk=2 hidden=256 inter=128 routing=zipf:1.2", "core", {"rows": 16, "fuse": False}),
]
# Slow: further combinations of the same, and experts on other ranks.
MORE: list[tuple[str, str, dict[str, Any] | None]] = [
    (f"tokens=2 {WIDE} ep=2 routing=uniform", "core", BY_TOKEN | {"down": 64, "swap": True}),
    (f"tokens=2 {DEEP} shared=1", "core", {"rows": 16, "fuse": False, "per_unit": 4, "chiplets": 8}),
    (f"tokens=40 {SMALL} ep=4 routing=uniform", "with_routing", None),
    ("tokens=70 experts=4 topk=2 hidden=1024 inter=128 routing=zipf:1.2", "core", None),
    (f"tokens=3 {SMALL} ep=2 routing=uniform fp8=e4m3fnuz", "core", PAIRWISE | {"down": 64}),
]
MANY_BLOCKS = 100  # stands for that of grouped, so that the cases have SiLU programs of one pair and of eight

# Segments, and rows of a tile. Of 7 segments the last has fewer pairs than the others.
ALIGNMENTS = [(1, 16), (7, 16), (2, 64)]


def sizes_of(text: str) -> FusedMoeSizes:
    return OP.sizes(parse(text)[0])


def interpret(text: str, boundary: str, config: dict[str, Any] | None) -> list[str]:
    """What is wrong with the interpreted call; empty if nothing is."""
    sizes = sizes_of(text)
    operands, out = OP.operands(sizes, Seeds(), "cpu", boundary), OP.empty_output(sizes, "cpu")
    prepared = bind(OP, IMPLEMENTATION.configured(config) if config else IMPLEMENTATION, operands, out)
    poisoned = buffers(innermost(prepared))
    assert len(poisoned) > 3
    return wrong(OP, IMPLEMENTATION, prepared, operands, poisoned)


def wrong_alignment(segments: int, rows: int) -> str:
    """What is wrong with the slots and tiles of 300 pairs in so many segments; empty if nothing is."""
    sizes = sizes_of("tokens=75 experts=24 topk=4 hidden=128 inter=128 ep=2 routing=zipf:1.2")
    layouts.ONE_LAUNCH, layouts.CHUNK = 300 // segments, {"cpu": 64}
    ids = OP.operands(sizes, Seeds(), "cpu").topk_ids
    alignment = layouts.Alignment(sizes, rows, ids)
    slots, experts = [], []
    for expert in range(sizes.local_experts):
        pairs = (ids.flatten() == expert).nonzero().flatten().tolist()
        tiles = -(-len(pairs) // rows)
        experts += [expert] * tiles
        slots += pairs + [ids.numel()] * (tiles * rows - len(pairs))
    for tensor in (alignment.slots, alignment.expert_of, alignment.used_tiles):
        tensor.fill_(-7)
    alignment()
    used_tiles = alignment.used_tiles.item()
    is_right = (
        used_tiles == len(experts)
        and alignment.expert_of[:used_tiles].tolist() == experts
        and alignment.slots[: used_tiles * rows].tolist() == slots
        and len(alignment.launches) == (2 if segments > 1 else 1)
    )
    slots, experts = alignment.slots.tolist(), alignment.expert_of.tolist()
    return "" if is_right else f"{slots} of {experts}, {used_tiles} tiles"


def wrong_picks_of_equal_scores() -> str:
    """What is wrong with the picks where all scores are equal; empty if nothing is. The first experts of the
    first groups are right."""
    ids, weights = torch.full((2, 9), -7, dtype=torch.int32), torch.empty(2, 9)
    rule = Router(groups=8, limit=4, topk=8, scaling=2.5, local=6, shared=1)
    router(torch.zeros(2, 256), torch.zeros(256), ids, weights, rule)()
    right_ids = [0, 1, 2, 3, 4, 5, -1, -1, 6]
    right_weights = [*[2.5 / 8] * 8, 1.0]
    is_right = ids.tolist() == [right_ids] * 2 and weights.tolist() == [right_weights] * 2
    return "" if is_right else f"{ids.tolist()} {weights.tolist()}"


@each_part
def test_interpreted(part: str) -> None:
    assert wrong_interpreted(__file__, part) == []


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_grids_hold_any_picks(rows: int) -> None:
    for tokens, routing, shared in itertools.product((1, 5, 100), ("balanced", "one", "zipf:1.2"), (0, 1)):
        sizes = sizes_of(f"tokens={tokens} routing={routing} shared={shared}")
        assert sum(-(-load // rows) for load in sizes.routed.loads()) <= layouts.most_tiles(rows, sizes)


def test_no_split_is_without_a_block() -> None:
    config = grouped.GroupedConfig(16, fuse=False, per_unit=4)
    for hidden, units in itertools.product((128, 512, 1152, 7168), (1, 60, 132, 304)):
        sizes = sizes_of(f"tokens=1 hidden={hidden}")
        splits, blocks = grouped.splits_for(config, units, sizes), hidden // 128
        assert 1 <= splits <= max(1, blocks // 4)
        assert (splits - 1) * math.ceil(blocks / splits) < blocks


if __name__ == "__main__":
    grouped.MANY_BLOCKS = MANY_BLOCKS
    print_found(interpret, CASES, MORE)
    if sys.argv[1] == "third":  # the part of the cases that is not slow
        for segments, rows in ALIGNMENTS:
            case = f"pairs in the order of experts, {segments} segments, {rows} rows"
            print(json.dumps([case, wrong_alignment(segments, rows)]))
        print(json.dumps(["of equal scores the first", wrong_picks_of_equal_scores()]))
