"""AITER's configurations of its Triton GEMM: in which folder, file and bucket of M a call looks them up.

Source: `aiter/ops/triton/utils/gemm_config_utils.py` `get_gemm_config`, called by `_get_config` of
`aiter/ops/triton/_triton_kernels/gemm/basic/gemm_a8w8_blockscale.py`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kernels.tables import Entry, Found, Problem
from kernels.tables.files import TableError

if TYPE_CHECKING:
    from kernels.tables.files import Files
    from kernels.tuning import Target

SOURCE = "aiter/ops/triton/utils/gemm_config_utils.py"
BOUNDS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""The M of the buckets M_LEQ_ and M_GEQ_, where the source does not tell others."""
FOLDER = "aiter/ops/triton/configs"
NAME = "GEMM-A8W8_BLOCKSCALE"
PRESHUFFLED_NAME = f"{NAME}_PRESHUFFLED"


def places(arch: str, name: str) -> list[tuple[str, str]]:
    """The folders in AITER's order, each as (how the names of its files for shapes begin, its default file).
    gfx1250, which has other folders, is in no engine's table here."""
    nested = f"{FOLDER}/{arch}/triton/gemm/{name.lower().replace('-', '_')}"
    flat = (f"{FOLDER}/{folder}/{arch}-{name}" for folder in ("gemm/triton", "gemm"))
    return [(f"{nested}/{name}", f"{nested}/DEFAULT.json"), *((stem, f"{stem}.json") for stem in flat)]


def bounds_of(files: Files) -> tuple[int, ...]:
    """The M of the buckets, as this copy's source has them."""
    try:
        said = re.search(r"STANDARD_M_BOUNDS = \(([\d, ]+)\)", files.text(SOURCE))
    except TableError:
        return BOUNDS
    return tuple(int(bound) for bound in re.findall(r"\d+", said[1])) if said else BOUNDS


class TritonTables:
    """The JSON files of `GEMM-A8W8_BLOCKSCALE`, for weights that are preshuffled or not."""

    def __init__(self, files: Files) -> None:
        self._files, self._bounds = files, bounds_of(files)
        self._read: dict[str, tuple[dict[str, Any], str] | None] = {}
        self._problems: dict[str, Problem] = {}
        self.asked: dict[str, set[str]] = defaultdict(set)
        """By NAME or PRESHUFFLED_NAME, the endings of the files for shapes that were looked for."""

    def gemm(self, target: Target, m: int, n: int, k: int, preshuffled: bool = False) -> Found:
        """Looks up y [m, n] = x [m, k] w [n, k]^T. A bucket in the shape's own file is a hit, but not the
        bucket `any`, which AITER calls untuned."""
        name = PRESHUFFLED_NAME if preshuffled else NAME
        stem, default = self._place(target, name)
        self.asked[name].add(f"-N={n}-K={k}.json")
        shaped = f"{stem}-N={n}-K={k}.json"
        if not self._files.has(default):
            return Found(shaped, None, f"AITER raises AssertionError: there is no {default}")
        file = shaped if self._files.has(shaped) else default
        if (read := self._json(file)) is None:
            return Found(shaped, None, f"AITER raises: {file} cannot be read")
        buckets, text = read
        bucket = self._bucket(buckets, m)
        if not isinstance(buckets.get(bucket), dict):
            return Found(shaped, None, f"AITER raises KeyError: {file} has no bucket for M={m}")
        line = text[: text.index(f'"{bucket}"')].count("\n") + 1 if f'"{bucket}"' in text else 0
        kernel = _described(buckets[bucket])
        if file == default or bucket == "any":
            return Found(shaped, None, f"{bucket} of {file}:{line}: {kernel}")
        bound = int(bucket.rsplit("_", 1)[1])
        return Found(shaped, Entry(file, line, f"N={n},K={k},{bucket}", bound, kernel))

    def _bucket(self, buckets: dict[str, Any], m: int) -> str:
        """The name of the bucket for m rows. It is `any` where no bound holds, even without such a bucket."""
        for bound in self._bounds:
            if m <= bound and f"M_LEQ_{bound}" in buckets:
                return f"M_LEQ_{bound}"
        for bound in reversed(self._bounds):
            if m >= bound and f"M_GEQ_{bound}" in buckets:
                return f"M_GEQ_{bound}"
        return "any"

    def _place(self, target: Target, name: str) -> tuple[str, str]:
        """The first folder that has a default file. AITER looks for the shape only there."""
        tried = places(target.arch, name)
        return next((place for place in tried if self._files.has(place[1])), tried[-1])

    def _json(self, file: str) -> tuple[dict[str, Any], str] | None:
        """The buckets of a file and its text. None where it cannot be read, which becomes a problem."""
        if file not in self._read:
            self._read[file] = None
            try:
                text = self._files.text(file)
                buckets = json.loads(text)
                if isinstance(buckets, dict):
                    self._read[file] = (buckets, text)
                else:
                    self._say(file, "is not an object of buckets")
            except TableError as error:
                self._say(file, f"cannot be read ({error.reason})")
            except json.JSONDecodeError as error:
                self._say(file, f"is not JSON: {error.msg}", error.lineno)
            except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
                self._say(file, f"is not JSON: {type(error).__name__}")
        return self._read[file]

    def _say(self, file: str, text: str, line: int = 0) -> None:
        self._problems[file] = Problem(file, line, f"{text}: AITER raises when it reads this file")

    def problems(self, target: Target) -> list[Problem]:
        """Files of the shapes that were looked up: those that no look-up reads, or that cannot be read."""
        found: list[Problem] = []
        for name, asked in self.asked.items():
            used, _ = self._place(target, name)
            stems = [stem for stem, _ in places(target.arch, name)]
            for stem in (*stems, f"{FOLDER}/gemm/gluon/{target.arch}-{name}"):
                shaped = [file for end in sorted(asked) if self._files.has(file := stem + end)]
                if shaped and stem == used:
                    found += self._short(shaped)
                elif shaped:
                    text = f"{_files(shaped)} never read: {used.rsplit('/', 1)[0]}/ comes first"
                    found.append(Problem(shaped[0], 0, text))
            foreign = [
                file
                for file in self._files.names(f"{FOLDER}/gemm/*-{name}*.json")
                if not file.rsplit("/", 1)[1].startswith("gfx") and file.endswith((*asked, f"-{name}.json"))
            ]
            if foreign:
                text = f"{_files(foreign)} never read: the name must begin with {target.arch}-"
                found.append(Problem(foreign[0], 0, text))
        return [*self._problems.values(), *found]

    def _short(self, shaped: list[str]) -> Iterator[Problem]:
        """Files without a bucket for large M, at which a call raises."""
        for file in shaped:
            buckets = (self._json(file) or ({"any": 0}, ""))[0]
            if not any(name == "any" or name.startswith("M_GEQ") for name in buckets):
                most = max((bound for bound in self._bounds if f"M_LEQ_{bound}" in buckets), default=0)
                yield Problem(file, 0, f"has no bucket for M above {most}: AITER raises KeyError there")


def _files(names: list[str]) -> str:
    return "this file is" if len(names) == 1 else f"{len(names)} files, the first here, are"


def _described(config: dict[str, Any]) -> str:
    """A configuration as text: `64x128x128, num_warps 4, ...`."""
    block = [f"BLOCK_SIZE_{side}" for side in "MNK"]
    rest = [f"{name} {value}" for name, value in config.items() if name not in block and value is not None]
    return ", ".join(["x".join(str(config.get(side, "?")) for side in block), *rest])
