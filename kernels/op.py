"""Contracts between what is measured (kernels) and how (harness): Op, Implementation, Prepared.

Importing this module, or a provider file of an op, imports no library: torch and the rest are imported inside
functions, so that `list` works on a machine that has none of them.
"""

from __future__ import annotations

import functools
import inspect
import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from kernels import formats
from kernels import platform as platforms
from kernels.lazy import torch
from kernels.operands import Operands, Seeds
from kernels.platform import Platform
from kernels.support import Support, as_support, need
from shapes.case import Case, Size
from shapes.names import unknown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BOUNDARIES = ("core", "with_quant", "with_routing")
"""What a timed call covers, from the narrowest to the widest. Each includes those before it."""

PRODUCERS = {"with_quant": "quantise", "with_routing": "routing"}
"""By boundary, the step that it adds to the next narrower one. The suite has a kernel of its own for it."""

INTERPRETED_S = 2.0
"""The most seconds that one call in Triton's interpreter may take. Such a call is checked, never timed."""

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
    """The narrowest of DTYPES in which operands may enter products without making the output wrong. The
    device's rate for products of this dtype is the ceiling of the op."""


@dataclass(frozen=True)
class Tolerance:
    """How far a right output may be from the reference. `row`, `element` and `noise` are in units of
    `Reference.sigma`, the error that rounding alone explains (each op derives it beside its reference)."""

    row: float
    """The limit of the root mean square over a row of the output's last dimension, or each segment of it."""
    element: float
    """The limit of each single element."""
    segment: int | None = None
    """How many elements of a row are judged together; None: all. It is the fewest that one thread block
    writes, so that right neighbours do not dilute the error of a wrong block."""
    bias: float = 0.015
    """By what share the whole output may be larger or smaller than the reference, for calls that round to FP8
    or truncate. The sigma of these calls is so wide that a common factor could hide in it."""
    bias_bf16: float = 0.006
    """The same for all other calls. A truncation to bf16 makes an output 0.28 percent smaller."""
    noise: float | None = None
    """The limit of the root mean square over the whole output, for calls that round to FP8; None: not judged.
    Only this limit refuses a kernel that rounds to one bit less. Each row of its output errs no more than the
    worst row of a right call. Records call it `noise_limit`. It is not the noise of an A/A pair."""


@dataclass
class Reference:
    """The right answer for the rows that were computed, and the error that rounding explains there."""

    value: torch.Tensor
    """[rows, ...]: the computed rows of the output's first dimension."""
    sigma: torch.Tensor
    """The root mean square error of each element of `value` by rounding alone, with activations in bf16."""
    rows: list[int] | None = None
    """The numbers of the computed rows, ascending; None: all rows were computed."""
    sigma_fp8: torch.Tensor | None = None
    """Like `sigma`, for calls that round activations to FP8 themselves; None where no call can."""
    even: torch.Tensor | None = None
    """Bool, in the shape of `value` without its last dimension: the rows in which sigma_fp8 comes from many
    independent errors of similar size. `Tolerance.bias` and `noise` judge these together; None: all rows."""


def spread(count: int, offset: float = 0.0) -> list[int]:
    """The numbers 0 .. count - 1 in such an order that the first n of them are spread evenly, for any n. The
    order begins at about `offset` * count, with an offset in [0, 1)."""
    # Steps of the golden section do that. They repeat some numbers and miss others, which follow at the end.
    golden = 0.5 * (5**0.5 - 1)
    steps = (int((offset + i * golden) % 1 * count) for i in range(2 * count))
    return list(dict.fromkeys([*steps, *range(count)]))


MOST_ELEMENTS = 1 << 27
"""The most elements of a reference, 16384 rows of 7168. The host holds several of them, 1 to 3 GiB each."""


def rows_kept(rows: int, width: int) -> int:
    """How many of an output's rows, of `width` elements each, a reference has room for."""
    return max(1, min(rows, MOST_ELEMENTS // width))


def affordable(
    order: Iterable[int], flops: Callable[[int], float], max_flops: float, width: int = 1
) -> list[int] | None:
    """Which rows a reference computes: the first ones in `order` that together take at most `max_flops` and
    MOST_ELEMENTS, but at least one. Returns their numbers, ascending, or None where these are all rows.

    order: the numbers of all rows, which have `width` elements each; a repeated one counts once
    flops: returns what a row costs. It is called in this order, so it may count shared weights only once
    """
    rows = list(dict.fromkeys(order))
    chosen: list[int] = []
    spent = 0.0
    for row in rows[: rows_kept(len(rows), width)]:
        spent += flops(row)
        if chosen and spent > max_flops:
            break
        chosen.append(row)
    return sorted(chosen) if len(chosen) < len(rows) else None


@dataclass(frozen=True)
class RowGroups:
    """What the rows of an output belong to, for messages: a token to its sequence, or to its experts."""

    name: str
    """What a group is: `sequence` or `expert`."""
    of: torch.Tensor
    """int64 [rows, most groups of a row]: the numbers of a row's groups, then -1 where it has fewer."""


def named(function: Any) -> str:
    """The name of a function, or of what it wraps, with its place, for messages: `mine() of mine.py:4`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f" of {Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""
    return f"{getattr(function, '__qualname__', type(function).__name__)}(){place}"


Call = Callable[[], object]
"""Timed: computes the op once, from whatever the operands hold now."""


def sequence(*steps: Call) -> Call:
    """A call that makes these calls in order, and returns what the last of them returns."""

    *earlier, last = steps

    def call() -> object:
        for step in earlier:
            step()
        return last()

    return call


class Prepared:
    """A call that is bound to operands and an output, and can be made again and again. What differs between
    calls is given to the constructor as functions and tensors, or a subclass overrides methods."""

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
        operands: what the call reads
        out:    the tensor that the call writes, in the op's canonical layout; None where the library
                allocates its output (see `Implementation.allocates`)
        call:   takes no arguments. It writes `out`, or returns the output where `out` is None
        inputs: where the call reads each live operand, by name: views of its canonical shape with any
                strides. Default: the canonical tensors themselves
        after_load: called by `load` after it copied new live operands into `inputs`
        result: the output in the op's canonical layout, as a tensor or as a function of what the call
                returned (None where there is an `out`). Default: `out`, or what the call returned
        picked: returns what the library chose to run, for the record

        Raises TypeError without a call, or for a function that needs arguments.
        """
        if call is None and type(self).call is Prepared.call:
            raise TypeError(f"{type(self).__name__} has no call: give it one, or define the method `call`")
        if inspect.isfunction(call):
            _check_parameters(call, (), named(call), follow_wrapped=False)
        self.operands = operands
        # None only where the library allocates its output. Its type spares all other rows a check for None.
        self.out = cast("torch.Tensor", out)
        self.stationary: Any = None
        """What the declaration's `stationary` returned, which calls on further sets of operands use again."""
        self.inner: Prepared | None = None
        """The implementation's own call, if kernels/compose.py put steps of the suite before it."""
        self._call = call
        self._inputs = inputs
        self._after_load = after_load
        self._result = result
        self._picked = picked
        self._returned: Any = None
        self._called = False

    def call(self) -> None:
        """Timed: computes the op once, from whatever the operands hold now. The harness fills `out` with NaN
        before the first call. Raises TypeError if that leaves it NaN and returns a tensor of its shape."""
        assert self._call is not None
        returned: Any = self._call()
        if self.out is None:
            self._returned = returned
        elif not self._called:
            self._called = True
            is_output = isinstance(returned, torch.Tensor) and returned.shape == self.out.shape
            if is_output and returned.data_ptr() != self.out.data_ptr() and self.out.isnan().all():
                raise TypeError(f"{named(self._call)} did not write `out`, but returned one: see `allocates`")

    def load(self, live: Mapping[str, torch.Tensor]) -> None:
        """Untimed: puts new live operands, by name, where `call` reads them."""
        for name, target in self.inputs().items():
            target.copy_(live[name])
        if self._after_load is not None:
            self._after_load()

    def inputs(self) -> Mapping[str, torch.Tensor]:
        """By name, the tensors from which every later `call` reads live operands. The caller writes them."""
        return self.operands.live_tensors() if self._inputs is None else self._inputs

    def reads(self) -> Mapping[str, torch.Tensor]:
        """The canonical tensors that the call reads now; asking does not change the call. DeepGEMM's call
        reads packed scales until it is asked for `inputs`. It overrides this method and leaves them out."""
        return self.inputs()

    def result(self) -> torch.Tensor:
        """The output of the last call in the op's canonical layout. Raises TypeError where there is none."""
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


def as_prepared(returned: object, source: str, operands: Operands, out: torch.Tensor | None) -> Prepared:
    """What a function that prepares a call returned, as a Prepared: it may return one, or the call alone.
    Raises TypeError for anything else. source: names the function in the error"""
    if isinstance(returned, Prepared):
        return returned
    if callable(returned):
        return Prepared(operands, out, returned)
    raise TypeError(
        f"{source} returned {type(returned).__name__}: it must return the call to be timed, which is a "
        "function without arguments, or a Prepared"
    )


class Implementation:
    """One way to compute an op: a subclass in a module of the op, or what `implementation` below declares."""

    # `provider.variant`
    name: ClassVar[str]
    # What it needs, as a text for people. A plug-in may leave it empty: then it is the name of the file.
    requires: ClassVar[str] = ""
    # The name of its op; in a module of the op's folder `kernels.implementations` fills in an empty one.
    op: str = ""
    # The file that brought it; empty for the suite's own.
    plugin: str = ""
    # The module whose version is this row's; empty: the module that is named like the provider.
    library: ClassVar[str] = ""
    # Implementations of one runtime share a worker process, others never do.
    runtime: ClassVar[str] = "torch"
    # The boundaries that its call covers by itself; kernels/compose.py makes wider ones of them.
    boundaries: ClassVar[tuple[str, ...]] = ("core",)
    # What its own call rounds bf16 activations to before products: `bf16` (it leaves them), or `fp8`.
    activations: ClassVar[str] = "bf16"
    # Whether its call rounds to bf16 toward zero. Such errors are up to twice as large; so are its limits.
    truncates: ClassVar[bool] = False
    # Whether its call returns the output in a tensor of the library's. `out` is then None.
    allocates: ClassVar[bool] = False
    # Whether its call can be recorded into a CUDA or HIP graph.
    captures: ClassVar[bool] = True
    # For the memory plan: the name of the layout that `prepare` brings stationary operands into.
    # Implementations of a runtime that give the same name share one copy; empty: each has a copy of its own.
    shared_layout: ClassVar[str] = ""
    # Whether `prepare_turn` uses again all that `prepare` made of the stationary operands. Then a call on
    # other live operands takes almost no time to prepare, so that a serving engine can do it at every step.
    rebinds: ClassVar[bool] = False
    # Whether a compiler writes another program for each size: outputs at one size say nothing of others.
    per_size: ClassVar[bool] = False

    @property
    def provider(self) -> str:
        return self.name.split(".")[0]

    @property
    def version(self) -> str:
        """The version of its library as installed here, empty where it is not. Nothing is imported."""
        return platforms.version(self.library or self.provider) or ""

    def available(self, platform: Platform) -> Support:
        """Whether its libraries, by default torch, are here and it runs on this platform. Imports nothing."""
        return platform.library("torch")

    def fits(self, sizes: DataclassInstance) -> Support:
        """Whether it takes these sizes (heads, page, dtype ...)."""
        return Support(True)

    def interpreted(self, platform: Platform) -> bool:
        """Whether it runs on this platform only through an interpreter. Then it is checked, never timed."""
        return False

    def environment(self, platform: Platform) -> dict[str, str]:
        """Environment variables of its worker process, the same for all implementations of a runtime."""
        return {}

    def native(self, boundary: str) -> str | None:
        """The widest of its `boundaries` that is not wider than this one; None if all are wider."""
        not_wider = BOUNDARIES[: BOUNDARIES.index(boundary) + 1]
        return next((own for own in reversed(not_wider) if own in self.boundaries), None)

    def composition(self, boundary: str) -> str:
        """Says which kernels of the suite precede its call in this boundary; empty if none does."""
        own = self.native(boundary)
        if own in (None, boundary):
            return ""
        added = BOUNDARIES[BOUNDARIES.index(own) + 1 : BOUNDARIES.index(boundary) + 1]
        producers = " and ".join(PRODUCERS[wider] for wider in reversed(added))
        return f"{own} call after the suite's own {producers}"

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

    # The memory plan adds up the bytes that the next three return.

    def layout(self, sizes: DataclassInstance) -> int:
        """Bytes of the copies that `prepare` makes of stationary operands in another layout."""
        return 0

    def workspace(self, sizes: DataclassInstance) -> int:
        """Bytes that `prepare` allocates for each set, without operands, `layout` and the output."""
        return 0

    def scratch(self, sizes: DataclassInstance) -> int:
        """Bytes that a call allocates and frees again, or shares with calls on other sets."""
        return 0

    def require(self) -> None:
        """Called in the worker before `prepare`. Raises Unsupported where the library cannot be called."""

    def prepare(self, operands: Operands, out: torch.Tensor | None) -> Prepared:
        """Untimed: brings stationary operands into the library's layout, and binds the call. It may return
        the call alone (see `as_prepared`). `out` is None where the library allocates. Raises Unsupported."""
        raise NotImplementedError(f"{type(self).__name__} defines no prepare")

    def prepare_turn(self, first: Prepared | None, operands: Operands, out: torch.Tensor | None) -> Prepared:
        """As `prepare`, on another of the sets of operands that calls rotate over. Where stationary operands
        are the same, the call may use the layouts that were made for `first`, the call on the first set."""
        return self.prepare(operands, out)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


REQUIREMENTS = ("available", "fits", "supports")
"""Methods for which a declaration may give a further condition; that of the base class must hold as well."""

REPLACED = ("interpreted", "interpreted_s", "environment", "layout", "workspace", "scratch")
"""Methods of Implementation for which a declaration may give a function in place of the base class's."""


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
    stationary: brings the stationary operands into the library's layout, once for all sets with the same
                ones. It gets the operands, and the declared function its result as a third argument
    overrides:  attributes of the class (`requires`, `since`, `archs` ...), and functions, without `self`, for
                the methods in REQUIREMENTS and REPLACED

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

    def prepare_on(operands: Operands, out: torch.Tensor | None, laid_out: object) -> Prepared:
        """laid_out: what `stationary` made of the stationary operands"""
        returned = function(operands, out) if stationary is None else function(operands, out, laid_out)
        prepared = as_prepared(returned, source, operands, out)
        prepared.stationary = laid_out
        return prepared

    def prepare(self: Implementation, operands: Operands, out: torch.Tensor | None) -> Prepared:
        laid_out = None if stationary is None else stationary(operands)
        return prepare_on(operands, out, laid_out)

    def prepare_turn(
        self: Implementation, first: Prepared | None, operands: Operands, out: torch.Tensor | None
    ) -> Prepared:
        is_overridden = type(self).prepare is not prepare  # by a subclass of the declared class
        if first is None or is_overridden or not operands.same_stationary(first.operands):
            return self.prepare(operands, out)
        return prepare_on(operands, out, first.stationary)

    return {"prepare": prepare, "prepare_turn": prepare_turn}


def declared(kernel: Any, op: str, boundary: str) -> type[Implementation]:
    """The class of a user's own kernel of an op: a class that `implementation` made, or a function of
    (operands, out) that fills `out`, returns the output, or returns the timed call. Raises TypeError."""
    if isinstance(kernel, type) and issubclass(kernel, Implementation):
        if kernel.op not in ("", op):
            raise TypeError(f"{kernel.name} is declared for {kernel.op}, not for {op}")
        return kernel

    @functools.wraps(kernel, assigned=("__name__", "__qualname__"), updated=())
    def prepare(operands: Operands, out: Any) -> Call | Prepared:
        returned = kernel(operands, out)
        if callable(returned) or isinstance(returned, Prepared):
            return cast("Call | Prepared", returned)
        # The kernel returned no call: it has computed the output at once. So each timed call calls it.
        output: Any = None  # what the last call returned

        def call() -> None:
            nonlocal output
            output = kernel(operands, out)

        def result(_: object) -> Any:
            return out if output is None else output

        return Prepared(operands, out, call, result=result)

    name = f"yours.{getattr(kernel, '__name__', 'kernel')}"
    return implementation(name, requires="torch", op=op, boundaries=(boundary,))(prepare)


def _check_parameters(
    function: Any, parameters: tuple[str, ...], source: str, follow_wrapped: bool = True
) -> None:
    """Raises TypeError where a function does not take these arguments by position. follow_wrapped: whether
    to ask the function that it wraps (functools.wraps), which a wrapper may call with more arguments"""
    try:
        inspect.signature(function, follow_wrapped=follow_wrapped).bind(*parameters)
    except TypeError:
        mistake = f"{source} has to take ({', '.join(parameters) or 'no arguments'})"
        if isinstance(function, type):
            mistake += "; a class with `prepare` is a subclass of Implementation and takes no decorator"
        raise TypeError(mistake) from None


def _check_declaration(name: object, base: object, overrides: Mapping[str, Any]) -> None:
    """Raises TypeError for arguments of `implementation` that cannot be right."""
    if not isinstance(name, str):
        raise TypeError('@implementation takes the name first: @implementation("provider.variant", ...)')
    mistake = f"implementation {name!r}"
    if not (isinstance(base, type) and issubclass(base, Implementation)):
        raise TypeError(f"{mistake}: {base!r} is no subclass of Implementation")
    members = set(dir(base))
    for ancestor in base.__mro__:  # `dir` leaves out attributes that are declared without a value
        members.update(vars(ancestor).get("__annotations__", {}))
    members -= {"name", "prepare", "prepare_turn", "require"}
    allowed = sorted(member for member in members if not member.startswith("_"))
    for member, value in overrides.items():
        if member not in allowed:
            raise TypeError(f"{mistake}: {base.__name__} has no {member!r}; it has {', '.join(allowed)}")
        if member in (*REQUIREMENTS, *REPLACED) and not callable(value):
            raise TypeError(f"{mistake}: {member} is {value!r}, where a function is needed")


def _member(base: type[Implementation], member: str, value: Any) -> Any:
    """What a class has as `member`: the value, or for REQUIREMENTS and REPLACED a method that calls it."""

    def replaced(self: Implementation, *arguments: Any) -> Any:
        return value(*arguments)

    def required(self: Implementation, *arguments: Any) -> Support:
        answer = as_support(value(*arguments), f"{member} of {self.name}, {named(value)},")
        return Support.all_of(getattr(base, member)(self, *arguments), answer)

    if member in REQUIREMENTS:
        return required
    return replaced if member in REPLACED else value


_size_types = functools.cache(typing.get_type_hints)
"""Of a class `Op.Sizes`: by the name of each size, its type, int or str."""


class Op(ABC):
    """What is computed: sizes, operands, reference, work, tolerance. `sizes` is an instance of `Sizes`."""

    name: ClassVar[str]
    # A frozen dataclass of ints and strs; its fields are the sizes on the command line.
    Sizes: ClassVar[type[DataclassInstance]]
    # The boundaries that it has, from the narrowest.
    boundaries: ClassVar[tuple[str, ...]] = ("core",)
    # By kind of platform, the name of the default baseline: torch's best implementation there.
    baseline: ClassVar[Mapping[str, str]]
    # The name of the implementation that stands for an engine's in the replay of a rank; empty: the baseline.
    engine_like: ClassVar[str] = ""
    # Whether its operands have lengths of sequences (see Seeds.lengths).
    lengths: ClassVar[bool] = False
    # Whether further sets of operands (see Seeds.turn) hold other live values than the first, not copies.
    turns: ClassVar[bool] = False
    # For messages: what an index along each dimension of its output counts, columns last: `token` ...
    axes: ClassVar[tuple[str, ...]] = ()
    # Sizes that a case leaves out where they are the default, because older records do not have them.
    unsaid: ClassVar[tuple[str, ...]] = ()
    # The size that says whether operands are FP8, such as `kv`. Only where it is `fp8` does a case have the
    # size `fp8`, which names the format. Empty: all cases have it.
    fp8_where: ClassVar[str] = ""

    def sizes(self, given: Mapping[str, Size]) -> DataclassInstance:
        """Reads sizes given as text or numbers. Raises ValueError for an unknown, missing or wrong one."""
        types = _size_types(self.Sizes)
        values: dict[str, Size] = {}
        for name, value in given.items():
            if name not in types:
                raise ValueError(unknown("size", name, types, of=self.name))
            try:
                values[name] = types[name](value)
            except ValueError:
                raise ValueError(f"size {name}={value!r} of {self.name} is not a whole number") from None
        missing = [f.name for f in fields(self.Sizes) if f.name not in values and f.default is MISSING]
        if missing:
            raise ValueError(f"{self.name} needs {', '.join(missing)}; sizes: {', '.join(types)}")
        return self.Sizes(**values)

    def case(self, given: Mapping[str, Size], **further: Any) -> Case:
        """A case of the op. given: as in `sizes`; further: fields of Case beside the op and the sizes"""
        return Case(self.name, self.case_sizes(self.sizes(given)), **further)

    def case_sizes(self, sizes: DataclassInstance) -> dict[str, Size]:
        """Sizes by name as records have them: no `unsaid` one at its default, no `fp8` if nothing is FP8."""
        by_name = asdict(sizes)
        for field in fields(sizes):
            if field.name in self.unsaid and by_name[field.name] == field.default:
                del by_name[field.name]
        if self.fp8_where and by_name[self.fp8_where] != "fp8":
            del by_name["fp8"]
        return by_name

    def defaults(self, arch: str) -> Mapping[str, Size]:
        """Sizes that a case leaves to the architecture it runs on: the FP8 format and the kind of scales."""
        of_arch = {"fp8": formats.native(arch), "scales": formats.native_scales(arch)}
        return {field.name: of_arch[field.name] for field in fields(self.Sizes) if field.name in of_arch}

    def make(self, sizes: DataclassInstance, seeds: Seeds, device: str, boundary: str = "core") -> Operands:
        """The canonical operands of a case, of the set `seeds.turn`. device: as torch names it"""
        operands = self.operands(sizes, seeds, device, boundary)
        return operands.turned(seeds.turn) if seeds.turn else operands

    @abstractmethod
    def operands(self, sizes: Any, seeds: Seeds, device: str, boundary: str = "core") -> Operands:
        """The operands of the first set: a pure function of the arguments without `seeds.turn`."""

    @abstractmethod
    def empty_operands(self, sizes: DataclassInstance, device: str) -> Operands:
        """The operands of the widest boundary, not filled. On torch's meta device they take no memory."""

    def step(self, operands: Operands, into: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """The suite's own kernel that a boundary adds to the next narrower one. Returns a call that reads
        `operands` and writes the live operands of the narrower boundary, by name, `into` these tensors."""
        raise NotImplementedError(f"{self.name} has no step inside {operands.boundary}")

    def output_shape(self, sizes: DataclassInstance) -> tuple[int, ...]:
        """The shape of the output. An op whose output is not bf16 overrides the next two methods instead."""
        raise NotImplementedError(f"{self.name} does not say the shape of its output")

    def empty_output(self, sizes: DataclassInstance, device: str) -> torch.Tensor:
        return torch.empty(self.output_shape(sizes), dtype=torch.bfloat16, device=device)

    def output_bytes(self, sizes: DataclassInstance) -> int:
        return 2 * math.prod(self.output_shape(sizes))

    def row_groups(self, operands: Operands) -> RowGroups | None:
        """What the rows of its output belong to; None where a row's number says it."""
        return None

    @abstractmethod
    def reference(self, operands: Any, max_flops: float = float("inf"), offset: float = 0.0) -> Reference:
        """Computes the op from the operands in fp64, or in fp32 where the error of that is far below a sigma.
        Where all rows would take more than `max_flops` or MOST_ELEMENTS, it computes a sample of them, which
        an offset in [0, 1) selects (see `spread`)."""

    def reference_bytes(self, sizes: DataclassInstance) -> int:
        """Bytes that `reference` holds at most beside the operands: by default three results in fp64."""
        elements = self.output_bytes(sizes) // 2  # of bf16
        return 3 * 8 * elements

    @abstractmethod
    def tolerance(self, sizes: DataclassInstance) -> Tolerance: ...

    @abstractmethod
    def work(self, sizes: DataclassInstance, boundary: str = "core") -> Work: ...

    @abstractmethod
    def operand_bytes(self, sizes: DataclassInstance) -> int:
        """Bytes of one set of operands, in the boundary whose operands take most."""

    def narrowed_bytes(self, sizes: DataclassInstance) -> int:
        """Bytes that `Operands.narrowed` allocates for each set beside the operands."""
        return 0

    @abstractmethod
    def streamed_bytes(self, sizes: DataclassInstance, turns: int = 1) -> int:
        """The least number of bytes that so many calls, each on the next set of operands, read from memory,
        each byte once; 0 if nothing is streamed. The number of sets follows from it."""

    def turn_bytes(self, sizes: DataclassInstance) -> int:
        """Bytes of memory that a further set takes (see `Operands.turned`)."""
        return self.streamed_bytes(sizes)


OPS: dict[str, Op] = {}
"""All ops by name. `kernels` fills it when it is imported."""
