"""MHA prefill with torch's fused attention: one call per sequence, or one for all where torch has that."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, cast

from kernels.mha_prefill.layouts import padded
from kernels.mha_prefill.operands import GUARD, MhaPrefillOperands, Sequence
from kernels.mha_prefill.sizes import VALUE, WIDTH, MhaPrefillSizes, takes
from kernels.op import Implementation, Prepared, Unsupported
from kernels.platform import Platform
from kernels.support import Support, need
from kernels.triton_runtime import kind_of

if TYPE_CHECKING:
    import torch


class _PaddedPrefill(Prepared):
    """Keeps v as wide as q and k, filled up with zeros: torch's flash kernels take one head size. kv_b's
    product would write it so; the output's columns behind the 128th are dropped."""

    operands: MhaPrefillOperands

    def __init__(self, operands: MhaPrefillOperands, out: torch.Tensor, pads: bool = True) -> None:
        super().__init__(operands, out)
        self.v = padded(operands.v) if pads else operands.v

    def inputs(self) -> Mapping[str, torch.Tensor]:
        return {**super().inputs(), "v": self.v[..., :VALUE]}


class _Widened(Prepared):
    """FP8 operands made bf16 in the call, then what takes that: exact for q and k, whose descales are in the
    softmax scale, while v is multiplied by its own and rounded."""

    operands: MhaPrefillOperands

    def __init__(
        self, operands: MhaPrefillOperands, prepare: Callable[[MhaPrefillOperands], Prepared]
    ) -> None:
        super().__init__(operands)
        o = operands
        widened = {name: tensor.bfloat16() for name, tensor in o.live_tensors().items()}
        descales = dict.fromkeys(("q_descale", "k_descale", "v_descale"))
        self.inner = prepare(o.replaced(**widened, **descales, scale=o.score_scale))

    def call(self) -> None:
        import torch

        o, to = self.operands, self.inner.inputs()
        to["q"].copy_(o.q)
        to["k"].copy_(o.k)
        torch.mul(o.v.bfloat16(), o.v_descale, out=to["v"])
        self.inner.call()

    def result(self) -> torch.Tensor:
        return self.inner.result()


class _SdpaPrefill(_PaddedPrefill):
    def __init__(self, operands: MhaPrefillOperands, out: torch.Tensor, backend: str, pads: bool) -> None:
        import torch.nn.attention

        super().__init__(operands, out, pads)
        self.masks = [_causal(s, out.device) for s in operands.sequences]
        self.context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if backend:
            kernel = getattr(torch.nn.attention.SDPBackend, f"{backend.upper()}_ATTENTION")
            self.context = lambda: torch.nn.attention.sdpa_kernel(kernel)

    def call(self) -> None:
        import torch

        o = self.operands
        with self.context():
            for sequence, mask in zip(o.sequences, self.masks, strict=True):
                q, k, v = _batched(o.q[sequence.queries], o.k[sequence.keys], self.v[sequence.keys])
                attended = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, scale=o.scale
                )
                self.out[sequence.queries] = attended[0, ..., :VALUE].transpose(0, 1)


def _batched(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """[tokens, heads, n] as [1, heads, tokens, n]."""
    return [tensor.transpose(0, 1)[None] for tensor in tensors]


def _causal(sequence: Sequence, device: torch.device) -> torch.Tensor:
    """The mask [new, length]: torch's own bias, which its kernels know as causal. Where they align that to
    the first key and not to the last, on ROCm, it is written out if tokens are cached."""
    import torch
    from torch.nn.attention.bias import causal_lower_right

    if sequence.prefix and kind_of(device) == "rocm":
        every = torch.ones(sequence.new, sequence.length, dtype=torch.bool, device=device)
        return every.tril_(sequence.prefix)
    return causal_lower_right(sequence.new, sequence.length)


class TorchSdpaPrefill(Implementation):
    """scaled_dot_product_attention, by the kernel that torch chooses; FP8 operands are made bf16 first.

    backend: the one that it is held to, by its name in torch.nn.attention.SDPBackend
    padded:  whether v stands as wide as q and k
    """

    name = "torch.sdpa"
    requires = "torch"
    rebinds = True
    backend: ClassVar[str] = ""
    padded: ClassVar[bool] = True

    def available(self, platform: Platform) -> Support:
        return platform.library("torch")

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """v in its layout and FP8 operands made bf16."""
        widened = sizes.queries * WIDTH + sizes.keys * (WIDTH + 2 * VALUE) if sizes.dtype == "fp8" else 0
        padded = (sizes.keys + 2 * GUARD) * WIDTH if self.padded else 0
        return (widened + padded) * sizes.heads * 2

    def scratch(self, sizes: MhaPrefillSizes) -> int:
        """Of the longest sequence the mask written out and the call's own output."""
        longest = max(new * (prefix + new) * (1 + 2) for prefix, new in sizes.lengths())
        return longest + max(new for _, new in sizes.lengths()) * sizes.heads * WIDTH * 2

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        import torch

        if operands.q_descale is not None:
            return _Widened(operands, lambda widened: self.prepare(widened, out))
        prepared = _SdpaPrefill(operands, out, self.backend, self.padded)
        if self.backend:
            # One that torch lacks for these operands would be an error in the call.
            can_use = getattr(torch.backends.cuda, f"can_use_{self.backend}_attention")
            for sequence, mask in zip(operands.sequences, prepared.masks, strict=True):
                tensors = _batched(operands.q[sequence.queries], operands.k[sequence.keys])
                tensors += _batched(prepared.v[sequence.keys])
                written_out = mask if type(mask) is torch.Tensor else None
                causal = sequence.prefix == 0
                params = torch.backends.cuda.SDPAParams(*tensors, written_out, 0.0, causal, False)
                if not can_use(params, False):
                    raise Unsupported(
                        f"this torch's {self.backend} kernel does not take {sequence.new} queries over "
                        f"{sequence.length} keys with v {prepared.v.shape[-1]} wide on this device"
                    )
        return prepared


class _OnGpu(TorchSdpaPrefill):
    def available(self, platform: Platform) -> Support:
        return Support.all_of(platform.is_a("cuda", "rocm"), super().available(platform))


class Flash(_OnGpu):
    """On ROCm this is AOTriton's flash attention, which torch's build carries (CK only where
    torch.backends.cuda.preferred_rocm_fa_library was set to that): its row there, and it has no other."""

    name = "torch.sdpa_flash"
    requires = "torch's build for CUDA or ROCm (there AOTriton)"
    backend = "flash"


class Efficient(_OnGpu):
    """On ROCm AOTriton too, by torch's other entry, which takes v as narrow as it is."""

    name = "torch.sdpa_efficient"
    requires = "torch's build for CUDA or ROCm (there AOTriton)"
    backend = "efficient"
    padded = False


class TorchCudnnPrefill(TorchSdpaPrefill):
    name = "torch.sdpa_cudnn"
    requires = "torch's build for CUDA, with cuDNN 9 or later"
    backend = "cudnn"
    padded = False

    def available(self, platform: Platform) -> Support:
        return Support.all_of(platform.is_a("cuda"), super().available(platform))

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        cached = any(prefix for prefix, _ in sizes.lengths())
        return need(not cached, "torch gives cuDNN no causal mask over cached tokens; needs prefix=0")


class _Varlen(_PaddedPrefill):
    def __init__(self, operands: MhaPrefillOperands, out: torch.Tensor) -> None:
        super().__init__(operands, out)
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            raise Unsupported("this torch has no torch.nn.attention.varlen (2.10 or later has)") from None
        takes = inspect.signature(varlen_attn).parameters
        if "scale" not in takes and operands.scale != WIDTH**-0.5:
            raise Unsupported("this torch's varlen_attn takes no scale")
        # Its signature differs by version.
        self.attend = cast("Callable[..., torch.Tensor]", varlen_attn)
        self.options: dict[str, object] = {"is_causal": True}
        if "window_size" in takes:
            self.options = {"window_size": (-1, 0)}
        if "scale" in takes:
            self.options["scale"] = operands.scale

    def call(self) -> None:
        o = self.operands
        attended = self.attend(o.q, o.k, self.v, o.cu_q, o.cu_k, *o.longest, **self.options)
        self.out.copy_(attended[..., :VALUE])


class TorchVarlenPrefill(Implementation):
    """varlen_attn, FlashAttention over all sequences at once; it aligns the causal mask to the last key."""

    name = "torch.varlen"
    requires = "torch's build for CUDA, 2.10 or later"

    def available(self, platform: Platform) -> Support:
        return Support.all_of(platform.is_a("cuda"), platform.library("torch"))

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        return takes(sizes, "bf16")

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """v as wide as q and k."""
        return (sizes.keys + 2 * GUARD) * sizes.heads * WIDTH * 2

    def scratch(self, sizes: MhaPrefillSizes) -> int:
        return sizes.queries * sizes.heads * (WIDTH * 2 + 4)

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        return _Varlen(operands, out)
