"""The double of cuDNN's graphs of attention against plain torch, and that each wrong use is noticed."""

import importlib
import math

import pytest
import torch

from tests.doubles import lent
from tests.support.attention_problems import PREFILLS, SCALE, close, differs, library, prefill


@pytest.fixture
def cudnn():
    yield from library("cudnn", "cudnn_frontend")


def graph(cudnn, o, fp8=None, alter=lambda tensors: None, **changed):
    """A ragged graph, built, and what it is executed with; out is poisoned."""
    kind = cudnn.data_type
    g = cudnn.pygraph(
        handle=cudnn.create_handle(),
        io_data_type=kind.BFLOAT16,
        intermediate_data_type=kind.FLOAT,
        compute_data_type=kind.FLOAT,
    )
    b, heads = len(o.cu_q) - 1, o.q.shape[1]
    out = torch.full((len(o.q), heads, 128), math.nan, dtype=torch.bfloat16)
    pack, made = {}, {}

    def ragged(name, data, cu, longest, t=None):
        width = data.shape[2]
        offsets = (cu.long() * heads * width).view(-1, 1, 1, 1)
        ragged = g.tensor(dim=offsets.shape, stride=(1, 1, 1, 1), data_type=kind.INT64)
        dim, stride = (b, heads, longest, width), (longest * heads * width, width, heads * width, 1)
        if t is None:
            t = g.tensor(dim=dim, stride=stride, data_type=data.dtype, name=name)
        else:
            t.set_output(True).set_dim(dim).set_stride(stride).set_data_type(data.dtype)
        t.set_ragged_offset(ragged)
        pack[t], pack[ragged], made[name] = data, offsets, t
        return t

    def lengths(cu):
        t = g.tensor(dim=(b, 1, 1, 1), stride=(1, 1, 1, 1), data_type=kind.INT32)
        pack[t] = (cu[1:] - cu[:-1]).view(-1, 1, 1, 1)
        return t

    operands = {"q": o.q, "k": o.k, "v": o.v} if fp8 is None else fp8
    given = {
        n: ragged(n, t, *((o.cu_q, o.max_q) if n == "q" else (o.cu_k, o.max_k))) for n, t in operands.items()
    }
    given |= {
        "attn_scale": SCALE,
        "use_padding_mask": True,
        "seq_len_q": lengths(o.cu_q),
        "seq_len_kv": lengths(o.cu_k),
    }
    given |= {"use_causal_mask_bottom_right": True, "generate_stats": False}
    if fp8 is None:
        y, stats = g.sdpa(**given | changed)
    else:
        for name, value in o.scales.items():
            given[name] = g.tensor(dim=(1, 1, 1, 1), stride=(1, 1, 1, 1), data_type=kind.FLOAT)
            pack[given[name]] = torch.tensor([value])
        y, stats, *_ = g.sdpa_fp8(**given | changed)
    assert stats is None
    ragged("o", out, o.cu_q, o.max_q, y)
    alter(made)
    g.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(g.get_workspace_size(), dtype=torch.uint8)
    g.execute(pack, workspace)
    return out


@pytest.mark.parametrize(("queries", "keys"), PREFILLS)
def test_cudnn_is_right(cudnn, queries, keys):
    o = prefill(queries, keys)
    close(graph(cudnn, o), o.right)


def test_cudnn_notices(cudnn):
    o = prefill((3, 20), (30, 25))
    bottom_right = cudnn.diagonal_alignment.BOTTOM_RIGHT
    band = {
        "diagonal_alignment": bottom_right,
        "diagonal_band_right_bound": 0,
        "use_causal_mask_bottom_right": False,
    }
    close(graph(cudnn, o, **band), o.right)
    for wrong in (
        {"use_causal_mask": True, "use_causal_mask_bottom_right": False},
        {"use_causal_mask_bottom_right": False},
        {"attn_scale": None},
    ):
        assert differs(graph(cudnn, o, **wrong), o.right), wrong
    for wrong in (
        {"use_padding_mask": False},
        {"seq_len_kv": None},
        {"is_inference": True},
        {"use_causal_mask": True},
    ):
        with pytest.raises(RuntimeError):
            graph(cudnn, o, **wrong)
    for alter in (
        lambda made: made["o"].set_output(False),
        lambda made: made["v"].set_ragged_offset(made["k"].ragged),
        lambda made: made["k"].set_data_type(torch.float16),
        lambda made: made["k"].ragged.set_stride((0, 1, 1, 1)),
        lambda made: made["k"].ragged.set_stride((2, 1, 1, 1)),
        lambda made: made["q"].set_stride((4 * 192, 192 * made["q"].dim[2], 192, 1)),
    ):
        try:
            out = graph(cudnn, o, alter=alter)
        except RuntimeError:
            continue
        assert differs(out, o.right)


def test_cudnn_of_fp8_is_blackwell():
    o = prefill((3, 20), (30, 25))
    scale = 0.02
    fp8 = {n: (getattr(o, n).float() / scale).to(torch.float8_e4m3fn) for n in "qkv"}
    o.scales = {
        "descale_q": scale,
        "descale_k": scale,
        "descale_v": scale,
        "descale_s": 1 / 256,
        "scale_s": 256.0,
        "scale_o": 1.0,
    }
    with lent("cuda", "sm_100", "cudnn_frontend"):
        out = graph(importlib.import_module("cudnn"), o, fp8)
        torch.testing.assert_close(out.float(), o.right, atol=0.3, rtol=0.3)
    with lent("cuda", "sm_90", "cudnn_frontend"):
        cudnn = importlib.import_module("cudnn")
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="Blackwell"):
            graph(cudnn, o, fp8)
