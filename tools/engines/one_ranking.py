"""One ranking by one engine, in a process of its own; the answer is a file of JSON.

python -m tools.engines.one_ranking ENGINE BASELINE --load quiet --out FILE
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from tools.engines import ours, pyperf_runner, pytest_session, torch_timer, triton_rule
from tools.engines.callables import KERNELS, callables
from tools.engines.verdicts import Ranking

# Seconds of turns, at most: what `harness run` gives a case at least, and so few that with the start of the
# process it comes to about twice what the fastest peer takes.
OURS = {"ours, 20 s": 20.0, "ours, 4 s": 4.0}
QUICK_S = 3.0
PEERS = ("torch.utils.benchmark", "pytest-benchmark", "pyperf", "do_bench")
ENGINES = (*OURS, *PEERS)
LOADS = ("quiet", "busy")


def rank(options: argparse.Namespace) -> Ranking:
    names = callables(options.baseline, options.quick)
    if options.engine == "pytest-benchmark":
        return pytest_session.rank(names)
    if options.engine == "pyperf":
        return pyperf_runner.rank(names, quick=options.quick)
    if options.engine == "torch.utils.benchmark":
        return torch_timer.rank(names)
    if options.engine == "do_bench":
        return triton_rule.rank(names)
    budget_s = QUICK_S if options.quick else OURS[options.engine]
    return ours.rank(names, budget_s=budget_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("baseline", choices=KERNELS)
    parser.add_argument("--load", choices=LOADS, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.write_text(json.dumps(asdict(rank(options))))


if __name__ == "__main__":
    main()
