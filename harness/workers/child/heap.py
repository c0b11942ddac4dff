"""The heap of a worker, which keeps what it freed (see environment.py)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from kernels.platform import available_memory

# Of the memory that is free, as much as a heap may keep unused. What was freed is not always of use again:
# an aligned block does not fit where one of its own size was.
MOST_UNUSED = 0.5


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2, ten of them; `fordblks` are the unused bytes."""

    _fields_ = [(f"other{i}", ctypes.c_size_t) for i in range(8)] + [
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def give_back() -> None:
    """Gives unused memory back where the others need it. Does nothing with other allocators than glibc's."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return
    library.mallinfo2.restype = _Mallinfo
    if library.mallinfo2().fordblks > MOST_UNUSED * available_memory():
        trim()


def trim() -> None:
    """Gives all unused memory back, with glibc's allocator."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@contextlib.contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """Limits this process to mapping `nbytes` more: a larger allocation fails, instead of the machine running
    out of memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = [limit for limit in (mapped + nbytes, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
