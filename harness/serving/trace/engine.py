"""The engine that a trace is of: by the operators that it adds to torch, else by its annotations of steps."""

from __future__ import annotations

import numpy as np

from harness.serving.trace.classify import engine_namespaces, step_rule, step_rules
from harness.serving.trace.columns import RecordedTrace


def engine_of(recorded: RecordedTrace) -> str:
    """Its name; empty where nothing tells."""
    names = recorded.names.all()
    namespaces = {names[i].partition("::")[0] for i in np.unique(recorded.ops.name).tolist()}
    by_operator = [engine for engine, own in engine_namespaces().items() if own & namespaces]
    numbers = [step_rule(names[i]) for i in np.unique(recorded.spans.name).tolist()]
    by_step = [step_rules()[number].engine for number in numbers if number is not None]
    return next(filter(None, [*by_operator, *by_step]), "")
