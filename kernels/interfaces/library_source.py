"""What a library has, read from its Python sources: nothing of it is imported.

A library is a folder of packages (a site-packages, a checkout) or a wheel. What is compiled is known by name
alone, but for operators of torch, whose schemas stand as text in the compiled file, and for functions whose
C++ source names their arguments.
"""

from __future__ import annotations

import ast
import builtins
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
Statement = ast.stmt

DEPTH = 3
"""Folders below the one that is given, in which a package may lie: `python/sglang`, `hopper`."""

FIELDS = {"dataclass", "NamedTuple", "BaseModel", "Struct"}
"""Decorators and bases that make a class take its fields."""

UNREADABLE = (OSError, zipfile.BadZipFile, zlib.error, SyntaxError, ValueError)
"""Of a damaged file, a template, or Python of another day."""

CPP = (".cpp", ".cc", ".cu", ".hpp", ".h")


class NotThere(LookupError):
    """The library has no such name; the text says which."""


class SignatureSource(Protocol):
    """What tells of a library's signatures."""

    def signature(self, place: str) -> inspect.Signature | None:
        """Of the function or class at that dotted place, without `self` for a method of a class; None where
        the source does not tell. Raises NotThere."""


@dataclass
class LibrarySource:
    """roots: folders in which packages lie, in the order of Python's path"""

    roots: list[Folder]
    trees: dict[str, ast.Module | None] = field(default_factory=dict)

    @staticmethod
    def of(path: Path) -> LibrarySource:
        """Raises OSError or zipfile.BadZipFile for what cannot be read."""
        if not path.is_dir():
            return LibrarySource(_archive_roots(zipfile.Path(path)))
        if _is_package(path):
            return LibrarySource([path.parent])
        return LibrarySource([path, *_folders(path, DEPTH)])

    @staticmethod
    def installed(package: str) -> LibrarySource:
        """Where Python would import that top-level package from; no roots where it is not installed."""
        spec = importlib.util.find_spec(package)
        places = [*(spec.submodule_search_locations or ())] if spec else []
        if spec and not places and spec.origin:
            places = [spec.origin]
        return LibrarySource([Path(place).parent for place in places])

    def has(self, module: str) -> bool:
        return bool(self._file(module) or self._compiled(module))

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

    def _in_module(self, module: str, names: list[str], seen: tuple[str, ...]) -> inspect.Signature | None:
        tree = self._tree(module)
        name, rest = names[0], names[1:]
        where = f"{module}.{name}"
        if tree is None and not self.has(module):  # a folder of packages
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
                    return signature if self._agree(tree, module, names, seen) else None
                exists = True
            except NotThere as error:
                missing = error
        if exists:
            return None
        if self._exists(where):
            return self._in_module(where, rest, seen) if rest else None
        if defined:
            raise missing
        exists = any(_binds(statement, name, overloads=True) for statement in _statements(tree.body))
        for target in self._stars(tree, module):
            if _exports(self._tree(target), name):
                with contextlib.suppress(NotThere):
                    if signature := self._in_module(target, names, seen):
                        return signature
                    exists = True
        if _makes(tree, name):
            return self._made(tree, module, names, seen)
        if exists or self._is_stub(module):  # a stub may leave out what is compiled
            return None
        raise missing

    def _agree(self, tree: ast.Module, module: str, names: list[str], seen: tuple[str, ...]) -> bool:
        """Whether definitions on the sides of a condition, which is not known here, take the same."""
        texts = set()
        for statement in _on_condition(tree.body, names[0]):
            with contextlib.suppress(NotThere):
                signature = self._of(statement, module, names[0], names[1:], seen)
                if signature and not signatures.takes_anything(signature):
                    texts.add(signatures.text(signature))
        return len(texts) < 2

    def _stars(self, tree: ast.Module, module: str) -> Iterator[str]:
        """Modules whose names it takes over."""
        for statement in _statements(tree.body):
            target = ""
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                target = self._absolute(statement, module)
            elif isinstance(statement, ast.For) and _last_name(statement.iter) == "dir":
                target = f"{module}.{ast.unparse(statement.iter)[4:-1]}"  # `for name in dir(_C.part):`
            if target and self._exists(target):
                yield target

    def _made(
        self, tree: ast.Module, module: str, names: list[str], seen: tuple[str, ...]
    ) -> inspect.Signature | None:
        """Of a name that the module makes as it is imported or asked for it: where an import or a table says
        of which module it is."""
        name, rest = names[0], names[1:]
        for statement in _definitions(list(_inside_getattr(tree)), name):
            with contextlib.suppress(NotThere):
                return self._of(statement, module, name, rest, seen)
        for text in _table(tree, name):
            target, _, attribute = text.partition(":")
            for place in (f"{module}.{target.lstrip('.')}", target):
                inside = [attribute, *rest] if attribute else rest or [name]
                if self._exists(place):
                    with contextlib.suppress(NotThere):
                        return self._in_module(place, inside, seen)
        return self._schema(module, names[-1])

    def _of(
        self, statement: Statement, module: str, name: str, rest: list[str], seen: tuple[str, ...]
    ) -> inspect.Signature | None:
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
        if isinstance(statement, ast.Import):
            target = next(a.name for a in statement.names if a.asname == name or a.name == name)
            return self._in_module(target, rest, seen) if rest and self._exists(target) else None
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Lambda) and not rest:
            return signatures.of_arguments(value.args)
        if isinstance(value, ast.Call) and _last_name(value) == "partial" and not rest:
            whole = self._of_expression(value.args[0], module, seen)
            return signatures.partial(whole, value) if whole else None
        if isinstance(value, ast.Name):
            return None if hasattr(builtins, value.id) else self._in_module(module, [value.id, *rest], seen)
        if isinstance(value, ast.Attribute):
            signature = None if rest else self._of_expression(value, module, seen)
            return signature or self._schema(module, value.attr)
        return None

    def _of_expression(
        self, expression: ast.expr, module: str, seen: tuple[str, ...]
    ) -> inspect.Signature | None:
        """Of `name` or `name.attribute`."""
        names = ast.unparse(expression).split(".")
        if not all(name.isidentifier() for name in names):
            return None
        try:
            return self._in_module(module, names, seen)
        except NotThere:  # an attribute of an object that is made as the module is imported
            return None

    def _in_class(
        self, made: ast.ClassDef, module: str, rest: list[str], seen: tuple[str, ...]
    ) -> inspect.Signature | None:
        """Of the class where it is called, or of a method or member."""
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
            parents = [base for base in bases if base not in makers]
            inherited = [self._of_expression(parent, module, seen) for parent in parents]
            return signatures.of_fields(made.body, makers[0], inherited)
        for base in bases:
            if isinstance(base, ast.Name):
                try:
                    return self._in_module(module, [base.id, *rest], seen)
                except NotThere:
                    return None  # of a library that is not here
            return None
        tree = self._tree(module)
        is_made = tree and _gives_members(tree, made.name) and wanted in _texts(tree)
        if rest and not is_made and not self._is_stub(module):
            raise NotThere(f"{module}.{made.name} has no {wanted}")
        return None

    def _absolute(self, statement: ast.ImportFrom, module: str) -> str:
        """The module that an import names."""
        if not statement.level:
            return statement.module or ""
        package = module.split(".")
        up = statement.level - (1 if self._is_folder(module) else 0)
        base = package[: len(package) - up]
        return ".".join([*base, *filter(None, [statement.module])])

    def _tree(self, module: str) -> ast.Module | None:
        """None where it is compiled, or has no source of its own."""
        if module not in self.trees:
            file = self._file(module)
            self.trees[module] = None
            with contextlib.suppress(*UNREADABLE), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.trees[module] = ast.parse(file.read_bytes()) if file else None
        return self.trees[module]

    @functools.cache  # noqa: B019  # a library is read once in a process
    def _homes(self, package: str) -> list[Folder]:
        """Roots that have that top-level package or module."""
        return [
            root
            for root in self.roots
            if (root / package).is_dir()
            or (root / f"{package}.py").is_file()
            or any(_module_name(file) == package for file in self._compiled_in(root, "."))
        ]

    @functools.cache  # noqa: B019
    def _file(self, module: str) -> Folder | None:
        """Its source; of a compiled one its stub."""
        path = module.replace(".", "/")
        for root in self._homes(_top(module)):
            for file in (f"{path}.py", f"{path}/__init__.py", f"{path}.pyi", f"{path}/__init__.pyi"):
                if (root / file).is_file():
                    return root / file
        return None

    def _is_stub(self, module: str) -> bool:
        file = self._file(module)
        return file is not None and file.name.endswith(".pyi")

    def _is_folder(self, module: str) -> bool:
        return any((root / module.replace(".", "/")).is_dir() for root in self._homes(_top(module)))

    def _exists(self, module: str) -> bool:
        return bool(self._file(module) or self._is_folder(module) or self._compiled(module))

    def _compiled(self, module: str) -> list[Folder]:
        folder, _, name = module.replace(".", "/").rpartition("/")
        files = (
            file for root in self._homes(_top(module)) for file in self._compiled_in(root, folder or ".")
        )
        return [file for file in files if _module_name(file) == name]

    @functools.cache  # noqa: B019
    def _compiled_in(self, root: Folder, folder: str) -> list[Folder]:
        inside = root if folder == "." else root / folder
        return [f for f in inside.iterdir() if f.name.endswith(".so")] if inside.is_dir() else []

    def _schema(self, module: str, name: str) -> inspect.Signature | None:
        """Of an operator of torch, by the compiled files of the module's package."""
        return next((schemas[name] for schemas in self._schemas(_top(module)) if name in schemas), None)

    @functools.cache  # noqa: B019
    def _schemas(self, package: str) -> list[dict[str, inspect.Signature]]:
        """Of its compiled files, and of the C++ sources beside it."""
        schemas = []
        for home in self._homes(package):
            compiled = home / package
            sources = [home / "csrc", *([home.parent / "csrc"] if isinstance(home, Path) else [])]
            for folder, endings, read in (
                (compiled, (".so",), signatures.of_compiled),
                *((source, CPP, signatures.of_cpp) for source in sources),
            ):
                if folder.is_dir():
                    schemas += [read(f.read_bytes()) for f in _files(folder) if f.name.endswith(endings)]
        return schemas

    def __hash__(self) -> int:
        return id(self)


def _module_name(compiled: Folder) -> str:
    """`_C` of `_C.abi3.so`."""
    return compiled.name.partition(".")[0]


def _top(module: str) -> str:
    return module.partition(".")[0]


def _definitions(body: Sequence[Statement], name: str) -> list[Statement]:
    """Statements that bind the name, those that tell most first: of several definitions the last that is
    made without a condition, then those made on one, then values."""
    plain = [s for s in body if _binds(s, name)]
    nested = [s for s in _statements(body) if _binds(s, name) and s not in plain]
    candidates = [*reversed(plain), *nested]
    return sorted(candidates, key=lambda s: isinstance(s, ast.Assign | ast.AnnAssign))


def _on_condition(body: Sequence[Statement], name: str) -> list[Statement]:
    """Definitions and imports of the name in branches of `if`, with those that stand before them; not what
    only raises, in place of what cannot be had."""
    made = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ImportFrom
    inside = [
        inner
        for statement in _statements(body)
        if isinstance(statement, ast.If)
        for inner in _statements([statement])
        if isinstance(inner, made) and _binds(inner, name) and not _only_raises(inner)
    ]
    last = max((statement.lineno for statement in inside), default=0)
    before = [s for s in body if isinstance(s, made) and _binds(s, name) and s.lineno < last]
    return [*before, *inside]


def _only_raises(statement: Statement) -> bool:
    body = statement.body if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) else []
    return bool(body) and isinstance(body[-1], ast.Raise) and len(body) <= 2


def _binds(statement: Statement, name: str, overloads: bool = False) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        is_overload = any(_last_name(d) == "overload" for d in statement.decorator_list)
        return statement.name == name and is_overload == overloads
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
    """`a` and `b` of `a, b = ...`."""
    return target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def _exports(tree: ast.Module | None, name: str) -> bool:
    """Whether `from module import *` brings the name, if it is there."""
    exported, is_all = _exported(tree) if tree else (frozenset(), False)
    return name in exported or not (is_all or name.startswith("_"))


@functools.cache
def _exported(tree: ast.Module) -> tuple[frozenset[str], bool]:
    """Names in the module's `__all__`, and whether those are all; not where it is put together."""
    lists = [s for s in _statements(tree.body) if _binds(s, "__all__") or _adds_exports(s)]
    names = {node.value for s in lists for node in ast.walk(s) if isinstance(node, ast.Constant)}
    is_plain = len(lists) == 1 and isinstance(getattr(lists[0], "value", None), ast.List | ast.Tuple)
    return frozenset(name for name in names if isinstance(name, str)), is_plain


def _adds_exports(statement: Statement) -> bool:
    """`__all__ += [...]` or `__all__.extend([...])`."""
    changed: ast.expr | None = None
    if isinstance(statement, ast.AugAssign):
        changed = statement.target
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        method = statement.value.func
        changed = method.value if isinstance(method, ast.Attribute) else None
    return isinstance(changed, ast.Name) and changed.id == "__all__"


def _makes(tree: ast.Module, name: str) -> bool:
    """Whether the module may make the name as it is imported or asked for it: names it in a text, or
    answers whatever it is asked for."""
    asked = [s for s in _statements(tree.body) if _binds(s, "__getattr__")]
    if any(isinstance(s, ast.FunctionDef) and not _raises(s) for s in asked):
        return True
    made = _calls(tree, "globals")
    loops = (
        s for s in _statements(tree.body) if isinstance(s, ast.For) and isinstance(s.iter, ast.Attribute)
    )
    if any(call in ast.walk(loop) for loop in loops for call in made):  # of names of another object
        return True
    return name in _texts(tree) and bool(asked or made)


def _gives_members(tree: ast.Module, name: str) -> bool:
    """Whether the module gives its class of that name members: `setattr(name, ...)`."""
    owners = [call.args[0] for call in _calls(tree, "setattr") if call.args]
    return any(isinstance(owner, ast.Name) and owner.id == name for owner in owners)


@functools.cache
def _texts(tree: ast.Module) -> frozenset[str]:
    """Those in the module."""
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return frozenset(text for text in constants if isinstance(text, str))


@functools.cache
def _calls(tree: ast.Module, function: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _last_name(node) == function]


def _raises(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Raise) for node in ast.walk(function))


def _inside_getattr(tree: ast.Module) -> Iterator[Statement]:
    """What the module's `__getattr__` does."""
    for statement in _definitions(tree.body, "__getattr__"):
        yield from (node for node in ast.walk(statement) if isinstance(node, ast.ImportFrom))


def _table(tree: ast.Module, name: str) -> Iterator[str]:
    """Where tables of the module say that the name is, as `module` or `module:name`: `{name: module}`,
    `{name: (module, name)}` or `{module: [names]}`."""
    for table in (node for node in ast.walk(tree) if isinstance(node, ast.Dict)):
        for key, value in zip(table.keys, table.values, strict=True):
            texts = [part.value for part in _parts(value) if isinstance(part, ast.Constant)]
            words = [text for text in texts if isinstance(text, str)]
            if not isinstance(key, ast.Constant) or not words:
                continue
            if key.value == name:
                yield ":".join(words[:2])
            elif name in words:
                yield f"{key.value!s}:{name}"


def _statements(body: Sequence[Statement]) -> Iterator[Statement]:
    """Those of a module or class, inside conditions too, not inside functions and classes."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and _last_name(statement.test) == "TYPE_CHECKING":
            yield from _statements(statement.orelse)
        elif isinstance(statement, ast.If | ast.Try | ast.With | ast.For):
            for block in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, block, []):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _last_name(node: ast.expr) -> str:
    """`dataclass` of `dataclasses.dataclass(frozen=True)`."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    """Those below it that are no packages themselves: packages may lie in them."""
    with contextlib.suppress(PermissionError):
        for inner in sorted(folder.iterdir()):
            if inner.is_dir() and not inner.name.startswith(".") and not _is_package(inner):
                yield inner
                if depth > 1:
                    yield from _folders(inner, depth - 1)


def _is_package(folder: Path) -> bool:
    """And no project of its own, as `hopper` in FlashAttention's checkout is beside."""
    return (folder / "__init__.py").exists() and not (folder / "setup.py").exists()


def _archive_roots(archive: zipfile.Path) -> list[Folder]:
    """The archive, and folders in it that are no packages themselves."""
    names = archive.root.namelist()
    packages = {name.removesuffix("/__init__.py") for name in names if name.endswith("/__init__.py")}
    folders = {
        "/".join(parts[:depth])
        for parts in (name.split("/") for name in names)
        for depth in range(1, min(DEPTH, len(parts) - 1) + 1)
    }
    inside = [f for f in sorted(folders) if not any(f == p or f.startswith(f"{p}/") for p in packages)]
    return [archive, *(archive / folder for folder in inside)]


def _files(folder: Folder) -> Iterator[Folder]:
    """All below it."""
    if isinstance(folder, Path):
        yield from (path for path in folder.rglob("*") if path.is_file())
    else:  # by its list of names, which iterdir would read again for each folder
        inside = (n for n in folder.root.namelist() if n.startswith(folder.at) and not n.endswith("/"))
        yield from (zipfile.Path(folder.root, name) for name in inside)
