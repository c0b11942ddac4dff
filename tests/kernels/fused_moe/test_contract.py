"""The adapters of vendors' fused MoE keep to what the libraries take, by their doubles; an adapter with one
step of a layout broken is caught.

Some stand between the suite's own Triton kernels, which a CPU interprets: as in test_triton_mla_decode, those
cases run in a process of their own, this file as a script.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels
from kernels.compose import bind
from kernels.fused_moe.providers import aiter, aiter_triton, deep_gemm, flashinfer, sglang_triton, vllm_triton
from kernels.operands import Seeds
from shapes.case import parse
from tests.doubles import lent
from tests.support.interpreting import run_interpreted
from tests.support.judging import judged

OP = kernels.OPS["fused_moe"]
IMPLEMENTATIONS = {i.name: i for i in kernels.implementations(OP.name)}
DOUBLES = {
    "aiter": "aiter_gemm_moe",
    "deepgemm": "deep_gemm",
    "flashinfer": "flashinfer_gemm_moe",
    "sglang": "sglang",
}

SMALL = "tokens=5 experts=8 topk=2 hidden=256 inter=128"
MANY = "tokens=40 experts=8 topk=3 hidden=256 inter=128 shared=1"
EP = "tokens=5 experts=16 topk=4 hidden=256 inter=128 ep=2 shared=1 routing=uniform"
DEEP = "tokens=3 experts=4 topk=2 hidden=640 inter=640"
ROUTED = "tokens=7 experts=32 topk=4 hidden=256 inter=128"


@dataclass(frozen=True)
class Contract:
    name: str
    arch: str
    boundary: str
    text: str = SMALL
    changed: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.name} {self.arch} {self.boundary} {self.text}"

    def found(self, mutation: Mutation | None = None) -> list[str]:
        """What the judge has against the outputs: of a set that shares the weights of another, and once other
        live operands are loaded; of a mutation the first thing. Raises what the library raises."""
        kind = "rocm" if self.arch.startswith("gfx") else "cuda"
        with lent(kind, self.arch, DOUBLES[self.name.split(".")[0]]), pytest.MonkeyPatch.context() as patch:
            if mutation is None:
                return list(self._found())
            mutation.breaks(patch)
            return list(islice(filter(None, self._found()), 1))

    def _found(self):
        implementation = IMPLEMENTATIONS[self.name]
        sizes = OP.sizes({**OP.defaults(self.arch), **parse(self.text)[0], **self.changed})
        operands = OP.operands(sizes, Seeds(1, 1), "cpu", self.boundary)
        turned = operands.turned(1)
        prepared = self._bound(turned, self._bound(operands))
        yield self._judged(implementation, sizes, turned, prepared)
        other = OP.operands(sizes, Seeds(1, 2), "cpu", self.boundary)
        prepared.load(other.live_tensors())
        yield self._judged(implementation, sizes, other, prepared)

    def _bound(self, operands: Any, first: Any = None) -> Any:
        implementation = IMPLEMENTATIONS[self.name]
        out = None if implementation.allocates else OP.empty_output(operands.sizes, "cpu")
        return bind(OP, implementation, operands, out, first)

    @staticmethod
    def _judged(implementation: Any, sizes: Any, operands: Any, prepared: Any) -> str:
        if not implementation.allocates:
            prepared.result().fill_(float("nan"))
        prepared.call()
        return judged(OP, implementation, sizes, operands, prepared.result())["reason"]


CONTRACTS = [
    Contract("aiter.dispatch", "gfx942", "with_quant"),
    Contract("aiter.dispatch", "gfx942", "with_quant", MANY),
    Contract("aiter.dispatch", "gfx950", "with_quant", MANY),
    Contract("aiter.dispatch", "gfx950", "with_routing", EP),
    Contract("aiter.asm", "gfx942", "core"),
    Contract("aiter.asm", "gfx950", "with_quant", MANY),
    Contract("aiter.asm", "gfx942", "with_routing", EP),
    Contract("aiter.ck", "gfx942", "core"),
    Contract("aiter.ck", "gfx950", "with_quant", MANY),
    Contract("aiter.ck", "gfx942", "with_routing", EP),
    Contract("aiter.triton", "gfx942", "core"),
    Contract("aiter.triton", "gfx950", "with_routing", EP),
    Contract("flashinfer.cutlass", "sm_90", "with_quant"),
    Contract("flashinfer.cutlass", "sm_90", "with_routing", EP),
    Contract("flashinfer.trtllm", "sm_100", "with_routing", ROUTED),
    Contract("flashinfer.trtllm", "sm_100", "with_routing", f"{ROUTED} ep=2 routing=uniform"),
    Contract("deepgemm.contiguous", "sm_90", "core", DEEP),
    Contract("deepgemm.contiguous", "sm_90", "with_routing", EP),
    Contract("deepgemm.contiguous", "sm_100", "core", DEEP),
    Contract("deepgemm.masked", "sm_90", "core"),
    Contract("deepgemm.masked", "sm_100", "core", DEEP),
    Contract("deepgemm.masked", "sm_100", "with_routing", EP),
    Contract("sglang.triton", "sm_90", "with_quant", MANY),
    Contract("sglang.triton", "gfx942", "with_routing", EP),
]


@dataclass(frozen=True)
class Mutation:
    """One step of an adapter broken.

    breaks: does that to the provider's module
    """

    what: str
    contract: Contract
    breaks: Callable[[pytest.MonkeyPatch], None] = lambda patch: None

    def __str__(self) -> str:
        return f"{self.contract.name} {self.contract.arch}: {self.what}"

    def found(self) -> list[str]:
        try:
            return self.contract.found(self)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]


def instead(module: Any, step: str, broken: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """The step replaced by `broken(right, *arguments)`."""
    right = getattr(module, step)
    return lambda patch: patch.setattr(module, step, lambda *args, **given: broken(right, *args, **given))


def once(owner: type, step: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The step done for the first call only: what it gave stays."""
    right = getattr(owner, step)

    def breaks(patch: pytest.MonkeyPatch) -> None:
        def first(self):
            if "kept" not in vars(self):
                self.kept = right(self)
            return dict(self.kept) if self.kept else None

        patch.setattr(owner, step, first)

    return breaks


def unshuffled(_, weight):
    plain = weight.clone()
    plain.is_shuffled = True
    return plain


def swapped(right, weight):
    """w13 with its halves exchanged; w2 as it is."""
    gate_up = weight.shape[1] == 2 * 128
    return right(weight.view(torch.uint8).roll(128, 1).view(weight.dtype) if gate_up else weight)


def row_major(right, groups, rows, k, packed, device):
    return right(groups, rows, k, packed, device).contiguous()


def unaligned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deep_gemm, "alignment", lambda expected: 64)
    patch.setattr(deep_gemm, "setter", lambda aligned: lambda: None)


def row_major_weights(right, *args):
    return right(*args).contiguous()


ASM, CK = Contract("aiter.asm", "gfx942", "core", MANY), Contract("aiter.ck", "gfx942", "core", MANY)
TRITON = Contract("aiter.triton", "gfx942", "core")
DISPATCH = Contract("aiter.dispatch", "gfx950", "with_quant", MANY)
ASM_EP, CK_EP = (Contract(c.name, c.arch, "core", EP) for c in (ASM, CK))
CUTLASS = Contract("flashinfer.cutlass", "sm_90", "with_quant", EP)
TRTLLM = Contract("flashinfer.trtllm", "sm_100", "with_routing", ROUTED)
HOPPER = {n: Contract(f"deepgemm.{n}", "sm_90", "core") for n in ("contiguous", "masked")}
BLACKWELL = {n: Contract(f"deepgemm.{n}", "sm_100", "core", DEEP) for n in ("contiguous", "masked")}
ROUNDED = {n: Contract(c.name, c.arch, "core", SMALL, {"scales": "ue8m0"}) for n, c in HOPPER.items()}
# Powers of two would be packed by the library, in the call.
UNROUNDED = {n: Contract(c.name, c.arch, "core", DEEP, {"scales": "fp32"}) for n, c in BLACKWELL.items()}
FN = {"fp8": "e4m3fn"}
SGLANG = Contract("sglang.triton", "sm_90", "with_quant")

MUTATIONS = [
    *(Mutation("shuffle dropped", c, instead(aiter, "shuffled", unshuffled)) for c in (DISPATCH, ASM, CK)),
    *(Mutation("up before gate", c, instead(aiter, "shuffled", swapped)) for c in (DISPATCH, ASM, CK)),
    Mutation("scales of x not transposed", ASM, instead(aiter, "block_major", lambda _, x: x.t())),
    Mutation("sorted pairs of another routing", ASM, once(aiter._Sorted, "sorted_pairs")),
    Mutation("sorted pairs of another routing", CK, once(aiter._Sorted, "sorted_pairs")),
    Mutation("weights applied twice", CK, instead(aiter, "unweighted", lambda _, h: {"out": h})),
    *(
        Mutation("experts elsewhere not masked", c, instead(aiter, "expert_mask", lambda *_: None))
        for c in (ASM_EP, CK_EP)
    ),
    Mutation("blocks of 64 rows for kernels of 32", ASM, lambda p: p.setattr(aiter, "ONE_STAGE_ROWS", 64)),
    *(
        Mutation("e4m3fn on gfx942", Contract(c.name, c.arch, c.boundary, SMALL, FN))
        for c in (ASM, CK, TRITON)
    ),
    Mutation(
        "steps of 256 of K",
        TRITON,
        instead(aiter_triton, "configuration", lambda right, sizes: right(sizes) | {"BLOCK_SIZE_K": 256}),
    ),
    *(
        Mutation("gate before up", c, instead(flashinfer, "up_first", lambda _, rows, inter: rows))
        for c in (CUTLASS, TRTLLM)
    ),
    Mutation(
        "scales in the other order",
        CUTLASS,
        instead(flashinfer, "up_first", lambda right, x, n: x if x.dtype == torch.float32 else right(x, n)),
    ),
    Mutation("tiles of 128 rows", TRTLLM, lambda p: p.setattr(flashinfer, "EPILOGUE_ROWS", 128)),
    Mutation(
        "no blocks along K",
        TRTLLM,
        instead(flashinfer, "blocked", lambda right, w: right(w).permute(0, 2, 1, 3).reshape(w.shape)),
    ),
    Mutation("unscaled weights", TRTLLM, lambda p: p.setattr(flashinfer, "SCALING", 1.0)),
    Mutation("softmax before the top", TRTLLM, lambda p: p.setattr(flashinfer, "DEEPSEEK_V3", 1)),
    *(
        Mutation("scales row-major", c, instead(deep_gemm, "mn_major", row_major))
        for c in (*HOPPER.values(), *BLACKWELL.values())
    ),
    *(
        Mutation("rows of another routing", c, once(owner, "place"))
        for c, owner in zip(HOPPER.values(), (deep_gemm._Contiguous, deep_gemm._Masked), strict=True)
    ),
    *(
        Mutation("scales not packed to UE8M0", c, instead(deep_gemm, "packs", lambda *_: False))
        for c in UNROUNDED.values()
    ),
    *(
        Mutation("weights' scales row-major", c, instead(deep_gemm, "weight_scale", row_major_weights))
        for c in BLACKWELL.values()
    ),
    *(
        Mutation("scales packed to UE8M0", c, instead(deep_gemm, "packs", lambda *_: True))
        for c in ROUNDED.values()
    ),
    *(
        Mutation("library not told the alignment", c, instead(deep_gemm, "setter", lambda *_: dict))
        for c in BLACKWELL.values()
    ),
    *(Mutation("experts aligned to 64 rows", c, unaligned) for c in HOPPER.values()),
    Mutation("no server of one process", SGLANG, instead(sglang_triton, "alone", lambda _: None)),
    Mutation("e4m3fn on gfx942", Contract("sglang.triton", "gfx942", "with_quant", SMALL, FN)),
]


def interpreted(contract: Contract) -> bool:
    return contract.name.startswith(("deepgemm", "aiter.triton"))


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, list[str]]:
    """What the interpreted cases find, by name."""
    return dict(map(json.loads, run_interpreted(__file__).stdout.splitlines()))


def marked(checked: Sequence[Any], contract: Callable[[Any], Contract]) -> list[Any]:
    """The interpreted ones, which take 10 s to start, are slow."""
    return [pytest.param(c, marks=[pytest.mark.slow] * interpreted(contract(c)), id=str(c)) for c in checked]


@pytest.mark.parametrize("contract", marked(CONTRACTS, lambda contract: contract))
def test_contract(contract: Contract, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue("elsewhere")[str(contract)] if interpreted(contract) else contract.found()
    assert found == ["", ""]


@pytest.mark.parametrize("mutation", marked(MUTATIONS, attrgetter("contract")))
def test_mutation_is_caught(mutation: Mutation, request: pytest.FixtureRequest) -> None:
    apart = interpreted(mutation.contract)
    assert any(request.getfixturevalue("elsewhere")[str(mutation)] if apart else mutation.found())


def test_aiter_says_what_it_picked() -> None:
    with lent("rocm", DISPATCH.arch, DOUBLES["aiter"]):
        sizes = OP.sizes({**OP.defaults(DISPATCH.arch), **parse(MANY)[0]})
        picked = DISPATCH._bound(OP.operands(sizes, Seeds(1, 1), "cpu", "with_quant")).picked()
    assert picked in ("one stage, not tuned", "two stages, not tuned")


def test_some_picks_are_of_other_ranks() -> None:
    for text in (EP, f"{ROUTED} ep=2 routing=uniform"):
        operands = OP.operands(OP.sizes(parse(text)[0]), Seeds(1, 1), "cpu")
        assert bool((operands.topk_ids < 0).any()) and bool((operands.topk_ids >= 0).any())


def signature_of(package: str, place: str, name: str) -> Callable:
    """A function that takes what an installed package's takes, by its source, and gives it back: importing
    vLLM's Triton MoE needs more than its CPU build brings."""
    folder = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    tree = ast.parse((folder / f"{place}.py").read_text())
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    function.args.defaults = [ast.Constant(None) for _ in function.args.defaults]
    for argument in function.args.args:
        argument.annotation = None
    function.decorator_list, function.returns = [], None
    function.body = ast.parse("return dict(locals())").body
    made: dict[str, Any] = {"__name__": package}
    exec(compile(ast.fix_missing_locations(ast.Module([function], [])), place, "exec"), made)
    return made[name]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_takes_what_its_adapter_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the installed version's signatures, and by what its map of experts makes of the ids."""
    for place, name in (("fused_moe", "fused_experts"), ("config", "fp8_w8a8_moe_quant_config")):
        module = types.ModuleType(place)
        setattr(module, name, signature_of("vllm", f"model_executor/layers/fused_moe/{place}", name))
        monkeypatch.setitem(sys.modules, f"{vllm_triton.MODULE}.{place}", module)
    operands = OP.operands(OP.sizes(parse(EP)[0]), Seeds(1, 1), "cpu", "with_quant")
    prepared = IMPLEMENTATIONS["vllm.triton"].prepare(operands, None)
    prepared.call()
    given = prepared.result()
    assert torch.equal(given["expert_map"][given["topk_ids"].long()], operands.topk_ids)
    assert int(given["topk_ids"].max()) < given["global_num_experts"]
    assert given["quant_config"]["block_shape"] == [128, 128]
    assert given["quant_config"]["w1_scale"] is operands.w13_scale


def main() -> None:
    for contract in filter(interpreted, CONTRACTS):
        try:
            found = contract.found()
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        print(json.dumps((str(contract), found)))
    for mutation in MUTATIONS:
        if interpreted(mutation.contract):
            print(json.dumps((str(mutation), mutation.found())))


if __name__ == "__main__":
    main()
