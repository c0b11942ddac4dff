"""Arms of a comparison: one engine each, that differ by environment, flags or a swapped op."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.errors import UsageError
from harness.serving.live.swaps import current_names, is_swap, known_swaps

VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


@dataclass(frozen=True)
class EngineArm:
    """environment: None takes a variable away."""

    name: str
    environment: tuple[tuple[str, str | None], ...] = ()
    flags: tuple[str, ...] = ()
    swaps: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def parse_arm(text: str) -> EngineArm:
    """`NAME` or `NAME:ITEM ITEM ...`, quoted as in a shell. An item is an environment variable (`A=1`, or
    `A=unset`), a flag (`--flag=value`), or a swap (`mla_decode=torch.naive`, see live/swaps.py). Raises
    UsageError."""
    name, _, rest = text.partition(":")
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,63}", name):
        raise UsageError(
            f"cannot read --arm {text!r}: write NAME, or NAME:ITEM ITEM ... (A=1, --flag=value, swap)"
        )
    try:
        items = shlex.split(rest)
    except ValueError as error:
        raise UsageError(f"cannot read --arm {text!r}: {error}") from None
    environment: list[tuple[str, str | None]] = []
    flags: list[str] = []
    swaps: list[str] = []
    for item in items:
        left, equals, right = item.partition("=")
        if item.startswith("--"):
            flags.append(item)
        elif all(is_swap(swap) for swap in current_names([item])):
            swaps += current_names([item])
        elif equals and VARIABLE.fullmatch(left):
            environment.append((left, None if right == "unset" else right))
        elif flags and not equals:
            flags.append(item)  # the value of `--flag value`
        else:
            raise UsageError(
                f"--arm {name}: {item!r} is no variable (A=1), flag (--flag) or swap; "
                f"swaps: {', '.join(known_swaps())}"
            )
    return EngineArm(name, tuple(environment), tuple(flags), tuple(swaps))


def parse_arms(texts: Sequence[str]) -> list[EngineArm]:
    """In the order given, the first being what the others are compared with; without any, one plain arm."""
    arms = [parse_arm(text) for text in texts] or [EngineArm("base")]
    names = [arm.name for arm in arms]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"two arms are called {twice[0]}")
    return arms
