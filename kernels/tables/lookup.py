"""Which tuned table decides how a row of this suite runs, and what that table has for a case."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kernels.tables import Found, Problem
from kernels.tables.aiter import AiterTables
from kernels.tables.engine_json import EngineTables
from kernels.tables.files import Files, library
from kernels.tuning import Target
from shapes.case import Size
from shapes.toml import read_toml

LIBRARIES = ("aiter", "vllm", "sglang")
"""The libraries that have tuned tables."""

WITHOUT_TABLES: Mapping[str, str] = read_toml(Path(__file__).with_name("without.toml"))
"""What decides instead of a table, by how the name of a row begins."""


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
        self._target, self._paths, self._given = target, paths, given
        self._columns, self._masked = columns, masked
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

    def library_of(self, row: str) -> str:
        """The library whose tables a row's kernel uses; empty where it uses none."""
        name, _, variant = row.partition("@")[0].partition(".")
        if name == "aiter" and variant.startswith(("dispatch", "triton")):
            return name
        return name if name in ("vllm", "sglang") and variant == "triton" else ""

    def find(self, op: str, row: str, sizes: Mapping[str, Size]) -> Found | None:
        """What the tables have for a case; None where no table decides. Raises TableError."""
        package, is_gemm = self.library_of(row), op == "block_scale_gemm"
        if not package or not (is_gemm or op == "fused_moe"):
            return None
        if package not in self._tables:
            is_aiter, files = package == "aiter", self.files(package)
            self._tables[package] = (
                AiterTables(files, self._given) if is_aiter else EngineTables(package, files, self._given)
            )
        tables = self._tables[package]
        if is_gemm:
            m, n, k = (int(sizes[name]) for name in "mnk")
            if isinstance(tables, EngineTables):
                return tables.gemm(self._target, m, n, k)
            look = tables.triton.gemm if ".triton" in row else tables.gemm
            return look(self._target, m, n, k, preshuffled=row.endswith("_preshuffled"))
        tokens, hidden, inter = (int(sizes[name]) for name in ("tokens", "hidden", "inter"))
        experts = int(sizes["experts"]) // int(sizes["ep"]) + int(sizes["shared"])
        if isinstance(tables, EngineTables):
            return tables.moe(self._target, tokens, inter, experts)
        if ".triton" in row:
            return None
        return tables.moe(self._target, tokens, hidden, inter, experts, self._columns, self._masked)

    def problems(self) -> list[Problem]:
        """What is wrong with the tables of the libraries that were asked."""
        return [problem for tables in self._tables.values() for problem in tables.problems(self._target)]

    def untuned(self) -> dict[str, str]:
        """The texts of files for tuners, by the file's name, about the look-ups that found nothing. For AITER
        it is the CSV of untuned shapes that its tuner reads, without Triton's, which AITER tunes by hand; for
        an engine, a list of the JSON files that it lacks."""
        texts: dict[str, str] = {}
        for tables in self._tables.values():
            texts |= tables.untuned(self._target)
        return texts
