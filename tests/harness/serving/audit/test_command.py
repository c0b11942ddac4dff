"""`serving audit` as a user calls it, on documents and on files of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli.serving import serving
from harness.serving.audit.rows import by_kind
from harness.serving.clients.load import load
from tests.support.serving_files import DATA


def run(*arguments: str):
    return CliRunner().invoke(serving, ["audit", *arguments])


@pytest.mark.parametrize("fail_on, code", [("wrong", 0), ("suspect", 1), ("never", 0)])
def test_what_fails_is_chosen(fail_on, code):
    assert run("amd-sglang", "--fail-on", fail_on).exit_code == code


def test_json_has_every_finding_with_its_quotes():
    result = run("mi350x", "--json", "-", "--fail-on", "never")
    whole = json.loads(result.stdout)
    (document,) = whole["audited"]
    found = next(f for f in document["findings"] if f["rule"] == "memory_label")
    assert len(found["quotes"]) == 2 and whole["counts"]["wrong"] >= 10


def test_files_of_one_point_each_are_one_sweep(tmp_path):
    """As vllm bench serve writes them."""
    names = []
    for limit, out in ((32, 900.0), (64, 1500.0), (128, 800.0)):
        tokens = round(out * 100)
        whole = {
            "date": "20260101-000000", "endpoint_type": "vllm", "backend": "vllm", "label": None,
            "model_id": "deepseek-ai/DeepSeek-R1", "tokenizer_id": "x", "num_prompts": 2000,
            "request_rate": "inf", "max_concurrency": limit, "duration": 100.0, "completed": 2000,
            "total_input_tokens": 2000000, "total_output_tokens": tokens, "request_throughput": 20.0,
            "output_throughput": out, "total_token_throughput": out + 20000.0,
        }  # fmt: skip
        names.append(str(tmp_path / f"c{limit}.json"))
        (tmp_path / f"c{limit}.json").write_text(json.dumps(whole))
    result = run(*names)
    assert "3 files" in result.stdout and "throughput falls by 47%" in result.stdout
    assert "throughput falls" not in run(names[2]).stdout
    other = Path(names[2])
    other.write_text(other.read_text().replace("deepseek-ai/DeepSeek-R1", "a/b"))
    assert "throughput falls" not in run(*names).stdout


def test_kinds_of_unlike_scopes_are_not_added():
    run = load(DATA / "inferencex_api.json")[2]
    assert {m.scope for m in run.metrics if m.name == "throughput"} == {"gpu", "decode_gpu", "prefill_gpu"}
    assert by_kind(run) == {"total": run.value("throughput", tokens="total")}


def test_what_is_neither_file_nor_document():
    result = run("nothing-of-the-kind")
    assert result.exit_code != 0 and "neither a file nor a document" in str(result.exception)


def test_a_broken_file_costs_itself_only(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    result = run(str(tmp_path / "bad.json"), "inferencex-870")
    assert result.exit_code == 2 and "inferencex-870" in result.stdout


def test_the_rules_are_listed():
    assert "batch_below_concurrency" in run("--rules").stdout
