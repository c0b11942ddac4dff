"""What the commands of serving clients ask for: `vllm bench serve`, `sglang.bench_serving`."""

from __future__ import annotations

import re
import shlex

from harness.serving.schema import Workload

CLIENT = re.compile(r"bench[ _]serv|benchmark_serving|bench_serving")
OPTIONS = {
    "--dataset-name": "dataset",
    "--random-input": "input_len",
    "--random-input-len": "input_len",
    "--sharegpt-input-len": "input_len",
    "--gutenberg-input-len": "input_len",
    "--random-output": "output_len",
    "--random-output-len": "output_len",
    "--sharegpt-output-len": "output_len",
    "--gutenberg-output-len": "output_len",
    "--max-concurrency": "concurrency",
    "--request-rate": "request_rate",
    "--num-prompt": "num_prompts",
    "--num-prompts": "num_prompts",
    "--warmup-time": "warmup_s",
    "--cooldown-time": "cooldown_s",
    "--random-range-ratio": "range_ratio",
}


def workloads_of(text: str) -> list[Workload]:
    """One for each client's command in a text, in its order; an option that a shell variable fills is left
    out."""
    found = []
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        if not CLIENT.search(line):
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        pairs = [(one, two) for one, two in zip(words, [*words[1:], ""], strict=True)]
        pairs += [tuple(word.split("=", 1)) for word in words if word.startswith("--") and "=" in word]
        taken = {OPTIONS[name]: _value(OPTIONS[name], value) for name, value in pairs if name in OPTIONS}
        found.append(Workload(**{name: value for name, value in taken.items() if value is not None}))
    return found


def _value(name: str, text: str) -> float | int | str | None:
    if name == "dataset":
        return None if "$" in text else text
    try:
        return int(text) if name == "num_prompts" else float(text)
    except ValueError:
        return None
