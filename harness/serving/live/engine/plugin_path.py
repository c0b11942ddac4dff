"""Python path of an engine, a folder: the plug-in as if installed, the suite that it calls, and what hides
broken packages."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

from harness.paths import ROOT
from harness.serving.live import plugin

PACKAGE = "deepseek_kernel_bench_plugin"
PLUGIN = Path(plugin.__file__).parent
SUITE = ("kernels", "shapes")

# Packages that vLLM installs and does not need for text. PyPI has them built for another torch than the CPU
# build beside them: then importing them fails, and takes the engine down with it.
OPTIONAL = ("torchvision", "torchaudio", "torchcodec")

HIDE = '''"""Put here by deepseek-kernel-bench: these packages cannot be imported beside this torch."""

import importlib.machinery
import importlib.util
import pathlib
import sys

for name in {names!r}:
    sys.modules.setdefault(name, None)

# Only one `sitecustomize` is found: the one that this hides is run from here.
_here = str(pathlib.Path(__file__).parent)
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [p for p in sys.path if p != _here])
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
'''


def stage(site: Path, hidden: tuple[str, ...]) -> None:
    """Fills `site` with the plug-in. Raises OSError."""
    shutil.rmtree(site, ignore_errors=True)
    _copy(PLUGIN, site / PACKAGE)
    about = site / f"{PACKAGE}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1\n")
    entry = f"[vllm.general_plugins]\n{PACKAGE} = {PACKAGE}:register\n"
    (about / "entry_points.txt").write_text(entry)
    if hidden:
        (site / "sitecustomize.py").write_text(HIDE.format(names=hidden))


def stage_suite(folder: Path) -> None:
    """Puts `kernels` and `shapes` there, apart from the plug-in: on the path of engines that swap an op
    alone. Raises OSError."""
    shutil.rmtree(folder, ignore_errors=True)
    for package in SUITE:
        _copy(ROOT / package, folder / package)


def _copy(package: Path, to: Path) -> None:
    shutil.copytree(package, to, ignore=shutil.ignore_patterns("__pycache__"))


@functools.cache
def broken_modules(python: str = sys.executable) -> tuple[str, ...]:
    """Those of OPTIONAL that are installed and cannot be imported. Takes some seconds at the first call."""
    code = (
        "import importlib, importlib.util, sys\n"
        "for name in sys.argv[1:]:\n"
        "    if importlib.util.find_spec(name) is None: continue\n"
        "    try: importlib.import_module(name)\n"
        "    except Exception: print(name)\n"
        "    finally: sys.modules[name] = None\n"
    )
    done = subprocess.run([python, "-c", code, *OPTIONAL], capture_output=True, text=True, check=False)
    return tuple(line for line in done.stdout.split() if line in OPTIONAL)
