"""JSON tables of vLLM and SGLang for their Triton kernels with block FP8 [128, 128]: GEMM and fused MoE.

One reader serves both engines; RULES has what differs. The reader follows vLLM 0.33.0 (`get_moe_configs` of
fused_moe.py, `get_w8a8_block_fp8_configs` of fp8_utils.py) and SGLang 0.5.23 (fused_moe_triton_config.py,
fp8_kernel.py). An entry is for a number of rows M. A call uses the entry of the nearest M, and of two that
are equally near, the one that comes first in the file.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels.engine_tuning import nearest_of
from kernels.tables import RULES_TOML, Entry, Found, Problem, files_text
from kernels.tables.files import Files, Place, TableError, json_object, within
from kernels.tuning import Target

Config = Mapping[str, Any]
"""A configuration of Triton: option -> value."""


@dataclass(frozen=True)
class Rules:
    """What differs between the engines (rules.toml)."""

    gemm: str
    """The package's folder of tables for GEMM."""
    moe: str
    """The package's folder of tables for MoE. SGLang's holds a folder for each version of Triton."""
    block: str
    """How the names of files write the block."""
    space: str
    """A pattern of what is replaced by `_` in a device's name."""
    variable: str
    """The environment variable that names another folder for MoE."""
    gemm_default: Config
    """The configuration of a GEMM without a table."""
    moe_defaults: Mapping[str, Sequence[tuple[float, Config]]]
    """By kind of platform, ascending: [most tokens, the configuration of a MoE without a table]."""
    below: str = ""
    """The subfolder of the variable's folder that has the tables; empty: that folder itself."""

    def moe_default(self, kind: str, tokens: int) -> Config:
        """The configuration of a MoE without a table. kind: of the platform"""
        configs = self.moe_defaults["rocm" if kind == "rocm" else "cuda"]
        return next(config for most_tokens, config in configs if tokens <= most_tokens)


RULES = {engine: Rules(**rules) for engine, rules in RULES_TOML["engines"].items()}

IMPOSSIBLE = "AMD_Instinct_MI3(00|08|25)X?_OAM"
"""A pattern of device names that no driver reports (_ROCM_DEVICE_ID_NAME_MAP of vLLM's platforms/rocm.py)."""
INVARIANT: Config = RULES_TOML["batch_invariant"]
"""What vLLM's MoE runs with VLLM_BATCH_INVARIANT=1."""
INVARIANT_NOTE = "VLLM_BATCH_INVARIANT: no table is read"

NO_FOLDER = "no such folder in the package, or none that may be read"
NAME = re.compile(r"[EN]=\d+,[NK]=\d+,device_name=(?P<device>[^,]*?)(?P<format>,.*?)?(_down)?\.json")
"""A name of a file. `format`: what `file_name` writes behind the device."""


class EngineTables:
    """The tables of one engine, by VLLM_TUNED_CONFIG_FOLDER, SGLANG_MOE_CONFIG_DIR and VLLM_BATCH_INVARIANT.
    SGLang uses none with --enable-deterministic-inference or torch.compile, which are not known here."""

    def __init__(self, engine: str, files: Files, environment: Mapping[str, str] = {}) -> None:
        """engine: one of RULES. Raises TableError for a variable's value that the engine does not accept."""
        self.engine = engine
        self._files = files
        self._rules = RULES[engine]
        own_folder = environment.get(self._rules.variable)
        self._setting = f"{self._rules.variable}={own_folder}"
        self._own_folder = None if own_folder is None else Path(own_folder, self._rules.below)
        invariant = environment.get("VLLM_BATCH_INVARIANT", "0") if engine == "vllm" else "0"
        if invariant not in ("0", "1"):
            raise TableError(f"VLLM_BATCH_INVARIANT={invariant}: vllm takes 0 or 1")
        self._invariant = invariant == "1"
        self._asked: dict[str, None] = {}  # names of files that were looked up, in order

    def gemm(self, target: Target, m: int, n: int, k: int) -> Found:
        """Looks up x [m, k] w [n, k]^T like w8a8_triton_block_scaled_mm or w8a8_block_fp8_matmul_triton."""
        name = self._name(target, f"N={n},K={k}")
        file = f"{self._rules.gemm}/{name}"
        self._asked[name] = None
        fallback = as_text(self._rules.gemm_default)
        if self._invariant:
            return Found(file, None, fallback, (INVARIANT_NOTE,))
        if not self._files.has(file):
            return Found(file, None, fallback)
        table = self._load(file)
        if stop := self._why_stopped(table, m, "BLOCK_SIZE_K"):
            return Found(file, None, stop)
        if not table.by_m:
            return Found(file, None, fallback, ("the file has no entry",))
        entry_m = nearest_of(table.by_m, m)
        notes = self._notes(target, table, m)
        config = table.by_m[entry_m]
        tile_k = config["BLOCK_SIZE_K"]
        is_raised = tile_k < 128 and (target.kind == "rocm" or 128 % tile_k != 0)
        if self.engine == "sglang" and is_raised:
            config = {**config, "BLOCK_SIZE_K": 128}
            notes.append(f"BLOCK_SIZE_K {tile_k} of the file is raised to 128")
        return Found(file, table.entry(entry_m, as_text(config)), notes=tuple(notes))

    def moe(self, target: Target, tokens: int, inter: int, experts: int) -> Found:
        """Looks up a fused MoE as try_get_optimal_moe_config of the engine does.

        SGLang has a second file, for the down projection. vLLM limits the K of a tile to that of a block
        (invoke_fused_moe_triton_kernel).

        inter, experts: the intermediate size and the experts of this rank, with a shared one that is fused
        """
        name = self._name(target, f"E={experts},N={inter}")
        shown = str(within(self._moe_root, name if self.engine == "vllm" else f"triton_*/{name}"))
        self._asked[name] = None
        if self._invariant:
            return Found(shown, None, as_text(INVARIANT), (INVARIANT_NOTE,))
        try:
            up = self._first(target, name)
            down = self._first(target, _down(name)) if self.engine == "sglang" else None
        except TableError as error:
            return Found(shown, None, f"none, sglang stops: {error}")
        file_of_tile_m = down or up  # of all its entries SGLang reads BLOCK_SIZE_M
        for table in filter(None, (up, down)):
            if stop := self._why_stopped(table, tokens, "BLOCK_SIZE_M" if table is file_of_tile_m else ""):
                return Found(table.file, None, stop)
        entry_m: int | None = None
        notes: list[str] = []
        config = self._rules.moe_default(target.kind, tokens)
        if up and up.by_m:
            entry_m = nearest_of(up.by_m, tokens)
            config = up.by_m[entry_m]
            notes += self._notes(target, up, tokens)
        elif up:
            notes.append(f"{up.file} has no entry")
        if self.engine == "vllm" and config["BLOCK_SIZE_K"] > 128:
            notes.append(f"BLOCK_SIZE_K {config['BLOCK_SIZE_K']} of the file runs as 128")
        kernel = as_text(config)
        if self.engine == "sglang" and (entry_m is not None or (down and down.by_m)):
            of_down, notes_on_down = self._down_config(target, tokens, down, config)
            kernel = f"up {kernel}; down {as_text(of_down)}"
            notes += [f"down: {note}" for note in notes_on_down]
        if up is None or entry_m is None:
            return Found(up.file if up else shown, None, kernel, tuple(notes))
        return Found(up.file, up.entry(entry_m, kernel), notes=tuple(notes))

    def _down_config(
        self, target: Target, tokens: int, down: Configurations | None, of_up: Config
    ) -> tuple[Config, list[str]]:
        """SGLang's configuration of the down projection beside that of up, and notes on it."""
        if down is None or not down.by_m:
            lacking = "no _down file" if down is None else "nothing in the _down file"
            return of_up, [f"{lacking}, so up's configuration"]
        config = down.by_m[nearest_of(down.by_m, tokens)]
        notes = self._notes(target, down, tokens)
        m_of_tile = of_up["BLOCK_SIZE_M"]
        if config["BLOCK_SIZE_M"] != m_of_tile:
            notes.append(f"BLOCK_SIZE_M {config['BLOCK_SIZE_M']} of the file becomes that of up")
        return {**config, "BLOCK_SIZE_M": m_of_tile}, notes

    def untuned(self, target: Target) -> dict[str, str]:
        """By a file's name, the missing tables that were looked for, as the engine's tuner names them."""
        texts: dict[str, str] = {}
        for name in self._missed(target):
            op = "block_scale_gemm" if name.startswith("N=") else "fused_moe"
            file = f"{self.engine}_{op}_missing.txt"
            texts[file] = f"{texts.get(file, '')}{name}\n"
        return texts

    def _missed(self, target: Target) -> list[str]:
        return [name for name in self._asked if not self._all_places(target, name)]

    def problems(self, target: Target) -> list[Problem]:
        """What is wrong with files of shapes that were looked up, one problem for each kind and folder."""
        found: list[Problem] = []
        if self._has_looked_up(is_moe=False):
            found += self._folder_problems(self._rules.gemm, self._device(target))
        moe_device = self._device(target, is_moe=True)
        if self._has_looked_up(is_moe=True):
            found += self._moe_problems(moe_device)
        if self._own_folder is not None:
            texts: Iterable[str] = ["no kernel of this deployment looks into it"]
            if self._has_looked_up(is_moe=True):
                texts = self._variable_problems(moe_device)
            found += [Problem(self._setting, 0, text) for text in texts]
        return [*_grouped(found), *self._elsewhere(target), *self._shadowed(target)]

    def _has_looked_up(self, is_moe: bool) -> bool:
        """Whether files for MoE, or those for GEMM, were looked up and are not ignored."""
        is_ignored = is_moe and self._invariant
        return not is_ignored and any(name.startswith("E=" if is_moe else "N=") for name in self._asked)

    def _moe_problems(self, device: str) -> Iterator[Problem]:
        """What is wrong in the folders for MoE."""
        try:
            for folder in self._folders:
                yield from self._folder_problems(folder, device)
        except TableError as error:
            stop = f"{error.reason}; sglang stops where it looks for a version"
            yield Problem(str(self._moe_root), 0, stop)

    def _variable_problems(self, device: str) -> Iterator[str]:
        """What is wrong with the folder that the variable names."""
        if self.engine == "sglang":
            shipped = [name for name in self._files.names(f"{self._rules.moe}/*/*") if f"={device}," in name]
            yield f"replaces the package's folder, in which {files_text(len(shipped))} of {device}"
        try:
            own_folders = [folder for folder in self._folders if isinstance(folder, Path)]
            names = [name for folder in own_folders for name in self._files.inside(folder)]
        except TableError:  # this is a problem already
            return
        if not any(name.startswith("E=") and NAME.fullmatch(name) for name in names):
            yield "no file in it is named E=...,N=...,device_name=....json"
        of_gemm = [name for name in names if name.startswith("N=")]
        if of_gemm:
            yield f"{files_text(len(of_gemm))} N=...,K=...: these are read only in the package"

    def _folder_problems(self, folder: Place, device: str) -> Iterator[Problem]:
        """Files of a folder that no look-up reads because of their names, and faults inside the others."""
        try:
            names = self._files.inside(folder)
        except TableError as error:
            yield Problem(str(folder), 0, error.reason)
            return
        if not names and isinstance(folder, str):
            yield Problem(folder, 0, NO_FOLDER)
        own_format = f",dtype=fp8_w8a8,block_shape={self._rules.block}"
        asked_shapes = {name.partition("device_name=")[0] for name in self._asked}
        never_read = Counter[str]()
        for name in names:
            parts = NAME.fullmatch(name)
            if not parts or name.partition("device_name=")[0] not in asked_shapes:
                continue
            if parts["device"] == device:
                format = parts["format"] or ""
                if format == own_format:
                    yield from self._table_problems(self._load(within(folder, name)))
                elif format.replace(" ", "") == own_format.replace(" ", ""):
                    never_read[f"with a block that {self.engine} writes as {self._rules.block}"] += 1
            elif _model(device) and _model(parts["device"]) == _model(device):
                other_name = f"for the device {parts['device']}; this one is {device}"
                if re.fullmatch(IMPOSSIBLE, parts["device"]):
                    other_name += ", and no driver reports that name"
                never_read[other_name] += 1
            elif not parts["device"]:
                never_read["without the device's name"] += 1
        for text, count in never_read.items():
            yield Problem(str(folder), 0, f"{files_text(count)} {text}")

    def _table_problems(self, table: Configurations) -> Iterator[Problem]:
        """What is wrong inside a file."""
        if table.broken:
            yield Problem(table.file, table.line, f"{table.broken}; {self.engine} stops where it loads this")
            return
        if not table.by_m:
            yield Problem(table.file, 0, "no entry, so the default runs")
        for reason in dict.fromkeys(table.bad.values()):
            ms = [m for m, other_reason in table.bad.items() if other_reason == reason]
            text = f"M {', '.join(map(str, ms))}: {reason}; a launch with it fails"
            yield Problem(table.file, table.lines.get(ms[0], 0), text)
        for text in table.doubts:
            yield Problem(table.file, 0, text)

    def _elsewhere(self, target: Target) -> Iterator[Problem]:
        """Shapes that have no file for this GPU, but one for another GPU of its vendor."""
        missed = self._missed(target)
        for is_moe in filter(self._has_looked_up, (False, True)):
            device = self._device(target, is_moe)
            try:
                folders = self._folders if is_moe else [self._rules.gemm]
                names = {name for folder in folders for name in self._files.inside(folder)}
            except TableError:  # this is a problem already
                continue
            others = set()
            for parts in filter(None, map(NAME.fullmatch, names)):
                other = parts["device"]
                is_of_vendor = other.split("_")[0] == device.split("_")[0]
                if is_of_vendor and parts.string.replace(f"={other},", f"={device},") in missed:
                    others.add(other)
            model = _model(device) or device
            other_models = sorted(other for other in others if _model(other) != model)
            if other_models:
                text = f"shapes without a file for {device} have one for {', '.join(other_models)}"
                yield Problem(str(self._moe_root if is_moe else self._rules.gemm), 0, text)

    def _shadowed(self, target: Target) -> Iterator[Problem]:
        """Files for MoE that were looked up and exist in more than one folder."""
        names = [name for name in self._asked if name.startswith("E=") and not self._invariant]
        if self.engine == "sglang":
            names = [file for name in names for file in (name, _down(name))]
        for name in names:
            places = self._all_places(target, name)
            if len(places) > 1:
                folders = ", ".join(Path(place).parent.name for place in places[1:])
                yield Problem(str(places[0]), 0, f"shadows the file of this name in {folders}")

    def _notes(self, target: Target, table: Configurations, m: int) -> list[str]:
        """What is doubtful about the entry that m rows use."""
        entry_m = nearest_of(table.by_m, m)
        notes = table.doubts
        if m > 2 * entry_m or 2 * m < entry_m:
            notes.append(f"the nearest M is {entry_m}, for {m}")
        if self.engine == "vllm":
            if table.triton and target.triton not in ("", table.triton):
                notes.append(f"tuned with Triton {table.triton}, here {target.triton}")
            if self._own_folder is not None and table.file.startswith(self._rules.moe):
                notes.append(f"not in {self._setting}")
        elif not table.file.startswith(self._rules.gemm):
            folder = Path(table.file).parent.name
            if folder != _version_folder(target):
                version = target.triton or "of unknown version"
                notes.append(f"of {folder}, as there is none for Triton {version}")
        return notes

    def _why_stopped(self, table: Configurations, m: int, read_from_all: str) -> str:
        """What happens instead of a launch; empty where nothing fails. read_from_all: the size, if any, that
        SGLang reads from every entry of the table, not only from the one that it uses"""
        if table.broken:
            return f"none, {self.engine} stops: {table.broken}"
        if self.engine == "sglang" and read_from_all:
            for bad_m, reason in table.bad.items():
                config = table.by_m[bad_m]
                if not isinstance(config, dict) or not isinstance(config.get(read_from_all), int):
                    return f"none, sglang stops at M {bad_m}: {reason}"
        if table.by_m:
            entry_m = nearest_of(table.by_m, m)
            if entry_m in table.bad:
                return f"none, the launch fails at M {entry_m}: {table.bad[entry_m]}"
        return ""

    @property
    def _moe_root(self) -> Place:
        return self._rules.moe if self._own_folder is None else self._own_folder

    def _device(self, target: Target, is_moe: bool = False) -> str:
        """The device in files' names: vLLM's get_device_name_as_file_name, SGLang's get_device_name."""
        name = re.sub(self._rules.space, "_", target.device)
        is_h200 = self.engine == "vllm" and is_moe and "H200" in name.split("_")
        return "NVIDIA_H200" if is_h200 else name

    def _name(self, target: Target, shape: str) -> str:
        """The name of a file. shape: `N=512,K=7168` or `E=256,N=256`"""
        return file_name(shape, self._device(target, shape.startswith("E")), self._rules.block)

    def _places(self, target: Target, name: str) -> Iterator[Place]:
        """The places where a file exists. The engine uses the first. Raises TableError."""
        folders: list[Place] = [self._rules.gemm]
        if name.startswith("E="):
            exact = within(self._moe_root, _version_folder(target))
            # SGLang lists the other folders, and stops at a wrong name, only if this one lacks the file.
            if self.engine == "sglang" and self._files.has(within(exact, name)):
                yield within(exact, name)
            folders = [folder for folder in self._folders if folder != exact]
        for folder in folders:
            if self._files.has(within(folder, name)):
                yield within(folder, name)

    def _first(self, target: Target, name: str) -> Configurations | None:
        place = next(self._places(target, name), None)
        return None if place is None else self._load(place)

    def _all_places(self, target: Target, name: str) -> list[Place]:
        """The places where a file exists. Where SGLang stops, the list ends."""
        places: list[Place] = []
        with contextlib.suppress(TableError):
            places.extend(self._places(target, name))  # keeps the places before the error
        return places

    @functools.cached_property
    def _folders(self) -> list[Place]:
        """The folders for MoE, in the engine's order. Raises TableError where SGLang stops at one."""
        if self.engine == "vllm":
            return [self._rules.moe] if self._own_folder is None else [self._own_folder, self._rules.moe]
        names = self._files.inside(self._moe_root)
        if isinstance(self._moe_root, str):
            # A zip lists only files, so the folders follow from the names of the files in them.
            names += [name.split("/")[-2] for name in self._files.names(f"{self._moe_root}/*/*")]
            if not names:
                raise TableError(NO_FOLDER, self._moe_root)
        by_version: dict[tuple[int, ...], str] = {}
        for name in names:
            if name.startswith("triton_"):
                try:
                    by_version[tuple(int(part) for part in name.removeprefix("triton_").split("_"))] = name
                except ValueError:
                    raise TableError(f"the name {name} is not triton_ and a version") from None
        return [within(self._moe_root, by_version[version]) for version in sorted(by_version, reverse=True)]

    @functools.cache  # noqa: B019  # an engine is read once in a process
    def _load(self, place: Place) -> Configurations:
        file = str(place)
        says_triton = self.engine == "vllm" and not Path(file).name.startswith("N=")
        try:
            return parse(file, self._files.text(place), says_triton)
        except TableError as error:
            return Configurations(file, broken=error.reason)


def file_name(shape: str, device: str, block: str) -> str:
    """The name of a table's file. shape: `N=512,K=7168` or `E=256,N=256`; block: that of Rules."""
    return f"{shape},device_name={device},dtype=fp8_w8a8,block_shape={block}.json"


def _version_folder(target: Target) -> str:
    return f"triton_{target.triton.replace('.', '_')}"


def _down(name: str) -> str:
    return f"{name.removesuffix('.json')}_down.json"


def _model(device: str) -> str:
    """The model of a device: `MI325` for AMD_Instinct_MI325X and AMD_Instinct_MI325_OAM; empty if unknown."""
    for part in re.split(r"[\s/_-]", device.upper()):
        if re.fullmatch(r"[A-Z]+\d+X?", part):
            return part.removesuffix("X")
    return ""


def _grouped(problems: list[Problem]) -> list[Problem]:
    """The problems, with one in place of several whose text and folder are the same."""
    alike: dict[tuple[str, str], list[Problem]] = defaultdict(list)
    for problem in problems:
        folder = problem.file.rpartition("/")[0]
        alike[folder, problem.text].append(problem)
    return [
        Problem(first.file, 0, f"{first.text}; {len(others)} more like it") if others else first
        for first, *others in alike.values()
    ]


# The contents of a file: configurations by M

TILE = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
"""The sizes without which a launch fails."""
OPTIONS = RULES_TOML["options"]
"""Options for which the kernels have defaults."""

KEY = re.compile(r'"(\s*\d+\s*)"\s*:')
"""An M in the text of a file."""


@dataclass(frozen=True)
class Configurations:
    """The contents of a file."""

    file: str
    """Its name in the package, or its path."""
    by_m: Mapping[int, Config] = field(default_factory=dict)
    """Configurations by M, in the file's order."""
    lines: Mapping[int, int] = field(default_factory=dict)
    """The number of each entry's line, by M."""
    bad: Mapping[int, str] = field(default_factory=dict)
    """Why a launch fails, by M, for the configurations with which it does."""
    triton: str = ""
    """The version of Triton that the file names."""
    broken: str = ""
    """Why the engine stops when it loads the file; empty where it loads."""
    line: int = 0
    """The line of what is broken; 0 if unknown."""

    def entry(self, m: int, kernel: str) -> Entry:
        return Entry(self.file, self.lines.get(m, 0), str(m), m, kernel)

    @property
    def doubts(self) -> list[str]:
        """Names options that no kernel has, such as a misspelled one; and says that there are few entries, as
        when a tuner was stopped, or only its last process wrote the file (vLLM #36840)."""
        doubts = []
        names = {name for m in self.by_m.keys() - self.bad.keys() for name in self.by_m[m]}
        if others := sorted(names - {*TILE, *OPTIONS}):
            doubts.append(f"no kernel is known to take {', '.join(others)}")
        ms = sorted(self.by_m)
        if 0 < len(ms) < 8:
            doubts.append(f"thin: only entries for M {', '.join(map(str, ms))}")
        elif ms and ms[0] > 64:
            doubts.append(f"thin: no entry below M {ms[0]}")
        return doubts


def parse(file: str, text: str, says_triton: bool) -> Configurations:
    """Reads a file's text. says_triton: whether the engine accepts the key `triton_version` beside the M."""
    if "\ufffd" in text:
        return Configurations(file, broken="not UTF-8")
    try:
        whole = json_object(text)
    except TableError as error:
        return Configurations(file, broken=error.reason, line=error.line)
    triton = str(whole.pop("triton_version", "")) if says_triton else ""
    lines = {int(key[1]): text.count("\n", 0, key.start()) + 1 for key in KEY.finditer(text)}
    by_m: dict[int, Config] = {}
    for key, config in whole.items():
        try:
            by_m[int(key)] = config
        except ValueError:
            return Configurations(file, broken=f"the key {key!r} is not a number of rows")
    bad = {m: reason for m, config in by_m.items() if (reason := _refused(config))}
    return Configurations(file, by_m, lines, bad, triton)


def _refused(config: object) -> str:
    """Why a launch with this configuration fails; empty where it does not."""
    if not isinstance(config, dict):
        return "not a configuration"
    if missing := [name for name in TILE if name not in config]:
        return f"no {', '.join(missing)}"
    wrong = [name for name in (*TILE, *OPTIONS) if not isinstance(config.get(name, 0), int)]
    wrong += [name for name in TILE if name not in wrong and config[name] < 1]
    return ", ".join(f"{name} is {config[name]!r}" for name in wrong)


def as_text(config: Config) -> str:
    """`16x128x128 group 1, 2 warps, 4 stages, waves_per_eu 0`: M, N and K of the tile, then the rest."""
    tile = "x".join(str(config[f"BLOCK_SIZE_{axis}"]) for axis in "MNK")
    parts = [f"{tile} group {config['GROUP_SIZE_M']}"]
    parts += [f"{config[f'num_{unit}']} {unit}" for unit in ("warps", "stages") if f"num_{unit}" in config]
    others = [name for name in config if name not in (*TILE, "num_warps", "num_stages")]
    return ", ".join([*parts, *(f"{name} {config[name]}" for name in others)])
