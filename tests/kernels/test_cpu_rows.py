"""Rows of torch and of vLLM that run on a CPU are right, also on operands that are hard to compute with."""

import functools
import math
from typing import Any, NamedTuple

import pytest
import torch

import kernels
from harness.workers.child.judge import compare_output
from kernels.compose import bind
from kernels.mla_decode.operands import WIDTH
from kernels.op import Implementation
from kernels.operands import Seeds
from kernels.platform import detect
from shapes.case import parse
from tests.support.judging import given_to

CPU = detect("cpu")


def scale(o: Any, **factors: float) -> None:
    for name, factor in factors.items():
        getattr(o, name).mul_(factor)


def scaled(**factors: float) -> Any:
    """Operands times these; it goes to vLLM's process."""
    twist: Any = functools.partial(scale, **factors)
    twist.__name__ = " ".join(f"{name} times {factor:g}" for name, factor in factors.items())
    return twist


def loud_key(o: Any) -> None:
    o.k[len(o.k) // 2] *= 100
    o.v[len(o.v) // 2] *= 100


def loud_token(o: Any) -> None:
    slots = o.token_slots(0)
    row = o.kv.view(-1, WIDTH)[slots[len(slots) // 2]]
    largest = torch.finfo(o.kv.dtype).max
    row.copy_((row.float() * 100).clamp(-largest, largest))


def outlier(o: Any) -> None:
    o.a[:, o.sizes.k // 2] = o.a.abs().amax(1) * 10_000


def one_product(o: Any) -> None:
    a, half = o.a_q if o.a is None else o.a, o.sizes.k // 2
    kept = a[:, half].clone()
    a.view(torch.uint8).zero_()
    a[:, half] = kept


def zero_blocks(o: Any) -> None:
    o.b_q.view(torch.int8)[:128] = 0
    o.b_scale[0] = 2.0**-126


def cancelling(o: Any) -> None:
    """Products in pairs of opposite sign but for the scales, which differ between blocks."""
    a, half = o.a_q if o.a is None else o.a, o.sizes.k // 2
    a[:, half : 2 * half] = a[:, :half].clone()
    b = o.b_q.float()
    b[:, half : 2 * half] = -b[:, :half]
    o.b_q.copy_(b)


def largest_codes(o: Any) -> None:
    """0x7F and 0xFF are 240 and -240 in e4m3fnuz, and NaN in e4m3fn."""
    o.b_q.view(torch.uint8)[::3] = 0x7F
    o.b_q.view(torch.uint8)[1::3] = 0xFF


def outliers(o: Any) -> None:
    o.x[:, 3] *= 1000


def zero_weights(o: Any) -> None:
    o.x[:, :128] = 0
    o.w13[:, :, -128:] = 0
    o.w2[:, :128] = 0


def one_hot_value(o: Any) -> None:
    o.x.mul_(2.0**-20)[:, 5] = 2.0


class Case(NamedTuple):
    """A case, and what is done to its operands."""

    op: str
    text: str
    boundary: str = "core"
    twist: Any = None

    def __str__(self) -> str:
        return f"{self.op} {self.text} {self.boundary} {self.twist.__name__ if self.twist else 'as drawn'}"

    def operands(self, *seeds: int) -> Any:
        op = kernels.OPS[self.op]
        operands = op.make(op.sizes(parse(self.text)[0]), Seeds(*seeds), "cpu", self.boundary)
        if self.twist:
            self.twist(operands)
        return operands


GEMM, MOE, MHA, MLA = kernels.OPS
EXPERTS = "experts=16 topk=4 hidden=256 inter=128"
CASES = [
    Case(GEMM, "m=1 n=1 k=1"),
    Case(GEMM, "m=1 n=288 k=576 scales=ue8m0", "with_quant", scaled(b_scale=2.0**-30)),
    Case(GEMM, "m=37 n=160 k=416", "with_quant", outlier),
    Case(GEMM, "m=300 n=160 k=384", "with_quant", one_product),
    Case(GEMM, "m=70 n=200 k=300 fp8=e4m3fnuz", "with_quant", zero_blocks),
    Case(GEMM, "m=5 n=129 k=1300", "core", cancelling),
    Case(GEMM, "m=4 n=128 k=256 fp8=e4m3fnuz", "core", largest_codes),
    Case(GEMM, "m=5 n=129 k=130 scales=ue8m0", "core", one_product),
    Case(MOE, f"tokens=1 {EXPERTS} shared=1"),
    Case(MOE, f"tokens=20 {EXPERTS} routing=one scales=ue8m0 shared=1", "with_quant", outliers),
    Case(MOE, "tokens=7 experts=8 topk=2 hidden=640 inter=128 routing=zipf:1.2", "with_quant", one_hot_value),
    Case(MOE, "tokens=5 experts=12 topk=3 hidden=384 inter=256", "with_quant", scaled(w13_scale=64,
     w2_scale=2.0**20)),
    Case(MOE, f"tokens=2 {EXPERTS}", "with_routing", scaled(w13_scale=2.0**-30, w2_scale=2.0**-20)),
    Case(MOE, f"tokens=40 {EXPERTS} fp8=e4m3fnuz ep=4", "with_routing", zero_weights),
    Case(MHA, "batch=4 new=1..40 prefix=0..30 heads=3"),
    Case(MHA, "batch=1 new=1 heads=1", twist=loud_key),
    Case(MHA, "batch=2 new=130 heads=2", twist=loud_key),
    Case(MHA, "batch=2 new=64 heads=2", twist=scaled(q=0)),
    Case(MHA, "batch=3 new=3..100 prefix=257 heads=1", twist=scaled(q=8)),
    Case(MHA, "batch=3 new=1..40 prefix=0..30 heads=16 dtype=fp8"),
    Case(MHA, "batch=2 new=130 heads=2 dtype=fp8 fp8=e4m3fnuz"),
    Case(MLA, "batch=3 ctx=1..200 page=16"),
    Case(MLA, "batch=1 ctx=1 heads=1 page=1", twist=loud_token),
    Case(MLA, "batch=1 ctx=255 heads=128 page=64", twist=scaled(q=0)),
    Case(MLA, "batch=2 ctx=250..600 page=64", twist=scaled(q=8)),
    Case(MLA, "batch=2 ctx=100 heads=20 page=7 kv=fp8", twist=scaled(q=8)),
    Case(MLA, "batch=3 ctx=3..300 page=16 kv=fp8 fp8=e4m3fnuz", twist=loud_token),
    Case(MLA, "batch=3 ctx=2..50 page=16 q=2"),
    Case(MLA, "batch=3 ctx=8..70 heads=8 page=16 kv=fp8 q=8"),
]  # fmt: skip


def rows(case: Case, names: str) -> list[str]:
    """Those with such a name that take the case."""
    sizes = kernels.OPS[case.op].sizes(parse(case.text)[0])
    found = [row for row in kernels.implementations(case.op) if row.name.startswith(names)]
    taking = [row for row in found if row.fits(sizes).ok and row.native(case.boundary)]
    return [row.name for row in taking if row.available(CPU).ok and not row.name.endswith("triton")]


def named(op: str, name: str) -> Implementation:
    return next(row for row in kernels.implementations(op) if row.name == name)


def wrong(case: Case, names: list[str]) -> dict[tuple[str, str], str]:
    """What the judge has against rows, by row and call: on the operands that they were prepared on, and after
    other live operands were loaded; of operands as drawn also on a further set, and prepared on other
    weights. A call may not change its operands."""
    op, references, found = kernels.OPS[case.op], {}, {}

    def judged(row: Implementation, prepared: Any, operands: Any) -> str:
        before = operands.digest()
        prepared.call()
        if operands.digest() != before:
            return "changed its operands"
        given = given_to(op, row, operands)
        if (key := given.digest()) not in references:
            references[key] = op.reference(given)
        out, shape = prepared.result(), tuple(op.empty_output(operands.sizes, "meta").shape)
        fp8 = row.activations == "fp8"
        return compare_output(out, references[key], op.tolerance(operands.sizes), shape, fp8)["reason"]

    for name in names:
        row, first, loaded = named(case.op, name), case.operands(1, 1), case.operands(1, 7)

        def prepare(operands: Any, *further: Any, row: Implementation = row) -> Any:
            out = None if row.allocates else op.empty_output(operands.sizes, "cpu").fill_(math.nan)
            return bind(op, row, operands, out, *further)

        prepared = prepare(first)
        found[name, "first"] = judged(row, prepared, first)
        if not case.twist:
            turned, other = first.turned(2), case.operands(2, 2)
            found[name, "turned"] = judged(row, prepare(turned, prepared), turned)
            found[name, "other weights"] = judged(row, prepare(other), other)
        prepared.load(loaded.live_tensors())
        found[name, "loaded"] = judged(row, prepared, loaded)
    return {call: reason for call, reason in found.items() if reason}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_is_right(case):
    names = [name for name in rows(case, "torch.") if name != "torch.compile"]
    assert len(names) == (2 if case.boundary == "core" or case.op == MOE else len(names)) > 0
    assert not wrong(case, names)


@pytest.mark.slow
@pytest.mark.parametrize("index", [2, 8, 16, 24])
def test_torch_compile_is_right(index):
    if not (support := named(CASES[index].op, "torch.compile").available(CPU)).ok:
        pytest.skip(support.reason)
    assert not wrong(CASES[index], ["torch.compile"])


@pytest.mark.slow
@pytest.mark.parametrize("op", kernels.OPS)
def test_vllm_is_right(op, vllms_process):
    taken = {case: names for case in CASES if case.op == op and (names := rows(case, "vllm."))}
    if not taken:
        pytest.skip("vLLM's build for CPUs is not installed, or takes another CPU")
    assert len(taken) >= 3
    for case, names in taken.items():
        assert not vllms_process.submit(wrong, case, names).result(timeout=900), case


def test_without_bf16_instructions_torch_multiplies_all_the_same(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert not wrong(CASES[7], ["torch.bf16"])
