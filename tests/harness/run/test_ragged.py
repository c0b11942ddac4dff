"""What a run finds at sizes and places other than those of the case that it times."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.support.workers_here import run_here

PLUGIN = """
from kernels.mla_decode.providers.torch_eager import NaiveMlaDecode


class Eight(NaiveMlaDecode):
    name, op = "wrong.ninth_sequence", "mla_decode"

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)
        compute = prepared.call

        def call():
            compute()
            out[8:] = 0.0

        prepared.call = call
        return prepared

    def prepare_turn(self, first, operands, out):
        return self.prepare(operands, out)


class Narrow(NaiveMlaDecode):
    name, op = "wrong.32_bits", "mla_decode"

    def prepare(self, operands, out):
        pages = (1 << 32) // operands.kv[0].numel()
        return super().prepare(operands.replaced(page_table=operands.page_table % pages), out)

    def prepare_turn(self, first, operands, out):
        return self.prepare(operands, out)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    where = tmp_path_factory.mktemp("ragged")
    (where / "wrong.py").write_text(PLUGIN)
    command = "--op mla_decode --case 'batch=2 ctx=40 page=16' --impl wrong.*,torch.naive --budget 1s"
    options = "--device cpu --threads 1 --quiet --json - --out"
    done = run_here(*shlex.split(command), *shlex.split(options), where / "run", plugin=where / "wrong.py")
    assert done.stdout, done.stderr
    return {cell["impl"]: cell for cell in json.loads(done.stdout)["cells"]}


@pytest.mark.parametrize(
    ("impl", "stage"),
    [("wrong.ninth_sequence", ""), ("wrong.32_bits", "with addresses of more than 32 bits: ")],
)
def test_who_is_wrong_elsewhere_gets_no_time(impl, stage, told):
    assert (told[impl]["status"], told[impl]["time_us"]) == ("wrong", None)
    assert told[impl]["reason"].startswith(f"at batch=11 ctx=1..190 heads=16 page=16 kv=bf16: {stage}")


def test_who_is_right_there_is_timed(told):
    assert told["torch.naive"]["status"] == "ok"
    assert told["torch.naive"]["check"]["calls"] >= 20
