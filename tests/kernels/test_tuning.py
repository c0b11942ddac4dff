"""Which stored configuration a call gets, and what it says of where that comes from."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import kernels
from harness.catalogue.architectures import architectures
from harness.compile.launches import implementations, shipped, tuned
from harness.tune.store import Place, store
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


def keep(folder: Path, place: Place, *rows: tuple[int, int]) -> Path:
    """Stores (m, rows of the tile)."""
    choices = [
        {"case": f"m={m}", "features": asdict(Sizes(m)), "config": asdict(Config(tile))} for m, tile in rows
    ]
    tuning.stored.cache_clear()
    return store(folder, Tiled.name, place, choices, {"source": "x"})


def chosen(m: int, target: Target = H200) -> Choice:
    return Tiled().choose(target, Sizes(m))


COMPILED = Place("cuda", "sm_90")
MEASURED = Place("cuda", "sm_90", "NVIDIA H200", measured=True)
BLACKWELL = Place("cuda", "sm_100")
AMD = Place("rocm", "gfx942")


def test_the_nearest_case_is_taken(folder: Path):
    keep(folder, COMPILED, (64, 32), (4096, 128))
    assert chosen(64) == Choice(Config(32), "compiled for sm_90, not measured, for this case")
    near = "compiled for sm_90, not measured, for the nearest case, m=64"
    assert chosen(100) == Choice(Config(32), near)
    assert chosen(2000).config == Config(128)


def test_measured_goes_before_compiled_if_not_far(folder: Path):
    keep(folder, COMPILED, (64, 32))
    keep(folder, MEASURED, (96, 64))
    assert chosen(64) == Choice(Config(64), "measured on NVIDIA H200, for the nearest case, m=96")
    assert chosen(96).origin == "measured on NVIDIA H200, for this case"
    keep(folder, COMPILED, (4096, 32))
    assert chosen(4096).origin.startswith("compiled for sm_90"), "six binary orders away is too far"


def test_this_device_goes_before_another_of_its_architecture(folder: Path):
    keep(folder, MEASURED, (64, 64))
    keep(folder, dataclasses.replace(MEASURED, device="NVIDIA H100"), (64, 16))
    assert chosen(64).config == Config(64)
    other = chosen(64, dataclasses.replace(H200, device="NVIDIA H100"))
    assert other == Choice(Config(16), "measured on NVIDIA H100, for this case")


def test_another_architecture_comes_last_and_is_named(folder: Path):
    keep(folder, BLACKWELL, (64, 64))
    said = "compiled for sm_100, not measured, for this case, for want of any for sm_90"
    assert chosen(64) == Choice(Config(64), said)
    keep(folder, COMPILED, (8192, 128))
    assert chosen(256).config == Config(128), "however far"


def test_another_kind_of_device_is_no_help(folder: Path):
    keep(folder, AMD, (64, 64))
    assert chosen(64) == Choice(Config(16), "by rule: none of the stored fits sm_90 here")


def test_what_is_not_right_for_the_sizes_is_not_taken(folder: Path):
    keep(folder, COMPILED, (32, 64), (4096, 16))
    assert chosen(32).config == Config(16), "the nearest has more rows than there are"


def test_nothing_stored_is_by_rule():
    assert chosen(64) == Choice(Config(16), "by rule: none of the stored fits sm_90 here")


def test_what_is_told_is_taken(folder: Path):
    keep(folder, COMPILED, (64, 32))
    told = Tiled().configured({"rows": 128})
    assert told.choose(H200, Sizes(64)) == Choice(Config(128), "as told")
    assert chosen(64).config == Config(32)


def test_a_cpu_takes_what_is_stored_for_cpus(folder: Path):
    keep(folder, COMPILED, (64, 64))
    assert chosen(64, CPU) == Choice(Config(16), "by rule: none of the stored fits cpu here")
    keep(folder, Place("cpu", "cpu", measured=True), (64, 32))
    assert chosen(64, CPU) == Choice(Config(32), "measured on cpu, for this case")


def test_a_folder_of_ones_own_goes_before(folder: Path, monkeypatch, tmp_path: Path):
    keep(folder, COMPILED, (64, 32))
    keep(tmp_path / "own", COMPILED, (64, 64))
    assert chosen(64).config == Config(32)
    monkeypatch.setenv("KERNEL_BENCH_TUNED", str(tmp_path / "own"))
    tuning.stored.cache_clear()
    assert chosen(64).config == Config(64)
    monkeypatch.setenv("KERNEL_BENCH_TUNED", str(tmp_path / "none"))
    tuning.stored.cache_clear()
    with pytest.raises(StoredError, match=r"KERNEL_BENCH_TUNED names .*none, which is not a folder"):
        chosen(64)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting"),
        ("[]", "indices"),
        ('{"kind": "cuda"}', "lacks 'arch'"),
        ('{"choices": 3}', "lacks"),
    ],
)
def test_a_broken_file_is_named(folder: Path, text: str, why: str):
    path = keep(folder, COMPILED, (64, 32))
    path.write_text(text)
    tuning.stored.cache_clear()
    with pytest.raises(StoredError, match=f"{path} cannot be read: .*{why}.*; tune again"):
        chosen(64)


def test_distance():
    assert distance({"m": 64}, {"m": 64}) == 0
    assert distance({"m": 127, "n": 63}, {"m": 31, "n": 255}) == pytest.approx(4)
    assert distance({"m": 64, "fp8": "a"}, {"m": 64, "fp8": "b"}) == 4
    assert distance({"m": 64}, {}) == 4


def test_storing_merges_by_case(folder: Path):
    keep(folder, COMPILED, (64, 32), (32, 16))
    path = keep(folder, COMPILED, (64, 64))
    stored = json.loads(path.read_text())
    assert path == folder / "sm_90" / "triton.tiled.json"
    assert [(one["case"], one["config"]["rows"]) for one in stored["choices"]] == [("m=32", 16), ("m=64", 64)]
    assert not list(path.parent.glob(".*")), "what it wrote on the way is gone"
    assert keep(folder, MEASURED, (64, 64)).parent.name == "NVIDIA_H200"


def test_choosing_is_quick(folder: Path):
    """Among as many as a suite has cases, of four architectures."""
    for place in (COMPILED, BLACKWELL, AMD, Place("rocm", "gfx950")):
        keep(folder, place, *((m, 16) for m in range(1, 506)))
    chosen(64)
    started = time.process_time()
    for m in range(100):
        chosen(64 + m)
    assert (time.process_time() - started) / 100 < 0.05


@pytest.mark.parametrize("op", kernels.OPS)
def test_every_configuration_can_be_stored_and_found(op: str, folder: Path):
    """As JSON, by every implementation, for each architecture."""
    case = shipped(op)[0]
    for implementation in implementations(op):
        for architecture in architectures().values():
            target = architecture.target
            sizes = kernels.OPS[op].sizes({**kernels.OPS[op].defaults(target.arch), **case.sizes})
            *_, config = implementation.configurations(target, sizes)
            place = Place(target.kind, target.arch)
            one = {"case": case.text, "features": implementation.features(sizes), "config": asdict(config)}
            store(folder, implementation.name, place, [one], {"source": "x"})
            tuning.stored.cache_clear()
            found = implementation.choose(target, sizes)
            assert found.config == config and found.origin.endswith("for this case")


CANNOT_LAUNCH = {
    "block_scale_gemm": ("m=256 n=256 k=1024", {"rows": 256, "columns": 128, "stages": 3}),
    "mla_decode": ("batch=2 ctx=40..150 page=16", {"heads": 16, "tokens": 64, "stages": 2}),
    "fused_moe": ("tokens=16 experts=16 topk=4 hidden=256 inter=128", {"fuse": True, "stages": 3}),
}
"""On gfx942, which has 64 KB where gfx950 has 160: the compiler gave 98,304, 73,728 and 69,632 bytes."""


@pytest.mark.parametrize(("op", "text", "config"), [(op, *rest) for op, rest in CANNOT_LAUNCH.items()])
def test_what_cannot_launch_is_not_offered(op, text, config):
    (implementation,) = implementations(op)

    def offered(arch: str) -> bool:
        target = architectures()[arch].target
        sizes = kernels.OPS[op].sizes({**kernels.OPS[op].defaults(arch), **parse(text)[0]})
        return any(config.items() <= asdict(c).items() for c in implementation.configurations(target, sizes))

    assert offered("gfx950") and not offered("gfx942")


@pytest.mark.parametrize("path", sorted(tuning.TUNED.glob("*/*.json")), ids=lambda p: "-".join(p.parts[-2:]))
def test_what_was_chosen_is_offered(path):
    file = json.loads(path.read_text())
    implementation = next(i for op in kernels.OPS for i in implementations(op) if i.name == path.stem)
    op, target = kernels.OPS[implementation.op], architectures()[file["arch"]].target
    for choice in file["choices"][::5]:
        sizes = op.sizes({**op.defaults(target.arch), **parse(choice["case"])[0]})
        assert choice["config"] in map(asdict, implementation.configurations(target, sizes))


def test_what_is_tuned_spans_what_is_shipped():
    """Every combination of what is no amount: a choice for one would not be right for another."""
    words = ("heads", "page", "kv", "dtype", "ep", "shared", "inter", "hidden")
    for op in kernels.OPS:
        of_all, of_tuned = (
            {tuple(case.sizes.get(name) for name in words) for case in cases}
            for cases in (shipped(op), tuned(op))
        )
        assert of_all == of_tuned, op
