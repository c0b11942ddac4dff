"""`serving ab` with a real vLLM and its own client on this CPU: slow."""

import importlib.util
import json
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.serving_processes import marked
from tests.support.tiny_deepseek import write_checkpoint

SUPPORT = ROOT / "tests" / "support"
PLAN = """\
launch = '''{python} -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port {{port}} --model {model}
  --dtype bfloat16 --enforce-eager --no-enable-prefix-caching --distributed-executor-backend uni
  --max-model-len 256 --max-num-batched-tokens 256 --max-num-seqs 4'''
client = '''VLLM_PLUGINS= {python} {client} bench --backend vllm --base-url {{url}}
  --model {model} --dataset-name random --random-input-len 64 --random-output-len 48 --num-prompts 4
  --max-concurrency 4 --ignore-eos --temperature 0 --disable-tqdm --seed {{seed}}
  --save-result --result-filename {{result}}'''
warm_up = "{python} -S {client} warm {{url}}"
pairs = 1
[env]
VLLM_CPU_KVCACHE_SPACE = "1"
VLLM_PLUGINS = ""
HF_HUB_OFFLINE = "1"
VLLM_NO_USAGE_STATS = "1"
[arms.a]
[arms.b]
"""


@pytest.mark.slow
@pytest.mark.first
def test_an_a_a_pair_of_a_real_engine_resolves_nothing_and_leaves_nothing(tmp_path, mark, cli):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    paths = {"python": sys.executable, "client": SUPPORT / "vllm_client.py"}
    model = write_checkpoint(tmp_path / "model")
    (tmp_path / "ab.toml").write_text(PLAN.format(model=model, **paths))
    written = ("--out", tmp_path / "out", "--json", tmp_path / "ab.json")
    done = cli("serving", "ab", tmp_path / "ab.toml", *written)
    assert done.returncode == 0, done.stderr
    assert not marked(mark)
    found = json.loads((tmp_path / "ab.json").read_text())
    assert (found["engine"]["engine"], found["engine"]["owned"], found["pairs"]) == ("vllm", True, 1)
    assert {line["metric"]: line["verdict"] for line in found["verdicts"]}["tpot"] == "unclear"
    assert "b and a are launched alike: an A/A, which shows this machine's noise" in found["findings"]
