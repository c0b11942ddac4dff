"""Outputs that the harness owns: what is written beside them shows, and what is not written."""

import math
import os

import pytest
import torch

from harness.workers.child.outputs import GUARD, SPOILT, Blob, OwnedOutput, Repeats


@pytest.fixture
def out() -> OwnedOutput:
    like = torch.empty(3, 5, dtype=torch.bfloat16, device="meta")
    return OwnedOutput(like, "cpu")


@pytest.mark.parametrize("at", [0, GUARD - 1, -GUARD, -1], ids=["first", "before", "behind", "last"])
@pytest.mark.parametrize("value", [0, 1, 128, 255])
def test_a_byte_beside_an_output_shows(out, at, value):
    assert out.guards_hold()
    out.storage[at] = value
    assert not out.guards_hold()


def test_an_output_is_filled_as_a_whole_and_nothing_beside_it(out):
    out.fill()
    assert bool(out.tensor.isnan().all())
    out.fill(SPOILT)
    assert bool((out.tensor == SPOILT).all())
    assert out.guards_hold()


def test_of_outputs_that_differ_the_farthest_is_kept():
    """However small those before and after it."""
    repeats, known = Repeats(), torch.ones(4, 8)
    for factor in (1.0, 1.01, 1.5, 1.02, 1.0):
        repeats.compare(0, factor * known, True)
    which, output = repeats.farthest
    assert (which, output[0, 0].item(), repeats.distance) == (0, 1.5, pytest.approx(0.5))
    assert (repeats.calls, repeats.differed) == (4, 3)
    repeats.compare(0, math.nan * known, True)
    assert repeats.distance == math.inf
    signs = Repeats()
    for zeros in (torch.zeros(1, 8), -torch.zeros(1, 8)):
        signs.compare(0, zeros, True)
    assert signs.farthest and not signs.distance, "other bits of the same value, too"


def test_what_is_written_to_its_tensor_stays_here_and_its_memory_goes_with_it():
    blob = Blob.of(torch.zeros(4))
    blob.tensor(torch.float32, (4,)).fill_(1.0)
    tensor, descriptor = blob.tensor(torch.float32, (4,)), blob.descriptor
    del blob
    with pytest.raises(OSError):
        os.fstat(descriptor)
    assert torch.equal(tensor, torch.zeros(4))
