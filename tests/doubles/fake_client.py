"""A client that writes what `vllm bench serve` does: python fake_client.py URL RESULT SEED [--mode M].

--modes FILE: takes the first line of that file as its mode, away from it. --waits PIPE: in the second
pair's run of `base`, where there is such a pipe, says on it that it is here, and waits. Warm-ups do neither.
"""

import argparse
import json
import random
import socket
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("url")
parser.add_argument("result", type=Path)
parser.add_argument("seed", type=int)
parser.add_argument("--mode", default="")
parser.add_argument("--modes", type=Path)
parser.add_argument("--waits", type=Path)
parser.add_argument("--noise", type=float, default=0.002)
options = parser.parse_args()
host, port = options.url.removeprefix("http://").split(":")
with socket.create_connection((host, int(port)), timeout=60) as connection:
    connection.sendall(b"GET /call HTTP/1.0\r\n\r\n")
    answer = connection.makefile().read()
step = json.loads(answer.partition("\n\n")[2])["step_ms"] / 1e3
mode, warms_up = options.mode, options.result.name == "warm-up.json"
if options.modes and not warms_up:
    mode, _, rest = options.modes.read_text().partition("\n")
    options.modes.write_text(rest)
if mode == "hangs":
    time.sleep(600)
if options.waits and options.waits.exists() and not warms_up and options.result.parent.name == "002-0-base":
    with options.waits.open("w") as pipe:
        pipe.write("here\n")
        pipe.flush()
        time.sleep(600)

PROMPTS, TOKENS, LENGTH = 8, 33, 64
draw = random.Random(f"{options.seed} {options.url}")  # the port: another launch, other noise
step *= 1 + draw.gauss(0, options.noise)
failed = PROMPTS // 2 if mode == "half-fails" else 0
done = PROMPTS - failed
ttft = 0.1 * (1 + draw.gauss(0, options.noise))
e2e = ttft + (TOKENS - 1) * step
row = {
    "endpoint_type": "openai", "backend": "vllm", "model_id": "fake", "label": f"seed {options.seed}",
    "tokenizer_id": "fake", "num_prompts": PROMPTS, "request_rate": "inf", "burstiness": 1.0,
    "max_concurrency": PROMPTS, "duration": e2e, "completed": done, "failed": failed,
    "total_input_tokens": done * LENGTH, "total_output_tokens": done * TOKENS,
    "request_throughput": done / e2e,
    "output_throughput": done * TOKENS / e2e, "total_token_throughput": done * (TOKENS + LENGTH) / e2e,
}  # fmt: skip
for name, value in (("ttft", ttft), ("tpot", step), ("itl", step), ("e2el", e2e)):
    row |= {f"{statistic}_{name}_ms": 1e3 * value for statistic in ("mean", "median", "p99")}
options.result.write_text(json.dumps(row))
