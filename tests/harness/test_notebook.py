"""`harness.bench`: a function of a script, of a cell or of a module reaches the process that measures it."""

import functools
import io
import json
import linecache
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch

import harness
import kernels
from harness.cli.run import run
from harness.errors import UsageError, one_line
from harness.notebook import _plugin
from tests.support.paths import ROOT
from tests.support.workers_here import captured_here

CASE = "batch=2 ctx=5..20 heads=4 page=16"
SCRIPT = """
import json
import sys
import harness
import torch

LATENT, WIDE = 512, torch.float32

class Softmax:
    over: int = -1
    def __call__(self, x):
        return torch.softmax(x, self.over) if __name__ else x

def attention(q, kv, scale):
    return Softmax()(q.to(WIDE) @ kv.T * scale)

def mine(o, out):
    kv = o.kv.flatten(0, 1)
    for i in range(len(o.host_lengths)):
        tokens = kv[o.token_slots(i)].to(WIDE)
        out[i] = attention(o.q[i], tokens, o.scale) @ tokens[:, :LATENT]

kv = torch.zeros(3)  # a name that `mine` has for itself
case = sys.argv[1]
options = dict(budget="1s", device="cpu", per_case="1s", cache="warm", quiet=False, seed=None)
table = harness.bench("mla_decode", mine, case=case, out="run", **options)
table.page("page.html")
frame = table.frame()
print(json.dumps([str(table), table._repr_html_(), str(table.folder), dict(zip(frame.impl, frame.status))]))
"""


def test_a_script_gets_the_table_of_its_function_and_the_baseline(tmp_path, monkeypatch):
    """Its workers are this process, and their rows are of the file that is written for them."""
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py", CASE])
    with captured_here() as (patch, out, _):
        patch.setattr(kernels, "_imports_plugins", True)  # as in workers, which are this process
        runpy.run_path("script.py", run_name="__main__")
    text, html, folder, statuses = json.loads(out.getvalue())
    assert statuses == {"yours.mine": "ok", "torch.sdpa": "ok"}
    assert text.startswith("mla_decode batch=2 ctx=5..20") and "recorded in run" in text
    (plugin,) = re.findall(r" KERNEL_BENCH_PLUGINS=(\S+)$", text)
    assert "def attention" in Path(plugin).read_text()
    assert html.startswith("<pre>mla_decode batch=2 ctx=5..20") and "yours.mine" in html
    assert "yours.mine" in (tmp_path / "page.html").read_text()
    command = json.loads((tmp_path / folder / "run.json").read_text())["command"]
    assert command[:6] == ["run", "--op", "mla_decode", "--impl", "yours.mine", "--case"]


def test_the_import_is_cheap():
    look = "import harness, sys; assert not {'click', 'torch', 'kernels'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", look], cwd=ROOT, check=True)


class Notebook(dict[str, Any]):
    """Cells, which have a source but no file, and the names that they made."""

    def __init__(self) -> None:
        super().__init__(__name__="__main__")

    def cell(self, source: str) -> None:
        name = f"<cell {len(linecache.cache)}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), self)


CELLS = (
    """
import functools
import torch as t
from numpy import exp as raised
from torch import mul as product
from kernels.op import implementation, Prepared
from kernels.support import need as needed
LIMIT, KIND = 7, t.float32
_sys, _pickle, _declared, annotations = 3, 1, 2, 0  # the file has none of these names for itself

def twice(x):
    return product(x, 2 * int(raised(0))) if LIMIT else again(x)

def again(x):
    return twice(x).to(KIND)

def through(function):
    @functools.wraps(function)
    def call(x):
        return function(x) + 1
    return call

@through
def thrice(x):
    return x * _sys - _pickle
""",
    """
def fills(o, out):
    out.copy_(again(o.x))

def returns(o, out):
    x = [each for each in (o.x,)]
    return twice(x[0])

def prepares(o, out):
    return lambda: out.copy_(thrice(o.x) - o.x * (_declared - 1) + annotations)

def made(factor):
    def closed(o, out):
        return o.x * factor
    return closed

closed = made(2)

@implementation("mine.more", requires="torch", fits=lambda sizes: needed(sizes < LIMIT, "too many"))
def declares(o, out):
    return Prepared(o, out, lambda: out.copy_(twice(o.x)))

@implementation("mine.moe", op="fused_moe", requires="torch")
def elsewhere(o, out):
    return lambda: None
""",
)


@pytest.fixture(scope="module")
def notebook() -> Notebook:
    notebook = Notebook()
    for source in CELLS:
        notebook.cell(source)
    return notebook


@pytest.mark.parametrize("name", ["fills", "returns", "prepares", "closed", "declares"])
def test_a_function_of_a_cell_takes_along_what_it_uses(notebook, name):
    path, called = _plugin(notebook[name], "mla_decode", "core")
    (row,) = kernels.implementations_of(path)
    assert (row.name, row.op, row.boundaries) == (called, "mla_decode", ("core",))
    assert called == ("mine.more" if name == "declares" else f"yours.{name}")
    out = torch.full((2,), torch.nan)
    prepared = row.prepare(SimpleNamespace(x=torch.tensor([1.0, 5.0])), out)
    out.fill_(torch.nan)
    prepared.call()
    assert prepared.result().tolist() == [2, 10]
    assert row.fits(9).ok == (name != "declares")


def test_a_function_of_a_module_is_imported(notebook):
    path, called = _plugin(_plugin, "mla_decode", "core")
    assert "from harness.notebook import _plugin as _plugin" in path.read_text()
    assert called == "yours._plugin"


TUNED = """
import triton

CONFIGS = [triton.Config({"B": size}) for size in range(100)]

@triton.heuristics({"EVEN": lambda given: True})
@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def scaled(x, n, B, EVEN):
    pass

def tuned(o, out):
    scaled[(1,)](out, 2)
"""


def test_a_tuned_triton_kernel_goes_along(notebook):
    pytest.importorskip("triton")
    notebook.cell(TUNED)
    path, _ = _plugin(notebook["tuned"], "mla_decode", "core")
    kernels.implementations_of(path)
    scaled = sys.modules[f"kernel_bench_plugin_{path.stem}"].scaled
    assert [type(each).__name__ for each in (scaled, scaled.fn)] == ["Heuristics", "Autotuner"]
    assert len(scaled.fn.configs) == 100


@pytest.mark.parametrize("source", [
    "from kernels.op import Work\ndef annotated(o: Work, out) -> Work: ...",
    "from __future__ import annotations\ndef annotated(o: Unknown, out): ...",
])  # fmt: skip
def test_annotations_are_read_as_the_notebook_does(source):
    notebook = Notebook()
    notebook.cell(source)
    path, _ = _plugin(notebook["annotated"], "mla_decode", "core")
    assert kernels.implementations_of(path)


def test_what_was_exported_for_an_earlier_call_gives_way(notebook, monkeypatch, tmp_path):
    """And the last line says what commands need. Only the user can read the file, as it holds values."""
    earlier, _ = _plugin(notebook["fills"], "mla_decode", "core")
    other, _ = _plugin(notebook["returns"], "mla_decode", "core")
    monkeypatch.setenv(kernels.PLUGINS, f"{earlier}:{other}")
    seen = []
    monkeypatch.setattr(run, "main", lambda *_, **__: seen.append(kernels.plugin_files()))
    monkeypatch.chdir(tmp_path)
    edited = Notebook()
    edited.cell("def fills(o, out):\n    return o.x")
    table = harness.bench("mla_decode", edited["fills"], case=CASE)
    ((fresh, *others),) = seen
    assert others == [other] and fresh != earlier
    line = f"before these commands: export PYTHONPATH={ROOT}:$PYTHONPATH KERNEL_BENCH_PLUGINS={fresh}"
    assert table.text == line
    assert [path.stat().st_mode & 0o777 for path in (fresh, fresh.parent)] == [0o600, 0o700]


REFUSED = """
def tensor(o, out): return LARGE
def nested(o, out): return HELD
def file(o, out): return OPEN
def helper(o, out): return lambda: unnamed(o)
def wrapped(o, out): return compiled(o)
def instance(o, out): return OWN
def before(o, out): return o
"""


@pytest.mark.parametrize(("name", "said"), [
    ("tensor", "LARGE (Tensor) is of this process, and the kernel runs in another: make it in the kernel"),
    ("nested", "HELD (dict) is of this process"),
    ("file", "OPEN (BytesIO) is of this process"),
    ("instance", "OWN (Own) is of this process"),
    ("helper", "unnamed was not made by `def unnamed` alone: write that, or make it in what uses"),
    ("wrapped", "compiled was not made by `def compiled` alone"),
    ("before", "renamed was not made by `def renamed` alone"),
    ("unnamed", "is no kernel: give a function of (operands, out) that `def` made"),
    ("sourceless", "the source of sourceless is not known: put it into a file"),
    ("LARGE", "is no kernel"),
])  # fmt: skip
def test_what_cannot_reach_the_process_is_one_line(notebook, name, said):
    notebook.cell("class Own: pass\nOWN = Own()\nunnamed = [\n  lambda o: o,\n][0]\n" + REFUSED)
    notebook |= {"LARGE": torch.zeros(2), "OPEN": io.BytesIO(b"0" * 99999)}
    notebook["HELD"] = {"w": [notebook["LARGE"]]}
    notebook["before"].__name__ = "renamed"
    notebook["compiled"] = functools.wraps(notebook["twice"])(lambda x: x)
    exec("def sourceless(o, out): pass", notebook)
    with pytest.raises(UsageError) as error:
        harness.bench("mla_decode", notebook[name], case=CASE)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("kernel", "given", "error", "said"), [
    ("fills", {"beside": "torch.sdp"}, UsageError, "unknown implementation 'torch.sdp' of mla_decode"),
    ("fills", {"boundary": "all"}, UsageError, "unknown boundary 'all'"),
    ("fills", {"per_cace": "1s"}, click.UsageError, "--per-cace"),
    ("elsewhere", {}, kernels.PluginError, "mine.moe is declared for fused_moe, not for mla_decode"),
])  # fmt: skip
def test_other_mistakes_are_those_of_run(notebook, monkeypatch, kernel, given, error, said):
    monkeypatch.setenv(kernels.PLUGINS, "")
    with pytest.raises(error, match=said):
        harness.bench(
            **{"op": "mla_decode", "kernel": notebook[kernel], "case": CASE, "device": "cpu"} | given
        )
    assert not [i for i in kernels.implementations("mla_decode") if i.plugin], "its plug-in is forgotten"


def test_triton_without_a_gpu_and_without_its_base_says_what_to_take():
    driver = pytest.importorskip("triton.runtime.driver").driver
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    with pytest.raises(RuntimeError) as error:
        driver.active.get_current_device()
        assert "derives from kernels.triton_runtime.TritonImplementation" in one_line(error.value)
