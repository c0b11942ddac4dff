"""Which tuned table decides how a row of this suite runs, and what it holds for a case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from kernels.tables import Found, Problem, Target
from kernels.tables.aiter import AiterTables
from kernels.tables.aiter_csv import GEMM, MOE, PRESHUFFLED
from kernels.tables.engine_json import EngineTables
from kernels.tables.files import Files, library
from shapes.case import Size


class Lookups:
    """Look-ups of an engine's libraries, each read when it is first asked.

    paths:  library (aiter, vllm, sglang) -> where it lies; others: installed, else recorded here
    given:  variables that are set
    asked:  the files of each library that was asked
    columns, masked: of the `topk_ids` that reach AITER's fused_moe
    """

    def __init__(
        self,
        target: Target,
        paths: Mapping[str, Path],
        given: Mapping[str, str],
        columns: int = 0,
        masked: bool = False,
    ) -> None:
        self.target, self.paths, self.given = target, paths, given
        self.columns, self.masked = columns, masked
        self.asked: dict[str, Files] = {}
        self._tables: dict[str, AiterTables | EngineTables] = {}

    def _asked(self, package: str) -> AiterTables | EngineTables:
        if package not in self._tables:
            files = self.asked[package] = library(package, self.paths.get(package))
            made = (
                AiterTables(files, self.given)
                if package == "aiter"
                else EngineTables(package, files, self.given)
            )
            self._tables[package] = made
        return self._tables[package]

    def library_of(self, row: str) -> str:
        """The library whose tables a row's kernel looks into; empty: none."""
        name, _, variant = row.partition("@")[0].partition(".")
        if name == "aiter" and variant.startswith(("dispatch", "triton")):
            return name
        return name if name in ("vllm", "sglang") and variant == "triton" else ""

    def find(self, op: str, row: str, sizes: Mapping[str, Size]) -> Found | None:
        """What the tables hold for a case; None where no table decides. Raises TableError."""
        package = self.library_of(row)
        if not package or op not in ("block_scale_gemm", "fused_moe"):
            return None
        tables = self._asked(package)
        if op == "block_scale_gemm":
            if isinstance(tables, EngineTables):
                return tables.gemm(self.target, *_gemm(sizes))
            look = tables.triton_gemm if ".triton" in row else tables.gemm
            return look(self.target, *_gemm(sizes), preshuffled=row.endswith("_preshuffled"))
        tokens, hidden, inter, experts = _moe(sizes)
        if isinstance(tables, EngineTables):
            return tables.moe(self.target, tokens, inter, experts)
        if ".triton" in row:
            return None
        return tables.moe(self.target, tokens, hidden, inter, experts, self.columns, self.masked)

    def problems(self) -> list[Problem]:
        """Of the libraries that were asked."""
        return [problem for tables in self._tables.values() for problem in tables.problems(self.target)]

    def untuned(self, misses: Iterable[tuple[str, str, Mapping[str, Size]]]) -> dict[str, str]:
        """Of (op, row, sizes) that tables hold nothing for: a file's name -> its text, as the library's own
        tuner reads it: AITER's CSV of untuned shapes, and the names of JSON files that an engine lacks."""
        gemms: dict[str, list[tuple[int, int, int]]] = {}
        calls = []
        lacking: dict[str, set[str]] = {}
        for op, row, sizes in misses:
            package = self.library_of(row)
            if package != "aiter":
                tables = self._tables[package]
                assert isinstance(tables, EngineTables)
                lacking.setdefault(f"{package}_missing.txt", set()).update(
                    tables.missing(op, self.target, sizes)
                )
            elif ".triton" not in row and op == "block_scale_gemm":
                family = PRESHUFFLED if row.endswith("_preshuffled") else GEMM
                gemms.setdefault(PurePosixPath(family.untuned).name, []).append(_gemm(sizes))
            elif op == "fused_moe":
                calls.append((*_moe(sizes), self.columns, self.masked))
        texts = {
            name: "".join(f"{file}\n" for file in sorted(files)) for name, files in lacking.items() if files
        }
        aiter = self._tables.get("aiter")
        if isinstance(aiter, AiterTables):
            texts |= {name: aiter.untuned_gemm(shapes) for name, shapes in gemms.items()}
            if calls:
                texts[PurePosixPath(MOE.untuned).name] = aiter.untuned_moe(self.target, calls)
        return texts


def _gemm(sizes: Mapping[str, Size]) -> tuple[int, int, int]:
    """m, n, k."""
    return int(sizes["m"]), int(sizes["n"]), int(sizes["k"])


def _moe(sizes: Mapping[str, Size]) -> tuple[int, int, int, int]:
    """Tokens, hidden, inter, and the rank's experts, a fused shared one included."""
    local = int(sizes["experts"]) // int(sizes["ep"]) + int(sizes["shared"])
    return int(sizes["tokens"]), int(sizes["hidden"]), int(sizes["inter"]), local
