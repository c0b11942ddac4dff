"""Records the tuned tables of AITER, vLLM and SGLang for DeepSeek-R1 and V3: kernels/tables/recorded/*.zip.

    python -m tools.record_tables --aiter DIR --vllm DIR --sglang DIR --version aiter="e404860, 2026-08-22"

Each extract has the paths of the package, so that the same reader reads both. It holds the entries for the
linears of TP1 to TP16, and for fused MoE with the model's hidden size. The same input gives the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from kernels.tables.aiter_csv import GEMM, LINE, MOE, PRESHUFFLED, packaged
from kernels.tables.aiter_triton import FOLDER, NAME, PRESHUFFLED_NAME, places
from kernels.tables.engine_json import RULES
from kernels.tables.files import RECORDED, Files
from shapes.attention import Parallel
from shapes.linears import linears
from shapes.models import FP8, model

TP = (1, 2, 4, 8, 16)
MODEL = model("deepseek-r1")
# The sizes of DeepSeek's shapes: columns of an expert on a rank, experts of a rank, (n, k) of linears.
INTER = {MODEL.moe_intermediate_size // tp for tp in TP}
EXPERTS = {MODEL.n_routed_experts // ep + shared for ep in (1, 8, 16, 32) for shared in (0, 1)}
LINEARS = {
    (linear.n, linear.k) for tp in TP for linear in linears(MODEL, Parallel(tp=tp)) if linear.kind == FP8
}

GEMM_COLUMNS = ("gfx", *GEMM.numbers, "libtype", "kernelId", "splitK", "us", "kernelName")
MOE_RESULTS = ("block_m", "ksplit", "kernelName1", "kernelName2", "us", "run_1stage", "_tag")
MOE_COLUMNS = ("gfx", *MOE.numbers[:6], *MOE.texts, *MOE.numbers[6:], *MOE_RESULTS)

LICENCES = {
    "aiter": "AITER, https://github.com/ROCm/aiter, is under the MIT License, (c) Advanced Micro Devices.",
    "vllm": "vLLM, https://github.com/vllm-project/vllm, is under the Apache License 2.0.",
    "sglang": "SGLang, https://github.com/sgl-project/sglang, is under the Apache License 2.0.",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for library in LICENCES:
        parser.add_argument(f"--{library}", type=Path, metavar="DIR", help="checkout, wheel or site-packages")
    parser.add_argument("--version", action="append", default=[], metavar="LIBRARY=TEXT",
                        help="what is shown as its version: `0.33.0, 4ba787e, 2026-11-01`")  # fmt: skip
    options = parser.parse_args(arguments)
    versions = dict(text.split("=", 1) for text in options.version)
    for library in LICENCES:
        path = getattr(options, library)
        if path:
            files = Files(library, path)
            archive = RECORDED / f"{library}.zip"
            write(archive, library, files, versions.get(library, files.version))
            print(f"{archive}: {archive.stat().st_size // 1000} kB")


def write(archive: Path, library: str, files: Files, version: str) -> None:
    """Writes the zip. Its files are sorted and have no times, so that equal tables give equal bytes."""
    texts = dict(_aiter(files) if library == "aiter" else _json(files, library))
    texts[f"{library}/_version.py"] = f'__version__ = "{version}"\n'
    texts["NOTICE"] = f"Extracts of {library} {version}.\n{LICENCES[library]}\n"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        for name in sorted(texts):
            info = zipfile.ZipInfo(name)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            target.writestr(info, texts[name])


def _json(files: Files, library: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each JSON file of vLLM or SGLang for DeepSeek's shapes."""
    rules = RULES[library]
    for folder in (rules.gemm, rules.moe, f"{rules.moe}/triton_*"):
        for name in files.names(f"{folder}/*.json"):
            file_name = name.rsplit("/", 1)[1]
            if "dtype=fp8_w8a8,block_shape=[128" not in file_name:
                continue
            sizes = {key: int(value) for key, value in re.findall(r"\b([ENK])=(\d+)", file_name)}
            of_linear = (sizes.get("N"), sizes.get("K")) in LINEARS
            of_experts = sizes.get("E") in EXPERTS and sizes.get("N") in INTER
            if of_linear or of_experts:
                yield name, files.text(name)


def _aiter(files: Files) -> Iterator[tuple[str, str]]:
    """(name, text) of AITER's CSV and Triton files for DeepSeek's shapes."""
    for family in (GEMM, PRESHUFFLED, MOE):
        for name in packaged(files, family):
            yield name, _rows(files.text(name), MOE_COLUMNS if family is MOE else GEMM_COLUMNS)
        if files.has(family.untuned):
            yield family.untuned, files.text(family.untuned).split("\n")[0].strip() + "\n"
    for arch, kernel in itertools.product(("gfx942", "gfx950"), (NAME, PRESHUFFLED_NAME)):
        gluon = f"{FOLDER}/gemm/gluon/{arch}-{kernel}"
        # `default` is the file for all shapes; a shape's own file begins with `stem`.
        for stem, default in (*places(arch, kernel), (gluon, f"{gluon}.json")):
            for name in (default, *(f"{stem}-N={n}-K={k}.json" for n, k in sorted(LINEARS))):
                if files.has(name):
                    yield name, files.text(name)


def _rows(text: str, columns: tuple[str, ...]) -> str:
    """The rows of a CSV for DeepSeek's shapes: the columns that the reader uses, and the line of each row."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    there = [column for column in columns if column in (reader.fieldnames or ())]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*there, LINE])
    for row in reader:
        if "N" in row:
            is_deepseeks = (int(row["N"]), int(row["K"])) in LINEARS
        else:
            is_deepseeks = int(row["model_dim"]) == MODEL.hidden_size
        if is_deepseeks:
            writer.writerow([*(row[column] for column in there), reader.line_num])
    return out.getvalue()


if __name__ == "__main__":
    main()
