#!/usr/bin/env bash
# All $count $type of this node. Not run yet on a node of several GPUs.
# Ray is started for the campaign, listens on 127.0.0.1 only, and ends with it.
set -euo pipefail
cd $checkout
python3 tools/set_up.py --extra cluster
.venv/bin/python -m harness campaign $campaign --cluster --budget ${minutes}m

# Where steps name their devices, or campaigns share a Ray that stays, it is started with the type first. It
# keeps to 127.0.0.1, too:
#
# export RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0
# export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 RAY_AUTH_MODE=token
# .venv/bin/ray get-auth-token --generate > /dev/null
# .venv/bin/ray start --head --num-gpus=$count --resources='{"device:$type": $count}'
# .venv/bin/python -m harness campaign $campaign --cluster 127.0.0.1:6379 --budget ${minutes}m
# .venv/bin/ray stop
