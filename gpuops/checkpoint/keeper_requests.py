"""What a connection may ask of the keeper, and what it is answered.

A handler returns the answer, or None where it has to wait; it is then called again, with the same
request, whenever something has happened, until its time is over.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuops.checkpoint.crew import FENCE_S, Guest, Post
from gpuops.checkpoint.keeper import SLOTS_MAX, Skipped
from gpuops.checkpoint.keeper_core import Core
from gpuops.checkpoint.keeper_progress import progress_to_json
from gpuops.checkpoint.messages import (
    ID_MAX,
    WHY_CHARS_MAX,
    Fields,
    MessageError,
    offer_to_json,
    policy_from_json,
    shard_to_json,
    state_to_json,
)
from gpuops.checkpoint.node_memory import handle
from gpuops.checkpoint.offering import WHY_MAX
from gpuops.checkpoint.peer_messages import holders_from_json, peers_from_json, shards_from_json
from gpuops.checkpoint.peer_shards import Holders
from gpuops.checkpoint.states import (
    EPOCH_MAX,
    IMAGE_BYTES_MAX,
    STEP_MAX,
    WORLD_MAX,
    CheckpointError,
    Copy,
    KeeperError,
    Shard,
)
from gpuops.checkpoint.vote_words import told_from

GENERATION_MAX = 2**31
OFFER_WAIT_S_MAX = 86_400.0
_HASH_CHARS = 64
_NAME_CHARS_MAX = 200
_TOKEN_CHARS_MAX = 4096
_EVENTS_CHARS_PER_ANSWER = 40_000
_COPIES_PER_ANSWER = 200
TABLE_BYTES_PER_ANSWER = 24_000


@dataclass(frozen=True, slots=True)
class Answer:
    """The fields of an answer, and the descriptors that go with it; who sends it closes them."""

    ok: Mapping[str, Any] = field(default_factory=dict)
    fds: tuple[int, ...] = ()


class CannotTell(KeeperError):  # noqa: N818 not an error of the keeper's
    """Whether there is a state to load cannot be told; the answer says so by its kind."""


@dataclass(slots=True)
class Visitor:
    """One connection: who it says it is. ``role`` is "" until it has said so.

    ``sources``: who holds what of the state that is going to be chosen.
    """

    guest: Guest
    role: str = ""
    post: Post | None = None
    sources: dict[Shard, Holders] = field(default_factory=dict)

    @property
    def station(self) -> Post:
        """Return where the rank stands."""
        assert self.post is not None
        return self.post


@dataclass(frozen=True, slots=True)
class Request:
    """A message of *visitor*: what it asks for, and since when it waits, in seconds."""

    visitor: Visitor
    what: str
    fields: Fields
    waited_s: float = 0.0


Handler = Callable[[Core, Request], Answer | None]


def wait_s_max(request: Request) -> float:
    """Return for how long the request may wait for its answer; 0: not at all."""
    if request.what == "hello":
        return 2 * FENCE_S
    if request.what in ("offer", "flush"):
        return request.fields.number("deadline_s", 0.0, OFFER_WAIT_S_MAX)
    return 0.0


def answer(core: Core, request: Request) -> Answer | None:
    """Return the answer to *request*, None where it waits.

    Raises:
        CheckpointError: It is refused; says why.
    """
    if request.what == "hello":
        return _hello(core, request)
    handler = _HANDLERS.get(request.visitor.role, {}).get(request.what)
    if handler is None:
        who = request.visitor.role or "who has not said who it is"
        raise MessageError(f"{who} cannot ask for {request.what[:40]!r}")
    return handler(core, request)


def _hello(core: Core, request: Request) -> Answer | None:
    visitor, fields = request.visitor, request.fields
    if visitor.role:
        raise MessageError("this connection has said hello already")
    role = fields.text("role", 20)
    if role == "agent":
        if core.agent is not None:
            raise KeeperError(
                f"this keeper serves the agent with pid {core.agent.pid}: two agents must not use "
                "one folder"
            )
        core.agent = visitor.guest
    elif role == "rank":
        post = _post(fields)
        is_patient = request.waited_s < FENCE_S
        is_back = fields.flag("is_back") if "is_back" in fields else False
        if not core.join(visitor.guest, post, is_patient=is_patient, is_back=is_back):
            return None
        visitor.post = post
    elif role != "probe":
        raise MessageError(f"there is no role {role!r}")
    visitor.role = role
    return Answer({"agent": core.agent.pid if core.agent else None})


def _post(fields: Fields) -> Post:
    world = fields.integer("world", 1, WORLD_MAX)
    n_ranks = fields.integer("local_world", 1, min(world, 4096))
    return Post(
        Shard(fields.integer("rank", 0, world - 1), world),
        fields.integer("local_rank", 0, n_ranks - 1),
        n_ranks,
        fields.integer("generation", 0, GENERATION_MAX),
    )


def _reserve(core: Core, request: Request) -> Answer:
    fields = request.fields
    layout = fields.text("layout", _HASH_CHARS)
    if len(layout) != _HASH_CHARS or layout.strip("0123456789abcdef"):
        raise MessageError(f"{layout!r} is no hash of a layout")
    nbytes = fields.integer("nbytes", 1, IMAGE_BYTES_MAX)
    n_slots = fields.integer("slots", 1, SLOTS_MAX)
    arena = core.reserve(request.visitor.station, layout, nbytes, n_slots)
    slots = sorted(arena.slots.items())[:SLOTS_MAX]
    return Answer(
        {"slots": [index for index, _memory in slots], "nbytes": nbytes},
        tuple(handle(memory, writable=True) for _index, memory in slots),
    )


def _begin(core: Core, request: Request) -> Answer:
    step = request.fields.integer("step", 0, STEP_MAX)
    is_last = request.fields.flag("is_last")
    decided = core.begin(request.visitor.station, step, is_last=is_last)
    if isinstance(decided, Skipped):
        return Answer({"skipped": decided.why, "is_due": decided.is_due})
    notice = core.notice_for(request.visitor.station)
    return Answer(
        {"slot": decided.slot.index, "state": state_to_json(decided.state), "notice": notice}
    )


def _seal(core: Core, request: Request) -> Answer:
    core.seal(request.visitor.station, request.fields.state())
    return Answer()


def _abandon(core: Core, request: Request) -> Answer:
    core.abandon(request.visitor.station, request.fields.state())
    return Answer()


def _offer(core: Core, _request: Request) -> Answer | None:
    crew, command = core.crew, core.command
    assert crew is not None
    if command is not None and command.is_taken_over:
        # Which state the others loaded nobody knows any more: all have to be started anew.
        raise KeeperError(
            "the keeper that told the ranks of this generation where to go on from is gone"
        )
    if crew.found is None and not crew.trouble:
        core.want(crew)
    if crew.trouble:
        raise CannotTell(crew.trouble) if crew.cannot_tell else KeeperError(crew.trouble)
    if crew.found is None:
        return None
    offer = crew.found.offer
    return Answer({"offer": None if offer is None else offer_to_json(offer)})


def _open_shard(core: Core, request: Request) -> Answer:
    source = core.source(request.fields.state(), request.fields.shard())
    if isinstance(source, Path):
        return Answer({"path": str(source)})
    return Answer({"nbytes": source.nbytes}, (handle(source, writable=False),))


def _restored(core: Core, request: Request) -> Answer:
    fields, post = request.fields, request.visitor.station
    core.restored(
        post,
        fields.state(),
        tier=fields.text("tier", 20),
        seconds=fields.number("seconds"),
        nbytes=fields.integer("bytes", 0, ID_MAX),
    )
    return Answer()


def _settings(core: Core, request: Request) -> Answer:
    core.set_policy(policy_from_json(request.fields.part("policy")))
    return Answer()


def _stats(core: Core, _request: Request) -> Answer:
    return Answer(core.counts())


def _begin_generation(core: Core, request: Request) -> Answer:
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
    return Answer()


def _choose(core: Core, request: Request) -> Answer:
    fields = request.fields
    state = fields.state() if "state" in fields else None
    n_sources = fields.integer("sources", 0, WORLD_MAX) if "sources" in fields else 0
    why = fields.items("why", WHY_MAX) if "why" in fields else []
    holders = dict(request.visitor.sources) if n_sources else {}
    request.visitor.sources.clear()
    if n_sources != len(holders):
        raise MessageError(f"of {n_sources} shards the holders were to be said, not {len(holders)}")
    epoch = fields.integer("epoch", 0, EPOCH_MAX)
    core.choose(state, epoch, holders, tuple(str(text)[:WHY_CHARS_MAX] for text in why))
    return Answer()


def _take_over(core: Core, request: Request) -> Answer:
    core.take_over(request.fields.integer("epoch", 0, EPOCH_MAX))
    return Answer()


def _commit(core: Core, request: Request) -> Answer:
    fields = request.fields
    is_new = core.commit(fields.state(), is_to_persist=fields.flag("persist"))
    return Answer({"is_new": is_new})


def _aim(core: Core, request: Request) -> Answer:
    core.aim(request.fields.integer("step", 0, STEP_MAX))
    return Answer()


def _give_up(core: Core, request: Request) -> Answer:
    core.give_up(request.fields.state())
    return Answer()


def _flush(core: Core, request: Request) -> Answer | None:
    """Answer once the newest committed state is persisted, or cannot be."""
    persister, gate = core.persister, core.memory.gate
    if core.n_hashing:
        return None
    newest = gate.newest
    policy = persister.policy
    why = ""
    if newest is None:
        why = "there is no committed state"
    elif policy is None or policy.directory is None:
        why = "no directory for checkpoints is set"
    elif not persister.schedule.has(newest):
        if request.waited_s > 0 and not persister.is_flushing and persister.failure:
            why = persister.failure
        else:
            persister.is_flushing = True
            persister.persist_if_due()
            return None
    persister.is_flushing = False
    return Answer(
        {
            "state": state_to_json(newest) if newest and not why else None,
            "seconds": persister.seconds,
            "bytes": persister.nbytes,
            "why": why,
        }
    )


def _inventory(core: Core, request: Request) -> Answer:
    """Answer a page of the verified copies; the tables of their digests come apart."""
    after = request.fields.integer("after", 0, ID_MAX)
    copies = _copies(core)
    page = copies[after : after + _COPIES_PER_ANSWER]
    return Answer(
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


def _copies(core: Core) -> list[Copy]:
    """Return what memory holds, of this node's ranks and for others, the newest state first."""
    own = [held.copy for state in core.memory.states() for held in core.memory.held(state).values()]
    there = {(copy.state, copy.shard) for copy in own}
    others = [copy for copy in core.peers.copies() if (copy.state, copy.shard) not in there]
    return sorted([*own, *others], key=lambda copy: copy.state, reverse=True)


def _table(core: Core, request: Request) -> Answer:
    fields = request.fields
    state, shard = fields.state(), fields.shard()
    found = next((c for c in _copies(core) if (c.state, c.shard) == (state, shard)), None)
    if found is None:
        raise KeeperError("memory holds that copy no more")
    table = found.digest.table
    begin = fields.integer("begin", 0, len(table))
    return Answer({"table": b64encode(table[begin : begin + TABLE_BYTES_PER_ANSWER]).decode()})


def _serve_peers(core: Core, request: Request) -> Answer:
    fields = request.fields
    port = core.peers.serve(
        fields.text("address", _NAME_CHARS_MAX),
        port=fields.integer("port", 0, 65_535) if "port" in fields else 0,
        node=fields.text("node", _NAME_CHARS_MAX),
        token=fields.text("token", _TOKEN_CHARS_MAX),
        job=fields.text("job", _NAME_CHARS_MAX),
    )
    return Answer({"port": port})


def _replicate(core: Core, request: Request) -> Answer:
    fields = request.fields
    bytes_per_s = fields.number("bytes_per_s", 1.0, 1e15) if "bytes_per_s" in fields else None
    core.peers.replicate(
        peers_from_json(fields, "holders"), shards_from_json(fields, "keep"), bytes_per_s
    )
    return Answer()


def _sources(_core: Core, request: Request) -> Answer:
    """Take a page of holders in; the last page is followed by `choose`."""
    found = request.visitor.sources
    if request.fields.flag("begin"):
        found.clear()
    found |= holders_from_json(request.fields)
    if len(found) > WORLD_MAX:
        raise MessageError(f"no world has {len(found)} shards")
    return Answer()


def _progress(core: Core, _request: Request) -> Answer:
    return Answer(progress_to_json(core.progress()))


def _differ(core: Core, request: Request) -> Answer:
    told = told_from(request.fields.values.get("told"))
    if told is None:
        raise MessageError("a message tells of no replicas that differ")
    core.voting.told(told)
    return Answer()


def _seal_persisted(core: Core, request: Request) -> Answer:
    fields = request.fields
    core.persister.seal(fields.state(), fields.integer("world", 1, WORLD_MAX))
    return Answer()


def _events(core: Core, _request: Request) -> Answer:
    found = core.events.take(_EVENTS_CHARS_PER_ANSWER)
    return Answer({"events": found, "is_all": not len(core.events)})


def _leave(core: Core, request: Request) -> Answer:
    """End the keeper where it is over: no rank is at work, and the newest state persists."""
    crew = core.crew
    n_ranks = len(crew.members) if crew is not None else 0
    if crew is not None:
        crew.is_left = True
    persister, newest = core.persister, core.memory.gate.newest
    has_place = persister.policy is not None and persister.policy.directory is not None
    is_safe = newest is None or not has_place or persister.schedule.has(newest)
    if request.fields.flag("is_over") and not n_ranks and not core.n_hashing and is_safe:
        core.is_ending = True
    return Answer({"ranks": n_ranks, "is_ending": core.is_ending})


def _left(core: Core, _request: Request) -> Answer:
    return Answer({"is_left": core.crew is not None and core.crew.is_left})


def _end(core: Core, _request: Request) -> Answer:
    core.is_ending = True
    return Answer()


_HANDLERS: Mapping[str, Mapping[str, Handler]] = {
    "probe": {"stats": _stats, "left": _left},
    "rank": {
        "reserve": _reserve,
        "begin": _begin,
        "seal": _seal,
        "abandon": _abandon,
        "offer": _offer,
        "open_shard": _open_shard,
        "restored": _restored,
        "settings": _settings,
        "stats": _stats,
    },
    "agent": {
        "begin_generation": _begin_generation,
        "choose": _choose,
        "take_over": _take_over,
        "commit": _commit,
        "give_up": _give_up,
        "aim": _aim,
        "flush": _flush,
        "inventory": _inventory,
        "table": _table,
        "serve_peers": _serve_peers,
        "replicate": _replicate,
        "sources": _sources,
        "progress": _progress,
        "seal_persisted": _seal_persisted,
        "differ": _differ,
        "stats": _stats,
        "events": _events,
        "leave": _leave,
        "end": _end,
    },
}


def kind_of(error: CheckpointError) -> str:
    """Return the word by which the other side tells refusals apart."""
    return "cannot_tell" if isinstance(error, CannotTell) else "refused"
