"""A forecast: what is expected of one workload, of changes to its kernels, and what a target would need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError
from harness.serving.ledger.ledger import ChangeEntry, PredictionEntry, Setting, append, read
from harness.serving.ledger.prediction import KernelChange, Prediction
from harness.serving.link.closed_loop import ClosedLoop
from harness.serving.link.inverse import Need, needs
from harness.serving.link.model import Link
from harness.serving.link.predictions import Outlook, outlook, predict
from harness.serving.schema import OfferedLoad, Parallelism


@dataclass(frozen=True)
class Forecast:
    """predictions: of all changes together, empty where there is none"""

    load: ClosedLoop
    outlook: Outlook
    predictions: tuple[Prediction, ...]
    needs: tuple[Need, ...]


def forecast(
    link: Link, load: ClosedLoop, changes: Sequence[KernelChange], target_tpot_ms: float | None
) -> Forecast:
    expected = outlook(link, load)
    predictions = predict(link, load, changes) if changes else ()
    return Forecast(load, expected, tuple(predictions), tuple(needs(link, load, target_tpot_ms)))


def record(
    ledger: Path, row: str, link: Link, changes: Sequence[KernelChange], forecasts: Sequence[Forecast]
) -> None:
    """Writes the predictions down, a row for each load. Raises UsageError where the ledger has a row of that
    name already."""
    known = {entry.row for entry in read(ledger)} if ledger.exists() else set()
    alone = len(forecasts) == 1
    rows = {(row if alone else f"{row} c={each.load.concurrency}"): each for each in forecasts}
    for name in rows:
        if name in known:
            raise UsageError(f"{ledger} has a row {name!r} already; take another --row")
    parallel = link.structure.parallel
    for name, each in rows.items():
        load = each.load
        setting = Setting(
            hardware=link.hardware,
            gpus=link.gpus,
            engine=link.engine,
            model="DeepSeek-R1",
            precision="fp8 block-scale",
            kv_cache=link.kv,
            plain=True,
            launch="eager" if link.eager else "graph",
            recv_interval=load.recv_interval,
            prefill_tokens=load.prefill_tokens,
            parallelism=Parallelism(tp=parallel.tp, pp=1, ep=parallel.ep, dp=parallel.dp),
            workload=OfferedLoad(
                input_len=load.mean_isl,
                output_len=load.mean_osl,
                range_ratio=load.range_ratio,
                concurrency=load.concurrency,
                request_rate=0.0,
                num_prompts=load.concurrency * load.waves,
            ),
            note=parallel.text,
        )
        append(ledger, ChangeEntry(row=name, changes=tuple(changes), setting=setting))
        for prediction in each.predictions:
            append(ledger, PredictionEntry(row=name, prediction=prediction))
