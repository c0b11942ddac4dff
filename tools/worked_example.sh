#!/bin/bash
# The example of docs/deciding.md, made anew: bash tools/worked_example.sh [FOLDER]
# vLLM on this CPU serves a tiny DeepSeek-V3. An image sets OMP_NUM_THREADS=1: is it worth setting 2? The kernel is
# measured, the launch decided, what it is worth predicted, both servers measured in pairs, and the difference
# explained. 11 to 17 minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:-results/local/deciding}" && cd "${1:-results/local/deciding}" && pwd)
python=$PWD/.venv/bin/python
harness="$python -m harness"
export PATH=$PWD/.venv/bin:$PATH VLLM_CPU_KVCACHE_SPACE=1 VLLM_PLUGINS= HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
model=$(mktemp -d)
trap 'rm -rf "$model"; kill $(jobs -p) 2>/dev/null || true' EXIT
$python tests/support/tiny_deepseek.py "$model/tiny"

# 4 requests of 800 tokens decode together, 200 tokens each; 4 layers.
cat >"$out/cases.json" <<CASES
{"cases": [{"op": "mla_decode", "sizes": "batch=4 ctx=801..999 heads=16 page=16 kv=bf16",
            "place": "tiny decode", "weight": 4}]}
CASES
server="$python -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --model $model/tiny --dtype bfloat16
  --enforce-eager --no-enable-prefix-caching --distributed-executor-backend uni --max-model-len 2048
  --max-num-batched-tokens 4096 --max-num-seqs 4"
client="$python tests/support/vllm_client.py bench --backend vllm --model $model/tiny --dataset-name random
  --random-input-len 800 --random-output-len 200 --num-prompts 4 --max-concurrency 4 --ignore-eos --temperature 0
  --disable-tqdm --save-result"

echo "== 1. measure: the kernel that vLLM runs, with one thread and with two"
$harness toggle --op mla_decode --impl vllm.vec --cases "$out/cases.json" --threads 1 --flag OMP_NUM_THREADS=2 \
  --budget 60s --per-case 60s --out "$out/toggle" | tee "$out/toggle.txt"

echo "== 2. decide"
$harness decide --engine vllm "$out/toggle" --cases "$out/cases.json" --page "$out/decision.html" \
  --json "$out/decision.json" >/dev/null
$harness decide --engine vllm "$out/toggle" --cases "$out/cases.json" | tee "$out/decision.txt"

echo "== 3. serve: pairs of launches with one and the other"
cat >"$out/ab.toml" <<PLAN
launch = '''$server --port {port}'''
client = '''$client --base-url {url} --seed {seed} --result-filename {result}'''
warm_up = "$python -S tests/support/vllm_client.py warm {url}"
pairs = 4
launch_minutes = 0.5
run_minutes = 0.5
[arms.one]
env.OMP_NUM_THREADS = "1"
[arms.two]
env.OMP_NUM_THREADS = "2"
PLAN
$harness serving ab "$out/ab.toml" --out "$out/ab" | tee "$out/ab.txt"

echo "== 4. trace: one launch more of each"
for threads in 1 2; do
  traces=$(mktemp -d)
  OMP_NUM_THREADS=$threads $server --port 18123 \
    --profiler-config "{\"profiler\": \"torch\", \"torch_profiler_dir\": \"$traces\", \"torch_profiler_with_stack\": false}" >"$traces/log" 2>&1 &
  until curl -fs http://127.0.0.1:18123/health >/dev/null; do kill -0 $!; sleep 1; done
  $python -S tests/support/vllm_client.py warm http://127.0.0.1:18123
  $client --base-url http://127.0.0.1:18123 --seed 1 --random-output-len 12 --profile \
    --result-filename "$traces/result.json" >/dev/null 2>&1
  kill $!
  wait $! || true
  mv "$traces"/dp0*.json.gz "$out/trace-$threads.json.gz"
  rm -rf "$traces"
done

echo "== 5. explain"
$harness explain --run "$out/toggle" --rows plain,OMP_NUM_THREADS=2 --ab "$out/ab" --trace "$out/trace-1.json.gz" "$out/trace-2.json.gz" |
  tee "$out/explained.txt"
