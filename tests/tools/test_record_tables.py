"""Extracts of tables: the same look-ups as with the whole library, the same bytes each time."""

import json
import zipfile

from kernels.tables.aiter import AiterTables
from kernels.tables.files import Files
from kernels.tuning import Target
from tools import record_tables

HEADER = "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw"
# The first row is of the lm_head, which is bf16.
ROWS = ("gfx942,304,16,129280,7168,ck,1,0,5.0,other,1,1", "gfx942,304,16,2112,7168,ck,1,0,6.5,ours,1,1")


def test_rows_keep_their_lines(tmp_path):
    configs = tmp_path / "aiter" / "configs"
    configs.mkdir(parents=True)
    (configs / "a8w8_blockscale_tuned_gemm.csv").write_text("\n".join((HEADER, *ROWS)) + "\n")
    (configs / "a8w8_blockscale_bpreshuffle_tuned_gemm.csv").write_text(f"{HEADER}\n{ROWS[0]}\n")
    (configs / "tuned_fmoe.csv").write_text("cu_num,token,model_dim\n304,1,4096\n304,1,7168\n")
    whole = Files("aiter", tmp_path)
    places = [tmp_path / "first.zip", tmp_path / "second.zip"]
    for place in places:
        record_tables.write(place, "aiter", whole, "commit 1234567, 2026-08-22")
    assert places[0].read_bytes() == places[1].read_bytes()
    extract = Files("aiter", places[0])
    assert extract.version == "commit 1234567, 2026-08-22"
    assert "129280" not in extract.text("aiter/configs/a8w8_blockscale_tuned_gemm.csv")
    assert extract.text("aiter/configs/tuned_fmoe.csv") == "cu_num,token,model_dim,_line\n304,1,7168,3\n"
    target = Target("rocm", "gfx942", 304, "AMD Instinct MI300X")
    found = AiterTables(extract).gemm(target, 3, 2112, 7168)
    assert found.entry.line == 3 and found == AiterTables(whole).gemm(target, 3, 2112, 7168)
    assert "MIT" in zipfile.ZipFile(places[0]).read("NOTICE").decode()


def test_configurations_of_our_shapes(tmp_path):
    folder = tmp_path / "vllm" / "model_executor" / "layers" / "fused_moe" / "configs"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("")
    ending = "device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    ours, others = (
        [f"E=256,N=512,{ending}", f"E=33,N=2048,{ending}"],
        [f"E=64,N=512,{ending}", "E=256,N=512.json"],
    )
    for name in ours + others:
        (folder / name).write_text(json.dumps({"1": {}}))
    record_tables.write(tmp_path / "vllm.zip", "vllm", Files("vllm", tmp_path), "0.33.0")
    names = {name.rpartition("/")[2] for name in zipfile.ZipFile(tmp_path / "vllm.zip").namelist()}
    assert names == {*ours, "NOTICE", "_version.py"}
