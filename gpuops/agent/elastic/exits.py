"""What one worker's end looked like: its status, its exception, its last step, its last lines."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuops.agent.elastic.teardown import ObservedExit, SentSignal, signal_name, was_ours
from gpuops.agent.monitors.progress import RankProgress
from gpuops.host.trust import read_json
from gpuops.log import printable
from gpuops.model import WorkerExit

TAIL_LINES = 30
TAIL_BYTES = 64 * 1024
LINE_CHARS_MAX = 400
TEXT_CHARS_MAX = 1600
SCRUB_CHARS_MAX = 4096  # of a line; more than is kept, so that no half of a secret is
ERROR_BYTES_MAX = 2**20
TRACEBACK_LINES_MAX = 60
DUMP_LINES_MAX = 12
# The parts of a dump by faulthandler, after its first line.
_DUMP_START = "Fatal Python error: "
_MODULES = "Extension modules: "
_DUMP_PART = re.compile(r"(?:Current t|T)hread 0x|  File \"|  <|  \.\.\.|Python runtime state: ")
ScrubLines = Callable[[Sequence[str]], list[str]]


@dataclass(slots=True)
class RankFiles:
    """The files that one rank leaves; None where that stream goes to the console only."""

    stdout: Path | None = None
    stderr: Path | None = None
    torch_error: Path | None = None
    exception: Path | None = None
    stacks: Path | None = None  # appended to at each SIGUSR2, see `gpuops.worker.shim`


@dataclass(frozen=True, slots=True)
class ExceptionNote:
    """What a rank wrote down when its program raised."""

    type: str
    message: str
    traceback: tuple[str, ...] = ()
    mono_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitContext:
    """Who a worker is."""

    node: str
    rank: int
    local_rank: int
    pid: int


def to_exit(  # noqa: PLR0913 a record has as many sources
    place: ExitContext,
    seen: ObservedExit,
    *,
    sent: SentSignal | None,
    note: ExceptionNote | None,
    progress: RankProgress,
    tail: Sequence[str] = (),
    log_path: Path | None = None,
) -> WorkerExit:
    """Return the end of one worker as one record."""
    name = signal_name(seen.code)
    error_mono_ns, finished_ns = note.mono_ns if note else None, progress.finished_ns
    # One that came to its end because we asked it to is not done.
    by_itself = sent is None or (finished_ns or 0) < sent.at_mono_ns
    return WorkerExit(
        node=place.node,
        rank=place.rank,
        local_rank=place.local_rank,
        pid=place.pid,
        exit_code=None if name else seen.code,
        signal=name,
        terminated=was_ours(sent, name, error_mono_ns),
        seen_us=seen.seen_us,
        seen_mono_ns=seen.seen_mono_ns,
        exception_type=note.type if note else None,
        exception_message=note.message if note else None,
        traceback=note.traceback if note else (),
        error_mono_ns=error_mono_ns,
        finished_mono_ns=finished_ns if by_itself else None,
        last_step=progress.last_step,
        beats=progress.beats,
        last_beat_mono_ns=progress.last_mono_ns,
        log_tail=tuple(tail),
        log_path=None if log_path is None else str(log_path),
    )


def read_exception(files: RankFiles, scrub: ScrubLines) -> ExceptionNote | None:
    """Return the exception that the rank noted: in our file, else in torch's ``error.json``."""
    ours = _read_json(files.exception)
    if ours is not None:
        mono_ns = ours.get("mono_ns")
        return ExceptionNote(
            type=_clean(str(ours.get("type")), scrub),
            message=_clean(str(ours.get("message")), scrub),
            traceback=_lines(ours.get("traceback"), scrub),
            mono_ns=mono_ns if isinstance(mono_ns, int) else None,
        )
    message = (_read_json(files.torch_error) or {}).get("message")
    if not isinstance(message, dict):
        return None
    kind, _, text = str(message.get("message")).partition(": ")
    info = message.get("extraInfo")
    callstack = info.get("py_callstack") if isinstance(info, dict) else None
    lines = _lines(str(callstack or "").splitlines(), scrub)
    return ExceptionNote(_clean(kind, scrub), _clean(text, scrub), lines)


def _read_json(path: Path | None) -> dict[str, Any] | None:
    found = None if path is None else read_json(path, ERROR_BYTES_MAX)
    return None if found is None else found[0]


def _lines(value: object, scrub: ScrubLines) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    lines = [part for line in value for part in str(line).split("\n")]
    return _shown(lines[-2 * TRACEBACK_LINES_MAX :], scrub, TRACEBACK_LINES_MAX, TEXT_CHARS_MAX)


def _clean(text: str, scrub: ScrubLines) -> str:
    lines = text[:TAIL_BYTES].split("\n")
    return "\n".join(_shown(lines, scrub, len(lines), TEXT_CHARS_MAX))[:TEXT_CHARS_MAX]


def _shown(lines: Sequence[str], scrub: ScrubLines, count: int, chars: int) -> tuple[str, ...]:
    """Return the last *count* of *lines*; a key may begin above them, so all are scrubbed."""
    clean = scrub([printable(line)[:SCRUB_CHARS_MAX] for line in lines])
    return tuple(line[:chars] for line in clean[-count:])


def read_tail(files: RankFiles, scrub: ScrubLines) -> tuple[tuple[str, ...], Path | None]:
    """Return the last lines of a rank's output, standard error last, and the file to read."""
    errors = _tail(files.stderr, scrub, TAIL_LINES)
    output = _tail(files.stdout, scrub, TAIL_LINES - min(len(errors), 2 * TAIL_LINES // 3))
    shown = (*output, *errors)[-TAIL_LINES:]
    return shown, files.stderr if errors or files.stdout is None else files.stdout


def _tail(path: Path | None, scrub: ScrubLines, count: int) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ()
    lines = [line.rpartition("\r")[2] for line in text.split("\n") if line.strip()]
    return _shown(_shorten_dump(lines), scrub, count, LINE_CHARS_MAX)


def _shorten_dump(lines: list[str]) -> list[str]:
    """Return *lines* with at most `DUMP_LINES_MAX` of a dump by faulthandler, without its modules.

    It has the stacks of all threads, and follows the reason: that has to stay in the tail.
    """
    lines = [line for line in lines if not line.startswith(_MODULES)]
    starts = [i for i, line in enumerate(lines, start=1) if line.startswith(_DUMP_START)]
    if not starts:
        return lines
    start = end = starts[-1]
    while end < len(lines) and _DUMP_PART.match(lines[end]):
        end += 1
    threads = range(start, end)
    current = next((i for i in threads if lines[i].startswith("Current thread")), start)
    return [*lines[:start], *lines[current : min(end, current + DUMP_LINES_MAX)], *lines[end:]]
