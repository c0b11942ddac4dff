"""MLA decode in plain torch: the obvious code, the same code compiled, and torch's fused attention."""

from __future__ import annotations

from kernels.attention import BYTES
from kernels.lazy import torch
from kernels.mla_decode.operands import LATENT, WIDTH, MlaDecodeOperands, MlaDecodeSizes
from kernels.op import Call, Implementation, Prepared, implementation

Tables = tuple["torch.Tensor", "torch.Tensor"]


def padded_tables(operands: MlaDecodeOperands) -> Tables:
    """Where each token is in the flat cache, int64 [batch, longest], and which of these entries each query
    token sees, bool [batch, q, longest]. Entries past a length repeat the first token, which is finite."""
    slots_of_sequences = [operands.token_slots(i) for i in range(len(operands.host_lengths))]
    slots = torch.nn.utils.rnn.pad_sequence(slots_of_sequences, batch_first=True)
    position = torch.arange(slots.shape[1], device=slots.device)
    tokens_after = torch.arange(operands.q.shape[1] - 1, -1, -1, device=slots.device)  # after a query token
    seen = position < operands.lengths[:, None, None] - tokens_after[:, None]
    seen_by_last = seen[:, -1]  # all tokens of the sequence
    return torch.where(seen_by_last, slots, slots[:, :1]), seen


def attend(
    q: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor, seen: torch.Tensor, scale: float, kv_scale: float
) -> torch.Tensor:
    """Gather, product, mask, softmax, product, all in fp32. slots, seen: from `padded_tables`"""
    rows = kv.view(-1, WIDTH)[slots].float() * kv_scale
    scores = (q.flatten(1, 2).float() @ rows.mT * scale).unflatten(1, q.shape[1:3])
    weights = scores.masked_fill(~seen[:, :, None], float("-inf")).softmax(-1)
    return (weights.flatten(1, 2) @ rows[..., :LATENT]).view(*q.shape[:3], LATENT)


class TorchMlaDecode(Implementation):
    requires = "torch"

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        """The bytes of slots in int64, and of masks by query token and by query row."""
        return sizes.batch * max(sizes.lengths()) * (8 + sizes.q * (1 + sizes.heads))

    def scratch(self, sizes: MlaDecodeSizes) -> int:
        """The gathered rows, as they are cached and twice in fp32, and four tensors of scores in fp32."""
        return sizes.batch * max(sizes.lengths()) * (WIDTH * (2 + 4 + 4) + sizes.q * sizes.heads * 4 * 4)


@implementation("torch.naive", TorchMlaDecode, rebinds=True, stationary=padded_tables)
def naive(o: MlaDecodeOperands, out: torch.Tensor, tables: Tables) -> Call:
    return lambda: out.copy_(attend(o.q, o.kv, *tables, o.scale, o.kv_scale))


@implementation(
    "torch.compile",
    TorchMlaDecode,
    requires="torch with its compiler (a C++ compiler on cpu, Triton on cuda and rocm)",
    available=lambda platform: platform.compiler(),
    per_size=True,
    stationary=padded_tables,
)
def compiled(o: MlaDecodeOperands, out: torch.Tensor, tables: Tables) -> Call:
    function = torch.compile(attend, dynamic=False)
    return lambda: out.copy_(function(o.q, o.kv, *tables, o.scale, o.kv_scale))


class SdpaMlaDecode(TorchMlaDecode):
    """One scaled_dot_product_attention for the batch. Query tokens and heads become the query rows of one
    head, so that the cache is not read anew for each of them. The value keeps all 576 columns, because the
    flash kernels want one head size; the last 64 columns of the output are dropped."""

    name = "torch.sdpa"

    def scratch(self, sizes: MlaDecodeSizes) -> int:
        """The gathered rows, which all sets share; with an FP8 cache also in fp32 and in bf16."""
        slots = sizes.batch * max(sizes.lengths())
        return slots * WIDTH * (BYTES[sizes.kv] + (4 + 2 if sizes.kv == "fp8" else 0))

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return self.prepare_turn(None, operands, out)

    def prepare_turn(self, first: Prepared | None, o: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        import torch

        if first is not None and o.same_stationary(first.operands):
            slots, seen, rows = first.stationary
        else:
            slots, seen = padded_tables(o)
            if o.q.shape[1] > 1:
                seen = seen.repeat_interleave(o.heads, 1)  # a row of the mask for each query row
            # One buffer serves the calls on all sets, as one serves all layers of an engine.
            rows = None if first is None else first.stationary[2]
            if rows is None or rows.shape[:2] != slots.shape:
                rows = o.kv.new_empty(*slots.shape, WIDTH)

        def call() -> None:
            # Into a buffer that exists already: page faults in fresh memory cost more than the copy.
            torch.index_select(o.kv.view(-1, WIDTH), 0, slots.flatten(), out=rows.view(-1, WIDTH))
            scaled = rows if o.kv_scale == 1.0 else (rows.float() * o.kv_scale).bfloat16()
            kv = scaled[:, None]
            attended = torch.nn.functional.scaled_dot_product_attention(
                o.q.flatten(1, 2)[:, None], kv, kv, attn_mask=seen[:, None], scale=o.scale
            )
            out.copy_(attended[:, 0, :, :LATENT].view_as(out))

        prepared = Prepared(o, out, call)
        prepared.stationary = slots, seen, rows
        return prepared
