"""Messages between a worker and its parent. Large outputs in them travel as an open file without a name, so
that they are neither pickled nor copied on the way."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LARGE = 1 << 24  # an output of this many bytes or more travels as a file of its own


class Blob:
    """Bytes in shared memory; they exist as long as a process holds the descriptor."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size

    def __del__(self) -> None:
        os.close(self.descriptor)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Blob:
        """A copy of a contiguous tensor on any device."""
        import torch

        blob = cls(os.memfd_create("output"), tensor.nbytes)
        os.ftruncate(blob.descriptor, blob.size)
        memory = mmap.mmap(blob.descriptor, blob.size)
        torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
        return blob

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The bytes as a tensor on the host. Writing to it does not change the blob."""
        import torch

        memory = mmap.mmap(self.descriptor, self.size, access=mmap.ACCESS_COPY)
        return torch.frombuffer(memory, dtype=dtype).view(shape)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.blobs: list[Blob] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Blob):
            return None
        self.blobs.append(value)
        return value.size


class _Unpickler(pickle.Unpickler):
    """Reads a message; its blobs follow it on the connection."""

    def __init__(self, message: bytes, connection: Connection) -> None:
        super().__init__(io.BytesIO(message))
        self.connection = connection

    def persistent_load(self, size: Any) -> Blob:
        with _socket(self.connection) as stream:
            _, descriptors, _, _ = socket.recv_fds(stream, 1, 1)
        if not descriptors:
            raise EOFError
        return Blob(descriptors[0], size)


def send(connection: Connection, message: object) -> None:
    """Sends a message. `Connection.recv` can read it if it holds no blob."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(message)
    connection.send_bytes(file.getbuffer())
    for blob in pickler.blobs:
        with _socket(connection) as stream:
            socket.send_fds(stream, [b"\0"], [blob.descriptor])


def receive(connection: Connection) -> Any:
    """Waits for a message and returns it. Raises EOFError where the other side has ended."""
    return _Unpickler(connection.recv_bytes(), connection).load()


def _socket(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))
