"""vLLM's and SGLang's JSON tables are found and taken as their own functions do it.

Expected values are of get_moe_configs, get_w8a8_block_fp8_configs, try_get_optimal_moe_config and the
defaults in vLLM 0.33.0 and SGLang 0.5.23, run with stubs over the files of their wheels and over broken ones.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.tables.engine_json import RULES, EngineTables, parse
from kernels.tables.files import Files, TableError
from kernels.tuning import Target

MI300X = Target("rocm", "gfx942", 304, "AMD Instinct MI300X", triton="3.4.0")
MI325X = Target("rocm", "gfx942", 304, "AMD Instinct MI325X", triton="3.4.0")
H200 = Target("cuda", "sm_90", 132, "NVIDIA H200", triton="3.7.1")
LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)


def config(m=16, n=128, k=128, group=1, warps=4, stages=2, **more):
    tile = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": group}
    return {**tile, "num_warps": warps, "num_stages": stages, **more}


def table(keys=LADDER, **one):
    return json.dumps({key: config(**one) for key in keys}, indent=1)


def gemm_name(engine, device, n=512, k=7168):
    return f"N={n},K={k},device_name={device},dtype=fp8_w8a8,block_shape={RULES[engine].block}.json"


def moe_name(engine, device, experts=256, inter=256):
    return f"E={experts},N={inter},device_name={device},dtype=fp8_w8a8,block_shape={RULES[engine].block}.json"


@pytest.fixture
def tables(tmp_path):
    """Makes an engine's tables of files {name: text}; folders of the environment lie beside the package."""

    def made(engine, written, environment=None):
        rules = RULES[engine]
        for name, text in {f"{rules.moe}/triton_1_0/x": "", f"{rules.gemm}/x": "", **written}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        (tmp_path / engine / "__init__.py").touch()
        variables = {key: str(tmp_path / value) for key, value in (environment or {}).items()}
        return EngineTables(engine, Files(engine, tmp_path), variables)

    return made


def said(tables, target=None):
    return [str(problem) for problem in tables.problems(target or MI300X)]


def test_vllm_takes_the_nearest_m_and_of_two_the_first_in_the_file(tables):
    """M 20, 384 and 5000 of E=256,N=256 on MI300X: 16 (24 is as near), 256 (512 is), 4096, the largest."""
    file = f"{RULES['vllm'].moe}/{moe_name('vllm', 'AMD_Instinct_MI300X')}"
    entries = {m: config(group=8, waves_per_eu=0) for m in (*LADDER, 1536, 2048, 3072, 4096)}
    entries |= {
        4096: config(k=256),
        16: config(warps=2, waves_per_eu=0),
        512: config(m=32, group=8, waves_per_eu=0),
    }
    read = tables("vllm", {file: json.dumps(entries, indent=1)})
    found = read.moe(MI300X, 20, 256, 256)
    assert found.table == found.entry.file == file
    assert (found.entry.key, found.entry.m, found.entry.line) == ("16", 16, 38)
    assert found.entry.kernel == "16x128x128 group 1, 2 warps, 2 stages, waves_per_eu 0"
    assert (found.fallback, found.notes) == ("", ())
    assert [read.moe(MI300X, m, 256, 256).entry.m for m in (384, 385, 5000)] == [256, 512, 4096]
    assert read.moe(MI300X, 10000, 256, 256).notes == (
        "the nearest M is 4096, for 10000",
        "BLOCK_SIZE_K 256 of the file runs as 128",
    )

    turned = tables("vllm", {file: table((24, 16))})
    assert turned.moe(MI300X, 20, 256, 256).entry.m == 24


@pytest.mark.parametrize(("engine", "target", "tokens", "moe"), [
    ("vllm", MI300X, 1, "16x128x128 group 1, 4 warps, 2 stages, SPLIT_K 1"),
    ("vllm", MI300X, 17, "16x128x128 group 32, 4 warps, 2 stages, SPLIT_K 1"),
    ("vllm", MI300X, 65, "64x128x128 group 32, 4 warps, 2 stages, SPLIT_K 1"),
    ("vllm", H200, 4, "16x64x128 group 1, 4 warps, 4 stages, SPLIT_K 1"),
    ("vllm", H200, 8, "16x64x128 group 1, 4 warps, 3 stages, SPLIT_K 1"),
    ("vllm", H200, 64, "16x128x128 group 32, 4 warps, 3 stages, SPLIT_K 1"),
    ("sglang", MI300X, 1, "64x128x128 group 32, 4 warps, 2 stages"),
    ("sglang", H200, 99, "64x128x128 group 32, 4 warps, 3 stages"),
])  # fmt: skip
def test_a_miss_runs_the_default(tables, engine, target, tokens, moe):
    read = tables(engine, {})
    product, experts = read.gemm(target, tokens, 2112, 7168), read.moe(target, tokens, 2048, 33)
    stages = {"vllm": 2, "sglang": 3}[engine]
    assert (product.entry, product.fallback) == (None, f"64x128x128 group 32, 4 warps, {stages} stages")
    assert (experts.entry, experts.fallback) == (None, moe)


def test_names_of_missing_files_are_those_that_the_tuners_write(tables):
    here = f"{RULES['vllm'].gemm}/{gemm_name('vllm', 'NVIDIA_H200_NVL')}"
    read = tables("vllm", {here: table()})
    # vLLM folds the H200's family for MoE alone
    nvl, slash = replace(H200, device="NVIDIA H200 NVL"), replace(H200, device="A  GPU/B")
    for n, k in ((512, 7168), (7168, 256)):
        read.gemm(nvl, 1, n, k)
    for _ in range(2):
        read.moe(nvl, 1, 256, 32)
    assert read.untuned(nvl) == {
        "vllm_block_scale_gemm_missing.txt": "N=7168,K=256,device_name=NVIDIA_H200_NVL,dtype=fp8_w8a8,"
        "block_shape=[128,128].json\n",
        "vllm_fused_moe_missing.txt": "E=32,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,"
        "block_shape=[128,128].json\n",
    }
    for engine, device in (("vllm", "A_GPU_B"), ("sglang", "A__GPU/B")):
        assert f"device_name={device}," in tables(engine, {}).gemm(slash, 1, 1, 1).table
    read = tables("sglang", {})
    read.gemm(H200, 1, 512, 7168)
    read.moe(H200, 1, 256, 257)
    assert read.untuned(H200) == {
        "sglang_block_scale_gemm_missing.txt": "N=512,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,"
        "block_shape=[128, 128].json\n",
        "sglang_fused_moe_missing.txt": "E=257,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,"
        "block_shape=[128, 128].json\n",
    }


def test_sglang_takes_the_newest_folder_and_a_second_file_for_down(tables):
    """H200, TP8, 100 tokens with Triton 3.7.1: triton_3_5_1, M 96, as in the wheel."""
    folder, name = RULES["sglang"].moe, moe_name("sglang", "NVIDIA_H200", experts=257)
    down = name.replace(".json", "_down.json")
    read = tables("sglang", {
        f"{folder}/triton_3_3_1/{name}": table(k=256),
        f"{folder}/triton_3_5_1/{name}": table(n=64, group=16, stages=5),
        f"{folder}/triton_3_5_1/{down}": table(m=64, group=64, USE_TMA=True),
        f"{folder}/triton_3_10_0/README": "",
    })  # fmt: skip
    found = read.moe(H200, 100, 256, 257)
    assert (found.entry.file, found.entry.m) == (f"{folder}/triton_3_5_1/{name}", 96)
    assert found.entry.kernel == (
        "up 16x64x128 group 16, 4 warps, 5 stages; down 16x128x128 group 64, 4 warps, 2 stages, USE_TMA True"
    )
    assert found.notes == (
        "of triton_3_5_1, as there is none for Triton 3.7.1",
        "down: of triton_3_5_1, as there is none for Triton 3.7.1",
        "down: BLOCK_SIZE_M 64 of the file becomes that of up",
    )
    exact = read.moe(replace(H200, triton="3.3.1"), 100, 256, 257)
    assert exact.entry.file == f"{folder}/triton_3_3_1/{name}"
    assert not any("BLOCK_SIZE_K" in note for note in exact.notes), "vLLM alone cuts it"
    assert read.moe(replace(H200, triton="3.3.1+git"), 100, 256, 257).entry.file == found.entry.file
    assert f"{folder}/triton_3_5_1/{name}: shadows the file of this name in triton_3_3_1" in said(read, H200)
    shadow = f"{folder}/triton_3_3_1/{name}: shadows the file of this name in triton_3_5_1"
    assert shadow in said(read, replace(H200, triton="3.3.1"))

    alone = tables("sglang", {f"{folder}/triton_3_7_1/{moe_name('sglang', 'NVIDIA_H200', 8)}": table()})
    only = alone.moe(H200, 1, 256, 8)
    same = "16x128x128 group 1, 4 warps, 2 stages"
    assert only.entry.kernel == f"up {same}; down {same}"
    assert only.notes == ("down: no _down file, so up's configuration",)
    empty = f"{folder}/triton_3_7_1/{moe_name('sglang', 'NVIDIA_H200', 8)}".replace(".json", "_down.json")
    notes = tables("sglang", {empty: "{}"}).moe(H200, 1, 256, 8).notes
    assert notes == ("down: nothing in the _down file, so up's configuration",)


def test_sglang_raises_a_small_block_of_k(tables):
    """_sanitize in get_w8a8_block_fp8_configs: off CUDA always, on it where it does not divide 128."""
    files = {
        f"{RULES['sglang'].gemm}/{gemm_name('sglang', device)}": json.dumps(
            {64: config(k=64), 128: config(k=48)}
        )
        for device in ("NVIDIA_H200", "AMD_Instinct_MI300X")
    }
    read = tables("sglang", files)
    tiles = {
        (target.arch, m): read.gemm(target, m, 512, 7168).entry.kernel.split()[0]
        for target in (H200, MI300X)
        for m in (64, 128)
    }
    assert tiles == {
        ("sm_90", 64): "16x128x64", ("sm_90", 128): "16x128x128",
        ("gfx942", 64): "16x128x128", ("gfx942", 128): "16x128x128",
    }  # fmt: skip
    assert "BLOCK_SIZE_K 48 of the file is raised to 128" in read.gemm(H200, 128, 512, 7168).notes


FAULTS = {
    "truncated": (table()[:200], "stops: not JSON: Unterminated string starting at"),
    "empty": ("", "stops: empty, which is not JSON"),
    "no object": ("[1]", "stops: not a JSON object"),
    "deep": ("[" * 100_000, "stops: not JSON: RecursionError"),
    "long": ('{"1": ' + "9" * 5000 + "}", "stops: not JSON: ValueError"),
    "byte order mark": ("\ufeff" + table(), "stops: not JSON: Unexpected UTF-8 BOM"),
    "UTF-16": (table().encode("utf-16"), "stops: not UTF-8"),
    "triton_version": (
        '{"triton_version": "3.4.0"}',
        "stops: the key 'triton_version' is not a number of rows",
    ),
    "renamed": (table().replace("BLOCK_SIZE_N", "BLOCK_N"), "the launch fails at M 1: no BLOCK_SIZE_N"),
    "a string": (table().replace('warps": 4', 'warps": "4"'), "the launch fails at M 1: num_warps is '4'"),
    "below one": (table(m=0), "the launch fails at M 1: BLOCK_SIZE_M is 0"),
    "null": (json.dumps(dict.fromkeys(LADDER)), "the launch fails at M 1: not a configuration"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_breaks_the_engine_is_said_and_not_read(tables, fault):
    text, expected = FAULTS[fault]
    file = f"{RULES['vllm'].gemm}/{gemm_name('vllm', 'AMD_Instinct_MI300X')}"
    read = tables("vllm", {file: text, file.replace("N=512", "N=7168"): table()})
    found = read.gemm(MI300X, 1, 512, 7168)
    assert (found.table, found.entry) == (file, None)
    assert expected in found.fallback
    assert read.gemm(MI300X, 1, 7168, 7168).entry, "the others are read"
    assert len([line for line in said(read) if line.startswith(file)]) == 1


def test_what_harms_no_load_is_said(tables):
    folder = RULES["vllm"].moe
    files = {
        8: table().replace("\n", "\r\n"),
        32: "{}",
        64: table((2048, 3072, 4096)),
        128: '{"triton_version": "3.1.0",' + table(tile_m=1)[1:],
        256: table(range(65, 75)),
    }
    read = tables(
        "vllm", {f"{folder}/{moe_name('vllm', 'AMD_Instinct_MI300X', e)}": text for e, text in files.items()}
    )
    founds = {experts: read.moe(MI300X, 16, 256, experts) for experts in files}
    assert {experts: found.notes for experts, found in founds.items()} == {
        8: (),
        32: (f"{founds[32].table} has no entry",),
        64: ("thin: only entries for M 2048, 3072, 4096", "the nearest M is 2048, for 16"),
        128: ("no kernel is known to take tile_m", "tuned with Triton 3.1.0, here 3.4.0"),
        256: ("thin: no entry below M 65", "the nearest M is 65, for 16"),
    }
    assert read.moe(replace(MI300X, triton=""), 16, 256, 128).notes == founds[128].notes[:1]
    assert founds[32].fallback == "16x128x128 group 1, 4 warps, 2 stages, SPLIT_K 1"
    assert [line.partition("json: ")[2] for line in said(read)] == [
        "no kernel is known to take tile_m",
        "thin: no entry below M 65",
        "no entry, so the default runs",
        "thin: only entries for M 2048, 3072, 4096",
    ]


@pytest.mark.parametrize(("keys", "doubts"), [
    (range(7), ["thin: only entries for M 0, 1, 2, 3, 4, 5, 6"]),
    (range(64, 72), []),
    (range(65, 73), ["thin: no entry below M 65"]),
])  # fmt: skip
def test_a_table_is_thin_with_few_entries_or_large_ones_alone(keys, doubts):
    assert parse("a.json", table(keys), says_triton=True).doubts == doubts


def test_names_that_lead_nowhere(tables):
    folder = RULES["vllm"].gemm
    others = [
        gemm_name("vllm", "AMD_Instinct_MI325_OAM"),
        gemm_name("vllm", "AMD_Instinct_MI325_OAM", 7168),
        gemm_name("vllm", "amd_instinct_mi325x"),
        gemm_name("vllm", ""),
        gemm_name("sglang", "AMD_Instinct_MI325X"),
        gemm_name("vllm", "AMD_Instinct_MI300X"),
        gemm_name("vllm", "NVIDIA_H200"),
        gemm_name("vllm", "AMD_Instinct_MI325_OAM", 512, 512),  # no look-up asks for this shape
    ]
    read = tables("vllm", {f"{folder}/{name}": table() for name in others})
    assert read.gemm(MI325X, 1, 512, 7168).entry is None
    assert read.gemm(MI325X, 1, 7168, 7168).entry is None
    assert sorted(line for line in said(read, MI325X) if line.startswith(folder)) == [
        f"{folder}: 1 file for the device amd_instinct_mi325x; this one is AMD_Instinct_MI325X",
        f"{folder}: 1 file with a block that vllm writes as [128,128]",
        f"{folder}: 1 file without the device's name",
        f"{folder}: 2 files for the device AMD_Instinct_MI325_OAM; this one is AMD_Instinct_MI325X, "
        "and no driver reports that name",
        f"{folder}: shapes without a file for AMD_Instinct_MI325X have one for AMD_Instinct_MI300X",
    ]


def test_a_folder_of_ones_own(tables, tmp_path):
    """vLLM's comes before the package's and holds MoE alone; SGLang's replaces it."""
    for engine, below in (("vllm", ""), ("sglang", "configs/triton_3_4_0/")):
        rules, name = RULES[engine], moe_name(engine, "AMD_Instinct_MI300X")
        shipped = f"{rules.moe}/{name if engine == 'vllm' else f'triton_3_4_0/{name}'}"
        other = shipped.replace("E=256", "E=32")
        mine = {
            f"mine/{below}{name}": table(stages=1),
            f"mine/{below}{gemm_name(engine, 'AMD_Instinct_MI300X')}": table(),
        }
        read = tables(engine, {shipped: table(), other: table(), **mine}, {rules.variable: "mine"})
        own = str(tmp_path / "mine")
        found = read.moe(MI300X, 1, 256, 256)
        assert found.entry.file == f"{own}/{below}{name}"
        beside, problems = read.moe(MI300X, 1, 256, 32), said(read)
        setting = f"{rules.variable}={own}"
        assert f"{setting}: 1 file N=...,K=...: these are read only in the package" in problems
        assert read.gemm(MI300X, 1, 512, 7168).entry is None
        if engine == "vllm":
            assert (found.notes, beside.notes) == ((), (f"not in {setting}",))
            assert f"{own}/{name}: shadows the file of this name in configs" in problems
        else:
            assert beside.entry is None
            assert (
                f"{setting}: replaces the package's folder, in which 2 files of AMD_Instinct_MI300X"
                in problems
            )


def test_a_folder_that_is_not_there_or_holds_nothing(tables, tmp_path):
    read = tables("vllm", {}, {"VLLM_TUNED_CONFIG_FOLDER": "none"})
    read.moe(MI300X, 1, 256, 256)
    assert f"{tmp_path}/none: No such file or directory" in said(read)
    (tmp_path / "none").mkdir()
    nothing = (
        f"VLLM_TUNED_CONFIG_FOLDER={tmp_path}/none: no file in it is named E=...,N=...,device_name=....json"
    )
    assert nothing in said(read)

    read = tables("sglang", {}, {"SGLANG_MOE_CONFIG_DIR": "none"})
    assert read.moe(MI300X, 1, 256, 256).fallback == (
        f"none, sglang stops: {tmp_path}/none/configs: No such file or directory"
    )
    assert (
        f"{tmp_path}/none/configs: No such file or directory; sglang stops where it looks for a version"
        in said(read)
    )


def test_a_folder_that_is_no_version_breaks_sglang_unless_the_exact_one_has_the_file(tables):
    folder, name = RULES["sglang"].moe, moe_name("sglang", "NVIDIA_H200")
    names = {f"{folder}/triton_3_7_1/{name}", f"{folder}/triton_3_7_1/{name.replace('.json', '_down.json')}"}
    read = tables("sglang", {file: table() for file in names} | {f"{folder}/triton_3_8_0+rocm/x": ""})
    assert read.moe(H200, 1, 256, 256).entry
    stop = "none, sglang stops: the name triton_3_8_0+rocm is not triton_ and a version"
    assert read.moe(replace(H200, triton="3.7.0"), 1, 256, 256).fallback == stop
    assert any("triton_3_8_0+rocm" in line for line in said(read, H200))


def test_what_sglang_reads_of_every_entry_stops_it(tables):
    """w8a8: BLOCK_SIZE_K of all; MoE: BLOCK_SIZE_M of all entries of the file for down, which may be up's."""
    folder, name = RULES["sglang"].moe, moe_name("sglang", "NVIDIA_H200")
    bad = json.dumps({1: config(), 512: {key: size for key, size in config().items() if key[-1] not in "MK"}})
    gemm = f"{RULES['sglang'].gemm}/{gemm_name('sglang', 'NVIDIA_H200')}"
    read = tables("sglang", {gemm: bad, f"{folder}/triton_3_7_1/{name}": bad})
    stops = "none, sglang stops at M 512: no BLOCK_SIZE_M, BLOCK_SIZE_K, GROUP_SIZE_M"
    assert read.gemm(H200, 1, 512, 7168).fallback == read.moe(H200, 1, 256, 256).fallback == stops
    with_down = {f"{folder}/triton_3_7_1/{name.replace('.json', '_down.json')}": table()}
    read = tables("sglang", with_down)
    assert read.moe(H200, 1, 256, 256).entry
    assert read.moe(H200, 512, 256, 256).fallback.startswith("none, the launch fails at M 512")


def test_a_file_that_may_not_be_read_is_said(tables, monkeypatch):
    file = f"{RULES['vllm'].gemm}/{gemm_name('vllm', 'AMD_Instinct_MI300X')}"
    read = tables("vllm", {file: table(), file.replace("N=512", "N=256"): table()})

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as no_entry:  # as root nothing is refused
        no_entry.setattr("pathlib.Path.is_file", refuse)
        assert read.gemm(MI300X, 1, 512, 7168).fallback == "64x128x128 group 32, 4 warps, 2 stages"
    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    assert read.gemm(MI300X, 1, 512, 7168).fallback == "none, vllm stops: Permission denied"
    read.gemm(MI300X, 1, 256, 7168)
    assert [line.partition("json: ")[2] for line in said(read)] == [
        "Permission denied; vllm stops where it loads this; 1 more like it"
    ]


def test_batch_invariance_takes_no_table(tables, tmp_path):
    files = {
        f"{RULES['vllm'].moe}/{moe_name('vllm', 'AMD_Instinct_MI300X')}": table(),
        f"{RULES['vllm'].gemm}/{gemm_name('vllm', 'AMD_Instinct_MI300X')}": table(),
    }
    tables("vllm", files)
    package = Files("vllm", tmp_path)
    invariant = EngineTables("vllm", package, {"VLLM_BATCH_INVARIANT": "1"})
    assert invariant.gemm(MI300X, 1, 512, 7168).fallback == "64x128x128 group 32, 4 warps, 2 stages"
    assert invariant.moe(MI300X, 1, 256, 256).fallback == "64x64x32 group 8, SPLIT_K 1"
    assert EngineTables("vllm", package, {"VLLM_BATCH_INVARIANT": "0"}).moe(MI300X, 1, 256, 256).entry
    with pytest.raises(TableError, match="VLLM_BATCH_INVARIANT=yes: vllm takes 0 or 1"):
        EngineTables("vllm", package, {"VLLM_BATCH_INVARIANT": "yes"})


@pytest.mark.parametrize("engine", RULES)
def test_a_wheel_answers_as_its_files_do(tables, tmp_path, engine):
    """Also one that lists its folders, as this does."""
    folder, name = RULES[engine].moe, moe_name(engine, "NVIDIA_H200")
    below = "triton_3_5_1/" if engine == "sglang" else ""
    read = tables(engine, {f"{folder}/{below}{name}": table()})
    wheel = shutil.make_archive(str(tmp_path.parent / "wheel"), "zip", tmp_path, engine)
    zipped = EngineTables(engine, Files(engine, Path(wheel)))
    assert read.moe(H200, 1, 256, 256).entry
    assert zipped.moe(H200, 1, 256, 256) == read.moe(H200, 1, 256, 256)
    assert zipped.problems(H200) == read.problems(H200)
