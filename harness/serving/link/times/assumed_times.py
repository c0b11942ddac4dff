"""Times that nobody measured: those of the H200's tables, scaled by the data sheets of both machines.

A kernel that is bound by memory scales with the bandwidths, one that is bound by its products with the peak
TFLOPS. Both machines add LAUNCH_US to that, so that small kernels scale little. How near another machine's
kernels come to its data sheet: ON_AMD and DEVIATION are from AITER's own times for MI300X and MI350X
(results/published/aiter-tuned.json), of which 28 of 31 lie in the 90 % interval. 25 of these 31 set ON_AMD;
none is of MLA.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.files import JsonObject
from harness.serving.link.times.tables import LAUNCH_US, TABLES, Tables, read_tables
from harness.serving.names import data_sheet

ON_AMD = 1.4  # of FP8 block-scale products: the median of AITER's 25 times over those that data sheets give
# FP8 products of SGLang 0.5.9 on gfx942 take this for each 128 of k, whatever n: 123, 30, 34, 122 and 39 us
# of k = 7168, 1536, 2048, 7168 and 2304 on MI325X, in InferenceX's issue 863 (a language model's summary of a
# trace of 64 requests, kept in results/published/notes/ab_points.json). It calls the first two q_a and kv_a;
# that they are qkv_a and q_b, which SGLang calls as often, is our reading.
BLOCK_OF_K_US = {("gfx942", "sglang"): 2.2}
# What a step takes beside these kernels, and for each of its tokens, on MI325X with SGLang: by the TPOT of 4
# requests and the TTFT of 8192 tokens in results/published/serving-link/mi325x-sglang.json. A token's 17 us
# are taken for bytes that SGLang's small kernels move on AMD; ATOM and vLLM have kernels of their own. From
# 60 to 140 MB the errors of `serving validate` hardly move.
BETWEEN_US = {("gfx942", "sglang"): 4.7e3}
TOKEN_BYTES = 100e6
# MLA on gfx942 takes so many times what data sheets make of the H200's: TPOT of MI325X grows that much faster
# with the context. MI300X's points set nothing of these.
SLOWER_MLA = {"gfx942": 4.0}
DEVIATION = 0.4  # of the logarithm of a time


def data_sheet_us(sheet: JsonObject, flops: float, moved: float, dtype: str) -> float:
    """Of a kernel at a machine's peaks. flops: of dense products; moved: bytes"""
    return LAUNCH_US + max(flops / sheet["tflops"][dtype], moved / sheet["tbps"]) / 1e6


@dataclass(frozen=True)
class AssumedTables(Tables):
    """The H200's tables, scaled to another machine. here: its data sheet; there: the H200's"""

    here: JsonObject
    there: JsonObject

    @classmethod
    def of(cls, hardware: str, engine: str) -> AssumedTables:
        """hardware: a machine with a data sheet, by its name there"""
        base, here = read_tables(TABLES / "h200-sglang-0.5.9"), data_sheet(hardware)
        there, arch, where = data_sheet("h200"), here["arch"], f"assumed from {base.where} by data sheets"
        token_us = TOKEN_BYTES / here["tbps"] / 1e6 if arch.startswith("gfx") and engine == "sglang" else 0.0
        between_us = BETWEEN_US.get((arch, engine), 0.0), token_us
        return cls(hardware, engine, base.version, where, base.rows, here, there, between_us=between_us)

    def _scaled(self, us: float, flops: float, moved: float, dtype: str) -> float:
        here, there = (data_sheet_us(sheet, flops, moved, dtype) for sheet in (self.here, self.there))
        return us * here / there

    def gemm(self, kind: str, m: float, n: int, k: int) -> float:
        size, dtype = (1, "fp8") if kind == "fp8_block" else (2, "bf16")
        moved = size * (n * k + m * k) + 2 * m * n
        scaled = self._scaled(super().gemm(kind, m, n, k), 2 * m * n * k, moved, dtype)
        if kind != "fp8_block":
            return scaled
        arch = self.here["arch"]
        block_of_k_us = BLOCK_OF_K_US.get((arch, self.engine), 0.0)
        return max(scaled * (ON_AMD if arch.startswith("gfx") else 1.0), block_of_k_us * k / 128)

    def moe(self, tokens: float, tp: int, ep: int, distribution: str) -> float:
        expert = 3 * 7168 * 2048 / tp
        touched = min(256.0, 8 * tokens) / ep
        flops, moved = 2 * tokens * 8 / ep * expert, touched * expert + 4 * tokens * 7168
        return self._scaled(super().moe(tokens, tp, ep, distribution), flops, moved, "fp8")

    def mla_decode(self, batch: float, context: float, heads: int, kv: str) -> float:
        """From the H200's times with a bf16 cache, whatever the cache here: its times with FP8 are 7.5 to
        15.8 times what data sheets give, those with bf16 1.2 to 5.3, and nobody else runs that kernel."""
        tokens = batch * context
        flops, moved = 2 * tokens * heads * (576 + 512), tokens * 576 * (2 if kv == "bfloat16" else 1)
        there = data_sheet_us(self.there, flops, tokens * 576 * 2, "bf16")
        us = super().mla_decode(batch, context, heads, "bfloat16") * SLOWER_MLA.get(self.here["arch"], 1.0)
        return us * data_sheet_us(self.here, flops, moved, "bf16") / there

    def mla_prefill(self, batch: float, length: float, heads: int, kv: str) -> float:
        flops, moved = batch * length**2 * heads * (576 + 512), 4 * batch * length * heads * 576
        return self._scaled(super().mla_prefill(batch, length, heads, kv), flops, moved, "bf16")

    def absorbed_bmm(self, which: str, tokens: float, heads: int) -> float:
        flops, moved = 2 * tokens * heads * 128 * 512, 2 * heads * (128 * 512 + tokens * (128 + 512))
        return self._scaled(super().absorbed_bmm(which, tokens, heads), flops, moved, "bf16")

    # The all-reduce is the H200's: eight MI300X or MI350X in a mesh give each GPU 448 GB/s, NVLink 450.
