"""The kernel's log as journald keeps it, for those who may not read ``/dev/kmsg``.

journald copies the kernel's records with their facility, so that what programs wrote into the
kernel's log can be told from what the kernel wrote (systemd.journal-fields(7)).
"""

import json
from collections.abc import Iterator
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.commands import ask, find
from gpuops.host.kmsg import KernelRecord
from gpuops.model import UnknownReason

BYTES_MAX = 64 * 2**20
_FIELDS = "MESSAGE,PRIORITY,SYSLOG_FACILITY,_SOURCE_MONOTONIC_TIMESTAMP"
_ARGUMENTS = ("-k", "-b", "-q", "--no-pager", "-r", "-o", "json")
_LINE_MAX = 65536
_KERNEL = "0"
_LEVELS = frozenset("01234567")


def journal_records(root: Path, timeout_s: float) -> list[KernelRecord]:
    """Return the kernel's records of this boot that journald shows this user, the oldest first.

    The newest are asked for first, so that a bound on the bytes costs the oldest. Their numbers
    are not the kernel's: they begin at 1, because nobody says whether the log's start is there.

    Raises:
        ProbeError: ``missing_tool`` without journalctl, ``no_permission`` where it shows nothing,
            ``timeout``.
    """
    program = find(root, "journalctl")
    if program is None:
        raise ProbeError("there is no journalctl", UnknownReason.MISSING_TOOL)
    argv = (program, *_ARGUMENTS, f"--output-fields={_FIELDS}")
    said = ask(argv, timeout_s, bytes_max=BYTES_MAX)
    if said.timed_out:
        raise ProbeError(f"journalctl {said.ending}", UnknownReason.TIMEOUT)
    records = list(parse_journal(said.output))
    if not records:
        told = said.first_line() or "it shows no line of the kernel"
        raise ProbeError(f"journalctl {said.ending}: {told}", UnknownReason.NO_PERMISSION)
    return [
        KernelRecord(number, record.level, record.since_boot_us, record.text)
        for number, record in enumerate(reversed(records), start=1)
    ]


def parse_journal(text: str) -> Iterator[KernelRecord]:
    """Yield the kernel's records in the JSON lines of *text*, in their order, numbered 0.

    Lines of another form and records of another facility are left out.
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
    return KernelRecord(0, int(level), int(str(since_boot_us)), text)


def _is_number(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 20


def _text(message: object) -> str | None:
    """Return the message; journald writes one that is no text as a list of bytes."""
    if isinstance(message, str):
        return message
    if not isinstance(message, list):
        return None
    try:
        return bytes(message).decode("utf-8", errors="replace")
    except (ValueError, TypeError):
        return None
