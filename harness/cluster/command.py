"""`python -m harness.cluster.command ARGUMENTS` becomes `python ARGUMENTS`, and dies with who started it."""

from __future__ import annotations

import os
import sys

from harness.workers.child.main import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
