"""Packs the raw files of each recorded serving run into one archive (harness/archive.py).

    python -m tools.pack_results results/MACHINE/serving/RUN...

Pack a run that is over before you commit it. Commands read packed files by the paths that the files had;
`unzip raw.zip` in the run's folder restores the files.
"""

import sys
from pathlib import Path

from harness.archive import NAME, pack
from harness.errors import HarnessError

if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        try:
            print(f"{folder / NAME}: {pack(folder)} files packed")
        except OSError as error:
            sys.exit(f"error: cannot pack {folder}: {error.strerror}; nothing is lost, pack again")
        except HarnessError as error:
            sys.exit(f"error: {error}")
