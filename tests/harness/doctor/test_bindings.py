"""`doctor --bind`: which rows' calls fit a version of their library."""

import json
from pathlib import Path

import pytest
from packaging.version import Version

from harness.doctor.bindings import BINDS, OLDER, UNKNOWN, bindings, recorded, rows
from kernels.platform import LIBRARIES, version
from kernels.vendor import VllmCpu, releases_read
from shapes.toml import read_toml
from tests.support.paths import ROOT
from tools import record_signatures

SIGNATURES = sorted((ROOT / "tests" / "kernels" / "signatures").glob("*.json"))

DECODE = (
    "def tokenspeed_mla_decode(query, kv_cache, workspace_buffer, kv_lora_rank, qk_rope_head_dim, "
    "block_tables, seq_lens, max_seq_len, softmax_scale, output_scale=1.0, "
    "enable_pdl=False, causal_mask=True): ..."
)
UNITS = "def get_num_sm(device): ..."
WHOLE = f"{DECODE}\n{UNITS}"
NAME = "tokenspeed_mla/__init__.py"  # one row uses it
LIBRARY = {NAME: WHOLE}
TREES: dict[str, dict[str, str]] = {
    "fits, and is not imported": {NAME: f"raise SystemExit('imported')\n{WHOLE}"},
    "what is wished for is lacking": {
        "tokenspeed_mla.py": WHOLE.replace(", enable_pdl=False, causal_mask=True", "")
    },
    "argument renamed": {NAME: WHOLE.replace("kv_cache,", "cache,")},
    "default renamed": {NAME: WHOLE.replace("output_scale=1.0", "output_factor=1.0")},
    "argument added": {NAME: WHOLE.replace("query,", "query, heads,")},
    "by name alone": {NAME: WHOLE.replace("(device)", "(*, device)")},
    "moved": {NAME: "", "tokenspeed_mla/decode.py": WHOLE},
    "lost": {
        NAME: "from .kernels import tokenspeed_mla_decode, get_num_sm", "tokenspeed_mla/kernels.py": DECODE,
    },
    "hidden": {
        NAME: "from .kernels import *", "tokenspeed_mla/kernels.py": f"{WHOLE}\n__all__ = ['get_num_sm']",
    },
    "one of two is made on import": {NAME: f"{DECODE}\nget_num_sm = made()"},
    "what some devices need": {"deep_gemm/__init__.py": "def gemm_fp8_fp8_bf16_nt(lhs, rhs, out): ..."},
    "two, of which one breaks": {**LIBRARY, "deep_gemm/__init__.py": "x = 1"},
    "library-2.7.0.post1": LIBRARY,
    "Library@v2.7": LIBRARY,
    "newer-99.0": LIBRARY,
    "a build for CPUs": {
        **LIBRARY,
        "tokenspeed_mla-1.0.dist-info/METADATA": "Name: tokenspeed-mla\nVersion: 1.0+cpu\n",
    },
}  # fmt: skip


def test_rows_that_bind_and_break_are_as_committed(here, tmp_path, snapshot):
    texts = []
    for name, files in TREES.items():
        for file, text in files.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text)
        done = here("doctor", "--bind", tmp_path / name)
        told = done.stdout + done.stderr.replace(str(tmp_path), "FOLDER")
        rows = here("doctor", "--bind", tmp_path / name, "--json", "-").stdout
        facts = [] if done.returncode == 3 else json.loads(rows)["bindings"]
        without = [f"{row['implementation']} without {row['without']}\n" for row in facts if row["without"]]
        texts.append(f"=== {name}\n{told}{''.join(without)}[{done.returncode}]\n")
    snapshot(Path(__file__).parent / "snapshots" / "bindings.txt", "\n".join(texts))


def test_recorded_places_are_those_that_rows_use_and_releases_are_listed():
    listed = read_toml(record_signatures.RELEASES)
    stems = {file.stem for file in SIGNATURES}
    assert stems == {name for name in LIBRARIES if releases_read(name)} == set(listed), (
        "releases.toml lists them"
    )
    assert {row.library or row.provider for row in rows()} - {"torch"} <= stems
    for file in SIGNATURES:
        versions = {Version(release.version).public for release in recorded(file)}
        assert versions.issuperset(releases_read(file.stem))
        releases = json.loads(file.read_text())["releases"]
        for release in releases:
            again = f"python -m tools.record_signatures FOLDER {file.stem}"
            assert sorted(release["signatures"]) == record_signatures.used_places(file.stem), again
        facts = [{name: release[name] for name in release if name != "signatures"} for release in releases]
        assert facts == sorted(listed[file.stem], key=lambda release: Version(release["version"]))


@pytest.mark.parametrize("file", SIGNATURES, ids=lambda file: file.stem)
def test_rows_bind_to_the_releases_that_are_recorded(file):
    """Releases older than a row's first are too old for it."""
    releases = recorded(file)
    assert len(releases) >= 3
    for row in bindings(releases):
        assert row.status in (BINDS, OLDER, UNKNOWN), row


def test_a_row_is_not_told_if_its_operators_are_not():
    """vLLM's wheel for CUDA has only the Python around the operators."""
    *_, newest = recorded(ROOT / "tests" / "kernels" / "signatures" / "vllm.json")
    ours = {(row.op, row.name) for row in rows() if isinstance(row, VllmCpu)}
    found = [row for row in bindings([newest]) if (row.op, row.implementation) in ours]
    assert {row.status for row in found} == {UNKNOWN} and {row.op for row in found} == {op for op, _ in ours}


@pytest.mark.skipif(not version("vllm"), reason="vLLM is not installed")
def test_rows_bind_to_what_is_installed(here):
    done = here("doctor", "--bind")
    assert done.returncode == 0, done.stdout
