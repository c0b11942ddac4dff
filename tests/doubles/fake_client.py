"""A client that writes what vLLM's would: python fake_client.py URL RESULT SEED CONCURRENCY LENGTH [MODE].

MODE: how long a decode step took in ms (10 by default), or `fails`, `hangs`, `race-once`, or `dated`: one
request, whose tokens come from the fake engine and have the monotonic clock's times.
"""

import json
import random
import sys
import time
import urllib.request
from itertools import pairwise
from pathlib import Path

url, result, seed, concurrency, length = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6])
mode = sys.argv[6] if len(sys.argv) > 6 else "10"
urllib.request.urlopen(f"{url}/health?client", timeout=60).read()
if mode == "fails":
    sys.exit("KeyError: 'choices'")
if mode == "hangs":
    time.sleep(600)
start, times = 5.0, []
if mode == "dated":
    start = time.perf_counter()
    for _ in range(length):
        urllib.request.urlopen(f"{url}/token", timeout=60).read()
        times.append(time.perf_counter())
    ttfts, itls = [times[0] - start], [[b - a for a, b in pairwise(times)]]
else:
    step = (float(mode) if mode.isdigit() else 10.0) / 1e3 * (1 + random.Random(seed).gauss(0, 0.02))
    # The first request is prefilled alone, then the others together; or all at once.
    together = mode == "race-once" and result.name == "pair-000-0-b.json"
    ttfts = [0.3 if i and not together else 0.1 for i in range(concurrency)]
    itls = [[step] * (length - 1) for _ in range(concurrency)]
    if not together:
        itls[0][0] += 0.2 - step
alike = {"start_times": start, "input_lens": 16, "output_lens": length, "errors": ""}
whole = {key: [value] * len(itls) for key, value in alike.items()}
result.write_text(json.dumps(whole | {"completed": len(itls), "ttfts": ttfts, "itls": itls}))
