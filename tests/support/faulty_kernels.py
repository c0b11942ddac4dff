"""Implementations of mla_decode with one fault each, brought in through KERNEL_BENCH_PLUGINS.

A fault waits for its stage; before it the class computes the right answer in plain torch.
"""

from __future__ import annotations

import os
import signal
import time

from kernels.mla_decode.providers.torch_eager import NaiveMlaDecode
from kernels.op import Unsupported


class _Faulty(NaiveMlaDecode):
    op = "mla_decode"
    requires = "a test"
    runtime = "faulty"
    fault = ""

    def prepare(self, operands, out):
        if self.fault == "hang in prepare" and len(operands.host_lengths) == 2:  # not at ragged sizes, too
            time.sleep(3600)
        if self.fault == "raise in prepare":
            raise RuntimeError("no such\nluck")
        if self.fault == "unsupported in prepare":
            raise Unsupported("this build has no such kernel")
        prepared = super().prepare(operands, out)
        self.calls = 0
        call = prepared.call

        def faulty() -> None:
            self.calls += 1
            if self.fault == "raise in call" and self.calls > 3:
                raise RuntimeError("out of luck")
            if self.fault == "hang in call" and self.calls > 3:
                time.sleep(3600)
            if self.fault == "segfault" and self.calls > 3:
                os.kill(os.getpid(), signal.SIGSEGV)
            call()

        prepared.call = faulty
        return prepared

    def prepare_turn(self, first, operands, out):
        return self.prepare(operands, out)


FAULTS = {
    "hang_prepare": "hang in prepare",
    "raise_prepare": "raise in prepare",
    "unsupported": "unsupported in prepare",
    "raise_call": "raise in call",
    "hang_call": "hang in call",
    "segfault": "segfault",
}

for _name, _fault in FAULTS.items():
    _class = type(_name, (_Faulty,), {"name": f"faulty.{_name}", "fault": _fault, "__module__": __name__})
    globals()[_name] = _class
del _class
