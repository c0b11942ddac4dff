"""Recording the signatures of wheels and of sources that git downloads."""

import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from harness.doctor.bindings import recorded
from kernels.interfaces.library_source import LibrarySource, NotThere
from tools import record_signatures

OLDER = "def gemm_fp8_fp8_bf16_nt(lhs, rhs, out): ..."
NEWER = "def fp8_gemm_nt(a, b, d, c=None, *, recipe=(1, 128, 128)): ..."
PYPI = {"version": "2.7", "date": "2026-01-01", "source": "pypi: deep-gemm 2.7"}


def wheel(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "deep_gemm-2.7-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("deep_gemm/__init__.py", text)
    return path


@pytest.fixture
def github(tmp_path, monkeypatch) -> dict[str, str]:
    """A release of a repository on a local disk, which git finds in place of github.com."""
    repository = tmp_path / "owner" / "DeepGEMM"
    (repository / "deep_gemm").mkdir(parents=True)
    (repository / "deep_gemm" / "__init__.py").write_text(OLDER)
    git = ("git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "1"), ("tag", "v1.0")):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{tmp_path}/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", record_signatures.GITHUB)
    return {"version": "1.0", "date": "2025-01-01", "source": "github: owner/DeepGEMM@v1.0"}


def test_signatures_are_recorded_as_they_are_the_oldest_first(tmp_path, github):
    path = wheel(tmp_path / "all", NEWER)
    file = record_signatures.record("deep_gemm", [PYPI, github], tmp_path / "all", tmp_path / "data")
    older, newer = recorded(file)
    assert (older.version, newer.version) == ("1.0", "2.7")
    assert str(older.source.signature("deep_gemm.gemm_fp8_fp8_bf16_nt")) == "(lhs, rhs, out)"
    source = LibrarySource.of(path)
    for place in record_signatures.used_places("deep_gemm"):
        try:
            assert str(newer.source.signature(place)) == str(source.signature(place))
        except NotThere:
            with pytest.raises(NotThere):
                newer.source.signature(place)


def test_a_release_that_is_gone_is_kept_while_it_has_all_places(tmp_path, monkeypatch):
    monkeypatch.setattr(record_signatures, "_call", lambda *command: None)
    path = wheel(tmp_path / "all", NEWER)
    data = tmp_path / "data"
    file = record_signatures.record("deep_gemm", [PYPI], tmp_path / "all", data)
    wheel(tmp_path / "all", NEWER.replace("c=None", "alpha=1"))  # a release in the folder is read again
    (release,) = recorded(record_signatures.record("deep_gemm", [PYPI], tmp_path / "all", data))
    assert "alpha" in str(release.source.signature("deep_gemm.fp8_gemm_nt"))
    first = file.read_text()
    path.unlink()
    record_signatures.record("deep_gemm", [PYPI], tmp_path / "all", data)
    assert file.read_text() == first
    short = json.loads(first)
    short["releases"][0]["signatures"].popitem()
    file.write_text(json.dumps(short))
    with pytest.raises(SystemExit, match=r"has no pypi: deep-gemm 2\.7"):
        record_signatures.record("deep_gemm", [PYPI], tmp_path / "all", data)


def test_an_unreadable_source_or_another_library_is_not_recorded(tmp_path):
    for text in ("pypi: name", "github: owner/name", "conda: name 1", "name"):
        with pytest.raises(SystemExit, match="is no source of a release"):
            record_signatures.Source.parse(text)
    wheel(tmp_path, NEWER)
    with pytest.raises(SystemExit, match="has no aiter"):
        record_signatures.record("aiter", [PYPI], tmp_path, tmp_path / "data")
