"""Spoilt files of every client: a clear error, a finding that names what was touched, or the same numbers.

What no rule can see from a file alone is not among them: a stand-alone number changed within reason (a TTFT's
p99 a tenth larger, a limit of concurrency that was another), a number that nothing else in its file depends
on, and a file cut off between two rows. A key that is gone, or a printed report cut off between two numbers,
makes numbers missing, and changes none.
"""

from __future__ import annotations

import pytest

from harness.serving import load
from tests.support.serving_mutations import A_FEW, ALL, examples, mutations, verdict

FILES = examples()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_example_loads(path):
    assert load(path)


def test_there_are_enough_of_every_client():
    counts = {path.name: sum(1 for _ in mutations(path)) for path in FILES}
    assert sum(counts.values()) >= 200
    assert min(counts.values()) >= 20, counts


def check(path, numbers, target):
    """Raises AssertionError with all mutations of the file that are silently wrong or end in an exception."""
    good, failed, seen = load(path), [], set()
    for mutation in mutations(path, numbers):
        try:
            seen.add(verdict(good, mutation, target / f"spoilt{mutation.suffix}"))
        except Exception as error:
            failed.append(f"{mutation.name}: {type(error).__name__}: {str(error)[:300]}")
    assert not failed, f"{len(failed)} of them:\n" + "\n".join(failed)
    assert seen >= {"error", "same", "flagged"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_spoilt_file_is_no_silent_wrong_number(path, tmp_path):
    check(path, A_FEW, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_number_of_a_file_can_be_spoilt_silently(path, tmp_path):
    check(path, ALL, tmp_path)
