"""Kernel times for predictions: from tables, from runs of this suite, or scaled from another machine.

**Tables** are files of NVIDIA's AIConfigurator; aiconfigurator.toml says what their times cover. Their
`latency` is in milliseconds; here all times are in microseconds.

**Between the points** of a table the logarithm of the time is linear in the logarithm of the size. Times grow
with the work. A measured curve that falls is noise, so its isotonic regression in the logarithm replaces it.

**Assumed times** are not measured. They are the H200's tables, scaled by the data sheets of both machines: by
the bandwidths if memory limits the kernel, by the peak TFLOPS if its products do. LAUNCH_US is added on both
machines, so that small kernels scale little. fitted.toml has what data sheets do not give.
"""

from __future__ import annotations

import bisect
import functools
import math
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.files import JsonObject, read_toml
from harness.paths import PUBLISHED
from harness.serving.names import data_sheet, engine_name, hardware_name
from kernels.engines import engines, entries
from shapes.lengths import parse_span

MOST_BEYOND = 3.0  # times of a table are used up to this factor beyond its sizes


class Surface:
    """The time in us over positive sizes: at each point of the other sizes a curve over the last one."""

    def __init__(self, points: Mapping[tuple[float, ...], float]) -> None:
        """points: from sizes to us; at least one"""
        self.ranges = [(min(column), max(column)) for column in zip(*points, strict=True)]
        by_size: dict[float, dict[tuple[float, ...], float]] = {}  # by the first size, then by the others
        for (size, *others), us in sorted(points.items()):
            by_size.setdefault(size, {})[tuple(others)] = us
        self.sizes = list(by_size)
        if len(self.ranges) == 1:
            self.times_us = isotonic([at_size[()] for at_size in by_size.values()])
        else:
            self.surfaces = [Surface(at_size) for at_size in by_size.values()]

    def covers(self, *sizes: float) -> bool:
        """Whether no size lies beyond those of the table by more than the factor MOST_BEYOND."""
        pairs = zip(sizes, self.ranges, strict=True)
        return all(least / MOST_BEYOND <= size <= most * MOST_BEYOND for size, (least, most) in pairs)

    def us_at(self, size: float, *others: float) -> float:
        """The time at these sizes. Below the least of a size it is the time at the least. Beyond the largest
        it grows in proportion to the size, as more work of the same kind does; but beyond the largest of the
        last size, which a curve is over, it grows with the slope of that curve's end."""
        sizes = self.sizes
        if size <= sizes[0]:
            return self._us(0, others)
        if size > sizes[-1]:
            return self._us(-1, others) * (size / sizes[-1]) ** (1.0 if others else self._slope())
        right = bisect.bisect_left(sizes, size)
        if sizes[right] == size:
            return self._us(right, others)
        weight = math.log(size / sizes[right - 1]) / math.log(sizes[right] / sizes[right - 1])
        return self._us(right - 1, others) ** (1 - weight) * self._us(right, others) ** weight

    def _us(self, index: int, others: tuple[float, ...]) -> float:
        return self.surfaces[index].us_at(*others) if others else self.times_us[index]

    def _slope(self) -> float:
        """The slope of a curve over its last factor of 1.6, in logarithms; 1 if it has one point."""
        least = self.sizes[-1] / math.exp(0.5)
        before = max((i for i, size in enumerate(self.sizes) if size < least), default=0)
        run = math.log(self.sizes[-1] / self.sizes[before])
        return math.log(self.times_us[-1] / self.times_us[before]) / run if run else 1.0


def isotonic(times: Sequence[float]) -> list[float]:
    """The growing times whose logarithms are nearest in least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # mean of the logarithms of neighbours, and their count
    for time in times:
        mean, count = math.log(time), 1
        while pools and pools[-1][0] > mean:
            mean_before, count_before = pools.pop()
            mean = (mean_before * count_before + mean * count) / (count_before + count)
            count += count_before
        pools.append((mean, count))
    return [math.exp(mean) for mean, count in pools for _ in range(count)]


TABLES = PUBLISHED / "kernel-tables"
_FORMAT = read_toml(Path(__file__).parent / "aiconfigurator.toml")
FILES: Mapping[str, JsonObject] = _FORMAT["files"]
KERNEL_WORDS: Mapping[str, str] = _FORMAT["words"]  # from words that tell kernels apart to their patterns
COMMON = ("framework", "version", "device", "latency")
OPTIONAL = ("kernel_source", "backend", "mla_dtype", "kv_cache_dtype")
SUFFIXES = (".csv", ".txt", ".parquet")
REUSED_VERSION = re.compile(r"^- table: *(\S+)\n +from_version: *['\"]?([^\s'\"]+)", re.MULTILINE)
Row = dict[str, Any]
ABSORBED = "flash_attention"  # `kernel_source` of SGLang's prefill attention where it was timed absorbed
# Columns of sizes; a row in which one of them is 0 is left out.
SIZES = ("m", "n", "k", "num_tokens", "batch_size", "isl", "message_size")
SAME_CHIP = {"gb200": "b200", "gb300": "b300"}  # a set of tables of one may have files of the other
PLAUSIBLE_TFLOPS = (3.0, 20_000.0)  # of a large product; outside of this range the unit is not milliseconds
LAUNCH_US = 3.0
# FP8 products and experts are judged by their times at JUDGED_TOKENS tokens. If these take over SLOWEST times
# as long as a launch and reading the weights, the whole table is left out: the host was timed (vLLM 0.24's
# FP8 products), or a kernel that no engine runs (MoE).
JUDGED_TOKENS, SLOWEST = 64, 10.0
# Sizes of DeepSeek-R1: of its hidden state and its experts; of heads; and of absorbed attention over the
# latent cache, of queries and keys and of values.
HIDDEN, EXPERTS, TOP_K, EXPERT_WIDTH = 7168, 256, 8, 2048
HEAD_WIDTH, QK_WIDTH, V_WIDTH = 128, 576, 512


class MissingTable(UsageError):
    """Raised for a time that no table here has."""


@dataclass(frozen=True)
class Tables:
    """Times of one device and one engine's version.

    source:     the set's name, or what else messages call it
    rows:       the rows of each file, by its stem
    notes:      a line for each file that is of another device or version
    between_us: time of a step, and time of each of its tokens, beside all kernels and the assumed glue
    """

    device: str
    engine: str
    version: str
    source: str
    rows: Mapping[str, list[Row]]
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    between_us: tuple[float, float] = field(default=(0.0, 0.0), kw_only=True)
    surfaces: dict[Any, Surface] = field(init=False, default_factory=dict, compare=False, repr=False)

    def gemm(self, kind: str, m: float, n: int, k: int) -> float:
        """The time in us of y [m, n] = x [m, k] W^T. kind: fp8_block or bfloat16"""
        return self._us("gemm_perf", {"gemm_dtype": kind}, n=n, k=k, m=m)

    def moe(self, tokens: float, tp: int, ep: int, distribution: str) -> float:
        """The time in us of DeepSeek-R1's 256 experts, top 8, without the shared one. tokens: of all ranks"""
        where = {"moe_tp_size": tp, "moe_ep_size": ep, "distribution": distribution}
        return self._us("moe_perf", where, num_tokens=tokens)

    def mla_decode(self, batch: float, context: float, heads: int, kv: str) -> float:
        """The time in us. context: cached tokens of each sequence, with the token of this step"""
        where = {"kv_cache_dtype": kv, "num_heads": heads}
        return self._us("generation_mla_perf", where, batch_size=batch, context=context)

    def mla_prefill(self, batch: float, length: float, heads: int, kv: str) -> float:
        """The time in us; of absorbed attention if `prefill_is_absorbed`."""
        where: dict[str, Any] = {"num_heads": heads}
        # A prompt reads no cache, so that times with a cache of another type may be used.
        if kv in self.values("context_mla_perf", "kv_cache_dtype"):
            where["kv_cache_dtype"] = kv
        return self._us("context_mla_perf", where, batch_size=batch, isl=length)

    @property
    def prefill_is_absorbed(self) -> bool:
        """Whether prefill attention was timed in the absorbed form, which no engine runs."""
        sources = self.values("context_mla_perf", "kernel_source")
        frameworks = self.values("context_mla_perf", "framework")
        of_sglang = {engine_name(name) for name in frameworks} == {"sglang"}
        return of_sglang and all(source in (ABSORBED, "") for source in sources)

    def absorbed_bmm(self, which: str, tokens: float, heads: int) -> float:
        """The time in us. which: mla_gen_pre (w_uk) or mla_gen_post (w_uv)"""
        where = {"op_name": which, "bmm_dtype": "bfloat16", "num_heads": heads}
        return self._us("mla_bmm_perf", where, num_tokens=tokens)

    def all_reduce(self, elements: float, gpus: int) -> float:
        """The device time in us for bf16 elements, in a graph if the table has such times. `message_size` of
        the table counts elements: with bytes, the largest message would run at half the rate of NVLink."""
        backends = self.values("custom_allreduce_perf", "backend")
        in_graphs = [backend for backend in backends if backend.endswith("_graph")]
        where: dict[str, Any] = {"num_gpus": gpus}
        if in_graphs:
            where["backend"] = in_graphs[0]
        return self._us("custom_allreduce_perf", where, message_size=elements)

    def values(self, file: str, column: str) -> list[str]:
        """The different values of a column, sorted."""
        return sorted({row[column] for row in self.rows.get(file, ())})

    def _us(self, file: str, where: Mapping[str, Any], **sizes: float) -> float:
        """The time in us between the rows that `where` selects. sizes: by column. Raises MissingTable."""
        key = (file, *where.items(), *sizes)
        if key not in self.surfaces:
            times: dict[tuple[float, ...], list[float]] = {}
            for row in self.rows.get(file, ()):
                if where.items() <= row.items():
                    times.setdefault(tuple(row[size] for size in sizes), []).append(row["us"])
            if not times:
                selection = " ".join(f"{column}={value}" for column, value in where.items())
                raise MissingTable(f"no rows of {file} with {selection} in {self.source}")
            # A case that was timed more than once has the median of its times.
            self.surfaces[key] = Surface({case: statistics.median_high(us) for case, us in times.items()})
        return self.surfaces[key].us_at(*sizes.values())


@functools.cache
def read_tables(folder: Path) -> Tables:
    """The set of tables in a folder. Raises UsageError if there is none, or one cannot be read."""
    rows: dict[str, list[Row]] = {}
    for stem, path in table_files(folder).items():
        file = FILES[stem]
        lines = read_rows(path, file.get("wanted", {}))
        read = [_row(path, line, row, file["columns"]) for line, row in lines]
        with_sizes = [row for row in read if all(row[size] > 0 for size in SIZES if size in row)]
        if with_sizes:
            rows[stem] = with_sizes
    tables = _labelled(folder, rows)
    _require_milliseconds(folder, tables)
    return _without_layers(_without_slow(tables))


def _labelled(folder: Path, rows: Mapping[str, list[Row]]) -> Tables:
    """The tables with the label that most files have. Raises UsageError for several machines or engines."""
    if not rows:
        raise UsageError(f"no times of DeepSeek-R1 in {folder}: FP8 block-scale products and 256 experts")
    labels: dict[str, list[tuple[str, str, str]]] = {}  # by file: device, framework and version
    for stem, of_file in rows.items():
        labels[stem] = sorted({(row["device"], row["framework"], row["version"]) for row in of_file})
    # Some sets of other engines have the all-reduce of TensorRT-LLM, whose labels do not count.
    own = [label for stem in labels if stem != "custom_allreduce_perf" for label in labels[stem]]
    every = sorted(set().union(*labels.values()))
    devices = {hardware_name(device) for device, _, _ in every}
    chips = {SAME_CHIP.get(name, name) for name in devices}
    if len(chips) > 1 or len({engine_name(engine) for _, engine, _ in own}) > 1:
        names = "; ".join(map(" ".join, every))
        raise UsageError(f"tables in {folder} are of more than one machine or engine: {names}")
    device, engine, version = statistics.mode(own or every)
    if folder.name in {version for _, _, version in own}:  # a folder of the set is named by its version
        version = folder.name
    source = folder.name if folder.parent == TABLES else str(folder)
    notes = [
        f"{stem} in {source} is of {' '.join(label)}; the set is of {device} {engine} {version}"
        for stem, of_file in labels.items()
        for label in of_file
        if (label[0], engine_name(label[1]), label[2]) != (device, engine_name(engine), version)
    ]
    return Tables(device, engine, version, source, rows, notes=tuple(notes))


def _row(path: Path, line: int, raw: Mapping[str, Any], columns: Sequence[str]) -> Row:
    """The row of a file, with numbers as floats and the time in us."""
    for name in (*columns, *COMMON):
        if raw.get(name) in (None, ""):
            raise UsageError(f"cannot read {path}, line {line}: no column {name!r}")
    latency = number(raw["latency"])
    if not isinstance(latency, float) or not 0 < latency < 1e6:
        raise UsageError(f"cannot read {path}, line {line}: latency {raw['latency']!r} is no time in ms")
    row = {name: number(raw[name]) for name in columns} | {"us": latency * 1e3}
    row |= {name: str(raw.get(name) or "") for name in (*COMMON, *OPTIONAL) if name != "latency"}
    if "step" in row:
        row["context"] = row["isl"] + row["step"]
    return {name: "bfloat16" if value == "float16" else value for name, value in row.items()}


def _require_milliseconds(folder: Path, tables: Tables) -> None:
    """Raises UsageError if the time of a large product is impossible: then it is in another unit."""
    for row in tables.rows.get("gemm_perf", ()):
        tflops = 2 * row["m"] * row["n"] * row["k"] / row["us"] / 1e6
        is_large = row["m"] >= 4096 and row["n"] * row["k"] >= 2**20
        if is_large and not PLAUSIBLE_TFLOPS[0] < tflops < PLAUSIBLE_TFLOPS[1]:
            what = f"GEMM m={row['m']:g} n={row['n']:g} k={row['k']:g} would run at {tflops:.3g} TFLOPS"
            raise UsageError(f"{folder}: {what}; latency is to be in milliseconds")


def _without_slow(tables: Tables) -> Tables:
    """The tables without FP8 products or experts that are slower than any such kernel (SLOWEST)."""
    tbps = data_sheet(hardware_name(tables.device)).get("tbps")
    if not tbps:
        return tables
    rows, notes = dict(tables.rows), list(tables.notes)
    for stem, kind in (("gemm_perf", "FP8 products"), ("moe_perf", "experts")):
        factors = [factor for row in rows.get(stem, ()) if (factor := _slowness(row, tbps))]
        if factors and (median := statistics.median_high(factors)) > SLOWEST:
            rows[stem] = [row for row in rows[stem] if _is_bf16(row)]
            slow = f"of {JUDGED_TOKENS} tokens take {median:.0f} times what reading their weights takes"
            notes.append(f"{tables.source}: {kind} {slow}: left out")
    return replace(tables, rows=rows, notes=tuple(notes))


def _without_layers(tables: Tables) -> Tables:
    """The tables without files that time attention together with the products beside it."""
    engine = engine_name(tables.engine)
    of_layers = [stem for stem in tables.rows if engine in FILES[stem].get("of_layers", ())]
    if not of_layers:
        return tables
    rows = {stem: of_file for stem, of_file in tables.rows.items() if stem not in of_layers}
    note = f"{tables.source}: {', '.join(of_layers)} hold products beside attention: left out"
    return replace(tables, rows=rows, notes=(*tables.notes, note))


def _is_bf16(row: Row) -> bool:
    """Whether it is a GEMM in bf16, which is of no op of the suite."""
    return row.get("gemm_dtype") == "bfloat16"


def _slowness(row: Row, tbps: float) -> float:
    """The time of a row over that of reading its weights and a launch; 0 for rows that are not judged."""
    if row.get("gemm_dtype") == "fp8_block" and row["m"] == JUDGED_TOKENS:
        weight_bytes = row["n"] * row["k"]
    elif row.get("num_tokens") == JUDGED_TOKENS and row.get("moe_ep_size") == 1:
        weight_bytes = 3 * row["hidden_size"] * row["inter_size"] / row["moe_tp_size"] * row["num_experts"]
    else:
        return 0.0
    return row["us"] / (LAUNCH_US + weight_bytes / tbps / 1e6)


def kernel_words(name: str) -> frozenset[str]:
    """The words of KERNEL_WORDS that the name of a kernel has."""
    return frozenset(word for word, regex in KERNEL_WORDS.items() if re.search(regex, name, re.IGNORECASE))


def of_engine(tables: Tables, engine: str, hardware: str) -> Tables:
    """The tables without the rows of kernels that the engine does not run. Times of another kernel once made
    TPOT 54 % wrong (SGLang's MoE on B200). Notes say what was left out, and what cannot be told."""
    rows, notes = dict(tables.rows), list(tables.notes)
    for stem, file in FILES.items():
        of_op = [row for row in rows.get(stem, ()) if not _is_bf16(row)]
        if "op" not in file or not of_op:
            continue
        op = file["op"]
        known = entries(engine, op, data_sheet(hardware).get("arch", "")) if engine in engines() else ()
        implementations = dict.fromkeys(entry.row for entry in known if entry.row and not entry.flags)
        words = {word for name in implementations for word in kernel_words(name)}
        if not words:
            notes.append(f"which kernel {engine} runs of {op} is not known: that of the tables is taken")
            continue
        sources = {row["kernel_source"] for row in of_op}
        of_the_engine = {source for source in sources if kernel_words(source) & words}
        left_out = {source for source in sources - of_the_engine if kernel_words(source)}
        if not left_out:
            continue
        # A source without any word may be of the engine's kernel, unless the table has none of that kernel.
        if not of_the_engine:
            left_out = sources
        kept = [row for row in rows[stem] if _is_bf16(row) or row["kernel_source"] not in left_out]
        count = len(rows[stem]) - len(kept)
        rows[stem] = kept
        those = f"{count} of {len(of_op)} times of {op} are of {', '.join(sorted(left_out))}"
        notes.append(f"{those}, the engine runs {' or '.join(implementations)}: left out")
    return replace(tables, rows=rows, notes=tuple(notes))


def table_files(folder: Path) -> dict[str, Path]:
    """The file of each stem of FILES that the set has. Raises UsageError if it has none."""
    folders = [folder]
    if not folder.is_dir():  # SYSTEM/ENGINE/VERSION names the folders SYSTEM/OP/ENGINE/VERSION
        folders = sorted(folder.parent.parent.glob(f"*/{folder.parent.name}/{folder.name}"))
        if not folders:
            raise UsageError(
                f"no folder {folder} on disk: give that of a set of AIConfigurator's tables, which ends in "
                "SYSTEM/ENGINE/VERSION, or of a run of this suite, with run.json and cells.jsonl"
            )
    paths: dict[str, Path] = {}
    for each in folders:
        paths |= _reused_files(each)
    for each in folders:  # A file of the set itself replaces one of another version.
        paths |= _files_in(each, FILES)
    if not paths:
        sets = [*folder.glob("*/*/gemm_perf.*"), *folder.glob("gemm/*/*/gemm_perf.*")]
        names = sorted({"/".join(path.parts[-3:-1]) for path in sets})
        why = f"wanted: one or more of {', '.join(FILES)} as .csv or .parquet, or a run of this suite"
        if names:
            why = f"it has sets of tables: give {folder} with one of {', '.join(names)}"
        raise UsageError(f"no tables in {folder}; {why}")
    return paths


def _files_in(folder: Path, stems: Collection[str]) -> dict[str, Path]:
    """The files of these stems; of several suffixes the first of SUFFIXES counts."""
    paths = [(stem, folder / f"{stem}{suffix}") for stem in stems for suffix in reversed(SUFFIXES)]
    return {stem: path for stem, path in paths if path.exists()}


def _reused_files(folder: Path) -> dict[str, Path]:
    """The files of other versions that `reuse.yaml` names."""
    try:
        versions = REUSED_VERSION.findall((folder / "reuse.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return {}
    paths: dict[str, Path] = {}
    for stem, version in versions:
        if stem in FILES:
            paths |= _files_in(folder.parent / version, [stem])
    return paths


def read_rows(path: Path, wanted: Mapping[str, Collection[Any]]) -> Iterator[tuple[int, Row]]:
    """Line number and row of each row whose columns have wanted values. Raises UsageError."""
    import pandas

    if path.suffix == ".parquet" and path.read_bytes()[:7] == b"version":
        raise UsageError(f"{path} is not there, only Git LFS's word for it: run `git lfs pull`")
    try:
        if path.suffix == ".parquet":
            table = pandas.read_parquet(path)
        else:
            table = pandas.read_csv(path, dtype=str, keep_default_na=False)
    except ImportError:
        raise UsageError(f"cannot read {path}: install pyarrow, or save it as CSV") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    for name in wanted.keys() & {*table}:
        table = table[table[name].map(number).isin(wanted[name])]
    yield from zip(table.index + 2, table.to_dict("records"), strict=True)


def number(value: Any) -> Any:
    """A float if the value is a number; otherwise the value itself, for words such as bfloat16."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


PREFERRED = [("with_quant", "graph"), ("with_quant", "eager"), ("core", "graph"), ("core", "eager")]
"""Boundaries and launch modes, the best first. Engines decode in graphs, and count the routing separately."""
AXES = {
    "block_scale_gemm": (("n", "k"), ("m",)),
    "fused_moe": (("experts", "topk", "hidden", "inter", "ep", "shared"), ("tokens",)),
    "mla_decode": (("heads", "kv", "q"), ("batch", "ctx")),
    "mha_prefill": (("heads", "prefix"), ("batch", "new")),
}
"""For each op the sizes that must be equal, and those between which times are interpolated."""

Key = tuple[str, tuple[Any, ...]]  # the op, and the sizes that must be equal
Surfaces = Mapping[Key, Surface]  # over the interpolated sizes


@dataclass(frozen=True)
class MeasuredTimes:
    """Times from runs of this suite on a device. source: the runs, as messages name them"""

    device: str
    source: str
    surfaces: Surfaces


def is_run(path: str) -> bool:
    """Whether there are runs of this suite at a path."""
    from harness.results.read import run_folders

    try:
        return bool(run_folders(path))
    except UsageError:
        return False


def read_measured_times(runs: Sequence[str]) -> MeasuredTimes:
    """The times of the fastest correct implementation of each case of these runs, in a graph if there is one.
    Raises UsageError if a run cannot be read, or if the runs are of several machines."""
    from harness.results.read import load

    cells = [cell for run in runs for cell in load(run).to_dict("records")]
    devices = sorted({cell["machine"] for cell in cells if cell["machine"]})
    if len(devices) != 1:
        raise UsageError(f"runs are of {len(devices)} machines ({', '.join(devices)}); give those of one")

    def rank(cell: Mapping[str, Any]) -> tuple[int, float]:
        return PREFERRED.index((cell["boundary"], cell["launch"])), cell["time_us"]

    usable = [
        cell for cell in cells
        if cell["op"] in AXES and cell["status"] == "ok" and cell["time_us"] > 0
        and (cell["boundary"], cell["launch"]) in PREFERRED
    ]  # fmt: skip
    best: dict[Key, dict[tuple[float, ...], float]] = {}
    for cell in sorted(usable, key=rank, reverse=True):  # the best comes last, and replaces the others
        sizes = {"q": "1"} | dict(word.split("=", 1) for word in cell["case"].split() if "=" in word)
        fixed_names, interpolated_names = AXES[cell["op"]]
        fixed = (sizes.get(name, "0") for name in fixed_names)
        key = (cell["op"], tuple(int(value) if value.isdigit() else value for value in fixed))
        interpolated = tuple(sum(parse_span(sizes[name])) / 2 for name in interpolated_names)
        best.setdefault(key, {})[interpolated] = cell["time_us"]
    if not best:
        raise UsageError(f"no correct times of {', '.join(AXES)} in {', '.join(runs)}")
    return MeasuredTimes(devices[0], ", ".join(runs), {key: Surface(times) for key, times in best.items()})


FITTED = read_toml(Path(__file__).parent / "fitted.toml")
DEVIATION = 0.4  # the deviation of the logarithm of an assumed time


def peak_us(sheet: JsonObject, flops: float, moved: float, dtype: str) -> float:
    """The time in us of a kernel at a machine's peaks. flops: of dense products; moved: bytes"""
    return LAUNCH_US + max(flops / sheet["tflops"][dtype], moved / sheet["tbps"]) / 1e6


def peak_mla_us(sheet: JsonObject, rows: float, tokens: float, kv: str) -> float:
    """The time in us of absorbed attention at a machine's peaks.

    rows: query tokens of a sequence, times heads; tokens: in the cache of all sequences; kv: bfloat16 or fp8
    """
    flops = rows * (2 * tokens * (QK_WIDTH + V_WIDTH))
    return peak_us(sheet, flops, tokens * QK_WIDTH * (2 if kv == "bfloat16" else 1), "bf16")


@dataclass(frozen=True)
class AssumedTables(Tables):
    """The H200's tables, scaled to another machine. sheet, h200: its data sheet and the H200's

    fp8_factor, slower_mla, block_of_k_us: of fitted.toml; 0 for machines and engines that have none
    """

    sheet: JsonObject
    h200: JsonObject
    fp8_factor: float
    slower_mla: float
    block_of_k_us: float

    @classmethod
    def scaled_to(cls, hardware: str, engine: str) -> AssumedTables:
        """Times for a machine that has a data sheet. hardware: its name there"""
        base, sheet = read_tables(TABLES / "h200-sglang-0.5.9"), data_sheet(hardware)
        arch = sheet["arch"]
        is_amd = arch.startswith("gfx")
        token_us = FITTED["token_bytes"] / sheet["tbps"] / 1e6 if is_amd and engine == "sglang" else 0.0
        return cls(
            hardware, engine, base.version, f"assumed from {base.source} by data sheets", base.rows,
            between_us=(FITTED["between_us"].get(f"{arch} {engine}", 0.0), token_us),
            sheet=sheet, h200=data_sheet("h200"), fp8_factor=FITTED["on_amd"] if is_amd else 0.0,
            slower_mla=FITTED["slower_mla"].get(arch, 0.0),
            block_of_k_us=FITTED["block_of_k_us"].get(f"{arch} {engine}", 0.0),
        )  # fmt: skip

    @property
    def notes_on_fits(self) -> list[str]:
        """What the data sheets do not give, with what it was fitted to; a line for each source of fits."""
        step_us, token_us = self.between_us
        fits = [
            (self.slower_mla, "mla_decode x {:g}"),
            (step_us / 1e3, "{:g} ms a step"),
            (self.block_of_k_us, "FP8 products at least {:g} us for each 128 of k"),
            (token_us, "{:.0f} us a token"),
        ]
        known = [form.format(value) for value, form in fits if value]
        lines = [f"fitted to MI325X with SGLang: {', '.join(known)}"] if known else []
        if self.fp8_factor:
            lines.append(f"fitted to AITER's own times: FP8 products x {self.fp8_factor:g}")
        return lines

    def _scaled(self, us: float, flops: float, moved: float, dtype: str) -> float:
        """The time here, if the H200 takes `us` for so many flops and moved bytes."""
        return us * peak_us(self.sheet, flops, moved, dtype) / peak_us(self.h200, flops, moved, dtype)

    def gemm(self, kind: str, m: float, n: int, k: int) -> float:
        element_bytes, dtype = (1, "fp8") if kind == "fp8_block" else (2, "bf16")
        moved = element_bytes * (n * k + m * k) + 2 * m * n
        us = self._scaled(super().gemm(kind, m, n, k), 2 * m * n * k, moved, dtype)
        if kind != "fp8_block":
            return us
        return max(us * (self.fp8_factor or 1.0), self.block_of_k_us * k / 128)

    def moe(self, tokens: float, tp: int, ep: int, distribution: str) -> float:
        weights = 3 * HIDDEN * EXPERT_WIDTH / tp  # of one expert, a byte each
        read_experts = min(float(EXPERTS), TOP_K * tokens) / ep
        flops = 2 * tokens * TOP_K / ep * weights
        moved = read_experts * weights + 4 * tokens * HIDDEN  # activations in and out, in bf16
        return self._scaled(super().moe(tokens, tp, ep, distribution), flops, moved, "fp8")

    def mla_decode(self, batch: float, context: float, heads: int, kv: str) -> float:
        """Scaled from the H200's times with a bf16 cache, whatever the type of the cache is here. The H200's
        times with an FP8 cache are 7.5 to 15.8 times what its data sheet gives, those with bf16 1.2 to 5.3
        times, and no other engine runs the FP8 kernel."""
        cached = batch * context
        us = super().mla_decode(batch, context, heads, "bfloat16") * (self.slower_mla or 1.0)
        h200_us = peak_mla_us(self.h200, heads, cached, "bfloat16")
        return us * peak_mla_us(self.sheet, heads, cached, kv) / h200_us

    def mla_prefill(self, batch: float, length: float, heads: int, kv: str) -> float:
        flops = batch * length**2 * heads * (QK_WIDTH + V_WIDTH)
        moved = 4 * batch * length * heads * QK_WIDTH  # queries and outputs in bf16, taken as equally wide
        return self._scaled(super().mla_prefill(batch, length, heads, kv), flops, moved, "bf16")

    def absorbed_bmm(self, which: str, tokens: float, heads: int) -> float:
        flops = 2 * tokens * heads * HEAD_WIDTH * V_WIDTH
        moved = 2 * heads * (HEAD_WIDTH * V_WIDTH + tokens * (HEAD_WIDTH + V_WIDTH))
        return self._scaled(super().absorbed_bmm(which, tokens, heads), flops, moved, "bf16")

    # The all-reduce is the H200's: eight MI300X or MI350X in a mesh give each GPU 448 GB/s, NVLink 450.
