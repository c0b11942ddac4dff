"""`campaign --plan`: files that their tools can read. What it prints: transcripts/campaign.txt."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from harness.campaign.plan import Step, planned_job
from harness.cli.campaign import campaign
from harness.cli.campaign_display import NAMES
from harness.paths import ROOT
from harness.tune.race import TuneRequest
from kernels.platform import Platform

CHECKOUT = ROOT.as_posix()


@pytest.fixture
def printed(here):
    def of(kind: str, *arguments: object) -> str:
        done = here("campaign", "--plan", kind, *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return of


def test_a_note_is_printed_once_and_not_for_each_op(here):
    done = here("campaign", "--plan", "--devices", "MI300X=8")
    notes = done.stderr.splitlines()
    assert len(notes) == len({*notes}) and sum("mi350x-vllm: 1" in note for note in notes) == 1


def test_a_race_has_the_time_that_it_gives_each_case():
    step = Step("tune", "tune", 0, "mla_decode", ())
    request = TuneRequest(op="mla_decode", case=("batch=4 ctx=128 heads=16",), per_case="25s", budget="50s")
    job = planned_job(step, "tune", "H200", Platform("cuda", "sm_90"), 600.0, lambda _: request)
    assert (len(job.waiting), job.measure_s) == (1, 25.0)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("type", ["H200", "MI300X"])
def test_a_file_is_read_by_its_tools(printed, kind, type):
    text = script = printed(kind, "--devices", f"{type}=16", "--budget", "40m")
    assert "Untested" in text or "Not run yet" in text
    if kind == "kuberay":
        _, job = yaml.safe_load_all(text)
        cluster = job["spec"]["rayClusterSpec"]
        assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
        script = job["spec"]["entrypoint"]
        resources = cluster["workerGroupSpecs"][0]["rayStartParams"]["resources"]
        # KubeRay puts it into a shell's command as it is.
        assert shlex.split(resources) == [f'{{"device:{type}": 8}}']
        text = shlex.split(script)[-1]  # of `bash -c`
    elif kind == "dstack":
        script = text = " && ".join(yaml.safe_load(text)["commands"])
    for read in (script, re.sub(r"^# (?=(export|\.venv))", "", script, flags=re.MULTILINE)):
        subprocess.run(["bash", "-n"], input=read, text=True, check=True, capture_output=True)
    for words in re.findall(r"-m harness campaign (.*)", text.replace("\\\n", " ")):
        options = campaign.make_context("campaign", shlex.split(words)).params
        assert (options["budget"], bool(options["cluster"])) == ("40m", True)
        assert (ROOT / options["file"]).exists()


@pytest.fixture
def stand_ins(tmp_path):
    """A checkout whose `ray` says how it was called, beside a Slurm of one node."""
    scripts = {
        ".venv/bin/ray": 'printf "%s\\n" "$RAY_AUTH_MODE" "${#RAY_AUTH_TOKEN}" "$@"',
        ".venv/bin/python": f'exec {shlex.quote(sys.executable)} "$@"',
        "slurm/scontrol": "echo node7",
        "slurm/hostname": "echo 10.0.0.7 fe80::7",
        "slurm/srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    }
    for name, text in scripts.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/usr/bin/env bash\n{text}\n")
        file.chmod(0o755)

    def called(script: str, **variables: str) -> list[str]:
        environment = variables | {"PATH": f"{tmp_path}/slurm:{os.environ['PATH']}"}
        command = ["bash", "-c", script.replace(CHECKOUT, str(tmp_path))]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, text=True, capture_output=True, check=True
        )
        return done.stdout.splitlines()

    return called


def test_slurm_starts_ray_and_the_campaign(printed, stand_ins):
    variables = {"JOB_NODELIST": "node[7-8]", "SUBMIT_DIR": "/home", "JOB_ID": "42", "CPUS_ON_NODE": "96"}
    mode, length, *words = stand_ins(
        printed("slurm", "--devices", "H200=16"),
        **{f"SLURM_{name}": value for name, value in variables.items()},
    )
    assert (mode, length) == ("token", "64")
    assert words == [
        *("symmetric-run", "--address", "10.0.0.7:6379", "--min-nodes", "2"),
        *("--num-gpus=8", '--resources={"device:H200": 8}', "--"),
        *("python", "-m", "harness", "campaign", "harness/campaign/defaults/cuda.toml"),
        *("--cluster", "10.0.0.7:6379", "--budget", "25m", "--out", "/home/campaign-42"),
    ]


def test_many_cases_on_many_devices_are_planned(here, tmp_path):
    many = tmp_path / "many.toml"
    many.write_text('[[step]]\ncommand = "run"\nrepeats = 8\noptions = { suite = "r1-tp8" }\n')
    done = here("campaign", many, "--plan", "--devices", "cpu=64", "--budget", "20h")
    assert (done.returncode, done.stderr) == (0, "")
    fits = re.findall(r"(\d+) of (\d+)  ", done.stdout)
    assert len(fits) > 20 and all(fit == cases for fit, cases in fits)
