"""Record of a replay, as it is stored and printed."""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, ConfigDict, Field
from tabulate import tabulate

from harness.serving.replay.step import OP_CLASS
from harness.serving.schema import StrictRecord

CONFIDENCE = 0.9


class Timed(StrictRecord):
    """Milliseconds of a step or a difference of two, with a 90 % interval over blocks."""

    ms: float
    low: float | None = None
    high: float | None = None

    def text(self, form: str = "") -> str:
        interval = "" if self.low is None else f" ({self.low:{form}.4g}..{self.high:{form}.4g})"
        return f"{self.ms:{form}.4g}{interval}"


class ReplayArm(StrictRecord):
    """One choice of implementations. Of older records, calls that were waited for are left out: on a GPU they
    say nothing of the step.

    chosen:  `op` or `op:place` -> implementation
    change:  step - the base's step, from paired rounds; None for the base
    whole:   `change` for the model's full number of layers, where fewer were replayed
    alone:   what the swapped calls change without the rest of the step; `cold` in older records
    places_alone: milliseconds of all layers' calls of a place in turn, without the rest of the step and
             launched as it is; of the base all places', of an arm the swapped ones'
    difference: of the swapped outputs from the base's, relative, at the first layer
    """

    model_config = ConfigDict(extra="ignore")

    chosen: dict[str, str]
    step: Timed | None = None
    change: Timed | None = None
    whole: Timed | None = None
    alone: float | None = Field(default=None, validation_alias=AliasChoices("alone", "cold"))
    places_alone: dict[str, float] = Field(default_factory=dict)
    difference: dict[str, float] = Field(default_factory=dict)
    failed: str = ""

    def classes_alone(self) -> dict[str, float]:
        """Milliseconds of the places by op class, the longest first."""
        classes: dict[str, float] = {}
        for place, ms in self.places_alone.items():
            classes[OP_CLASS[place]] = classes.get(OP_CLASS[place], 0.0) + ms
        return dict(sorted(classes.items(), key=lambda item: -item[1]))

    def verdict(self) -> str:
        """What the change says, and how far the outputs are from the base's."""
        if self.failed or self.change is None:
            return self.failed
        low, high = self.change.low or 0.0, self.change.high or 0.0
        word = "faster" if high < 0 else "slower" if low > 0 else "no change seen"
        other = {"faster": "slower", "slower": "faster"}.get(word, "")
        if other and (self.alone or 0.0) * self.change.ms < 0:
            word = f"{other} alone, {word} in the step"
        return f"{word}; outputs {max(self.difference.values(), default=0.0):.1e} apart"


class Replay(StrictRecord):
    """twin: the base against itself: the change that is none; samples: block, round, arm -> seconds"""

    model_config = ConfigDict(extra="ignore")

    created: str
    command: tuple[str, ...]
    step: dict[str, Any]
    launch: str
    threads: int
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

    def table(self) -> str:
        """The step, what each arm changes in it and would change alone, and where the base's time goes."""
        step, base = self.step, self.arms[self.base]
        rows = [
            [name, *(timed.text(form) if timed else "" for timed, form in
                     ((arm.step, ""), (arm.change, "+"), (arm.whole, "+"))),
             "" if arm.alone is None else f"{arm.alone:+.4g}", arm.verdict()]
            for name, arm in self.arms.items()
        ]  # fmt: skip
        columns = ["arm", "step ms", "change", "whole model", "alone", ""]
        classes = base.classes_alone()
        total = sum(classes.values())
        shares = ", ".join(f"{name} {ms:.3g} ({ms / total:.0%})" for name, ms in classes.items())
        lines = [
            f"decode step of {step['model']}, tp={step['parallel']['tp']}: batch {step['batch']}, "
            f"ctx {step['ctx']}, {step['dense']} dense and {step['moe']} MoE layers, page {step['page']}, "
            f"kv {step['kv']}, routing {step['routing']}, {self.launch}, {self.threads} threads",
            "base: " + ", ".join(f"{op}={name}" for op, name in base.chosen.items()),
            tabulate(rows, columns, disable_numparse=True),
            f"the base against itself: {self.twin.text('+')} ms" if self.twin else "",
            f"the base's calls alone, {total:.4g} ms: {shares}" if classes else "",
            f"left out: {', '.join(self.left_out)}",
            *(f"note: {text}" for text in self.notes),
            f"{self.rounds} rounds, {self.disturbed} more disturbed; change: of the step, by paired rounds, "
            "with a 90 % interval; alone: all layers' swapped calls without the rest of the step",
        ]
        return "\n".join(filter(None, lines))
