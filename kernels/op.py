"""Contracts between what is measured (kernels) and how (harness): Op, Implementation, Prepared.

Importing this module, or a provider file of an op, imports no library: torch and the rest are imported inside
functions, so that `list` works on a machine that has none of them.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from kernels.formats import native, native_scales
from kernels.lazy import torch
from kernels.operands import Operands, Seeds
from kernels.support import Support, as_support, need
from shapes.case import Case, Size
from shapes.names import unknown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from kernels.platform import Platform

BOUNDARIES = ("core", "with_quant", "with_routing")
"""What a timed call covers, from the narrowest to the widest. Each includes those before it."""

PRODUCERS = {"with_quant": "quantise", "with_routing": "routing"}
"""What the suite's own kernel does between a boundary and the next narrower one."""

INTERPRETED_S = 2.0
"""Seconds that one interpreted call may take: it is checked and never timed."""

DTYPES = ("fp8", "bf16", "fp32")
"""The dtypes of operands of products, from the narrowest. Each holds all values of those before it."""


class Unsupported(Exception):
    """Raised by `prepare` where a library lacks what is needed; the text is the reason."""


@dataclass(frozen=True)
class Work:
    """The least work that a call must do."""

    flops: float
    bytes: float
    """Bytes moved, each byte once."""
    dtype: str = "bf16"
    """The narrowest dtype of operands with which products are right. The ceiling is that of this dtype."""


@dataclass(frozen=True)
class Tolerance:
    """How far a right output may be from the reference, in units of `Reference.sigma`, which is the error
    that rounding alone explains (each op derives it beside its reference)."""

    row: float
    """Root mean square over one row of the output's last dimension, or over each segment of it."""
    element: float
    """The largest single element."""
    segment: int | None = None
    """Elements of a row that are judged together: the fewest that one thread block writes, so that its error
    is not diluted by its neighbours; None: all."""
    bias: float = 0.015
    """By what share the whole output may be larger or smaller than the reference, for calls that round to FP8
    or truncate: their sigma is so wide that it would hide a common factor."""
    bias_bf16: float = 0.006
    """The same for all other calls. Each truncation to bf16 makes an output 0.28 percent smaller, rounding to
    nearest does not."""
    noise: float | None = None
    """Root mean square over the whole output, for calls that round to FP8; None: not judged. The worst row of
    a right call errs as much as each row of a format with one bit less, so that `row` cannot tell them apart.
    Records have it as `noise_limit`. It is not the noise of an A/A pair."""


@dataclass
class Reference:
    """The right answer for the rows that were computed, and the error that rounding explains there."""

    value: torch.Tensor
    """[rows, ...]: the first dimension is that of the output."""
    sigma: torch.Tensor
    """Like `value`, for activations that enter products in bf16."""
    rows: list[int] | None = None
    """The sampled row numbers; None: all rows were computed."""
    sigma_fp8: torch.Tensor | None = None
    """Like `sigma`, for calls that round activations to FP8 themselves; None where no call can."""
    even: torch.Tensor | None = None
    """Bool, in the shape of `value` without its last dimension: the rows in which sigma_fp8 comes from many
    independent errors of similar size. Only these rows are averaged, for `Tolerance.bias` and `.noise`;
    None: all are."""


def spread(count: int, offset: float = 0.0) -> list[int]:
    """The numbers 0 .. count - 1 in steps of the golden section, so that the first n of them are spread
    evenly for any n. offset: where the list begins, as a share of the count."""
    golden = 0.5 * (5**0.5 - 1)
    # Steps repeat some numbers and miss others. The missed ones follow at the end.
    steps = (int((offset + i * golden) % 1 * count) for i in range(2 * count))
    return list(dict.fromkeys([*steps, *range(count)]))


MOST_ELEMENTS = 1 << 27
"""The most elements of a reference, 16384 rows of 7168: the host's memory has to hold several of them with
their sigmas, 1 to 3 GiB each."""


def rows_kept(rows: int, width: int) -> int:
    """How many of an output's rows, of `width` elements each, a reference has room for."""
    return max(1, min(rows, MOST_ELEMENTS // width))


def affordable(
    order: Iterable[int], flops: Callable[[int], float], max_flops: float, width: int = 1
) -> list[int] | None:
    """The first rows of an order, ascending, that together take at most `max_flops` and MOST_ELEMENTS; at
    least one. None where that is all of them. flops: of a row, called in this order; width: elements of a
    row."""
    rows = list(dict.fromkeys(order))
    spent = itertools.accumulate(map(flops, rows))
    paid = sum(1 for _ in itertools.takewhile(lambda total: total <= max_flops, spent))
    kept = rows[: max(1, min(paid, rows_kept(len(rows), width)))]
    return sorted(kept) if len(kept) < len(rows) else None


@dataclass(frozen=True)
class RowGroups:
    """What the rows of an output belong to, for messages: a token to its sequence, or to its experts."""

    name: str

    of: torch.Tensor
    """int64 [rows, groups of a row], -1 where a row has fewer."""


def named(function: Any) -> str:
    """A function, or what wraps one, with its place: `mine() of mine.py:4`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f" of {Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""
    return f"{getattr(function, '__qualname__', type(function).__name__)}(){place}"


Call = Callable[[], object]
"""Timed: computes the op once, from whatever the operands hold now."""


def sequence(*steps: Call) -> Call:
    """A call that makes these calls in order, and returns what the last of them returns."""

    def call() -> object:
        for step in before:
            step()
        return last()

    *before, last = steps
    return call


class Prepared:
    """A call that is bound to operands and an output, and can be made again and again. A subclass may define
    `call` and the other methods; else they are given as functions."""

    def __init__(
        self,
        operands: Operands,
        out: torch.Tensor | None = None,
        call: Call | None = None,
        *,
        inputs: Mapping[str, torch.Tensor] | None = None,
        after_load: Callable[[], object] | None = None,
        result: torch.Tensor | Callable[[Any], torch.Tensor] | None = None,
        picked: Callable[[], str] | None = None,
    ) -> None:
        """
        call:   writes `out`; where the library allocates its own output (`out` is None), returns it
        inputs: where the call reads each live operand, as views of its canonical shape with any strides.
                Default: the canonical tensors themselves
        after_load: completes what `load` does after it copied new live operands into `inputs`
        result: the output in the op's canonical layout, as a tensor or as a function of what the call
                returned. Default: `out`, or what the call returned
        picked: says which kernel the library chose, for the record
        """
        if call is None and type(self).call is Prepared.call:
            raise TypeError(f"{type(self).__name__} has no call: give it one, or define the method `call`")
        if inspect.isfunction(call):
            _check_parameters(call, (), named(call), wrapped=False)
        self.operands = operands
        # None only for a library that allocates its own output. Other rows need no check for None.
        self.out = cast("torch.Tensor", out)
        self.stationary: Any = None
        """What further sets of operands share: what the declaration's `stationary` made of them; of a call
        that kernels/compose.py composed, its inner call."""
        self._call = call
        self._inputs = inputs
        self._after_load = after_load
        self._result = result
        self._picked = picked
        self._returned: Any = None
        self._called = False

    def call(self) -> None:
        """Timed: compute the op once, from whatever the operands hold now. Raises TypeError where the first
        call returned its output and left `out` as it was poisoned."""
        assert self._call is not None
        returned = self._call()
        if self.out is None:
            self._returned = returned
        elif not self._called:
            self._called = True
            if isinstance(returned, torch.Tensor) and returned.shape == self.out.shape:
                is_other = returned.data_ptr() != self.out.data_ptr()
                if is_other and self.out.isnan().all():
                    raise TypeError(
                        f"{named(self._call)} did not write `out`, but returned one: see `allocates`"
                    )

    def load(self, live: Mapping[str, torch.Tensor]) -> None:
        """Untimed: put new live operands where `call` reads them."""
        for name, target in self.inputs().items():
            target.copy_(live[name])
        if self._after_load is not None:
            self._after_load()

    def inputs(self) -> Mapping[str, torch.Tensor]:
        """The tensors in which `call` reads each live operand. `load` and the suite's own producer kernels
        write there."""
        return self.operands.live_tensors() if self._inputs is None else self._inputs

    def reads(self) -> Mapping[str, torch.Tensor]:
        """Like `inputs`, without side effects: the tensors that `call` reads at present. Live operands that
        only `load` can write are left out."""
        return self.inputs()

    def result(self) -> torch.Tensor:
        """The output of the last call in the op's canonical layout."""
        output = self._returned if self.out is None else self.out
        if callable(self._result):
            output = self._result(self._returned)
        elif self._result is not None:
            output = self._result
        if output is None:
            raise TypeError(
                f"{named(self._call or self.call)} gets no `out` to write, and returned no output"
            )
        return output

    def picked(self) -> str:
        """What the library chose to run, where it tells; for the record."""
        return "" if self._picked is None else self._picked()


def as_prepared(given: object, source: str, operands: Operands, out: torch.Tensor | None) -> Prepared:
    """The Prepared that a function returned, or of the call that it returned. Raises TypeError for anything
    else, which names the function as `source`."""
    if isinstance(given, Prepared):
        return given
    if callable(given):
        return Prepared(operands, out, given)
    raise TypeError(
        f"{source} returned {type(given).__name__}: it must return the call to be timed, which is a function "
        "without arguments, or a Prepared"
    )


class Implementation:
    """One way to compute an op: a subclass in a module of the op, or a function that `implementation` below
    declares."""

    # `provider.variant`
    name: ClassVar[str]
    # What it needs, for people. Empty in a plug-in: the name of its file.
    requires: ClassVar[str] = ""
    # Filled in by the op that finds it.
    op: str = ""
    # The file that brought it, if it is not the suite's own.
    plugin: str = ""
    # The module that has this row's version; empty: the provider.
    library: ClassVar[str] = ""
    # Implementations of one runtime share a worker process, others never do.
    runtime: ClassVar[str] = "torch"
    # The boundaries that its call covers by itself; composition makes wider ones of them.
    boundaries: ClassVar[tuple[str, ...]] = ("core",)
    # What its own call rounds bf16 activations to before products: bf16, or fp8.
    activations: ClassVar[str] = "bf16"
    # Its call rounds to bf16 toward zero, so that its limits are those of an error twice as large.
    truncates: ClassVar[bool] = False
    # The library allocates its own output: `out` is then None.
    allocates: ClassVar[bool] = False
    # False: the call cannot be recorded into a CUDA or HIP graph.
    captures: ClassVar[bool] = True
    # For the memory plan: a name for the layout. Implementations of a runtime with the same name share one
    # copy of the stationary operands in it; empty: each has a copy of its own.
    shared_layout: ClassVar[str] = ""
    # `prepare_turn` takes over all that `prepare` made of the stationary operands. So a call on other live
    # operands is prepared in almost no time, and a serving engine under test can call this implementation.
    rebinds: ClassVar[bool] = False
    # A compiler writes another program for each size: the answers at one size say nothing of another.
    per_size: ClassVar[bool] = False

    @property
    def provider(self) -> str:
        return self.name.split(".")[0]

    @property
    def version(self) -> str:
        """The version of its library as installed here, empty where it is not. Nothing is imported."""
        from kernels.platform import version

        return version(self.library or self.provider) or ""

    def available(self, platform: Platform) -> Support:
        """Whether this platform and its libraries can run it at all; by default whether torch is here.
        Nothing is imported."""
        return platform.library("torch")

    def fits(self, sizes: DataclassInstance) -> Support:
        """Whether it takes these sizes (heads, page, dtype ...)."""
        return Support(True)

    def interpreted(self, platform: Platform) -> bool:
        """True where it runs only through an interpreter: checked, never timed."""
        return False

    def environment(self, platform: Platform) -> dict[str, str]:
        """Variables that its worker process needs from the start; equal for all of one runtime."""
        return {}

    def native(self, boundary: str) -> str | None:
        """The widest boundary within this one that its call covers by itself; None if there is none."""
        within = BOUNDARIES[: BOUNDARIES.index(boundary) + 1]
        return next((b for b in reversed(within) if b in self.boundaries), None)

    def composition(self, boundary: str) -> str:
        """What precedes its call in this boundary, for people; empty if nothing does."""
        native = self.native(boundary) or boundary
        between = BOUNDARIES[BOUNDARIES.index(native) + 1 : BOUNDARIES.index(boundary) + 1]
        names = " and ".join(PRODUCERS[b] for b in reversed(between))
        return f"{native} call after the suite's own {names}" if names else ""

    def supports(self, case: Case, platform: Platform) -> Support:
        """Whether it runs this case on this platform."""
        sizes = OPS[self.op].sizes(case.sizes)
        interpreted_s = self.interpreted_s(sizes) if self.interpreted(platform) else 0.0
        return Support.all_of(
            as_support(self.available(platform), named(self.available)),
            need(
                self.native(case.boundary),
                f"its call covers {' and '.join(self.boundaries)}, which is more than {case.boundary}",
            ),
            as_support(self.fits(sizes), named(self.fits)),
            need(
                interpreted_s <= INTERPRETED_S,
                f"interpreting one call would take about {_duration(interpreted_s)}: suite `smoke` checks it",
            ),
        )

    def interpreted_s(self, sizes: DataclassInstance) -> float:
        """About how many seconds Triton's interpreter takes for a call."""
        return 0.0

    def layout(self, sizes: DataclassInstance) -> int:
        """For the memory plan: bytes of stationary operands that `prepare` brings into another layout."""
        return 0

    def workspace(self, sizes: DataclassInstance) -> int:
        """Bytes that `prepare` allocates for each set of operands beside those, layout and output, for the
        memory plan."""
        return 0

    def scratch(self, sizes: DataclassInstance) -> int:
        """Bytes that a call allocates and frees again, or shares with calls on other sets, for the memory
        plan."""
        return 0

    def require(self) -> None:
        """Before anything is prepared: raises Unsupported where this process cannot call the library."""

    def prepare(self, operands: Operands, out: torch.Tensor | None) -> Prepared:
        """Untimed: bring stationary operands into the library's layout. `out` is None where the library
        allocates the output. Raises Unsupported."""
        raise NotImplementedError(f"{type(self).__name__} defines no prepare")

    def prepare_turn(self, first: Prepared | None, operands: Operands, out: torch.Tensor | None) -> Prepared:
        """Prepares the call on another of the sets of operands that calls rotate over.

        first: the call that was prepared on the first set. Where the stationary operands are the same, the
               new call may use the layouts that were made of them for `first`
        """
        return self.prepare(operands, out)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


REQUIREMENTS = ("available", "fits", "supports")
"""Methods to which a declaration adds a condition: that of the base class must hold as well."""

REPLACED = ("interpreted", "interpreted_s", "environment", "layout", "workspace", "scratch")
"""Methods in whose place a declaration puts its own."""


def implementation(
    name: str,
    base: type[Implementation] = Implementation,
    *,
    stationary: Callable[[Any], object] | None = None,
    **overrides: Any,  # whatever the attributes and methods of the base class hold
) -> Callable[[Callable[..., Call | Prepared]], type[Implementation]]:
    """Declares an implementation by the function that prepares its call; the function becomes the class.

        @implementation("lib.fast", Lib, since="1.2", fits=lambda sizes: need(sizes.heads == 128, "..."))
        def fast(operands, out):
            return functools.partial(lib.fast, operands.q, operands.kv, out)

    base:       says what all rows of a library share
    stationary: brings the stationary operands into the library's layout. The function gets the result as its
                third argument; all sets of operands with the same stationary tensors share it
    overrides:  attributes of the class (`requires`, `since`, `archs` ...), and functions, without `self`, for
                its methods: see REQUIREMENTS and REPLACED

    Raises TypeError, in one line, for a declaration that cannot be right.
    """
    _check_declaration(name, base, overrides)

    def declare(function: Callable[..., Call | Prepared]) -> type[Implementation]:
        source = f"{name}: {named(function)}"
        parameters = ("operands", "out") if stationary is None else ("operands", "out", "stationary")
        _check_parameters(function, parameters, source)
        members = {member: _member(base, member, value) for member, value in overrides.items()}
        members |= _preparing(function, stationary, source)
        members |= {"__doc__": function.__doc__, "__module__": function.__module__, "__wrapped__": function}
        return type(function.__name__, (base,), {"name": name, **members})

    return declare


def _preparing(
    function: Callable[..., Call | Prepared], stationary: Callable[[Any], object] | None, source: str
) -> dict[str, object]:
    """The methods `prepare` and `prepare_turn` of a declared class. source: names the function in errors"""

    def call_on(operands: Operands, out: torch.Tensor | None, made: object) -> Prepared:
        """made: what `stationary` made of the stationary operands"""
        returned = function(operands, out) if stationary is None else function(operands, out, made)
        prepared = as_prepared(returned, source, operands, out)
        prepared.stationary = made
        return prepared

    def prepare(self: Implementation, operands: Operands, out: torch.Tensor | None) -> Prepared:
        made = None if stationary is None else stationary(operands)
        return call_on(operands, out, made)

    def prepare_turn(
        self: Implementation, first: Prepared | None, operands: Operands, out: torch.Tensor | None
    ) -> Prepared:
        is_overridden = type(self).prepare is not prepare  # by a subclass of the declared class
        if first is None or is_overridden or not operands.same_stationary(first.operands):
            return self.prepare(operands, out)
        return call_on(operands, out, first.stationary)

    return {"prepare": prepare, "prepare_turn": prepare_turn}


def declared(kernel: Any, op: str, boundary: str) -> type[Implementation]:
    """The implementation that a user's own kernel is. Raises TypeError, in one line, for what cannot be one.

    kernel: what `implementation` made; or a function of (operands, out) that fills `out`, returns the output,
            or returns the call to be timed
    """
    if isinstance(kernel, type) and issubclass(kernel, Implementation):
        if kernel.op not in ("", op):
            raise TypeError(f"{kernel.name} is declared for {kernel.op}, not for {op}")
        return kernel

    @functools.wraps(kernel, assigned=("__name__", "__qualname__"), updated=())
    def prepare(operands: Operands, out: Any) -> Call | Prepared:
        answer = kernel(operands, out)
        if callable(answer) or isinstance(answer, Prepared):
            return cast("Call | Prepared", answer)
        output: Any = None  # what the last call returned

        def call() -> None:
            nonlocal output
            output = kernel(operands, out)

        def result(_: object) -> Any:
            return out if output is None else output

        return Prepared(operands, out, call, result=result)

    name = f"yours.{getattr(kernel, '__name__', 'kernel')}"
    return implementation(name, requires="torch", op=op, boundaries=(boundary,))(prepare)


def _check_parameters(function: Any, given: tuple[str, ...], source: str, wrapped: bool = True) -> None:
    """Raises TypeError where a function, or what it wraps, does not take these."""
    try:
        inspect.signature(function, follow_wrapped=wrapped).bind(*given)
    except TypeError:
        mistake = f"{source} has to take ({', '.join(given) or 'no arguments'})"
        if isinstance(function, type):
            mistake += "; a class with `prepare` is a subclass of Implementation and takes no decorator"
        raise TypeError(mistake) from None


def _check_declaration(name: object, base: object, overrides: Mapping[str, Any]) -> None:
    if not isinstance(name, str):
        raise TypeError('@implementation takes the name first: @implementation("provider.variant", ...)')
    mistake = f"implementation {name!r}"
    if not (isinstance(base, type) and issubclass(base, Implementation)):
        raise TypeError(f"{mistake}: {base!r} is no subclass of Implementation")
    members = set(dir(base))
    for ancestor in base.__mro__:
        members.update(vars(ancestor).get("__annotations__", {}))
    members -= {"name", "prepare", "prepare_turn", "require"}
    known = {member for member in members if not member.startswith("_")}
    for member, value in overrides.items():
        if member not in known:
            others = ", ".join(sorted(known))
            raise TypeError(f"{mistake}: {base.__name__} has no {member!r}; it has {others}")
        if member in (*REQUIREMENTS, *REPLACED) and not callable(value):
            raise TypeError(f"{mistake}: {member} is {value!r}, where a function is needed")


def _member(base: type[Implementation], member: str, value: Any) -> Any:
    """A member of a class that a declaration makes: the attribute, or a method that calls the function."""

    def replaced(self: Implementation, *arguments: Any) -> Any:
        return value(*arguments)

    def required(self: Implementation, *arguments: Any) -> Support:
        answer = as_support(value(*arguments), f"{member} of {self.name}, {named(value)},")
        return Support.all_of(getattr(base, member)(self, *arguments), answer)

    if member in REQUIREMENTS:
        return required
    return replaced if member in REPLACED else value


@functools.cache
def _kinds(sizes: type[DataclassInstance]) -> dict[str, Callable[[Size], Size]]:
    return typing.get_type_hints(sizes)


class Op(ABC):
    """What is computed: its sizes, operands, reference, work and tolerance."""

    name: ClassVar[str]
    # A frozen dataclass; its fields are the sizes on the command line.
    Sizes: ClassVar[type[DataclassInstance]]
    # The boundaries that it has, from the narrowest.
    boundaries: ClassVar[tuple[str, ...]] = ("core",)
    # Platform kind -> the best torch implementation there: the default baseline.
    baseline: ClassVar[Mapping[str, str]]
    # What stands for a serving engine's kernel in the replay of a rank on a GPU; empty: the baseline.
    engine_like: ClassVar[str] = ""
    # Its operands have lengths of sequences (see Seeds).
    lengths: ClassVar[bool] = False
    # The sets that calls rotate over hold other live values, not copies.
    turns: ClassVar[bool] = False
    # What an index along each dimension of its output counts, the columns last.
    axes: ClassVar[tuple[str, ...]] = ()
    # An element of its output is a sum of independent terms.
    sums: ClassVar[bool] = False
    # Sizes that cases and records leave out at their default: older records have none of them.
    unsaid: ClassVar[tuple[str, ...]] = ()
    # The size that says whether operands are FP8, so that a case has a format. Empty: always, or never.
    fp8_where: ClassVar[str] = ""

    def sizes(self, given: Mapping[str, Size]) -> DataclassInstance:
        """Reads sizes given as text or numbers. Raises ValueError, which names the op's sizes, where one is
        unknown or missing."""
        kinds = _kinds(self.Sizes)
        values: dict[str, Size] = {}
        for name, value in given.items():
            if name not in kinds:
                raise ValueError(unknown("size", name, kinds, of=self.name))
            try:
                values[name] = kinds[name](value)
            except ValueError:
                raise ValueError(f"size {name}={value!r} of {self.name} is not a whole number") from None
        missing = [f.name for f in fields(self.Sizes) if f.name not in values and f.default is MISSING]
        if missing:
            raise ValueError(f"{self.name} needs {', '.join(missing)}; sizes: {', '.join(kinds)}")
        return self.Sizes(**values)

    def case(self, given: Mapping[str, Size], **place: Any) -> Case:  # a Case's further fields
        return Case(self.name, self.said(self.sizes(given)), **place)

    def said(self, sizes: DataclassInstance) -> dict[str, Size]:
        """Sizes as the texts of cases and records say them."""
        said = asdict(sizes)
        for field in fields(sizes):
            if field.name in self.unsaid and said[field.name] == field.default:
                del said[field.name]
        if self.fp8_where and said[self.fp8_where] != "fp8":
            del said["fp8"]
        return said

    def defaults(self, arch: str) -> Mapping[str, Size]:
        """Sizes that a case leaves to the architecture it runs on: the FP8 format and the kind of scales."""
        of_arch = {"fp8": native(arch), "scales": native_scales(arch)}
        return {field.name: of_arch[field.name] for field in fields(self.Sizes) if field.name in of_arch}

    def make(self, sizes: DataclassInstance, seeds: Seeds, device: str, boundary: str = "core") -> Operands:
        """The canonical operands of a case, of the set `seeds.turn`."""
        operands = self.operands(sizes, seeds, device, boundary)
        return operands.turned(seeds.turn) if seeds.turn else operands

    @abstractmethod
    def operands(self, sizes: Any, seeds: Seeds, device: str, boundary: str = "core") -> Operands:
        """The operands of the first set, a pure function of these arguments. sizes: of the op's class."""

    @abstractmethod
    def empty_operands(self, sizes: DataclassInstance, device: str) -> Operands:
        """Those of the widest boundary without values. On torch's meta device they take no memory."""

    def step(self, operands: Operands, into: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """The suite's own kernel between `operands.boundary` and the next narrower one: a call that reads
        `operands` and writes the narrower boundary's live operands into these views."""
        raise NotImplementedError(f"{self.name} has no step inside {operands.boundary}")

    def output_shape(self, sizes: DataclassInstance) -> tuple[int, ...]:
        """The shape of the output in bf16. An op with another dtype defines the next two methods instead."""
        raise NotImplementedError(f"{self.name} does not say the shape of its output")

    def empty_output(self, sizes: DataclassInstance, device: str) -> torch.Tensor:
        return torch.empty(self.output_shape(sizes), dtype=torch.bfloat16, device=device)

    def output_bytes(self, sizes: DataclassInstance) -> int:
        return 2 * math.prod(self.output_shape(sizes))

    def row_groups(self, operands: Operands) -> RowGroups | None:
        """What the rows of its output belong to; None where the row's number says it."""
        return None

    @abstractmethod
    def reference(self, operands: Any, max_flops: float = float("inf"), offset: float = 0.0) -> Reference:
        """Computes the op from the same operands in fp64, or in fp32 where that errs far below a sigma. It
        samples rows above `max_flops` or MOST_ELEMENTS. offset: of the sample, in [0, 1) (see `spread`)."""

    def reference_bytes(self, sizes: DataclassInstance) -> int:
        """Bytes that `reference` holds at most beside the operands: by default three results in fp64."""
        return 3 * 8 * self.output_bytes(sizes) // 2

    @abstractmethod
    def tolerance(self, sizes: DataclassInstance) -> Tolerance: ...

    @abstractmethod
    def work(self, sizes: DataclassInstance, boundary: str = "core") -> Work: ...

    @abstractmethod
    def operand_bytes(self, sizes: DataclassInstance) -> int:
        """Bytes of one full set of operands, of the boundary with the most."""

    def narrowed_bytes(self, sizes: DataclassInstance) -> int:
        """Bytes that `Operands.narrowed` allocates for each set beside those of the operands."""
        return 0

    @abstractmethod
    def streamed_bytes(self, sizes: DataclassInstance, turns: int = 1) -> int:
        """Bytes that so many calls, each on the next set, read from memory at least, each byte once; 0 if
        nothing is streamed. The cache policy uses it."""

    def turn_bytes(self, sizes: DataclassInstance) -> int:
        """Bytes of memory that a further set takes."""
        return self.streamed_bytes(sizes)


OPS: dict[str, Op] = {}
"""All ops by name: those in the folders that `kernels` finds."""
