"""A decision as text, as a shell snippet and as JSON."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

import kernels
from harness.decide.choices import launch_text, rows_of, words_of
from harness.decide.decision import LEAST, NO_ROW, Compared, Crossover, Decision
from harness.decide.mix import Weighed
from harness.decide.worth import Worth
from harness.engine import as_given
from harness.paths import command
from harness.report.fitting_table import table_of
from harness.report.notes import noted
from harness.report.terminal import COMMAND, whole_line
from harness.report.text import counted, grouped, ratio_text
from harness.serving.link.report import worth as sentence
from kernels import engines
from kernels.engines import SPELLED
from kernels.engines.deploy import TABLES, known_settings
from shapes.names import near

SERVERS = {"vllm": "vllm serve MODEL", "sglang": "python -m sglang.launch_server --model-path MODEL"}
SHOWN_CROSSOVERS = 8
ENOUGH = 0.95
"""The share of the ops' time with measured cases, from which no more are asked for."""
MOST_CASES = 12
"""Cases of one command, those first that take most of the time."""


def answer(decision: Decision, worth: Worth | None) -> str:
    """The decision in a few sentences."""
    mix, gain = decision.mix, decision.gain
    if gain is None:
        text = _left(decision)
    else:
        ends = gain.share_interval
        within = f" ({ends[0]:.1%} to {ends[1]:.1%})" if ends else ""
        of = "the ops' time in a step" if mix.counts_calls else "the time of the measured cases"
        text = f"Use {launch_text(decision.chosen)}: it saves {gain.share:.1%}{within} of {of}."
        text += _in_serving(worth) if worth else ""
    told = mix.share_of([each.case for each in decision.cases])
    less = "" if told >= ENOUGH or not decision.cases else f" Only {told:.0%} of that time was measured."
    return text + less


def _left(decision: Decision) -> str:
    default = f"{SPELLED[decision.launches.engine]}'s default"
    tried = decision.compared
    if not tried and decision.cases and not decision.choices:
        return "Nothing to choose: no known flag and no measured variable swaps a row of these cases."
    if not tried:
        return f"Nothing could be compared with {default}."
    best, choices = tried[0], counted(len(tried), "choice")
    assert best.comparison
    launch, ratio = launch_text(best.settings), ratio_text(best.comparison)
    if best.is_clear and best.share < decision.margin:
        gain = f"{launch} makes {best.op} {ratio} faster, but saves {best.share:.1%} in all"
        return f"Leave it: {gain}, less than {decision.margin:.1%}."
    if best.is_clear:
        gain = f"{launch} is {ratio} in {best.op}"
        return f"Leave it: {gain}, but in other ops it loses, fails, or has no times: see below."
    if best.saved_us <= 0:
        return f"Leave it: none of {choices} is faster than {default}."
    tried_best = f"best of {choices} is {launch} with {ratio} in {best.op}"
    if not _open(decision):
        return f"Leave it: the {tried_best}, which cannot save {decision.margin:.1%}."
    return f"Not told from the default: leave it. The {tried_best}."


def _in_serving(worth: Worth) -> str:
    if not worth.token_ms:
        return f" That is {worth.step_ms:.3g} ms of a mean step."
    prompt = f", the prefill of a prompt by {worth.prompt_ms:.3g} ms" if worth.prompt_ms else ""
    return f" By these kernels' times alone TPOT falls by {worth.token_ms:.3g} ms{prompt}."


def decision_text(decision: Decision, worth: Worth | None) -> RenderableType:
    launches = decision.launches
    measured, mix = launches.measured, decision.mix
    release = f"{launches.engine} {engines.defaults(launches.engine)[0].version}"
    base = f", launched with {launch_text(launches.base)}" if launches.base else ""
    where = f"{release} on {measured.device} ({measured.arch}){base}; {mix.text}"
    parts: list[RenderableType] = [Text(answer(decision, worth), "bold"), where, ""]
    shown = decision.compared
    if decision.gain and len(decision.taken) > 1:
        shown = [decision.gain, *shown]
    if shown:
        parts += [table_of([_row(each) for each in shown]), ""]
    parts.append(noted([*notes(decision, worth)]))
    if commands := [*to_measure(decision)]:
        parts += ["", "measure what is missing:", *(whole_line(COMMAND + line) for line in commands)]
    if decision.chosen:
        parts += ["", "launch:", *(whole_line(line) for line in snippet(decision))]
    return Group(*parts)


def _row(of: Compared) -> dict[str, object]:
    assert of.comparison
    return {
        "choice": launch_text(of.settings), "op": of.op or "all", "verdict": of.verdict,
        "speedup": ratio_text(of.comparison), "saves of all": f"{of.share:.2%}", "rows": rows_of(of.pairs),
        "cases": len(of.pairs),
    }  # fmt: skip


def notes(decision: Decision, worth: Worth | None) -> Iterator[tuple[str, str]]:
    mix = decision.mix
    if decision.compared:
        yield "regret", _regret(decision)
    for crossover in decision.crossovers[:SHOWN_CROSSOVERS]:
        yield "crossover", crossover_text(crossover)
    if len(decision.crossovers) > SHOWN_CROSSOVERS:
        yield "crossover", f"{len(decision.crossovers) - SHOWN_CROSSOVERS} more: --json, --page"
    yield from _beyond(decision)
    yield from _also_changed(decision)
    if decision.likely != decision.chosen and _open(decision):
        text = "by the estimates alone the least time has"
        yield "not told", f"{text} {launch_text(decision.likely)}; more rounds would tell"
    for concurrency, predicted in worth.predicted.items() if worth else ():
        told = sentence([launch_text(decision.chosen)], predicted, concurrency)
        yield "predicted", f"{told}: `serving predict`, 90 %, by its own times of kernels, with these factors"
    if worth and worth.why_not:
        yield "predicted", f"nothing: {worth.why_not}"
    if mix.covered < 1:
        yield "covered", f"{mix.covered:.0%} of the four ops' time in a step has measured cases"
    for why, cases in grouped(decision.undecided, decision.undecided.__getitem__).items():
        ops = ", ".join(dict.fromkeys(case.partition(" ")[0] for case in cases))
        yield "not decided", f"{counted(len(cases))} of {ops}: {why}"
    yield from _not_measured(decision)
    for launch, why in decision.failing.items():
        if len(launch.split()) <= 2:  # combinations are told by their parts
            yield "fails", f"{launch}: {why}"
    if decision.choices:
        yield "verdicts", f"all hold together with 95 %; a launch has to save {decision.margin:.1%} of a step"
    yield from _compared_in(decision)
    yield from _unknown(decision)
    for note in decision.launches.measured.notes:
        yield "note", note


def _unknown(decision: Decision) -> Iterator[tuple[str, str]]:
    """What is set for the engine and decides nothing that is known."""
    launches = decision.launches
    known = known_settings(launches.engine, list(kernels.OPS), launches.measured.arch)
    varied = {
        name for sheets in launches.measured.sheets.values() for sheet in sheets for name in sheet.varied
    }
    for name in {*launches.base} - {*known} - varied:
        meant = "".join(f"; did you mean {as_given(each)}?" for each in near(name, known, 0.8)[:1])
        yield "note", f"{as_given(name)} decides nothing that is known of {launches.engine} here{meant}"


def _compared_in(decision: Decision) -> Iterator[tuple[str, str]]:
    """The boundaries and launch modes of the times, and whether the engine's rows are of the release that was
    read."""
    found = [pair for each in decision.cases if (pair := decision.launches.pair(each.case, {}))]
    ways = dict.fromkeys(f"{pair.sheet.case.boundary}, {pair.old.cell.launch}" for pair in found)
    if ways:
        yield "times", f"{' and '.join(ways)}: of the first boundary and launch mode that the default has"
    engine = decision.launches.engine
    read = engines.defaults(engine)[0].version
    cells = [pair.old.cell for pair in found if re.search(rf"(^|@){engine}\b", pair.old.cell.impl)]
    others = dict.fromkeys(cell.version for cell in cells if cell.version and read not in cell.version)
    if others:
        yield "note", f"what {engine} runs was read in {read}; its rows ran in {', '.join(others)}"


def _also_changed(decision: Decision) -> Iterator[tuple[str, str]]:
    """Rows that the launch swaps in cases that were not compared, and ops that no run has."""
    launches, decided = decision.launches, {each.case.key for each in decision.cases}
    cases = decision.mix.every
    others = [each for each in cases if each.key not in decided]
    for op, own in grouped(others, lambda case: case.op).items():
        rows = [[launches.row_name(case, each) or "no row" for each in ({}, decision.chosen)] for case in own]
        if told := ", ".join(dict.fromkeys(" -> ".join(pair) for pair in rows if pair[0] != pair[1])):
            yield "not compared", f"this launch also swaps rows of {op} in cases without times: {told}"
    for op in (op for op in kernels.OPS if op not in {case.op for case in cases}):
        if read := {*decision.chosen} & launches.known(op):
            text = f"this launch may also swap rows of {op}, of which there is no run"
            yield "not compared", f"{text}: {', '.join(sorted(read))}"


def _open(decision: Decision) -> bool:
    """Whether more rounds could tell that the launch with the least time by the estimates is to be taken."""
    made = decision.made_by(decision.likely)
    unclear = [each for each in made if not each.is_clear]
    of, least = (unclear, LEAST * decision.margin) if decision.chosen else (made, decision.margin)
    most = sum(each.share_interval[1] if each.share_interval else math.inf for each in of)
    return bool(unclear) and most >= least


def _not_measured(decision: Decision) -> Iterator[tuple[str, str]]:
    """Choices that could not be compared, by the reason."""
    reasons: dict[str, dict[str, None]] = {}
    for each in decision.choices:
        for case, why in each.missing.items():
            reasons.setdefault(f"{case.partition(' ')[0]}: {why}", {})[launch_text(each.settings)] = None
    for why, launches in reasons.items():
        yield "no row" if NO_ROW in why else "not measured", f"{', '.join(launches)}: {why}"


def _regret(decision: Decision) -> str:
    text = f"{decision.regret:.2%} more than the fastest row of each case that a flag can choose"
    if switch := [each for each in decision.cases if each.clear]:
        rows = ", ".join(dict.fromkeys(each.best.new.cell.impl for each in switch))
        text += f"; {counted(len(switch))} of {len(decision.cases)} would gain by another launch: {rows}"
    return f"this launch takes {text}"


def _beyond(decision: Decision) -> Iterator[tuple[str, str]]:
    """Rows that no flag chooses."""
    found = [each for each in decision.cases if each.beyond]
    for op, cases in grouped(found, lambda each: each.case.op).items():
        best = max(cases, key=lambda each: each.best.new_us / each.beyond_us)
        assert best.beyond
        ratio = f"{best.best.new_us / best.beyond_us:.2f}x as fast at {best.case.key[1]}"
        engine = decision.launches.engine
        yield "no flag", f"{op}: {best.beyond.cell.impl} is {ratio}; {engine} is not known to run it"


def crossover_text(of: Crossover) -> str:
    where = f"between {of.size}={of.below} and {of.above}"
    if of.at is not None:
        where = f"at about {of.size}={of.at:.0f} ({where})"
    sure = "" if of.told else ", not told apart there"
    return f"{of.op} {of.fixed}: {of.faster_below}, then {of.faster_above}, {where}{sure}"


def to_measure(decision: Decision) -> Iterator[str]:
    """Commands that would measure what the decision lacks: the engine's default beside its choices, in the
    same rounds; variables that a run of `toggle` measured in other cases by `toggle`. None for a row that had
    no time in the case."""
    launches, mix = decision.launches, decision.mix
    without = [({}, decision.undecided), *((each.settings, each.missing) for each in decision.choices)]

    def failed(case: Weighed) -> set[str]:
        return {name for sheet in launches.sheets(case) for name in sheet.untimed}

    cases = [
        case
        for case in mix.cases
        if any(
            case.text in missing and launches.row_name(case, settings) not in {"", *failed(case)}
            for settings, missing in without
        )
    ]
    measured = {op for op, _ in launches.measured.sheets}
    others = [each for each in mix.uncovered if each.op not in measured or mix.covered < ENOUGH]
    for op, own in grouped([*cases, *others], lambda case: case.op).items():
        rows: dict[str, None] = {}
        for case in own:
            names = [launches.row_name(case, each) for each in ({}, *launches.candidates)]
            unable = {"", *failed(case)}
            if names[0] not in unable:
                rows |= dict.fromkeys(name for name in names if name not in unable)
        if not rows:
            continue
        which = mix.words if op not in measured else _which(decision, own)
        lacks = (each for each in decision.choices if each.op == op and each.missing)
        varied = [each.settings for each in lacks if each.settings in launches.measured.varied]
        flags = [("--flag", f"{name}={value}") for each in varied for name, value in each.items()]
        words = *chain.from_iterable(flags), "--op", op, "--impl", ",".join(rows), *which
        yield command("toggle" if flags else "run", *words)


def _which(decision: Decision, cases: Sequence[Weighed]) -> list[str]:
    """The options by which `run` measures these cases: the suite or file that has them all, else each."""
    sheets = [decision.launches.sheets(case) for case in cases]
    suites = {each[0].suite if each else "" for each in sheets}
    if len(cases) > 1 and len(suites) == 1 and (name := suites.pop()) not in ("", "ad hoc"):
        return ["--cases" if name.endswith(".json") else "--suite", name]
    return [word for case in cases[:MOST_CASES] for word in ("--case", case.key[1])]


def snippet(decision: Decision) -> Iterator[str]:
    """Lines of a shell script that launches the server, with what supports each setting."""
    folders = decision.launches.measured.folders
    yield f"# decided from {', '.join(map(str, folders[:3]))}{' ...' if len(folders) > 3 else ''}"
    yield f"# for {decision.mix.text}"
    for each in decision.taken:
        assert each.comparison
        over = f"{ratio_text(each.comparison)} over {counted(len(each.pairs))}"
        yield f"# {each.op}: {rows_of(each.pairs)}, {over}{_source(decision, each)}"
    variables, flags = words_of({**decision.launches.base, **decision.chosen})
    flags = [*decision.mix.server, *flags]
    yield from (f"export {name}={shlex.quote(value)}" for name, value in variables.items())
    quoted = [" ".join(map(shlex.quote, flag.split(" ", 1))) for flag in flags]
    yield " ".join([SERVERS[decision.launches.engine], *quoted])
    variables, flags = words_of(decision.chosen)
    yield "# confirm it: `serving ab --template` lists plans; set the load, and this arm:"
    yield "# [arms.decided]"
    yield from (f"# env.{name} = {json.dumps(value)}" for name, value in variables.items())
    if flags:
        yield f"# flags = {json.dumps(' '.join(flags))}"


def _source(decision: Decision, choice: Compared) -> str:
    """Where the engine decides it, and what that code says."""
    entry = decision.launches.entry(choice.pairs[0].case, decision.chosen)
    swapped = choice.pairs[0].old.cell.impl != choice.pairs[0].new.cell.impl
    return f" ({entry.file.rpartition('/')[2]}:{entry.line}: {entry.why})" if entry and swapped else ""


def facts(decision: Decision, worth: Worth | None) -> dict[str, Any]:
    """The object of JSON."""
    launches, mix = decision.launches, decision.mix
    tables = {name: value for name, value in decision.chosen.items() if name in TABLES[launches.engine]}
    files = {name: value for name, value in tables.items() if "/" in value}
    return {
        "engine": launches.engine, "engine_version": engines.defaults(launches.engine)[0].version,
        "device": launches.measured.device, "arch": launches.measured.arch,
        "runs": [str(folder) for folder in launches.measured.folders], "mix": mix.text,
        "covered": round(mix.covered, 4), "with": dict(launches.base), "answer": answer(decision, worth),
        "leave_it": not decision.chosen if decision.compared else None,
        "variables": _part(decision.chosen, flags=False),
        "flags": _part(decision.chosen, flags=True), "files": files,
        "gain": _compared(decision.gain) if decision.gain else None, "margin": decision.margin,
        "regret": decision.regret, "choices": [_compared(each) for each in decision.choices],
        "taken": [_compared(each) for each in decision.taken],
        "crossovers": [asdict(each) for each in decision.crossovers],
        "cases": [
            {"op": each.case.op, "case": each.case.key[1], "decode_calls": each.case.decode,
             "prefill_calls": each.case.prefill, "row": each.chosen.new.cell.impl, "us": each.chosen.new_us,
             "best_row": each.best.new.cell.impl, "best_us": each.best.new_us, "best_is_faster": each.clear,
             "no_flag": each.beyond.cell.impl if each.beyond else None}
            for each in decision.cases
        ],
        "not_decided": dict(decision.undecided),
        "uncovered": [f"{case.text}: {case.share:.2%}" for case in mix.uncovered],
        "worth": _worth(worth) if worth else None, "measure": [*to_measure(decision)],
        "snippet": [*snippet(decision)] if decision.chosen else [],
    }  # fmt: skip


def _part(settings: Mapping[str, str], flags: bool) -> dict[str, str]:
    return {name: value for name, value in settings.items() if name.islower() == flags}


def _compared(of: Compared) -> dict[str, Any]:
    found = of.comparison
    return {
        "variables": _part(of.settings, flags=False), "flags": _part(of.settings, flags=True),
        "op": of.op or None, "verdict": of.verdict if of.is_complete else None,
        **{name: _finite(getattr(found, name, None)) for name in ("ratio", "low", "high")},
        "noise": _finite(of.noise), "confidence": of.confidence, "share": of.share, "saved_us": of.saved_us,
        "rows": sorted({pair.new.cell.impl for pair in of.pairs}),
        "cases": [f"{pair.case.op} {pair.case.key[1]}" for pair in of.pairs],
        "runs": sorted({str(pair.sheet.folder) for pair in of.pairs}), "not_measured": dict(of.missing),
    }  # fmt: skip


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None


def _worth(worth: Worth) -> dict[str, Any]:
    predicted = [
        {"concurrency": concurrency, "changes": [each.model_dump() for each in changes]}
        for concurrency, changes in worth.predicted.items()
    ]
    return vars(worth) | {"changes": [each.model_dump() for each in worth.changes], "predicted": predicted}
