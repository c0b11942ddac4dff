"""`toggle`: the plans of its options, and a run whose settings are real environments. Effects and verdicts of
known times are tested in ../results and ../report."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.catalogue.architectures import architectures
from harness.cli.run import toggle_request
from harness.errors import HarnessError
from harness.plan.toggle import MARGIN, plan_toggle
from harness.results.journal import Journal
from harness.run.plan import Request
from harness.workers.environment import cache_environment, worker_environment
from kernels.platform import named
from tests.support.recorded_verdicts import redo

PROBE = """
import os
from kernels.mla_decode.providers.torch_eager import naive as NaiveMlaDecode

class Probe(NaiveMlaDecode):
    op = "mla_decode"
    name = "probe.kernel"

    def prepare(self, operands, out):
        prepared = super().prepare(operands, out)
        prepared.picked = lambda: os.environ.get("PROBE_PATH", "nowhere")
        return prepared
"""
TOGGLE = (
    *("--op", "mla_decode", "--impl", "probe.kernel", "--boundary", "core", "--device", "cpu"),
    *("--threads", "1", "--cache", "warm", "--budget", "5m", "--per-case", "1s"),
)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    path = tmp_path_factory.mktemp("probe") / "probe.py"
    path.write_text(PROBE)
    return path


@pytest.mark.slow
def test_each_setting_runs_in_its_own_environment_and_one_that_cannot_start_costs_only_itself(
    cli, plugin, tmp_path
):
    out = tmp_path / "run"
    done = cli(
        *("toggle", *TOGGLE, "--case", "batch=1 ctx=5..20", "--out", out, "--json", tmp_path / "out.json"),
        *("--flag", "PROBE_PATH=other", "--flag", "PYTHONHOME=/nowhere,unset"),
        KERNEL_BENCH_PLUGINS=plugin,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr and "crashed" in done.stdout and "recorded in" in done.stdout
    written = json.loads((tmp_path / "out.json").read_text())
    cells = {cell["arm"]: cell for cell in written["cells"]}
    plain, broken, other = cells.values()
    assert list(cells) == ["plain", *(f"PROBE_PATH=other, PYTHONHOME{of}" for of in ("=/nowhere", " unset"))]
    assert broken["status"] == "crashed" and "exit code 1 while in starting" in broken["reason"]
    assert (plain["picked"], other["picked"]) == ("nowhere", "other")
    assert [v["a"] for v in written["verdicts"] if v["about"] == "A/A"] == ["probe.kernel @ plain (again)"]
    said = " ".join(done.stdout.split())
    # A profile on a busy machine may tell of operators, too.
    assert re.search(r"unset: .*\bnowhere\b.* -> .*\bother\b", said)
    assert "noise probe.kernel against itself in other workers" in said

    run = Journal(out).run()
    assert run.flags == {"PROBE_PATH": ["other"], "PYTHONHOME": ["/nowhere", None]}
    assert run.settings["PROBE_PATH=other, PYTHONHOME unset"] == {"PROBE_PATH": "other", "PYTHONHOME": None}
    (records,) = Journal(out).finished().values()
    for verdict, again in redo(records):
        assert (verdict.verdict, verdict.ratio) == (again.verdict, pytest.approx(again.ratio))


BLOCKING, AITER = "mla_decode CUDA_LAUNCH_BLOCKING=0,1", "fused_moe VLLM_ROCM_USE_AITER=1,0"
BACKEND = "mla_decode VLLM_ATTENTION_BACKEND=FLASHMLA,unset,TRITON_MLA"
KERNARG, EAGER, FORCE = "HIP_FORCE_DEV_KERNARG=0,1", {"launch": "eager"}, {"force": True}
RECIPE = {"recipe": "mi350x-vllm", "common": ["C=3"]}
# An op with flags, an architecture, and further options of `toggle`.
ASKED: tuple[tuple[str, str, dict[str, object]], ...] = (
    *((BLOCKING, "sm_90", more) for more in ({}, EAGER, FORCE)),
    *((AITER, arch, {}) for arch in ("gfx942", "sm_90")),
    *((words, "sm_90", {}) for words in (BACKEND, "mla_decode VLLM_ATTENTION_BACKEND=ROCM_AITER_MLA,NONE")),
    ("fused_moe VLLM_ROCM_USE_AITER=True,unset,2", "gfx942", {}),
    *((f"{AITER} {KERNARG}", "gfx942", more) for more in (EAGER, FORCE)),
    *(("fused_moe HIP_FORCE_DEV_KERNARGS=1", "gfx942", more) for more in ({}, FORCE)),
    (r"fused_moe XYZZY=granularity=fine\,compact,,unset", "gfx942", {}),
    ("fused_moe XYZZY=1 HIP_FORCE_DEV_KERNARG=2", "gfx942", EAGER | {"common": ["C=3"]}),
    (f"fused_moe {KERNARG} XYZZY=1,unset", "gfx942", EAGER | {"design": "one-at-a-time"}),
    *(("fused_moe", "gfx950", RECIPE | more) for more in ({}, {"leave_one_out": True}, FORCE)),
    *(("fused_moe", "sm_90", RECIPE | more) for more in ({}, {"flag_texts": ["A=1"]})),
    ("fused_moe", "gfx950", {"leave_one_out": True, "flag_texts": ["A=1"]}),
    *((f"fused_moe {flags}", "sm_90", {}) for flags in ("=1", "A=1,1", "A=1 A=2")),
    ("fused_moe", "sm_90", {"flag_texts": ["A B=1"]}),
    ("fused_moe", "sm_90", {"flag_texts": [f"A={','.join(map(str, range(33)))}"], "common": ["C=3"]}),
)


def test_plans_are_as_committed(snapshot):
    lines: list[str] = []
    for words, arch, further in ASKED:
        op, *flags = words.split()
        options = {"launch": None, "recipe": None, "leave_one_out": False, "force": False, "common": []}
        options |= {"op": op, "flag_texts": flags, "design": "factorial"} | further
        lines.append(f"=== {words} on {arch}, {further}")
        try:
            plan = plan_toggle(named(architectures()[arch].kind, arch), lines.append, **options)
            lines += [f"setting: {setting.name}" for setting in plan.settings]
            lines += [f"flag: {name} {values}" for name, values in plan.flags.items()]
            lines += [f"row: {name}" for name in plan.implementations]
        except HarnessError as error:
            lines.append(f"{type(error).__name__}: {error}")
    snapshot(Path(__file__).parent / "snapshots" / "toggles.txt", "\n".join(lines) + "\n")
    options = {"design": "", "recipe": None, "leave_one_out": False, "force": False}
    asked = toggle_request(
        Request(op="fused_moe"), lines.append, flag_texts=["VLLM_ROCM_USE_AITER=1,0"], **options
    )
    gpu, resumed = named("rocm", "gfx942"), Request(resume="a run")
    assert toggle_request(resumed, lines.append, flag_texts=[], **options)(gpu) == replace(
        resumed, margin=MARGIN
    )
    rows = asked(gpu)
    assert (rows.impl, rows.baseline, rows.margin) == ("aiter.dispatch,vllm.triton", "aiter.dispatch", MARGIN)


def test_an_unset_variable_is_gone_and_an_empty_one_is_empty(monkeypatch):
    monkeypatch.setenv("GONE", "1")
    environment = worker_environment({"GONE": None, "EMPTY": ""})
    assert "GONE" not in environment
    assert environment["EMPTY"] == ""
    assert os.environ["GONE"] == "1"


def test_each_setting_has_compile_caches_of_its_own():
    texts = ["plain", "A=/usr/lib", "A=/usr/bin", "A=" + "x" * 300, "A=" + "x" * 301, "plain (again)"]
    found = [cache_environment(text)["TRITON_CACHE_DIR"] for text in texts]
    assert len(set(found)) == len(texts)
    assert all("/usr" not in path.rpartition("deepseek-kernel-bench")[2] for path in found)
    assert all(len(part) < 100 for path in found for part in path.split("/"))
