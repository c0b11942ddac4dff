"""Good files of serving clients, spoilt in known ways, and the verdict on what loading makes of one."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.serving import ServingRun, load
from harness.serving.clients.files import UnreadableError
from tests.support.paths import SERVING_DATA

DATA = SERVING_DATA
SEED = 8
A_FEW = 5  # fields of each file that are spoilt one after another
ALL = 40
CUTS = 10


@dataclass(frozen=True)
class Mutation:
    """A file's bytes after a change.

    touched: keys of the file that it changed; empty: the file as a whole
    harmless: all numbers must stay; else they may only be missing, or be reported
    """

    name: str
    suffix: str
    data: bytes
    touched: tuple[str, ...] = ()
    harmless: bool = False

    @property
    def cut(self) -> bool:
        return self.name.startswith("cut at")


def examples() -> list[Path]:
    """All good files; each of a known client."""
    return sorted(
        p for p in DATA.iterdir() if p.is_file() and p.suffix in (".json", ".jsonl", ".csv", ".txt", ".log")
    )


def mutations(path: Path, numbers: int = A_FEW) -> Iterator[Mutation]:
    """All of the file as a whole, and those of so many of its numbers, the same each time."""
    data, suffix = path.read_bytes(), path.suffix
    yield from _of_bytes(data, suffix)
    text = data.decode("utf-8-sig")
    if suffix in (".json", ".jsonl"):
        yield from _of_json(text, suffix, numbers)
    elif suffix == ".csv":
        yield from _of_csv(text, suffix, numbers)
    else:
        yield from _of_text(text, suffix, numbers)


def _of_bytes(data: bytes, suffix: str) -> Iterator[Mutation]:
    text = data.decode("utf-8-sig")
    packed = gzip.compress(data, mtime=0)
    yield Mutation("empty", suffix, b"")
    yield Mutation("blank", suffix, b" \n\n")
    yield Mutation("bom", suffix, b"\xef\xbb\xbf" + text.encode(), harmless=True)
    yield Mutation("utf-16 with bom", suffix, text.encode("utf-16"), harmless=True)
    yield Mutation("utf-16 without bom", suffix, text.encode("utf-16-le"))
    yield Mutation("utf-32", suffix, text.encode("utf-32"))
    yield Mutation("crlf", suffix, re.sub("\r?\n", "\r\n", text).encode(), harmless=True)
    middle = len(text) // 2
    western = (text[:middle] + "\xe9" + text[middle:]).encode("latin-1", "replace")
    yield Mutation("latin-1", suffix, western)
    yield Mutation("nul", suffix, (text[:middle] + "\0" + text[middle:]).encode())
    yield Mutation("binary", suffix, random.Random(SEED).randbytes(400))
    yield Mutation("gz", f"{suffix}.gz", packed, harmless=True)
    yield Mutation("gz cut off", f"{suffix}.gz", packed[: len(packed) // 2])
    spoilt = bytearray(packed)
    spoilt[len(packed) // 2] ^= 0xFF
    yield Mutation("gz spoilt", f"{suffix}.gz", bytes(spoilt))
    yield Mutation("gz wrong sum", f"{suffix}.gz", packed[:-8] + b"\0\0\0\0" + packed[-4:])
    yield Mutation("zip", suffix, b"PK\x03\x04" + data)


# What a number may have become; None: the key is gone. Of a JSON file.
NO_NUMBERS: dict[str, Any] = {
    "nan": float("nan"),
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
    "words": "fast",
    "object": {"value": 1},
    "list": [1, 2],
    "true": True,
    "huge": 1e300,
    "huge int": 10**400,
    "negative": -1.5,
    "object in objects": {"a": {"b": [{"c": 1}]}},
}


NO_NUMBERS_IN_TEXT = {
    "nan": "nan",
    "inf": "inf",
    "words": "fast",
    "empty": "",
    "huge": "1e300",
    "hex": "0x1f",
    "object": "{1}",
    "underscore": "1_0",
}


def _of_json(text: str, suffix: str, numbers: int) -> Iterator[Mutation]:
    try:
        rows = [json.loads(text)]
    except ValueError:
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]

    def written(rows: list[Any]) -> bytes:
        return "\n".join(json.dumps(row) for row in rows).encode()

    yield from _cuts(written(rows), suffix)
    for row, place in _places(rows, numbers):
        value, key = _get(rows[row], place), str(place[-1])
        changed: dict[str, Any] = {**NO_NUMBERS, "text of it": str(value), "gone": None, "null": None}
        if key == "request_rate":
            changed.pop("infinity")  # which it may be: SGLang's client writes it for all at once
        for name, wrong in changed.items():
            copy = json.loads(json.dumps(rows))
            _set(copy[row], place, wrong, drop=name == "gone")
            yield Mutation(f"{_named(place)} {name}", suffix, written(copy), (key,))
        twice = json.dumps(rows[row]).replace(f'"{key}": ', f'"{key}": 1, "{key}": ', 1)
        lines = [json.dumps(one) if i != row else twice for i, one in enumerate(rows)]
        yield Mutation(f"{_named(place)} twice", suffix, "\n".join(lines).encode(), (key,))
        for name, factor in units(place):
            copy = json.loads(json.dumps(rows))
            _set(copy[row], place, value * factor)
            yield Mutation(f"{_named(place)} {name}", suffix, written(copy), (key,))
    yield from _spoilt_lists(rows, suffix, written)


def _places(rows: list[Any], numbers: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Some numbers of the file, each by its row and keys; those of which rules speak first."""
    found = [(i, place) for i, row in enumerate(rows) for place in _numbers(row, ())]
    choice = random.Random(SEED)
    choice.shuffle(found)
    found.sort(key=lambda one: not list(units(one[1])))
    yield from found[:numbers]


def _numbers(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _numbers(one, (*place, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for i, one in enumerate(value):
            yield from _numbers(one, (*place, i))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield place


def _named(place: tuple[Any, ...]) -> str:
    return ".".join(map(str, place))


def units(place: tuple[Any, ...]) -> Iterator[tuple[str, float]]:
    """Changes of unit that rules can see in a number of this name."""
    key = str(place[-1])
    if re.fullmatch(r"(mean|median|p99)_(ttft|tpot|itl|e2e_latency|e2el)_ms", key):
        yield "in s", 1e-3
        yield "in us", 1e3
    if re.fullmatch(r"(input|output|total|total_token|request)_throughput", key):
        yield "of eight", 8.0
        yield "x 1000", 1e3
    if key == "duration":
        yield "in ms", 1e3


def _get(row: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        row = row[key]
    return row


def _set(row: Any, place: tuple[Any, ...], value: Any, drop: bool = False) -> None:
    inside = _get(row, place[:-1])
    if drop:
        del inside[place[-1]]
    else:
        inside[place[-1]] = value


def _spoilt_lists(rows: list[Any], suffix: str, written: Callable[[list[Any]], bytes]) -> Iterator[Mutation]:
    """Lists of single requests shorter, with a number that is none, or in other units."""
    for row, values in enumerate(rows):
        if not isinstance(values, dict):
            continue
        for key in ("input_lens", "output_lens", "ttfts", "itls"):
            if not (isinstance(values.get(key), list) and len(values[key]) > 1):
                continue
            flat = not isinstance(values[key][0], list)
            spoilt = {"shorter": values[key][:-1], "no list": 3, "of words": ["a"] * len(values[key])}
            if flat:
                spoilt["times 1000"] = [one * 1000 for one in values[key]]
                spoilt["with null"] = [None, *values[key][1:]]
                spoilt["with nan"] = [float("nan"), *values[key][1:]]
            for name, value in spoilt.items():
                copy = json.loads(json.dumps(rows))
                copy[row][key] = value
                yield Mutation(f"{key} {name}", suffix, written(copy), (key,))


def _of_csv(text: str, suffix: str, numbers: int) -> Iterator[Mutation]:
    table = list(csv.reader(io.StringIO(text)))
    header = table[0]
    yield from _cuts(text.rstrip(",\r\n").encode(), suffix)
    choice = random.Random(SEED)
    cells = [
        (r, c)
        for r in range(1, len(table))
        for c, value in enumerate(table[r])
        if re.fullmatch(r"[\d.]+", value) and header[c]
    ]
    choice.shuffle(cells)
    cells.sort(key=lambda one: not list(units((header[one[1]],))))
    for r, c in cells[:numbers]:
        value, key = table[r][c], header[c]
        spoilt = {**NO_NUMBERS_IN_TEXT, "negative": f"-{value}", "decimal comma": value.replace(".", ","),
                  **{name: repr(float(value) * factor) for name, factor in units((key,))}}  # fmt: skip
        for name, wrong in spoilt.items():
            if wrong == value:
                continue
            copy = [list(row) for row in table]
            copy[r][c] = wrong
            yield Mutation(f"{r}.{key} {name}", suffix, _csv(copy), (key,))
        copy = [[one for i, one in enumerate(row) if i != c] for row in table]
        yield Mutation(f"{key} column gone", suffix, _csv(copy), (key,))
        yield Mutation(f"{key} twice", suffix, _csv([[*row, row[c]] for row in table]), (key,))
        yield Mutation(f"{r} one cell less", suffix, _csv([*table[:r], table[r][:-1], *table[r + 1 :]]))
    for a, b in SWAPS:
        if a in header and b in header:
            names = [b if one == a else a if one == b else one for one in header]
            yield Mutation(f"{a} and {b} swapped", suffix, _csv([names, *table[1:]]), (a, b))


SWAPS = (
    ("mean_ttft_ms", "mean_tpot_ms"),
    ("mean_e2e_latency_ms", "mean_ttft_ms"),
    ("median_itl_ms", "p99_itl_ms"),
    ("p99_ttft_ms", "median_ttft_ms"),
    ("input_throughput", "output_throughput"),
    ("duration", "completed"),
    ("total_input_tokens", "total_output_tokens"),
    ("request_throughput", "concurrency"),
    ("requests_per_second", "tokens_per_second"),
    ("elapsed_time", "num_requests"),
    ("total_num_tokens", "total_input_tokens"),
)


def _csv(table: list[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue().encode()


def _of_text(text: str, suffix: str, numbers: int) -> Iterator[Mutation]:
    """Console output: numbers after a colon."""
    yield from _cuts(text.encode(), suffix)
    found = list(re.finditer(r"^([^\n:]*\([^\n:]*\)[^\n:]*|[^\n:]*): +([\d.]+)\s*$", text, re.MULTILINE))
    random.Random(SEED).shuffle(found)
    for one in found[:numbers]:
        key = one[1].strip()
        spoilt = {**NO_NUMBERS_IN_TEXT, "decimal comma": "1,5", "negative": f"-{one[2]}"}
        if "rate" in key.lower() or "number of" in key.lower():
            spoilt.pop("inf")  # which a rate may be
        for name, wrong in spoilt.items():
            changed = text[: one.start(2)] + wrong + text[one.end(2) :]
            yield Mutation(f"{key} {name}", suffix, changed.encode(), (key, wrong))


def _cuts(data: bytes, suffix: str) -> Iterator[Mutation]:
    """Cut off at any byte but between two rows."""
    choice = random.Random(SEED)
    for _ in range(CUTS):
        at = choice.randrange(1, len(data))
        if data[at - 1 : at] != b"\n" and data[at : at + 1] != b"\n":
            yield Mutation(f"cut at {at}", suffix, data[:at])


Facts = dict[tuple[str, ...], Any]


def facts(run: ServingRun) -> Facts:
    """Every number of a run that a user may read off, by what it is."""
    found: Facts = {}
    for one in run.metrics:
        key = ("metric", one.name, one.statistic, one.scope, one.tokens, one.unit)
        found[(*key, "derived") if one.derived else key] = one.value
    for part in ("totals", "workload", "samples", "parallelism"):
        for key, value in getattr(run, part).model_dump().items():
            if value not in (None, (), ""):
                found[(part, key)] = value
    for key in ("gpus", "nodes"):
        if getattr(run, key) is not None:
            found[("run", key)] = getattr(run, key)
    return found


def verdict(good: list[ServingRun], mutation: Mutation, path: Path) -> str:
    """`error`, `flagged`, `less` (numbers are missing, none is changed) or `same`.

    Raises AssertionError where a number changed without a finding that names it, an error is not one line
    about this file, or a harmless change was not.
    """
    path.write_bytes(mutation.data)
    try:
        runs = load(path)
    except UnreadableError as error:
        message = str(error)
        assert not mutation.harmless, message
        assert message.startswith(f"cannot read {path}"), message
        assert "\n" not in message
        assert len(message) < 400 + len(str(path)), message
        return "error"
    json.dumps([run.model_dump() for run in runs], allow_nan=False)
    verdicts = set()
    assert len(runs) == len(good) or (mutation.cut and len(runs) < len(good)), f"{len(runs)} of {len(good)}"
    for before, after in zip(good, runs, strict=False):
        verdicts.add(_row_verdict(before, after, mutation))
    return next(one for one in ("flagged", "less", "same") if one in verdicts)


def _row_verdict(before: ServingRun, after: ServingRun, mutation: Mutation) -> str:
    old, new = facts(before), facts(after)
    changed = [key for key in new if key in old and not _equal(old[key], new[key])]
    appeared = [
        key
        for key in new
        if key not in old and key[-1] != "derived" and not ("unknown" in key and new[key] in old.values())
    ]  # a number whose scope nobody says any more is the same number
    lost = [key for key in old if key not in new]
    if mutation.harmless:
        assert not (changed or appeared or lost), (changed, appeared, lost)
        return "same"
    known = {one.message.removeprefix(before.source) for one in before.findings}
    findings = [
        f
        for f in after.findings
        if f.severity != "note" and f.message.removeprefix(after.source) not in known
    ]
    if not (changed or appeared or lost):
        return "flagged" if findings else "same"
    if mutation.cut and not changed and not appeared:
        return "flagged" if findings or "truncated" in {f.rule for f in after.findings} else "less"
    if findings:
        words = {*mutation.touched, *(part for key in (*changed, *lost, *appeared) for part in key[1:2])}
        said = " ".join(f"{f.rule} {f.message}" for f in findings).lower()
        assert any(_word(word) in said for word in words), (words, said)
        return "flagged"
    assert not changed and not appeared, (
        f"silently changed: {[(k, old.get(k), new[k]) for k in changed + appeared]}"
    )
    assert mutation.name.endswith(("gone", "null", "empty")), f"silently lost: {lost}"
    return "less"


def _word(word: str) -> str:
    return re.sub(r"_s$|_tokens$|_ms$", "", word).lower()


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, (int, float)):
        return abs(a - b) <= 1e-12 * abs(a)
    return a == b
