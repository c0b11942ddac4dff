"""Packed runs: read as the files were, nothing lost by a kill, nothing altered unseen."""

import gzip
import itertools
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness import archive
from harness.errors import UsageError
from harness.paths import ROOT
from harness.results import read as read_module
from harness.serving.ledger import read, rows
from tests.harness.results.test_journal import filled
from tests.support.command_line import contents

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
KEPT = {name for name in FILES if "/runs/" not in name and not name.endswith(".gz")}


def folder_of(folder: Path) -> Path:
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def assert_all_read(folder: Path) -> None:
    assert {name: archive.read_bytes(folder / name) for name in FILES} == FILES


def rewritten(folder: Path, change: dict[str, bytes]) -> None:
    """The archive with other bytes in a member, and a checksum of the format's own that fits them."""
    path = folder / archive.NAME
    with zipfile.ZipFile(path) as old:
        members = {info: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w") as new:
        for info, data in members.items():
            new.writestr(info, change.get(info.filename, data))


def test_packed_files_are_read_as_they_were(tmp_path):
    folder = folder_of(tmp_path / "run")
    assert archive.pack(folder) == len(FILES) - len(KEPT)
    assert contents(folder).keys() == KEPT | {archive.NAME}
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"live"}
    assert_all_read(folder)
    archive.verify(folder)
    assert archive.is_file(folder / "live/a/runs/one.json") and archive.is_folder(folder / "live/a/runs")
    assert not archive.is_file(folder / "live/a/runs") and not archive.is_folder(folder / "live/b")
    again = folder / "live/a/runs/one.json"
    again.parent.mkdir()
    again.write_bytes(b"again")
    assert archive.read_bytes(again) == b"again", "a later file counts"
    assert archive.pack(folder) == 1 and archive.read_bytes(again) == b"again"
    assert archive.read_bytes(folder / "observed/trace.json.gz") == FILES["observed/trace.json.gz"]
    for missing in ("live/a/runs/three.json", "live/a/live.jsonl/none"):
        with pytest.raises(OSError, match=r"No such file|Not a directory"):
            archive.read_bytes(folder / missing)


def test_an_archive_has_the_same_bytes_whenever_it_is_packed_and_unzips_to_what_was_packed(tmp_path):
    for name in ("one", "two"):
        archive.pack(folder_of(tmp_path / name))
    one, two = (tmp_path / name / archive.NAME for name in ("one", "two"))
    data = one.read_bytes()
    assert data == two.read_bytes()
    assert archive.pack(tmp_path / "one") == 0 and one.read_bytes() == data
    with zipfile.ZipFile(one) as packed:
        packed.extractall(tmp_path / "one")
    assert {name: (tmp_path / "one" / name).read_bytes() for name in FILES} == FILES
    with pytest.raises(UsageError, match=r"one/raw\.zip packs a part of .* by itself"):
        archive.pack(tmp_path)
    subprocess.run(["sha256sum", "--check", "--quiet", archive.SUMS], cwd=tmp_path / "one", check=True)


KILLED = """
import os, signal, sys
from pathlib import Path
from harness import archive

steps = 0

def killing(call):
    def counted(*arguments, **more):
        global steps
        steps += 1
        if steps == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **more)
    return counted

os.fsync = killing(os.fsync)
for name in ("open", "replace", "unlink", "rmdir"):
    setattr(Path, name, killing(getattr(Path, name)))
archive.pack(Path(sys.argv[1]))
"""


def test_a_kill_while_packing_loses_nothing(tmp_path):
    archive.pack(folder_of(tmp_path / "whole"))
    wanted = contents(tmp_path / "whole")
    for step in range(1, 100):
        folder = folder_of(tmp_path / f"killed-{step}")
        command = [sys.executable, "-c", KILLED, str(folder), str(step)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert_all_read(folder)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        archive.pack(folder)
        assert contents(folder) == wanted
    assert step > 8


# What is damaged or altered


def test_an_altered_member_and_a_broken_archive_are_one_line(tmp_path, here):
    folder = folder_of(tmp_path / "out")
    archive.pack(folder)
    name = "live/a/runs/one.json"
    rewritten(folder, {name: b"b" * 5000})
    done = here("serving", "load", folder / name)
    line = f"error: {folder / archive.NAME}, {name}: altered since it was packed\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)

    path = folder / archive.NAME
    data = path.read_bytes()
    commands = [
        ["serving", "load", folder / name],
        ["serving", "trace", folder / "observed/trace.json.gz"],
        ["compare", folder / "kernels/a", folder / "kernels/b"],
    ]
    for keep, command in itertools.product((0, -30), commands):
        path.write_bytes(data[:keep])
        done = here(*command)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), command
        assert done.stderr.startswith(f"error: cannot read {path}: BadZipFile: ")


def test_a_member_that_rotted_is_told(tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "run")
    archive.pack(folder)
    path = folder / archive.NAME
    data = bytearray(path.read_bytes())
    at = data.index(FILES["observed/trace.json.gz"])
    data[at + 12] ^= 1
    path.write_bytes(data)
    with pytest.raises(archive.BrokenArchive, match=r"observed/trace\.json\.gz: BadZipFile: Bad CRC-32"):
        archive.read_bytes(folder / "observed/trace.json.gz")
    with pytest.raises(archive.BrokenArchive, match="Bad CRC-32"):
        archive.verify(folder)
    folder = folder_of(tmp_path / "unpacked")
    monkeypatch.setattr(archive, "replace", lambda path, _: path.write_bytes(data))
    with pytest.raises(archive.BrokenArchive, match="Bad CRC-32"):
        archive.pack(folder)
    assert contents(folder).keys() == {*FILES, archive.NAME}, "nothing was removed"


# Who reads packed files


def test_runs_of_kernels_are_loaded_from_an_archive(tmp_path):
    for name in ("day/x/kernels/one", "day/x/kernels/two", "day/three"):
        filled(tmp_path / name, "case a")
    wheres = (".", "day/x", "day/x/kernels", "day/x/kernels/one", "day/x/kernels/two/cells.jsonl",
              "day/*/kernels/t*", "**/one", "*/*", "day/**/run.json", "day/t*")  # fmt: skip
    before = {where: read_module.load(f"{tmp_path}/{where}") for where in wheres}
    archive.pack(tmp_path / "day/x")
    for where, table in before.items():
        found = read_module.load(f"{tmp_path}/{where}")
        assert found.to_csv() == table.to_csv(), where
    with pytest.raises(UsageError, match="no run at"):
        read_module.load(f"{tmp_path}/day/x/kernels/four")


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.parent.name)
def test_what_a_recorded_ledger_names_is_there_and_unaltered(path):
    """Or was taken out, all of it, to keep the checkout small (results/README.md)."""
    folder = path.parent
    archive.verify(folder)
    named = set()
    for row in rows(read(path)):
        named |= {name for line in row.observations for name in line.observation.runs}
        named |= {name for line in row.explanations for name in line.evidence}
    there = {name for name in named if archive.is_file(folder / name)}
    assert there == named or (folder.name not in WHOLE and not there)
