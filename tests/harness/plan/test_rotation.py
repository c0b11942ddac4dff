"""Over how many sets of operands calls rotate, and what the record says of it."""

import pytest

import kernels
from harness.plan.rotation import MOST_COPIES, ROTATE_CACHES, UNKNOWN_LEVEL, rotation

OP = kernels.OPS["mla_decode"]
SIZES = OP.sizes({"batch": 8, "ctx": 1024})
TOUCHED = OP.streamed_bytes(SIZES)


def test_streamed_operands_rotate_past_the_last_level_cache():
    found = rotation(OP, SIZES, "serving", 10 * TOUCHED)
    assert found.enough
    assert found.why == ""
    assert found.bytes >= ROTATE_CACHES * 10 * TOUCHED + TOUCHED
    assert found.last_level == 10 * TOUCHED
    assert rotation(OP, SIZES, "serving", TOUCHED // 2).copies == 1
    assert rotation(OP, SIZES, "serving", 0) == rotation(OP, SIZES, "serving", UNKNOWN_LEVEL)
    warm = rotation(OP, SIZES, "warm", TOUCHED)
    assert (warm.copies, warm.enough, warm.why) == (1, False, "one set, over and over, as asked")


@pytest.mark.parametrize(("reach", "past"), [(12, 12), (20, 20), (30, 20), (0, 20)])
def test_they_rotate_no_further_than_was_measured_to_be_enough(reach, past):
    found = rotation(OP, SIZES, "serving", 10 * TOUCHED, reach * TOUCHED)
    assert found.enough
    assert past * TOUCHED <= found.bytes - TOUCHED < (past + 2) * TOUCHED


def test_what_touches_too_little_says_how_little():
    tiny = OP.sizes({"batch": 1, "ctx": 1})
    found = rotation(OP, tiny, "serving", 1 << 30)
    assert not found.enough
    assert found.copies == MOST_COPIES
    assert (
        found.why == f"64 sets of operands touch {found.bytes / 1e6:.3g} MB; the last level holds 1.07e+03 MB"
    )


def test_activations_pass_through_the_cache_too():
    """At 128 000 tokens they are a GB, so two sets of weights find none of them in 50 MB."""
    gemm = kernels.OPS["block_scale_gemm"]
    sizes = gemm.sizes({"m": 128000, "n": 3072, "k": 1536})
    found = rotation(gemm, sizes, "serving", 50 << 20)
    assert (found.copies, found.enough) == (1, True)
    assert rotation(gemm, gemm.sizes({"m": 1, "n": 3072, "k": 1536}), "serving", 50 << 20).copies > 20


def test_where_a_step_streams_nothing_that_is_said():
    prefill = kernels.OPS["mha_prefill"]
    found = rotation(prefill, prefill.sizes({"batch": 1, "new": 3200}), "serving", 50 << 20)
    assert (found.copies, found.why) == (1, "a serving step streams none of its operands")


def test_cold_calls_move_activations_too():
    serving, cold = (rotation(OP, SIZES, mode, 10 * TOUCHED) for mode in ("serving", "cold"))
    assert cold.bytes / cold.copies > serving.bytes / serving.copies


@pytest.mark.parametrize("room", [1, 2, 5])
def test_memory_bounds_the_sets(room):
    wanted = rotation(OP, SIZES, "serving", 10 * TOUCHED).copies
    found = rotation(OP, SIZES, "serving", 10 * TOUCHED, fits=lambda copies: copies <= room)
    assert found.copies == room
    assert not found.enough
    assert found.why == f"memory holds {room} of the {wanted} sets of operands that it takes"
    none = rotation(OP, SIZES, "serving", 10 * TOUCHED, fits=lambda copies: False)
    assert none.copies == 1, "one is made for the reason to be found"


def test_moe_rotates_until_other_experts_were_read():
    """At one token a call touches 8 of 256 experts; the sets route to others."""
    moe = kernels.OPS["fused_moe"]
    sizes = moe.sizes({"tokens": 1})
    found = rotation(moe, sizes, "serving", 32 << 20)
    assert found.copies > 1
    assert found.bytes == moe.streamed_bytes(sizes, found.copies)
    assert found.bytes - moe.streamed_bytes(sizes) >= ROTATE_CACHES * (32 << 20)
