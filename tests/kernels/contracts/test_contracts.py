"""Rows of libraries against doubles of these, judged as the harness judges.

What doubles cannot show: that a library builds, and what its kernels round (untested on hardware). Some rows
stand between the suite's own Triton kernels, which a CPU interprets: those cases run in a process of their
own, this file as a script.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.errors import one_line
from tests.support.contract_rows import CONTRACTS, interpreted
from tests.support.contracts import Contract
from tests.support.interpreting import found_interpreted

CASES = [(contract, text) for contract in CONTRACTS for text in contract.texts]
FIRST = {(c.op, c.name, c.doubles, text): c for c, text in reversed(CASES)}
"""The first of the architectures on which a row has a case; on the others it is slow."""


def name(case: tuple[Contract, str]) -> str:
    return f"{case[0]}: {case[1]}"


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, str]:
    """Why an interpreted case is wrong, by name; empty: it is not."""
    return dict(found_interpreted(__file__))


def marked(cases: list[tuple[Contract, str]], slow: bool = False) -> list[Any]:
    return [
        pytest.param(case, marks=[pytest.mark.slow] * (slow or interpreted(case[0])), id=name(case))
        for case in cases
    ]


@pytest.mark.parametrize(
    "case",
    [
        *marked([(c, text) for c, text in CASES if FIRST[c.op, c.name, c.doubles, text] is c]),
        *marked([(c, text) for c, text in CASES if FIRST[c.op, c.name, c.doubles, text] is not c], slow=True),
    ],
)
def test_a_row_keeps_its_contract(case: tuple[Contract, str], request: pytest.FixtureRequest) -> None:
    contract, text = case
    if interpreted(contract):
        assert request.getfixturevalue("elsewhere")[name(case)] == ""
    else:
        contract.keep(text)


def main() -> None:
    for case in filter(lambda case: interpreted(case[0]), CASES):
        wrong = ""
        try:
            case[0].keep(case[1])
        except Exception as error:
            wrong = one_line(error)
        print(json.dumps((name(case), wrong)))


if __name__ == "__main__":
    main()
