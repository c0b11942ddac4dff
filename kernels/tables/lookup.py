"""Which tuned table decides how a row of this suite runs, and what that table has for a case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from kernels.tables import Found, Problem
from kernels.tables.aiter import AiterTables
from kernels.tables.aiter_csv import GEMM, MOE, PRESHUFFLED
from kernels.tables.engine_json import EngineTables
from kernels.tables.files import Files, library
from kernels.tuning import Target
from shapes.case import Size

LIBRARIES = ("aiter", "vllm", "sglang")
"""The libraries that have tuned tables."""

WITHOUT_TABLES: Mapping[str, str] = {
    "deepgemm": "rules by m, n, k, groups and SMs (DeepGEMM csrc/jit_kernels/heuristics/common.hpp)",
    "flash_attn": "rules by lengths, heads and SMs (of version 3: flash-attention hopper/heuristics.h)",
    "flashinfer": "tactics profiled at start-up and kept on the machine, else the runner's own choice; those "
    "that ship need FLASHINFER_AUTOTUNER_LOAD_FROM_FILE=1 (flashinfer/autotuner/autotuner.py)",
    "flashinfer.sm90": "rules by m, n, k and SMs (get_best_gemm_config in FlashInfer's copy of "
    "TensorRT-LLM's deep_gemm/jit_utils.cuh)",
    "flashmla": "a plan by lengths and SMs (FlashMLA csrc/smxx/decode/get_decoding_sched_meta)",
    "sglang.cutlass": "rules by m, n and k (sgl-kernel/csrc/gemm/fp8_blockwise_gemm_kernel.cu)",
    "vllm.cutlass": "rules by m, n, k and SMs "
    "(vLLM csrc/.../cutlass/c3x/scaled_mm_blockwise_sm90_fp8_dispatch.cuh and its like)",
    "vllm.cutlass_mla": "splits by length and SMs "
    "(vLLM csrc/attention/mla/cutlass_sm100_mla/device/sm100_mla.hpp)",
}
"""What decides instead of a table, by how the name of a row begins. The longest beginning counts."""


def decides_without(op: str, row: str) -> str:
    """What decides how a row runs if its library has no table; empty if unknown."""
    starts = [start for start in WITHOUT_TABLES if row.startswith(start)]
    if not starts or (starts == ["flashinfer"] and op not in ("block_scale_gemm", "fused_moe")):
        return ""
    return WITHOUT_TABLES[max(starts, key=len)]


class Lookups:
    """Look-ups in the tables of the libraries that an engine calls. Each is read when it is first needed."""

    def __init__(
        self,
        target: Target,
        paths: Mapping[str, Path],
        given: Mapping[str, str],
        columns: int = 0,
        masked: bool = False,
    ) -> None:
        """Reads nothing yet.

        paths:   where libraries are, by name; `files.library` finds those that are not named
        given:   the variables that are set for the engine
        columns: how many columns of `topk_ids` AITER's fused_moe gets
        masked:  whether fused_moe gets an expert mask
        """
        self.target, self.given = target, given
        self.columns, self.masked = columns, masked
        self._paths = paths
        self._files: dict[str, Files] = {}
        self._tables: dict[str, AiterTables | EngineTables] = {}

    def files(self, package: str) -> Files:
        """The files of one of LIBRARIES. Raises TableError."""
        if package not in self._files:
            self._files[package] = library(package, self._paths.get(package))
        return self._files[package]

    @property
    def asked(self) -> dict[str, Files]:
        """The files of the libraries whose tables were asked."""
        return {package: self._files[package] for package in self._tables}

    def _tables_of(self, package: str) -> AiterTables | EngineTables:
        if package not in self._tables:
            files = self.files(package)
            if package == "aiter":
                self._tables[package] = AiterTables(files, self.given)
            else:
                self._tables[package] = EngineTables(package, files, self.given)
        return self._tables[package]

    def library_of(self, row: str) -> str:
        """The library whose tables a row's kernel uses; empty where it uses none."""
        name, _, variant = row.partition("@")[0].partition(".")
        if name == "aiter" and variant.startswith(("dispatch", "triton")):
            return name
        return name if name in ("vllm", "sglang") and variant == "triton" else ""

    def find(self, op: str, row: str, sizes: Mapping[str, Size]) -> Found | None:
        """What the tables have for a case; None where no table decides. Raises TableError."""
        package = self.library_of(row)
        if not package or op not in ("block_scale_gemm", "fused_moe"):
            return None
        tables = self._tables_of(package)
        if op == "block_scale_gemm":
            if isinstance(tables, EngineTables):
                return tables.gemm(self.target, *_gemm(sizes))
            look = tables.triton.gemm if ".triton" in row else tables.gemm
            return look(self.target, *_gemm(sizes), preshuffled=row.endswith("_preshuffled"))
        tokens, hidden, inter, experts = _moe(sizes)
        if isinstance(tables, EngineTables):
            return tables.moe(self.target, tokens, inter, experts)
        if ".triton" in row:
            return None
        return tables.moe(self.target, tokens, hidden, inter, experts, self.columns, self.masked)

    def problems(self) -> list[Problem]:
        """What is wrong with the tables of the libraries that were asked."""
        return [problem for tables in self._tables.values() for problem in tables.problems(self.target)]

    def untuned(self, misses: Iterable[tuple[str, str, Mapping[str, Size]]]) -> dict[str, str]:
        """The texts of files for tuners, by the file's name. For AITER it is the CSV of untuned shapes that
        its tuner reads; for an engine, a list of the JSON files that it lacks.

        misses: op, row and sizes of cases for which the tables have no entry
        """
        shapes: dict[tuple[str, str, bool], list[Mapping[str, Size]]] = {}
        for op, row, sizes in misses:
            if not (self.library_of(row) == "aiter" and ".triton" in row):  # AITER tunes those by hand
                key = self.library_of(row), op, row.endswith("_preshuffled")
                shapes.setdefault(key, []).append(sizes)
        texts = {}
        for (package, op, shuffled), of_op in shapes.items():
            tables, is_gemm = self._tables[package], op == "block_scale_gemm"
            if isinstance(tables, EngineTables):
                gemms = [_gemm(sizes)[1:] for sizes in of_op if is_gemm]
                moes = [_moe(sizes)[2:] for sizes in of_op if not is_gemm]
                if names := tables.missing(self.target, gemms, moes):
                    texts[f"{package}_{op}_missing.txt"] = "".join(f"{name}\n" for name in names)
            elif is_gemm:
                family = PRESHUFFLED if shuffled else GEMM
                texts[PurePosixPath(family.untuned).name] = tables.untuned_gemm(
                    _gemm(sizes) for sizes in of_op
                )
            else:
                calls = [(*_moe(sizes), self.columns, self.masked) for sizes in of_op]
                texts[PurePosixPath(MOE.untuned).name] = tables.untuned_moe(self.target, calls)
        return texts


def _gemm(sizes: Mapping[str, Size]) -> tuple[int, int, int]:
    """m, n, k."""
    return int(sizes["m"]), int(sizes["n"]), int(sizes["k"])


def _moe(sizes: Mapping[str, Size]) -> tuple[int, int, int, int]:
    """Tokens, hidden, inter, and the experts of the rank, including the shared expert where it is fused."""
    local = int(sizes["experts"]) // int(sizes["ep"]) + int(sizes["shared"])
    return int(sizes["tokens"]), int(sizes["hidden"]), int(sizes["inter"]), local
