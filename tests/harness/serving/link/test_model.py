"""The model as a whole: least squares, the closed loop, changes of kernels, validation. Numbers by hand."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import kernels
from harness.cli.serving import serving
from harness.cli.serving.predict import parse_change
from harness.errors import HarnessError, UsageError
from harness.serving.ledger import KernelChange, read
from harness.serving.link import load as closed_loop
from harness.serving.link.calibration import (
    PRIOR,
    SCATTER_POINTS,
    T90,
    TPOT_SCATTER,
    Constants,
    Equations,
    ModelledPoint,
    Normal,
    Point,
    Value,
    learnt,
    tpot_equations,
    ttft_equations,
)
from harness.serving.link.kernel_times import read_tables
from harness.serving.link.load import DRAIN, KernelSums, Load, Phase, features, settled_features
from harness.serving.link.model import System, link, uncalibrated
from harness.serving.link.predictions import needs, outlook, predict
from harness.serving.link.validation import (
    ON_SHORTEST,
    ON_TWO,
    UNCALIBRATED,
    Validation,
    _learnt,
    stored_series,
    unvalidated,
    validated,
)
from harness.serving.names import data_sheet
from tests.support.serving_link_tables import US, written

LOAD = Load(isl=1024, osl=1024, concurrency=32)
ONE = Load(isl=100, osl=1000, concurrency=1)


def run(*words):
    return CliRunner().invoke(serving, list(words))


@pytest.fixture(scope="module")
def h200():
    return link()


@pytest.fixture
def tiny(tmp_path):
    return uncalibrated(System(), read_tables(written(tmp_path)))


# Least squares: with no point the prior, with many the fit, in between by how sure each is


def test_without_points_they_are_the_prior_and_many_points_fit_them():
    prior = Normal.from_deviations((1.0, 1.0), (0.5, 0.5), (0.3,))
    assert prior.covariance == pytest.approx(np.array([[0.25, 0.075], [0.075, 0.25]]))
    none = Equations(np.zeros((0, 2)), np.zeros(0), 0.05)
    assert none.fitted(prior) is prior
    x = np.array([[1.0, 10.0], [1.0, 40.0]])
    exact = Equations(np.tile(x, (500, 1)), np.tile(x @ [3.0, 0.7], 500), 0.01)
    assert exact.fitted(prior).mean == pytest.approx([3.0, 0.7], rel=0.01)
    # One value of one constant: the mean weighted by precisions, 1 / 0.5^2 and 1 / (0.1 * 2)^2.
    one = Equations(np.array([[1.0]]), np.array([2.0]), 0.1).fitted(
        Normal.from_deviations((1.0,), (0.5,), ())
    )
    assert one.mean == pytest.approx([(1.0 * 4 + 2.0 * 25) / 29]) and one.deviation == pytest.approx(29**-0.5)


def test_a_scatter_is_that_of_residuals_beside_what_is_assumed():
    rows = Equations(np.ones((4, 1)), np.array([1.0, 1.0, 0.8, 1.25]), 0.1)
    off = [0.0, 0.0, 0.25, -0.2]
    found = rows.scatter_about(Normal.from_deviations((1.0,), (1.0,), ()))
    assert found == pytest.approx(math.sqrt((6 * 0.1**2 + sum(x * x for x in off)) / (6 + 2)))


def test_a_prior_is_learnt_from_systems_of_which_each_counts_once():
    """Systems of known constants: their mean and spread; two servers of one system count as one."""

    def rows(value: float) -> Equations:
        return Equations(np.ones((400, 1)), np.full(400, value), 0.01)

    begun = Normal.from_deviations((5.0,), (3.0,), ())
    found = learnt(begun, {"a": [rows(1.0)], "b": [rows(2.0), rows(4.0)]}, start_weight=0)
    assert found.mean == pytest.approx([2.0], rel=0.01)
    assert found.deviation == pytest.approx([math.sqrt(0.5 * 1 + 0.25 * 0 + 0.25 * 4)], rel=0.01)
    held = learnt(begun, {"a": [rows(1.0)], "b": [rows(3.0)]}, start_weight=2)
    assert held.deviation == pytest.approx([math.sqrt((2 * 1 + 2 * 9) / 4)], rel=0.02)


def test_an_interval_is_by_a_factor():
    value = Value.from_share(10.0, 0.1)
    assert (value.low, value.high) == pytest.approx((10 / math.exp(T90 * 0.1), 10 * math.exp(T90 * 0.1)))
    assert value.share == pytest.approx(0.1)


# The closed loop


def sums(load: Load, capacity: float = math.inf, cold: float = 1.0) -> KernelSums:
    """A step of b requests takes 5 + 0.2 b ms, a prefill of n prompts 15 + 10 n."""
    grid = np.geomspace(1, 64, 400)
    decode, prefill = (Phase((), grid, 1e3 * (a + b * grid)[None, :]) for a, b in ((5.0, 0.2), (15.0, 10.0)))
    return KernelSums(load, decode, prefill, capacity, cold)


def test_what_tpot_and_ttft_are_made_of():
    load = Load(1000, 401, 8, 0.5, prefill_tokens=1500, waves=5)  # means 750 in, 300.75 out; 2 a prefill
    found = features(sums(load), tpot_ms=10.0, ttft_ms=100.0)
    n = 300.75 - 1
    batch = 8 * n * 10 / (100 + n * 10)
    assert found.batch == pytest.approx(batch)
    stall = batch / n * 7 / 8 * 25
    assert found.tpot == pytest.approx([1, 5 + 0.2 * batch, stall], rel=1e-3)
    rate = batch / (n * 10)
    residual = 7 / 8 * min(rate * 25, 1) * 25 / 2
    waiting = 7 / 8 * 10 / 2
    together = 1 + rate * 7 / 8 * (waiting + residual)
    assert found.waiting_ms == pytest.approx(waiting)
    assert found.steady == pytest.approx([1, 15 + 10 * together + residual, 0, 0], rel=1e-3)
    wave = 35 * (1 + 2 + 3 + 4) / 4  # eight prompts, two by two
    first = np.array([1, wave, 1, (8 + 1) / 2])
    assert found.mean == pytest.approx((first + 4 * found.steady) / 5, rel=1e-3)
    assert found.mean_waiting_ms == pytest.approx(0.8 * waiting)
    warm = features(sums(load, cold=0.0), 10.0, 100.0)
    assert warm.mean[2:] == pytest.approx([0, 0]) and warm.mean[:2] == pytest.approx(found.mean[:2])
    alone = features(sums(replace(load, concurrency=1)), 10.0, 100.0)
    assert alone.tpot[2] == alone.waiting_ms == 0.0
    slow = features(sums(replace(load, recv_interval=10)), 10.0, 100.0)
    assert slow.waiting_ms == pytest.approx(10 * waiting)


def test_what_memory_does_not_hold_waits_and_requests_of_one_length_are_in_step():
    load = Load(1000, 401, 8, 0.5)
    found = features(sums(load, capacity=3.0), 10.0, 100.0)
    assert found.batch == 3.0
    assert found.queue_ms == pytest.approx(8 / (3 / (299.75 * 10)) - 299.75 * 10 - 100)  # Little's law
    assert found.mean_waiting_ms == pytest.approx(0.9 * found.waiting_ms + found.queue_ms / 20)
    step = features(sums(Load(1000, 401, 8, 1.0, prefill_tokens=2000)), 10.0, 100.0)
    assert step.batch == 8 and step.steady[1] == pytest.approx(35 * 2.5, rel=1e-3)
    assert step.tpot[2] == pytest.approx(35 * (4 - 2.5) / 400, rel=1e-3)
    assert (step.waiting_ms, Load(1000, 401, 8, 1.0).output_tok_s(1000.0)) == (0.0, pytest.approx(8 * 401))
    assert load.output_tok_s(1000.0) == pytest.approx(8 * 300.75 * 10 / (10 + DRAIN))


@pytest.mark.parametrize(("engine", "warm", "isl", "share"), [
    ("sglang", False, 8192, 1.0), ("sglang", True, 8192, 0.0), ("trtllm", False, 8192, 0.1),
    ("trtllm", False, 1024, 1 - 0.9 * 1024 / 8192), ("trtllm", False, 65536, 0.0),
])  # fmt: skip
def test_how_cold_a_first_wave_is(engine, warm, isl, share):
    model = link(System(engine=engine, warm=warm))
    assert model.sums(Load(isl, 1024, 4)).cold == pytest.approx(share)


@pytest.mark.parametrize("load", [
    LOAD, ONE, Load(8192, 1024, 64), Load(64, 8192, 512), Load(8192, 2, 64), Load(100, 100, 8, 1.0),
    Load(32768, 64, 256, 0.0), Load(1024, 1024, 64, waves=1), Load(8192, 1024, 128),
])  # fmt: skip
def test_the_loop_settles_where_it_reproduces_itself(h200, load):
    served = h200.served(load)
    again = features(h200.sums(load), served.tpot.value, served.ttft.value - served.features.queue_ms)
    assert again.batch == pytest.approx(served.features.batch, rel=1e-4)
    assert served.tpot.low < served.tpot.value < served.tpot.high
    # Little's law: as many are in flight as the client allows, those that wait for memory among them.
    rate = served.features.batch / ((load.mean_osl - 1) * served.tpot.value)
    if load.range_ratio < 1:
        in_flight = rate * (served.ttft.value + (load.mean_osl - 1) * served.tpot.value)
        assert in_flight == pytest.approx(load.concurrency, rel=1e-3)


def test_what_the_cache_holds_and_how_sure_a_throughput_is(h200):
    load = Load(8192, 1024, 128)
    sums, memory = h200.sums(load), data_sheet("h200")["memory_gib"] * 2**30 / 1e9
    room = 0.82 * memory - h200.structure.weights_gb - 3
    assert sums.capacity == pytest.approx(room / (61 * 576 * 2 * load.mean_context / 1e9))
    assert h200.served(load).features.batch == sums.capacity
    served = h200.served(LOAD)
    decoding, ttft = (LOAD.mean_osl - 1) * served.tpot.value, served.ttft_mean.value
    both = math.hypot(served.tpot.share * decoding, served.ttft_mean.share * ttft)
    assert served.output.share == pytest.approx(both / (decoding + ttft))


def test_what_does_not_settle_is_said_in_one_line(monkeypatch):
    turn = iter(range(10**6))
    plain = closed_loop.features

    def jumping(*given):
        found = plain(*given)
        return replace(found, tpot=found.tpot * (1 + next(turn) % 2))

    monkeypatch.setattr(closed_loop, "features", jumping)
    with pytest.raises(HarnessError, match=r"^[^\n]*concurrency 32 does not settle: after \d+ rounds"):
        settled_features(sums(LOAD), np.array([0, 1, 1]), np.zeros(4))


# Calibration


def points(constants: Constants, loads: list[Load], model) -> list[ModelledPoint]:
    """As a server of these constants would measure them."""
    found = []
    for load in loads:
        served = constants.served(model.sums(load))
        point = Point(load, served.tpot.value, served.ttft_mean.value, served.ttft.value)
        found.append(ModelledPoint(point, model.sums(load)))
    return found


def test_constants_are_found_again_and_two_points_are_enough(h200):
    planted = replace(
        PRIOR,
        tpot=Normal(np.array([6.0, 0.6, 1.1]), PRIOR.tpot.covariance),
        ttft=Normal(np.array([80.0, 1.4, 600.0, 60.0]), PRIOR.ttft.covariance),
    )
    short = [Load(1024, 1024, c) for c in (4, 8, 16, 32, 64)]
    far = [Load(8192, 1024, 32), Load(1024, 8192, 32)]
    for loads in (short, [short[0], short[-1]]):
        found = PRIOR.fitted(points(planted, loads, h200))
        for load in far:
            wanted, got = (each.served(h200.sums(load)) for each in (planted, found))
            assert got.tpot.value == pytest.approx(wanted.tpot.value, rel=0.03)
            assert got.ttft_mean.value == pytest.approx(wanted.ttft_mean.value, rel=0.25)
            assert got.tpot.share < 0.6 * PRIOR.served(h200.sums(load)).tpot.share
    exact = PRIOR.fitted(points(planted, short, h200))
    expected = TPOT_SCATTER * math.sqrt(SCATTER_POINTS / (SCATTER_POINTS + 3))
    assert exact.tpot_scatter == pytest.approx(expected, rel=0.03)


def test_what_a_point_tells_of_ttft(h200):
    [whole] = points(PRIOR, [LOAD], h200)
    assert len(ttft_equations([whole]).y) == 2 and len(tpot_equations([whole]).y) == 1
    for lacking in ({"ttft_median_ms": None}, {"ttft_ms": None}):
        assert len(ttft_equations([replace(whole, point=replace(whole.point, **lacking))]).y) == 1
    two = replace(LOAD, waves=2)
    short = replace(whole, point=replace(whole.point, load=two), sums=h200.sums(two))
    assert len(ttft_equations([short]).y) == 1  # half of its requests are of the first wave
    late = replace(whole.point, tpot_ms=25.0, ttft_ms=1300.0, ttft_median_ms=1300.0)
    waits = replace(whole, point=late, sums=replace(whole.sums, capacity=30.0))
    assert 0 < waits.features.queue_ms < 1300
    assert not len(ttft_equations([waits]).y)


# Changes of kernels


@pytest.mark.parametrize(("text", "saved_us", "in_server"), [
    ("mla_decode=2x", 61 * US["decode"] / 2, True),
    ("block_scale_gemm:qkv_a@decode=saved:4us", 61 * 4, False),
    ("block_scale_gemm:qkv_a@decode=saved:6us", 61 * 6, False),  # of 10 alone, of 7.5 in the server
    ("absorbed_bmm@decode=saved:1us", 2 * 61 * 1, False),
    *[(f"block_scale_gemm:qkv_a@decode=saved:{us}us", 61 * us, False) for us in (7, 9.1, 100)],
])  # fmt: skip
def test_a_change_is_what_its_calls_save_in_the_server(tiny, text, saved_us, in_server):
    """A factor's times are the tables', so that k is theirs; a saving is of the server's own calls."""
    record, *_, of_prefill = predict(tiny, ONE, [parse_change(text)])
    assert of_prefill.change == 0.0  # attention and absorbed products are of decode, the others are @decode
    k = tiny.in_server["decode"]
    assert -record.change == pytest.approx((k if in_server else 1.0) * saved_us / 1e3, rel=1e-6)
    plain = tiny.served(ONE).tpot.value
    slower = any("the server before was slower" in line for line in record.assumptions)
    assert (record.after if slower else record.before) == pytest.approx(plain)
    assert slower == ("saved" in text and saved_us > 61 * 9 * k)


def test_of_a_prompt_in_chunks_attention_is_the_whole_s_and_all_else_is_called_for_each(tiny):
    whole, chunked, chunk = (
        tiny.sums(Load(isl, 100, 1, 1.0, prefill_tokens=most)).prefill
        for isl, most in ((4096, 4096), (4096, 1024), (1024, 1024))
    )
    for op, wanted in (("mha_prefill", whole.us), ("block_scale_gemm", 4 * chunk.us)):
        rows = whole.indices(op)
        assert rows and chunked.us[rows, 0] == pytest.approx(wanted[rows, 0])


def test_quantities_and_interval_of_a_change(h200):
    changes = [parse_change("fused_moe=1.3x(1.2..1.4)"), parse_change("mla_decode=2x")]
    records = predict(h200, LOAD, changes)
    units = {record.quantity: record.unit for record in records}
    times = ("tpot", "ttft", "decode_step", "prefill")
    assert units == dict.fromkeys(times, "ms") | {"output_throughput": "tok/s"}
    one = records[0]
    assert one.low < one.change < one.high < 0 and one.after - one.before == pytest.approx(one.change)
    mla, moe, *of_moe = (
        predict(h200, LOAD, [parse_change(text)])[0].change
        for text in ("mla_decode=2x", "fused_moe=1.3x", "fused_moe=1.2x", "fused_moe=1.4x")
    )
    k = float(PRIOR.tpot.deviation[1] / PRIOR.tpot.mean[1])
    for end, of_change, sign in ((one.low, of_moe[1], 1), (one.high, of_moe[0], -1)):
        # By k, by what the server makes of a saving and by tables' times, a deviation of 0.1 each.
        factors = [((moe + mla), k), *((each, 0.1) for each in (moe, moe, mla, mla))]
        parts = [value * (math.exp(sign * T90 * deviation) - 1) for value, deviation in factors]
        assert abs(end - one.change) == pytest.approx(math.hypot(*parts, of_change - moe))


def test_a_saving_is_uncertain_by_what_the_server_makes_of_it_alone(tiny):
    one = predict(tiny, ONE, [parse_change("mla_decode=saved:5us")])[0]
    assert one.low / one.change == pytest.approx(math.exp(T90 * 0.1))


@pytest.mark.parametrize(
    "text", ["mla_decode", "mla_decode=0x", "mla_decode=2x(3..4)", "what=2x", "mla_decode=-1x"]
)
def test_what_is_no_change_is_one_line(text):
    with pytest.raises(UsageError, match=r"^(cannot read change|unknown op)[^\n]*$"):
        parse_change(text)


def test_a_change_as_it_is_written_and_one_of_no_kernel(h200):
    assert parse_change("block_scale_gemm:qkv_a@decode=saved:100us(90..110us)") == KernelChange(
        op="block_scale_gemm", part="qkv_a", phase="decode", saved_us=100, low=90, high=110
    )
    with pytest.raises(UsageError, match="no kernel 'mla_decode' in a step of prefill; there are: block"):
        predict(h200, LOAD, [parse_change("mla_decode@prefill=2x")])


def test_what_an_op_could_give_and_what_a_target_needs(tiny):
    before = tiny.served(ONE).tpot.value
    by_op = {need.ops: need for need in needs(tiny, ONE, target_ms=before - 0.3)}
    mla = by_op[("mla_decode",)]
    k = tiny.in_server["decode"]
    assert mla.most_ms == pytest.approx(k * 61 * US["decode"] / 1e3, rel=1e-5)
    assert (mla.limit_ms, mla.share) == pytest.approx((before - mla.most_ms, mla.most_ms / before))
    assert 1 - 1 / mla.factor == pytest.approx(0.3 / mla.most_ms, rel=1e-3)
    assert by_op[("mha_prefill",)].factor is None
    assert {need.factor for need in needs(tiny, ONE, target_ms=1e3)} == {1.0}


def test_every_op_of_the_suite_that_the_model_has_is_asked_what_it_could_give(h200, monkeypatch):
    four = ("block_scale_gemm", "fused_moe", "mla_decode", "mha_prefill")
    monkeypatch.setitem(kernels.OPS, "mha_decode", object())  # not of this model
    assert [need.ops for need in needs(h200, LOAD)][-1] == four
    monkeypatch.setitem(kernels.OPS, "bf16_gemm", object())
    assert ("bf16_gemm",) in [need.ops for need in needs(h200, LOAD)]


def test_shares_are_of_all_of_tpot(h200):
    look = outlook(h200, LOAD)
    assert sum(share.share for share in look.shares) == pytest.approx(1.0)
    assert look.served.decode_ms + look.served.stall_ms == pytest.approx(look.served.tpot.value)
    assert sum(share.decode_ms for share in look.shares) == pytest.approx(look.served.decode_ms)


def test_predictions_go_into_a_ledger_with_the_command_that_makes_them_again(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    words = ("what-if", "mla_decode=2x", "--concurrency", "4,16", "--ledger", str(ledger))
    assert run(*words).exit_code == 0
    rows = read(ledger)
    names = ["h200 sglang tp8 1024/1024 c4: mla_decode=2x", "h200 sglang tp8 1024/1024 c16: mla_decode=2x"]
    assert list(dict.fromkeys(row.row for row in rows)) == names
    assert rows[0].setting.workload.concurrency == 4 and rows[0].setting.note == "tp8"
    command = rows[1].command.split()[3:]
    again = json.loads(run(*command[1:], "--json", "-").output)
    assert again["workloads"][0]["changes"][0]["change"] == pytest.approx(rows[1].prediction.change)
    with pytest.raises(UsageError, match=r"has a row .* already"):
        raise run(*words).exception


# Validation: no number of a server is of constants that its machine and engine set


@pytest.fixture(scope="module")
def validation() -> Validation:
    return validated()


KEPT = {
    "b200 sglang InferenceX tp8", "h200 sglang InferenceX tp8", "h200 trtllm InferenceX tp8",
    "mi300x sglang InferenceX tp8", "mi325x sglang InferenceX tp8", "mi355x sglang InferenceX tp8",
}  # fmt: skip


def test_errors_and_coverage_are_as_documents_promise(validation):
    """InferenceX's servers at lengths that were not calibrated on; all together in their intervals."""
    servers = {server.name: server for server in validation.servers}
    for name in KEPT:
        assert servers[name].errors(ON_SHORTEST, "TPOT").mean <= 0.06, name
        assert servers[name].errors(ON_TWO, "TPOT").mean <= 0.06, name
        assert servers[name].errors(ON_SHORTEST, "mean TTFT").mean <= 0.20, name
    together = validation.together(drafts=False)
    for mode, quantity, width in (
        (UNCALIBRATED, "TPOT", 0.65), (ON_TWO, "TPOT", 0.30), (ON_SHORTEST, "TPOT", 0.26),
        (UNCALIBRATED, "throughput", 0.65), (ON_SHORTEST, "throughput", 0.26),
        (ON_SHORTEST, "mean TTFT", 0.95),
    ):  # fmt: skip
        found = together.errors(mode, quantity)
        assert found.covered >= 0.85 * found.points and found.width <= width, (mode, quantity)
    assert validation.holds
    drafted = validation.together(drafts=True).errors(ON_TWO, "TPOT")
    assert drafted.points == 20 and drafted.mean <= 0.1 and drafted.covered >= 0.85 * drafted.points
    names = {each.name for each in stored_series() if each.system.drafts}
    assert names and not names & {row.series for row in together.rows}
    assert sum(len(server.rows) for server in validation.servers if server.left_out) > 0


@pytest.mark.slow
def test_any_two_points_of_one_length_predict_the_other_lengths():
    """Of every server, with constants learnt from the other machines and engines."""
    measured = {one: uncalibrated(one.system).modelled(one.points) for one in stored_series()}
    kept = {one: points for one, points in measured.items() if not one.left_out}
    errors, inside = [], []
    for kind in {one.kind for one in kept}:
        prior = _learnt({one: points for one, points in kept.items() if one.kind != kind})
        own = [one for one in kept if one.kind == kind]
        for near, far in ((a, b) for a in own for b in own if a is not b and a.server == b.server):
            for pair in itertools.combinations(kept[near], 2):
                constants = prior.fitted(pair)
                for each in kept[far]:
                    found, tpot_ms = constants.served(each.sums).tpot, each.point.tpot_ms
                    errors.append(abs(found.value / tpot_ms - 1))
                    inside.append(found.low <= tpot_ms <= found.high)
    assert len(errors) > 3000 and np.mean(errors) <= 0.07 and np.mean(inside) >= 0.9


def test_the_prior_is_what_the_series_teach(validation):
    for known, found in ((PRIOR.tpot, validation.prior.tpot), (PRIOR.ttft, validation.prior.ttft)):
        assert known.mean == pytest.approx(found.mean, rel=0.01)
        assert known.deviation == pytest.approx(found.deviation, rel=0.01)
        of_both = [n.covariance / np.outer(n.deviation, n.deviation) for n in (known, found)]
        assert of_both[0] == pytest.approx(of_both[1], abs=0.006)


def test_a_system_s_own_points_teach_nothing_of_it(monkeypatch):
    """With TPOTs three times as long a system is predicted as before, uncalibrated, and others are not."""
    names = ("inferencex-h200-trtllm-1k1k", "inferencex-h200-trtllm-8k1k", "inferencex-b200-1k1k")
    kept = [series for series in stored_series() if series.name in names]
    slower = {s.name: tuple(replace(p, tpot_ms=3 * p.tpot_ms) for p in s.points) for s in kept}
    slow = [replace(s, points=slower[s.name]) if "trtllm" in s.name else s for s in kept]
    found = []
    for series in (kept, slow):
        monkeypatch.setattr("harness.serving.link.validation.stored_series", lambda series=series: series)
        rows = [row for server in validated().servers for row in server.rows if row.quantity == "TPOT"]
        found.append({(r.series, r.concurrency): r.predicted.value for r in rows if r.mode == UNCALIBRATED})
        assert {r.series for r in rows if r.mode != UNCALIBRATED} == {names[1]}  # not what is calibrated on
    same = {key[0] for key, value in found[0].items() if found[1][key] == pytest.approx(value)}
    assert same == set(names[:2])


@pytest.mark.slow
def test_validate_answers_with_its_exit_code():
    done = run("validate", "--hardware", "mi355x", "--json", "-")
    document = json.loads(done.output)
    assert done.exit_code == 0
    assert {server["server"].split()[0] for server in document["servers"]} == {"mi355x"}
    [row, *_] = document["servers"][0]["points"]
    assert row["error"] == pytest.approx(row["predicted"]["value"] / row["measured"] - 1)


def test_notes_name_what_was_fitted_and_that_no_server_of_the_kind_was_near():
    kinds = (("mi300x", "sglang"), ("mi300x", "vllm"), ("h200", "vllm"))
    systems = [System(hardware=hardware, engine=engine) for hardware, engine in kinds]
    of_sglang, of_vllm, of_none = (" | ".join([*link(of).notes, *unvalidated(of)]) for of in systems)
    fitted = "fitted to MI325X with SGLang: mla_decode x 4, 4.7 ms a step, FP8 products at least 2.2"
    assert fitted in of_sglang and "public server" not in of_sglang
    assert "vllm on mi300x was as near as the intervals say: mi300x vllm dstack tp8 was 53 % off" in of_vllm
    assert "no public server of vllm on h200 to compare this with" in of_none and "fitted" not in of_none
