"""The steps of faults as data, so that each can be shown, sent to a process, performed and tested.

A step that holds a resource (disk space, memory) returns the function that releases it.
"""

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpuops.config.resolve import environ
from gpuops.drill.find import Victim, send
from gpuops.errors import DrillError, ProbeError
from gpuops.host.process.command import ask, find, module_command
from gpuops.host.process.sidecar import start_sidecar

COMMAND_TIMEOUT_S = 10.0
_CHUNK_BYTES = 2**20
_UNKNOWN_QDISC = "qdisc kind is unknown"  # tc(8); its sixth word names the kind
Release = Callable[[], None]


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Send the signal called *name* to *victim*."""

    victim: Victim
    name: str


@dataclass(frozen=True, slots=True)
class RunProgram:
    """Run a program; *words* begin with its name."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TakeSpace:
    """Hold *size_bytes* of the file system of *directory* in an unlinked file.

    The kernel frees the space when this process ends, however it ends.
    """

    directory: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WriteLines:
    """Append *lines* to the file *path*, each in one write, as ``/dev/kmsg`` requires."""

    path: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TakeMemory:
    """Hold *size_bytes* of memory in a child that the OOM killer would kill first."""

    size_bytes: int


Step = SendSignal | RunProgram | TakeSpace | WriteLines | TakeMemory
_UNDO_STEPS = {"signal": SendSignal, "program": RunProgram}


def to_json(step: Step) -> dict[str, Any]:
    """Return *step*, one that can undo another, as JSON.

    Raises:
        ValueError: A step that cannot.
    """
    for kind, cls in _UNDO_STEPS.items():
        if isinstance(step, cls):
            return {"kind": kind, **asdict(step)}
    raise ValueError(f"{step} undoes nothing")


def from_json(data: Mapping[str, Any]) -> Step:
    """Return the step in *data*.

    Raises:
        KeyError, TypeError, ValueError: Not a step.
    """
    if data["kind"] == "signal":
        return SendSignal(Victim(**data["victim"]), str(signal.Signals[data["name"]].name))
    if data["kind"] == "program":
        return RunProgram(tuple(map(str, data["words"])))
    raise ValueError(f"{data['kind']!r} is no step")


def perform(step: Step) -> Release | None:
    """Perform *step*; return the function that releases what it holds, if anything.

    Raises:
        DrillError: It failed; says why.
    """
    match step:
        case SendSignal():
            if not send(step.victim, signal.Signals[step.name]):
                raise DrillError(f"{step.victim} has ended, or is another process by now")
        case RunProgram():
            _run(step.words)
        case WriteLines():
            _write(step)
        case TakeSpace():
            return _take_space(step)
        case TakeMemory():
            return _take_memory(step)
    return None


def _run(argv: tuple[str, ...]) -> None:
    program = find(Path("/"), argv[0])
    if program is None:
        raise DrillError(f"this machine has no {argv[0]}")
    try:
        answer = ask([program, *argv[1:]], COMMAND_TIMEOUT_S)
    except ProbeError as exc:
        raise DrillError(str(exc)) from exc
    if answer.exit_code != 0:
        message = answer.first_line() or answer.ending
        if _UNKNOWN_QDISC in message:
            message = f"this kernel has no sch_{argv[6]} (try modprobe sch_{argv[6]})"
        raise DrillError(f"`{' '.join(argv)}`: {message}")


def _write(step: WriteLines) -> None:
    try:
        for line in step.lines:
            _append(step.path, line)
    except OSError as exc:
        raise DrillError(f"cannot write {step.path}: {exc.strerror}") from exc


def _append(path: str, line: str) -> None:
    # The kernel accepts ten lines in five seconds from one open file of its log (printk_devkmsg).
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(fd, line.encode() + b"\n")
    finally:
        os.close(fd)


def _take_space(step: TakeSpace) -> Release:
    with contextlib.ExitStack() as undo:
        try:
            file = undo.enter_context(tempfile.TemporaryFile(dir=step.directory, buffering=0))
            _grow(file.fileno(), step.size_bytes)
        except OSError as exc:
            raise DrillError(f"cannot fill {step.directory}: {exc.strerror}") from exc
        return undo.pop_all().close
    raise AssertionError("not reached")


def _grow(fd: int, size_bytes: int) -> None:
    """Extend the file to its size, with all blocks allocated."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError:
        block = bytes(_CHUNK_BYTES)
        while (at := os.lseek(fd, 0, os.SEEK_CUR)) < size_bytes:
            os.write(fd, block[: min(_CHUNK_BYTES, size_bytes - at)])
        os.fsync(fd)


def _take_memory(step: TakeMemory) -> Release:
    argv = module_command("gpuops.drill.machine", str(step.size_bytes))
    try:
        hog = start_sidecar(argv, environ())
    except OSError as exc:
        raise DrillError(f"cannot start the memory hog: {exc.strerror}") from exc
    if hog.read_line() != "full":
        code = hog.wait()
        raise DrillError(f"the memory hog ended with {code} before it had its memory")

    def release() -> None:
        hog.wait()

    return release


def free_bytes(directory: Path) -> int:
    """Return the bytes that an unprivileged user may still write into *directory*.

    Raises:
        DrillError: It cannot be read.
    """
    try:
        return shutil.disk_usage(directory).free
    except OSError as exc:
        raise DrillError(f"cannot read {directory}: {exc.strerror}") from exc
