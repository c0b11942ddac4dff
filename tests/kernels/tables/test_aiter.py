"""AITER's tables: what a call finds, how files are merged, and what is said of broken ones.

What is expected is what AITER's own functions gave on its files and on such doubles: `get_CKGEMM_config`,
`update_config_files`, `get_2stage_cfgs` and `get_gemm_config` of commit e404860, run with stubs.
"""

import json
import os
import re
from pathlib import Path

import pytest

from kernels.tables import Problem
from kernels.tables.aiter import AiterTables, padded, why_other_rules
from kernels.tables.files import RECORDED, Files
from kernels.tuning import Target
from shapes.suites import suite

MI300X = Target("rocm", "gfx942", 304, "AMD Instinct MI300X")
MI308X = Target("rocm", "gfx942", 80, "AMD Instinct MI308X")
MI355X = Target("rocm", "gfx950", 256, "AMD Instinct MI355X")

GEMM = "aiter/configs/a8w8_blockscale_tuned_gemm.csv"
MODEL = "aiter/configs/model_configs/a8w8_blockscale_tuned_gemm_ds_v3.csv"
MOE = "aiter/configs/tuned_fmoe.csv"
MODEL_MOE = "aiter/configs/model_configs/ds_tuned_fmoe.csv"
HEADER = "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName"
MOE_KEY = (
    "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1"
)
MOE_HEADER = f"gfx,cu_num,{MOE_KEY},block_m,ksplit,kernelName1,kernelName2,us,run_1stage"

CORE = "# model_configs gfx_from_cu_num\n"
FUSED = """
_PADDED_M_TIERS = [32768, 131072]
    keys = (
        activation,
    )
"""


def gemm_row(m, us, *, gfx="gfx942", units=304, nk="2112,7168", rest="ck,7,2", name="kernel"):
    return f"{gfx},{units},{m},{nk},{rest},{us},{name}"


def moe_row(
    token, us, *, key="7168,256,256,8", act="Silu", fp8="fnuz", gfx="gfx942,304", flags="1,0", name="one"
):
    fp8 = f"torch.float8_e4m3{fp8}"
    texts = f"ActivationType.{act},torch.bfloat16,{fp8},{fp8},QuantType.per_1x128"
    return f"{gfx},{token},{key},{texts},{flags},32,0,{name},two,{us},0"


def csv(*rows, header=HEADER):
    return "\n".join((header, *rows)) + "\n"


def checkout(folder: Path, files: dict[str, str]) -> AiterTables:
    """A double of AITER's package with source of the newest rules and these files."""
    source = {
        "aiter/__init__.py": "",
        "aiter/jit/core.py": CORE,
        "aiter/fused_moe.py": FUSED,
        "aiter/configs/a8w8_blockscale_untuned_gemm.csv": "M,N,K\n",
        "aiter/configs/untuned_fmoe.csv": f"{MOE_KEY}\n",
        "aiter/configs/a8w8_blockscale_bpreshuffle_tuned_gemm.csv": csv(gemm_row(16, 5)),
        GEMM: csv(gemm_row(16, 5, nk="512,512")),
        MOE: csv(moe_row(16, 5, key="1024,128,8,2"), header=MOE_HEADER),
    }
    for name, text in {**source, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return AiterTables(Files("aiter", folder))


def problems(tables: AiterTables) -> list[Problem]:
    """What is wrong with the tables for the shapes of `gemm_row` and `moe_row`, which are looked up here."""
    for preshuffled in (False, True):
        tables.gemm(MI300X, 48, 2112, 7168, preshuffled)
    tables.moe(MI300X, 64, 7168, 256, 256, 8)
    return tables.problems(MI300X)


@pytest.fixture(scope="module")
def recorded():
    return AiterTables(Files("aiter", RECORDED / "aiter.zip"))


@pytest.mark.parametrize(("target", "preshuffled", "hits"), [
    (MI300X, False, (76, 21, 12)),
    (MI355X, False, (80, 80, 44)),
    (MI355X, True, (76, 57, 18)),
    (MI308X, False, (0, 0, 0)),
    (MI300X, True, (0, 0, 0)),
])  # fmt: skip
def test_coverage_of_the_suites(recorded, target, preshuffled, hits):
    found = []
    for name in ("r1-tp8", "r1-tp4", "r1-dp-ep8"):
        sizes = [case.sizes for case in suite(name).cases("block_scale_gemm")]
        asked = (recorded.gemm(target, each["m"], each["n"], each["k"], preshuffled) for each in sizes)
        found.append(sum(each.entry is not None for each in asked))
    assert tuple(found) == hits


@pytest.mark.parametrize(("target", "shape", "preshuffled", "line", "m", "us"), [
    (MI300X, (37, 2112, 7168), False, 7298, 48, 15.852),
    (MI300X, (20000, 2112, 7168), False, 35, 32768, 1348.5752),
    (MI355X, (64, 4096, 512), True, 308, 64, 3.5282),
])  # fmt: skip
def test_gemm_of_the_recorded_tables(recorded, target, shape, preshuffled, line, m, us):
    entry = recorded.gemm(target, *shape, preshuffled).entry
    assert (entry.line, entry.m, entry.us) == (line, m, us)
    assert entry.key == f"{target.arch},{target.units},{m},{shape[1]},{shape[2]}"


@pytest.mark.parametrize(
    ("target", "call", "line", "m", "notes"),
    [
        (MI355X, (48, 7168, 256, 257, 9), 358, 64, 0),
        (MI355X, (200000, 7168, 256, 257, 9), 367, 32768, 3),  # copied, above the peak, for fewer tokens
        (MI300X, (64, 7168, 2048, 33, 10, True), 388, 64, 0),
        (MI308X, (64, 7168, 256, 256, 8), 354, 64, 1),  # a row of Gelu
    ],
)
def test_moe_of_the_recorded_tables(recorded, target, call, line, m, notes):
    found = recorded.moe(target, *call)
    assert (found.entry.line, found.entry.m, len(found.notes)) == (line, m, notes), found


@pytest.mark.parametrize(("target", "call", "fallback"), [
    (MI355X, (48, 7168, 256, 256, 8), "1stage asm chosen by get_heuristic_kernel, block_m 32"),
    (MI300X, (64, 7168, 2048, 32, 8, True), "1stage asm chosen by get_heuristic_kernel, block_m 32"),
    (MI300X, (1, 7168, 256, 256, 8), "2stage CK .*, block_m 16, ksplit 14"),
    (MI300X, (16, 7168, 256, 256, 8), "2stage CK .*, block_m 16, ksplit 2"),
    (MI300X, (32, 7168, 256, 256, 8), "2stage CK .*, block_m 16, ksplit 0"),
    (MI300X, (64, 7168, 192, 256, 8), "2stage CK .*, block_m 64, ksplit 0"),
])  # fmt: skip
def test_moe_without_a_row(recorded, target, call, fallback):
    found = recorded.moe(target, *call)
    assert found.entry is None
    assert re.fullmatch(fallback, found.fallback)


def test_triton_of_the_recorded_tables(recorded):
    hit = recorded.triton.gemm(MI355X, 64, 7168, 2048).entry
    assert (hit.m, hit.line, hit.kernel.split(",")[0]) == (64, 38, "32x16x128")
    untuned = recorded.triton.gemm(MI355X, 600, 7168, 2048)
    assert (
        untuned.entry is None
        and "any of " in untuned.fallback
        and "N=7168-K=2048.json:62" in untuned.fallback
    )
    default = recorded.triton.gemm(MI300X, 1, 24576, 1536)
    assert default.entry is None and "gfx942-GEMM-A8W8_BLOCKSCALE.json" in default.fallback


@pytest.mark.parametrize(("m", "n", "tried"), [
    (3, 512, [3, 16, 4]),
    (300, 512, [300, 320, 512]),
    (2000, 512, [2000, 2048]),
    (5000, 512, [5000, 5120, 8192]),
    (10000, 24576, [10000, 10112, 8192]),
    (10000, 2112, [10000, 10112, 16384]),
    (0, 512, [0, 1]),
])  # fmt: skip
def test_m_is_looked_for_unpadded_then_padded(m, n, tried):
    assert padded(m, n) == tried


def test_files_of_models_join_the_default_file(tmp_path):
    old = csv("304,32,2112,7168,ck,7,0,4,", header=HEADER.removeprefix("gfx,"))
    tables = checkout(
        tmp_path,
        {
            MODEL: csv(gemm_row(16, 6)),
            MODEL.replace("ds_v3", "old"): old,
            MODEL.replace("tuned", "untuned"): csv(gemm_row(64, 1)),
        },
    )
    found = tables.gemm(MI300X, 3, 2112, 7168)
    assert (found.table, found.entry.file, found.entry.line) == (
        "a8w8_blockscale_tuned_gemm (3 files)",
        MODEL,
        2,
    )
    assert found.entry.kernel == "ck kernel, splitK 2"
    assert tables.gemm(MI300X, 32, 2112, 7168).entry.kernel == "ck kernelId 7, splitK 0"  # gfx from 304 CUs
    assert tables.gemm(MI300X, 64, 2112, 7168).notes == ("the shape has rows for M 16 to 32, none for 64",)


def test_a_variable_replaces_the_merge(tmp_path, monkeypatch):
    tables = checkout(tmp_path / "package", {MODEL: csv(gemm_row(16, 6), gemm_row(32, 7))})
    mine, other = tmp_path / "mine.csv", tmp_path / "missing.csv"
    mine.write_text(csv(gemm_row(64, 8), gemm_row(64, 8), gemm_row(64, 9, name="slower")))
    variable = "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE"

    def given(*paths):
        return AiterTables(tables.files, {variable: ":".join(map(str, paths))})

    alone = given(mine)
    assert alone.gemm(MI300X, 16, 2112, 7168).entry is None
    assert alone.gemm(MI300X, 64, 2112, 7168).entry.us == 8
    assert [str(each) for each in problems(alone) if variable in each.file or each.file == str(mine)] == [
        f"{variable}: replaces the 2 files of the package by {mine}: to add to them, name them too",
        f"{mine}:4: 1 row with a key that another row has: pandas raises ValueError at the first look-up",
    ]
    joined = given(mine, other, tables.files.path / MODEL)
    assert joined.gemm(MI300X, 16, 2112, 7168).entry.file == str(tables.files.path / MODEL)
    texts = [each.text for each in problems(joined)]
    assert "does not exist: AITER merges the other files" in texts
    assert any(
        "AITER keeps the fastest, rewrites its files and raises RuntimeError" in text for text in texts
    )
    assert "No such file" in problems(given(other))[0].text
    extract = AiterTables(Files("aiter", RECORDED / "aiter.zip"), {variable: str(mine)})
    assert extract.gemm(MI300X, 64, 2112, 7168).entry.us == 8


def ds(*rows, model=MODEL, header=HEADER):
    return {model: csv(*rows, header=header)}


GOOD = gemm_row(48, 15.8)
FAULTS = {
    "wrong CUs": (ds(gemm_row(48, 15.8, units=80)), ":2: 1 row for 80 CUs, of a shape without rows for 304",
     None),
    "duplicate": (ds(GOOD, gemm_row(48, 9.5)),
     ":3: 1 row with a key that another row has: AITER keeps the fastest, rewrites its files and raises "
     "RuntimeError", 9.5),
    "cut short": ({MODEL: csv(GOOD)[:-8]}, ":2: 1 row cut short: AITER reads the missing cells as nan", 15.8),
    "empty": ({MODEL: ""},
     ": cannot be read (No columns to parse from file): AITER raises at the first look-up", None),
    "too many cells": (ds(GOOD, GOOD.replace("48", "64") + ",1"),
     ": cannot be read (Error tokenizing data. C error: Expected 10 fields in line 3, saw 11): AITER "
     "raises at the first look-up", None),
    "open quote": (ds(GOOD, '"' + GOOD.replace("48", "64")),
     ": cannot be read (Error tokenizing data. C error: EOF inside string starting at row 2): AITER "
     "raises at the first look-up", None),
    "UTF-16": ({MODEL: csv(GOOD).encode("utf-16")},
     ": cannot be read (not UTF-8): AITER raises at the first look-up", None),
    "no header": ({MODEL: f"{GOOD}\n{GOOD.replace('48', '64')}\n"},
     ":1: has no column cu_num, M, N, K: its 1 rows are never found", None),
    "libtype": (ds(gemm_row(48, 15.8, rest="asm,1,0")), ":2: 1 row of libtype asm, which this GEMM refuses",
     15.8),
    "name of the file": ({"aiter/configs/model_configs/a8w8_blockscale_tunedgemm.csv": csv(GOOD)},
     ": is never read: its name does not contain the name of a table", None),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line(tmp_path, fault):
    files, line, us = FAULTS[fault]
    said = 'get_config_file("a8w8_blockscale_tuned_gemm")\n"untuned".join(name.rsplit("tuned", 1))\n'
    tables = checkout(tmp_path, {**files, "aiter/jit/core.py": CORE + said})
    before = [str(each) for each in problems(checkout(tmp_path / "good", ds(GOOD)))]
    said = [str(each) for each in problems(tables) if each.file in files]
    assert said == [f"{next(iter(files))}{line}"]
    assert all("\n" not in each for each in said) and not any(MODEL in each for each in before)
    found = tables.gemm(MI300X, 48, 2112, 7168)
    assert (found.entry and found.entry.us) == us
    assert any("AITER raises before" in note for note in found.notes) == ("raises" in line)


@pytest.mark.parametrize("line", ["\x0c", "\xa0", '"a\n\nb",1', "\t"])
def test_lines_that_pandas_and_others_count_differently(tmp_path, line):
    tables = checkout(tmp_path, {MODEL: f"{csv(GOOD)}{line}\n"})
    found = tables.gemm(MI300X, 48, 2112, 7168)
    assert (found.entry.us, found.entry.line) == (15.8, 2)
    assert all(str(each).isprintable() for each in problems(tables))


def test_a_pipe_is_not_waited_for(tmp_path):
    pipe = tmp_path / "mine.csv"
    os.mkfifo(pipe)
    tables = AiterTables(checkout(tmp_path / "package", {}).files, {"AITER_CONFIG_FMOE": str(pipe)})
    assert tables.moe(MI300X, 64, 7168, 256, 256, 8).entry is None
    assert any("is not a regular file" in str(each) for each in problems(tables))


def test_files_without_gfx(tmp_path):
    bare = HEADER.removeprefix("gfx,")
    tables = checkout(tmp_path, ds(GOOD.removeprefix("gfx942,"), header=bare) | {GEMM: csv(header=bare)})
    assert tables.gemm(MI300X, 48, 2112, 7168).entry.us == 15.8


def test_a_key_that_two_rows_of_one_file_for_moe_have(tmp_path):
    """get_2stage_cfgs keeps the first of one file."""
    mine = tmp_path / "mine.csv"
    mine.write_text(csv(moe_row(64, 90), moe_row(64, 50), header=MOE_HEADER))
    single = AiterTables(checkout(tmp_path / "package", {}).files, {"AITER_CONFIG_FMOE": str(mine)})
    found = single.moe(MI300X, 64, 7168, 256, 256, 8)
    assert (found.entry.us, found.notes) == (90, ())


@pytest.mark.parametrize("us", ["-1", "0", ""])
def test_a_row_without_a_time(tmp_path, us):
    tables = checkout(tmp_path / "without", ds(gemm_row(48, us)))
    assert tables.gemm(MI300X, 48, 2112, 7168).notes == ("the row has no time",)
    header = HEADER.replace("us", "milliseconds")
    tables = checkout(
        tmp_path / "no column", ds(gemm_row(48, us), header=header) | {GEMM: csv(header=header)}
    )
    assert tables.gemm(MI300X, 48, 2112, 7168).notes == ()


def test_rows_for_other_cus_are_no_fault_where_the_shape_has_its_own(tmp_path):
    tables = checkout(tmp_path, ds(GOOD, gemm_row(64, 9, units=80), gemm_row(64, 9, gfx="gfx950", units=256)))
    assert not [each for each in problems(tables) if "CUs" in each.text]


@pytest.mark.parametrize(
    "text",
    [
        csv(GOOD).replace("\n", "\r\n"),
        "\ufeff" + csv(GOOD),
        csv(GOOD.replace(",48,", ', "48",').replace(' "48"', '"48"')),
        csv("", "   ", GOOD),
        csv(GOOD.replace(",48,", ",48.0,")),
        csv(GOOD.replace(",48,", ", 48 ,")),
        csv(GOOD, gemm_row("", 3)),  # a missing cell makes the column float, and 48.0 is 48
        csv(f"{GOOD},99", header=f"{HEADER},us"),  # the second one is `us.1` to pandas
    ],
    ids=["crlf", "bom", "quoted", "blank lines", "float", "spaces", "nan beside it", "doubled column"],
)
def test_what_pandas_reads_is_read_and_not_reported(tmp_path, text):
    tables = checkout(tmp_path, {MODEL: text})
    assert tables.gemm(MI300X, 48, 2112, 7168).entry.us == 15.8
    assert not [each for each in problems(tables) if each.file == MODEL]


def test_problems_are_of_what_is_asked(tmp_path):
    """Rows of other shapes, and tables that no look-up uses, belong to another deployment. A row that is cut
    short is reported, as it may be of any shape."""
    broken = MODEL.replace("model_configs/", "model_configs/z")
    rows = [gemm_row(m, m + 1, units=80, nk=nk) for m in (16, 32) for nk in ("2112,7168", "512,7168")]
    files = {
        **ds(*rows, "gfx942,304,64,21", "gfx942,304,64,51"),
        broken: csv("gfx942,304,64,512,7168,x,1,0,0,1") + "gfx942,304,65,51",
        MODEL_MOE: "",
        "aiter/configs/model_configs/x_a8w8_blockscale_bpreshuffle_tuned_gemm.csv": "",
    }
    tables = checkout(tmp_path, files)
    assert tables.gemm(MI300X, 16, 2112, 7168).entry is None
    assert [str(each) for each in tables.problems(MI300X)] == [
        f"{MODEL}:6: 2 rows, the first here, cut short: AITER reads the missing cells as nan",
        f"{broken}:3: 1 row cut short: AITER reads the missing cells as nan",
        f"{MODEL}:2: 2 rows, the first here, for 80 CUs, of a shape without rows for 304",
    ]
    tables.environment = {"AITER_CONFIG_FMOE": "mine.csv"}
    assert (
        str(tables.problems(MI300X)[-1])
        == "AITER_CONFIG_FMOE: no kernel of this deployment looks into its table"
    )


def test_a_miss_tells_which_experts_have_rows(tmp_path):
    """SGLang's --ep-size 8 asks AITER for topk 8, of 9 columns; the rows are for topk 9 (ROCm/aiter#3739)."""
    rows = csv(moe_row(64, 1, key="7168,2048,33,9"), moe_row(64, 1, key="7168,256,33,9"), header=MOE_HEADER)
    found = checkout(tmp_path, {MODEL_MOE: rows}).moe(MI300X, 64, 7168, 2048, 33, 9, True)
    assert found.entry is None
    assert found.notes == ("there are rows for 33 experts with topk 9, not 33 with 8",)


def test_a_renamed_kernel_is_in_no_list(tmp_path):
    sizes = "256, 1, 128, 128, 16, 128, 256, 16, 16, 16, 16, 1, 2, [16, 16, 1], [16, 16, 1], 1, 2"
    instance = f'    7:   KernelInstance({sizes}, [1, 16, 1, 16], [8], "Intrawave", 1,),\n'
    name = "a8w8_blockscale_1x128x128_256x16x128x256_16x16_16x16_1x2_16x16x1_16x16x1"
    name += "_1x16x1x16_8_1x2_intrawave_v1"
    csrc = "csrc/ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale_instance.py"
    asm = {"aiter_meta/hsa/gfx942/fmoe/silu/list.csv": "knl_name,co_name\n_ZN5aiter4goodE,x\n"}
    shuffled = (
        "a8w8_blockscale_bpreshuffle_1x128x128_256x128x128x128_16x16_16x16_8x32x1_8x32x1_1x32x1x8_8_2x1"
    )
    sizes = "256, 1, 128, 128, 128, 128, 128, 16, 16, 16, 16, 8, 2, [ 8, 32, 1], [ 8, 32, 1], 2, 1"
    asm["csrc/ck_gemm_a8w8_blockscale_bpreshuffle/gemm_a8w8_blockscale_bpreshuffle_common.py"] = (
        f'    0:   kernelInstance({sizes}, [1, 32, 1,  8], [8], "Intrawave", 3,),\n'
    )
    preshuffled = "aiter/configs/a8w8_blockscale_bpreshuffle_tuned_gemm.csv"
    rows = (moe_row(1, 1, name="_ZN5aiter4goodE"), moe_row(2, 2, name="_ZN5aiter3oldE"))
    tables = checkout(
        tmp_path,
        {
            csrc: instance,
            **asm,
            **ds(
                gemm_row(16, 1, name=name),
                gemm_row(32, 2, name="a9w8"),
                gemm_row(64, 3, rest="cktile,7,2", name="whose names are not known here"),
            ),
            **ds(*rows, model=MODEL_MOE, header=MOE_HEADER),
            preshuffled: csv(
                gemm_row(16, 1, name=f"{shuffled}_intrawave_v3"),
                gemm_row(32, 2),
                gemm_row(64, 3, rest="asm,7,2"),
            ),
        },
    )
    said = [str(each) for each in problems(tables) if "does not have" in each.text]
    assert f"{MODEL}:3: 1 row of kernel a9w8, which this AITER does not have" in said
    assert f"{MODEL_MOE}:3: 1 row of kernel _ZN5aiter3oldE, which this AITER does not have" in said
    assert f"{preshuffled}:3: 1 row of kernel kernel, which this AITER does not have" in said
    assert not any(f"{file}:2" in each for file in (MODEL, preshuffled) for each in said)
    assert not any("asserts" in each.text for each in problems(tables)), "this one takes asm"


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    tables = checkout(tmp_path, ds(GOOD))
    real = Path.read_bytes

    def read_bytes(path):
        if path.name == Path(MODEL).name:
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    line = f"{MODEL}: cannot be read (Permission denied): AITER raises at the first look-up"
    assert line in map(str, problems(tables))
    assert tables.gemm(MI300X, 16, 512, 512).entry  # the rest goes on


def moe_tables(folder, *rows, header=MOE_HEADER, **files):
    return checkout(folder, {MODEL_MOE: csv(*rows, header=header), **files})


def test_tokens_are_padded_to_powers_and_tiers(tmp_path):
    tables = moe_tables(tmp_path, moe_row(64, 1), moe_row(32768, 2))
    found = {
        tokens: tables.moe(MI300X, tokens, 7168, 256, 256, 8) for tokens in (33, 64, 65, 20000, 40000, 200000)
    }
    rows = {33: 64, 64: 64, 65: None, 20000: 32768, 40000: 32768, 200000: 32768}
    assert {tokens: each.entry and each.entry.m for tokens, each in found.items()} == rows
    assert found[65].notes == ("the shape has rows for M 64 to 32768, none for 128",)
    assert "tuned for 32768 rows, asked for 200000" in found[200000].notes


def test_a_mask_takes_a_column(tmp_path):
    tables = moe_tables(tmp_path, moe_row(64, 1, key="7168,2048,33,9"))
    assert tables.moe(MI300X, 64, 7168, 2048, 33, 10, mask=True).entry
    assert tables.moe(MI300X, 64, 7168, 2048, 33, 9, mask=True).entry is None
    assert tables.moe(MI300X, 64, 7168, 2048, 33, 9).entry


def test_the_first_row_answers_whatever_its_activation(tmp_path):
    rows = moe_row(64, 91, act="Gelu", name="gelu"), moe_row(64, 92, name="silu")
    found = moe_tables(tmp_path, *rows).moe(MI300X, 64, 7168, 256, 256, 8)
    assert found.entry.kernel == "gelu + two, block_m 32"
    assert found.notes == (
        "a row of Gelu is used: AITER does not compare act_type, and this row comes first",
    )


def test_a_time_is_copied_where_the_next_row_has_it(tmp_path):
    rows = [gemm_row(m, us) for m, us in ((16, 50), (32, 60), (64, 50), (128, 70), (256, 70))]
    tables = checkout(tmp_path, ds(*rows))
    noted = [bool(tables.gemm(MI300X, m, 2112, 7168).notes) for m in (16, 32, 64, 128, 256)]
    assert noted == [False, False, False, True, True]
    assert tables.gemm(MI300X, 256, 2112, 7168).notes == ("70 us is in the next row, too: a copied time",)


def test_moe_takes_a_missing_gfx_from_the_cus(tmp_path):
    """get_2stage_cfgs does so for an empty cell and for 0, which a merge fills in."""
    rows = [moe_row(token, 50, gfx=f"{gfx},304") for token, gfx in ((16, "0"), (32, ""), (64, "gfx950"))]
    tables = moe_tables(tmp_path, *rows)
    hits = [tables.moe(MI300X, token, 7168, 256, 256, 8).entry is not None for token in (16, 32, 64)]
    assert hits == [True, True, False]
    assert [each for each in problems(tables) if "for 0 with" in each.text] == []
    partition = moe_tables(tmp_path / "partition", moe_row(64, 50, gfx=",20"))
    live = Target("rocm", "gfx942", 20, MI300X.device)  # what the GPU here has
    assert partition.moe(live, 64, 7168, 256, 256, 8).entry


def test_rows_that_no_call_of_moe_can_find(tmp_path):
    rows = (
        moe_row(56, 1),
        moe_row(64, 2, fp8="fn"),
        moe_row(64, 3, fp8="fn", gfx="gfx942,80"),
        moe_row(128, 4),
        moe_row(131072, 5),
    )
    tables = moe_tables(tmp_path, *rows)
    said = [str(each).removeprefix(f"{MODEL_MOE}:") for each in problems(tables) if each.file == MODEL_MOE]
    assert said[:2] == [
        "3: 2 rows, the first here, of torch.float8_e4m3fn, which gfx942 never looks up",
        "2: 1 row for 56 tokens, which no number of tokens is padded to",
    ]
    assert tables.moe(MI300X, 64, 7168, 256, 256, 8).entry is None


def test_a_column_of_booleans_beside_numbers_is_text(tmp_path):
    """The forms that AITER's README shows; a column of booleans alone pandas compares with 1."""
    mixed = moe_tables(tmp_path / "mixed", moe_row(64, 1, flags="True,0"), moe_row(128, 1))
    assert mixed.moe(MI300X, 128, 7168, 256, 256, 8).entry is None
    assert any("use_g1u1 is 'True'" in each.text for each in problems(mixed))
    alone = {MOE: csv(moe_row(64, 1, flags="True,0"), header=MOE_HEADER)}
    assert checkout(tmp_path / "alone", alone).moe(MI300X, 64, 7168, 256, 256, 8).entry


def test_rows_of_a_fallback_do_not_count(tmp_path):
    rows = [
        f"{moe_row(token, token)},{tag}"
        for token, tag in ((64, ""), (128, "flydsl_fallback"), (256, "other"))
    ]
    rows += [  # which is faster and of the same key otherwise
        f"{moe_row(64, 1)},flydsl_fallback"
    ]
    tables = moe_tables(tmp_path, *rows, header=f"{MOE_HEADER},_tag")
    asked = [tables.moe(MI300X, token, 7168, 256, 256, 8).entry for token in (64, 128, 256)]
    assert [entry is not None for entry in asked] == [True, False, True]


def test_variables_of_moe(tmp_path):
    files = moe_tables(tmp_path, moe_row(64, 1)).files
    bypassed = AiterTables(files, {"AITER_BYPASS_TUNE_CONFIG": "1"}).moe(MI300X, 64, 7168, 256, 256, 8)
    assert bypassed.entry is None and bypassed.fallback.startswith("1stage")
    assert bypassed.notes == (f"AITER_BYPASS_TUNE_CONFIG: {MODEL_MOE}:2 is not used",)
    split = AiterTables(files, {"AITER_KSPLIT": "4"}).moe(MI300X, 1, 7168, 256, 256, 8)
    assert split.fallback.endswith("ksplit 4")


OLD = "older than v0.1.19"


@pytest.mark.parametrize(
    ("core", "fused", "said"),
    [
        (CORE, FUSED, ""),
        ("# model_configs", FUSED, OLD),
        (CORE, "run_1stage = token > 32 and (inter_dim % 256 == 0)", OLD),
        (CORE, FUSED.replace("activation,", "str(activation),"), OLD),
        (CORE, FUSED + 'df = df[df["_tag"].fillna("") == ""]', OLD),
        (None, FUSED, "it has no readable jit/core.py"),
    ],
    ids=["e404860", "v0.1.15", "v0.1.9", "v0.1.18", "v0.1.17", "no source"],
)
def test_a_release_with_other_rules_is_told(tmp_path, core, fused, said):
    tables = checkout(tmp_path, {"aiter/fused_moe.py": fused, "aiter/jit/core.py": core or ""})
    if core is None:
        (tmp_path / "aiter/jit/core.py").unlink()
    assert why_other_rules(tables.files) == said
    assert any("may differ" in each.text for each in problems(tables)) == bool(said)


def test_the_recorded_extract_is_of_known_rules(recorded):
    assert not any("may differ" in each.text for each in recorded.problems(MI300X))


def bucket(m):
    return {
        "BLOCK_SIZE_M": m,
        "BLOCK_SIZE_N": 16,
        "BLOCK_SIZE_K": 128,
        "num_warps": 4,
        "cache_modifier": None,
    }


FOLDER = "aiter/ops/triton/configs"
FLAT = f"{FOLDER}/gemm/gfx942-GEMM-A8W8_BLOCKSCALE"
NESTED = f"{FOLDER}/gfx942/triton/gemm/gemm_a8w8_blockscale"


def test_buckets_of_triton(tmp_path):
    shaped = {"M_LEQ_4": bucket(4), "M_LEQ_32": bucket(32), "M_GEQ_64": bucket(64)}
    tables = checkout(
        tmp_path,
        {
            f"{FLAT}.json": json.dumps({"any": bucket(99)}),
            f"{FLAT}-N=2112-K=7168.json": json.dumps(shaped, indent=1),
            f"{FLAT}-N=256-K=512.json": json.dumps({f"M_GEQ_{m}": bucket(m) for m in (4, 16, 64)}),
        },
    )
    found = {m: tables.triton.gemm(MI300X, m, 2112, 7168) for m in (1, 5, 33, 64, 9000)}
    assert {m: each.entry and each.entry.m for m, each in found.items()} == {
        1: 4,
        5: 32,
        33: None,
        64: 64,
        9000: 64,
    }
    assert found[33].fallback.startswith("AITER raises KeyError")
    assert (found[5].entry.line, found[5].entry.kernel) == (9, "32x16x128, num_warps 4")
    assert tables.triton.gemm(MI300X, 32, 256, 512).entry.m == 16
    assert tables.triton.gemm(MI300X, 5, 512, 512).fallback == f"any of {FLAT}.json:1: 99x16x128, num_warps 4"
    assert "AssertionError" in tables.triton.gemm(MI355X, 5, 512, 512).fallback


def test_the_first_folder_with_a_default_hides_the_others(tmp_path):
    files = {
        f"{FLAT}.json": json.dumps({"any": bucket(1)}),
        f"{FLAT}-N=512-K=512.json": json.dumps({"M_LEQ_64": bucket(2), "any": bucket(3)}),
        f"{NESTED}/DEFAULT.json": json.dumps({"any": bucket(4)}),
        f"{NESTED}/GEMM-A8W8_BLOCKSCALE-N=256-K=512.json": json.dumps(
            {"M_LEQ_64": bucket(5), "M_LEQ_5": bucket(6)}
        ),
        f"{FOLDER}/gemm/MI300X-GEMM-A8W8_BLOCKSCALE-N=512-K=512.json": "{}",
        f"{FOLDER}/gemm/MI300X-GEMM-A8W8_BLOCKSCALE.json": "{}",
        f"{FOLDER}/gemm/gluon/gfx942-GEMM-A8W8_BLOCKSCALE-N=512-K=512.json": "{}",
        f"{NESTED}_preshuffled/DEFAULT.json": "{",  # which nothing asks
    }
    tables = checkout(tmp_path, files)
    assert "DEFAULT.json" in tables.triton.gemm(MI300X, 8, 512, 512).fallback
    assert tables.triton.gemm(MI300X, 8, 256, 512).entry.kernel.startswith("5x16x128")
    tables.gemm(MI300X, 8, 512, 512)
    said = [str(each) for each in tables.problems(MI300X) if each.file.startswith(FOLDER)]
    for hidden in (FLAT, f"{FOLDER}/gemm/gluon/gfx942-GEMM-A8W8_BLOCKSCALE"):
        assert f"{hidden}-N=512-K=512.json: this file is never read: {NESTED}/ comes first" in said
    assert not any("preshuffled" in each for each in said)
    foreign = "2 files, the first here, are never read: the name must begin with gfx942-"
    assert f"{FOLDER}/gemm/MI300X-GEMM-A8W8_BLOCKSCALE-N=512-K=512.json: {foreign}" in said
    assert any(each.endswith("has no bucket for M above 64: AITER raises KeyError there") for each in said)


def test_the_bounds_of_buckets_are_read_in_the_source(tmp_path):
    source = {"aiter/ops/triton/utils/gemm_config_utils.py": "STANDARD_M_BOUNDS = (4, 8)"}
    shaped = {"M_LEQ_1": bucket(1), "M_LEQ_4": bucket(4), "any": bucket(9)}
    files = {f"{FLAT}.json": "{}", f"{FLAT}-N=512-K=512.json": json.dumps(shaped)}
    found = {
        m: checkout(tmp_path / str(m), files | more).triton.gemm(MI300X, 1, 512, 512).entry.m
        for m, more in ((4, source), (1, {}))
    }
    assert found == {4: 4, 1: 1}


@pytest.mark.parametrize("text", ["{", "[1]", '{"any": 3}', b"\xff\xfe\x00", '{"M_LEQ_64": []}'])
def test_a_broken_configuration_harms_nothing(tmp_path, text):
    file = f"{FLAT}-N=512-K=512.json"
    tables = checkout(tmp_path, {f"{FLAT}.json": json.dumps({"any": bucket(1)}), file: text})
    found = tables.triton.gemm(MI300X, 8, 512, 512)
    assert found.entry is None and found.fallback.startswith("AITER raises")


def test_misses_as_the_tuners_want_them(tmp_path):
    tables = checkout(tmp_path, {})
    for m, n in ((64, 2112), (1, 512), (64, 2112)):
        assert tables.gemm(MI355X, m, n, 7168).entry is None
    rest = (
        "ActivationType.Silu,torch.bfloat16,torch.float8_e4m3fn,torch.float8_e4m3fn,QuantType.per_1x128,1,0"
    )
    calls = [(48, 7168, 2048, 33, 9, True), (64, 7168, 2048, 33, 9, True), (40000, 7168, 256, 256, 8, False)]
    for call in calls:
        assert tables.moe(MI355X, *call).entry is None
    experts = [MOE_KEY, f"32768,7168,256,256,8,{rest}", f"64,7168,2048,33,8,{rest}"]
    assert tables.untuned(MI355X) == {
        "a8w8_blockscale_untuned_gemm.csv": "M,N,K\n1,512,7168\n64,2112,7168\n",
        "untuned_fmoe.csv": "".join(f"{line}\n" for line in experts),
    }
