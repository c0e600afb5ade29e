"""fio: ``fio --output-format=json`` (3.0 and later say bytes per second)."""

import os
from pathlib import Path
from typing import Any

from gpuops.errors import ProbeError
from gpuops.host.tools.run import ToolOutput, ToolRate, measure, rate_of
from gpuops.model import Entity, EntityKind, UnknownReason

_BYTES_MAX = 2**30
_BLOCK_BYTES = 4 * 2**20
_FREE_SHARE = 10


def measure_disk(tool: str, folder: Path, seconds: float) -> ToolOutput:
    """Measure direct writes and reads of a file in *folder*, of 1 GiB or a tenth of its room.

    The file has no name, so that none stays behind.

    Raises:
        ProbeError: See `run.measure`; ``not_supported``: no such file can be made.
    """
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        text = f"cannot write in {folder}: {exc.strerror}"
        raise ProbeError(text, UnknownReason.NOT_SUPPORTED) from exc
    with os.fdopen(fd, "wb"):
        room = os.fstatvfs(fd)
        size = min(_BYTES_MAX, room.f_bavail * room.f_frsize // _FREE_SHARE)
        size -= size % _BLOCK_BYTES
        os.truncate(fd, size)  # fio removes a file that is too short, by its name
        words = f"filename=/proc/self/fd/{fd} size={size} bs={_BLOCK_BYTES} direct=1 thread"
        words += f" ioengine=psync time_based runtime={max(round(seconds / 2), 1)}"
        words += " name=write rw=write end_fsync=1 name=read rw=read stonewall"
        options = [f"--{word}" for word in words.split()]
        part = Entity(EntityKind.MOUNT, str(folder))
        return measure(
            lambda path: [tool, "--output-format=json", f"--output={path}", *options],
            lambda found: parse(found, part),
            seconds,
            pass_fds=(fd,),
        )


def parse(document: Any, part: Entity) -> ToolOutput:  # noqa: ANN401 JSON
    """Return the rates of *part*: of each job, whose name is ``read`` or ``write``.

    Raises:
        LookupError, TypeError, ValueError: It is not as documented, or a job failed.
    """
    rates = []
    for job in document["jobs"]:
        if job["error"]:
            raise ValueError(f"{job['jobname']}: error {job['error']}")
        rate = rate_of(job[job["jobname"]]["bw_bytes"]) / 1e9
        rates.append(ToolRate({"tool": "fio", "work": job["jobname"]}, (rate,), part))
    return ToolOutput(str(document["fio version"]), tuple(rates))
