"""What rounding q and the softmax weights to FP8 explains of an output's error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.formats import Fp8Format, fp8_format, rounding_deviation

if TYPE_CHECKING:
    import torch


def format_of(tensor: torch.Tensor) -> Fp8Format:
    """Raises ValueError for a tensor that is not FP8."""
    return fp8_format(str(tensor.dtype).removeprefix("torch.float8_"))


def fp8_variance(
    q: torch.Tensor, kv: torch.Tensor, p: torch.Tensor, out: torch.Tensor, fmt: Fp8Format
) -> torch.Tensor:
    """What a call adds to the squared error that rounds q and the softmax weights to FP8 too, [heads, 512].

    q: fp32 [heads, 576], times the softmax scale; kv: [tokens, 576]; p: [heads, tokens]; out: [heads, 512]

    An error d of q (formats.rounding_deviation) moves all of a head's scores together, by d . kv_j, and the
    output by d . C to first order, where C = sum_j p_j kv_j (v_j - out) is the covariance under the weights.
    It counts twice, because where two tokens share the weight all of a row errs by one normal number, which
    in millions of rows reaches 5. First order holds for scores that deviate by up to 8, not by 60.
    The weights before they are normalised lie in [0, 1]; each errs by 2^-4 / sqrt(3) of itself at most in
    root mean square, or by the format's subnormal step / sqrt(12). That moves the output by the error times
    v_j where their sum is of unrounded weights, v_j - out where of rounded ones: the larger counts.
    """
    import torch

    kv, p, out = kv.float(), p.float(), out.float()
    v = kv[:, : out.shape[1]]
    deviation = rounding_deviation(q, fmt).mul_(2).square_()
    of_q = torch.stack(
        [
            d @ ((kv.T * weights) @ (v - mean)).square_()
            for d, weights, mean in zip(deviation, p, out, strict=True)
        ]
    )
    floor = p.amax(-1, keepdim=True) * (fmt.smallest_subnormal / 12**0.5)
    error = torch.maximum(p * (2**-4 / 3**0.5), floor).square_()
    about_zero = error @ v.square()
    about_mean = about_zero - 2 * out * (error @ v) + out.square() * error.sum(-1, keepdim=True)
    return of_q + torch.maximum(about_zero, about_mean)
