"""Seconds that a call takes, by what each of its kernels asks of a device: the static criterion by which
`harness tune` ranks configurations that it cannot run.

A kernel's programs go over the compute units in waves of `units x resident`. A unit that holds n programs of
a wave takes for it

    wave(n) = latency + max(n * flops / compute,            a unit's share of the matrix rate
                            flops / (reach * compute),      of which one program's waves reach a part
                            n * read / cache,               a unit's share of the cache's bandwidth
                            read / in_flight * latency)     one program waits for its own loads, and for its
                                                            products as well where the two do not overlap

and the kernel, with `whole` full waves and `rest` programs on the fullest unit of the last one,

    max(whole * wave(resident) + wave(rest),
        moved / memory,
        moved / bytes in flight of all programs at once * latency)
    + a tenth of what these hide: the times of compute, cache, latency and memory but the longest
    + launch

`compute` is that of the instructions which the products were compiled to, and no more than shared memory
feeds: a tile reads the less of it for each product, the larger it is.

It ranks configurations of one kernel; it does not predict times. It knows nothing of bank conflicts, of
instructions beside the products, of operands that stay in registers, of clocks under load, nor of which
programs find in the cache what others read; its peaks are the vendors', which no kernel reaches; its tenth is
a guess.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from harness.catalogue.architectures import Architecture
from harness.catalogue.devices import DATASHEETS
from harness.compile.resources import Product, Resources
from kernels.tuning import Demand

HIDDEN = 0.1
"""Of a time that others hide: no overlap is perfect. Without it, all that are bound by memory were equal."""

ITEM = {"fp8": 1, "bf16": 2}
"""Bytes."""

SIMDS = 4
"""Of a compute unit of CDNA, and of a streaming multiprocessor."""

WITHIN = 0.03
"""Estimates this much above the best are thought as good: finer differences are beyond what it can tell."""


@dataclass(frozen=True)
class Peaks:
    """Of a whole device.

    flops:   per second, by dtype of the operands of products
    memory:  bytes per second
    cache:   bytes per second that all units together read from the cache that they share
    latency: seconds from a load to its data, from memory
    launch:  seconds that a kernel costs in a graph, beside its own time
    """

    units: int
    flops: dict[str, float]
    memory: float
    cache: float
    latency: float
    launch: float


def peaks(architecture: Architecture) -> Peaks:
    """Of the device that stands for the architecture."""
    read = json.loads(DATASHEETS.read_text())["devices"]
    device = next(each for each in read if each["name"] == architecture.device)
    return Peaks(
        architecture.units,
        {dtype: rate * 1e12 for dtype, rate in device["tflops"].items()},
        device["tbps"] * 1e12,
        architecture.cache_tbps * 1e12,
        architecture.latency_ns * 1e-9,
        architecture.launch_us * 1e-6,
    )


@dataclass(frozen=True)
class Estimate:
    """Of a call: seconds, and what takes most of them: compute, cache, latency, memory or launch."""

    seconds: float
    bound: str


def estimate(on: Peaks, asked: Iterable[tuple[Demand, int, float, float]]) -> Estimate:
    """Of a call. asked: of each kernel what it asks, how many programs of it a unit holds, the share of the
    full matrix rate that its instructions have, and the part of a unit that a program's waves reach."""
    seconds, bounds = 0.0, Counter[str]()
    for demand, resident, share, reach in asked:
        took, bound = _kernel(on, demand, resident, share, reach)
        seconds += took + on.launch
        bounds.update({bound: took, "launch": on.launch})
    return Estimate(seconds, max(bounds, key=lambda name: bounds[name]))


def _kernel(on: Peaks, demand: Demand, resident: int, share: float, reach: float) -> tuple[float, str]:
    """Its seconds without the launch, and what bounds them."""
    whole, left = divmod(demand.programs, on.units * resident)
    waves = [(whole, resident), (1, math.ceil(left / on.units))] if left else [(whole, resident)]
    compute = demand.flops * on.units / (on.flops[demand.dtype] * share) if demand.flops else 0.0
    cache = demand.read * on.units / on.cache
    own = compute / reach
    alone = demand.read / demand.in_flight * on.latency if demand.read else 0.0
    alone += 0.0 if demand.overlaps else own
    all_in_flight = min(demand.programs, on.units * resident) * demand.in_flight
    memory = demand.moved / on.memory
    starved = demand.moved / all_in_flight * on.latency if all_in_flight else 0.0
    in_waves = sum(
        times * (on.latency + max(max(n, 1 / reach) * compute, n * cache, alone)) for times, n in waves
    )
    terms = {
        "compute": sum(times * max(n * compute, own) for times, n in waves),
        "cache": sum(times * n for times, n in waves) * cache,
        "latency": max(sum(times for times, _ in waves) * (on.latency + alone), starved),
        "memory": memory,
    }
    bound = max(terms, key=lambda name: terms[name])
    return max(in_waves, memory, starved) + HIDDEN * (sum(terms.values()) - terms[bound]), bound


def held(figures: Resources, architecture: Architecture) -> int:
    """Programs of a compiled kernel that a compute unit holds at once."""
    waves = max(1, figures.threads // architecture.threads_per_wave)
    return architecture.resident(figures.registers, figures.shared_bytes, figures.columns, waves)[0]


def reach(figures: Resources, architecture: Architecture) -> float:
    """The part of a unit's matrix rate that one program can have: each of a unit's SIMDs (sub-partitions)
    multiplies for its own waves."""
    return min(1.0, figures.threads / architecture.threads_per_wave / SIMDS)


def share(demand: Demand, figures: Resources, architecture: Architecture) -> float:
    """Of the full matrix rate: less where a product was compiled to the architecture's older instructions, or
    where its tile does too little with each byte for shared memory to feed it."""
    if not demand.flops:
        return 1.0
    wide = any(re.fullmatch(architecture.instructions.get(demand.dtype, ""), i) for i in figures.instructions)
    rate = 1.0 if wide else architecture.older_rate.get(demand.dtype, 1.0)
    flops = sum(2.0 * product.m * product.n * product.k for product in figures.products)
    read = sum(_operands(product, wide, figures, architecture) for product in figures.products)
    bytes_per_flop = architecture.shared_per_clock / architecture.flops_per_clock[demand.dtype]
    return min(rate, bytes_per_flop * flops / read) if read else rate


def _operands(product: Product, wide: bool, figures: Resources, architecture: Architecture) -> float:
    """Bytes that a product reads from shared memory, each of its two sides being there. Instructions that
    read there themselves read the second side for each of their rows; else each wave loads what its part of
    the tile needs, the parts being as square as they can be."""
    item = ITEM.get(product.dtype, 4)
    if wide and architecture.product_rows:
        times = math.ceil(product.m / architecture.product_rows)
        return item * product.k * (product.m + times * product.n)
    waves = max(1, figures.threads // architecture.threads_per_wave)
    splits = [(down, waves // down) for down in range(1, waves + 1) if waves % down == 0]
    return item * product.k * min(down * product.n + across * product.m for down, across in splits)


def least(on: Peaks, asked: Iterable[tuple[Demand, int]]) -> float:
    """What `estimate` is never below, whatever compiling finds. asked: of each kernel what it asks, and the
    most programs that a unit can hold. More of them do not always take less time: a last wave may be emptier.
    """
    return sum(
        on.launch + min(_kernel(on, demand, resident, 1.0, 1.0)[0] for resident in range(1, most + 1))
        for demand, most in asked
    )
