"""Mistakes that an environment makes. Those of a command's words: transcripts/mistakes.txt."""

import re

import pytest

from tests.support.command_line import PLUGIN, error_line

HALF = """
from kernels.op import Implementation

class Half(Implementation):
    op, name, requires = "mla_decode", "half", ""
"""


@pytest.mark.parametrize(("text", "wanted"), [
    (None, "which is not a Python file"),
    ("def (", "cannot import .*plugin.py, named by KERNEL_BENCH_PLUGINS: SyntaxError: invalid syntax"),
    ("raise ImportError('two\\nlines')", "PLUGINS: plugin.py:1 in <module>: ImportError: two lines"),
    (PLUGIN.replace("elsewhere.kernel", "torch.sdpa"), "torch.sdpa .* declared twice, in .*plugin.py"),
    (HALF, r"plugin\.py: class Half defines no prepare$"),
])  # fmt: skip
def test_a_plugin_that_cannot_be_used_is_one_line(cli, tmp_path, text, wanted):
    plugin = tmp_path / "plugin.py"
    if text is not None:
        plugin.write_text(text)
    command = ("run", "--op", "mla_decode", "--out", tmp_path / "run") if text == "def (" else ("list",)
    done = cli(*command, KERNEL_BENCH_PLUGINS=plugin, PYTHONDONTWRITEBYTECODE=1)
    assert re.search(wanted, error_line(done))
    assert not (tmp_path / "run").exists()
