"""What an adapter keeps to: with the doubles of its libraries it is right by the harness's own judge, for
several sets of operands, and changes none of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import kernels
from kernels.compose import bind
from kernels.op import Implementation, Op, Prepared
from kernels.operands import Seeds
from kernels.platform import Platform
from shapes.case import parse
from tests.doubles import lent
from tests.doubles.torch_scaled_mm import double as scaled_mm
from tests.support.judging import judged


class Wrong(Exception):
    """What an adapter computed is not what the op is; the judge's reason."""


@dataclass(frozen=True)
class Contract:
    """A row on an architecture, with the doubles of its libraries and the cases that it must get right.

    stationary: how many sets of stationary operands are tried, each with two of live ones
    """

    op: str
    name: str
    arch: str
    doubles: tuple[str, ...]
    texts: tuple[str, ...]
    boundary: str = "core"
    stationary: int = 1

    def __str__(self) -> str:
        apart = "" if self.boundary == "core" else f" {self.boundary}"
        return f"{self.op} {self.name} {self.arch}{apart} {'+'.join(self.doubles)}".strip()

    @property
    def kind(self) -> str:
        return "rocm" if self.arch.startswith("gfx") else "cuda"

    @property
    def implementation(self) -> Implementation:
        return next(i for i in kernels.implementations(self.op) if i.name == self.name)

    @contextlib.contextmanager
    def lent(self) -> Iterator[Platform]:
        with lent(self.kind, self.arch, *self.doubles) as here, pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_mm", scaled_mm.scaled_mm)
            yield here

    def keep(self, text: str, **changed: Any) -> None:
        """Raises Wrong, what the library raised, or AssertionError for what is not supported."""
        op, implementation = kernels.OPS[self.op], self.implementation
        with self.lent() as here:
            case = op.case(
                {**op.defaults(self.arch), **parse(text)[0], **changed}, boundary=self.boundary
            )  # fmt: skip
            support = implementation.supports(case, here)
            assert support.ok, support.reason
            for stationary in range(self.stationary):
                self._keep(op, implementation, op.sizes(case.sizes), stationary)

    def _keep(self, op: Op, implementation: Implementation, sizes: Any, stationary: int) -> None:
        operands = op.operands(sizes, Seeds(stationary, 0), "cpu", self.boundary)
        out = None if implementation.allocates else op.empty_output(sizes, "cpu").fill_(torch.nan)
        prepared = bind(op, implementation, operands, out)
        if op.turns:
            operands = operands.turned(1)
            prepared = bind(op, implementation, operands, out, prepared)
        before = pointers(prepared)
        prepared.reads()
        if pointers(prepared) != before:
            raise Wrong("asking where it reads changes that")
        for live in (0, 1):
            if live:
                given = op.operands(sizes, Seeds(stationary, live), "cpu", self.boundary).live_tensors()
                before = pointers(prepared)
                prepared.load(given)
                if pointers(prepared) != before:
                    raise Wrong("a recorded graph would not see what was loaded")
                for name, tensor in given.items():
                    getattr(operands, name).copy_(tensor)
            if out is not None:
                out.fill_(torch.nan)
            before_call = operands.digest()
            prepared.call()
            if operands.digest() != before_call:
                raise Wrong("the call changed its operands")
            report = judged(op, implementation, sizes, operands, prepared.result())
            if not report["ok"]:
                raise Wrong(report["reason"])


def pointers(prepared: Prepared) -> list[int]:
    """Where the library reads and writes, by the calls that are bound."""
    inner = getattr(prepared, "inner", prepared)
    calls = [value for value in vars(inner).values() if hasattr(value, "keywords")]
    given = itertools.chain.from_iterable([*call.args, *call.keywords.values()] for call in calls)
    flat = itertools.chain(*(part if isinstance(part, tuple | list) else [part] for part in given))
    return [part.data_ptr() for part in flat if isinstance(part, torch.Tensor)]
