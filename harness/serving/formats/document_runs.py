"""`document_runs/1`: runs, configurations and claims of published documents, one row each, as a reader noted
them: what its numbers are of stands there in words.

A word that is not known here leaves the scope or the tokens open, and a note quotes it. A bound ("up to 17")
is the metric's `max` (or `min` where it is below zero), a range both, with the words as label. The words
themselves stay in `extra`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from harness.serving.fields import Fields
from harness.serving.formats import console
from harness.serving.formats.words import gpus_of, options_of, parallelism_of
from harness.serving.reading import Document, UnreadableError
from harness.serving.schema import (
    Finding,
    Metric,
    Mode,
    Parallelism,
    Scope,
    ServingRun,
    Tokens,
    Totals,
    Workload,
)

NAME = "notes.document_runs"
SCHEMA = "document_runs/1"
SCOPES: dict[str, Scope] = {
    "request": "request", "per GPU": "gpu", "per GPU rank": "gpu", "node": "node",
    "per decode node": "decode_node", "cluster": "cluster",
}  # fmt: skip
TOKENS: dict[str, Tokens] = {
    "output": "output", "input": "input", "TOTAL": "total", "TOTAL in+out": "total",
    "output?": "unknown", "unknown": "unknown",
}  # fmt: skip
MODES: dict[str, Mode] = {
    "online": "online", "offline": "offline",
    "client": "unknown", "client wall-clock": "unknown", "server-log": "unknown",
}  # fmt: skip
METRICS: tuple[tuple[str, str, Tokens, str], ...] = (
    (r"output_throughput(?: \(.*\))?", "throughput", "output", "total"),
    (r"peak throughput|vLLM reported peak.*|highest .*throughput.*", "throughput", "unknown", "max"),
    (r"(?:per GPU|single request) throughput|\"Throughput\" column.*", "throughput", "unknown", "total"),
    (r"request latency.*", "e2e", "none", "total"),
    (r"throughput at same latency vs .*", "throughput_ratio", "none", "total"),
    (r"throughput at same concurrency vs .*", "throughput_gain", "none", "total"),
    (r"latency at same concurrency vs .*", "latency_change", "none", "total"),
    (r"max concurrency .*", "concurrency", "none", "max"),
    (r".* speedup", "speedup", "none", "total"),
    (r"model memory used", "memory", "none", "total"),
    (r"loading time", "load", "none", "total"),
)
UNITS = {
    "tok/s": ("tok/s", 1.0), "s": ("s", 1.0), "GiB": ("GiB", 1.0), "x": ("1", 1.0), "%": ("%", 1.0),
    "requests": ("1", 1.0),
}  # fmt: skip
ENGINES = {
    "vLLM": "vllm", "SGLang": "sglang", "TensorRT-LLM": "tensorrt-llm", "NIM": "nim", "MoAI": "moai",
}  # fmt: skip
BACKEND = re.compile(r"(\S+)(?: (V\d+)| \((.*)\))?")
BOUND = re.compile(r"up to (-?\d+(?:\.\d+)?)")
RANGE = re.compile(r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)")
LAYOUT = re.compile(r"(\d+) prefill nodes? \+ (\d+) decode nodes?")
WINDOWS = (
    ("warmup_cmd_s", "warmup_s", "warm-up (s)"),
    ("cooldown_cmd_s", "cooldown_s", "cool-down (s)"),
)


def recognises(document: Document) -> bool:
    content = document.content if document.kind == "json" else None
    schema = content.get("schema") if isinstance(content, Mapping) else None
    return isinstance(schema, str) and schema.startswith("document_runs/")


def runs(document: Document) -> list[ServingRun]:
    """Raises UnreadableError where the schema is another version's, or a row no object."""
    schema, rows = document.content["schema"], document.content.get("runs")
    if schema != SCHEMA:
        raise UnreadableError(f"cannot read {document.path}: its schema is {schema[:40]!r}, not {SCHEMA!r}")
    if not isinstance(rows, list):
        raise UnreadableError(f"cannot read {document.path}: 'runs' is to be a list of rows")
    beside = {key: value for key, value in document.content.items() if key not in ("schema", "runs")}
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            said = type(row).__name__
            raise UnreadableError(f"cannot read {document.path}: runs[{i}] is {said}, not an object")
    return [_run(document, i, row, beside) for i, row in enumerate(rows)]


def _run(document: Document, index: int, values: Mapping[str, Any], beside: dict[str, Any]) -> ServingRun:
    named = values.get("id")
    row = Fields(
        f"{document.path}: {named if isinstance(named, str) and named else f'runs[{index}]'}", values
    )
    notes: list[str] = []
    kind, note = row.kept("kind"), row.kept("note")
    scope = _known(row, "scope", SCOPES, "unknown", notes)
    tokens = _known(row, "token_scope", TOKENS, None, notes)
    metrics = _metrics(row, scope, tokens, note, notes)
    asked, totals, reported = _log(row, scope, notes)
    hardware, gpus, nodes, parallelism = _machine(row, notes)
    flags, said = options_of(row.kept("flags"))
    if said:
        notes.append(f"beside its options, the text of the flags says more, kept in `extra`: {said!r}")
    engine, version = _engine(row)
    workload = _workload(row, asked, "config" in kind, notes)
    return ServingRun(
        id=row.text("id") or row.where,
        client=f"document_runs.{kind.split()[0] if kind else 'unsaid'}",
        source=row.where,
        label="; ".join(one for one in (kind, row.kept("metric"), note) if one),
        date=row.text("date"),
        hardware=hardware,
        gpus=gpus,
        nodes=nodes,
        engine=engine,
        version=row.text("version") or version,
        image=row.text("image"),
        flags=flags,
        environment=_environment(row),
        parallelism=parallelism,
        mode=_known(row, "mode", MODES, "unknown", notes),
        workload=workload,
        totals=_totals(row, totals),
        metrics=_together(row, metrics, reported),
        extra=row.rest() | beside,
        notes=tuple(notes),
        findings=tuple(row.findings),
    )


def _known(row: Fields, key: str, words: Mapping[str, Any], otherwise: Any, notes: list[str]) -> Any:
    """What all words mean, or those before a bracket, comma or semicolon; else a note that quotes them."""
    text = row.kept(key)
    for said in (text, re.split(r" \(|[;,]", text)[0].strip()):
        if said in words:
            return words[said]
    if text:
        notes.append(f"{key} {text!r} is not among the known ones: left open")
    return otherwise


def _metrics(row: Fields, scope: Scope, tokens: Tokens | None, note: str, notes: list[str]) -> list[Metric]:
    """The row's own number, as one metric or the two ends of a range; and what its reader made of it."""
    label = row.kept("metric")
    name, own, statistic = label, "none", "total"
    for pattern, *meaning in METRICS:
        if re.fullmatch(pattern, label):
            name, own, statistic = meaning
            break
    of = {"scope": scope, "tokens": tokens or own, "label": label}
    unit, scale = _unit(row, name)
    bounded = "max" if note.startswith("up to") else statistic
    found = [
        Metric(name=name or "value", value=value * scale, unit=unit, statistic=which or bounded, **of | more)
        for value, which, more in (_values(row, label) if unit else ())
    ]
    if (output := row.number("output_only")) is not None:
        derived = {"derived": "output_only, which the row's reader made of its source"}
        more = {"name": "throughput", "unit": "tok/s", "statistic": statistic}
        found.append(Metric(value=output, **more, **of | {"tokens": "output"}, **derived))
    return found


def _values(row: Fields, label: str) -> list[tuple[float, str, dict[str, str]]]:
    """(value, statistic, what else is said): empty where there is none, or words that are no number."""
    raw = row.values.get("value")
    if isinstance(raw, str):
        more = {"label": f"{label}: {raw}"}
        if bound := BOUND.fullmatch(raw):
            row.text("value")
            return [(float(bound[1]), "min" if float(bound[1]) < 0 else "max", more)]
        if ends := RANGE.fullmatch(raw):
            row.text("value")
            return [(float(ends[1]), "min", more), (float(ends[2]), "max", more)]
    value = row.number("value")
    return [] if value is None else [(value, "", {})]


def _unit(row: Fields, name: str) -> tuple[str, float]:
    """(unit, scale), latencies in ms; an empty unit where the text is none that this metric can have."""
    text = row.text("unit")
    row.taken.discard("unit")
    known = {"throughput": {"tok/s": ("tok/s", 1.0)}, "e2e": {"s": ("ms", 1e3)}}.get(name, UNITS)
    if text not in known and row.values.get("value") is not None:
        row.leave_out("unit", f"is {text[:40]!r}, not one of {', '.join(known)}: 'value'")
    return known.get(text, ("", 1.0))


def _log(row: Fields, scope: Scope, notes: list[str]) -> tuple[Workload, Totals, list[Metric]]:
    """A client's printed block, label by label, as harness/serving/formats/console.py reads it; its
    throughputs are of what the row says it ran on."""
    log = row.inside("log")
    lines = {key.lower(): key for key in log.values}
    block = Fields(log.where, {low: log.values[key] for low, key in lines.items()}, findings=row.findings)
    workload, totals, metrics = console.printed(block)
    log.taken.update(lines[low] for low in block.taken if low in lines)
    if workload.warmup_s or workload.cooldown_s:
        notes.append(console.WINDOW)
    whole = [one.model_copy(update={"scope": scope}) if one.scope == "instance" else one for one in metrics]
    return workload, totals, metrics if scope == "unknown" else whole


def _together(row: Fields, noted: list[Metric], reported: list[Metric]) -> tuple[Metric, ...]:
    """The metrics of the row and of its log; a number that both have is one, unless they differ."""
    apart = []
    for one in noted:
        what = (one.name, one.tokens, one.statistic)
        same = next((m for m in reported if (m.name, m.tokens, m.statistic) == what), None)
        if same is None:
            apart.append(one)
        elif same.value != one.value:
            message = (
                f"{row.where}: 'value' is {one.value:g} {one.unit}, but the row's log says {same.value:g}"
            )
            row.findings.append(Finding(rule="log", severity="wrong", message=message))
            apart.append(one)
    return (*apart, *reported)


def _workload(row: Fields, logged: Workload, sweep: bool, notes: list[str]) -> Workload:
    """What was asked for; the log's window, since that is what the numbers are of."""
    asked = row.inside("workload")
    dataset = asked.text("dataset")
    concurrencies = asked.values.get("concurrency")
    if sweep and isinstance(concurrencies, list):
        said = ", ".join(map(str, concurrencies))
        notes.append(f"a configuration of several concurrencies: {said}")
        concurrency = None
    else:
        concurrency = asked.number("concurrency")
    own = {
        "dataset": "" if dataset == "unknown" else dataset,
        "prefix_cached": True if dataset.startswith("prefix-cached") else None,
        "input_len": asked.number("isl"),
        "output_len": _first(asked.number("osl"), asked.number("osl_per_request")),
        "range_ratio": asked.number("range_ratio"),
        "concurrency": concurrency,
        "request_rate": asked.number("request_rate", infinite=0.0),
        "num_prompts": asked.count("num_prompts"),
        "warmup_s": asked.number("warmup_log_s"),
        "cooldown_s": asked.number("cooldown_log_s"),
    }
    for name, value in logged.model_dump(exclude_defaults=True).items():
        if own.get(name) not in (None, value):
            _disagree(row, name, own[name], "workload", value, "log")
        own[name] = _first(own.get(name), value)
    for key, name, said in WINDOWS:
        command = asked.number(key)
        asked.taken.discard(key)
        if command is not None and own[name] is not None and command != own[name]:
            _disagree(row, said, command, "command", own[name], "log")
    return Workload(**own)


def _disagree(row: Fields, name: str, one: Any, here: str, other: Any, there: str) -> None:
    message = f"{row.where}: {name} is {one:g} in its {here}, {other:g} in its {there}"
    row.findings.append(Finding(rule="command", severity="suspect", message=message))


def _first(*values: Any) -> Any:
    return next((one for one in values if one is not None), None)


def _totals(row: Fields, logged: Totals) -> Totals:
    """`total_tokens` is of output where the row's words say that they were generated."""
    own = {"duration_s": row.number("elapsed_s")}
    generated = row.count("total_tokens")
    if "generated" in str(row.values.get("token_scope")):
        own["output_tokens"] = generated
    else:
        row.taken.discard("total_tokens")
    return Totals(**{name: _first(own.get(name), value) for name, value in logged.model_dump().items()})


def _machine(row: Fields, notes: list[str]) -> tuple[str, int | None, int | None, Parallelism]:
    """(name, GPUs, nodes, parallelism); `8xMI300X` in a label where no field says it."""
    hardware = row.inside("hardware")
    label, layout, text = hardware.kept("label"), hardware.kept("layout"), row.kept("parallel")
    count, name = gpus_of(label)
    said, nodes = hardware.count("n_gpus"), hardware.count("n_nodes")
    if None not in (said, count) and said != count:
        _disagree(row, "n_gpus", said, "hardware", count, "label")
    gpus = _first(said, count)
    parallelism = parallelism_of(text)
    if text and not parallelism.model_dump(exclude_none=True):
        notes.append(f"parallel {text!r} is not understood: left open")
    halves = LAYOUT.fullmatch(layout)
    if halves and gpus and nodes and nodes == int(halves[1]) + int(halves[2]) and gpus % nodes == 0:
        sides = {"prefill_gpus": int(halves[1]), "decode_gpus": int(halves[2])}
        update = {side: count * gpus // nodes for side, count in sides.items()}
        parallelism = parallelism.model_copy(update=update)
    elif layout:
        notes.append(f"layout {layout!r} is not understood: left open")
    return hardware.text("gpu") or name or label, gpus, nodes, parallelism


def _engine(row: Fields) -> tuple[str, str]:
    """(name, version) of `vLLM V1`, `MoAI (Odin 0.6.1/...)`; as it stands there where it is not known."""
    text = row.kept("backend")
    found = BACKEND.fullmatch(text)
    if not found or found[1] not in ENGINES:
        return text, ""
    return ENGINES[found[1]], found[2] or found[3] or ""


def _environment(row: Fields) -> dict[str, str]:
    """Each variable as text; one that is none of text and number stays in the rest."""
    env = row.inside("env")
    good = {key: value for key, value in env.values.items() if isinstance(value, (str, int, float))}
    env.taken.update(good)
    return {key: str(value) for key, value in good.items()}
