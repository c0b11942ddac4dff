"""`doctor --bind`: which rows' calls fit a version of their library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.doctor.bindings import BINDS, BREAKS, OLDER, UNKNOWN, bindings, recorded, rows
from kernels.library_source import LibrarySource, NotThere
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


def test_the_table_says_what_broke_first(cli, tmp_path):
    path = tree(tmp_path, {"deep_gemm/__init__.py": "x = 1"})
    done = cli("doctor", "--bind", str(path))
    assert done.returncode == 1
    assert done.stdout.splitlines()[0].startswith(f"deep_gemm {path.name}: ")
    assert "deep_gemm has no fp8_gemm_nt" in " ".join(done.stdout.split())


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
    libraries = {file.stem for file in SIGNATURES}
    for library in libraries:
        (file,) = [file for file in SIGNATURES if file.stem == library]
        for release in json.loads(file.read_text())["releases"]:
            assert sorted(release["signatures"]) == record_signatures.places(library), library
    own = {row.library or row.provider for row in rows()}
    assert own - {"torch"} <= libraries, "tools/record_signatures.py records a library's releases"


def test_signatures_are_recorded_as_they_are(tmp_path):
    path = tree(tmp_path / "lib", DEEP_GEMM)
    for number in ("2.0", "1.0", "2.0"):
        file = record_signatures.record("deep_gemm", number, "abc", "2026-01-01", path, tmp_path)
    older, newer = recorded(file)
    assert (older.version, newer.version) == ("1.0", "2.0")
    source = LibrarySource.of(path)
    for place in record_signatures.places("deep_gemm"):
        try:
            assert str(newer.source.signature(place)) == str(source.signature(place))
        except NotThere:
            with pytest.raises(NotThere):
                newer.source.signature(place)


@pytest.mark.skipif(not version("vllm"), reason="vLLM is not installed")
def test_rows_bind_to_what_is_installed(cli):
    done = cli("doctor", "--bind")
    assert done.returncode == 0, done.stdout
