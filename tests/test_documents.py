"""Documents: what README, CONTRIBUTING, CHANGELOG and docs/ say is so. Commands parse and the cheap ones run;
paths, modules and links exist; tables are those of recorded runs; no document is too long; and texts use the
project's words."""

import ast
import fnmatch
import importlib
import io
import itertools
import re
import shlex
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest

import kernels
from harness.catalogue.architectures import architectures
from harness.cli import cli
from harness.compile.compiler import compile_launch
from harness.compile.launches import recorded_launches
from harness.report.case_table import case_table
from harness.report.terminal import plain_text
from harness.results.journal import Journal
from kernels.triton_runtime import interpreter_fits
from shapes.case import parse
from shapes.suites import suites
from tests.support.paths import ROOT
from tests.support.workers_here import run_here

pytestmark = pytest.mark.first  # almost the last by name, and one of the longest

DOCS = sorted(ROOT.glob("docs/**/*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
WITH_LINKS = [*PAGES, *sorted(ROOT.glob("results/**/*.md")), *sorted(ROOT.glob("kernels/**/*.md"))]
LINES = {"README.md": 100, "CONTRIBUTING.md": 60, "results/README.md": 60, "CHANGELOG.md": 180}
"""The most lines of these documents; DOCUMENT_LINES is that of any other one."""
DOCUMENT_LINES = 180
DOCS_LINES = 1500
"""The most lines of docs/."""
TERMS = 25
"""The most words that docs/architecture.md defines."""

COMMAND = re.compile(r"(?:\.venv/bin/)?python -m harness (.*)")
PLACEHOLDER = re.compile(r"[A-Z]+(/[A-Z]+)?")
"""`OP`, `RUN`, `FILE`: stands for a value."""
READ_ONLY = {
    ("list",),
    ("claims",),
    ("engine",),
    ("compare",),
    ("export",),
    ("doctor", "--quick"),
    *(("serving", name) for name in ("load", "compare", "recipe", "trace", "predict", "what-if", "ledger")),
}
"""Commands that measure nothing; they run as they are written where the files they name are there."""
WRITES = ("--ledger", "--out", "--json", "--resume", "--revisions", "--write")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FOLDERS = ("harness", "kernels", "shapes", "tests", "tools", "results", "docs")
PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w<>*./+-]*")
MODULE = re.compile(r"(?:harness|kernels|shapes)(?:\.\w+)+")


def place(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def each_page(pages: Sequence[Path] = PAGES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=place)


def blocks(page: Path, language: str = "") -> list[str]:
    return [text for of, text in FENCE.findall(page.read_text()) if of == language]


def spans(page: Path) -> list[str]:
    """What stands between backticks, outside fenced blocks."""
    return SPAN.findall(FENCE.sub("", page.read_text()))


def shell_lines(page: Path) -> Iterator[list[str]]:
    """Words of each line of a block without a language, continued lines joined, up to a pipe or comment."""
    for block in blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"(\.venv/bin/)?python -m|make |git |export ", line):
                words = shlex.split(line, comments=True)
                yield list(itertools.takewhile(lambda word: word != "|", words))


def commands(page: Path) -> list[tuple[str, ...]]:
    """Arguments of each `python -m harness` in the blocks and between backticks."""
    found = [
        tuple(words[3:])
        for words in shell_lines(page)
        if words[1:3] == ["-m", "harness"] and words[0].endswith("python")
    ]
    found += [tuple(shlex.split(match[1])) for span in spans(page) if (match := COMMAND.fullmatch(span))]
    if page == ROOT / "README.md":  # its tables leave `python -m harness` out
        names = cli.list_commands(click.Context(cli))
        words_of_spans = [tuple(span.split()) for span in spans(page) if span.count('"') % 2 == 0]
        found += [words for words in words_of_spans if len(words) > 2 and words[0] in names]
    return [words for words in found if not PLACEHOLDER.fullmatch(words[0])]


FIRST_CONTACT = (ROOT / "tools" / "first_contact.sh").read_text()
STEPS = [tuple(shlex.split(line)[3:]) for line in FIRST_CONTACT.splitlines() if line.startswith("step ")]
"""Of what a GPU is asked first, where a command that cannot be understood costs its time."""
COMMANDS = sorted({words for page in PAGES for words in commands(page)} | set(STEPS))


def parsed(words: Sequence[str]) -> click.Context:
    """As click reads it, without running it. Raises click.ClickException."""
    command, rest = cli, list(words)
    while isinstance(command, click.Group):
        context = click.Context(command)
        assert rest and rest[0] in command.list_commands(context), f"no command {rest[:1]}"
        command = command.get_command(context, rest.pop(0))
    return command.make_context(words[0], rest)


def values(option: object) -> list[str]:
    given = [option] if isinstance(option, str) else list(option or ())
    return [value for value in given if not PLACEHOLDER.fullmatch(value)]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_can_be_understood(words):
    options = parsed(words).params
    for op in values(options.get("op")):
        assert op in kernels.OPS
        names = [implementation.name for implementation in kernels.implementations(op)]
        own = ("mine.*", "control.*")  # of a file that a document tells to write, of tools/control_kernels.py
        for pattern in ",".join(values(options.get("impl"))).split(","):
            assert not pattern or pattern in own or fnmatch.filter(names, pattern), pattern
        for text in values(options.get("case")):
            assert [kernels.OPS[op].case(sizes) for sizes in parse(text)]
    for suite in values(options.get("suite")):
        assert suite in suites()


def runs_here(words: tuple[str, ...]) -> bool:
    if words[:1] not in READ_ONLY and words[:2] not in READ_ONLY and "--dry-run" not in words:
        return False
    files = [word for word in words if re.search(r"\.(jsonl?|txt|gz)$", word)]
    return not set(words) & set(WRITES) and all((ROOT / file).exists() for file in files)


@pytest.mark.parametrize("words", [of for of in COMMANDS if runs_here(of)], ids=" ".join)
def test_a_command_that_measures_nothing_runs(words, here, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = here(*words)
    assert done.returncode == 0
    assert done.stdout
    assert "error:" not in done.stderr


@each_page()
def test_make_has_the_targets_and_python_compiles(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = [words[1] for words in shell_lines(page) if words[0] == "make"]
    asked += [span.split()[1] for span in spans(page) if span.startswith("make ")]
    assert set(asked) <= set(targets)
    for block in blocks(page, "python"):
        compile(block, place(page), "exec")


@each_page()
def test_paths_exist(page):
    text = re.sub(r"\]\([^)]*\)|https?://\S+", "", page.read_text())
    missing = []
    for path in dict.fromkeys(PATH.findall(text)):
        pattern = re.sub(r"<\w+>", "*", path.rstrip("./"))
        if pattern.startswith("results/local") or "<device>" in path:
            continue  # made by a run
        if not any(ROOT.glob(pattern)):
            missing.append(path)
    assert not missing


@each_page()
def test_modules_exist(page):
    """Between backticks, called or not: `harness.results.load`."""
    names = {match[0] for span in spans(page) if (match := MODULE.match(span))}
    lines = [line for block in blocks(page, "python") for line in block.splitlines()]
    names |= {f"{m[1]}.{m[2]}" for line in lines if (m := re.match(r"from ([\w.]+) import (\w+)", line))}
    for name in sorted(names):
        module, _, rest = name.rpartition(".")
        assert hasattr(importlib.import_module(module), rest) or importlib.import_module(name)


@each_page(WITH_LINKS)
def test_links_lead_somewhere(page):
    targets = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
    assert not [link for link in targets if link and not (page.parent / link).exists()]


@each_page([*PAGES, ROOT / "results" / "README.md"])
def test_a_document_is_short(page):
    assert len(page.read_text().splitlines()) <= LINES.get(place(page), DOCUMENT_LINES)


def test_the_documents_are_short_in_all():
    assert sum(len(page.read_text().splitlines()) for page in DOCS) <= DOCS_LINES


def test_readme_counts_the_implementations():
    (said,) = re.findall(r"more than (\d+) implementations", (ROOT / "README.md").read_text())
    assert int(said) < sum(len(kernels.implementations(op)) for op in kernels.OPS) < int(said) + 20


def test_readme_names_every_command_and_leads_to_every_document():
    text = (ROOT / "README.md").read_text()
    context = click.Context(cli)
    names = [name for name in cli.list_commands(context) if name != "serving"]
    names += [f"serving {name}" for name in cli.get_command(context, "serving").list_commands(context)]
    assert not [name for name in names if f"`{name}`" not in text]
    assert {place(page) for page in PAGES if page.name != "README.md"} <= set(LINK.findall(text))


def test_tables_are_of_committed_runs():
    of_case = Journal(ROOT / "results/h200/mla_decode-b64")
    (records,) = of_case.finished().values()
    assert plain_text(case_table(records, of_case.run())) + "\n" in blocks(ROOT / "README.md")
    of_settings = Journal(ROOT / "results/epyc-zen4-2core/toggle/onednn")
    table = plain_text(case_table(next(iter(of_settings.finished().values())), of_settings.run()))
    shown = next(block for block in blocks(ROOT / "docs" / "comparing.md") if "what ran" in block)
    assert shown.rstrip() in table


@pytest.mark.parametrize(("example", "name"), [(0, "mine.mla"), (1, "mine.triton")])
def test_an_example_of_an_implementation_is_right(cli, tmp_path, example, name):
    """A block of adding-a-kernel.md, as a file of one's own; Triton's by its interpreter, in a process of its
    own."""
    if name == "mine.triton":
        pytest.importorskip("triton")
        if not (support := interpreter_fits()).ok:
            pytest.skip(support.reason)
    (plugin := tmp_path / "mine.py").write_text(blocks(ROOT / "docs/adding-a-kernel.md", "python")[example])
    case = ("--op", "mla_decode", "--case", "batch=2 ctx=1..40 heads=2 page=16", "--device", "cpu")
    if name == "mine.triton":
        done = cli("check", *case, "--impl", name, KERNEL_BENCH_PLUGINS=plugin)
    else:
        done = run_here(*case, "--impl", name, plugin=plugin, command="check")
    assert f"{name} is right" in done.stdout, done.stderr


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_triton_example_compiles_for_gpus(tmp_path, target):
    pytest.importorskip("triton")
    (path := tmp_path / f"{target}.py").write_text(blocks(ROOT / "docs" / "adding-a-kernel.md", "python")[1])
    (row,), op = kernels.implementations_of(path), kernels.OPS["mla_decode"]
    sizes = op.sizes({**op.defaults(target), **parse("batch=16 ctx=4096 heads=16")[0]})
    with recorded_launches(architectures()[target]) as calls:
        row.prepare(op.empty_operands(sizes, "meta"), op.empty_output(sizes, "meta")).call()
    ((kernel, data),) = calls
    figures = compile_launch(kernel, target, data)
    assert (figures.error, figures.scratch_bytes) == ("", 0)


def terms() -> list[str]:
    """The words that docs/architecture.md defines, in its order."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("| word | meaning |\n|---|---|\n")[2].partition("\n\n")[0]
    return [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()]


def test_the_words_are_few_and_common():
    assert len(terms()) == len(set(terms()))
    assert 20 <= len(terms()) <= TERMS
    assert not [term for term in terms() if coined(term)]


COINED = re.compile(
    r"\b(?:arms?|(?i:contenders?|stations?|twins?|anchors?|heats?|lanes?|whoever|whomever|somebody|nobody))\b"
)
"""Words of the project's former private language. `Arm` is a maker of CPUs."""
OTHER_SENSES = {
    "harness/page": "anchor",
    "harness/machine": "heat",
    "kernels": "lane",
    "harness/serving": "twin",
}
"""Where such a word means what it means everywhere: a place in a page, heat, a lane of a vector unit,
`twin` as a key of recorded replays."""
PACKAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("harness/*"), *ROOT.glob("kernels/*")]
    if path.suffix == ".py" or any(path.glob("*.py"))
)


def coined(text: str, *places: str) -> list[str]:
    """The coined words of a text, but for those that have another sense in one of the places."""
    senses = tuple(OTHER_SENSES[place] for place in places if place in OTHER_SENSES)
    return [word for word in COINED.findall(text) if not word.lower().startswith(senses or "-")]


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """Lines of a file's docstrings (of attributes too) and comments, with their numbers; none of a file
    without a coined word."""
    source = file.read_text()
    if not COINED.search(source):
        return
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield from enumerate(lines[node.lineno - 1 : node.end_lineno], node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_and_comments_have_no_coined_words(package):
    """An A/B of a server and a replay have arms."""
    top = ROOT / package
    found = [
        f"{place(file)}:{number}: {line.strip()}"
        for file in ([top] if top.is_file() else sorted(top.rglob("*.py")))
        for number, line in texts(file)
        if set(coined(line, package, package.partition("/")[0]))
        - ({"arm", "arms"} if "serving" in file.parts else set())
    ]
    assert not found, "\n".join(found)


def helps(command: click.Command, path: str) -> Iterator[tuple[str, str]]:
    """The help of a command, of its options and of the commands below it, each with where it stands."""
    yield path, f"{command.help or ''} {command.short_help or ''}"
    for option in command.params:
        if isinstance(option, click.Option):
            yield f"{path} {option.opts[0]}", f"{option.help or ''} {option.metavar or ''}"
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            yield from helps(command.get_command(click.Context(command), name), f"{path} {name}")


def test_helps_have_no_coined_words():
    found = [
        f"{path}: {text.strip()}"
        for path, text in helps(cli, "harness")
        if set(coined(text)) - ({"arm", "arms"} if "serving" in path else set())
    ]
    assert not found, "\n".join(found)


@each_page([page for page in PAGES if page.name != "CHANGELOG.md"])
def test_documents_have_no_coined_words(page):
    """Code between backticks and in blocks may have them: keys of records, options."""
    prose = FENCE.sub(lambda block: "\n" * block[0].count("\n"), page.read_text())
    found = [
        f"{place(page)}:{number}: {line}"
        for number, line in enumerate(prose.splitlines(), 1)
        if set(coined(SPAN.sub("", line))) - ({"arm", "arms"} if "serving" in page.name + line else set())
    ]
    assert not found, "\n".join(found)
