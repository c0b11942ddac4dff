#!/usr/bin/env bash
# First contact with a GPU: measures in under nine minutes what only hardware can show.
#
#     tools/first_contact.sh OUT [STEP ...]          WITHIN=540 seconds, PYTHON=python3
#
# It runs all steps, or the named ones, each with a limit in seconds; a step that fails does not stop the next.
# OUT gets log.txt, machine.txt and runs.tgz with the records of all runs. results/OWED.md says what to carry.
# Exit code 1: a step failed; 2: there is no such step; 3: there is no GPU.
set -u
[ $# -ge 1 ] || { sed -n '2,8s/^# \?//p' "$0"; exit 2; }
out=$(realpath -m "$1")
runs=$(dirname "$out")/first-contact-runs
root=$(realpath "$(dirname "$0")/..")
python=${PYTHON:-python3}
wanted=" ${*:2} "  # the named steps, each between spaces; two spaces if none is named
failed=0
for name in $wanted; do
  grep -q "^step $name " "$0" || { echo "error: no step $name; steps: $(sed -n 's/^step \([^ ]*\) .*/\1/p' "$0" | xargs)" >&2; exit 2; }
done
cd "$root" || exit
export PYTHONUNBUFFERED=1 KERNEL_BENCH_PLUGINS=$root/tools/control_kernels.py
"$python" - << 'END' || exit 3
import sys
from kernels.platform import detect, unseen
if detect().kind == "cpu":
    sys.exit(f"error: no GPU here: {unseen() or 'this is what only a GPU can tell'}")
END
mkdir -p "$out" "$runs"
for command in "nvidia-smi -q -d CLOCK,PERFORMANCE,POWER,COMPUTE" "nvcc --version" "$python -m pip list" lscpu "free -g"; do
  echo "==== $command"; $command
done > "$out/machine.txt" 2>&1

step() {
  local name=$1 limit=$2 left=$((${WITHIN:-540} - SECONDS)) began=$SECONDS
  case $wanted in "  " | *" $name "*) ;; *) return ;; esac  # all steps, or those that are named
  [ $left -ge 15 ] || { echo "[$SECONDS s] $name: left out, no time" | tee -a "$out/log.txt"; return; }
  rm -rf "${runs:?}/$name"  # of an earlier call, which runs.tgz has
  echo "==== $name: ${*:3}" >> "$out/log.txt"
  timeout -s INT -k 10 $((limit < left ? limit : left)) "$python" -m harness "${@:3}" >> "$out/log.txt" 2>&1
  local code=$?
  [ $code = 0 ] || failed=1
  echo "[$SECONDS s] $name: $((SECONDS - began)) s, $([ $code = 124 ] && echo stopped || echo "exit code $code")" | tee -a "$out/log.txt"
}

# `table` has cases that results/published/kernel-tables has too, `pairs` has equal rows and rows that are slower by
# a known share, and `large` is the GEMM of suite r1-tp8 that takes most memory.
step mla-small 60 run --op mla_decode --impl 'torch.sdpa,torch.naive,triton.*' --launch both --case 'batch=1 ctx=130 heads=16 page=64 kv=bf16' --budget 8s --per-case 4s --out "$runs/mla-small"
step pairs 100 run --op block_scale_gemm --impl 'torch.bf16,control.*' --boundary core --case 'm=8192 n=2112 k=7168' --budget 12s --out "$runs/pairs"
step gemm 90 run --op block_scale_gemm --impl 'torch.bf16,cublaslt,triton.*,deepgemm,flashinfer.*' --case 'm=64,4096 n=4608 k=7168' --budget 10s --per-case 4s --out "$runs/gemm"
step mla 70 run --op mla_decode --impl 'torch.sdpa,triton.*,flashmla,flashinfer.*' --case 'batch=64 ctx=3201..3999 heads=16 page=64 kv=bf16' --budget 8s --out "$runs/mla"
step prefill 80 run --op mha_prefill --impl 'torch.sdpa*,triton.*,flashinfer.*,cudnn' --case 'batch=4 new=3200 heads=16' --budget 8s --out "$runs/prefill"
step moe 180 run --op fused_moe --impl 'torch.bf16,triton.*,deepgemm.*' --case 'tokens=64 inter=256' --budget 8s --per-case 4s --out "$runs/moe"
step table 120 run --op block_scale_gemm --impl 'torch.bf16,deepgemm,flashinfer.*' --boundary with_quant --case 'm=64,4096 n=7168 k=2048' --budget 8s --per-case 4s --out "$runs/table"
step check 100 check --op block_scale_gemm --impl triton.split_k --case 'm=16384 n=7168 k=2048'
step toggle 80 toggle --op mla_decode --impl triton.split_kv --force --flag CUDA_DEVICE_MAX_CONNECTIONS=unset,1 --budget 6s --case 'batch=1 ctx=130 heads=16 page=64 kv=bf16' --out "$runs/toggle"
step tune 120 tune --op mla_decode --impl triton.split_kv --keep 4 --budget 8s --case 'batch=64 ctx=3201..3999 heads=16 page=64 kv=bf16' --out "$runs/tuned" --journal "$runs/tune"
step large 120 run --op block_scale_gemm --impl 'torch.bf16,torch.naive,triton.*' --boundary core --case 'm=128000 n=4608 k=7168' --budget 4s --out "$runs/large"
step mtp 70 run --op mla_decode --impl 'torch.sdpa,triton.*,flashmla,flashinfer.*' --case 'batch=64 ctx=3204..4002 heads=16 page=64 kv=bf16 q=4' --budget 8s --out "$runs/mtp"
step doctor 60 doctor --json "$out/doctor.json"
tar -C "$(dirname "$runs")" -czf "$out/runs.tgz" first-contact-runs
exit $failed
