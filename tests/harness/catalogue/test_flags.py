"""The catalogue of flags and the documents' recipes: complete, sourced, and right about this suite."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase

import pytest

import kernels
from harness.catalogue import flags, recipes
from harness.catalogue.flags import READ, UNSET, catalogue
from harness.errors import UsageError
from harness.paths import DATA
from harness.workers.environment import provenance
from kernels.platform import KINDS, named
from tests.support import paths
from tests.support.command_line import error_line

DOCUMENTS = json.loads((paths.DATA / "document_variables.json").read_text())
SET = {name for _, _, name, _ in DOCUMENTS["variables"]}
FLAGS = list(catalogue().values())
WIDE = 120


@pytest.fixture(params=FLAGS, ids=lambda flag: flag.name)
def flag(request):
    return request.param


# Complete


@pytest.mark.parametrize("name", sorted(SET | set(DOCUMENTS["brief"])))
def test_every_flag_of_the_documents_is_in_the_catalogue(name):
    assert name in catalogue()


def test_every_variable_of_a_recipe_is_in_the_catalogue():
    assert {v.name for r in recipes.recipes().values() for v in r.variables} == SET


@pytest.mark.parametrize("recipe", recipes.recipes().values(), ids=lambda recipe: recipe.name)
def test_a_recipe_says_what_its_document_says(recipe):
    (document,) = [key for key, title in DOCUMENTS["documents"].items() if title == recipe.document]
    there = {(line, name): value for key, line, name, value in DOCUMENTS["variables"] if key == document}
    for variable in recipe.variables:
        assert there[variable.line, variable.name] == variable.value


def test_each_setting_of_a_document_is_in_a_recipe_of_it():
    kept = {(r.document, v.name, v.value) for r in recipes.recipes().values() for v in r.variables}
    for key, _, name, value in DOCUMENTS["variables"]:
        assert (DOCUMENTS["documents"][key], name, value) in kept


def test_an_entry_has_all_that_a_toggle_asks(flag):
    assert re.fullmatch(r"[A-Z][A-Z0-9_]+", flag.name)
    assert flag.source and flag.default and flag.effect.endswith(".")
    assert flag.read in READ
    assert flag.platforms and set(flag.platforms) <= set(KINDS)
    assert flag.launch in ("", "eager", "graph")
    assert flag.values or flag.takes
    assert flag.takes or flag.default in flag.values
    assert len(flag.values) != 1 or flag.takes
    # It changes rows, an engine chooses rows by it, or nothing here can show it.
    assert sum(map(bool, (flag.touches, flag.chooses, flag.without))) == 1
    # What only an engine reads changes nothing in a worker.
    assert not (flag.read in ("server", "never") and flag.touches)
    assert not (flag.chooses and flag.read != "server")


def test_names_are_unique():
    entries = json.loads((DATA / "flags.json").read_text())["flags"]
    assert len(entries) == len(catalogue())


# Right about this suite


@pytest.mark.parametrize("op", list(kernels.OPS))
def test_what_a_flag_touches_or_chooses_are_implementations(op):
    names = [implementation.name for implementation in kernels.implementations(op)]
    for flag in FLAGS:
        assert set(flag.ops) <= set(kernels.OPS)
        for pattern in flag.touches.get(op, ()):
            assert any(fnmatchcase(name, pattern) for name in names), f"{flag.name}: {pattern}"
        for value, rows in flag.chooses.items():
            assert value in flag.values, flag.name
            assert set(rows.get(op, ())) <= set(names), f"{flag.name}={value}"


def test_rows_that_a_choice_stands_for_run_where_the_flag_is_read(flag):
    """On some architecture of its platforms, each."""
    archs = {"cuda": ("sm_90", "sm_100"), "rocm": ("gfx942", "gfx950"), "cpu": ("x86-amx",)}
    platforms = [named(kind, arch) for kind in flag.platforms for arch in flag.archs or archs[kind]]
    for value, rows in flag.chooses.items():
        for op, names in rows.items():
            known = {implementation.name: implementation for implementation in kernels.implementations(op)}
            for name in names:
                assert any(known[name].available(p).ok for p in platforms), f"{flag.name}={value}: {name}"


def test_an_engine_is_asked_for_the_rows_of_a_value():
    master = flags.find("VLLM_ROCM_USE_AITER")
    assert master.stands_for("1", "fused_moe") == ("aiter.dispatch",)
    assert master.stands_for("True", "fused_moe") == ("aiter.dispatch",)
    assert master.stands_for("0", "fused_moe") == ("vllm.triton",)
    assert master.stands_for(None, "fused_moe") == master.stands_for(UNSET, "fused_moe") == ("vllm.triton",)
    backend = flags.find("VLLM_ATTENTION_BACKEND")
    assert backend.stands_for("FLASHMLA", "mla_decode") == ("flashmla",)
    assert backend.stands_for(None, "mla_decode") == ()


# Whether toggling can show anything


def reason(name, op, kind, arch, launch):
    support = flags.find(name).can_touch(op, named(kind, arch), launch)
    assert support.ok != bool(support.reason)
    return support.reason


def test_a_flag_that_can_act_gives_no_reason():
    assert not reason("ONEDNN_MAX_CPU_ISA", "block_scale_gemm", "cpu", "x86-amx", "eager")
    assert not reason("HIP_FORCE_DEV_KERNARG", "mla_decode", "rocm", "gfx942", "eager")
    assert not reason("VLLM_ROCM_USE_AITER", "mla_decode", "rocm", "gfx950", "graph")


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("HIP_FORCE_DEV_KERNARG", "mla_decode", "rocm", "gfx942", "graph"), "eager launches alone"),
        (("HIP_FORCE_DEV_KERNARG", "mla_decode", "cpu", "x86-amx", "eager"), "acts on rocm; this is cpu"),
        (("AITER_MLA_USE_OPUS", "mla_decode", "rocm", "gfx942", "graph"), "acts on gfx950; this is rocm"),
        (("AITER_KSPLIT", "mla_decode", "rocm", "gfx942", "graph"), "acts on fused_moe, not on mla_decode"),
        (("NCCL_MIN_NCHANNELS", "fused_moe", "rocm", "gfx942", "graph"), "talks to another device"),
        (("HSA_NO_SCRATCH_RECLAIM", "fused_moe", "cpu", "x86-amx", "eager"), "no effect on a kernel"),
        (("VLLM_LOG_STATS_INTERVAL", "fused_moe", "cuda", "sm_90", "graph"), "around the kernels"),
        (("VLLM_USE_DEEP_GEMM", "block_scale_gemm", "cuda", "sm_90", "graph"), "only deepgemm is a row here"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_why_toggling_would_show_nothing(asked, why):
    assert why in reason(*asked)


@pytest.mark.parametrize("op", list(kernels.OPS))
def test_every_answer_is_one_line(op):
    for flag in FLAGS:
        for kind, arch in (("cuda", "sm_90"), ("rocm", "gfx942"), ("cpu", "x86-amx")):
            for launch in ("eager", "graph"):
                assert "\n" not in flag.can_touch(op, named(kind, arch), launch).reason


def test_values_have_meanings():
    fusion = flags.find("TRITON_DEFAULT_FP_FUSION")
    assert fusion.meaning("0").reason == "not fused"
    assert fusion.meaning(None).reason == fusion.meaning("1").reason == "fused"
    unknown = flags.find("ONEDNN_MAX_CPU_ISA").meaning("AVX513")
    assert not unknown.ok
    assert "AVX512_CORE_AMX" in unknown.reason
    assert flags.find("OMP_NUM_THREADS").meaning("3").ok
    assert flags.find("AITER_CONFIG_FMOE").meaning(None).ok


def test_a_run_records_every_flag_that_was_set(monkeypatch):
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    recorded = provenance(named("cpu"), 1)["environment"]
    assert recorded["DISABLE_PTXAS_OPT"] == "1"


# Names


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("ONEDNN_MAX_ISA", "ONEDNN_MAX_CPU_ISA"),
        ("VLLM_ROCM_USE_AITER_MLP", "VLLM_ROCM_USE_AITER_MLA"),
        ("hip_force_dev_kernarg", "HIP_FORCE_DEV_KERNARG"),
    ],
)
def test_a_misspelt_flag_gets_a_suggestion(typed, meant):
    with pytest.raises(UsageError, match=rf"^unknown flag '{typed}'; did you mean .*{meant}"):
        flags.find(typed)


def test_a_name_like_no_other_gets_none():
    with pytest.raises(UsageError, match="unknown flag 'XYZZY'; `list flags` shows all"):
        flags.find("XYZZY")


def test_an_unknown_recipe_gets_the_known_ones():
    with pytest.raises(UsageError, match=r"^unknown recipe 'mi350'; recipes: mi350x-vllm, .*, moai-decode, "):
        recipes.find("mi350")


def test_a_recipe_gives_an_environment():
    environment = recipes.find("mi350x-vllm").environment
    assert environment["VLLM_ROCM_USE_AITER"] == "1"
    assert len(environment) == 15
    moai = recipes.find("moai-decode")
    assert moai.environment["NCCL_SOCKET_IFNAME"] == ""
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" not in moai.environment


# list


def test_list_flags_as_text(here):
    done = here("list", "flags")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= WIDE
    assert lines[0].split() == ["flag", "default", "read", "platforms", "ops"]
    assert {line.split()[0] for line in lines if line[:1].isupper()} >= set(catalogue())
    assert re.search(r"^HIP_FORCE_DEV_KERNARG +0 +load +rocm +all$", done.stdout, re.MULTILINE)
    assert "no effect on a kernel on one device: no op of this suite talks to another device" in done.stdout
    assert "1 stands for block_scale_gemm by aiter.dispatch or aiter.triton" in done.stdout


def test_list_flags_as_json_has_everything(here):
    rows = json.loads(here("list", "flags", "--json", "-").stdout)
    entries = json.loads((DATA / "flags.json").read_text())["flags"]
    for row, entry in zip(rows, entries, strict=True):
        assert entry.items() <= row.items()
        assert set(row["ops"]) <= set(kernels.OPS)


def listed(here, *arguments):
    return {row["name"] for row in json.loads(here("list", "flags", *arguments, "--json", "-").stdout)}


def test_list_flags_of_a_platform_an_architecture_and_an_op(here):
    everywhere, cpu = listed(here), listed(here, "--platform", "cpu")
    cdna3, cdna4 = (listed(here, "--platform", "rocm", "--arch", arch) for arch in ("gfx942", "gfx950"))
    assert everywhere == set(catalogue())
    assert "ONEDNN_MAX_CPU_ISA" in cpu
    assert "HIP_FORCE_DEV_KERNARG" not in cpu
    assert "AITER_MLA_USE_OPUS" in cdna4 - cdna3
    moe = listed(here, "--op", "fused_moe")
    assert "AITER_KSPLIT" in moe
    assert not moe & {"AITER_MLA_USE_OPUS", "NCCL_MIN_NCHANNELS"}


def test_list_recipes(here):
    done = here("list", "recipes")
    assert (done.returncode, done.stderr) == (0, "")
    assert "moai-decode  (rocm gfx942)" in done.stdout
    assert "    HSA_NO_SCRATCH_RECLAIM=1" in done.stdout
    rows = json.loads(here("list", "recipes", "--platform", "cuda", "--json", "-").stdout)
    assert [row["name"] for row in rows] == ["h200-sglang", "dstack-h200-sglang",
                                             "dstack-h200-tensorrt-llm", "dstack-h200-vllm"]  # fmt: skip


def test_an_unknown_platform_is_one_line(here):
    assert "'xpu' is not one of" in error_line(here("list", "flags", "--platform", "xpu"))
