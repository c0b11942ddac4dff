"""Run folders: no finished case is lost, whatever happens to the file's end; what cannot be read is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.files import JournalFull
from harness.results import read
from harness.results.journal import Journal, JournalChanged
from harness.results.schema import SCHEMA, CaseDone, Cell, DeviceUsed, Record, Run, Samples, Verdict
from tests.support.calibrated import LIGHT, calibrations

IMPLS = ("torch.naive", "torch.sdpa", "vllm.amx")


def a_run(name: str = "run") -> Run:
    return Run(
        id=name,
        created="2025-01-01T00:00:00Z",
        command=["run", "--op", "mla_decode"],
        op="mla_decode",
        suite="ad hoc",
        cases=[],
        implementations=list(IMPLS),
        baseline="torch.sdpa",
        arms={"plain": {}},
        launches=["eager"],
        cache="serving",
        budget_s=60,
        per_case_s=15,
        seed=0,
        confidence=0.95,
        ceilings={},
        provenance={"machine": {"device": "a CPU"}},
    )


def finished_case(key: str, time_us: float = 100.0) -> list[Record]:
    """The records of a case: three cells, a verdict, and its end."""
    cells = [
        Cell(
            op="mla_decode",
            case=key,
            boundary="core",
            impl=impl,
            platform="cpu",
            arch="x86-amx",
            arm="plain",
            launch="eager",
            cache="serving",
            status="ok",
            reason="µ – not only ASCII, and a \n line end",
            time_us=time_us * (i + 1),
            check={"ok": True, "row_error": 0.5, "element_error": None},
            samples=Samples(block=[0, 1], round=[0, 0], seconds=[1e-3 / 3, 2e-3 / 3]),
        )
        for i, impl in enumerate(IMPLS)
    ]
    verdict = Verdict(
        case=key,
        a="torch.naive",
        b="torch.sdpa",
        ratio=0.5,
        low=None,
        high=None,
        floor=0.01,
        verdict="unclear",
        confidence=0.95,
        about="baseline",
    )
    end = CaseDone(case=key, measured_s=1, setup_s=2, rounds=2, blocks=2, stopped="budget")
    return [*cells, verdict, end]


def filled(folder: Path, *keys: str) -> Journal:
    journal = Journal.create(folder, a_run(folder.name))
    for key in keys:
        journal.append(finished_case(key))
    return journal


def test_what_is_appended_is_read_again(tmp_path):
    journal = filled(tmp_path / "run", "case a", "case b")
    assert Journal(tmp_path / "run").run() == a_run()
    found = journal.finished()
    assert list(found) == ["case a", "case b"]
    assert found == {key: finished_case(key) for key in found}


def test_an_empty_journal(tmp_path):
    journal = filled(tmp_path / "run")
    assert journal.finished() == {}
    assert read.load(tmp_path / "run").empty


def test_a_case_measured_again_replaces_the_first(tmp_path):
    journal = filled(tmp_path / "run", "case a", "case b")
    journal.append(finished_case("case a", time_us=7))
    assert journal.finished()["case a"] == finished_case("case a", time_us=7)
    assert journal.finished()["case b"] == finished_case("case b")


def test_a_run_is_not_written_over(tmp_path):
    journal = filled(tmp_path / "run", "case a")
    before = journal.cells.read_bytes()
    with pytest.raises(UsageError, match=r"already holds a run; choose another --out, or --resume "):
        Journal.create(tmp_path / "run", a_run())
    assert journal.cells.read_bytes() == before


def test_cut_off_anywhere_in_the_last_case(tmp_path):
    """A kill or a power cut may leave any part of the last write."""
    journal = filled(tmp_path / "run", "case a", "case b")
    two, before = journal.cells.read_bytes(), journal.finished()
    last = finished_case("case c")
    journal.append(last)
    whole = journal.cells.read_bytes()
    line_ends = [i + 1 for i in range(len(two), len(whole)) if whole[i : i + 1] == b"\n"]
    assert len(line_ends) == len(last)
    around_line_ends = [end + by for end in line_ends for by in (-1, 0, 1) if end + by < len(whole)]
    for end in sorted({*range(len(two), len(whole), 9), *around_line_ends}):
        journal.cells.write_bytes(whole[:end])
        journal = Journal(journal.folder)
        assert journal.finished() == before, f"cut at {end}"
        journal.append(last)
        assert journal.finished() == before | {"case c": last}, f"cut at {end}"
        assert journal.cells.read_bytes() == whole, f"cut at {end}: the rest of the cut-off write stays"


def test_a_write_cut_off_before_another_case_is_not_taken_for_its(tmp_path):
    """A resumed run may measure another case first."""
    journal = filled(tmp_path / "run", "case a")
    whole = journal.cells.read_bytes()
    journal.append(finished_case("case b"))
    second_line = journal.cells.read_bytes().index(b"\n", len(whole)) + 1
    journal.cells.write_bytes(journal.cells.read_bytes()[:second_line])
    journal = Journal(journal.folder)
    journal.append(finished_case("case c"))
    journal.append(finished_case("case b", time_us=7))
    assert journal.finished() == {
        "case a": finished_case("case a"),
        "case c": finished_case("case c"),
        "case b": finished_case("case b", time_us=7),
    }


# Several devices


def used(name: str) -> DeviceUsed:
    return DeviceUsed(name=name, type="H200", host=name.partition("/")[0], uuid=name.partition("/")[2])


def by(device: str, key: str) -> list[Record]:
    *records, done = finished_case(key)
    assert isinstance(done, CaseDone)
    return [*records, done.model_copy(update={"device": device})]


CALIBRATED = calibrations({"n1/x": 100.0, "n2/y": 105.0}) + calibrations(
    {"n1/x": 101.0, "n2/y": 106.0}, when="last"
)
WRITES: list[list[Record]] = [
    [used("n1/x"), *by("n1/x", "case a")],
    [used("n2/y"), *by("n2/y", "case b")],
    [*CALIBRATED[:2]],
    by("n1/x", "case c"),
    [used("n3/z"), *by("n3/z", "case d")],
    [*CALIBRATED[2:]],
]
"""Of a run that was resumed: calibrations stand in the middle, too."""


def written(folder: Path) -> Journal:
    journal = Journal.create(folder, a_run(folder.name))
    for records in WRITES:
        journal.append(records)
    return journal


def kept(journal: Journal) -> tuple[object, ...]:
    return journal.finished(), journal.devices(), journal.calibrations()


def test_devices_and_calibrations_are_read_from_among_the_cases(tmp_path):
    journal = written(tmp_path / "run")
    assert journal.finished() == {
        f"case {name}": by(device, f"case {name}")
        for name, device in (("a", "n1/x"), ("b", "n2/y"), ("c", "n1/x"), ("d", "n3/z"))
    }
    assert journal.devices() == [used("n1/x"), used("n2/y"), used("n3/z")]
    assert journal.calibrations() == CALIBRATED


def test_a_calibration_is_none_of_the_records_of_a_case_that_is_the_same(tmp_path):
    journal = Journal.create(tmp_path / "run", a_run())
    journal.append(CALIBRATED)
    journal.append(by("n1/x", LIGHT))
    assert journal.finished() == {LIGHT: by("n1/x", LIGHT)}


def test_a_kill_anywhere_costs_no_more_than_the_case_that_was_being_written(tmp_path):
    """Cut after any line, or within one; then the cases that are missing are measured on another device, as
    by a run that is resumed."""
    whole = written(tmp_path / "whole").cells.read_bytes()
    ends, total = [], 0
    for records in WRITES:
        total += sum(len(record.model_dump_json().encode()) + 1 for record in records)
        ends.append(total)
    assert ends[-1] == len(whole)
    lines = [i + 1 for i in range(len(whole)) if whole[i : i + 1] == b"\n"]
    for cut in sorted(
        {0, *(line + by for line in lines for by in (-9, -1, 0, 7) if line + by <= len(whole))}
    ):
        journal = Journal.create(tmp_path / f"run {cut}", a_run())
        journal.cells.write_bytes(whole[:cut])
        finished = {
            record.case
            for records, end in zip(WRITES, ends, strict=True)
            for record in records
            if isinstance(record, CaseDone) and end <= cut
        }
        assert set(journal.finished()) == finished, f"cut at {cut}"
        stood = [line for line in lines if line <= cut]
        devices, calibrated = journal.devices(), journal.calibrations()
        of_whole_lines = [json.loads(line)["kind"] for line in whole[: max(stood, default=0)].splitlines()]
        assert len(devices) == of_whole_lines.count("device")
        assert calibrated == CALIBRATED[: of_whole_lines.count("calibration")]
        missing = [f"case {name}" for name in "abcd" if f"case {name}" not in finished]
        if not missing:
            continue
        journal.append([used("n4/w"), *by("n4/w", missing[0])])
        for key in missing[1:]:
            journal.append(by("n4/w", key))
        again = Journal(journal.folder)
        assert set(again.finished()) == {f"case {name}" for name in "abcd"}, f"cut at {cut}"
        for key in missing:
            assert again.finished()[key] == by("n4/w", key), f"cut at {cut}"
        for key in finished:
            assert again.finished()[key] == journal.finished()[key]
        assert again.devices() == [*devices, used("n4/w")]
        assert again.calibrations() == calibrated
        counts = [r.case for r in again.lines.records() if isinstance(r, CaseDone)]
        assert sorted(counts) == [f"case {name}" for name in "abcd"], "no case is there twice"
        cells = [r for r in again.lines.records() if isinstance(r, Cell)]
        assert len(cells) == 4 * len(IMPLS), f"cut at {cut}: cells of the cut-off write stay"


@pytest.mark.parametrize("kind", ["device", "calibration"])
def test_a_broken_device_or_calibration_is_named(tmp_path, kind):
    journal = written(tmp_path / "run")
    lines = journal.cells.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == kind)
    lines[number] = json.dumps(json.loads(lines[number]) | {"type": 7})
    journal.cells.write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError, match=rf"cells\.jsonl, line {number + 1}: type: "):
        journal.finished()


@pytest.mark.parametrize(
    "broken",
    [
        "{",
        "",
        "null",
        "[]",
        "7",
        '"cell"',
        "not json",
        '{"kind": "cell"}',
        '{"kind": "rumour"}',
        '{"kind": ["cell"]}',
        '{"case": "x"}',
        "\x00\x00\x00",
    ],
)
@pytest.mark.parametrize("number", [1, 3, 5, 7])
def test_a_broken_line_is_named(tmp_path, broken, number):
    journal = filled(tmp_path / "run", "case a", "case b")
    lines = journal.cells.read_text().split("\n")
    lines[number - 1] = broken
    journal.cells.write_text("\n".join(lines))
    with pytest.raises(UsageError, match=rf"cannot read .*cells\.jsonl, line {number}: ") as caught:
        journal.finished()
    assert "\n" not in str(caught.value)


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    journal = filled(tmp_path / "run", "case a")
    journal.cells.write_bytes(b"\xff\xfe\n" + journal.cells.read_bytes())
    with pytest.raises(UsageError, match=r"cells\.jsonl, line 1: "):
        journal.finished()


@pytest.mark.parametrize("change", [{"time_us": "fast"}, {"status": "great"}, {"new_field": 1}])
def test_a_record_that_is_none_of_ours_is_named(tmp_path, change):
    journal = filled(tmp_path / "run", "case a")
    lines = journal.cells.read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | change)
    journal.cells.write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError, match=rf"cells\.jsonl, line 2: {next(iter(change))}: ") as caught:
        journal.finished()
    assert "\n" not in str(caught.value)


def edit_run(folder: Path, **changes: object) -> None:
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_newer_schema_is_refused_and_both_are_named(tmp_path):
    journal = filled(tmp_path / "run")
    edit_run(tmp_path / "run", schema_version=SCHEMA + 3, something_new=True)
    with pytest.raises(UsageError, match=rf"has schema {SCHEMA + 3}; .* reads up to {SCHEMA}\b"):
        journal.run()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[1, 2]",
        "null",
        "7",
        '"run"',
        "{}",
        "{",
        "garbage",
        '{"schema_version": "1"}',
        '{"schema_version": 1}',
        '{"schema_version": 1, "id": 3}',
    ],
)
def test_a_run_that_is_none_is_named(tmp_path, text):
    journal = filled(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(text)
    with pytest.raises(UsageError, match=r"run\.json") as caught:
        journal.run()
    assert "\n" not in str(caught.value)


def test_a_run_of_random_bytes_is_named(tmp_path):
    journal = filled(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_bytes(os.urandom(64) + b"\xff")
    with pytest.raises(UsageError, match=r"cannot read .*run\.json"):
        journal.run()


def test_a_truncated_run_is_named(tmp_path):
    journal = filled(tmp_path / "run")
    text = (tmp_path / "run" / "run.json").read_text()
    for end in range(0, len(text.rstrip()), 7):
        (tmp_path / "run" / "run.json").write_text(text[:end])
        with pytest.raises(UsageError, match=r"cannot read .*run\.json"):
            journal.run()


def test_missing_files_are_named(tmp_path):
    journal = filled(tmp_path / "run", "case a")
    journal.cells.unlink()
    with pytest.raises(UsageError, match=r"cannot read .*cells\.jsonl: No such file"):
        journal.finished()
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(UsageError, match=r"cannot read .*run\.json: No such file"):
        journal.run()
    (tmp_path / "run" / "run.json").mkdir()
    with pytest.raises(UsageError, match=r"cannot read .*run\.json: Is a directory"):
        journal.run()


@pytest.mark.parametrize("out", ["file", "file/run", "run"])
def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, out):
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f".run.json.{os.getpid()}").mkdir()
    with pytest.raises(UsageError, match=r"cannot write results to .*choose another --out"):
        Journal.create(tmp_path / out, a_run())


# results.load


def test_load(tmp_path):
    filled(tmp_path / "day" / "one", "case a", "case b")
    filled(tmp_path / "day" / "two", "case a")
    table = read.load(tmp_path / "day" / "one")
    assert len(table) == 2 * len(IMPLS)
    assert list(table["impl"]) == [*IMPLS, *IMPLS]
    assert set(table["run"]) == {"one"}
    assert set(table["machine"]) == {"a CPU"}
    assert table["time_us"].tolist() == [100, 200, 300] * 2
    assert set(Cell.model_fields) - {"kind"} <= set(table.columns)


def test_load_has_the_device_and_the_host_of_each_cell(tmp_path):
    written(tmp_path / "several")
    table = read.load(tmp_path / "several").drop_duplicates("case").set_index("case")
    assert table["device"].to_dict() == {
        "case a": "n1/x",
        "case b": "n2/y",
        "case c": "n1/x",
        "case d": "n3/z",
    }
    assert table["host"].to_dict() == {"case a": "n1", "case b": "n2", "case c": "n1", "case d": "n3"}


def test_load_of_one_machine_has_its_host_and_no_device(tmp_path):
    filled(tmp_path / "run", "case a")
    assert {*read.load(tmp_path / "run")["host"]} == {""}, "older runs do not have it"
    edit_run(tmp_path / "run", provenance={"machine": {"device": "a CPU", "host": "here"}})
    table = read.load(tmp_path / "run")
    assert ({*table["device"]}, {*table["host"]}) == ({""}, {"here"})


@pytest.mark.parametrize(
    ("where", "runs"),
    [
        ("day/one", ["one"]),
        ("day/one/", ["one"]),
        ("day/one/cells.jsonl", ["one"]),
        ("day/one/run.json", ["one"]),
        ("day", ["one", "two"]),
        (".", ["one", "two", "three"]),
        ("day/*", ["one", "two"]),
        ("day/t*", ["two"]),
        ("*/*/cells.jsonl", ["one", "two"]),
        ("**/three", ["three"]),
    ],
)
def test_where_load_finds_runs(tmp_path, where, runs):
    for name in ("day/one", "day/two", "three"):
        filled(tmp_path / name, "case a")
    table = read.load(f"{tmp_path}/{where}")
    assert sorted(table["run"]) == sorted(run for run in runs for _ in IMPLS)


@pytest.mark.parametrize("where", ["", "nowhere", "no*", "empty"])
def test_load_where_there_is_no_run(tmp_path, where, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no run at"):
        read.load(where)


def test_load_ignores_what_is_unfinished(tmp_path):
    journal = filled(tmp_path / "run", "case a", "case b")
    journal.cells.write_bytes(journal.cells.read_bytes()[:-3])
    assert set(read.load(tmp_path / "run")["case"]) == {"case a"}


def test_load_refuses_a_newer_schema_among_others(tmp_path):
    filled(tmp_path / "one", "case a")
    filled(tmp_path / "two", "case a")
    edit_run(tmp_path / "two", schema_version=SCHEMA + 1)
    with pytest.raises(UsageError, match=f"schema {SCHEMA + 1}"):
        read.load(tmp_path)


# A full disk


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = [shutil.which("mount") or "false", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount a small disk here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_costs_the_case_that_did_not_fit(small_disk):
    journal = filled(small_disk / "run", "case a")
    written = ["case a"]
    with pytest.raises(JournalFull, match=r"cannot write to .*cells\.jsonl: No space left") as caught:
        for i in range(100):
            before = journal.cells.read_bytes()
            journal.append(finished_case(f"case {i}"))
            written.append(f"case {i}")
    assert caught.value.exit_code == 1
    assert len(written) > 5
    assert journal.cells.read_bytes() == before, "as it was before the case that did not fit"
    assert journal.finished() == {key: finished_case(key) for key in written}
    assert len(read.load(small_disk)) == len(written) * len(IMPLS)


def test_a_disk_that_has_room_again(small_disk):
    journal = filled(small_disk / "run", "case a")
    ballast = small_disk / "ballast"
    with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(JournalFull):
        for _ in range(10):
            journal.append(finished_case("case b"))
    ballast.unlink()
    journal.append(finished_case("case c"))
    assert {"case a", "case c"} <= set(journal.finished())


def test_no_room_for_a_run(small_disk):
    with pytest.raises(OSError), (small_disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(UsageError, match="No space left on device; choose another --out"):
        Journal.create(small_disk / "run", a_run())
    assert not (small_disk / "run" / "run.json").exists()


@pytest.mark.parametrize("changed", [lambda text: text.replace("case a", "case b"), lambda text: text[:-20]])
def test_a_journal_that_somebody_else_rewrote_takes_no_more(tmp_path, changed):
    """A kernel that is measured runs as the same user, and may reach it."""
    journal = filled(tmp_path / "run", "case a", "case c")
    journal.cells.write_text(changed(journal.cells.read_text()))
    with pytest.raises(JournalChanged, match="was changed by another process"):
        journal.append(finished_case("case d"))


def test_a_journal_that_was_only_touched_goes_on(tmp_path):
    journal = filled(tmp_path / "run", "case a")
    journal.cells.chmod(0o600)
    journal.append(finished_case("case b"))
    journal.append(finished_case("case c"))
    assert list(journal.finished()) == ["case a", "case b", "case c"]


def test_a_file_that_is_no_run_does_not_bring_its_neighbours(tmp_path):
    filled(tmp_path / "run", "case a")
    (tmp_path / "run.log").touch()
    with pytest.raises(UsageError, match="no run at"):
        read.run_folders(tmp_path / "*.log")
    assert read.run_folders(tmp_path / "run*") == [tmp_path / "run"]
    assert (
        read.run_folders(tmp_path / "run" / "cells.jsonl") == read.run_folders(tmp_path) == [tmp_path / "run"]
    )
