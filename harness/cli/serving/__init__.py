"""`python -m harness serving ...`: one module a command."""

from __future__ import annotations

import click

from harness.cli.lazy import LazyGroup

COMMANDS = ("compare", "ledger", "load", "observe", "predict", "recipe", "trace", "validate")
MODULES = {name: f"{__name__}.{name}:{name}" for name in COMMANDS}
MODULES |= {name: f"{__name__}.{name}:{name}_command" for name in ("replay",)}
MODULES["what-if"] = f"{__name__}.what_if:what_if"


@click.group(cls=LazyGroup, modules=MODULES)
def serving() -> None:
    """What a kernel is worth in a serving run: results, traces, the model and the ledger.

    \b
    python -m harness serving load FILE...       any client's results, in one schema, with what does not hold
    python -m harness serving compare A B        two results, if they are alike
    python -m harness serving recipe [NAME]      the published set-ups, ready to run on your own machine
    python -m harness serving trace FILE         where a step's time goes, and what of it is exposed
    python -m harness serving predict            TPOT, TTFT, throughput from the times of kernels
    python -m harness serving what-if OP=2.0x    what a faster kernel would be worth
    python -m harness serving validate           errors of these predictions for public servers
    python -m harness serving replay --swap mla_decode=vllm.amx
    python -m harness serving ledger             predicted, observed, residual
    """
