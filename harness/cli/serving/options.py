"""Options that several serving commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., object])


def json_option(help: str) -> Callable[[Function], Function]:
    """`--json FILE|-`, as the parameter `json_to`; help: what is written there."""
    return click.option("--json", "json_to", metavar="FILE|-", help=help)
