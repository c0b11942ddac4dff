"""The environment of a worker under a setting. Flags and their mistakes: test_toggle.py."""

import os

from harness.workers.environment import cache_environment, worker_environment


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
