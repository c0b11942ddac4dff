"""aiter/ops/shuffle.py: the weight layout of preshuffled kernels."""

import torch


def shuffle_weight(
    x: torch.Tensor,
    layout=(16, 16),
    use_int4=False,
    is_guinterleave=False,
    gate_up: bool = False,
    pad_k_to: int = 0,
) -> torch.Tensor:
    """shuffle.py:148. Rows in tiles of 16, K in tiles of 32 bytes: [N/16, K/32, 2, 16 rows, 16 bytes]; the
    shape stays, and the result carries the attribute is_shuffled. The interleaved and int4 layouts are not
    doubled."""
    if use_int4 or is_guinterleave:
        raise NotImplementedError("the double has the plain layout alone")
    if pad_k_to:
        raise NotImplementedError("the double pads nothing")
    rows, step = layout
    depth, vector = step * 2, 16 // x.element_size()
    assert x.shape[-2] % rows == 0, f"{x.shape[-2]} % {rows} == {x.shape[-2] % rows}"
    assert x.shape[-1] % depth == 0, f"{x.shape[-1]} % {depth} == {x.shape[-1] % depth}"
    tiles = x.view(-1, x.shape[-2] // rows, rows, x.shape[-1] // depth, depth // vector, vector)
    shuffled = tiles.permute(0, 1, 3, 4, 2, 5).contiguous().view(*x.shape)
    shuffled.is_shuffled = True
    return shuffled
