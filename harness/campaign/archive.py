"""The archive of a campaign: one zip file to carry home, which every command reads as the folder it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import files
from harness.archive import packed
from harness.errors import HarnessError

MOST_BYTES = 16_000_000


@dataclass(frozen=True)
class Packed:
    """left_out: steps whose files made it too large, the least valuable first"""

    file: Path
    size: int
    left_out: Sequence[str]


def pack(folder: Path, steps: Sequence[str], most: int = MOST_BYTES) -> Packed:
    """Beside the folder, all that is in it, unless that is more than `most` bytes: then without the last of
    the steps, as many as it takes. Raises HarnessError where it cannot be written."""
    target, left_out = folder.with_name(f"{folder.name}.zip"), list[str]()
    while True:
        data = packed(folder, lambda name: not set(Path(name).parts) & set(left_out))
        if len(data) <= most or len(left_out) == len(steps):
            break
        left_out.append(steps[len(steps) - 1 - len(left_out)])
    try:
        files.replace(target, data)
    except OSError as error:
        raise HarnessError(f"cannot write {target}: {error.strerror}; {folder} is whole") from None
    return Packed(target, len(data), left_out)
