"""Plans: commands as they will run, and what could only fail later is refused before anything starts."""

import json
import sys
from pathlib import Path

import pytest

from harness.cli.serving.ab import parse_arm
from harness.errors import UsageError
from harness.serving.ab import names
from harness.serving.ab.plan import client_command, launch_command, read_plan, stop_command
from harness.serving.ab.server import RunFailed
from harness.serving.ab.session import whole_run
from harness.serving.ab.templates import listed
from tests.support.paths import DATA

LAUNCH, CLIENT = "serve --port {port} --model m", "bench {url} --seed {seed} --out {result}"
ARMS = {"a": {}, "b": {"env": {"X": 1}, "flags": "--fast 2"}}
GOOD = {"launch": LAUNCH, "client": CLIENT, "arms": ARMS}
DOCKER = {
    "launch": "docker run --rm --name {name} {env} -p 127.0.0.1:{port}:8000 {image} vllm serve m",
    "stop": "docker stop -t 90 {name}", "image": "vllm:1",
    "arms": {"a": {}, "b": {"image": "vllm:2", "env": {"X": "1"}}},
}  # fmt: skip


def launched(plan, arm):
    return launch_command(plan, arm, "n-1", 30000, Path("/c"))


def test_an_arm_is_variables_and_flags_at_the_end_of_the_command():
    plan = read_plan(GOOD | {"env": {"Y": "{cache}/y", "PATH_TO": "unset"}, "launch": f"Z=3 {LAUNCH}"}, "x")
    a, b = (launched(plan, arm) for arm in plan.arms)
    assert a.words == ("serve", "--port", "30000", "--model", "m") and b.words == (*a.words, "--fast", "2")
    assert dict(a.variables) == {"Z": "3", "Y": "/c/y", "PATH_TO": None} and b.variables["X"] == "1"
    assert str(b).startswith("env -u PATH_TO Z=3 Y=/c/y X=1 serve --port 30000")
    assert "PATH_TO" not in b.environment()
    called = client_command(plan, "a", 30000, 7, Path("/r.json"), Path("/c"))
    assert called.words == ("bench", "http://127.0.0.1:30000", "--seed", "7", "--out", "/r.json")
    assert plan.differing() == (["X"], ["--fast"])
    commented = launched(read_plan(GOOD | {"launch": f"{LAUNCH}  # why"}, "x"), "b").words
    assert commented == b.words, "flags do not stand in a comment"


def test_an_arm_of_the_command_line_says_the_same_as_one_of_the_file():
    assert parse_arm("b: X=1 --fast 2") == ("b", {"env": {"X": "1"}, "flags": "--fast 2", "image": ""})
    assert parse_arm("b: image=t:2 --a=1 B=2")[1] == {"env": {}, "flags": "--a=1 B=2", "image": "t:2"}
    assert parse_arm("base") == ("base", {"env": {}, "flags": "", "image": ""})


def test_a_container_has_its_own_variables_image_and_end():
    plan = read_plan(GOOD | DOCKER, "x")
    b = launched(plan, "b").words
    assert b[3:8] == ("--name", "n-1", "-e", "X=1", "-p") and "vllm:2" in b
    assert "-e" not in launched(plan, "a").words and "vllm:1" in launched(plan, "a").words
    assert stop_command(plan, "b", "n-1", 30000).words[1:] == ("stop", "-t", "90", "n-1")


def test_flags_go_where_the_command_says_and_prompts_are_fewer_before(tmp_path, monkeypatch):
    plan = read_plan(GOOD | {"launch": "bash -c 'exec serve --port {port} {flags}'",
                        "client": f"{CLIENT} --n {{prompts}}", "prompts": 640,
                        "warm_up_prompts": 128}, "x")  # fmt: skip
    assert launched(plan, "b").words[-1] == "exec serve --port 30000 --fast 2"
    assert client_command(plan, "a").words[-1] == "640"
    assert client_command(plan.for_warm_up(), "a").words[-1] == "128"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.sh").write_text("exec vllm serve m --port $1")
    arms = {"a": {"flags": "--config=serve.sh"}, "b": {}}
    launches = {"launch": "A=./serve.sh bash serve.sh {port}", "env": {"B": "./serve.sh"}, "arms": arms}
    plan = read_plan(GOOD | launches, "x")
    found, script = launched(plan, "a"), str(tmp_path / "serve.sh")
    assert found.words[1] == found.variables["A"] == found.variables["B"] == script
    assert found.words[-1] == f"--config={script}"


@pytest.mark.parametrize(("values", "why"), [
    ({"launch": "serve"}, r"no \{port\} in the launch command"),
    ({"client": "bench --seed {seed} --out {result}"}, r"no \{url\} in the client command: it would call"),
    ({"client": "bench {url} --seed {seed}"}, r"no \{result\} in the client"),
    ({"client": "bench {url} --out {result}"}, r"no \{seed\} in the client"),
    ({"client": CLIENT + " --n {prompts}"}, r"\{prompts\} stands in the client command: say how many"),
    ({"launch": LAUNCH + " --x {porrt}"}, r"no \{porrt\} to fill in; there are: \{port\} \{url\}"),
    ({"launch": f"cd /x && {LAUNCH}"}, r"no shell runs the launch command, so '&&' would reach it"),
    ({"client": CLIENT + " --model $MODEL"}, r"'\$MODEL' would reach it as it stands"),
    ({"launch": LAUNCH + " 'x"}, "cannot read the launch command: No closing quotation"),
    ({"arms": {"a": {}}}, "cannot read x: arms: .* at least 2"),
    ({"arms": {"a": {}, "b c": {}}}, "an arm is named with letters"),
    ({"arms": {"a": {}, "b": {"env": {"A B": "1"}}}}, "'A B' is no environment variable"),
    ({"arms": {"a": {}, "b": {"image": "t"}}}, r"arm b has an image, and no \{image\}"),
    ({"arms": {"a": {}, "b": {"flag": "t"}}}, "arms.b.flag: no such key"),
    ({"arms": {"a": {}, "b": {"flags": "'t"}}}, "arms.b.flags: No closing quotation"),
    ({"ready": "health"}, "ready: .*'\\^/'"), ({"flush": "flush_cache"}, "flush: "),
    ({"margin": 0}, "margin: "), ({"metric": "itl"}, "metric: "),
    ({"ready_timeout": "soon"}, "cannot read ready_timeout 'soon'; write"),
    (DOCKER | {"stop": ""}, r"does not end its container .* stop = \"docker stop -t 90 \{name\}\""),
    (DOCKER | {"launch": DOCKER["launch"].replace("{env} ", "")}, r"reach the container: write \{env\}"),
    ({"launch": "bash -lc 'serve {port}'"}, r"flags at the end would go to the shell: write \{flags\}"),
    ({"launch": f"sudo docker run {LAUNCH}"}, r"docker does not end its container"),
    ({"arms": {"a": {}, "b": {"env": {"A": True}}}}, "arms.b.env.A: "),
])  # fmt: skip
def test_what_could_only_fail_later_is_one_line_now(values, why):
    with pytest.raises(UsageError, match=why) as refusal:
        read_plan(GOOD | values, "x")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("template", [row["template"] for row in listed() if row["kind"] == "a plan"])
def test_a_template_is_a_plan_that_passes_the_dry_run(here, tmp_path, template):
    file = tmp_path / "ab.toml"
    file.write_text(here("serving", "ab", "--template", template).stdout)
    told = "--json", tmp_path / "out.json", "--out", tmp_path / "out"
    done = here("serving", "ab", file, "--dry-run", *told)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "34 min a pair" in done.stdout and "7.4 h for 12 pairs" in done.stdout
    plan = json.loads((tmp_path / "out.json").read_text())["plan"]
    assert plan["client"].count("--max-concurrency 64") == 1 and not (tmp_path / "out").exists()
    assert here("serving", "ab", "--template").stdout.count(f"\n{template} ") == 1


# Names that nothing reads


SERVER = '''
"""Reads nothing: SGLANG_IN_DOCS."""
import os
# os.environ["SGLANG_IN_COMMENT"] works
class Envs:
    SGLANG_DECLARED = True
    SGLANG_USED = True
FAST = os.environ.get("SGLANG_READ", "0")
if Envs.SGLANG_USED: pass
class ServerArgs:
    tp_size: A[int, "x"] = 1
    num_steps: A[int, "x"] = 1
    graph_bs_decode: A[int, "x"] = 1
    graph_bs_prefill: A[int, "x"] = 1
    gemm_runner: A[
        str,
        Arg(help="x", cli_name="--gemm-backend"),
    ] = "auto"
ORDER = (
    "num_steps",
)
def serve(args): return args.tp_size, args.gemm_runner, args.graph_bs_decode, args.graph_bs_prefill
'''


def test_names_that_nothing_installed_reads_are_told(tmp_path):
    package = tmp_path / "engine"
    (package / "tests").mkdir(parents=True)
    (package / "server.py").write_text(SERVER)
    (package / "tests" / "test_it.py").write_text('import os; os.environ["SGLANG_IN_TESTS"]')
    (package / "lib.so").write_bytes(b"\x7fELF\0SGLANG_IN_BINARY\0XSGLANG_PART\0")
    (package / "kernel.cu").write_text('getenv("SGLANG_IN_C"); // getenv("SGLANG_IN_C_COMMENT")')
    variables = {"X_DEAD", "SGLANG_IN_DOCS", "SGLANG_IN_COMMENT", "SGLANG_DECLARED", "SGLANG_USED",
                 "SGLANG_READ", "SGL_READ",
                 "SGLANG_IN_TESTS", "SGLANG_IN_BINARY", "SGLANG_PART", "SGLANG_IN_C",
                 "SGLANG_IN_C_COMMENT", "CUDA_VISIBLE_DEVICES"}  # fmt: skip
    flags = "--tp-size --tp --num-steps --graph-bs --gemm-runner --gemm-backend --no-gemm-backend --gone -x"
    plan = read_plan(GOOD | {
        "launch": f"{sys.executable} {package}/server.py {{port}}",
        "arms": {"a": {}, "b": {"env": dict.fromkeys(sorted(variables), "1"), "flags": flags}},
    }, "x")  # fmt: skip
    installed = names._installed  # which must not raise for this launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "_installed", lambda command: installed(command) and ([package], [package]))
        told = {line["name"]: line["says"] for line in names.looked_up(plan)}
    dead = {"X_DEAD", "SGLANG_IN_DOCS", "SGLANG_IN_COMMENT", "SGLANG_DECLARED", "SGLANG_IN_TESTS",
            "SGLANG_PART", "SGLANG_IN_C_COMMENT",
            "--num-steps", "--graph-bs", "--gemm-runner", "--gone"}  # fmt: skip
    assert told.keys() == dead
    assert told["X_DEAD"] == "nothing installed reads X_DEAD"
    assert told["--num-steps"] == "--num-steps is accepted, but nothing in the engine reads it"
    longer = "--graph-bs-decode, --graph-bs-prefill"
    assert told["--graph-bs"] == f"the engine has no flag --graph-bs, but {longer}"


def test_looking_up_names_writes_nothing_into_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    command = f"PYTHONPYCACHEPREFIX={{cache}}/pyc {sys.executable} -m json.tool {{port}}"
    names.looked_up(read_plan(GOOD | {"launch": command}, "x"))
    assert not list(tmp_path.iterdir())


def test_an_engine_that_is_not_here_is_not_called_silent():
    plan = read_plan(GOOD | {"arms": {"a": {}, "b": {"env": {"VLLM_USE_V1": "1", "Q": "1"}}}}, "x")
    unknown, old = names.looked_up(plan)
    assert unknown["found"] is None
    assert unknown["says"].startswith("VLLM_USE_V1, Q could not be looked up: serve is")
    assert old["says"] == "VLLM_USE_V1 is in none of today's engines; today: the default"


def test_requests_that_a_client_does_not_count_are_missed(tmp_path):
    """SGLang's file says how many completed, and not how many there were to be."""
    rows = (DATA / "serving" / "sglang_bench_serving_0.5.9.jsonl").read_text().splitlines()
    (file := tmp_path / "result.jsonl").write_text(rows[0])
    done = json.loads(rows[0])["completed"]
    plan = read_plan(GOOD | {"client": f"{CLIENT} --num-prompts {2 * done}"}, "x")
    assert whole_run(file, done).totals.completed == done
    with pytest.raises(RunFailed, match=f"{done} of {2 * done} requests failed"):
        whole_run(file, plan.prompts_asked)
    file.write_text("\n".join([rows[0], rows[0].replace('"completed"', '"other": 1, "completed"')]))
    with pytest.raises(RunFailed, match="holds 2 runs: the client is to make one"):
        whole_run(file, done)
    file.write_text("not yet")
    with pytest.raises(RunFailed, match="cannot read"):
        whole_run(file, done)
