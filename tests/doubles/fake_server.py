"""A server that answers as an engine does, or fails as one can:

    python fake_server.py PORT [--mode M] [--step-ms T]

--modes FILE: takes the first line of that file as its mode, away from it.
"""

import argparse
import json
import os
import signal
import socketserver
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
parser.add_argument("--mode", default="")
parser.add_argument("--modes", type=Path)
parser.add_argument("--step-ms", type=float, default=10.0)
options = parser.parse_args()
MODE = options.mode
if options.modes:
    MODE, _, rest = options.modes.read_text().partition("\n")
    options.modes.write_text(rest)
SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


class Handler(socketserver.StreamRequestHandler):
    """Much of http.server is imported, for each of many processes, to read these lines."""

    def handle(self):
        method, path, _ = self.rfile.readline().decode().split()
        while self.rfile.readline().strip():
            pass
        if path == "/call":
            if MODE == "dies-in-the-middle":
                print("ValueError: the KV cache is gone", flush=True)
                os._exit(9)
            if MODE == "hangs-in-the-middle":
                print("Scheduler hit an exception: all is lost", flush=True)
                time.sleep(600)
        answers = {
            "/call": {"step_ms": options.step_ms},
            "/v1/models": {"data": [{"id": "fake", "owned_by": "fake"}]},
            "/version": {"version": "1.2.3"},
            "/server_info": {"step_ms": options.step_ms, "port": options.port, "internal_states": []},
            "/health": {},
        }
        if method == "POST":
            status = 200 if path == "/flush_cache" else 404
        elif path == "/health" and MODE == "never-ready":
            status = 503
        else:
            status = 200 if path in answers else 404
        self.wfile.write(f"HTTP/1.0 {status} it\r\n\r\n{json.dumps(answers.get(path))}".encode())


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


print("loading weights", flush=True)
if MODE == "dies-at-start":
    print("RuntimeError: no such layer", flush=True)
    sys.exit(3)
if MODE == "fatal-line":
    print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    time.sleep(600)
if MODE == "tells-its-port":  # and never listens
    with Path(os.environ["FAKE_FIFO"]).open("w") as fifo:
        fifo.write(str(options.port))
    time.sleep(600)
if MODE == "ignores-sigterm":
    import subprocess

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(SLEEP)
    subprocess.Popen(SLEEP, start_new_session=True)
    # An orphan: its parent ends at once.
    code = f"import subprocess; subprocess.Popen({SLEEP!r}, start_new_session=True)"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
Server(("127.0.0.1", options.port), Handler).serve_forever()
