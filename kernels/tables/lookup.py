"""Which tuned table decides how a row of this suite runs, and what that table has for a case."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kernels.tables import RULES_TOML, Found, Problem
from kernels.tables.aiter import AiterTables
from kernels.tables.engine_json import EngineTables
from kernels.tables.files import Files, library
from kernels.tuning import Target
from shapes.case import Size

LIBRARIES = ("aiter", "vllm", "sglang")
"""The libraries that have tuned tables."""

WITHOUT_TABLES: Mapping[str, str] = RULES_TOML["without"]
"""By how the name of a row begins: what decides how the row runs, where its library has no table."""


def what_decides(op: str, row: str) -> str:
    """What decides how a row runs whose library has no tuned table; empty if unknown."""
    starts = [start for start in WITHOUT_TABLES if row.startswith(start)]
    start = max(starts, key=len, default="")
    if start == "flashinfer" and op not in ("block_scale_gemm", "fused_moe"):
        return ""  # this text is about GEMM and MoE
    return WITHOUT_TABLES.get(start, "")


class Lookups:
    """Look-ups in the tables of the libraries that an engine calls. Each is read when it is first needed."""

    def __init__(
        self,
        target: Target,
        paths: Mapping[str, Path],
        environment: Mapping[str, str],
        columns: int = 0,
        masked: bool = False,
    ) -> None:
        """paths:           where libraries are, by name; `files.library` finds those that are not named
        environment:     the variables that are set for the engine
        columns, masked: how many columns of `topk_ids` AITER's fused_moe gets, and whether an expert mask"""
        self._target, self._paths, self._environment = target, paths, environment
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
        provider, _, variant = row.partition("@")[0].partition(".")
        if provider == "aiter" and variant.startswith(("dispatch", "triton")):
            return provider
        return provider if provider in ("vllm", "sglang") and variant == "triton" else ""

    def find(self, op: str, row: str, sizes: Mapping[str, Size]) -> Found | None:
        """What the tables have for a case; None where no table decides. Raises TableError."""
        package = self.library_of(row)
        if not package or op not in ("block_scale_gemm", "fused_moe"):
            return None
        tables = self._tables_of(package)
        if op == "block_scale_gemm":
            m, n, k = int(sizes["m"]), int(sizes["n"]), int(sizes["k"])
            if isinstance(tables, EngineTables):
                return tables.gemm(self._target, m, n, k)
            of_kernel = tables.triton if ".triton" in row else tables
            return of_kernel.gemm(self._target, m, n, k, preshuffled=row.endswith("_preshuffled"))
        tokens, hidden, inter = (int(sizes[name]) for name in ("tokens", "hidden", "inter"))
        experts = int(sizes["experts"]) // int(sizes["ep"]) + int(sizes["shared"])
        if isinstance(tables, EngineTables):
            return tables.moe(self._target, tokens, inter, experts)
        if ".triton" in row:  # AITER's Triton kernel of MoE looks into no table
            return None
        return tables.moe(self._target, tokens, hidden, inter, experts, self._columns, self._masked)

    def _tables_of(self, package: str) -> AiterTables | EngineTables:
        if package not in self._tables:
            files = self.files(package)
            if package == "aiter":
                self._tables[package] = AiterTables(files, self._environment)
            else:
                self._tables[package] = EngineTables(package, files, self._environment)
        return self._tables[package]

    def problems(self) -> list[Problem]:
        """What is wrong with the tables of the libraries that were asked."""
        return [problem for tables in self._tables.values() for problem in tables.problems(self._target)]

    def untuned(self) -> dict[str, str]:
        """Files for tuners about the look-ups that found nothing: by the file's name, its text. For AITER it
        is the CSV of untuned shapes that its tuner reads; for an engine, a list of the JSON files that it
        lacks. Look-ups of AITER's Triton kernel are left out, as AITER has no tuner for it."""
        texts: dict[str, str] = {}
        for tables in self._tables.values():
            texts |= tables.untuned(self._target)
        return texts
