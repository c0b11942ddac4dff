"""What a plug-in's rows say of themselves reaches the process that measures."""

import re

import pytest

import kernels
from kernels.op import Implementation
from kernels.platform import Platform
from kernels.plugin_process import PluginImplementation, PluginProcess
from kernels.support import Mistaken

PLUGIN = """
from kernels.op import Implementation
from kernels.support import Support
from lies_beside import TOKENS


class Mine(Implementation):
    name, op, requires, library, runtime = "mine.row", "fused_moe", "a test", "pytest", "here"
    boundaries, activations, shared_layout = ("with_quant", "with_routing"), "fp8", "rows"
    truncates, allocates, captures, rebinds, per_size = True, True, False, True, True

    def available(self, platform):
        return Support(platform.here, f"{platform.arch} {sorted(platform.features)}")

    def fits(self, sizes):
        return Support(sizes.tokens < TOKENS, f"{sizes}")

    def interpreted(self, platform):
        return platform.kind == "cpu"

    def environment(self, platform):
        return {"ARCH": platform.arch}

    interpreted_s, layout, workspace, scratch = (
        lambda self, sizes, times=times: times * sizes.tokens for times in (0.5, 2, 3, 4)
    )

    def prepare(self, operands, out):
        raise NotImplementedError


class Silent(Mine):
    name = "mine.silent"

    def layout(self, sizes):
        raise NotImplementedError
"""


def test_a_plug_in_says_in_its_own_process_what_it_says_here(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/lies_beside.py").write_text("TOKENS = 5")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    (path := tmp_path / "mine.py").write_text(PLUGIN)
    process = PluginProcess(path)
    (here, _), (there, silent) = kernels.implementations_of(path), process.ask("list")
    there, silent = (PluginImplementation(process, facts) for facts in (there, silent))
    facts = Implementation.__annotations__.keys()
    assert all(getattr(here, fact) != getattr(Implementation, fact, None) for fact in facts)
    assert all(getattr(there, fact) == getattr(here, fact) for fact in {*facts, "version"})
    places = Platform("cpu", "x86", features=frozenset({"a", "b"})), Platform("rocm", "any", here=False)
    sizes = map(kernels.OPS["fused_moe"].sizes, ({"tokens": 4}, {"tokens": 6, "ep": 2}))
    for asked in (*places, *sizes):
        of_places = ("available", "interpreted", "environment")
        of_sizes = ("fits", "interpreted_s", "layout", "workspace", "scratch")
        for name in of_places if asked in places else of_sizes:
            assert getattr(there, name)(asked) == getattr(here, name)(asked)
    with pytest.raises(kernels.PluginError, match=r"^mine.py:3\d in layout: NotImplementedError$"):
        silent.layout(asked)
    support = silent.supports(kernels.OPS["fused_moe"].case({"tokens": 1}, boundary="with_quant"), places[0])
    assert type(support) is Mistaken and support.reason.endswith("in layout: NotImplementedError")


class InterpreterError(Exception):
    """As Triton's interpreter raises it."""


def test_an_error_in_an_interpreted_kernel_is_told_with_the_kernels_line():
    def kernel():
        raise ValueError("tile")

    def launch():
        try:
            kernel()
        except ValueError as error:
            raise InterpreterError(repr(error)) from error

    try:
        launch()
    except InterpreterError as error:
        assert re.match(
            r"test_plugin_process.py:\d+ in kernel, .* in launch: Interp", kernels.describe_error(error)
        )
