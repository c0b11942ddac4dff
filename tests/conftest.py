"""What the tests share: a place of their own, and the command line as a user calls it."""

import difflib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.catalogue.devices import Ceilings
from harness.cli import main
from harness.machine.cpu_threads import default_threads
from harness.paths import ROOT
from harness.run.ceilings import keep
from kernels import tuning
from kernels.platform import detect

pytest_plugins = ["harness.pytest_plugin"]

# As make has it: pytest and the processes that tests start would compile all that they import, each time.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Collecting makes a million objects that stay: to look through them again and again takes half of its time.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "write: tests record anew what they compare with committed files; `git diff` shows what changed"
    parser.addoption("--golden", choices=["write"], help=told)


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compares a text with a committed file, which `--golden=write` writes instead."""

    def compare(file: Path, text: str) -> None:
        if request.config.getoption("golden") == "write":
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        before = file.read_text() if file.exists() else ""
        lines = before.splitlines(), text.splitlines()
        changed = difflib.unified_diff(*lines, "recorded", "now", n=6, lineterm="")
        how = f"if this is right: python -m pytest --golden=write '{request.node.nodeid}'"
        if text != before:
            pytest.fail("\n".join([*changed, how]), pytrace=False)

    return compare


# Stored from the start, so that no run has to measure them; lower than those of any machine.
LEAST = Ceilings({"bf16": 1e9}, read=1e8, copy=1e8, measured="never")


@pytest.fixture(scope="session", autouse=True)
def place_of_our_own(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Device locks, caches and measured ceilings of this session: its runs neither wait for nor disturb
    a real one, and do not depend on what the user's environment steers."""
    place = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        for variable, name in (
            ("TMPDIR", "tmp"),
            ("KERNEL_BENCH_LOCKS", "locks"),
            ("XDG_CACHE_HOME", "cache"),
        ):
            (place / name).mkdir()
            patch.setenv(variable, str(place / name))
        # What else runs on this machine must not fail a test.
        patch.setenv("KERNEL_BENCH_DISTURBED", "keep")
        patch.setattr(tempfile, "tempdir", str(place / "tmp"))
        patch.delenv("KERNEL_BENCH_PLUGINS", raising=False)
        patch.delenv("OMP_NUM_THREADS", raising=False)
        if not request.config.option.kernel_device:
            # The CPU is measured, beside a GPU or with a torch that is built for one, too.
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        cpu = detect("cpu")
        for threads in {1, default_threads()}:
            keep(cpu, threads, LEAST)
        if beside := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
            import torch

            # Threads that wait spin: with more of them than cores, each waits for those that do not run.
            threads = max(1, default_threads() // int(beside))
            torch.set_num_threads(threads)
            patch.setenv("OMP_NUM_THREADS", str(threads))
        yield


@pytest.fixture(scope="session", autouse=True)
def control_c() -> None:
    """A shell that started these tests in the background has them, and all that they start, ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def vllms_process() -> Iterator[ProcessPoolExecutor]:
    """One for vLLM, which takes long to import and does not share one with Triton's interpreter."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


class CommandLine:
    """`python -m harness ...` in a process of its own."""

    folder = ROOT

    @staticmethod
    def command(*arguments: object) -> list[str]:
        return [sys.executable, "-m", "harness", *map(str, arguments)]

    @staticmethod
    def environment(**variables: object) -> dict[str, str]:
        return os.environ | {name: str(value) for name, value in variables.items()}

    def __call__(self, *arguments: object, **variables: object) -> subprocess.CompletedProcess[str]:
        """Runs it to its end; `variables` are added to its environment."""
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )


@pytest.fixture(scope="session")
def cli() -> CommandLine:
    return CommandLine()


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """What stand-ins of an engine are told to serve."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["DeepseekV3ForCausalLM"]}')
    return folder


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The same in this process, which starts sooner, for commands that neither measure nor bring plugins."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["harness", *map(str, arguments)])
        try:
            code = main()
        except SystemExit as end:
            code = end.code
        return subprocess.CompletedProcess(sys.argv, code or 0, *capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def printed_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name one Python, whichever the tests run with."""
    monkeypatch.setattr("harness.paths.this_python", lambda: "python")


@pytest.fixture(autouse=True)
def no_earlier_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in this process is compared with none of those that lie in `results/` here."""
    monkeypatch.setattr("harness.cli.run_display.changed_since", lambda folder: None)


@pytest.fixture(autouse=True)
def no_stored_choices(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Tests in this process choose configurations by rule, whatever `kernels/tuned` holds."""
    monkeypatch.setattr(tuning, "TUNED", tmp_path_factory.getbasetemp() / "no choices")
    tuning.stored_choices.cache_clear()
    yield
    tuning.stored_choices.cache_clear()
