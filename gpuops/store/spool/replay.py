"""Send refused lines again, after an upgrade or a fix: ``gpuops db replay``.

A line is kept byte for byte until the store has committed it. The directory says whose it is
(``rejected``: ours, ``users/<uid>/rejected``: that user's), never the line itself; a user's line
must pass the rules of `gpuops.store.spool.forward` again. The locks are those of the flushers. A
replay that is killed after a commit finds its lines already there the next time.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from gpuops.errors import SpoolError, StoreError
from gpuops.host.clock import Clock
from gpuops.model import Json
from gpuops.store.backends import parse_url
from gpuops.store.engine import IncidentStore, open_store
from gpuops.store.spool.folders import open_file, open_folder, replace_file
from gpuops.store.spool.format import SpoolLine
from gpuops.store.spool.forward import USERS_DIR, Allowance, ForwardOptions, user_sender
from gpuops.store.spool.read import decode_entry, rejected_files
from gpuops.store.spool.segments import REJECTED_DIR, spool_error
from gpuops.store.spool.send import BATCH_BYTES, BATCH_LINES, SpoolSender, flush_lock
from gpuops.store.spool.users import ROOT

REPLAY_DEADLINE_S = 60.0
REASONS_SHOWN = 10
_HEAD_ONLY = "it was too long: only its head was kept"
_DAMAGED = "its record in the file of refused lines is damaged"


@dataclass(slots=True)
class ReplayReport:
    """What a replay did. Everything but ``reasons`` and ``note`` counts lines.

    Attributes:
        stored: New in the store.
        already_there: Known by the store.
        refused: Refused again; they stay, for these ``reasons``.
        note: Why some were not tried, or None.
    """

    stored: int = 0
    already_there: int = 0
    refused: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    note: str | None = None

    def most_frequent(self) -> list[tuple[str, int]]:
        """Return the most frequent reasons, and what all others make together."""
        found = self.reasons.most_common(REASONS_SHOWN)
        rest = self.refused - sum(n for _, n in found)
        return [*found, ("other reasons", rest)] if rest else found


@dataclass(slots=True)
class _KeptLine:
    """One record of a file of refused lines: what it is now, and what becomes of it."""

    file: str
    data: bytes
    fields: Json
    line: SpoolLine | None = None
    reason: str | None = None
    is_stored: bool = False

    @property
    def updated(self) -> bytes:
        """Return the record with the newest reason, all else unchanged."""
        if self.reason is None or not self.fields or self.fields["reason"] == self.reason:
            return self.data
        return json.dumps({**self.fields, "reason": self.reason}).encode("ascii") + b"\n"


def replay_rejected(
    options: ForwardOptions, *, dry_run: bool, deadline_s: float, clock: Clock
) -> ReplayReport:
    """Send the refused lines below ``options.spool_dir`` again, as root also those of users.

    If something is in the way, ``note`` says what. With *dry_run* the store and the files stay as
    they are. Each user gets an equal share of the time that is left.

    Raises:
        UsageError: The store's URL is malformed or its driver is not installed.
    """
    parse_url(options.store_url)
    report, end_ns = ReplayReport(), clock.mono_ns() + round(deadline_s * 1e9)
    spool = options.spool_dir
    uids = [uid for uid, records in users_records(spool).items() if _has_rejected(records)]
    owners: dict[Path, Sequence[int | None]] = {spool / USERS_DIR: uids} if uids else {}
    if _has_rejected(spool):
        owners = {spool: [None], **owners}
    if not owners:
        return report
    try:
        with open_store(
            options.store_url, mode="write", root=options.root, deadline_s=deadline_s
        ) as store:
            for directory, whose in owners.items():
                left_s = max((end_ns - clock.mono_ns()) / 1e9, 0.1)
                with flush_lock(directory, left_s) as has_lock:
                    if not has_lock:
                        report.note = f"a flusher is working on {directory}"
                        continue
                    for sender, uid in _senders(options, store, whose, clock, end_ns):
                        _replay(sender, uid, report, dry_run=dry_run)
    except (StoreError, SpoolError) as exc:
        report.note = str(exc)
    return report


def users_records(spool: Path) -> dict[int, Path]:
    """Return where root keeps what it refused of each user, by uid; it alone forwards."""
    if os.geteuid() != ROOT:
        return {}
    try:
        with open_folder(spool, USERS_DIR, uid=ROOT) as folder, os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return {}
    uids = sorted(int(name) for name in names if name.isascii() and name.isdecimal())
    return {uid: spool / USERS_DIR / str(uid) for uid in uids if uid != ROOT}


def _has_rejected(records: Path) -> bool:
    try:
        with open_folder(records, REJECTED_DIR, uid=os.geteuid()) as folder:
            return bool(rejected_files(folder))
    except OSError:
        return False


def _senders(
    options: ForwardOptions,
    store: IncidentStore,
    owners: Sequence[int | None],
    clock: Clock,
    end_ns: int,
) -> Iterator[tuple[SpoolSender, int | None]]:
    """Yield the sender for each user's lines (None: our own); each has a share of the time left."""
    for done, uid in enumerate(owners):
        now_ns = clock.mono_ns()
        share_ns = now_ns + (end_ns - now_ns) // (len(owners) - done)
        if uid is None:
            yield (
                SpoolSender(
                    options.spool_dir, store, cluster=options.cluster, clock=clock, end_ns=share_ns
                ),
                None,
            )
        else:
            # They were counted when they were read from the user's spool.
            allowance = Allowance()
            yield user_sender(options, store, uid, allowance, clock=clock, end_ns=share_ns), uid


def _replay(sender: SpoolSender, uid: int | None, report: ReplayReport, *, dry_run: bool) -> None:
    """Send what is kept in the sender's records again; the caller holds their lock."""
    records, owner = sender.records, os.geteuid() if uid is None else uid
    try:
        kept = list(_read(records))
        try:
            for batch in _batches(kept):
                if sender.remaining_s <= 0:
                    report.note = f"the time for {records / REJECTED_DIR} passed"
                    break
                lines = [item.line for item in batch if item.line is not None]
                refused = sender.resend(lines, owner, dry_run=dry_run)
                for index, item in enumerate(batch):
                    item.reason = refused.get(index)
                    item.is_stored = item.reason is None
        finally:
            report.stored += sender.counts.sent
            report.already_there += sender.counts.already_there
            again = [item.reason for item in kept if item.reason is not None]
            report.refused += len(again)
            report.reasons.update(again)
            if not dry_run:
                _rewrite(records, kept, sender.rejected_bytes_max)
    except OSError as exc:
        raise spool_error(records, exc.strerror or str(exc)) from exc


def _read(records: Path) -> Iterator[_KeptLine]:
    """Yield what is kept, by writer and number, in the order in which it was refused."""
    uid = os.geteuid()
    with open_folder(records, REJECTED_DIR, uid=uid) as folder:
        for name in rejected_files(folder):
            with os.fdopen(open_file(folder, name, uid=uid), "rb") as file:
                for data in file:
                    yield _decode(name, data)


def _decode(name: str, data: bytes) -> _KeptLine:
    try:
        fields = json.loads(data)
        origin, raw, _ = fields["origin"], fields["raw"], fields["reason"]
        raw = raw.encode("utf-8", "surrogateescape")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return _KeptLine(name, data, {}, reason=_DAMAGED)
    if not raw.endswith(b"\n"):
        return _KeptLine(name, data, {}, reason=_HEAD_ONLY)
    entry = decode_entry(raw, 0, origin, has_newline=True)
    reason = entry.bad_line.reason if entry.bad_line else None
    return _KeptLine(name, data, fields, entry.line, reason)


def _batches(kept: Sequence[_KeptLine]) -> Iterator[list[_KeptLine]]:
    """Yield the lines that can be sent, in order, as many at once as a flush sends."""
    batch: list[_KeptLine] = []
    size = 0
    for item in kept:
        if item.line is None:
            continue
        if batch and (len(batch) >= BATCH_LINES or size + len(item.data) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += len(item.data)
    if batch:
        yield batch


def _rewrite(records: Path, kept: Sequence[_KeptLine], bytes_max: int) -> None:
    """Remove stored lines from their files, and write newer reasons as far as *bytes_max* allows.

    Raises:
        OSError: A file cannot be written; it stays, and its stored lines are known the next time.
    """
    left = bytes_max - sum(len(item.data) for item in kept)
    with open_folder(records, REJECTED_DIR, uid=os.geteuid()) as folder:
        for name, group in groupby(kept, key=lambda item: item.file):
            items, lines = list(group), []
            for item in items:
                data = b"" if item.is_stored else item.updated
                growth = len(data) - len(item.data)
                if growth > max(left, 0):
                    data, growth = item.data, 0
                left -= growth
                lines.append(data)
            if lines == [item.data for item in items]:
                continue
            if any(lines):
                replace_file(folder, name, b"".join(lines), sync=True)
            else:
                os.unlink(name, dir_fd=folder)
