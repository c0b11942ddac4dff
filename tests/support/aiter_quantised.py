"""FP8 operands as AITER has them on each architecture, for the tests of its double."""

import torch

FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


def up(n):
    return -(-n // 128)


def quantised(shape, arch, seed=0):
    """Values in FP8 and their scales: one per 128 columns of a row for two dimensions."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(FP8[arch]), 0.5 + torch.rand(
        (*shape[:-1], up(shape[-1])), generator=torch.Generator().manual_seed(seed + 1)
    )


def weights(shape, arch, seed=5):
    """Values in FP8 and one scale per 128x128."""
    w, _ = quantised(shape, arch, seed)
    grid = (*shape[:-2], up(shape[-2]), up(shape[-1]))
    return w, 0.05 + 0.1 * torch.rand(grid, generator=torch.Generator().manual_seed(seed + 1))


def plain(w, scale):
    full = scale.repeat_interleave(128, -2)[..., : w.shape[-2], :].repeat_interleave(128, -1)
    return w.float() * full[..., : w.shape[-1]]


def rows(x, scale):
    return x.float() * scale.repeat_interleave(128, -1)[..., : x.shape[-1]]


def column_major(scale):
    return scale.t().contiguous().view(*scale.shape)


def close(a, b, tolerance=2e-2):
    return bool((a.float() - b.float()).norm() <= tolerance * b.float().norm())
