"""Signatures of the wheel's deep_gemm/utils/math.py, for the two functions that callers use for shapes."""


def ceil_div(x: int, y: int) -> int:
    return (x + y - 1) // y


def align(x: int, y: int) -> int:
    return ceil_div(x, y) * y
