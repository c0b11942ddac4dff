"""What compiling found of the configurations that a choice was made among: kept beside the choices, so that
these can be held against the criterion again without compiling.

`<arch>/compiled/<implementation>.json`: `figures` and `configs` are what there is, each once; a table says
for configurations, by their place, which figures their launches have, by theirs, or why a configuration could
not be asked; `cases` says which table holds for a case. A table serves all cases that do not contradict it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.catalogue.architectures import Architecture
from harness.compile.resources import Resources
from harness.tune.cost_model import Peaks
from harness.tune.search import Candidate, Search
from harness.tune.store import Place, write
from kernels.tuning import words

KEPT = ("registers", "shared_bytes", "columns", "threads", "instructions", "products")
"""Of Resources: what the criterion needs."""

ABOUT = (
    "What compiling found of the configurations that choices were made among: "
    "see harness/tune/compile_records.py."
)


@dataclass(frozen=True)
class Compiled:
    """Of one launch: its kernel, what compiling found, and why it may not be shipped, if so."""

    kernel: str
    figures: Resources
    refused: str = ""

    def kept(self) -> dict[str, Any]:
        figures = {name: value for name, value in asdict(self.figures).items() if name in KEPT}
        return {"kernel": self.kernel, **figures, "refused": self.refused}

    @staticmethod
    def read(kept: Mapping[str, Any]) -> Compiled:
        return Compiled(kept["kernel"], Resources.read({name: kept[name] for name in KEPT}), kept["refused"])


Judged = Sequence[Compiled] | str
"""Of a configuration: its launches in order, or why it could not be asked for them."""


def judge(one: Candidate, judged: Judged, on: Peaks, architecture: Architecture) -> None:
    if isinstance(judged, str):
        one.refuse(judged)
        return
    refused = list(filter(None, dict.fromkeys(each.refused for each in judged)))
    if refused:
        one.refuse("; ".join(refused))
    else:
        one.judge(on, architecture, [(each.kernel, each.figures) for each in judged])


@dataclass
class Evidence:
    """source: of the kernels that were compiled (see harness/tune/store.py); cases: case -> configuration, in
    words -> what was found."""

    source: str = ""
    cases: dict[str, dict[str, Judged]] = field(default_factory=dict)

    def judge(self, on: Peaks, architecture: Architecture, batch: Iterable[tuple[Search, Candidate]]) -> None:
        """Of candidates, those that are known."""
        for search, one in batch:
            known = self.cases.get(search.case, {}).get(words(one.config))
            if known is not None:
                judge(one, known, on, architecture)

    @staticmethod
    def read(file: Path) -> Evidence:
        """Without anything where there is no file, or none that can be read."""
        try:
            found = json.loads(file.read_text())
            figures = [Compiled.read(each) for each in found["figures"]]
            tables = [
                {
                    found["configs"][int(at)]: one if isinstance(one, str) else [figures[i] for i in one]
                    for at, one in table.items()
                }
                for table in found["tables"]
            ]
            return Evidence(found["source"], {each["case"]: tables[each["table"]] for each in found["cases"]})
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return Evidence()

    def store(self, file: Path) -> None:
        """Raises UsageError where that cannot be done."""
        tables: list[dict[str, Judged]] = []
        cases = [{"case": case, "table": _placed(self.cases[case], tables)} for case in sorted(self.cases)]
        figures, configs = _Places(), _Places()
        coded = [
            {
                str(configs(config)): one if isinstance(one, str) else [figures(each.kept()) for each in one]
                for config, one in sorted(table.items())
            }
            for table in tables
        ]
        lists = {"figures": figures.all, "configs": configs.all, "tables": coded, "cases": cases}
        write(file, {"about": ABOUT, "source": self.source, **lists})


def _placed(found: Mapping[str, Judged], tables: list[dict[str, Judged]]) -> int:
    """The place of a table that holds what was found; one that lacks some of it gets it."""
    for at, table in enumerate(tables):
        if all(table.get(config, one) == one for config, one in found.items()):
            table.update(found)
            return at
    tables.append(dict(found))
    return len(tables) - 1


class _Places:
    """Of values, each once, in the order of their first use."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.known: dict[str, int] = {}

    def __call__(self, value: Any) -> int:
        text = json.dumps(value)
        if text not in self.known:
            self.known[text] = len(self.all)
            self.all.append(value)
        return self.known[text]


def file(folder: Path, implementation: str, place: Place) -> Path:
    return folder / place.folder / "compiled" / f"{implementation}.json"
