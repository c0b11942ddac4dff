"""A tunable GEMM of plain torch, brought in through KERNEL_BENCH_PLUGINS, whose configurations really differ:
the columns that it computes at a time, and, for those of the variable FAULTS, what goes wrong."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from kernels.formats import BLOCK, dequantise_activations, dequantise_weights
from kernels.op import Prepared, Support, need
from kernels.platform import Platform
from kernels.triton_runtime import target_of
from kernels.tuning import Target, Tunable, words


@dataclass(frozen=True)
class Config:
    columns: int
    fault: str = ""


RIGHT = (Config(8), Config(16), Config(32), Config(BLOCK), Config(4 * BLOCK))


class Chunked(Tunable):
    op = "block_scale_gemm"
    name = "plugin.chunked"
    requires = "a test"
    Config = Config

    def available(self, platform: Platform) -> Support:
        return need(platform.kind == "cpu", "for CPUs")

    def configurations(self, target: Target, sizes: object) -> Iterator[Config]:
        yield from RIGHT
        yield from (Config(BLOCK, fault) for fault in os.environ.get("FAULTS", "").split())

    def heuristic(self, target: Target, sizes: object) -> Config:
        return Config(16)

    def prepare(self, operands, out):
        choice = self.choose(target_of(out.device), operands.sizes)
        return _Chunked(operands, out, choice)


class _Chunked(Prepared):
    def __init__(self, operands, out, choice) -> None:
        super().__init__(operands, out)
        self.choice, self.config = choice, choice.config
        self.b = dequantise_weights(operands.b_q, operands.b_scale).T.contiguous()

    def call(self) -> None:
        if self.config.fault == "raise":
            raise RuntimeError("out of luck")
        a = dequantise_activations(self.operands.a_q, self.operands.a_scale)
        for at in range(0, self.out.shape[1], self.config.columns):
            part = slice(at, at + self.config.columns)
            self.out[:, part] = a @ self.b[:, part]
        if self.config.fault == "wrong":
            self.out[0, 0] += 100

    def picked(self) -> str:
        return f"{words(self.config)} ({self.choice.origin})"
