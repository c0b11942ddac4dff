"""Memory of a replayed step: how many layers fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import kernels
from harness.errors import NothingRan, UsageError
from harness.serving.replay.step import ReplayStep, StepPlace, places
from kernels.platform import Platform, free_memory

SHARE = 0.92
"""Of memory: nothing else is on the device, and no further sets of operands rotate."""


def fitted(
    step: ReplayStep, layers: str | None, arms: Mapping[str, Mapping[str, str]], platform: Platform
) -> tuple[ReplayStep, tuple[str, ...]]:
    """The step with as many layers as the device holds with all arms' layouts, or as `layers` says
    (`DENSE,MOE`), and a note where they are not all. Raises UsageError or NothingRan."""
    whole = step
    if layers:
        try:
            dense, moe = (int(part) for part in layers.split(","))
            step = replace(step, dense=dense, moe=moe)
        except ValueError as error:
            raise UsageError(f"--layers takes DENSE,MOE, not {layers!r}: {error}") from None
    else:
        memory = free_memory(platform)
        limit = float("inf") if memory is None else SHARE * memory
        while needed(step, arms) > limit:
            if step.moe > 1:
                step = replace(step, moe=step.moe - 1)
            elif step.dense > 1:
                step = replace(step, dense=step.dense - 1)
            else:
                raise NothingRan(
                    f"a step of {step.dense} dense and {step.moe} MoE layers takes "
                    f"{needed(step, arms) / 2**30:.1f} GiB, more than the device has: "
                    "take fewer requests or fewer swaps"
                )
    if (step.dense, step.moe) == (whole.dense, whole.moe):
        return step, ()
    return step, (
        f"{step.dense} of {whole.dense} dense and {step.moe} of {whole.moe} MoE layers were replayed; "
        "`whole model` is the change times the number of swapped calls",
    )


def needed(step: ReplayStep, arms: Mapping[str, Mapping[str, str]]) -> float:
    """Bytes of operands, outputs and every arm's layouts; workspaces are shared and small beside them."""
    total = 2.0 * 2 * step.linear("lm_head").n * step.model.hidden_size
    alike = Counter(replace(place, layer=0) for place in places(step) if place.op)
    return total + sum(count * _bytes(step, place, arms) for place, count in alike.items())


def _bytes(step: ReplayStep, place: StepPlace, arms: Mapping[str, Mapping[str, str]]) -> float:
    op = kernels.OPS[place.op]
    sizes = op.sizes(step.sizes(place))
    names = {chosen.get(f"{place.op}:{place.name}") or chosen[place.op] for chosen in arms.values()}
    layouts = sum(i.layout(sizes) for i in kernels.implementations(place.op) if i.name in names)
    return op.operand_bytes(sizes) + op.output_bytes(sizes) + layouts
