"""What follows from a server's context length, as engines record it into graphs: splits, lists, room.

Other arguments are recorded, see tests/kernels/test_recorded_calls.py."""

import itertools

import pytest

import kernels
from kernels.mla_decode.providers import aiter, flash_attn, flashinfer, sglang_triton, vllm

OP = kernels.OPS["mla_decode"]
SGLANGS = sglang_triton.most_splits
REQUESTS = aiter.REQUESTS


def listed(requests: int, model_len: int) -> int:
    return aiter.list_entries(OP.sizes({"batch": 2, "ctx": "100", "model_len": model_len}), requests)


@pytest.mark.parametrize(("function", "given", "wanted"), [
    # Splits by vLLM's: _compute_num_kv_splits of its triton_mla.py.
    (vllm.splits_for, (163_840, 304), 512),
    (vllm.splits_for, (163_840, 132), 264),
    (vllm.splits_for, (32_768, 304), 64),
    (vllm.splits_for, (2112, 304), 4),
    (vllm.splits_for, (130, 304), 1),
    # By SGLang's: _mla_decode_kv_splits_cap of its triton_backend.py.
    (SGLANGS, (163_840, 132, "sm_90"), 256),
    (SGLANGS, (163_840, 304, "gfx942"), 256),
    (SGLANGS, (163_840, 304, "gfx950"), 512),
    (SGLANGS, (2112, 132, "sm_90"), 128),
    (SGLANGS, (130, 132, "sm_90"), 8),
    # By FlashAttention 3's: num_splits_heuristic on 132 units.
    (flash_attn.most_splits, (96, 163_840), 66),
    (flash_attn.most_splits, (16, 2049), 33),
    # Heads that vLLM gives TensorRT-LLM's kernels.
    *((flashinfer.trusts_trtllm, (heads,), True) for heads in (6, 16, 32, 48, 128)),
    *((flashinfer.trusts_trtllm, (heads,), False) for heads in (20, 96)),
    # Entries of the list that AITER is given.
    (listed, (REQUESTS["sglang"], 163_840), 2 * 163_840),
    (listed, (REQUESTS["sglang"], 512), 512 * 512),
    (listed, (REQUESTS["vllm"], 130), 1024 * 130),
    (listed, (0, 130), 200),
])  # fmt: skip
def test_what_follows_from_the_context_length(function, given, wanted) -> None:
    assert function(*given) == wanted


def busiest(batch: int, average: float, units: int) -> int:
    """As get_meta_param of aiter/mla.py at e404860: the number of splits, 1 to 16, with which most compute
    units are busy, less an overhead of each split; of equally good numbers the smallest. average: keys of a
    sequence."""

    def value(i: int) -> float:
        busy = batch * i / ((batch * i + units - 1) // units * units)
        return busy * average / (average + 84.1 * i)

    return max(range(1, 17), key=value)


@pytest.mark.parametrize("model_len", [9216, 32_768, 163_840])
def test_entries_left_away_change_no_number_of_splits(model_len: int) -> None:
    for units, requests, batch in itertools.product((256, 304), aiter.REQUESTS.values(), range(1, 513)):
        sizes = OP.sizes({"batch": batch, "ctx": "100", "model_len": model_len})
        ours, engines = aiter.list_entries(sizes, requests), requests * model_len
        assert busiest(batch, ours / batch, units) == busiest(batch, engines / batch, units), batch
