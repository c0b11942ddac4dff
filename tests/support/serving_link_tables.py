"""Small tables for tests of the serving link: every op of a kind takes the same time at every size."""

import csv
import itertools
from pathlib import Path

from harness.serving.link.kernel_times import COMMON, FILES

US = {
    "fp8_block": 10.0, "bfloat16": 8.0, "moe": 100.0, "decode": 20.0, "prefill": 30.0, "bmm": 5.0,
    "reduce": 6.0,
}  # fmt: skip


def written(
    folder: Path, us=US, device="NVIDIA X1", framework="SGLang", version="9", moe=("",), gpus=8
) -> Path:
    """Folder with tables in AIConfigurator's columns; times in us come out in ms.

    moe:  kernels of the MoE, the column `kernel_source`, each next slower by half
    gpus: of the all-reduce
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = {name: [] for name in FILES}

    def add(table, time, **sizes):
        rows[table].append(sizes | {"us": time})

    # None large enough to be held against a peak
    for kind, n, k, m in itertools.product(("fp8_block", "bfloat16"), (128, 65536), (128, 65536), (1, 2048)):
        add("gemm_perf", us[kind], gemm_dtype=kind, m=m, n=n, k=k)
    for distribution, tokens, (nth, kernel) in itertools.product(
        ("balanced", "power_law_1.2"), (1, 32, 64, 16384), enumerate(moe)
    ):
        add("moe_perf", us["moe"] * 1.5**nth, moe_dtype="fp8_block", num_tokens=tokens, hidden_size=7168,
            inter_size=2048, topk=8, num_experts=256, moe_tp_size=8, moe_ep_size=1,
            distribution=distribution, kernel_source=kernel)  # fmt: skip
    for batch, step in itertools.product((1, 1024), (1, 65535)):
        add("generation_mla_perf", us["decode"], kv_cache_dtype="bfloat16", num_heads=16, batch_size=batch,
            isl=1, step=step)  # fmt: skip
    for isl in (1, 32768):
        add("context_mla_perf", us["prefill"], num_heads=16, batch_size=1, isl=isl)
    for op, tokens in itertools.product(("mla_gen_pre", "mla_gen_post") if "bmm" in us else (), (1, 20480)):
        add("mla_bmm_perf", us["bmm"], op_name=op, bmm_dtype="bfloat16", num_tokens=tokens, num_heads=16)
    for size in (128, 536870912):
        graph = {"backend": "sglang_graph"} if framework == "SGLang" else {}
        add("custom_allreduce_perf", us["reduce"], num_gpus=gpus, message_size=size, **graph)
    shared = {"framework": framework, "version": version, "device": device}
    for name, many in ((name, many) for name, many in rows.items() if many):
        columns = [key for key in many[0] if key != "us" and (key != "kernel_source" or moe != ("",))]
        with (folder / f"{name}.csv").open("w", newline="") as file:
            out = csv.DictWriter(file, [*COMMON[:-1], *columns, "latency"], extrasaction="ignore")
            out.writeheader()
            out.writerows([shared | row | {"latency": row["us"] / 1e3} for row in many])
    return folder
