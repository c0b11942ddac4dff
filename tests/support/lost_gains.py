"""Made-up servers whose gain from a faster kernel vanished for a known reason, as files that commands read.

Sizes are drawn from a seed: times of kernels, layers, the gain, noise of calls, of launches and of clients.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.serving.ab.plan import read_plan
from harness.serving.ab.record import Record
from shapes.case import Case
from tests.support import written_runs
from tests.support.serving_files import SGLANG_ROW
from tests.support.traces import NORM, REDUCE, Event, kernel, launch, op, span, text

SPLIT = "void flash_fwd_splitkv_mla_kernel<__nv_bfloat16>(x)"
COMBINE = "void flash_fwd_mla_combine_kernel<__nv_bfloat16>(x)"
NEW = "void quick::one_pass_mla_kernel<__nv_bfloat16>(x)"
MOE = "fused_moe_kernel"
GEMMS = ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 2112u, 7168u, 1u>",
         "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 7168u, 2048u, 1u>")  # fmt: skip
COPY = "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>(x)"
CACHE = "void vllm::concat_and_cache_mla_kernel<__nv_bfloat16>(x)"
VARIANT = "void vllm::rms_norm_kernel<c10::BFloat16, 16, 4>(x)"
PREFILL = "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<192>>(x)"
STEP = "execute_context_0(sq0sk0sqsq0sqsk0)_generation_{0}(sq{0}sk{1}sqsq{0}sqsk{1})"
"""vLLM's annotation of a step: requests, tokens in the cache."""


@dataclass
class Server:
    """One profiled server: us of each kernel of a layer, in order, and how its steps run.

    beside:  kernels that run on another stream while the one after them runs
    partial: kernels that stand for others in the first layers only: (how many layers, the kernels)
    graphs:  None: as the world draws it; operators: the trace has them; renamed: kernels of other names
    """

    layer: dict[str, float]
    beside: tuple[str, ...] = ()
    partial: tuple[int, dict[str, float]] = (0, {})
    wait_us: float = 400.0
    clock: float = 1.0
    batch: int = 16
    ctx: int = 4096
    graphs: bool | None = None
    operators: bool = False
    pauses: int = 1
    renamed: dict[str, str] = field(default_factory=dict)


@dataclass
class World:
    """draw: of everything; gain_us: of a call, alone; args: of the command, as files are written"""

    folder: Path
    draw: random.Random
    steps: int = 10
    layers: int = 12
    args: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        scale = self.draw.uniform(0.7, 1.6)
        self.graphs, self.variant = self.draw.random() < 0.5, self.draw.random() < 0.5
        self.layers = self.draw.choice([10, 12, 16])
        self.noise = self.draw.uniform(0.002, 0.015)  # of a call
        self.of_launch = self.draw.uniform(0.0, 0.003)  # of a kernel in a launch
        old = {SPLIT: 60.0, COMBINE: 8.0}
        around = {GEMMS[0]: 12.0, CACHE: 5.0, **old, GEMMS[1]: 10.0, NORM: 4.0, MOE: 52.0, REDUCE: 20.0}
        self.layer = {name: us * scale * self.draw.uniform(0.9, 1.1) for name, us in around.items()}
        self.old_us = self.layer[SPLIT] + self.layer[COMBINE]
        self.gain_us = self.old_us * self.draw.uniform(0.3, 0.55)
        self.new_us = self.old_us - self.gain_us

    @property
    def gain_ms(self) -> float:
        """Of a step."""
        return self.ms(self.gain_us)

    def ms(self, us: float) -> float:
        """Of a step, where a layer has so many us."""
        return us * self.layers / 1e3

    def server(self, layer: dict[str, float] | None = None, **changes: Any) -> Server:
        """By default without the change."""
        return Server(dict(layer or self.layer), **changes)

    def swapped(self, us: float | None = None) -> dict[str, float]:
        """The layer with the new kernel in place of the old ones."""
        layer = {NEW if name == SPLIT else name: us_ for name, us_ in self.layer.items() if name != COMBINE}
        return layer | {NEW: self.new_us if us is None else us}

    # Files

    def trace(self, name: str, server: Server) -> Path:
        """With what real traces have besides: a prefill, a pause, a step that the profiler cut off, launches
        by graphs or one by one, and after the change another variant of a kernel that does the same."""
        events: list[Event] = []
        self.now, self.call = 1.7e15, 0
        prefill = self.draw.randrange(1, self.steps - 1)
        pauses = self.draw.sample(range(1, self.steps), server.pauses)
        cut = self.draw.random() < 0.5
        factor = {name: 1 + self.draw.gauss(0, self.of_launch)
                  for name in {*server.layer, *server.partial[1]}}  # fmt: skip
        label = STEP.format(server.batch, server.batch * server.ctx)
        for step in range(self.steps):
            if step == prefill:
                events.append(span("execute_context_1(512)_generation_0(0)", self.now, 20))
                us = 900.0 * (1 + self.draw.gauss(0, 0.2))
                events += [
                    launch(self.call, self.now),
                    kernel(PREFILL, self.now + 1, us, correlation=self.call),
                ]
                self.now, self.call = self.now + us + 300, self.call + 1
            events.append(span(label, self.now, 20))
            graphs = self.graphs if server.graphs is None else server.graphs
            events += [op("torch::call", self.now, 1)] if server.operators else []
            if graphs:
                events.append(launch(self.call, self.now, name="cudaGraphLaunch"))
            for number in range(self.layers // 3 if cut and not step else self.layers):
                layer = server.partial[1] if number < server.partial[0] else server.layer
                us_of = {k: us * factor[k] * server.clock * (1 + self.draw.gauss(0, self.noise))
                         for k, us in layer.items()}  # fmt: skip
                events += self._layer(us_of, server, graphs, name)
            self.call += graphs
            self.now += server.wait_us * (1 + self.draw.gauss(0, self.noise))
            self.now += 5000 if step in pauses else 0
        path = self.folder / f"{name}.json"
        path.write_text(text(events))
        return path

    def _layer(self, us_of: dict[str, float], server: Server, graphs: bool, side: str) -> Iterator[Event]:
        for name, us in us_of.items():
            at = {"stream": 8} if name in server.beside else {}
            ran = VARIANT if name == NORM and side == "after" and self.variant else name
            if not graphs:
                yield launch(self.call, self.now)
            if server.operators and not graphs:
                yield op("torch::call", self.now - 0.5, 1)
            ran = server.renamed.get(ran, ran)
            yield kernel(ran, self.now + 1, us, correlation=self.call, **at)
            self.call += not graphs
            self.now += 0 if at else us + 1

    def traces(self, before: Server, after: Server) -> None:
        self.args += ["--trace", str(self.trace("before", before)), str(self.trace("after", after))]

    def run(
        self, op: str = "mla_decode", sizes: dict[str, Any] | None = None, kernel: str = MOE, **us: float
    ) -> None:
        """A run in which `old` and `new` were timed at these sizes; us: other times of a call;
        kernel: of both, if it is another op."""
        case = Case(op, sizes or {"batch": 16, "ctx": 4096}, "core", "ad hoc", 1.0)
        old, new = us.get("old", self.old_us), us.get("new", self.new_us)
        if op == "mla_decode":
            kernels = (
                [(name, self.layer[name]) for name in (SPLIT, COMBINE) if name in self.layer],
                [(NEW, new)],
            )
        else:
            kernels = [(kernel, old)], [(kernel, new)]
        cells = [
            written_runs.cell(case, name, time, 0.002 * time, kernels=[n for n, _ in ran],
                              kernel_us=[t for _, t in ran])
            for name, time, ran in (("old", old, kernels[0]), ("new", new, kernels[1]))
        ]  # fmt: skip
        written_runs.write(self.folder / "run", [*cells, written_runs.finished(case)], [case], baseline="old")
        self.args += ["--run", str(self.folder / "run")]

    def profiled(self, layer: dict[str, float] | None = None, **changes: Any) -> None:
        """The run, and traces of servers without the change and with it; layer, changes: of the latter."""
        self.run()
        self.traces(self.server(), self.server(layer, **changes))

    def log(self, *lines: str) -> None:
        (self.folder / "server.log").write_text("".join(f"{line}\n" for line in lines))
        self.args += ["--log", str(self.folder / "server.log")]

    def results(
        self, saved_ms: float, *, tpot: float = 0.0, pairs: int = 6, noise: float = 0.002, **after: Any
    ) -> None:
        """Of a client, in pairs; after: what else its files say with the change."""
        tpot = tpot or self.step_ms
        for side, value in (("before", tpot), ("after", tpot - saved_ms)):
            names = []
            for number in range(pairs):
                took = value * (1 + self.draw.gauss(0, noise))
                row = SGLANG_ROW | {"mean_tpot_ms": took} | (after if side == "after" else {})
                path = self.folder / f"{side}{number}.jsonl"
                path.write_text(json.dumps(row) + "\n")
                names.append(str(path))
            self.args += [f"--{side}", *names]

    def record(
        self,
        saved_ms: float,
        *,
        unread: Sequence[str] = (),
        info: Callable[[str], dict[str, Any]] = lambda name: {"backend": name},
        pairs: int = 6,
        noise: float = 0.002,
        log: str = "",
        predicted_ms: float | None = None,
        change: dict[str, Any] | None = None,
        tokens: tuple[int, int] = (1000, 1000),
        accepted: tuple[float, float] | None = None,
    ) -> None:
        """Of `serving ab`: unread: names; info: what the server of base or quick reports; change:
        of quick, by default a variable; tokens: of both."""
        quick: dict[str, Any] = {"env": {"QUICK": "1"}} if change is None else change
        client = "bench {url} {seed} {result} --max-concurrency 16"
        plan = read_plan(
            {"launch": "serve {port} {image}", "client": client, "arms": {"base": {}, "quick": quick}}, "test"
        )
        names = [{"name": name, "found": False, "says": f"nothing installed reads {name}"} for name in unread]
        saving = self.gain_ms if predicted_ms is None else predicted_ms
        low, high = sorted((-1.2 * saving, -0.8 * saving))
        prediction = {"quantity": "tpot", "unit": "ms", "method": "link", "change": -saving,
                      "low": low, "high": high, "before": self.step_ms}  # fmt: skip
        more = {"names": names, "predictions": [prediction]}
        record = Record.begin(self.folder / "ab", plan, more)
        for pair in range(pairs + 1):
            for side, arm in enumerate(("base", "quick")):
                about = {"pair": pair, "attempt": 0, "arm": arm}
                record.append("launch", **about)
                folder = record.launch_folder(about)
                folder.mkdir(parents=True)
                said = {"server_info": info(arm), "environment": quick.get("env", {}) if side else {}}
                (folder / "server.json").write_text(json.dumps(said))
                (folder / "server.log").write_text(log if side else "ready\n")
                tpot = (self.step_ms - side * saved_ms) * (1 + self.draw.gauss(0, noise))
                row = SGLANG_ROW | {"mean_tpot_ms": tpot, "total_output_tokens": 147 * tokens[side]}
                row |= {"accept_length": accepted[side]} if accepted else {}
                (folder / "result.json").write_text(json.dumps(row) + "\n")
                record.append("ready", **about, engine="sglang", version="1", owned=True, seconds=1)
                metrics = dict.fromkeys(("ttft", "ttft_median", "throughput")) | {"tpot": tpot}
                record.append("measured", **about, metrics=metrics, suspect={}, output_tokens=tokens[side])
            record.append("pair", pair=pair, attempt=0)
        self.args += ["--ab", str(self.folder / "ab")]

    @property
    def step_ms(self) -> float:
        """Of the server without the change: its kernels, the microsecond between them, and the wait."""
        return (sum(self.layer.values()) + len(self.layer)) * self.layers / 1e3 + 0.4
