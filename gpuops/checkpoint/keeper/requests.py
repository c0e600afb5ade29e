"""What a connection may ask of the keeper, and what it is answered.

A handler returns the answer, or None where it has to wait; it is then called again, with the same
request, whenever something has happened, until its time is over.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuops.checkpoint.agreement.local_recovery import WHY_MAX
from gpuops.checkpoint.agreement.replica_check import replica_report_from_json
from gpuops.checkpoint.keeper.agent_messages import (
    holders_from_json,
    peers_from_json,
    shards_from_json,
)
from gpuops.checkpoint.keeper.api import SLOTS_MAX, Skipped
from gpuops.checkpoint.keeper.core import KeeperCore
from gpuops.checkpoint.keeper.messages import (
    ID_MAX,
    WHY_CHARS_MAX,
    MessageError,
    MessageFields,
    policy_from_json,
    restore_point_to_json,
    shard_to_json,
    state_to_json,
)
from gpuops.checkpoint.keeper.restore import FENCE_S, ClientConnection, RankInfo
from gpuops.checkpoint.memory.node_memory import duplicate_fd
from gpuops.checkpoint.peers.fetch import ShardHolders
from gpuops.checkpoint.types import (
    EPOCH_MAX,
    IMAGE_BYTES_MAX,
    STEP_MAX,
    WORLD_MAX,
    CheckpointError,
    KeeperError,
    Shard,
    ShardCopy,
)

GENERATION_MAX = 2**31
REQUEST_WAIT_S_MAX = 86_400.0
_HASH_CHARS = 64
_NAME_CHARS_MAX = 200
_TOKEN_CHARS_MAX = 4096
_EVENTS_CHARS_PER_REPLY = 40_000
_COPIES_PER_REPLY = 200
TABLE_BYTES_PER_REPLY = 24_000


@dataclass(frozen=True, slots=True)
class KeeperReply:
    """The fields of an answer, and the descriptors that go with it; who sends it closes them."""

    ok: Mapping[str, Any] = field(default_factory=dict)
    fds: tuple[int, ...] = ()


class RestoreUndecidedRefusal(KeeperError):  # noqa: N818 not an error of the keeper's
    """Whether there is a state to load cannot be told; the answer says so by its kind."""


@dataclass(slots=True)
class ClientSession:
    """One connection: who it says it is. ``role`` is "" until it has said so.

    ``holders``: who holds what of the state that is going to be chosen.
    """

    connection: ClientConnection
    role: str = ""
    rank_info: RankInfo | None = None
    holders: dict[Shard, ShardHolders] = field(default_factory=dict)

    @property
    def known_rank(self) -> RankInfo:
        """Return where the rank stands."""
        assert self.rank_info is not None
        return self.rank_info


@dataclass(frozen=True, slots=True)
class KeeperRequest:
    """A message of *session*: what it asks for, and since when it waits, in seconds."""

    session: ClientSession
    command: str
    fields: MessageFields
    waited_s: float = 0.0


Handler = Callable[[KeeperCore, KeeperRequest], KeeperReply | None]


def wait_s_max(request: KeeperRequest) -> float:
    """Return for how long the request may wait for its answer; 0: not at all."""
    if request.command == "hello":
        return 2 * FENCE_S
    if request.command in ("offer", "flush"):
        return request.fields.number("deadline_s", 0.0, REQUEST_WAIT_S_MAX)
    return 0.0


def handle_request(core: KeeperCore, request: KeeperRequest) -> KeeperReply | None:
    """Return the answer to *request*, None where it waits.

    Raises:
        CheckpointError: It is refused; says why.
    """
    if request.command == "hello":
        return _hello(core, request)
    handler = _HANDLERS.get(request.session.role, {}).get(request.command)
    if handler is None:
        who = request.session.role or "who has not said who it is"
        raise MessageError(f"{who} cannot ask for {request.command[:40]!r}")
    return handler(core, request)


def _hello(core: KeeperCore, request: KeeperRequest) -> KeeperReply | None:
    session, fields = request.session, request.fields
    if session.role:
        raise MessageError("this connection has said hello already")
    role = fields.text("role", 20)
    if role == "agent":
        if core.agent is not None:
            raise KeeperError(
                f"this keeper serves the agent with pid {core.agent.pid}: two agents must not use "
                "one folder"
            )
        core.agent = session.connection
    elif role == "rank":
        rank_info = _parse_rank_info(fields)
        may_wait = request.waited_s < FENCE_S
        is_reconnect = fields.flag("is_back") if "is_back" in fields else False
        if not core.join(
            session.connection, rank_info, may_wait=may_wait, is_reconnect=is_reconnect
        ):
            return None
        session.rank_info = rank_info
    elif role != "probe":
        raise MessageError(f"there is no role {role!r}")
    session.role = role
    return KeeperReply({"agent": core.agent.pid if core.agent else None})


def _parse_rank_info(fields: MessageFields) -> RankInfo:
    world = fields.integer("world", 1, WORLD_MAX)
    n_ranks = fields.integer("local_world", 1, min(world, 4096))
    return RankInfo(
        Shard(fields.integer("rank", 0, world - 1), world),
        fields.integer("local_rank", 0, n_ranks - 1),
        n_ranks,
        fields.integer("generation", 0, GENERATION_MAX),
    )


def _reserve(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    fields = request.fields
    layout = fields.text("layout", _HASH_CHARS)
    if len(layout) != _HASH_CHARS or layout.strip("0123456789abcdef"):
        raise MessageError(f"{layout!r} is no hash of a layout")
    nbytes = fields.integer("nbytes", 1, IMAGE_BYTES_MAX)
    n_slots = fields.integer("slots", 1, SLOTS_MAX)
    pool = core.reserve(request.session.known_rank, layout, nbytes, n_slots)
    slots = sorted(pool.slots.items())[:SLOTS_MAX]
    return KeeperReply(
        {"slots": [index for index, _memory in slots], "nbytes": nbytes},
        tuple(duplicate_fd(memory, writable=True) for _index, memory in slots),
    )


def _begin(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    step = request.fields.integer("step", 0, STEP_MAX)
    is_last = request.fields.flag("is_last")
    decided = core.acquire(request.session.known_rank, step, is_last=is_last)
    if isinstance(decided, Skipped):
        return KeeperReply({"skipped": decided.why, "is_due": decided.is_due})
    notice = core.notice_for(request.session.known_rank)
    return KeeperReply(
        {"slot": decided.slot.index, "state": state_to_json(decided.state), "notice": notice}
    )


def _seal(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    core.seal(request.session.known_rank, request.fields.state())
    return KeeperReply()


def _abandon(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    core.abandon(request.session.known_rank, request.fields.state())
    return KeeperReply()


def _restore_point(core: KeeperCore, _request: KeeperRequest) -> KeeperReply | None:
    group, instructions = core.group, core.instructions
    assert group is not None
    if instructions is not None and instructions.is_taken_over:
        # Which state the others loaded nobody knows any more: all have to be started anew.
        raise KeeperError(
            "the keeper that told the ranks of this generation where to go on from is gone"
        )
    if group.result is None and not group.error:
        core.request_restore(group)
    if group.error:
        refusal = RestoreUndecidedRefusal if group.is_undecided else KeeperError
        raise refusal(group.error)
    if group.result is None:
        return None
    point = group.result.restore_point
    return KeeperReply({"offer": None if point is None else restore_point_to_json(point)})


def _open_shard(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    source = core.shard_location(request.fields.state(), request.fields.shard())
    if isinstance(source, Path):
        return KeeperReply({"path": str(source)})
    return KeeperReply({"nbytes": source.nbytes}, (duplicate_fd(source, writable=False),))


def _restored(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    fields, rank_info = request.fields, request.session.known_rank
    core.on_restored(
        rank_info,
        fields.state(),
        tier=fields.text("tier", 20),
        seconds=fields.number("seconds"),
        nbytes=fields.integer("bytes", 0, ID_MAX),
    )
    return KeeperReply()


def _settings(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    core.set_policy(policy_from_json(request.fields.nested("policy")))
    return KeeperReply()


def _stats(core: KeeperCore, _request: KeeperRequest) -> KeeperReply:
    return KeeperReply(core.counts())


def _begin_generation(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    fields = request.fields
    excluded = None
    if "excluded_step" in fields:
        excluded = fields.integer("excluded_step", 0, STEP_MAX)
    core.begin_generation(
        fields.integer("generation", 0, GENERATION_MAX),
        fields.integer("n_nodes", 1, WORLD_MAX),
        excluded,
        fields.text("job", _NAME_CHARS_MAX),
    )
    return KeeperReply()


def _restore_from(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    fields = request.fields
    state = fields.state() if "state" in fields else None
    n_sources = fields.integer("sources", 0, WORLD_MAX) if "sources" in fields else 0
    why = fields.items("why", WHY_MAX) if "why" in fields else []
    holders = dict(request.session.holders) if n_sources else {}
    request.session.holders.clear()
    if n_sources != len(holders):
        raise MessageError(f"of {n_sources} shards the holders were to be said, not {len(holders)}")
    epoch = fields.integer("epoch", 0, EPOCH_MAX)
    core.restore_from(state, epoch, holders, tuple(str(text)[:WHY_CHARS_MAX] for text in why))
    return KeeperReply()


def _take_over(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    core.take_over(request.fields.integer("epoch", 0, EPOCH_MAX))
    return KeeperReply()


def _commit(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    fields = request.fields
    is_new = core.commit(fields.state(), persist=fields.flag("persist"))
    return KeeperReply({"is_new": is_new})


def _set_next_step(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    core.set_next_step(request.fields.integer("step", 0, STEP_MAX))
    return KeeperReply()


def _give_up(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    core.give_up(request.fields.state())
    return KeeperReply()


def _flush(core: KeeperCore, request: KeeperRequest) -> KeeperReply | None:
    """Answer once the newest committed state is persisted, or cannot be."""
    persister, table = core.persister, core.memory.buffer_table
    if core.n_hashing:
        return None
    newest = table.last_committed
    policy = persister.policy
    why = ""
    if newest is None:
        why = "there is no committed state"
    elif policy is None or policy.directory is None:
        why = "no directory for checkpoints is set"
    elif not persister.schedule.has_persisted(newest):
        if request.waited_s > 0 and not persister.is_flushing and persister.failure:
            why = persister.failure
        else:
            persister.is_flushing = True
            persister.persist_if_due()
            return None
    persister.is_flushing = False
    return KeeperReply(
        {
            "state": state_to_json(newest) if newest and not why else None,
            "seconds": persister.seconds,
            "bytes": persister.nbytes,
            "why": why,
        }
    )


def _inventory(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    """Answer a page of the verified copies; the tables of their digests come apart."""
    after = request.fields.integer("after", 0, ID_MAX)
    copies = _copies(core)
    page = copies[after : after + _COPIES_PER_REPLY]
    return KeeperReply(
        {
            "copies": [
                {
                    "state": state_to_json(copy.state),
                    "shard": shard_to_json(copy.shard),
                    "layout": copy.layout,
                    "nbytes": copy.digest.nbytes,
                    "root": copy.digest.root,
                    "table_bytes": len(copy.digest.table),
                }
                for copy in page
            ],
            "holder": core.memory.node,
            "is_all": after + len(page) >= len(copies),
        }
    )


def _copies(core: KeeperCore) -> list[ShardCopy]:
    """Return what memory holds, of this node's ranks and for others, the newest state first."""
    own = [
        held.copy
        for state in core.memory.complete_states()
        for held in core.memory.held_shards(state).values()
    ]
    there = {(copy.state, copy.shard) for copy in own}
    others = [copy for copy in core.peers.copies() if (copy.state, copy.shard) not in there]
    return sorted([*own, *others], key=lambda copy: copy.state, reverse=True)


def _table(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    fields = request.fields
    state, shard = fields.state(), fields.shard()
    found = next((c for c in _copies(core) if (c.state, c.shard) == (state, shard)), None)
    if found is None:
        raise KeeperError("memory holds that copy no more")
    table = found.digest.table
    begin = fields.integer("begin", 0, len(table))
    return KeeperReply({"table": b64encode(table[begin : begin + TABLE_BYTES_PER_REPLY]).decode()})


def _serve_peers(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    fields = request.fields
    port = core.peers.serve(
        fields.text("address", _NAME_CHARS_MAX),
        port=fields.integer("port", 0, 65_535) if "port" in fields else 0,
        node=fields.text("node", _NAME_CHARS_MAX),
        token=fields.text("token", _TOKEN_CHARS_MAX),
        job=fields.text("job", _NAME_CHARS_MAX),
    )
    return KeeperReply({"port": port})


def _replicate(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    fields = request.fields
    bytes_per_s = fields.number("bytes_per_s", 1.0, 1e15) if "bytes_per_s" in fields else None
    core.peers.replicate(
        peers_from_json(fields, "holders"), shards_from_json(fields, "keep"), bytes_per_s
    )
    return KeeperReply()


def _sources(_core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    """Take a page of holders in; the last page is followed by `choose`."""
    found = request.session.holders
    if request.fields.flag("begin"):
        found.clear()
    found |= holders_from_json(request.fields)
    if len(found) > WORLD_MAX:
        raise MessageError(f"no world has {len(found)} shards")
    return KeeperReply()


def _progress(core: KeeperCore, _request: KeeperRequest) -> KeeperReply:
    return KeeperReply(core.progress().to_json())


def _report_difference(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    report = replica_report_from_json(request.fields.values.get("told"))
    if report is None:
        raise MessageError("a message tells of no replicas that differ")
    core.replica_checker.on_report(report)
    return KeeperReply()


def _seal_persisted(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    fields = request.fields
    core.persister.commit_shards(fields.state(), fields.integer("world", 1, WORLD_MAX))
    return KeeperReply()


def _events(core: KeeperCore, _request: KeeperRequest) -> KeeperReply:
    found = core.events.take(_EVENTS_CHARS_PER_REPLY)
    return KeeperReply({"events": found, "is_all": not len(core.events)})


def _hand_over(core: KeeperCore, request: KeeperRequest) -> KeeperReply:
    """End the keeper where it is over: no rank is at work, and the newest state persists."""
    group = core.group
    n_ranks = len(group.connections) if group is not None else 0
    if group is not None:
        group.is_handed_over = True
    persister, newest = core.persister, core.memory.buffer_table.last_committed
    has_place = persister.policy is not None and persister.policy.directory is not None
    is_safe = newest is None or not has_place or persister.schedule.has_persisted(newest)
    if request.fields.flag("is_over") and not n_ranks and not core.n_hashing and is_safe:
        core.is_ending = True
    return KeeperReply({"ranks": n_ranks, "is_ending": core.is_ending})


def _is_handed_over(core: KeeperCore, _request: KeeperRequest) -> KeeperReply:
    return KeeperReply({"is_left": core.group is not None and core.group.is_handed_over})


def _shut_down(core: KeeperCore, _request: KeeperRequest) -> KeeperReply:
    core.is_ending = True
    return KeeperReply()


_HANDLERS: Mapping[str, Mapping[str, Handler]] = {
    "probe": {"stats": _stats, "left": _is_handed_over},
    "rank": {
        "reserve": _reserve,
        "begin": _begin,
        "seal": _seal,
        "abandon": _abandon,
        "offer": _restore_point,
        "open_shard": _open_shard,
        "restored": _restored,
        "settings": _settings,
        "stats": _stats,
    },
    "agent": {
        "begin_generation": _begin_generation,
        "choose": _restore_from,
        "take_over": _take_over,
        "commit": _commit,
        "give_up": _give_up,
        "aim": _set_next_step,
        "flush": _flush,
        "inventory": _inventory,
        "table": _table,
        "serve_peers": _serve_peers,
        "replicate": _replicate,
        "sources": _sources,
        "progress": _progress,
        "seal_persisted": _seal_persisted,
        "differ": _report_difference,
        "stats": _stats,
        "events": _events,
        "leave": _hand_over,
        "end": _shut_down,
    },
}


def error_kind(error: CheckpointError) -> str:
    """Return the word by which the other side tells refusals apart."""
    return "cannot_tell" if isinstance(error, RestoreUndecidedRefusal) else "refused"
