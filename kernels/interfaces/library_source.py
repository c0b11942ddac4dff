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
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Signature
from pathlib import Path
from typing import Protocol

from kernels.interfaces import signatures

Folder = Path | zipfile.Path

DEPTH = 3
"""How many folders may lie between the given one and a package, as `python` before `python/sglang` does."""

FIELDS = {"dataclass", "NamedTuple", "BaseModel", "Struct"}
"""Decorators and bases that make a class take its fields as arguments."""

UNREADABLE = (OSError, zipfile.BadZipFile, zlib.error, SyntaxError, ValueError)
"""What reading a damaged file, a template or another version's Python raises."""

Seen = tuple[str, ...]
"""The places that were followed already, so that circular imports end."""

CPP = (".cpp", ".cc", ".cu", ".hpp", ".h")


class NotThere(LookupError):
    """The library has no such name. The text says which."""


class SignatureSource(Protocol):
    """Knows a library's signatures."""

    def signature(self, place: str) -> Signature | None:
        """The signature at a dotted place, without `self`. None if unknown. Raises NotThere."""


@dataclass(frozen=True)
class Module:
    """What the files of a module tell."""

    name: str
    exists: bool
    """Whether there is a source, a compiled file, or a folder of that name."""
    source: Folder | None
    """Its source file; for a compiled module its stub."""
    is_compiled: bool
    """Whether there is a compiled file."""
    tree: ast.Module | None
    """The parsed source; None where there is none, or where it cannot be read."""

    @property
    def is_bare_folder(self) -> bool:
        """Whether an existing module is only a folder, without an __init__.py."""
        return self.source is None and not self.is_compiled

    @property
    def is_stub(self) -> bool:
        return self.source is not None and self.source.name.endswith(".pyi")

    def absolute(self, statement: ast.ImportFrom) -> str:
        """The full name of the module that an import in this module names."""
        if not statement.level:
            return statement.module or ""
        parts = self.name.split(".")
        is_package = self.source is not None and self.source.name.startswith("__init__.")
        package = parts if is_package else parts[:-1]  # what one dot stands for; each further dot goes up
        parts = package[: len(package) - (statement.level - 1)]
        return ".".join([*parts, statement.module] if statement.module else parts)


class LibrarySource:
    def __init__(self, roots: list[Folder]) -> None:
        """roots: folders in which packages lie, in the order of Python's path"""
        self.roots = roots

    @staticmethod
    def of(path: Path) -> LibrarySource:
        """Reads a folder, a wheel or another zip. Raises OSError or zipfile.BadZipFile."""
        if not path.is_dir():
            archive = zipfile.Path(path)
            return LibrarySource([archive, *_folders(archive, DEPTH)])
        if _is_package(path):
            return LibrarySource([path.parent])
        return LibrarySource([path, *_folders(path, DEPTH)])

    @staticmethod
    def installed(package: str) -> LibrarySource:
        """Reads the top-level package that Python would import. Has no roots where it is not installed."""
        spec = importlib.util.find_spec(package)
        places = [*(spec.submodule_search_locations or ())] if spec else []
        if spec and not places and spec.origin:
            places = [spec.origin]  # a module that is a file
        return LibrarySource([Path(place).parent for place in places])

    def has(self, name: str) -> bool:
        """Whether there is a module of that name, which is more than a folder."""
        module = self._module(name)
        return module.exists and not module.is_bare_folder

    def signature(self, place: str) -> Signature | None:
        names = place.split(".")
        is_unbuilt = names[-2].endswith("_C") and not self._module(".".join(names[:-1])).exists
        if is_unbuilt and (schema := self._schema(names[0], names[-1])):
            return schema
        for count in range(len(names) - 1, 0, -1):
            module = self._module(".".join(names[:count]))
            if module.exists:
                return self._in_module(module, names[count:], ())
        raise NotThere(f"no module {'.'.join(names[:-1])}")

    # The methods below look for names[0] in a module, for names[1] inside that, and so on. They return the
    # signature of the last name, or None where the source does not tell it, and raise NotThere.

    def _in_module(self, module: Module, names: list[str], seen: Seen) -> Signature | None:
        """The signature of what the module has by these names."""
        place = f"{module.name}.{names[0]}"
        if place in seen:
            return None
        if module.tree is None and not module.is_bare_folder:
            return self._schema(module.name, names[-1])
        seen = (*seen, place)
        found: list[Signature | None] = []
        not_there: NotThere | None = None  # the error of a definition that lacks a further name
        definitions = _definitions(module.tree, names[0]) if module.tree else []
        for definition in definitions:
            try:
                found.append(self._of_definition(definition, module, names, seen))
            except NotThere as error:
                not_there = error
        if found:
            return _common(found)
        inner = self._module(place)
        if inner.exists:
            return self._in_module(inner, names[1:], seen) if names[1:] else None
        if not_there:
            raise not_there
        if module.tree is None:  # a folder
            raise NotThere(f"no {place}")
        return self._not_bound(module.tree, module, names, seen)

    def _not_bound(self, tree: ast.Module, module: Module, names: list[str], seen: Seen) -> Signature | None:
        """The signature of a name that no statement of the module binds: it has the name by an import of all
        names of another module, or makes it (see `_may_make`)."""
        may_have = module.is_stub  # a stub may leave out what is compiled
        for target in self._stars(module, names[0]):
            with contextlib.suppress(NotThere):
                if signature := self._in_module(target, names, seen):
                    return signature
                may_have = True
        if _may_make(tree, names[0]):
            return self._in_table(tree, module, names, seen)
        if not may_have:
            raise NotThere(f"{module.name} has no {names[0]}")
        return None

    def _in_table(self, tree: ast.Module, module: Module, names: list[str], seen: Seen) -> Signature | None:
        """The signature of a name that the module makes. A dict in its source may say where the name is:
        {name: "module:other name"} or {name: ("module", "other name")}. With {name: "module"}, the name is
        one of that module, or the module itself if `names` goes on with members of it."""
        for table in (node for node in ast.walk(tree) if isinstance(node, ast.Dict)):
            for key, value in zip(table.keys, table.values, strict=True):
                if not (isinstance(key, ast.Constant) and key.value == names[0]):
                    continue
                texts = [text for text in map(_text, _parts(value)) if text]
                target, *other_name = ":".join(texts).split(":")
                members = names[1:]
                names_there = [other_name[0], *members] if other_name else members or names
                for place in (f"{module.name}.{target.lstrip('.')}", target):
                    if self._module(place).exists:
                        with contextlib.suppress(NotThere):
                            return self._in_module(self._module(place), names_there, seen)
        return None

    def _of_definition(self, node: ast.AST, module: Module, names: list[str], seen: Seen) -> Signature | None:
        """The signature by a statement that binds the first name."""
        members = names[1:]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return signatures.of_arguments(node.args)
        if isinstance(node, ast.ClassDef):
            return self._in_class(node, module, members, seen)
        if isinstance(node, ast.ImportFrom):
            target = self._module(module.absolute(node))
            original = next(a.name for a in node.names if (a.asname or a.name) == names[0])
            inner = self._module(f"{target.name}.{original}")
            if target.name == module.name and inner.exists:  # `from . import inner`
                return self._in_module(inner, members, seen) if members else None
            if target.exists:
                return self._in_module(target, [original, *members], seen)
            # The source of the target is not here: it may be compiled.
            return self._schema(module.name, members[-1] if members else original)
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Name):
            with contextlib.suppress(NotThere):  # a builtin, or an object that is made when it is imported
                return self._in_module(module, [value.id, *members], seen)
        if isinstance(value, ast.Attribute):
            return self._schema(module.name, value.attr)
        return None

    def _in_class(
        self, cls: ast.ClassDef, module: Module, members: list[str], seen: Seen
    ) -> Signature | None:
        """The signature of a class when it is called; of one of its methods, if there is a member."""
        method_name = members[0] if members else "__init__"
        methods = _definitions(cls, method_name)
        if methods:
            method = methods[0]
            if not isinstance(method, ast.FunctionDef):
                return None
            is_static = "staticmethod" in map(_last_name, method.decorator_list)
            signature = signatures.of_arguments(method.args)
            without_self = list(signature.parameters.values())[1:]
            return signature if is_static else signature.replace(parameters=without_self)
        bases = [base for base in cls.bases if _last_name(base) not in ("object", "Generic", "Protocol")]
        makers = [node for node in [*cls.decorator_list, *bases] if _last_name(node) in FIELDS]
        if not members and makers:
            if any(base not in makers for base in bases):  # the class may inherit fields
                return None
            text = ast.unparse(makers[0])
            return signatures.of_fields(cls.body, "kw_only=True" in text or text.endswith("BaseModel"))
        if bases:
            with contextlib.suppress(NotThere):  # a base of another library
                if isinstance(bases[0], ast.Name):
                    return self._in_module(module, [bases[0].id, *members], seen)
            return None
        may_be_added = module.tree is not None and {"setattr", method_name} <= _words(module.tree)
        if members and not may_be_added and not module.is_stub:
            raise NotThere(f"{module.name}.{cls.name} has no {method_name}")
        return None

    def _stars(self, module: Module, name: str) -> Iterator[Module]:
        """The modules from which a module imports all names and which export this name."""
        for statement in _statements(module.tree):
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                target = self._module(module.absolute(statement))
                if target.exists and _exports(target.tree, name):
                    yield target

    # Files of a module

    @functools.cache  # noqa: B019  # a library is read once in a process
    def _module(self, name: str) -> Module:
        path = name.replace(".", "/")
        folder, _, last_part = path.rpartition("/")
        source, is_folder, is_compiled = None, False, False
        for root in self._homes(name.partition(".")[0]):
            for file in (f"{path}.py", f"{path}/__init__.py", f"{path}.pyi", f"{path}/__init__.pyi"):
                if source is None and (root / file).is_file():
                    source = root / file
            is_folder = is_folder or (root / path).is_dir()
            is_compiled = is_compiled or last_part in self._compiled_in(root, folder)
        exists = is_folder or is_compiled or source is not None
        return Module(name, exists, source, is_compiled, _parsed(source) if source else None)

    @functools.cache  # noqa: B019
    def _homes(self, package: str) -> list[Folder]:
        """The roots that have this top-level package or module."""
        return [
            root
            for root in self.roots
            if (root / package).is_dir()
            or (root / f"{package}.py").is_file()
            or package in self._compiled_in(root, "")
        ]

    @functools.cache  # noqa: B019
    def _compiled_in(self, root: Folder, folder: str) -> set[str]:
        """The names of the compiled modules in a folder: `_C` for `_C.abi3.so`."""
        files = _inside(root / folder if folder else root)
        return {file.name.partition(".")[0] for file in files if file.name.endswith(".so")}

    def _schema(self, module: str, name: str) -> Signature | None:
        """The signature of one of torch's operators, by the compiled files of the module's package."""
        return self._schemas(module.partition(".")[0]).get(name)

    @functools.cache  # noqa: B019
    def _schemas(self, package: str) -> dict[str, Signature]:
        """The first signature of each name in a package's compiled files and the C++ sources beside it."""
        by_name: dict[str, Signature] = {}
        for home in self._homes(package):
            for file in _all_files(home / package):
                if file.name.endswith(".so"):
                    by_name = signatures.of_compiled(file.read_bytes()) | by_name
            sources: list[Folder] = [home / "csrc"]
            if isinstance(home, Path):
                sources.append(home.parent / "csrc")
            for folder in sources:
                for file in _all_files(folder):
                    if file.name.endswith(CPP):
                        by_name = signatures.of_cpp(file.read_bytes()) | by_name
        return by_name


def _parsed(file: Folder) -> ast.Module | None:
    """The parsed source; None where it cannot be read."""
    with contextlib.suppress(*UNREADABLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(file.read_bytes())
    return None


def _common(of_definitions: list[Signature | None]) -> Signature | None:
    """The signature that all definitions of a name have. Those that do not tell (None) or take anything are
    left out, unless all are such. None where they differ, as it is not known which branch runs."""
    known = [signature for signature in of_definitions if signature]
    exact = [signature for signature in known if not signatures.takes_anything(signature)]
    different = set(exact or known)
    return different.pop() if len(different) == 1 else None


# Statements of a module


def _statements(block: ast.AST | None) -> Iterator[ast.AST]:
    """The statements of a module or class, also inside conditions, but not inside functions or classes."""
    for inner in ast.iter_child_nodes(block) if block else ():
        if isinstance(inner, ast.If) and _last_name(inner.test) == "TYPE_CHECKING":
            for statement in inner.orelse:
                yield statement
                yield from _statements(statement)
            continue
        yield inner
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            yield from _statements(inner)


def _definitions(block: ast.AST, name: str) -> list[ast.AST]:
    """The statements that bind a name. Assignments, and functions that only raise, stand for a function that
    is not available. So they are left out if there are other statements."""
    binding = [s for s in _statements(block) if _binds(s, name)]
    others = [s for s in binding if not isinstance(s, ast.Assign | ast.AnnAssign) and not _only_raises(s)]
    return others or binding


def _only_raises(statement: ast.AST) -> bool:
    """Whether it is a function that only raises, perhaps behind one other statement such as a docstring."""
    body = statement.body if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) else []
    return bool(body) and isinstance(body[-1], ast.Raise) and len(body) <= 2


def _binds(statement: ast.AST, name: str) -> bool:
    """Whether a statement binds a name. A definition with `@overload` does not count."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return statement.name == name and "overload" not in map(_last_name, statement.decorator_list)
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


def _parts(node: ast.expr) -> list[ast.expr]:
    """`a` and `b` for `a, b`."""
    return node.elts if isinstance(node, ast.Tuple | ast.List) else [node]


def _text(node: ast.expr) -> str:
    """The text of a string constant, else an empty one."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _last_name(node: ast.expr) -> str:
    """`dataclass` for `dataclasses.dataclass(frozen=True)`."""
    node = node.func if isinstance(node, ast.Call) else node
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _exports(tree: ast.Module | None, name: str) -> bool:
    """Whether `from module import *` may import the name, if the module has it. A name that the source has as
    a text may be in `__all__`. Another public name is imported, unless all of `__all__` is one list."""
    if tree is not None and name in _words(tree):
        return True
    if name.startswith("_"):
        return False
    if tree is None:
        return True
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "__all__"]
    lists = [getattr(s, "value", None) for s in _statements(tree) if _binds(s, "__all__")]
    is_complete = len(uses) == len(lists) == 1 and isinstance(lists[0], ast.List | ast.Tuple)
    return not is_complete


def _may_make(tree: ast.Module, name: str) -> bool:
    """Whether the module may make the name when it is imported or asked for it. It may make any name with a
    `__getattr__` that never raises, or if it copies all names of another module into `globals()`. It may make
    a name that it has as a text with any `__getattr__`, or if it uses `globals()`."""
    words = _words(tree)
    uses_globals = "globals" in words
    getattrs = [s for s in _statements(tree) if _binds(s, "__getattr__")]
    for function in getattrs:
        raises = any(isinstance(node, ast.Raise) for node in ast.walk(function))
        if isinstance(function, ast.FunctionDef) and not raises:
            return True
    if uses_globals and not words.isdisjoint({"getattr", "dir"}):
        return True
    return name in words and (uses_globals or len(getattrs) > 0)


@functools.cache
def _words(tree: ast.Module) -> frozenset[str]:
    """The string constants of a module, and the names that it uses."""
    words = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
    return frozenset(words)


# Folders and archives


def _inside(folder: Folder) -> list[Folder]:
    """What a folder has, sorted by name; nothing where it does not exist or may not be read."""
    with contextlib.suppress(PermissionError):
        inner: list[Folder] = [*folder.iterdir()] if folder.is_dir() else []
        return sorted(inner, key=lambda path: path.name)
    return []


def _folders(folder: Folder, depth: int) -> Iterator[Folder]:
    """The folders below a folder, down to this depth, that are no packages themselves but may hold some."""
    for inner in _inside(folder):
        if inner.is_dir() and not inner.name.startswith(".") and not _is_package(inner):
            yield inner
            if depth > 1:
                yield from _folders(inner, depth - 1)


def _is_package(folder: Folder) -> bool:
    """Whether a folder is a package. One with a setup.py is a project, such as FlashAttention's `hopper`."""
    return (folder / "__init__.py").is_file() and not (folder / "setup.py").is_file()


def _all_files(folder: Folder) -> Iterator[Folder]:
    """All files below a folder."""
    for inner in _inside(folder):
        if inner.is_dir():
            yield from _all_files(inner)
        else:
            yield inner
