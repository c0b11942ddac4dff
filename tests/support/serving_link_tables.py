"""Small tables for tests of the serving link: every op of a kind takes the same time at every size."""

import csv
from pathlib import Path

from harness.serving.link.tables import COMMON, FILES

US = {
    "fp8_block": 10.0,
    "bfloat16": 8.0,
    "moe": 100.0,
    "decode": 20.0,
    "prefill": 30.0,
    "bmm": 5.0,
    "reduce": 6.0,
}


def written(folder: Path, us=US, device="NVIDIA X1", scale=1.0, framework="SGLang", moe=()) -> Path:
    """Folder with tables in AIConfigurator's columns; times in us come out in ms, times scale.

    moe: kernels of the MoE, the column `kernel_source`, each next slower by half
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = {name: [] for name in FILES}
    for kind in ("fp8_block", "bfloat16"):
        for n in (128, 65536):
            for k in (128, 65536):
                for m in (1, 2048):  # none large enough to be held against a peak
                    rows["gemm_perf"].append({"gemm_dtype": kind, "m": m, "n": n, "k": k, "us": us[kind]})
    for distribution in ("balanced", "power_law_1.2"):
        for tokens in (1, 32, 64, 16384):
            rows["moe_perf"].append(
                {"moe_dtype": "fp8_block", "num_tokens": tokens, "hidden_size": 7168, "inter_size": 2048,
                 "topk": 8, "num_experts": 256, "moe_tp_size": 8, "moe_ep_size": 1,
                 "distribution": distribution, "us": us["moe"]}
            )  # fmt: skip
    for batch in (1, 1024):
        for step in (1, 65535):
            rows["generation_mla_perf"].append(
                {"kv_cache_dtype": "bfloat16", "num_heads": 16, "batch_size": batch, "isl": 1, "step": step,
                 "us": us["decode"]}
            )  # fmt: skip
    for isl in (1, 32768):
        rows["context_mla_perf"].append({"num_heads": 16, "batch_size": 1, "isl": isl, "us": us["prefill"]})
    for op in ("mla_gen_pre", "mla_gen_post"):
        for tokens in (1, 20480):
            rows["mla_bmm_perf"].append(
                {
                    "op_name": op,
                    "bmm_dtype": "bfloat16",
                    "num_tokens": tokens,
                    "num_heads": 16,
                    "us": us["bmm"],
                }
            )
    for size in (128, 536870912):
        rows["custom_allreduce_perf"].append(
            {"num_gpus": 8, "message_size": size, "us": us["reduce"]}
            | ({"backend": "sglang_graph"} if framework == "SGLang" else {})
        )
    for name, many in rows.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            kernels = moe if name == "moe_perf" else ()
            own = [key for key in many[0] if key != "us"] + (["kernel_source"] if kernels else [])
            out = csv.DictWriter(file, [*COMMON[:-1], *own, "latency"])
            out.writeheader()
            shared = {"framework": framework, "version": "9", "device": device}
            for row in many:
                latency = row.pop("us") / 1e3 * scale
                for nth, kernel in enumerate(kernels):
                    slower = latency * 1.5**nth
                    out.writerow(shared | {"latency": slower, "kernel_source": kernel} | row)
                if not kernels:
                    out.writerow(shared | {"latency": latency} | row)
    return folder
