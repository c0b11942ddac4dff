"""Cases from what engines write. The lines are made up in the words of vLLM 0.33, SGLang 0.5.23 and AITER
e404860; the numbers that follow from them are worked out by hand."""

import json

import pytest

from shapes.case import parse

VLLM = """\
INFO 11-26 17:02:01 [kv_cache_utils.py:1148] GPU KV cache size: 560,000 tokens, Maximum concurrency for 32768
INFO 11-26 17:02:11 [loggers.py:217] Engine 000: Iteration(811): 0 context requests, 0 context tokens, \
64 generation requests, 256 generation tokens, iteration elapsed time: 21.87 ms, GPU KV cache usage: 40.0%
INFO 11-26 17:02:11 [loggers.py:217] Engine 000: Iteration(812): 1 context requests, 2048 context tokens, \
64 generation requests, 256 generation tokens, iteration elapsed time: 41.87 ms, GPU KV cache usage: 40.625%
INFO 11-26 17:02:11 [loggers.py:217] Engine 000: Iteration(813): 0 context requests, 0 context tokens, \
0 generation requests, 8 generation tokens, iteration elapsed time: 41.87 ms (dummy)
"""
STATISTICS = (
    "INFO 11-26 17:02:21 [loggers.py:281] Engine 000: Avg prompt throughput: 4210.0 tokens/s, Avg generation "
    "throughput: 1890.5 tokens/s, Running: 64 reqs, Waiting: 3 reqs, GPU KV cache usage: 40.0%\n"
)
ACCEPTED = (
    "INFO 11-26 17:02:21 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 2.71, Drafted: 198 "
    "tokens, Per-position acceptance rate: 0.919, 0.788, Avg Draft acceptance rate: 85.4%\n"
)
PREFILL = (
    "[2026-11-26 17:02:11 DP0 TP0] Prefill batch, #new-seq: 2, #new-token: 6400, #cached-token: 200, token "
    "usage: 0.31, #running-req: 62, #queue-req: 5, cuda graph: False, input throughput (token/s): 51234.00\n"
)
DECODE = (
    "[2026-11-26 17:02:12 DP0 TP0] Decode batch, #running-req: 62, #token: 223200, token usage: 0.31, {}cuda "
    "graph: True, gen throughput (token/s): 2890.10, #queue-req: 5\n"
)
FILE = "/tmp/aiter_configs/a8w8_blockscale_tuned_gemm.csv"
FP8 = "'torch.float8_e4m3fnuz', 'torch.float8_e4m3fnuz'"
AITER = f"""\
[aiter] shape is M:96, N:2112, K:7168, not found tuned config in {FILE}, will use default config!
[aiter] shape is M:96, N:2112, K:7168, not found tuned config in {FILE}, will use default config!
[aiter] shape is M:64, N:7168, K:2048, found padded_M: 64, N:7168, K:2048 is tuned on cu_num = 304 in \
{FILE} , kernel name is x!
[aiter] shape is M:64, N:384, K:7168 dtype='torch.bfloat16' otype='torch.bfloat16' bias=False, \
scaleAB=False, bpreshuffle=False, not found tuned config in /tmp/bf16_tuned_gemm.csv, will use default config!
[aiter] [fused_moe] using 2stage default for ('gfx942', 304, 128, 7168, 256, 257, 9, \
<ActivationType.Silu: 0>, 'torch.bfloat16', {FP8}, 'QuantType.per_1x128', True, False)
[aiter] [fused_moe] using 1stage (kernelName1='a') for (304, 64, 7168, 2048, 32, 8, \
<ActivationType.Silu: 0>, 'torch.bfloat16', {FP8}, 'QuantType.per_1x128', True, False)
"""
MLA = "batch={} ctx={} heads=16 page=64 kv=bf16"


def trace(*names, dims=(), kernels=("k",), graph=False):
    """A trace as torch.profiler writes it: annotations, operators with dimensions, kernels."""
    events = [{"cat": "user_annotation", "name": name} for name in names]
    events += [{"cat": "cpu_op", "name": op, "args": {"Input Dims": each}} for op, each in dims]
    events += [{"cat": "cpu_op", "name": op + "_inside", "ts": 10 * (len(names) + at) + 1, "dur": 2,
                "args": {"Input Dims": each}} for at, (op, each) in enumerate(dims)]  # fmt: skip
    events += [{"cat": "kernel", "name": name, "pid": 0, "args": {"stream": 7}} for name in kernels]
    events += [{"cat": "cuda_runtime", "name": "cudaGraphLaunch"}] * graph
    timed = [
        {"ph": "X", "ts": at * 10, "dur": 9, "pid": 0, "tid": 1, **event} for at, event in enumerate(events)
    ]
    return json.dumps({"schemaVersion": 1, "traceEvents": timed})


@pytest.fixture
def made(here, tmp_path):
    """Runs `shapes from` on a text; returns the weights by op and sizes, and what is printed."""

    def run(text, *options, name="file.log"):
        (tmp_path / name).write_text(text)
        done = here("shapes", "from", tmp_path / name, "-o", tmp_path / "cases.json", *options)
        if done.returncode:
            assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
            return done.stderr
        cases = json.loads((tmp_path / "cases.json").read_text())["cases"]
        return {(case["op"], case["sizes"]): case["weight"] for case in cases}, " ".join(done.stdout.split())

    return run


def of(cases, op):
    return {sizes: weight for (name, sizes), weight in cases.items() if name == op}


def experts(cases):
    """Tokens -> weight."""
    return {int(parse(sizes)[0]["tokens"]): weight for sizes, weight in of(cases, "fused_moe").items()}


def test_each_iteration_of_vllm_is_a_step(made):
    cases, printed = made(VLLM + STATISTICS)
    assert of(cases, "mla_decode") == {MLA.format(64, 3500) + " q=4": 61}
    assert of(cases, "mha_prefill") == {"batch=1 new=2048 prefix=0 heads=16": 30.5}
    assert experts(cases) == {256: 29, 2304: 29}
    gemm = of(cases, "block_scale_gemm")
    assert gemm["m=256 n=2112 k=7168"] == gemm["m=2304 n=2112 k=7168"] == 30.5
    assert gemm["m=2048 n=4096 k=512"] == 30.5  # kv_b sees the prompt alone
    assert "left out 1 x idle steps of a DP rank (dummy)" in printed and "steps 2 written" in printed
    assert "1 x lines of vLLM's statistics" in printed


def test_steps_of_more_query_tokens_than_mla_decode_takes_are_left_out(made):
    cases, printed = made(VLLM + VLLM.splitlines(keepends=True)[1].replace("256 gen", "640 gen"))
    assert cases == made(VLLM)[0]
    assert "left out 1 x idle steps of a DP rank (dummy) 1 x steps of 10 tokens a decoding request" in printed


def test_all_tokens_of_a_step_count_where_requests_have_different_numbers(made):
    first, step, *_ = VLLM.splitlines(keepends=True)
    cases, printed = made(first + step.replace("256 gen", "160 gen"))
    assert experts(cases) == {160: 58} and of(cases, "mla_decode") == {MLA.format(64, 3500) + " q=2": 61}
    assert "different numbers of query tokens" in printed


def test_drafts_are_what_a_file_leaves_open(made):
    first = VLLM.splitlines(keepends=True)[0]
    assert "as with --drafts 2, not 3" in made(first + STATISTICS + ACCEPTED, "--drafts", 3)
    assert made(first + STATISTICS + ACCEPTED, "--drafts", 2)[0] == made(first + STATISTICS + ACCEPTED)[0]
    assert of(made(first + STATISTICS, "--drafts", 1)[0], "mla_decode") == {MLA.format(64, 3500) + " q=2": 61}
    told = json.dumps(RESULT | {"spec_decode_num_drafts": 10, "spec_decode_draft_tokens": 30})
    assert "as with --drafts 3, not 1" in made(told, "--drafts", 1, name="r.json")
    plain = json.dumps(RESULT | {"spec_decoding": "none"})
    assert "speculation none, as with --drafts 0, not 3" in made(plain, "--drafts", 3, name="r.json")
    assert "which is not of --drafts 0" in made(trace("step[TARGET_VERIFY bs=62]"), "--drafts", 0)
    for text, nothing in ((VLLM, True), (DECODE.format(""), True), (first + STATISTICS, False)):
        assert ("--drafts 3 changed nothing" in made(text, "--drafts", 3)[1]) == nothing


def test_statistics_of_vllm_are_samples(made):
    first = VLLM.splitlines(keepends=True)[0]
    cases, printed = made(first + STATISTICS + ACCEPTED)
    assert of(cases, "mla_decode") == {MLA.format(64, 3500) + " q=3": 61}  # a draft for each position
    assert experts(cases) == {192: 58} and not of(cases, "mha_prefill")
    cases, printed = made(STATISTICS, "--model", "kimi-k2")
    assert "mla_decode has no case" in printed and not of(cases, "mla_decode")
    assert experts(cases) == {64: 60}


def test_batches_of_sglang(made):
    verifying = DECODE.format("accept len: 2.80, accept rate: 0.60, ")
    assert "2.80`, which does not say how many tokens a step verifies: give --drafts N" in made(verifying)
    for too_few in (0, 1):
        assert f"2.80`, which is not of --drafts {too_few}" in made(verifying, "--drafts", too_few)
    cases, _ = made(PREFILL + verifying, "--drafts", 3, "--kv", "fp8")
    calls = 59.512195  # 61 * 40/41
    assert of(cases, "mla_decode") == {"batch=62 ctx=3600 heads=16 page=64 kv=fp8 q=4": calls}
    assert of(cases, "mha_prefill") == {"batch=2 new=3200 prefix=100 heads=16": 1.487805}
    assert experts(cases) == {248: 56.585366, 6400: 1.414634}
    few = verifying.replace("#token: 223200", "#token: 62")  # the tokens of a step are part of a context
    assert of(made(few, "--drafts", 3)[0], "mla_decode") == {MLA.format(62, 4) + " q=4": 61}
    cases, _ = made(DECODE.format(""), "--dp-attention", "--ep", 8)
    assert of(cases, "mla_decode") == {"batch=62 ctx=3600 heads=128 page=64 kv=bf16": 61}


def test_shapes_of_aiter_have_no_counts(made):
    cases, printed = made(AITER)
    assert of(cases, "block_scale_gemm") == {"m=96 n=2112 k=7168": 1, "m=64 n=7168 k=2048": 1}
    sizes = "topk=8 hidden=7168 inter={} shared={} routing=uniform ep={} groups=8 group_topk=4"
    assert of(cases, "fused_moe") == {
        f"tokens=128 experts=256 {sizes.format(256, 1, 1)}": 1,
        f"tokens=64 experts=256 {sizes.format(2048, 0, 8)}": 1,
    }
    assert "weights are unknown" in printed and "left out 1 x GEMM shapes of AITER" in printed
    assert "routed without groups" in made(AITER, "--model", "kimi-k2")[1]


@pytest.mark.parametrize(("names", "wanted"), [
    (["execute_66_context_2(sq2sk1002sqsq2sqsk1002)_generation_32(sq64sk55040sqsq128sqsk110080)",
      "step[EXTEND bs=2 toks=2]"],
     {MLA.format(32, 1720) + " q=2": 61, "batch=2 new=1 prefix=500 heads=16": 61}),
    (["execute_context_1(2048)_generation_63(63)"], {"batch=1 new=2048 prefix=0 heads=16": 61}),
    (["step[VERIFY bs=62 g_sq=248 g_sqsq=992 g_sqsk=892800 g_sk=223200]", "step[DRAFT bs=62]"],
     {MLA.format(62, 3600) + " q=4": 61}),
    (["step[EXTEND bs=2 toks=4000 c_sq=4000 c_sqsq=10000000 c_sqsk=10000000 c_sk=4000]"],
     {"batch=2 new=1000..3000 prefix=0 heads=16": 61}),
    (["prefill[bs=2 tok=14721 ctx=[7803, 6918]]"], {"batch=2 new=6918..7803 prefix=0 heads=16": 61}),
])  # fmt: skip
def test_annotations_of_a_trace(made, names, wanted):
    cases, _ = made(trace(*names))
    assert of(cases, "mla_decode") | of(cases, "mha_prefill") == wanted


def test_dimensions_and_names_in_a_trace(made):
    gemm = [[64, 7168], [2112, 7168], [64, 56], [17, 56], [64, 2112]]
    moe = [[64, 7168], [256, 512, 7168], [256, 7168, 256], [64, 8], [64, 8], [256, 4, 56], [256, 56, 2]]
    dims = [("aiter::gemm_a8w8_blockscale_ck", gemm)] * 2 + [("vllm::fused_moe", moe), ("aten::mm", gemm[:2])]
    name = "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, {}u, 4096u, 512u, 1u, 64u>"
    cases, printed = made(trace(dims=dims, kernels=[name.format(0), name.format(7)]))
    assert of(cases, "block_scale_gemm") == {"m=64 n=2112 k=7168": 2, "m=7 n=4096 k=512": 1}
    assert experts(cases) == {64: 1}
    assert "left out 1 x calls of DeepGEMM with n=4096 k=512, whose name has no M" in printed
    step = "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55040sqsq32sqsk55040)"
    cases, printed = made(trace(step, dims=dims, graph=True))
    assert experts(cases) == {32: 58}
    assert "left out 3 x calls with dimensions beside replayed graphs" in printed
    assert "annotations of steps" in made(trace())
    assert "give --drafts N" in made(trace("step[TARGET_VERIFY bs=62]"))


def test_workloads_of_flashinfer(made):
    def row(name, **axes):
        return json.dumps({"definition": name, "workload": {"uuid": "u", "axes": axes, "inputs": {}}})

    rows = [row("gemm_fp8_nt_groupwise_n1536_k7168", M=64), row("gemm_n2112_k7168", M=64),
            row("moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048", seq_len=9),
            row("mla_paged_decode_h16_ckv512_kpe64_ps64", batch_size=4, num_kv_indices=100)]  # fmt: skip
    cases, printed = made("\n".join(rows), name="gemm.jsonl")
    assert of(cases, "block_scale_gemm") == {"m=64 n=1536 k=7168": 1}
    assert of(cases, "mla_decode") == {"batch=4 ctx=1600 heads=16 kv=bf16": 1}
    assert experts(cases) == {9: 1} and " ep=8 " in str(cases)
    assert "left out 1 x workloads of gemm_n2112_k7168" in printed
    const = json.dumps({"name": "mla_paged_decode_h16_ckv512_kpe64_ps64", "axes": {"head": 16}})
    assert "has the constant axes alone" in made(const, name="mla.json")


RESULT = {
    "date": "20261121-092843", "endpoint_type": "vllm", "backend": "vllm", "label": None, "model_id": "tiny",
    "tokenizer_id": "tiny", "num_prompts": 2, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 2,
    "duration": 0.5, "completed": 2, "failed": 0, "total_input_tokens": 200, "total_output_tokens": 10,
    "request_throughput": 4.0, "output_throughput": 20.0, "total_token_throughput": 420.0,
}  # fmt: skip
TIMES = {
    "input_lens": [100, 100], "output_lens": [5, 5], "start_times": [10.0, 10.0], "ttfts": [0.1, 0.1],
    "itls": [[0.1] * 4] * 2,
}  # fmt: skip


def test_results_of_clients(made, here, tmp_path):
    """Two prompts alone, then four steps that read 101 to 104 tokens, together."""
    cases, printed = made(json.dumps(RESULT | TIMES), name="r.json")
    assert of(cases, "mla_decode") == {MLA.format(2, 102): 40.666667}
    assert of(cases, "mha_prefill") == {"batch=1 new=100 prefix=0 heads=16": 20.333333}
    assert "about 4 decode steps" in printed
    cases, printed = made(json.dumps(RESULT), name="r.json")  # simulated: both prompts in one step
    assert of(cases, "mla_decode") == {MLA.format(2, 102): 48.8}
    assert of(cases, "mha_prefill") == {"batch=2 new=100 prefix=0 heads=16": 12.2}
    predicted = here("serving", "predict", "--cases", tmp_path / "cases.json", "--json", "-").stdout
    assert '"isl": 100' in predicted and '"concurrency": 2' in predicted and '"drafts": 0' in predicted
    untimed = {key: value for key, value in TIMES.items() if key != "ttfts"}
    assert made(json.dumps(RESULT | untimed), name="r.json")[0] == cases
    timed, _ = made(json.dumps(RESULT | TIMES), "--drafts", 3, name="r.json")
    assert of(timed, "mla_decode") == {MLA.format(2, 106) + " q=4": 40.666667}
    of_rank, _ = made(json.dumps(RESULT | TIMES), "--dp-attention", name="r.json")  # of 8, one request of 2
    assert [text.split()[0] for text in of(of_rank, "mla_decode")] == ["batch=1"]
    cases, _ = made(json.dumps(RESULT), "--drafts", 3, name="r.json")
    assert of(cases, "mla_decode") == {MLA.format(2, 106) + " q=4": 48.8} and experts(cases)[8] == 46.4
    predict = "serving", "predict", "--cases", tmp_path / "cases.json", "--json", "-"
    assert '"drafts": 3' in here(*predict).stdout
    for other in (0, 1):
        assert "verify 3 drafts: give --drafts 3" in here(*predict, "--drafts", other).stderr
    assert "only its load" not in here(*predict).stdout
    made(json.dumps(RESULT), "--dp-attention", "--ep", 8, name="r.json")
    assert "is of deepseek-r1 dp8 ep8: only its load and drafts are taken" in here(*predict).stdout
    told = RESULT | {"spec_decode_num_drafts": 10, "spec_decode_draft_tokens": 30}
    assert made(json.dumps(told), name="r.json")[0] == cases
    made(json.dumps(RESULT | TIMES), name="r.json")
    assert "has no lengths and concurrency" in here(*predict).stderr
    assert "no known client" in made('{"a": 1}', name="r.json")


def test_files_of_several_kinds(made, here, tmp_path):
    (tmp_path / "steps.log").write_text(VLLM)
    assert "give them apart" in made(AITER, tmp_path / "steps.log")
    (tmp_path / "link.log").symlink_to(tmp_path / "file.log")
    assert "is given twice" in made(VLLM, tmp_path / "link.log")
    assert "it is empty" in made("")
    assert "no line of vLLM's, SGLang's or AITER's" in made("hello\n")


def test_other_commands_take_the_cases(made, here, tmp_path):
    made(VLLM)
    file = tmp_path / "cases.json"
    done = here("engine", "sglang", "--arch", "gfx942", "--cases", file, "--json", "-")
    shapes = json.loads(done.stdout)["shapes"]
    assert any(shape["op"] == "mla_decode" and shape["sizes"]["q"] == 4 for shape in shapes)
    assert sum(shape["share"] for shape in shapes) == pytest.approx(1, abs=1e-3)
    for other in (("--model", "kimi-k2"), ("--tp", 4), ("--kv", "fp8")):
        words = "engine", "sglang", "--arch", "gfx942", "--cases", file, *other
        assert "has shapes of deepseek-r1 tp8, not of" in here(*words).stderr
    planned = here("campaign", "--cases", file, "--plan", "--devices", "H200=1").stdout
    assert "mla_decode-cases" in planned and "smoke" not in planned
    rows = json.loads(here("list", "cases", "--op", "mla_decode", "--suite", file, "--json", "-").stdout)
    assert [row["weight"] for row in rows] == [1.0]
    rows = '[{"op": "mla_decode", "sizes": "batch=1 ctx=9 heads=16 page=64 kv=bf16", "place": null}]'
    file.write_text(f'{{"deployment": null, "cases": {rows}}}')
    assert here("engine", "sglang", "--arch", "gfx942", "--cases", file, "--tp", 4).returncode == 0
    for q in ("9", "0", "abc", "1..4"):
        file.write_text(f'{{"cases": {rows.replace("heads", f"q={q} heads")}}}')
        for words in (("engine", "sglang", "--arch", "gfx942"), ("serving", "predict")):
            assert "q of mla_decode is 1 to 8" in here(*words, "--cases", file).stderr
    file.write_text('{"cases": [{"op": ["mla_decode"], "sizes": "m=1"}]}')
    assert "no op" in here("engine", "sglang", "--arch", "gfx942", "--cases", file).stderr
    file.write_text('{"cases": [{"op": "no_op", "sizes": "m=1"}]}')
    assert "no op 'no_op'" in here("run", "--op", "mla_decode", "--cases", file).stderr
    for wrong in ('"cases": [{"op": "mla_decode", "sizes": "batch=1 ctx=9", "weight": NaN}]',
                  '"load": {"isl": NaN, "osl": 1, "concurrency": 1, "range_ratio": 1}, '
                  '"cases": [{"op": "mla_decode", "sizes": "batch=1 ctx=9"}]'):  # fmt: skip
        file.write_text(f"{{{wrong}}}")
        done = here("engine", "sglang", "--arch", "H200", "--cases", file)
        assert "weights and load are above 0" in done.stderr


@pytest.mark.parametrize(("text", "op", "wanted"), [
    ("16q4s4k", "mla_decode", [{"batch": "16", "ctx": "4096", "q": "4"}]),
    ("q1s1k heads=8,16", "mla_decode", [{"batch": "1", "ctx": "1024", "heads": n} for n in ("8", "16")]),
    ("2q2k_32q1s1k_q8s9", "mla_decode",
     [{"batch": "32", "ctx": "1024"}, {"batch": "1", "ctx": "9", "q": "8"}]),
    ("2q2k_32q1s1k", "mha_prefill", [{"batch": "2", "new": "2048", "prefix": "0"}]),
    ("q4s4", "mha_prefill", [{"batch": "1", "new": "4", "prefix": "0"}]),
    ("q512s4k", "mha_prefill", [{"batch": "1", "new": "512", "prefix": "3584"}]),
    ("2q2k_32q1s1k", "fused_moe", [{"tokens": "4128"}]),
])  # fmt: skip
def test_a_case_in_the_short_form_of_vllm(text, op, wanted):
    assert parse(text, op) == wanted


@pytest.mark.parametrize("size", ["q=2", "batch=2", "ctx=8192"])
def test_a_short_form_says_its_sizes_alone(size):
    with pytest.raises(ValueError, match=r"stands twice .*: 16q1s4k says it"):
        parse(f"16q1s4k heads=8 {size}", "mla_decode")
