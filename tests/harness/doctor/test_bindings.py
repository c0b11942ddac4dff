"""`doctor --bind`: which rows' calls fit a version of their library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.doctor.bindings import BINDS, BREAKS, OLDER, UNKNOWN, bindings, recorded, rows
from kernels.platform import version
from tests.support.paths import ROOT
from tools import record_signatures

SIGNATURES = sorted((ROOT / "tests" / "kernels" / "signatures").glob("*.json"))

DEEP_GEMM = {
    "deep_gemm/__init__.py": "def fp8_gemm_nt(a, b, d, c=None): ...\n"
    "def transform_sf_into_required_layout(sf, mn, k, recipe, is_sfa): ...\n"
}


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def told(cli, path: Path) -> tuple[int, dict[str, dict[str, str]]]:
    done = cli("doctor", "--bind", str(path), "--json", "-")
    assert done.stderr == ""
    return done.returncode, {row["implementation"]: row for row in json.loads(done.stdout)["bindings"]}


def test_a_library_that_fits(cli, tmp_path):
    code, told_rows = told(cli, tree(tmp_path, DEEP_GEMM))
    assert code == 0 and told_rows["deepgemm"]["status"] == BINDS


def test_a_renamed_argument_breaks_the_row(cli, tmp_path):
    broken = {name: text.replace("(a, b, d,", "(a, b, out,") for name, text in DEEP_GEMM.items()}
    code, told_rows = told(cli, tree(tmp_path, broken))
    assert code == 1 and told_rows["deepgemm"]["status"] == BREAKS
    assert told_rows["deepgemm"]["reason"] == "fp8_gemm_nt missing a required argument: 'out'"


def test_what_some_devices_need_is_said_with_them(cli, tmp_path):
    first = {"deep_gemm/__init__.py": "def gemm_fp8_fp8_bf16_nt(lhs, rhs, out): ..."}
    code, told_rows = told(cli, tree(tmp_path, first))
    assert code == 1
    reason = "sm_100: deep_gemm has no transform_sf_into_required_layout"
    assert told_rows["deepgemm"]["reason"] == reason


def test_nothing_is_imported(cli, tmp_path):
    files = {name: f"raise SystemExit('imported')\n{text}" for name, text in DEEP_GEMM.items()}
    assert told(cli, tree(tmp_path, files))[0] == 0


def test_what_breaks_is_said_first_in_a_line_each(cli, tmp_path):
    path = tree(tmp_path / "deep_gemm-9.0", {"deep_gemm/__init__.py": "x = 1"})
    done = cli("doctor", "--bind", str(path))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    broken = [line for line in lines if " breaks: " in line]
    assert broken == lines[: len(broken)]
    (line,) = [line for line in broken if " block_scale_gemm deepgemm " in line]
    assert line.startswith(
        "deep_gemm 9.0: block_scale_gemm deepgemm breaks: deep_gemm has no fp8_gemm_nt; sm_100"
    )
    assert lines[len(broken) + 1] == f"deep_gemm 9.0: {len(broken)} breaks"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"x.txt": ""}, "error: no library of any row is in "),
        ({}, "error: no library of any row is in "),
    ],
)
def test_nothing_to_bind(cli, tmp_path, files, said):
    done = cli("doctor", "--bind", str(tree(tmp_path, files)))
    assert done.returncode == 3 and done.stderr.startswith(said) and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["missing", "text.whl", "list.json"])
def test_what_cannot_be_read_is_one_line(cli, tmp_path, name):
    if name != "missing":
        (tmp_path / name).write_text("[]")
    done = cli("doctor", "--bind", str(tmp_path / name))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "is no folder of packages, wheel, or file of recorded signatures" in done.stderr


def test_a_path_goes_with_bind(cli):
    done = cli("doctor", "here")
    assert done.returncode == 2 and done.stderr == "error: PATH goes with --bind\n"


@pytest.mark.parametrize("file", SIGNATURES, ids=lambda file: file.stem)
def test_rows_bind_to_the_releases_that_are_recorded(file):
    """Those older than a row's first aside."""
    releases = recorded(file)
    assert len(releases) >= 3
    for row in bindings(releases):
        assert row.status in (BINDS, OLDER, UNKNOWN), row


def test_every_place_that_a_row_takes_is_recorded():
    for file in SIGNATURES:
        for release in json.loads(file.read_text())["releases"]:
            again = f"python -m tools.record_signatures FOLDER {file.stem}"
            assert sorted(release["signatures"]) == record_signatures.taken(file.stem), again
    own = {row.library or row.provider for row in rows()}
    assert own - {"torch"} <= {file.stem for file in SIGNATURES}, "tools/releases.toml lists its releases"


def test_what_is_recorded_is_listed():
    listed = record_signatures.listed()
    assert set(listed) == {file.stem for file in SIGNATURES}
    for file in SIGNATURES:
        releases = json.loads(file.read_text())["releases"]
        facts = [{name: release[name] for name in release if name != "signatures"} for release in releases]
        assert facts == record_signatures.in_order(listed[file.stem])


def test_a_build_for_cpus_is_not_asked_for_what_gpus_run(cli, tmp_path):
    path = tree(tmp_path, {"deep_gemm/__init__.py": ""})
    metadata = {
        "deep_gemm-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: deep-gemm\nVersion: 1.0+cpu\n"
    }
    done = cli("doctor", "--bind", str(tree(path, metadata)))
    assert done.returncode == 3 and "no row takes anything of deep_gemm 1.0+cpu" in done.stderr


@pytest.mark.parametrize(
    ("name", "number"),
    [("deep_gemm-2.7.0.post1", "2.7.0.post1"), ("DeepGEMM@v2.7", "2.7"), ("DeepGEMM", "DeepGEMM")],
)
def test_a_folder_without_metadata_is_of_the_version_in_its_name(cli, tmp_path, name, number):
    done = cli("doctor", "--bind", str(tree(tmp_path / name, DEEP_GEMM)), "--json", "-")
    assert {row["version"] for row in json.loads(done.stdout)["bindings"]} == {number}


@pytest.mark.skipif(not version("vllm"), reason="vLLM is not installed")
def test_rows_bind_to_what_is_installed(cli):
    done = cli("doctor", "--bind")
    assert done.returncode == 0, done.stdout
