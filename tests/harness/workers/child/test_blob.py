"""Large bytes beside messages."""

import os
import socket
from multiprocessing.connection import Connection

import pytest
import torch

from harness.workers.child.blob import Blob, receive, send


@pytest.fixture
def ends():
    pair = [Connection(end.detach()) for end in socket.socketpair()]
    yield pair
    for end in pair:
        end.close()


def test_a_message_without_blobs_is_what_older_workers_read(ends):
    send(ends[0], ("open", {"op": "mla_decode"}))
    assert ends[1].recv() == ("open", {"op": "mla_decode"})
    ends[0].send(("ok", b"bytes"))
    assert receive(ends[1]) == ("ok", b"bytes")


def test_what_is_written_to_its_tensor_stays_here_and_its_memory_goes_with_it():
    blob = Blob.of(torch.zeros(4))
    blob.tensor(torch.float32, (4,)).fill_(1.0)
    tensor, descriptor = blob.tensor(torch.float32, (4,)), blob.descriptor
    del blob
    with pytest.raises(OSError):
        os.fstat(descriptor)
    assert torch.equal(tensor, torch.zeros(4))
