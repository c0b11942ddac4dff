"""What the tests of the double of AITER's attention share."""

from __future__ import annotations

import importlib
from contextlib import contextmanager

import torch

from tests.doubles import lent

SCALE = 0.1352337788608801


@contextmanager
def on(arch: str):
    with lent("rocm", arch, "aiter_attention"):
        yield importlib.import_module("aiter")


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    found, wanted = found.float(), wanted.float()
    return (
        bool(torch.isfinite(found).all())
        and (found - wanted).abs().max().item() < 0.02 * wanted.abs().max().item()
    )
