"""Rows of libraries against doubles of these, judged as the harness judges.

What doubles cannot show: that a library builds, and what its kernels round (untested on hardware). Some rows
stand between the suite's own Triton kernels, which a CPU interprets: those cases run in a process of their
own, this file as a script.
"""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import pytest

from harness.errors import one_line
from tests.support.broken_calls import Break, broken, listed
from tests.support.contract_rows import CONTRACTS, interpreted
from tests.support.contracts import Contract
from tests.support.interpreting import found_interpreted

CASES = [(contract, text) for contract in CONTRACTS for text in contract.texts]


def tried(contract: Contract) -> list[str]:
    """Cases that tell right from wrong: pages of several tokens, rows that fill no tile, keys before the new
    ones; and an FP8 cache."""
    usual = contract.texts[min(len(contract.texts) - 1, 2 if contract.op == "block_scale_gemm" else 1)]
    return list(dict.fromkeys([usual, *[text for text in contract.texts if "kv=fp8" in text][:1]]))


ONE_OF_EACH = {(c.op, c.name, c.doubles, "fp8" in c.texts[0]): c for c in reversed(CONTRACTS)}
NO_ARGUMENTS = {"hipblaslt.dequantised": "its product is torch's own, by the library that torch prefers"}
BROKEN = [(c, text) for c in ONE_OF_EACH.values() if c.name not in NO_ARGUMENTS for text in tried(c)]

ONE = "a sequence has one query token, and pages of one token are full"
SPLITS = "the answer does not depend on how sequences are split"
ROOM = "there may be more room than is needed"

HARMLESS = {
    ".*": {
        r"\(max_\w+\): one more": "an upper bound",
        r"\(causal\w*\): the other flag": "a query of one token sees all keys",
        r"\(num_splits\): one more": "the answer does not depend on the splits",
    },
    "block_scale_gemm": {
        r"shuffle_weight\(x\): other strides": "tiles are cut by shape",
        r"gemm_a8w8_blockscale(_preshuffle)?\((w|w_scale)\): other strides": "Triton takes strides",
        r"w8a8_block_fp8_matmul_triton\(Bs\): other strides": "Triton takes strides",
        r"fp8_gemm_nt\(b\[1\]\): other strides": "on sm_90 DeepGEMM takes scales of b by rows or by columns",
        r"\(mma_sm\): one more": "how many SMs share an instruction",
    },
    "fused_moe": {
        r"shuffle_weight\(x\): other strides": "the same values",
        r"moe_sorting\(num_experts\): one more": "an expert that nobody picks",
        r"get_padded_M\(|\(use_non_temporal_load\)": "how weights are read, not what",
        r"\(moe_sorting_dispatch_policy\)": "how pairs are sorted, not which",
        r"ck_moe_stage1_fwd\(w2\)|ck_moe_stage2_fwd\(w1\)": "its shape is read alone",
        r"ck_moe_stage1_fwd\(splitk\): one more": "0 and 1 split nothing",
        r"fmoe_fp8_blockscale_g1u1\(topk\)": "assembly, whose use of it no source tells",
        r"get_optimal_moe_config\(M\)|\(tune_max_num_tokens\)|autotune\(": "a choice of tiles",
        r"aiter.triton .* fused_moe\(topk_": "weights are applied after it",
        r"aiter.triton .* fused_moe\(B\w*\): other strides": "it is told strides",
        r"get_theoretical_mk_alignment": "experts' rows keep to whatever is advised, and the library is told",
        r"nt_masked\(4\): one more|\(alignment\): one more": "a hint",
        r"deepgemm.contiguous .*\(1\[1\]\): other strides|w1_scale\): other strides": "it reads strides",
        r"transform_sf_into_required_layout\((sf\): other strides|recipe\[0\])": "not read of weights",
        r"\(block_shape\[0\]\)": "x has blocks of one row",
        r"post_reorder_deepgemm\(topk_ids\)": "rows of -1 tell what is elsewhere",
        r"compute_aligned_M_and_alignment\(": "room for more rows",
        r"\((aq_out|output|output_q)\): another order": "it is written",
        r"deepgemm_unpermute_and_reduce\(topk_ids\): other (index type|strides)": "it takes both",
        r"shuffle_matrix_a\(1\): one more": "tiles below 128 rows have one order",
        r"\(ep_size\): one more": "the rank's experts are the first",
        r"init_distributed_environment\(local_rank\)|MoeRunnerConfig\(num_": "of one rank, with all experts",
    },
    # What engines give is asked for in tests/kernels/mla_decode/test_engine_arguments.py.
    "mla_decode": {
        r" get_num_kv_splits_triton\(": SPLITS,
        r"(sglang.triton|aiter.triton_split) .*\(\w+\): other index type": "Triton reads either type",
        r"sglang.triton .*\((has_mla|use_pdl|uneven_batch|num_kv_splits)\)": "only the order of work changes",
        r"sglang.triton .*\(v_buffer\): another order$": "with has_mla values are read out of k_buffer",
        r"\((attn_logits|attn_lse|lse)\): another order": "it is only written, or before it is read",
        r"aiter.triton_split (?!.*kv=fp8).*\([kv]_scale\)": "a cache in bf16 has no scale",
        r"aiter.triton .*\(max_seqlen_kv\)": SPLITS,
        r"aiter.gluon .*\(min_kv_seq_len\)": SPLITS,
        r"flashinfer.* get_trtllm_gen_multi_ctas_kv_counter_bytes\(": ROOM,
        r"flashinfer.*\(qk_nope_head_dim\)": "the library reads it nowhere",
        r"flashinfer.* autotune\(": "whichever kernel is chosen is right",
        r" get_mla_metadata_info_v1\((batch_size|is_sparse|fast_mode|intra_batch_mode|num_kv_splits)\)": ROOM,
        r" get_mla_metadata_v1\((seqlens_qo_indptr|is_causal|kv_last_page_lens|page_size)\)": ONE,
        r"aiter.*@sglang .*\((fast_mode|max_split_per_batch|num_kv_splits)\)": SPLITS,
        r"aiter.*\(intra_batch_mode\)": SPLITS,
        r"aiter.asm_persistent.* mla_decode_fwd\((qo|kv)_indptr\): (one|an)": "the schedule says it",
        r"aiter.*@sglang gfx942 .*\(q_scale\)": "q is in bf16",
    },
}
"""Breaks that nobody can notice: op -> pattern of contract, case and break -> the reason."""


def name(case: tuple[Contract, str]) -> str:
    return f"{case[0]}: {case[1]}"


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, list[str]]:
    """What interpreted contracts say, by name: why a case is wrong, and which breaks nobody noticed."""
    return dict(found_interpreted(__file__))


def marked(cases: list[tuple[Contract, str]], slow: bool = False) -> list[Any]:
    return [
        pytest.param(case, marks=[pytest.mark.slow] * (slow or interpreted(case[0])), id=name(case))
        for case in cases
    ]


@pytest.mark.parametrize("case", marked(CASES))
def test_a_row_keeps_its_contract(case: tuple[Contract, str], request: pytest.FixtureRequest) -> None:
    contract, text = case
    if interpreted(contract):
        assert request.getfixturevalue("elsewhere")[name(case)][0] == ""
    else:
        contract.keep(text)


@pytest.mark.parametrize("case", marked(BROKEN, slow=True))
def test_a_broken_argument_is_noticed(case: tuple[Contract, str], request: pytest.FixtureRequest) -> None:
    """For each argument of each call of a row: of another index type, order, layout, scale or flag."""
    apart = interpreted(case[0])
    unnoticed = request.getfixturevalue("elsewhere")[name(case)][1] if apart else survivors(*case)
    harmless = re.compile("|".join(f"^{op} .*(?:{p})" for op, patterns in HARMLESS.items() for p in patterns))
    assert [text for text in unnoticed if not harmless.search(f"{name(case)} {text}")] == []


def survivors(contract: Contract, text: str) -> list[str]:
    """Breaks that neither the double nor the judge noticed."""
    with listed() as breaks:
        contract.keep(text)
    assert breaks, "no call of it is bound"
    return [str(way) for way in breaks if not noticed(contract, text, way)]


def noticed(contract: Contract, text: str, way: Break) -> bool:
    with broken(way), warnings.catch_warnings(action="ignore"):  # of what overflows then
        try:
            contract.keep(text)
        except Exception:
            return True
    return False


def main() -> None:
    for case in filter(lambda case: interpreted(case[0]), CASES):
        wrong, unnoticed = "", []
        try:
            case[0].keep(case[1])
            unnoticed = survivors(*case) if case in BROKEN else []
        except Exception as error:
            wrong = one_line(error)
        print(json.dumps((name(case), (wrong, unnoticed))))


if __name__ == "__main__":
    main()
