"""Ceilings: the least times by them, how they are stored, and how a meter measures them."""

import contextlib
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import pytest

import kernels
from harness.catalogue.devices import Ceilings, datasheets, known_type, last_level, peaks
from harness.machine.monitor.base import Blind
from harness.plan.entry import Entry
from harness.plan.memory import Rotation
from harness.plan.settings import Setting
from harness.results.schema import Cell
from harness.run.ceilings import ceilings, impossible, keep, measured, stored
from harness.run.cells import Group, build_cells
from harness.run.device import device_type
from harness.timing.rounds import Round, Rounds
from harness.workers.child import METER, meter
from harness.workers.child.meter import MIB, Meter, buffer_bytes, reach
from harness.workers.child.timers import Program, Sample
from harness.workers.process import WorkerFailure
from kernels.op import Work
from kernels.platform import Platform
from shapes.case import Case
from tests.support.written_runs import a_run

CPU = Platform("cpu", "x86", name="a CPU")


@pytest.mark.parametrize(("rates", "copy", "work", "seconds"), [
    ({"fp8": 8.0, "bf16": 4.0}, 5.0, Work(16.0, 10.0, "fp8"), 2.0),
    ({"fp8": 8.0, "bf16": 4.0}, 5.0, Work(16.0, 10.0, "bf16"), 4.0),
    ({"fp8": 8.0, "bf16": 4.0}, 5.0, Work(16.0, 50.0, "fp8"), 5.0),
    ({"fp8": 8.0, "bf16": 4.0}, 20.0, Work(0.0, 40.0), 2.0),  # the larger of read and copy
    ({"fp8": 8.0, "bf16": 4.0}, 0.0, Work(16.0, 0.0, "fp32"), 2.0),  # no rate of fp32: the highest
    ({"bf16": 4.0, "fp32": 2.0}, 0.0, Work(16.0, 0.0, "fp8"), 4.0),  # nothing measured in FP8
    ({"bf16": 1.0, "fp32": 2.0}, 0.0, Work(16.0, 0.0, "bf16"), 8.0),  # emulated bf16
])  # fmt: skip
def test_least_time_is_the_longer_of_memory_and_products_of_that_dtype_or_a_wider(rates, copy, work, seconds):
    assert Ceilings(rates, read=10.0, copy=copy).min_time(work) == seconds


@pytest.mark.parametrize(("op", "sizes", "dtype"), [
    ("block_scale_gemm", {"m": 1, "n": 128, "k": 128}, "fp8"),
    ("fused_moe", {"tokens": 2}, "fp8"),
    ("mla_decode", {"batch": 1, "ctx": "9"}, "bf16"),
    ("mla_decode", {"batch": 1, "ctx": "9", "kv": "fp8"}, "fp8"),
    ("mha_prefill", {"batch": 1, "new": "9"}, "bf16"),
])  # fmt: skip
def test_each_op_says_what_its_products_may_take(op, sizes, dtype):
    it = kernels.OPS[op]
    assert {it.work(it.sizes(sizes), boundary).dtype for boundary in it.boundaries} == {dtype}


def test_ceilings_beyond_the_data_sheet_are_no_ceilings():
    """Where events or the sleep are broken, as on a device that was only pretended."""
    peak = peaks(Platform("cuda", "sm_90", "cuda:0", "NVIDIA H100 80GB HBM3"))
    assert impossible(Ceilings({"bf16": 8e14, "fp8": 1.6e15}, read=3.0e12, copy=3.1e12), peak) == ""
    told = impossible(Ceilings({"bf16": 3.7e17}, read=3.0e12, copy=3.58e14), peak)
    assert told == (
        "impossible: bf16 products at 3.7e+05 T/s where the data sheet has 1979, "
        "copies at 358 T/s where the data sheet has 3.35: this device's events or its sleep are broken"
    )
    assert impossible(Ceilings({"bf16": 3.7e17}, read=3.0e12), peaks(CPU)) == ""


GEMM = kernels.OPS["block_scale_gemm"].case({"m": 128, "n": 128, "k": 128})
GEMM_WORK = 2 * 128**3


def row(case: Case, cache: str, enough: bool, known: Ceilings | None, peak: Ceilings | None = None) -> Cell:
    """The cell of an entry that took 10 ms in each of two blocks."""
    (impl,) = [i for i in kernels.implementations(case.op) if i.name == "torch.naive"]
    entry = Entry(impl.name, impl, Setting(), "eager")
    rounds = Rounds([Round(block, 0, {impl.name: 0.01}) for block in range(2)])
    measured = Group(case, [entry], Rotation(cache, 1, 0, 0, enough), rounds)
    with patch("harness.run.cells.peaks", lambda _: peak):
        cells, _ = build_cells(measured, CPU, a_run(ceilings=asdict(known) if known else {}))
    return cells[entry.name]


def test_a_row_is_compared_with_the_ceilings_of_its_dtype_and_of_memory():
    """Bytes count only where they come from memory."""
    found = Ceilings({"fp8": 400.0 * GEMM_WORK, "bf16": 200.0 * GEMM_WORK}, read=1e15)
    warm = row(GEMM, "warm", True, found)
    assert (warm.status, warm.percent_of_ceiling) == ("ok", pytest.approx(25.0))
    slow = Ceilings(found.rates, read=warm.gbps * 1e9 * 1.25, copy=warm.gbps * 1e9)
    for cache, enough, percent in (("warm", True, 25), ("cold", False, 25), ("cold", True, 80)):
        assert row(GEMM, cache, enough, slow).percent_of_ceiling == pytest.approx(percent)


def test_bytes_that_serving_keeps_in_the_cache_bound_no_time():
    """A short context of many heads: q and out are twice the KV cache, and only that comes from memory."""
    op = kernels.OPS["mla_decode"]
    case = op.case({"batch": 128, "ctx": 128, "heads": 128})
    sizes = op.sizes(case.sizes)
    whole, streamed = op.work(sizes).bytes, op.streamed_bytes(sizes)
    peak = Ceilings({"bf16": 1e20}, read=1.5 * streamed / 0.01)
    assert whole > 2.5 * streamed
    assert row(case, "cold", True, None, peak).status == "impossible"
    serving = row(case, "serving", True, peak, peak)
    assert (serving.status, serving.percent_of_ceiling) == ("ok", pytest.approx(100 / 1.5))


def test_a_row_beyond_a_measured_ceiling_stays_and_one_beyond_a_datasheet_goes():
    low = Ceilings({"bf16": 50.0 * GEMM_WORK}, read=1e15)
    beyond = row(GEMM, "warm", True, low)
    assert (beyond.status, beyond.percent_of_ceiling) == ("ok", pytest.approx(200.0))
    gone = row(GEMM, "warm", True, low, low)
    assert (gone.status, gone.time_us, gone.percent_of_ceiling) == ("impossible", None, None)
    assert row(GEMM, "warm", True, None).percent_of_ceiling is None


def test_recorded_ceilings_can_be_read_again():
    """Also those of 2026-11-21, which have one rate for all products."""
    found = Ceilings({"bf16": 4.0}, 3.0, 2.0, "then")
    assert Ceilings.recorded(json.loads(json.dumps(found.__dict__))) == found
    assert Ceilings.recorded({}) is None, "none could be measured"
    old = Ceilings.recorded({"flops": 4.0, "bytes": 2.0, "measured": "2026-11-21 18:37:16Z"})
    assert old.measured == "2026-11-21 18:37:16Z"
    for flops, moved, wanted in ((8.0, 2.0, 2.0), (4.0, 6.0, 3.0)):
        assert old.min_time(Work(flops, moved, "fp8")) == old.min_time(Work(flops, moved, "bf16")) == wanted


def gpu(name: str, arch: str = "sm_90") -> Platform:
    return Platform("rocm" if arch.startswith("gfx") else "cuda", arch, "cuda:0", name)


DEVICES = {
    "sm_90": (
        *("H100 80GB HBM3", "H100 NVL", "H20", "H20-3e", "H200", "GH200 480GB", "H100 80GB HBM3 MIG 1g.10gb"),
        *("H100 80GB HBM3 MIG 1g.20gb", "H200 MIG 1c.3g.71gb", "H200 MIG 7g.141gb", "H100 NVL MIG 7g.94gb"),
        *("H100 80GB HBM3 MIG-aaaa", "H100 PCIe", "H200 NVL"),
    ),
    "sm_103": ("B300 SXM6 AC", "GB300"),
    "sm_89": ("H2000",),
    "gfx942": (
        *("ip discovery", "AMD_Instinct_MI300X_OAM", "AMD Instinct MI300X CPX/NPS4"),
        *("AMD Instinct MI300X VF", "AMD Instinct MI308X", "AMD Instinct MI300A CPX"),
        "AMD Instinct MI325X QPX/NPS1",
    ),
    "gfx950": ("AMD Instinct MI350X VF DPX/NPS2", "AMD Instinct MI355X TPX/NPS1"),
}


def test_facts_of_devices_are_as_committed(snapshot):
    """The type of each, and the highest rates of the data sheets that it may have, also of slices."""
    assert device_type(CPU) == "cpu"
    lines = []
    for arch, name in [(arch, name) for arch, names in DEVICES.items() for name in names]:
        device = gpu(name if arch.startswith("gfx") else f"NVIDIA {name}", arch)
        sheets, limit = datasheets(device), peaks(device)
        names = ", ".join(sheet["name"] for sheet in sheets)
        lines += [f"=== {device.name}, {arch}", f"{known_type(device.name)}, may be: {names}"]
        if limit:
            assert {limit.rate(dtype) for dtype in ("fp8", "bf16", "fp32")} == {limit.rate("fp8")}
            lines.append(f"{limit.rate('fp8') / 1e12:.1f} TFLOPS, {limit.bandwidth / 1e12:.3f} TB/s")
        lines.append(f"last level: {last_level(device) >> 20} MiB")
        lines += [sheet["source"].partition(";")[0] for sheet in sheets if "has at most" in sheet["source"]]
    snapshot(Path(__file__).parent / "snapshots" / "devices.txt", "\n".join(lines) + "\n")


def test_a_slice_of_unknown_size_has_no_peaks_and_ceilings_of_its_own():
    unknown = gpu("NVIDIA H100 80GB HBM3 MIG-aaaa")
    whole = replace(unknown, name="NVIDIA H100 80GB HBM3")
    assert peaks(unknown) is peaks(CPU) is None
    keep(whole, 1, Ceilings({"bf16": 9e14}, read=3e12))
    assert stored(whole, 1) is not None
    assert stored(unknown, 1) is stored(replace(whole, memory=9 << 30), 1) is None


HOST = Platform("cpu", "x86-amx", last_level=480 * MIB)
KNOWN = Ceilings({"bf16": 1e12}, read=1e10, reach=128 * MIB)


@pytest.mark.parametrize(("platform", "known", "mebibytes"), [
    (Platform("cuda", "sm_90", name="NVIDIA H200", last_level=99 * MIB), None, 99),
    (HOST, None, 480),
    (HOST, replace(KNOWN, reach=0), 480),
    (HOST, KNOWN, 128),
    (replace(HOST, last_level=32 * MIB), KNOWN, 32),
])  # fmt: skip
def test_the_last_level_is_no_larger_than_the_measured_reach(platform, known, mebibytes):
    assert last_level(platform, known) == mebibytes * MIB
    assert replace(KNOWN, reach=64 * MIB).or_better(KNOWN).reach == 128 * MIB


@pytest.mark.parametrize(("rates", "reached"), [
    ((50, 49, 12, 10, 10), 512),
    ((50, 11, 12, 10, 10), 128),
    ((10, 10, 10, 10, 10), 64),
    ((50, 50, 50, 49, 25), 960),
])  # fmt: skip
def test_the_reach_of_a_cache_ends_where_reading_is_as_slow_as_memory(rates, reached):
    sizes = (64 * MIB, 128 * MIB, 256 * MIB, 512 * MIB, 960 * MIB)
    assert reach({size: rate * 1e9 for size, rate in zip(sizes, rates, strict=True)}) == reached * MIB


def test_a_meter_measures_the_reach_of_an_unlikely_last_level(monkeypatch):
    monkeypatch.setattr(meter, "BELIEVED", MIB)
    monkeypatch.setattr(meter, "LEAST_BUFFER", {"cpu": 2 * MIB})
    monkeypatch.setattr(meter, "REACH_S", 0.002)
    found = Meter()
    found.hello("cpu", "cpu", threads=1)
    found.open("x86", memory=0, last_level=5 * MIB)
    assert found.reach in (1 * MIB, 2 * MIB, 4 * MIB, 10 * MIB)
    assert found.bytes == max(2, meter.REACHES * found.reach // MIB) * MIB
    found.open("x86", memory=0, last_level=MIB)
    assert found.reach == 0


class Fake:
    """Stands for a worker with a meter; its measurements are the test's `measures`, one after the other."""

    measures: list[dict]

    def __init__(self, role: str, environment: dict[str, str], log: object) -> None:
        assert role == METER

    def ask(self, request: str, deadline: float, **arguments: object) -> object:
        return MIB if request == "open" else self.measures.pop(0)

    def hello(self, *_: object) -> None:
        pass

    def kill(self) -> None:
        pass


QUIET = Blind("nobody looks")

FOUND = {"rates": {"bf16": 4.0, "fp32": 2.0}, "read": 10.0, "copy": 9.0}


@pytest.fixture
def store(monkeypatch, tmp_path):
    """The file of stored ceilings. No measurement is planned yet."""
    monkeypatch.setattr("harness.run.ceilings.WorkerProcess", Fake)
    monkeypatch.setattr("harness.run.ceilings.driver", lambda platform: "1.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Fake.measures = []
    return tmp_path / "deepseek-kernel-bench" / "ceilings" / "ceilings.json"


@pytest.mark.parametrize("text", ["", "[]", '{"KEY": 7}', '{"KEY": {"flops": 1}}'])
def test_ceilings_that_cannot_be_read_are_measured_again(store, text):
    Fake.measures = [FOUND, FOUND]
    ceilings(CPU, 2, QUIET)
    (key,) = json.loads(store.read_text())
    store.write_text(text.replace('"KEY"', json.dumps(key)))
    assert stored(CPU, 2) is None
    found = ceilings(CPU, 2, QUIET)
    assert (found.rates, found.read, found.copy) == tuple(FOUND.values())
    assert found.measured
    assert not Fake.measures
    assert ceilings(CPU, 2, QUIET) == found, "now it is stored"


def test_another_device_driver_or_thread_count_is_measured_anew(store, monkeypatch):
    Fake.measures = [FOUND | {"read": float(n)} for n in range(1, 5)]
    assert ceilings(CPU, 2, QUIET).read == 1.0
    assert ceilings(CPU, 1, QUIET).read == 2.0
    assert ceilings(Platform("cpu", "x86", name="another CPU"), 2, QUIET).read == 3.0
    monkeypatch.setattr("harness.run.ceilings.driver", lambda platform: "2.0")
    assert ceilings(CPU, 2, QUIET).read == 4.0
    monkeypatch.setattr("harness.run.ceilings.driver", lambda platform: "1.0")
    assert ceilings(CPU, 2, QUIET).read == 1.0, "the first ones are still there"


def test_ceilings_of_a_busy_machine_are_measured_again_by_the_next_run(store):
    class Busy(Blind):
        def end(self) -> str:
            return "other processes took 90% of a CPU"

    Fake.measures = [FOUND, {**FOUND, "read": 8.0}, {**FOUND, "read": 12.0}]
    assert ceilings(CPU, 2, Busy("")).disturbed == "other processes took 90% of a CPU"
    assert (ceilings(CPU, 2, Busy("")).read, ceilings(CPU, 2, QUIET).read) == (10.0, 12.0)
    assert ceilings(CPU, 2, QUIET).disturbed == "", "and those are kept"


def test_the_highest_rates_are_stored_but_none_beyond_the_data_sheet(store, monkeypatch, tmp_path):
    again = {"rates": {"bf16": 3.0, "fp8": 8.0}, "read": 11.0, "copy": 8.0}
    Fake.measures = [FOUND, again, FOUND | {"read": 1e14}, FOUND]
    measured(CPU, 2, QUIET)
    found = measured(CPU, 2, QUIET)
    assert (found.rates, found.read, found.copy) == ({"fp8": 8.0, "bf16": 4.0, "fp32": 2.0}, 11.0, 9.0)
    assert stored(CPU, 2) == found
    h100 = gpu("NVIDIA H100 80GB HBM3")
    with pytest.raises(WorkerFailure, match="impossible: reads at 100 T/s"):
        measured(h100, 2, QUIET)
    assert stored(h100, 2) is None
    (tmp_path / "file").touch()
    monkeypatch.setattr("harness.run.ceilings.cache", lambda: tmp_path / "file")
    assert ceilings(CPU, 2, QUIET).read == FOUND["read"]


@pytest.fixture
def small(monkeypatch):
    """A meter on this CPU that tries few products for a moment."""
    monkeypatch.setattr(meter, "LEAST_BUFFER", {"cpu": 2 * MIB})
    monkeypatch.setattr(meter, "SHAPES", ((32, 48, 64), (64, 64, 64)))
    monkeypatch.setattr(meter, "STEADY_SIZE", {"cpu": 32})
    for name in ("READ_S", "COPY_S", "PRODUCT_S", "TRY_S"):
        monkeypatch.setattr(meter, name, 0.002)
    found = Meter()
    found.hello("cpu", "cpu", threads=1)
    assert found.open("x86", memory=0, last_level=0) == 2 * MIB
    return found


def test_a_meter_measures_what_ceilings_are_made_of_or_says_why_not(small, monkeypatch):
    found = small.measure()
    assert set(found["rates"]) == {"bf16", "fp32"}
    assert all(math.isfinite(v) and v > 0 for v in (*found["rates"].values(), found["read"], found["copy"]))
    Ceilings(**found)

    def broken():
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(small, "_products", lambda dtype: iter([(1.0, broken)]))
    monkeypatch.setattr(small, "_mm", lambda *shape: broken)
    with pytest.raises(RuntimeError, match="no such kernel"):
        small.measure()


def test_products_have_the_shape_that_their_flops_are_counted_for(small):
    import torch

    for dtype in ("bf16", "fp32"):
        assert small._mm(16, 48, 32, dtype)().shape == (16, 48)
        with contextlib.suppress(RuntimeError, AttributeError):  # oneDNN packs no bf16 for AVX2, say
            assert small._prepacked(16, 48, 32, dtype)().shape == (16, 48)
    values = small._random(3, MIB // 2, dtype="bf16")
    assert (values.shape, values.dtype) == ((3, MIB // 2), torch.bfloat16)
    assert values.float().std() > 0.3, "zeros would be faster"
    assert values.flatten()[MIB:].equal(values.flatten()[: MIB // 2]), "a million, over and over"


def test_every_reader_reads_the_whole_buffer_and_every_copy_writes_it(small):
    """A buffer of ones has another value at its end, which shows that the end was reached."""
    import torch

    plain, other = torch.ones(MIB, dtype=torch.bfloat16), torch.ones(MIB, dtype=torch.bfloat16)
    other[-1] = 3e38
    for (amount, of_plain), (_, of_other) in zip(small._readers(plain), small._readers(other), strict=True):
        assert amount == 2 * MIB
        assert not of_plain()().equal(of_other()())
    for amount, make in small._copiers(other):
        assert amount == 2 * MIB
        assert make()().flatten()[-2:].view(torch.bfloat16)[-1] == other[-1]


class Timed:
    """A timer whose calls return the seconds that they are said to take, which may change from try to try."""

    program = staticmethod(Program)

    def sample(self, program, at_least_s):
        return Sample(program.steps[0](), 1)


def candidate(amount: float, *seconds: float):
    """A call of so much work, which takes these seconds one after the other, then always the last of them."""
    times = list(seconds)
    return amount, lambda: lambda: times.pop(0) if len(times) > 1 else times[0]


def broken():
    raise RuntimeError("not supported here")


def never():
    raise AssertionError("one call of it would take minutes")


@pytest.mark.parametrize(
    ("candidates", "seconds", "best"),
    [
        ([candidate(1, 0.1), candidate(1.5, 0.075), candidate(0.5, 0.1)], 0.01, 20.0),
        ([candidate(1, 0.9, 0.9, 0.1), candidate(1, 0.2)], 0.01, 10.0),
        ([candidate(1, 0.1, 0.1, 0.9), candidate(1, 0.2)], 0.01, 10.0),
        ([candidate(100, 10.0), candidate(100, 5.0)], 0.01, 20.0),
        ([(1.0, broken), candidate(0.1, 0.01), (1000.0, never)], 0.0, 10.0),
        ([(1.0, broken)], 0.01, 0.0),
    ],
    ids=["of all", "after a disturbed first try", "of an early try", "however slow", "that fit", "none"],
)
def test_the_best_try_of_any_counts(small, candidates, seconds, best):
    small.timer = Timed()
    assert small._best(iter(candidates), seconds) == best


@pytest.mark.parametrize(("kind", "share", "last_level", "reach", "mebibytes"), [
    ("cpu", math.inf, 32 * MIB, 0, 256),
    ("cpu", math.inf, 384 * MIB, 0, 1536),
    ("cpu", math.inf, 384 * MIB, 256 * MIB, 512),
    ("cpu", math.inf, 384 * MIB, 64 * MIB, 256),
    ("cpu", 100.5 * MIB, 32 * MIB, 0, 100),
    ("cpu", 17, 0, 0, 1),
    ("rocm", 20 << 30, 256 * MIB, 0, 2048),
    ("rocm", 20 << 30, 1024 * MIB, 0, 4096),
])  # fmt: skip
def test_a_buffer_lies_past_the_cache_and_within_memory(kind, share, last_level, reach, mebibytes):
    assert buffer_bytes(kind, share, last_level, reach) == mebibytes * MIB
