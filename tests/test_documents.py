"""Documents: what README, CONTRIBUTING, CHANGELOG and docs/ say is so. Commands parse and the cheap ones run;
paths, modules and links exist; tables are those of recorded runs; and no document is too long."""

import fnmatch
import importlib
import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest

import kernels
from harness.cli import cli
from harness.report import arm_table
from harness.report.case_table import case_table
from harness.report.terminal import plain
from harness.results.journal import Journal
from kernels.triton_runtime import interpreter_fits
from shapes.case import parse
from shapes.suites import suites
from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
RESULTS = sorted((ROOT / "results").rglob("*.md"))
LINES = {"README.md": 100, "CONTRIBUTING.md": 60, "results/README.md": 60}
"""At most, of these; of any other document DOCUMENT_LINES."""
DOCUMENT_LINES = 180

COMMAND = re.compile(r"(?:\.venv/bin/)?python -m harness (.*)")
PLACEHOLDER = re.compile(r"[A-Z]+(/[A-Z]+)?")
"""`OP`, `RUN`, `FILE`: stands for a value."""
READ_ONLY = {
    ("list",),
    ("claims",),
    ("compare",),
    ("export",),
    ("doctor", "--quick"),
    *(("serving", name) for name in ("load", "compare", "recipe", "trace", "predict", "what-if", "ledger")),
}
"""Commands that measure nothing; they run as they are written where the files they name are there."""
WRITES = ("--ledger", "--out", "--json", "--resume", "--revisions")

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


@each_page([*PAGES, *RESULTS])
def test_links_lead_somewhere(page):
    targets = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
    assert not [link for link in targets if link and not (page.parent / link).exists()]


@each_page([*PAGES, ROOT / "results" / "README.md"])
def test_a_document_is_short(page):
    assert len(page.read_text().splitlines()) <= LINES.get(place(page), DOCUMENT_LINES)


def test_readme_names_every_command_and_leads_to_every_document():
    text = (ROOT / "README.md").read_text()
    context = click.Context(cli)
    names = [name for name in cli.list_commands(context) if name != "serving"]
    names += [f"serving {name}" for name in cli.get_command(context, "serving").list_commands(context)]
    assert not [name for name in names if f"`{name}`" not in text]
    assert {place(page) for page in PAGES} - {"README.md"} <= set(LINK.findall(text))


def test_tables_are_of_committed_runs():
    of_case = Journal(ROOT / "results/h200/mla_decode-b64")
    assert plain(case_table(next(iter(of_case.finished().values())))) + "\n" in blocks(ROOT / "README.md")
    of_arms = Journal(ROOT / "results/epyc-zen4-2core/toggle/onednn")
    table = plain(arm_table.case_table(next(iter(of_arms.finished().values())), of_arms.run()))
    shown = next(block for block in blocks(ROOT / "docs" / "toggles.md") if "what ran" in block)
    assert shown.rstrip() in table


def test_the_table_of_compare_is_what_it_prints(here, monkeypatch):
    monkeypatch.chdir(ROOT)
    runs = "results/epyc-zen4-2core/compare"
    printed = here("compare", f"{runs}/a", f"{runs}/b").stdout
    shown = next(block for block in blocks(ROOT / "docs" / "comparing.md") if "B vs A" in block)
    assert {line.rstrip() for line in shown.splitlines()} <= {line.rstrip() for line in printed.splitlines()}


@pytest.mark.parametrize(("example", "name"), [(0, "mine.mla"), (1, "mine.triton")])
def test_an_example_of_an_implementation_is_right(cli, tmp_path, example, name):
    """A block of adding-a-kernel.md, as a file of one's own; Triton's by its interpreter."""
    if name == "mine.triton":
        pytest.importorskip("triton")
        if not (support := interpreter_fits()).ok:
            pytest.skip(support.reason)
    (tmp_path / "mine.py").write_text(blocks(ROOT / "docs" / "adding-a-kernel.md", "python")[example])
    case = ("--op", "mla_decode", "--case", "batch=2 ctx=1..40 heads=2 page=16", "--device", "cpu")
    done = cli("check", *case, "--impl", name, KERNEL_BENCH_PLUGINS=tmp_path / "mine.py")
    assert f"{name} is right" in done.stdout, done.stderr
