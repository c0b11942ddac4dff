"""cuDNN's fused attention through NVIDIA's cudnn front end: a graph of one node over ragged sequences.

Read at front end 1.23.0: python/cudnn/__init__.py, python/pygraph/{pygraph,sdpa}.cpp (which take arguments by
these names), include/cudnn_frontend/node/sdpa_support_surface.h (what each cuDNN takes), and
test/python/sdpa/{fp16,fp8}.py for the ragged layout. Untested on hardware.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from kernels import vendor
from kernels.binding import load
from kernels.mha_prefill.operands import MhaPrefillOperands
from kernels.mha_prefill.sizes import VALUE, WIDTH, MhaPrefillSizes, takes
from kernels.op import Prepared, Unsupported
from kernels.support import Support

if TYPE_CHECKING:
    import torch

FP8_WEIGHTS = 256.0  # by which softmax weights, 1 at most, are scaled up into e4m3fn before they are rounded


class CudnnSdpaPrefill(vendor.Cudnn):
    """`sdpa`, or `sdpa_fp8`, with d_qk 192 and d_v 128, causal from the bottom right."""

    name = "cudnn"
    requires = (
        "nvidia-cudnn-frontend 1.13 or later and cuDNN 9.10.2 or later, CUDA sm_90 or later; "
        "FP8: cuDNN 9.19 or later, sm_100 or later"
    )
    archs = ("sm_90", *vendor.BLACKWELL, "sm_120")  # ragged sequences need those
    activations = "fp8"

    def fits(self, sizes: MhaPrefillSizes) -> Support:
        return takes(sizes, "bf16", "fp8")

    def workspace(self, sizes: MhaPrefillSizes) -> int:
        """What a plan asks for is known once it is built; forward plans have asked for little."""
        return 32 << 20

    def prepare(self, operands: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
        return _Graph(operands, out, load("cudnn"))


def sequence_lengths(o: MhaPrefillOperands) -> dict[str, torch.Tensor]:
    """int32 [batch, 1, 1, 1] on the device."""
    return {
        name: cumulative.diff().view(-1, 1, 1, 1)
        for name, cumulative in (("seq_len_q", o.cu_q), ("seq_len_kv", o.cu_k))
    }


def offsets(o: MhaPrefillOperands) -> dict[str, torch.Tensor]:
    """Where each sequence begins, in elements, int64 [batch + 1, 1, 1, 1]."""
    heads = o.q.shape[1]
    begins = {"q": (o.cu_q, WIDTH), "k": (o.cu_k, WIDTH), "v": (o.cu_k, VALUE), "out": (o.cu_q, VALUE)}
    return {
        name: (cumulative.long() * (heads * width)).view(-1, 1, 1, 1)
        for name, (cumulative, width) in begins.items()
    }


def shape(o: MhaPrefillOperands, name: str) -> tuple[list[int], list[int]]:
    """Sizes [batch, heads, the most tokens, width] and the strides of tokens that lie behind each other."""
    most_new, longest = o.longest
    tokens = most_new if name in ("q", "out") else longest
    width = WIDTH if name in ("q", "k") else VALUE
    heads = o.q.shape[1]
    return [len(o.sequences), heads, tokens, width], [tokens * heads * width, width, heads * width, 1]


def mask() -> dict[str, object]:
    """Causal, aligned to each sequence's last key."""
    return {"use_causal_mask_bottom_right": True}


def fp8_scales(o: MhaPrefillOperands) -> dict[str, torch.Tensor]:
    """fp32 [1, 1, 1, 1]: the operands' descales, and factors for the weights and the output."""
    import torch

    def number(value: float) -> torch.Tensor:
        return torch.full((1, 1, 1, 1), value, device=o.q.device)

    return {
        "descale_q": o.q_descale.view(1, 1, 1, 1),
        "descale_k": o.k_descale.view(1, 1, 1, 1),
        "descale_v": o.v_descale.view(1, 1, 1, 1),
        "descale_s": number(1 / FP8_WEIGHTS),
        "scale_s": number(FP8_WEIGHTS),
        "scale_o": number(1.0),
    }


class _Graph(Prepared):
    """Tensors have numbers, by which a call gives their addresses."""

    operands: MhaPrefillOperands

    def __init__(self, operands: MhaPrefillOperands, out: torch.Tensor, cudnn: ModuleType) -> None:
        import torch

        super().__init__(operands, out)
        self.cudnn = cudnn
        self.handle = cudnn.create_handle()
        self.bound: dict[int, torch.Tensor] = {}
        try:
            self.graph = self._built()
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError, TypeError, AttributeError) as error:
            # What a version or an architecture does not take is told when the graph is built.
            reason = str(error).partition("\n")[0]
            raise Unsupported(
                f"cudnn {cudnn.__version__} with cuDNN {cudnn.backend_version()}: {reason}"
            ) from error
        size = max(self.graph.get_workspace_size(), 1)
        self.room = torch.empty(size, dtype=torch.uint8, device=out.device)

    def _built(self) -> Any:  # a graph of cudnn
        import torch

        o, types = self.operands, self.cudnn.data_type
        kinds = {
            torch.bfloat16: types.BFLOAT16,
            torch.float8_e4m3fn: types.FP8_E4M3,
            torch.float32: types.FLOAT,
            torch.int32: types.INT32,
            torch.int64: types.INT64,
        }
        graph = self.cudnn.pygraph(
            io_data_type=kinds[o.q.dtype],
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=self.handle,
        )

        def bind(tensor: torch.Tensor) -> int:
            self.bound[len(self.bound) + 1] = tensor
            return len(self.bound)

        def like(tensor: torch.Tensor) -> Any:  # of cudnn
            """A node for a small tensor, as it lies."""
            dims, strides = list(tensor.shape), list(tensor.stride())
            return graph.tensor(dim=dims, stride=strides, data_type=kinds[tensor.dtype], uid=bind(tensor))

        begins = {name: like(tensor) for name, tensor in offsets(o).items()}
        nodes = {}
        for name, tensor in o.live_tensors().items():
            dims, strides = shape(o, name)
            nodes[name] = graph.tensor(
                dim=dims, stride=strides, data_type=kinds[tensor.dtype], uid=bind(tensor)
            )
            nodes[name].set_ragged_offset(begins[name])
        options = {name: like(tensor) for name, tensor in sequence_lengths(o).items()}
        options |= {"use_padding_mask": True, "attn_scale": o.scale, "generate_stats": False, **mask()}
        if o.q_descale is None:
            attended, _ = graph.sdpa(**nodes, **options)
        else:
            scales = {name: like(tensor) for name, tensor in fp8_scales(o).items()}
            attended, _, *largest = graph.sdpa_fp8(**nodes, **scales, **options)
            for node in largest:
                number = bind(torch.empty(1, 1, 1, 1, device=o.q.device))
                node.set_uid(number).set_output(True).set_dim([1] * 4).set_stride([1] * 4)
                node.set_data_type(types.FLOAT)
        dims, strides = shape(o, "out")
        attended.set_uid(bind(self.out)).set_output(True).set_dim(dims).set_stride(strides)
        attended.set_data_type(types.BFLOAT16).set_ragged_offset(begins["out"])
        graph.validate()
        graph.build_operation_graph()
        modes = self.cudnn.heur_mode
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return graph

    def call(self) -> None:
        import torch

        if self.out.is_cuda:
            stream = torch.cuda.current_stream(self.out.device).cuda_stream
            self.cudnn.set_stream(handle=self.handle, stream=stream)
        self.graph.execute(self.bound, self.room, handle=self.handle)
