"""A libnvidia-ml in C for the real pynvml: struct layouts, error codes and hangs are real.

`scenario.c` tells what a scenario can say; scenarios here are text, and lines can be added to them.
"""

import shutil
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

from support.services import unavailable

SOURCES = tuple(Path(__file__).with_name(name) for name in ("mock.c", "scenario.c"))
UUIDS = tuple(f"GPU-0000000{index}-aaaa-bbbb-cccc-00000000000{index}" for index in range(8))

# What differs from the mock's own values, which are an H100's at rest. Names, memory, clocks and
# power are as nvidia-smi prints them for these boards; which fields a board lacks is a guess that
# takes every way through the reader.
SHAPES = {
    "h100": {"name": "NVIDIA H100 80GB HBM3"},
    "h200": {
        "name": "NVIDIA H200",
        "vbios": "96.00.BC.00.02",
        "memory_bytes": 150754820096,
        "memory_mhz": 3201,
        "memory_max_mhz": 3201,
        "memory_application_mhz": 3201,
    },
    "a100": {
        "name": "NVIDIA A100-SXM4-80GB",
        "vbios": "92.00.9E.00.01",
        "memory_bytes": 85899345920,
        "nvlink_count": 12,
        "has_nvlink_link_counters": 0,
        "has_nvlink_state_field": 0,
        "has_nvlink_lane_counters": 1,
        "pcie_generation": 4,
        "pcie_generation_max": 4,
        "power_mw": 61000,
        "power_limit_mw": 400000,
        "default_power_limit_mw": 400000,
        "max_power_limit_mw": 400000,
        "min_power_limit_mw": 100000,
        "sm_mhz": 210,
        "sm_max_mhz": 1410,
        "sm_application_mhz": 1410,
        "memory_mhz": 1593,
        "memory_max_mhz": 1593,
        "memory_application_mhz": 1593,
        "fabric_state": "-",
        "shutdown_tlimit_c": "-",
        "slowdown_tlimit_c": "-",
        "memory_max_tlimit_c": "-",
        "margin_c": "-",
    },
    "b200": {
        "name": "NVIDIA B200",
        "vbios": "97.00.88.00.0F",
        "memory_bytes": 192265846784,
        "has_nvlink_link_counters": 0,
        "has_nvlink_packet_counters": 1,
        "power_mw": 140000,
        "power_limit_mw": 1000000,
        "default_power_limit_mw": 1000000,
        "max_power_limit_mw": 1000000,
        "sm_mhz": 120,
        "sm_max_mhz": 1965,
        "sm_application_mhz": "-",
        "memory_mhz": 3996,
        "memory_max_mhz": 3996,
        "memory_application_mhz": "-",
        "shutdown_c": "-",
        "slowdown_c": "-",
        "memory_max_c": "-",
    },
}


def bus_ids(count):
    """Return bus ids as NVML spells them."""
    return [f"00000000:{0x1B + index:02X}:00.0" for index in range(count)]


def addresses(count):
    """Return the same devices as sysfs spells them."""
    return [f"0000:{0x1B + index:02x}:00.0" for index in range(count)]


def gpus(count, *, broken=None):
    """Return scenario lines for *count* GPUs; *broken* maps an index to NVML's error code."""
    lines = ["driver 999.1"]
    for index, bus_id in enumerate(bus_ids(count)):
        code = (broken or {}).get(index, 0)
        lines.append(f"gpu {UUIDS[index]} {bus_id} {code} Mock GPU 80GB")
    return "\n".join(lines)


def shape(name, count=8, *, per_gpu=None, broken=None, **changes):
    """Return the scenario of *count* healthy GPUs of a shape, with *changes* to their values.

    *changes* are those of all GPUs (``temperature_c=95``, ``driver="535.1"``), *per_gpu* of one by
    its index; a key may name an NVLink (``"nvlink_state:3"``), a value be ``"-"`` (not supported)
    or ``"!15"`` (an error code).
    """
    lines = [gpus(count, broken=broken), "driver 550.163.01"]
    lines += [f"set * {key} {value}" for key, value in {**SHAPES[name], **changes}.items()]
    for index, own in (per_gpu or {}).items():
        lines += [f"set {index} {key} {value}" for key, value in own.items()]
    return "\n".join(lines)


@dataclass(frozen=True)
class MockNvml:
    """A built mock; `env` is what a process needs to meet it instead of the driver's library."""

    directory: Path

    def env(self, scenario):
        """Return the environment in which *scenario* is played."""
        content = scenario.encode(errors="surrogateescape")
        path = self.directory / f"scenario-{zlib.crc32(content):08x}.txt"
        env = {"LD_LIBRARY_PATH": str(self.directory), "MOCK_NVML": str(path)}
        change(env, scenario)
        return env


def change(env, scenario):
    """Play *scenario* from now on, to processes too that have begun with *env*.

    It may hold bytes that are no UTF-8, as the characters of ``surrogateescape``.
    """
    path = Path(env["MOCK_NVML"])
    new = path.with_suffix(".new")
    new.write_text(scenario + "\n", errors="surrogateescape")
    new.replace(path)


def build(directory, *, old=False):
    """Return the mock, compiled into *directory*; an *old* driver's library lacks functions."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        unavailable("no C compiler for the mock libnvidia-ml")
    library = directory / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror"]
    flags += ["-Wl,-soname,libnvidia-ml.so.1", *(["-DOLD_DRIVER"] if old else [])]
    subprocess.run(
        [compiler, *flags, "-o", str(library), *map(str, SOURCES)], check=True, timeout=60
    )
    return MockNvml(directory)
