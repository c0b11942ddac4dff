"""What `tune` stores: the choice of a raced case. Choices for the suite's kernels go into files that
`kernels/tuning.py` reads, those for an engine's kernel into the engine's own tables."""

from __future__ import annotations

import inspect
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kernels
from harness import files
from harness.errors import UsageError
from harness.results.schema import CaseDone, Cell, Record, Run, Verdict
from harness.workers.child.profile import jit_source
from kernels.op import Implementation
from kernels.tuning import Target, Tunable
from shapes.case import Case

Facts = Mapping[str, Any]

ABOUT = "What `python -m harness tune` measured."
OPPOSITE = {"faster": "slower", "slower": "faster"}  # if the two sides are exchanged; other verdicts stay


def choice(case: Case, records: Sequence[Record], implementation: Tunable, run: Run) -> dict[str, Any] | None:
    """What is stored for a finished case; None where there is no verdict whose noise is known.

    It is the challenger if the verdict calls it faster than the baseline, else the baseline. `config` is the
    choice, and `against` the other of the two. `verdict`, `ratio`, `low` and `high` are of `config` against
    it: a ratio is the time of `against` over that of `config`.
    """
    cells = {r.name: r for r in records if isinstance(r, Cell)}
    done = next(r for r in records if isinstance(r, CaseDone))
    of_baseline = [v for v in records if isinstance(v, Verdict) and v.about == "baseline"]
    verdicts = [v for v in of_baseline if v.ratio is not None and v.noise is not None]
    search = done.search
    if not verdicts or search is None:
        return None
    # A verdict compares a challenger, `a`, with the baseline, `b`.
    best = max(verdicts, key=lambda v: (v.verdict == "faster", v.low or 0.0))
    verdict, ratio, low, high = str(best.verdict), best.ratio, best.low, best.high
    if verdict == "faster":
        chosen, other = cells[best.a], cells[best.b]
    else:
        chosen, other = cells[best.b], cells[best.a]
        verdict = OPPOSITE.get(verdict, verdict)
        ratio, low, high = _inverse(ratio), _inverse(high), _inverse(low)
    return {
        "case": case.text,
        "features": implementation.features(kernels.OPS[case.op].sizes(case.sizes)),
        "config": chosen.config or search.baseline,
        "time_us": _short(chosen.time_us),
        "verdict": verdict,
        "ratio": _short(ratio),
        "low": _short(low),
        "high": _short(high),
        "confidence": best.confidence,
        "against": other.config or search.baseline,
        "before": search.origin,
        "considered": search.considered,
        "pruned": search.pruned,
        "raced": search.raced,
        "failed": dict(Counter(c.status for c in cells.values() if c.status != "ok")),
        "conditions": _conditions(done),
        "launch": chosen.launch,
        "cache": chosen.cache,
        "run": run.id,
        "created": run.created,
        **_made_with(run),
    }


def provenance(implementation: Implementation, run: Run) -> dict[str, Any]:
    """What a file of choices says of the machine and code that it was last written with. Each choice also
    keeps the versions with which it was made itself."""
    return {
        "device": run.provenance["machine"]["device"],
        **_made_with(run),
        "source": jit_source(Path(inspect.getfile(type(implementation)))),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _made_with(run: Run) -> dict[str, str]:
    """The suite's commit, the driver and the libraries of a run."""
    versions = run.provenance["versions"]
    return {
        "commit": run.provenance["git"]["commit"],
        "driver": run.provenance["machine"]["driver"],
        **{name: versions.get(name, "") for name in ("torch", "triton")},
    }


def _conditions(done: CaseDone) -> dict[str, float]:
    """The median of each quantity that the device's monitor read."""
    values: dict[str, list[float]] = {}
    for conditions in done.conditions:
        for quantity, readings in conditions.items():
            if isinstance(readings, Mapping) and "median" in readings:
                values.setdefault(quantity, []).append(readings["median"])
    return {quantity: statistics.median(medians) for quantity, medians in values.items()}


def _inverse(ratio: float | None) -> float | None:
    return 1 / ratio if ratio else None


def _short(value: float | None) -> float | None:
    """Five significant digits."""
    return None if value is None else float(f"{value:.5g}")


def folder_name(target: Target) -> str:
    """The name of a target's folder: `NVIDIA_H200` for a device, else `gfx942`."""
    return re.sub(r"[^\w.-]+", "_", target.device or target.arch).strip("_")


def path(folder: Path, implementation: str, target: Target) -> Path:
    return folder / folder_name(target) / f"{implementation}.json"


def store(file: Path, target: Target, choice: Facts, provenance: Facts, unless_newer: bool = False) -> None:
    """Writes a choice that was measured on a target to a file (see `path`), which is replaced at once or not
    at all. The choice replaces the one of the same case; choices of other cases stay. Raises UsageError where
    the folder cannot be written or the present file cannot be read.

    choice:     see the function `choice`
    provenance: of this choice, see the function `provenance`
    unless_newer: whether a choice of the same case stays if its run began later
    """
    by_case = {stored["case"]: stored for stored in read(file)["choices"]}
    stored = by_case.get(choice["case"])
    if unless_newer and stored and stored["created"] > choice["created"]:
        return
    by_case[choice["case"]] = {**choice, "source": provenance["source"]}
    content = {
        "kind": target.kind,
        "arch": target.arch,
        "device": target.device,
        "measured": True,
        "about": ABOUT,
        "provenance": dict(provenance),
        "choices": [by_case[case] for case in sorted(by_case)],
    }
    with files.explained(f"cannot write {file}", "; give another folder by --out"):
        files.replace(file, _text(content))


def read(file: Path) -> dict[str, Any]:
    """The content of a file of choices, which may be absent. Raises UsageError where it cannot be read."""
    try:
        return {"choices": []} | json.loads(file.read_bytes())
    except FileNotFoundError:
        return {"choices": []}
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{file} cannot be read ({error}): remove it, or give another --out") from None


def _text(content: Facts) -> str:
    """JSON with one line for each entry of a list, so that diffs are readable."""

    def text_of_value(value: Any) -> str:
        if not isinstance(value, list) or not value:
            return json.dumps(value)
        return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"

    members = [f" {json.dumps(name)}: {text_of_value(value)}" for name, value in content.items()]
    return "{\n" + ",\n".join(members) + "\n}\n"


def store_winner(folder: Path, tables: Mapping[str, Mapping[str, Facts]], m: int, config: Facts) -> Path:
    """Writes a winner into the engine's table files, under the names that the engine looks for, and returns
    the path of the first. Raises UsageError where a file cannot be read or written.

    The engines take the entry of the nearest M, so a file with this M alone would serve all other M too.
    Therefore each file also gets what the engine takes at the other M at present, unless the file has them:
    `tables`, by file and M (EngineTable.files). A winner serves calls up to half-way to its neighbours in M.
    """

    def number(key: str) -> int:
        return int(key) if key.isdigit() else -1  # a key that is no M comes first

    for name, used_by_engine in tables.items():
        file = folder / name
        try:
            in_file = json.loads(file.read_bytes()) if file.exists() else {}
            merged = {**used_by_engine, **in_file, str(m): dict(config)}
            ordered = {key: merged[key] for key in sorted(merged, key=number)}
            files.replace(file, json.dumps(ordered, indent=4) + "\n")
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"cannot merge a winner into {file}: {error}; give another --out") from None
    return folder / next(iter(tables))
