"""Signatures of functions: of live ones, of those written down as text, of torch's operators, of C++.

A default is kept as the text that stands in the source.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Kind = inspect.Parameter

LONGEST = 8000
"""Bytes that a schema may have."""

FIELD = ("field", "Field")
"""What tells of a field of a dataclass or model."""


@dataclass(frozen=True)
class Default:
    """A default by its text."""

    text: str

    def __repr__(self) -> str:
        return self.text


def of(function: Callable[..., Any]) -> inspect.Signature | None:
    """None for one that does not tell: of C++ (pybind11), or wrapped so that it takes anything."""
    if schema := getattr(getattr(function, "default", function), "_schema", None):  # an operator of torch
        return inspect.Signature(
            [
                Kind(
                    argument.name,
                    Kind.KEYWORD_ONLY if argument.kwarg_only else Kind.POSITIONAL_OR_KEYWORD,
                    default=Default("...") if argument.has_default_value() else Kind.empty,
                )
                for argument in schema.arguments
            ]
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    return None if takes_anything(signature) else signature


def takes_anything(signature: inspect.Signature) -> bool:
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return kinds == [Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD]


def parse(text: str) -> inspect.Signature:
    """Of `(q, kv, *, scale=1.0, **rest)`, with or without annotations."""
    definition = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    return of_arguments(definition.args)


def of_arguments(arguments: ast.arguments) -> inspect.Signature:
    """Of a definition in Python source."""
    by_position = [*arguments.posonlyargs, *arguments.args]
    kinds: list[Any] = [Kind.POSITIONAL_ONLY] * len(arguments.posonlyargs)
    kinds += [Kind.POSITIONAL_OR_KEYWORD] * len(arguments.args)
    bare: list[ast.expr | None] = [None] * (len(by_position) - len(arguments.defaults))
    defaults = [*bare, *arguments.defaults]
    parameters = [_parameter(*parts) for parts in zip(by_position, kinds, defaults, strict=True)]
    if arguments.vararg:
        parameters.append(_parameter(arguments.vararg, Kind.VAR_POSITIONAL, None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(argument, Kind.KEYWORD_ONLY, default))
    if arguments.kwarg:
        parameters.append(_parameter(arguments.kwarg, Kind.VAR_KEYWORD, None))
    return inspect.Signature(parameters)


def _parameter(argument: ast.arg, kind: Any, default: ast.expr | None) -> inspect.Parameter:
    return Kind(argument.arg, kind, default=Kind.empty if default is None else Default(ast.unparse(default)))


def of_fields(
    body: Iterable[ast.stmt], maker: ast.expr, inherited: Sequence[inspect.Signature | None]
) -> inspect.Signature | None:
    """Of the class of a dataclass or named tuple, by the annotated names in its body; None where a class that
    it inherits from is not known.

    maker: the decorator or base that makes it one
    """
    parameters: dict[str, inspect.Parameter] = {}
    for parent in inherited:
        if parent is None:
            return None
        parameters |= parent.parameters
    kind: Any = Kind.KEYWORD_ONLY if _by_name_alone(maker) else Kind.POSITIONAL_OR_KEYWORD
    for field in body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        annotation = ast.unparse(field.annotation)
        if annotation.rpartition(".")[2] == "KW_ONLY":
            kind = Kind.KEYWORD_ONLY
            continue
        settings = _settings(field.value)
        if "ClassVar" in annotation or settings.get("init") == "False":
            continue
        is_told = isinstance(field.value, ast.Call) and _maker(field.value) in FIELD
        has_default = bool({"default", "default_factory"} & settings.keys()) if is_told else bool(field.value)
        name = field.target.id
        own: Any = Kind.KEYWORD_ONLY if settings.get("kw_only") == "True" else kind
        parameters[name] = Kind(name, own, default=Default("...") if has_default else Kind.empty)
    try:
        return inspect.Signature(sorted(parameters.values(), key=lambda p: p.kind))
    except ValueError:
        return None


def _by_name_alone(maker: ast.expr) -> bool:
    """Whether it makes all fields keyword-only: `@dataclass(kw_only=True)`, pydantic's models."""
    return _settings(maker).get("kw_only") == "True" or ast.unparse(maker).endswith("BaseModel")


def _settings(value: ast.expr | None) -> dict[str, str]:
    """Keywords of `field(...)` or `dataclass(...)`."""
    if not isinstance(value, ast.Call) or _maker(value) not in ("dataclass", *FIELD):
        return {}
    return {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords if keyword.arg}


def _maker(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def of_schema(text: str) -> inspect.Signature:
    """Of what an operator's schema has in brackets: `Tensor a, (Tensor, Tensor) b, *, int c=1`."""
    parameters: list[inspect.Parameter] = []
    kind: Any = Kind.POSITIONAL_OR_KEYWORD
    for part in _apart(text):
        if part == "*":
            kind = Kind.KEYWORD_ONLY
            continue
        declared, equals, default = part.partition("=")
        name = declared.split()[-1]
        parameters.append(Kind(name, kind, default=Default(default) if equals else Kind.empty))
    return inspect.Signature(parameters)


def _apart(text: str) -> list[str]:
    """Its parts between commas that stand in no brackets."""
    flat, before = text, ""
    while flat != before:
        flat, before = re.sub(r"[(\[][^()\[\]]*[)\]]", lambda m: " " * len(m.group()), flat), flat
    ends = [*(comma.start() for comma in re.finditer(",", flat)), len(text)]
    starts = [0, *(end + 1 for end in ends)]
    return [part for start, end in zip(starts, ends, strict=False) if (part := text[start:end].strip())]


def text(signature: inspect.Signature) -> str:
    """As `parse` reads it."""
    return str(
        signature.replace(
            parameters=[p.replace(annotation=Kind.empty) for p in signature.parameters.values()],
            return_annotation=inspect.Signature.empty,
        )
    )


def without_first(signature: inspect.Signature) -> inspect.Signature:
    """Of a method as its object has it."""
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def partial(whole: inspect.Signature, call: ast.Call) -> inspect.Signature | None:
    """Of `functools.partial(function, ...)` in source, whole being the function's; None where that does not
    tell."""
    given = {keyword.arg: Default(ast.unparse(keyword.value)) for keyword in call.keywords}
    if None in given or any(isinstance(argument, ast.Starred) for argument in call.args):
        return None

    def function() -> None: ...

    function.__signature__ = whole  # type: ignore[attr-defined]
    by_position = [Default(ast.unparse(argument)) for argument in call.args[1:]]
    try:
        return inspect.signature(functools.partial(function, *by_position, **given))  # type: ignore[arg-type]
    except ValueError:
        return None


def of_compiled(compiled: bytes) -> dict[str, inspect.Signature]:
    """Of torch's operators by name, whose schemas stand as text in a compiled file."""
    made: dict[str, inspect.Signature] = {}
    for arrow in (b") ->", b")->"):
        end = compiled.find(arrow)
        while end >= 0:
            start = compiled.rfind(b"\0", max(0, end - LONGEST), end) + 1
            with contextlib.suppress(UnicodeDecodeError):
                made = _schema(compiled[start:end].decode()) | made
            end = compiled.find(arrow, end + 1)
    return made


def of_cpp(source: bytes) -> dict[str, inspect.Signature]:
    """Of functions by the name that a C++ source binds them to: torch's operators with a schema, and those of
    pybind11 whose arguments it names."""
    if b"def(" not in source:
        return {}
    text = source.decode(errors="replace")
    made: dict[str, inspect.Signature] = {}
    for literals in re.findall(r'\bdef\(\s*((?:"[^"\n]*"\s*)+)', text):
        schema = "".join(re.findall(r'"([^"\n]*)"', literals))
        made |= _schema(schema.rpartition("->")[0].rstrip().removesuffix(")"))
    for name, rest in re.findall(r'm\.def\(\s*"(\w+)"(.*?)\);', text, re.DOTALL):
        named = re.findall(r'(?:py|pybind11)::arg\("(\w+)"\)(\s*=)?', rest)
        if named:
            made[name] = parse(f"({', '.join(n + ('=...' if equals else '') for n, equals in named)})")
    for name, other in re.findall(r'm\.attr\("(\w+)"\)\s*=\s*m\.attr\("(\w+)"\)', text):
        if other in made:
            made[name] = made[other]
    return made


def _schema(text: str) -> dict[str, inspect.Signature]:
    """Of `namespace::name.overload(arguments`, by the name; nothing if it is none."""
    match = re.fullmatch(r"(?:\w+::)?(\w+)(?:\.\w+)?\((.*)", text, re.DOTALL)
    with contextlib.suppress(ValueError, IndexError):
        return {match[1]: of_schema(match[2])} if match else {}
    return {}
