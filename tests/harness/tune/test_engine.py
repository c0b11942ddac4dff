"""Races of engines' Triton kernels: which configurations are raced against the engine's own, and what goes
into the engine's tables. Times are made up."""

import json
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest

import kernels
from harness.cli.run_display import RaceTables
from harness.errors import NothingRan, UsageError
from harness.results.schema import CaseDone, RaceSettings, Verdict
from harness.tune import configs, race
from harness.tune.configs import NOT_KEPT, ask_tables, raced_configs
from harness.tune.race import Race, TuneRequest, implementations_here, would_race
from harness.tune.store import store_winner
from kernels.binding import BindingError, Function
from kernels.block_scale_gemm.providers.engines import LOOK_UP, GemmTables
from kernels.engine_tuning import LADDER, EngineConfig, EngineTable, nearest_of
from kernels.fused_moe.providers import engine_triton
from kernels.op import Unsupported
from kernels.platform import Platform
from kernels.support import Support
from kernels.tuning import Target, values
from shapes.case import text_of
from tests.support.workers_here import WorkerHere
from tests.support.written_runs import a_cell, a_run

H200 = Target("cuda", "sm_90", 132, "NVIDIA H200", shared=232448)
ON = Platform("cuda", "sm_90", "cuda:0", "NVIDIA H200")
FILE = "N=6144,K=1536,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
NOW = values(EngineConfig(64, 128, 128, 32, 4, 2))
FAST = values(EngineConfig(16, 64, 128, 1, 4, 4))
OP = kernels.OPS["block_scale_gemm"]
CASE = OP.case({"m": 24, "n": 6144, "k": 1536})


def by_default(entry):
    """What an engine without a table uses."""
    return EngineTable(entry, "the engine's default", {FILE: dict.fromkeys(LADDER, entry)})


TABLE = by_default(NOW)


def row(op: str, name: str = "vllm.triton"):
    return next(i for i in kernels.implementations(op) if i.name == name)


@pytest.fixture
def gemm():
    return row("block_scale_gemm")


def test_the_engine_is_told_nothing_where_its_own_choice_is_the_baseline(gemm):
    entries, search = raced_configs(gemm, CASE, H200, 5, {CASE.key: TABLE})
    assert entries[0] is None and NOW not in entries
    assert (len(entries), search.raced, search.baseline) == (6, 6, NOW)
    assert search.considered == 6 + search.pruned[NOT_KEPT] > 300
    assert search.origin == "the engine's default"
    assert search.tables == {FILE: {str(m): NOW for m in LADDER}}
    assert len({tuple(each.values())[:3] for each in entries[1:]}) > 2, "one tile fills the race"


def test_the_baseline_does_not_race_itself(gemm):
    (_, first, second), _ = raced_configs(gemm, CASE, H200, 2, {CASE.key: TABLE})
    entries, _ = raced_configs(gemm, CASE, H200, 1, {CASE.key: by_default(first)})
    assert entries == [None, second], "the same draw without it"


def test_of_two_entries_that_are_as_near_the_first_in_the_file_is_taken():
    """`min(configs.keys(), key=lambda x: abs(x - M))` of vLLM and SGLang."""
    assert [nearest_of(own, 20) for own in ((16, 24), (24, 16))] == [16, 24]


def test_what_the_engine_takes_near_m_enters_first(gemm, monkeypatch):
    own = {
        m: values(EngineConfig(8, 32, 128, 1, 4, stages))
        for m, stages in ((16, 5), (48, 4), (96, 3), (512, 2))
    }
    own[24] = {"USE_TMA": True, **FAST}  # which is more than EngineConfig says
    stub = SimpleNamespace(own=lambda N, K, block_n, block_k: own, device=lambda: "NVIDIA H200")
    monkeypatch.setitem(sys.modules, "an_engine", stub)
    asked = {"find_table": Function("an_engine.own", needs="N K block_n block_k")}
    tables = replace(gemm.tables, **asked, find_device=Function("an_engine.device"))
    case = OP.case({"m": 16, "n": 6144, "k": 1536})
    table = tables.engine_table(OP.sizes(case.sizes))
    assert (table.entry, table.origin) == (own[16], "the engine's table at M = 16")
    assert [*table.files] == [FILE] and [*table.files[FILE]] == [*LADDER]
    entries, _ = raced_configs(gemm, case, H200, 4, {case.key: table})
    first, *near = entries[:4]
    assert first is None and near == [own[48], own[96], own[512]]
    assert len(entries) == 5 and own[16] not in entries


@pytest.mark.parametrize("target", [H200, Target("rocm", "gfx942", 304, "AMD Instinct MI300X", shared=65536)])
def test_configurations_have_room_and_are_right(gemm, target):
    sizes = OP.sizes({"m": 64, "n": 6144, "k": 1536})
    offered = list(gemm.configurations(target, sizes))
    assert len(offered) == len(set(offered)) > 100
    for config in offered:
        assert config.shared <= target.shared and config.BLOCK_SIZE_K in (64, 128)
        assert ("kpack" in values(config)) == (target.kind == "rocm")
        assert config.BLOCK_SIZE_M < 64 or config.GROUP_SIZE_M == 1, "one tile of rows has no groups"
    many = list(gemm.configurations(target, OP.sizes({"m": 1024, "n": 6144, "k": 1536})))
    largest = {
        warps: max(c.BLOCK_SIZE_M * c.BLOCK_SIZE_N for c in many if c.num_warps == warps) for warps in (4, 8)
    }
    of_cuda, of_rocm = {4: 64 * 128, 8: 128 * 128}, {4: 128 * 256, 8: 256 * 256}
    assert largest == (of_cuda if target is H200 else of_rocm), "two tiles of fp32 fill the registers"
    sglang = row("block_scale_gemm", "sglang.triton")
    depths = {config.BLOCK_SIZE_K for config in sglang.configurations(target, OP.sizes(CASE.sizes))}
    assert depths == ({64, 128} if target is H200 else {128}), "it raises those of a table off CUDA"
    of_moe = [
        next(row("fused_moe").configurations(target, kernels.OPS["fused_moe"].sizes({"tokens": tokens})))
        for tokens in (16, 17)
    ]
    assert [config.GROUP_SIZE_M for config in of_moe] == [1, 32], "with few rows the engines have no groups"


def raced(word: str, won: dict | None = FAST, against: dict | None = None, status: str = "ok") -> list:
    """Records of a case with the baseline, or the configuration that stood in for it, and a rival that is
    `word` than it."""
    facts = {"op": CASE.op, "case": CASE.key, "impl": "vllm.triton", "time_us": 10.0}
    other, this = a_cell(**facts, config=against), a_cell(**facts | {"status": status}, config=won)
    ratio = {"faster": (1.25, 1.2, 1.3), "same": (1.0, 0.99, 1.01), "slower": (0.8, 0.7, 0.9)}[word]
    told = dict(zip(("ratio", "low", "high"), ratio, strict=True), verdict=word, confidence=0.95, noise=0.01)
    verdict = Verdict(case=CASE.key, a=this.name, b=other.name, about="baseline", **told)
    tables = {FILE: {str(m): dict(entry) for m, entry in TABLE.files[FILE].items()}}
    found = {"anchor": NOW, "origin": TABLE.origin, "considered": 9, "pruned": {}, "raced": 2}
    done = {"measured_s": 1, "setup_s": 1, "rounds": 1, "blocks": 1, "stopped": "clear"}
    verdicts = [verdict] if status == "ok" else []
    return [other, this, *verdicts, CaseDone(case=CASE.key, entries={**found, "tables": tables}, **done)]


@pytest.fixture
def on_case(gemm, tmp_path):
    """Returns what is printed about the case, and its row."""

    def told(records: list) -> tuple[str, dict]:
        said: list[str] = []
        display = Mock()
        display.stored = lambda *stored: RaceTables.stored(SimpleNamespace(print=said.append), *stored)
        run = a_run().model_copy(update={"race": RaceSettings(keep=8, folder=str(tmp_path))})
        this = Race(gemm, H200, run, display)
        this.on_case(CASE, records)
        return " ".join(said), this.rows[0]

    return told


def test_a_winner_goes_into_the_engines_table(on_case, tmp_path):
    said, row = on_case(raced("faster"))
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    there = json.loads((tmp_path / FILE).read_text())
    assert list(there) == [str(m) for m in LADDER], "an M alone would serve all others"
    assert there.pop("24") == FAST and all(entry == NOW for entry in there.values())
    assert (tmp_path / FILE).read_text().startswith('{\n    "1": {\n        "BLOCK_SIZE_M": 64,\n')
    assert row["file"] == str(tmp_path / FILE) and row["against"] == NOW
    assert said.startswith(f"stored in {tmp_path / FILE}: BLOCK_SIZE_M=16 BLOCK_SIZE_N=64")


@pytest.mark.parametrize(("records", "text"), [
    (raced("same"), "leave it: the engine's default stays, nothing is written: BLOCK_SIZE_M=64"),
    (raced("slower"), "leave it: the engine's default stays, nothing is written: BLOCK_SIZE_M=64"),
    (raced("faster", status="wrong"), "nothing stored: there is no verdict"),
    (raced("faster", against=values(EngineConfig(32, 64, 128, 1, 4, 3))), "leave it: "),  # another baseline
])  # fmt: skip
def test_else_nothing_is_written(on_case, tmp_path, records, text):
    said, row = on_case(records)
    assert said.startswith(text)
    assert (list(tmp_path.iterdir()), row["file"]) == ([], None)


def test_winners_are_merged_with_what_is_there(tmp_path):
    present = {FILE: {"1": NOW, "64": NOW}, "down.json": {"1": FAST, "64": FAST}}
    (tmp_path / FILE).write_text(json.dumps({"triton_version": "3.6.0", "64": FAST, "8192": FAST}))
    assert store_winner(tmp_path, present, 100, FAST) == tmp_path / FILE
    there = json.loads((tmp_path / FILE).read_text())
    assert list(there) == ["triton_version", "1", "64", "100", "8192"]
    assert (there["1"], there["64"], there["100"]) == (NOW, FAST, FAST)
    assert list(json.loads((tmp_path / "down.json").read_text())) == ["1", "64", "100"]
    (tmp_path / FILE).write_text("[1, 2")
    with pytest.raises(UsageError, match=r"cannot merge a winner into .*; give another --out"):
        store_winner(tmp_path, present, 1, FAST)
    assert (tmp_path / FILE).read_text() == "[1, 2"


def test_the_engine_is_asked_in_a_process_of_its_own(gemm, monkeypatch):
    monkeypatch.setattr(configs, "WorkerProcess", WorkerHere)
    monkeypatch.setattr(type(gemm), "engine_table", lambda self, sizes: TABLE)
    assert ask_tables(gemm, [CASE], ON, 9) == {CASE.key: TABLE}

    def absent(*_: object) -> None:
        raise Unsupported("vllm is not installed")

    monkeypatch.setattr(type(gemm), "engine_table", absent)
    with pytest.raises(NothingRan, match=r"vllm.triton: its engine .*: vllm is not installed"):
        ask_tables(gemm, [CASE], ON, 9)


def test_a_table_of_the_second_product_is_written_beside(monkeypatch):
    """The M of SGLang's own table are kept, too."""
    up, down = {1: FAST, 5000: NOW}, {1: {**FAST, "USE_TMA": True}}
    stub = SimpleNamespace(
        take=lambda w1_shape, w2_shape, top_k, dtype, M, block_shape: {
            **up[1 if M < 2500 else 5000],
            "SPLIT_K": 1,
        },
        own=lambda E, N, dtype, block_n, block_k, down_moe=False: down if down_moe else up,
        name=lambda E, N, dtype, block_shape, down_moe=False: (
            f"E={E},N={N}{'_down' if down_moe else ''}.json"
        ),
    )
    monkeypatch.setitem(sys.modules, "an_engine", stub)
    monkeypatch.setattr(engine_triton, "version", lambda module: "3.6.0")
    tables = engine_triton.SglangMoeTables(
        find_entry=Function("an_engine.take", needs="w1_shape w2_shape top_k dtype M block_shape"),
        find_table=Function("an_engine.own", needs="E N dtype block_n block_k", wishes="down_moe"),
        find_name=Function("an_engine.name", needs="E N dtype block_shape", wishes="down_moe"),
        override=Function("an_engine.take"),
    )
    table = tables.engine_table(kernels.OPS["fused_moe"].sizes({"tokens": 4096}))
    folder = "configs/triton_3_6_0/E=256,N=256"
    assert list(table.files) == [f"{folder}.json", f"{folder}_down.json"]
    assert list(table.files[f"{folder}.json"]) == [*LADDER, 5000]
    main = table.files[f"{folder}.json"]
    assert (table.entry, main[64], main[5000]) == (NOW, FAST, NOW)
    assert table.files[f"{folder}_down.json"][4096] == down[1]
    down = {}  # engines take a table that says nothing for none
    assert len(tables.engine_table(kernels.OPS["fused_moe"].sizes({"tokens": 64})).files) == 1
    stub.own = lambda E, N, dtype, block_n, block_k: up  # an older SGLang
    assert list(tables.engine_table(kernels.OPS["fused_moe"].sizes({"tokens": 64})).files) == [
        f"{folder}.json"
    ]


def test_a_call_says_what_its_engine_takes_and_from_where(gemm, monkeypatch):
    own = {6144: {1: FAST, 4096: NOW}, 1536: {}}
    stub = SimpleNamespace(own=lambda N, K, block_n, block_k: own.get(N))
    monkeypatch.setitem(sys.modules, "an_engine", stub)
    tables = replace(gemm.tables, find_table=Function("an_engine.own", needs="N K block_n block_k"))
    calls = ((4096, 6144), (3, 6144), (3, 3072), (3, 1536))
    sizes = [OP.sizes({"m": m, "n": n, "k": 1536}) for m, n in calls]
    assert [tables.picked(each, None) for each in sizes] == [
        f"{text_of(NOW)} (the engine's table at M = 4096)",
        f"{text_of(FAST)} (the engine's table at M = 1)",
        f"{text_of(NOW)} (the engine's default)",
        f"{text_of(NOW)} (the engine's default)",
    ]
    assert tables.picked(sizes[0], EngineConfig(**FAST)) == f"{text_of(FAST)} (as told)"
    for lost in ("json.gone", "no_engine.own"):
        none = replace(tables, find_table=Function(lost, needs="N K block_n block_k"))
        assert none.picked(sizes[0], None) == ""


def test_files_of_the_product_are_named_as_the_engine_names_them(monkeypatch):
    """As in SGLang 0.5.23 and vLLM 0.33.0, where get_device_name_as_file_name gives no spaces."""
    stub = SimpleNamespace(device=lambda: "AMD Instinct MI300X", own=lambda N, K, block_n, block_k: None)
    monkeypatch.setitem(sys.modules, "an_engine", stub)
    own = Function("an_engine.own", needs="N K block_n block_k")
    names, now = [], []
    for name in ("sglang.triton", "vllm.triton"):
        tables = replace(
            row("block_scale_gemm", name).tables, find_table=own, find_device=Function("an_engine.device")
        )
        table = tables.engine_table(OP.sizes({"m": 1, "n": 3072, "k": 1536}))
        names += table.files
        now.append(table.entry)
    shape = "N=3072,K=1536,device_name=AMD_Instinct_MI300X,dtype=fp8_w8a8"
    assert names == [f"{shape},block_shape=[128, 128].json", f"{shape},block_shape=[128,128].json"]
    assert now == [values(EngineConfig(64, 128, 128, 32, 4, stages)) for stages in (3, 2)]


def test_engines_rows_are_raced_where_they_are_named(gemm, monkeypatch, tmp_path):
    monkeypatch.setattr(type(gemm), "available", lambda self, platform: Support(True))

    def here(impl: str | None, out: str | None = None, **more: bool) -> list[str]:
        asked = TuneRequest(op="block_scale_gemm", impl=impl, tuned=out, **more)
        return [i.name for i in implementations_here(asked, ON)]

    assert "vllm.triton" not in here(None)
    assert here("vllm.triton", str(tmp_path)) == here("vllm.triton", check=True) == ["vllm.triton"]
    with pytest.raises(
        UsageError, match=r"--out is missing: the folder for the tables of vllm.triton's engine"
    ):
        here("vllm.triton")


def test_a_dry_run_says_what_would_be_raced(gemm, monkeypatch, tmp_path):
    monkeypatch.setattr(type(gemm), "available", lambda self, platform: Support(True))
    monkeypatch.setattr(race, "target_of", lambda *_: H200)
    asked = TuneRequest(op="block_scale_gemm", impl="vllm.triton", case=["m=1,64 n=512 k=256"], dry_run=True,
                        keep=6, per_case="5s")  # fmt: skip
    lines = list(would_race([gemm], asked, ON))
    sizes = "n=512 k=256 fp8=e4m3fn scales=fp32"
    known = [len(list(gemm.configurations(H200, OP.sizes({"m": m, "n": 512, "k": 256})))) for m in (1, 64)]
    assert lines == [
        f"vllm.triton: m=1 {sizes}: up to 7 of {known[0]} configurations",
        f"vllm.triton: m=64 {sizes}: up to 7 of {known[1]} configurations",
        "vllm.triton: 2 cases, 14 configurations: 10 s of measuring, beside it about 52 s",
        "vllm.triton: against what the engine takes now; what is faster goes into tables in --out: "
        "copy it to vllm/model_executor/layers/quantization/utils/configs",
    ]
    alone = list(would_race([gemm], replace(asked, case=["m=64 n=512 k=256"]), ON))
    assert alone[1] == "vllm.triton: 1 case, 7 configurations: 5 s of measuring, beside it about 26 s"


def test_a_given_configuration_is_what_the_product_looks_up_and_only_then(monkeypatch):
    stub = ModuleType("an_engine")
    source = (
        f"def {LOOK_UP}(*_): return None\ndef multiply(m): return {LOOK_UP}(1, 2, 3, 4)\ndef other(m): pass\n"
    )
    exec(source, vars(stub))
    monkeypatch.setitem(sys.modules, "an_engine", stub)
    look_up, fast = vars(stub)[LOOK_UP], EngineConfig(**FAST)

    def tables(product: str) -> GemmTables:
        own = Function(f"an_engine.{LOOK_UP}", positions=4)
        return GemmTables("vllm", Function(f"an_engine.{product}", positions=1), own, own)

    overridden = tables("multiply").overridden(fast)
    with overridden():
        assert stub.multiply(7) == {0: FAST}
    with pytest.raises(RuntimeError), overridden():
        raise RuntimeError
    assert vars(stub)[LOOK_UP] is look_up and stub.multiply(7) is None
    with tables("other").overridden(None)():
        assert vars(stub)[LOOK_UP] is look_up
    with pytest.raises(BindingError, match=f"an_engine.other does not ask {LOOK_UP}"):
        tables("other").overridden(fast)
