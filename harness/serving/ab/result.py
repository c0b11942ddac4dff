"""The result of an A/B: when its pairs are looked at, the effects with their intervals, and lines on them.

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

from harness.errors import UsageError
from harness.files import JsonObject, read_toml
from harness.report.text import ranged
from harness.results.journal import Journal
from harness.results.read import load, run_folders
from harness.serving.ab.plan import METRICS, PLACEHOLDER, Plan
from harness.serving.ab.record import Record
from harness.serving.ledger import KernelChange, Prediction
from harness.serving.link.load import Load
from harness.serving.link.model import System, link
from harness.serving.link.predictions import predict
from harness.serving.names import KNOWN_ENGINES, hardware_name
from harness.statistics.intervals import CONFIDENCE, mean_half_width, students_t
from harness.statistics.paired import VerdictName, verdict

TP = r"--(?:tp|tp[-_]size|tensor-parallel-size)[ =]+(\d+)"
DRAFTS = re.compile(
    r"num[-_](?:speculative[-_]tokens|steps)\W+(?P<drafted>\d+)|num[-_]draft[-_]tokens\W+(?P<verified>\d+)"
)
PREDICTED_OF = "predicted of "


def predicted(plan: Plan, names: Sequence[str]) -> list[Prediction]:
    """The predictions of files and runs. Raises UsageError for a file or a run that gives none."""
    predictions: list[Prediction] = []
    runs = []
    for name in names:
        path = Path(name)
        if path.suffix == ".json" and path.name != "run.json":
            predictions += _of_file(plan, path)
        else:
            runs.append(name)
    if runs:
        for arm in plan.others:
            changes = list(changes_of(plan, arm, runs))
            predictions += [item.model_copy(update={"of": arm}) for item in of_link(plan, changes)]
    return predictions


def _of_file(plan: Plan, path: Path) -> list[Prediction]:
    """The predictions in a file of `serving what-if --json` for the plan's concurrency. Raises UsageError if
    the plan's commands name another engine, number of GPUs or length. Machine and model are only noted."""
    fitting: list[list[Prediction]] = []  # the predictions of each workload of the plan's concurrency
    predicted_for: JsonObject = {}
    try:
        document = json.loads(path.read_bytes())
        where = f"{PREDICTED_OF}DeepSeek-R1 on {document['gpus']} x {document['hardware'].upper()}"
        for workload in document["workloads"]:
            if workload["load"]["concurrency"] == plan.concurrency:
                predicted_for = {"drafts": 0} | document | workload["load"]  # older documents have no drafts
                fitting.append([Prediction.model_validate(change) for change in workload["changes"]])
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        pass  # not a document of `what-if`
    if len(fitting) != 1 or not fitting[0]:
        load = f"{plan.concurrency} in flight" if plan.concurrency else "a client of unknown concurrency"
        raise UsageError(f"{path} does not hold one prediction for {load}: `what-if --json FILE` writes one")
    unlike = [
        f"{name} {predicted_for[name]}, in the plan {value}"
        for name, value in _of_commands(plan).items()
        if value is not None and value != predicted_for[name]
    ]
    if unlike:
        raise UsageError(f"{path} is no prediction for this plan: it is of {'; '.join(unlike)}")
    return [item.model_copy(update={"assumptions": (where, *item.assumptions)}) for item in fitting[0]]


def _of_commands(plan: Plan) -> JsonObject:
    """Engine, number of GPUs, lengths and draft tokens by the plan's commands; None where they do not say."""
    command = f"{plan.image} {plan.launch}"
    tp = re.search(TP, plan.launch)
    drafts = DRAFTS.search(plan.launch)
    if drafts is None and "--speculative" in plan.launch:
        raise UsageError("--predict: the launch command does not say how many tokens a step drafts")
    if drafts is None:
        draft_tokens = 0
    elif drafts["drafted"]:
        draft_tokens = int(drafts["drafted"])
    else:  # SGLang's num-draft-tokens also counts the token that is verified with the drafts
        draft_tokens = int(drafts["verified"]) - 1
    return {
        "engine": next((name for name in KNOWN_ENGINES if re.search(rf"\b{name}\b", command)), None),
        "gpus": int(tp[1]) if tp else None,
        "isl": plan.of_client("--(?:random-)?input-len"),
        "osl": plan.of_client("--(?:random-)?output-len"),
        "drafts": draft_tokens,
    }


def changes_of(plan: Plan, arm: str, names: Sequence[str]) -> Iterator[KernelChange]:
    """The change of each op that a run timed under the variables of both arms. It is that of the
    implementation which is fastest under the base's variables. The interval shows the scatter over cases."""
    for folder in dict.fromkeys(folder for name in names for folder in run_folders(name)):
        run = Journal(folder).run()
        before = _setting(run.settings, plan.variables(plan.base))
        after = _setting(run.settings, plan.variables(arm))
        cells = load(str(folder))
        times_us = cells[cells.status == "ok"].pivot_table("time_us", ["case", "impl"], "arm")
        if before == after or not {before, after} <= set(times_us.columns):
            continue
        fastest = times_us[[before, after]].dropna().sort_values(before).groupby("case").head(1)
        logs = [math.log(before_us / after_us) for before_us, after_us in fastest.itertuples(index=False)]
        mean = statistics.fmean(logs)
        half_width = 1.645 * statistics.pstdev(logs)  # nine tenths of a normal distribution
        low, high = math.exp(mean - half_width), math.exp(mean + half_width)
        yield KernelChange(op=run.op, factor=math.exp(mean), low=low, high=high, source=str(folder))


def _setting(settings: dict[str, dict[str, str | None]], variables: dict[str, str]) -> str | None:
    """The name of the run's setting with the arm's values of all variables that its settings have; None if
    it has no such setting.

    settings: the variables of each setting of the run; variables: those of the arm
    """
    varied = {name for setting in settings.values() for name in setting}
    arms_values = {name: value for name, value in variables.items() if name in varied}
    return next((name for name, setting in settings.items() if setting == arms_values), None)


def of_link(plan: Plan, changes: Sequence[KernelChange]) -> tuple[Prediction, ...]:
    """What changes of kernels are worth to the server that the plan's commands describe. Raises UsageError if
    there is no change, or if the commands do not describe it."""
    if not changes:
        raise UsageError(
            "--predict: no run timed a kernel under the variables of both arms: `toggle` makes one"
        )
    deployment = _of_commands(plan)
    isl, osl = deployment["isl"], deployment["osl"]
    if not (plan.concurrency and isl and osl):
        raise UsageError("--predict: the client command does not say both lengths and a concurrency")
    machine = Journal(Path(changes[0].source)).run().provenance.get("machine", {})
    hardware = hardware_name(str(machine.get("device", "")))
    model = link(System(hardware=hardware, tp=deployment["gpus"] or 1, drafts=deployment["drafts"]))
    return predict(model, Load(isl, osl, plan.concurrency, range_ratio=1.0), changes)


LOOKS = (4, 6, 8, 12)
"""The numbers of pairs after which an A/B is looked at: verdicts are only made then."""
MOST_PAIRS = 200  # more pairs than this are not proposed
POWER = 0.8  # the chance of finding an effect with which a number of pairs suffices for it
SPREAD = read_toml(Path(__file__).with_name("engines.toml"))["spread"]
"""The deviation between launches by metric, in per cent, at concurrencies from BUSY_FROM on and below it."""
BUSY_FROM = SPREAD["busy"]
NAMES = {"tpot": "TPOT, mean", "ttft": "TTFT, mean", "ttft_median": "TTFT, median", "throughput": "output"}
UNITS = {"tpot": "ms", "ttft": "ms", "ttft_median": "ms", "throughput": "tok/s"}
MOST_LOOKED_AT = range(2, MOST_PAIRS + 1)  # numbers of pairs of which one may be proposed


def looks(pairs: int | None) -> tuple[int, ...]:
    """The numbers of pairs after which there may be a verdict: only the user's number, if it is fixed."""
    return LOOKS if pairs is None else (pairs,)


def order(arms: list[str], pair: int) -> list[str]:
    """The arms in mirrored order (AB, BA, AB ...), so that a drift of the machine affects them equally."""
    is_mirrored = pair > 0 and pair % 2 == 0
    return arms[::-1] if is_mirrored else arms


def pair_seconds(plan: Plan, record: Record | None) -> float:
    """Seconds that one launch of each arm takes: as measured so far, or as the plan expects."""
    arms = len(plan.arms)
    launches_s = [event["seconds"] for event in record.of("stopped", ok=True)] if record else []
    if len(launches_s) > arms:
        launches_s = launches_s[arms:]  # the first launch of an arm fills caches
    if launches_s:
        return arms * statistics.fmean(launches_s)
    warm_up_runs = 1.0  # the warm-up's length, in runs
    if plan.warm_up_prompts and plan.prompts:
        warm_up_runs = plan.warm_up_prompts / plan.prompts
    return 60 * arms * (plan.launch_minutes + plan.run_minutes * (1 + warm_up_runs))


def confidence(pairs: int | None, comparisons: int) -> float:
    """The confidence of each interval: all looks and arms together are wrong in at most 5 % (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / len(looks(pairs)) / comparisons


@dataclass(frozen=True)
class Effect:
    """The effect of an arm. A ratio above 1 means that it is faster: the base's time over its own, or its
    throughput over the base's.

    base, arm:         mean of the metric under each, in its own unit
    low, high:         ends of the ratio's interval; 0 and infinity where pairs give none, as one pair
    percent, interval: change of the metric itself, in per cent, and its interval; None where there is none
    launch_spread:     deviation between launches of one arm, in per cent: that of the pairs over sqrt(2);
                       None for one pair
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
    """The effect by one pair or more, with Student's t over the logarithms of the pairs' ratios.

    base, arm: the metric in each pair; higher: whether more is better; level: the interval's confidence;
    margin: in per cent
    """
    logs = [math.log(b / a) if higher else math.log(a / b) for a, b in zip(base, arm, strict=True)]

    def percent(log: float) -> float:
        """The change of the metric where this is the logarithm of the ratio."""
        return 100 * math.expm1(log if higher else -log)

    mean = statistics.fmean(logs)
    low, high = 0.0, math.inf
    interval = launch_spread = None
    half_width = mean_half_width(logs, level)
    if half_width < 100:  # a wider one says nothing, and its ends are no floating-point numbers
        low, high = math.exp(mean - half_width), math.exp(mean + half_width)
        interval = sorted([percent(mean - half_width), percent(mean + half_width)])
    if len(logs) > 1:
        launch_spread = 100 * statistics.stdev(logs) / math.sqrt(2)
    return Effect(
        pairs=len(logs),
        base=statistics.fmean(base),
        arm=statistics.fmean(arm),
        ratio=math.exp(mean),
        low=low,
        high=high,
        percent=percent(mean),
        interval=interval,
        confidence=level,
        launch_spread=launch_spread,
        verdict=verdict(low, high, noise=0.0, margin=margin / 100),
    )


def power(change: float, pairs: int, launch_spread: float, level: float) -> float:
    """The chance that two or more pairs tell a change from none.

    change, launch_spread: in per cent; level: the confidence of the interval
    """
    from scipy.special import nctdtr

    shift = math.log1p(change / 100) / (launch_spread / 100 * math.sqrt(2 / pairs))
    return 1 - float(nctdtr(pairs - 1, shift, students_t(pairs - 1, level)))


def pairs_for(change: float, launch_spread: float, level: float, among: Sequence[int]) -> int | None:
    """The least of these numbers of pairs that finds a change four times in five; None if none does.

    Arguments as for `power`; among: numbers of pairs, from 2 on
    """
    return next((pairs for pairs in among if power(change, pairs, launch_spread, level) >= POWER), None)


def more_pairs(found: Effect, margin: float) -> tuple[int, float] | None:
    """How many more pairs would decide, if mean and scatter stay as they are, and the half width of the
    interval then, in per cent. None if that takes too many, or if there is one pair."""
    if found.launch_spread is None:
        return None
    from_one = abs(math.log(found.ratio))
    narrow_enough = max(from_one, math.log1p(margin / 100) - from_one)  # for a difference, or for `same`
    for pairs in range(found.pairs + 1, MOST_PAIRS + 1):
        deviation = found.launch_spread / 100 * math.sqrt(2 / pairs)  # of the mean over pairs
        half_width = students_t(pairs - 1, found.confidence) * deviation
        if half_width < narrow_enough:
            return pairs - found.pairs, 100 * half_width
    return None


def effects(record: Record, arm: str) -> dict[str, Effect]:
    """The effect on each metric that both arms have in at least one pair."""
    plan = record.plan
    level = confidence(plan.pairs, len(plan.others))
    by_metric = {}
    for metric in METRICS:
        if pairs := record.values(metric, (plan.base, arm)):
            before, after = zip(*pairs, strict=True)
            higher = metric == "throughput"
            by_metric[metric] = effect(before, after, higher=higher, level=level, margin=plan.margin)
    return by_metric


def summary(record: Record) -> JsonObject:
    """All results as plain values, for --json and the tables."""
    plan = record.plan
    verdicts: list[JsonObject] = []
    expected: list[JsonObject] = []
    more: dict[str, tuple[int, float] | None] = {}
    for arm in plan.others:
        by_metric = effects(record, arm)
        for metric, found in by_metric.items():
            decides = metric == plan.metric
            line = {"a": arm, "b": plan.base, "metric": metric, "decides": decides, "floor": 0.0}
            line |= asdict(found)
            if found.interval is None:  # JSON has no infinity
                line |= {"low": None, "high": None}
            verdicts.append(line)
            if decides and found.verdict == "unclear":
                more[arm] = more_pairs(found, plan.margin)
        expected += _expected(record, arm, by_metric)
    ready = record.of("ready")
    return {
        "folder": str(record.folder),
        "created": record.about["created"],
        "plan": plan.model_dump(),
        "engine": ready[-1] if ready else {},
        "pairs": _pairs_made(record),
        "finished": finished(record),
        "verdicts": verdicts,
        "more_pairs": more,
        "expected": expected,
        "differences": {arm: differences(record, arm) for arm in plan.others},
        "names": record.names,
        "findings": list(_findings(record)),
        "seconds": sum(event["seconds"] for event in record.of("stopped")),
    }


def _pairs_made(record: Record) -> int:
    """The number of pairs that count. Pair 0 is thrown away: its launches fill caches."""
    return len(record.pairs().keys() - {0})


def finished(record: Record) -> str:
    """Why there are no more pairs; empty if time was over, or it was killed."""
    pairs = _pairs_made(record)
    if any(event["pair"] not in record.pairs() for event in record.of("given up")):
        return "given up"
    if pairs >= looks(record.plan.pairs)[-1]:
        return "all pairs made"
    if any("unclear" not in event["verdicts"] for event in record.of("look", pairs=pairs)):
        return "decided"
    return ""


def _expected(record: Record, arm: str, found: dict[str, Effect]) -> Iterator[JsonObject]:
    """Each prediction for the arm beside the effect, in per cent of the metric before."""
    for prediction, metric, (change, low, high) in in_percent(record.predictions):
        if metric in found and prediction.of in ("", arm):
            found_low, found_high = found[metric].interval or (-math.inf, math.inf)
            meets = (low is None or low <= found_high) and (high is None or found_low <= high)
            line: JsonObject = {"arm": arm, "metric": metric, "method": prediction.method}
            line |= {"change": change, "low": low, "high": high}
            yield line | {"found": found[metric].percent, "meets": meets}


def in_percent(predictions: Sequence[Prediction]) -> Iterator[tuple[Prediction, str, list[float | None]]]:
    """Each prediction of an A/B's metric: the metric, change, low and high in per cent; None: an open end."""
    for prediction in predictions:
        metric = prediction.quantity.removeprefix("output_")  # the clients' names
        if metric in METRICS and prediction.before and prediction.change is not None:
            ends = (prediction.change, prediction.low, prediction.high)
            yield prediction, metric, [None if end is None else 100 * end / prediction.before for end in ends]


def differences(record: Record, arm: str) -> JsonObject:
    """The settings and variables, as the servers report them, in which an arm differs from the base: the
    values of both, [base, arm], by name. A variable is left out if the launches of one arm do not agree on
    it, and if its value has a placeholder, which each launch fills in otherwise."""
    before = servers(record, record.plan.base)
    after = servers(record, arm)
    differing: JsonObject = {"server_info": {}, "environment": {}}
    for part, values in differing.items():
        for name in dict.fromkeys(key for server in before + after for key in server[part]):
            bases = [server[part].get(name) for server in before] or [None]
            arms = [server[part].get(name) for server in after] or [None]
            agree = all(value == bases[0] for value in bases) and all(value == arms[0] for value in arms)
            is_filled_in = PLACEHOLDER.search(record.plan.variables(arm).get(name, ""))
            if agree and not is_filled_in and bases[0] != arms[0]:
                values[name] = [bases[0], arms[0]]
    return differing


def servers(record: Record, arm: str) -> list[JsonObject]:
    """What the servers of an arm's launches report of themselves."""
    reports = []
    for ready in record.of("ready", arm=arm):
        with contextlib.suppress(OSError, ValueError):
            reports.append(json.loads((record.launch_folder(ready) / "server.json").read_text("utf-8")))
    return reports


def _findings(record: Record) -> Iterator[str]:
    """What a reader of the verdicts has to know, a line each."""
    plan, base = record.plan, record.plan.base
    for arm in plan.others:
        if plan.changes(arm) == plan.changes(base):
            yield f"{arm} and {base} are launched alike: an A/A, which shows this machine's noise"
        elif all(server["server_info"] for server in servers(record, arm)):
            differing = differences(record, arm)
            if not differing["server_info"]:
                names = ", ".join(differing["environment"]) or "none"
                yield f"the servers of {arm} and {base} report the same settings; other variables: {names}"
    counted = [run for number, pair in record.pairs().items() if number > 0 for run in pair.values()]
    tokens = dict.fromkeys(plan.arms, 0)
    for run in counted:
        tokens[run["arm"]] += run["output_tokens"] or 0
    if len(set(tokens.values())) > 1:
        by_arm = ", ".join(f"{arm} {count}" for arm, count in tokens.items())
        yield f"the arms made different numbers of tokens, which is other work: {by_arm}"
    for rule in sorted({rule for run in counted for rule in run["suspect"]}):
        reasons = [run["suspect"][rule] for run in counted if rule in run["suspect"]]
        yield f"{len(reasons)} of {len(counted)} runs are suspect ({rule}): {reasons[0]}"
    for failed in record.of("failed"):
        yield f"pair {failed['pair']} was made again: {failed['reason']}"
    if any(ready["owned"] is None for ready in record.of("ready")):
        yield "it cannot be told whether the server that answered is the one that was launched"
    if len({(ready["arm"], ready["version"]) for ready in record.of("ready")}) > len(plan.arms):
        yield "the engine's version changed between launches of one arm"
    if len({begun["boot"] for begun in record.of("begun")}) > 1:
        yield "the machine was started anew between pairs"


def warning(name: JsonObject) -> str:
    """A line on a variable's name that the engine may not read (see harness.serving.ab.names); a note where
    that cannot be told."""
    kind = "note" if name["found"] is None else "warning"
    return f"{kind}: {name['says']}"


def row(line: JsonObject, base: str) -> dict[str, str]:
    """The cells of a verdict, by column. The verdict is in brackets if another metric decides."""
    unit, spread = UNITS[line["metric"]], line["launch_spread"]
    cells = {"arm": line["a"], "metric": NAMES[line["metric"]]}
    cells["verdict"] = line["verdict"] if line["decides"] else f"({line['verdict']})"
    cells["change"] = f"{line['percent']:+.2f} %"
    cells[f"{100 * line['confidence']:.3g} % interval"] = interval_text(line)
    cells |= {base: f"{line['base']:.4g} {unit}", "arm's": f"{line['arm']:.4g} {unit}"}
    cells["between launches"] = "" if spread is None else f"{spread:.2f} %"
    return cells


def interval_text(verdict: JsonObject) -> str:
    """The ends of the change's interval, `-1.20 to +0.40 %`; `any` where one pair gives none."""
    return "{:+.2f} to {:+.2f} %".format(*verdict["interval"]) if verdict["interval"] else "any"


def closing(result: JsonObject) -> Iterator[str]:
    """The lines below the table. result: as `summary` returns it"""
    margin = result["plan"]["margin"]
    for line in result["verdicts"]:
        if not line["decides"]:
            continue
        if line["verdict"] == "same":
            yield f"{line['a']}: same within {margin:g} %"
        elif line["verdict"] != "unclear":
            beyond = line["low"] > 1 + margin / 100 or line["high"] < 1 / (1 + margin / 100)
            how = "by more than" if beyond else "perhaps by less than"
            yield f"{line['a']}: {line['verdict']}, {how} the margin of {margin:g} %"
    for arm, more in result["more_pairs"].items():
        if more:
            pairs, half_width = more
            again = f"a new A/B with --pairs {result['pairs'] + pairs}"
            advice = f"{again} would narrow it to +-{half_width:.2g} % and decide it at this effect"
        elif result["pairs"] > 1:
            advice = f"no number of pairs up to {MOST_PAIRS} would decide it"
        else:
            advice = "one pair has no interval"
        yield f"{arm}: unclear: {advice}"
    for line in result["expected"]:
        expected = ranged(line["change"], line["low"], line["high"], "+.2f", " %")
        yield (
            f"{line['arm']}: {NAMES[line['metric']]} was expected to change by {expected}, and did by "
            f"{line['found']:+.2f} %: the intervals {'meet' if line['meets'] else 'do not meet'}"
        )
    for arm, differing in result["differences"].items():
        for what, part in (("setting", "server_info"), ("variable", "environment")):
            for name, (before, after) in differing[part].items():
                sides = ("unset" if value is None else repr(value) for value in (before, after))
                yield f"{arm}: {what} {name}: {' -> '.join(sides)}"
    yield from (warning(name) for name in result["names"])
    yield from (f"note: {line}" for line in result["findings"])
    if not result["finished"]:
        yield f"not finished: --resume {result['folder']} goes on"
