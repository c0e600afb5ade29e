"""The handlers of the keeper's requests.

The fields of a message are read by the types of the parameters of its handler. Parameters that the
connection provides (``session``, ``rank_info``, ``waited_s``) are not fields. A handler that raises
`NotReadyError` is called again with the same fields after each event, until its deadline.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from gpuops import __version__
from gpuops.checkpoint.agreement.replica_check import (
    ReplicaReport,
    replica_report_from_json,
    replica_report_to_json,
)
from gpuops.checkpoint.keeper.core import KeeperCore
from gpuops.checkpoint.keeper.messages import (
    NO_DIRECTORY,
    WHY_MAX,
    Count,
    Epoch,
    EventsPage,
    FlushResult,
    HandOver,
    Hash,
    HelloReply,
    HolderRows,
    ImageBytes,
    InventoryPage,
    KeeperStatus,
    Lease,
    MessageError,
    OpenedShard,
    Peers,
    Ranges,
    RankInfo,
    ReservedSlots,
    Restore,
    SaveDecision,
    Seconds,
    Skipped,
    SlotCount,
    Step,
    WaitSeconds,
    Why,
    World,
    holders_in,
)
from gpuops.checkpoint.keeper.rank_group import FENCE_S, ClientConnection, PartsRead
from gpuops.checkpoint.memory.node_memory import duplicate_fd
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.partial_image import PartialImage
from gpuops.checkpoint.types import (
    WORLD_MAX,
    KeeperError,
    Shard,
    ShardCopy,
    ShardHolders,
    StateId,
    Tier,
)
from gpuops.wire.messages import Limit, MessageFormatError, Using, read_arguments

_EVENTS_CHARS_PER_REPLY = 40_000
_COMMIT_SHARE = 0.9  # of the time of a flush: the rest is for the reply
_COPIES_PER_REPLY = 200
Handler = Callable[..., object]


class NotReadyError(Exception):
    """The request cannot be answered yet."""


@dataclass(slots=True)
class ClientSession:
    """One connection and its identity. ``role`` is "" before its hello.

    ``holders``: the holders of the state that is about to be chosen. ``fds``: descriptors for the
    next reply; the server sends and closes them. ``parts``: what is being read for it.
    """

    connection: ClientConnection
    role: str = ""
    rank_info: RankInfo | None = None
    holders: dict[Shard, ShardHolders] = field(default_factory=dict)
    fds: list[int] = field(default_factory=list)
    parts: PartsRead | None = None


def _report(data: object) -> ReplicaReport:
    report = replica_report_from_json(data)
    if report is None:
        raise ValueError("invalid replica report")
    return report


_Report = Annotated[ReplicaReport, Using(replica_report_to_json, _report)]


class KeeperRequests:
    """The requests to *core*, by role and name."""

    def __init__(self, core: KeeperCore) -> None:
        self._core = core
        persister, peers = core.persister, core.peers
        self._handlers: Mapping[str, Mapping[str, Handler]] = {
            "": {"hello": self._hello},
            "probe": {"stats": core.counts, "newest_image": self._newest_image},
            "rank": {
                "reserve": self._reserve,
                "begin": self._acquire,
                "seal": core.mark_written,
                "abandon": core.abandon,
                "offer": self._restore_point,
                "open_shard": self._open_shard,
                "read_parts": self._read_parts,
                "reject": self._reject,
                "restored": self._restored,
                "settings": core.set_policy,
                "stats": core.counts,
            },
            "agent": {
                "begin_generation": core.begin_generation,
                "sources": self._add_holders,
                "choose": self._restore_from,
                "take_over": core.take_over,
                "commit": core.commit,
                "give_up": core.give_up,
                "aim": core.set_next_step,
                "flush": self._flush,
                "inventory": self._inventory,
                "serve_peers": peers.serve,
                "replicate": peers.replicate,
                "status": self._status,
                "seal_persisted": persister.commit_shards,
                "differ": self._report_difference,
                "stats": core.counts,
                "events": self._events,
                "leave": self._hand_over,
                "end": self._shut_down,
            },
        }

    def handle(
        self, session: ClientSession, command: str, fields: Mapping[str, Any], waited_s: float
    ) -> object:
        """Handle *command* and return the reply.

        Raises:
            NotReadyError: It has to wait.
            CheckpointError: It is refused; the message says why.
        """
        handler = self._handlers[session.role].get(command)
        if handler is None:
            if command == "hello":
                raise MessageError("this connection has said hello already")
            who = session.role or "a connection without a hello"
            raise MessageError(f"{who} cannot send {command!r}")
        given = {"session": session, "rank_info": session.rank_info, "waited_s": waited_s}
        given = {name: value for name, value in given.items() if value is not None}
        try:
            arguments = read_arguments(handler, fields, given)
        except MessageFormatError as exc:
            raise MessageError(f"a message {command!r} has {exc}") from exc
        return handler(**arguments)

    def wait_s_max(self, command: str, fields: Mapping[str, Any]) -> float:
        """Return how long the request may wait for its reply; 0: not at all."""
        if command == "hello":
            return 2 * FENCE_S
        deadline_s = fields.get("deadline_s", 0.0)
        return deadline_s if isinstance(deadline_s, int | float) else 0.0

    def _hello(
        self,
        session: ClientSession,
        waited_s: float,
        role: str,
        rank: RankInfo | None = None,
        *,
        is_back: bool = False,
    ) -> HelloReply:
        core = self._core
        if role == "agent":
            if core.agent is not None:
                raise KeeperError(
                    f"this keeper serves the agent with pid {core.agent.pid}: two agents must not "
                    "use one folder"
                )
            core.agent = session.connection
        elif role == "rank" and rank is not None:
            may_wait = waited_s < FENCE_S
            if not core.join(session.connection, rank, may_wait=may_wait, is_reconnect=is_back):
                raise NotReadyError
            session.rank_info = rank
        elif role != "probe":
            raise MessageError(f"unknown role {role[:20]!r}")
        session.role = role
        return HelloReply(core.agent.pid if core.agent else None, __version__)

    def _newest_image(self, session: ClientSession, shard: Shard) -> OpenedShard:
        """Return memory of the newest complete state, of 0 bytes where it has no such shard.

        For workers that are not ranks yet: mostly they load it.
        """
        memory = self._core.memory
        newest = next(iter(memory.complete_states()), None)
        found = None if newest is None else memory.complete_shards(newest).get(shard)
        if found is None:
            return OpenedShard()
        session.fds.append(duplicate_fd(found.memory, writable=False))
        return OpenedShard(nbytes=found.memory.nbytes)

    # Requests of ranks.

    def _reserve(
        self,
        session: ClientSession,
        rank_info: RankInfo,
        layout: Hash,
        nbytes: ImageBytes,
        slots: SlotCount,
    ) -> ReservedSlots:
        if layout.strip("0123456789abcdef"):
            raise MessageError(f"{layout!r} is not a layout hash")
        pool = self._core.reserve(rank_info, layout, nbytes, slots)
        numbers = sorted(pool.slots)
        session.fds += [duplicate_fd(pool.slots[number], writable=True) for number in numbers]
        session.fds.append(duplicate_fd(pool.stamp, writable=True))
        return ReservedSlots(tuple(numbers))

    def _acquire(
        self, rank_info: RankInfo, step: Step, *, n_steps: Count = 0, is_last: bool = False
    ) -> SaveDecision:
        decided = self._core.acquire(rank_info, step, n_steps=n_steps, is_last=is_last)
        if isinstance(decided, Skipped):
            return SaveDecision(skipped=decided)
        notice = self._core.notice_for(rank_info)
        return SaveDecision(Lease(decided.slot.index, decided.state, decided.number, notice))

    def _restore_point(self, deadline_s: WaitSeconds) -> Restore:  # noqa: ARG002 the server waits
        group, instructions = self._core.group, self._core.instructions
        assert group is not None
        if instructions is not None and instructions.is_taken_over:
            # Which state the other ranks loaded is unknown: all have to be restarted.
            raise KeeperError(
                "the keeper that decided the state to resume from for this generation is gone"
            )
        if group.result is None and not group.error:
            self._core.request_restore(group)
        if group.error:
            raise group.refusal()
        if group.result is None:
            raise NotReadyError
        return Restore(group.result.restore_point)

    def _open_shard(self, session: ClientSession, state: StateId, shard: Shard) -> OpenedShard:
        assert self._core.group is not None
        source = self._core.group.shard_location(state, shard)
        if isinstance(source, Path):
            return OpenedShard(path=str(source))
        is_partial = isinstance(source, PartialImage)
        memory = source.memory if isinstance(source, PartialImage) else source
        session.fds.append(duplicate_fd(memory, writable=False))
        digest = self._core.group.shard_digest(shard)
        if digest is None:
            return OpenedShard(nbytes=source.nbytes, is_partial=is_partial)
        with SharedBuffer.create("gpuops-digest", len(digest.table)) as table:
            table.view[:] = digest.table
            session.fds.append(duplicate_fd(table, writable=False))
        return OpenedShard(nbytes=source.nbytes, root=digest.root)

    def _read_parts(
        self,
        session: ClientSession,
        state: StateId,
        shard: Shard,
        ranges: Ranges,
        deadline_s: WaitSeconds,  # noqa: ARG002 the server waits
    ) -> None:
        wanted = (state, shard, ranges)
        if session.parts is None or session.parts.wanted != wanted:
            assert self._core.group is not None
            session.parts = self._core.restore_finder.read_parts(self._core.group, wanted)
        if not session.parts.is_done:
            raise NotReadyError
        error, session.parts = session.parts.error, None
        if error is not None:
            raise error

    def _reject(
        self, state: StateId | None, *, is_verified: bool, why: Why, is_given_up: bool = False
    ) -> None:
        core, rejected = self._core, (state, is_verified)
        assert core.group is not None
        core.restore_finder.reject(
            core.group, core.instructions, rejected, why, is_given_up=is_given_up
        )

    def _restored(
        self, rank_info: RankInfo, state: StateId, tier: Tier, seconds: Seconds, nbytes: Count
    ) -> None:
        self._core.on_restored(rank_info, state, tier=tier, seconds=seconds, nbytes=nbytes)

    # Requests of the agent.

    def _add_holders(
        self, session: ClientSession, peers: Peers, shards: HolderRows, *, is_first: bool
    ) -> None:
        """Add a page of holders; the last page is followed by `choose`."""
        if is_first:
            session.holders.clear()
        session.holders |= holders_in(peers, shards)
        if len(session.holders) > WORLD_MAX:
            raise MessageError(f"invalid world of {len(session.holders)} shards")

    def _restore_from(
        self,
        session: ClientSession,
        state: StateId | None,
        epoch: Epoch,
        n_sources: Annotated[int, Limit(WORLD_MAX)] = 0,
        why: Annotated[tuple[Why, ...], Limit(WHY_MAX)] = (),
        loading_world: World | None = None,
    ) -> None:
        holders = dict(session.holders) if n_sources else {}
        session.holders.clear()
        if n_sources != len(holders):
            raise MessageError(f"expected the holders of {n_sources} shards, not of {len(holders)}")
        self._core.restore_from(state, epoch, holders, why, loading_world)

    def _flush(
        self, waited_s: float, deadline_s: WaitSeconds, *, tells_wait: bool = False
    ) -> FlushResult:
        """Reply once the newest committed state is persisted and verified, or cannot be.

        On several nodes that is once the shards of all of them are there. If they are not there at
        once, a caller that *tells_wait* has a reply that says so, and calls again.
        """
        persister, table = self._core.persister, self._core.memory.buffer_table
        if self._core.verifier.n_running:
            raise NotReadyError
        newest, policy, why = table.last_committed, persister.policy, ""
        if newest is None:
            why = "there is no committed state"
        elif policy is None or policy.directory is None:
            why = NO_DIRECTORY
        elif not persister.schedule.has_persisted(newest):
            if waited_s > 0 and not persister.is_flushing and persister.failure:
                why = persister.failure
            else:
                persister.is_flushing = True
                persister.persist_if_due()
                raise NotReadyError
        elif not persister.is_persistent(newest):
            left_s = _COMMIT_SHARE * deadline_s - waited_s
            left_s = min(left_s, persister.commit_at_end(newest)) if left_s > 0 else 0.0
            if left_s > 0:
                persister.is_flushing = True
                if tells_wait and persister.commit_failure:
                    return FlushResult(None, others_s=left_s)
                raise NotReadyError
            why = persister.commit_failure or "other nodes have not written their shards"
        elif persister.awaits_read_back(newest) and waited_s < _COMMIT_SHARE * deadline_s:
            raise NotReadyError
        persister.is_flushing = False
        directory = None if policy is None else policy.directory
        state = None if why else newest
        return FlushResult(state, persister.seconds, persister.nbytes, why, directory)

    def _inventory(self, after: Count) -> InventoryPage:
        """Return a page of the verified copies, of this node's ranks and for others.

        The newest state is first; messages carry only the roots of the digests.
        """
        memory = self._core.memory
        own = [
            entry.copy
            for state in memory.complete_states()
            for entry in memory.complete_shards(state).values()
        ]
        there = {(copy.state, copy.shard) for copy in own}
        others = [
            copy for copy in self._core.peers.copies() if (copy.state, copy.shard) not in there
        ]
        copies = sorted([*own, *others], key=lambda copy: copy.state, reverse=True)
        page = copies[after : after + _COPIES_PER_REPLY]
        return InventoryPage(
            tuple(_with_root(copy, memory.node) for copy in page), after + len(page) >= len(copies)
        )

    def _status(self) -> KeeperStatus:
        """Return the status that the agent polls."""
        core = self._core
        table, persister = core.memory.buffer_table, core.persister
        n_holders, n_gone = core.peers.pusher.n_holders()
        return KeeperStatus(
            progress=core.progress(),
            epoch=table.epoch,
            n_ranks=len(core.group.connections) if core.group else 0,
            n_committed=table.n_committed,
            skipped={reason.value: n for reason, n in table.skipped.items()},
            n_holders=n_holders,
            n_holders_gone=n_gone,
            directory=persister.policy.directory if persister.policy else None,
            n_persist_failed=persister.schedule.failures,
            persist_failed=persister.failed_state,
            persist_trouble=persister.failure,
            persist_pieces=persister.n_writes,
            verified=persister.read_back.verified,
        )

    def _report_difference(self, report: _Report) -> None:
        self._core.replica_checker.on_report(report)

    def _events(self) -> EventsPage:
        events = tuple(self._core.events.take(_EVENTS_CHARS_PER_REPLY))
        return EventsPage(events, is_all=not len(self._core.events))

    def _hand_over(self, *, is_over: bool) -> HandOver:
        """End the keeper where no rank is connected and the newest state is persisted."""
        core, group = self._core, self._core.group
        n_ranks = len(group.connections) if group is not None else 0
        if group is not None:
            group.is_handed_over = is_over and n_ranks > 0
        persister, newest = core.persister, core.memory.buffer_table.last_committed
        has_place = persister.policy is not None and persister.policy.directory is not None
        is_safe = newest is None or not has_place or persister.schedule.has_persisted(newest)
        if is_over and not n_ranks and not core.verifier.n_running and is_safe:
            core.is_ending = True
        return HandOver(n_ranks, core.is_ending)

    def _shut_down(self) -> None:
        self._core.is_ending = True


def _with_root(copy: ShardCopy, holder: str) -> ShardCopy:
    return replace(copy, digest=replace(copy.digest, table=b""), holder=holder)
