"""An agent enters its run: it makes the record or finds it, and says who it is.

An agent that was restarted enters like any other; the seat of its dead predecessor is a hole that
it fills, because its node has the same name.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from gpuops.control.board import Board, Entry
from gpuops.control.board_server import OVER
from gpuops.control.keys import Keys
from gpuops.control.record import BAD_ENTRY, CONTROL, ControlRecord, Member, Phase, pack, unpack
from gpuops.control.view import View
from gpuops.errors import UsageError
from gpuops.host.clock import Clock

log = logging.getLogger(__name__)

# A live agent beats every second; one that does not in this time is dead, or as good as dead.
SECOND_AGENT_S = 3.5
_ANOTHER_JOB = (
    "another job is running under the same --rdzv-id on this endpoint: its command, --nnodes or "
    "--nproc-per-node differs from this one's; give each run an id of its own, and all its agents "
    "the same command"
)


class RunIsOverError(Exception):
    """The run of this key has come to its end; ``record`` says how."""

    def __init__(self, record: ControlRecord) -> None:
        super().__init__(f"this run has ended: {record.reason}")
        self.record = record


def enter(
    board: Board, me: Member, fresh: ControlRecord, clock: Clock, wait: Callable[[float], object]
) -> View:
    """Return the record of the run that *me* is now part of; *fresh* where there was none.

    Raises:
        RunIsOverError: See there.
        UsageError: It is another job's run, or another agent of this node is part of it.
        BoardError: See `Board`.
    """
    record, entry = _begin_or_find(board, fresh, wait)
    if record is fresh:
        board.delete(OVER)  # said to the server by the run before this one
    else:
        _refuse_a_second(board, record, me, wait)
    keys = Keys(run_id=record.run_id)
    board.put(keys.agent(me.agent), pack(me.to_json()))
    beaten = board.beat(
        keys.alive(me.agent), pack({"seq": 0}), watch=CONTROL, seen=entry.version, hold_s=0.0
    )
    view = View(record, entry.version, beaten.board_s, clock.mono_ns())
    if beaten.watched is None:
        return view
    newer = ControlRecord.from_bytes(beaten.watched.value)
    return replace(view, record=newer, version=beaten.watched.version)


def _begin_or_find(
    board: Board, fresh: ControlRecord, wait: Callable[[float], object]
) -> tuple[ControlRecord, Entry]:
    """Return the record of the run of this key, which is *fresh* itself where no other lives."""
    version = 0
    while True:
        done, entry = board.swap(CONTROL, fresh.to_bytes(), version=version)
        if done:
            return fresh, entry
        version = entry.version
        if version == 0:
            continue  # taken off the board by the last agent of the run before
        record = ControlRecord.from_bytes(entry.value)
        is_ours = record.fingerprint == fresh.fingerprint
        if is_ours and record.phase is not Phase.STOP:
            return record, entry
        if _somebody_beats(board, record, wait):
            raise RunIsOverError(record) if is_ours else UsageError(_ANOTHER_JOB)
        # Its agents were killed before they could clean up. Of several that find it so, one
        # changes the record; the others find that one's.
        board.delete(f"{Keys(run_id=record.run_id).prefix}/")


def _somebody_beats(board: Board, record: ControlRecord, wait: Callable[[float], object]) -> bool:
    keys = Keys(run_id=record.run_id)
    before = {key: entry.version for key, entry in board.list(keys.alive()).items()}
    if not before:
        return False
    wait(SECOND_AGENT_S)
    now = board.list(keys.alive())
    return any(now[key].version > version for key, version in before.items() if key in now)


def _refuse_a_second(
    board: Board, record: ControlRecord, me: Member, wait: Callable[[float], object]
) -> None:
    keys = Keys(run_id=record.run_id)
    same = []
    for entry in board.list(keys.agent()).values():
        try:
            other = Member.from_json(unpack(entry.value))
        except BAD_ENTRY as exc:
            log.warning("an agent's entry cannot be read: %s", exc)
            continue
        if other.node == me.node and other.agent != me.agent:
            same.append(other.agent)
    if not same:
        return
    before = {agent: board.get(keys.alive(agent)).version for agent in same}
    wait(SECOND_AGENT_S)
    if any(board.get(keys.alive(agent)).version > before[agent] for agent in same):
        raise UsageError(
            f"an agent of this run is on node {me.node} already: one agent for each node "
            "(`srun --ntasks-per-node=1`), with --nproc-per-node for its workers; where several "
            "share a host name, give each a SLURMD_NODENAME of its own"
        )


def leave(
    board: Board,
    record: ControlRecord,
    me: Member,
    *,
    has_server: bool,
    dead: Collection[str] = (),
) -> None:
    """Take *me* off the board, so that nobody waits for it.

    The last agent of a run that is over takes everything off; where the board *has_server* of its
    own, that one is told to end. Agents that are *dead* do not count.

    Raises:
        BoardError: See `Board`.
    """
    keys = Keys(run_id=record.run_id)
    board.delete(keys.agent(me.agent))
    is_over = record.phase is Phase.STOP
    others = {key.rpartition("/")[2] for key in board.list(keys.agent())} if is_over else set()
    is_last = is_over and others <= set(dead)
    # Our heartbeat goes last: as long as it is there, nobody begins a new run in its place.
    board.delete("" if is_last else keys.alive(me.agent))
    if not (has_server and is_over):
        return
    if is_last:
        board.put(OVER, b"1")
    else:
        # Only where nothing is said yet: the last one may have been quicker, and its word counts.
        board.swap(OVER, b"30", version=0)
