"""`doctor --bind`: which rows' calls fit a version of their library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from packaging.version import Version

from harness.doctor.bindings import BINDS, BREAKS, OLDER, UNKNOWN, bindings, recorded, rows
from kernels.platform import version
from kernels.vendor import READ_TO, VllmCpu
from tests.support.paths import ROOT
from tools import record_signatures

SIGNATURES = sorted((ROOT / "tests" / "kernels" / "signatures").glob("*.json"))

DECODE = (
    "def tokenspeed_mla_decode(query, kv_cache, workspace_buffer, kv_lora_rank, qk_rope_head_dim, "
    "block_tables, seq_lens, max_seq_len, softmax_scale, output_scale=1.0, "
    "enable_pdl=False, causal_mask=True): ..."
)
UNITS = "def get_num_sm(device): ..."
LIBRARY = {"tokenspeed_mla/__init__.py": f"{DECODE}\n{UNITS}"}  # which has one row


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def bound(here, path: Path) -> tuple[int, dict[str, dict[str, str]]]:
    done = here("doctor", "--bind", str(path), "--json", "-")
    assert done.stderr == ""
    return done.returncode, {row["implementation"]: row for row in json.loads(done.stdout)["bindings"]}


def test_a_library_that_fits(here, tmp_path):
    """Nothing of it is imported; what is wished for may be lacking."""
    files = {name: f"raise SystemExit('imported')\n{text}" for name, text in LIBRARY.items()}
    code, rows_ = bound(here, tree(tmp_path / "whole", files))
    (row,) = rows_.values()
    assert (code, row["status"], row["reason"], row["without"]) == (0, BINDS, "", "")
    older = DECODE.replace(", enable_pdl=False, causal_mask=True", "")
    code, rows_ = bound(here, tree(tmp_path / "older", {"tokenspeed_mla.py": f"{older}\n{UNITS}"}))
    assert code == 0 and rows_["tokenspeed_mla"]["without"] == "causal_mask, enable_pdl"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            {"__init__.py": f"{DECODE.replace('kv_cache,', 'cache,')}\n{UNITS}"},
            "tokenspeed_mla_decode missing a required argument: 'cache'",
        ),
        (
            {"__init__.py": f"{DECODE.replace('output_scale=1.0', 'output_factor=1.0')}\n{UNITS}"},
            "tokenspeed_mla_decode an unexpected keyword argument 'output_scale'",
        ),
        (
            {"__init__.py": f"{DECODE.replace('query,', 'query, heads,')}\n{UNITS}"},
            "tokenspeed_mla_decode missing a required argument: 'heads'",
        ),
        (
            {"__init__.py": f"{DECODE}\n{UNITS.replace('device', '*, device')}"},
            "get_num_sm too many positional arguments",
        ),
        ({"__init__.py": "", "decode.py": f"{DECODE}\n{UNITS}"},
         "tokenspeed_mla has no tokenspeed_mla_decode; "),
        ({"__init__.py": "from .kernels import tokenspeed_mla_decode, get_num_sm", "kernels.py": DECODE},
         "tokenspeed_mla.kernels has no get_num_sm"),
        ({"__init__.py": "from .kernels import *",
          "kernels.py": f"{DECODE}\n{UNITS}\n__all__ = ['get_num_sm']"},
         "tokenspeed_mla has no tokenspeed_mla_decode"),
    ],
    ids=["argument renamed", "default renamed", "argument added", "by name alone", "moved", "lost", "hidden"],
)  # fmt: skip
def test_an_interface_that_changed_breaks_the_row(here, tmp_path, files, reason):
    library = {f"tokenspeed_mla/{name}": text for name, text in files.items()}
    code, rows_ = bound(here, tree(tmp_path, library))
    row = rows_["tokenspeed_mla"]
    assert (code, row["status"]) == (1, BREAKS)
    assert row["reason"].startswith(reason)


def test_what_some_devices_need_is_said_with_them(here, tmp_path):
    first = {"deep_gemm/__init__.py": "def gemm_fp8_fp8_bf16_nt(lhs, rhs, out): ..."}
    code, rows_ = bound(here, tree(tmp_path, first))
    assert code == 1
    reason = rows_["deepgemm"]["reason"]
    assert reason.startswith("sm_100") and reason.endswith(
        ": deep_gemm has no transform_sf_into_required_layout"
    )


def test_what_breaks_is_said_first_in_a_line_each(here, tmp_path):
    path = tree(tmp_path / "both", {**LIBRARY, "deep_gemm/__init__.py": "x = 1"})
    done = here("doctor", "--bind", str(path))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    broken = [line for line in lines if " breaks: " in line]
    assert broken == lines[: len(broken)]
    (line,) = [line for line in broken if " block_scale_gemm deepgemm " in line]
    assert line.startswith(
        "deep_gemm both: block_scale_gemm deepgemm breaks: deep_gemm has no fp8_gemm_nt; sm_100"
    )
    assert "tokenspeed_mla both: 1 binds" in lines[len(broken) :]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("library-2.7.0.post1", "2.7.0.post1"),
        ("Library@v2.7", "2.7"),
        ("new-99.0", "99.0"),
        ("library", "library"),
    ],
)
def test_a_folder_without_metadata_is_of_the_version_in_its_name(here, tmp_path, name, number):
    path = tree(tmp_path / name, LIBRARY)
    assert {row["version"] for row in bound(here, path)[1].values()} == {number}
    if number == "99.0":
        (line, *_) = here("doctor", "--bind", str(path)).stdout.splitlines()
        assert line == "tokenspeed_mla 99.0: 1 binds; newer than 2.0.4, the last that was read"


def test_a_build_for_cpus_is_not_asked_for_what_gpus_run(here, tmp_path):
    metadata = "Metadata-Version: 2.1\nName: tokenspeed-mla\nVersion: 1.0+cpu\n"
    path = tree(tmp_path, {**LIBRARY, "tokenspeed_mla-1.0.dist-info/METADATA": metadata})
    done = here("doctor", "--bind", str(path))
    assert done.returncode == 3 and "no row takes anything of tokenspeed_mla 1.0+cpu" in done.stderr


def test_what_is_recorded_is_what_rows_take_and_was_read_and_is_listed():
    listed = record_signatures.tomllib.loads(record_signatures.RELEASES.read_text())
    stems = {file.stem for file in SIGNATURES}
    assert stems == set(READ_TO) == set(listed), "releases.toml lists them"
    assert {row.library or row.provider for row in rows()} - {"torch"} <= stems
    for file in SIGNATURES:
        versions = {Version(release.version).public for release in recorded(file)}
        assert versions.issuperset(READ_TO[file.stem])
        releases = json.loads(file.read_text())["releases"]
        for release in releases:
            again = f"python -m tools.record_signatures FOLDER {file.stem}"
            assert sorted(release["signatures"]) == record_signatures.taken(file.stem), again
        facts = [{name: release[name] for name in release if name != "signatures"} for release in releases]
        assert facts == sorted(listed[file.stem], key=lambda release: Version(release["version"]))


@pytest.mark.parametrize("file", SIGNATURES, ids=lambda file: file.stem)
def test_rows_bind_to_the_releases_that_are_recorded(file):
    """Those older than a row's first aside."""
    releases = recorded(file)
    assert len(releases) >= 3
    for row in bindings(releases):
        assert row.status in (BINDS, OLDER, UNKNOWN), row


def test_a_row_whose_operators_are_not_told_is_not_told():
    """Whatever Python stands around them: vLLM's wheel for CUDA has that alone."""
    *_, newest = recorded(ROOT / "tests" / "kernels" / "signatures" / "vllm.json")
    ours = {(row.op, row.name) for row in rows() if isinstance(row, VllmCpu)}
    found = [row for row in bindings([newest]) if (row.op, row.implementation) in ours]
    assert {row.status for row in found} == {UNKNOWN} and {row.op for row in found} == {op for op, _ in ours}


def test_rows_that_an_engines_pins_make_too_old(here, tmp_path):
    pins = (
        "tilelang==0.1.9",
        "vllm>=0.1",
        'sglang==0.1; extra == "all"',
        "aiter==0.1; python_version < '3'",
        "flashinfer_python==99",
    )
    requires = "".join(f"Requires-Dist: {pin}\n" for pin in pins)
    metadata = f"Metadata-Version: 2.1\nName: tokenspeed-mla\nVersion: 2.0\n{requires}"
    path = tree(tmp_path, {**LIBRARY, "tokenspeed_mla-2.0.dist-info/METADATA": metadata})
    code, rows_ = bound(here, path)
    assert code == 0 and set(rows_) == {"tokenspeed_mla", "tilelang.tiled", "tilelang.split"}
    row = rows_["tilelang.split"]
    assert (row["version"], row["status"]) == ("0.1.9", OLDER)
    assert row["reason"] == "needs 0.1.12 or later; tokenspeed_mla pins 0.1.9"
    tree(
        tmp_path,
        {
            "tilelang/__init__.py": "",
            "tilelang-0.1.15.dist-info/METADATA": "Name: tilelang\nVersion: 0.1.15\n",
        },
    )
    assert bound(here, path)[1]["tilelang.split"]["version"] == "0.1.15"


@pytest.mark.skipif(not version("vllm"), reason="vLLM is not installed")
def test_rows_bind_to_what_is_installed(here):
    done = here("doctor", "--bind")
    assert done.returncode == 0, done.stdout
