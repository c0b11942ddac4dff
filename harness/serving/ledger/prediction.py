"""Predictions: what a change of kernels is worth, with where each part of the number came from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from harness.serving.schema import StrictRecord

Origin = Literal["measured", "trace", "table", "regression", "calibration", "assumed"]
Method = Literal["link", "isolated-warm", "isolated-cold", "serving-mode", "replay", "bound"]
QuantityName = Literal[
    "tpot", "itl", "ttft", "e2e", "output_throughput", "decode_step", "prefill", "duration"
]
Unit = Literal["ms", "s", "tok/s", "1"]
"""`s` of a client's whole run (`duration`); `1` of a quantity whose value before is taken as 1."""


def unit_text(unit: str) -> str:
    """What a reader calls a unit."""
    return "x before" if unit == "1" else unit


class KernelChange(StrictRecord):
    """One op made faster or slower.

    op:        a name of harness/serving/op_classes.py
    part:      `qkv_a`, `n=2112 k=7168`; empty: all calls of the op
    factor:    time before / time after, above 1 is faster; or saved_us: time saved of each call
    low, high: 90 % interval of the factor or the saving; equal to it where nobody gave one
    calls:     calls a step; None: as the model has them
    phase:     of which steps
    source:    where the factor comes from: a run, a pull request
    """

    op: str
    part: str = ""
    factor: float | None = Field(default=None, gt=0)
    saved_us: float | None = None
    low: float | None = None
    high: float | None = None
    calls: int | None = None
    phase: Literal["decode", "prefill", "both"] = "both"
    source: str = ""


class Part(StrictRecord):
    """One term of a prediction, or one source of its uncertainty: what it adds to the change, in the
    prediction's unit, with a 90 % interval."""

    what: str
    origin: Origin
    value: float
    low: float
    high: float


class Prediction(StrictRecord):
    """A predicted change of a quantity.

    of:            one change, where the prediction is not of all that its row changed
    low, high:     90 % interval of `change`; a bound has one of them None
    before, after: None where only the difference or a bound is known
    parts:         sum to `change`
    uncertainty:   the interval of `change` by each source alone
    """

    quantity: QuantityName
    unit: Unit
    method: Method
    of: str = ""
    change: float | None = None
    low: float | None = None
    high: float | None = None
    before: float | None = None
    after: float | None = None
    confidence: float = 0.9
    parts: tuple[Part, ...] = ()
    uncertainty: tuple[Part, ...] = ()
    assumptions: tuple[str, ...] = ()
