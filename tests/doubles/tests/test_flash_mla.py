"""FlashMLA's doubles against plain torch, and that each wrong use is noticed."""

import importlib

import pytest
import torch

from tests.doubles import lent
from tests.support.attention_problems import DECODES, MISUSE, SCALE, close, decode, differs, library


@pytest.fixture
def flash_mla():
    yield from library("flash_mla", "flash_mla")


@pytest.fixture
def flash_mla_2025():
    yield from library("flash_mla", "flash_mla_2025")


def mla(library, o, meta=None, splits=None, lengths=None, **changed):
    q, cache, table, used = o.q, o.cache[:, :, None], o.table, o.lengths if lengths is None else lengths
    given = {"q": q, "k_cache": cache, "block_table": table, "cache_seqlens": used, "head_dim_v": 512}
    given |= {"tile_scheduler_metadata": meta, "num_splits": splits, "softmax_scale": SCALE, "causal": True}
    return library.flash_mla_with_kvcache(**given | changed)


@pytest.mark.parametrize(("lengths", "heads", "s_q"), DECODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_mla_is_right(flash_mla, lengths, heads, s_q, dtype):
    o = decode(lengths, heads, 64, s_q, dtype)
    meta, none = flash_mla.get_mla_metadata()
    assert none is None
    for _ in range(2):  # the second call finds the metadata filled
        out, lse = mla(flash_mla, o, meta)
        close(out, o.right)
    assert out.dtype == dtype and lse.shape == (len(lengths), heads, s_q)


def test_flash_mla_of_2025_is_right(flash_mla_2025):
    for lengths, heads, s_q in DECODES:
        o = decode(lengths, heads, 64, s_q)
        meta = flash_mla_2025.get_mla_metadata(o.lengths, s_q * heads, 1)
        out, _ = mla(flash_mla_2025, o, *meta)
        close(out, o.right)


@pytest.mark.parametrize("long", [640, 1300])
def test_flash_mla_splits_long_sequences(flash_mla, long):
    o = decode((long, 3), 16, 64)
    meta, _ = flash_mla.get_mla_metadata()
    close(mla(flash_mla, o, meta)[0], o.right)
    assert (meta.num_splits[1:] - meta.num_splits[:-1]).max() > 1


def test_flash_mla_metadata_of_other_lengths_is_stale(flash_mla):
    o = decode((1300, 3), 16, 64)
    meta, _ = flash_mla.get_mla_metadata()
    mla(flash_mla, o, meta, lengths=torch.tensor([100, 3], dtype=torch.int32))
    assert differs(mla(flash_mla, o, meta)[0], o.right)


def test_flash_mla_metadata_of_other_shapes_is_refused(flash_mla):
    meta, _ = flash_mla.get_mla_metadata()
    mla(flash_mla, decode((64, 1), 16, 64), meta)
    for other in (decode((64,), 16, 64), decode((64, 1), 32, 64), decode((64, 2), 16, 64, 2)):
        with pytest.raises(AssertionError, match="sched_meta"):
            mla(flash_mla, other, meta)


def test_flash_mla_of_2025_metadata_of_other_lengths_is_stale(flash_mla_2025):
    o = decode((1300, 3), 16, 64)
    meta = flash_mla_2025.get_mla_metadata(torch.tensor([100, 3], dtype=torch.int32), 16, 1)
    assert differs(mla(flash_mla_2025, o, *meta)[0], o.right)
    with pytest.raises(TypeError):
        mla(flash_mla_2025, o)


def wrong_mla(o):
    """Changes to a right call that a caller may well make."""
    table, cache = o.table, o.cache[:, :, None]
    return {
        "long table": {"block_table": table.long()},
        "long lengths": {"cache_seqlens": o.lengths.long()},
        "strided lengths": {"cache_seqlens": o.lengths.repeat_interleave(2)[::2]},
        "another dtype": {"q": o.q.half()},
        "float": {"q": o.q.float(), "k_cache": cache.float()},
        "page of 32": {"k_cache": cache.reshape(-1, 32, 1, 576), "block_table": table * 2},
        "heads swapped": {"q": o.q.transpose(1, 2)},
        "no scale": {"softmax_scale": None},
        "another table": {"block_table": table.flip(0)},
        "a page too far": {"block_table": table + len(cache)},
        "values of 576": {"head_dim_v": 576},
        "column-major q": {"q": o.q.transpose(2, 3).contiguous().transpose(2, 3)},
        "unaligned cache": {"k_cache": torch.nn.functional.pad(cache, (0, 1))[..., :576]},
    }


@pytest.mark.parametrize("case", sorted(wrong_mla(decode((64, 1), 16, 64))))
def test_flash_mla_notices(flash_mla, case):
    o = decode((100, 30), 16, 64)
    try:
        out, _ = mla(flash_mla, o, flash_mla.get_mla_metadata()[0], **wrong_mla(o)[case])
    except MISUSE:
        return
    assert out.shape != o.right.shape or differs(out, o.right)


def test_flash_mla_needs_hopper():
    with lent("cuda", "sm_100", "flash_mla"):
        library = importlib.import_module("flash_mla")
        with pytest.raises(RuntimeError, match="SM90a"):
            mla(library, decode((3,), 16, 64), library.get_mla_metadata()[0])
