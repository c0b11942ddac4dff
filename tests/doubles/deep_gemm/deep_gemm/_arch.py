"""The device that is doubled, and the library's state."""

import os

from ._errors import host_assert

# csrc/jit/device_runtime.hpp: the multiprocessors of the device; H100 SXM 132, B200 148.
_SMS = {9: 132, 10: 148}
_state = {"num_sms": 0, "mk_alignment": 128}  # 128: csrc/jit_kernels/heuristics/runtime.hpp


def arch_major() -> int:
    """9 for sm_90 (the default), 10 for sm_100 and sm_103."""
    digits = "".join(c for c in os.environ.get("DOUBLE_ARCH", "sm_90") if c.isdigit())
    major = int(digits) // 10
    if major not in _SMS:
        raise RuntimeError("Unsupported architecture")  # csrc/utils/layout.hpp get_default_recipe
    return major


def set_num_sms(new_num_sms: int) -> None:
    # A string of the wheel's _C.so; upstream 2.6.1 (device_runtime.hpp) also takes 0.
    host_assert(0 < new_num_sms <= _SMS[arch_major()], "0 < new_num_sms <= num_sms of the device")
    _state["num_sms"] = new_num_sms


def get_num_sms() -> int:
    return _state["num_sms"] or _SMS[arch_major()]


def set_mk_alignment(new_value: int) -> None:
    _state["mk_alignment"] = new_value


def mk_alignment() -> int:
    return _state["mk_alignment"]
