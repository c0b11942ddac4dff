"""What a library has, read from its Python sources. Nothing of the library is imported or run.

A library is a folder of packages (site-packages, a checkout) or a wheel. Compiled modules are known by name
alone, with two exceptions: torch's operators, whose schemas are text in the compiled file, and functions
whose C++ source names their arguments.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kernels.interfaces import signatures

Folder = Path | zipfile.Path

DEPTH = 3
"""A package may lie so many folders below the given one, as `python/sglang` and `hopper` do."""

FIELDS = {"dataclass", "NamedTuple", "BaseModel", "Struct"}
"""Decorators and bases that make a class take its fields as arguments."""

UNREADABLE = (OSError, zipfile.BadZipFile, zlib.error, SyntaxError, ValueError)
"""What reading a damaged file, a template or another version's Python raises."""

CPP = (".cpp", ".cc", ".cu", ".hpp", ".h")


class NotThere(LookupError):
    """The library has no such name. The text says which."""


class SignatureSource(Protocol):
    """Knows a library's signatures."""

    def signature(self, place: str) -> inspect.Signature | None:
        """The signature of a function or class at a dotted place, without `self` for a method. None where the
        source does not tell. Raises NotThere."""


@dataclass(frozen=True)
class ModuleFiles:
    """Where a module is."""

    source: Folder | None
    """Its source file; for a compiled module its stub."""
    is_folder: bool
    is_compiled: bool


@dataclass
class LibrarySource:
    """The sources of a library."""

    roots: list[Folder]
    """Folders in which packages lie, in the order of Python's path."""

    trees: dict[str, ast.Module | None] = field(default_factory=dict)
    """Modules that were parsed; None for a module that has no Python source."""

    @staticmethod
    def of(path: Path) -> LibrarySource:
        """Reads a folder, a wheel or another zip. Raises OSError or zipfile.BadZipFile."""
        if not path.is_dir():
            return LibrarySource(_archive_roots(zipfile.Path(path)))
        if _is_package(path):
            return LibrarySource([path.parent])
        return LibrarySource([path, *_folders(path, DEPTH)])

    @staticmethod
    def installed(package: str) -> LibrarySource:
        """Reads the top-level package that Python would import. Has no roots where it is not installed."""
        spec = importlib.util.find_spec(package)
        places = [*(spec.submodule_search_locations or ())] if spec else []
        if spec and not places and spec.origin:
            places = [spec.origin]
        return LibrarySource([Path(place).parent for place in places])

    def has(self, module: str) -> bool:
        files = self._files(module)
        return bool(files.source or files.is_compiled)

    def signature(self, place: str) -> inspect.Signature | None:
        names = place.split(".")
        is_unbuilt = names[-2].endswith("_C") and not self._exists(place.rpartition(".")[0])
        if is_unbuilt and (schema := self._schema(names[0], names[-1])):
            return schema
        for count in range(len(names) - 1, 0, -1):
            module = ".".join(names[:count])
            if self._exists(module):
                return self._in_module(module, names[count:], ())
        raise NotThere(f"no module {'.'.join(names[:-1])}")

    # Names in a module. `seen` holds the places that were followed, so that circular imports end.

    def _in_module(self, module: str, names: list[str], seen: tuple[str, ...]) -> inspect.Signature | None:
        tree = self._tree(module)
        name, rest = names[0], names[1:]
        where = f"{module}.{name}"
        if tree is None and not self.has(module):  # a folder without __init__.py
            if rest and self._exists(where):
                return self._in_module(where, rest, seen)
            raise NotThere(f"no {where}")
        if tree is None:
            return self._schema(module, names[-1])
        if where in seen:
            return None
        seen = (*seen, where)
        missing, exists = NotThere(f"{module} has no {name}"), False
        defined = _definitions(tree.body, name)
        for statement in defined:
            try:
                if signature := self._of(statement, module, name, rest, seen):
                    if _on_condition(tree.body, name) and not self._agree(defined, module, names, seen):
                        return None  # which branch runs is not known
                    return signature
                exists = True
            except NotThere as error:
                missing = error
        if exists:
            return None
        if self._exists(where):
            return self._in_module(where, rest, seen) if rest else None
        if defined:
            raise missing
        for target in self._stars(tree, module):
            if _exports(self._tree(target), name):
                with contextlib.suppress(NotThere):
                    if signature := self._in_module(target, names, seen):
                        return signature
                    exists = True
        if _makes(tree, name):
            return self._in_table(tree, module, names, seen)
        if exists or self._is_stub(module):  # a stub may leave out what is compiled
            return None
        raise missing

    def _agree(
        self, statements: list[ast.stmt], module: str, names: list[str], seen: tuple[str, ...]
    ) -> bool:
        """Whether all definitions of a name take the same. A function that only raises does not count, as it
        stands for one that is not available."""
        texts = set()
        for statement in statements:
            with contextlib.suppress(NotThere):
                signature = self._of(statement, module, names[0], names[1:], seen)
                if signature and not signatures.takes_anything(signature) and not _only_raises(statement):
                    texts.add(signatures.text(signature))
        return len(texts) < 2

    def _stars(self, tree: ast.Module, module: str) -> Iterator[str]:
        """The modules from which it imports all names."""
        for statement in _statements(tree.body):
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                target = self._absolute(statement, module)
                if self._exists(target):
                    yield target

    def _in_table(
        self, tree: ast.Module, module: str, names: list[str], seen: tuple[str, ...]
    ) -> inspect.Signature | None:
        """The signature of a name that the module makes when it is imported or asked for the name, where a
        table says in which module the name is defined."""
        name, rest = names[0], names[1:]
        for text in _table(tree, name):
            target, _, attribute = text.partition(":")
            for place in (f"{module}.{target.lstrip('.')}", target):
                inside = [attribute, *rest] if attribute else rest or [name]
                if self._exists(place):
                    with contextlib.suppress(NotThere):
                        return self._in_module(place, inside, seen)
        return self._schema(module, names[-1])

    def _of(
        self, statement: ast.stmt, module: str, name: str, rest: list[str], seen: tuple[str, ...]
    ) -> inspect.Signature | None:
        """The signature that a statement gives a name, or a member of it where there is a rest."""
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            return signatures.of_arguments(statement.args)
        if isinstance(statement, ast.ClassDef):
            return self._in_class(statement, module, rest, seen)
        if isinstance(statement, ast.ImportFrom):
            target = self._absolute(statement, module)
            original = next(a.name for a in statement.names if (a.asname or a.name) == name)
            inner = f"{target}.{original}"
            if target == module and self._exists(inner):  # `from . import inner`
                return self._in_module(inner, rest, seen) if rest else None
            if self._exists(target):
                return self._in_module(target, [original, *rest], seen)
            return self._schema(module, [original, *rest][-1])
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Name):
            with contextlib.suppress(NotThere):  # a builtin, or an object that is made when it is imported
                return self._in_module(module, [value.id, *rest], seen)
        if isinstance(value, ast.Attribute):
            return self._schema(module, value.attr)
        return None

    def _in_class(
        self, made: ast.ClassDef, module: str, rest: list[str], seen: tuple[str, ...]
    ) -> inspect.Signature | None:
        """The signature of a class when it is called, or of one of its methods."""
        wanted = rest[0] if rest else "__init__"
        for statement in _definitions(made.body, wanted):
            if not isinstance(statement, ast.FunctionDef):
                return None
            how = [_last_name(decorator) for decorator in statement.decorator_list]
            signature = signatures.of_arguments(statement.args)
            return signature if "staticmethod" in how else signatures.without_first(signature)
        bases = [base for base in made.bases if _last_name(base) not in ("object", "Generic", "Protocol")]
        makers = [node for node in [*made.decorator_list, *bases] if _last_name(node) in FIELDS]
        if not rest and makers:
            if [base for base in bases if base not in makers]:  # it may inherit fields
                return None
            text = ast.unparse(makers[0])
            return signatures.of_fields(made.body, "kw_only=True" in text or text.endswith("BaseModel"))
        if bases:
            with contextlib.suppress(NotThere):  # a base of another library
                if isinstance(bases[0], ast.Name):
                    return self._in_module(module, [bases[0].id, *rest], seen)
            return None
        tree = self._tree(module)
        is_added = tree and _calls(tree, "setattr") and wanted in _texts(tree)
        if rest and not is_added and not self._is_stub(module):
            raise NotThere(f"{module}.{made.name} has no {wanted}")
        return None

    def _absolute(self, statement: ast.ImportFrom, module: str) -> str:
        """The full name of the module that an import names."""
        if not statement.level:
            return statement.module or ""
        package = module.split(".")
        up = statement.level - (1 if self._files(module).is_folder else 0)
        base = package[: len(package) - up]
        return ".".join([*base, *filter(None, [statement.module])])

    # Files of a module

    def _tree(self, module: str) -> ast.Module | None:
        """The parsed source; None where the module is compiled, is a bare folder, or cannot be read."""
        if module not in self.trees:
            file = self._files(module).source
            self.trees[module] = None
            with contextlib.suppress(*UNREADABLE), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.trees[module] = ast.parse(file.read_bytes()) if file else None
        return self.trees[module]

    @functools.cache  # noqa: B019  # a library is read once in a process
    def _homes(self, package: str) -> list[Folder]:
        """The roots that have this top-level package or module."""
        return [
            root
            for root in self.roots
            if (root / package).is_dir()
            or (root / f"{package}.py").is_file()
            or any(_module_name(file) == package for file in self._compiled_in(root, "."))
        ]

    @functools.cache  # noqa: B019
    def _files(self, module: str) -> ModuleFiles:
        path = module.replace(".", "/")
        folder, _, name = path.rpartition("/")
        source, is_folder, is_compiled = None, False, False
        for root in self._homes(_top(module)):
            for file in (f"{path}.py", f"{path}/__init__.py", f"{path}.pyi", f"{path}/__init__.pyi"):
                if source is None and (root / file).is_file():
                    source = root / file
            is_folder = is_folder or (root / path).is_dir()
            compiled = self._compiled_in(root, folder or ".")
            is_compiled = is_compiled or any(_module_name(file) == name for file in compiled)
        return ModuleFiles(source, is_folder, is_compiled)

    def _exists(self, module: str) -> bool:
        files = self._files(module)
        return bool(files.source or files.is_folder or files.is_compiled)

    def _is_stub(self, module: str) -> bool:
        source = self._files(module).source
        return source is not None and source.name.endswith(".pyi")

    @functools.cache  # noqa: B019
    def _compiled_in(self, root: Folder, folder: str) -> list[Folder]:
        inside = root if folder == "." else root / folder
        return [f for f in inside.iterdir() if f.name.endswith(".so")] if inside.is_dir() else []

    def _schema(self, module: str, name: str) -> inspect.Signature | None:
        """The signature of one of torch's operators, by the compiled files of the module's package."""
        return next((schemas[name] for schemas in self._schemas(_top(module)) if name in schemas), None)

    @functools.cache  # noqa: B019
    def _schemas(self, package: str) -> list[dict[str, inspect.Signature]]:
        """The signatures in a package's compiled files, and in the C++ sources beside the package."""
        schemas = []
        for home in self._homes(package):
            compiled = home / package
            sources = [home / "csrc", *([home.parent / "csrc"] if isinstance(home, Path) else [])]
            for folder, endings, read in (
                (compiled, (".so",), signatures.of_compiled),
                *((source, CPP, signatures.of_cpp) for source in sources),
            ):
                if folder.is_dir():
                    schemas += [read(f.read_bytes()) for f in _all_files(folder) if f.name.endswith(endings)]
        return schemas

    def __hash__(self) -> int:
        return id(self)


def _module_name(compiled: Folder) -> str:
    """`_C` for `_C.abi3.so`."""
    return compiled.name.partition(".")[0]


def _top(module: str) -> str:
    return module.partition(".")[0]


# Statements of a module


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, including those inside conditions, but not inside functions."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and _last_name(statement.test) == "TYPE_CHECKING":
            yield from _statements(statement.orelse)
        elif isinstance(statement, ast.If | ast.Try | ast.With | ast.For):
            for block in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, block, []):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _definitions(body: Sequence[ast.stmt], name: str) -> list[ast.stmt]:
    """The statements that bind a name, the most telling first: definitions without a condition, the last of
    them first, then those on a condition, then assignments."""
    plain = [s for s in body if _binds(s, name)]
    nested = [s for s in _statements(body) if _binds(s, name) and s not in plain]
    candidates = [*reversed(plain), *nested]
    return sorted(candidates, key=lambda s: isinstance(s, ast.Assign | ast.AnnAssign))


def _on_condition(body: Sequence[ast.stmt], name: str) -> bool:
    """Whether a branch of an `if` binds the name."""
    branches = (_statements([statement]) for statement in _statements(body) if isinstance(statement, ast.If))
    return any(_binds(inner, name) for branch in branches for inner in branch)


def _only_raises(statement: ast.stmt) -> bool:
    body = statement.body if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) else []
    return bool(body) and isinstance(body[-1], ast.Raise) and len(body) <= 2


def _binds(statement: ast.stmt, name: str) -> bool:
    """Whether a statement binds a name. A definition with `@overload` does not count."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        is_overload = any(_last_name(d) == "overload" for d in statement.decorator_list)
        return statement.name == name and not is_overload
    if isinstance(statement, ast.ClassDef):
        return statement.name == name
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return any((a.asname or a.name) == name for a in statement.names)
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return any(isinstance(t, ast.Name) and t.id == name for target in targets for t in _parts(target))


def _parts(target: ast.expr) -> list[ast.expr]:
    """`a` and `b` for `a, b`."""
    return target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def _last_name(node: ast.expr) -> str:
    """`dataclass` for `dataclasses.dataclass(frozen=True)`."""
    node = node.func if isinstance(node, ast.Call) else node
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


# Names that a module exports, or makes when it is imported


def _exports(tree: ast.Module | None, name: str) -> bool:
    """Whether `from module import *` imports the name if the module has it. A name that the module has as a
    text may be in `__all__`."""
    if tree and name in _texts(tree):
        return True
    return not name.startswith("_") and not (tree and _lists_all_names(tree))


@functools.cache
def _lists_all_names(tree: ast.Module) -> bool:
    """Whether the module's `__all__` is one list, to which nothing is added."""
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "__all__"]
    lists = [s for s in _statements(tree.body) if _binds(s, "__all__")]
    return len(uses) == len(lists) == 1 and isinstance(getattr(lists[0], "value", None), ast.List | ast.Tuple)


def _makes(tree: ast.Module, name: str) -> bool:
    """Whether the module may make the name when it is imported or asked for it: it has the name as a text, or
    it answers for any name."""
    asked = [s for s in _statements(tree.body) if _binds(s, "__getattr__")]
    if any(isinstance(s, ast.FunctionDef) and not _raises(s) for s in asked):
        return True
    made = _calls(tree, "globals")
    loops = (s for s in _statements(tree.body) if isinstance(s, ast.For))
    if any(call in ast.walk(loop) for loop in loops if not _lists(loop.iter) for call in made):
        return True
    return name in _texts(tree) and bool(asked or made)


def _lists(names: ast.expr) -> bool:
    """Whether a loop runs over names that stand in the module itself."""
    return isinstance(names, ast.List | ast.Tuple | ast.Set | ast.Dict | ast.Name)


@functools.cache
def _texts(tree: ast.Module) -> frozenset[str]:
    """The string constants of the module."""
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return frozenset(text for text in constants if isinstance(text, str))


@functools.cache
def _calls(tree: ast.Module, function: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _last_name(node) == function]


def _raises(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Raise) for node in ast.walk(function))


def _table(tree: ast.Module, name: str) -> Iterator[str]:
    """Where tables of the module say that a name is defined, as `module` or `module:name`. A table is
    `{name: module}` or `{name: (module, name)}`."""
    for table in (node for node in ast.walk(tree) if isinstance(node, ast.Dict)):
        for key, value in zip(table.keys, table.values, strict=True):
            texts = [part.value for part in _parts(value) if isinstance(part, ast.Constant)]
            words = [text for text in texts if isinstance(text, str)]
            if isinstance(key, ast.Constant) and key.value == name and words:
                yield ":".join(words[:2])


# Folders and archives


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    """The folders below, so deep, that are no packages themselves but may hold some."""
    with contextlib.suppress(PermissionError):
        for inner in sorted(folder.iterdir()):
            if inner.is_dir() and not inner.name.startswith(".") and not _is_package(inner):
                yield inner
                if depth > 1:
                    yield from _folders(inner, depth - 1)


def _is_package(folder: Path) -> bool:
    """A folder with a setup.py is a project, as FlashAttention's `hopper`, even with an __init__.py."""
    return (folder / "__init__.py").exists() and not (folder / "setup.py").exists()


def _archive_roots(archive: zipfile.Path) -> list[Folder]:
    """The archive, and the folders in it that are no packages themselves but may hold some."""
    names = archive.root.namelist()
    packages = {name.removesuffix("/__init__.py") for name in names if name.endswith("/__init__.py")}
    folders = {
        "/".join(parts[:depth])
        for parts in (name.split("/") for name in names)
        for depth in range(1, min(DEPTH, len(parts) - 1) + 1)
    }
    inside = [f for f in sorted(folders) if not any(f == p or f.startswith(f"{p}/") for p in packages)]
    return [archive, *(archive / folder for folder in inside)]


def _all_files(folder: Folder) -> Iterator[Folder]:
    """All files below a folder."""
    if isinstance(folder, Path):
        yield from (path for path in folder.rglob("*") if path.is_file())
    else:  # by the archive's list of names: iterdir would read the list again for each folder
        inside = (n for n in folder.root.namelist() if n.startswith(folder.at) and not n.endswith("/"))
        yield from (zipfile.Path(folder.root, name) for name in inside)
