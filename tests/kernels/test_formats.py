"""Block-scale FP8 against a second implementation: exact fractions for FP8, numpy's fp32 for the scales."""

import bisect
import itertools
import math
from fractions import Fraction

import pytest

from kernels.formats import (
    FORMATS,
    SCALES,
    Fp8Format,
    dequantise_activations,
    dequantise_weights,
    fp8_format,
    quantise_activations,
    rounding_deviation,
)

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


def decode(code: int, name: str) -> Fraction | None:
    """What 8 bits mean, from the formats' definition: sign, 4 exponent bits, 3 mantissa bits. None: NaN."""
    sign, exponent, mantissa = -1 if code & 0x80 else 1, code >> 3 & 0xF, code & 0x7
    if name == "e4m3fn":
        bias, nan = 7, code & 0x7F == 0x7F
    else:
        bias, nan = 8, code == 0x80
    if nan:
        return None
    if exponent == 0:
        return sign * Fraction(mantissa, 8) * Fraction(2) ** (1 - bias)
    return sign * (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - bias)


# Non-negative values in ascending order; their place is their code.
VALUES = {name: [v for c in range(128) if (v := decode(c, name)) is not None] for name in FORMATS}


def encode(value: float, name: str) -> int:
    """The code nearest to value, of two the even one; past the largest, the largest."""
    values, size = VALUES[name], abs(Fraction(value))
    above = bisect.bisect_left(values, size)
    if above == len(values):
        code = above - 1
    elif above == 0 or values[above] == size:
        code = above
    else:
        below = above - 1
        code = min((below, above), key=lambda c: (abs(values[c] - size), c % 2))
    negative = math.copysign(1, value) < 0 and (code > 0 or name == "e4m3fn")
    return code | 0x80 * negative


def slow_scale(block, name: str, scales: str):
    scale = np.float32(np.abs(block).max()) / np.float32(VALUES[name][-1])
    scale = max(scale, np.float32(2.0**-126))
    if scales == "ue8m0":
        exponent = math.frexp(scale)[1]  # scale in [2^(exponent - 1), 2^exponent)
        scale = np.float32(2.0 ** (exponent - 1 if scale == 2.0 ** (exponent - 1) else exponent))
    return np.float32(scale)


def slow_quantise(x, name: str, scales: str):
    """Block by block, 1 x 128, value by value. x: fp32 [N, K]."""
    codes = np.zeros(x.shape, np.uint8)
    steps = np.zeros((len(x), -(-x.shape[1] // 128)), np.float32)
    for i, j in np.ndindex(*steps.shape):
        at = i, slice(j * 128, (j + 1) * 128)
        steps[i, j] = slow_scale(x[at], name, scales)
        quotients = x[at] / steps[i, j]
        assert quotients.dtype == np.float32
        codes[at] = [encode(float(v), name) for v in quotients]
    return codes, steps


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def with_outliers() -> torch.Tensor:
    x = random(3, 300)
    x[:, ::50] *= 1e4
    return x


def with_zero_blocks() -> torch.Tensor:
    x = random(4, 384)
    x[:, 128:256] = 0
    x[1] = -0.0
    return x


def of_all_sizes() -> torch.Tensor:
    """Finite fp32 values of any bits, also subnormal ones."""
    bits = torch.randint(-(2**31), 2**31, (6, 200), generator=torch.Generator().manual_seed(0))
    x = bits.int().view(torch.float32)
    return torch.where(x.isfinite(), x, 0.0)


def ties(fmt: Fp8Format) -> torch.Tensor:
    """Every value and every middle of two neighbours, both signs; max itself in each block: scale 1."""
    values = [float(v) for v in VALUES[fmt.name]]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    points = torch.tensor([sign * v for v in values + middles for sign in (1, -1)])
    points = torch.nn.functional.pad(points, (0, -len(points) % 127)).view(-1, 127)
    return torch.cat([points, torch.full((len(points), 1), fmt.max)], 1)


def near_largest(fmt: Fp8Format) -> torch.Tensor:
    """Quotients that fp32 rounds to either side of max: amax of many mantissas."""
    x = torch.zeros(128, 128)
    x[:, 0] = torch.linspace(1, 2, 128) * 1.0001
    x[:, 1] = -x[:, 0]
    return x


# Blocks whose scale would be subnormal, or zero, and values of x that are subnormal themselves.
TINY = 2.0 ** torch.tensor([-110, -117, -120, -126, -133, -149]).unsqueeze(1).double()
INPUTS = {
    "random": lambda fmt: random(2, 300),
    "one": lambda fmt: random(2, 1),
    "outliers": lambda fmt: with_outliers(),
    "zero blocks": lambda fmt: with_zero_blocks(),
    "tiny": lambda fmt: (random(6, 256) * TINY).float(),
    "large": lambda fmt: random(2, 128).clamp(-3, 3) * 1e38,
    "all sizes": lambda fmt: of_all_sizes(),
    "ties": ties,
    "near largest": near_largest,
}
KINDS = [(name, scales) for name in FORMATS for scales in SCALES]


def same(q: torch.Tensor, scale: torch.Tensor, codes, steps) -> None:
    assert q.is_contiguous()
    assert scale.is_contiguous()
    np.testing.assert_array_equal(q.view(torch.uint8).numpy(), codes)
    np.testing.assert_array_equal(scale.numpy().view(np.int32), steps.view(np.int32))


@pytest.mark.parametrize(("name", "scales"), KINDS)
@pytest.mark.parametrize("text", INPUTS)
def test_activations(text: str, name: str, scales: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = INPUTS[text](FORMATS[name]).to(dtype)
        kept = x.clone()
        q, scale = quantise_activations(x, FORMATS[name], scales)
        same(q, scale, *slow_quantise(x.float().numpy(), name, scales))
        assert torch.equal(x, kept), "changed its input"
        assert dequantise_activations(q, scale, torch.float64).isfinite().all()


@pytest.mark.parametrize("name", FORMATS)
def test_all_codes_decode(name: str) -> None:
    q = torch.arange(256, dtype=torch.uint8).view(FORMATS[name].dtype)
    expected = [math.nan if (v := decode(c, name)) is None else float(v) for c in range(256)]
    for scale in (1.0, 0.3, 2.0**-126):
        scales = torch.full((2,), scale)
        found = dequantise_activations(q, scales)
        with np.errstate(invalid="ignore"):
            wanted = np.array(expected, np.float32) * np.float32(scale)
        np.testing.assert_array_equal(found.numpy(), wanted)
        exact = dequantise_activations(q, scales, torch.float64).numpy()
        np.testing.assert_array_equal(exact, np.array(expected) * float(np.float32(scale)))


def test_format_figures() -> None:
    for name, fmt in FORMATS.items():
        values = VALUES[name]
        assert (fmt.max, fmt.smallest_subnormal, fmt.smallest_normal) == (values[-1], values[1], values[8])
        info = torch.finfo(fmt.dtype)
        assert (fmt.max, fmt.smallest_normal) == (info.max, info.smallest_normal)


@pytest.mark.parametrize("name", FORMATS)
def test_dequantised_weights(name: str) -> None:
    q, scale = quantise_activations(random(2, 192, 300), FORMATS[name])[0], random(2, 2, 3)
    every = scale.repeat_interleave(128, 1)[:, :192].repeat_interleave(128, 2)[..., :300]
    wanted = q.float() * every
    assert torch.equal(dequantise_weights(q, scale), wanted)
    assert torch.equal(dequantise_weights(q, scale, torch.bfloat16), wanted.bfloat16())


@pytest.mark.parametrize(("name", "scales"), KINDS)
def test_rounding_deviation_bounds_the_error(name: str, scales: str) -> None:
    """Whatever binade the values lie in, down to those that vanish, the mean square error stays below."""
    fmt = FORMATS[name]
    for exponent in range(-16, 1):
        x = (random(64, 320) / 8 + 1.5) * 2.0**exponent
        x[:, ::64] = 1
        deviation = rounding_deviation(x, fmt, scales)
        assert deviation.shape == x.shape
        ratio = (dequantise_activations(*quantise_activations(x, fmt, scales)) - x) / deviation
        others = torch.arange(320) % 64 != 0
        bound = 3**0.5 if exponent < -12 else 1.15  # values less than a step all err alike
        assert ratio[:, others].square().mean().sqrt() < bound, exponent
        assert ratio.abs().max() < 2, exponent


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_deviation_figures(name: str) -> None:
    fmt = FORMATS[name]
    x = torch.tensor([[fmt.max, -1.0, 0.0]])
    floor = fmt.smallest_subnormal / 12**0.5
    found = rounding_deviation(x, fmt, "fp32")[0].tolist()
    assert found == pytest.approx([fmt.max / 16 / 3**0.5, 1 / 16 / 3**0.5, floor], rel=1e-6)
    assert rounding_deviation(x, fmt)[0, 2].item() == pytest.approx(2 * floor, rel=1e-6)


def test_errors() -> None:
    with pytest.raises(ValueError, match="unknown FP8 format 'e5m2'; formats: e4m3fn, e4m3fnuz"):
        fp8_format("e5m2")
    for function in (quantise_activations, rounding_deviation):
        with pytest.raises(ValueError, match="unknown scales 'bf16'; scales: fp32, ue8m0"):
            function(torch.ones(1, 1), fp8_format("e4m3fn"), "bf16")
