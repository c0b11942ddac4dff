"""Reads signatures of live functions, Python source, schemas of torch's operators, and C++ bindings.

A signature from a source has no annotations, and its defaults are texts (`Default`). `parse` reads its `str`.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Kind = inspect.Parameter

LONGEST = 8000
"""The most bytes of a compiled file that are searched for the beginning of a schema."""


@dataclass(frozen=True)
class Default:
    """A default, known by its text."""

    text: str

    def __repr__(self) -> str:
        return self.text


def of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a live function. None for C++ (pybind11), and where a wrapper takes anything."""
    # One of torch's operators has a schema, or its overload `default` has one.
    schema = getattr(getattr(function, "default", function), "_schema", None)
    if schema:
        return next(iter(_schema(_without_result(str(schema))).values()), None)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    return None if takes_anything(signature) else signature


def takes_anything(signature: inspect.Signature) -> bool:
    """Whether it is `(*args, **kwargs)`."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return kinds == [Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD]


def parse(text: str) -> inspect.Signature:
    """Reads `(q, kv, *, scale=1.0, **rest)`, with or without annotations."""
    definition = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    return of_arguments(definition.args)


def of_arguments(arguments: ast.arguments) -> inspect.Signature:
    """The signature of a definition in Python source."""
    by_position: list[tuple[ast.arg, Any]] = [
        *((argument, Kind.POSITIONAL_ONLY) for argument in arguments.posonlyargs),
        *((argument, Kind.POSITIONAL_OR_KEYWORD) for argument in arguments.args),
    ]
    count_without = len(by_position) - len(arguments.defaults)  # the defaults are those of the last ones
    defaults: list[ast.expr | None] = [None] * count_without + list(arguments.defaults)
    parameters = [
        _parameter(argument, kind, default)
        for (argument, kind), default in zip(by_position, defaults, strict=True)
    ]
    if arguments.vararg:
        parameters.append(_parameter(arguments.vararg, Kind.VAR_POSITIONAL, None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(argument, Kind.KEYWORD_ONLY, default))
    if arguments.kwarg:
        parameters.append(_parameter(arguments.kwarg, Kind.VAR_KEYWORD, None))
    return inspect.Signature(parameters)


def _parameter(argument: ast.arg, kind: Any, default: ast.expr | None) -> inspect.Parameter:
    return Kind(argument.arg, kind, default=Kind.empty if default is None else Default(ast.unparse(default)))


def of_fields(body: Iterable[ast.stmt], by_name: bool) -> inspect.Signature | None:
    """The signature of a dataclass, named tuple or model, by the annotated names in its body. None where a
    field is declared in a way that is not read here: by `field(...)`, `ClassVar` or `KW_ONLY`."""
    parameters = ["*"] if by_name else []
    for field in body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            annotation = ast.unparse(field.annotation)
            if isinstance(field.value, ast.Call) or "ClassVar" in annotation or "KW_ONLY" in annotation:
                return None
            parameters.append(f"{field.target.id}=..." if field.value else field.target.id)
    try:
        return parse(f"({', '.join(parameters)})")
    except SyntaxError:  # a field without a default behind one with a default
        return None


def of_schema(text: str) -> inspect.Signature:
    """Reads what an operator's schema has in brackets: `Tensor a, (Tensor, Tensor) b, *, int c=1`."""
    parameters = []
    for part in _apart(text):
        declared, equals, default = part.partition("=")
        parameters.append(declared.split()[-1] + equals + default)
    return parse(f"({', '.join(parameters)})")


def _apart(text: str) -> list[str]:
    """Splits a text at the commas that are not inside brackets."""
    parts, depth = [""], 0
    for character in text:
        if character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def of_compiled(compiled: bytes) -> dict[str, inspect.Signature]:
    """The signatures of torch's operators by name. Their schemas are text in the compiled file."""
    by_name: dict[str, inspect.Signature] = {}
    for arrow in (b") ->", b")->"):
        end = compiled.find(arrow)
        while end >= 0:
            start = compiled.rfind(b"\0", max(0, end - LONGEST), end) + 1
            with contextlib.suppress(UnicodeDecodeError):
                by_name = _schema(compiled[start:end].decode()) | by_name
            end = compiled.find(arrow, end + 1)
    return by_name


def of_cpp(source: bytes) -> dict[str, inspect.Signature]:
    """The signatures of functions that a C++ source binds, by name: torch's operators by their schemas, and
    those of pybind11 where it names the arguments."""
    if b"def(" not in source:
        return {}
    text = source.decode(errors="replace")
    by_name: dict[str, inspect.Signature] = {}
    for literals in re.findall(r'\bdef\(\s*((?:"[^"\n]*"\s*)+)', text):
        schema = "".join(re.findall(r'"([^"\n]*)"', literals))
        by_name |= _schema(_without_result(schema))
    for name, binding in re.findall(r'm\.def\(\s*"(\w+)"(.*?)\);', text, re.DOTALL):
        arguments = re.findall(r'(?:py|pybind11)::arg\("(\w+)"\)(\s*=)?', binding)
        if arguments:
            parameters = [f"{argument}=..." if equals else argument for argument, equals in arguments]
            with contextlib.suppress(SyntaxError):  # a macro that binds several functions
                by_name[name] = parse(f"({', '.join(parameters)})")
    for name, other in re.findall(r'm\.attr\("(\w+)"\)\s*=\s*m\.attr\("(\w+)"\)', text):
        if other in by_name:
            by_name[name] = by_name[other]
    return by_name


def _without_result(schema: str) -> str:
    """A schema without the closing bracket of its arguments and what it returns, as `_schema` reads it."""
    return schema.rpartition("->")[0].rstrip().removesuffix(")")


def _schema(text: str) -> dict[str, inspect.Signature]:
    """Reads `namespace::name.overload(arguments`. Returns the signature by name; nothing for another text."""
    match = re.fullmatch(r"(?:\w+::)?(\w+)(?:\.\w+)?\((.*)", text, re.DOTALL)
    with contextlib.suppress(SyntaxError, ValueError, IndexError):
        return {match[1]: of_schema(match[2])} if match else {}
    return {}
