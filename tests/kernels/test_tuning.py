"""Which stored configuration a call gets, and what it says of where that comes from."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import kernels
from harness.catalogue.architectures import architectures
from harness.compile.launches import implementations
from harness.tune.store import path, store
from kernels import tuning
from kernels.op import Support
from kernels.triton_runtime import CPU
from kernels.tuning import Choice, StoredError, Target, Tunable, distance
from shapes.case import parse

H200 = Target("cuda", "sm_90", 132, "NVIDIA H200")


@dataclass(frozen=True)
class Sizes:
    m: int
    n: int = 1024
    fp8: str = "e4m3fn"


@dataclass(frozen=True)
class Config:
    rows: int
    swap: bool = False


class Tiled(Tunable):
    """Takes 16 to 128 rows, and no more than there are."""

    op, name, Config = "block_scale_gemm", "triton.tiled", Config

    def available(self, platform: Any) -> Support:
        return Support(True)

    def prepare(self, operands: Any, out: Any) -> Any:
        raise NotImplementedError

    def configurations(self, target: Target, sizes: Sizes) -> Iterator[Config]:
        yield from (Config(rows) for rows in (16, 32, 64, 128) if rows <= sizes.m)

    def heuristic(self, target: Target, sizes: Sizes) -> Config:
        return Config(16)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tuning, "TUNED", tmp_path / "shipped")
    return tmp_path / "shipped"


def keep(folder: Path, place: tuple[Target, bool], *rows: tuple[int, int]) -> Path:
    """Stores (m, rows of the tile) for a target, as measured there or as compiled for it."""
    target, measured = place
    file = path(folder, Tiled.name, target)
    for m, tile in rows:
        choice = {"case": f"m={m}", "features": asdict(Sizes(m)), "config": asdict(Config(tile))}
        store(file, target, choice, {"source": "x"})
    if not measured:
        file.write_text(file.read_text().replace('"measured": true', '"measured": false'))
    tuning.stored_choices.cache_clear()
    return file


def chosen(m: int, target: Target = H200) -> Choice:
    return Tiled().choose(target, Sizes(m))


COMPILED = Target("cuda", "sm_90", 132), False
BLACKWELL = Target("cuda", "sm_100", 148), False
AMD = Target("rocm", "gfx942", 304), False
MEASURED, ON_H100 = (H200, True), (replace(H200, device="NVIDIA H100"), True)
ON_CPU = CPU, True
OFFLINE = "compiled for sm_90, not measured, for"
NEAR = {COMPILED: [(64, 32), (4096, 32)], MEASURED: [(96, 64)]}
BOTH = {MEASURED: [(64, 64)], ON_H100: [(64, 16)]}


@pytest.mark.parametrize(
    ("stored", "m", "target", "rows", "origin"),
    [
        ({}, 64, H200, 16, "by rule: none of the stored fits sm_90 here"),
        ({COMPILED: [(64, 32), (4096, 128)]}, 64, H200, 32, f"{OFFLINE} this case"),
        ({COMPILED: [(64, 32), (4096, 128)]}, 100, H200, 32, f"{OFFLINE} the nearest case, m=64"),
        ({COMPILED: [(64, 32), (4096, 128)]}, 2000, H200, 128, f"{OFFLINE} the nearest case, m=4096"),
        # Measured goes before compiled, unless it is six binary orders away.
        (NEAR, 64, H200, 64, "measured on NVIDIA H200, for the nearest case, m=96"),
        (NEAR, 96, H200, 64, "measured on NVIDIA H200, for this case"),
        (NEAR, 4096, H200, 32, f"{OFFLINE} this case"),
        # So does what another device gave, within a factor of two.
        ({COMPILED: [(64, 32)], ON_H100: [(120, 16)]}, 64, H200, 16, "measured on NVIDIA H100, for the "
         "nearest case, m=120"),
        ({COMPILED: [(64, 32)], ON_H100: [(140, 16)]}, 64, H200, 32, f"{OFFLINE} this case"),
        # This device goes before another of its architecture, and that before another architecture.
        (BOTH, 64, H200, 64, "measured on NVIDIA H200, for this case"),
        (BOTH, 64, replace(H200, device="NVIDIA H100"), 16, "measured on NVIDIA H100, for this case"),
        ({BLACKWELL: [(64, 64)]}, 64, H200, 64, "compiled for sm_100, not measured, for this case, "
         "for want of any for sm_90"),
        ({BLACKWELL: [(64, 64)], COMPILED: [(8192, 128)]}, 256, H200, 128, f"{OFFLINE} the nearest case, "
         "m=8192"),
        # Another kind of device is no help.
        ({AMD: [(64, 64)]}, 64, H200, 16, "by rule: none of the stored fits sm_90 here"),
        ({COMPILED: [(64, 64)]}, 64, CPU, 16, "by rule: none of the stored fits cpu here"),
        ({COMPILED: [(64, 64)], ON_CPU: [(64, 32)]}, 64, CPU, 32, "measured on cpu, for this case"),
        # The nearest has more rows than there are.
        ({COMPILED: [(32, 64), (4096, 16)]}, 32, H200, 16, f"{OFFLINE} the nearest case, m=4096"),
    ],
)  # fmt: skip
def test_what_is_chosen_and_why(folder: Path, stored, m, target, rows, origin):
    for place, choices in stored.items():
        keep(folder, place, *choices)
    assert chosen(m, target) == Choice(Config(rows), origin)


def test_what_is_told_is_taken(folder: Path):
    file = keep(folder, COMPILED, (64, 32))
    file.with_stem(f"{Tiled.name}_by_another").write_text("nothing of ours")
    told = Tiled().configured({"rows": 128})
    assert told.choose(H200, Sizes(64)) == Choice(Config(128), "as told")
    assert chosen(64).config == Config(32)


def test_a_folder_of_ones_own_goes_before(folder: Path, monkeypatch, tmp_path: Path):
    keep(folder, COMPILED, (64, 32))
    keep(tmp_path / "own", COMPILED, (64, 64))
    assert chosen(64).config == Config(32)
    monkeypatch.setenv("KERNEL_BENCH_TUNED", str(tmp_path / "own"))
    tuning.stored_choices.cache_clear()
    assert chosen(64).config == Config(64)
    (tmp_path / "none").touch()
    monkeypatch.setenv("KERNEL_BENCH_TUNED", str(tmp_path / "none"))
    tuning.stored_choices.cache_clear()
    with pytest.raises(StoredError, match=r"KERNEL_BENCH_TUNED names .*none, which is not a folder"):
        chosen(64)


@pytest.mark.parametrize(("text", "why"), [
    ("{", "Expecting"),
    ("[]", "indices"),
    ('{"kind": "cuda"}', "lacks 'arch'"),
    ('{"choices": 3}', "lacks"),
])  # fmt: skip
def test_a_broken_file_is_named(folder: Path, text: str, why: str):
    file = keep(folder, COMPILED, (64, 32))
    file.write_text(text)
    tuning.stored_choices.cache_clear()
    with pytest.raises(StoredError, match=f"{file} cannot be read: .*{why}.*; tune again"):
        chosen(64)


def test_distance():
    assert distance({"m": 64}, {"m": 64}) == 0
    assert distance({"m": 127, "n": 63}, {"m": 31, "n": 255}) == pytest.approx(4)
    assert distance({"m": 64, "fp8": "a"}, {"m": 64, "fp8": "b"}) == 4
    assert distance({"m": 64}, {}) == 4


def test_storing_merges_by_case(folder: Path):
    keep(folder, COMPILED, (64, 32), (32, 16))
    file = keep(folder, COMPILED, (64, 64))
    stored = json.loads(file.read_text())
    assert file == folder / "sm_90" / "triton.tiled.json"
    assert [(one["case"], one["config"]["rows"]) for one in stored["choices"]] == [("m=32", 16), ("m=64", 64)]
    assert not list(file.parent.glob(".*")), "what it wrote on the way is gone"
    assert keep(folder, MEASURED, (64, 64)).parent.name == "NVIDIA_H200"


@pytest.mark.parametrize("of", sorted(tuning.TUNED.glob("*/*.json")), ids=lambda p: "-".join(p.parts[-2:]))
def test_what_was_chosen_is_offered(of):
    file = json.loads(of.read_text())
    implementation = next(i for op in kernels.OPS for i in implementations(op) if i.name == of.stem)
    op, target = kernels.OPS[implementation.op], architectures()[file["arch"]].target
    for choice in file["choices"][::5]:
        sizes = op.sizes({**op.defaults(target.arch), **parse(choice["case"])[0]})
        assert choice["config"] in map(asdict, implementation.configurations(target, sizes))
