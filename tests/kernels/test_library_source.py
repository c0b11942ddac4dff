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
        ("lib._C.listed", "(a)"),
    ],
)
def test_a_signature_is_read(source, place, text):
    assert signatures.text(source.signature(place)) == text


@pytest.mark.parametrize(
    "place", ["lib.constant", "lib.late.anything", "lib.ops", "lib._C.unlisted", "lib._C.Kind.unlisted"]
)
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
    assert {name: signatures.text(s) for name, s in signatures.of_compiled(text).items()} == {
        "f": "(self, size=[1, 2], *, x=False)"
    }


def test_functions_that_cpp_binds():
    text = b"""m.def("first", &first, py::arg("a"), py::arg("b") = std::nullopt);
    m.def("silent", &silent); m.attr("second") = m.attr("first");"""
    assert {name: signatures.text(s) for name, s in signatures.of_cpp(text).items()} == {
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


def read(tmp_path: Path, text: str, **more: str) -> LibrarySource:
    """Of a library of that source and further modules."""
    for name, source in {"__init__": text, **more}.items():
        path = tmp_path / "lib" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    return LibrarySource.of(tmp_path)


BRANCHES = """
    if NEW:
        def f({new}): {body}
    else:
        def f({old}): {body}
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BRANCHES.format(new="a", old="b", body="..."), None),
        (BRANCHES.format(new="a, b=1", old="a, b=1", body="..."), "(a, b=1)"),
        (BRANCHES.format(new="a", old="*args, **kwargs", body="..."), "(a)"),
        ("def f(a): ...\nif NEW:\n    def f(a, b): ...", None),
        ("if NEW:\n    def f(a, b): ...\nelse:\n    def f():\n        raise RuntimeError", "(a, b)"),
        ("try:\n    from gone import f\nexcept ImportError:\n    f = None", None),
        ("try:\n    from .kernels import f\nexcept ImportError:\n    f = None", "(q, k=1)"),
        ("if HIP:\n    from .kernels import f\nelse:\n    from .others import f", None),
        ("if HIP:\n    from .kernels import f\nelse:\n    from .kernels import f", "(q, k=1)"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .others import f\nelse:\n"
         "    from .kernels import f", "(q, k=1)"),
        ("@overload\ndef f(a): ...\n@overload\ndef f(b): ...", None),
        ("f = lambda a, b=1: a", "(a, b=1)"),
        ("from functools import partial\nfrom . import kernels\nf = partial(kernels.f, 1, k=2)", "(*, k=2)"),
        ("from functools import partial\nfrom . import kernels\nf = partial(kernels.f, k=2)", "(q, *, k=2)"),
        ("from functools import partial\nf = partial(gone, 1)", None),
        ("f = decorator(lambda a: a)", None),
        ("f = max", None),
        ("f, g = make()", None),
        ("from . import kernels\nf = kernels.f", "(q, k=1)"),
        ("@compile_ops('module', fc_name='g')\nasync def f(a, /, b): ...", "(a, /, b)"),
        ("def f(a):\n    def f(b): ...", "(a)"),
        ("class f:\n    def __new__(cls, a): ...", None),
        ("class f(Base):\n    def __init__(self, a, *b): ...", "(a, *b)"),
    ],
)  # fmt: skip
def test_a_definition_among_several(tmp_path, text, told):
    source = read(tmp_path, text, kernels="def f(q, k=1): ...", others="def f(other): ...")
    signature = source.signature("lib.f")
    assert (signature and signatures.text(signature)) == told


LAZY = """
    import importlib
    TABLE = {table}
    def __getattr__(name):
        if name not in TABLE:
            raise AttributeError(name)
        return getattr(importlib.import_module(TABLE[name]), name)
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (LAZY.format(table="{'f': 'lib.kernels'}"), "(q, k=1)"),
        (LAZY.format(table="{'f': '.kernels:f'}"), "(q, k=1)"),
        (LAZY.format(table="{'f': ('kernels', 'f')}"), "(q, k=1)"),
        (LAZY.format(table="{'kernels': ['f', 'g']}"), "(q, k=1)"),
        (LAZY.format(table="{'f', 'g'}"), None),
        ("def __getattr__(name):\n    if name == 'f':\n        from .kernels import f\n        return f\n"
         "    raise AttributeError", "(q, k=1)"),
        ("def __getattr__(name):\n    return getattr(inner, name)", None),
        ("def bind(*names):\n    globals().update({n: ops[n] for n in names})\nbind('f', 'g')", None),
        ("for name in _C.names:\n    globals()[name] = getattr(_C, name)", None),
        ("from . import _C\nfor name in dir(_C):\n    globals()[name] = getattr(_C, name)", "(q, k=1)"),
    ],
)  # fmt: skip
def test_a_name_that_is_made_when_it_is_asked_for(tmp_path, text, told):
    source = read(tmp_path, text, kernels="def f(q, k=1): ...", _C="def f(q, k=1): ...")
    signature = source.signature("lib.f")
    assert (signature and signatures.text(signature)) == told


@pytest.mark.parametrize(
    "text",
    [
        LAZY.format(table="{'g': 'lib.kernels'}"),
        "def __getattr__(name):\n    raise AttributeError(name)",
        "from .kernels import *",
        "from .kernels import f",
        "names = ['f']",
        "def bind(*names):\n    globals().update({n: ops[n] for n in names})\nbind('g')",
        "if False:\n    def g(): ...",
        "class g:\n    def f(self): ...",
    ],
)
def test_a_name_that_is_gone(tmp_path, text):
    source = read(tmp_path, text, kernels="def _f(q): ...\ndef g(q): ...")
    with pytest.raises(NotThere):
        source.signature("lib.f")


def test_a_star_brings_what_a_module_exports(tmp_path):
    kernels = "def f(a): ...\ndef _g(b): ...\ndef h(c): ...\n__all__ = ['f']\n__all__ += ['_g']"
    source = read(tmp_path, "from .kernels import *", kernels=kernels)
    assert signatures.text(source.signature("lib._g")) == "(b)"
    plain = read(tmp_path / "plain", "from .kernels import *", kernels="def _g(b): ...\ndef h(c): ...")
    assert signatures.text(plain.signature("lib.h")) == "(c)"
    with pytest.raises(NotThere):
        plain.signature("lib._g")


def test_a_module_under_an_older_name(tmp_path):
    """AITER keeps names of modules that it moved in a table."""
    source = read(tmp_path, LAZY.format(table="{'older': 'kernels'}"), kernels="def f(q): ...")
    assert signatures.text(source.signature("lib.older.f")) == "(q)"
    with pytest.raises(NotThere):
        source.signature("lib.oldest.f")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("class C(P):\n    b: int = 1", "(a, b=...)"),
        ("class C(P):\n    a: int = 1", "(a=...)"),
        ("class C(elsewhere.P):\n    b: int = 1", None),
        ("class C:\n    a: ClassVar[int] = 1\n    b: int = field(init=False)\n    c: int = field()", "(c)"),
        (
            "class C:\n    a: int = field(default_factory=list)\n    b: int = field(kw_only=True)",
            "(a=..., *, b)",
        ),
        ("class C:\n    a: int = 1\n    _: KW_ONLY\n    b: int", "(a=..., *, b)"),
        ("class C:\n    a: int\n    def __init__(self, other): ...", "(other)"),
    ],
)
def test_the_fields_of_a_dataclass(tmp_path, text, told):
    parent = "@dataclass\nclass P:\n    a: int\n"
    signature = read(tmp_path, f"{parent}@dataclasses.dataclass(frozen=True)\n{text}").signature("lib.C")
    assert (signature and signatures.text(signature)) == told


def test_fields_by_name_alone(tmp_path):
    text = (
        "@dataclass(kw_only=True)\nclass C:\n    a: int = 1\n    b: int\nclass M(BaseModel):\n    c: int = 1"
    )
    source = read(tmp_path, text)
    assert signatures.text(source.signature("lib.C")) == "(*, a=..., b)"
    assert signatures.text(source.signature("lib.M")) == "(*, c=...)"


def test_members_that_a_module_gives_its_class(tmp_path):
    """cudnn's front end makes methods of a table."""
    text = "class C: ...\nfor op, names in {'sdpa': ('q',)}.items():\n    setattr(C, op, make(op, names))"
    source = read(tmp_path, text)
    assert source.signature("lib.C.sdpa") is None
    with pytest.raises(NotThere):
        source.signature("lib.C.gone")


def test_operators_of_torch_by_their_cpp_source(tmp_path):
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "ops.cpp").write_text(
        'TORCH_LIBRARY(_C, ops) {\n  ops.def(\n      "scaled(Tensor! out, Tensor a,"\n'
        '      "       int[] sizes=[1, 2], *, float? s=None) -> ()");\n  ops.impl("scaled", &scaled);\n}'
    )
    source = read(tmp_path, "")
    assert signatures.text(source.signature("lib._C.scaled")) == "(out, a, sizes=[1, 2], *, s=None)"
    for place in ("lib._C.gone", "lib.scaled"):
        with pytest.raises(NotThere):
            source.signature(place)


def test_sources_beside_the_folder_of_packages(tmp_path):
    """`sgl-kernel/csrc` and `sgl-kernel/python/sgl_kernel`."""
    (tmp_path / "python" / "lib").mkdir(parents=True)
    (tmp_path / "python" / "lib" / "__init__.py").write_text("f = torch.ops.lib.f")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "ops.cc").write_text('m.def("f(Tensor a) -> Tensor");')
    source = LibrarySource.of(tmp_path)
    assert signatures.text(source.signature("lib.f")) == "(a)"


def test_a_project_within_a_project(tmp_path):
    """FlashAttention 3 lies in `hopper`, which is a package to Python too."""
    hopper = tmp_path / "hopper"
    hopper.mkdir()
    for name, text in {"__init__": "", "setup": "", "flash_attn_interface": "def f(a): ..."}.items():
        (hopper / f"{name}.py").write_text(text)
    assert signatures.text(LibrarySource.of(tmp_path).signature("flash_attn_interface.f")) == "(a)"
    assert signatures.text(LibrarySource.of(hopper).signature("flash_attn_interface.f")) == "(a)"


@pytest.mark.parametrize("inside", ["library-1.0/", "library-1.0/python/", "library-1.0.data/purelib/"])
def test_an_archive_of_a_source(tmp_path, inside):
    with zipfile.ZipFile(tmp_path / "source.zip", "w") as archive:
        archive.writestr(f"{inside}lib/__init__.py", "from .ops import f")
        archive.writestr(f"{inside}lib/ops.py", "def f(a): ...")
    assert signatures.text(LibrarySource.of(tmp_path / "source.zip").signature("lib.f")) == "(a)"


def test_a_source_that_cannot_be_read_tells_nothing(tmp_path, recwarn):
    source = read(tmp_path, "from .bad import f\nfrom .odd import g")
    (tmp_path / "lib" / "bad.py").write_bytes(b"\xff\x00def f(a): ...")
    (tmp_path / "lib" / "odd.py").write_text("def g(a): return '\\d'")
    assert source.signature("lib.f") is None
    assert signatures.text(source.signature("lib.g")) == "(a)" and not recwarn.list
