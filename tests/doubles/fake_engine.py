"""A server that answers as an engine does, or fails as one can: python fake_engine.py MODE PORT [NAME]."""

import http.server
import json
import os
import signal
import subprocess
import sys

MODE, PORT, NAME = sys.argv[1], int(sys.argv[2]), (*sys.argv[3:], "model")[0]
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]

clients = 0


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global clients
        clients += "client" in self.path
        if MODE == "dies-mid-run" and clients == 2:  # the first one warms it up
            print("ValueError: the KV cache is gone", flush=True)
            os._exit(9)
        if MODE == "never-healthy":
            self.send_error(503)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": NAME}]}).encode())

    def log_message(self, *_):
        pass


print("loading weights", flush=True)
if MODE == "dies-at-start":
    print("RuntimeError: no such layer", flush=True)
    sys.exit(3)
if MODE == "ignores-sigterm":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if MODE in ("spawns", "ignores-sigterm"):
    subprocess.Popen(SLEEP)
    subprocess.Popen(SLEEP, start_new_session=True)
    # An orphan: its parent ends at once.
    code = f"import subprocess; subprocess.Popen({SLEEP!r}, start_new_session=True)"
    subprocess.run([sys.executable, "-c", code], check=True)
http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
