"""What every row gives its library is what it gave when it was last looked at.

`pytest tests/kernels/test_recorded_calls.py --golden=write` writes the records anew; their diff is what a
reviewer reads.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels
from kernels.op import Prepared
from kernels.vendor import Vendor
from tests.support.broken_calls import survivors
from tests.support.recorded import RECORDS, Case, Wrong, record, rendered
from tests.support.recorded_rows import CASES

ROWS: dict[tuple[str, str], list[Case]] = {}
for case in CASES:
    ROWS.setdefault((case.op, case.name), []).append(case)


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_a_row_gives_its_library_what_is_recorded(
    row: tuple[str, str], snapshot: Callable[[Path, str], None]
) -> None:
    op, name = row
    if "triton" in getattr(ROWS[row][0].implementation, "also", ()):
        pytest.importorskip("triton")
    snapshot(RECORDS / op / f"{name}.txt", rendered(ROWS[row]))


def test_every_row_of_a_gpu_is_recorded() -> None:
    """But for the suite's own kernels, which TileLang compiles (test_tilelang.py), and torch's product."""
    rows = [i for op in kernels.OPS for i in kernels.implementations(op) if isinstance(i, Vendor)]
    of_gpus = {(i.op, i.name) for i in rows if set(i.kinds) - {"cpu"} and i.library != "tilelang"}
    of_gpus.remove(("block_scale_gemm", "hipblaslt.dequantised"))
    recorded = {(file.parent.name, file.stem) for file in RECORDS.glob("*/*.txt")}
    assert recorded == set(ROWS) == of_gpus


@pytest.mark.parametrize(("op", "name"), [
    ("block_scale_gemm", "deepgemm"),
    ("mla_decode", "flashmla@vllm"),
    pytest.param("fused_moe", "aiter.ck", marks=pytest.mark.slow),
    pytest.param("mla_decode", "flashinfer.auto", marks=pytest.mark.slow),
    pytest.param("mha_prefill", "flashinfer.cutlass", marks=pytest.mark.slow),
    pytest.param("mha_prefill", "cudnn", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_broken_argument_changes_the_record(op: str, name: str) -> None:
    """Each argument of each call in every way that a mistake would give."""
    *_, case = ROWS[op, name]
    assert survivors(lambda: record(case)) == []


def spoils(self: Any) -> None:
    self.operands.q.zero_()


def moves(self: Any, live: Mapping[str, torch.Tensor]) -> None:
    self._call = functools.partial(self._call, q_nope=self._call.keywords["q_nope"].clone())


@pytest.mark.parametrize(("step", "instead", "reason"), [
    ("call", spoils, "the call changed its operands"),
    ("load", moves, "a recorded graph would not see what was loaded"),
])  # fmt: skip
def test_what_no_row_may_do(step: str, instead: object, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prepared, step, instead)
    with pytest.raises(Wrong, match=reason):
        record(ROWS["mla_decode", "flashinfer.fa2"][0])
