"""The pool of one machine without a cluster: its own device, with an agent in a process beside this one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from harness.cluster.agent import Agent
from harness.cluster.orders import Answer, Order
from harness.cluster.pool import Offer
from harness.errors import HarnessError, one_line
from harness.workers.child.main import die_with_parent


class LocalPool:
    """type: of its only device, as the driver calls it; device: as torch does"""

    grows = False

    def __init__(self, type: str, device: str) -> None:
        self.offer = Offer(device, type, device=device)
        self.process: BaseProcess | None = None
        self.connection: Connection | None = None

    def offers(self) -> Sequence[Offer]:
        return [self.offer]

    def start(self, offer: Offer) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), name="agent")
        self.process.start()
        theirs.close()
        self.connection = ours

    def send(self, device: str, order: Order) -> None:
        assert self.connection is not None
        with contextlib.suppress(OSError):  # one that is gone answers so
            self.connection.send(order)

    def wait(self, timeout_s: float) -> Sequence[Answer]:
        if self.connection is None:
            time.sleep(min(timeout_s, 0.2))
            return []
        if not self.connection.poll(timeout_s):
            return []
        try:
            answer: Answer = self.connection.recv()
            return [Answer(self.offer.id, answer.result, answer.error)]
        except (EOFError, OSError):
            assert self.process is not None
            self.process.join(10)
            code = self.process.exitcode
            how = (
                f"died of {signal.Signals(-code).name}"
                if code and code < 0
                else f"ended with exit code {code}"
            )
            self.stop(self.offer.id)
            return [Answer(self.offer.id, None, f"its agent {how}", lost=True)]

    def stop(self, device: str) -> None:
        if self.process is not None and self.connection is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = self.connection = None

    def close(self) -> None:
        self.stop(self.offer.id)


def _serve(connection: Connection) -> None:
    """In the agent's process: a control-C is its driver's, which then ends it."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent = Agent()
    while True:
        try:
            order = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = Answer("", agent.obey(order))
        except HarnessError as error:
            answer = Answer("", None, str(error))
        except Exception as error:
            answer = Answer("", None, one_line(error))
        connection.send(answer)
