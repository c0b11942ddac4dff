"""How many sets of operands calls rotate over, and the reasons that records give."""

from collections.abc import Iterator
from pathlib import Path

import kernels
from harness.plan.memory import UNKNOWN_LEVEL, Rotation, rotation

OP = kernels.OPS["mla_decode"]
SIZES = OP.sizes({"batch": 8, "ctx": 1024})
TOUCHED = OP.streamed_bytes(SIZES)
MOE, GEMM, PREFILL = (kernels.OPS[name] for name in ("fused_moe", "block_scale_gemm", "mha_prefill"))


def rotations() -> Iterator[tuple[str, Rotation]]:
    """Rotations, each with what is special about it."""
    yield "a last level of ten sets", rotation(OP, SIZES, "serving", 10 * TOUCHED)
    yield "a last level of half a set", rotation(OP, SIZES, "serving", TOUCHED // 2)
    yield "one that is not known", rotation(OP, SIZES, "serving", 0)
    # Reading so many sets again and again was measured to be as slow as memory.
    for reach in (12, 20, 30):
        yield f"measured to {reach} sets", rotation(OP, SIZES, "serving", 10 * TOUCHED, reach * TOUCHED)
    yield "warm", rotation(OP, SIZES, "warm", TOUCHED)
    yield "cold: activations move, too", rotation(OP, SIZES, "cold", 10 * TOUCHED)
    yield "touching too little", rotation(OP, OP.sizes({"batch": 1, "ctx": 1}), "serving", 1 << 30)
    for room in (0, 1, 2, 5):
        held = rotation(OP, SIZES, "serving", 10 * TOUCHED, fits=lambda copies, most=room: copies <= most)
        yield f"memory for {room}", held
    # At 128 000 tokens the activations, a GB, push the weights out of 50 MB, so two sets are enough.
    for m in (1, 128000):
        sizes = GEMM.sizes({"m": m, "n": 3072, "k": 1536})
        yield f"a GEMM of {m} rows", rotation(GEMM, sizes, "serving", 50 << 20)
    sizes = PREFILL.sizes({"batch": 1, "new": 3200})
    yield "a prefill streams nothing", rotation(PREFILL, sizes, "serving", 50 << 20)
    # At one token a call touches 8 of 256 experts; further sets route to other experts.
    yield "experts of one token", rotation(MOE, MOE.sizes({"tokens": 1}), "serving", 32 << 20)


def test_rotations_are_as_committed(snapshot):
    lines = [
        f"{name}: {of.mode}, {of.copies} sets of {of.bytes} bytes, last level {of.last_level}, "
        f"{'enough' if of.enough else 'not enough'}{f': {of.why}' if of.why else ''}"
        for name, of in rotations()
    ]
    snapshot(Path(__file__).parent / "snapshots" / "rotations.txt", "\n".join(lines) + "\n")
    assert rotation(OP, SIZES, "serving", 0) == rotation(OP, SIZES, "serving", UNKNOWN_LEVEL)
