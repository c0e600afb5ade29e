"""A libnvidia-ml in C for the real pynvml: struct layouts, error codes and hangs are real."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from support.services import unavailable

SOURCE = Path(__file__).with_name("mock.c")
UUIDS = tuple(f"GPU-0000000{index}-aaaa-bbbb-cccc-00000000000{index}" for index in range(8))


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


@dataclass(frozen=True)
class MockNvml:
    """A built mock; `env` is what a process needs to meet it instead of the driver's library."""

    directory: Path

    def env(self, scenario):
        path = self.directory / f"scenario-{abs(hash(scenario))}.txt"
        path.write_text(scenario + "\n")
        return {"LD_LIBRARY_PATH": str(self.directory), "MOCK_NVML": str(path)}


def build(directory):
    """Return the mock, compiled into *directory*."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        unavailable("no C compiler for the mock libnvidia-ml")
    library = directory / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE)], check=True, timeout=60)
    return MockNvml(directory)
