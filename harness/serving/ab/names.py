"""Names by which arms differ, looked up in what is installed: that nothing reads a variable or a flag is the
cheapest explanation of a gain that vanished.

A name in a comment or a docstring reads nothing, and neither does the line that declares it. Names that are
put together at run time escape; so what is not found is a warning.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import mmap
import os
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from harness.files import JsonObject
from harness.serving.ab.plan import FOREIGN, SHELLS, Command, Plan, launch
from harness.serving.ab.templates import gone

ASK = """import importlib.util, json, sys
spec = importlib.util.find_spec(sys.argv[1]) if sys.argv[1] else None
found = list(spec.submodule_search_locations or []) or [spec.origin] if spec else []
print(json.dumps([found, [p for p in sys.path if p] + [sys.executable]]))"""
# Read by the system, by Python, or by runtimes that put the name together.
OF_SYSTEM = re.compile(r"(LD|OMP|GOMP|MALLOC|GLIBC|PYTHON|LC|XDG|HF|CUDA)_\w+|PATH|HOME|TMPDIR|TZ|LANG|USER")
LIBRARIES = ("/opt/rocm/lib", "/opt/rocm/lib64", "/usr/local/lib", "/usr/local/cuda/lib64")
NO_PRODUCT = {"test", "tests", "benchmark", "benchmarks", "__pycache__", ".git"}
C_SOURCES = (".cpp", ".cc", ".cu", ".cuh", ".h", ".hpp", ".hip")
FIELD = re.compile(r"^    (\w+)\s*:\s*A\[", re.MULTILINE)  # of SGLang's server arguments


def looked_up(plan: Plan, say: Callable[[str], None] = lambda line: None) -> list[JsonObject]:
    """Of each differing name that nothing reads: `name`, `found` (False; None: it could not be looked up) and
    `says`, a line. Takes up to a minute, where libraries are read."""
    variables, flags = plan.differing()
    names = [*variables, *flags]
    if not names:
        return []
    package, roots, why = _installed(launch(plan, plan.base, "a-name", plan.port, Path("/cache")))
    if why:
        unread = [(name, f"{name} is in none of today's engines") for name in names if name in gone()]
    else:
        say(f"looking up {', '.join(names)} in what is installed")
        unread = [*_variables(variables, roots), *_flags(flags, package)]
    unknown: list[JsonObject] = [{"found": None, "says": f"{', '.join(names)} could not be looked up: {why}"}]
    today = {name: f"; today: {gone()[name]}" for name, _ in unread if gone().get(name)}
    found: list[JsonObject] = [
        {"name": n, "found": False, "says": f"{says}{today.get(n, '')}"} for n, says in unread
    ]
    return [*(unknown if why else []), *found]


def _installed(command: Command) -> tuple[list[Path], list[Path], str]:
    """The engine's package, and all that its Python finds; or why they are not known."""
    program, *rest = command.words
    name, module = Path(program).name, ""
    if name in (*FOREIGN, *SHELLS, "mpirun"):
        return [], [], f"the engine of a command that {name} runs is not looked into"
    if not re.fullmatch(r"python[\d.]*", name):
        text = Path(program).read_text(errors="replace")[:4096] if Path(program).is_file() else ""
        program = text.splitlines()[0][2:].strip() if text.startswith("#!") else ""
        imported = re.search(r"^\s*(?:from|import) (?!sys|re\b)(\w+)", text, re.MULTILINE)
        module = imported[1] if imported else ""
    elif "-m" in rest[:-1]:
        module = rest[rest.index("-m") + 1].partition(".")[0]
    try:
        ask = [program, "-c", ASK, module]
        done = subprocess.run(ask, env=command.environment(), capture_output=True, timeout=120, check=True)
        package, paths = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return [], [], f"{command.words[0]} is not here, or no Python program"
    own = [*map(Path, package), *(Path(word) for word in rest if word.endswith(".py"))]
    if not own:
        return [], [], f"no {module or 'engine'} is installed for {program}"
    return own, [*own, *map(Path, [*paths, *LIBRARIES])], ""


def _variables(names: Iterable[str], roots: list[Path]) -> Iterator[tuple[str, str]]:
    """Those that no Python code reads, and no library's binary or C source holds."""
    wanted = {
        name: {name, re.sub("^SGL_", "SGLANG_", name)} for name in names if not OF_SYSTEM.fullmatch(name)
    }
    declared: set[str] = set()
    for file in _files(roots, (".py", *C_SOURCES)):
        source = _text(file)
        for name, forms in list(wanted.items()):
            uses = [_use(source, form, file.suffix == ".py") for form in forms if form in source]
            declared |= {name} if "declared" in uses else set()
            if "read" in uses:
                del wanted[name]
        if not wanted:
            return
    for file in _files(roots, (".so",)):
        for name, forms in list(wanted.items()):
            if any(_holds(file, form) for form in forms):
                del wanted[name]
    for name in wanted:
        says = f"{name} is declared, but nothing installed reads it"
        yield name, says if name in declared else f"nothing installed reads {name}"


def _flags(names: Iterable[str], package: list[Path]) -> Iterator[tuple[str, str]]:
    """Those that the engine does not declare, or declares and never reads."""
    wanted = [name for name in names if re.fullmatch(r"--[\w-]+(\.\w+)*", name)]
    sources = [_text(file) for file in _files(package, (".py",))] if wanted else []
    # SGLang's own parser beside those of its tools; of other engines all that parse anything.
    parsing = [each for each in sources if "add_cli_args_from_dataclass" in each or FIELD.search(each)]
    flags = {flag: field for source in parsing or sources for flag, field in _declared(source)}
    for name in wanted:
        head = "--" + name[2:].partition(".")[0].replace("_", "-")
        flag = head if head in flags else head.replace("--no-", "--", 1)
        longer = sorted(each for each in flags if each.startswith(flag))
        flag = longer[0] if len(longer) == 1 else flag  # argparse takes what begins only one flag
        if flag not in flags:
            but = f", but {', '.join(longer[:4])}" if longer else ""
            yield name, f"the engine has no flag {name}{but}"
        elif (field := flags[flag]) and not any(re.search(rf"\.{field}\b", source) for source in sources):
            yield name, f"{name} is accepted, but nothing in the engine reads it"


def _declared(source: str) -> Iterator[tuple[str, str]]:
    """Flags, each with its field where that is known: `"--a-b"` anywhere, and SGLang's `a_b: A[...]`, which
    may name its flag itself."""
    for flag in re.findall(r"""["'](--[\w-]+)["']""", source):
        yield flag.replace("_", "-"), ""
    fields = FIELD.split(source)
    for field, text in zip(fields[1::2], fields[2::2], strict=True):
        own = re.search(r"""cli_name\s*=\s*["'](--[\w-]+)""", text.partition("\n    ] = ")[0])
        yield own[1] if own else f"--{field.replace('_', '-')}", field


def _use(source: str, name: str, python: bool) -> str:
    """`read`, `declared` or nothing: how a name stands in a file. A string counts where it is the whole name
    and no key or line of a list; a name where it is no target of an assignment."""
    if not python:
        source = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)
        return "read" if f'"{name}"' in source else ""
    use, before = "", ("end", "")
    for (kind, text), (_, after) in itertools.pairwise([*_tokens(source), ("end", "")]):
        if text == name and kind in ("name", "string"):
            target = kind == "name" and before[1] != "." and after in ("=", ":")
            if not target and not (kind == "string" and before[0] == "end" and after in (",", ":")):
                return "read"
            use = "declared"
        before = (kind, text)
    return use


def _tokens(source: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of each token; a string by what is between its quotes."""
    kinds = {tokenize.NAME: "name", tokenize.STRING: "string", tokenize.OP: "op"}
    with contextlib.suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            kind = kinds.get(token.type, "end")
            yield kind, token.string.lstrip("rbuRBU").strip("'\"") if kind == "string" else token.string


def _files(roots: Iterable[Path], suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Below the roots, each folder once; `.so` is also `.so.1`, and a program, which has no suffix."""
    seen: set[str] = set()
    for root in roots:
        if root.is_file() and (root.suffix in suffixes or (".so" in suffixes and not root.suffix)):
            yield root
        for folder, inner, names in os.walk(root):
            real = os.path.realpath(folder)
            inner[:] = [] if real in seen else sorted(set(inner) - NO_PRODUCT)
            for name in [] if real in seen else names:
                if name.endswith(suffixes) or (".so" in suffixes and ".so." in name):
                    yield Path(folder, name)
            seen.add(real)


def _text(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text(errors="replace")
    return ""


def _holds(file: Path, name: str) -> bool:
    """Whether a binary holds the name, and not as a part of another."""
    word, size = name.encode(), len(name)
    with contextlib.suppress(OSError, ValueError), file.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        at = data.find(word)
        while at >= 0 and re.search(rb"\w", data[max(0, at - 1) : at] + data[at + size : at + size + 1]):
            at = data.find(word, at + 1)
        data.close()
        return at >= 0
    return False
