"""The files of serving clients. What each of them writes is a table (`Format`), read by one reader; a new
client is one table and one example in tests/data/serving."""

from __future__ import annotations

from typing import Protocol

from harness.serving.clients import aiperf, dstack, guidellm, inference_perf, inferencex, sglang, trtllm, vllm
from harness.serving.clients.console import Console
from harness.serving.clients.files import Document
from harness.serving.schema import ServingRun


class Known(Protocol):
    """A format: by keys that only its client writes, never by the file's name."""

    @property
    def name(self) -> str: ...

    @property
    def own(self) -> frozenset[str]: ...

    def recognises(self, document: Document) -> bool: ...

    def runs(self, document: Document) -> list[ServingRun]: ...


FORMATS: tuple[Known, ...] = (
    *aiperf.FORMATS, *guidellm.FORMATS, *inference_perf.FORMATS, *inferencex.FORMATS, *trtllm.FORMATS,
    *sglang.FORMATS, *vllm.FORMATS, *dstack.FORMATS, Console(),
)  # fmt: skip
"""In the order in which a file is asked whose it is: clients that began as a copy of vLLM's write its keys
and their own."""
