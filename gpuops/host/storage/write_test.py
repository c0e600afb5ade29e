"""Write test of folders: a small file is created, synced and removed, each in its own child."""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.process import probe
from gpuops.host.process.abandoned import abandoned

ASKED_MAX = 64
_MARGIN_S = 0.1
_CONTENT = b"gpuops writes this to see whether it can, and removes it\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteAnswer:
    """The result of writing in one folder.

    ``error`` is the errno's name; ``silent``: why there is no answer, ``stuck`` if the writing
    process was inside the kernel. Neither: it was written.
    """

    path: str
    elapsed_s: float
    error: str | None = None
    silent: str | None = None
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class Writes:
    """The results of all folders."""

    answers: tuple[WriteAnswer, ...] = ()


def read_writes(root: Path, budget_s: float, paths: Sequence[str]) -> Writes:
    """Return the results of writing in *paths* below *root*, in parallel, within *budget_s*."""
    deadline_s = max(budget_s - probe.STOP_S - _MARGIN_S, 0.1)
    left, asked = abandoned(), {}
    for path in paths[:ASKED_MAX]:
        child = probe.start_call(
            _question(root / path.lstrip("/")),
            deadline_s=deadline_s,
            question=f"write {root} {path}",
            left=left,
        )
        asked[child.pid] = path, child
    answers = [
        _answer(asked[child.pid][0], outcome)
        for child, outcome in probe.watch([child for _, child in asked.values()])
    ]
    return Writes(tuple(sorted(answers, key=lambda answer: answer.path)))


def _question(folder: Path) -> Callable[[], str | None]:
    def ask() -> str | None:
        try:
            write_and_remove(folder)
        except OSError as exc:
            return errno.errorcode.get(exc.errno or 0, str(exc))
        return None

    return ask


def write_and_remove(folder: Path) -> None:
    """Create a file in *folder*, write and sync it, and remove it.

    Raises:
        OSError: One of these failed.
    """
    # One name per node: the next run removes the file of a killed one.
    path = folder / f".gpuops-writes-{os.uname().nodename}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except FileExistsError:
        path.unlink(missing_ok=True)
        fd = os.open(path, flags, 0o600)
    try:
        os.write(fd, _CONTENT)
        os.fsync(fd)
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _answer(path: str, outcome: probe.ProbeOutcome) -> WriteAnswer:
    error = silent = None
    try:
        error = probe.answer(outcome)
    except ProbeError as exc:
        silent = str(exc)
    return WriteAnswer(
        path=path,
        elapsed_s=outcome.elapsed_s,
        error=error,
        silent=silent,
        stuck=outcome.stuck,
    )
