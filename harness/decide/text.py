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
from harness.decide.choices import Launches, launch_text, rows_of, words_of
from harness.decide.decision import LEAST, NO_ROW, BestCase, Choice, Crossover, Decision
from harness.decide.mix import WeighedCase
from harness.decide.worth import Worth
from harness.engine import as_given
from harness.files import finite
from harness.paths import command
from harness.report.fitting_table import table_of
from harness.report.notes import printed_notes
from harness.report.terminal import COMMAND, whole_line
from harness.report.text import counted, grouped, ratio_text
from harness.serving.link.predictions import worth as worth_text
from kernels import engines
from kernels.engines import SPELLED
from kernels.engines.deploy import TABLES, known_settings
from shapes.names import near

SERVERS = {"vllm": "vllm serve MODEL", "sglang": "python -m sglang.launch_server --model-path MODEL"}
SHOWN_CROSSOVERS = 8  # the most that the text shows
ENOUGH = 0.95  # the share of the ops' time with measured cases from which no more are asked for
MOST_CASES = 12  # the most cases that one command names


def answer(decision: Decision, worth: Worth | None) -> str:
    """The decision in a sentence or two."""
    mix, gain = decision.mix, decision.gain
    if gain is None:
        text = _why_default(decision)
    else:
        ends = gain.share_interval
        interval = f" ({ends[0]:.1%} to {ends[1]:.1%})" if ends else ""
        whole = "the ops' time in a step" if mix.counts_calls else "the time of the measured cases"
        text = f"Use {launch_text(decision.chosen)}: it saves {gain.share:.1%}{interval} of {whole}."
        if worth:
            text += _in_serving(worth)
    measured = mix.share_of([best.case for best in decision.cases])
    if decision.cases and measured < ENOUGH:
        text += f" Only {measured:.0%} of that time was measured."
    return text


def _why_default(decision: Decision) -> str:
    default = f"{SPELLED[decision.launches.engine]}'s default"
    compared = decision.compared
    if not compared and decision.cases and not decision.choices:
        return "Nothing to choose: no known flag and no measured variable swaps a row of these cases."
    if not compared:
        return f"Nothing could be compared with {default}."
    best = compared[0]
    assert best.comparison
    launch, ratio = launch_text(best.settings), ratio_text(best.comparison)
    if best.is_clear and best.share < decision.margin:
        gain = f"{launch} makes {best.op} {ratio} faster, but saves {best.share:.1%} in all"
        return f"Leave it: {gain}, less than {decision.margin:.1%}."
    if best.is_clear:
        gain = f"{launch} is {ratio} in {best.op}"
        return f"Leave it: {gain}, but in other ops it loses, fails, or has no times: see below."
    if best.saved_us <= 0:
        return f"Leave it: none of {counted(len(compared), 'choice')} is faster than {default}."
    best_text = f"best of {counted(len(compared), 'choice')} is {launch} with {ratio} in {best.op}"
    if not _is_open(decision):
        return f"Leave it: the {best_text}, which cannot save {decision.margin:.1%}."
    return f"Not told from the default: leave it. The {best_text}."


def _in_serving(worth: Worth) -> str:
    if not worth.token_ms:
        return f" That is {worth.step_ms:.3g} ms of a mean step."
    prompt = f", the prefill of a prompt by {worth.prompt_ms:.3g} ms" if worth.prompt_ms else ""
    return f" By these kernels' times alone TPOT falls by {worth.token_ms:.3g} ms{prompt}."


def decision_text(decision: Decision, worth: Worth | None) -> RenderableType:
    launches = decision.launches
    measured = launches.measured
    release = f"{launches.engine} {engines.defaults(launches.engine)[0].version}"
    base = f", launched with {launch_text(launches.base)}" if launches.base else ""
    where = f"{release} on {measured.device} ({measured.arch}){base}; {decision.mix.text}"
    parts: list[RenderableType] = [Text(answer(decision, worth), "bold"), where, ""]
    shown = decision.compared
    if decision.gain and len(decision.taken) > 1:
        shown = [decision.gain, *shown]
    if shown:
        parts += [table_of([_row(choice) for choice in shown]), ""]
    parts.append(printed_notes([*notes(decision, worth)]))
    if commands := [*to_measure(decision)]:
        parts += ["", "measure what is missing:", *(whole_line(COMMAND + line) for line in commands)]
    if decision.chosen:
        parts += ["", "launch:", *(whole_line(line) for line in snippet(decision))]
    return Group(*parts)


def _row(choice: Choice) -> dict[str, object]:
    assert choice.comparison
    return {
        "choice": launch_text(choice.settings), "op": choice.op or "all", "verdict": choice.verdict,
        "speedup": ratio_text(choice.comparison), "saves of all": f"{choice.share:.2%}",
        "rows": rows_of(choice.pairs), "cases": len(choice.pairs),
    }  # fmt: skip


def notes(decision: Decision, worth: Worth | None) -> Iterator[tuple[str, str]]:
    """What a reader of the decision has to know: (label, text)."""
    mix = decision.mix
    if decision.compared:
        yield "regret", _regret(decision)
    for crossover in decision.crossovers[:SHOWN_CROSSOVERS]:
        yield "crossover", crossover_text(crossover)
    if len(decision.crossovers) > SHOWN_CROSSOVERS:
        yield "crossover", f"{len(decision.crossovers) - SHOWN_CROSSOVERS} more: --json, --page"
    yield from _no_flag(decision)
    yield from _also_changed(decision)
    if decision.likely != decision.chosen and _is_open(decision):
        text = f"by the estimates alone {launch_text(decision.likely)} has the least time"
        yield "not told", f"{text}; more rounds would tell"
    if worth:
        for concurrency, predicted in worth.predicted.items():
            text = worth_text([launch_text(decision.chosen)], predicted, concurrency)
            how = "`serving predict`, 90 %, by its own times of kernels, with these factors"
            yield "predicted", f"{text}: {how}"
        if worth.why_not:
            yield "predicted", f"nothing: {worth.why_not}"
    if mix.covered < 1:
        yield "covered", f"{mix.covered:.0%} of the four ops' time in a step has measured cases"
    for why, cases in grouped(decision.undecided, decision.undecided.__getitem__).items():
        ops = ", ".join(dict.fromkeys(case.partition(" ")[0] for case in cases))
        yield "not decided", f"{counted(len(cases))} of {ops}: {why}"
    yield from _not_measured(decision)
    for launch, why in decision.failing.items():
        if len(launch.split()) <= 2:  # two words can be one flag; longer combinations are told by their parts
            yield "fails", f"{launch}: {why}"
    if decision.choices:
        yield "verdicts", f"all hold together with 95 %; a launch has to save {decision.margin:.1%} of a step"
    yield from _compared_in(decision)
    yield from _unknown(decision)
    for note in decision.launches.measured.notes:
        yield "note", note


def _unknown(decision: Decision) -> Iterator[tuple[str, str]]:
    """The given settings of which it is not known what they decide."""
    launches = decision.launches
    known = known_settings(launches.engine, list(kernels.OPS), launches.measured.arch)
    sheets = chain.from_iterable(launches.measured.sheets.values())
    varied = frozenset[str]().union(*(sheet.varied for sheet in sheets))
    for name in launches.base.keys() - known - varied:
        meant = "".join(f"; did you mean {as_given(nearest)}?" for nearest in near(name, known, 0.8)[:1])
        yield "note", f"{as_given(name)} decides nothing that is known of {launches.engine} here{meant}"


def _compared_in(decision: Decision) -> Iterator[tuple[str, str]]:
    """The boundaries and launch modes of the times; a note if rows ran in another release than was read."""
    defaults = [pair for best in decision.cases if (pair := decision.launches.pair(best.case, {}))]
    modes = dict.fromkeys(f"{pair.sheet.case.boundary}, {pair.old.cell.launch}" for pair in defaults)
    if modes:
        yield "times", f"{' and '.join(modes)}: of the first boundary and launch mode that the default has"
    engine = decision.launches.engine
    release = engines.defaults(engine)[0].version
    # Of the engine's own rows, such as `vllm.triton` and `flash_attn.fa3@vllm`.
    cells = [pair.old.cell for pair in defaults if re.search(rf"(^|@){engine}\b", pair.old.cell.impl)]
    others = dict.fromkeys(cell.version for cell in cells if cell.version and release not in cell.version)
    if others:
        yield "note", f"what {engine} runs was read in {release}; its rows ran in {', '.join(others)}"


def _also_changed(decision: Decision) -> Iterator[tuple[str, str]]:
    """Rows that the launch swaps in cases that were not compared, and ops that no run has."""
    launches = decision.launches
    decided = {best.case.key for best in decision.cases}
    cases_by_op = grouped(decision.mix.every, lambda case: case.op)
    for op, cases in cases_by_op.items():
        swaps: dict[str, None] = {}
        for case in cases:
            old = launches.row_name(case, {}) or "no row"
            new = launches.row_name(case, decision.chosen) or "no row"
            if case.key not in decided and old != new:
                swaps[f"{old} -> {new}"] = None
        if swaps:
            text = f"this launch also swaps rows of {op} in cases without times"
            yield "not compared", f"{text}: {', '.join(swaps)}"
    for op in kernels.OPS:
        deciding = decision.chosen.keys() & launches.known_names(op)
        if deciding and op not in cases_by_op:
            text = f"this launch may also swap rows of {op}, of which there is no run"
            yield "not compared", f"{text}: {', '.join(sorted(deciding))}"


def _is_open(decision: Decision) -> bool:
    """Whether more rounds could show that the likely launch is to be taken: not all of its choices are clear,
    and they would save enough if each saved what the upper end of its interval says."""
    choices = decision.made_by(decision.likely)
    unclear = [choice for choice in choices if not choice.is_clear]
    needed_share = decision.margin
    if decision.chosen:  # The clear choices are taken already, so the question is whether others join them.
        choices, needed_share = unclear, LEAST * decision.margin
    intervals = [choice.share_interval or (0.0, math.inf) for choice in choices]
    return bool(unclear) and sum(high for _, high in intervals) >= needed_share


def _not_measured(decision: Decision) -> Iterator[tuple[str, str]]:
    """Choices that could not be compared, by the reason."""
    launches_by_reason: dict[str, dict[str, None]] = {}
    for choice in decision.choices:
        for why in choice.missing.values():
            launches_by_reason.setdefault(f"{choice.op}: {why}", {})[launch_text(choice.settings)] = None
    for why, launches in launches_by_reason.items():
        yield "no row" if NO_ROW in why else "not measured", f"{', '.join(launches)}: {why}"


def _regret(decision: Decision) -> str:
    text = f"{decision.regret:.2%} more than the fastest row of each case that a flag can choose"
    if gaining := [best for best in decision.cases if best.clear]:
        rows = ", ".join(dict.fromkeys(best.fastest.new.cell.impl for best in gaining))
        text += f"; {counted(len(gaining))} of {len(decision.cases)} would gain by another launch: {rows}"
    return f"this launch takes {text}"


def _no_flag(decision: Decision) -> Iterator[tuple[str, str]]:
    """Rows that are faster than any row that a flag of the engine runs: of each op the one with most lead."""
    engine = decision.launches.engine
    beaten = [best for best in decision.cases if best.no_flag]
    for op, of_op in grouped(beaten, lambda best: best.case.op).items():
        most = max(of_op, key=lambda best: best.fastest.new_us / best.no_flag_us)
        assert most.no_flag
        ratio = f"{most.fastest.new_us / most.no_flag_us:.2f}x as fast at {most.case.sizes_text}"
        yield "no flag", f"{op}: {most.no_flag.cell.impl} is {ratio}; {engine} is not known to run it"


def crossover_text(crossover: Crossover) -> str:
    where = f"between {crossover.size}={crossover.below} and {crossover.above}"
    if crossover.at is not None:
        where = f"at about {crossover.size}={crossover.at:.0f} ({where})"
    unsure = "" if crossover.told else ", not told apart there"
    rows = f"{crossover.faster_below}, then {crossover.faster_above}"
    return f"{crossover.op} {crossover.fixed}: {rows}, {where}{unsure}"


def to_measure(decision: Decision) -> Iterator[str]:
    """Commands that would measure what the decision lacks: the engine's default beside its choices, in the
    same rounds. Variables that a run of `toggle` measured in other cases are measured by `toggle`. A row that
    had no time in a case is not measured again."""
    launches = decision.launches
    mix = decision.mix
    measured_ops = {op for op, _ in launches.measured.sheets}
    unmeasured = [case for case in mix.uncovered if case.op not in measured_ops or mix.covered < ENOUGH]
    for op, cases in grouped([*_lacking(decision), *unmeasured], lambda case: case.op).items():
        rows: dict[str, None] = {}
        for case in cases:
            default = _measurable(launches, case, {})
            if default:
                others = [_measurable(launches, case, settings) for settings in launches.candidates]
                rows |= dict.fromkeys([default, *filter(None, others)])
        if not rows:
            continue
        words = ["--op", op, "--impl", ",".join(rows)]
        words += _case_options(decision, cases) if op in measured_ops else mix.run_options
        flags: list[str] = []
        for choice in decision.choices:
            if choice.op == op and choice.missing and choice.settings in launches.measured.settings:
                for name, value in choice.settings.items():
                    flags += ["--flag", f"{name}={value}"]
        yield command("toggle" if flags else "run", *flags, *words)


def _lacking(decision: Decision) -> Iterator[WeighedCase]:
    """The cases in which the default, or a choice, has a row that could be measured and has no time."""
    lacking = [(choice.settings, choice.missing) for choice in decision.choices]
    lacking.append(({}, decision.undecided))
    for case in decision.mix.cases:
        settings_without = [settings for settings, missing in lacking if case.text in missing]
        if any(_measurable(decision.launches, case, settings) for settings in settings_without):
            yield case


def _measurable(launches: Launches, case: WeighedCase, settings: Mapping[str, str]) -> str:
    """The row that runs; empty where there is none, or where a run could not time it."""
    name = launches.row_name(case, settings)
    return "" if any(name in sheet.untimed for sheet in launches.sheets(case)) else name


def _case_options(decision: Decision, cases: Sequence[WeighedCase]) -> list[str]:
    """The options by which `run` measures these cases: the suite or file that has all, or the first cases."""
    sheets = [decision.launches.sheets(case) for case in cases]
    suites = {of_case[0].suite if of_case else "" for of_case in sheets}
    if len(cases) > 1 and len(suites) == 1:
        (suite,) = suites
        if suite not in ("", "ad hoc"):
            return ["--cases" if suite.endswith(".json") else "--suite", suite]
    return [word for case in cases[:MOST_CASES] for word in ("--case", case.sizes_text)]


def snippet(decision: Decision) -> Iterator[str]:
    """Lines of a shell script that launches the server, with what supports each setting."""
    folders = decision.launches.measured.folders
    dots = " ..." if len(folders) > 3 else ""
    yield f"# decided from {', '.join(map(str, folders[:3]))}{dots}"
    yield f"# for {decision.mix.text}"
    for choice in decision.taken:
        assert choice.comparison
        speedup = f"{ratio_text(choice.comparison)} over {counted(len(choice.pairs))}"
        yield f"# {choice.op}: {rows_of(choice.pairs)}, {speedup}{_source(decision, choice)}"
    variables, flags = words_of({**decision.launches.base, **decision.chosen})
    flags = [*decision.mix.server_flags, *flags]
    yield from (f"export {name}={shlex.quote(value)}" for name, value in variables.items())
    quoted = [" ".join(map(shlex.quote, flag.split(" ", 1))) for flag in flags]
    yield " ".join([SERVERS[decision.launches.engine], *quoted])
    variables, flags = words_of(decision.chosen)
    yield "# confirm it: `serving ab --template` lists plans; set the load, and this arm:"
    yield "# [arms.decided]"
    yield from (f"# env.{name} = {json.dumps(value)}" for name, value in variables.items())
    if flags:
        yield f"# flags = {json.dumps(' '.join(flags))}"


def _source(decision: Decision, choice: Choice) -> str:
    """The line of the engine's code that makes it run the new row, and why, in brackets; empty if unknown."""
    pair = choice.pairs[0]
    rule = decision.launches.rule(pair.case, decision.chosen)
    if rule is None or pair.old.cell.impl == pair.new.cell.impl:
        return ""
    return f" ({rule.file.rpartition('/')[2]}:{rule.line}: {rule.why})"


def facts(decision: Decision, worth: Worth | None) -> dict[str, Any]:
    """The decision as the command's JSON has it."""
    launches, mix = decision.launches, decision.mix
    tables = decision.chosen.keys() & TABLES[launches.engine]
    files = {name: value for name, value in decision.chosen.items() if name in tables and "/" in value}
    return {
        "engine": launches.engine, "engine_version": engines.defaults(launches.engine)[0].version,
        "device": launches.measured.device, "arch": launches.measured.arch,
        "runs": [str(folder) for folder in launches.measured.folders], "mix": mix.text,
        "covered": round(mix.covered, 4), "with": dict(launches.base), "answer": answer(decision, worth),
        "leave_it": not decision.chosen if decision.compared else None,
        **_settings_of(decision.chosen), "files": files,
        "gain": _choice_facts(decision.gain) if decision.gain else None, "margin": decision.margin,
        "regret": decision.regret, "choices": [_choice_facts(choice) for choice in decision.choices],
        "taken": [_choice_facts(choice) for choice in decision.taken],
        "crossovers": [asdict(crossover) for crossover in decision.crossovers],
        "cases": [_case(best) for best in decision.cases],
        "not_decided": dict(decision.undecided),
        "uncovered": [f"{case.text}: {case.share:.2%}" for case in mix.uncovered],
        "worth": _worth(worth) if worth else None, "measure": [*to_measure(decision)],
        "snippet": [*snippet(decision)] if decision.chosen else [],
    }  # fmt: skip


def _settings_of(settings: Mapping[str, str]) -> dict[str, dict[str, str]]:
    flags = {name: value for name, value in settings.items() if name.islower()}
    return {"variables": {name: settings[name] for name in settings if name not in flags}, "flags": flags}


def _case(best: BestCase) -> dict[str, Any]:
    case, chosen, fastest = best.case, best.chosen, best.fastest
    return {
        "op": case.op, "case": case.sizes_text, "decode_calls": case.decode, "prefill_calls": case.prefill,
        "row": chosen.new.cell.impl, "us": chosen.new_us, "best_row": fastest.new.cell.impl,
        "best_us": fastest.new_us, "best_is_faster": best.clear,
        "no_flag": best.no_flag.cell.impl if best.no_flag else None,
    }  # fmt: skip


def _choice_facts(choice: Choice) -> dict[str, Any]:
    comparison = choice.comparison
    return {
        **_settings_of(choice.settings), "op": choice.op or None,
        "verdict": choice.verdict if choice.is_complete else None,
        "ratio": finite(comparison.ratio) if comparison else None,
        "low": finite(comparison.low) if comparison else None,
        "high": finite(comparison.high) if comparison else None,
        "noise": finite(choice.noise), "confidence": choice.confidence, "share": choice.share,
        "saved_us": choice.saved_us, "rows": sorted({pair.new.cell.impl for pair in choice.pairs}),
        "cases": [pair.case.text for pair in choice.pairs],
        "runs": sorted({str(pair.sheet.folder) for pair in choice.pairs}),
        "not_measured": dict(choice.missing),
    }  # fmt: skip


def _worth(worth: Worth) -> dict[str, Any]:
    predicted = [
        {"concurrency": concurrency, "changes": [prediction.model_dump() for prediction in predictions]}
        for concurrency, predictions in worth.predicted.items()
    ]
    changes = [change.model_dump() for change in worth.changes]
    return vars(worth) | {"changes": changes, "predicted": predicted}
