"""A client that writes what vLLM's would: python fake_client.py URL RESULT SEED CONCURRENCY LENGTH [MODE].

MODE: how long a decode step took in ms (10 by default), or `fails`, `hangs`, `race`, `race-once`, `short`.
"""

import json
import random
import sys
import time
import urllib.request
from pathlib import Path

url, result, seed, concurrency, length = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6])
mode = sys.argv[6] if len(sys.argv) > 6 else "10"
urllib.request.urlopen(f"{url}/health?client", timeout=60).read()
if mode == "fails":
    sys.exit("KeyError: 'choices'")
if mode == "hangs":
    time.sleep(600)
step = (float(mode) if mode.replace(".", "").isdigit() else 10.0) / 1e3
rng = random.Random(seed)
step *= 1 + rng.gauss(0, 0.02)
# The first request is prefilled alone, then the others together; or all at once.
together = mode == "race" or (mode == "race-once" and result.name == "pair-000-0-b.json")
ttfts = [0.3 if i and not together else 0.1 for i in range(concurrency)]
itls = [[step] * (length - 1) for _ in range(concurrency)]
if not together:
    itls[0][0] += 0.2 - step
if mode == "short":
    itls[-1] = itls[-1][:-2]
result.write_text(
    json.dumps(
        {
            "completed": concurrency,
            "start_times": [5.0] * concurrency,
            "ttfts": ttfts,
            "itls": itls,
            "input_lens": [16] * concurrency,
            "output_lens": [1 + len(gaps) for gaps in itls],
            "errors": [""] * concurrency,
        }
    )
)
