"""An implementation that is declared by the function which prepares its call."""

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import kernels
from kernels.compose import bind
from kernels.op import Implementation, Prepared, implementation
from kernels.operands import Operands
from kernels.platform import named
from kernels.plugin_process import PluginImplementation
from kernels.support import Mistaken, Support, need

CPU = named("cpu", "x86-avx512")


class Base(Implementation):
    requires = "a base"
    edge: ClassVar[int] = 0

    def fits(self, sizes: Any) -> Support:
        return need(sizes.rows > 0, "needs rows")

    def layout(self, sizes: Any) -> int:
        return 1


@dataclass
class Numbers(Operands):
    x: torch.Tensor
    table: torch.Tensor
    boundary: str = "core"

    live: ClassVar = ("x",)


def numbers() -> Numbers:
    return Numbers(torch.arange(3.0), torch.tensor([2, 0, 1]))


@implementation("test.double", Base, edge=7)
def double(operands, out):
    """Twice."""
    return lambda: torch.mul(operands.x, 2, out=out)


def test_the_call_writes_what_the_operands_hold_now():
    operands, out, row = numbers(), torch.empty(3), double()
    prepared = row.prepare(operands, out)
    prepared.load({"x": torch.tensor([1.0, 5.0, 7.0])})
    prepared.call()
    assert prepared.result() is out and out.tolist() == [2, 10, 14]
    assert (row.name, row.edge, row.requires, double.__doc__) == ("test.double", 7, "a base", "Twice.")
    assert row.layout(None) == 1 and prepared.picked() == "" and prepared.inputs() == {"x": operands.x}


def test_where_the_library_allocates_the_result_is_what_the_call_returns():
    operands = numbers()
    assert_result = Prepared(operands, None, lambda: (operands.x + 1, "more"), result=lambda both: both[0])
    assert_result.call()
    assert assert_result.result().tolist() == [1, 2, 3]
    plain = Prepared(operands, None, lambda: operands.x)
    plain.call()
    assert plain.result() is operands.x
    nothing = Prepared(operands, None, lambda: None)
    nothing.call()
    with pytest.raises(
        TypeError,
        match=r"<lambda>\(\) of test_declaration.py:\d+ gets no `out` to write, and returned no output",
    ):
        nothing.result()


def test_a_prepared_says_what_differs():
    operands, out, copy, done = numbers(), torch.zeros(4), torch.zeros(3), []
    given: dict[str, Any] = {"inputs": {"x": copy}, "after_load": lambda: done.append(copy.tolist())}
    prepared = Prepared(operands, out, lambda: None, **given, result=out[:3], picked=lambda: "kernel 3")
    prepared.load({"x": torch.tensor([4.0, 5.0, 6.0])})
    assert done == [[4, 5, 6]] and operands.x.tolist() == [0, 1, 2]
    assert prepared.result().shape == (3,) and prepared.picked() == "kernel 3"


def test_requirements_add_up_and_other_answers_take_the_place_of_the_base_classs():
    @implementation(
        "test.more",
        Base,
        fits=lambda sizes: need(sizes.rows < 9, "needs fewer"),
        layout=lambda sizes: 5 * sizes.rows,
        available=lambda platform: need(platform.kind != "cpu", "no CPU"),
        environment=lambda platform: {"ARCH": platform.arch},
    )
    def more(operands, out):
        return Prepared(operands, out, lambda: None)

    row = more()
    fits = [row.fits(SimpleNamespace(rows=rows)) for rows in (0, 1, 9)]
    assert [support.reason for support in fits] == ["needs rows", "", "needs fewer"]
    assert row.layout(SimpleNamespace(rows=3)) == 15 and row.environment(CPU) == {"ARCH": "x86-avx512"}
    assert row.available(CPU).reason == "no CPU"


def test_sets_of_operands_that_share_stationary_tensors_share_what_was_made_of_them():
    made = []

    def laid_out(operands: Numbers) -> torch.Tensor:
        made.append(operands)
        return operands.table.flip(0)

    @implementation("test.shares", Base, stationary=laid_out)
    def shares(operands, out, table):
        return lambda: torch.index_select(operands.x, 0, table, out=out)

    row, operands, out = shares(), numbers(), torch.empty(3)
    first = row.prepare(operands, out)
    turn = row.prepare_turn(first, operands.replaced(x=torch.tensor([3.0, 4.0, 5.0])), out)
    assert len(made) == 1
    turn.call()
    assert out.tolist() == [4, 3, 5]
    row.prepare_turn(turn, operands.copy(), out)
    assert len(made) == 2


def test_a_call_that_returns_its_output_and_leaves_out_alone_is_told():
    @implementation("test.returns", Base)
    def returns(operands, out):
        return lambda: operands.x * 2

    with pytest.raises(TypeError, match="did not write `out`, but returned one: see `allocates`"):
        returns().prepare(numbers(), torch.full((3,), torch.nan)).call()
    returns().prepare(numbers(), torch.zeros(3)).call()  # which something wrote


def nothing(operands, out):
    out.zero_()


@pytest.mark.parametrize(("said", "reason"), [
    ({"sinse": "1"}, "Base has no 'sinse'; it has activations, allocates"),
    ({"prepare": nothing}, "Base has no 'prepare'"),
    ({"fits": True}, "fits is True, where a function is needed"),
    ({"base": Numbers}, "is no subclass of Implementation"),
    ({"stationary": lambda operands: 1}, " has to take (operands, out, stationary)"),
])  # fmt: skip
def test_a_declaration_that_cannot_be_right_is_one_line(said, reason):
    with pytest.raises(TypeError) as error:
        implementation("test.wrong", **{"base": Base, **said})(nothing)
    assert reason in str(error.value) and "\n" not in str(error.value)
    assert "test.wrong" in str(error.value)


def test_the_decorator_needs_a_name():
    with pytest.raises(TypeError, match="takes the name first"):
        implementation(nothing)  # type: ignore[arg-type]


def test_a_function_that_returns_no_call_is_told():
    row = implementation("test.none", Base)(nothing)()
    with pytest.raises(
        TypeError, match=r"^test.none: nothing\(\) of test_declaration.py:\d+ returned NoneType: it must"
    ):
        row.prepare(numbers(), torch.empty(3))


def test_an_answer_that_is_no_support_is_told():
    row = implementation("test.fits", Base, fits=lambda sizes: sizes.answer)(nothing)()
    yes, no, none = (row.fits(SimpleNamespace(rows=1, answer=answer)) for answer in (True, False, None))
    assert (yes.ok, type(no), type(none)) == (True, Support, Mistaken)
    place = r"fits of test.fits, .*<lambda>\(\) of test_declaration.py:\d+, returned "
    assert re.fullmatch(place + "False", no.reason)
    assert re.fullmatch(place + r"None, where kernels.support.need\(...\) or a bool is due", none.reason)


def test_a_call_that_takes_something_is_told():
    with pytest.raises(TypeError, match=r"of test_declaration.py:\d+ has to take \(no arguments\)"):
        Prepared(numbers(), torch.ones(3), lambda x: None)  # type: ignore[arg-type, misc]


def test_a_prepared_without_a_call_is_told():
    with pytest.raises(TypeError, match="Prepared has no call"):
        Prepared(numbers())


class OfItsOwn(Base):
    name = "test.class"

    def prepare(self, operands, out):
        return None if out is None else lambda: out.zero_()


def test_a_class_may_return_the_call_alone():
    op: Any = None
    prepared = bind(op, OfItsOwn(), numbers(), torch.ones(3))
    prepared.call()
    assert prepared.result().tolist() == [0, 0, 0]
    with pytest.raises(TypeError, match=r"OfItsOwn.prepare\(\) of test_declaration.py:\d+ returned NoneType"):
        bind(op, OfItsOwn(), numbers(), None)


PLUGIN = """
from kernels.op import implementation

@implementation("{name}", op="{op}", available=lambda platform: {available})
def zero(operands, out):
    return out.zero_
"""


def test_a_plug_in_declares_one(tmp_path, monkeypatch):
    (path := tmp_path / "mine.py").write_text(
        PLUGIN.format(name="mine.zero", op="mla_decode", available="1 / 0")
    )
    (row,) = kernels.implementations_of(path)
    assert (row.name, row.runtime, row.plugin) == ("mine.zero", "mine.torch", str(path))
    assert row.requires == "mine.py"
    monkeypatch.setattr(
        kernels, "_imports_plugins", False
    )  # another test may have made this process a worker
    monkeypatch.setenv("KERNEL_BENCH_PLUGINS", str(path))
    kernels.implementations.cache_clear()
    try:
        (asked,) = (i for i in kernels.implementations("mla_decode") if i.name == "mine.zero")
        supports = [
            asked.available(CPU),
            asked.supports(kernels.OPS["mla_decode"].case({"batch": 1, "ctx": 1}), CPU),
        ]
        kernels.import_plugins()
        (imported,) = (i for i in kernels.implementations("mla_decode") if i.name == "mine.zero")
    finally:
        kernels.implementations.cache_clear()
    reason = "mine.py:4 in <lambda>: ZeroDivisionError: division by zero"
    assert supports == [Mistaken(False, reason)] * 2
    assert isinstance(asked, PluginImplementation) and not isinstance(imported, PluginImplementation)


TWICE = PLUGIN + PLUGIN.replace("def zero", "def nought")


@pytest.mark.parametrize(("text", "name", "op", "said"), [
    (PLUGIN, "mine.zero", "mla-decode", "own.py: mine.zero has op 'mla-decode'; ops are block_scale_gemm"),
    (PLUGIN, "my zero", "mla_decode", "own.py: the name 'my zero' is not of letters, digits"),
    (PLUGIN, "torch.sdpa", "mla_decode", "torch.sdpa .* declared twice, in (?=.*torch_eager.py).*own.py"),
    (TWICE, "mine.zero", "mla_decode", "mine.zero of mla_decode is declared twice, in [^ ]*own.py$"),
    ("", "", "", "own.py declares no implementation: see @implementation"),
])  # fmt: skip
def test_a_plug_in_that_cannot_be_taken_is_told(text, name, op, said, tmp_path, monkeypatch):
    (path := tmp_path / "own.py").write_text(text.format(name=name, op=op, available="True"))
    monkeypatch.setenv("KERNEL_BENCH_PLUGINS", str(path))
    kernels.implementations.cache_clear()
    with pytest.raises(kernels.PluginError, match=said):
        kernels.implementations("mla_decode")
    kernels.implementations.cache_clear()


def test_a_plug_in_that_is_named_twice_is_told(tmp_path, monkeypatch):
    (path := tmp_path / "own.py").write_text(
        PLUGIN.format(name="mine.zero", op="mla_decode", available="True")
    )
    monkeypatch.setenv("KERNEL_BENCH_PLUGINS", f"{path}:{path}")
    kernels.implementations.cache_clear()
    with pytest.raises(kernels.PluginError, match=r"mine\.zero of mla_decode is declared twice"):
        kernels.implementations("mla_decode")
    kernels.implementations.cache_clear()
