"""A small experiment, and doubles of the bench and the engine that it asks."""

import contextlib
import itertools
from dataclasses import replace
from datetime import datetime, timedelta, timezone

from harness.serving.experiment.run import LEDGER, Conduct
from harness.serving.experiment.schedule import DECODE
from harness.serving.experiment.schema import LiveRun, ObservedArm, Paired, Served
from harness.serving.experiment.spec import Experiment, read_experiment
from harness.serving.experiment.stages import Stages
from harness.serving.ledger.ledger import read, rows
from harness.serving.replay.schema import Replay, ReplayArm, Timed
from shapes.models import model

R1 = model("deepseek-r1")
RANK = replace(R1, name="small", num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=8, n_group=8)
TEXT = """\
name = "tiny"
[load]
input_len = 32
output_len = 11
prompts = 4
concurrency = 4
pairs = 3
[replay]
routings = 1
[replay.base]
block_scale_gemm = "vllm.amx"
fused_moe = "vllm.amx"
mla_decode = "vllm.vec"
mha_prefill = "torch.naive"
[[swaps]]
name = "linears"
op = "block_scale_gemm"
swap = ["block_scale_gemm=vllm.onednn"]
replay = { block_scale_gemm = "vllm.onednn", "block_scale_gemm:kv_b" = "vllm.amx" }
[[swaps]]
name = "mla"
op = "mla_decode"
swap = ["mla_decode=torch.naive"]
replay = { mla_decode = "vllm.amx" }
"""
OP = {"linears": "block_scale_gemm", "mla": "mla_decode"}
STEP_MS = {"linears": {DECODE: 8.0, 1: 40.0, 3: 100.0}, "mla": {DECODE: 1.0, 1: 0.0, 3: 0.0}}


def experiment(tmp_path, text=TEXT) -> Experiment:
    path = tmp_path / "tiny.toml"
    path.write_text(text)
    return read_experiment(str(path))


class Killed(BaseException):
    """As control-C or the end of the process: nothing may catch it."""


class Doubles:
    """Bench and engine that know what each swap does, count what they are asked, and may be killed."""

    def __init__(self, folder, off=0.0, clock=None, kill_at=None):
        self.folder, self.off, self.asked, self.kill_at, self.opened = folder, off, [], kill_at, 0
        self.clock = clock or (lambda: datetime.now(timezone.utc) + timedelta(seconds=1))

    def _ask(self, what):
        self.asked.append(what)
        if len(self.asked) == self.kill_at:
            raise Killed(what)

    @contextlib.contextmanager
    def live(self):
        self.opened += 1
        yield self

    def replay(self, step, name, base, chosen):
        kind = DECODE if step.phase == "decode" else len(step.contexts)
        self._ask(f"replay {name} {kind}")
        change = STEP_MS[name][kind] + self.off
        samples = tuple(
            {"block": b, "round": r, "base": 0.1, name: 0.1 + (change + 0.01 * (b + r % 2)) / 1e3}
            for b, r in itertools.product(range(2), range(3))
        )
        took = {OP[name]: 5.0 + change}
        swapped = ReplayArm(chosen=dict(chosen), cold=change, warm=3 * change, classes=took)
        arms = {"base": ReplayArm(chosen=dict(base), classes={OP[name]: 5.0, "copy": 1.0}), name: swapped}
        return Replay(created="", command=(), step={}, launch="eager", threads=1, base="base", arms=arms,
                      samples=samples)  # fmt: skip

    def serving(self, step, base, chosen, budget_s, folder):
        self._ask("serving")
        return Served(change=Timed(ms=7.0, low=6.0, high=8.0))

    def look(self):
        self._ask("look base")
        patterns = (2, 2), (1, 3), (1, 3)
        return ObservedArm(runs=tuple(self._run("base", n, each) for n, each in enumerate(patterns)))

    def trace(self, swap, name):
        """The base's when a decode step took twice as long as in the swapped arm's."""
        self._ask(f"trace {name}")
        classes = {"block_scale_gemm": 5.0, "copy": 4.0, "mla_decode": 5.0, "fused_moe": 3.0}
        prefill = {"block_scale_gemm": 64.0, "fused_moe": 77.0}
        if swap is None:
            classes = {"block_scale_gemm": 8.0, "copy": 2.0, "mla_decode": 10.0, "fused_moe": 6.0}
            prefill = {"block_scale_gemm": 40.0, "fused_moe": 70.0}
        return ObservedArm(trace=f"{name}.gz", classes=classes, prefill=prefill)

    def rest(self):
        pass

    def pairs(self, swap, pattern, predicted):
        self._ask(f"pairs {swap.name}")
        self.predicted = predicted
        runs = [(self._run("base", n, pattern), self._run(swap.name, n, pattern)) for n in range(3)]
        return Paired(begun=self.clock().isoformat(timespec="milliseconds"), pairs=tuple(runs))

    def _run(self, arm, number, pattern):
        step = STEP_MS.get(arm, {})
        decode = 60.0 + step.get(DECODE, 0.0) + 0.05 * number + (0.01 * number**2 if arm != "base" else 0.0)
        first, second = (1000.0 * size + step.get(size, 0.0) for size in pattern)
        return LiveRun(
            started="", itl=decode, ttft=first + 0.75 * second, tpot=decode + (second - decode) / 40,
            pattern=tuple(pattern), prefills=(first, second), kv_len=37.0,
        )  # fmt: skip


def conduct(tmp_path, doubles, text=TEXT, resume=False):
    made, folder = experiment(tmp_path, text), tmp_path / "out"
    return Conduct(made, RANK, folder, Stages.begin(folder, made, resume), doubles, doubles.live)


def ledger(tmp_path):
    return {row.id: row for row in rows(read(tmp_path / "out" / LEDGER))}
