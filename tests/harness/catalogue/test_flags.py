"""The catalogue of flags and the recipes are complete, have sources, and are right about this suite."""

import itertools
import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import kernels
from harness.catalogue import flags, recipes
from harness.catalogue.flags import READ, catalogue
from harness.errors import UsageError
from harness.paths import DATA
from harness.report.lists import _all_flags
from harness.workers.environment import provenance
from kernels.platform import KINDS, named
from tests.support import paths

DOCUMENTS = json.loads((paths.DATA / "document_variables.json").read_text())
SET = {name for _, _, name, _ in DOCUMENTS["variables"]}
FLAGS = list(catalogue().values())


def test_the_documents_settings_are_in_the_catalogue_and_in_recipes_as_they_say():
    assert {*SET, *DOCUMENTS["brief"]} <= set(catalogue())
    title = DOCUMENTS["documents"]
    there = {(title[key], name, value, line) for key, line, name, value in DOCUMENTS["variables"]}
    kept = {(r.document, v.name, v.value, v.line) for r in recipes.recipes().values() for v in r.variables}
    assert kept <= there
    assert {of[:3] for of in kept} == {of[:3] for of in there}


def test_the_list_begins_with_what_documents_set_and_what_can_act(here):
    """Engines' switches first, then what most documents set; the others with --all."""
    said = here("list", "flags", "--op", "mla_decode", "--arch", "MI300X").stdout
    names = re.findall(r"^([A-Z]\w+)(?:=\S+ by |: \w+'s switch)", said, re.MULTILINE)
    switches = ["VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MLA"]
    assert names[:4] == [*switches, "TORCH_BLAS_PREFER_HIPBLASLT", "HIP_FORCE_DEV_KERNARG"]
    assert 4 < len(names) and len(said.splitlines()) < 60
    by = {found.name: {v.name for v in found.variables} for found in recipes.recipes_and_guides()}
    for name in names:
        assert not flags.catalogue()[name].obstacle("mla_decode", named("rocm", "gfx942"), "eager")
        assert name in switches or any(name in of for of in by.values())
    assert "AITER_TRITON_ONLY" not in said
    everything = here("list", "flags", "--op", "mla_decode", "--arch", "MI300X", "--all").stdout
    first, more, _ = said.partition("every flag that can act")
    assert more and everything.startswith(first) and "AITER_TRITON_ONLY" in everything
    assert "HIP_FORCE_DEV_KERNARG" not in here("list", "flags", "--arch", "H200").stdout
    assert set().union(*by.values()) <= set(catalogue())


def test_an_entry_has_all_that_a_toggle_needs_and_is_listed(here):
    entries = json.loads((DATA / "flags.json").read_text())["flags"]
    assert len(entries) == len(FLAGS), "names are unique"
    for listed, entry in zip(json.loads(here("list", "flags", "--json", "-").stdout), entries, strict=True):
        assert entry.items() <= listed.items()
    for flag in FLAGS:
        assert re.fullmatch(r"[A-Z][A-Z0-9_]+", flag.name)
        assert flag.source and flag.default and flag.effect.endswith("."), flag.name
        assert flag.read in READ and flag.launch in ("", "eager", "graph"), flag.name
        assert flag.platforms and set(flag.platforms) <= set(KINDS), flag.name
        assert flag.takes or flag.default in flag.values, flag.name
        assert len(flag.values) > 1 or flag.takes, flag.name
        # It changes rows, an engine chooses rows by it, or nothing here can show it.
        assert sum(map(bool, (flag.touches, flag.chooses, flag.without))) == 1, flag.name
        # A flag that only an engine reads changes nothing in a worker.
        assert not (flag.read in ("server", "never") and flag.touches), flag.name
        assert not (flag.chooses and flag.read != "server"), flag.name


ARCHS = {"cuda": ("sm_90", "sm_100"), "rocm": ("gfx942", "gfx950"), "cpu": ("x86-amx",)}


@pytest.mark.parametrize("op", list(kernels.OPS))
def test_what_a_flag_touches_or_chooses_are_implementations_that_run_where_it_is_read(op):
    known = {implementation.name: implementation for implementation in kernels.implementations(op)}
    for flag in FLAGS:
        assert set(flag.ops) <= set(kernels.OPS)
        for pattern in flag.touches.get(op, ()):
            assert any(fnmatchcase(name, pattern) for name in known), f"{flag.name}: {pattern}"
        platforms = [named(kind, arch) for kind in flag.platforms for arch in flag.archs or ARCHS[kind]]
        for value, rows in flag.chooses.items():
            assert value in flag.values, flag.name
            for name in rows.get(op, ()):
                assert any(known[name].available(p).ok for p in platforms), f"{flag.name}={value}: {name}"


# Whether toggling can show anything


def test_why_toggling_would_show_nothing_is_as_committed(snapshot):
    lines = []
    for flag in FLAGS:
        asked: dict[str, list[str]] = {}
        for op, kind, launch in itertools.product(kernels.OPS, ARCHS, ("eager", "graph")):
            for arch in ARCHS[kind]:
                obstacle = flag.obstacle(op, named(kind, arch), launch)
                assert "\n" not in obstacle
                asked.setdefault(obstacle or "can act", []).append(f"{op} {arch} {launch}")
        lines += [flag.name, *(f"  {reason}: {len(of)}, first {of[0]}" for reason, of in asked.items())]
    snapshot(Path(__file__).parent / "snapshots" / "why-not.txt", "\n".join(lines) + "\n")


def test_unknown_values_are_told_and_a_run_records_every_flag_that_was_set(monkeypatch):
    fusion = flags.catalogue()["TRITON_DEFAULT_FP_FUSION"]
    assert fusion.canonical("False") == "0" and fusion.canonical(None) == "1"
    assert flags.catalogue()["OMP_PROC_BIND"].canonical("true") == "true", "as its library writes it"
    assert "AVX512_CORE_AMX" in flags.catalogue()["ONEDNN_MAX_CPU_ISA"].why_unknown("AVX513")
    for name, value in {fusion.name: "False", "OMP_NUM_THREADS": "3", "AITER_CONFIG_FMOE": None}.items():
        assert flags.catalogue()[name].why_unknown(value) == ""
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    assert provenance(named("cpu"), 1)["environment"]["DISABLE_PTXAS_OPT"] == "1"


@pytest.mark.parametrize("name", [name for name in flags.catalogue() if name.startswith("AITER_CONFIG_")])
def test_a_table_of_aiter_is_a_merge_that_a_value_replaces(name):
    """get_config_file and update_config_files in aiter/jit/core.py do it."""
    said = " ".join(" ".join(_all_flags([flags.catalogue()[name]])).split())
    (table,) = re.findall(r"default: aiter/configs/(\w+)\.csv merged with ", said)
    assert f"merged with aiter/configs/model_configs/*{table}*.csv" in said
    assert f"writes what it merges to /tmp/aiter_configs/{table}.csv, one place for all processes" in said
    assert "a path, which replaces that merge; or several, joined by :, which are merged" in said


# Names


def test_an_unknown_recipe_gets_a_suggestion():
    with pytest.raises(UsageError, match="unknown recipe 'mi350'; did you mean mi350x-vllm"):
        recipes.find("mi350")


def test_a_recipe_gives_an_environment():
    environment = recipes.find("mi350x-vllm").environment
    assert environment["VLLM_ROCM_USE_AITER"] == "1" and len(environment) == 15
    moai = recipes.find("moai-decode").environment
    assert moai["NCCL_SOCKET_IFNAME"] == "" and "VLLM_NIXL_SIDE_CHANNEL_HOST" not in moai
