"""Holds the link's requests at a rate against a real engine: vLLM and its client, on this machine's CPUs.

    python -m tools.serve_at_rates --out results/MACHINE/serving-rates

Decode steps of each batch and prefills of several prompts are timed alone, on the engine that serves. From
them `harness.serving.link.simulation` says what a client will see of requests at a rate; then they are sent.
Started again, it makes the runs that are missing.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from harness import files
from harness.errors import HarnessError
from harness.files import JsonObject
from harness.machine.provenance import surroundings
from harness.serving.link.simulation import OpenLoop, simulate
from harness.serving.live.checkpoint.directory import default_model
from harness.serving.live.client.client import Client
from harness.serving.live.client.load import ClientLoad
from harness.serving.live.engine.engine import Engine
from harness.serving.live.engine.launch import kind_for, launch
from harness.serving.live.process.launching import free_port

INPUT, OUTPUT, MOST = 16, 24, 8  # tokens in and out, requests in flight at most
BATCHES, PROMPTS = (1, 2, 4, 8), (1, 2, 4)
OF_CAPACITY, BURSTINESS = (0.5, 0.8, 1.1), (1.0, 0.25)
REQUESTS, SEEDS, SIMULATED = 64, (1, 2), 200
STEP_TOKENS = 4608
QUANTITIES = {
    "TPOT": ("mean_tpot_ms", lambda run: float(run.tpot.mean())),
    "median TTFT": ("median_ttft_ms", lambda run: float(np.median(run.ttft))),
    "mean TTFT": ("mean_ttft_ms", lambda run: float(run.ttft.mean())),
    "p99 TTFT": ("p99_ttft_ms", lambda run: float(np.percentile(run.ttft, 99))),
    "tok/s": ("output_throughput", lambda run: run.tokens / run.duration * 1e3),
}


class Session:
    """An engine and its client, with the runs that are kept in a folder."""

    def __init__(self, engine: Engine, client: Client, folder: Path) -> None:
        self.engine, self.client, self.folder = engine, client, folder

    def run(self, name: str, words: Sequence[object]) -> JsonObject:
        """The client's result, made where it is missing."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            arguments = [
                *("--backend", "vllm", "--base-url", self.engine.url, "--model", "model"),
                *("--tokenizer", self.client.model, "--dataset-name", "random", "--ignore-eos"),
                *("--temperature", 0, "--disable-tqdm", "--percentile-metrics", "ttft,tpot,itl,e2el"),
                *("--save-result", "--result-dir", self.folder, "--result-filename", path.name, *words),
            ]
            with self.client.processes.begin(list(map(str, arguments)), path.with_suffix(".log")) as process:
                while process.wait(1.0) is None:
                    self.engine.check()
                if not path.exists():
                    raise HarnessError(f"the client left no {path}; {process.last_words()}")
        return json.loads(path.read_text(encoding="utf-8"))

    def decode_ms(self, batch: int) -> float:
        """Of a step of so many requests: the median time between two tokens."""
        words = [*_lengths(INPUT, OUTPUT), *_loop(batch, 6 * batch)]
        return float(self.run(f"decode-{batch}", words)["median_itl_ms"])

    def prefill_ms(self, prompts: int) -> float:
        """From sending a prompt as long as so many to its first token, all outside the engine included."""
        words = [*_lengths(INPUT * prompts, 2), *_loop(1, 12)]
        return float(self.run(f"prefill-{prompts}", words)["median_ttft_ms"])

    def at_rate(self, rate: float, burstiness: float, seed: int) -> JsonObject:
        words = [*_lengths(INPUT, OUTPUT), "--num-prompts", REQUESTS, "--seed", seed]
        words += ["--request-rate", f"{rate:.4f}", "--burstiness", burstiness]
        return self.run(f"rate-{rate:.2f}-burstiness-{burstiness}-seed-{seed}", words)


def _lengths(most_in: int, most_out: int) -> list[object]:
    return ["--random-input-len", most_in, "--random-output-len", most_out, "--random-range-ratio", 0]


def _loop(concurrency: int, prompts: int) -> list[object]:
    return ["--max-concurrency", concurrency, "--num-prompts", prompts]


def predicted(
    rate: float, burstiness: float, decode: Sequence[float], prefill: Sequence[float]
) -> dict[str, list[float]]:
    """Of each quantity the median, and 5 and 95 % of the simulated runs."""
    load = OpenLoop(
        INPUT,
        OUTPUT,
        MOST,
        range_ratio=1.0,
        prefill_tokens=STEP_TOKENS,
        rate=rate,
        burstiness=burstiness,
        requests=REQUESTS,
    )
    logs = np.log(PROMPTS)
    runs = [simulate(load, decode, logs, np.array(prefill), 0.0, seed=seed) for seed in range(SIMULATED)]
    return {
        name: np.percentile([of(run) for run in runs], [50, 5, 95]).round(4).tolist()
        for name, (_, of) in QUANTITIES.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    folder = parser.parse_args().out
    runs = folder / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    server_core, client_core = sorted(os.sched_getaffinity(0))[:2]
    model = default_model(say=print)
    load = ClientLoad(INPUT * max(PROMPTS), OUTPUT, MOST, REQUESTS)
    environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(server_core)}
    flags, port = ("--max-num-seqs", str(MOST)), free_port()
    with tempfile.TemporaryDirectory() as work:
        started = launch(
            kind_for("vllm"),
            model,
            port,
            Path(work),
            name="model",
            load=load,
            environment=environment,
            flags=flags,
        )
        with Engine(started, port, Path(work) / "server.log") as engine:
            engine.wait_healthy(600.0)
            os.sched_setaffinity(0, {client_core})
            with Client("vllm", "vllm", model, Path(work)) as client:
                _measure(Session(engine, client, runs.resolve()), folder)


def _measure(session: Session, folder: Path) -> None:
    session.run("warm-up", [*_lengths(INPUT, OUTPUT), *_loop(MOST, 2 * MOST)])
    steps = [session.decode_ms(batch) for batch in BATCHES]
    decode = np.interp(range(1, MOST + 1), BATCHES, steps).tolist()
    prefill = [session.prefill_ms(prompts) for prompts in PROMPTS]
    capacity = 1e3 / (prefill[0] + (OUTPUT - 1) * decode[-1] / MOST)
    print(f"steps {[round(s, 2) for s in steps]} ms, prefills {[round(p, 1) for p in prefill]} ms")
    lines = []
    for share, burstiness in itertools.product(OF_CAPACITY, BURSTINESS):
        rate = round(share * capacity, 2)
        line = {"rate": rate, "of_capacity": share, "burstiness": burstiness}
        line["predicted"] = predicted(rate, burstiness, decode, prefill)
        found = [session.at_rate(rate, burstiness, seed) for seed in SEEDS]
        line["measured"] = {
            name: [round(float(each[key]), 4) for each in found] for name, (key, _) in QUANTITIES.items()
        }
        lines.append(line)
        print(json.dumps(line))
    document = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "surroundings": surroundings(),
        "decode_ms": dict(zip(map(str, BATCHES), steps, strict=True)),
        "prefill_ms": dict(zip(map(str, PROMPTS), prefill, strict=True)),
        "lines": lines,
    }
    files.replace(folder / "rates.json", json.dumps(document, indent=1) + "\n")
    for name in QUANTITIES:
        errors = [line["predicted"][name][0] / statistics.mean(line["measured"][name]) - 1 for line in lines]
        inside = [
            low <= value <= high
            for line in lines
            for _, low, high in [line["predicted"][name]]
            for value in line["measured"][name]
        ]
        print(
            f"{name}: off by {math.fsum(map(abs, errors)) / len(errors):.0%}; {sum(inside)} of {len(inside)}"
        )


if __name__ == "__main__":
    main()
