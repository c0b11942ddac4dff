"""Compile records: what compiling found of the configurations that choices were made among, kept beside the
choices, so that these can be held against the criterion again without compiling.

`<arch>/compiled/<implementation>.jsonl.gz`, a line for each configuration and what compiling found of it: its
`config` in words, the `cases` for which that holds, its `launches` in order, or why they could not be asked
for (`refused`), and the `source` of the kernels.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness import files
from harness.catalogue.architectures import Architecture
from harness.compile.resources import Resources
from harness.errors import UsageError
from harness.tune.cost_model import Peaks
from harness.tune.search import Candidate, Search
from harness.tune.store import Place
from kernels.tuning import words

KEPT = ("registers", "shared_bytes", "columns", "threads", "instructions", "products")
"""Of Resources: what the criterion needs."""


@dataclass(frozen=True)
class CompiledLaunch:
    """Of one launch: its kernel, what compiling found, and why it may not be shipped, if so."""

    kernel: str
    figures: Resources
    refused: str = ""

    def kept(self) -> dict[str, Any]:
        figures = {name: value for name, value in asdict(self.figures).items() if name in KEPT}
        return {"kernel": self.kernel, **figures, "refused": self.refused}

    @staticmethod
    def read(kept: Mapping[str, Any]) -> CompiledLaunch:
        figures = Resources.read({name: kept[name] for name in KEPT})
        return CompiledLaunch(kept["kernel"], figures, kept["refused"])


CompileResult = Sequence[CompiledLaunch] | str
"""Of a configuration: its launches in order, or why it could not be asked for them."""


def judge(candidate: Candidate, result: CompileResult, on: Peaks, architecture: Architecture) -> None:
    if isinstance(result, str):
        candidate.refuse(result)
        return
    refused = list(filter(None, dict.fromkeys(launch.refused for launch in result)))
    if refused:
        candidate.refuse("; ".join(refused))
    else:
        candidate.judge(on, architecture, [(launch.kernel, launch.figures) for launch in result])


@dataclass
class CompileRecords:
    """source: of the kernels that were compiled (see harness/tune/store.py); cases: case -> configuration, in
    words -> what was found."""

    source: str = ""
    cases: dict[str, dict[str, CompileResult]] = field(default_factory=dict)

    def judge(self, on: Peaks, architecture: Architecture, batch: Iterable[tuple[Search, Candidate]]) -> None:
        """Of candidates, those that are known."""
        for search, candidate in batch:
            known = self.cases.get(search.case, {}).get(words(candidate.config))
            if known is not None:
                judge(candidate, known, on, architecture)

    @staticmethod
    def read(file: Path) -> CompileRecords:
        """Without anything where there is no file, or none that can be read."""
        records = CompileRecords()
        try:
            for line in gzip.decompress(file.read_bytes()).splitlines():
                record = json.loads(line)
                records.source = record["source"]
                result: CompileResult = record["refused"] or [
                    CompiledLaunch.read(launch) for launch in record["launches"]
                ]
                for case in record["cases"]:
                    records.cases.setdefault(case, {})[record["config"]] = result
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            return CompileRecords()
        return records

    def store(self, file: Path) -> None:
        """Raises UsageError where that cannot be done."""
        cases: dict[str, list[str]] = {}
        for case in sorted(self.cases):
            for config, result in self.cases[case].items():
                cases.setdefault(json.dumps(self._record(config, result)), []).append(case)
        lines = [json.dumps(json.loads(record) | {"cases": of}) for record, of in sorted(cases.items())]
        try:
            files.replace(file, gzip.compress("\n".join(lines).encode(), mtime=0))
        except OSError as error:
            raise UsageError(f"cannot write {file}: {error.strerror}; give another folder by --out") from None

    def _record(self, config: str, result: CompileResult) -> dict[str, Any]:
        refused = result if isinstance(result, str) else ""
        launches = [] if isinstance(result, str) else [launch.kept() for launch in result]
        return {"source": self.source, "config": config, "refused": refused, "launches": launches}


def file(folder: Path, implementation: str, place: Place) -> Path:
    return folder / place.folder / "compiled" / f"{implementation}.jsonl.gz"
