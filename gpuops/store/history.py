"""Open a store for reading, as `report` and `incident` do.

Events in the spool are sent first. If the default store would be SQLite on a network file system,
and for the journal of a run directory, the lines are read into a store in memory and nothing is
deleted.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from gpuops.errors import NetworkFilesystemError, SpoolError, StoreError, UsageError
from gpuops.host.clock import Clock, SystemClock
from gpuops.host.storage.mounts import read_mounts
from gpuops.store.backends import parse_url, reject_network_filesystem, sqlite_path
from gpuops.store.engine import IncidentStore, memory_store, open_store
from gpuops.store.ingest.batch import ingest, valid_envelopes
from gpuops.store.ingest.envelope import EventEnvelope
from gpuops.store.spool.format import ORIGIN_PATTERN
from gpuops.store.spool.read import read_lines
from gpuops.store.spool.record import JOURNAL_SUFFIX
from gpuops.store.spool.segments import find_segments, open_segment
from gpuops.store.spool.send import flush

FLUSH_TIMEOUT_S = 5.0
_BATCH = 500


def store_for_reading(
    url: str,
    *,
    is_default: bool,
    spool_dir: Path,
    cluster: str = "default",
    clock: Clock,
    root: Path = Path("/"),
) -> IncidentStore:
    """Return the store at *url* with the events in *spool_dir*; ``notes`` say what is missing.

    Args:
        url: The store.
        is_default: The store is the default one: if it does not exist it is empty, and if it would
            be on a network file system it is replaced by the spool.
        spool_dir: The spool of this user on this node.
        cluster: The cluster of the spool's events.
        clock: For the deadline of sending.
        root: A fake root for the mount table.

    Raises:
        UsageError, StoreError: The store cannot be read.
    """
    parsed = parse_url(url)
    is_sqlite = parsed.get_backend_name() == "sqlite"
    if is_default and is_sqlite:
        try:
            reject_network_filesystem(sqlite_path(parsed), read_mounts(root))
        except NetworkFilesystemError as exc:
            return _spool_in_memory(spool_dir, cluster, clock, str(exc))
    notes = _flush_first(url, spool_dir, cluster=cluster, clock=clock, root=root)
    if is_default and is_sqlite and not sqlite_path(parsed).exists():
        return memory_store(*notes)
    store = open_store(url, mode="read", root=root)
    return replace(store, notes=(*notes, *store.notes))


def _flush_first(
    url: str, spool_dir: Path, *, cluster: str, clock: Clock, root: Path
) -> tuple[str, ...]:
    try:
        report = flush(
            spool_dir, url, deadline_s=FLUSH_TIMEOUT_S, cluster=cluster, clock=clock, root=root
        )
    except (SpoolError, StoreError) as exc:
        return (f"the events in the spool are not shown: {exc}",)
    if report.note is None:
        return ()
    return (f"{report.remaining} events in the spool are not shown: {report.note}",)


def _spool_in_memory(spool_dir: Path, cluster: str, clock: Clock, why: str) -> IncidentStore:
    store = memory_store(f"showing only the spool {spool_dir} of this user: {why}")
    n_bad = _ingest_all(store, _spool_envelopes(spool_dir, cluster), clock)
    if n_bad:
        return replace(store, notes=(*store.notes, f"{n_bad} lines of the spool cannot be read"))
    return store


def load_journal(journal_dir: Path) -> IncidentStore:
    """Return a store in memory with everything in a run directory's journal.

    Raises:
        UsageError: There is no journal.
    """
    paths = sorted(journal_dir.glob(f"*{JOURNAL_SUFFIX}")) if journal_dir.is_dir() else []
    if not paths:
        raise UsageError(
            f"there is no journal in {journal_dir}; name a run directory of `gpuops run`"
        )
    store = memory_store()
    n_bad = _ingest_all(store, _with_own_cluster(list(_journal_envelopes(paths))), SystemClock())
    if n_bad:
        return replace(store, notes=(f"{n_bad} lines of {journal_dir} cannot be read",))
    return store


def _spool_envelopes(spool_dir: Path, cluster: str) -> Iterator[EventEnvelope | None]:
    for segment in find_segments(spool_dir):
        fd = open_segment(segment)
        if fd is not None:
            yield from _read_file(fd, segment.origin, cluster)


def _journal_envelopes(paths: Iterable[Path]) -> Iterator[EventEnvelope | None]:
    for path in paths:
        origin = path.name.removesuffix(JOURNAL_SUFFIX)
        if not ORIGIN_PATTERN.fullmatch(origin):
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as exc:
            raise UsageError(f"cannot read the journal {path}: {exc.strerror}") from exc
        yield from _read_file(fd, origin, "default")


def _read_file(fd: int, origin: str, cluster: str) -> Iterator[EventEnvelope | None]:
    """Yield the envelopes of an open file, None for a bad line; closes *fd*."""
    try:
        uid = os.fstat(fd).st_uid
        for read in read_lines(fd, origin=origin):
            if read.line is not None:
                yield EventEnvelope(read.line, cluster, uid)
            elif read.bad_line is not None:
                yield None
    finally:
        os.close(fd)


def _with_own_cluster(envelopes: list[EventEnvelope | None]) -> list[EventEnvelope | None]:
    started = (e for e in envelopes if e is not None and e.event.kind == "run.started")
    named = (e.event.payload.get("cluster") for e in started)
    cluster = next((name for name in named if isinstance(name, str) and name), "default")
    return [e and replace(e, cluster=cluster) for e in envelopes]


def _ingest_all(
    store: IncidentStore, envelopes: Iterable[EventEnvelope | None], clock: Clock
) -> int:
    """Ingest *envelopes*; return how many lines could not be read."""
    n_bad = 0
    with store.begin() as connection:
        for batch in _batches(envelopes):
            readable = [envelope for envelope in batch if envelope is not None]
            valid = valid_envelopes(readable)
            ingest(connection, valid, clock.now_us())
            n_bad += len(batch) - len(valid)
    return n_bad


def _batches(envelopes: Iterable[EventEnvelope | None]) -> Iterator[list[EventEnvelope | None]]:
    iterator = iter(envelopes)
    while batch := list(islice(iterator, _BATCH)):
        yield batch
