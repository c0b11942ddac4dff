"""Calibrations of made-up devices."""

from collections.abc import Mapping

from harness.results.schema import Calibration

LIGHT, HEAVY = "block_scale_gemm m=64 core", "block_scale_gemm m=8192 core"


def calibrations(
    times_us: Mapping[str, float],
    half: float = 0.005,
    when: str = "first",
    case: str = LIGHT,
    type: str = "H200",
) -> list[Calibration]:
    """What each device took, microseconds; half: of each interval, as a share of the time."""
    return [
        Calibration(
            device=device, type=type, when=when, case=case, impl="torch.bf16", time_us=us,
            low_us=us * (1 - half), high_us=us * (1 + half),
        )
        for device, us in times_us.items()
    ]  # fmt: skip
