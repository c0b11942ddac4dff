"""A client that writes what vLLM's would: python fake_client.py URL RESULT SEED CONCURRENCY LENGTH [MODE].

MODE: `fails`, `hangs` or `race-once`.
"""

import json
import random
import sys
import time
import urllib.request
from pathlib import Path

url, result, seed, concurrency, length = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6])
mode = sys.argv[6] if len(sys.argv) > 6 else ""
urllib.request.urlopen(f"{url}/health?client", timeout=60).read()
if mode == "fails":
    sys.exit("KeyError: 'choices'")
if mode == "hangs":
    time.sleep(600)
step = 0.01 * (1 + random.Random(seed).gauss(0, 0.02))
# The first request is prefilled alone, then the others together; or all at once.
together = mode == "race-once" and result.name == "pair-000-0-b.json"
itls = [[step] * (length - 1) for _ in range(concurrency)]
alike = {"start_times": 5.0, "input_lens": 16, "output_lens": length, "errors": "", "ttfts": 0.1}
whole = {key: [value] * concurrency for key, value in alike.items()}
if not together:
    whole["ttfts"][1:] = [0.3] * (concurrency - 1)
    itls[0][0] += 0.2 - step
result.write_text(json.dumps(whole | {"completed": concurrency, "itls": itls}))
