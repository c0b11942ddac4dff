"""aiter/ops/enum.py, values from csrc/include/aiter_enum.h. pybind's enums: not ints, but they convert to
int."""

from enum import Enum


class _PybindEnum(Enum):
    def __int__(self):
        return self.value

    def __index__(self):
        return self.value


class ActivationType(_PybindEnum):
    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2
    Situv2 = 3


class QuantType(_PybindEnum):
    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5
    per_256x128 = 6
    per_1024x128 = 7
