"""The result of an A/B: when its pairs are looked at, the effects with their intervals, and the text.

The unit is a launch. Runs of one launch share memory addresses, tuned kernels and clocks; taken as
independent they give 23 to 59 % false verdicts at a nominal 5 %. So a pair is one launch of each arm, and its
value the logarithm of their ratio. Looking after every pair and stopping at significance gives 18 % false
verdicts. Four looks that share the error give less than 5 %.

The record holds predictions from before the first launch. They are read from a file, or follow from runs of
the suite in which the arms' variables were measured as settings.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Group, RenderableType

from harness.errors import UsageError
from harness.files import JsonObject, read_toml
from harness.report.fitting_table import table_of
from harness.report.terminal import plain
from harness.report.text import ranged
from harness.results.journal import Journal
from harness.results.read import load, run_folders
from harness.serving.ab.plan import METRICS, PLACEHOLDER, Plan, client, launch
from harness.serving.ab.record import Record
from harness.serving.ledger import KernelChange, Prediction
from harness.serving.link.load import Load
from harness.serving.link.model import System, link
from harness.serving.link.predictions import predict
from harness.serving.names import KNOWN_ENGINES, hardware_name
from harness.statistics.intervals import CONFIDENCE, mean_half_width, students_t
from harness.statistics.paired import VerdictName, verdict

TP = r"--(?:tp|tp[-_]size|tensor-parallel-size)[ =]+(\d+)"
DRAFTS = re.compile(r"num[-_](?:speculative[-_]tokens|steps)\W+(\d+)|num[-_]draft[-_]tokens\W+(\d+)")
PREDICTED_OF = "predicted of "


def predicted(plan: Plan, names: Sequence[str]) -> list[Prediction]:
    """The predictions of files and runs. Raises UsageError for a file or a run that gives none."""
    files = [name for name in names if Path(name).suffix == ".json" and Path(name).name != "run.json"]
    found = [each for name in files for each in _of_file(plan, Path(name))]
    if runs := [name for name in names if name not in files]:
        for arm in plan.others:
            changes = list(changes_of(plan, arm, runs))
            found += [each.model_copy(update={"of": arm}) for each in of_link(plan, changes)]
    return found


def _of_file(plan: Plan, path: Path) -> list[Prediction]:
    """The predictions in a file of `serving what-if --json` for the plan's concurrency. Raises UsageError if
    the plan's commands name another engine, number of GPUs or length. Machine and model are only noted."""
    fitting: list[list[Prediction]] = []
    said: JsonObject = {}
    try:
        document = json.loads(path.read_bytes())
        where = f"{PREDICTED_OF}DeepSeek-R1 on {document['gpus']} x {document['hardware'].upper()}"
        for workload in document["workloads"]:
            if workload["load"]["concurrency"] == plan.concurrency:
                said = {"drafts": 0} | document | workload["load"]  # older documents have no drafts
                fitting.append([Prediction.model_validate(each) for each in workload["changes"]])
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        pass  # not a document of `what-if`
    if len(fitting) != 1 or not fitting[0]:
        load = f"{plan.concurrency} in flight" if plan.concurrency else "a client of unknown concurrency"
        raise UsageError(f"{path} does not hold one prediction for {load}: `what-if --json FILE` writes one")
    own = _of_commands(plan).items()
    if unlike := [
        f"{name} {said[name]}, in the plan {is_}" for name, is_ in own if is_ not in (None, said[name])
    ]:
        raise UsageError(f"{path} is no prediction for this plan: it is of {'; '.join(unlike)}")
    return [each.model_copy(update={"assumptions": (where, *each.assumptions)}) for each in fitting[0]]


def _of_commands(plan: Plan) -> JsonObject:
    """What the plan's commands tell; None for what they do not."""
    tp, named = re.search(TP, plan.launch), f"{plan.image} {plan.launch}"
    engine = next((name for name in KNOWN_ENGINES if re.search(rf"\b{name}\b", named)), None)
    isl, osl = (plan.of_client(f"--(?:random-)?{side}-len") for side in ("input", "output"))
    if not (found := DRAFTS.search(plan.launch)) and "--speculative" in plan.launch:
        raise UsageError("--predict: the launch command does not say how many tokens a step drafts")
    drafts = (int(found[1] or 0) or int(found[2]) - 1) if found else 0  # draft tokens hold the verified one
    return {"engine": engine, "gpus": int(tp[1]) if tp else None, "isl": isl, "osl": osl, "drafts": drafts}


def changes_of(plan: Plan, arm: str, names: Sequence[str]) -> Iterator[KernelChange]:
    """The change of each op that a run timed under the variables of both arms. It is that of the
    implementation which is fastest under the base's variables. The interval shows the scatter over cases."""
    for folder in dict.fromkeys(folder for name in names for folder in run_folders(name)):
        run = Journal(folder).run()
        base, own = (_setting(run.settings, plan.variables(each)) for each in (plan.base, arm))
        cells = load(str(folder))
        times = cells[cells.status == "ok"].pivot_table("time_us", ["case", "impl"], "arm")
        if base != own and {base, own} <= {*times.columns}:
            best = times[[base, own]].dropna().sort_values(base).groupby("case").head(1)
            logs = [math.log(before / after) for before, after in best.itertuples(index=False)]
            mean, apart = statistics.fmean(logs), 1.645 * statistics.pstdev(logs)
            low, factor, high = (math.exp(each) for each in (mean - apart, mean, mean + apart))
            yield KernelChange(op=run.op, factor=factor, low=low, high=high, source=str(folder))


def _setting(settings: dict[str, dict[str, str | None]], variables: dict[str, str]) -> str | None:
    """The name of the run's setting with the arm's values of all variables that its settings have."""
    own = {name: variables[name] for each in settings.values() for name in each if name in variables}
    return next((name for name, each in settings.items() if each == own), None)


def of_link(plan: Plan, changes: Sequence[KernelChange]) -> tuple[Prediction, ...]:
    if not changes:
        raise UsageError(
            "--predict: no run timed a kernel under the variables of both arms: `toggle` makes one"
        )
    own = _of_commands(plan)
    isl, osl = own["isl"], own["osl"]
    if not (plan.concurrency and isl and osl):
        raise UsageError("--predict: the client command does not say both lengths and a concurrency")
    machine = Journal(Path(changes[0].source)).run().provenance.get("machine", {})
    hardware = hardware_name(str(machine.get("device", "")))
    model = link(System(hardware=hardware, tp=own["gpus"] or 1, drafts=own["drafts"]))
    load_ = Load(isl, osl, plan.concurrency, range_ratio=1.0)
    return predict(model, load_, changes)


LOOKS = (4, 6, 8, 12)  # the numbers of pairs after which the default plan is looked at
MOST_PAIRS = 200  # more pairs than this are not proposed
POWER = 0.8
SPREAD = read_toml(Path(__file__).with_name("engines.toml"))["spread"]
"""The deviation between launches by metric, in per cent, at concurrencies from BUSY_FROM on and below it."""
BUSY_FROM = SPREAD["busy"]
NAMES = {"tpot": "TPOT, mean", "ttft": "TTFT, mean", "ttft_median": "TTFT, median", "throughput": "output"}
UNITS = {"tpot": "ms", "ttft": "ms", "ttft_median": "ms", "throughput": "tok/s"}
CHANGES = (1.0, 2.0, 5.0)  # per cent
MOST_LOOKED_AT = range(2, MOST_PAIRS + 1)


def looks(pairs: int | None) -> tuple[int, ...]:
    """The numbers of pairs after which there may be a verdict: only the user's number, if it is fixed."""
    return LOOKS if pairs is None else (pairs,)


def order(arms: list[str], pair: int) -> list[str]:
    """The arms in mirrored order (AB, BA, AB ...), so that a drift of the machine affects them equally."""
    return arms if pair % 2 or not pair else arms[::-1]


def pair_seconds(plan: Plan, record: Record | None) -> float:
    """Seconds that one launch of each arm takes: as measured so far, or as the plan expects."""
    took = [e["seconds"] for e in record.of("stopped", ok=True)] if record else []
    took = took[len(plan.arms) :] or took  # in its first launch an arm fills caches
    if took:
        return len(plan.arms) * sum(took) / len(took)
    warm = plan.warm_up_prompts / plan.prompts if plan.warm_up_prompts and plan.prompts else 1.0
    return 60 * len(plan.arms) * (plan.launch_minutes + plan.run_minutes * (1 + warm))


def confidence(pairs: int | None, comparisons: int) -> float:
    """The confidence of each interval: all looks and arms together are wrong in at most 5 % (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / len(looks(pairs)) / comparisons


@dataclass(frozen=True)
class Effect:
    """The effect of an arm. A ratio above 1 means that it is faster: the base's time over its own, or its
    throughput over the base's.

    percent, interval: change of the metric itself; one pair has no interval
    launch_spread:     deviation between launches of one arm, in per cent: that of the pairs over sqrt(2)
    """

    pairs: int
    base: float
    arm: float
    ratio: float
    low: float
    high: float
    percent: float
    interval: list[float] | None
    confidence: float
    launch_spread: float | None
    verdict: VerdictName


def effect(
    base: Sequence[float], arm: Sequence[float], *, higher: bool, level: float, margin: float
) -> Effect:
    """The effect by one pair or more, with Student's t over the logarithms of the pairs' ratios. higher:
    whether more is better; margin: in per cent"""
    logs = [math.log(b / a) if higher else math.log(a / b) for a, b in zip(base, arm, strict=True)]
    mean, half = statistics.fmean(logs), mean_half_width(logs, level)
    low, high = math.exp(mean - half), math.exp(mean + half) if half < 100 else math.inf
    ends = (mean - half, mean + half) if half < 100 else ()
    own, *interval = (100 * math.expm1(log if higher else -log) for log in (mean, *ends))
    apart = 100 * statistics.stdev(logs) / math.sqrt(2) if len(logs) > 1 else None
    return Effect(
        len(logs), statistics.fmean(base), statistics.fmean(arm), math.exp(mean), low, high,
        own, sorted(interval) or None, level, apart, verdict(low, high, noise=0.0, margin=margin / 100),
    )  # fmt: skip


def power(change: float, pairs: int, launch_spread: float, level: float) -> float:
    """The chance that so many pairs tell a change of so many per cent from none."""
    from scipy.special import nctdtr

    shift = math.log1p(change / 100) / (launch_spread / 100 * math.sqrt(2 / pairs))
    return 1 - float(nctdtr(pairs - 1, shift, students_t(pairs - 1, level)))


def pairs_for(change: float, launch_spread: float, level: float, among: Sequence[int]) -> int | None:
    """The fewest of these numbers of pairs that finds such a change four times in five; None: none does."""
    return next((n for n in among if n > 1 and power(change, n, launch_spread, level) >= POWER), None)


def more_pairs(found: Effect, margin: float) -> tuple[int, float] | None:
    """How many more pairs would decide, if mean and scatter stay as they are, and the half width of the
    interval then, in per cent. None if that takes too many, or if there is one pair."""
    if found.launch_spread is None:
        return None
    away = abs(math.log(found.ratio))
    enough = max(away, math.log1p(margin / 100) - away)
    for n in range(found.pairs + 1, MOST_PAIRS + 1):
        half = students_t(n - 1, found.confidence) * found.launch_spread / 100 * math.sqrt(2 / n)
        if half < enough:
            return n - found.pairs, 100 * half
    return None


def effects(record: Record, arm: str) -> dict[str, Effect]:
    """The effect on each metric that both arms have in at least one pair."""
    plan, found = record.plan, {}
    level = confidence(plan.pairs, len(plan.others))
    for metric in METRICS:
        if rows := record.values(metric, (plan.base, arm)):
            base, own = zip(*rows, strict=True)
            higher = metric == "throughput"
            found[metric] = effect(base, own, higher=higher, level=level, margin=plan.margin)
    return found


def summary(record: Record) -> JsonObject:
    """All results as plain values, for --json and the tables."""
    plan = record.plan
    per_arm = {arm: effects(record, arm) for arm in plan.others}
    deciding = {arm: found[plan.metric] for arm, found in per_arm.items() if plan.metric in found}
    verdicts = [
        {"a": arm, "b": plan.base, "metric": metric, "decides": metric == plan.metric, "floor": 0.0,
         **asdict(found)}
        for arm, of_arm in per_arm.items() for metric, found in of_arm.items()
    ]  # fmt: skip
    for line in verdicts:  # JSON has no infinity
        line.update({} if line["interval"] else {"low": None, "high": None})
    return {
        "folder": str(record.folder), "created": record.about["created"], "plan": plan.model_dump(),
        "engine": next((e for e in reversed(record.of("ready"))), {}),
        "pairs": sum(1 for pair in record.pairs() if pair), "finished": finished(record),
        "verdicts": verdicts,
        "more_pairs": {a: more_pairs(f, plan.margin) for a, f in deciding.items() if f.verdict == "unclear"},
        "expected": [line for arm, of_arm in per_arm.items() for line in _expected(record, arm, of_arm)],
        "differences": {arm: differences(record, arm) for arm in plan.others}, "names": record.names,
        "findings": list(_findings(record)), "seconds": sum(e["seconds"] for e in record.of("stopped")),
    }  # fmt: skip


def finished(record: Record) -> str:
    """Why there are no more pairs; empty if time was over, or it was killed."""
    done = record.pairs()
    pairs = sum(1 for pair in done if pair)
    if any(lost["pair"] not in done for lost in record.of("given up")):
        return "given up"
    if pairs >= looks(record.plan.pairs)[-1]:
        return "all pairs made"
    return "decided" if any("unclear" not in e["verdicts"] for e in record.of("look", pairs=pairs)) else ""


def _expected(record: Record, arm: str, found: dict[str, Effect]) -> Iterator[JsonObject]:
    """Each prediction for the arm beside the effect, in per cent of the metric before."""
    for prediction, metric, (change, low, high) in _in_percent(record.predictions):
        if metric in found and prediction.of in ("", arm):
            own = found[metric].interval or (-math.inf, math.inf)
            meets = (low is None or low <= own[1]) and (high is None or own[0] <= high)
            yield {"arm": arm, "metric": metric, "method": prediction.method, "change": change, "low": low,
                   "high": high, "found": found[metric].percent, "meets": meets}  # fmt: skip


def _in_percent(predictions: Sequence[Prediction]) -> Iterator[tuple[Prediction, str, list[float | None]]]:
    """Each prediction of an A/B's metric: the metric, change, low and high in per cent; None: an open end."""
    for each in predictions:
        metric = each.quantity.removeprefix("output_")  # the clients' names
        if metric in METRICS and each.before and each.change is not None:
            ends = (each.change, each.low, each.high)
            yield each, metric, [None if end is None else 100 * end / each.before for end in ends]


def differences(record: Record, arm: str) -> JsonObject:
    """Reported settings and variables in which arms differ, if all launches of an arm agree: [base, arm]."""
    both = [servers(record, name) for name in (record.plan.base, arm)]
    found: JsonObject = {"server_info": {}, "environment": {}}
    for part, differing in found.items():
        for name in dict.fromkeys(key for side in both for server in side for key in server[part]):
            values = [[server[part].get(name) for server in side] for side in both]
            filled_in = PLACEHOLDER.search(record.plan.variables(arm).get(name, ""))
            agree = all(of == of[:1] * len(of) for of in values)
            if agree and not filled_in and values[0][:1] != values[1][:1]:
                differing[name] = [of[0] if of else None for of in values]
    return found


def servers(record: Record, arm: str) -> list[JsonObject]:
    """What the servers of an arm's launches report of themselves."""
    said = []
    for ready in record.of("ready", arm=arm):
        with contextlib.suppress(OSError, ValueError):
            said.append(json.loads((record.launch_folder(ready) / "server.json").read_text("utf-8")))
    return said


def _findings(record: Record) -> Iterator[str]:
    """What a reader of the verdicts has to know, a line each."""
    plan, base = record.plan, record.plan.base
    for arm in plan.others:
        if plan.changes(arm) == plan.changes(base):
            yield f"{arm} and {base} are launched alike: an A/A, which shows this machine's noise"
        elif all(server["server_info"] for server in servers(record, arm)):
            found = differences(record, arm)
            if not found["server_info"]:
                names = ", ".join(found["environment"]) or "none"
                yield f"the servers of {arm} and {base} report the same settings; other variables: {names}"
    counted = [run for number, runs in record.pairs().items() if number for run in runs.values()]
    tokens = {
        arm: sum(run["output_tokens"] or 0 for run in counted if run["arm"] == arm) for arm in plan.arms
    }
    if len(set(tokens.values())) > 1:
        each = ", ".join(f"{arm} {count}" for arm, count in tokens.items())
        yield f"the arms made different numbers of tokens, which is other work: {each}"
    for rule in sorted({rule for run in counted for rule in run["suspect"]}):
        lines = [run["suspect"][rule] for run in counted if rule in run["suspect"]]
        yield f"{len(lines)} of {len(counted)} runs are suspect ({rule}): {lines[0]}"
    for failed in record.of("failed"):
        yield f"pair {failed['pair']} was made again: {failed['reason']}"
    if any(ready["owned"] is None for ready in record.of("ready")):
        yield "it cannot be told whether the server that answered is the one that was launched"
    if len({(ready["arm"], ready["version"]) for ready in record.of("ready")}) > len(plan.arms):
        yield "the engine's version changed between launches of one arm"
    if len({begun["boot"] for begun in record.of("begun")}) > 1:
        yield "the machine was started anew between pairs"


def planned(
    plan: Plan,
    record: Record | None,
    folder: Path,
    names: Sequence[JsonObject],
    predictions: Sequence[Prediction],
    budget_s: float | None = None,
) -> str:
    """What would run, how long it takes, what it can tell, and what is expected."""
    lines = []
    for number, arm in enumerate(plan.arms):
        port, cache = plan.port + 10 * number, folder / "cache" / arm
        result = folder / "launches" / f"000-0-{arm}" / "result.json"
        warm = client(plan, arm, port, plan.seed, result.with_name("warm-up.json"), cache, warm_up=True)
        lines += [
            f"{arm}:",
            f"  server   {launch(plan, arm, f'ab-{folder.name}-{number}-{arm}', port, cache)}",
            f"  warm-up  {warm}",
            f"  client   {client(plan, arm, port, plan.seed, result, cache)}",
        ]
    at, pair_s = looks(plan.pairs), pair_seconds(plan, record)
    first = "; ".join(" ".join(order(list(plan.arms), pair)) for pair in (1, 2, 3))
    known = "as the launches so far took" if record and record.of("stopped") else "as the plan expects"
    lines += [
        "",
        f"order: a launch of each arm that is thrown away, then pairs: {first} ...",
        f"looked at after {', '.join(map(str, at))} pairs, and at no other time",
        f"time: {_time(pair_s)} a pair ({known}), {_time((at[-1] + 1) * pair_s)} for {at[-1]} pairs",
    ]
    if budget_s:
        made = len(record.pairs()) if record else 0
        launches = min(int(budget_s / pair_s), at[-1] + 1 - made)  # of each arm; the first is thrown away
        pairs = launches if made else max(0, launches - 1)
        lines.append(f"budget: {_time(budget_s)}; pairs that would end within it: {pairs}")
    lines += ["", _needed(plan, pair_s)]
    told = [*map(_name, names)]
    for each, metric, (change, low, high) in _in_percent(predictions):
        by = ranged(change, low, high, "+.2f", " %")
        told.append(f"expected: {each.of and each.of + ': '}{NAMES[metric]} changes by {by}")
    of = (text for each in predictions for text in each.assumptions if text.startswith(PREDICTED_OF))
    told += dict.fromkeys(f"note: {text}: nothing here says whether the plan's is that" for text in of)
    return "\n".join([*lines, *([""] if told else []), *told])


def _needed(plan: Plan, pair_s: float) -> str:
    """A table of the number of pairs that find an effect four times in five."""
    busy, quiet = SPREAD[plan.metric]
    apart = busy if (plan.concurrency or 0) >= BUSY_FROM else quiet
    arms = len(plan.others)
    rows = []
    for change in CHANGES:
        fixed = pairs_for(change, apart, confidence(1, arms), MOST_LOOKED_AT)
        looked = None if plan.pairs else pairs_for(change, apart, confidence(None, arms), LOOKS)
        shown = str(looked or fixed or f"over {MOST_PAIRS}")
        if fixed and not (looked or plan.pairs):
            shown = f"{fixed}, by --pairs {fixed}: the four looks do not reach"
        time = _time((n + 1) * pair_s) if (n := looked or fixed) else ""
        rows.append({f"effect on {NAMES[plan.metric]}": f"{change:g} %", "pairs needed": shown, "time": time})
    where = f"where launches differ by {apart:g} %, as on 8 MI355X with DeepSeek-R1"
    unseen = "" if plan.concurrency else "; the client command names no concurrency"
    return f"{plain(table_of(rows))}\n{where}{unseen}"


def _name(found: JsonObject) -> str:
    return f"{'note' if found['found'] is None else 'warning'}: {found['says']}"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def shown(found: JsonObject) -> RenderableType:
    """A table of the effects of each arm, with notes below it."""
    base, verdicts = next(iter(found["plan"]["arms"])), found["verdicts"]
    engine = " ".join(filter(None, (found["engine"].get("engine"), found["engine"].get("version"))))
    head = f"{found['pairs']} pairs against {base}{f', {engine}' if engine else ''}\n"
    table: list[RenderableType] = [table_of([row(line, base) for line in verdicts]), ""] if verdicts else []
    return Group(head, *table, *closing(found))


def row(line: JsonObject, base: str) -> dict[str, str]:
    """The cells of a verdict, by column. The verdict is in brackets if another metric decides."""
    unit, apart = UNITS[line["metric"]], line["launch_spread"]
    ends = "{:+.2f} to {:+.2f} %".format(*line["interval"]) if line["interval"] else "any"
    return {
        "arm": line["a"], "metric": NAMES[line["metric"]],
        "verdict": line["verdict"] if line["decides"] else f"({line['verdict']})",
        "change": f"{line['percent']:+.2f} %", f"{100 * line['confidence']:.3g} % interval": ends,
        base: f"{line['base']:.4g} {unit}", "arm's": f"{line['arm']:.4g} {unit}",
        "between launches": "" if apart is None else f"{apart:.2f} %",
    }  # fmt: skip


def closing(found: JsonObject) -> Iterator[str]:
    """The lines below the table."""
    margin = found["plan"]["margin"]
    for line in filter(lambda each: each["decides"], found["verdicts"]):
        if line["verdict"] == "same":
            yield f"{line['a']}: same within {margin:g} %"
        elif line["verdict"] != "unclear":
            beyond = line["low"] > 1 + margin / 100 or line["high"] < 1 / (1 + margin / 100)
            how = "by more than" if beyond else "perhaps by less than"
            yield f"{line['a']}: {line['verdict']}, {how} the margin of {margin:g} %"
    for arm, more in found["more_pairs"].items():
        many = f"no number of pairs up to {MOST_PAIRS} would decide it"
        then = many if found["pairs"] > 1 else "one pair has no interval"
        if more:
            again = f"a new A/B with --pairs {found['pairs'] + more[0]}"
            then = f"{again} would narrow it to +-{more[1]:.2g} % and decide it at this effect"
        yield f"{arm}: unclear: {then}"
    for line in found["expected"]:
        expected = ranged(line["change"], line["low"], line["high"], "+.2f", " %")
        yield (
            f"{line['arm']}: {NAMES[line['metric']]} was expected to change by {expected}, and did by "
            f"{line['found']:+.2f} %: the intervals {'meet' if line['meets'] else 'do not meet'}"
        )
    for arm, differing in found["differences"].items():
        for what, part in (("setting", "server_info"), ("variable", "environment")):
            for name, (before, after) in differing[part].items():
                sides = ("unset" if value is None else repr(value) for value in (before, after))
                yield f"{arm}: {what} {name}: {' -> '.join(sides)}"
    yield from map(_name, found["names"])
    yield from (f"note: {line}" for line in found["findings"])
    if not found["finished"]:
        yield f"not finished: --resume {found['folder']} goes on"
