"""`python -m harness claims`: headline claims compared with recorded runs."""

from __future__ import annotations

import click

from harness.cli.options import answer, json_option


@click.command()
@click.argument("runs", nargs=-1)
@json_option("Write JSON there instead of a table.")
def claims(runs: tuple[str, ...], json_to: str | None) -> None:
    """Compare AITER's headline claims (2x GEMM, 3x MoE, 17x MLA decode, 14x MHA prefill) with recorded RUNS
    (default: all under results/)."""
    from dataclasses import asdict

    from harness.catalogue.published import CLAIMS, read
    from harness.paths import PUBLISHED, RESULTS
    from harness.report.comparison_table import claims_table
    from harness.results.claims import examine, recorded_cells
    from kernels.platform import detect

    document, machine = read(PUBLISHED / CLAIMS), detect()
    cells = [cell for run in runs or [str(RESULTS)] for cell in recorded_cells(run)]
    tests = examine(document, machine, cells)
    about = {name: document[name] for name in ("source", "device", "arch", "unknown")}
    facts = about | {"tests": [asdict(test) for test in tests]}
    answer(json_to, facts, lambda: claims_table(document, tests, machine))
