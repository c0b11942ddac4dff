"""The archive of a campaign: one zip file to carry home, which every command reads as the folder it was."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from harness import files
from harness.archive import packed
from harness.errors import HarnessError

MOST_BYTES = 16_000_000
BESIDE = ("campaign.json", "tuned")
"""What is in the folder beside those of steps."""


@dataclass(frozen=True)
class Packed:
    """left_out: steps whose files made it too large, the least valuable first"""

    file: Path
    size: int
    left_out: Sequence[str]


def pack(folder: Path, steps: Sequence[str], most: int = MOST_BYTES) -> Packed:
    """Beside the folder, what the campaign made in it; if that is more than `most` bytes, without the last of
    the steps, as many as it takes. Raises HarnessError where it cannot be written."""
    target = folder.with_name(f"{folder.name}.zip")
    try:
        data = packed(folder, lambda name: bool(_step_of(name, steps)))
        left_out = _too_large(data, steps, most)
        if left_out:
            data = packed(folder, lambda name: _step_of(name, steps) not in {"", *left_out})
        files.replace(target, data)
    except OSError as error:
        raise HarnessError(f"cannot write {target}: {error.strerror}; {folder} is whole") from None
    return Packed(target, len(data), left_out)


def _step_of(name: str, steps: Sequence[str]) -> str:
    """To which step a file belongs, or what of BESIDE it is; empty for what is another's. A race's folder has
    its implementation's name behind the step's."""
    for part in PurePosixPath(name).parts[:2]:
        for known in (*BESIDE, *steps):
            if part == known or (part.startswith(f"{known}-") and "." in part):
                return known
    return ""


def _too_large(data: bytes, steps: Sequence[str], most: int) -> list[str]:
    """The last of the steps, without which it is not."""
    sizes: dict[str, int] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in archive.infolist():
            step = _step_of(member.filename, steps)
            sizes[step] = sizes.get(step, 0) + member.compress_size + 3 * len(member.filename) + 200
    left_out: list[str] = []
    size = len(data)
    for step in reversed(steps):
        if size <= most:
            break
        size -= sizes.get(step, 0)
        left_out.append(step)
    return left_out
