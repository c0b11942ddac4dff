"""Colours of serving's charts: of verdicts, of the two sides of a row, of op classes."""

from __future__ import annotations

from harness.page.style import PROVIDERS
from harness.serving.ledger.report import NOT_OBSERVED, NOT_PREDICTED
from harness.serving.op_classes import OP_CLASSES

VERDICT_COLOURS = {
    "explained": "#009E73",
    "missed": "#D55E00",
    "not resolved": "#7f7f7f",
    "bound holds": "#0072B2",
    "bound broken": "#AA4499",
    NOT_OBSERVED: "#7f7f7f",
    NOT_PREDICTED: "#7f7f7f",
}
PREDICTED, OBSERVED = "#0072B2", "#E69F00"
BEFORE, AFTER, TARGET = "#7f7f7f", "#0072B2", "#D55E00"

_OP_COLOURS = {
    "block_scale_gemm": "#0072B2",
    "fused_moe": "#E69F00",
    "mla_decode": "#009E73",
    "indexer": "#AA8844",
    "mha_decode": "#117733",
    "mha_prefill": "#44AA99",
    "attention": "#88CCEE",
    "absorbed_bmm": "#56B4E9",
    "scaled_gemm": "#332288",
    "bf16_gemm": "#6699CC",
    "moe_routing": "#F0E442",
    "quantise": "#DDCC77",
    "norm": "#999933",
    "rope_kv": "#CC79A7",
    "activation": "#CC6677",
    "all_reduce": "#D55E00",
    "all_to_all": "#882255",
    "sampling": "#AA4499",
    "copy": "#bbbbbb",
    "elementwise": "#999999",
    "host": "#555555",
    "unknown": "#dddddd",
}
"""Okabe and Ito's, then Paul Tol's `muted`, then greys: more than anyone tells apart, so that a class also
has its name at each mark, and the same place in every stack."""


def op_colours(classes: list[str]) -> tuple[list[str], list[str]]:
    """The domain and the range of a scale, in the order of OP_CLASSES; a class that it lacks comes last."""
    order = list(OP_CLASSES)
    domain = sorted(set(classes), key=lambda name: (order.index(name) if name in order else len(order), name))
    return domain, [_OP_COLOURS.get(name, PROVIDERS["torch"]) for name in domain]
