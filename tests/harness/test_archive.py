"""Files in archives are read as they were before they were packed."""

import gzip
import io
import itertools
import subprocess
import zipfile
from pathlib import Path

import pytest

from harness import archive
from harness.errors import UsageError
from harness.paths import ROOT
from harness.results import read as read_module
from harness.serving.ledger import read, rows
from tests.harness.results.test_journal import filled

RECORDED = sorted((ROOT / "results").glob("*/serving/*/ledger.jsonl"))
WHOLE = ("cpu-decode-3", "cpu-long-2")  # with all of their raw files
FILES = {
    "experiment.json": b"{}",
    "ledger.jsonl": b"",
    "NOTES.md": b"What it was.\n",
    "live/a/live.jsonl": b'{"kind": "plan"}\n',
    "live/a/runs/one.json": b"a" * 5000,
    "live/a/runs/two.json": b"",
    "logs/runs/one.log": b"",
    "observed/trace.json.gz": gzip.compress(b"{}", mtime=0),
}


def folder_of(folder: Path) -> Path:
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def assert_all_read(folder: Path) -> None:
    assert {name: archive.read_bytes(folder / name) for name in FILES} == FILES


def pack(folder: Path, *kept: str) -> None:
    """Moves the folder's files into its archive, except those that are `kept`."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name not in kept]
    data = archive.packed(folder, lambda name: folder / name in files)
    for file in files:
        file.unlink()
    (folder / archive.NAME).write_bytes(data)


def test_packed_files_are_read_as_they_were(tmp_path):
    folder = folder_of(tmp_path / "run")
    pack(folder, "NOTES.md")
    assert_all_read(folder)
    assert archive.is_file(folder / "live/a/runs/one.json") and archive.is_folder(folder / "live/a/runs")
    assert not archive.is_file(folder / "live/a/runs") and not archive.is_folder(folder / "live/b")
    again = folder / "live/a/runs/one.json"
    again.write_bytes(b"again")
    assert archive.read_bytes(again) == b"again", "a later file counts"
    for missing in ("live/a/runs/three.json", "NOTES.md/none"):
        with pytest.raises(OSError, match=r"No such file|Not a directory"):
            archive.read_bytes(folder / missing)


def test_an_archive_has_the_same_bytes_at_any_time_and_unzips_to_what_was_packed(tmp_path):
    one, two = (archive.packed(folder_of(tmp_path / name), bool) for name in ("one", "two"))
    assert one == two
    with zipfile.ZipFile(io.BytesIO(one)) as packed:
        packed.extractall(tmp_path / "out")
    assert_all_read(tmp_path / "out")
    subprocess.run(["sha256sum", "--check", "--quiet", archive.SUMS], cwd=tmp_path / "out", check=True)


def test_a_broken_archive_is_one_line(tmp_path, here):
    folder = folder_of(tmp_path / "out")
    pack(folder)
    path = folder / archive.NAME
    data = path.read_bytes()
    commands = [
        ["serving", "load", folder / "live/a/runs/one.json"],
        ["serving", "trace", folder / "observed/trace.json.gz"],
        ["compare", folder / "kernels/a", folder / "kernels/b"],
    ]
    for keep, command in itertools.product((0, -30), commands):
        path.write_bytes(data[:keep])
        done = here(*command)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), command
        assert done.stderr == f"error: cannot read {path}: it is no zip archive, or it is broken\n"


def test_the_error_names_a_damaged_member(tmp_path):
    folder = folder_of(tmp_path / "run")
    pack(folder)
    path = folder / archive.NAME
    data = bytearray(path.read_bytes())
    data[data.index(FILES["observed/trace.json.gz"]) + 12] ^= 1
    path.write_bytes(data)
    with pytest.raises(archive.BrokenArchive, match=r"observed/trace\.json\.gz: BadZipFile: Bad CRC-32"):
        archive.read_bytes(folder / "observed/trace.json.gz")


def test_runs_of_kernels_are_loaded_from_an_archive(tmp_path):
    for name in ("day/x/kernels/one", "day/x/kernels/two", "day/three"):
        filled(tmp_path / name, "case a")
    wheres = (".", "day/x", "day/x/kernels", "day/x/kernels/one", "day/x/kernels/two/cells.jsonl",
              "*/*", "day/t*")  # fmt: skip
    before = {where: read_module.load(f"{tmp_path}/{where}") for where in wheres}
    pack(tmp_path / "day/x")
    for where, table in before.items():
        assert read_module.load(f"{tmp_path}/{where}").to_csv() == table.to_csv(), where
    with pytest.raises(UsageError, match="no run at"):
        read_module.load(f"{tmp_path}/day/x/kernels/four")


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.parent.name)
def test_files_that_a_recorded_ledger_names_are_there(path):
    """Or all were taken out, to keep the checkout small (results/README.md)."""
    folder = path.parent
    named = set()
    for row in rows(read(path)):
        named |= {name for line in row.observations for name in line.observation.runs}
        named |= {name for line in row.explanations for name in line.evidence}
    present = {name for name in named if archive.is_file(folder / name)}
    assert present == named or (folder.name not in WHOLE and not present)
