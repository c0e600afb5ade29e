"""State of the kernel: CPUs, taint, modules, swap; from ``/proc`` and ``/sys``."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.procfs import read_text
from gpuops.host.trust import entries_of, number_of, text_of
from gpuops.model import UnknownReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """Logical processors ``online`` and ``present``; None: not reported.

    ``governors``: how many frequency policies each governor has; none in a virtual machine.
    ``clock_sources`` are all available ones.
    """

    online: int | None = None
    present: int | None = None
    governors: Mapping[str, int] = field(default_factory=dict)
    clock_source: str | None = None
    clock_sources: tuple[str, ...] = ()


def read_cpu(root: Path = Path("/")) -> Cpu:
    """Return the state of this machine's processors."""
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
    """Return how many processors the list ``"0-3,8,10-11"`` has, None if it is no list."""
    count = 0
    for part in (text or "").split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return None
        count += int(last) - int(first) + 1 if dash else 1
    return count


@dataclass(frozen=True, slots=True)
class Taint:
    """The mask of ``/proc/sys/kernel/tainted``."""

    mask: int


@dataclass(frozen=True, slots=True)
class Modules:
    """Which of the requested modules are in the kernel, loaded or built in."""

    present: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SwapArea:
    """One line of ``/proc/swaps``."""

    name: str
    size_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Swap:
    """All swap areas in use."""

    areas: tuple[SwapArea, ...] = ()


@dataclass(frozen=True, slots=True)
class ShmemHugePages:
    """When shared memory is in transparent huge pages of 2 MiB; None: the kernel has none.

    ``setting`` is ``always``, ``within_size``, ``advise``, ``never``, ``deny`` or ``force``.
    """

    setting: str | None = None


def read_shmem_huge_pages(root: Path = Path("/")) -> ShmemHugePages:
    """Return the setting for pages of 2 MiB, which may inherit that for all sizes."""
    folder = root / "sys/kernel/mm/transparent_hugepage"
    for_all = _chosen(folder / "shmem_enabled")
    own = _chosen(folder / "hugepages-2048kB/shmem_enabled")
    has_own = own not in {None, "inherit"} and for_all not in {"deny", "force"}
    return ShmemHugePages(own if has_own else for_all)


def _chosen(path: Path) -> str | None:
    """Return the chosen word of ``always [never]``."""
    _, _, rest = (text_of(path) or "").partition("[")
    return rest.partition("]")[0] or None


def read_taint(root: Path = Path("/")) -> Taint:
    """Return the kernel's taint.

    Raises:
        ProbeError: The kernel does not report it.
    """
    mask = number_of(root / "proc/sys/kernel/tainted")
    if mask is None or mask < 0:
        text = f"cannot read a number from {root / 'proc/sys/kernel/tainted'}"
        raise ProbeError(text, UnknownReason.NOT_SUPPORTED)
    return Taint(mask)


def read_modules(root: Path, names: tuple[str, ...]) -> Modules:
    """Return which of the modules *names* are present.

    Raises:
        ProbeError: There is no ``/sys/module``.
    """
    folder = root / "sys/module"
    if names and not folder.is_dir():
        raise ProbeError(f"there is no {folder}", UnknownReason.NOT_SUPPORTED)
    present = [name for name in names if (folder / name.replace("-", "_")).is_dir()]
    return Modules(tuple(present), tuple(name for name in names if name not in present))


def read_swap(root: Path = Path("/")) -> Swap:
    """Return the swap areas; none if the kernel was built without swap.

    Raises:
        ProbeError: ``/proc/swaps`` exists and cannot be read.
    """
    path = root / "proc/swaps"
    return parse_swaps(read_text(path)) if path.exists() else Swap()


def parse_swaps(text: str) -> Swap:
    """Return the areas in ``/proc/swaps``; malformed lines are ignored."""
    areas = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 5 and fields[2].isdecimal() and fields[3].isdecimal():
            areas.append(SwapArea(fields[0], int(fields[2]) * 1024, int(fields[3]) * 1024))
    return Swap(tuple(areas))
