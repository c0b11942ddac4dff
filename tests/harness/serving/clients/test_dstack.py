"""dstack's two tables as published: all rows, the shifted ones found and mended, nothing else accused."""

from __future__ import annotations

import csv

import pytest

from harness.paths import ROOT
from harness.serving import load

FOLDER = ROOT / "results" / "published" / "serving" / "dstack"
ONLINE, OFFLINE = FOLDER / "online_results.csv", FOLDER / "offline_results.csv"
SHIFTED = [*range(26, 32), 53, 54, 55]  # lines


@pytest.fixture(scope="module")
def online():
    return {int(run.id.rsplit(":")[-1]): run for run in load(ONLINE)}


def test_all_rows(online):
    offline = load(OFFLINE)
    assert (len(online), len(offline)) == (54, 63)
    assert {run.mode for run in online.values()} == {"online"}
    assert {run.mode for run in offline} == {"offline"}
    for run in (*online.values(), *offline):
        assert run.hardware in ("MI300X", "H200")
        assert (run.gpus, run.nodes) == (8, 1)
        assert run.version
        assert {m.scope for m in run.metrics if m.unit in ("tok/s", "req/s")} == {"node"}


def test_only_shifted_rows_and_the_incomplete_one_are_accused(online):
    accused = {line: {f.rule for f in run.findings} for line, run in online.items() if run.findings}
    assert accused == {**{line: {"column_shift"} for line in SHIFTED}, 46: {"completed"}}
    assert {run.engine for line, run in online.items() if line in SHIFTED} == {"tensorrt-llm"}
    assert sum(run.engine == "tensorrt-llm" for run in online.values()) == 9
    assert not any(run.findings for run in load(OFFLINE))


def test_a_shifted_row_is_mended_with_a_note(online):
    with ONLINE.open(encoding="utf-8-sig") as file:
        rows = dict(enumerate(csv.DictReader(file), 2))
    for line in SHIFTED:
        run, row = online[line], rows[line]
        assert run.value("itl", "p95") == float(row["p99_itl_ms"])
        assert run.value("itl", "p99") == float(row["concurrency"])
        concurrency = run.metric("concurrency")
        assert concurrency.derived
        assert concurrency.value <= run.workload.concurrency
        note = next(one for one in run.notes if one.startswith("repaired"))
        assert "p95 of itl" in note
        assert "true concurrency is lost" in note
        finding = run.findings[0]
        assert finding.severity == "wrong"
        assert finding.numbers["concurrency"] == float(row["concurrency"])
    assert online[26].value("concurrency") == pytest.approx(4.0, abs=0.01)
    assert not any(one.startswith("repaired") for line, run in online.items() if line not in SHIFTED
                   for one in run.notes)  # fmt: skip


def test_defaults_that_a_dataset_does_not_use_are_not_its_lengths(online):
    shared = [run for run in online.values() if run.workload.dataset == "generated-shared-prefix"]
    assert len(shared) == 9
    assert {(run.workload.input_len, run.workload.output_len) for run in shared} == {(3200, 800)}
    assert all(any("1024 / 1024" in note for note in run.notes) for run in shared)


@pytest.mark.parametrize("change", ["concurrency", "latencies"])
def test_what_only_looks_like_a_shift_is_not_mended(tmp_path, change):
    """A concurrency that could not be a p99 of ITL; latencies in s, which break Little's law as well."""
    with ONLINE.open(encoding="utf-8-sig", newline="") as file:
        header, row = list(csv.reader(file))[:2]
    for i, name in enumerate(header):
        if (change == "concurrency" and name == "concurrency") or (
            change == "latencies" and name.endswith("_ms")
        ):
            row[i] = repr(float(row[i]) * (1e3 if change == "concurrency" else 1e-3))
    path = tmp_path / "row.csv"
    path.write_text("\n".join(",".join(one) for one in (header, row)))
    (run,) = load(path)
    assert "littles_law" in {one.rule for one in run.findings}
    assert "column_shift" not in {one.rule for one in run.findings}
    assert run.value("itl", "p99") == float(row[header.index("p99_itl_ms")])
