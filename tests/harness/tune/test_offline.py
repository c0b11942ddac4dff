"""`python -m harness tune` without a device: the estimate, the search that it makes exact, what is stored."""

import ast
import dataclasses
import gzip
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kernels
from harness.catalogue.architectures import architectures
from harness.compile.launches import implementations
from harness.compile.launches import tuned as cases_tuned
from harness.compile.resources import Product, Resources
from harness.tune import offline, store
from harness.tune.compile_records import CompiledLaunch, CompileRecords
from harness.tune.compile_records import file as records_file
from harness.tune.cost_model import HIDDEN, WITHIN, Peaks, estimate, held, least, peaks, reach, share
from harness.tune.offline import Compiling
from harness.tune.search import Search, _paired, fewest, run
from harness.tune.store import Place
from harness.workers.child.source_hash import bare
from kernels.platform import version
from kernels.tuning import TUNED, Demand, words
from shapes.case import Case, parse

pytestmark = pytest.mark.skipif(
    not version("torch") or not version("triton"), reason="needs torch and Triton"
)

SM_90 = architectures()["sm_90"]
ON = Peaks(units=10, flops={"fp8": 1e12}, memory=1e9, cache=1e10, latency=1e-6, launch=1e-6)
"""A unit multiplies 1e11 a second and reads 1e9 bytes a second."""

COMPUTE = Demand("k", programs=10, flops=1e8, dtype="fp8", read=1e3, in_flight=1e3, moved=1e4)


@pytest.mark.parametrize(
    ("changes", "resident", "rate", "microseconds", "hidden", "bound"),
    [
        # A latency, the products, a launch; hidden: cache, a latency and a wait for loads, memory.
        ({}, 1, 1.0, 1 + 1000 + 1, 1 + 2 + 10, "compute"),
        ({}, 1, 0.5, 1 + 2000 + 1, 1 + 2 + 10, "compute"),
        ({"programs": 11}, 1, 1.0, 2 + 2000 + 1, 2 + 4 + 10, "compute"),  # a second wave, of one program
        ({"programs": 11}, 2, 1.0, 1 + 2000 + 1, 2 + 2 + 10, "compute"),
        ({"programs": 40}, 2, 1.0, 2 + 4000 + 1, 4 + 4 + 10, "compute"),
        ({"flops": 0, "read": 1e6, "in_flight": 1e6}, 1, 1.0, 1 + 1000 + 1, 2 + 10, "cache"),
        ({"flops": 0, "read": 1e6, "in_flight": 100}, 1, 1.0, 1 + 10_000 + 1, 1000 + 10, "latency"),
        # One program loads and multiplies in turn; four on a unit hide each other's loads.
        ({"flops": 1e6, "read": 1e4, "overlaps": False}, 1, 1.0, 1 + 20 + 1, 10 + 10 + 10, "latency"),
        ({"flops": 1e6, "read": 1e4, "overlaps": False, "programs": 40}, 4, 1.0, 1 + 40 + 1, 40 + 21 + 10,
         "compute"),
        ({"moved": 1e7}, 1, 1.0, 10_000 + 1, 1000 + 1 + 1000, "memory"),  # 10,000 bytes a us
        # All programs together have 100 bytes on the way.
        ({"moved": 1e7, "in_flight": 10, "read": 10}, 1, 1.0, 100_000 + 1, 1000 + 0.01 + 10_000, "latency"),
    ],
)  # fmt: skip
def test_the_estimate_by_hand(changes, resident, rate, microseconds, hidden, bound):
    made = estimate(ON, [(dataclasses.replace(COMPUTE, **changes), resident, rate, 1.0)])
    assert made.seconds == pytest.approx((microseconds + HIDDEN * hidden) * 1e-6)
    assert made.bound == bound


def test_a_program_of_one_wave_multiplies_on_one_simd():
    """Four of them on a unit together have all of it."""

    def seconds(demand: Demand, *given: float, kernels: int = 1) -> float:
        return pytest.approx(estimate(ON, [(demand, *given)] * kernels).seconds)

    many = dataclasses.replace(COMPUTE, programs=40)
    assert seconds(COMPUTE, 1, 1.0, 0.25) == seconds(COMPUTE, 1, 0.25, 1.0).expected
    assert seconds(many, 4, 1.0, 0.25) == seconds(many, 4, 1.0, 1.0).expected
    assert seconds(COMPUTE, 4, 1.0, 0.25) == seconds(COMPUTE, 1, 1.0, 0.25).expected, "ten: one to a unit"
    several = seconds(COMPUTE, 4, 1.0, 0.25, kernels=3)
    assert several == 3 * seconds(COMPUTE, 4, 1.0, 0.25).expected, "kernels of a call add up"


WGMMA, TCGEN05, MFMA = (
    "wgmma.x.f32.bf16.bf16",
    "tcgen05.mma.cta_group::1.kind::f16",
    "v_mfma_f32_32x32x8_bf16",
)


@pytest.mark.parametrize(("arch", "instruction", "tile", "threads", "fed"), [
    # Bytes of a step of k over its flops, against 128 or 256 bytes a clock at the full rate.
    ("sm_90", WGMMA, (128, 128, "bf16"), 256, 1.0),  # (128 + 2 * 128) * 2 over 2 * 128 * 128: 96 a clock
    ("sm_90", WGMMA, (128, 32, "bf16"), 128, 128 / 192),
    ("sm_100", TCGEN05, (128, 64, "bf16"), 128, 128 / 192),
    ("gfx942", "v_mfma_f32_32x32x16_fp8_fp8", (128, 128, "fp8"), 256, 1.0),  # four waves of 64x64
    ("gfx942", MFMA, (64, 16, "bf16"), 256, 0.5),  # of 16x16: (4 * 16 + 64) * 2 over 2 * 64 * 16: 256
])  # fmt: skip
def test_shared_memory_feeds_large_tiles_only(arch, instruction, tile, threads, fed):
    m, n, dtype = tile
    figures = Resources(threads=threads, instructions=[instruction], products=[Product(m, n, 64, dtype)])
    found = share(dataclasses.replace(COMPUTE, dtype=dtype), figures, architectures()[arch])
    assert found == pytest.approx(fed)


def test_older_instructions_and_what_a_unit_holds():
    wide = Resources(registers=128, threads=128, instructions=["wgmma.mma_async.x.f32.e4m3.e4m3"])
    older = dataclasses.replace(wide, instructions=["mma.sync.aligned.x"])
    assert share(COMPUTE, wide, SM_90) == 1.0
    assert share(COMPUTE, older, SM_90) == SM_90.older_rate["fp8"] < 0.5
    assert share(dataclasses.replace(COMPUTE, flops=0, dtype="fp32"), older, SM_90) == 1.0
    assert share(dataclasses.replace(COMPUTE, dtype="bf16"), older, architectures()["gfx942"]) == 1.0
    assert held(wide, SM_90) == 4
    assert [reach(dataclasses.replace(wide, threads=n), SM_90) for n in (32, 128, 512)] == [0.25, 1.0, 1.0]


def test_no_estimate_is_below_the_bound():
    """Of 100 random kernels, whatever compiling finds."""
    draw = random.Random(1)
    for _ in range(100):
        read = 10 ** draw.uniform(2, 7)
        demand = Demand("k", draw.randrange(1, 500), 10 ** draw.uniform(5, 9), "fp8", read,
                        read / draw.uniform(1, 50), 10 ** draw.uniform(4, 8))  # fmt: skip
        bound = least(ON, [(demand, 32)])
        for resident in range(1, 33):
            for rate, part in ((0.3, 1.0), (1.0, 0.25), (1.0, 1.0)):
                assert estimate(ON, [(demand, resident, rate, part)]).seconds >= bound * (1 - 1e-12)


def test_each_architecture_knows_what_the_estimate_needs():
    for architecture in architectures().values():
        on = peaks(architecture)
        assert on.units == architecture.units and {"bf16", "fp8"} <= set(on.flops)
        assert on.memory < on.cache and 1e-7 < on.latency < 1e-5 and 1e-7 < on.launch < 1e-5
        assert set(architecture.older_rate) == set(architecture.older)
        assert {"cache_tbps", "latency_ns", "launch_us"} <= set(architecture.sources)


GEMM = implementations("block_scale_gemm")[0]
CASES = [Case("block_scale_gemm", sizes) for sizes in parse("m=1,300,4096 n=2112 k=7168")]


def made_up(launch: Any) -> Resources:
    """As a compiler may find it, without one: always the same for a launch, some too large."""
    draw = random.Random(launch.kernel + launch.data)
    options = json.loads(launch.data)["options"]
    return Resources(
        registers=draw.choice((32, 64, 128, 255)),
        shared_bytes=draw.choice((0, 40_000, 100_000, 240_000)),
        threads=32 * options["num_warps"],
        instructions=["wgmma.mma_async.sync.x.f32.e4m3.e4m3"],
    )


@pytest.fixture(scope="module")
def told() -> Iterator[list[int]]:
    """How many launches each call of the compiler was given; nothing is compiled."""
    counts: list[int] = []

    def compile_all(launches: Sequence[Any], done: Any = None, each: Any = None) -> list[Resources]:
        counts.append(len(launches))
        return [made_up(launch) for launch in launches]

    patch = pytest.MonkeyPatch()
    patch.setattr(offline, "compile_all", compile_all)
    yield counts
    patch.undo()


@pytest.fixture(scope="module")
def tuning(told: list[int]) -> tuple[Compiling, list[Search]]:
    compiling = Compiling(GEMM, SM_90)
    searches = compiling.searches(CASES)
    compiling.run(searches)
    return compiling, searches


def test_the_search_finds_the_best_and_judges_few_and_compiles_each_launch_once(tuning, told: list[int]):
    compiling, searches = tuning
    assert len(searches) == len(CASES)
    assert sum(told) == len(compiling.compiled)
    for search in searches:
        whole = compiling.searches([Case("block_scale_gemm", parse(search.case)[0])])[0]
        compiling.judge([(whole, one) for one in whole.candidates])
        whole.at = len(whole.candidates)
        assert search.best == whole.best < math.inf
        assert {words(one.config) for one in search.good} == {words(one.config) for one in whole.good}
    judged, all_of_them = (sum(n) for n in zip(*((s.at, len(s.candidates)) for s in searches), strict=True))
    assert judged < 0.7 * all_of_them


def test_a_kernel_that_is_launched_twice_has_the_figures_of_each_launch():
    demands = [SimpleNamespace(kernel=name) for name in ("rows", "sum", "rows")]
    assert _paired(demands, [("rows", 1), ("rows", 2), ("sum", 3)]) == [1, 3, 2]


def test_few_configurations_serve_all(tuning):
    _, searches = tuning
    picked = fewest(searches)
    assert set(picked) == {search.case for search in searches}
    for search in searches:
        assert picked[search.case].estimate.seconds <= search.best * (1 + WITHIN)
    least_alone = {words(search.good[0].config) for search in searches}
    assert len({words(one.config) for one in picked.values()}) <= len(least_alone)


def test_shards_leave_what_is_not_theirs(told, monkeypatch):
    """The second of two finds what the first compiled, and one that compiles all what both did."""
    known: dict[str, Resources] = {}

    def compile_all(launches: Sequence[Any], done: Any = None, each: Any = None) -> list[Resources]:
        known.update((offline.key_of(one), made_up(one)) for one in launches)
        return [made_up(one) for one in launches]

    monkeypatch.setattr(offline, "compile_all", compile_all)
    monkeypatch.setattr(offline, "recall", known.get)
    counts, waiting = [], []
    for shard in ((1, 2), (2, 2), (1, 1)):
        compiling = Compiling(GEMM, SM_90, shard)
        compiling.run(compiling.searches(CASES))
        counts.append(len(known))
        waiting.append(sum(launch is None for launch in compiling.compiled.values()))
    assert 0 < counts[0] < counts[1] == counts[2]
    assert waiting[0] > 0 == waiting[1] == waiting[2]
    assert set(compiling.results) == {search.case for search in compiling.searches(CASES)}


def test_what_is_stored_holds_and_a_worse_one_does_not(tuning, tmp_path: Path):
    compiling, searches = tuning
    what = offline.OfflineResult(compiling, searches)
    beside, own = records_file(tmp_path, GEMM.name, what.place), {search.case for search in searches}
    for made_of, further in ((store.source(GEMM), {"m=1"}), ("0" * 12, set())):
        CompileRecords(made_of, {"m=1": {"a": "E"}}).store(beside)
        file = what.store(tmp_path)
        kept = CompileRecords.read(beside)
        assert set(kept.cases) == own | further, "what was compiled of these kernels is kept, of others not"
    assert not what.differences(tmp_path)
    stored = store.read(file)["choices"]
    best = {search.case: round(search.good[0].seconds * 1e6, 2) for search in searches}
    assert {one["case"]: one["best_us"] for one in stored} == best
    several = max(searches, key=lambda search: len(search.good))
    another = offline._choice(several, several.good[-1])
    assert another["estimate_us"] > another["best_us"] == best[several.case], "it may serve several cases"

    def said(cases: Sequence[Case], choices: list[dict[str, Any]]) -> str:
        again = compiling.searches(cases)
        run(again, lambda batch: kept.judge(compiling.on, SM_90, batch))
        return "\n".join(offline.differences(GEMM, what.place, again, choices))

    def planted(**changes: Any) -> list[dict[str, Any]]:
        return [one | changes if one["case"] == search.case else one for one in stored]

    assert not said(CASES, stored), "figures say what compiling said"
    search = next(one for one in searches if one.at < len(one.candidates))
    worse = said(CASES, planted(config=dataclasses.asdict(search.candidates[-1].config)))
    assert search.case in worse and "not within 3% of the best; the best is" in worse and "\n" not in worse
    stale = said(CASES, planted(source="0" * 12))
    assert "stored from other kernels" in stale and "tune again" in stale and "\n" not in stale
    lacking = said(CASES, [one for one in stored if one["case"] != search.case])
    assert lacking == f"sm_90 {GEMM.name} {search.case}: nothing is stored"
    lost = next(iter(kept.cases[search.case]))
    kept.cases[search.case] = {lost: kept.cases[search.case][lost]}
    (case,) = parse(search.case)
    assert "may be better were not compiled" in said([Case("block_scale_gemm", case)], stored)


def test_an_implementation_that_fails_costs_a_configuration(told, monkeypatch):
    def prepare_for(*_: Any) -> Any:
        raise StopIteration

    monkeypatch.setattr(type(GEMM), "prepare_for", prepare_for)
    compiling = Compiling(GEMM, SM_90)
    searches = compiling.searches(CASES[:1])
    compiling.run(searches)
    assert set(searches[0].refusals) == {"StopIteration"} and not searches[0].good
    assert not offline.OfflineResult(compiling, searches).choices


def test_compile_records_are_a_line_for_each_configuration_and_result(tmp_path: Path):
    one, other = (CompiledLaunch("k", Resources(registers=n, threads=128)) for n in (32, 64))
    cases = {"m=1": {"a": [one], "b": "E"}, "m=2": {"a": [one], "c": [other]}, "m=3": {"a": [other]}}
    file = tmp_path / "x.jsonl.gz"
    CompileRecords("s", cases).store(file)
    lines = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert [(line["config"], line["cases"]) for line in lines] == [
        *(("a", ["m=1", "m=2"]), ("a", ["m=3"]), ("b", ["m=1"]), ("c", ["m=2"])),
    ]
    assert CompileRecords.read(file) == CompileRecords("s", cases)
    assert CompileRecords.read(tmp_path / "none.jsonl.gz") == CompileRecords()
    file.write_bytes(file.read_bytes()[:-20])
    assert CompileRecords.read(file) == CompileRecords()


def test_the_source_is_of_kernels_wherever_they_lie_and_not_of_their_comments(tmp_path: Path, monkeypatch):
    code = bare(ast.parse("def f(x):\n    '''Says.'''\n    return x  # why\n"))
    assert code == bare(ast.parse("def f(x):\n    return x\n"))
    assert code != bare(ast.parse("def f(x):\n    return x + 1\n"))
    returned = "['Return', ('value', ['Name', ('id', \"'x'\"), ('ctx', ['Load'])])]"
    assert code == (  # by every Python: one that adds fields leaves them empty here
        "['Module', ('body', [['FunctionDef', ('name', \"'f'\"), ('args', ['arguments', ('args', [['arg', "
        f"('arg', \"'x'\")]])]), ('body', [{returned}])]])]"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def source(folder: str, jit: str, text: str) -> str:
        """Of the kernel beside a file."""
        (tmp_path / "suite" / folder).mkdir(parents=True, exist_ok=True)
        module = f"suite.{folder.replace('/', '.')}"
        (tmp_path / "suite" / folder / f"{jit}.py").write_text(text)
        (tmp_path / "suite" / folder / "tile.py").write_text(f"from {module}.{jit} import f\n")
        return store.source(type("Tile", (), {"__module__": f"{module}.tile"})())

    text = "from kernels.fp8_jit import widen\n\n\ndef f(x):\n    return widen(x)\n"
    flat = source("flat", "tile_jit", text)
    assert flat == source("nested/triton", "moved_jit", text.replace("\n    return", " return"))
    assert flat != source("nested/triton", "moved_jit", "def f(x): return x\n")


def test_the_command(told, here, tmp_path: Path):
    asked = ("tune", "--op", "block_scale_gemm", "--target", "sm_90", "--case", "m=1,64 n=2112 k=7168")
    asked = (*asked, "--out", tmp_path)
    lacking = here(*asked, "--check")
    assert (lacking.returncode, lacking.stderr.count("nothing is stored")) == (1, 2)
    begun = [len(told)]
    done = here(*asked)
    assert done.returncode == 0 and "rows=" in done.stdout
    for shard in ("1/2", "2/2"):
        begun.append(len(told))
        here(*asked, "--shard", shard, "--out", tmp_path / "half")
    whole, *halves = (told[first] for first in begun)
    assert whole == sum(halves) and not (tmp_path / "half").exists()
    stored = json.loads((tmp_path / "sm_90" / "triton.split_k.json").read_text())
    about = {name: stored[name] for name in ("kind", "arch", "device", "measured")}
    assert about == {"kind": "cuda", "arch": "sm_90", "device": "", "measured": False}
    assert {"triton", "commit", "source", "criterion", "date"} <= set(stored["provenance"])
    assert {"case", "features", "config", "estimate_us", "bound_by", "resident"} <= set(stored["choices"][0])
    checked = here(*asked, "--check", "--json", "-")
    rows = json.loads(checked.stdout)["tuned"]
    assert (checked.returncode, [row["case"].split()[0] for row in rows]) == (0, ["m=1", "m=64"])
    assert all(row["judged"] <= row["configurations"] for row in rows)


SHIPPED = sorted(TUNED.glob("*/*.json"))


def test_all_that_is_chosen_by_compiling_is_shipped():
    there = {(path.parent.name, path.stem) for path in SHIPPED}
    of = {(arch, row.name) for op in kernels.OPS for row in implementations(op) for arch in architectures()}
    assert of <= there


@pytest.mark.parametrize("path", SHIPPED, ids=[f"{path.parent.name}-{path.stem}" for path in SHIPPED])
def test_what_is_shipped_is_the_best_by_the_criterion(path: Path):
    """A sample of cases, from the figures that are stored; `tune --check` compiles, and takes all cases."""
    file = store.read(path)
    if file["measured"]:
        return
    architecture = architectures()[file["arch"]]
    place = Place(file["kind"], file["arch"])
    implementation = next(i for op in kernels.OPS for i in implementations(op) if i.name == path.stem)
    records = CompileRecords.read(records_file(TUNED, implementation.name, place))
    compiling = Compiling(implementation, architecture)
    cases = cases_tuned(implementation.op)
    searches = compiling.searches(cases[:: max(1, len(cases) // 2)])
    run(searches, lambda batch: records.judge(compiling.on, architecture, batch))
    assert not offline.differences(implementation, place, searches, file["choices"])
