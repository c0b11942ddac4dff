"""Ending by SIGTERM as by control-C."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def termination_is_an_interrupt() -> Iterator[None]:
    """SIGTERM ends servers as control-C does. Of kill -9 their guards take care."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
