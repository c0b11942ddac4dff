"""Packs the raw files of recorded serving runs and experiments, an archive each (harness/archive.py).

    python -m tools.pack_results results/MACHINE/serving/RUN...

For a run that is over, before it is committed. Commands read packed files by the paths at which they were.
For the files themselves: `unzip raw.zip` in the run's folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from harness.archive import NAME, pack
from harness.errors import OK, HarnessError


@click.command(help=__doc__)
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False))
def main(folders: tuple[str, ...]) -> None:
    for folder in map(Path, folders):
        try:
            click.echo(f"{folder / NAME}: {pack(folder)} files packed")
        except OSError as error:
            sys.exit(f"error: cannot pack {folder}: {error.strerror}; nothing is lost, pack again")
        except HarnessError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)
    sys.exit(OK)


if __name__ == "__main__":
    main()
