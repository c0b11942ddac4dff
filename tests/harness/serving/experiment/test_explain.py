"""What is said of an experiment: its misses explained by the trace, its methods beside each other."""

from __future__ import annotations

import pytest

from harness.cli.serving.ledger import print_ledgers
from harness.serving.experiment.explain import by_class
from harness.serving.experiment.report import replays_held
from harness.serving.experiment.schema import Replays
from harness.serving.ledger.ledger import ExplanationEntry
from harness.serving.replay.schema import Replay, ReplayArm
from tests.support.serving_experiments import Doubles, conduct, experiment, ledger


def test_a_miss_is_explained_by_the_trace_of_the_swapped_arm(tmp_path):
    doubles = Doubles(tmp_path, off=4.0)
    conduct(tmp_path, doubles).run(["linears"])
    row = ledger(tmp_path)["tiny linears"]
    [one] = row.explanations
    assert isinstance(one, ExplanationEntry) and doubles.asked[-2:] == ["trace linears-base", "trace linears"]
    assert one.evidence == ("linears-base.gz", "linears.gz")
    assert "itl -3.99 ms" in one.text and "(-50%)" in one.text
    # Replayed: +12, no copies left (-1); traced: 5 and 4 ms after 8 and 2 at half the speed.
    assert "the base's trace times 0.50" in one.text
    assert "block_scale_gemm and glue +11.00 and +4.00 ms" in one.text
    assert "mla_decode" not in one.text, "the same but for the machine's pace"
    assert "of 1 +44 and +40 ms" in one.text and "of 3 +104 and +100 ms" in one.text
    assert not replays_held(experiment(tmp_path), tmp_path / "out", ["linears"])
    again = Doubles(tmp_path)
    conduct(tmp_path, again, resume=True).run(["linears"])
    assert not again.asked and len(ledger(tmp_path)["tiny linears"].explanations) == 1


def test_a_kernel_swapped_in_is_no_other_op_s_for_its_name(tmp_path):
    """Torch's products for MLA decode stand in a trace as absorbed products."""
    arms = {
        "base": ReplayArm(chosen={}, classes={"mla_decode": 5.0, "absorbed_bmm": 3.0, "fused_moe": 9.0}),
        "mla": ReplayArm(chosen={}, classes={"mla_decode": 9.0, "absorbed_bmm": 3.0, "fused_moe": 9.5}),
    }
    replay = Replay(created="", command=(), step={}, launch="eager", threads=1, base="base", arms=arms,
                    samples=())  # fmt: skip
    traced = {"absorbed_bmm": 12.0, "fused_moe": 9.0}
    found = by_class(
        experiment(tmp_path).swap("mla"), Replays(replays=(replay,)), arms["base"].classes, traced
    )
    assert found == [
        ("fused_moe", pytest.approx(0.5), pytest.approx(0.0)),
        ("mla_decode and glue", pytest.approx(4.0), pytest.approx(4.0)),
    ]


def test_the_methods_stand_beside_each_other(tmp_path, capsys):
    conduct(tmp_path, Doubles(tmp_path)).run()
    capsys.readouterr()
    print_ledgers([str(tmp_path / "out")])
    text = capsys.readouterr().out
    line = next(one for one in text.splitlines() if one.startswith("tiny linears"))
    assert (
        "+8.02 ms (" in line and "+24 (+199%)" in line and "+7 (-13%)" in line and "explained, blind" in line
    )
    assert next(one for one in text.splitlines() if one.startswith("tiny mla")).endswith(
        "not resolved, blind"
    )
    # Of mla nothing is resolved.
    assert "replay: off by 0% in the median of 3" in text
    assert "warm: off by 200% in the median of 3, at worst 200% (tiny linears, " in text
