"""A replay as text, and as a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tabulate import tabulate

from harness.errors import UsageError
from harness.serving.replay.schema import Replay, Timed


def keep(replay: Replay, folder: Path, name: str) -> Path:
    """Writes a replay into a folder; raises UsageError where that cannot be done."""
    path = folder / f"{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(replay.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    return path


def table(replay: Replay) -> str:
    """The step, what each arm changes by each method, and where the base's time goes."""
    step, base = replay.step, replay.arms[replay.base]
    layers = f"{step['dense']} dense and {step['moe']} MoE layers"
    head = (
        f"{step['phase']} step of {step['model']}, tp={step['parallel']['tp']}: "
        f"{len(step['contexts'])} requests, {step['tokens']} tokens, context {max(step['contexts'])}, "
        f"{layers}, routing {step['picks']}, "
        f"{replay.launch}, {replay.threads} threads"
    )
    rows = [
        [name, _timed(arm.step), _timed(arm.change, "+"), *(_ms(v) for v in (arm.own, arm.cold, arm.warm)),
         _timed(arm.whole, "+"), arm.failed or _alike(arm.difference)]
        for name, arm in replay.arms.items()
    ]  # fmt: skip
    columns = ["arm", "step ms", "change", "own calls", "cold", "warm", "whole model", ""]
    chosen = ", ".join(f"{op}={implementation}" for op, implementation in base.chosen.items())
    lines = [head, f"base: {chosen}", tabulate(rows, columns, disable_numparse=True)]
    if replay.twin:
        lines.append(f"the base against itself: {_timed(replay.twin, '+')} ms")
    total = sum(base.classes.values()) or 1.0
    shares = sorted(base.classes.items(), key=lambda item: -item[1])
    lines.append(
        f"base, each call waited for, so that nothing overlaps, {total:.3g} ms: "
        + ", ".join(f"{k} {v:.3g} ms ({v / total:.0%})" for k, v in shares)
    )
    lines.append(f"left out: {', '.join(replay.left_out)}")
    lines += [f"note: {text}" for text in replay.notes]
    lines.append(
        f"{replay.rounds} rounds, {replay.disturbed} more disturbed; change: of the whole step, from paired "
        "rounds, with a 90 % interval; own calls: of that, the swapped calls in their place; cold, warm: the "
        "same calls isolated"
    )
    return "\n".join(lines)


def _timed(timed: Timed | None, sign: str = "") -> str:
    if timed is None:
        return ""
    interval = f" ({timed.low:{sign}.4g}..{timed.high:{sign}.4g})" if timed.low is not None else ""
    return f"{timed.ms:{sign}.4g}{interval}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:+.4g}"


def _alike(difference: Mapping[str, float]) -> str:
    return f"outputs {max(difference.values()):.1e} apart" if difference else ""
