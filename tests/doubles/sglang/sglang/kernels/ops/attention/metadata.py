"""kernels/ops/attention/metadata.py of SGLang 0.5.23: into how many parts each sequence's cache is split."""

import math

import torch

from ...._kernel import cdiv, flat, power_of_two


class _Kernel:
    """get_num_kv_splits_triton, line 9, which is launched as one program. Sequences are `num_group` rows."""

    def __getitem__(self, grid):
        if tuple(grid) != (1,):
            raise RuntimeError(f"a grid of {grid}: all but one program would write the same")
        return self._run

    @staticmethod
    def _run(
        num_kv_splits_ptr,
        seq_lens_ptr,
        num_seq,
        num_group,
        num_head,
        num_kv_head,
        max_kv_splits,
        device_core_count,
        MAX_NUM_SEQ,
        uneven_batch_ptr=None,
    ):
        if not power_of_two(MAX_NUM_SEQ):
            raise ValueError("arange's range must be a power of 2")
        if num_kv_splits_ptr.dtype != torch.int32 or not num_kv_splits_ptr.is_contiguous():
            raise RuntimeError("num_kv_splits would be misread: contiguous int32")
        if num_kv_splits_ptr.numel() < num_seq * num_group:
            raise RuntimeError("memory access fault: num_kv_splits is overrun")
        lengths = flat(seq_lens_ptr, "seq_lens", num_seq)[:MAX_NUM_SEQ]
        longest, shortest = max(lengths), min(lengths)
        if longest * 8 < shortest * 10:
            shortest = longest
        if uneven_batch_ptr is not None:
            uneven_batch_ptr.fill_(int(shortest < longest))
        apart = cdiv(longest, min(cdiv(longest, shortest), max_kv_splits))
        cores = int(device_core_count * max(math.log2(longest / 64), 1.0))
        group = num_head // num_kv_head
        tiles = num_head if group == 1 else cdiv(num_head, min(16, group))
        even = cdiv(longest, min(cdiv(cores, num_seq * num_group * tiles), max_kv_splits))
        splits = [max(cdiv(length, apart), cdiv(length, even)) for length in lengths]
        written = num_kv_splits_ptr.view(-1)[: len(splits) * num_group].view(-1, num_group)
        written[:] = torch.tensor(splits, dtype=torch.int32)[:, None]


get_num_kv_splits_triton = _Kernel()
