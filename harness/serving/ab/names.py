"""Looks up the names by which arms differ in the installed engine. If nothing reads a variable or a flag,
that is the simplest explanation of a gain that vanished.

A name does not count in a comment or a docstring, in the line that declares it, or as an item of a list or a
key of a table. Names that are put together at run time are not found, so the result is only a warning.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from harness.files import JsonObject
from harness.serving.ab.plan import FOREIGN, SHELLS, Command, Plan, launch_command
from harness.serving.ab.templates import GONE

ASK = """import importlib.util, json, sys
spec = importlib.util.find_spec(sys.argv[1]) if sys.argv[1] else None
package = (list(spec.submodule_search_locations or []) or [spec.origin]) if spec else []
print(json.dumps([package, [path for path in sys.path if path] + [sys.executable]]))"""
"""Prints where the module of the first argument is, and the paths that its Python searches."""
# Variables that are read by the system, by Python, or by runtimes that put the name together.
OF_SYSTEM = re.compile(r"(LD|OMP|GOMP|MALLOC|GLIBC|PYTHON|LC|XDG|HF|CUDA)_\w+|PATH|HOME|TMPDIR|TZ|LANG|USER")
LIBRARIES = ("/opt/rocm/lib", "/opt/rocm/lib64", "/usr/local/lib", "/usr/local/cuda/lib64")
NO_PRODUCT = {"test", "tests", "benchmark", "benchmarks", "__pycache__", ".git"}
PYTHON, C = (".py",), (".cpp", ".cc", ".cu", ".cuh", ".h", ".hpp", ".hip")
# What is no code: docstrings and comments.
NO_PYTHON = re.compile(r"\"\"\".*?\"\"\"|'''.*?'''|#[^\n]*", re.DOTALL)
NO_C = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# What reads a name in Python: `.NAME`; "NAME" behind other text in its line, as in `getenv("NAME")`; "NAME"
# in the line after an open bracket; "NAME" at the start of a line, but not as an item of a list or as a key.
READ_IN_PYTHON = r"""\.NAME\b|(?:\S[^\n]*|\w[(\[]\s*)["']NAME["']|^\s*["']NAME["']\s*(?![\s,:])"""
READ_IN_C = '"NAME"'
FIELD = re.compile(r"^    (\w+)\s*:\s*A\[", re.MULTILINE)  # a field of SGLang's server arguments


def looked_up(plan: Plan, say: Callable[[str], None] = lambda line: None) -> list[JsonObject]:
    """An entry for each differing name that nothing reads: `name`, `found` (False) and a text, `says`.

    If the engine cannot be looked into, the first entry has no `name`, None as `found`, and the reason as
    `says`. The others are the names that templates.toml knows to be gone.
    """
    variables, flags = plan.differing()
    names = [*variables, *flags]
    if not names:
        return []
    entries: list[JsonObject] = []
    try:
        package, roots = _installed(launch_command(plan, plan.base))
        say(f"looking up {', '.join(names)} in what is installed")
        unread = [*_variables(variables, roots), *_flags(flags, package)]
    except _NotLookedInto as why:
        entries.append({"found": None, "says": f"{', '.join(names)} could not be looked up: {why}"})
        unread = [(name, f"{name} is in none of today's engines") for name in names if name in GONE]
    for name, says in unread:
        today = f"; today: {GONE[name]}" if GONE.get(name) else ""
        entries.append({"name": name, "found": False, "says": says + today})
    return entries


class _NotLookedInto(Exception):
    """Where the engine is installed is not known, for this reason."""


def _installed(command: Command) -> tuple[list[Path], list[Path]]:
    """The engine's package, and all folders in which something may read a variable. Raises _NotLookedInto."""
    program, *arguments = command.words
    name, module = Path(program).name, ""
    if name in (*FOREIGN, *SHELLS, "mpirun"):
        raise _NotLookedInto(f"the engine of a command that {name} runs is not looked into")
    if not re.fullmatch(r"python[\d.]*", name):
        # A script that pip installs: its first line has the Python, and it imports the engine.
        text = Path(program).read_text("utf-8", errors="replace")[:4096] if Path(program).is_file() else ""
        program = text.splitlines()[0][2:].strip() if text.startswith("#!") else ""
        imported = re.search(r"^\s*(?:from|import) (?!sys|re\b)(\w+)", text, re.MULTILINE)
        module = imported[1] if imported else ""
    elif "-m" in arguments[:-1]:
        module = arguments[arguments.index("-m") + 1].partition(".")[0]
    try:
        ask = [program, "-c", ASK, module]
        done = subprocess.run(ask, env=command.environment(), capture_output=True, timeout=120, check=True)
        package, paths = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        raise _NotLookedInto(f"{command.words[0]} is not here, or no Python program") from None
    own = [*map(Path, package), *(Path(word) for word in arguments if word.endswith(".py"))]
    if not own:
        raise _NotLookedInto(f"no {module or 'engine'} is installed for {program}")
    return own, [*own, *map(Path, [*paths, *LIBRARIES])]


def _variables(names: Iterable[str], roots: list[Path]) -> Iterator[tuple[str, str]]:
    """The variables that no Python code reads and that no library's binary or C source contains."""
    unread = {name for name in names if not OF_SYSTEM.fullmatch(name)}
    for suffixes in (PYTHON + C, (".so",)):  # binaries are large, so they come last
        for file in _files(roots, suffixes) if unread else ():
            unread -= set(_read(file, unread))
    for name in sorted(unread):
        yield name, f"nothing installed reads {name}"


def _read(file: Path, names: Iterable[str]) -> Iterator[str]:
    """The names that a source reads, or that a binary contains as a word."""
    with contextlib.suppress(OSError, ValueError), file.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        for name in names:
            forms = {name, re.sub("^SGL_", "SGLANG_", name)}  # SGLang reads SGL_* as SGLANG_*
            if any(data.find(form.encode()) >= 0 and _is_read(file, data, form) for form in forms):
                yield name


def _is_read(file: Path, data: mmap.mmap, name: str) -> bool:
    if file.suffix not in PYTHON + C:
        return bool(re.search(rf"\b{name}\b".encode(), data))
    no_code, reading = (NO_PYTHON, READ_IN_PYTHON) if file.suffix in PYTHON else (NO_C, READ_IN_C)
    code = no_code.sub("", data[:].decode(errors="replace"))
    return bool(re.search(reading.replace("NAME", name), code, re.MULTILINE))


def _flags(names: Iterable[str], package: list[Path]) -> Iterator[tuple[str, str]]:
    """The flags that the engine does not declare, or declares and never reads."""
    examined = [name for name in names if re.fullmatch(r"--[\w-]+(\.\w+)*", name)]
    files = [file for file in _files(package, PYTHON) if os.access(file, os.R_OK)] if examined else []
    sources = [file.read_text("utf-8", errors="replace") for file in files]
    # SGLang has parsers of tools beside that of its server; of other engines all parsers count.
    of_server = [text for text in sources if "add_cli_args_from_dataclass" in text or FIELD.search(text)]
    fields = {flag: field for source in of_server or sources for flag, field in _declared(source)}
    for name in examined:
        # Engines take `--a.b` as key b of the flag `--a`, `--a_b` as `--a-b`, and `--no-a` as `--a` off.
        flag = "--" + name[2:].partition(".")[0].replace("_", "-")
        if flag not in fields:
            flag = flag.replace("--no-", "--", 1)
        longer = sorted(known for known in fields if known.startswith(flag))
        flag = longer[0] if len(longer) == 1 else flag  # argparse accepts a unique beginning
        if flag not in fields:
            but = f", but {', '.join(longer[:4])}" if longer else ""
            yield name, f"the engine has no flag {name}{but}"
            continue
        field = fields[flag]
        if field and not any(re.search(rf"\.{field}\b", source) for source in sources):
            yield name, f"{name} is accepted, but nothing in the engine reads it"


def _declared(source: str) -> Iterator[tuple[str, str]]:
    """Flags, each with its field if that is known: `"--a-b"` anywhere, and SGLang's `a_b: A[...]`."""
    for flag in re.findall(r"""["'](--[\w-]+)["']""", source):
        yield flag.replace("_", "-"), ""
    _, *pieces = FIELD.split(source)  # each field's name, then the text up to the next field
    for field, text in zip(pieces[::2], pieces[1::2], strict=True):
        annotation, _, _ = text.partition("\n    ] = ")
        own = re.search(r"""cli_name\s*=\s*["'](--[\w-]+)""", annotation)
        yield own[1] if own else f"--{field.replace('_', '-')}", field


def _files(roots: Iterable[Path], suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Files below the roots. `.so` includes `.so.1` and programs, which have no suffix."""
    with_binaries, seen = ".so" in suffixes, set()
    for root in roots:
        if root.is_file() and (root.suffix in suffixes or (with_binaries and not root.suffix)):
            yield root
        for folder, inner, names in os.walk(root):
            inner[:] = sorted(set(inner) - NO_PRODUCT)  # what stays in it is walked next
            if (real := os.path.realpath(folder)) in seen:
                inner.clear()
                continue
            seen.add(real)
            for name in names:
                if name.endswith(suffixes) or (with_binaries and ".so." in name):
                    yield Path(folder, name)
