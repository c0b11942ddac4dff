"""`serving ab` with doubles of a server and a client: every fault is one line and leaves nothing."""

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from harness.errors import NothingRan, UsageError
from harness.serving.ab.plan import Command, read_plan
from harness.serving.ab.record import Record
from harness.serving.ab.result import summary
from harness.serving.ab.server import Guarded, RunFailed, held_port
from harness.serving.ab.session import Session
from tests.support.paths import ROOT
from tests.support.serving_processes import CLIENT, SERVER, comes, gone, marked

PORT = 10000 + os.getpid() % 100 * 500  # of this process, and of no other for many launches


def plan_of(launch="", client="", slow="", **more):
    """Two pairs; `slow` is what the second arm's command has at its end."""
    arms = {"base": {}, "slow": {"flags": slow or "--step-ms 11"}}
    values = {"launch": SERVER + launch, "client": CLIENT + client, "arms": arms, "pairs": 2, "port": PORT}
    return read_plan(values | more, "a test")


@pytest.fixture
def run(tmp_path, mark):
    """The summary of a plan's run, and what was said of it."""

    def ran(plan, folder="out", budget_s=None):
        said = []
        record = Record.begin(tmp_path / folder, plan, {"names": [], "predictions": []})
        record.hold(said.append)
        try:
            Session(record, budget_s, said.append).run()
        finally:
            assert not marked(mark), "all servers and clients have ended"
            os.close(record.lock)
        return summary(Record(tmp_path / folder)), "\n".join(said)

    return ran


def verdicts(found):
    return {line["metric"]: line["verdict"] for line in found["verdicts"]}


def test_a_slower_arm_is_found_and_what_the_servers_differ_in_is_said(run, tmp_path):
    env = {"NCCL_OF_ARM": "{cache}"}
    found, _ = run(plan_of(flush="/flush_cache", client=" --noise 0.0002", env=env))
    slower, same = ("tpot", "throughput"), ("ttft", "ttft_median")
    assert verdicts(found) == dict.fromkeys(slower, "slower") | dict.fromkeys(same, "same")
    (tpot,) = [line for line in found["verdicts"] if line["decides"]]
    assert tpot["percent"] == pytest.approx(10, abs=0.2) and tpot["pairs"] == found["pairs"] == 2
    assert found["differences"]["slow"] == {"server_info": {"step_ms": [10.0, 11.0]}, "environment": {}}
    assert found["engine"]["version"] == "1.2.3" and found["engine"]["owned"] is True
    assert found["finished"] == "all pairs made" and not found["findings"]
    events = Record(tmp_path / "out").events
    launches = [(e["pair"], e["arm"]) for e in events if e["event"] == "launch"]
    assert [arm for _, arm in launches] == ["base", "slow", "base", "slow", "slow", "base"], "mirrored"
    assert len({e["port"] for e in events if e["event"] == "launch"}) == len(launches), "no port twice"
    seeds = {(e["pair"], e["seed"]) for e in events if e["event"] == "measured"}
    assert len(seeds) == len({seed for _, seed in seeds}) == 3, "each pair its own, both arms the same"
    warm = {json.loads(file.read_text())["label"] for file in tmp_path.rglob("warm-up.json")}
    assert len(warm) == 3 and not warm & {f"seed {seed}" for _, seed in seeds}, "other prompts before"


def test_a_fault_costs_its_pair_which_is_made_again_and_no_more(run, tmp_path):
    """In both launches that are thrown away there is none; then one in each attempt but the last."""
    server, client = tmp_path / "server", tmp_path / "client"
    server.write_text("\n\ndies-in-the-middle\nhangs-in-the-middle\n")
    client.write_text("\n\nhalf-fails\n")
    found, said = run(plan_of(f" --modes {server}", f" --modes {client}", pairs=1))
    assert found["pairs"] == 1 and found["finished"] == "all pairs made"
    made_again = [line for line in said.splitlines() if "made again" in line]
    for line, why in zip(made_again, [
        "base: the server ended with exit code 9 while the client called it; it said: 'ValueError: the KV",
        "base: the server failed while the client called it: 'Scheduler hit an exception: all is lost'",
        "base: 4 of 8 requests failed",
    ], strict=True):  # fmt: skip
        assert line.startswith(f"pair 1 is made again: {why}")
    assert [finding.partition(":")[0] for finding in found["findings"]] == ["pair 1 was made again"] * 3
    attempts = [(e["arm"], e["attempt"]) for e in Record(tmp_path / "out").of("measured", pair=1)]
    assert attempts == [("base", 3), ("slow", 3)], "both arms in one attempt"


@pytest.mark.parametrize(("values", "why"), [
    ({"launch": " --mode dies-at-start"}, "exit code 3 before it served; it said: 'RuntimeError: no such"),
    ({"launch": " --mode fatal-line"}, "server failed before it served: 'RuntimeError: Engine core init"),
    ({"launch": " --mode never-ready", "first_ready_timeout": "0.1s"}, "within 0.1 s (ready_timeout)"),
    ({"client": " --mode hangs", "client_timeout": "0.1s"}, "the client took over 0.1 s (client_timeout)"),
    ({"ready": "/nowhere", "first_ready_timeout": "0.1s"}, "did not serve within 0.1 s"),
    ({"client": " --result-of=/nowhere"}, "the client ended with exit code 2"),
])  # fmt: skip
def test_what_fails_in_the_first_launch_ends_it_in_one_line(run, values, why):
    with pytest.raises(NothingRan) as refusal:
        run(plan_of(**values))
    assert why in str(refusal.value) and "nothing was measured" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_stranger_on_the_port_is_not_measured_and_servers_launched_alike_are_an_a_a(
    run, tmp_path, monkeypatch
):
    """The plan's port is held by another A/B, so that the first server takes another one."""

    class Stranger(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    (modes := tmp_path / "modes").write_text("tells-its-port\n")
    os.mkfifo(fifo := tmp_path / "fifo")
    monkeypatch.setenv("FAKE_FIFO", str(fifo))
    strangers = []

    def answer():
        strangers.append(http.server.ThreadingHTTPServer(("127.0.0.1", int(fifo.read_text())), Stranger))
        strangers[0].serve_forever()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with held_port(PORT) as taken:
            found, said = run(plan_of(f" --modes {modes}", slow=" ", pairs=1))
    finally:
        strangers[0].shutdown()
        strangers[0].server_close()
        thread.join()
    assert found["pairs"] == 1 and "another process, not this server, answers on port" in said
    assert f"port {taken} is taken by another process: base takes " in said
    assert "launched alike: an A/A" in found["findings"][0]
    assert verdicts(found)["tpot"] == "unclear", "one pair says nothing"


def test_a_port_that_is_taken_is_left_alone():
    """By a server, or by another A/B whose server does not listen yet; afterwards it is free."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        port = stranger.getsockname()[1]
        stranger.listen()
        with held_port(port) as first, held_port(port) as second:
            assert port < first < second
        with held_port(first) as again:
            assert again == first


def test_a_server_that_ignores_sigterm_is_killed_with_all_that_it_started(tmp_path, mark):
    lock = os.open(tmp_path / "lock", os.O_CREAT)
    command = Command(tuple((SERVER.format(port=0) + " --mode ignores-sigterm").split()))
    with Guarded(command, tmp_path / "log", keep=lock, grace=0.05) as process:
        assert comes(lambda: len(marked(mark)) >= 5)  # guard, server, two children, an orphan
    assert process.code == -signal.SIGKILL and not marked(mark)
    os.close(lock)


def test_a_command_that_cannot_be_started_says_why(tmp_path, mark):
    (file := tmp_path / "serve").write_text("")
    lock = os.open(tmp_path / "lock", os.O_CREAT)
    with Guarded(Command((str(file),)), tmp_path / "log", keep=lock) as process:
        assert process.wait(60) == 127
    assert f"cannot start {file}: Permission denied" in process.last_words()
    os.close(lock)


def test_a_stop_command_is_run_first(tmp_path, mark):
    lock = os.open(tmp_path / "lock", os.O_CREAT)
    stop = Command(("touch", str(tmp_path / "stopped")))
    command = Command(tuple(SERVER.format(port=0).split()))
    with Guarded(command, tmp_path / "log", keep=lock, grace=60, stop=stop) as process:
        assert process.wait() is None
    assert (tmp_path / "stopped").exists() and process.code == -signal.SIGTERM
    os.close(lock)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_killed_in_the_middle_of_a_pair_it_goes_on_and_loses_none(tmp_path, mark, how, here):
    """The first arm of pair 2 was measured, the second's client waits: the pair is made anew at its place."""
    pipe, out, file = tmp_path / "pipe", tmp_path / "out", tmp_path / "ab.toml"
    client = f"{CLIENT} --waits {pipe}"
    file.write_text(
        f"launch = {json.dumps(SERVER)}\nclient = {json.dumps(client)}\npairs = 2\nport = {PORT}\n"
        "[arms.base]\n[arms.slow]\nflags = '--step-ms 11'\n"
    )
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "harness", "serving", "ab", str(file), "--out", str(out), "--quiet"]
    running = subprocess.Popen(command, cwd=ROOT)
    with pipe.open() as told:
        told.readline()
        running.send_signal(how)
        running.wait(timeout=120)
    assert gone(mark)
    pipe.unlink()
    record = Record(out)
    assert sorted(record.pairs()) == [0, 1]
    changed = here("serving", "ab", "--resume", out, "--pairs", "3")
    assert changed.returncode == 2
    assert changed.stderr == f"error: {out} was begun with another pairs: 2, now 3\n"
    done = here("serving", "ab", file, "--resume", out, "--json", "-", "--quiet")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["pairs"] == 2 and verdicts(found)["tpot"] in ("slower", "unclear")
    again = [(e["arm"], e["attempt"]) for e in Record(out).of("launch", pair=2)]
    assert again[-2:] == [("slow", 1), ("base", 1)], "both arms, in the pair's order"
    assert Record(out).of("launch", pair=1) == record.of("launch", pair=1)
    before = (out / "journal.jsonl").read_bytes()
    shown = here("serving", "ab", "--resume", out)
    assert "2 pairs against base, sglang 1.2.3" in shown.stdout
    assert (out / "journal.jsonl").read_bytes() == before


def test_two_processes_do_not_go_on_with_one_record(tmp_path):
    plan = plan_of()
    record = Record.begin(tmp_path / "out", plan, {"names": [], "predictions": []})
    record.hold(print)
    with pytest.raises(UsageError, match=f"process {os.getpid()} goes on with"):
        Record(tmp_path / "out").hold(print)
    with pytest.raises(UsageError, match="holds an A/B: --resume"):
        Record.begin(tmp_path / "out", plan, {})
    os.close(record.lock)


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """A session whose pairs are made by a function of the pair's number, without a server."""

    def session_of(make, budget_s=None):
        def launch(self, about, number, port):
            make(about["pair"])
            self.record.append("launch", **about)
            self.record.append("measured", **about)
            self.record.append("stopped", **about, seconds=60.0, ok=True)

        monkeypatch.setattr(Session, "_launch", launch)
        said = []
        record = Record.begin(tmp_path / "out", plan_of(), {"names": [], "predictions": []})
        Session(record, budget_s, said.append).run()
        return record, "\n".join(said)

    return session_of


def test_a_pair_that_never_counts_is_given_up(pretended):
    def make(pair):
        if pair == 1:
            raise RunFailed("slow: its numbers are wrong")

    record, said = pretended(make)
    assert "pair 1 is given up after 4 attempts: slow: its numbers are wrong" in said
    assert said.count("made again") == 3 and sorted(record.pairs()) == [0]
    assert summary(record)["finished"] == "given up"


@pytest.mark.parametrize(("budget_s", "pairs"), [(119, 0), (3600, 2)])
def test_no_pair_is_begun_that_would_not_end_within_the_budget(pretended, budget_s, pairs):
    """One of a launch of a minute for each of two arms."""
    record, said = pretended(lambda pair: None, budget_s)
    assert len(record.pairs()) == pairs + 1
    assert ("does not reach" in said) == (pairs == 0)
