"""The Triton flash kernel: right in the interpreter, and the order of its programs.

As in mla_decode/test_triton.py, a process runs the interpreted cases: this file as a script."""

import math
import warnings
from typing import Any

import pytest

import kernels
from harness.catalogue.architectures import architectures
from kernels.formats import FORMATS
from kernels.mha_prefill.triton.flash import CACHES, PAD, FlashConfig, order, turnable, turned_columns
from kernels.op import Unsupported
from kernels.operands import Seeds
from kernels.triton_runtime import CPU
from kernels.tuning import Target
from shapes.case import parse
from tests.support.interpreting import each_part, print_found, wrong, wrong_interpreted

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


OP = kernels.OPS["mha_prefill"]
IMPLEMENTATION = next(i for i in kernels.implementations("mha_prefill") if i.name == "triton.flash_varlen")
ON = {"cpu": CPU, "sm_90": Target("cuda", "sm_90", 132), "gfx942": Target("rocm", "gfx942", 304)}

# Sizes, the target whose kernel is interpreted (sm_90's has descriptors), and the configuration. Its tiles
# are so small that there are blocks before the diagonal, on it and behind it, and sequences that end inside
# a tile, at its edge and one row behind.
RAGGED = "batch=3 new=1..90 prefix=0..70 heads=2"
FP8 = {name: f"dtype=fp8 fp8={name}" for name in FORMATS}
SHORT = "batch=3 new=1..50 prefix=0..40 heads=2"
CASES = [
    ("batch=1 new=1 heads=1", "cpu", FlashConfig(128, 128)),
    (RAGGED, "sm_90", FlashConfig(64, 32)),
    ("batch=3 new=63..65 heads=2", "cpu", FlashConfig(32, 32)),
    ("batch=2 new=2 prefix=94..95 heads=2", "cpu", FlashConfig(32, 32)),
    (f"{SHORT} {FP8['e4m3fn']}", "sm_90", FlashConfig(64, 32, turned=True)),
    (f"batch=2 new=1..5 prefix=120..160 heads=1 {FP8['e4m3fn']}", "sm_90", FlashConfig(32, 128, turned=True)),
    (f"{SHORT} {FP8['e4m3fnuz']}", "gfx942", FlashConfig(32, 32, instruction=16, turned=True)),
]
# Slow: further pairings of what the cases above have.
MORE = [
    ("batch=1 new=300 prefix=40 heads=1", "cpu", FlashConfig(128, 128)),
    ("batch=1 new=1 prefix=1000 heads=1", "sm_90", FlashConfig(64, 128)),
    (RAGGED, "sm_90", FlashConfig(16, 64)),
    (f"{SHORT} {FP8['e4m3fn']}", "cpu", FlashConfig(32, 32)),
    (f"batch=1 new=1 prefix=1000 heads=1 {FP8['e4m3fn']}", "sm_90", FlashConfig(64, 128, turned=True)),
]


def sizes_of(text: str):
    return OP.sizes(parse(text)[0])


def interpret(text: str, arch: str, config: FlashConfig) -> list[str]:
    """Weights stay fp32 here even for FP8: errors are held to the narrow sigma."""
    sizes = sizes_of(text)
    operands, out = OP.operands(sizes, Seeds(), "cpu"), OP.empty_output(sizes, "cpu")
    prepared = IMPLEMENTATION.prepare_with(config, ON[arch], operands, out)
    turned = [launch.args[1] for launch in prepared.launches[:-1]]
    poisoned = [out, prepared.written, *turned]
    return wrong(OP, IMPLEMENTATION, prepared, operands, poisoned, fp8=False) + alone(prepared, operands)


def alone(prepared: Any, operands: Any) -> list[str]:
    """Whether a sequence's rows stay as they are where those before and behind it hold NaN."""
    out = prepared.result()
    before, own = out.clone(), operands.sequences[-1]
    for tensor, rows in ((operands.q, own.queries), (operands.k, own.keys), (operands.v, own.keys)):
        for others in (tensor[: rows.start], tensor[rows.stop :]):
            others.copy_(torch.tensor(math.nan))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared.call()
    return (
        []
        if torch.equal(before[own.queries], out[own.queries])
        else ["NaN of other sequences is in its output"]
    )


@each_part
def test_interpreted(part: str) -> None:
    assert wrong_interpreted(__file__, part) == []


def test_another_gpus_fp8_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"^products of e4m3fn need another GPU; gfx942 takes e4m3fnuz$"):
        on_no_device("batch=1 new=1 dtype=fp8 fp8=e4m3fn", ON["gfx942"])


@pytest.mark.parametrize("fp8", FORMATS)
def test_the_largest_weight_uses_the_formats_range(fp8: str) -> None:
    target = ON["gfx942" if fp8 == "e4m3fnuz" else "sm_90"]
    largest = (
        2.0 ** on_no_device(f"batch=1 new=1 dtype=fp8 fp8={fp8}", target).launches[-1].keywords["HEADROOM"]
    )
    assert FORMATS[fp8].max / 2 < largest < FORMATS[fp8].max


# The order of programs

LENGTHS = [(0, 1), (300, 200), (5, 64), (0, 129), (300, 200)]


@pytest.mark.parametrize("arch", ON)
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("heads", [1, 3, 16])
def test_the_order_has_every_row_of_every_head_once(arch: str, rows: int, heads: int) -> None:
    found = order(LENGTHS, heads, rows, ON[arch], 640)
    covered = [
        (t.head, t.sequence, row)
        for t in found
        for row in range(t.first, min(t.first + rows, LENGTHS[t.sequence][1]))
    ]
    assert sorted(covered) == [
        (head, i, row) for head in range(heads) for i, (_, new) in enumerate(LENGTHS) for row in range(new)
    ]


def test_where_the_cache_holds_everything_the_longest_go_first() -> None:
    prefixes = [prefix for prefix, _ in LENGTHS]
    keys = [prefixes[t.sequence] + t.first for t in order(LENGTHS, 4, 64, ON["sm_90"], 640)]
    assert keys == sorted(keys, reverse=True)


def test_sections_are_what_the_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads' keys fit: after all tiles of those come two others', each section the longest first."""
    monkeypatch.setitem(CACHES, "cuda", (1, 2 * 256 * 640))
    found = order([(0, 256)], 4, 64, ON["sm_90"], 640)
    assert [sorted({t.head for t in found[i : i + 8]}) for i in (0, 8)] == [[0, 1], [2, 3]]
    assert [t.first for t in found[:8]] == [192, 192, 128, 128, 64, 64, 0, 0]


def test_a_head_of_a_sequence_stays_on_its_die() -> None:
    dies, _ = CACHES["rocm"]
    place: dict[tuple[int, int], set[int]] = {}
    for i, tile in enumerate(order([(0, 300)] * 3, 16, 64, ON["gfx942"], 640)):
        place.setdefault((tile.head, tile.sequence), set()).add(i % dies)
    assert all(len(on) == 1 for on in place.values())
    assert len(set.union(*place.values())) == dies


# Configurations


def on_no_device(text: str, target: Target, config: FlashConfig | None = None) -> Any:
    """Prepared on torch's meta device: shapes and types without memory."""
    sizes = sizes_of(text)
    operands, out = OP.empty_operands(sizes, "meta"), OP.empty_output(sizes, "meta")
    config = config or IMPLEMENTATION.heuristic(target, sizes)
    return IMPLEMENTATION.prepare_with(config, target, operands, out)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_values_are_turned_where_they_may_be_in_whole_blocks(dtype: str) -> None:
    for architecture in architectures().values():
        sizes = OP.sizes({**OP.defaults(architecture.arch), "batch": 7, "new": "1..600", "dtype": dtype})
        found = list(IMPLEMENTATION.configurations(architecture.target, sizes))
        assert all(PAD % config.keys == 0 for config in found)
        assert any(config.turned for config in found) == turnable(architecture.target, sizes)


def test_turned_values_do_not_meet() -> None:
    """Where each sequence begins is a multiple of PAD, behind all blocks of the one before."""
    for keys in ([1], [128, 1, 127, 129, 255], [130] * 9, [1] * 300):
        starts = [sum(keys[:i]) // PAD * PAD + i * PAD for i in range(len(keys))]
        ends = [start + math.ceil(n / PAD) * PAD for start, n in zip(starts, keys, strict=True)]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        assert ends[-1] <= turned_columns(sum(keys), len(keys))


if __name__ == "__main__":
    print_found(interpret, CASES, MORE)
