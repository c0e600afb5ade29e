"""The kernel's log since boot, from ``/dev/kmsg`` or from journald.

Under a fake root it is a plain file of such records. Times are microseconds of the kernel's own
clock since boot: unlike ``dmesg -T`` they do not drift against each other. The entire log is read,
in blocks: a storm of 170,000 lines must not hide the ten relevant lines among them.

Users who may not read ``/dev/kmsg`` read the log from journald. It copies the kernel's records with
their facility, which separates the kernel's lines from those that programs wrote into the kernel's
log (systemd.journal-fields(7)).
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.process.command import ask, find
from gpuops.host.trust import reason_of
from gpuops.model import UnknownReason

RECORD_MAX = 16384
# More than the largest log buffer of distribution kernels (32 MiB); only a bound against a log that
# grows faster than it is read.
BYTES_MAX = 256 * 2**20
_BLOCK_BYTES = 2**18
_PREFIX = re.compile(r"(\d{1,10}),(\d{1,20}),(\d{1,20}),[^;\n]{0,64};")
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})")
_FACILITY_SHIFT = 3
# What a rehearsal (`gpuops drill`) writes into its lines. Only root can write into this log.
REHEARSAL = "gpuops drill"
# Messages that quote what any user may choose: mount options (a mount in a namespace of the user's
# own fails with such a line), and command lines. fs/fs_parser.c, fs/fs_context.c, fs/super.c,
# security/yama/yama_lsm.c, fs/exec.c. The words are where a process' name cannot be, so that a name
# hides no other message.
_QUOTES = re.compile(
    r"[\w.-]{1,32}: (?:Unknown parameter|Unexpected value|[Bb]ad (?:value|mount option)|[Nn]o value"
    r"|[Uu]n(?:recognized|known) (?:mount )?option)\b|ptrace \w{1,16} of \"|process '"
)
_QUOTES_FIRST = (": Can't open blockdev", ": Can't lookup blockdev")
# Messages that begin with the name of a process, of at most 15 bytes, which it chooses itself:
# arch/x86/mm/fault.c, mm/page_alloc.c, mm/oom_kill.c.
_NAME_FIRST = re.compile(
    r"(?s:.{0,15}?)(?:\[\d{1,10}\][:, ]| ?\(\d{1,10}\)[:, ]"
    r"|: page allocation | invoked oom-killer: |: vmalloc )"
)
# What dmesg, journalctl (all of its ``-o short…``) and /dev/kmsg write in front of a message.
_IN_FRONT = re.compile(
    r"(?:\d{1,3},\d{1,20},\d{1,20},[^;\n]{0,64};|<\d{1,3}>)?"
    r"(?:(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,9})?|\d{4}-\d\d-\d\dT[\d:.,+Z-]{8,24}"
    r"|[A-Z][a-z]{2} \d{4}-\d\d-\d\d [\d:.]{8,18} \S{1,8}|\d{1,12}\.\d{6}"
    r"|\[\s{0,8}\d{1,10}\.\d{1,9}\]) (?:\S{1,64} )?kernel: )?"
    r"(?:\[\s{0,8}\d{1,10}\.\d{1,9}\] ?|\[[A-Z][a-z]{2} [A-Z][a-z]{2} [\d: ]{14,18}\] ?)?"
    r"(?:\[\s{0,6}[TC]\d{1,10}\] ?)?"
)


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One message of the kernel; ``level`` is 0 (emergency) to 7 (debug), as in syslog(2)."""

    sequence: int
    level: int
    since_boot_us: int
    text: str


def kernel_records(root: Path = Path("/")) -> Iterator[KernelRecord]:
    """Yield the kernel's own records, the oldest first, at most `BYTES_MAX` bytes.

    Raises:
        ProbeError: ``no_permission`` (``kernel.dmesg_restrict``), ``not_supported`` without a log.
    """
    for block in read_kmsg(root):
        yield from parse_kmsg(block)


def parse_kmsg(text: str, *, rehearsals: bool = False) -> Iterator[KernelRecord]:
    """Yield the records in *text* that the kernel itself wrote.

    Malformed lines are ignored, as are the ``KEY=value`` lines that follow a record, records of
    another facility than the kernel's (programs may write into this log too), and those that
    quote users (`quotes_user`). With *rehearsals* the marked records of `gpuops drill` are yielded
    as well.
    """
    for line in text.split("\n"):
        match = _PREFIX.match(line)
        if match is None:
            continue
        priority, sequence, since_boot_us = match.groups()
        if int(priority) >> _FACILITY_SHIFT and not (rehearsals and REHEARSAL in line):
            continue
        message = _unescape(line[match.end() :])
        if quotes_user(message):
            continue
        yield KernelRecord(int(sequence), int(priority) & 7, int(since_boot_us), message)


def quotes_user(text: str) -> bool:
    """Return whether the message *text* quotes what any user may choose; it proves nothing."""
    return _QUOTES.match(text) is not None or text.endswith(_QUOTES_FIRST)


def begins_with_name(text: str) -> bool:
    """Return whether the message *text* begins with a process' name, which it chooses itself."""
    return _NAME_FIRST.match(text) is not None


def message_of(line: str) -> str:
    """Return the kernel's message in *line*, without what dmesg or journald write in front."""
    match = _IN_FRONT.match(line)
    return line if match is None else line[match.end() :]


def _unescape(text: str) -> str:
    r"""Undo the kernel's escapes (``\x0a``) of bytes outside printable ASCII."""
    if "\\x" not in text:
        return text
    raw = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)
    try:
        return raw.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return raw


def read_kmsg(root: Path = Path("/")) -> Iterator[str]:
    """Yield the log's text in blocks of complete lines; one beyond `RECORD_MAX` may be truncated.

    Raises:
        ProbeError: See `kernel_records`.
    """
    fd = open_kmsg(root)
    try:
        yield from _blocks(_chunks(fd, root / "dev/kmsg"))
    finally:
        os.close(fd)


def open_kmsg(root: Path = Path("/")) -> int:
    """Return a file descriptor at the log's oldest record, which never blocks.

    Raises:
        ProbeError: See `kernel_records`.
    """
    path = root / "dev/kmsg"
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError as exc:
        raise ProbeError(
            f"may not read {path} (root or CAP_SYSLOG may)", UnknownReason.NO_PERMISSION
        ) from exc
    except OSError as exc:
        raise ProbeError(
            f"cannot open {path}: {exc.strerror}", UnknownReason.NOT_SUPPORTED
        ) from exc


def _blocks(chunks: Iterator[bytes]) -> Iterator[str]:
    """Join *chunks* to blocks that end at the end of a line."""
    kept: list[bytes] = []
    size = 0
    for chunk in chunks:
        kept.append(chunk)
        size += len(chunk)
        if size >= _BLOCK_BYTES:
            complete, newline, rest = b"".join(kept).rpartition(b"\n")
            if not newline:
                # A single line of more than a block: only its beginning is read.
                complete, rest = rest, b""
            yield complete.decode("utf-8", errors="replace")
            kept, size = [rest], len(rest)
    yield b"".join(kept).decode("utf-8", errors="replace")


def _chunks(fd: int, path: Path) -> Iterator[bytes]:
    left = BYTES_MAX
    while left > 0:
        try:
            chunk = os.read(fd, RECORD_MAX)
        except BlockingIOError:
            return
        except BrokenPipeError:
            # The record was overwritten meanwhile; the next read returns the oldest.
            continue
        except OSError as exc:
            raise ProbeError(f"cannot read {path}: {exc.strerror}", reason_of(exc)) from exc
        if not chunk:
            return
        left -= len(chunk)
        yield chunk


JOURNAL_BYTES_MAX = 64 * 2**20
_FIELDS = "MESSAGE,PRIORITY,SYSLOG_FACILITY,_SOURCE_MONOTONIC_TIMESTAMP"
_ARGUMENTS = ("-k", "-b", "-q", "--no-pager", "-r", "-o", "json")
_LINE_MAX = 65536
_KERNEL = "0"
_LEVELS = frozenset("01234567")


def journal_records(root: Path, timeout_s: float) -> list[KernelRecord]:
    """Return the kernel's records of this boot that journald shows this user, the oldest first.

    The newest are read first, so that the bound on the bytes drops the oldest. Their numbers are
    not the kernel's: they begin at 1, because it is unknown whether the log's start is included.

    Raises:
        ProbeError: ``missing_tool`` without journalctl, ``no_permission`` if it shows nothing,
            ``timeout``.
    """
    program = find(root, "journalctl")
    if program is None:
        raise ProbeError("there is no journalctl", UnknownReason.MISSING_TOOL)
    argv = (program, *_ARGUMENTS, f"--output-fields={_FIELDS}")
    answer = ask(argv, timeout_s, bytes_max=JOURNAL_BYTES_MAX)
    if answer.timed_out:
        raise ProbeError(f"journalctl {answer.ending}", UnknownReason.TIMEOUT)
    records = list(parse_journal(answer.output))
    if not records:
        message = answer.first_line() or "it shows no line of the kernel"
        raise ProbeError(f"journalctl {answer.ending}: {message}", UnknownReason.NO_PERMISSION)
    return [
        KernelRecord(number, record.level, record.since_boot_us, record.text)
        for number, record in enumerate(reversed(records), start=1)
    ]


def parse_journal(text: str) -> Iterator[KernelRecord]:
    """Yield the kernel's records in the JSON lines of *text*, in their order, numbered 0.

    Malformed lines, records of another facility and those that quote users are ignored.
    """
    for line in text.split("\n"):
        if 0 < len(line) <= _LINE_MAX:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            record = _record(entry)
            if record is not None:
                yield record


def _record(entry: object) -> KernelRecord | None:
    if not isinstance(entry, dict) or entry.get("SYSLOG_FACILITY") != _KERNEL:
        return None
    level, since_boot_us = entry.get("PRIORITY"), entry.get("_SOURCE_MONOTONIC_TIMESTAMP")
    text = _text(entry.get("MESSAGE"))
    if level not in _LEVELS or text is None or not _is_number(since_boot_us):
        return None
    if quotes_user(text):
        return None
    return KernelRecord(0, int(level), int(str(since_boot_us)), text)


def _is_number(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 20


def _text(message: object) -> str | None:
    """Return the message; journald encodes one that is not valid text as a list of bytes."""
    if isinstance(message, str):
        return message
    if not isinstance(message, list):
        return None
    try:
        return bytes(message).decode("utf-8", errors="replace")
    except (ValueError, TypeError):
        return None
