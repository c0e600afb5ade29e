"""Processors, their frequency governor and the kernel's clock source, from sysfs.

Documentation/ABI/testing/sysfs-devices-system-cpu and sysfs-devices-system-clocksource of Linux.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuops.host.files import entries_of, text_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """Logical processors ``online`` and ``present``; None: not told.

    ``governors``: how many frequency policies each governor has; none in a virtual machine.
    ``clock_sources`` are all that this kernel could use.
    """

    online: int | None = None
    present: int | None = None
    governors: Mapping[str, int] = field(default_factory=dict)
    clock_source: str | None = None
    clock_sources: tuple[str, ...] = ()


def read_cpu(root: Path = Path("/")) -> Cpu:
    """Return what this machine tells about its processors."""
    cpu = root / "sys/devices/system/cpu"
    clock = root / "sys/devices/system/clocksource/clocksource0"
    governors = (text_of(item / "scaling_governor") for item in entries_of(cpu / "cpufreq"))
    return Cpu(
        online=count_cpus(text_of(cpu / "online")),
        present=count_cpus(text_of(cpu / "present")),
        governors=dict(sorted(Counter(name for name in governors if name).items())),
        clock_source=text_of(clock / "current_clocksource") or None,
        clock_sources=tuple((text_of(clock / "available_clocksource") or "").split()),
    )


def count_cpus(text: str | None) -> int | None:
    """Return how many processors the list ``"0-3,8,10-11"`` names, None where it is no list."""
    count = 0
    for part in (text or "").split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return None
        count += int(last) - int(first) + 1 if dash else 1
    return count
