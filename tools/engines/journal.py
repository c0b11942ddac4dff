"""Journal of a comparison: rankings.jsonl, a line for each session and each ranking."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness.files import JsonLines, JsonObject


@dataclass(frozen=True)
class Settings:
    """What all sessions of a folder share, or their rankings are not alike."""

    threads: int
    quick: bool


@dataclass(frozen=True)
class Session:
    """When rankings were made, with what."""

    began: str
    settings: Settings
    machine: JsonObject
    versions: JsonObject
    commit: str


@dataclass(frozen=True)
class Ranked:
    """One ranking by one engine.

    seconds:   of a call, by callable; verdicts: about the baseline, by callable (see verdicts.Ranking)
    wall_s:    from the start of its process to its end
    others:    how many CPUs others than engine and loops kept busy meanwhile
    error:     why there is none
    """

    engine: str
    load: str
    ranking: int
    baseline: str
    wall_s: float
    others: float
    seconds: dict[str, float] = field(default_factory=dict)
    verdicts: dict[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def place(self) -> tuple[str, str, int]:
        return self.engine, self.load, self.ranking


class Journal:
    """Appends to, and reads, one folder."""

    def __init__(self, folder: Path) -> None:
        self.lines = JsonLines(folder / "rankings.jsonl", _line)

    def append(self, line: Session | Ranked) -> None:
        kind = {"kind": "session" if isinstance(line, Session) else "ranked"}
        self.lines.path.parent.mkdir(parents=True, exist_ok=True)
        self.lines.append(json.dumps(kind | asdict(line)))

    def read(self) -> tuple[list[Session], list[Ranked]]:
        """Rankings that failed only where no later one succeeded."""
        lines = list(self.lines.records()) if self.lines.path.exists() else []
        ranked = {line.place: line for line in lines if isinstance(line, Ranked)}
        return [line for line in lines if isinstance(line, Session)], list(ranked.values())


def _line(text: bytes) -> Session | Ranked:
    values = json.loads(text)
    if values.pop("kind") == "session":
        return Session(**values | {"settings": Settings(**values["settings"])})
    return Ranked(**values)
