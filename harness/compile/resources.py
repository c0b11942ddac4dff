"""Resources of a compiled kernel: registers, spills, shared memory, code, its matrix instructions."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.files import JsonObject

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

MATRIX = re.compile(r"\b(?:v_s?mfmac?_\w+|wgmma\.mma_async[\w.:]*|tcgen05\.mma\.[\w.:]*|mma\.sync[\w.:]*)")
PRODUCT = re.compile(r"\btt\.dot\b.*: tensor<(\d+)x(\d+)x(\w+)> \* tensor<\d+x(\d+)x(\w+)>")
DTYPES = {"f8E4M3FN": "fp8", "f8E4M3FNUZ": "fp8", "bf16": "bf16"}


@dataclass(frozen=True)
class Product:
    """A product of a program's tiles, [m, k] by [k, n]; dtype as the design says it, or as Triton does."""

    m: int
    n: int
    k: int
    dtype: str


@dataclass
class Resources:
    """Of a program, or of a thread of it.

    registers:      of a thread; on CDNA vector registers, VGPRs and AGPRs together
    spills:         registers of a thread that did not fit (on NVIDIA the bytes that it stores for that, by 4;
                    on CDNA some may have gone to AGPRs)
    scratch_bytes:  of a thread, in memory: spilled registers and local arrays
    shared_bytes:   of a program
    columns:        of tensor memory, of a program
    threads:        of a program
    code_bytes:     of the machine code
    instructions:   matrix instructions in the assembly, each once
    products:       those of the source, each once
    remarks:        of the assembler, that cost speed
    error:          why there is nothing, in one line
    """

    registers: int = 0
    spills: int = 0
    scratch_bytes: int = 0
    shared_bytes: int = 0
    columns: int = 0
    threads: int = 0
    code_bytes: int = 0
    instructions: list[str] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    error: str = ""

    @staticmethod
    def read(entry: JsonObject) -> Resources:
        return Resources(**entry | {"products": [Product(**product) for product in entry["products"]]})


def resources_of(compiled: CompiledKernel, log: str) -> Resources:
    """compiled: Triton's CompiledKernel; log: what ptxas printed with -v, on NVIDIA."""
    amd = "amdgcn" in compiled.asm
    text = compiled.asm["amdgcn" if amd else "ptx"]
    counts = _amd(text) if amd else _nvidia(text, log, compiled.asm["cubin"])
    products = [
        Product(int(m), int(n), int(k), DTYPES.get(a, a))
        for m, k, a, n, _ in PRODUCT.findall(compiled.asm["ttir"])
    ]
    return Resources(
        **counts,
        shared_bytes=compiled.metadata.shared,
        columns=getattr(compiled.metadata, "tmem_size", None) or 0,
        instructions=sorted(set(MATRIX.findall(text))),
        products=list(dict.fromkeys(products)),
    )


def _amd(text: str) -> JsonObject:
    """From the metadata and the comments of LLVM's assembly."""

    def value(name: str) -> int:
        return int(_match(rf"^\s*(?:- )?{re.escape(name)}[:=]?\s+(?:= )?(\d+)", text)[1])

    return {
        "registers": value("; TotalNumVgprs"),
        "spills": value(".vgpr_spill_count"),
        "scratch_bytes": value(".private_segment_fixed_size"),
        "threads": value(".max_flat_workgroup_size"),
        "code_bytes": value("; codeLenInByte"),
    }


def _nvidia(text: str, log: str, cubin: bytes) -> JsonObject:
    frame, stores = _match(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log).groups()
    threads = [int(n) for n in _match(r"\.(?:max|req)ntid\s+([\d, ]+)", text)[1].split(",")]
    remarks = re.findall(r"Potential Performance Loss: ([^\n]*?)(?: in the function| in function|\n|$)", log)
    return {
        "registers": int(_match(r"Used (\d+) registers", log)[1]),
        "spills": int(stores) // 4,
        "scratch_bytes": int(frame),
        "threads": threads[0],
        "code_bytes": _text_bytes(cubin),
        "remarks": list(dict.fromkeys(remarks)),
    }


def _match(pattern: str, text: str) -> re.Match[str]:
    if match := re.search(pattern, text, re.MULTILINE):
        return match
    raise ValueError(f"nothing in the compiler's output matches {pattern}")


def _text_bytes(elf: bytes) -> int:
    """Sizes of an ELF file's sections of code together (64 bits, little-endian)."""
    first, (size, count) = struct.unpack_from("<Q", elf, 40)[0], struct.unpack_from("<HH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQ", elf, first + i * size) for i in range(count)]
    executable = 4
    return sum(length for _, _, flags, _, _, length in sections if flags & executable)
