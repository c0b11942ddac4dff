"""AITER's configurations of its Triton GEMM: in which folder, file and bucket of M a call looks them up.

Source: `aiter/ops/triton/utils/gemm_config_utils.py` `get_gemm_config`, called by `_get_config` of
`aiter/ops/triton/_triton_kernels/gemm/basic/gemm_a8w8_blockscale.py`.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from kernels.tables import RULES_TOML, Entry, Found, Problem
from kernels.tables.files import Files, TableError, json_object
from kernels.tuning import Target

SOURCE = "aiter/ops/triton/utils/gemm_config_utils.py"
FOLDER = "aiter/ops/triton/configs"
NAME = "GEMM-A8W8_BLOCKSCALE"
PRESHUFFLED_NAME = f"{NAME}_PRESHUFFLED"


class Place(NamedTuple):
    """A folder in which AITER looks for the files of a table."""

    stem: str
    """How the names of its files for shapes begin."""
    default: str
    """Its file for all other shapes."""


def places(arch: str, name: str) -> list[Place]:
    """The folders of a table in AITER's order. name: NAME or PRESHUFFLED_NAME. gfx1250, which no engine here
    names, has others."""
    nested = f"{FOLDER}/{arch}/triton/gemm/{name.lower().replace('-', '_')}"
    flat = [f"{FOLDER}/{folder}/{arch}-{name}" for folder in ("gemm/triton", "gemm")]
    return [
        Place(f"{nested}/{name}", f"{nested}/DEFAULT.json"),
        *(Place(stem, f"{stem}.json") for stem in flat),
    ]


def bounds_of(files: Files) -> list[int]:
    """The M of the buckets M_LEQ_ and M_GEQ_, as this copy's source has them."""
    match = None
    with contextlib.suppress(TableError):
        match = re.search(r"STANDARD_M_BOUNDS = \(([\d, ]+)\)", files.text(SOURCE))
    return list(map(int, re.findall(r"\d+", match[1]))) if match else RULES_TOML["aiter"]["triton_bounds"]


class TritonTables:
    """The JSON files of `GEMM-A8W8_BLOCKSCALE`, for weights that are preshuffled or not."""

    def __init__(self, files: Files) -> None:
        self._files, self._bounds = files, bounds_of(files)
        self._problems: list[Problem] = []
        self._endings: dict[str, set[str]] = defaultdict(set)
        """By NAME or PRESHUFFLED_NAME, the endings of the files for shapes that were looked for."""

    def gemm(self, target: Target, m: int, n: int, k: int, preshuffled: bool = False) -> Found:
        """Looks up y [m, n] = x [m, k] w [n, k]^T. Hits are buckets of the shape's own file, except `any`."""
        name = PRESHUFFLED_NAME if preshuffled else NAME
        place = self._place(target, name)
        ending = f"-N={n}-K={k}.json"
        self._endings[name].add(ending)
        shaped = place.stem + ending  # the file for this shape
        if not self._files.has(place.default):
            return Found(shaped, None, f"AITER raises AssertionError: there is no {place.default}")
        file = shaped if self._files.has(shaped) else place.default
        contents = self._contents(file)
        if contents is None:
            return Found(shaped, None, f"AITER raises: {file} cannot be read")
        buckets, text = contents
        bucket = self._bucket(buckets, m)
        if not isinstance(buckets.get(bucket), dict):
            return Found(shaped, None, f"AITER raises KeyError: {file} has no bucket for M={m}")
        before, quoted_name, _ = text.partition(f'"{bucket}"')
        line = before.count("\n") + 1 if quoted_name else 0
        kernel = _described(buckets[bucket])
        if file == place.default or bucket == "any":
            return Found(shaped, None, f"{bucket} of {file}:{line}: {kernel}")
        _, _, bound = bucket.rpartition("_")
        return Found(shaped, Entry(file, line, f"N={n},K={k},{bucket}", int(bound), kernel))

    def _bucket(self, buckets: dict[str, Any], m: int) -> str:
        """The name of the bucket for m rows; `any`, which may be missing, where no bound holds."""
        for bound in self._bounds:
            if m <= bound and f"M_LEQ_{bound}" in buckets:
                return f"M_LEQ_{bound}"
        for bound in reversed(self._bounds):
            if m >= bound and f"M_GEQ_{bound}" in buckets:
                return f"M_GEQ_{bound}"
        return "any"

    def _place(self, target: Target, name: str) -> Place:
        """The first folder that has a default file, else the last one. Only there AITER looks for shapes."""
        in_order = places(target.arch, name)
        return next((place for place in in_order if self._files.has(place.default)), in_order[-1])

    @functools.cache  # noqa: B019  # a copy of AITER is read once in a process
    def _contents(self, file: str) -> tuple[dict[str, Any], str] | None:
        """The buckets of a file and its text. None where it cannot be read, which becomes a problem."""
        try:
            text = self._files.text(file)
            return json_object(text), text
        except TableError as error:
            reason = f"cannot be read ({error.reason}): AITER raises when it reads this file"
            self._problems.append(Problem(file, error.line, reason))
            return None

    def problems(self, target: Target) -> list[Problem]:
        """What is wrong with files of shapes that were looked up: not read, not readable, or no large M."""
        found: list[Problem] = []
        for name, endings in self._endings.items():
            used = self._place(target, name).stem
            stems = [place.stem for place in places(target.arch, name)]
            for stem in (*stems, f"{FOLDER}/gemm/gluon/{target.arch}-{name}"):
                candidates = [stem + ending for ending in sorted(endings)]
                shaped = [file for file in candidates if self._files.has(file)]
                if shaped and stem == used:
                    found += self._without_large_m(shaped)
                elif shaped:
                    text = f"{_subject(shaped)} never read: {used.rsplit('/', 1)[0]}/ comes first"
                    found.append(Problem(shaped[0], 0, text))
            of_kernel = self._files.names(f"{FOLDER}/gemm/*-{name}*.json")
            asked = [file for file in of_kernel if file.endswith((*endings, f"-{name}.json"))]
            if misnamed := [file for file in asked if not file.rpartition("/")[2].startswith("gfx")]:
                text = f"{_subject(misnamed)} never read: the name must begin with {target.arch}-"
                found.append(Problem(misnamed[0], 0, text))
        return [*self._problems, *found]

    def _without_large_m(self, shaped: list[str]) -> Iterator[Problem]:
        """Files without a bucket for large M, at which a call raises."""
        for file in shaped:
            contents = self._contents(file)
            if contents is None:  # this is a problem already
                continue
            buckets, _ = contents
            if not any(name == "any" or name.startswith("M_GEQ") for name in buckets):
                most = max((bound for bound in self._bounds if f"M_LEQ_{bound}" in buckets), default=0)
                yield Problem(file, 0, f"has no bucket for M above {most}: AITER raises KeyError there")


def _subject(names: list[str]) -> str:
    """The beginning of a sentence about these files."""
    return "this file is" if len(names) == 1 else f"{len(names)} files, the first here, are"


def _described(config: dict[str, Any]) -> str:
    """A configuration as text: `64x128x128, num_warps 4, ...`."""
    sides = [f"BLOCK_SIZE_{axis}" for axis in "MNK"]
    tile = "x".join(str(config.get(side, "?")) for side in sides)
    options = [f"{name} {value}" for name, value in config.items() if name not in sides and value is not None]
    return ", ".join([tile, *options])
