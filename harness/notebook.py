"""`harness.bench`: measures a function of a notebook or a script beside the suite's implementations.

Workers cannot import a notebook, so the function is written to a file, a plug-in. The file has the source of
the function and of what it uses of the same notebook, imports, and small values. It stays in the user's
cache, so that later commands can use it.
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
from harness.paths import RESULTS, ROOT, cache, option_words
from harness.plan.select import choose_op
from harness.results.read import load

if TYPE_CHECKING:
    import pandas

FUTURE = "from __future__"  # the key of the __future__ import among definitions: a file begins with it
MOST_PICKLED = 16384  # bytes of a value that is written into a plug-in


@dataclass(frozen=True, repr=False)
class BenchTable:
    """The run that `bench` measured."""

    folder: Path  # of the run
    text: str  # what `run` printed, and the environment for its commands

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
    """Checks and times a user's kernel, and implementations of the suite beside it, as `run` does.

        harness.bench("mla_decode", mine, case="batch=16 ctx=4096 heads=16", beside="vllm.*", budget="30s")

    kernel:  a function of (operands, out) that fills `out`, returns the output, or returns the call to be
             timed; or what `kernels.op.implementation` made. It runs in a process of its own
    case:    sizes, as `--case` takes them
    beside:  patterns of names, as `--impl` takes them; the baseline is measured in any case
    options: those of `run`, with `_` for `-`; True for a flag, a list for an option that is given several
             times. The default of `boundary` is the op's first

    Raises UsageError or click.UsageError for arguments that are not understood, NothingRan where another run
    has the device, and KeyboardInterrupt where the run was stopped.
    """
    boundary = options.setdefault("boundary", choose_op(op).boundaries[0])
    plugin, name = _plugin(kernel, op, boundary)
    created = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    folder = options.pop("out", RESULTS / "local" / f"{created}-{op}-{name}")
    words = ["--op", op, "--impl", f"{name},{beside}".rstrip(","), "--case", case]
    words += option_words({option.replace("_", "-"): value for option, value in options.items()})
    output, argv, plugins = io.StringIO(), sys.argv, os.environ.get(kernels.PLUGINS, "")
    sys.argv = ["harness", "run", *words]  # the command that the run records
    # Other versions of this plug-in, with another hash after the last `_`, declare the same implementation.
    family = str(plugin).rpartition("_")[0]
    others = [path for path in plugins.split(os.pathsep) if path and path.rpartition("_")[0] != family]
    kernels.name_plugins(os.pathsep.join([str(plugin), *others]))
    try:
        with contextlib.redirect_stdout(output):
            run.main([*words, "--out", str(folder)], "run", standalone_mode=False)
    except SystemExit as ended:
        if ended.code == STOPPED:
            raise KeyboardInterrupt from None
    finally:
        sys.argv = argv
        kernels.name_plugins(plugins)
    path = "" if Path.cwd() == ROOT else f"PYTHONPATH={shlex.quote(str(ROOT))}:$PYTHONPATH "
    hint = f"before these commands: export {path}{kernels.PLUGINS}={shlex.quote(str(plugin))}"
    return BenchTable(Path(folder), output.getvalue().lstrip() + hint)


def _plugin(kernel: Any, op: str, boundary: str) -> tuple[Path, str]:
    """Writes the plug-in of a kernel. Returns the file, whose name has a hash of the content, and the name of
    the implementation. Raises UsageError for what cannot be written to a file."""
    name = getattr(kernel, "__name__", "")
    if not (isinstance(kernel, type | FunctionType) and name.isidentifier()):
        raise UsageError(f"{kernel!r} is no kernel: give a function of (operands, out) that `def` made")
    definitions = {FUTURE: ""}  # name -> the text that defines it, in the order of the file
    _define(name, kernel, definitions)
    path = [str(Path(folder).absolute()) for folder in sys.path]
    future, texts = definitions.pop(FUTURE), "\n".join(definitions.values())
    # Names with `_bench_` are in no notebook.
    text = f"""# Written by harness.bench for {op}, {boundary}.
{future}
import pickle as _bench_pickle_, sys as _bench_sys_
from kernels.op import declared as _bench_declared_
_bench_sys_.path += [folder for folder in {path} if folder not in _bench_sys_.path]
{texts}
{name} = _bench_declared_({name}, {op!r}, {boundary!r})
{name}.__module__, {name}.op = __name__, {op!r}
"""
    file = cache() / "bench" / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
    with explained(f"cannot write {file}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.parent.chmod(0o700)  # values of the notebook may be secret
        replace(file, text)
        file.chmod(0o600)
    return file, getattr(kernel, "name", f"yours.{name}")


def _define(name: str, value: Any, definitions: dict[str, str]) -> None:
    """Adds the text that gives a name its value, after the texts of the names that it needs. What a module
    has is imported; other functions and classes are defined by their source. Raises UsageError."""
    if name in definitions:
        return
    definitions[name] = ""  # so that a function that uses itself is not defined again
    made = _undecorated(value)
    module, own_name = getattr(made, "__module__", None) or "", getattr(made, "__name__", "")
    if isinstance(value, ModuleType):
        text = f"import {value.__name__} as {name}"
    elif own_name and module != "__main__" and getattr(sys.modules.get(module), own_name, None) is value:
        text = f"from {module} import {own_name} as {name}"
    elif own_name and (module == "__main__" or isinstance(made, FunctionType)):  # it cannot be imported
        text = _source_with_names(name, value, definitions)
    else:  # a number, a tuple ...
        text = f"{name} = _bench_pickle_.loads({_pickled(name, value)!r})"
    del definitions[name]
    definitions[name] = text  # now behind the names that it needs


def _undecorated(value: Any) -> Any:
    """The function or class inside decorators; a value without decorators itself."""
    attributes = getattr(value, "__dict__", {})
    inner = attributes.get("__wrapped__")
    if inner is None and not isinstance(value, type):
        inner = attributes.get("fn")  # Triton's decorators keep the function there
    return value if inner is None else _undecorated(inner)


def _source_with_names(name: str, value: Any, definitions: dict[str, str]) -> str:
    """The source of a function or class; adds the definitions of the names in it. Raises UsageError."""
    made = _undecorated(value)
    variables = getattr(made, "__globals__", None) or vars(sys.modules[made.__module__])
    # Whether the notebook says `from __future__ import annotations`, under which its source was compiled.
    future = annotations.compiler_flag if variables.get("annotations") is annotations else 0
    defined_as = made.__code__.co_name if isinstance(made, FunctionType) else made.__name__
    try:
        text = textwrap.dedent(inspect.getsource(made))
        # The source gives this value if it has the name and all decorators of the value.
        is_whole = defined_as == name and (made is value or text.startswith("@"))
        code = compile(text, name, "exec", future, dont_inherit=True) if is_whole else None
    except (OSError, TypeError, SyntaxError):
        raise UsageError(f"the source of {name} is not known: put it into a file") from None
    if code is None:
        raise UsageError(f"{name} was not made by `def {name}` alone: write that, or make it in what uses it")
    if future:
        definitions[FUTURE] = "from __future__ import annotations"
    if isinstance(made, FunctionType):
        variables = {**variables, **inspect.getclosurevars(made).nonlocals}
    of_module = ("__name__", "__annotations__")  # each module has its own
    for used_name in _loaded_names(code):
        if used_name in variables and used_name not in of_module:
            _define(used_name, variables[used_name], definitions)
    return text


def _loaded_names(code: CodeType) -> Iterator[str]:
    """Yields the names that code, and code inside it, reads of its module."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
            yield instruction.argval
        elif isinstance(instruction.argval, CodeType):
            yield from _loaded_names(instruction.argval)


def _pickled(name: str, value: Any) -> bytes:
    """A pickled value. Raises UsageError if it is large or of this process, as an open file is."""
    with contextlib.suppress(Exception):  # `__reduce__` of a class may raise anything
        data = pickle.dumps(value)
        is_of_process = b"__main__" in data or b"_rebuild_tensor" in data
        if len(data) <= MOST_PICKLED and not is_of_process:
            return data
    what = f"{name} ({type(value).__name__})"
    raise UsageError(f"{what} is of this process, and the kernel runs in another: make it in the kernel")
