"""Breaks each argument of each call of the vendors' rows, against the doubles of their libraries.

python -m tools.break_calls [OP ...]

Of each case: how many breaks were tried, how many nobody noticed, and of these the ones that
tests/support/broken_calls.py does not list, as harmless or as unnoticed so far. Rows between interpreted
Triton kernels are left out.
"""

from __future__ import annotations

import sys
import warnings

from tests.kernels.contracts.test_contracts import BROKEN, name
from tests.support.broken_calls import is_known, listed, survivors


def main() -> int:
    warnings.simplefilter("ignore")
    ops = sys.argv[1:] or sorted({contract.op for contract, _ in BROKEN})
    total = unnoticed = unknown = 0
    for contract, text in BROKEN:
        if contract.op not in ops:
            continue
        with listed() as breaks:
            contract.keep(text)
        left = survivors(contract, text)
        new = [way for way in left if not is_known(f"{name((contract, text))} {way}")]
        total, unnoticed, unknown = total + len(breaks), unnoticed + len(left), unknown + len(new)
        print(f"{name((contract, text))}: {len(breaks)} tried, {len(left)} unnoticed", flush=True)
        for way in new:
            print(f"    {way}: not listed", flush=True)
    print(f"{total} tried, {unnoticed} unnoticed, {unknown} of them not listed")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
