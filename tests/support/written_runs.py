"""Run folders written by hand: what a page, or another reader of records, is tried on."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.results.schema import CaseDone, Cell, DisturbedRound, PlannedCase, Record, Run, Samples, Verdict
from shapes.case import Case, Size

MACHINE = {"platform": "cpu", "arch": "x86-avx512", "device": "A machine", "threads": 2, "driver": ""}


def a_cell(**facts: Any) -> Cell:
    """Of made-up facts beside those given."""
    told = {
        "op": "mla_decode", "case": "mla_decode batch=1 ctx=64 core", "boundary": "core",
        "impl": "torch.sdpa", "platform": "cpu", "arch": "x86", "setting": "plain", "launch": "eager",
        "cache": "warm", "status": "ok",
    }  # fmt: skip
    return Cell(**told | facts)


def case(batch: int = 4, boundary: str = "core", op: str = "mla_decode", **sizes: Size) -> Case:
    return Case(op, {"batch": batch, "ctx": 100, **sizes}, boundary, "ad hoc", 0.5)


def cell(of: Case, impl: str, us: float | None, half: float = 0.0, **facts: Any) -> Cell:
    """With six blocks of two rounds around the time."""
    common = {
        "op": of.op, "case": of.key, "boundary": of.boundary, "platform": "cpu", "arch": "x86-avx512",
        "setting": "plain", "launch": "eager", "cache": "serving", "weight": of.weight, "place": of.place,
    }  # fmt: skip
    if us is None:
        return Cell(impl=impl, **{"status": "unsupported", "reason": "needs cuda", **common, **facts})
    places = [(block, number) for block in range(6) for number in range(2)]
    samples = Samples(
        block=[block for block, _ in places],
        round=[number for _, number in places],
        seconds=[(us + half * (2 * number - 1)) / 1e6 for _, number in places],
    )
    rates = {"tflops": 10 / us, "gbps": 1000 / us, "percent_of_ceiling": 1000 / us}
    times = {"time_us": us, "low_us": us - half, "high_us": us + half, "samples": samples}
    return Cell(impl=impl, **{"status": "ok", **common, **times, **rates, **facts})


def verdict(a: Cell, b: Cell, word: str, about: str = "baseline", half: float = 0.02) -> Verdict:
    assert a.time_us and b.time_us
    ratio = b.time_us / a.time_us
    rerun = {"samples": b.samples} if about == "A/A" else {}
    return Verdict(
        case=a.case, a=a.name, b=b.name, ratio=ratio, low=ratio - half, high=ratio + half, noise=0.01,
        verdict=word, confidence=0.99, about=about, **rerun,
    )  # fmt: skip


def ranked(of: Case, times: Mapping[str, float], word: str = "faster", **done: Any) -> list[Record]:
    """A finished case; the first is the baseline, the fastest is called `word` against it and the second."""
    cells = [cell(of, impl, us, us / 100) for impl, us in times.items()]
    baseline, *others = cells
    order = sorted(cells, key=lambda c: c.time_us or 0)
    verdicts = [verdict(c, baseline, word if c is order[0] else "unclear") for c in others]
    verdicts.append(verdict(order[0], order[1], word, "runner-up"))
    verdicts.append(verdict(baseline, baseline, "same", "A/A"))
    return [*cells, *verdicts, finished(of, **done)]


def finished(of: Case, disturbed: Sequence[DisturbedRound] = (), **facts: Any) -> CaseDone:
    return CaseDone(
        **{"case": of.key, "measured_s": 1.0, "setup_s": 1.0, "rounds": 12, "blocks": 6, "stopped": "clear",
           "disturbed": list(disturbed), **facts},
    )  # fmt: skip


def planned(of: Case) -> PlannedCase:
    return PlannedCase(
        op=of.op, sizes=dict(of.sizes), boundary=of.boundary, place=of.place, weight=of.weight, key=of.key
    )


def a_run(cases: Sequence[PlannedCase] = (), **facts: Any) -> Run:
    """Of these cases, with made-up facts beside those given."""
    provenance = {"machine": MACHINE, "versions": {"torch": "2"}, "git": {"commit": "abc", "dirty": False}}
    asked = {
        "id": "a run", "created": "2026-11-24T00:00:00Z", "command": ["run"], "op": "mla_decode",
        "suite": "ad hoc", "cases": list(cases), "implementations": [], "baseline": "torch.sdpa",
        "settings": {"plain": {}}, "launches": ["eager"], "cache": "serving", "budget_s": 60.0,
        "per_case_s": 10.0, "seed": 0, "confidence": 0.95, "ceilings": {}, "provenance": provenance,
    }  # fmt: skip
    return Run(**asked | facts)


def write(folder: Path, records: Sequence[Record], cases: Sequence[Case], **facts: Any) -> Path:
    """A run folder that every reader takes."""
    told = {"id": folder.name, "op": cases[0].op, "command": ["run", "--op", cases[0].op]}
    ceilings = {"rates": {"bf16": 1e12}, "read": 1e10, "measured": "now"}
    run = a_run([planned(of) for of in cases], **{**told, "ceilings": ceilings, **facts})
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(run.model_dump_json())
    (folder / "cells.jsonl").write_text("".join(r.model_dump_json() + "\n" for r in records))
    return folder


def altered(folder: Path, **facts: Any) -> Path:
    """Its run.json with other values."""
    file = folder / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))
    return folder
