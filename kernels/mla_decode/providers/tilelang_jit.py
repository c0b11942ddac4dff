"""TileLang sources of MLA decode: each program attends to a part of a sequence, and others combine the parts.

TileLang reads the sources as text, annotations too: no annotation may be a string. Scores are logarithms to
base 2 of softmax weights. Parts and slots come from split_kv_plan."""

import tilelang.language as T

from kernels.mla_decode.operands import LATENT, ROPE, WIDTH


def attend(heads, page, tile_heads, tokens, threads, stages, query_in_registers):
    """A program takes `tile_heads` heads of one sequence over one part of its tokens, `tokens` at a time.

    Where `tokens` divides a page, steps are copied whole, even if the part ends within one: what the page has
    behind the end must be finite. Otherwise tokens are copied one by one, and behind the end of the part its
    last token is copied again."""
    batch, width, rows = T.dynamic("batch"), T.dynamic("width"), T.dynamic("rows")
    parts, slots = T.dynamic("parts"), T.dynamic("slots")

    @T.prim_func
    def main(
        q: T.Tensor((batch, heads, WIDTH), "bfloat16"),
        kv: T.Tensor((rows, WIDTH), "bfloat16"),
        page_table: T.Tensor((batch, width), "int32"),
        plan: T.Tensor((parts, 4), "int32"),  # SplitPlan.parts
        scale: T.float32,  # turns q . kv into a score
        partial: T.Tensor((slots, heads, LATENT), "float32"),
        log_sums: T.Tensor((slots, heads), "float32"),
        out: T.Tensor((batch, heads, LATENT), "bfloat16"),
    ):
        with T.Kernel(parts, heads // tile_heads, threads=threads) as (part, block):
            alloc_query = T.alloc_fragment if query_in_registers else T.alloc_shared
            q_latent = alloc_query((tile_heads, LATENT), "bfloat16")
            q_rope = alloc_query((tile_heads, ROPE), "bfloat16")
            latent = T.alloc_shared((tokens, LATENT), "bfloat16")
            rope = T.alloc_shared((tokens, ROPE), "bfloat16")
            weights = T.alloc_shared((tile_heads, tokens), "bfloat16")
            scores = T.alloc_fragment((tile_heads, tokens), "float32")
            attended = T.alloc_fragment((tile_heads, LATENT), "float32")
            peak = T.alloc_fragment((tile_heads,), "float32")
            peak_before = T.alloc_fragment((tile_heads,), "float32")
            rescale = T.alloc_fragment((tile_heads,), "float32")
            step_total = T.alloc_fragment((tile_heads,), "float32")
            total = T.alloc_fragment((tile_heads,), "float32")

            sequence = plan[part, 0]
            first = plan[part, 1]
            end = plan[part, 2]
            slot = plan[part, 3]
            head = block * tile_heads
            T.copy(q[sequence, head : head + tile_heads, 0:LATENT], q_latent)
            T.copy(q[sequence, head : head + tile_heads, LATENT:WIDTH], q_rope)
            T.fill(attended, 0)
            T.fill(total, 0)
            T.fill(peak, -T.infinity("float32"))
            for step in T.Pipelined(T.ceildiv(end - first, tokens), num_stages=stages):
                if page % tokens == 0:
                    start = first + step * tokens
                    row = page_table[sequence, start // page] * page + start % page
                    T.copy(kv[row : row + tokens, 0:LATENT], latent)
                    T.copy(kv[row : row + tokens, LATENT:WIDTH], rope)
                else:
                    for i, j in T.Parallel(tokens, LATENT):
                        latent[i, j] = kv[
                            page_table[sequence, T.min(first + step * tokens + i, end - 1) // page] * page
                            + T.min(first + step * tokens + i, end - 1) % page,
                            j,
                        ]
                    for i, j in T.Parallel(tokens, ROPE):
                        rope[i, j] = kv[
                            page_table[sequence, T.min(first + step * tokens + i, end - 1) // page] * page
                            + T.min(first + step * tokens + i, end - 1) % page,
                            LATENT + j,
                        ]
                T.clear(scores)
                T.gemm(q_latent, latent, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.gemm(q_rope, rope, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                for i, j in T.Parallel(tile_heads, tokens):
                    scores[i, j] = T.if_then_else(
                        first + step * tokens + j < end, scores[i, j] * scale, -T.infinity("float32")
                    )
                T.copy(peak, peak_before)
                T.reduce_max(scores, peak, dim=1, clear=False)
                for i in T.Parallel(tile_heads):
                    rescale[i] = T.exp2(peak_before[i] - peak[i])
                for i, j in T.Parallel(tile_heads, tokens):
                    scores[i, j] = T.exp2(scores[i, j] - peak[i])
                T.reduce_sum(scores, step_total, dim=1)
                T.copy(scores, weights)
                for i in T.Parallel(tile_heads):
                    total[i] = total[i] * rescale[i] + step_total[i]
                for i, j in T.Parallel(tile_heads, LATENT):
                    attended[i, j] *= rescale[i]
                T.gemm(weights, latent, attended, policy=T.GemmWarpPolicy.FullCol)
            for i, j in T.Parallel(tile_heads, LATENT):
                attended[i, j] /= total[i]
            if slot < 0:
                T.copy(attended, out[sequence, head : head + tile_heads, 0:LATENT])
            else:
                T.copy(attended, partial[slot, head : head + tile_heads, 0:LATENT])
                for i in T.Parallel(tile_heads):
                    log_sums[slot, head + i] = peak[i] + T.log2(total[i])

    return main


def combine(heads, threads):
    """A program: one head of a sequence that several parts attended to."""
    batch, slots, sequences = T.dynamic("batch"), T.dynamic("slots"), T.dynamic("sequences")

    @T.prim_func
    def main(
        partial: T.Tensor((slots, heads, LATENT), "float32"),
        log_sums: T.Tensor((slots, heads), "float32"),
        split: T.Tensor((sequences, 3), "int32"),  # SplitPlan.split
        out: T.Tensor((batch, heads, LATENT), "bfloat16"),
    ):
        with T.Kernel(sequences, heads, threads=threads) as (entry, head):
            peak = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            joined = T.alloc_fragment((LATENT,), "float32")
            first = split[entry, 1]
            count = split[entry, 2]
            peak[0] = -T.infinity("float32")
            total[0] = 0
            T.clear(joined)
            for slot in T.serial(count):
                peak[0] = T.max(peak[0], log_sums[first + slot, head])
            for slot in T.serial(count):
                total[0] += T.exp2(log_sums[first + slot, head] - peak[0])
                for j in T.Parallel(LATENT):
                    joined[j] += partial[first + slot, head, j] * T.exp2(
                        log_sums[first + slot, head] - peak[0]
                    )
            for j in T.Parallel(LATENT):
                out[split[entry, 0], head, j] = joined[j] / total[0]

    return main
