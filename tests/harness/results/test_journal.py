"""Run folders: no finished case is lost, whatever happens to the file's end; what cannot be read is named."""

import json
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.files import JournalFull
from harness.results import read
from harness.results.journal import Journal
from harness.results.schema import KEYS, SCHEMA, CaseDone, Cell, DeviceUsed, Record, Samples, Verdict
from shapes.case import Case
from tests.support.calibrated import LIGHT, calibrations
from tests.support.written_runs import a_cell, a_run, altered, finished

IMPLS = ("torch.naive", "torch.sdpa", "vllm.amx")


def finished_case(key: str, time_us: float = 100.0, device: str = "") -> list[Record]:
    """The records of a case: three cells, a verdict, and its end."""
    facts = {"case": key, "reason": "µ – not only ASCII, and a \n line end",
             "check": {"ok": True, "row_error": 0.5, "element_error": None},
             "samples": Samples(block=[0, 1], round=[0, 0], seconds=[1e-3 / 3, 2e-3 / 3])}  # fmt: skip
    verdict = Verdict(
        case=key, a="torch.naive", b="torch.sdpa", ratio=0.5, low=None, high=None, noise=0.01,
        verdict="unclear", confidence=0.95, about="baseline",
    )  # fmt: skip
    cells = [a_cell(impl=impl, time_us=time_us * (i + 1), **facts) for i, impl in enumerate(IMPLS)]
    return [*cells, verdict, finished(Case("mla_decode", {}), case=key, device=device)]


def filled(folder: Path, *keys: str) -> Journal:
    journal = Journal.create(folder, a_run(id=folder.name, provenance={"machine": {"device": "a CPU"}}))
    for key in keys:
        journal.append(finished_case(key))
    return journal


def test_what_is_appended_is_read_again_and_a_case_measured_again_replaces_the_first(tmp_path):
    journal = filled(tmp_path / "run")
    assert journal.finished() == {} and read.load(tmp_path / "run").empty
    for key, time_us in (("case a", 100.0), ("case b", 100.0), ("case a", 7.0)):
        journal.append(finished_case(key, time_us))
    journal.append([*finished_case("lost")[:2], *finished_case("case c")])
    assert Journal(tmp_path / "run").run().id == "run"
    assert Journal(tmp_path / "run").finished() == {
        "case a": finished_case("case a", 7.0),
        **{key: finished_case(key) for key in ("case b", "case c")},
    }


def test_fields_and_what_stands_for_those_that_a_record_lacks_are_as_committed(snapshot):
    lines = []
    for kind in Record.__subclasses__():
        lines.append(kind.__name__)
        for name, field in kind.model_fields.items():
            default = field.get_default(call_default_factory=True)
            lines.append(f"    {name}" if field.is_required() else f"    {name} = {default!r}")
    snapshot(Path(__file__).parent / "snapshots" / "records.txt", "\n".join(lines) + "\n")


# Several devices


def used(name: str) -> DeviceUsed:
    return DeviceUsed(name=name, type="H200", host=name.partition("/")[0], uuid=name.partition("/")[2])


def by(device: str, name: str) -> list[Record]:
    return finished_case(f"case {name}", device=device)


CALIBRATED = calibrations({"n1/x": 100.0, "n2/y": 105.0}) + calibrations(
    {"n1/x": 101.0, "n2/y": 106.0}, when="last"
)
WRITES: list[list[Record]] = [
    [used("n1/x"), *by("n1/x", "a")],
    [used("n2/y"), *by("n2/y", "b")],
    [*CALIBRATED[:2]],
    by("n1/x", "c"),
    [used("n3/z"), *by("n3/z", "d")],
    [*CALIBRATED[2:]],
]
"""Of a run that was resumed: calibrations stand in the middle, too."""
MEASURED = {"case a": "n1/x", "case b": "n2/y", "case c": "n1/x", "case d": "n3/z"}


def written(folder: Path) -> Journal:
    journal = filled(folder)
    for records in WRITES:
        journal.append(records)
    return journal


def test_devices_and_calibrations_are_read_from_among_the_cases(tmp_path):
    journal = written(tmp_path / "run")
    assert journal.finished() == {case: by(device, case[-1]) for case, device in MEASURED.items()}
    assert journal.devices() == [used("n1/x"), used("n2/y"), used("n3/z")]
    assert journal.calibrations() == CALIBRATED
    table = read.load(tmp_path / "run").drop_duplicates("case").set_index("case")
    assert table["device"].to_dict() == MEASURED
    assert table["host"].to_dict() == {case: device[:2] for case, device in MEASURED.items()}

    other = filled(tmp_path / "other")
    other.append(CALIBRATED)
    other.append(finished_case(LIGHT))
    assert other.finished() == {LIGHT: finished_case(LIGHT)}, "calibrations of the same case are none of it"


def test_a_kill_anywhere_costs_no_more_than_the_case_that_was_being_written(tmp_path):
    """Cut after any line, or within one; then the missing cases are measured on another device, the last of
    them first, as a run that is resumed may."""
    whole = written(tmp_path / "whole").cells.read_bytes()
    sizes = [sum(len(r.model_dump_json().encode()) + 1 for r in records) for records in WRITES]
    ends = [sum(sizes[: i + 1]) for i in range(len(WRITES))]
    assert ends[-1] == len(whole)
    lines = [i + 1 for i in range(len(whole)) if whole[i : i + 1] == b"\n"]
    for cut in sorted({0, *(line + by for line in lines for by in (-9, -1, 0, 7))} - {len(whole) + 7}):
        journal = filled(tmp_path / f"run {cut}")
        journal.cells.write_bytes(whole[:cut])
        left = {
            record.case
            for records, end in zip(WRITES, ends, strict=True)
            for record in records
            if isinstance(record, CaseDone) and end <= cut
        }
        assert set(journal.finished()) == left, f"cut at {cut}"
        devices, calibrated = journal.devices(), journal.calibrations()
        stood = max((line for line in lines if line <= cut), default=0)
        kinds = [json.loads(line)["kind"] for line in whole[:stood].splitlines()]
        assert (len(devices), len(calibrated)) == (kinds.count("device"), kinds.count("calibration"))
        missing = sorted({*MEASURED} - left, reverse=True)
        if missing:
            journal.append([used("n4/w")])
            devices.append(used("n4/w"))
        for key in missing:
            journal.append(by("n4/w", key[-1]))
        again = Journal(journal.folder)
        by_device = MEASURED | dict.fromkeys(missing, "n4/w")
        assert again.finished() == {key: by(device, key[-1]) for key, device in by_device.items()}, cut
        assert again.devices() == devices
        assert again.calibrations() == calibrated
        records = list(again.lines.records())
        assert sum(isinstance(r, CaseDone) for r in records) == len(MEASURED), "no case is there twice"
        more = sum(isinstance(r, Cell) for r in records) - len(MEASURED) * len(IMPLS)
        assert not missing or more == 0, f"cut at {cut}: cells of the cut-off write stay"


# What cannot be read


@pytest.mark.parametrize(("number", "broken", "said"), [
    *((1, text, "") for text in ("{", "", "null", '"cell"', "\x00\x00", b"\xff\xfe")),
    *((3, text, "") for text in ('{"kind": "cell"}', '{"kind": "rumour"}', '{"kind": ["cell"]}')),
    *(
        (5, '{"case": "x"}', ""),
        (2, {"time_us": "fast"}, "cell.time_us: "),
        (2, {"new_field": 1}, "cell.new_field: "),
    ),
    *((line, {"type": 7}, f"{kind}.type: ") for line, kind in ((11, "device"), (12, "calibration"))),
])  # fmt: skip
def test_a_broken_line_is_named(tmp_path, number, broken, said):
    journal = filled(tmp_path / "run", "case a", "case b")
    journal.append([used("n1/x"), *CALIBRATED])
    lines = journal.cells.read_bytes().split(b"\n")
    if isinstance(broken, dict):
        broken = json.dumps(json.loads(lines[number - 1]) | broken)
    lines[number - 1] = broken if isinstance(broken, bytes) else broken.encode()
    journal.cells.write_bytes(b"\n".join(lines))
    with pytest.raises(UsageError, match=rf"cannot read .*cells\.jsonl, line {number}: {said}") as caught:
        journal.finished()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", '"run"', "{}", '{"schema_version": "1"}', '{"schema_version": 1}',
                                  '{"schema_version": 1, "id": 3}', b"\x80\x12\xff", 0.5, 0.99])  # fmt: skip
def test_a_run_that_is_none_is_named(tmp_path, text):
    """A number is the share of the file that is left."""
    journal = filled(tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    whole = file.read_bytes()
    part = whole[: int(text * len(whole))] if isinstance(text, float) else text
    file.write_bytes(part.encode() if isinstance(part, str) else part)
    with pytest.raises(UsageError, match=r"run\.json") as caught:
        journal.run()
    assert "\n" not in str(caught.value)


def test_a_newer_schema_is_refused_and_both_are_named(tmp_path):
    filled(tmp_path / "two", "case a")
    altered(tmp_path / "two", schema_version=SCHEMA + 3, something_new=True)
    with pytest.raises(UsageError, match=rf"has schema {SCHEMA + 3}; .* reads up to {SCHEMA}\b"):
        read.load(tmp_path)


# results.load


def test_load(tmp_path):
    journal = filled(tmp_path / "one", "case a", "case b", "case c")
    journal.cells.write_bytes(journal.cells.read_bytes()[:-3])  # case c is unfinished
    table = read.load(tmp_path / "one")
    assert list(table["impl"]) == [*IMPLS, *IMPLS]
    assert set(table["run"]) == {"one"}
    assert table["time_us"].tolist() == [100, 200, 300] * 2
    assert {KEYS.get(name, name) for name in Cell.model_fields} - {"kind"} <= set(table.columns)
    machine = [{*table[column]} for column in ("machine", "device", "host")]
    assert machine == [{"a CPU"}, {""}, {""}], "older runs do not have the host"
    altered(tmp_path / "one", provenance={"machine": {"device": "a CPU", "host": "here"}})
    table = read.load(tmp_path / "one")
    assert ({*table["device"]}, {*table["host"]}) == ({""}, {"here"})


@pytest.mark.parametrize(("where", "runs"), [
    *((where, ["one"]) for where in ("day/one/", "day/one/cells.jsonl", "day/one/run.json")),
    *(("day", ["one", "two"]), (".", ["one", "two", "three"]), ("day/t*", ["two"])),
    *(("*/*/cells.jsonl", ["one", "two"]), ("**/three", ["three"]), ("thr*", ["three"])),
    *((where, []) for where in ("nowhere", "no*", "empty", "*.log")),
])  # fmt: skip
def test_where_load_finds_runs(tmp_path, where, runs):
    for name in ("day/one", "day/two", "three"):
        filled(tmp_path / name, "case a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "three.log").touch()
    if not runs:
        with pytest.raises(UsageError, match="no run at"):
            read.load(f"{tmp_path}/{where}")
    else:
        table = read.load(f"{tmp_path}/{where}")
        assert sorted(table["run"]) == sorted(run for run in runs for _ in IMPLS)


# A full disk


def test_a_full_disk_costs_the_case_that_did_not_fit_and_takes_no_run(tmp_path, monkeypatch):
    """It goes on when there is room again."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    journal = filled(tmp_path / "run", "case a")
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(JournalFull, match=r"cannot write to .*cells\.jsonl: No space left") as caught:
            journal.append(finished_case("case b"))
        with pytest.raises(UsageError, match="No space left on device; choose another --out"):
            Journal.create(tmp_path / "another", a_run())
    assert caught.value.exit_code == 1 and not (tmp_path / "another" / "run.json").exists()
    journal.append(finished_case("last"))
    assert journal.finished() == {key: finished_case(key) for key in ("case a", "last")}
