"""Tables of kernel times, in the files and columns of NVIDIA's AIConfigurator.

Its `latency` is in milliseconds; here all times are microseconds. What its figures hold, from its collectors
(ai-dynamo/aiconfigurator, collector/): GEMM times hold the quantisation of the activations; MoE times the
sorting by expert, both products, the activation and the weighted sum, not the choice of experts. Prefill
attention is plain (192 wide, values 128), but SGLang's on Hopper is timed **absorbed** (576/512 wide, one KV
head), which no engine runs so. What attention's times hold beside attention is in HELD.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.paths import PUBLISHED
from harness.serving.link.times.interpolation import BEYOND, Surface, TimeEstimate
from harness.serving.link.times.table_files import Row, number, read_rows, table_files
from harness.serving.names import data_sheet, engine_name, hardware_name

TABLES = PUBLISHED / "kernel-tables"
FILES: Mapping[str, tuple[str, ...]] = {
    "gemm_perf": ("gemm_dtype", "m", "n", "k"),
    "moe_perf": ("moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size",
                 "moe_ep_size", "distribution"),
    "generation_mla_perf": ("kv_cache_dtype", "num_heads", "batch_size", "isl", "step"),
    "context_mla_perf": ("num_heads", "batch_size", "isl"),
    "mla_generation_module_perf": ("kv_cache_dtype", "gemm_type", "num_heads", "batch_size", "isl", "step"),
    "mla_context_module_perf": ("kv_cache_dtype", "gemm_type", "num_heads", "batch_size", "isl"),
    "mla_bmm_perf": ("op_name", "bmm_dtype", "num_tokens", "num_heads"),
    "custom_allreduce_perf": ("num_gpus", "message_size"),
}  # fmt: skip
COMMON = ("framework", "version", "device", "latency")
OPTIONAL = ("kernel_source", "backend", "mla_dtype", "kv_cache_dtype")
EXPERTS = {"moe_dtype": "fp8_block", "hidden_size": 7168, "inter_size": 2048, "topk": 8, "num_experts": 256}
"""DeepSeek-R1's."""
SIXTEEN_BITS = ("bfloat16", "float16")  # one is as fast as the other; tables of 2025 say float16
WANTED: Mapping[str, Mapping[str, Collection[Any]]] = {
    "gemm_perf": {"gemm_dtype": ("fp8_block", *SIXTEEN_BITS)},
    "moe_perf": {name: (value,) for name, value in EXPERTS.items()},
    "context_mla_perf": {"step": (0,)},
    "mla_generation_module_perf": {"gemm_type": ("fp8_block",), "mla_dtype": SIXTEEN_BITS},
    "mla_context_module_perf": {"gemm_type": ("fp8_block",), "mla_dtype": SIXTEEN_BITS, "step": (0,)},
}
"""Rows of other models and dtypes are left out, and of prompts behind a cached prefix."""
HELD: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("generation_mla_perf", "vllm"): {"w_uk": "", "w_uv": ""},
    ("context_mla_perf", "vllm"): {"kv_b": "bfloat16"},
    ("mla_generation_module_perf", ""): {
        "qkv_a": "fp8_block", "q_b": "fp8_block", "w_uk": "", "w_uv": "", "o_proj": "fp8_block", "glue": ""
    },
    ("mla_context_module_perf", ""): {
        "qkv_a": "fp8_block", "q_b": "fp8_block", "kv_b": "fp8_block", "o_proj": "fp8_block", "glue": ""
    },
}  # fmt: skip
"""(file, engine or any) -> what its times hold beside attention, and of which dtype where it is a GEMM:
vLLM's layer was timed whole (collector/vllm/collect_mla.py, with a kv_b of bf16), and modules are."""
ATTENTION = {"decode": ("generation_mla_perf", "mla_generation_module_perf"),
             "prefill": ("context_mla_perf", "mla_context_module_perf")}  # fmt: skip
"""By phase, the files that have attention's time; the first that is there counts."""
ABSORBED = "flash_attention"  # `kernel_source` of SGLang's prefill attention where it was timed absorbed
SIZES = ("m", "n", "k", "num_tokens", "batch_size", "isl", "message_size")  # some tables have rows of none
SAME_CHIP = {"gb200": "b200", "gb300": "b300"}  # tables of one stand in sets of the other
# FP8 products this much slower than bf16's of the same sizes hold the host's launches: AIConfigurator's for
# vLLM 0.24 are 7 to 35 times slower, those for other engines 0.8 to 3.4 times.
HOST_BOUND, AT_ROWS = 4.0, 64
ONE_SWITCH = {"gb200": 72, "gb300": 72}  # GPUs; tables time all-reduces over those of one tray
# An all-reduce over more GPUs of a switch takes as much longer as their ratio to this power: from 4 to 8 GPUs
# of an H200 or B200 1.06 to 1.45 times, by SGLang 0.5.9's tables.
MORE_GPUS = 0.25
PLAUSIBLE = (3.0, 20_000.0)  # TFLOPS of a large product: outside, the unit is another
SLOWEST_MOE = 10.0  # times what reading the weights takes: of AIConfigurator's sets one is above 6.3


class MissingTable(UsageError):
    """A time that is in no table here."""


@dataclass(frozen=True)
class Tables:
    """rows of each file by its stem, of one device and one engine's version.

    notes: what differs from that, one line each
    """

    device: str
    engine: str
    version: str
    where: str
    rows: Mapping[str, list[Row]]
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    surfaces: dict[Any, Surface] = field(init=False, default_factory=dict, compare=False, repr=False)

    def gemm(self, kind: str, m: float, n: int, k: int) -> TimeEstimate:
        """kind: fp8_block or bfloat16; y [m, n] = x [m, k] W^T."""
        name = f"GEMM {kind}"
        return self._surface("gemm_perf", name, {"gemm_dtype": kind}, ("n", "k", "m")).at(n, k, m)

    def moe(self, tokens: float, tp: int, ep: int, distribution: str) -> TimeEstimate:
        """DeepSeek-R1's 256 experts, top 8, without the shared one; tokens are those of all ranks."""
        where = EXPERTS | {"moe_tp_size": tp, "moe_ep_size": ep, "distribution": distribution}
        name = f"fused MoE at tp {tp}, ep {ep}, {distribution}"
        return self._surface("moe_perf", name, where, ("num_experts", "num_tokens")).at(256, tokens)

    def mla_decode(self, batch: float, context: float, heads: int, kv: str) -> TimeEstimate:
        """With what `held("decode")` names. context: cached tokens of each sequence, that of this step
        included."""
        where = {"kv_cache_dtype": kv, "num_heads": heads}
        name = f"MLA decode with {heads} heads, {kv} cache"
        file = self._attention("decode")
        return self._surface(file, name, where, ("batch_size", "context")).at(batch, context)

    def mla_prefill(self, batch: float, length: float, heads: int, kv: str) -> TimeEstimate:
        """With what `held("prefill")` names, absorbed where `prefill_is_absorbed`."""
        file = self._attention("prefill")
        where: dict[str, Any] = {"num_heads": heads}
        # A prompt reads no cache: times with another one stand where that one was not timed.
        if kv in {row["kv_cache_dtype"] for row in self.rows.get(file, ())}:
            where["kv_cache_dtype"] = kv
        name = f"MLA prefill with {heads} heads"
        return self._surface(file, name, where, ("batch_size", "isl")).at(batch, length)

    @property
    def prefill_is_absorbed(self) -> bool:
        rows = self.rows.get(self._attention("prefill"), ())
        sources = {row["kernel_source"] for row in rows}
        return engine_name(self.engine) == "sglang" and sources <= {ABSORBED, ""}

    def held(self, phase: str) -> Mapping[str, str]:
        """What attention's times hold beside attention; see HELD."""
        file = self._attention(phase)
        return HELD.get((file, engine_name(self.engine))) or HELD.get((file, ""), {})

    def _attention(self, phase: str) -> str:
        files = ATTENTION[phase]
        return next((file for file in files if self.rows.get(file)), files[0])

    def absorbed_bmm(self, which: str, tokens: float, heads: int) -> TimeEstimate:
        """which: mla_gen_pre (w_uk) or mla_gen_post (w_uv)."""
        where = {"op_name": which, "bmm_dtype": "bfloat16", "num_heads": heads}
        return self._surface("mla_bmm_perf", which, where, ("num_heads", "num_tokens")).at(heads, tokens)

    def all_reduce(self, elements: float, gpus: int) -> TimeEstimate:
        """Of bf16 elements, in a graph where the table tells (TensorRT-LLM's does not): device time, without
        the host's launch. Over more GPUs of one switch than were timed, as `timed_gpus` has it.

        The table's `message_size` counts elements: were it bytes, its largest would run at half of what
        NVLink gives.
        """
        if (timed := self.timed_gpus(gpus)) != gpus:
            estimate, ratio = self.all_reduce(elements, timed), gpus / timed
            distance = math.hypot(estimate.distance, BEYOND * math.log(ratio))
            return TimeEstimate(estimate.us * ratio**MORE_GPUS, estimate.noise, distance)
        backends = {row["backend"] for row in self.rows.get("custom_allreduce_perf", [])}
        in_graphs = next((backend for backend in sorted(backends) if backend.endswith("_graph")), None)
        where = {"num_gpus": gpus} | ({} if in_graphs is None else {"backend": in_graphs})
        name = f"all-reduce over {gpus} GPUs"
        return self._surface("custom_allreduce_perf", name, where, ("num_gpus", "message_size")).at(
            gpus, elements
        )

    @property
    def between_us(self) -> tuple[float, float]:
        """What a step takes beside its kernels and the glue that is assumed of all machines, and each of its
        tokens."""
        return 0.0, 0.0

    def timed_gpus(self, gpus: int) -> int:
        """The GPUs whose all-reduce stands for that of so many: the most that were timed of a switch."""
        timed = {int(row["num_gpus"]) for row in self.rows.get("custom_allreduce_perf", ())}
        fewer = [count for count in timed if count < gpus]
        switched = gpus <= ONE_SWITCH.get(hardware_name(self.device), 0)
        return max(fewer) if switched and gpus not in timed and fewer else gpus

    def distributions(self) -> list[str]:
        """The least skewed first: balanced, then power laws by their exponent."""
        return sorted({row["distribution"] for row in self.rows.get("moe_perf", [])})

    def _surface(self, file: str, name: str, where: Mapping[str, Any], axes: tuple[str, ...]) -> Surface:
        key = (file, tuple(where.items()), axes)
        if key not in self.surfaces:
            matching = [row for row in self.rows.get(file, []) if all(row[k] == v for k, v in where.items())]
            if not matching:
                raise MissingTable(
                    f"no time of {name} in {self.where}; wanted: rows of {file} with "
                    + " ".join(f"{k}={v}" for k, v in where.items())
                )
            # Where a case was timed more than once, the median of its times.
            times: dict[tuple[float, ...], list[float]] = {}
            for row in matching:
                times.setdefault(tuple(row[a] for a in axes), []).append(row["us"])
            self.surfaces[key] = Surface([(sizes, sorted(us)[len(us) // 2]) for sizes, us in times.items()])
        return self.surfaces[key]


@functools.cache
def bundled() -> dict[tuple[str, str], Path]:
    """(hardware, engine) to the folder of its tables; folders are named hardware-engine-version."""
    folders = {}
    for folder in sorted(TABLES.glob("*-*-*")):
        hardware, engine, _ = folder.name.split("-", 2)
        folders[(hardware, engine)] = folder
    return folders


@functools.cache
def read_tables(folder: Path) -> Tables:
    """The set of tables in a folder; see table_files.py. Raises UsageError with one line where it has none or
    one cannot be read."""
    rows: dict[str, list[Row]] = {}
    for stem, path in table_files(folder, FILES).items():
        columns, wanted = FILES[stem], WANTED.get(stem, {})
        every = (*columns, *COMMON, *OPTIONAL, *wanted)
        read = (_row(path, line, row, columns) for line, row in read_rows(path, every, wanted))
        rows[stem] = [row for row in read if all(row[size] > 0 for size in SIZES if size in row)]
    where = folder.name if folder.parent == TABLES else str(folder)
    tables = _labelled(folder, where, {stem: of_file for stem, of_file in rows.items() if of_file})
    _plausible(folder, tables)
    return _on_the_device(tables)


def _on_the_device(tables: Tables) -> Tables:
    """With bf16's times in place of those of FP8 products that hold the host's launches."""
    by_size: dict[str, dict[tuple[float, ...], float]] = {"fp8_block": {}, "bfloat16": {}}
    for row in tables.rows.get("gemm_perf", ()):
        by_size[row["gemm_dtype"]][row["m"], row["n"], row["k"]] = row["us"]
    both = {size: us / by_size["bfloat16"][size] for size, us in by_size["fp8_block"].items()
            if size in by_size["bfloat16"]}  # fmt: skip
    at_rows = sorted(ratio for (m, _, _), ratio in both.items() if m == AT_ROWS)
    if not at_rows or (slower := at_rows[len(at_rows) // 2]) < HOST_BOUND:
        return tables
    gemms = []
    for row in tables.rows["gemm_perf"]:
        size = row["m"], row["n"], row["k"]
        slow = row["gemm_dtype"] == "fp8_block" and both.get(size, 0.0) > HOST_BOUND / 2
        gemms.append(row | {"us": by_size["bfloat16"][size]} if slow else row)
    note = (
        f"FP8 products of {AT_ROWS} rows in {tables.where} take {slower:.0f} times bf16's, which is the "
        "host's time: where they are that slow, bf16's times stand for them"
    )
    return replace(tables, rows={**tables.rows, "gemm_perf": gemms}, notes=(*tables.notes, note))


def _labelled(folder: Path, where: str, rows: Mapping[str, list[Row]]) -> Tables:
    if not rows:
        raise UsageError(
            f"no times of DeepSeek-R1 in {folder}: FP8 block-scale products and {EXPERTS['num_experts']} "
            f"experts of {EXPERTS['hidden_size']} x {EXPERTS['inter_size']}"
        )
    labels = {
        stem: Counter((row["device"], row["framework"], row["version"]) for row in of_file)
        for stem, of_file in rows.items()
    }
    # TensorRT-LLM's all-reduce stands in some sets of other engines.
    own = [label for stem, of_file in labels.items() if stem != "custom_allreduce_perf" for label in of_file]
    every = {label for of_file in labels.values() for label in of_file}
    chips = {SAME_CHIP.get(name, name) for name in (hardware_name(device) for device, _, _ in every)}
    if len(chips) > 1 or len({engine_name(e) for _, e, _ in own}) > 1:
        several = "; ".join(" ".join(label) for label in sorted(every))
        raise UsageError(f"tables in {folder} are of more than one machine or engine: {several}")
    device, engine, _ = most = Counter(own or sorted(every)).most_common(1)[0][0]
    versions = {version for _, _, version in own}
    version = folder.name if folder.name in versions else most[2]
    notes = []
    for stem, of_file in labels.items():
        others = {
            label
            for label in of_file
            if (label[0], engine_name(label[1]), label[2]) != (device, engine_name(engine), version)
        }
        if others:
            called = ", ".join(" ".join(other) for other in sorted(others))
            notes.append(f"{stem} in {where} is of {called}, the set of {device} {engine} {version}")
    return Tables(device, engine, version, where, rows, notes=tuple(notes))


def _row(path: Path, line: int, raw: Mapping[str, Any], columns: tuple[str, ...]) -> Row:
    row: Row = {}
    for name in (*columns, *COMMON):
        if raw.get(name) in (None, ""):
            raise UsageError(f"cannot read {path}, line {line}: no column {name!r}")
        row[name] = number(raw[name])
    if not isinstance(row["latency"], float) or not 0 < row["latency"] < 1e6:
        raise UsageError(
            f"cannot read {path}, line {line}: latency {raw['latency']!r} is no time in milliseconds"
        )
    for name in (*COMMON[:-1], *OPTIONAL):
        row[name] = str(raw.get(name) or "")
    for name in row:
        if row[name] == "float16" and name.endswith("dtype"):
            row[name] = "bfloat16"
    row["us"] = row.pop("latency") * 1e3
    if "step" in row:
        row["context"] = row["isl"] + row["step"]
    return row


def _plausible(folder: Path, tables: Tables) -> None:
    """Raises UsageError where a large product or the experts' weights would take what no machine takes."""
    gemms = tables.rows.get("gemm_perf", ())
    for row in (row for row in gemms if row["m"] >= 4096 and row["n"] * row["k"] >= 2**20):
        tflops = 2 * row["m"] * row["n"] * row["k"] / row["us"] / 1e6
        if not PLAUSIBLE[0] < tflops < PLAUSIBLE[1]:
            raise UsageError(
                f"{folder}: GEMM m={row['m']:g} n={row['n']:g} k={row['k']:g} would run at {tflops:.3g} "
                "TFLOPS; latency is to be in milliseconds"
            )
    machine = hardware_name(tables.device)
    tbps = data_sheet(machine).get("tbps", 0.0)
    for row in (row for row in tables.rows.get("moe_perf", ()) if tbps and row["num_tokens"] == AT_ROWS):
        read = 3 * row["hidden_size"] * row["inter_size"] / row["moe_tp_size"]
        touched = min(AT_ROWS * row["topk"], row["num_experts"]) / row["moe_ep_size"]
        if (times := row["us"] / (touched * read / tbps / 1e6)) > SLOWEST_MOE and row["moe_ep_size"] == 1:
            raise UsageError(
                f"{folder}: fused MoE of {AT_ROWS} tokens takes {row['us']:.0f} us at tp "
                f"{row['moe_tp_size']:g}, {times:.0f} times what reading the experts takes on {machine}; "
                "these are not the times of a kernel that anybody runs"
            )
