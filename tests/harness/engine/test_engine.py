"""What an engine runs for a deployment, from tables that hold a few entries."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.engine import NO_TABLE, EngineRequest, Shape, engine_view
from harness.page.assemble import engine_section
from harness.paths import ROOT
from harness.report.engine_table import Section
from harness.report.terminal import plain_text
from shapes.deployment import Call
from shapes.models import model

COLUMNS = "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
AITER = ("engine", "vllm", "--arch", "gfx942", "--with", "VLLM_ROCM_USE_AITER=1")


def aiter(folder: Path, *rows: tuple[int, int, int, int, str]) -> Path:
    """A package with a table of (CUs, m, n, k, kernel)."""
    configs = folder / "aiter" / "configs"
    configs.mkdir(parents=True)
    (folder / "aiter" / "__init__.py").touch()
    lines = [f"gfx942,{units},{m},{n},{k},ck,7,0,{m / 10},{kernel},1,1,0" for units, m, n, k, kernel in rows]
    (configs / "a8w8_blockscale_tuned_gemm.csv").write_text("\n".join([COLUMNS, *lines, ""]))
    return folder


def facts(here, *command):
    done = here(*command, "--json", "-")
    assert done.returncode == 0
    return json.loads(done.stdout)


def shapes(here, path, *options):
    return facts(here, *AITER, "--aiter", str(path), *options)["shapes"]


def test_json_says_of_each_shape_what_runs_and_what_is_tuned(here, tmp_path):
    path = aiter(tmp_path, (304, 64, 2112, 7168, "fast"), (80, 64, 3072, 1536, "other"))
    found = {(s["sizes"].get("m"), s["sizes"].get("n")): s for s in shapes(here, path)}
    hit = found[64, 2112]
    assert hit["entry"] == {
        "file": "aiter/configs/a8w8_blockscale_tuned_gemm.csv", "line": 2, "key": "gfx942,304,64,2112,7168",
        "m": 64, "kernel": "ck fast, splitK 0", "us": 6.4,
    }  # fmt: skip
    assert (hit["row"], hit["fallback"]) == ("aiter.dispatch", None)
    assert hit["decided_in"].startswith("vllm/model_executor/kernels/linear/scaled_mm/aiter.py:")
    miss = found[64, 3072]
    assert miss["entry"] is None
    assert miss["fallback"].startswith("CK a8w8_blockscale_1x128x128_256x16x128x256")
    assert found[32, 2112]["entry"] is None


def test_an_empty_word_is_no_path(here, tmp_path, monkeypatch):
    """As a variable of the shell that is not set leaves."""
    monkeypatch.chdir(tmp_path)
    empty = ("--vllm=", "--write=", "--workload=")
    assert facts(here, *AITER, "--aiter=", *empty)["shapes"] == facts(here, *AITER)["shapes"]
    assert not [*tmp_path.iterdir()]


def test_libraries_are_read_in_one_order(here):
    options = ("--vllm", "/nonexistent/vllm", "--aiter", "/nonexistent/aiter")
    for words in (options, options[2:] + options[:2]):
        assert "/nonexistent/aiter" in here("engine", "sglang", "--arch", "H200", *words).stderr


@pytest.mark.parametrize(("op", "sizes", "tokens"), [
    ("block_scale_gemm", {"m": 64, "n": 512, "k": 512}, 64),
    ("mha_prefill", {"batch": 2, "new": 100}, 200),
    ("rmsnorm", {"rows": 5, "hidden": 200}, 0),  # an op of a user's own
])  # fmt: skip
def test_tokens_of_a_shape(op, sizes, tokens):
    call = Call(op, sizes, step="", times=1.0, place="")
    assert Shape(call, sizes, 0.0, None, NO_TABLE, ()).tokens == tokens


def test_ops_that_do_not_hold_are_named_and_the_others_shown(here, tmp_path):
    found = facts(here, "engine", "vllm", "--arch", "H200", "--model", "glm-5")
    assert {shape["op"] for shape in found["shapes"]} == {"block_scale_gemm", "fused_moe"}
    said = "mla_decode does not hold: a query reads only the index_topk=2048 keys of its indexer"
    assert f"glm-5, not modelled: {said}" in found["notes"]
    k2 = facts(here, "engine", "sglang", "--arch", "MI300X", "--model", "kimi-k2", "--tp", "32")
    assert "what sglang runs was read for DeepSeek-R1; other shapes may run another row" in k2["notes"]
    assert any(note.startswith("tables of aiter were recorded for DeepSeek-R1's") for note in k2["notes"])
    assert {s["place"] for s in k2["shapes"] if s["op"] == "fused_moe"} == {"experts, 64 columns padded"}
    config = json.loads((ROOT / "shapes/data/glm-5.json").read_text("utf-8"))["config"]
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused = "an expert of kimi-k2 has 64 columns on a rank: sglang refuses"
    for words, said in (
        (("--model", str(tmp_path)), "has no call of an op here"),
        (("--model", "kimi-k2", "--tp", "32"), refused),
    ):
        done = here("engine", "sglang", "--arch", "H200", *words)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1) and said in done.stderr


def test_shares_are_of_all_ops(here, tmp_path):
    found = shapes(here, aiter(tmp_path))
    assert sum(shape["share"] for shape in found) == pytest.approx(1, abs=1e-4)
    assert {shape["op"] for shape in found} == {"block_scale_gemm", "fused_moe", "mla_decode", "mha_prefill"}
    assert [s["table"] for s in found if s["op"] == "mla_decode"] == [None] * 8
    of_step = {s["step"]: 0.0 for s in found}
    for shape in found:
        of_step[shape["step"]] += shape["share"]
    assert list(of_step.values()) == pytest.approx([1 / 11] * 11, abs=1e-4)


def test_csv_has_a_line_for_each_shape(here, tmp_path):
    path = aiter(tmp_path, (304, 64, 2112, 7168, "fast"))
    done = here(*AITER, "--aiter", str(path), "--op", "block_scale_gemm", "--csv", "-")
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert len(rows) == 80
    tuned = [row for row in rows if row["entry_kernel"]]
    assert [(row["sizes"], row["entry_us"]) for row in tuned] == [
        ("m=64 n=2112 k=7168 fp8=e4m3fnuz scales=fp32", "6.4")
    ]


def test_names_in_notes_stay_whole():
    """Names of SGLang's files have a blank between brackets."""
    name = "aiter/a-long-name/" * 6 + "block_shape=[128, 128].json"
    text = plain_text(Section("falls back", [f"no entry in {name}; runs\n  64 tokens: {name}: x"]))
    assert text.splitlines() == [
        "falls back", "  no entry in", f"    {name};", "    runs",
        "    64 tokens:", f"      {name}:", "      x",
    ]  # fmt: skip


def test_misses_are_written_for_the_tuner(here, tmp_path):
    """The keys are those of a look-up: AITER removes a column of topk with a mask, and pads tokens."""
    out = tmp_path / "out"
    path = aiter(tmp_path / "a", *((304, m, 2112, 7168, "fast") for m in (16, 32, 64, 128, 3200, 16384)))
    done = here(*AITER, "--aiter", str(path), "--dp-attention", "--ep", "8", "--write", str(out))
    assert done.returncode == 0
    assert sorted(done.stderr.splitlines()) == [
        f"written: {out}/a8w8_blockscale_untuned_gemm.csv", f"written: {out}/untuned_fmoe.csv"
    ]  # fmt: skip
    gemms = (out / "a8w8_blockscale_untuned_gemm.csv").read_text().splitlines()
    assert gemms[:2] == ["M,N,K", "16,4096,7168"]
    assert not [line for line in gemms if ",2112," in line]
    experts = (out / "untuned_fmoe.csv").read_text().splitlines()
    assert [line.split(",")[:5] for line in experts[1:]] == [
        [str(tokens), "7168", "2048", "32", "7"] for tokens in (128, 256, 512, 1024, 32768, 131072)
    ]
    (out / "untuned_fmoe.csv").write_text("token,model_dim\n1,2\n")  # as AITER's own folder has one
    (out / "a8w8_blockscale_untuned_gemm.csv").unlink()
    done = here(*AITER, "--aiter", str(path), "--dp-attention", "--ep", "8", "--write", str(out))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert f"{out}/untuned_fmoe.csv is there" in done.stderr
    assert [each.name for each in out.iterdir()] == ["untuned_fmoe.csv"]
    assert (out / "untuned_fmoe.csv").read_text() == "token,model_dim\n1,2\n"


def test_misses_that_are_not_written_are_reported(here, tmp_path):
    """AITER's Triton files are tuned one by one. If each shape has an entry, there is nothing to write."""
    options = ("--aiter", "recorded", "--op", "block_scale_gemm", "--write", str(tmp_path))
    done = here("engine", "sglang", "--arch", "gfx942", "--tp", "4", *options)
    said = "not written: 42 shapes of aiter.triton; AITER tunes them one by one: aiter/ops/"
    assert done.stderr.startswith(said)
    options = ("--sglang", "recorded", "--op", "fused_moe", "--write", str(tmp_path))
    done = here("engine", "sglang", "--arch", "H200", "--tp", "4", *options)
    assert done.stderr == "nothing written: no file lacks a shape\n"
    assert not list(tmp_path.iterdir())


def test_two_versions_are_compared_shape_by_shape(here, tmp_path):
    a = aiter(tmp_path / "a", (304, 64, 2112, 7168, "old"), (304, 32, 2112, 7168, "same"))
    b = aiter(
        tmp_path / "b",
        (304, 64, 2112, 7168, "new"), (304, 32, 2112, 7168, "same"), (304, 1, 512, 7168, "first"),
    )  # fmt: skip
    text = here(*AITER, "--diff", str(a), str(b)).stdout
    versions = f"version unknown, {a} -> version unknown, {b}"
    assert f"aiter {versions}: 2 of 91 shapes run another kernel or configuration" in text
    qkv_a = "block_scale_gemm qkv_a n=2112 k=7168 at 64 tokens"
    assert f"{qkv_a}\n        - ck old, splitK 0\n        + ck new" in text
    assert "block_scale_gemm shared gate_up n=512 k=7168 at 1 token\n        - miss: CK" in text
    found = json.loads(here(*AITER, "--diff", str(a), str(b), "--json", "-").stdout)
    assert (found["library"], found["asked"], len(found["changes"])) == ("aiter", 91, 2)
    shares = [each["share"] for each in found["changes"]]
    assert shares == sorted(shares, reverse=True)
    change = next(each for each in found["changes"] if each["sizes"]["n"] == 512)
    assert (change["a"]["entry"], change["b"]["entry"]["kernel"]) == (None, "ck first, splitK 0")


def test_a_library_is_compared_only_if_the_engine_reads_it(here, tmp_path):
    """vLLM reads no table of AITER unless a variable says so."""
    path = str(aiter(tmp_path))
    done = here("engine", "vllm", "--arch", "gfx942", "--diff", path, path)
    assert done.returncode == 2
    assert done.stderr.endswith("looks into tables of aiter; give --with VLLM_ROCM_USE_AITER=1\n")
    done = here("engine", "vllm", "--arch", "sm_90", "--diff", path, path)
    assert done.stderr.endswith("looks into tables of aiter\n")
    mistyped = ("--with", "VLLM_ROCM_USE_AITR=1")
    text = here("engine", "vllm", "--arch", "gfx942", "--aiter", path, *mistyped).stdout
    assert "  --aiter: nothing that vllm runs here looks into tables of aiter; give --with" in text
    assert "did you mean VLLM_ROCM_USE_AITER?" in text.replace("\n   ", "")
    done = here("engine", "vllm", "--arch", "gfx942", "--aiter", str(tmp_path / "none"))
    assert done.stderr == f"error: {tmp_path}/none: no such file or folder\n"


def test_misses_of_one_fallback_share_a_note(here):
    """Four layers whose files AITER lacks share a paragraph, and the tokens of a note share a line."""
    options = ("--tp", "4", "--aiter", "recorded", "--op", "block_scale_gemm")
    text = here("engine", "sglang", "--arch", "gfx942", *options).stdout
    lines = text.replace("\n    ", " ")
    assert "36 shapes: no entry in" in lines
    assert "N=7168-K=4096.json and 3 more like it; runs any of" in lines
    assert lines.count("no entry in") == 3
    assert text.endswith("`run` and `toggle` measure it\n")


def test_settings_change_what_runs(here, tmp_path):
    """AITER_CONFIG_* replaces the package's tables; CU_NUM replaces the device's number of CUs."""
    path = aiter(tmp_path / "a", (304, 64, 2112, 7168, "fast"), (80, 64, 2112, 7168, "small"))
    other = aiter(tmp_path / "b", (304, 32, 2112, 7168, "mine"))
    mine = other / "aiter/configs/a8w8_blockscale_tuned_gemm.csv"

    def kernels(*options):
        found = shapes(here, path, "--op", "block_scale_gemm", *options)
        return {s["sizes"]["m"]: s["entry"]["kernel"] for s in found if s["entry"]}

    assert kernels() == {64: "ck fast, splitK 0"}
    assert kernels("--with", "CU_NUM=80") == {64: "ck small, splitK 0"}
    assert kernels("--with", f"AITER_CONFIG_GEMM_A8W8_BLOCKSCALE={mine}") == {32: "ck mine, splitK 0"}
    command = (*AITER, "--aiter", str(path), "--op", "block_scale_gemm")
    assert facts(here, *command, "--with", "CU_NUM=80")["notes"] == []


@pytest.mark.parametrize("setting, notes", [
    ("--moe-dense-tp-size=1", []),  # the dense MLP is split differently, and the same kernel runs
    ("--moe-dense-tp-size=8", ["--moe-dense-tp-size=8 changes nothing here"]),
    ("--disable-shared-experts-fusion", []),
    ("SGLANG_ENABLE_JIT_DEEPGEM=0",
     ["SGLANG_ENABLE_JIT_DEEPGEM: what sglang does with it on sm_90 is not recorded, so it changed "
      "nothing here, and rows may be wrong; did you mean SGLANG_ENABLE_JIT_DEEPGEMM?"]),
])  # fmt: skip
def test_a_setting_without_effect_is_reported(here, setting, notes):
    command = ("engine", "sglang", "--arch", "H200", "--sglang", "recorded", "--dp-attention")
    assert facts(here, *command, "--with", setting)["notes"] == notes


def test_tables_of_another_release_are_reported(here, tmp_path):
    """The recorded choices are those of vLLM 0.33.0."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "_version.py").write_text("version = '0.30.1'\n")
    found = facts(here, "engine", "vllm", "--arch", "mi300x", "--vllm", str(tmp_path))
    assert found["device"] == "MI300X"
    assert found["notes"] == ["what vllm runs was read in 0.33.0; the tables are those of 0.30.1"]


def test_sglang_chooses_files_by_the_triton_that_is_given(here):
    command = ("engine", "sglang", "--arch", "H200", "--sglang", "recorded", "--op", "fused_moe")
    for options, folder in ((), "triton_3_5_1"), (("--triton", "3.3.1"), "triton_3_3_1"):
        files = {shape["entry"]["file"] for shape in facts(here, *command, *options)["shapes"]}
        assert [file.split("/")[-2] for file in files] == [folder]


def test_a_workload_takes_prompts_and_chunks(here, tmp_path):
    path = aiter(tmp_path)

    def found(more=""):
        return shapes(here, path, "--workload", f"isl=9000,osl=50,concurrency=2{more}")

    assert found() == found(",prompts=16,chunk=8192")
    assert found() != found(",prompts=3")
    tokens = [
        max(shape["sizes"]["m"] for shape in each if shape["op"] == "block_scale_gemm")
        for each in (found(), found(",chunk=1000"))
    ]
    assert tokens == [8192, 1000]


def test_a_page_on_stdout_stands_alone(here, tmp_path):
    done = here(*AITER, "--aiter", str(aiter(tmp_path)), "--op", "mla_decode", "--page", "-")
    assert done.stdout.strip().startswith("<!doctype html>") and done.stdout.endswith("</html>")


def test_a_page_maps_shapes_by_tokens(tmp_path):
    path = aiter(tmp_path, (304, 64, 2112, 7168, "fast"))
    given = {"VLLM_ROCM_USE_AITER": "1"}
    request = EngineRequest("vllm", "MI300X", model("deepseek-r1"), given=given, paths={"aiter": path})
    section = engine_section(engine_view(request))
    (chart,) = section.charts
    (values,) = chart.picture.to_dict()["datasets"].values()
    assert chart.marks == len(values) == len(chart.table.rows) == 102
    states = {(value["layer"], value["tokens"]): value["state"] for value in values}
    assert states["qkv_a n=2112 k=7168", 64] == "tuned"
    assert states["qkv_a n=2112 k=7168", 3200] == "fallback"
    assert states["MLA decode heads=16 kv=bf16", 64] == "no table"
    small = engine_section(engine_view(replace(request, kv="fp8", tp=2)))
    (values,) = small.charts[0].picture.to_dict()["datasets"].values()
    assert {value["state"] for value in values if value["op"] == "mla_decode"} == {"defect"}
    shares = dict.fromkeys(chart.picture.to_dict()["encoding"]["y"]["sort"], 0.0)
    assert next(iter(shares)) == "experts experts=256 inter=256 ep=1 shared=0"
    rows = [[getattr(cell, "order", cell) for cell in row.cells] for row in chart.table.rows]
    for share, _, layer, *_ in rows:
        shares[layer] += share
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert [row[0] for row in rows] == sorted((row[0] for row in rows), reverse=True)
    hit = dict(zip(chart.table.columns, next(r for r in rows if "ck fast, splitK 0" in r), strict=True))
    assert (hit["as"], hit["us"], hit["line"]) == (64, 6.4, 2)
    assert chart.table.numeric == {"share", "as", "us", "line"}
    label, note = section.notes[0]
    assert label == "falls back"
    assert "no entry in tuned_fmoe (0 files); 64, " in note and "; 1 token: runs 2stage CK chosen" in note


@pytest.mark.parametrize("version, known", [("0.1.16", False), ("0.1.20", True), ("", True)])
def test_defects_are_those_of_the_library_that_is_given(here, tmp_path, version, known):
    """ROCm/aiter#4957 is in 0.1.18 and later. A library of unknown version counts as the newest."""
    path = aiter(tmp_path)
    if version:
        (path / "aiter" / "_version.py").write_text(f"version = {version!r}\n")
    found = shapes(here, path, "--tp", "2", "--kv", "fp8", "--op", "mla_decode")
    assert {shape["row"] for shape in found} == {"aiter.asm_persistent"}
    assert any("aiter#4957" in defect for shape in found for defect in shape["defects"]) == known


@pytest.mark.parametrize("tp, row", [(8, "aiter.asm"), (4, "sglang.triton")])
def test_sglangs_attention_on_amd_depends_on_heads_over_tp(tp, row):
    request = EngineRequest("sglang", "gfx942", model("deepseek-r1"), tp=tp, dp_attention=True)
    found = engine_view(replace(request, ops=["mla_decode"])).shapes
    assert {(shape.sizes["heads"], shape.row) for shape in found} == {(128, row)}


def test_without_an_architecture_the_command_is_about_this_machine(here):
    done = here("engine", "vllm", "--op", "mla_decode")
    assert done.returncode in (0, 2)  # not every CPU has engines' defaults
    assert done.stderr.startswith("note: this is about the CPU of this machine; --arch names a GPU\n")
