"""Signatures of functions: of live ones, of those written down as text, and of torch's operators.

A default is kept as the text that stands in the source.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Kind = inspect.Parameter


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


def of_fields(fields: Iterable[ast.stmt]) -> inspect.Signature:
    """Of the class of a dataclass or named tuple, by the annotated names in its body."""
    return inspect.Signature(
        [
            Kind(
                field.target.id,
                Kind.POSITIONAL_OR_KEYWORD,
                default=Kind.empty if field.value is None else Default("..."),
            )
            for field in fields
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        ]
    )


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
    while (flat := re.sub(r"[(\[]([^()\[\]]*)[)\]]", lambda m: " " * len(m.group()), text)) != text:
        text = flat
    return [part.strip() for part in text.split(",") if part.strip()]


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
