"""A calibration that was stored is taken again for its own system, and for no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.serving.link.calibration import measured
from harness.serving.link.model import link
from tests.harness.serving.link.test_own_points import row

POINTS = next(s for s in measured("h200", "sglang") if s.name == "inferencex-0.5.9-1k1k").points
NAN = {"load": {"isl": 1, "osl": 2, "concurrency": 1}, "tpot_ms": float("nan")}
SHORT = ("link", "--concurrency", "16")


@pytest.fixture
def results(tmp_path) -> list[str]:
    paths = []
    for number, point in enumerate(POINTS[:2]):
        paths.append(str(tmp_path / f"{number}.jsonl"))
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(row(point)))
    return paths


@pytest.fixture
def kept(results, tmp_path, here) -> str:
    file = str(tmp_path / "h200.json")
    given = [word for path in results for word in ("--calibrate", path)]
    done = here("serving", *SHORT, *given, "--store-calibration", file)
    assert (done.returncode, done.stderr) == (0, "")
    return file


def test_it_calibrates_as_the_results_do(results, kept):
    assert link(own=[kept]).calibration == link(own=results).calibration
    assert link(own=[kept]).calibrated_versions == link(own=results).calibrated_versions
    # A point that is in both counts once.
    assert link(own=[kept, *results[:1]]).calibration == link(own=results).calibration


@pytest.mark.parametrize(
    "options",
    [("--kv-dtype", "fp8"), ("--ep", "8"), ("--hardware", "h100", "--assumed")],
)  # fmt: skip
def test_it_is_of_its_own_system_alone(kept, here, options):
    done = here("serving", *SHORT, "--calibrate", kept, *options)
    assert done.returncode == 2
    assert f"{kept} is a calibration of h200 with sglang" in done.stderr


@pytest.mark.parametrize(("change", "says"), [
    ({"points": []}, "wants points"),
    ({"points": [{"tpot_ms": 1}]}, "points.0.load: is missing"),
    ({"calibration_of": {"hardware": "h200"}}, "calibration_of.engine: is missing"),
    ({"more": 1}, "more: no such key"),
    ({"points": [NAN]}, "h200.json"),
])  # fmt: skip
def test_a_broken_one_is_one_line(kept, here, change, says):
    document = json.loads(Path(kept).read_text())
    Path(kept).write_text(json.dumps(document | change))
    done = here("serving", *SHORT, "--calibrate", kept)
    assert done.returncode == 2
    assert says in done.stderr and len(done.stderr.splitlines()) == 1


def test_it_takes_the_place_of_nothing_else(results, here):
    given = Path(results[0]).read_text()
    done = here("serving", *SHORT, "--calibrate", results[0], "--store-calibration", results[0])
    assert done.returncode == 2 and "no stored calibration" in done.stderr
    assert Path(results[0]).read_text() == given


def test_what_was_taken_for_granted_is_said_again(results, kept, here, tmp_path):
    again = str(tmp_path / "again.json")
    done = here("serving", *SHORT, "--calibrate", kept, "--store-calibration", again)
    assert "the points do not say their hardware, GPUs, " in done.stdout
    first, second = (json.loads(Path(path).read_text()) for path in (kept, again))
    assert second == first and first["runs"] == results


def test_points_of_two_versions_are_not_stored(results, tmp_path, here, monkeypatch):
    other = tmp_path / "other.jsonl"
    other.write_text(
        json.dumps(json.loads(Path(results[0]).read_text()) | {"server_info": {"version": "0.5.7"}})
    )
    given = [word for path in (*results, str(other)) for word in ("--calibrate", path)]
    done = here("serving", *SHORT, *given, "--store-calibration", str(tmp_path / "kept.json"))
    assert done.returncode == 2 and "a calibration is of one version" in done.stderr
    assert not (tmp_path / "kept.json").exists()
