"""Record of a replay, as it is stored and printed."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from harness.serving.schema import StrictRecord

CONFIDENCE = 0.9


class Timed(StrictRecord):
    """Milliseconds of a step or a difference of two, with a 90 % interval over blocks."""

    ms: float
    low: float | None = None
    high: float | None = None


class ReplayArm(StrictRecord):
    """One choice of implementations.

    chosen:  `op` or `op:place` -> implementation
    step:    the replayed step
    change:  step - the base's step, from paired rounds; None for the base
    own:     of that, what the swapped calls themselves take more or less, each timed in its place
    warm, cold: what isolated calls would predict: the swapped calls' times alone, on one layer's operands
             again and again, and over all layers' in turn
    whole:   `change` for the model's full number of layers, where fewer were replayed
    places:  milliseconds of each place of the step, over all its layers, each call waited for
    difference: of the swapped outputs from the base's, relative, at the first layer
    """

    chosen: dict[str, str]
    step: Timed | None = None
    change: Timed | None = None
    whole: Timed | None = None
    own: float | None = None
    warm: float | None = None
    cold: float | None = None
    places: dict[str, float] = Field(default_factory=dict)
    classes: dict[str, float] = Field(default_factory=dict)
    difference: dict[str, float] = Field(default_factory=dict)
    failed: str = ""


class Replay(StrictRecord):
    """environment: what its process had set besides, as the engine has it; None: not set
    twin:    the base against itself, prepared apart: the change that is none
    samples: block, round, arm -> seconds
    """

    created: str
    command: tuple[str, ...]
    step: dict[str, Any]
    launch: str
    threads: int
    environment: dict[str, str | None] = Field(default_factory=dict)
    base: str
    arms: dict[str, ReplayArm]
    twin: Timed | None = None
    rounds: int = 0
    disturbed: int = 0
    stopped: str = ""
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    samples: tuple[dict[str, Any], ...] = ()
    provenance: dict[str, Any] = Field(default_factory=dict)
