"""aiter/ops/enum.py: MlaVersion (csrc/include/aiter_enum.h)."""

from enum import IntEnum


class MlaVersion(IntEnum):
    V32 = 0
    V40 = 1
