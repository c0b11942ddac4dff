"""Packs the raw files of recorded serving runs and experiments, an archive each (harness/archive.py).

    python -m tools.pack_results results/MACHINE/serving/RUN...

For a run that is over, before it is committed. Commands read packed files by the paths at which they were.
For the files themselves: `unzip raw.zip` in the run's folder.
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
