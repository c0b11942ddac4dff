"""Every client's files: what is read of them, and what is made of files that are spoilt."""

import copy
import gzip
import itertools
import json
import math
import re
from pathlib import Path

import pytest

from harness.errors import UnreadableError
from harness.serving import load
from harness.serving.clients import files
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import read
from harness.serving.clients.format import Format, formats
from tests.support.serving_files import DATA, FILES, GONE, as_lines, content_of, of, place, rules, shapes

JSON = [path.name for path in FILES if path.suffix in (".json", ".jsonl")]


def test_every_value_of_every_file(snapshot):
    lines = [line for path in FILES for run in load(path) for line in as_lines(run)]
    snapshot(Path(__file__).with_name("as_read.txt"), "\n".join(lines).replace(f"{DATA}/", "") + "\n")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_its_clients_and_no_others(path):
    names = [one.name for one in formats().values() if one.recognises(read(path))]
    assert len(names) == 1 or names == ["tensorrt_llm.serve", "vllm.serve"]  # its client began as a copy


def test_secrets_and_answers_are_not_kept(tmp_path):
    assert "not-a-real-key" not in of("sglang_bench_serving_0.5.9.jsonl")[0].model_dump_json()
    content = content_of("guidellm_0.7.3.json")
    content["benchmarks"][0]["requests"]["successful"][0]["output"] = "a secret"
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert "a secret" not in load(tmp_path / "a.json")[0].model_dump_json()


# Values made wrong


def leaves(content, path=()):
    """Where each value that is no object or list stands."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        if isinstance(value, (dict, list)):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


WRONG = ["12.5", "a word", None, math.nan, -math.inf, -1.5, True, [], {}, [1, "x"], 1e300, 10**400, GONE]


@pytest.mark.parametrize("name", JSON)
def test_a_value_made_wrong_is_left_out_and_changes_no_other(tmp_path, name):
    content, path = content_of(name), tmp_path / "a.json"
    path.write_text(json.dumps(content))
    whole = [shapes(run) for run in load(path)]
    places = list(leaves(content)) + [(key,) for key in (content if isinstance(content, dict) else ())]
    places = places[:: 1 + len(places) // 15]
    for where, wrong in zip(places, itertools.cycle(WRONG)):
        broken = copy.deepcopy(content)
        place(broken, where, wrong)
        path.write_text(json.dumps(broken))
        try:
            runs = load(path)
        except UnreadableError as error:
            assert "\n" not in str(error)
            continue
        for run, before in zip(runs, whole, strict=False):
            derived = {one.name for one in run.metrics if one.derived}
            derived |= {key[0] for key in before if key[-1] == "unknown"}
            after = shapes(run)
            for key, value in after.items():
                assert value == before.get(key) or key[0] in derived or key[-1] == "unknown", (where, wrong)
            lost = {key for key in before if key not in after and key[0] not in derived}
            number = len(where) == 1 and type(content[where[0]]) in (int, float)
            if number and wrong not in (None, GONE) and lost:
                assert any(repr(where[0]) in f.message for f in run.findings), (where, wrong, lost)


@pytest.mark.parametrize("lists", [
    {"ttfts": [0.1, "0.2"]}, {"ttfts": [0.1, -0.2]}, {"ttfts": 0.1}, {"itls": [[0.1], 0.2]},
    {"itls": [[0.1], [None]]}, {"input_lens": [1.5] * 8}, {"output_lens": [12] * 7}, {"errors": [""] * 3},
    {"errors": {"0": "lost"}},
])  # fmt: skip
def test_lists_that_do_not_fit_are_left_out_and_flagged(lists, tmp_path):
    names = ("sglang_bench_serving_0.5.9_details.jsonl", "vllm_serve_0.32_detailed.json", "trtllm_serve.json")
    for name in names:
        (tmp_path / "a.json").write_text(json.dumps(content_of(name) | lists))
        (run,) = load(tmp_path / "a.json")
        assert "unreadable" in rules(run)
        assert run.value("ttft", "mean") == of(name)[0].value("ttft", "mean")


# Files as a whole

TEXT = (DATA / "vllm_serve_0.32.json").read_text()
CSV = (DATA / "dstack_online.csv").read_text("utf-8-sig")
PACKED = gzip.compress(TEXT.encode(), mtime=0)


@pytest.mark.parametrize(("data", "name"), [
    (b"\xef\xbb\xbf" + TEXT.encode(), "a.json"), (TEXT.encode("utf-16"), "a.json"),
    (re.sub("\n", "\r\n", TEXT).encode(), "a.json"), (PACKED, "a.json.gz"),
    (re.sub("^|\n", "\n\n", CSV.replace(",", ";")).encode(), "a.csv"),
])  # fmt: skip
def test_what_a_file_may_be_packed_in(tmp_path, data, name):
    (tmp_path / name).write_bytes(data)
    same = "dstack_online.csv" if name == "a.csv" else "vllm_serve_0.32.json"
    assert shapes(load(tmp_path / name)[0]) == shapes(of(same)[0])


ROWS = (DATA / "vllm_serve_0.32_appended.jsonl").read_text()


@pytest.mark.parametrize(("name", "data", "says"), [
    ("a.json", b"", "it is empty"),
    ("a.json", TEXT.encode("utf-32"), "NUL"),
    ("a.json", (TEXT[:20] + "\xe9" + TEXT[20:]).encode("latin-1"), "not saved as UTF-8"),
    ("a.json", TEXT.encode()[:90], "broken JSON"),
    ("A.JSON", b"PK" + TEXT.encode(), "it is not JSON"),
    ("a.json", TEXT.replace('"duration"', '"duration": 1, "duration"', 1).encode(), "stands twice"),
    ("a.json", b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "nested deeper than 64"),
    ("a.jsonl", ROWS[:-40].encode(), "line 2: broken JSON"),
    ("a.json", b"PK\x03\x04\xff\xfe\x00", "it is a ZIP archive or a spreadsheet: unpack"),
    ("a.json", b'[{"benchmarks": [{"metrics": {"requests_per_second": 1, "request_concurrency": 1}}]}]',
     "no number of a run"),
    ("a.json.gz", PACKED[: len(PACKED) // 2], "cannot read"),
    ("a.json.gz", PACKED[:-8] + b"\0\0\0\0" + PACKED[-4:], "cannot read"),
    ("A.CSV", CSV[:-60].encode(), "is the file cut off"),
    ("a.csv", CSV.replace("duration", "completed", 1).encode(), "a column name stands twice"),
    ("a.json", b"[null]", "of no known client"),
    ("a.json", b'{"benchmarks": [3]}', "cannot read"),
    ("a.json", b'{"performance": {}}', "cannot read"),
    ("a.json", b'{"speed": 3.0}', "of no known client; known: "),
    ("a.json", b'{"model_id": "x", "tokenizer_id": "x", "speed": 3.0}',
     "nearest to vllm.serve (model_id, tokenizer_id"),
    ("a.json", b'{"model_id": "x", "tokenizer_id": "x", "burstiness": 1.0, "duration": "abc"}',
     "completed, output_throughput"),
    ("a.csv", b"random_range_ratio,speed\n1,2\n", "nearest to sglang.bench_serving (random_range_ratio)"),
    ("a.jsonl", (ROWS.rstrip() + '\n{"something": "else"}\n').encode(),
     ":3 as vllm.serve: no number of a run"),
    ("a.txt", b"============ Serving Benchmark Result ============\n", "no run in it"),
])  # fmt: skip
def test_a_spoilt_file_is_one_line(tmp_path, name, data, says):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UnreadableError) as caught:
        load(path)
    assert str(caught.value).startswith(f"cannot read {path}") and says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "data"), [("a.json", TEXT.encode()), ("a.json.gz", PACKED)])
def test_a_file_larger_than_a_client_writes_is_refused(tmp_path, monkeypatch, name, data):
    (tmp_path / name).write_bytes(data)
    monkeypatch.setattr(files, "LARGEST_FILE", len(TEXT.encode()))
    load(tmp_path / name)
    monkeypatch.setattr(files, "LARGEST_FILE", len(TEXT.encode()) - 1)
    with pytest.raises(UnreadableError, match="MiB is more than a client writes"):
        load(tmp_path / name)


def test_lines_of_several_clients_in_one_file(tmp_path):
    both = ("sglang_bench_one_batch_0.5.9.jsonl", "sglang_bench_one_batch_server_0.5.9.jsonl")
    text, path = "".join((DATA / name).read_text() for name in both), tmp_path / "a.jsonl"
    path.write_text(text)
    clients = [(run.client.split("_")[-1], run.source.split(":")[-1]) for run in load(path)]
    assert clients == [("batch", "1"), ("batch", "2"), ("server", "3"), ("server", "4")]
    path.write_text(text + '{"something": "else"}\n')
    with pytest.raises(UnreadableError, match="line 5: of no known client"):
        load(path)


@pytest.mark.parametrize(("table", "says"), [
    ({"lod": {}}, "lod"), ({"load": {"speed": "a"}}, "speed: no field of OfferedLoad"),
    ({"metrics": {"a": {"unit": "ms"}}}, "either a name or latencies"),
    ({"metrics": {"a": {"name": "ttft", "unit": "min"}}}, "unit"),
    ({"completed_by": "vllm.nothing"}, "nothing"),
])  # fmt: skip
def test_a_table_is_checked_when_it_is_loaded(table, says):
    with pytest.raises((ValueError, AttributeError), match=says):
        Format(name="made", **table)


# What counts as a number in text


@pytest.mark.parametrize(("text", "value"), [
    ("1,234.5", 1234.5), ("66,194.80", 66194.8), (" 7. ", 7), (".5", 0.5), ("1e3", 1000),
    *[(text, None) for text in ("1.234,5", "1,5", "12,34", "1_000", "e5", "٣", "12 ms", "64/64", "nan")],
])  # fmt: skip
def test_a_number_in_text(text, value):
    row = Fields("here", {"a": text}, as_text=True)
    assert row.number("a") == value
    assert bool(row.findings) == (value is None)
