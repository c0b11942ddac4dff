"""The streaming JSON parser reads what Python's own reads, in pieces of any size."""

import json
import random

from harness import json_stream
from harness.json_stream import JsonText, items

LEAVES = [None, True, "", "naïve", '"\\', "💡 \0\n", "a" * 9, 0, 10**30, 1e300, -2.5e-7, float("inf")]


def a_value(draw, depth):
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(LEAVES)
    inner = [a_value(draw, depth - 1) for _ in range(draw.randint(0, 4))]
    return inner if draw.random() < 0.5 else {f"{draw.choice('aé')}{i}": each for i, each in enumerate(inner)}


def leaves(value, keys):
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*keys, key))]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in leaves(inner, (*keys, "*"))]
    return [(keys, value)]


def test_json_in_pieces_is_jsons_own(tmp_path, monkeypatch):
    draw = random.Random(0)
    for _ in range(60):
        value = a_value(draw, depth=3)
        written = json.dumps(value, indent=draw.choice([None, 1]), ensure_ascii=draw.random() < 0.5)
        path = tmp_path / "value.json"
        path.write_text(written, encoding="utf-8")
        monkeypatch.setattr(json_stream, "PIECE", draw.randint(1, 9))
        assert list(items(JsonText(path), lambda keys: False)) == [((), value)]
        assert list(items(JsonText(path), lambda keys: True)) == leaves(value, ())
