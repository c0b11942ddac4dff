"""`harness.bench`: a function of a notebook or a script beside the suite's implementations.

Workers cannot import a notebook. So the function is written down as a plug-in: its source, the sources of
what it uses of the same notebook, imports, and small values. The user's cache keeps it for later commands.
"""

from __future__ import annotations

import contextlib
import dis
import hashlib
import html
import inspect
import io
import os
import pickle
import shlex
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import kernels
from harness.cli.run import run
from harness.errors import STOPPED, UsageError
from harness.files import explained, replace
from harness.paths import RESULTS, ROOT, cache
from harness.plan.select import choose_op
from harness.results.read import load

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class BenchTable:
    """What was measured."""

    folder: Path  # of the run
    text: str  # what `run` prints

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text)}</pre>"

    def frame(self) -> pandas.DataFrame:
        """A row for each cell: see `harness.results.load`."""
        return load(self.folder)

    def page(self, path: str | Path) -> None:
        """Writes the page of `report`. Raises UsageError."""
        from harness.page.assemble import assemble, inputs
        from harness.page.html import write_page

        write_page(assemble(inputs([str(self.folder)]), ""), str(path), str(self.folder))


def bench(op: str, kernel: Any, *, case: str, beside: str = "", **options: Any) -> BenchTable:
    """Checks and times a kernel of one's own, and implementations of the suite beside it, as `run` does.

        harness.bench("mla_decode", mine, case="batch=16 ctx=4096 heads=16", beside="vllm.*", budget="30s")

    kernel:  a function of (operands, out) that fills `out`, returns the output, or returns the call to be
             timed; or what `kernels.op.implementation` made. It runs in a process of its own
    case:    sizes, as `--case` takes them
    beside:  patterns of names, as `--impl` takes them; the baseline is measured in any case
    options: those of `run`, with `_` for `-`; the default of `boundary` is the op's first

    Raises UsageError or click.UsageError for what cannot be understood, and NothingRan where another run has
    the device.
    """
    boundary = options.setdefault("boundary", choose_op(op).boundaries[0])
    plugin, name = _plugin(kernel, op, boundary)
    created = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    folder = options.pop("out", RESULTS / "local" / f"{created}-{op}-{name}")
    words = ["--op", op, "--impl", f"{name},{beside}".rstrip(","), "--case", case]
    for option, value in options.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is None or one is False:  # the default
                continue
            words += [f"--{option.replace('_', '-')}", *([] if one is True else [str(one)])]
    text, argv, plugins = io.StringIO(), sys.argv, os.environ.get(kernels.PLUGINS, "")
    sys.argv = ["harness", "run", *words]  # for the record
    end = len("01234567.py")  # without it the files of earlier calls are alike
    others = [path for path in plugins.split(os.pathsep) if path and path[:-end] != str(plugin)[:-end]]
    kernels.name_plugins(os.pathsep.join([str(plugin), *others]))
    try:
        with contextlib.redirect_stdout(text):
            run.main([*words, "--out", str(folder)], "run", standalone_mode=False)
    except SystemExit as end:
        if end.code == STOPPED:
            raise KeyboardInterrupt from None
    finally:
        sys.argv = argv
        kernels.name_plugins(plugins)
    path = "" if Path.cwd() == ROOT else f"PYTHONPATH={shlex.quote(str(ROOT))}:$PYTHONPATH "
    found = f"before these commands: export {path}{kernels.PLUGINS}={shlex.quote(str(plugin))}"
    return BenchTable(Path(folder), text.getvalue().lstrip() + found)


# The plug-in


def _plugin(kernel: Any, op: str, boundary: str) -> tuple[Path, str]:
    """Writes the file, named by what it holds, and returns it with the name of the implementation. Raises
    UsageError for what cannot be written down."""
    name = getattr(kernel, "__name__", "")
    if not (isinstance(kernel, type | FunctionType) and name.isidentifier()):
        raise UsageError(f"{kernel!r} is no kernel: give a function of (operands, out) that `def` made")
    parts = {"from __future__": ""}  # it stands before all others
    _define(name, kernel, parts)
    path = [str(Path(folder).absolute()) for folder in sys.path]
    lines = [
        f"# Written by harness.bench for {op}, {boundary}.",
        parts.pop("from __future__"),
        "import pickle as _bench_pickle_, sys as _bench_sys_",  # names that no notebook has
        "from kernels.op import declared as _bench_declared_",
        f"_bench_sys_.path += [folder for folder in {path} if folder not in _bench_sys_.path]",
        *parts.values(),
        f"{name} = _bench_declared_({name}, {op!r}, {boundary!r})",
        f"{name}.__module__, {name}.op = __name__, {op!r}\n",
    ]
    text = "\n".join(lines)
    file = cache() / "bench" / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
    with explained(f"cannot write {file}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.parent.chmod(0o700)  # values of the notebook may be secret
        replace(file, text)
        file.chmod(0o600)
    return file, getattr(kernel, "name", f"yours.{name}")


def _define(name: str, value: Any, parts: dict[str, str]) -> None:
    """Adds the text that gives a name its value, after the texts of what that needs. Raises UsageError."""
    if name in parts:
        return
    parts[name] = ""  # for what uses itself
    made = _made(value)
    module, own = getattr(made, "__module__", None) or "", getattr(made, "__name__", "")
    if isinstance(value, ModuleType):
        text = f"import {value.__name__} as {name}"
    elif own and module != "__main__" and getattr(sys.modules.get(module), own, None) is value:
        text = f"from {module} import {own} as {name}"
    elif own and (module == "__main__" or isinstance(made, FunctionType)):
        text = _source(name, value, parts)
    else:
        text = f"{name} = _bench_pickle_.loads({_pickled(name, value)!r})"
    parts[name] = parts.pop(name) + text  # last


def _made(value: Any) -> Any:
    """The function or class that was made before decorators took it; else the value."""
    kept = getattr(value, "__dict__", {})
    inner = kept.get("__wrapped__", None if isinstance(value, type) else kept.get("fn"))  # `fn`: of Triton
    return value if inner is None else _made(inner)


def _source(name: str, value: Any, parts: dict[str, str]) -> str:
    """The source of a function or class, once `parts` has what that uses."""
    made = _made(value)
    known = getattr(made, "__globals__", None) or vars(sys.modules[made.__module__])
    future = annotations.compiler_flag if known.get("annotations") is annotations else 0
    called = made.__code__.co_name if isinstance(made, FunctionType) else made.__name__
    try:
        text = textwrap.dedent(inspect.getsource(made))
        alone = called == name and (made is value or text.startswith("@"))
        code = compile(text, name, "exec", future, dont_inherit=True) if alone else None
    except (OSError, TypeError, SyntaxError):
        raise UsageError(f"the source of {name} is not known: put it into a file") from None
    if code is None:
        raise UsageError(f"{name} was not made by `def {name}` alone: write that, or make it in what uses it")
    if future:
        parts["from __future__"] = "from __future__ import annotations"
    if isinstance(made, FunctionType):
        known = {**known, **inspect.getclosurevars(made).nonlocals}
    for used in _loaded(code):
        if used in known and used not in ("__name__", "__annotations__"):  # each module has its own
            _define(used, known[used], parts)
    return text


def _loaded(code: CodeType) -> Iterator[str]:
    """The names that code, and code inside it, reads of its module."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
            yield step.argval
        elif isinstance(step.argval, CodeType):
            yield from _loaded(step.argval)


def _pickled(name: str, value: Any) -> bytes:
    """A small value. Raises UsageError for what this process alone has, such as a tensor or an open file."""
    with contextlib.suppress(Exception):  # classes pickle as they like
        data = pickle.dumps(value)
        if len(data) <= 16384 and not (b"__main__" in data or b"_rebuild_tensor" in data):
            return data
    what = f"{name} ({type(value).__name__})"
    raise UsageError(f"{what} is of this process, and the kernel runs in another: make it in the kernel")
