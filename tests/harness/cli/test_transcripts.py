"""Commands and all that they print, as in `transcripts/`: a mistake is one line and leaves nothing behind."""

import re
from pathlib import Path

import pytest

from harness.paths import ROOT
from tests.support.command_line import contents
from tests.support.transcripts import replayed

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
BEFORE = {
    "file": "as it was",
    "mine/my campaign.toml": '[[step]]\ncommand = "doctor"\n',
    "few.toml": '[[step]]\ncommand = "run"\nops = ["mla_decode"]\noptions = { suite = "r1-tp8" }\n',
    "two.toml": '[[step]]\ncommand = "run"\nops = ["mla_decode"]\n[[step]]\ncommand = "tune"\n'
    'ops = ["fused_moe"]\noptions.suite = "smoke"\ndevices = ["H200"]\n'
    '[[step]]\ncommand = "doctor"\nshare = 0.2\ndevices = ["MI300X"]\n'
    '[[step]]\ncommand = "toggle"\nops = ["mha_prefill"]\ndevices = ["MI300X"]\n'
    'options.flag = "ROCBLAS_USE_HIPBLASLT=0,1"\n',
    "mistyped.toml": '[[step]]\ncomand = "doctor"\n',
}


@pytest.mark.parametrize("file", TRANSCRIPTS, ids=lambda file: file.stem)
def test_a_command_prints_what_is_committed(snapshot, here, tmp_path, monkeypatch, file):
    for name, text in BEFORE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.chdir(ROOT)
    text = replayed(file.read_text(), tmp_path, here)
    snapshot(file, text)
    assert contents(tmp_path) == before
    failed = "\n[" if file.stem == "mistakes" else "\n[2]\n"
    of_mistakes = [answer for answer in text.split("\n$ ") if failed in answer]
    assert all(answer.count("\n! error: ") == answer.count("\n! ") == 1 for answer in of_mistakes)
    assert not re.search(r"^\[[01]\]$", text, re.MULTILINE) or file.stem != "mistakes"
