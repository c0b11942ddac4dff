"""What rows give their libraries, written down: a record that a reviewer reads as a diff.

A row is prepared and called on stand-ins (tests/support/stand_ins.py); every call of the library is written
down as it is made, with each argument by name: dtype, shape, strides, where it lies and what it holds.
Operands hold small whole numbers and eighths, which all formats hold and all arithmetic on the way keeps, so
that what tensors hold does not depend on the CPU.
"""

import copy
import functools
import hashlib
import importlib.util
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import kernels
from kernels.compose import bind
from kernels.op import Implementation, Op, Prepared
from kernels.operands import Operands, Seeds
from kernels.platform import Platform
from shapes.case import parse
from tests.support.answers import ALSO, ANSWERS, VALUES
from tests.support.composed import innermost
from tests.support.stand_ins import Answer, Arguments, Libraries, Made, StandIn, lent

RECORDS = Path(__file__).parent.parent / "kernels" / "recorded"

SHOWN = 12
"""Elements up to which a tensor's values are written, instead of a digest."""

LARGE = 1 << 24
"""Elements from which only the beginning of a tensor is looked at: a workspace."""

BEGINNING = 1024

SHORT = {
    torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16", torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e4m3fnuz: "e4m3fnuz",
}  # fmt: skip


class Wrong(Exception):
    """What no row may do, whatever it gives its library."""


@dataclass(frozen=True)
class Case:
    """A row on an architecture, with the libraries that stand in (`NAME`, or `NAME VERSION`)."""

    op: str
    name: str
    arch: str
    libraries: tuple[str, ...]
    text: str
    boundary: str = "core"

    def __str__(self) -> str:
        apart = [self.boundary] * (self.boundary != "core")
        older = [f"({library})" for library in self.libraries if " " in library]
        return f"{' '.join([self.arch, *apart, *older])}: {self.text}"

    @property
    def kind(self) -> str:
        return "rocm" if self.arch.startswith("gfx") else "cuda"

    @property
    def implementation(self) -> Implementation:
        return next(i for i in kernels.implementations(self.op) if i.name == self.name)

    @contextmanager
    def lent(self, **how: Any) -> Iterator[tuple[Platform, Libraries]]:
        besides = self.implementation.also  # type: ignore[attr-defined]  # of a vendor
        how = {"also": ALSO, "answers": ANSWERS, "values": VALUES, "besides": besides} | how
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # several wait for each other where other processes run
        try:
            with lent(self.kind, self.arch, *self.libraries, **how) as found:
                yield found
        finally:
            torch.set_num_threads(threads)

    @contextmanager
    def prepared(self, answers: Mapping[str, Answer] | None = None, **how: Any) -> Iterator[Prepared]:
        """Bound to stand-ins of which some answer otherwise."""
        op, row = kernels.OPS[self.op], self.implementation
        with self.lent(answers={**ANSWERS, **(answers or {})}, **how) as (here, _):
            operands = op.operands(self.sizes(here), Seeds(1, 1), "cpu", self.boundary)
            yield bind(op, row, operands, None if row.allocates else op.empty_output(operands.sizes, "cpu"))

    def sizes(self, here: Platform) -> Any:  # of its op
        """AssertionError for what the row does not support."""
        op = kernels.OPS[self.op]
        given = {**op.defaults(self.arch), **parse(self.text)[0]}
        support = self.implementation.supports(op.case(given, boundary=self.boundary), here)
        assert support.ok, support.reason
        return op.sizes(given)


FP8 = {arch: dict(kernels.OPS["mla_decode"].defaults(arch))["fp8"] for arch in ("gfx942", "gfx950")}


def rows(
    op: str, name: str, archs: str, libraries: str, *texts: str, boundary: str = "core"
) -> Iterator[Case]:
    """Of a row on some architectures, with libraries between commas. `{fp8}` in a text: the architecture's
    format."""
    for arch in archs.split():
        for text in texts:
            given = text.replace("{fp8}", FP8.get(arch, "e4m3fn"))
            yield Case(op, name, arch, tuple(filter(None, libraries.split(", "))), given, boundary)


def record(case: Case, answers: Mapping[str, Answer] = ANSWERS) -> str:
    """All calls of preparing, of the call, and of the call after other live operands were loaded, where these
    differ. Raises Wrong; AssertionError for what is not supported."""
    op, row = kernels.OPS[case.op], case.implementation
    heard = Recorder()
    how = {"heard": heard.call, "returned": heard.returned, "answers": answers}
    with case.lent(**how) as (here, libraries), launched(libraries), poisoned():
        sizes = case.sizes(here)
        operands = copy.deepcopy(exact_operands(op, sizes, 0, case.boundary))
        out = None if row.allocates else op.empty_output(sizes, "cpu").fill_(torch.nan)
        for name, tensor in [*operands.tensors().items(), *([] if out is None else [("out", out)])]:
            heard.name(tensor, name)
        prepared = bind(op, row, operands, out)
        if op.turns:
            operands = operands.turned(1)
            exact(operands, 0)
            prepared = bind(op, row, operands, out, prepared)
        unmoved(prepared, prepared.reads)
        heard.begin("call")
        called(operands, prepared)
        heard.result = heard.described(prepared.result())
        further = exact_operands(op, sizes, 1, case.boundary)
        heard.begin("load")
        load(prepared, operands, further)
        if out is not None:
            out.fill_(torch.nan)
        heard.begin("call after load")
        called(operands, prepared)
    return heard.text()


@contextmanager
def launched(libraries: Libraries) -> Iterator[None]:
    """The suite's own Triton kernels, around a library's, are told like calls of it, with their grid."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("triton"):
            from triton.runtime.jit import JITFunction

            from kernels.block_scale_gemm.providers import engines
            from kernels.fused_moe.providers import aiter, deep_gemm

            def launcher(kernel: Any, grid: tuple[int, ...]) -> Any:
                place = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
                return functools.partial(StandIn(place, libraries), grid=grid)

            patch.setattr(JITFunction, "__getitem__", launcher)
            for module in (aiter, deep_gemm, engines):
                patch.setattr(module, "require_interpreter", lambda device: None)
            patch.setattr(engines, "_device_for_triton", nullcontext)
        yield


@functools.lru_cache(maxsize=8)
def exact_operands(op: Op, sizes: Any, live: int, boundary: str) -> Operands:
    """Those of the rows of an op, most of which are recorded with the same sizes. They may not be changed."""
    operands = op.operands(sizes, Seeds(0, live), "cpu", boundary)
    exact(operands, live)
    return operands


def exact(operands: Operands, live: int) -> None:
    """Numbers in place of those that were drawn, but for NaN, which stays. Scales in fp32 of attention stay,
    which plain divisions make."""
    for name, tensor in operands.tensors().items():
        drawn = random.Random(f"{name} {live}")
        if tensor.is_floating_point() and tensor.element_size() < 4:
            eighths = torch.frombuffer(bytearray(drawn.randbytes(tensor.numel())), dtype=torch.uint8) % 31
            values = eighths.to(torch.bfloat16).sub_(15).div_(8)
            if name in ("a", "x"):  # blocks of which each gets a scale of its own when it is quantised
                blocks = values.view(-1, 128)
                blocks *= torch.tensor(powers_of_two(drawn, len(blocks)))[:, None].bfloat16()
            tensor.copy_(values.view(tensor.shape).masked_fill_(nans(tensor), torch.nan))
        elif name == "logits":
            sure_of_picks(operands, tensor)
        elif name in IN_FP32:
            values = torch.tensor(IN_FP32[name](drawn, tensor.numel()))
            tensor.copy_(values.view(tensor.shape))


def powers_of_two(drawn: random.Random, count: int) -> list[float]:
    return [2.0 ** (byte % 7 - 3) for byte in drawn.randbytes(count)]


IN_FP32: dict[str, Callable[[random.Random, int], list[float]]] = {
    **dict.fromkeys(("a_scale", "b_scale", "x_scale", "w13_scale", "w2_scale"), powers_of_two),
    "topk_weights": lambda drawn, count: [byte % 31 / 16 for byte in drawn.randbytes(count)],
    "bias": lambda drawn, count: [place / 256 for place in drawn.sample(range(count), count)],
}
"""Numbers for operands in fp32 that are drawn, by their names."""


def sure_of_picks(operands: Any, logits: torch.Tensor) -> None:
    """Of a pick every sigmoid makes 1, of another expert 0. Biases decide their order."""
    picks = operands.sizes.routed.global_picks(operands.seeds.live, operands.seeds.turn)
    logits.fill_(-200.0).scatter_(1, torch.tensor(picks), 200.0)


def called(operands: Operands, prepared: Prepared) -> None:
    before = operands.digest()
    prepared.call()
    if operands.digest() != before:
        raise Wrong("the call changed its operands")


def load(prepared: Prepared, operands: Operands, further: Operands) -> None:
    """Other live operands, into what was prepared and into what it was prepared on."""
    unmoved(prepared, lambda: prepared.load(further.live_tensors()))
    for name, tensor in further.live_tensors().items():
        getattr(operands, name).copy_(tensor)


def unmoved(prepared: Prepared, step: Callable[[], object]) -> None:
    """A recorded graph reads and writes where it did when it was recorded."""
    before = pointers(prepared)
    step()
    if pointers(prepared) != before:
        raise Wrong("a recorded graph would not see what was loaded")


def pointers(prepared: Prepared) -> list[int]:
    """Where the library reads and writes, by the calls that are bound."""
    inner = innermost(prepared)
    held = [*vars(inner).values()]
    for value in vars(inner).values():  # of a call that is a function of its own, what it calls
        held += [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    held += itertools.chain.from_iterable(value for value in held if isinstance(value, list | tuple))
    calls = [value for value in held if hasattr(value, "keywords")]
    given = itertools.chain.from_iterable([*call.args, *call.keywords.values()] for call in calls)
    return [part.data_ptr() for _, part in flat("", list(given)) if isinstance(part, torch.Tensor)]


def flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value, each by its name: of a list or tuple that holds more than plain numbers, of a
    dict; of an object what was set on it."""
    if isinstance(value, tuple | list) and any(not isinstance(v, int | float) for v in value):
        for i, part in enumerate(value):
            yield from flat(f"{name}[{i}]", part)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from flat(f"{name}[{key}]", part)
    elif isinstance(value, SimpleNamespace):
        yield name, type(value)
        for key, part in vars(value).items():
            yield from flat(f"{name}.{key}", part)
    else:
        yield name, value


POISON = {1: 0x5A, 2: 0x5A5A, 4: 0x5A5A5A5A, 8: 0x5A5A5A5A5A5A5A5A}
"""By element size, what an empty tensor of whole numbers holds."""


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated and not written is seen to be: NaN, or POISON."""

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        beginning = tensor.flatten()[:BEGINNING] if tensor.numel() >= LARGE else tensor
        beginning.fill_(torch.nan if tensor.is_floating_point() else POISON[tensor.element_size()])
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            right = getattr(owner, name)
            patch.setattr(owner, name, lambda *a, _right=right, **k: poison(_right(*a, **k)))
        zeros = torch.zeros

        def as_zeros(size: Any, *more: Any, **how: Any) -> torch.Tensor:
            if isinstance(size, int) and size >= LARGE:  # a workspace, for which no memory is taken
                return torch.from_numpy(numpy.zeros(size, "b")).view(how["dtype"])
            return zeros(size, *more, **how)

        patch.setattr(torch, "zeros", as_zeros)
        yield


class Recorder:
    """Calls of libraries as text, one line for each argument."""

    def __init__(self) -> None:
        self.parts: dict[str, list[tuple[str, dict[str, str]]]] = {}
        self.names: dict[int, tuple[str, torch.Tensor]] = {}
        self.objects: dict[str, list[Made]] = {}
        self.result = ""
        self.begin("prepare")

    def begin(self, part: str) -> None:
        self.calls = self.parts.setdefault(part, [])

    def call(self, place: str, given: Arguments, owner: object = None) -> None:
        lines: dict[str, str] = {"of": self.described(owner)} if owner else {}
        self.calls.append((place, lines))
        for argument, value in given.items():
            for name, part in flat(argument, value):
                if isinstance(part, torch.Tensor):
                    self.name(part, f"{place.rpartition('.')[2]}.{name}")
                lines[name] = self.described(part, f"{place.rpartition('.')[2]}.{name}")

    def returned(self, place: str, result: Any) -> None:
        for name, part in flat("", result):
            if isinstance(part, torch.Tensor):
                self.name(part, f"{place.rpartition('.')[2]}(){name}")

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Where a storage was first met: later arguments in it say so. It is kept, so that no other takes its
        place."""
        self.names.setdefault(tensor.untyped_storage().data_ptr(), (name, tensor))

    def described(self, value: Any, name: str = "") -> str:
        if isinstance(value, torch.Tensor):
            marks = [mark for mark, holds in vars(value).items() if holds is True]  # as AITER's is_shuffled
            return " ".join(filter(None, [shaped(value), self.place(value, name), content(value), *marks]))
        if isinstance(value, float):
            return plain(value)
        if isinstance(value, Made):
            same = self.objects.setdefault(value.place, [])
            if all(value is not other for other in same):
                same.append(value)
            return f"{value.place} {next(i for i, other in enumerate(same, 1) if other is value)}"
        if isinstance(value, int | str | torch.dtype | torch.device | StandIn | tuple | list | None):
            return repr(value)
        if isinstance(value, type):
            return f"a {value.__name__}"
        return f"a {type(value).__name__}"

    def place(self, tensor: torch.Tensor, own: str) -> str:
        """Nothing for a storage that was first met as this very argument."""
        name, first = self.names.get(tensor.untyped_storage().data_ptr(), (own, tensor))
        offset = (tensor.data_ptr() - first.data_ptr()) // tensor.element_size()
        return f"in {name}" + (f"{offset:+}" if offset else "") if (name, offset) != (own, 0) else ""

    def text(self) -> str:
        lines = []
        for part, calls in self.parts.items():
            if part == "load" and not calls:
                continue
            lines.append(f"{part}:")
            before = self.parts["call"] if part == "call after load" else []
            for (place, given), (_, others) in itertools.zip_longest(calls, before, fillvalue=("", {})):
                same = others.items() if others.keys() == given.keys() else ()
                changed = {name: text for name, text in given.items() if (name, text) not in same}
                lines.append(f"  {place}")
                lines += [f"    {name} {text}" for name, text in changed.items()]
        return "\n".join([*lines, f"result {self.result}", ""])


def plain(number: float) -> str:
    """Nine digits, which libraries of mathematics agree on; a whole one is not taken for an int."""
    text = f"{number:.9g}"
    return f"{text}.0" if text.lstrip("-").isdigit() else text


def shaped(tensor: torch.Tensor) -> str:
    dtype = SHORT.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    strides = "" if tensor.is_contiguous() else f" strides {list(tensor.stride())}"
    return f"{dtype} {list(tensor.shape)}{strides}"


def content(tensor: torch.Tensor) -> str:
    """Values of a few, a digest of more, and whether NaN is among them; `empty`: what nobody wrote."""
    if not tensor.numel():
        return ""
    large = tensor.numel() >= LARGE
    seen = tensor.detach().flatten()[:BEGINNING] if large else tensor.detach().flatten()
    begins = "begins with " if large else ""
    if is_empty(seen):
        return "empty"
    if not seen.view(torch.uint8).any():
        return f"{begins}zeros"
    if seen.numel() <= SHOWN:
        return "= " + " ".join(f"{value:.9g}" for value in seen.double().tolist())
    bits = seen.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[seen.element_size()])
    if seen.is_floating_point() and (nan := nans(seen)).any():
        begins += "NaN and "
        bits = bits.masked_fill(nan, 127)  # of NaN there are many, and CPUs make different ones
    return begins + hashlib.sha1(bits.numpy().tobytes()).hexdigest()[:10]


def nans(tensor: torch.Tensor) -> torch.Tensor:
    """Of FP8 by its codes: torch would convert it value by value."""
    if tensor.element_size() > 1:
        return tensor.isnan()
    codes = tensor.view(torch.uint8)
    return codes == 0x80 if tensor.dtype == torch.float8_e4m3fnuz else codes & 0x7F == 0x7F


def is_empty(tensor: torch.Tensor) -> bool:
    """What nobody wrote: see `poisoned`."""
    if tensor.is_floating_point():
        return bool(nans(tensor).all())
    return tensor.dtype != torch.bool and bool((tensor == POISON[tensor.element_size()]).all())


def rendered(cases: list[Case]) -> str:
    """The records of a row; equal ones once, under the names of all their cases."""
    texts: dict[str, list[Case]] = {}
    for case in cases:
        texts.setdefault(record(case), []).append(case)
    return "\n".join("".join(f"# {case}\n" for case in named) + text for text, named in texts.items())
