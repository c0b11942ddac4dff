"""What a library has, read from its Python sources: nothing of it is imported.

A library is a folder of packages (a site-packages, a checkout) or a wheel. What is compiled is known by name
alone, but for torch's operators, whose schemas stand as text in the compiled file.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kernels import signatures

Folder = Path | zipfile.Path
Statement = ast.stmt

DEPTH = 3
"""Folders below the one that is given, in which a package may lie: `python/sglang`, `hopper`."""

FIELDS = {"dataclass", "NamedTuple", "BaseModel", "Struct"}
"""Decorators and bases that make a class take its fields."""


class NotThere(LookupError):
    """The library has no such name; the text says which."""


class SignatureSource(Protocol):
    """What tells of a library's signatures."""

    def has(self, module: str) -> bool:
        """Whether it has that module or package."""

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
            return LibrarySource([zipfile.Path(zipfile.ZipFile(path))])
        if (path / "__init__.py").exists():  # a package itself
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
        missing = NotThere(f"{module} has no {name}")
        defined = _definitions(tree.body, name)
        for statement in defined:
            try:
                return self._of(statement, module, name, rest, seen)
            except NotThere as error:
                missing = error
        if self._exists(where):
            return self._in_module(where, rest, seen) if rest else None
        if defined:
            raise missing
        exists = bool(_definitions(tree.body, "__getattr__")) or _makes_globals(tree)
        for star in _statements(tree.body):
            if isinstance(star, ast.ImportFrom) and star.names[0].name == "*":
                target = self._absolute(star, module)
                if self._exists(target):
                    with contextlib.suppress(NotThere):
                        if signature := self._in_module(target, names, seen):
                            return signature
                        exists = True
        if exists:
            return None
        raise missing

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
            if self._exists(target):
                return self._in_module(target, [original, *rest], seen)
            return self._schema(module, [original, *rest][-1])
        if isinstance(statement, ast.Import):
            target = next(a.name for a in statement.names if a.asname == name or a.name == name)
            return self._in_module(target, rest, seen) if rest and self._exists(target) else None
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Name):
            return self._in_module(module, [value.id, *rest], seen)
        if isinstance(value, ast.Attribute):
            if isinstance(value.value, ast.Name) and not rest:
                try:
                    return self._in_module(module, [value.value.id, value.attr], seen)
                except NotThere:  # an attribute of an object that is made as the module is imported
                    pass
            return self._schema(module, value.attr)
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
        bases = [base for base in made.bases if _last_name(base) != "object"]
        if not rest and FIELDS & {_last_name(node) for node in [*made.decorator_list, *bases]}:
            known = len(bases) == 0 or _last_name(bases[0]) in FIELDS
            return signatures.of_fields(made.body) if known else None
        for base in bases:
            if isinstance(base, ast.Name):
                try:
                    return self._in_module(module, [base.id, *rest], seen)
                except NotThere:
                    return None  # of a library that is not here
            return None
        tree = self._tree(module)
        if rest and not (tree and _makes_members(tree, made.name)):
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
            try:
                self.trees[module] = ast.parse(file.read_text(encoding="utf-8")) if file else None
            except SyntaxError:  # a template, or Python of another day
                self.trees[module] = None
        return self.trees[module]

    def _file(self, module: str) -> Folder | None:
        """Its source; of a compiled one its stub."""
        path = module.replace(".", "/")
        for root in self.roots:
            for file in (f"{path}.py", f"{path}/__init__.py", f"{path}.pyi"):
                if (root / file).is_file():
                    return root / file
        return None

    def _is_folder(self, module: str) -> bool:
        return any((root / module.replace(".", "/")).is_dir() for root in self.roots)

    def _exists(self, module: str) -> bool:
        return bool(self._file(module) or self._is_folder(module) or self._compiled(module))

    def _compiled(self, module: str) -> list[Folder]:
        folder, _, name = module.replace(".", "/").rpartition("/")
        return [
            file
            for root in self.roots
            if (root / folder).is_dir()
            for file in (root / folder).iterdir()
            if file.name.split(".")[0] == name and file.name.endswith(".so")
        ]

    def _schema(self, module: str, name: str) -> inspect.Signature | None:
        """Of an operator of torch, by the compiled files of the module's package."""
        package = module.partition(".")[0]
        return next((schemas[name] for schemas in self._schemas(package) if name in schemas), None)

    @functools.cache  # noqa: B019  # a library is read once in a process
    def _schemas(self, package: str) -> list[dict[str, inspect.Signature]]:
        """Of its compiled files, and of the C++ sources beside it."""
        schemas = []
        for root in self.roots:
            for folder, endings, read in (
                (root / package, (".so",), operators),
                (root / "csrc", (".cpp", ".hpp", ".cu"), bindings),
            ):
                if folder.is_dir() and (root / package).is_dir():
                    schemas += [read(f.read_bytes()) for f in _files(folder) if f.name.endswith(endings)]
        return schemas

    def __hash__(self) -> int:
        return id(self)


def operators(compiled: bytes) -> dict[str, inspect.Signature]:
    """torch's operators by name, of the schemas that stand as text in a compiled file."""
    schemas: dict[str, inspect.Signature] = {}
    for match in re.finditer(rb"(?:\w+::)?(\w+)(?:\.\w+)?\(([^\x00]{0,4000}?)\) ?-> ?[\w(]", compiled):
        try:
            schemas.setdefault(match[1].decode(), signatures.of_schema(match[2].decode()))
        except (UnicodeDecodeError, ValueError, IndexError):
            continue
    return schemas


def bindings(source: bytes) -> dict[str, inspect.Signature]:
    """Functions by the name that a C++ source binds them to with pybind11, where it names the arguments."""
    text = source.decode(errors="replace")
    made: dict[str, inspect.Signature] = {}
    for name, rest in re.findall(r'm\.def\(\s*"(\w+)"(.*?)\);', text, re.DOTALL):
        named = re.findall(r'(?:py|pybind11)::arg\("(\w+)"\)(\s*=)?', rest)
        if named:
            made[name] = signatures.parse(
                f"({', '.join(n + ('=...' if equals else '') for n, equals in named)})"
            )
    for name, other in re.findall(r'm\.attr\("(\w+)"\)\s*=\s*m\.attr\("(\w+)"\)', text):
        if other in made:
            made[name] = made[other]
    return made


def _definitions(body: list[Statement], name: str) -> list[Statement]:
    """Statements that bind the name, those that tell most first: of several definitions the last that is
    made without a condition, then those made on one, then values."""
    plain = [s for s in body if _binds(s, name)]
    nested = [s for s in _statements(body) if _binds(s, name) and s not in plain]
    candidates = [*reversed(plain), *nested]
    return sorted(candidates, key=lambda s: isinstance(s, ast.Assign | ast.AnnAssign))


def _binds(statement: Statement, name: str) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        overload = any(_last_name(d) == "overload" for d in statement.decorator_list)
        return statement.name == name and not overload
    if isinstance(statement, ast.ClassDef):
        return statement.name == name
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return any((a.asname or a.name) == name for a in statement.names)
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return any(isinstance(t, ast.Name) and t.id == name for t in targets)


def _statements(body: list[Statement]) -> Iterator[Statement]:
    """Those of a module or class, inside conditions too, not inside functions and classes."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and _last_name(statement.test) == "TYPE_CHECKING":
            yield from _statements(statement.orelse)
        elif isinstance(statement, ast.If | ast.Try | ast.With | ast.For):
            for block in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, block, []):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _makes_globals(tree: ast.Module) -> bool:
    """Whether a module binds names as it is imported: `globals()[name] = ...`."""
    return any(
        isinstance(statement, ast.Assign)
        and any(isinstance(t, ast.Subscript) and _last_name(t.value) == "globals" for t in statement.targets)
        for statement in _statements(tree.body)
    )


def _makes_members(tree: ast.Module, name: str) -> bool:
    """Whether a class gets members as its module is imported: `setattr(name, ...)`."""
    return any(
        isinstance(call, ast.Call)
        and _last_name(call.func) == "setattr"
        and isinstance(call.args[0], ast.Name)
        and call.args[0].id == name
        for call in ast.walk(tree)
    )


def _last_name(node: ast.expr) -> str:
    """`dataclass` of `dataclasses.dataclass(frozen=True)`."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    """Those below it that are no packages themselves: packages may lie in them."""
    for inner in sorted(folder.iterdir()):
        if inner.is_dir() and not inner.name.startswith(".") and not (inner / "__init__.py").exists():
            yield inner
            if depth > 1:
                yield from _folders(inner, depth - 1)


def _files(folder: Folder) -> Iterator[Folder]:
    for inner in folder.iterdir():
        if inner.is_dir():
            yield from _files(inner)
        else:
            yield inner
