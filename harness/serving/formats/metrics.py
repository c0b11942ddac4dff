"""Reading metrics in the two ways that clients write them: one key a statistic, or an object a metric."""

from __future__ import annotations

import re
from collections.abc import Mapping

from harness.serving.fields import Fields
from harness.serving.schema import Metric, Scope, Tokens

STATISTIC = r"mean|median|std|min|max|p\d+(?:\.\d+)?"
MILLISECONDS = {
    "ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3, "secs": 1e3, "seconds": 1e3,
}  # fmt: skip


def of_keys(
    row: Fields, names: Mapping[str, str], *, suffix: str = "_ms", scale: float = 1.0
) -> list[Metric]:
    """Latencies in ms under keys such as `p99_ttft_ms`.

    names: the client's name of each to ours; suffix: what follows it; scale: the unit in ms
    """
    pattern = re.compile(rf"({STATISTIC})_({'|'.join(map(re.escape, names))}){re.escape(suffix)}")
    found = []
    for key in row.values:
        if (match := pattern.fullmatch(key)) and (value := row.number(key, scale=scale)) is not None:
            name = names[match[2]]
            found.append(Metric(name=name, value=value, unit="ms", scope="request", statistic=match[1]))
    return found


def of_object(
    fields: Fields,
    statistics: Mapping[str, str],
    name: str,
    unit: str = "ms",
    *,
    scale: float = 1.0,
    scope: Scope = "request",
    tokens: Tokens = "none",
) -> list[Metric]:
    """The statistics of one metric, each under its own key of an object.

    statistics: the client's key of each to ours; scale: the client's unit in `unit`
    """
    return [
        Metric(name=name, value=value, unit=unit, scope=scope, tokens=tokens, statistic=statistic)
        for key, statistic in statistics.items()
        if (value := fields.number(key, scale=scale)) is not None
    ]


def single(
    fields: Fields,
    key: str,
    name: str,
    unit: str,
    scope: Scope = "instance",
    tokens: Tokens = "none",
    statistic: str = "total",
) -> list[Metric]:
    """The metric under `key`, as a list of one or none."""
    return of_object(fields, {key: statistic}, name, unit, scope=scope, tokens=tokens)
