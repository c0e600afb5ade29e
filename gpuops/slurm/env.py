"""The environment that slurmd gives its hooks.

Source: Slurm's Prolog and Epilog Guide, "Environment variables". A hook gets neither PATH nor
HOME, a HealthCheckProgram nothing but SLURMD_NODENAME.

``SLURM_JOB_GPUS`` counts the GPUs of this node from 0: the device files in the order of gres.conf,
or the GPUs by PCI address with ``AutoDetect=nvml``. If the driver assigned the minor numbers in
another order, one number means two different GPUs (gres.conf(5), "Links").
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

# The prefix of a GPU number that Slurm assigned.
NUMBERED = "slurm:"

_JOB_ID = "SLURM_JOB_ID"
_USER_ID = "SLURM_JOB_UID"
_GPUS = "SLURM_JOB_GPUS"
_EXIT_STATUSES = ("SLURM_JOB_EXIT_CODE", "SLURM_JOB_DERIVED_EC")


@dataclass(frozen=True, slots=True, kw_only=True)
class HookJob:
    """The job that a hook runs for.

    ``gpus``: its GPUs on this node as ``slurm:3``, None if Slurm does not set them: a job without
    GPUs looks like one of a site whose gres.conf names no device files. ``exit_codes``: of the
    batch script and the worst of its steps, 128 + N for signal N; empty in a prolog.
    """

    id: str | None = None
    uid: int | None = None
    gpus: frozenset[str] | None = None
    exit_codes: tuple[int, ...] = ()

    @property
    def failed(self) -> bool:
        """Return whether the job ended with anything but zero."""
        return any(self.exit_codes)


def job_of(env: Mapping[str, str]) -> HookJob:
    """Return the job in the environment *env* of a prolog or epilog."""
    codes = tuple(
        code for name in _EXIT_STATUSES if (code := _exit_code(env.get(name))) is not None
    )
    user = _number(env.get(_USER_ID))
    return HookJob(
        id=_number(env.get(_JOB_ID)),
        uid=None if user is None else int(user[:10]),
        gpus=_numbers(env.get(_GPUS)),
        exit_codes=codes,
    )


def _number(text: str | None) -> str | None:
    return text if text and text.isascii() and text.isdecimal() else None


def _numbers(text: str | None) -> frozenset[str] | None:
    """Return the numbers in ``0,2-3``; None if it holds anything else: then all GPUs are meant."""
    if not text:
        return None
    found: set[str] = set()
    for word in text.split(","):
        first, dash, last = word.partition("-")
        low, high = _number(first), _number(last if dash else first)
        if low is None or high is None or not 0 <= int(high) - int(low) < 1024:
            return None
        found.update(f"{NUMBERED}{number}" for number in range(int(low), int(high) + 1))
    return frozenset(found)


def _exit_code(text: str | None) -> int | None:
    """Return the exit code in a status of wait(2)."""
    number = _number(text)
    if number is None or int(number) > 0xFFFF:
        return None
    status = int(number)
    if os.WIFSIGNALED(status):
        return 128 + os.WTERMSIG(status)
    return os.WEXITSTATUS(status)
