"""Values of each JSON example made wrong: left out, never a traceback or another number."""

from __future__ import annotations

import copy
import json

import pytest

from harness.serving import load
from harness.serving.clients.files import UnreadableError
from tests.support.serving_files import DATA, leaves, place, shapes

FILES = ("aiperf_0.13.0.json", "genai_perf.json", "guidellm_0.3.1.json", "guidellm_0.7.3.json",
         "inference_perf_0.7.0.json", "inference_perf_2025.json", "inferencex_agg.json",
         "inferencex_api.json", "inferencex_device.json", "trtllm_bench.json",
         "trtllm_serve.json")  # fmt: skip
WRONG = ("12", "a word", None, True, [], {}, [1, "x"], -1.0, 1e300, float("nan"), float("-inf"), {"avg": 3})


@pytest.mark.parametrize("name", FILES)
def test_each_value_made_wrong(tmp_path, name):
    content = json.loads((DATA / name).read_text())
    whole = {run.id: shapes(run) for run in load(DATA / name)}
    whole = {key.replace(str(DATA), str(tmp_path)): values for key, values in whole.items()}
    places = list(leaves(content))
    places = places[:: 1 + len(places) // 50]
    path = tmp_path / name
    for number, where in enumerate(places):
        for wrong in (WRONG[number % len(WRONG)], WRONG[(number + 5) % len(WRONG)]):
            broken = copy.deepcopy(content)
            place(broken, where, wrong)
            path.write_text(json.dumps(broken))
            try:
                runs = load(path)
            except UnreadableError as error:
                assert "\n" not in str(error)
                continue
            for run in runs:
                derived = {one.name for one in run.metrics if one.derived}
                for key, value in shapes(run).items():
                    before = whole[run.id].get(key, (None,))
                    assert value[0] == before[0] or key[0] in derived, (where, wrong, key)


@pytest.mark.parametrize("name", FILES)
def test_each_object_taken_away(tmp_path, name):
    content = json.loads((DATA / name).read_text())
    path = tmp_path / name
    for top in list(content) if isinstance(content, dict) else range(len(content)):
        broken = copy.deepcopy(content)
        del broken[top]
        path.write_text(json.dumps(broken))
        try:
            load(path)
        except UnreadableError as error:
            assert "\n" not in str(error)


OTHERS = (
    "3", "null", "[]", "{}", '"x"', "[[1]]", "[null]", '{"benchmarks": 3}', '{"benchmarks": []}',
    '{"benchmarks": [3]}',
    '{"metrics": []}', '{"performance": 3}', '{"performance": {}}', '{"a": 1}\n{"b": 2}',
)  # fmt: skip


@pytest.mark.parametrize("text", OTHERS)
def test_other_json_is_of_no_known_client(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UnreadableError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
