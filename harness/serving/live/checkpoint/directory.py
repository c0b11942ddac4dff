"""The default model's directory: made here, nothing downloaded, kept under a name that says what is in it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.errors import NothingRan, UsageError
from harness.paths import cache
from harness.serving.live.checkpoint.shape import ModelShape, __file__

INDEX = "model.safetensors.index.json"
MADE = "made.json"  # written last: what was made, and each file's size


def default_model(shape: ModelShape | None = None, say: Callable[[str], None] = lambda line: None) -> Path:
    """The directory of the default model, made at the first call (about 0.8 GB, half a minute).

    A call that was stopped, or ran out of disk, is taken up where it ended. Raises NothingRan where the disk
    is full or `safetensors` and `tokenizers` (which come with vLLM) are missing.
    """
    shape = shape or ModelShape()
    folder = models_folder() / f"deepseek-small-{recipe_hash(shape)}"
    if _whole(folder):
        return folder
    part = folder.with_suffix(".part")
    with _disk_full_is_one_line(part, shape):
        part.mkdir(parents=True, exist_ok=True)
        with (part.with_suffix(".lock")).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _whole(folder):
                _make(shape, part, say)
                shutil.rmtree(folder, ignore_errors=True)
                part.rename(folder)
    return folder


def models_folder() -> Path:
    return cache() / "models"


def recipe_hash(shape: ModelShape) -> str:
    """Of the sizes, the seed, and the code that makes weights and tokenizer of them."""
    digest = hashlib.sha256(json.dumps(shape.facts(), sort_keys=True).encode())
    for module in ("shape.py", "weights.py", "tokenizer.py"):
        digest.update((Path(__file__).parent / module).read_bytes())
    return digest.hexdigest()[:16]


def check_model(folder: Path) -> dict[str, Any]:
    """The config.json of a model directory. Raises UsageError where an engine could not load it."""
    config = folder / "config.json"
    if not folder.is_dir():
        raise UsageError(f"no model directory {folder}; `--model default` makes a small one")
    try:
        facts = json.loads(config.read_text())
    except OSError as error:
        raise UsageError(f"broken model directory {folder}: config.json: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"broken model directory {folder}: config.json: {error}") from None
    if not isinstance(facts, dict) or not facts.get("architectures"):
        raise UsageError(f"broken model directory {folder}: config.json names no `architectures`")
    if missing := _missing_shards(folder):
        raise UsageError(f"broken model directory {folder}: {missing}")
    return facts


def _missing_shards(folder: Path) -> str:
    index = folder / INDEX
    if not index.exists():
        return ""
    try:
        wanted = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, OSError):
        return f"{INDEX} cannot be read"
    gone = [name for name in wanted if not (folder / name).is_file()]
    return f"{gone[0]} is missing ({len(gone)} of {len(wanted)} weight files)" if gone else ""


def _whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / MADE).read_text())["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _make(shape: ModelShape, folder: Path, say: Callable[[str], None]) -> None:
    try:
        from safetensors.torch import save_file

        from harness.serving.live.checkpoint import tokenizer, weights
    except ImportError as error:
        raise NothingRan(
            f"cannot make the default model: {error.name} is missing; tools/set_up.py --extra cpu brings it"
        ) from None
    index: dict[str, str] = {}
    parts = weights.shards(shape)
    for number, part in enumerate(parts, 1):
        file = folder / f"{part}.safetensors"
        names = file.with_suffix(".names.json")
        if not (file.exists() and names.exists()):
            say(f"making {file.name} ({number} of {len(parts)}) in {folder}")
            tensors = dict(weights.tensors(shape, part))
            scratch = file.with_suffix(".writing")
            save_file(tensors, scratch, metadata={"format": "pt"})
            scratch.rename(file)
            names.write_text(json.dumps(list(tensors)))
        index |= dict.fromkeys(json.loads(names.read_text()), file.name)
    for names in folder.glob("*.names.json"):
        names.unlink()
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    _write(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
    _write(folder / "config.json", shape.config())
    _write(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "temperature": 0.0})
    tokenizer.write_tokenizer(folder, shape.vocabulary)
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    _write(folder / MADE, {"shape": shape.facts(), "recipe": recipe_hash(shape), "sizes": sizes})


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")


@contextmanager
def _disk_full_is_one_line(folder: Path, shape: ModelShape) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # safetensors wraps the system's error in one of its own, with the text alone.
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        if full:
            raise NothingRan(
                f"no space left for the default model in {folder} (it needs {shape.bytes() / 1e9:.1f} GB): "
                "free some, or set XDG_CACHE_HOME to another disk; what is finished is not made again"
            ) from None
        if isinstance(error, OSError):
            raise NothingRan(f"cannot make the default model in {folder}: {error.strerror}") from None
        raise
