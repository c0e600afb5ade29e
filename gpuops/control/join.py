"""An agent enters its run: it makes the record or finds it, and says who it is.

An agent that was restarted enters like any other; the place of its dead predecessor is a hole that
it fills, because its node has the same name.
"""

import json
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from gpuops.control.record import (
    ENTRY_ERRORS,
    RECORD_KEY,
    SENT_KEY,
    ControlKeys,
    ControlRecord,
    Member,
    RecordView,
    RunPhase,
    pack,
    unpack,
    unpack_any_version,
)
from gpuops.control.store import ControlStore, ControlStoreError, Entry
from gpuops.control.tcp.server import RUN_OVER_KEY
from gpuops.control.tcp.server_connection import REFUSED_PREFIX
from gpuops.errors import EXIT_USAGE, UsageError
from gpuops.host.clock import Clock
from gpuops.incident.correlate import limited_list
from gpuops.units import format_seconds

log = logging.getLogger(__name__)

# A run that still waits for nodes after this time logs once which nodes have joined.
WAIT_NOTICE_S = 10.0

# A live agent beats every second; one that does not in this time is dead, or as good as dead.
LIVENESS_CHECK_S = 3.5
_OTHER_JOB = (
    "another job is running under the same --rdzv-id on this endpoint: its command, --nnodes or "
    "--nproc-per-node differs from this one's; give each run an id of its own, and all its agents "
    "the same command"
)


class RunIsOverError(Exception):
    """The run of this key has come to its end; ``record`` says how."""

    def __init__(self, record: ControlRecord) -> None:
        super().__init__(f"this run has ended: {record.reason}")
        self.record = record


def join(
    store: ControlStore,
    own_member: Member,
    new_record: ControlRecord,
    clock: Clock,
    wait: Callable[[float], object],
) -> RecordView:
    """Return the record of the run that *own_member* joined; *new_record* where there was none.

    Raises:
        RunIsOverError: See there.
        UsageError: It is another job's run, another agent of this node is part of it, or its agents
            have another version of gpuops; that run ends, too, if it has not trained yet.
        ControlStoreError: See `ControlStore`.
    """
    try:
        record, entry = _create_or_find(store, new_record, own_member.node, wait)
        if record is not new_record:
            _reject_second_agent(store, record, own_member, clock, wait)
    except UsageError as exc:
        who = f"an agent on node {own_member.node} ({own_member.address})"
        with suppress(ControlStoreError):
            refused = f"{who} was refused: {exc}"
            store.put(f"{REFUSED_PREFIX}{own_member.agent}", refused.encode())
        raise
    if record is new_record:
        store.delete(RUN_OVER_KEY)  # sent to the server by the run before this one
        store.delete(REFUSED_PREFIX)
    keys = ControlKeys(run_id=record.run_id)
    reply = store.heartbeat(
        keys.heartbeat(own_member.agent),
        pack({"seq": 0, SENT_KEY: clock.mono_ns()}),
        watch=RECORD_KEY,
        seen_version=entry.version,
        hold_s=0.0,
    )
    # After the heartbeat: an agent without one is dead.
    store.put(keys.agent(own_member.agent), pack(own_member.to_json()))
    view = RecordView(record, entry.version, reply.store_s, clock.mono_ns())
    if reply.watched is None:
        return view
    newer_record = ControlRecord.from_bytes(reply.watched.value)
    return replace(view, record=newer_record, version=reply.watched.version)


def _create_or_find(
    store: ControlStore, new_record: ControlRecord, node: str, wait: Callable[[float], object]
) -> tuple[ControlRecord, Entry]:
    """Return the record of the run of this key, which is *new_record* where no other lives."""
    version = 0
    while True:
        is_written, entry = store.compare_and_set(
            RECORD_KEY, new_record.to_bytes(), version=version
        )
        if is_written:
            return new_record, entry
        version = entry.version
        if version == 0:
            continue  # taken off the control store by the last agent of the run before
        origin = _origin_of(entry.value)
        if origin.gpuops_version != new_record.gpuops_version:
            if _has_live_agent(store, origin.run_id, wait, is_new=True):
                _reject_other_version(store, entry, origin, new_record.gpuops_version, node)
            store.delete(f"{ControlKeys(run_id=origin.run_id).prefix}/")
            continue
        record = ControlRecord.from_bytes(entry.value)
        is_same_job = record.fingerprint == new_record.fingerprint
        if is_same_job and record.phase is not RunPhase.STOP:
            return record, entry
        if _has_live_agent(store, record.run_id, wait):
            raise RunIsOverError(record) if is_same_job else UsageError(_OTHER_JOB)
        # Its agents were killed before they could clean up. Of several that find it so, one
        # changes the record; the others find that one's.
        store.delete(f"{ControlKeys(run_id=record.run_id).prefix}/")


@dataclass(frozen=True, slots=True)
class _RecordOrigin:
    """What a record of any version of gpuops says of the run that it is of."""

    gpuops_version: str
    node: str
    run_id: str
    is_before_training: bool


def _origin_of(data: bytes) -> _RecordOrigin:
    """Return what the record in *data* says, in whatever version it is written.

    Raises:
        RecordError: Not a JSON object.
    """
    body = unpack_any_version(data)
    phase, generation = body.get("phase"), body.get("generation")
    return _RecordOrigin(
        gpuops_version=str(body.get("gpuops") or ""),
        node=str(body.get("node") or ""),
        run_id=str(body.get("run_id") or ""),
        is_before_training=(phase, generation) == (RunPhase.RENDEZVOUS.value, 0),
    )


def _stopped_by_other_version(data: bytes, reason: str, by: str) -> bytes:
    """Return the record in *data*, of a run of another version of gpuops, with its run ended."""
    body = unpack_any_version(data)
    end = {"phase": RunPhase.STOP.value, "exit_code": EXIT_USAGE, "reason": reason}
    return json.dumps({**body, **end, "decided_by": by}, separators=(",", ":")).encode()


def _reject_other_version(
    store: ControlStore, entry: Entry, origin: _RecordOrigin, own_version: str, node: str
) -> NoReturn:
    """Refuse to join a run of another version; end it if it has not trained yet."""
    version = origin.gpuops_version or "of an older version"
    why = (
        f"node {node} has gpuops {own_version}, and node {origin.node or 'of the first agent'} has "
        f"gpuops {version}: all nodes of a run need the same version; install it on all of them"
    )
    if origin.is_before_training:
        stopped = _stopped_by_other_version(entry.value, why, node)
        # Where the record has changed meanwhile, the others go on, and this node is not of them.
        store.compare_and_set(RECORD_KEY, stopped, version=entry.version)
    raise UsageError(why)


def _has_live_agent(
    store: ControlStore, run_id: str, wait: Callable[[float], object], *, is_new: bool = False
) -> bool:
    """Say whether an agent of the run lives; the first one of a new run may just be joining."""
    keys = ControlKeys(run_id=run_id)
    versions = {key: entry.version for key, entry in store.list(keys.heartbeat()).items()}
    if not versions and not is_new:
        return False
    wait(LIVENESS_CHECK_S)
    entries = store.list(keys.heartbeat())
    return any(entry.version > versions.get(key, 0) for key, entry in entries.items())


def _reject_second_agent(
    store: ControlStore,
    record: ControlRecord,
    own_member: Member,
    clock: Clock,
    wait: Callable[[float], object],
) -> None:
    keys = ControlKeys(run_id=record.run_id)
    duplicates = []
    for entry in store.list(keys.agent()).values():
        try:
            other = Member.from_json(unpack(entry.value))
        except ENTRY_ERRORS as exc:
            log.warning("an agent's entry cannot be read: %s", exc)
            continue
        if other.node == own_member.node and other.agent != own_member.agent:
            duplicates.append(other)
    beats = [(other, store.get(keys.heartbeat(other.agent)).version) for other in duplicates]
    # The store removes the heartbeat of a killed agent: there is nobody to wait for.
    beats = [(other, version) for other, version in beats if version]
    if not beats:
        return
    began_ns = clock.mono_ns()
    wait(LIVENESS_CHECK_S)
    for other, version in beats:
        entry = store.get(keys.heartbeat(other.agent))
        is_here = other.address == own_member.address
        if entry.version > version and not (is_here and _is_late(entry, began_ns)):
            raise UsageError(
                f"an agent of this run is on node {own_member.node} already: one agent for each "
                "node (`srun --ntasks-per-node=1`), with --nproc-per-node for its workers; where "
                "several share a host name, give each a SLURMD_NODENAME of its own"
            )


def _is_late(heartbeat: Entry, began_ns: int) -> bool:
    """Say whether an agent of this host sent *heartbeat* before *began_ns*.

    What an agent sent while it was cut off, members of etcd pass on later, for up to half a minute.
    """
    try:
        return int(unpack(heartbeat.value)[SENT_KEY]) < began_ns
    except ENTRY_ERRORS:
        return False


def describe_arrivals(nodes: Sequence[str], n_min: int, left_s: float) -> str:
    """Return which *nodes* have come, of *n_min* at least, and what to do if one is missing.

    *left_s*: for how long the run waits for the others.
    """
    came = f"{len(nodes)} of at least {n_min} nodes came so far"
    came = f"{came}: {limited_list(sorted(nodes))}" if nodes else came
    if len(nodes) >= n_min:
        return f"{came}; the run soon starts without the others"
    return (
        f"{came}; waiting for the others, {format_seconds(left_s)} at most. If one is missing, "
        "read what its own `gpuops run` says; it needs this command, --rdzv-endpoint and --rdzv-id"
    )


def leave(
    store: ControlStore,
    record: ControlRecord,
    own_member: Member,
    *,
    has_server: bool,
    dead: Collection[str] = (),
) -> bool:
    """Take *own_member* off the control store, so that nobody waits for it; say if it was the last.

    The last agent of a run that is over deletes everything; where the control store *has_server*
    of its own, that server is asked to end. Agents that are *dead* do not count.

    Raises:
        ControlStoreError: See `ControlStore`.
    """
    keys = ControlKeys(run_id=record.run_id)
    store.delete(keys.agent(own_member.agent))
    is_over = record.phase is RunPhase.STOP
    others = {key.rpartition("/")[2] for key in store.list(keys.agent())} if is_over else set()
    is_last = is_over and others <= set(dead)
    # Our heartbeat goes last: as long as it is there, nobody begins a new run in its place.
    store.delete("" if is_last else keys.heartbeat(own_member.agent))
    if not (has_server and is_over):
        return is_last
    if is_last:
        store.put(RUN_OVER_KEY, b"1")
    else:
        # Only where no message is there yet: that of an agent that was quicker counts.
        store.compare_and_set(RUN_OVER_KEY, b"30", version=0)
    return is_last
