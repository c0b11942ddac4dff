"""Routing log of an engine, as picks that a step is replayed with."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from harness import archive
from harness.errors import UsageError

Picks = tuple[tuple[tuple[int, ...], ...], ...]
"""[layer][token][pick]"""


def decode_picks(log: Path, batch: int, wanted: int) -> list[Picks]:
    """Of as many recorded decode steps of `batch` tokens as wanted, evenly from those with few experts picked
    to those with many: what experts cost goes by how many are read, and two steps spread over the run had 4
    and 5 % fewer than its mean (results/README.md, serving/cpu-default and cpu-default-warmed). Raises
    UsageError where the log has none."""
    data = _read(log)
    ends = data["tokens"].cumsum()
    decodes: dict[int, dict[int, Any]] = defaultdict(dict)
    for step, layer, end, tokens in zip(data["step"], data["layer"], ends, data["tokens"], strict=True):
        if tokens == batch:
            decodes[int(step)][int(layer)] = data["ids"][end - tokens : end]
    layers = 1 + int(data["layer"].max(initial=-1))
    whole = [by_layer for _, by_layer in sorted(decodes.items()) if len(by_layer) == layers]
    whole.sort(key=lambda by_layer: sum(len(set(ids.flat)) for ids in by_layer.values()))
    if not whole:
        raise UsageError(f"{log}: no decode step of {batch} tokens was logged")
    wanted = min(wanted, len(whole))
    spread = [whole[(2 * i + 1) * len(whole) // (2 * wanted)] for i in range(wanted)]
    return [
        tuple(tuple(tuple(map(int, row)) for row in by_layer[layer]) for layer in range(layers))
        for by_layer in spread
    ]


def prefill_picks(log: Path, tokens: int, slack: int) -> Picks:
    """Picks of a prefill step that load the experts as the logged one of about so many tokens did (at most
    `slack` more: requests that decode with it); () where none was logged. The log keeps counts only: who
    picked what among the tokens is made up, each token's picks being distinct."""
    data = _read(log)
    steps: dict[int, dict[int, Any]] = defaultdict(dict)
    for step, layer, counts in zip(
        data["prefill_step"], data["prefill_layer"], data["prefill_counts"], strict=True
    ):
        steps[int(step)][int(layer)] = counts
    topk = data["ids"].shape[-1] if data["ids"].size else 0
    for _, layers in sorted(steps.items()):
        sizes = {int(counts.sum()) for counts in layers.values()}
        if topk and len(sizes) == 1 and 0 <= sizes.pop() / topk - tokens <= slack:
            return tuple(_dealt(layers[layer].tolist(), tokens, topk) for layer in sorted(layers))
    return ()


def _dealt(counts: list[int], tokens: int, topk: int) -> tuple[tuple[int, ...], ...]:
    """Experts in turn down the tokens, as often as each was picked: as none is picked more often than there
    are tokens, no token gets it twice."""
    excess = sum(counts) - tokens * topk
    for _ in range(excess):
        counts[counts.index(max(counts))] -= 1
    row = [expert for expert, count in enumerate(counts) for _ in range(count)]
    return tuple(tuple(row[token + pick * tokens] for pick in range(topk)) for token in range(tokens))


def _read(log: Path) -> Any:
    import numpy

    try:
        with archive.open_binary(log) as file:
            return dict(numpy.load(file))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read routing log {log}: {error}") from None
