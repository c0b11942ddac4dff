"""How the library fails: a false DG_HOST_ASSERT is a RuntimeError in Python (csrc/utils/exception.hpp)."""


def host_assert(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"Assertion error: {what}")


def device_trap(holds: bool, what: str) -> None:
    """The kernel stops the device: seen at the next synchronisation."""
    if not holds:
        raise RuntimeError(f"CUDA error: unspecified launch failure (device assertion {what})")


def not_doubled(holds: bool, what: str) -> None:
    if not holds:
        raise NotImplementedError(f"the double of deep_gemm does not cover {what}")
