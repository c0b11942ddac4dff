"""What took the machine while a run measured, and what would help, in a line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from harness.results.schema import CaseDone

# By a word of a monitor's reason.
HELP = {
    "hypervisor": "use a host without other guests",
    "quota": "raise the CPU quota or give fewer --threads",
    "heat": "let it cool",
    "MHz": "fix its clock",
    "process": "stop what runs beside",
}
NAMED = 2


def disturbance(cases: Iterable[CaseDone]) -> str:
    """Of cases in which disturbed rounds count; empty if there are none."""
    disturbed = [case for case in cases if any(r.counted for r in case.disturbed)]
    if not disturbed:
        return ""
    reasons = [r.reason for case in disturbed for r in case.disturbed if r.counted]
    rounds = sum(case.rounds + case.eliminations for case in disturbed)
    # Alike but for their figures.
    kind, _ = Counter(re.sub(r"\d+(\.\d+)?", "#", reason) for reason in reasons).most_common(1)[0]
    typical = sorted(reason for reason in reasons if re.sub(r"\d+(\.\d+)?", "#", reason) == kind)
    what = typical[len(typical) // 2]
    help = [*(advice for word, advice in HELP.items() if word in kind), "give a longer --budget"]
    return (
        f"not quiet: {len(reasons)} of {rounds} rounds count though something else used the machine, or "
        f"slowed it ({what}{_who(disturbed)}). For narrower intervals, {', or '.join(help)}"
    )


def _who(cases: Iterable[CaseDone]) -> str:
    """The processes that took most, by name and number."""
    took: dict[str, float] = {}
    for case in cases:
        for conditions in case.conditions:
            for process, percent in conditions.get("processes", {}).items():
                took[process] = max(percent, took.get(process, 0.0))
    names = sorted(took, key=took.__getitem__, reverse=True)[:NAMED]
    return "".join(f", {'most of it ' * (i == 0)}{name}" for i, name in enumerate(names))
