"""cudnn._compiled_module: enumerations and tensor attributes (python/properties.cpp:124-203)."""

import enum
import itertools

import torch


class cudnnGraphNotSupportedError(RuntimeError):
    """pycudnn.cpp:94."""


data_type = enum.Enum(
    "data_type",
    "FLOAT DOUBLE HALF INT8 INT32 INT64 UINT8 BFLOAT16 BOOLEAN FP8_E4M3 FP8_E5M2 NOT_SET",
)
diagonal_alignment = enum.Enum("diagonal_alignment", "TOP_LEFT BOTTOM_RIGHT")
attention_implementation = enum.Enum("attention_implementation", "AUTO COMPOSITE UNIFIED")
heur_mode = enum.Enum("heur_mode", "A B FALLBACK OPENSOURCE")
build_plan_policy = enum.Enum("build_plan_policy", "HEURISTICS_CHOICE ALL")

TORCH = {
    data_type.FLOAT: torch.float32,
    data_type.HALF: torch.float16,
    data_type.BFLOAT16: torch.bfloat16,
    data_type.INT32: torch.int32,
    data_type.INT64: torch.int64,
    data_type.FP8_E4M3: torch.float8_e4m3fn,
    data_type.FP8_E5M2: torch.float8_e5m2,
}
UIDS = itertools.count(1 << 20)


def library_type(given):
    """python/cudnn/datatypes.py, _library_type: cuDNN's types or torch's."""
    if isinstance(given, data_type):
        return given
    for ours, torchs in TORCH.items():
        if given == torchs:
            return ours
    raise Exception(f"No available conversion from type {given} to a library type.")


class tensor:
    """Setters return the tensor (properties.cpp:159-198)."""

    def __init__(self):
        self.dim, self.stride, self.type, self.name = [], [], data_type.NOT_SET, ""
        self.virtual, self.ragged, self.uid = False, None, next(UIDS)

    def set_name(self, value):
        self.name = value
        return self

    def set_dim(self, value):
        self.dim = [int(n) for n in value]
        return self

    def set_stride(self, value):
        self.stride = [int(n) for n in value]
        return self

    def set_data_type(self, data_type=data_type.NOT_SET):
        self.type = library_type(data_type)
        return self

    def set_is_virtual(self, value):
        self.virtual = bool(value)
        return self

    def set_output(self, is_output):
        return self.set_is_virtual(not is_output)

    def set_ragged_offset(self, value):
        self.ragged = value
        return self

    def set_uid(self, value):
        self.uid = int(value)
        return self

    def get_name(self):
        return self.name

    def get_dim(self):
        return self.dim

    def get_stride(self):
        return self.stride

    def get_data_type(self):
        return self.type

    def get_is_virtual(self):
        return self.virtual

    def get_uid(self):
        return self.uid
