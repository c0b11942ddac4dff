"""`python -m harness serving ...`: its commands, and the modules that have them."""

from __future__ import annotations

import click

from harness.cli import LazyGroup

RESULTS = ("compare", "ledger", "load", "observe", "trace")
MODULES = {
    **{name: f"{__name__}.results:{name}" for name in RESULTS},
    "ab": f"{__name__}.ab:ab",
    "predict": f"{__name__}.predict:predict",
    "replay": f"{__name__}.replay:replay_command",
    "validate": f"{__name__}.predict:validate",
    "what-if": f"{__name__}.predict:what_if",
}
"""Name of a command -> `module:attribute`."""


@click.group(cls=LazyGroup, modules=MODULES)
def serving() -> None:
    """Check, compare and predict results of serving engines.

    \b
    Are these results sound?                     load FILE...
    Are these two alike, and which is faster?    compare A B
    What would a faster kernel be worth?         what-if mla_decode=2x
    How far off are predictions of servers?      validate
    Did a flag or a kernel change my server?     ab PLAN.toml
    Where does a step's time go?                 trace FILE, replay --swap ...
    How did predictions of changes come out?     ledger, observe LEDGER ROW
    """
