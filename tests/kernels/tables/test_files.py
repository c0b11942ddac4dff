"""Where a library lies, and files of it that cannot be read."""

import shutil
import zipfile
from pathlib import Path

import pytest

from kernels.tables.files import RECORDED, Files, TableError, library

NAME = "aiter/configs/a.csv"


def test_a_pattern_stays_within_a_folder_in_a_wheel_too(tmp_path):
    for name in ("a.csv", "models/b.csv"):
        path = tmp_path / "aiter" / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    wheel = shutil.make_archive(str(tmp_path.parent / "names"), "zip", tmp_path)
    for place in (tmp_path, Path(wheel)):
        assert Files("aiter", place).names("aiter/configs/*.csv") == [NAME]
        assert Files("aiter", place).names("aiter/*/*/*.csv") == ["aiter/configs/models/b.csv"]


def test_another_package_called_aiter_is_not_the_library(tmp_path, monkeypatch):
    """PyPI has one, of asynchronous iterators."""
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert library("aiter").path == RECORDED / "aiter.zip"
    (tmp_path / "aiter" / "configs").mkdir()
    assert library("aiter").path == tmp_path


def test_a_damaged_wheel_says_which_file(tmp_path):
    wheel = tmp_path / "aiter.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as made:
        for name in (NAME, "aiter/_version.py"):
            made.writestr(name, "M,N,K\n" * 1000)
    data = bytearray(wheel.read_bytes())
    with zipfile.ZipFile(wheel) as made:
        for each in made.infolist():
            start = each.header_offset + 30 + len(each.filename)
            data[start : start + 8] = b"\xff" * 8
    wheel.write_bytes(data)
    files = Files("aiter", wheel)
    with pytest.raises(TableError, match=f"^{NAME}: "):
        files.text(NAME)
    assert files.version == ""


@pytest.mark.parametrize(
    ("head", "version"), [("ref: refs/heads/main\n", "commit 1234567"), ("89abcdef01\n", "commit 89abcde")]
)
def test_a_checkout_tells_its_commit(tmp_path, head, version):
    (tmp_path / "aiter" / "configs").mkdir(parents=True)
    (tmp_path / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / ".git" / "refs" / "heads" / "main").write_text("123456789a\n")
    (tmp_path / ".git" / "HEAD").write_text(head)
    assert Files("aiter", tmp_path).version == version


def test_a_folder_that_may_not_be_entered_has_no_files(tmp_path, monkeypatch):
    (tmp_path / "aiter" / "configs").mkdir(parents=True)
    files = Files("aiter", tmp_path)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.is_file", refuse)  # as root nothing is refused
    assert not files.has(NAME)


@pytest.mark.parametrize("place", [
    "",
    "python",
    "lib/python3.12/site-packages",
    "usr/local/lib/python3.12/dist-packages",
    "opt/venv/lib/python3.12/site-packages",
    "opt/conda/envs/py_3.12/lib/python3.12/site-packages",
    "sgl-workspace/aiter",
])  # fmt: skip
def test_a_package_is_found_in_a_checkout_an_environment_and_an_image(tmp_path, place):
    """The last ones are of ROCm's and SGLang's images."""
    package = tmp_path / place / "aiter"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.1.20'\n")
    (package / "_version.py").write_text("version = '0.1.20'\n")
    files = Files("aiter", tmp_path)
    assert (files.version, files.has("aiter/_version.py")) == ("0.1.20", True)
    assert Files("aiter", package).has("aiter/_version.py")
