"""Small tables for tests of the serving link: every op of a kind takes the same time at every size."""

import csv
from pathlib import Path

from harness.serving.link.times.tables import COMMON, FILES

US = {
    "fp8_block": 10.0,
    "bfloat16": 8.0,
    "moe": 100.0,
    "decode": 20.0,
    "prefill": 30.0,
    "bmm": 5.0,
    "reduce": 6.0,
}


def written(
    folder: Path, us=US, device="NVIDIA X1", scale=1.0, framework="SGLang", version="9", moe=(), gpus=8
) -> Path:
    """Folder with tables in AIConfigurator's columns; times in us come out in ms, times scale.

    moe:  kernels of the MoE, the column `kernel_source`, each next slower by half
    gpus: of the all-reduce
    Where `us` has "decode module" and "prefill module", tables of these stand in place of attention's own.
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
    if "decode module" in us:
        layer = {"gemm_type": "fp8_block", "mla_dtype": "bfloat16"}
        for phase, single in (("generation", "decode"), ("context", "prefill")):
            many = rows.pop(f"{phase}_mla_perf")
            rows[f"mla_{phase}_module_perf"] = [
                {"kv_cache_dtype": "bfloat16", "step": 0} | row | layer | {"us": us[f"{single} module"]}
                for row in many
            ]
    for op in ("mla_gen_pre", "mla_gen_post") if "bmm" in us else ():
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
            {"num_gpus": gpus, "message_size": size, "us": us["reduce"]}
            | ({"backend": "sglang_graph"} if framework == "SGLang" else {})
        )
    for name, many in ((name, many) for name, many in rows.items() if many):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            kernels = moe if name == "moe_perf" else ()
            own = [key for key in many[0] if key != "us"] + (["kernel_source"] if kernels else [])
            out = csv.DictWriter(file, [*COMMON[:-1], *own, "latency"])
            out.writeheader()
            shared = {"framework": framework, "version": version, "device": device}
            for row in many:
                latency = row.pop("us") / 1e3 * scale
                for nth, kernel in enumerate(kernels):
                    slower = latency * 1.5**nth
                    out.writerow(shared | {"latency": slower, "kernel_source": kernel} | row)
                if not kernels:
                    out.writerow(shared | {"latency": latency} | row)
    return folder
