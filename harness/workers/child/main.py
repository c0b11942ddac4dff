"""A worker process: it answers the requests of its parent, one at a time, on a file descriptor of its own,
because libraries print to stdout and stderr. Both go to the worker's log."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import kernels
from harness.errors import one_line, text_of


def main() -> None:
    module, name = sys.argv[1].split(":")
    descriptor = int(sys.argv[2])
    die_with_parent()
    faulthandler.enable()
    if hasattr(kernels, "import_plugins"):  # kernels of older commits import plug-ins anyway
        kernels.import_plugins()
    with Connection(descriptor) as connection:
        try:
            served = getattr(__import__(module, fromlist=[name]), name)()
        except Exception as error:
            connection.send(("error", one_line(error)))
            return
        connection.send(("ready", None))
        serve(connection, served)


def serve(connection: Connection, served: Any) -> None:
    """Answers requests until the parent closes the connection: the request's name is a method of `served`."""
    from kernels.op import Unsupported

    with contextlib.suppress(EOFError):
        while True:
            request, arguments = connection.recv()
            answer = None  # frees the last answer: the parent had to be able to open a Blob in it until now
            try:
                answer = getattr(served, request)(**arguments)
                connection.send(("ok", answer))
            except Unsupported as error:
                connection.send(("unsupported", text_of(error)))
            except Exception as error:
                traceback.print_exc()
                # Kernels of older commits call it `told`, or have none.
                describe = getattr(kernels, "describe_error", getattr(kernels, "told", one_line))
                connection.send(("crashed" if _has_lost_gpu() else "error", describe(error)))


def _has_lost_gpu() -> bool:
    """Whether every further request would fail, as after an illegal access."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception:
        return True
    return False


def die_with_parent() -> None:
    """Makes Linux kill this process when its parent dies, even where it is stuck in a kernel."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    main()
