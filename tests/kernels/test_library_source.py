"""Signatures read from a library's source: through imports, conditions, classes, compiled parts."""

from __future__ import annotations

import textwrap
import zipfile
from pathlib import Path

import pytest

from kernels.interfaces import signatures
from kernels.interfaces.library_source import LibrarySource, NotThere

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
    "lib/ops/__init__.py": "from .attention import decode, Wrapper\n__all__ = ['decode', 'Wrapper']",
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
            @staticmethod
            def version(): ...

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
    "lib/_C.abi3.so": "",
    "lib/_C/__init__.pyi": "def listed(a): ...\nclass Kind: ...",
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


DECODE = "(q, kv, *, scale=1.0, **rest)"
TOLD = {
    "lib.ops.attention.decode": DECODE,
    "lib.decode": DECODE,
    "lib.attend": DECODE,
    "lib.alias": DECODE,
    "lib.Wrapper": "(workspace, backend='auto')",
    "lib.ops.attention.Wrapper.run": "(q, out=None)",
    "lib.ops.attention.Wrapper.plan": "(lengths, page=64)",
    "lib.ops.attention.Wrapper.size": "(batch)",
    "lib.ops.attention.Wrapper.version": "()",
    "lib.ops.attention.Config": "(experts, inplace=...)",
    "lib.ops.attention.Picks": "(weights, ids)",
    "lib.wrapper": "(a, b=1)",
    "lib.fast": "(q, kv, *, page=None)",
    "lib._C.listed": "(a)",
    # What is there and does not tell.
    **dict.fromkeys(
        ("lib.constant", "lib.again", "lib.late.anything", "lib.ops", "lib._C.unlisted", "lib._C.Kind.none")
    ),
    # What is not there.
    "lib.missing": NotThere("lib has no missing"),
    "lib.ops.attention.missing": NotThere("lib.ops.attention has no missing"),
    "lib.ops.attention.Base.run": NotThere("lib.ops.attention.Base has no run"),
    "other.missing": NotThere("no module other"),
}


def told(source: LibrarySource, place: str) -> object:
    """What a source tells of a place: the signature's text, None, or the NotThere that it raises."""
    try:
        signature = source.signature(place)
    except NotThere as error:
        return error
    return None if signature is None else str(signature)


def test_what_a_source_tells(source):
    found = {place: told(source, place) for place in TOLD}
    assert {place: repr(what) for place, what in found.items()} == {p: repr(what) for p, what in TOLD.items()}
    assert source.has("lib") and source.has("lib.ops.attention") and not source.has("other")


def test_what_compiled_files_and_bindings_in_cpp_tell():
    schemas = (
        b"\x00aten::f(Tensor self, int[2] size=[1, 2], *, bool x=False) -> (Tensor, Tensor)\x00f(garbage\x00"
    )
    bound = b"""m.def("first", &first, py::arg("a"), py::arg("b") = std::nullopt);
    m.def("silent", &silent); m.attr("second") = m.attr("first");
    m.def("macro", py::arg("a") = 1, py::arg("b"));"""
    found = signatures.of_compiled(schemas) | signatures.of_cpp(bound)
    assert {name: str(s) for name, s in found.items()} == {
        "f": "(self, size=[1, 2], *, x=False)",
        "first": "(a, b=...)",
        "second": "(a, b=...)",
    }


@pytest.mark.parametrize("text", ["()", "(a, b=1, /, c=None, *rest, d, e='x', **more)", "(*, a=(1, 128))"])
def test_a_signature_is_written_as_it_is_read(text):
    assert str(signatures.parse(text)) == text


def test_what_is_no_library(tmp_path: Path):
    (tmp_path / "text.whl").write_text("no archive")
    with pytest.raises(zipfile.BadZipFile):
        LibrarySource.of(tmp_path / "text.whl")


def read(tmp_path: Path, text: str, **more: str) -> LibrarySource:
    """Of a library of that source and further modules."""
    for name, source in {"__init__": text, **more}.items():
        path = tmp_path / "lib" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    return LibrarySource.of(tmp_path)


def branches(new: str, old: str) -> str:
    return f"if NEW:\n    def f({new}): ...\nelse:\n    def f({old}): ..."


def lazy(table: str) -> str:
    return (
        f"import importlib\nTABLE = {table}\ndef __getattr__(name):\n    if name not in TABLE:\n"
        "        raise AttributeError(name)\n    return getattr(importlib.import_module(TABLE[name]), name)"
    )


BOUND = "def bind(*names):\n    globals().update({n: ops[n] for n in names})\n"
TAKEN = "for name in %s:\n    globals()[name] = getattr(_C, name)"
KERNELS, GONE = "(q, k=1)", "NotThere"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # A definition among several.
        (branches("a", "b"), None),
        (branches("a, b=1", "a, b=1"), "(a, b=1)"),
        (branches("a", "*args, **kwargs"), "(a)"),
        ("def f(a): ...\nif NEW:\n    def f(a, b): ...", None),
        ("if NEW:\n    def f(a, b): ...\nelse:\n    def f():\n        raise RuntimeError", "(a, b)"),
        ("try:\n    from gone import f\nexcept ImportError:\n    f = None", None),
        ("try:\n    from .kernels import f\nexcept ImportError:\n    f = None", KERNELS),
        ("if HIP:\n    from .kernels import f\nelse:\n    from .others import f", None),
        ("if HIP:\n    from .kernels import f\nelse:\n    from .kernels import f", KERNELS),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .others import f\nelse:\n"
         "    from .kernels import f", KERNELS),
        ("if A:\n    def f(a):\n        log()\n        warn()\n        raise B\nelse:\n"
         "    from .kernels import f", None),
        # An assignment tells only where it gives a function another name.
        ("from .kernels import f as inner\nf = inner", KERNELS),
        ("from functools import partial\nfrom . import kernels\nf = partial(kernels.f, k=2)", None),
        ("from . import kernels\nf = kernels.f", None),
        ("f = lambda a, b=1: a", None),
        ("f = decorator(lambda a: a)", None),
        ("f = max", None),
        ("f, g = make()", None),
        ("@compile_ops('module', fc_name='g')\nasync def f(a, /, b): ...", "(a, /, b)"),
        ("def f(a):\n    def f(b): ...", "(a)"),
        ("class f:\n    def __new__(cls, a): ...", None),
        ("class f(Base):\n    def __init__(self, a, *b): ...", "(a, *b)"),
        # A name that is made when it is asked for.
        (lazy("{'f': 'lib.kernels'}"), KERNELS),
        (lazy("{'f': '.kernels:f'}"), KERNELS),
        (lazy("{'f': ('kernels', 'f')}"), KERNELS),
        (lazy("{'kernels': ['f', 'g']}"), None),
        (lazy("{'f', 'g'}"), None),
        ("def __getattr__(name):\n    if name == 'f':\n        from .kernels import f\n        return f\n"
         "    raise AttributeError", None),
        ("def __getattr__(name):\n    return getattr(inner, name)", None),
        (f"{BOUND}bind('f', 'g')", None),
        (TAKEN % "_C.names", None),
        (f"from . import _C\n{TAKEN % 'dir(_C)'}", None),
        # A name that is gone.
        (lazy("{'g': 'lib.kernels'}"), GONE),
        ("def __getattr__(name):\n    raise AttributeError(name)", GONE),
        ("from .without import *", GONE),
        ("from .without import f", GONE),
        ("names = ['f']", GONE),
        (f"{BOUND}bind('g')", GONE),
        ("if False:\n    def g(): ...", GONE),
        ("class g:\n    def f(self): ...", GONE),
    ],
)  # fmt: skip
def test_a_name_of_a_module(tmp_path, text, wanted):
    modules = {"kernels": "def f(q, k=1): ...", "_C": "def f(q, k=1): ...", "others": "def f(other): ..."}
    found = told(read(tmp_path, text, **modules, without="def _f(q): ...\ndef g(q): ..."), "lib.f")
    assert (GONE if isinstance(found, NotThere) else found) == wanted


@pytest.mark.parametrize(("text", "wanted"), [
    ("class C:\n    a: int\n    b: int = 1", "(a, b=...)"),
    ("class C(P):\n    b: int = 1", None),
    ("class C:\n    a: ClassVar[int] = 1\n    b: int", None),
    ("class C:\n    a: int = field(default_factory=list)", None),
    ("class C:\n    a: int = 1\n    _: KW_ONLY\n    b: int", None),
    ("class C:\n    a: int\n    def __init__(self, other): ...", "(other)"),
])  # fmt: skip
def test_the_fields_of_a_dataclass(tmp_path, text, wanted):
    parent = "@dataclass\nclass P:\n    a: int\n"
    source = read(tmp_path, f"{parent}@dataclasses.dataclass(frozen=True)\n{text}")
    assert told(source, "lib.C") == wanted


EXPORTS = "def f(a): ...\ndef _g(b): ...\ndef h(c): ...\n__all__ = ['f']\n__all__ += ['_g']"
CPP = """TORCH_LIBRARY(_C, ops) {
  ops.def(
      "scaled(Tensor! out, Tensor a,"
      "       int[] sizes=[1, 2], *, float? s=None) -> ()");
  ops.impl("scaled", &scaled);
}"""


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"lib/__init__.py": "from .kernels import *", "lib/kernels.py": EXPORTS}, {"lib._g": "(b)"}),
        (
            {"lib/__init__.py": "from .kernels import *", "lib/kernels.py": "def _g(b): ...\ndef h(c): ..."},
            {"lib._g": GONE, "lib.h": "(c)"},
        ),
        # AITER keeps names of modules that it moved in a table.
        (
            {"lib/__init__.py": lazy("{'older': 'kernels'}"), "lib/kernels.py": "def f(q): ..."},
            {"lib.older.f": "(q)", "lib.oldest.f": GONE},
        ),
        (
            {"lib/__init__.py": "@dataclass(kw_only=True)\nclass C:\n    a: int = 1\n    b: int\n"
             "class M(BaseModel):\n    c: int = 1"},
            {"lib.C": "(*, a=..., b)", "lib.M": "(*, c=...)"},
        ),
        # cudnn's front end makes methods of a table.
        (
            {"lib/__init__.py": "class C: ...\nfor op, names in {'sdpa': ('q',)}.items():\n"
             "    setattr(C, op, make(op, names))"},
            {"lib.C.sdpa": None, "lib.C.gone": GONE},
        ),
        (
            {"lib/__init__.py": "", "csrc/ops.cpp": CPP},
            {"lib._C.scaled": "(out, a, sizes=[1, 2], *, s=None)", "lib._C.gone": GONE, "lib.scaled": GONE},
        ),
        # As `sgl-kernel/csrc` beside `sgl-kernel/python/sgl_kernel`.
        (
            {"python/lib/__init__.py": "f = torch.ops.lib.f", "csrc/a.cc": 'm.def("f(Tensor a) -> Tensor");'},
            {"lib.f": "(a)"},
        ),
        # FlashAttention 3 lies in `hopper`, which is a package to Python too.
        (
            {"hopper/__init__.py": "", "hopper/setup.py": "", "hopper/attention.py": "def f(a): ..."},
            {"attention.f": "(a)"},
        ),
        (
            {"a/b/c/lib/__init__.py": "def f(a): ...", "a/b/c/d/far/__init__.py": ""},
            {"lib.f": "(a)", "far.f": GONE},
        ),
        ({"__init__.py": "", "setup.py": "", "attention.py": "def f(a): ..."}, {"attention.f": "(a)"}),
        # flash-attn-4 lives in `flash_attn`, which it does not bring.
        ({"space/part/__init__.py": "def f(a): ..."}, {"space.part.f": "(a)", "space.other.f": GONE}),
    ],
)  # fmt: skip
def test_a_layout_of_files(tmp_path, files, wanted):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    source = LibrarySource.of(tmp_path)
    found = {place: told(source, place) for place in wanted}
    assert {place: GONE if isinstance(what, NotThere) else what for place, what in found.items()} == wanted
    assert not source.has("space")


@pytest.mark.parametrize("inside", ["library-1.0/", "library-1.0/python/", "library-1.0.data/purelib/"])
def test_an_archive_of_a_source(tmp_path, inside):
    with zipfile.ZipFile(tmp_path / "source.zip", "w") as archive:
        archive.writestr(f"{inside}lib/__init__.py", "from .ops import f")
        archive.writestr(f"{inside}lib/ops.py", "def f(a): ...")
    assert told(LibrarySource.of(tmp_path / "source.zip"), "lib.f") == "(a)"


def test_a_source_that_cannot_be_read_tells_nothing(tmp_path, recwarn):
    source = read(tmp_path, "from .bad import f\nfrom .odd import g")
    (tmp_path / "lib" / "bad.py").write_bytes(b"\xff\x00def f(a): ...")
    (tmp_path / "lib" / "odd.py").write_text("def g(a): return '\\d'")
    assert source.signature("lib.f") is None
    assert str(source.signature("lib.g")) == "(a)" and not recwarn.list
