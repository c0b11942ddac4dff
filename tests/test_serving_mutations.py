"""Spoilt files of every client: a clear error, a finding that names what was touched, or the same numbers.

What no rule can see from a file alone is not among them: a stand-alone number changed within reason (a TTFT's
p99 a tenth larger, a limit of concurrency that was another), a number that nothing else in its file depends
on, and a file cut off between two rows. A key that is gone makes numbers missing, and changes none.
"""

from __future__ import annotations

import pytest
from serving_mutations import examples, mutations, verdict

from harness.serving import load

FILES = examples()
CASES = [(path, mutation) for path in FILES for mutation in mutations(path)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_example_loads(path):
    assert load(path)


def test_there_are_enough_of_every_client():
    assert len(CASES) >= 200
    for path in FILES:
        assert sum(path is one for one, _ in CASES) >= 20, path


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_spoilt_file_is_no_silent_wrong_number(path, tmp_path):
    good, failed, seen = load(path), [], set()
    for mutation in (mutation for one, mutation in CASES if one is path):
        try:
            seen.add(verdict(good, mutation, tmp_path / f"spoilt{mutation.suffix}"))
        except Exception as error:
            failed.append(f"{mutation.name}: {type(error).__name__}: {str(error)[:300]}")
    assert not failed, f"{len(failed)} of them:\n" + "\n".join(failed)
    assert seen >= {"error", "same"}
