"""GPUs as NVML tells of them, healthy and of four shapes; a test changes what it is about."""

from dataclasses import replace
from pathlib import Path

from gpuops.checks.core.profile_files import load_profiles
from gpuops.checks.core.suite import load_suite
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import (
    Clocks,
    EccErrors,
    Fabric,
    GpuMemory,
    Modes,
    NvLink,
    NvmlGpu,
    NvmlSnapshot,
    NvmlStatus,
    PcieLink,
    Power,
    RemappedRows,
    Temperatures,
)
from gpuops.host.sysfs import PciGpu

CHECKS = Path(__file__).parents[2] / "checks"
DRIVER = "550.163.01"
HEALTHY_MASK = 0b10_10_10_10 | 1 << 8

# Name, NVLinks, PCIe generation, watts, SM MHz, memory MHz, GiB: the boards' data sheets.
SHAPES = {
    "h100-sxm": ("NVIDIA H100 80GB HBM3", 18, 5, 700, 1980, 2619, 80),
    "h200-sxm": ("NVIDIA H200", 18, 5, 700, 1980, 3201, 141),
    "a100-sxm-80gb": ("NVIDIA A100-SXM4-80GB", 12, 4, 400, 1410, 1593, 80),
    "b200-sxm": ("NVIDIA B200", 18, 5, 1000, 1965, 3996, 180),
}


def gpu(index=0, shape="h100-sxm", **changes):
    """Return a healthy, idle GPU of *shape* with *changes* of its fields."""
    name, links, generation, watts, sm_mhz, memory_mhz, memory_gib = SHAPES[shape]
    healthy = NvmlGpu(
        index=index,
        minor=index,
        uuid=f"GPU-{index}",
        serial=f"16500{index}",
        address=address(index),
        name=name,
        vbios="96.00.74.00.01",
        recovery_action=0,
        remapped=RemappedRows(correctable=0, uncorrectable=0, pending=False, failure=False),
        ecc=EccErrors(
            volatile_corrected=0,
            volatile_uncorrected=0,
            aggregate_corrected=0,
            aggregate_uncorrected=0,
            sram_volatile_uncorrected=0,
            sram_aggregate_uncorrected=0,
            sram_threshold_exceeded=False,
        ),
        inforom_valid=True,
        temperature=Temperatures(
            core_c=31.0, memory_c=40.0, slowdown_c=87.0, shutdown_c=92.0, memory_max_c=95.0
        ),
        power=Power(drawn_w=75.0, limit_w=watts, default_limit_w=watts, max_limit_w=watts),
        clocks=Clocks(
            sm_mhz=345,
            sm_max_mhz=sm_mhz,
            memory_mhz=memory_mhz,
            memory_max_mhz=memory_mhz,
            sm_application_mhz=sm_mhz,
            memory_application_mhz=memory_mhz,
            reasons=0x1,
        ),
        pcie=PcieLink(
            generation=generation, generation_max=generation, width=16, width_max=16, replays=0
        ),
        nvlinks=tuple(
            NvLink(link=link, active=True, crc_errors=0, replay_errors=0, recovery_errors=0)
            for link in range(links)
        ),
        fabric=Fabric(state=3, status=0, health_mask=HEALTHY_MASK, health_summary=1, clique_id=1),
        modes=Modes(
            ecc=True, ecc_pending=True, mig=False, mig_pending=False, persistence=True, compute=0
        ),
        memory=GpuMemory(
            total_bytes=memory_gib * 2**30, used_bytes=2**20, reserved_bytes=500 * 2**20
        ),
        processes=(),
        utilization_percent=0,
    )
    return replace(healthy, **changes)


def part(whole, name, **changes):
    """Return *whole* with *changes* in its part *name*: ``part(gpu(), "ecc", …)``."""
    return replace(whole, **{name: replace(getattr(whole, name), **changes)})


def address(index):
    return f"0000:{0x1B + index:02x}:00.0"


def node(*gpus, on_bus=None, **changes):
    """Return the facts of a node with *gpus*; as many are on its PCI bus unless *on_bus* says."""
    count = len(gpus) if on_bus is None else on_bus
    pci = tuple(PciGpu(address(index), answers=True, driver="nvidia") for index in range(count))
    healthy = NvmlSnapshot(
        status=NvmlStatus.OK, driver=DRIVER, nvml_version=f"12.{DRIVER}", gpus=tuple(gpus)
    )
    return Gpus(pci, replace(healthy, **changes))


def eight(shape="h100-sxm"):
    """Return eight healthy GPUs of *shape*."""
    return [gpu(index, shape) for index in range(8)]


def silent(status, **changes):
    """Return the facts of a node with two GPUs on its bus whose NVML is not well."""
    return node(on_bus=2, status=status, driver=None, nvml_version=None, **changes)


def shipped_profile(name="h100-sxm"):
    return load_profiles([CHECKS / "profiles"])[name]


def shipped(*checks, suite="full"):
    """Return the parameters of *checks* as the shipped *suite* gives them, by name."""
    planned = load_suite(suite, [CHECKS / "suites"]).planned
    return {
        item.check.name: item.parameters
        for item in planned
        if not checks or item.check.name in checks
    }
