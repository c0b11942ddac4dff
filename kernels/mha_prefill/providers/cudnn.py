"""cuDNN's fused attention through NVIDIA's cudnn front end: a graph of one node over ragged sequences.

Read at front end 1.23.0: python/cudnn/__init__.py, python/pygraph/{pygraph,sdpa}.cpp (the names of
arguments), include/cudnn_frontend/{plans,node/sdpa_support_surface}.h (what each version of cuDNN takes, and
what is raised for the rest), and test/python/sdpa/{fp16,fp8}.py for the ragged layout; at 1.26.0, 1.27.0,
1.29.0 and 1.32.0 cudnn/{__init__,_pygraph}.py. From 1.27 on a kernel of the front end itself, in CuTe, may
run a graph in cuDNN's place: `picked` tells which. Ran on an H200 in bf16 (1.28)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kernels import vendor
from kernels.binding import Function, Symbol
from kernels.lazy import torch
from kernels.mha_prefill.operands import VALUE, WIDTH, MhaPrefillOperands, takes
from kernels.op import Prepared, Unsupported, implementation

FP8_WEIGHTS = 256.0  # scales softmax weights, 1 at most, up into e4m3fn before they are rounded
VERSIONS = (Symbol("cudnn.__version__"), Symbol("cudnn.backend_version"))
NOT_SUPPORTED = Symbol("cudnn.cudnnGraphNotSupportedError")
DATA_TYPE, HEURISTICS = Symbol("cudnn.data_type"), Symbol("cudnn.heur_mode")
CREATE_HANDLE = Function("cudnn.create_handle")
SET_STREAM = Function("cudnn.set_stream", needs="handle stream")
GRAPH = Function("cudnn.pygraph", needs="io_data_type intermediate_data_type compute_data_type handle")
TENSOR = Function("cudnn.pygraph.tensor", needs="dim stride data_type uid")
SDPA = Function(
    "cudnn.pygraph.sdpa",
    needs="q k v seq_len_q seq_len_kv use_padding_mask attn_scale generate_stats "
    "use_causal_mask_bottom_right",
    when="dtype=bf16",
)
SDPA_FP8 = Function(
    "cudnn.pygraph.sdpa_fp8",
    needs=" ".join(SDPA.needs) + " descale_q descale_k descale_v descale_s scale_s scale_o",
    when="dtype=fp8",
)
PLAN = Function("cudnn.pygraph.create_execution_plans", positions=1)
EXECUTE = Function("cudnn.pygraph.execute", positions=2, needs="handle")
STEPS = tuple(
    Function(f"cudnn.pygraph.{step}")
    for step in ("validate", "build_operation_graph", "check_support", "build_plans", "get_workspace_size")
)
# A node of a graph is its own class from 1.27 on.
NODE = tuple(
    Function(f"cudnn.Tensor.{setter}", f"cudnn.tensor.{setter}", positions=1)
    for setter in ("set_uid", "set_output", "set_dim", "set_stride", "set_data_type", "set_ragged_offset")
)
CONTEXT = (*VERSIONS, NOT_SUPPORTED, DATA_TYPE, HEURISTICS, CREATE_HANDLE, SET_STREAM)
SYMBOLS = (*CONTEXT, GRAPH, TENSOR, *NODE, SDPA, SDPA_FP8, PLAN, *STEPS, EXECUTE)


@implementation(
    "cudnn",
    vendor.Cudnn,
    since="1.13",
    requires="nvidia-cudnn-frontend 1.13 or later and cuDNN 9.10.2 or later, CUDA sm_90 or later; "
    "FP8: cuDNN 9.19 or later, sm_100 or later",
    archs=("sm_90", *vendor.BLACKWELL, "sm_120"),  # which take ragged sequences
    activations="fp8",
    symbols=SYMBOLS,
    fits=takes("bf16", "fp8"),
    # A guess: a plan's workspace is known only when it is built, and those of forward plans have been small.
    workspace=lambda sizes: 32 << 20,
)
def sdpa(o: MhaPrefillOperands, out: torch.Tensor) -> Prepared:
    """`sdpa`, or `sdpa_fp8`, with d_qk 192 and d_v 128 and a causal mask that ends at the bottom right."""
    import torch

    handle, set_stream, not_supported = CREATE_HANDLE.bind()(), SET_STREAM.find(), NOT_SUPPORTED.find()
    with refusals(not_supported):
        built = graph_of(o, out, handle)
        graph = built.graph
        graph.validate()
    with refusals(not_supported, RuntimeError):  # which is raised where cuDNN has no plan
        graph.build_operation_graph()
        modes = HEURISTICS.find()
        PLAN.bind([modes.A, modes.FALLBACK], method_of=graph)()
        graph.check_support()
        graph.build_plans()
    size = max(graph.get_workspace_size(), 1)
    room = torch.empty(size, dtype=torch.uint8, device=out.device)
    execute = EXECUTE.bind(built.tensors, room, method_of=graph, handle=handle)

    def call() -> None:
        if out.is_cuda:
            set_stream(handle=handle, stream=torch.cuda.current_stream(out.device).cuda_stream)
        execute()

    return Prepared(o, out, call, picked=lambda: engine_of(graph))


def engine_of(graph: Any) -> str:
    """The name of the front end's own kernel that runs the graph, or `cuDNN`; empty before 1.27."""
    if not hasattr(graph, "selected_engine"):
        return ""
    return getattr(graph.selected_engine, "name", "cuDNN")


@contextmanager
def refusals(*kinds: type[Exception]) -> Iterator[None]:
    """Raises Unsupported in place of these exceptions: by them a version of cuDNN refuses what it or the
    architecture does not take, while a graph is built and planned. Other exceptions are errors of the row."""
    try:
        yield
    except kinds as error:
        frontend, backend = (symbol.find() for symbol in VERSIONS)
        reason = str(error).partition("\n")[0]
        raise Unsupported(f"cudnn {frontend} with cuDNN {backend()}: {reason}") from error


class Graph:
    """A graph of cudnn, and its tensors by their numbers in it, which a call gets."""

    def __init__(self, dtype: torch.dtype, handle: Any) -> None:
        types = DATA_TYPE.find()
        self.types = {
            torch.bfloat16: types.BFLOAT16,
            torch.float8_e4m3fn: types.FP8_E4M3,
            torch.float32: types.FLOAT,
            torch.int32: types.INT32,
            torch.int64: types.INT64,
        }
        in_fp32 = {"intermediate_data_type": types.FLOAT, "compute_data_type": types.FLOAT}
        self.graph = GRAPH.bind(io_data_type=self.types[dtype], **in_fp32, handle=handle)()
        self.tensors: dict[int, torch.Tensor] = {}

    def number(self, tensor: torch.Tensor) -> int:
        """Adds a tensor, and returns its number."""
        self.tensors[len(self.tensors) + 1] = tensor
        return len(self.tensors)

    def input(self, tensor: torch.Tensor, dims: list[int], strides: list[int]) -> Any:
        """A node that reads a tensor."""
        layout = {"dim": dims, "stride": strides, "data_type": self.types[tensor.dtype]}
        return TENSOR.bind(method_of=self.graph, **layout, uid=self.number(tensor))()

    def values(self, values: torch.Tensor) -> Any:
        """A node that reads values [n], as [n, 1, 1, 1]."""
        return self.input(values.view(-1, 1, 1, 1), [len(values), 1, 1, 1], [1] * 4)

    def output(self, node: Any, tensor: torch.Tensor, dims: list[int], strides: list[int]) -> Any:
        """Makes a node write a tensor, and returns it."""
        node.set_uid(self.number(tensor)).set_output(True).set_dim(dims).set_stride(strides)
        return node.set_data_type(self.types[tensor.dtype])


def graph_of(o: MhaPrefillOperands, out: torch.Tensor, handle: Any) -> Graph:
    graph, heads = Graph(o.q.dtype, handle), o.q.shape[1]
    # By operand: where sequences begin in it, the tokens of the longest sequence, and the width.
    ragged = {
        "q": (o.cu_q, o.sizes.most_new, WIDTH),
        "k": (o.cu_k, o.sizes.most_keys, WIDTH),
        "v": (o.cu_k, o.sizes.most_keys, VALUE),
        "out": (o.cu_q, o.sizes.most_new, VALUE),
    }
    layouts, offsets = {}, {}
    for name, (starts, tokens, width) in ragged.items():
        # As if all sequences were as long as the longest: offsets, in elements, tell where each one begins.
        strides = [tokens * heads * width, width, heads * width, 1]
        layouts[name] = [len(o.sequences), heads, tokens, width], strides
        offsets[name] = graph.values(starts.long() * (heads * width))
    nodes = {name: graph.input(tensor, *layouts[name]) for name, tensor in o.live_tensors().items()}
    for name, operand in nodes.items():
        operand.set_ragged_offset(offsets[name])
    options = {
        "seq_len_q": graph.values(o.cu_q.diff()),
        "seq_len_kv": graph.values(o.cu_k.diff()),
        "use_padding_mask": True,
        "attn_scale": o.scale,
        "generate_stats": False,
        "use_causal_mask_bottom_right": True,
    }
    if not o.is_fp8:
        attended, _ = SDPA.bind(method_of=graph.graph, **nodes, **options)()
    else:
        # The operands' descales, and factors for the weights and the output.
        scales = {"descale_q": o.q_descale, "descale_k": o.k_descale, "descale_v": o.v_descale}
        for name, scale in {"descale_s": 1 / FP8_WEIGHTS, "scale_s": FP8_WEIGHTS, "scale_o": 1.0}.items():
            scales[name] = torch.full((1,), scale, device=o.q.device)
        scale_nodes = {name: graph.values(scale) for name, scale in scales.items()}
        # It also gives the statistics, and the largest magnitudes of the weights and of the output.
        attended, _, *largest = SDPA_FP8.bind(method_of=graph.graph, **nodes, **scale_nodes, **options)()
        for magnitude in largest:
            graph.output(magnitude, torch.empty(1, 1, 1, 1, device=o.q.device), [1] * 4, [1] * 4)
    graph.output(attended, out, *layouts["out"]).set_ragged_offset(offsets["out"])
    return graph
