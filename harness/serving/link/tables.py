"""Tables of kernel times, in the files and columns of NVIDIA's AIConfigurator.

Its `latency` is in milliseconds; here all times are microseconds. What its figures hold, from its collectors
(ai-dynamo/aiconfigurator, collector/sglang): GEMM times hold the quantisation of the activations; MoE times
the sorting by expert, both products, the activation and the weighted sum, not the choice of experts; prefill
attention on Hopper is timed **absorbed** (576/512 wide, one KV head), which no engine runs so.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.paths import PUBLISHED
from harness.serving.link.interpolation import Surface, TimeEstimate
from harness.serving.names import engine_name

TABLES = PUBLISHED / "kernel-tables"
FILES: Mapping[str, tuple[str, ...]] = {
    "gemm_perf": ("gemm_dtype", "m", "n", "k"),
    "moe_perf": ("moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size",
                 "moe_ep_size", "distribution"),
    "generation_mla_perf": ("kv_cache_dtype", "num_heads", "batch_size", "isl", "step"),
    "context_mla_perf": ("num_heads", "batch_size", "isl"),
    "mla_bmm_perf": ("op_name", "bmm_dtype", "num_tokens", "num_heads"),
    "custom_allreduce_perf": ("num_gpus", "message_size"),
}  # fmt: skip
COMMON = ("framework", "version", "device", "latency")
OPTIONAL = ("kernel_source", "backend")
SUFFIXES = (".csv", ".txt", ".parquet")
PLAUSIBLE = (3.0, 20_000.0)  # TFLOPS of a large product: outside, the unit is another


class MissingTable(UsageError):
    """A time that is in no table here."""


@dataclass(frozen=True)
class Tables:
    """rows of each file by its stem, of one device and one engine's version."""

    device: str
    engine: str
    version: str
    where: str
    rows: Mapping[str, list[dict[str, Any]]]

    def gemm(self, kind: str, m: float, n: int, k: int) -> TimeEstimate:
        """kind: fp8_block or bfloat16; y [m, n] = x [m, k] W^T."""
        name = f"GEMM {kind}"
        return self._surface("gemm_perf", name, {"gemm_dtype": kind}, ("n", "k", "m")).at(n, k, m)

    def moe(self, tokens: float, tp: int, ep: int, distribution: str) -> TimeEstimate:
        """DeepSeek-R1's 256 experts, top 8, without the shared one; tokens are those of all ranks."""
        where = {"moe_dtype": "fp8_block", "hidden_size": 7168, "inter_size": 2048, "topk": 8,
                 "num_experts": 256, "moe_tp_size": tp, "moe_ep_size": ep}  # fmt: skip
        name = f"fused MoE at tp {tp}, ep {ep}, {distribution}"
        whole = where | {"distribution": distribution}
        return self._surface("moe_perf", name, whole, ("num_experts", "num_tokens")).at(256, tokens)

    def mla_decode(self, batch: float, context: float, heads: int, kv: str) -> TimeEstimate:
        """context: cached tokens of each sequence, that of this step included."""
        where = {"kv_cache_dtype": kv, "num_heads": heads}
        name = f"MLA decode with {heads} heads, {kv} cache"
        return self._surface("generation_mla_perf", name, where, ("batch_size", "context")).at(batch, context)

    def absorbed_prefill(self, batch: float, length: float, heads: int) -> TimeEstimate:
        name = f"MLA prefill with {heads} heads"
        where = {"num_heads": heads}
        return self._surface("context_mla_perf", name, where, ("batch_size", "isl")).at(batch, length)

    def absorbed_bmm(self, which: str, tokens: float, heads: int) -> TimeEstimate:
        """which: mla_gen_pre (w_uk) or mla_gen_post (w_uv)."""
        where = {"op_name": which, "bmm_dtype": "bfloat16", "num_heads": heads}
        return self._surface("mla_bmm_perf", which, where, ("num_heads", "num_tokens")).at(heads, tokens)

    def all_reduce(self, elements: float, gpus: int) -> TimeEstimate:
        """Of bf16 elements, in a graph where the table tells (TensorRT-LLM's does not): device time, without
        the host's launch.

        The table's `message_size` counts elements: were it bytes, its largest would run at half of what
        NVLink gives.
        """
        backends = {row["backend"] for row in self.rows.get("custom_allreduce_perf", [])}
        in_graphs = next((backend for backend in sorted(backends) if backend.endswith("_graph")), None)
        where = {"num_gpus": gpus} | ({} if in_graphs is None else {"backend": in_graphs})
        name = f"all-reduce over {gpus} GPUs"
        return self._surface("custom_allreduce_perf", name, where, ("num_gpus", "message_size")).at(
            gpus, elements
        )

    def distributions(self) -> list[str]:
        return sorted({row["distribution"] for row in self.rows.get("moe_perf", [])})

    def _surface(self, file: str, name: str, where: Mapping[str, Any], axes: tuple[str, ...]) -> Surface:
        key = (file, tuple(where.items()), axes)
        if key not in (kept := _kept(self.where, self.device)):
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
            kept[key] = Surface([(sizes, sorted(us)[len(us) // 2]) for sizes, us in times.items()])
        return kept[key]


@functools.cache
def _kept(where: str, device: str) -> dict[Any, Surface]:
    """The surfaces made of one set of tables."""
    return {}


@functools.cache
def bundled() -> dict[tuple[str, str], Path]:
    """(hardware, engine) to the folder of its tables; folders are named hardware-engine-version."""
    folders = {}
    for folder in sorted(TABLES.iterdir()) if TABLES.is_dir() else []:
        if folder.is_dir() and folder.name.count("-") >= 2:
            hardware, engine, _ = folder.name.split("-", 2)
            folders[(hardware, engine)] = folder
    return folders


@functools.cache
def read_tables(folder: Path) -> Tables:
    """The tables in a folder. Raises UsageError with one line where it has none or one cannot be read."""
    if not folder.is_dir():
        raise UsageError(f"cannot read tables in {folder}: no such folder")
    rows: dict[str, list[dict[str, Any]]] = {}
    for stem, columns in FILES.items():
        path = next((p for s in SUFFIXES if (p := folder / (stem + s)).exists()), None)
        if path is not None:
            rows[stem] = [_row(path, i, row, columns) for i, row in enumerate(_raw(path), 2)]
    if not rows:
        raise UsageError(
            f"no tables in {folder}; wanted: one or more of {', '.join(FILES)} as .csv or .parquet"
        )
    spelt = {engine_name(row["framework"]): row["framework"] for of_file in rows.values() for row in of_file}
    labels = {
        (row["device"], spelt[engine_name(row["framework"])], row["version"])
        for of_file in rows.values()
        for row in of_file
    }
    if len(labels) > 1:
        several = "; ".join(" ".join(label) for label in sorted(labels))
        raise UsageError(f"tables in {folder} are of more than one machine or engine: {several}")
    device, engine, version = labels.pop()
    _plausible(folder, rows.get("gemm_perf", []))
    where = folder.name if folder.parent == TABLES else str(folder)
    return Tables(device, engine, version, where, rows)


def _raw(path: Path) -> Iterable[Mapping[str, Any]]:
    if path.suffix != ".parquet":
        try:
            with path.open(encoding="utf-8", newline="") as file:
                return list(csv.DictReader(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UsageError(f"cannot read {path}: {error}") from None
    try:
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            f"cannot read {path}: parquet needs pyarrow (pip install pyarrow), or save it as CSV"
        ) from None
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {' '.join(str(error).split())}") from None


def _row(path: Path, line: int, raw: Mapping[str, Any], columns: tuple[str, ...]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in (*columns, *COMMON):
        if raw.get(name) in (None, ""):
            raise UsageError(f"cannot read {path}, line {line}: no column {name!r}")
        row[name] = _number(raw[name])
    if not isinstance(row["latency"], float) or not 0 < row["latency"] < 1e6:
        raise UsageError(
            f"cannot read {path}, line {line}: latency {raw['latency']!r} is no time in milliseconds"
        )
    for name in COMMON[:-1]:
        row[name] = str(raw[name])
    for name in OPTIONAL:
        row[name] = str(raw.get(name) or "")
    row["us"] = row.pop("latency") * 1e3
    if "step" in row:
        row["context"] = row["isl"] + row["step"]
    return row


def _number(value: Any) -> Any:
    """A float where it is a number, else as it stands; words like bfloat16 stay words."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _plausible(folder: Path, gemms: list[dict[str, Any]]) -> None:
    large = [row for row in gemms if row["m"] >= 4096 and row["n"] * row["k"] >= 2**20]
    for row in large:
        tflops = 2 * row["m"] * row["n"] * row["k"] / row["us"] / 1e6
        if not PLAUSIBLE[0] < tflops < PLAUSIBLE[1]:
            raise UsageError(
                f"{folder}: GEMM m={row['m']:g} n={row['n']:g} k={row['k']:g} would run at {tflops:.3g} "
                "TFLOPS; latency is to be in milliseconds"
            )
