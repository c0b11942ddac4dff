"""cudnn.pygraph: python/pygraph/{pygraph,sdpa}.cpp, python/cudnn/__init__.py, and the checks of
include/cudnn_frontend/node/sdpa_support_surface.h (S)."""

import os

from cudnn import _sdpa
from cudnn._compiled_module import (
    attention_implementation,
    build_plan_policy,
    cudnnGraphNotSupportedError,
    data_type,
    diagonal_alignment,
    library_type,
)
from cudnn._compiled_module import tensor as Tensor

STAGES = ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")
FP8 = (data_type.FP8_E4M3, data_type.FP8_E5M2)
HALF = (data_type.HALF, data_type.BFLOAT16)
WORKSPACE = 1 << 10


class pygraph:
    def __init__(
        self,
        name="test_graph",
        io_data_type=data_type.NOT_SET,
        intermediate_data_type=data_type.NOT_SET,
        compute_data_type=data_type.NOT_SET,
        handle=None,
        sm_count=None,
        sm_version=None,
        kernel_cache=None,
        device_property=None,
        is_dynamic_shape_enabled=False,
        is_override_shape_enabled=False,
    ):
        # the compiled constructor knows cuDNN's types alone (pygraph.cpp:783)
        for given in (io_data_type, intermediate_data_type, compute_data_type):
            if not isinstance(given, data_type):
                raise TypeError("pygraph(): incompatible constructor arguments: a cudnn.data_type is wanted")
        self._io, self._intermediate = io_data_type, intermediate_data_type
        self._handle, self._node, self._stage = handle, None, 0

    def tensor(
        self,
        dim,
        stride,
        data_type=data_type.NOT_SET,
        is_virtual=False,
        is_pass_by_value=False,
        ragged_offset=None,
        reordering_type=None,
        name="",
        uid=-1,
    ):
        """python/cudnn/__init__.py:59."""
        made = Tensor().set_dim(dim).set_stride(stride).set_data_type(library_type(data_type)).set_name(name)
        made.set_is_virtual(is_virtual).set_ragged_offset(ragged_offset)
        return made if uid == -1 else made.set_uid(uid)

    def sdpa(
        self,
        q,
        k,
        v,
        is_inference=None,
        attn_scale=None,
        bias=None,
        block_mask=None,
        use_alibi_mask=False,
        use_padding_mask=False,
        seq_len_q=None,
        seq_len_kv=None,
        use_causal_mask=False,
        use_causal_mask_bottom_right=False,
        sliding_window_length=None,
        diagonal_alignment=diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound=None,
        diagonal_band_right_bound=None,
        dropout=None,
        rng_dump=None,
        paged_attention_k_table=None,
        paged_attention_v_table=None,
        paged_attention_max_seq_len_kv=None,
        compute_data_type=data_type.NOT_SET,
        name="",
        score_mod=None,
        generate_stats=None,
        implementation=attention_implementation.AUTO,
        score_max=None,
        score_sum_exp=None,
        sink_token=None,
        unfuse_fma=False,
    ):
        """sdpa.cpp:1063. q, k, v [b, h, s, d]; (o, stats or None). No scale unless attn_scale is given."""
        _undoubled(bias, block_mask, use_alibi_mask, sliding_window_length, diagonal_band_left_bound, dropout)
        _undoubled(rng_dump, paged_attention_k_table, paged_attention_v_table, paged_attention_max_seq_len_kv)
        _undoubled(score_mod, score_max, score_sum_exp, sink_token)
        band = (use_causal_mask, use_causal_mask_bottom_right, diagonal_alignment, diagonal_band_right_bound)
        lengths = (use_padding_mask, seq_len_q, seq_len_kv)
        o, stats, *_ = self._add((q, k, v), (), attn_scale, lengths, band, is_inference, generate_stats)
        return o, stats

    def sdpa_fp8(
        self,
        q,
        k,
        v,
        descale_q,
        descale_k,
        descale_v,
        descale_s,
        scale_s,
        scale_o,
        is_inference=None,
        attn_scale=None,
        bias=None,
        use_alibi_mask=False,
        use_padding_mask=False,
        seq_len_q=None,
        seq_len_kv=None,
        use_causal_mask=False,
        use_causal_mask_bottom_right=False,
        sliding_window=None,
        diagonal_alignment=diagonal_alignment.TOP_LEFT,
        left_bound=None,
        right_bound=None,
        dropout=None,
        rng_dump=None,
        paged_attention_k_table=None,
        paged_attention_v_table=None,
        paged_attention_max_seq_len_kv=None,
        compute_data_type=data_type.NOT_SET,
        name="",
        fn=None,
        generate_stats=None,
        score_max=None,
        score_sum_exp=None,
        sink_token=None,
    ):
        """sdpa.cpp:1213. Scales are f32 tensors [1, 1, 1, 1]; (o, stats or None, amax_s, amax_o)."""
        _undoubled(bias, use_alibi_mask, sliding_window, left_bound, dropout, rng_dump, fn, score_max)
        _undoubled(paged_attention_k_table, paged_attention_v_table, paged_attention_max_seq_len_kv)
        _undoubled(score_sum_exp, sink_token)
        scales = (descale_q, descale_k, descale_v, descale_s, scale_s, scale_o)
        band = (use_causal_mask, use_causal_mask_bottom_right, diagonal_alignment, right_bound)
        lengths = (use_padding_mask, seq_len_q, seq_len_kv)
        return self._add((q, k, v), scales, attn_scale, lengths, band, is_inference, generate_stats)

    def _add(self, qkv, scales, attn_scale, lengths, band, is_inference, generate_stats):
        """sdpa.cpp, PyGraph::sdpa: the older arguments become the newer ones."""
        if self._node is not None:
            raise NotImplementedError("the double's graphs have one node")
        top_left, bottom_right, alignment, right_bound = band
        if (generate_stats is None) == (is_inference is None):
            raise RuntimeError("Exactly one of {generate_stats, is_inference} must be set")
        if top_left and bottom_right:
            raise RuntimeError("use_causal_mask and use_causal_mask_bottom_right cannot both be true")
        if (top_left or bottom_right) and right_bound is not None:
            raise RuntimeError("use_causal_mask and a right bound cannot be set at the same time")
        if top_left or bottom_right:
            alignment = diagonal_alignment.BOTTOM_RIGHT if bottom_right else diagonal_alignment.TOP_LEFT
            right_bound = 0
        outputs = [Tensor().set_is_virtual(True) for _ in range(4)]  # until set_output
        stats = generate_stats if generate_stats is not None else not is_inference
        self._node = _sdpa.Node(
            *(qkv, scales, attn_scale, lengths, alignment is diagonal_alignment.BOTTOM_RIGHT, right_bound),
            *(outputs, stats),
        )
        o, lse, amax_s, amax_o = outputs
        return o, lse if stats else None, amax_s, amax_o

    def validate(self):
        node, major = self._node, int(os.environ.get("DOUBLE_ARCH", "sm_90").removeprefix("sm_")) // 10
        o = node.outputs[0]
        for t in (*node.qkv, o):
            if t.type is data_type.NOT_SET:
                t.set_data_type(self._io)
        _sdpa.infer(node)
        padding, len_q, len_kv = node.lengths
        dims = [t.dim for t in (*node.qkv, o)]
        (_, h, s_q, d_qk), (_, h_k, s_kv, _), (_, h_v, _, d_v), _ = dims
        if h % h_k or h % h_v:
            _unsupported("number of heads for key and query must be a factor of number of heads for query")
        if padding and (len_q is None or len_kv is None):
            raise RuntimeError("Padding mask requires seq_len_q and seq_len_kv to be set.")
        if not padding and (len_q or len_kv):
            raise RuntimeError("seq_len_q and seq_len_kv needs to be set only if padding mask is enabled.")
        if any(t.ragged is not None for t in (*node.qkv, o)) and not padding:
            _unsupported("Ragged offsets are only supported with padding mask.")  # S, is_ragged
        if node.bottom_right and not padding and s_q > s_kv:
            _unsupported("Bottom right causal mask does not support max_s_q > max_s_kv.")
        if node.right_bound is not None and node.right_bound < 0:
            raise RuntimeError("Right bound needs to be larger than or equal to zero")
        if node.right_bound not in (None, 0):
            raise NotImplementedError("bands other than causal are not doubled")
        if self._intermediate is data_type.NOT_SET:
            raise RuntimeError(
                "Intermediate tensor data type needs to be set as internal tensors require it."
            )
        types = {t.type for t in node.qkv}
        if len(types) > 1:
            _unsupported("q, k and v have one data type")
        if node.scales:
            self._fp8(node, major, d_qk, d_v, types, o)
        else:
            if not types <= {*HALF} or o.type not in types:
                _unsupported("sdpa takes HALF or BFLOAT16, and gives the same")
            if d_qk % 8 or d_v % 8:
                _unsupported("hidden_dim should be multiple of 8")
        _sdpa.shapes(node)
        self._done("validate")

    def _fp8(self, node, major, d_qk, d_v, types, o):
        """S, the branch of FP8, as cuDNN 9.19 has it."""
        if not types <= {*FP8}:
            _unsupported("sdpa_fp8 takes FP8_E4M3 or FP8_E5M2")
        if d_qk % 16 or d_v % 16:
            _unsupported("hidden_dim should be multiple of 16")
        if major >= 10 and (d_qk > 128 or d_v > 128) and (d_qk, d_v) != (192, 128):
            _unsupported("hidden_dim should be at most 128 unless d_qk == 192 and d_v == 128")
        if major < 10 and (d_qk > 256 or d_v > 256):
            _unsupported("hidden_dim should be less than or equal to 256")
        if node.bottom_right and node.right_bound == 0 and major < 10:
            _unsupported("bottom right causal masking of sdpa fp8 needs Blackwell")
        if o.type in HALF and major < 10:
            _unsupported("sdpa fp8 forward with HALF/BFLOAT16 output is only supported on Blackwell")
        if o.type not in (*HALF, *FP8):
            _unsupported("the output of sdpa fp8 is FP8, HALF or BFLOAT16")

    def build_operation_graph(self):
        self._done("build_operation_graph")

    def create_execution_plans(self, heur_modes):
        if not heur_modes:
            raise RuntimeError("no heuristic mode")
        self._done("create_execution_plans")

    def check_support(self):
        self._done("check_support")

    def build_plans(self, policy=build_plan_policy.HEURISTICS_CHOICE):
        self._done("build_plans")

    def build(self, heur_modes):
        """pygraph.cpp, PyGraph::build: the five steps at once."""
        self.validate()
        self.build_operation_graph()
        self.create_execution_plans(heur_modes)
        self.check_support()
        self.build_plans()

    def _done(self, stage):
        if STAGES.index(stage) != self._stage:
            raise RuntimeError(f"{stage} comes after {STAGES[STAGES.index(stage) - 1]}")
        self._stage += 1

    def get_workspace_size(self):
        if self._stage < len(STAGES):
            raise RuntimeError("no plan has been built")
        return WORKSPACE

    def execute(
        self,
        tensor_to_device_buffer,
        workspace,
        handle=None,
        override_uids=None,
        override_shapes=None,
        override_strides=None,
    ):
        """python/cudnn/__init__.py:117: pointers alone are taken; dims, strides and types
        are the graph's. The overrides are taken and not passed on (:141)."""
        if self._stage < len(STAGES):
            raise RuntimeError("no plan has been built")
        if workspace is None or workspace.numel() * workspace.element_size() < WORKSPACE:
            raise RuntimeError("the workspace is smaller than get_workspace_size()")
        pack = {
            t if type(t) is int else t.get_uid(): b
            for t, b in tensor_to_device_buffer.items()
            if t is not None
        }
        _sdpa.run(self._node, pack)


def _undoubled(*arguments):
    if any(a is not None and a is not False for a in arguments):
        raise NotImplementedError("this argument is not doubled")


def _unsupported(message):
    raise cudnnGraphNotSupportedError(message)
