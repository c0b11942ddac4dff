"""The tool that puts right kernels, bugs and cheats to the check, and what it says of a check that fails."""

from __future__ import annotations

import json

import pytest

import kernels
from harness.prove import cheat_runs, execute
from harness.prove.cheat_runs import CHEATED, CheatRow, cheat
from harness.prove.cheats import CHEATS, HONEST
from harness.prove.execute import catalogue
from harness.prove.planted import Planted


def test_every_op_is_cheated_at_two_sizes():
    assert set(CHEATED) == set(HONEST) == set(kernels.OPS)
    assert all(len(cases) == 2 for cases in CHEATED.values())
    assert len(CHEATS) * len(CHEATED) >= 60


def test_what_the_check_lets_pass_is_said_and_fails(here, monkeypatch):
    """A right kernel that claims to be a bug, and a bug that claims to be right."""
    planted = [
        Planted("nothing wrong", lambda operands, right: right),
        Planted("doubled", lambda operands, right: 2 * right, right=True, source="nowhere"),
        Planted("halved", lambda operands, right: right / 2),
    ]
    module = catalogue("mla_decode")
    monkeypatch.setattr(module, "PLANTED", planted)
    done = here("prove", "--op", "mla_decode", "--size", "small")
    assert done.returncode == 1
    assert "0 of 1" in done.stdout and "1 of 2" in done.stdout
    assert "missed: nothing wrong (mla_decode, small, seed 0): " in done.stdout
    assert "refused though right: doubled (mla_decode, small, seed 0): " in done.stdout
    monkeypatch.setattr(module, "PLANTED", planted[2:])
    done = here("prove", "--op", "mla_decode", "--size", "small", "--json", "-")
    assert done.returncode == 0
    assert [row["refused"] for row in json.loads(done.stdout)] == [True]


def test_a_cheat_that_gets_a_time_is_said_and_fails(here, monkeypatch):
    rows = [
        CheatRow("mla_decode", "cheat.in_load", "small", "ok", ""),
        CheatRow("mla_decode", "torch.naive", "small", "ok", ""),
    ]
    monkeypatch.setattr(cheat_runs, "cheat", lambda op, on_row, device, size: [*map(on_row, rows)])
    done = here("prove", "--op", "mla_decode", "--cheats")
    assert done.returncode == 1
    assert "0 of 1" in done.stdout and "mla_decode cheat.in_load (small) is ok" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--size", "smal"), "error: no size 'smal'; sizes: 'small', "),
        (("--size", "smal", "--cheats"), "error: no size 'smal'; sizes: 'small', 'middle'\n"),
        (("--device", "cuda:9"), "error: no device 'cuda:9'; devices here: "),
    ],
)
def test_a_mistake_is_one_line(here, arguments, wanted):
    done = here("prove", "--op", "mla_decode", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(wanted) and done.stderr.count("\n") == 1


def test_an_op_without_a_catalogue_is_one_line(here, monkeypatch):
    monkeypatch.setattr(execute, "CATALOGUES", ("mla_decode",))
    done = here("prove", "--op", "fused_moe")
    assert done.returncode == 2
    assert done.stderr == "error: no catalogue of fused_moe; there is one of mla_decode\n"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("op", ["block_scale_gemm", "mla_decode"])
def test_cheats_get_no_time(op):
    """`python -m harness prove --cheats` runs those of the other ops, and larger cases."""
    rows: list[CheatRow] = []
    cheat(op, rows.append, "cpu", "small")
    assert {row.name for row in rows} >= {f"cheat.{name}" for name in CHEATS}
    assert not [row for row in rows if not row.as_it_should]
