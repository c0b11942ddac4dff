"""`campaign --plan`: files that their tools can read, as far as that can be told without them, and a plan of
many cases on many devices."""

from __future__ import annotations

import os
import re
import shlex
import string
import subprocess
import sys
import time
from typing import Any

import pytest
import yaml

from harness.cli.campaign import campaign
from harness.cli.campaign_plan import FILES, IMAGES, NAMES
from harness.paths import ROOT
from tests.support.command_line import error_line

CHECKOUT = ROOT.as_posix()
SHELL = ("node", "slurm")
SHELLS_OWN = {
    *("PWD", "PATH", "DSTACK_MASTER_NODE_IP", "first", "address", "out"),
    *(f"SLURM_{name}" for name in ("JOB_NODELIST", "SUBMIT_DIR", "JOB_ID", "CPUS_ON_NODE")),
}
SEVERAL = ("slurm", "kuberay", "dstack")


@pytest.fixture
def printed(here):
    def of(kind: str, *arguments: object) -> str:
        done = here("campaign", "--plan", kind, *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return of


def in_bash(text: str) -> None:
    """Raises where bash cannot read it."""
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, capture_output=True)


def campaigns(kind: str, text: str) -> list[dict[str, Any]]:
    """Options of each `harness campaign` in a file, as the command reads them."""
    if kind == "kuberay":
        job = list(yaml.safe_load_all(text))[-1]
        text = shlex.split(job["spec"]["entrypoint"])[-1]  # of `bash -c`
    elif kind == "dstack":
        text = yaml.safe_load(text)["commands"][-1]
    found = re.findall(r"-m harness campaign (.*)", text.replace("\\\n", " "))
    return [campaign.make_context("campaign", shlex.split(words)).params for words in found]


@pytest.mark.parametrize("kind", NAMES)
def test_a_file_has_all_names_filled_in(printed, kind):
    template = (FILES / NAMES[kind]).read_text()
    text = printed(kind, "--devices", "MI300X=16", "--budget", "40m")
    found = string.Template.pattern.finditer(template)
    names = {match["named"] or match["braced"] for match in found}
    # What is left is the shell's.
    assert set(re.findall(r"\$\{?(\w+)", text)) == {name for name in names if name in SHELLS_OWN}
    assert "MI300X" in text
    assert CHECKOUT in text
    made = campaigns(kind, text)
    assert made
    for options in made:
        assert options["budget"] == "40m"
        assert options["cluster"]
        assert options["file"] == "harness/campaign/defaults/rocm.toml"


@pytest.mark.parametrize("kind", SHELL)
def test_bash_reads_a_script(printed, kind):
    text = printed(kind, "--devices", "H200=16")
    assert text.startswith("#!/usr/bin/env bash\n")
    in_bash(text)
    in_bash(re.sub(r"^# (?=(export|\.venv))", "", text, flags=re.MULTILINE))


def test_slurm_is_asked_for_what_there_is(printed):
    text = printed("slurm", "--devices", "H200=20", "--budget", "90s")
    before, _, after = text.partition("\nset -euo pipefail\n")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", before, re.MULTILINE))
    assert asked == {
        "job-name": "kernel-bench-h200",
        "nodes": "3",
        "ntasks-per-node": "1",
        "gpus-per-node": "7",
        "mem": "0",
        "time": "17",
    }
    assert "#SBATCH" not in after
    assert """--min-nodes 3 \\\n    --num-gpus=7 --resources='{"device:H200": 7}' --""" in after
    assert [options["budget"] for options in campaigns("slurm", text)] == ["2m"]


@pytest.mark.parametrize(("type", "resource"), [("H200", "nvidia.com/gpu"), ("MI300X", "amd.com/gpu")])
def test_kubernetes_is_given_a_volume_and_a_job(printed, type, resource):
    claim, job = yaml.safe_load_all(printed("kuberay", "--devices", f"{type}=16"))
    assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim")
    assert claim["spec"]["resources"]["requests"]["storage"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    in_bash(job["spec"]["entrypoint"])
    cluster = job["spec"]["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert cluster["authOptions"] == {"mode": "token"}
    head, (group,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"] == {"num-cpus": "0"}
    (volume,) = head["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", job["metadata"]["name"])
    assert [group[name] for name in ("groupName", "replicas", "minReplicas", "maxReplicas")] == [
        type.lower(),
        *(2, 2, 2),
    ]
    # KubeRay puts it into a shell's command as it is.
    in_bash(f"ray start --resources={group['rayStartParams']['resources']}")
    assert shlex.split(group["rayStartParams"]["resources"]) == [f'{{"device:{type}": 8}}']
    (container,) = group["template"]["spec"]["containers"]
    for amounts in container["resources"].values():
        assert amounts[resource] == 8


@pytest.mark.parametrize(("type", "kind"), [("H200", "cuda"), ("MI300X", "rocm")])
def test_dstack_is_given_a_task(printed, type, kind):
    task = yaml.safe_load(printed("dstack", "--devices", f"{type}=16"))
    assert (task["type"], task["nodes"]) == ("task", 2)
    assert re.fullmatch(r"[a-z][a-z0-9-]{1,40}", task["name"])
    assert task["resources"]["gpu"] == f"{type}:8"
    assert task["max_duration"] == "40m"
    assert task["repos"] == [f"{CHECKOUT}:/workflow"]
    assert yaml.safe_load(IMAGES[kind]).items() <= task.items()
    assert not {"image", "python"} <= task.keys()  # dstack refuses both
    assert "RAY_AUTH_TOKEN" in task["env"]  # has no value: dstack asks for it
    in_bash(" && ".join(task["commands"]))
    assert "$DSTACK_MASTER_NODE_IP:6379" in task["commands"][-1]


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


def test_dstack_starts_ray_and_the_campaign(printed, stand_ins):
    _, *commands = yaml.safe_load(printed("dstack", "--devices", "MI300X=16"))["commands"]  # after set-up
    _, _, *words = stand_ins(" && ".join(commands), DSTACK_MASTER_NODE_IP="10.0.0.7")
    assert words[:5] == ["symmetric-run", "--address", "10.0.0.7:6379", "--min-nodes", "2"]
    assert '--resources={"device:MI300X": 8}' in words
    assert words[-4:] == ["--budget", "25m", "--out", "/kept/campaign"]


@pytest.mark.parametrize("kind", SEVERAL)
def test_others_are_refused_by_a_token(kind):
    text = (FILES / NAMES[kind]).read_text()
    assert "RAY_AUTH_MODE=token" in text or "mode: token" in text


@pytest.mark.parametrize("kind", NAMES)
def test_it_says_what_has_not_been_tried(kind):
    start = "".join((FILES / NAMES[kind]).read_text().splitlines(keepends=True)[:2])
    assert "Untested" in start or "Not run yet" in start


def test_a_file_of_the_user_is_named_as_the_checkout_knows_it(printed, tmp_path):
    mine = tmp_path / "my campaign.toml"
    mine.write_text('[[step]]\ncommand = "doctor"\n')
    (elsewhere,) = campaigns("slurm", printed("slurm", mine))
    assert elsewhere["file"] == str(mine)
    (ours,) = campaigns("slurm", printed("slurm", ROOT / "harness/campaign/defaults/cuda.toml"))
    assert ours["file"] == "harness/campaign/defaults/cuda.toml"


def test_many_cases_on_many_devices_are_planned_in_seconds(here, tmp_path):
    many = tmp_path / "many.toml"
    many.write_text('[[step]]\ncommand = "run"\nrepeats = 45\noptions = { suite = "r1-tp8" }\n')
    began = time.process_time()
    done = here("campaign", many, "--plan", "--devices", "cpu=64", "--budget", "20h")
    assert time.process_time() - began < 20
    assert (done.returncode, done.stderr) == (0, "")
    fits = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) of (\d+)  ", done.stdout)]
    assert sum(cases for _, cases in fits) >= 10_000
    assert all(fit == cases for fit, cases in fits)
    assert re.search(r"^about \d+:\d\d of 1200:00$", done.stdout, re.MULTILINE)


def test_what_does_not_fit_is_said(here, tmp_path):
    few = tmp_path / "few.toml"
    few.write_text('[[step]]\ncommand = "run"\nops = ["mla_decode"]\noptions = { suite = "r1-tp8" }\n')
    done = here("campaign", few, "--plan", "--devices", "cpu=1", "--budget", "5s")
    assert re.search(r"mla_decode-r1-tp8 +0 of \d+ +does not fit", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--plan", "--devices", "H2000=8"], "unknown device 'H2000'; devices: .*H200.*, cpu"),
        (["--plan", "slurm", "--devices", "H2000=8"], "unknown device 'H2000'; devices: "),
        (["--plan", "--resume", "there"], "--plan is of a campaign from its start"),
        (["--plan", "--devices", "H200"], "cannot read --devices 'H200'; write for example H200=8"),
        (["--plan", "--devices", "H200=0"], "cannot read --devices 'H200=0'"),
        (["--plan", "--devices", "H200=-1"], "cannot read --devices 'H200=-1'"),
        (["--plan", "--devices", "H200=many"], "cannot read --devices 'H200=many'"),
        (["--plan", "--devices", "$(id)=1"], "cannot read --devices"),
        (["--plan", "node", "--devices", "H200=1", "--devices", "MI300X=1"], "one --devices TYPE=N"),
        (["--plan", "dstack", "--devices", "cpu=4"], "--plan prints files for GPUs"),
        (["--plan", "lsf"], "'lsf' is not one of 'steps', 'node', 'slurm'"),
        (["nowhere.toml", "--plan"], "cannot read nowhere.toml: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(here, arguments, wanted):
    assert re.search(wanted, error_line(here("campaign", *arguments)))
