"""AITER's products on shuffled FP8 weights: the GEMM in assembly, and the fused MoE in one stage or in two.

From AITER e404860 (August 2026): aiter/ops/shuffle.py, csrc/py_itfs_cu/{asm_a8w8_blockscale_bpreshuffle,
asm_fmoe}.cu, csrc/ck_gemm_moe_2stages_codegen/gemm_moe_ck2stages.cu, csrc/include/moe_sorting_opus.h,
csrc/kernels/quant_kernels.cu, aiter/fused_moe.py. Kernels get pointers: they ask for few shapes and strides,
and misread what lies otherwise.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import silu

from tests.doubles.arithmetic import BLOCK, activations, need, quantised, read, rounded, weights


class Aiter:
    def __init__(self, arch: str) -> None:
        self.fp8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}[arch]

    def functions(self) -> dict[str, Callable[..., Any]]:
        """By library and name."""
        return {
            "aiter.shuffle_weight": shuffle_weight,
            "aiter.gemm_a8w8_blockscale_bpreshuffle_asm": self.asm_gemm,
            "aiter.fmoe_fp8_blockscale_g1u1": self.one_stage,
            "aiter.ck_moe_stage1_fwd": self.first_stage,
            "aiter.ck_moe_stage2_fwd": self.second_stage,
            "aiter.per_group_quant_hip": self.quantise,
            "aiter.moe_sorting": moe_sorting,
            "aiter.fused_moe": self.layer,
        }

    def asm_gemm(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        A_scale: torch.Tensor,
        B_scale: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Scales of a are read column by column."""
        (m, k), n = A.shape, len(B)
        need(n % BLOCK == 0 and k % BLOCK == 0, "only support 128nx128k tile now!")
        need(out.dtype == torch.bfloat16 and tuple(out.shape) == (m, n), "out is bf16 [M, N]")
        need(A.stride(1) == 1 == out.stride(1), "inner strides are taken to be 1")
        a = activations(self.own(A), read(A_scale, k // BLOCK, m).T)
        b = weights(self.unshuffled(B, n, k), read(B_scale, n // BLOCK, k // BLOCK))
        out.copy_(a @ b.T)

    def own(self, values: torch.Tensor) -> torch.Tensor:
        need(values.dtype == self.fp8, f"{values.dtype} would be misread as {self.fp8}")
        return values

    def unshuffled(self, weight: torch.Tensor, n: int, k: int) -> torch.Tensor:
        """[..., N, K] in rows again."""
        need(weight.shape[-2:] == (n, k) and weight.is_contiguous(), "weights are contiguous [..., N, K]")
        tiles = self.own(weight).view(torch.uint8).reshape(-1, n // 16, k // 32, 2, 16, 16)
        return tiles.permute(0, 1, 4, 2, 3, 5).reshape(weight.shape).view(self.fp8)

    def quantise(
        self, x: torch.Tensor, quant_dtype: torch.dtype, group_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        need(group_size == BLOCK and x.is_contiguous(), "contiguous, in groups of 128")
        return quantised(x, quant_dtype)

    def gate_up(self, x: torch.Tensor, w13: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """SiLU(gate) * up of rows with their scales applied; gate rows of w13 stand first."""
        gate, up = (x @ weights(w13, scale).T).chunk(2, -1)
        return silu(gate) * up

    def one_stage(self, **given: Any) -> None:
        """`out`, which sorting has zeroed, gets the sum. Scales of x are read column by column."""
        g = SimpleNamespace(**given)
        (tokens, hidden), inter = g.out.shape, g.down.shape[2]
        need(hidden % BLOCK == 0 and inter % BLOCK == 0 and g.input.shape == g.out.shape, "sizes of 128")
        w13, w2 = self.unshuffled(g.gate, 2 * inter, hidden), self.unshuffled(g.down, hidden, inter)
        s13, s2 = of_experts(g.fc1_scale, w13), of_experts(g.fc2_scale, w2)
        x = activations(self.own(g.input), read(g.input_scale, hidden // BLOCK, tokens).T)
        total = torch.zeros(tokens, hidden)
        for expert, token, _, share in blocks(g, 32, tokens, len(w13)):
            h = rounded(self.gate_up(x[token], w13[expert], s13[expert]), self.fp8)
            total.index_add_(0, token, h @ weights(w2[expert], s2[expert]).T * share)
        g.out.copy_(total)

    def first_stage(self, **given: Any) -> None:
        """Writes h [tokens, top-k, inter] in bf16. Scales of x are read row by row."""
        g = SimpleNamespace(**given)
        (tokens, hidden), inter = g.hidden_states.shape, g.w1.shape[1] // 2
        self.checked(g, g.a1_scale, hidden)
        w13 = self.unshuffled(g.w1, 2 * inter, hidden)
        s13 = of_experts(g.w1_scale, w13)
        x = activations(self.own(g.hidden_states), read(g.a1_scale, tokens, hidden // BLOCK))
        need(g.out.dtype == g.dst_type == torch.bfloat16 and g.splitk in (0, 1), "h in bf16, K is not split")
        h = read(g.out, tokens, g.topk, inter)
        for expert, token, pick, share in blocks(g, g.block_m, tokens, len(w13)):
            h[token, pick] = (self.gate_up(x[token], w13[expert], s13[expert]) * share).bfloat16()

    def second_stage(self, **given: Any) -> None:
        """`out`, which sorting has zeroed, gets the sum."""
        g = SimpleNamespace(**given)
        (tokens, hidden), inter = g.out.shape, g.inter_states.shape[-1]
        self.checked(g, g.a2_scale, inter)
        w2 = self.unshuffled(g.w2, hidden, inter)
        s2 = of_experts(g.w2_scale, w2)
        h_q = read(self.own(g.inter_states), tokens, g.topk, inter)
        h = activations(h_q, read(g.a2_scale, tokens, g.topk, inter // BLOCK))
        total = torch.zeros(tokens, hidden)
        for expert, token, pick, share in blocks(g, g.block_m, tokens, len(w2)):
            total.index_add_(0, token, h[token, pick] @ weights(w2[expert], s2[expert]).T * share)
        g.out.copy_(total)

    def checked(self, g: SimpleNamespace, scale: torch.Tensor, k: int) -> None:
        need(
            is_called(g.quant_type, "per_1x128") and is_called(g.activation, "Silu"),
            "Unsupported kernel config",
        )
        need(g.block_m in (16, 32, 64) and k % BLOCK == 0, f"Unsupported block_m value: {g.block_m}")
        need(scale.dtype == torch.float32, "scales are fp32")

    def layer(self, **given: Any) -> torch.Tensor:
        """aiter/fused_moe.py without a tuned configuration: x is quantised, then all in one stage. A mark
        on the weights says which kernels run: those for plain rows misread shuffled ones."""
        g = SimpleNamespace(**given)
        need(getattr(g.w1, "is_shuffled", False), "kernels for plain rows run")
        need(is_called(g.quant_type, "per_128x128") and is_called(g.activation, "Silu"), "another layer")
        experts = len(g.w1) if g.expert_mask is None else g.expert_mask.numel()
        x_q, x_scale = quantised(g.hidden_states, self.fp8)
        hidden = g.hidden_states.shape[1]
        pairs = moe_sorting(g.topk_ids, g.topk_weight, experts, hidden, torch.bfloat16, 32, g.expert_mask)
        names = ("sorted_token_ids", "sorted_weights", "sorted_expert_ids", "num_valid_ids", "out")
        self.one_stage(
            **dict(zip(names, pairs, strict=True)), input=x_q, input_scale=x_scale.T.contiguous(), gate=g.w1,
            down=g.w2, fc1_scale=g.w1_scale, fc2_scale=g.w2_scale,
        )  # fmt: skip
        return pairs[-1]


def shuffle_weight(x: torch.Tensor, layout: tuple[int, int]) -> torch.Tensor:
    """Rows in tiles of 16, K in tiles of 32 bytes: [N/16, K/32, 2, 16 rows, 16 bytes]; the shape stays. The
    caller marks the result, as older releases do not."""
    rows, depth = layout[0], 2 * layout[1]
    *_, n, k = x.shape
    need(n % rows == 0 and k % depth == 0, f"{x.shape} % {rows}, {depth}")
    tiles = x.view(torch.uint8).reshape(-1, n // rows, rows, k // depth, depth // 16, 16)
    return tiles.permute(0, 1, 3, 4, 2, 5).reshape(x.shape).view(x.dtype)


def is_called(member: object, name: str) -> bool:
    """Whether that is a library's enum's member of that name."""
    return repr(member).endswith(f".{name}")


def of_experts(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """fp32 [experts, N/128, K/128], by pointer."""
    need(scale.dtype == torch.float32, "scales of weights are fp32")
    experts, n, k = weight.shape
    return read(scale, experts, n // BLOCK, k // BLOCK)


def moe_sorting(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    model_dim: int,
    moebuf_dtype: torch.dtype,
    block_size: int,
    expert_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """csrc/include/moe_sorting_opus.h: tokens by expert, each expert's padded to whole blocks, experts
    numbered among those that the mask leaves; and a zeroed output. The low 24 bits of an id are the token,
    those above its place in the top-k. Ids address shared memory: they are not checked."""
    tokens, picks = topk_ids.shape
    need(topk_ids.dtype == torch.int32 and topk_weights.dtype == torch.float32, "ids int32, weights fp32")
    need(topk_ids.is_contiguous() and topk_weights.is_contiguous(), "contiguous ids and weights")
    need(0 <= int(topk_ids.min()) and int(topk_ids.max()) < num_experts, "memory access fault: an expert id")
    here = [True] * num_experts if expert_mask is None else expert_mask.bool().tolist()
    need(len(here) == num_experts, "expert_mask has a number for each expert")
    need(expert_mask is None or expert_mask.dtype == torch.int32, "expert_mask is int32")
    ids, shares, experts = [], [], []
    for expert in (e for e in range(num_experts) if here[e]):
        token, pick = (topk_ids == expert).nonzero(as_tuple=True)
        spare = -len(token) % block_size
        ids += [*(token | pick << 24).tolist(), *[tokens | picks << 24] * spare]
        shares += [*topk_weights[token, pick].tolist(), *[0.0] * spare]
        experts += [sum(here[:expert])] * ((len(token) + spare) // block_size)
    whole = (
        torch.tensor(ids or [0]).int(),
        torch.tensor(shares or [0.0]),
        torch.tensor(experts or [0]).int(),
    )
    out = torch.zeros(tokens, model_dim, dtype=moebuf_dtype)
    return *whole, torch.tensor([len(ids), tokens]).int(), out


def blocks(
    g: SimpleNamespace, rows: int, tokens: int, experts: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of each block of sorted pairs: its expert, and of each pair its token, place and weight [., 1]."""
    for start in range(0, int(g.num_valid_ids[0]), rows):
        expert = int(g.sorted_expert_ids[start // rows])
        need(0 <= expert < experts, f"memory access fault: expert {expert}")
        ids = g.sorted_token_ids[start : start + rows]
        kept = (ids & 0xFFFFFF) < tokens
        ids = ids[kept].long()
        if g.sorted_weights is None:
            share = torch.ones(len(ids), 1)
        else:
            share = g.sorted_weights[start : start + rows][kept][:, None]
        yield expert, ids & 0xFFFFFF, ids >> 24, share
