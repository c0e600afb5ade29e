"""Whether this process is in a container, and what of the machine it does not see there.

A container here is a set of namespaces (pyxis with enroot, Apptainer, Docker). The kernel's first
namespaces have fixed inode numbers (``include/uapi/linux/nsfs.h``, before 6.18
``include/linux/proc_ns.h``), so nothing outside has to be readable to tell one of the container's
own. Mount namespaces had no such number for long: there the runtimes' marks count.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.kmsg import open_kmsg

_FIRST_USER, _FIRST_PID = 0xEFFFFFFD, 0xEFFFFFFC
_MARKS = (".singularity.d", ".dockerenv", "run/.containerenv")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerFacts:
    """What this process finds around it.

    ``has_foreign_proc``: ``/proc`` shows another PID namespace, so that its numbers are not ours.
    ``kernel_log``: None where it can be read, else why not.
    """

    has_own_pids: bool = False
    has_own_users: bool = False
    has_mark: bool = False
    has_foreign_proc: bool = False
    kernel_log: str | None = None

    @property
    def is_container(self) -> bool:
        """Return whether this is a container."""
        return self.has_own_pids or self.has_own_users or self.has_mark


def container_facts(root: Path = Path("/")) -> ContainerFacts:
    """Return what this process sees of its namespaces and of the kernel's log below *root*."""
    reason = None
    try:
        os.close(open_kmsg(root))
    except ProbeError as exc:
        reason = str(exc)
    return ContainerFacts(
        has_own_pids=_is_own("pid", _FIRST_PID),
        has_own_users=_is_own("user", _FIRST_USER),
        has_mark=any((root / mark).exists() for mark in _MARKS),
        has_foreign_proc=_proc_self() not in {None, os.getpid()},
        kernel_log=reason,
    )


def _is_own(kind: str, first: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/self/ns/{kind}").stat().st_ino != first
    return False


def _proc_self() -> int | None:
    """Return the number of this process in ``/proc``, None where that is not mounted."""
    with suppress(OSError, ValueError):
        return int(os.readlink("/proc/self"))  # noqa: PTH115 no path but a number
    return None
