"""Healthy nodes drawn at random, within the ranges that are published as normal.

Each look has a drawer of its facts in `DRAWERS`; a check is judged where its look has one. Where a
number is from stands beside it; "board" is what nvidia-smi prints for these boards.
"""

from dataclasses import replace

from gpuops.checks.core.check import JudgeContext
from gpuops.checks.core.profile import NO_PROFILE
from gpuops.host.node_state import Counters, CounterSample
from gpuops.host.nvml.facts import (
    EccErrors,
    GpuMemory,
    GpuProcess,
    RemappedRows,
    Temperatures,
)
from support.checks import NODE
from support.counters import DAY_S
from support.gpus import HEALTHY_MASK, gpu, node, shipped_profile

MIB = 2**20
_NOW_US = 1_800_000_000_000_000
# Every field that a driver, a board or a missing permission can leave out.
_OPTIONAL = (
    "serial",
    "minor",
    "vbios",
    "recovery_action",
    "remapped",
    "inforom_valid",
    "nvlinks",
    "fabric",
    "memory",
    "processes",
    "utilization_percent",
)
_PARTS = ("ecc", "temperature", "power", "clocks", "pcie", "modes")


def healthy_case(rng, shape):
    """Return what a judge of a healthy node may know: a profile or none, earlier counters."""
    profile = shipped_profile(shape) if rng.random() < 0.8 else NO_PROFILE
    up_s = rng.uniform(0, 90 * DAY_S)
    age_s = rng.uniform(0, min(up_s, DAY_S))
    sample = CounterSample(
        boot_id="now",
        since_boot_s=up_s - age_s,
        t_us=_NOW_US - int(age_s * 1e6),
        values={
            f"{check}:GPU-{index}:{counter}": float(rng.randrange(10_000))
            for index in range(8)
            for check, counter in (
                ("gpu_ecc_corrected", "aggregate"),
                ("gpu_ecc_corrected", "volatile"),
                ("gpu_pcie_replays", "replays"),
                ("nvlink_errors", "replay"),
            )
        },
    )
    counters = Counters(
        boot_id="now",
        since_boot_s=up_s,
        t_us=_NOW_US,
        samples=(sample,) if rng.random() < 0.8 else (),
    )
    return JudgeContext(node=NODE, profile=profile, counters=counters)


def healthy_gpus(rng, shape):
    """Return the facts of a node with 1, 2, 4 or 8 GPUs, each idle or busy."""
    count = rng.choice((1, 2, 4, 8))
    less = rng.choice((0.0, 0.0, 0.05, 0.5))
    mig = rng.random() < 0.1
    gpus = [_without(_drawn(rng, index, shape, mig=mig), rng, less) for index in range(count)]
    # A container does not see the bus, or sees more of it than NVML may list.
    return node(*gpus, on_bus=rng.choice((0, count, count, 8)))


def _drawn(rng, index, shape, *, mig):
    busy = rng.random() < 0.5
    healthy = gpu(index, shape)
    return replace(
        healthy,
        remapped=_remapped(rng),
        ecc=_ecc(rng),
        temperature=_temperature(rng, busy=busy),
        power=_power(rng, healthy.power, busy=busy),
        clocks=_clocks(rng, healthy.clocks, busy=busy),
        pcie=_pcie(rng, healthy.pcie, busy=busy),
        nvlinks=tuple(_link(rng, link) for link in healthy.nvlinks),
        fabric=_fabric(rng, healthy.fabric, shape),
        modes=replace(
            healthy.modes,
            mig=mig,
            mig_pending=mig,
            persistence=rng.random() < 0.9,
            compute=rng.choice((0, 0, 3)),
        ),
        memory=_memory(rng, healthy.memory, busy=busy),
        processes=_processes(rng) if busy else (),
        utilization_percent=rng.randint(1, 100) if busy else 0,
    )


def _remapped(rng):
    # oci-hpc gives a board up at more than 512 rows.
    return RemappedRows(
        correctable=rng.choice((0, 0, rng.randrange(100))),
        uncorrectable=rng.choice((0, 0, rng.randrange(513))),
        pending=False,
        failure=False,
    )


def _ecc(rng):
    # gcm: up to 50 million corrected; stas00/ml-engineering: up to 4 uncorrected in SRAM.
    volatile = rng.choice((0, rng.randrange(1000), rng.randrange(50_000_000)))
    return EccErrors(
        volatile_corrected=volatile,
        volatile_uncorrected=0,
        aggregate_corrected=volatile + rng.randrange(1000),
        aggregate_uncorrected=rng.choice((0, rng.randrange(20))),
        sram_volatile_uncorrected=0,
        sram_aggregate_uncorrected=rng.randrange(5),
        sram_threshold_exceeded=False,
    )


def _temperature(rng, *, busy):
    # Board: slowdown 87 to 89, shutdown 90 to 92, memory at most 95; in use below all of these.
    slowdown_c = rng.choice((87.0, 89.0))
    core_c = float(rng.randint(45, 84) if busy else rng.randint(20, 50))
    margins = rng.random() < 0.3
    return Temperatures(
        core_c=core_c,
        memory_c=float(rng.randint(45, 92) if busy else rng.randint(25, 60)),
        slowdown_c=None if margins else slowdown_c,
        shutdown_c=None if margins else slowdown_c + 3,
        memory_max_c=None if margins else 95.0,
        margin_c=85.0 - core_c if margins else None,
        slowdown_margin_c=-2.0 if margins else None,
        shutdown_margin_c=-5.0 if margins else None,
    )


def _power(rng, board, *, busy):
    # NVIDIA Health Validation: 65 W and more; short peaks above the limit are ordinary.
    limit_w = rng.choice((board.limit_w, board.limit_w, board.limit_w * 0.8))
    drawn_w = rng.uniform(0.2, 1.1) * limit_w if busy else rng.uniform(50, 150)
    return replace(board, drawn_w=drawn_w, limit_w=limit_w)


def _clocks(rng, board, *, busy):
    # gcm: an A100's application clock is 1155 MHz or more; 1275 MHz is its default.
    allowed_mhz = rng.choice((board.sm_max_mhz, None, 1275))
    reasons = rng.choice((0x0, 0x2, 0x4, 0x10, 0x20, 0x8) if busy else (0x0, 0x1))
    now_mhz = rng.randrange(600, board.sm_max_mhz + 1) if busy else rng.choice((210, 345, 1980))
    return replace(board, sm_mhz=now_mhz, sm_application_mhz=allowed_mhz, reasons=reasons)


def _pcie(rng, board, *, busy):
    # An idle link falls to its first generation.
    generation = board.generation_max if busy else rng.randint(1, board.generation_max)
    return replace(board, generation=generation, replays=rng.choice((0, rng.randrange(5000))))


def _link(rng, link):
    # nvidia-resiliency-ext flags more than 15; older errors are counted on.
    return replace(
        link,
        crc_errors=rng.choice((0, 0, rng.randrange(1000))),
        replay_errors=rng.choice((0, 0, 0, rng.randrange(16))),
        # DCGM: up to 1e-12; 15e-255 is NVML's smallest number.
        effective_ber=rng.choice((None, 15e-255, 15e-255, rng.uniform(0, 1e-12))),
        symbol_ber=rng.choice((None, 15e-255)),
    )


def _fabric(rng, fabric, shape):
    if shape.startswith("a100"):
        return None  # Fabric information begins with Hopper.
    mask = rng.choice((HEALTHY_MASK, 0, None))
    return replace(fabric, health_mask=mask, health_summary=rng.choice((None, 0, 1)))


def _memory(rng, board, *, busy):
    # gcm: up to 15 MiB in use at rest.
    used_bytes = rng.randrange(board.total_bytes) if busy else rng.randrange(15 * MIB + 1)
    reserved_bytes = rng.choice((None, rng.randrange(700 * MIB)))
    if reserved_bytes is None:
        used_bytes = min(used_bytes + 700 * MIB, board.total_bytes)
    return GpuMemory(
        total_bytes=board.total_bytes, used_bytes=used_bytes, reserved_bytes=reserved_bytes
    )


def _processes(rng):
    # A container may hide who it is, or all of them.
    return tuple(
        GpuProcess(
            pid=rng.randrange(1, 2**22),
            used_bytes=rng.choice((None, rng.randrange(2**36))),
            kind=rng.choice(("compute", "graphics")),
            name=rng.choice((None, "python3", "Xorg")),
        )
        for _ in range(rng.randrange(5))
    )


def _without(drawn, rng, less):
    """Return *drawn* less each optional fact with the probability *less*."""
    if not less:
        return drawn
    gone = {name: None for name in _OPTIONAL if rng.random() < less}
    for name in _PARTS:
        whole = getattr(drawn, name)
        kept = {key: None for key in whole.__dataclass_fields__ if rng.random() < less}
        gone[name] = replace(whole, **kept)
    return replace(drawn, **gone)


DRAWERS = {"gpus": healthy_gpus}
