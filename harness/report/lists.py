"""The lists of the command `list`. They are made without importing torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from fnmatch import fnmatchcase

from rich.console import Group, RenderableType
from rich.text import Text

import kernels
from harness.catalogue.architectures import evidence
from harness.catalogue.flags import READ, Flag, catalogue
from harness.catalogue.published import figures
from harness.catalogue.recipes import Recipe, Variable, recipes, recipes_and_guides
from harness.errors import UsageError
from harness.paths import command
from harness.plan.select import choose_cases
from harness.report.fitting_table import table_of
from harness.report.terminal import line_width, wrapped
from harness.report.text import grouped
from kernels.platform import KINDS, Platform
from shapes.attention import Parallel
from shapes.case import Case, parse, text_of
from shapes.cases import R1
from shapes.linears import linears
from shapes.models import model, models
from shapes.suites import suite, suites

ALL = "all"  # as `--suite`: the cases of all suites
INDENT = "    "

Row = Mapping[str, object]
Listing = tuple[Sequence[Row], RenderableType]
"""A list as objects for JSON, and as text for people."""


def listing(
    what: str, ops: Sequence[str], platform: Platform, suite_name: str | None, all_flags: bool = False
) -> Listing:
    """The list of the command `list WHAT`. If the platform is not this machine, only its own flags and
    recipes are listed. The text has only flags that recipes and guides set or, with `all_flags`, all of them,
    as the JSON has. Raises UsageError for an unknown suite."""
    if what == "impls":
        rows = _implementations(ops, platform)
        predicate = "can run" if platform.here else f"are rows for {platform.arch}, none of them tried"
        return rows, _by_reason(rows, platform, predicate, can="runs", why_not="why not")
    if what == "cases":
        rows = _cases(ops, platform, suite_name or "smoke")
        return rows, _titled_tables(_by_suite(rows))
    if what == "published":  # for all devices
        rows = _published(ops)
        return rows, _titled_tables(_by_source(rows))
    if what == "models":
        return _models()
    if what == "flags":
        flags = _flags(ops) if platform.here else _flags(ops, platform.kind, platform.arch)
        end = _all_flags(flags) if all_flags else _hints_on_flags(ops, platform)
        rows = [asdict(flag) | {"ops": flag.ops} for flag in flags]
        return rows, "\n".join([*_main_flags(ops, platform), *end])
    if what == "recipes":
        listed = [r for r in recipes().values() if platform.here or r.platform == platform.kind]
        text = "\n\n".join("\n".join(_recipe_lines(recipe)) for recipe in listed)
        return [asdict(recipe) for recipe in listed], text
    if what == "ops":
        rows = [
            {"op": op, "sizes": ", ".join(field.name for field in fields(kernels.OPS[op].Sizes)),
             "boundaries": ", ".join(kernels.OPS[op].boundaries),
             "implementations": len(kernels.implementations(op)),
             "baseline here": kernels.OPS[op].baseline[platform.kind]}
            for op in ops
        ]  # fmt: skip
    elif what == "suites":
        rows = [{"suite": s.name, "description": s.description} for s in suites().values()]
    else:  # the linears of DeepSeek-R1 on one rank; block_scale_gemm computes the kind fp8 block-scale
        deployments = (Parallel(tp=8), Parallel(tp=4), Parallel(dp=8, ep=8))
        rows = [
            {"parallel": p.text, **asdict(linear)} for p in deployments for linear in linears(model(R1), p)
        ]
    return rows, table_of(rows)


def of_case(ops: Sequence[str], text: str, platform: Platform) -> Listing:
    """The implementations of the op whose case the text is, and whether they take it in any boundary. For one
    that does not, the reason is that of the widest boundary, as in `run`. Raises UsageError, see `_one_case`.
    """
    cases = _one_case(ops, text, platform.arch)
    op = cases[0].op
    rows = []
    implementations = kernels.implementations(op)
    for row, implementation in zip(_implementations([op], platform), implementations, strict=True):
        supports = [implementation.supports(case, platform) for case in cases]
        takes = any(support.ok for support in supports)
        rows.append({**row, "takes": takes, "reason": row["why not"] if takes else supports[-1].reason})
    return rows, _by_reason(rows, platform, f"take {cases[0].text}", can="takes", why_not="reason")


def _one_case(ops: Sequence[str], text: str, arch: str) -> Sequence[Case]:
    """The case in the text, in each boundary of the op that has such sizes. Sizes that the text leaves out
    are those of the suite r1-tp8. Raises UsageError unless the text is one case of one op."""
    try:
        size_sets = parse(text, ops[0] if len(ops) == 1 else "")
    except ValueError as error:
        raise UsageError(str(error)) from None
    names = size_sets[0].keys()
    fitting_ops = [op for op in ops if names <= {field.name for field in fields(kernels.OPS[op].Sizes)}]
    if len(ops) > 1 and len(fitting_ops) != 1:
        raise UsageError(f"say whose case {text!r} is: --op {' or --op '.join(fitting_ops or ops)}")
    op = fitting_ops[0] if fitting_ops else ops[0]
    example = next(iter(suite("r1-tp8").cases(op)), None)
    texts = [text_of({**example.sizes, **sizes}) for sizes in size_sets] if example else [text]
    cases = choose_cases(kernels.OPS[op], None, texts, None, arch)
    if len(cases) != len(kernels.OPS[op].boundaries):
        raise UsageError(f"--case of list is one case; {text!r} is several")
    return cases


def _models() -> Listing:
    """The models with their sources, and what of them is left out."""
    rows: list[Row] = []
    lines = []
    for m in map(model, models()):
        mtp_layers = m.num_nextn_predict_layers
        rows.append({"model": m.name, "source": m.source, "MTP layers, left out": mtp_layers,
                     "not modelled": m.not_modelled})  # fmt: skip
        mtp = f"MTP layers, left out: {mtp_layers}" if mtp_layers else ""
        lines += [m.name, *_wrapped([m.source, *m.not_modelled, mtp])]
    return rows, "\n".join(lines)


def _published(ops: Sequence[str]) -> list[Row]:
    return [
        {
            "op": f.op, "sizes": text_of(f.sizes), "implementation": f.implementation, "device": f.device,
            "us": f.time_us, "TFLOPS": f.tflops, "source": f.source, "timed": f.method, "where": f.where,
        }
        for f in figures()
        if f.op in ops
    ]  # fmt: skip


def _implementations(ops: Sequence[str], platform: Platform) -> list[Row]:
    rows: list[Row] = []
    for op in ops:
        for impl in kernels.implementations(op):
            support = impl.available(platform)
            why_not = support.reason
            if support.ok and not why_not and impl.interpreted(platform):
                why_not = "checked, not timed (interpreted)"
            version = impl.version if platform.here else ""
            rows.append({
                "op": op, "implementation": impl.name, "provider": impl.provider, "version": version,
                "boundary": ", ".join(impl.boundaries), "runs": support.ok, "why not": why_not,
                "requires": impl.requires, "evidence": evidence().get(impl.name, {}),
            })  # fmt: skip
    return rows


def _by_reason(
    rows: Sequence[Row], platform: Platform, predicate: str, can: str, why_not: str
) -> RenderableType:
    """A table of the implementations that can do something, then the others by the reason why they cannot. On
    this machine the first table has versions instead of what the implementations require.

    rows:         as `_implementations` returns them, perhaps with more fields
    predicate:    what the first ones can do, in words: `can run`
    can, why_not: the fields of the rows that say whether they can, and why not"""
    one_op = len({row["op"] for row in rows}) == 1
    boundaries = {str(row["boundary"]) for row in rows}
    columns = ["implementation", "boundary"] if len(boundaries) > 1 else ["implementation"]
    running: list[Row] = []
    for row in (row for row in rows if row[can]):
        cells = {name: row[name] for name in (columns if one_op else ["op", *columns])}
        if platform.here:
            note, _, _ = str(row[why_not]).partition(" (")  # without the explanation in brackets
            cells |= {"note": note, "version": f"{row['provider']} {row['version']}".strip()}
        elif one_op:
            cells["requires"] = row["requires"]
        running.append(cells)
    everywhere = "" if len(boundaries) > 1 else f"; all compute {boundaries.pop()}"
    title = f"\n{len(running)} of {len(rows)} {predicate}{everywhere}"
    parts: list[RenderableType] = [Text(title, "bold green")]
    if running:
        parts.append(table_of(running))
    # The command has printed which machine this is, so reasons are cut there.
    others = [row for row in rows if not row[can]]
    by_reason = grouped(others, lambda row: str(row[why_not]).partition("; this is ")[0])
    largest_first = sorted(by_reason, key=lambda why: -len(by_reason[why]))
    # Rows that run here, but do not take the case, come before those that do not run here.
    for why in sorted(largest_first, key=lambda why: not by_reason[why][0]["runs"]):
        group = by_reason[why]
        parts += ["", Text(f"{len(group)} cannot: {why}", "bold")]
        lines: list[Row] = [{name: row[name] for name in (*columns, "requires")} for row in group]
        if not one_op:
            by_op = grouped(group, lambda row: row["op"]).items()
            lines = [{"op": op, "implementations": ", ".join(str(row["implementation"]) for row in of_op)}
                     for op, of_op in by_op]  # fmt: skip
        parts.append(table_of(lines))
    if not one_op:
        parts += ["", "with --op OP or --json: what each requires"]
    return Group(*parts)


def _cases(ops: Sequence[str], platform: Platform, suite_name: str) -> list[Row]:
    try:
        chosen = list(suites().values()) if suite_name == ALL else [suite(suite_name)]
        cases = [(s.name, op, case) for s in chosen for op in ops for case in s.cases(op)]
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not cases:
        raise UsageError(chosen[0].why_no_cases(ops[0]))
    defaults = {op: kernels.OPS[op].defaults(platform.arch) for op in ops}
    return [
        {"suite": name, "op": op, "case": kernels.OPS[op].case({**defaults[op], **case.sizes}).text,
         "weight": round(case.weight, 4), "place": case.place}
        for name, op, case in cases
    ]  # fmt: skip


def _titled_tables(groups: Iterable[tuple[str, Sequence[Row]]]) -> RenderableType:
    """A table for each group, below its title."""
    parts: list[RenderableType] = []
    for title, rows in groups:
        parts += ["", Text(title, "bold"), table_of(rows)]
    return Group(*parts[1:])


def _by_suite(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yields the cases of each suite and op, below a title with the sizes that all of them have."""
    for (suite_name, op), cases in grouped(rows, lambda row: (row["suite"], row["op"])).items():
        sizes_of_cases = [str(row["case"]).split() for row in cases]
        shared = []
        if len(cases) > 1:
            shared = [size for size in sizes_of_cases[0] if all(size in sizes for sizes in sizes_of_cases)]
        place, *other_places = {str(row["place"]): None for row in cases}
        title = f"{suite_name} {op}"
        if not other_places and place != suite_name:
            title += f"; {place}"
        if shared:
            title += f"; all with {' '.join(shared)}"
        lines: list[Row] = []
        for row, sizes in zip(cases, sizes_of_cases, strict=True):
            own_sizes = " ".join(size for size in sizes if size not in shared)
            weight = f"{100 * float(str(row['weight'])):.1f} %"
            lines.append({"case": own_sizes, "weight": weight, "place": row["place"] if other_places else ""})
        yield title, lines


def _by_source(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yields published figures below a title: their source, the place in it and how it timed."""
    about = ("source", "where", "timed")
    for title, group in grouped(rows, lambda row: "; ".join(str(row[name]) for name in about)).items():
        yield title, [{name: row[name] for name in row if name not in about} for row in group]


def _main_flags(ops: Sequence[str], platform: Platform) -> Iterator[str]:
    """Yields for each kind of platform the flags that can act on one of the ops: those by which all versions
    of an engine choose between implementations, then those that recipes and guides set; and the guides."""
    kinds = dict.fromkeys([platform.kind, *KINDS]) if platform.here else [platform.kind]
    for kind in kinds:
        arch = platform.arch if kind == platform.kind else ""
        documents = [document for document in recipes_and_guides() if document.platform == kind]
        settings = [(variable, document.name) for document in documents for variable in document.variables]
        by_flag = grouped(settings, lambda setting: setting[0].name)
        can_act = [flag for flag in _flags(ops, kind, arch) if not flag.without]
        listed = [f for f in can_act if f.name in by_flag or (_chooses(f, ops) and not f.versions)]
        listed.sort(key=lambda f: (not f.chooses, bool(f.versions), -len(by_flag.get(f.name, ()))))
        yield f"{kind} {arch}".strip() + ": engines' switches, then what recipes and guides set"
        for flag in listed:
            yield from _wrapped([_who_sets(flag, by_flag.get(flag.name, ()))], "")
            yield from _wrapped(_about(flag))
        guides = [document for document in documents if document.name not in recipes()]
        yield from [*_wrapped((f"{g.name}: {g.document}, {g.where}" for g in guides), ""), ""]


def _who_sets(flag: Flag, settings: Iterable[tuple[Variable, str]]) -> str:
    """Whose switch a flag is, and which values documents give it; settings: each with its document's name"""
    clauses = [f"{flag.name}: {flag.library}'s switch"] if flag.chooses else []
    # Where a document gives no value, its note says what to set.
    by_value = grouped(settings, lambda setting: setting[0].value or setting[0].note)
    for value, of_value in by_value.items():
        clauses.append(f"{flag.name}={value} by {', '.join(document for _, document in of_value)}")
    return "; ".join(clauses)


def _chooses(flag: Flag, ops: Sequence[str]) -> bool:
    """Whether an engine chooses between rows of one of the ops by two or more values of the flag."""
    values_with_rows = Counter(op for rows in flag.chooses.values() for op in ops if rows.get(op))
    return any(count > 1 for count in values_with_rows.values())


def _hints_on_flags(ops: Sequence[str], platform: Platform) -> Iterator[str]:
    options = [] if platform.here else ["--arch", platform.arch]
    if len(ops) == 1:
        options += ["--op", *ops]
    yield "every flag that can act, and what its values mean:"
    yield f"  {command('list', 'flags', '--all', *options)}"
    yield "`list recipes` has the documents; `toggle --flag NAME=A,B` measures a flag"


def _flags(ops: Sequence[str], kind: str = "", arch: str = "") -> list[Flag]:
    """The flags that can act on one of the ops on a kind of platform and an architecture; an empty text
    stands for all. Flags that act on no op are listed with all ops."""
    flags = [flag for flag in catalogue().values() if not kind or kind in flag.platforms]
    flags = [flag for flag in flags if not arch or not flag.archs or arch in flag.archs]
    if set(ops) != set(kernels.OPS):
        flags = [flag for flag in flags if set(ops) & set(flag.ops)]
    return flags


def _all_flags(flags: Sequence[Flag]) -> Iterator[str]:
    """Yields for each library its flags, their effects, when they are read, and their values."""
    for library, of_library in grouped(flags, lambda flag: flag.library).items():
        yield library
        for flag in of_library:
            yield from [flag.name, *_wrapped([*_about(flag), *_details(flag)])]
        yield ""
    yield "--json has what each entry was read in"


def _about(flag: Flag) -> Iterator[str]:
    """The effect of a flag, what it acts on, and the versions that read it."""
    acts_on = _acts_on(flag.name)
    yield f"{flag.effect} {acts_on[0].upper()}{acts_on[1:]}."
    if flag.versions:
        yield f"versions: {flag.versions}"


def _details(flag: Flag) -> Iterator[str]:
    yield f"default: {flag.default}; read {READ[flag.read]}; platforms: {', '.join(flag.platforms)}"
    values = "; ".join(f"{value}: {meaning}" for value, meaning in flag.values.items())
    yield "; or ".join(filter(None, [values, flag.takes]))
    for value, by_op in flag.chooses.items():
        rows = ", ".join(f"{op} by {' or '.join(names) or 'no row here'}" for op, names in by_op.items())
        yield f"{value} stands for {rows}"
    if flag.unconfirmed:
        yield f"not confirmed: {flag.unconfirmed}"


def _recipe_lines(recipe: Recipe) -> Iterator[str]:
    yield f"{recipe.name}  ({recipe.platform} {recipe.arch})"
    options = f"and, not applied: {' '.join(recipe.options)}" if recipe.options else ""
    yield from _wrapped([f"{recipe.document}: {recipe.where}", recipe.engine, recipe.note, options])
    for variable in recipe.variables:
        setting = variable.name if variable.value is None else f"{variable.name}={variable.value}"
        about = "; ".join(filter(None, [_acts_on(variable.name), variable.note]))
        yield from wrapped(f"{setting}  # {about}", INDENT, f"{INDENT * 2}# ", line_width()).splitlines()


def _acts_on(name: str) -> str:
    """What the flag of this name acts on, or why no measurement here shows it."""
    flag = catalogue()[name]
    if flag.without:
        return f"cannot act: {flag.without}"
    where = f" on {', '.join(flag.archs)}" if flag.archs else ""
    if flag.chooses:
        return f"an engine chooses between implementations by it{where}: toggle it alone"
    launch = f", in {flag.launch} launches" if flag.launch else ""
    patterns = dict.fromkeys(pattern for of_op in flag.touches.values() for pattern in of_op)
    # A pattern that another one covers, such as `aiter.ck` beside `aiter.ck*`, is left out.
    widest = [p for p in patterns if not any(p != other and fnmatchcase(p, other) for other in patterns)]
    rows = "" if "*" in patterns else f", on rows {', '.join(widest)}"
    ops = "every op" if set(flag.ops) == set(kernels.OPS) else ", ".join(flag.ops) or "no op"
    return f"acts on {ops}{where}{launch}{rows}"


def _wrapped(paragraphs: Iterable[str], indent: str = INDENT) -> Iterator[str]:
    """Yields the lines of the paragraphs. The first line of each has this indent, the others INDENT."""
    for paragraph in paragraphs:
        yield from wrapped(paragraph, indent, INDENT, line_width()).splitlines()
