"""Proves the measurement engine on this machine: equal pairs, a handicapped pair, the three cache modes.

    python -m tools.prove_engine --out results/MACHINE/engine
    python -m tools.prove_engine --out results/MACHINE/engine-loaded --loaded

With `--loaded`, beside a busy loop on each core: equal pairs, and pairs that differ by half, of calls that
are short and on one set of operands, as all else takes many times as long there.

Each is an ordinary run of the harness, kept in a folder beside the page that says what came of it. Takes as
long as it prints before it starts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from harness.plan.budget import parse_seconds
from harness.report.text import microseconds
from harness.results.journal import Journal
from harness.results.schema import CaseDone, Cell, Record, Run, Verdict
from tools.engines.busy_loops import busy_loops

ROOT = Path(__file__).resolve().parent.parent
OP, BASELINE = "block_scale_gemm", "torch.bf16"
AGAIN, HANDICAPPED, HALF_AGAIN = "control.again", "control.handicapped", "control.half_again"
SIZES = "n=2112 k=7168"  # DeepSeek-R1's qkv_a
FEW = "n=512 k=7168"  # its shared gate_up at TP8
# So many that a CPU computes, memory being what neighbours on a host share most; on a GPU so many that 2 %
# of a call is more than a device sleep costs.
ROWS = {
    "cpu": lambda i: 128 + 8 * i,
    "loaded": lambda i: 16 + 8 * i,
    "gpu": lambda i: 8192 + 128 * i,
}
# Weights of 15 MB in bf16: within a last level of 32 MiB, and far beyond it when they rotate.
STREAMED = "m=1 n=1024 k=7168"
SET_UP_S = 10  # a case, about


def harness_run(out: Path, device: str, *arguments: str) -> None:
    """A run with the control kernels; of one that is there, what is missing or failed. A case that was too
    disturbed to measure ends no proof: the page says so."""
    there = (out / "run.json").exists()
    resume = ["--resume", str(out), "--retry"] if there else ["--out", str(out), *arguments]
    environment = os.environ | {"KERNEL_BENCH_PLUGINS": str(ROOT / "tools" / "control_kernels.py")}
    # Dies with this process, and so lets go of the device.
    start = [sys.executable, "-m", "harness.cluster.command"]
    command = [*start, "-m", "harness", "run", "--op", OP, "--device", device, *resume]
    print(" ".join(command), file=sys.stderr, flush=True)
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, stdout=sys.stderr)
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)


def pairs(out: Path, contender: str, count: int, per_case: str, device: str, loaded: bool = False) -> None:
    size = ROWS["loaded" if loaded else "cpu" if device == "cpu" else "gpu"]
    rows = ",".join(str(size(i)) for i in range(count))
    budget_s = count * parse_seconds(per_case, "--per-case")
    harness_run(
        out,
        device,
        *("--impl", f"{BASELINE},{contender}", "--baseline", BASELINE, "--boundary", "core"),
        *("--case", f"m={rows} {FEW if loaded else SIZES}"),
        *("--budget", f"{budget_s:g}s", "--per-case", per_case),
        *(("--cache", "warm") if loaded else ()),
    )


def cache_modes(out: Path, per_case: str, device: str) -> None:
    for mode in ("serving", "cold", "warm"):
        harness_run(
            out.with_name(f"{out.name}-{mode}"),
            device,
            *("--impl", BASELINE, "--baseline", BASELINE, "--boundary", "core", "--case", STREAMED),
            *("--cache", mode, "--budget", per_case, "--per-case", per_case),
        )


def records(folder: Path) -> tuple[Run, list[Record]]:
    journal = Journal(folder)
    return journal.run(), [record for case in journal.finished().values() for record in case]


def minutes(out: Path) -> float:
    """Of measuring, set-up and checks, in all runs."""
    done = [r for run in out.iterdir() if run.is_dir() for r in records(run)[1] if isinstance(r, CaseDone)]
    return sum(d.measured_s + d.setup_s for d in done) / 60


def pairs_page(folder: Path, expected: str) -> Iterator[str]:
    run, found = records(folder)
    cells = [r for r in found if isinstance(r, Cell)]
    verdicts = [r for r in found if isinstance(r, Verdict) and r.about == "baseline"]
    twins = [r for r in found if isinstance(r, Verdict) and r.about == "A/A"]
    done = [r for r in found if isinstance(r, CaseDone)]
    counts = Counter(v.verdict for v in verdicts)
    failed = Counter(c.reason for c in cells if c.status != "ok")
    widths = sorted((v.high - v.low) / 2 / v.ratio for v in verdicts if v.ratio and v.low and v.high)
    yield f"## {expected}\n"
    yield f"[{folder.name}]({folder.name}): {len(run.cases)} cases, {len(verdicts)} verdicts.\n"
    yield "| verdict | pairs |\n| --- | ---: |"
    for word in ("faster", "slower", "same", "unclear"):
        yield f"| {word} | {counts[word]} |"
    yield ""
    for reason, n in failed.items():
        yield f"{n} cells without a time: {reason}\n"
    if widths:
        ratios = sorted(v.ratio for v in verdicts if v.ratio)
        yield (
            f"Ratios {ratios[0]:.4f} to {ratios[-1]:.4f}, median {ratios[len(ratios) // 2]:.4f}; half-widths "
            f"{widths[0]:.2%} to {widths[-1]:.2%}, median {widths[len(widths) // 2]:.2%}. The runs' own A/A "
            f"pairs: {dict(Counter(v.verdict for v in twins))}.\n"
        )
    dropped = sum(not r.counted for d in done for r in d.disturbed)
    disturbed = sum(r.counted for d in done for r in d.disturbed)
    yield (
        f"{sum(d.rounds for d in done)} rounds, {disturbed} of them disturbed, {dropped} more dropped; "
        f"{sum(d.measured_s for d in done):.0f} s of measuring, {sum(d.setup_s for d in done):.0f} s of "
        f"set-up and checks; ended by {dict(Counter(d.stopped for d in done))}.\n"
    )


def caches_page(folder: Path) -> Iterator[str]:
    yield "## Cache modes\n"
    yield f"{BASELINE} at {STREAMED}, whose weights are 14.7 MB in bf16: a call that reads memory.\n"
    yield "| mode | copies | bytes between | last level | time | interval | GB/s of bf16 weights |"
    yield "| --- | ---: | ---: | ---: | ---: | --- | ---: |"
    for mode in ("serving", "cold", "warm"):
        _, found = records(folder.with_name(f"{folder.name}-{mode}"))
        cell = next(r for r in found if isinstance(r, Cell) and r.impl == BASELINE)
        rate = f"{2 * 1024 * 7168 / cell.time_us / 1e3:.1f}" if cell.time_us else ""
        yield (
            f"| {mode} | {cell.rotation['copies']} | {cell.rotation['bytes'] / 1e6:.0f} MB | "
            f"{cell.rotation['last_level'] / (1 << 20):.0f} MiB | {microseconds(cell.time_us)} | "
            f"{microseconds(cell.low_us)}..{microseconds(cell.high_us)} | {rate} |"
        )
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--handicapped", type=int, default=20)
    parser.add_argument("--per-case", default="20s")
    parser.add_argument("--loaded", action="store_true", help="beside a busy loop on each core")
    parser.add_argument("--budget", help="as many pairs, two thirds of them equal, as fit that time")
    options = parser.parse_args()
    if options.budget:
        each_s = parse_seconds(options.per_case, "--per-case") + SET_UP_S
        # Three cases are those of the cache modes.
        fit = max(3, int(parse_seconds(options.budget, "--budget") // each_s) - 3 * (not options.loaded))
        options.pairs, options.handicapped = fit - fit // 3, fit // 3
    out, slower = options.out, HALF_AGAIN if options.loaded else HANDICAPPED
    cases = options.pairs + options.handicapped + 3 * (not options.loaded)
    longest_s = cases * (parse_seconds(options.per_case, "--per-case") + SET_UP_S)
    print(f"{cases} cases, about {longest_s / 60:.0f} minutes at most", file=sys.stderr)
    if not options.loaded:
        cache_modes(out / "cache", options.per_case, options.device)
    with busy_loops() if options.loaded else contextlib.nullcontext():
        how = options.per_case, options.device, options.loaded
        pairs(out / "handicapped", slower, options.handicapped, *how)
        pairs(out / "equal", AGAIN, options.pairs, *how)
    run, _ = records(out / "equal")
    share = "Half as long again" if options.loaded else "2 % slower"
    lines = [
        f"# The engine on this machine{', beside a busy loop on each core' if options.loaded else ''}\n",
        f"Printed by `python -m {' '.join(['tools.prove_engine', *sys.argv[1:]])}` on "
        f"{run.provenance['machine']['device']}, {run.provenance['machine']['threads']} threads, commit "
        f"{run.provenance['git']['commit'][:10]}; {minutes(out):.0f} minutes.\n",
        *pairs_page(out / "equal", "Equal pairs: `faster` and `slower` are false"),
        *pairs_page(out / "handicapped", f"{share}: `slower` is right, `faster` is wrong"),
        *(() if options.loaded else caches_page(out / "cache")),
    ]
    text = "\n".join(lines)
    (options.out / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
