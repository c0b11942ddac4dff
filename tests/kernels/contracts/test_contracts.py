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
from tests.support.broken_calls import is_known, survivors
from tests.support.contract_rows import CONTRACTS, interpreted
from tests.support.contracts import Contract
from tests.support.interpreting import found_interpreted

CASES = [(contract, text) for contract in CONTRACTS for text in contract.texts]
FIRST = {(c.op, c.name, c.doubles, text): c for c, text in reversed(CASES)}
"""The first of the architectures on which a row has a case; on the others it is slow."""


def tried(contract: Contract) -> list[str]:
    """Cases that tell right from wrong: pages of several tokens, rows that fill no tile, keys before the new
    ones; and an FP8 cache."""
    usual = contract.texts[min(len(contract.texts) - 1, 2 if contract.op == "block_scale_gemm" else 1)]
    return list(dict.fromkeys([usual, *[text for text in contract.texts if "kv=fp8" in text][:1]]))


ONE_OF_EACH = {(c.op, c.name, c.doubles, "fp8" in c.texts[0]): c for c in reversed(CONTRACTS)}
NO_ARGUMENTS = {"hipblaslt.dequantised": "its product is torch's own, by the library that torch prefers"}
BROKEN = [
    (c, text)
    for c in ONE_OF_EACH.values()
    if c.name not in NO_ARGUMENTS and not interpreted(c)
    for text in tried(c)
]


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


# MLA decode has more than all others together, for which CI lacks the time: tools/break_calls.py tries them.
@pytest.mark.parametrize("case", marked([case for case in BROKEN if case[0].op != "mla_decode"], slow=True))
def test_a_broken_argument_is_noticed(case: tuple[Contract, str]) -> None:
    """For each argument of each call of a row: of another index type, order, layout, scale or flag."""
    assert [text for text in survivors(*case) if not is_known(f"{name(case)} {text}")] == []


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
