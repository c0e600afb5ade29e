"""The messages between an agent and its keeper: peers, shards, status, events."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpuops.checkpoint.keeper.messages import (
    MessageError,
    MessageFields,
    shard_to_json,
)
from gpuops.checkpoint.peers.fetch import ShardHolders
from gpuops.checkpoint.types import (
    KeeperAddress,
    Shard,
)

HOLDERS_PER_SHARD_MAX = 8
SHARDS_MAX = 2048
_PEERS_MAX = 1000
_SHARDS_PER_PAGE = 100
_NAME_CHARS_MAX = 200
_PORT_MAX = 65_535
_ROOT_CHARS = 64


def peers_to_json(peers: Iterable[KeeperAddress]) -> list[object]:
    """Return ``[name, host, port]`` of each."""
    return [[peer.name, peer.host, peer.port] for peer in peers]


def peers_from_json(fields: MessageFields, name: str) -> list[KeeperAddress]:
    """Return the peers; raises MessageError."""
    parsed = []
    for item in fields.items(name, _PEERS_MAX):
        parts = item if isinstance(item, list) and len(item) == 3 else ["", "", None]
        part = MessageFields({"name": parts[0], "host": parts[1], "port": parts[2]})
        peer = KeeperAddress(
            part.text("name", _NAME_CHARS_MAX),
            part.text("host", _NAME_CHARS_MAX),
            part.integer("port", 1, _PORT_MAX),
        )
        parsed.append(peer)
    return parsed


def shards_from_json(fields: MessageFields, name: str) -> list[Shard]:
    """Return the shards; raises MessageError."""
    return [MessageFields({"shard": item}).shard() for item in fields.items(name, SHARDS_MAX)]


def holder_pages(
    sources: Mapping[Shard, Sequence[KeeperAddress]], roots: Mapping[Shard, str]
) -> Iterator[dict[str, object]]:
    """Yield the fields of the messages that say who holds what, each short enough for one.

    Of many holders of one shard the first are said.
    """
    shards = sorted(sources)
    for at in range(0, len(shards), _SHARDS_PER_PAGE):
        indexes_by_peer: dict[KeeperAddress, int] = {}
        rows = []
        for shard in shards[at : at + _SHARDS_PER_PAGE]:
            peers = list(sources[shard])[:HOLDERS_PER_SHARD_MAX]
            indexes = [indexes_by_peer.setdefault(peer, len(indexes_by_peer)) for peer in peers]
            rows.append([shard_to_json(shard), roots.get(shard, ""), indexes])
        yield {"begin": at == 0, "peers": peers_to_json(indexes_by_peer), "shards": rows}


def holders_from_json(fields: MessageFields) -> dict[Shard, ShardHolders]:
    """Return what one page says; raises MessageError."""
    peers = peers_from_json(fields, "peers")
    parsed: dict[Shard, ShardHolders] = {}
    for item in fields.items("shards", _SHARDS_PER_PAGE):
        parts = item if isinstance(item, list) and len(item) == 3 else [None, None, None]
        row = MessageFields({"shard": parts[0], "root": parts[1], "peers": parts[2]})
        root = row.text("root", _ROOT_CHARS)
        if root and (len(root) != _ROOT_CHARS or root.strip("0123456789abcdef")):
            raise MessageError(f"{root!r} is no root of a digest")
        indexes = row.items("peers", HOLDERS_PER_SHARD_MAX)
        if not all(type(n) is int and 0 <= n < len(peers) for n in indexes):
            raise MessageError(f"a message names peers {indexes} of {len(peers)}")
        parsed[row.shard()] = ShardHolders(tuple(peers[n] for n in indexes), root)
    return parsed


EVENTS_MAX = 1000
_TEXT_CHARS_MAX = 500
_ITEM_CHARS_MAX = 200
_ITEMS_MAX = 8
# Of these there may be one each step: those that follow one another become one with a count.
_COUNTED = ("committed", "skipped", "given_up", "whole", "replicated")
# What each save brings where there are several nodes: these take turns.
_PER_SAVE = ("whole", "replicated", "committed")


@dataclass(slots=True)
class EventQueue:
    """Mappings with a ``kind``, oldest first; *on_event* hears of each that is not one of many."""

    on_event: Callable[[Mapping[str, object]], None] = lambda _event: None
    dropped: int = 0
    _waiting: deque[dict[str, object]] = field(default_factory=deque)

    def add(self, kind: str, **fields: object) -> None:
        """Add an event; text in it is cut to a bound."""
        event: dict[str, object] = {"kind": kind}
        event |= {name: _bounded(value) for name, value in fields.items()}
        if kind in _COUNTED:
            event["n"] = 1
            last = self._find_mergeable(kind, event.get("holder"))
            if last is not None:
                n = last["n"]
                assert isinstance(n, int)
                event["n"] = n + 1
                self._waiting.remove(last)
        else:
            self.on_event(event)
        if len(self._waiting) >= EVENTS_MAX:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(event)

    def _find_mergeable(self, kind: str, holder: object) -> dict[str, object] | None:
        """Return the event that one more of *kind* is to be counted with."""
        for event in reversed(self._waiting):
            if event["kind"] == kind and event.get("holder") == holder:
                return event
            if not {kind, event["kind"]} <= set(_PER_SAVE):
                return None
        return None

    def take(self, chars_max: int) -> list[Mapping[str, object]]:
        """Return, and forget, the oldest, at least one and as many as *chars_max* of JSON hold.

        The first says how many were lost, if any.
        """
        found: list[Mapping[str, object]] = []
        if self.dropped:
            found.append({"kind": "events_lost", "n": self.dropped})
            self.dropped = 0
        n_chars = 0
        while self._waiting:
            n_chars += len(json.dumps(self._waiting[0]))
            if found and n_chars > chars_max:
                break
            found.append(self._waiting.popleft())
        return found

    def __len__(self) -> int:
        return len(self._waiting)


def _bounded(value: object) -> object:
    if isinstance(value, str):
        return value[:_TEXT_CHARS_MAX]
    if isinstance(value, list | tuple):
        items = value[:_ITEMS_MAX]
        return [item[:_ITEM_CHARS_MAX] if isinstance(item, str) else item for item in items]
    return value
