"""Each import and each run leaves a line in $DOUBLE_NOTES. A run's base URL says what it does."""

import json
import os
import signal
import sys
import time
from pathlib import Path

notes = Path(os.environ["DOUBLE_NOTES"])


def note(word):
    with notes.open("a") as file:
        file.write(f"{word}\n")


note("import")


def add_cli_args(parser):
    for name in ("base-url", "seed", "result-dir", "result-filename"):
        parser.add_argument(f"--{name}")
    for name in ("backend", "model", "tokenizer", "dataset-name", "random-input-len", "random-output-len"):
        parser.add_argument(f"--{name}")
    for name in ("num-prompts", "max-concurrency", "temperature", "percentile-metrics"):
        parser.add_argument(f"--{name}")
    for name in ("ignore-eos", "disable-tqdm", "save-result", "save-detailed"):
        parser.add_argument(f"--{name}", action="store_true")


def main(args):
    note(f"run {args.seed}")
    print(f"run {args.seed} with {args.base_url}")
    how = args.base_url
    if how == "fails":
        raise KeyError("choices")
    if how == "exits":
        sys.exit(7)
    if how == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hangs":
        time.sleep(600)
    about = {"pid": os.getpid(), "parent": os.getppid(), "seed": args.seed, "stdin": sys.stdin.read()}
    Path(args.result_dir, args.result_filename).write_text(json.dumps(about))
