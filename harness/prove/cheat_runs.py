"""Cheats in real runs: who gets a time, and who is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import kernels
from harness.errors import HarnessError
from harness.paths import ROOT

CHEATED = {
    "block_scale_gemm": {"small": "m=16 n=512 k=512", "middle": "m=64 n=2112 k=7168"},
    "fused_moe": {
        "small": "tokens=16 experts=16 topk=4 hidden=256 inter=128",
        "middle": "tokens=32 experts=16 topk=4 hidden=1024 inter=512",
    },
    "mha_prefill": {"small": "batch=2 new=60..100 heads=4", "middle": "batch=2 new=300..500 heads=8"},
    "mla_decode": {"small": "batch=2 ctx=40..150 page=16", "middle": "batch=8 ctx=500..1500 page=64"},
}
"""The cases of each op on which cheats run."""


@dataclass(frozen=True)
class CheatRow:
    """A row of a real run, of a cheat or of the right kernel that all cheats are made of.

    status, reason: as of a cell
    """

    op: str
    name: str
    size: str
    status: str
    reason: str

    @property
    def cheats(self) -> bool:
        return self.name.startswith("cheat.")

    @property
    def as_it_should(self) -> bool:
        return self.status == ("wrong" if self.cheats else "ok")


def cheat(
    op: str,
    on_row: Callable[[CheatRow], None],
    device: str | None = None,
    size: str = "",
    budget: str = "20s",
) -> None:
    """Runs the cheats of harness/prove/cheats.py beside the right kernel, as a user would run a plug-in;
    gives their rows. size: the only one. Raises HarnessError where a run gives none."""
    from harness.prove.cheats import HONEST

    for name, case in CHEATED[op].items():
        if size and name != size:
            continue
        with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as folder:
            command = ["--op", op, "--case", case, "--impl", f"cheat.*,{HONEST[op]}", "--budget", budget]
            command += ["--device", device] if device else []
            command += ["--out", f"{folder}/run", "--json", "-", "--quiet"]
            done = subprocess.run(
                [sys.executable, "-m", "harness", "run", *command],
                env={**os.environ, kernels.PLUGINS: str(Path(__file__).with_name("cheats.py"))},
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
        if not done.stdout:
            raise HarnessError(done.stderr.strip().splitlines()[-1].removeprefix("error: "))
        for cell in json.loads(done.stdout)["cells"]:
            on_row(CheatRow(op, cell["impl"], name, cell["status"], cell["reason"]))
