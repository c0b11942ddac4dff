"""Steps that verify drafts: their kernels, what a request gets of them, and results that tell it."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from harness.cli.serving import serving
from harness.errors import UsageError
from harness.paths import ROOT
from harness.serving import load as load_runs
from harness.serving.ab import expected as of_ab
from harness.serving.ab.plan import read_plan
from harness.serving.ledger import KernelChange
from harness.serving.link.calibration import PRIOR
from harness.serving.link.kernel_times import MeasuredTimes, Surface, read_tables
from harness.serving.link.load import Load
from harness.serving.link.model import System, link, uncalibrated
from harness.serving.link.predictions import outlook, predict
from harness.serving.link.structure import StepLoad, query_token_factor
from harness.serving.names import data_sheet
from tests.support.serving_files import SGLANG_ROW, VLLM_ROW, changed
from tests.support.serving_link_tables import written

ONE = Load(1024, 1024, 1)


def test_a_step_is_verification_and_the_passes_of_the_mtp_layer(tmp_path):
    """8 requests, 3 drafts: 61 layers at 32 tokens, then the MTP layer at 32, 8 and 8. Of the tables, FP8
    products take 10 us, others 8, experts 100, attention 20, absorbed ones 5 and all-reduces 6."""
    model = uncalibrated(System(drafts=3, accept_length=2.6), read_tables(written(tmp_path)))
    hit = 256 * (1 - (1 - 8 / 256) ** 32), 256 * (1 - (1 - 8 / 256) ** 8)
    experts, of_8 = (100 * (1 + 1 / each) for each in hit)  # with the shared one: a tile of 64 rows more
    attention = 3 * 10 + 2 * 5 + 20 + 2 * 6
    glue, glue_of_8 = (7 * 2.0 + tokens * 200e3 / 4000e3 for tokens in (32, 8))
    verify = 61 * (attention + glue) + 3 * 2 * 10 + 58 * (8 + experts) + 8
    passes = 3 * (attention + 8 + 8 + 8 * 2 * 7168 / 16160) + glue + experts + 2 * (glue_of_8 + of_8)
    calls = {term.name: term.calls for term in model.structure.decode}
    assert (calls["mla_decode"], calls["fused_moe"], calls["all_reduce"]) == (64, 61, 128)
    step = StepLoad(32, 8, 1500, 4)
    us = sum(term.calls * term.time(step) for term in model.structure.decode)
    assert us == pytest.approx(verify + passes)
    served = model.served(ONE)
    a, k, _ = PRIOR.tpot.mean
    assert served.decode_ms == pytest.approx(a + k * model.sums(ONE).decode.ms(1))
    assert served.tpot.value == pytest.approx(served.decode_ms / 2.6)


@pytest.mark.parametrize(("heads", "q", "timed", "kv", "ratio"), [
    (16, 4, 1, "bfloat16", 1.0), (16, 1, 4, "fp8", 1.0),  # 64 rows are one tile
    (128, 4, 1, "bfloat16", 4.0), (128, 1, 4, "bfloat16", 0.25),  # bound by its products
])  # fmt: skip
def test_what_query_tokens_cost_attention(heads, q, timed, kv, ratio):
    load = StepLoad(q * 64, 64, 30_000, q)
    assert query_token_factor(data_sheet("h200"), load, heads, kv, timed) == pytest.approx(ratio, rel=0.02)


def test_own_times_of_so_many_query_tokens_are_taken():
    known = {1: 40.0, 4: 70.0}
    surfaces = {("mla_decode", (16, "bf16", q)): Surface({(64.0, 1500.0): us}) for q, us in known.items()}
    step = StepLoad(256, 64, 1500, 4)

    def attention(known):
        times = MeasuredTimes("NVIDIA H200", "runs", {key: surfaces[key] for key in known})
        terms = uncalibrated(System(drafts=3, accept_length=2.6), own=times).structure.decode
        (term,) = (term for term in terms if term.op == "mla_decode")
        return term.calls * term.time(step)

    both, of_one = [*surfaces], [*surfaces][:1]
    assert attention(both) == pytest.approx(62 * 70.0 + 2 * 70.0)  # one query token in the same tile
    assert attention(of_one) == pytest.approx(64 * 40.0)


def test_acceptance_cancels_in_what_a_kernel_is_worth_and_drafts_do_not():
    """One request waits for no other: its TPOT is a step over the accept length."""
    faster = [KernelChange(op="fused_moe", factor=2.0)]

    def share(**system):
        model = uncalibrated(System(**system))
        found = predict(model, ONE, faster)[0]
        (experts,) = (each for each in outlook(model, ONE).shares if each.name == "fused_moe")
        assert found.change / found.before == pytest.approx(-experts.share / 2)
        return experts.share

    low, high = (share(drafts=3, accept_length=length) for length in (2.0, 3.0))
    assert low == pytest.approx(high) and low > 1.2 * share()


def test_an_unknown_accept_length_widens_the_interval():
    known, unknown = (uncalibrated(System(drafts=3, accept_length=given)) for given in (7.2**0.5, None))
    assert unknown.accept_length == pytest.approx((2.4 * 3.0) ** 0.5)
    assert "accept length unknown: 2.4 to 3, as published with --drafts 3" in " ".join(unknown.notes)
    of_known, of_unknown = known.served(ONE).tpot, unknown.served(ONE).tpot
    assert of_unknown.value == pytest.approx(of_known.value) and of_unknown.share > of_known.share + 0.005
    assert unknown.constants.tpot_scatter > known.constants.tpot_scatter
    saved = [KernelChange(op="fused_moe", saved_us=20.0)]
    less, more = (predict(each, ONE, saved)[0] for each in (known, unknown))
    assert more.change == pytest.approx(less.change) and more.low < less.low and more.high > less.high


def test_drafts_change_the_cache_of_a_token_and_no_wait_for_a_step():
    plain, verifying = (uncalibrated(System(drafts=drafts, accept_length=2.0 * bool(drafts) or None))
                        for drafts in (0, 3))  # fmt: skip
    grown = verifying.structure.kv_bytes / plain.structure.kv_bytes
    assert grown == pytest.approx(62 / 61)  # of the MTP layer, too
    # A prompt waits for whole steps, however many tokens those give.
    waits = [uncalibrated(System(drafts=3, accept_length=length)).served(replace(ONE, concurrency=8,
             recv_interval=100)).ttft_mean.value for length in (1.5, 3.0)]  # fmt: skip
    assert waits[0] == pytest.approx(waits[1], rel=0.1)


# What results tell

INFERENCEX = {"spec_decoding": "mtp"}
COUNTERS = {"spec_decode_draft_tokens": 3000, "spec_decode_num_drafts": 1000}


@pytest.mark.parametrize(("content", "drafts", "length"), [
    (SGLANG_ROW | {"accept_length": 2.7, "server_info": {"speculative_algorithm": "EAGLE",
                   "speculative_num_steps": 2, "speculative_num_draft_tokens": 3}}, 2, 2.7),
    (VLLM_ROW | COUNTERS | {"spec_decode_acceptance_length": 2.4}, 3, 2.4),
    (VLLM_ROW | COUNTERS | {"spec_decode_acceptance_rate": 60.0}, 3, 2.8),  # per cent of the drafts
    (VLLM_ROW | COUNTERS | {"spec_decode_accepted_tokens": 1400}, 3, 2.4),
    (VLLM_ROW | COUNTERS | {"spec_decode_acceptance_rate": 0.0}, 3, 1.0),
    (VLLM_ROW | {"spec_decode_acceptance_rate": 60.0}, None, None),
    (SGLANG_ROW | {"server_info": {"speculative_algorithm": "EAGLE", "speculative_num_steps": 2,
                   "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 4}}, None, None),  # a tree
    (VLLM_ROW | {"speculative_config": '{"method": "mtp", "num_speculative_tokens": 1}'}, 1, None),
    (VLLM_ROW | {"num_speculative_tokens": "2"}, 2, None),
    (changed("trtllm_bench.json", {"decoding_stats": {"global_acceptance_rate": 2.2}}), None, 2.2),
    (VLLM_ROW | INFERENCEX, None, None),
])  # fmt: skip
def test_drafts_and_accept_length_of_a_result(tmp_path, content, drafts, length):
    (tmp_path / "run.json").write_text(json.dumps(content))
    (run,) = load_runs(tmp_path / "run.json")
    assert run.speculation not in ("", "none") and run.drafts == drafts
    assert run.accept_length == (length and pytest.approx(length))


def test_none_are_none_whatever_points_tell(tmp_path):
    with pytest.raises(UsageError, match="speculative decoding 3 tokens drafted, not none"):
        linked(tmp_path, COUNTERS, drafts=0)


def linked(tmp_path, changes, **system):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(VLLM_ROW | changes))
    return link(System(calibrate=(str(path),), **system))


def test_points_tell_drafts_and_accept_length_where_the_user_does_not(tmp_path):
    told = COUNTERS | {"spec_decode_acceptance_length": 2.4}
    found = linked(tmp_path, told)
    assert (found.system.drafts, found.accept_length) == (3, 2.4)
    assert {"the points tell --drafts 3"} < set(found.notes)
    assert linked(tmp_path, told, accept_length=2.0).accept_length == 2.0
    unknown = linked(tmp_path, INFERENCEX, drafts=3)
    assert any("the points do not tell it" in note for note in unknown.notes)
    # What a point shows of its accept length is taken over, so that its own TPOT comes out.
    slow = linked(tmp_path, INFERENCEX | {"mean_tpot_ms": 2 * VLLM_ROW["mean_tpot_ms"]}, drafts=3)
    of_slow, of_unknown = (each.served(replace(ONE, concurrency=16)).tpot for each in (slow, unknown))
    assert of_slow.value / of_unknown.value > 1.7
    without = linked(tmp_path, {"mean_ttft_ms": None, "median_ttft_ms": None} | INFERENCEX, drafts=3)
    assert without.constants.ttft.mean == pytest.approx(PRIOR.ttft.mean)


@pytest.mark.parametrize(("changes", "system", "says"), [
    (INFERENCEX, {}, r"speculative decoding mtp, not none; --drafts N says how many"),
    (COUNTERS | INFERENCEX, {"drafts": 2}, "speculative decoding 3 tokens drafted, not 2 tokens drafted"),
    ({"spec_decoding": "none"}, {"drafts": 3}, "speculative decoding none, not 3 tokens drafted"),
    (INFERENCEX | {"spec_decode_acceptance_length": 4.5}, {"drafts": 3, "accept_length": 3},
     "accept length 4.5 with --drafts 3"),
])  # fmt: skip
def test_points_of_another_speculation_are_refused(tmp_path, changes, system, says):
    with pytest.raises(UsageError, match=says):
        linked(tmp_path, changes, **system)


@pytest.mark.parametrize(("words", "says"), [
    (("--accept-length", "2.6"), "--accept-length needs --drafts N"),
    (("--drafts", "3", "--accept-length", "4.1"), "accept length 4.1: steps with --drafts 3 give 1 to 4"),
    (("--drafts", "5"), "no accept length of so many is published; give --accept-length"),
])  # fmt: skip
def test_a_mistake_of_drafts_is_one_line(words, says):
    done = CliRunner().invoke(serving, ["predict", *words])
    assert isinstance(done.exception, UsageError) and says in str(done.exception)


def test_a_folder_is_predicted_if_it_has_the_layers_of_r1(tmp_path):
    """Whatever its name is."""
    config = json.loads((ROOT / "shapes" / "data" / "deepseek-r1.json").read_text(encoding="utf-8"))["config"]
    for name, changes, ok in (("mine", {}, True), ("deepseek-r1", {"num_hidden_layers": 30}, False)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
        words = ["predict", "--model", str(folder), "--hardware", "H200", "--concurrency", "4"]
        done = CliRunner().invoke(serving, words)
        assert (done.exit_code == 0) == ok
        assert ok or "num_hidden_layers 30" in f"{done.exception} {done.output}"


def test_an_ab_s_commands_say_how_many_tokens_they_draft():
    def drafts(flags):
        client = "bench {url} --seed {seed} --out {result}"
        plan = {"launch": f"serve --port {{port}} --tp 8 {flags}", "client": client, "pairs": 2}
        arms = {"a": {}, "b": {"env": {"X": "1"}}}
        return of_ab._deployment(read_plan(plan | {"arms": arms}, "a test"))["drafts"]

    assert drafts("") == 0
    assert drafts("--speculative-algorithm EAGLE --speculative-num-draft-tokens 4") == 3
    assert drafts("--speculative-config.num_speculative_tokens 2") == 2
    with pytest.raises(UsageError, match="does not say how many tokens a step drafts"):
        drafts("--speculative-algorithm EAGLE")


def test_a_ledger_has_the_command_of_a_prediction_with_drafts(here, tmp_path):
    words = ("what-if", "mla_decode=2x", "--drafts", "3", "--accept-length", "2.5", "--concurrency", "4")
    assert here("serving", *words, "--ledger", tmp_path / "ledger.jsonl").returncode == 0
    entries = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert "--drafts 3 --accept-length 2.5 --concurrency 4" in entries[1]["command"]
