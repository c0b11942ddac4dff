"""A client that asks a fake engine for one token after the other and dates them by the monotonic clock, as
vLLM's does: python fake_dated_client.py URL RESULT LENGTH [fails]."""

import json
import sys
import time
import urllib.request
from itertools import pairwise
from pathlib import Path

url, result, length = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])


def token():
    urllib.request.urlopen(f"{url}/token", timeout=60).read()
    return time.perf_counter()


urllib.request.urlopen(f"{url}/health?client", timeout=60).read()
if sys.argv[4:] == ["fails"] and "pair" in result.name:
    sys.exit("KeyError: 'choices'")
sent = time.perf_counter()
times = [token() for _ in range(length)]
result.write_text(
    json.dumps(
        {
            "completed": 1,
            "start_times": [sent],
            "ttfts": [times[0] - sent],
            "itls": [[b - a for a, b in pairwise(times)]],
            "input_lens": [16],
            "output_lens": [length],
            "errors": [""],
        }
    )
)
