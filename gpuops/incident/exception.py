"""The exception of a worker: its lines, its location, and when two are the same."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from gpuops.model import WorkerExit

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]{1,400})", line (?P<line>\d+)')
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")
# torch prefixes the last output of a rank with its rank: "[rank3]: Traceback …".
_RANK_PREFIX = re.compile(r"^\[(?:rank|default)\d+\]:\s?")
# libstdc++'s last words for an uncaught exception, and glibc's for assert(3).
_TERMINATE = re.compile(r"^terminate called after throwing an instance of '([^']{1,200})'")
_WHAT = re.compile(r"^\s*what\(\):\s*(\S.*)")
_ASSERTION = re.compile(r"^\S.{0,800}: Assertion [`'].{1,800}' failed\.?\s*$")
_SOURCE_FOLDER = re.compile(r"(?:\.{0,2}/)[^\s\[\]:]{0,300}/(?=[^\s\[\]:/]{1,100}:\d)")
_LAST_LINE = re.compile(r"^(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning))\b")


def strip_rank_prefix(line: str) -> str:
    """Return *line* without torch's rank prefix."""
    return _RANK_PREFIX.sub("", line)


def drop_frames(lines: Iterable[str]) -> list[str]:
    """Return *lines* without the frames of tracebacks."""
    texts = map(strip_rank_prefix, lines)
    return [line for line in texts if not line.startswith("    ") and not _FRAME.match(line)]


def exception_lines(worker: WorkerExit) -> list[str]:
    """Return the exception's own line, then the other lines of its traceback."""
    if worker.exception_type is None:
        return []
    message = worker.exception_message or ""
    short = worker.exception_type.rpartition(".")[2]
    if not message.startswith((short, worker.exception_type)):
        message = f"{worker.exception_type}: {message}"
    return message.splitlines() + drop_frames(worker.traceback)


def abort_reason(lines: Iterable[str]) -> str | None:
    """Return why a process aborted itself by its log, None where that does not say it.

    An uncaught C++ exception, as ``"std::runtime_error: text"``, or a failed assertion; of a source
    file only the name.
    """
    kind, found = "", None
    for line in map(strip_rank_prefix, lines):
        if match := _TERMINATE.match(line):
            kind = found = match[1]
        elif kind and (match := _WHAT.match(line)):
            found = f"{kind}: {match[1]}"
        elif _ASSERTION.match(line):
            found = line
    return None if found is None else _SOURCE_FOLDER.sub("", found).strip()


def headline(worker: WorkerExit, width: int = 160) -> str:
    """Return the exception in one line of at most *width* characters."""
    lines = exception_lines(worker)
    first = lines[0].strip().removesuffix(":") if lines else ""
    return truncate(first, width)


def truncate(text: str, width: int) -> str:
    """Return *text* in at most *width* characters."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def user_frame(worker: WorkerExit) -> str | None:
    """Return ``"data.py:88"``, the innermost frame outside installed packages, if known."""
    frames = [
        match for line in worker.traceback if (match := _FRAME.match(strip_rank_prefix(line)))
    ]
    own = [f for f in frames if not _is_installed(f["file"])] or frames
    return f"{PurePosixPath(own[-1]['file']).name}:{own[-1]['line']}" if own else None


def _is_installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file or file.startswith("<frozen")


def signature(worker: WorkerExit) -> tuple[str, str] | None:
    """Return a key that is equal for two ranks that raised the same exception.

    Type and location; without a traceback, the message without numbers, because ranks put their
    own rank, address or shape into it.
    """
    if worker.exception_type is None:
        return None
    where = user_frame(worker) or _NUMBER.sub("#", worker.exception_message or "")
    return worker.exception_type, where


def printed_exception(lines: Iterable[str]) -> str | None:
    """Return the last line of a traceback in a log, if there is one."""
    found, last = False, None
    for line in map(strip_rank_prefix, lines):
        if line.startswith("Traceback (most recent call last)"):
            found = True
        elif found and _LAST_LINE.match(line):
            last = line.strip()
    return last
