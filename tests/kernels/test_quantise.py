"""The quantise kernel bit by bit as kernels.formats has it: torch's, Triton's interpreted; and FP8 widened.

As in mla_decode/test_triton.py, the interpreted cases run in another process, which test_interpreted.py
starts: this file as a script.
"""

import json

import pytest
from packaging.version import Version

from harness.catalogue.architectures import architectures
from harness.compile.launches import pretended, recorded_launches
from kernels import quantise as provider
from kernels.formats import FORMATS, SCALES, dequantise_activations, native, quantise_activations

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
quantise_jit = pytest.importorskip("kernels.quantise_jit")
widen = pytest.importorskip("kernels.fp8_jit").widen


def values(rows: int, columns: int) -> torch.Tensor:
    """bf16 [rows, columns] with zero blocks, outliers, tiny and subnormal blocks, and ties."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    x[::7] *= 2.0**-120
    x[1::7] *= 2.0**-130
    x[2::7, ::100] *= 1e4
    x[3::7, :128] = 0
    x[4::7] = torch.arange(columns) % 449 * (1 - torch.arange(columns) % 2 * 2)  # scales near 1, ties
    x[5::7] = x[5::7].clamp(-3, 3) * 1e38
    return x.bfloat16()


def strided(rows: int, columns: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """Empty, and full of what no kernel may leave: rows apart, or columns one after the other."""
    if layout == "rows":
        wide = torch.empty(rows, columns + 24, dtype=dtype).view(torch.uint8).fill_(0xFF).view(dtype)
        return wide[:, :columns]
    return torch.empty(columns, rows, dtype=dtype).view(torch.uint8).fill_(0xFF).view(dtype).t()


CASES = [
    ((1, 128), "e4m3fn", "fp32", "rows"),
    ((37, 300), "e4m3fnuz", "fp32", "rows"),
    ((37, 300), "e4m3fn", "ue8m0", "rows"),
    ((140, 256), "e4m3fn", "fp32", "columns"),
    ((140, 256), "e4m3fnuz", "ue8m0", "columns"),
    ((5, 60), "e4m3fn", "fp32", "rows"),
]


def differences(shape: tuple[int, int], name: str, scales: str, layout: str) -> list[int]:
    """Bits that differ in q and scale: of a first call, and after x has changed."""
    x = strided(*shape, torch.bfloat16, layout)
    q = strided(*shape, FORMATS[name].dtype, layout)
    scale = strided(shape[0], -(-shape[1] // 128), torch.float32, layout)
    call = provider.quantiser(x, q, scale, scales)
    found = []
    for new in (values(*shape), values(*shape).flip(0)):
        x.copy_(new)
        call()
        wanted_q, wanted_scale = quantise_activations(new, FORMATS[name], scales)
        found.append(int((q.contiguous().view(torch.uint8) != wanted_q.view(torch.uint8)).sum()))
        found.append(int((scale != wanted_scale).sum()))
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch(case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert differences(*case) == [0] * 4


@triton.jit
def widen_kernel(codes, out, PRODUCT: tl.constexpr, FNUZ_BITS: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, widen(tl.load(codes + at), PRODUCT, FNUZ_BITS).to(tl.float32))


PRODUCTS = (tl.float32, tl.bfloat16, tl.float16)


def widened(name: str) -> list[int]:
    """Codes of a format that come out of the kernel as something else, as any of the product dtypes."""
    codes = torch.arange(256, dtype=torch.uint8)
    fnuz = name == "e4m3fnuz"
    wanted = dequantise_activations(codes.view(FORMATS[name].dtype), torch.ones(2))
    wrong = []
    for product in PRODUCTS:
        out = torch.full((256,), -1.0)
        widen_kernel[(1,)](codes if fnuz else codes.view(FORMATS[name].dtype), out, product, fnuz)
        same = (out.view(torch.int32) == wanted.view(torch.int32)) | (out.isnan() & wanted.isnan())
        wrong += codes[~same].tolist()
    return wrong


# To FP8, and the division that rounds correctly. Triton before 3.7 has no conversion for gfx950.
CONVERTS = ("v_cvt_scalef32_pk_fp8_f32",) if Version(triton.__version__) >= Version("3.7") else ()
INSTRUCTIONS = {
    "gfx942": ("v_cvt_pk_fp8_f32", "v_div_fixup_f32"),
    "gfx950": (*CONVERTS, "v_div_fixup_f32"),
    "sm_90": ("cvt.rn.satfinite.e4m3x2.f32", "div.rn.f32"),
    "sm_100": ("cvt.rn.satfinite.e4m3x2.f32", "div.rn.f32"),
}


@pytest.mark.parametrize(
    "target", ["gfx942", *(pytest.param(t, marks=pytest.mark.slow) for t in list(INSTRUCTIONS)[1:])]
)
@pytest.mark.parametrize("scales", SCALES)
def test_quantise_kernel_compiles(target: str, scales: str) -> None:
    """What a GPU would be given: on torch's meta device, with shapes and types but no memory."""
    dtypes, architecture = (torch.bfloat16, FORMATS[native(target)].dtype), architectures()[target]
    x, q = (torch.empty(33, 300, dtype=dtype, device="meta") for dtype in dtypes)
    with recorded_launches(architecture) as calls:
        provider.quantiser(x, q, torch.empty(3, 33, device="meta").t(), scales)()
    ((_, data),) = calls
    with pretended(architecture):
        compiled = quantise_jit.quantise_kernel.preload(data)
    text = compiled.asm["amdgcn" if target.startswith("gfx") else "ptx"]
    assert all(instruction in text for instruction in INSTRUCTIONS[target]) and "div.full" not in text


def test_errors() -> None:
    x, q = torch.zeros(3, 256, dtype=torch.bfloat16), torch.zeros(3, 256, dtype=torch.float8_e4m3fn)
    for other, scale in ((q, (3, 3)), (q, (2, 2)), (q[:2], (3, 2)), (q[:, :130], (3, 2))):
        with pytest.raises(ValueError, match=rf"shapes do not fit: .*scale \[{scale[0]}, {scale[1]}\]"):
            provider.quantiser(x, other, torch.zeros(scale))
    with pytest.raises(ValueError, match="unknown FP8 format 'e5m2'"):
        provider.quantiser(x, q.to(torch.float8_e5m2), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="unknown scales 'bf16'"):
        provider.quantiser(x, q, torch.zeros(3, 2), "bf16")


READ_WRONG = {"e4m3fn": [0x7F, 0xFF] * len(PRODUCTS), "e4m3fnuz": []}
"""NaN in e4m3fn, which Triton's interpreter reads as +-480."""


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps([f"quantise {case}", *differences(*case)]))
    for name in FORMATS:
        codes = widened(name)
        print(json.dumps([f"widen {name}", codes if codes != READ_WRONG[name] else ""]))
