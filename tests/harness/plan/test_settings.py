"""Flags as the user writes them, and the settings that they become."""

import os

import pytest

from harness.errors import UsageError
from harness.plan import toggle
from harness.workers.environment import cache_environment, worker_environment


@pytest.mark.parametrize(("texts", "said"), [
    (["A"], "cannot read --flag 'A'"),
    (["=1"], "cannot read --flag '=1'"),
    (["A B=1"], "cannot read --flag 'A B=1'"),
    (["A=1,1"], "names a value twice"),
    (["A=1", "A=2"], "--flag A is given twice"),
])  # fmt: skip
def test_mistakes_are_one_line(texts, said):
    with pytest.raises(UsageError, match=said) as failure:
        toggle.parse_flags(texts)
    assert "\n" not in str(failure.value)


def test_too_many_settings_say_what_to_do():
    with pytest.raises(UsageError, match="one-at-a-time"):
        toggle.settings_of([{"F": str(value)} for value in range(33)], {})


def test_an_unset_variable_is_gone_and_an_empty_one_is_empty(monkeypatch):
    monkeypatch.setenv("GONE", "1")
    environment = worker_environment({"GONE": None, "EMPTY": ""})
    assert "GONE" not in environment
    assert environment["EMPTY"] == ""
    assert os.environ["GONE"] == "1"


def test_each_setting_has_compile_caches_of_its_own():
    texts = ["plain", "A=/usr/lib", "A=/usr/bin", "A=" + "x" * 300, "A=" + "x" * 301, "plain (again)"]
    found = [cache_environment(text)["TRITON_CACHE_DIR"] for text in texts]
    assert len(set(found)) == len(texts)
    assert all("/usr" not in path.rpartition("deepseek-kernel-bench")[2] for path in found)
    assert all(len(part) < 100 for path in found for part in path.split("/"))
