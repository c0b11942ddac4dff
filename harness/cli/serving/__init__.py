"""`python -m harness serving ...`: its commands, and the modules that have them."""

from __future__ import annotations

import click

from harness.cli import LazyGroup

MODULES = {
    name: f"{__name__}.{name}:{name}" for name in ("ab", "compare", "ledger", "load", "predict", "trace")
}
MODULES |= {
    "observe": f"{__name__}.ledger:observe",
    "replay": f"{__name__}.replay:replay_command",
    "validate": f"{__name__}.predict:validate",
    "what-if": f"{__name__}.predict:what_if",
}


@click.group(cls=LazyGroup, modules=MODULES)
def serving() -> None:
    """Serving: are results sound, which of two is faster, what would a faster kernel be worth.

    \b
    Are these results sound?
      python -m harness serving load FILE...        any client's results, each held to its own numbers
    Are these two alike, and which is faster?
      python -m harness serving compare A B         their ratio and what differs, or why they are not alike
    What would a faster kernel be worth?
      python -m harness serving predict             TPOT, TTFT and throughput from the times of kernels
      python -m harness serving what-if mla_decode=2x
      python -m harness serving validate            how far predictions were off on public servers
    Did a flag or a kernel change my server?
      python -m harness serving ab PLAN.toml        servers in mirrored pairs, the effect with its interval
    And beside these:
      python -m harness serving trace FILE          where a step's time goes in a profiler's trace
      python -m harness serving replay --swap ...   one decode step of a rank, with an op swapped
      python -m harness serving ledger              what was predicted, beside what was observed
      python -m harness serving observe LEDGER ROW  runs before and after a change, into a ledger
    """
