"""Forward the spools of users to the fleet's store, as root: ``gpuops db flush``.

A user may write anything into their own spool, at any moment. So entries are opened as in
`gpuops.store.spool.folders`, offsets and refused lines are kept in root's own spool
(``users/<uid>``), and each user has bounds of time, lines and bytes. A line must be about a run,
this node and a time that can be true, an incident's id must be made of its run's, and
`find_foreign` refuses what belongs to another user. The uid of the spool is recorded with each
event: one of a user never makes a strike or a drain.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path

from sqlalchemy import Connection

from gpuops.errors import SpoolError, StoreError
from gpuops.host.clock import Clock
from gpuops.model import Event, Severity, run_incident_id
from gpuops.store.engine import IncidentStore, open_store
from gpuops.store.events import new_event
from gpuops.store.ingest.envelope import EventEnvelope
from gpuops.store.ingest.ownership import find_foreign
from gpuops.store.spool.folders import ensure_folder, open_file, open_folder, replace_file
from gpuops.store.spool.format import SpoolLine
from gpuops.store.spool.read import BadLine, RejectedLine, SpoolEntry, read_lines
from gpuops.store.spool.segments import (
    SpoolSegment,
    ensure_own_directory,
    list_segments,
    open_segment,
    read_offset,
    remove_marks,
)
from gpuops.store.spool.send import FlushReport, SpoolSender, flush_lock
from gpuops.store.spool.users import find_user_spools, node_names
from gpuops.units import US_PER_S

USERS_DIR = "users"
# An agent writes about a hundred events an hour; a failure of 8 ranks is about 12, of 200 KB.
LINES_PER_HOUR = 10_000
BYTES_PER_HOUR = 32 * 2**20
REJECTED_BYTES_MAX = 2**20
# An honest segment is at most this long (`gpuops.store.spool.write.SEGMENT_BYTES`) and one batch.
SEGMENT_BYTES_MAX = 8 * 2**20
# What one pass sees: entries of a directory, and segments of a spool.
ENTRIES_MAX = 1024
SEGMENTS_MAX = 4096
MEASURED_MAX = 1024
AGE_MAX_US = 14 * 86_400 * US_PER_S
AHEAD_MAX_US = 300 * US_PER_S
_LOCK_S = 0.1
_HOUR_US = 3600 * US_PER_S
_ALLOWANCE = "allowance.json"
_ALLOWANCE_BYTES_MAX = 4096
# What the agents of a run record; no check, drain, resume or repair.
_KINDS = re.compile(
    r"(?:run|attempt|incident|decision|checkpoint|agent|worker|board|drain|drill)\.[a-z_.]+"
    r"|node\.(?:excluded|doubted)|tool\.failed"
)
# An agent records these about its node; they count only if root did.
_NOT_FORWARDED = frozenset({"node.seen"})


@dataclass(slots=True)
class ForwardReport:
    """What a pass did. Everything but ``users``, ``held_back`` and ``note`` counts lines.

    Attributes:
        users: Spools with something to send.
        held_back: Of them, those whose user has used up an hour's allowance.
        sent: New in the store.
        already_there: Sent before, and known by the store.
        refused: Well-formed lines that their user may not write; quarantined.
        corrupt: Damaged lines; quarantined.
        torn: Last lines cut short by a crash; skipped.
        note: Why something remains, or None.
    """

    users: int = 0
    held_back: int = 0
    sent: int = 0
    already_there: int = 0
    refused: int = 0
    corrupt: int = 0
    torn: int = 0
    note: str | None = None

    def add(self, counts: FlushReport) -> None:
        """Add the *counts* of one user."""
        for name in ("sent", "already_there", "refused", "corrupt", "torn"):
            setattr(self, name, getattr(self, name) + getattr(counts, name))


@dataclass(slots=True)
class Allowance:
    """What a user has used in *hour* (since the epoch), and the last day that was reported."""

    hour: int = 0
    lines: int = 0
    bytes: int = 0
    reported_day: int = 0

    @property
    def is_used_up(self) -> bool:
        return self.lines >= LINES_PER_HOUR or self.bytes >= BYTES_PER_HOUR


def why_refused(event: Event, *, nodes: frozenset[str], now_us: int) -> str | None:
    """Return why a user's *event* is not forwarded, or None; *nodes*: the names of this node."""
    if not _KINDS.fullmatch(event.kind):
        return f"a user's spool has no {event.kind} events"
    if event.run_id is None:
        return "it is about no run"
    if event.kind == "incident.recorded" and (reason := _why_not_its_own(event)) is not None:
        return reason
    if event.node not in nodes:
        return f"it is about the node {event.node}, not this one"
    if not now_us - AGE_MAX_US <= event.t_us <= now_us + AHEAD_MAX_US:
        return "its time is not within the last 14 days"
    return None


def _why_not_its_own(event: Event) -> str | None:
    """Return why the incident in *event* is not of its run, or None.

    Without the proof by its id, who learns a run's id could take its incidents' ids in advance.
    """
    incident = event.payload
    if incident.get("run") != event.run_id:
        return "its incident is of another run, or of none"
    about = str(incident.get("about", incident.get("attempt")))
    with contextlib.suppress(UnicodeEncodeError):
        if incident.get("id") == run_incident_id(event.run_id or "", about):
            return None
    return "the id of its incident is not made of its run's"


class UserSpoolSender(SpoolSender):
    """Sends the spool of one user; ``allowance`` is updated."""

    rejected_bytes_max = REJECTED_BYTES_MAX

    def __init__(  # noqa: PLR0913 all but two are keywords
        self,
        records: Path,
        store: IncidentStore,
        *,
        cluster: str,
        clock: Clock,
        end_ns: int,
        uid: int,
        nodes: frozenset[str],
        node: str,
        allowance: Allowance,
        randomness: Callable[[int], bytes] = os.urandom,
    ) -> None:
        super().__init__(records, store, cluster=cluster, clock=clock, end_ns=end_ns)
        self.allowance = allowance
        self._uid = uid
        self._nodes = nodes
        self._node = node
        self._randomness = randomness

    def _read_segment(self, segment: SpoolSegment) -> bool:
        # Only whole segments are held back: the rest of the one in work is within its bound.
        if self.allowance.is_used_up:
            self._commit_batch()
            return False
        return super()._read_segment(segment)

    def _entries(
        self, segment: SpoolSegment, fd: int, offset: int, *, is_closed: bool
    ) -> Iterator[SpoolEntry]:
        size = os.fstat(fd).st_size
        if size > max(SEGMENT_BYTES_MAX, offset):
            reason = f"its segment is longer than {SEGMENT_BYTES_MAX} bytes"
            yield SpoolEntry(size, bad_line=BadLine(reason, b""))
            return
        for entry in read_lines(
            fd,
            origin=segment.origin,
            offset=offset,
            is_closed=is_closed,
            bytes_max=SEGMENT_BYTES_MAX,
        ):
            self.allowance.lines += 1
            self.allowance.bytes += entry.end - offset
            offset = entry.end
            yield entry

    def _add_entry(self, segment: SpoolSegment, entry: SpoolEntry, uid: int) -> None:
        line = entry.line
        if line is not None and not self._is_forwarded(line.event):
            self._batch.marks[segment] = entry.end
            return
        super()._add_entry(segment, entry, uid)

    def _is_forwarded(self, event: Event) -> bool:
        # An agent cannot write a count of lost events about its run.
        is_lost_count = event.kind == "tool.failed" and event.run_id is None
        return event.kind not in _NOT_FORWARDED and not is_lost_count

    def _refused(
        self, connection: Connection, envelopes: Sequence[EventEnvelope]
    ) -> dict[int, str]:
        now_us = self._clock.now_us()
        refused: dict[int, str] = {}
        for envelope in envelopes:
            reason = why_refused(envelope.event, nodes=self._nodes, now_us=now_us)
            if reason is not None:
                refused[id(envelope)] = reason
        rest = [envelope for envelope in envelopes if id(envelope) not in refused]
        return refused | find_foreign(connection, rest)

    def _reports(self, rejected: Sequence[RejectedLine]) -> list[SpoolLine]:
        """Return one event a day about this user, as root's own."""
        day = self._clock.now_us() // (24 * _HOUR_US)
        if self.allowance.reported_day == day:
            return []
        self.allowance.reported_day = day
        event = new_event(
            "tool.failed",
            node=self._node,
            clock=self._clock,
            randomness=self._randomness,
            severity=Severity.WARNING,
            payload={
                "what": f"spool of uid {self._uid}",
                "error": f"the spool of uid {self._uid} has refused lines, the first: "
                f"{rejected[0].bad_line.reason}; they are kept in {self.records}/rejected",
                "traceback": None,
            },
        )
        return [SpoolLine(f"forward.{self._randomness(6).hex()}", "forward", 1, event)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOptions:
    """Where users' spools and root's *spool_dir* are, and under which names the node is known."""

    users_dir: Path
    spool_dir: Path
    store_url: str
    cluster: str
    node: str
    root: Path = Path("/")


def forward_users(options: ForwardOptions, *, deadline_s: float, clock: Clock) -> ForwardReport:
    """Send the spools of all users to the store; if something is in the way, ``note`` says what.

    Each user gets an equal share of the time that is left. One pass works at a time; another one
    leaves the work to it.
    """
    report, end_ns = ForwardReport(), clock.mono_ns() + round(deadline_s * 1e9)
    try:
        waiting = _users_with_segments(options)
        if not waiting:
            return report
        ensure_own_directory(options.spool_dir, private=True)
        records = _make_records(options.spool_dir)
        with flush_lock(records, _LOCK_S) as has_lock:
            if not has_lock:
                report.note = f"another flusher is forwarding {options.users_dir}"
                return report
            left_s = max((end_ns - clock.mono_ns()) / 1e9, 0.1)
            with open_store(
                options.store_url, mode="write", root=options.root, deadline_s=left_s
            ) as store:
                for done, uid in enumerate(waiting):
                    share_ns = (end_ns - clock.mono_ns()) // (len(waiting) - done)
                    _forward_user(options, store, uid, clock.mono_ns() + share_ns, clock, report)
    except (StoreError, SpoolError) as exc:
        report.note = str(exc)
    except OSError as exc:
        report.note = f"cannot forward the spools in {options.users_dir}: {exc.strerror}"
    return report


@dataclass(slots=True)
class UsersBacklog:
    """What waits in the spools of users. ``users``: how many of them have something there.

    ``bytes``: of a segment at most `SEGMENT_BYTES_MAX`. ``oldest_us``: as in `SpoolBacklog`.
    ``is_complete``: False if there is more than was looked at.
    """

    users: int = 0
    segments: int = 0
    bytes: int = 0
    oldest_us: int | None = None
    is_complete: bool = True


def measure_users(options: ForwardOptions, *, clock: Clock, deadline_s: float) -> UsersBacklog:
    """Return the backlog of all users, as root; none where no users_dir is.

    No segment is read: a user can make it as long as they like. At most `MEASURED_MAX` of each user
    are looked at, and none after *deadline_s*.

    Raises:
        OSError: The directory cannot be read, or is not root's alone.
    """
    backlog, end_ns = UsersBacklog(), clock.mono_ns() + round(deadline_s * 1e9)
    for uid in find_user_spools(options.users_dir):
        waiting = backlog.segments
        for number, segment in enumerate(_segments(options, uid)):
            if number == MEASURED_MAX or clock.mono_ns() > end_ns:
                backlog.is_complete = False
                break
            _measure(segment, backlog)
        backlog.users += backlog.segments > waiting
    return backlog


def _measure(segment: SpoolSegment, backlog: UsersBacklog) -> None:
    fd = open_segment(segment)
    if fd is None:
        return
    try:
        found = os.fstat(fd)
    finally:
        os.close(fd)
    size = min(found.st_size, SEGMENT_BYTES_MAX) - read_offset(segment, found.st_ino)
    if size > 0:
        changed_us = found.st_mtime_ns // 1000
        backlog.segments += 1
        backlog.bytes += size
        backlog.oldest_us = min(backlog.oldest_us or changed_us, changed_us)


def _users_with_segments(options: ForwardOptions) -> list[int]:
    return [
        uid for uid in find_user_spools(options.users_dir) if next(_segments(options, uid), None)
    ]


def _segments(options: ForwardOptions, uid: int) -> Iterator[SpoolSegment]:
    spool, records = options.users_dir / str(uid), options.spool_dir / USERS_DIR / str(uid)
    try:
        with open_folder(spool, uid=uid) as top:
            yield from list_segments(top, spool, uid=uid, records=records, entries_max=ENTRIES_MAX)
    except OSError:
        return  # not made by root, or not to be trusted


def _make_records(spool_dir: Path, *names: str) -> Path:
    """Create the directory of root's records *names*, and return it."""
    path = spool_dir
    for name in (USERS_DIR, *names):
        with open_folder(path, uid=os.geteuid()) as folder:
            ensure_folder(folder, name)
        path /= name
    return path


def _forward_user(
    options: ForwardOptions,
    store: IncidentStore,
    uid: int,
    end_ns: int,
    clock: Clock,
    report: ForwardReport,
) -> None:
    records = _make_records(options.spool_dir, str(uid))
    found = islice(_segments(options, uid), SEGMENTS_MAX)
    segments = sorted(found, key=lambda item: (item.number, item.origin))
    remove_marks(records, segments)
    allowance = _read_allowance(records, clock.now_us() // _HOUR_US)
    report.users += 1
    sender = user_sender(options, store, uid, allowance, clock=clock, end_ns=end_ns)
    try:
        if not sender.send(segments) and not allowance.is_used_up:
            report.note = f"the time for the spool of uid {uid} passed"
    finally:
        report.held_back += allowance.is_used_up
        report.add(sender.counts)
        with open_folder(records, uid=os.geteuid()) as folder:
            replace_file(folder, _ALLOWANCE, json.dumps(asdict(allowance)).encode("ascii"))


def user_sender(
    options: ForwardOptions,
    store: IncidentStore,
    uid: int,
    allowance: Allowance,
    *,
    clock: Clock,
    end_ns: int,
) -> UserSpoolSender:
    """Return the sender for lines of the user *uid*; root's records of them are below its spool."""
    return UserSpoolSender(
        options.spool_dir / USERS_DIR / str(uid),
        store,
        cluster=options.cluster,
        clock=clock,
        end_ns=end_ns,
        uid=uid,
        nodes=node_names(options.users_dir, options.node),
        node=options.node,
        allowance=allowance,
    )


def _read_allowance(records: Path, hour: int) -> Allowance:
    try:
        with open_folder(records, uid=os.geteuid()) as folder:
            fd = open_file(folder, _ALLOWANCE, uid=os.geteuid())
        with os.fdopen(fd, "rb") as file:
            found = json.loads(file.read(_ALLOWANCE_BYTES_MAX))
        used = Allowance(**{item.name: int(found[item.name]) for item in fields(Allowance)})
    except (OSError, ValueError, TypeError, KeyError):
        used = Allowance()
    return used if used.hour == hour else Allowance(hour=hour, reported_day=used.reported_day)
