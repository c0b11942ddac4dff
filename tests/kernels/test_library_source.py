"""Signatures read from a library's source: through imports, conditions, classes, compiled parts."""

from __future__ import annotations

import textwrap
import zipfile
from pathlib import Path

import pytest

from kernels import signatures
from kernels.library_source import LibrarySource, NotThere, bindings, operators

FILES = {
    "lib/__init__.py": """
        from .ops import *
        from .ops.attention import decode as attend
        from . import late
        if True:
            from ._compiled import fast
        try:
            from gone import wrapper
        except ImportError:
            def wrapper(a, b=1): ...
        alias = attend
        def again(a): ...
        def again(a, b): ...
        constant = 3
    """,
    "lib/ops/__init__.py": "from .attention import decode, Wrapper\n__all__ = ['decode']",
    "lib/ops/attention.py": """
        from typing import NamedTuple, overload
        from dataclasses import dataclass

        @overload
        def decode(q): ...
        @compiled("module")
        def decode(q, kv, *, scale: float = 1.0, **rest) -> None: ...

        class Base:
            def plan(self, lengths, page=64): ...
            @staticmethod
            def size(batch): ...

        class Wrapper(Base):
            def __init__(self, workspace, backend="auto"): ...
            def run(self, q, out=None): ...

        @dataclass
        class Config:
            experts: int
            inplace: bool = True

        class Picks(NamedTuple):
            weights: object
            ids: object
    """,
    "lib/late.py": "def __getattr__(name): ...",
    "lib/_compiled.abi3.so": "\x00lib::fast(Tensor q, (Tensor, Tensor) kv, *, int? page=None) -> Tensor\x00",
    "lib/broken.py": "def (",
}


@pytest.fixture(scope="module", params=["folder", "checkout", "wheel"])
def source(request, tmp_path_factory) -> LibrarySource:
    root = tmp_path_factory.mktemp("lib")
    folder = root / ("python" if request.param == "checkout" else ".")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    if request.param != "wheel":
        return LibrarySource.of(root)
    wheel = root / "lib.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in FILES:
            archive.write(root / name, name)
    return LibrarySource.of(wheel)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("lib.ops.attention.decode", "(q, kv, *, scale=1.0, **rest)"),
        ("lib.decode", "(q, kv, *, scale=1.0, **rest)"),
        ("lib.attend", "(q, kv, *, scale=1.0, **rest)"),
        ("lib.alias", "(q, kv, *, scale=1.0, **rest)"),
        ("lib.Wrapper", "(workspace, backend='auto')"),
        ("lib.ops.attention.Wrapper.run", "(q, out=None)"),
        ("lib.ops.attention.Wrapper.plan", "(lengths, page=64)"),
        ("lib.ops.attention.Wrapper.size", "(batch)"),
        ("lib.ops.attention.Config", "(experts, inplace=...)"),
        ("lib.ops.attention.Picks", "(weights, ids)"),
        ("lib.wrapper", "(a, b=1)"),
        ("lib.again", "(a, b)"),
        ("lib.fast", "(q, kv, *, page=None)"),
    ],
)
def test_a_signature_is_read(source, place, text):
    assert signatures.text(source.signature(place)) == text


@pytest.mark.parametrize("place", ["lib.constant", "lib.late.anything", "lib.ops"])
def test_what_is_there_and_does_not_tell(source, place):
    assert source.signature(place) is None


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("lib.missing", "lib has no missing"),
        ("lib.ops.attention.missing", "lib.ops.attention has no missing"),
        ("lib.ops.attention.Base.run", "lib.ops.attention.Base has no run"),
        ("other.missing", "no module other"),
    ],
)
def test_what_is_not_there(source, place, reason):
    with pytest.raises(NotThere) as raised:
        source.signature(place)
    assert str(raised.value) == reason


def test_which_libraries_it_has(source):
    assert source.has("lib") and source.has("lib.ops.attention") and not source.has("other")


def test_a_part_of_a_namespace_is_not_the_whole(tmp_path):
    """flash-attn-4 lives in `flash_attn`, which it does not bring."""
    (tmp_path / "space" / "part").mkdir(parents=True)
    (tmp_path / "space" / "part" / "__init__.py").write_text("def f(a): ...")
    source = LibrarySource.of(tmp_path)
    assert source.has("space.part") and not source.has("space")
    assert signatures.text(source.signature("space.part.f")) == "(a)"
    with pytest.raises(NotThere):
        source.signature("space.other.f")


def test_schemas_of_a_compiled_file():
    text = (
        b"\x00aten::f(Tensor self, int[2] size=[1, 2], *, bool x=False) -> (Tensor, Tensor)\x00f(garbage\x00"
    )
    assert {name: signatures.text(s) for name, s in operators(text).items()} == {
        "f": "(self, size=[1, 2], *, x=False)"
    }


def test_functions_that_cpp_binds():
    text = b"""m.def("first", &first, py::arg("a"), py::arg("b") = std::nullopt);
    m.def("silent", &silent); m.attr("second") = m.attr("first");"""
    assert {name: signatures.text(s) for name, s in bindings(text).items()} == {
        "first": "(a, b=...)",
        "second": "(a, b=...)",
    }


@pytest.mark.parametrize("text", ["()", "(a, b=1, /, c=None, *rest, d, e='x', **more)", "(*, a=(1, 128))"])
def test_a_signature_is_written_as_it_is_read(text):
    assert signatures.text(signatures.parse(text)) == text


def test_what_is_no_library(tmp_path: Path):
    (tmp_path / "text.whl").write_text("no archive")
    with pytest.raises(zipfile.BadZipFile):
        LibrarySource.of(tmp_path / "text.whl")


def test_names_that_are_made_as_a_module_is_imported(tmp_path: Path):
    """cudnn binds compiled functions in a loop, and gives a class of its own methods in another."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").write_text(
        "for name in compiled.names:\n    globals()[name] = getattr(compiled, name)\n"
        "from .graph import Graph, Bare\n"
    )
    (tmp_path / "lib" / "graph.py").write_text(
        "class Graph:\n    def run(self, a): ...\nclass Bare: ...\n"
        "def install():\n    for name in OPS:\n        setattr(Graph, name, make(name))\ninstall()\n"
    )
    source = LibrarySource.of(tmp_path)
    assert source.signature("lib.create_handle") is None
    assert source.signature("lib.Graph.sdpa") is None
    assert str(source.signature("lib.Graph.run")) == "(a)"
    with pytest.raises(NotThere, match="has no sdpa"):
        source.signature("lib.Bare.sdpa")
