"""The plan of split-KV MLA decode: every token once, parts of nearly equal length, second passes that pay."""

import itertools
import random

import pytest

from kernels.mla_decode.triton.split_kv import HEURISTIC, SplitKv
from kernels.mla_decode.triton.split_kv_plan import SplitPlan, plan
from kernels.op import OPS
from kernels.tuning import Target

TOKENS, LEAST = 32, 64


def made(lengths: list[int], programs: int) -> SplitPlan:
    return plan(tuple(lengths), TOKENS, programs, LEAST)


BATCHES = {
    "one token": [1],
    "equal": [4096] * 64,
    "ragged": [random.Random(i).randint(1, 8192) for i in range(40)],
    "one long": [131072, *[100] * 63],
    "more than programs": [8192, *[500] * 1000],
}


@pytest.mark.parametrize("programs", [1, 7, 132, 264, 1216])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_every_token_once(lengths: list[int], programs: int) -> None:
    found = made(lengths, programs)
    for sequence, length in enumerate(lengths):
        parts = sorted(
            (part for part in found.parts if part.sequence == sequence), key=lambda part: part.start
        )
        assert parts[0].start == 0 and parts[-1].end == length
        assert all(part.end == following.start for part, following in itertools.pairwise(parts))
        assert all(part.start % TOKENS == 0 and part.start < part.end for part in parts)
        slots = [part.slot for part in parts]
        if len(parts) == 1:
            assert slots == [-1] and all(sequence != split.sequence for split in found.split)
        else:
            assert (sequence, slots[0], len(parts)) in found.split
            assert slots == list(range(slots[0], slots[0] + len(parts)))
    slots = [part.slot for part in found.parts if part.slot >= 0]
    assert sorted(slots) == list(range(sum(split.slots for split in found.split)))
    lengths_of_parts = [part.end - part.start for part in found.parts]
    assert lengths_of_parts == sorted(lengths_of_parts, reverse=True)
    assert len(found.parts) <= max(programs, len(lengths)) or len(lengths) >= programs


def test_one_long_sequence_is_shared() -> None:
    """Uniform splits would leave it to as many programs as the 100 tokens beside it."""
    found = made(BATCHES["one long"], 132)
    assert found.split == ((0, 0, 69),)
    assert max(part.end - part.start for part in found.parts) == 1920
    crowded = made(BATCHES["more than programs"], 132)
    assert [split.slots for split in crowded.split] == [3], "no sequence outlasts what the others take"


def test_there_is_no_second_pass_without_need() -> None:
    assert not made([4096] * 264, 264).split
    assert not made([4096] * 200, 132).split
    assert not made([3500 + i for i in range(116)], 132).split, "parts would be hardly shorter"
    assert {split.slots for split in made([4096] * 128, 264).split} == {2}
    assert not made([64], 132).split and made([65], 132).split == ((0, 0, 2),)


@pytest.mark.parametrize(("kind", "arch", "heads", "kv", "name"), [
    ("cuda", "sm_100", 16, "fp8", "sm_100 few fp8"), ("cuda", "sm_100", 128, "fp8", "sm_100 many fp8"),
    ("cuda", "sm_90", 128, "fp8", "cuda many fp8"), ("cuda", "sm_90", 16, "fp8", "cuda few"),
    ("rocm", "gfx950", 16, "fp8", "gfx950 few"), ("rocm", "gfx950", 128, "fp8", "gfx950 many fp8"),
    ("rocm", "gfx942", 128, "fp8", "rocm many"),
])  # fmt: skip
def test_a_configuration_of_the_architecture_comes_before_one_of_its_kind(
    kind: str, arch: str, heads: int, kv: str, name: str
) -> None:
    sizes = OPS["mla_decode"].sizes({"batch": 4, "ctx": 4096, "heads": heads, "kv": kv})
    assert SplitKv().heuristic(Target(kind, arch, 132, ""), sizes) == HEURISTIC[name]
