"""Compares our engine with torch.utils.benchmark, pytest-benchmark, pyperf and do_bench's rule on this CPU.

    python -m tools.compare_engines --out results/MACHINE/engines

All rank the same callables, each ranking in a fresh process, in turn, quiet and beside a busy loop on each
core: how long until a verdict, how often equal callables are told apart, how often a difference of 2 % is
found. Started again, it makes the rankings that are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from harness import files
from harness.files import JsonObject
from harness.machine.cpu_threads import default_threads
from harness.machine.monitor.procfs import Counters
from harness.machine.provenance import surroundings
from harness.paths import ROOT
from harness.workers.environment import thread_environment, worker_environment
from kernels.platform import detect, version
from tools.engines.busy_loops import busy_loops
from tools.engines.callables import KERNELS
from tools.engines.journal import Journal, Ranked, Session, Settings
from tools.engines.one_ranking import ENGINES, LOADS
from tools.engines.others import Moment
from tools.engines.page import page

RANKINGS, QUICK_RANKINGS = 6, 1
# pyperf's take as long as those of all others together.
PYPERF_SHARE = 3
LONGEST_S = 1800.0
NEEDED = ("pyperf", "pytest_benchmark")
VERSIONS = ("torch", "triton", "pytest_benchmark", "pyperf", "pytest", "numpy", "scipy")


def schedule(rankings: int) -> Iterator[tuple[str, str, int]]:
    """(engine, load, ranking) of each, so that a machine's drift falls on all engines alike."""
    for ranking in range(rankings):
        for load in LOADS:
            for engine in ENGINES:
                if engine != "pyperf" or ranking < -(-rankings // PYPERF_SHARE):
                    yield engine, load, ranking


def session(settings: Settings) -> Session:
    facts = surroundings(detect("cpu"))
    named = ("device", "arch", "cpus", "device_memory", "last_level_cache", "os")
    versions = {name: release for name in VERSIONS if (release := version(name))}
    dirty = " (changed)" if facts["git"]["dirty"] else ""
    return Session(
        began=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        settings=settings,
        machine={name: facts["machine"][name] for name in named},
        versions={"Python": facts["versions"]["python"], **versions},
        commit=facts["git"]["commit"][:10] + dirty,
    )


def one_ranking(place: tuple[str, str, int], settings: Settings) -> Ranked:
    """Made by a process of its own, with whatever that starts; none of it outlives this call."""
    engine, load, ranking = place
    baseline = list(KERNELS)[ranking % len(KERNELS)]
    environment = worker_environment(thread_environment(detect("cpu"), settings.threads))
    counters = Counters()
    before = Moment.now(counters)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        answer = Path(folder, "answer.json")
        command = [sys.executable, "-m", "tools.engines.one_ranking", engine, baseline]
        command += ["--load", load, "--out", str(answer), *["--quick"] * settings.quick]
        if load == "busy":
            stack.enter_context(busy_loops())
        started = time.perf_counter()
        error = run_alone(command, environment)
        wall_s = time.perf_counter() - started
        found: JsonObject = {} if error else json.loads(answer.read_text())
    others = before.others_until(Moment.now(counters))
    return Ranked(engine, load, ranking, baseline, wall_s, others, error=error, **found)


def run_alone(command: list[str], environment: dict[str, str]) -> str:
    """Runs a command with a process group of its own, which is killed if we are to end. Returns the last
    line that it complained with, or nothing."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        _, complaint = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return f"took more than {LONGEST_S:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not process.returncode:
        return ""
    return next(iter(complaint.strip().splitlines()[-1:]), f"ended with {process.returncode}")


def measure(journal: Journal, settings: Settings, rankings: int) -> None:
    if absent := [name for name in NEEDED if not version(name)]:
        sys.exit(f"{' and '.join(absent)} not here: python tools/set_up.py --extra peers --extra test")
    sessions, ranked = journal.read()
    if any(earlier.settings != settings for earlier in sessions):
        sys.exit(f"{journal.lines.path} has rankings with other settings: choose another --out")
    made = {r.place for r in ranked if not r.error}
    missing = [place for place in schedule(rankings) if place not in made]
    if not missing:
        return
    journal.append(session(settings))
    for number, place in enumerate(missing, 1):
        ranked_now = one_ranking(place, settings)
        journal.append(ranked_now)
        outcome = ranked_now.error or ", ".join(f"{n} {v}" for n, v in ranked_now.verdicts.items())
        print(
            f"{number} of {len(missing)}: {place[0]}, {place[1]}, {ranked_now.wall_s:.1f} s: {outcome}",
            file=sys.stderr,
            flush=True,
        )


def render(folder: Path, command: str) -> str:
    sessions, ranked = Journal(folder).read()
    if not ranked:
        sys.exit(f"there are no rankings in {folder}")
    text = page(command, sessions, ranked)
    files.replace(folder / "README.md", text)
    return text


def end(number: int, frame: FrameType | None) -> None:
    """By an exception, so that whatever was started is stopped on the way."""
    sys.exit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rankings", type=int, help=f"by each engine under each load ({RANKINGS})")
    parser.add_argument("--threads", type=int, default=min(2, default_threads()))
    parser.add_argument("--quick", action="store_true", help="tries the program, in about two minutes")
    parser.add_argument("--render", action="store_true", help="makes the page anew, and measures nothing")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    rankings = options.rankings or (QUICK_RANKINGS if options.quick else RANKINGS)
    if not options.render:
        measure(Journal(options.out), Settings(options.threads, options.quick), rankings)
    shown = [argument for argument in sys.argv[1:] if argument != "--render"]
    print(render(options.out, shlex.join(["python", "-m", "tools.compare_engines", *shown])))


if __name__ == "__main__":
    main()
