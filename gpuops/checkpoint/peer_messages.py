"""Peers and shards in the messages between an agent and its keeper."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpuops.checkpoint.messages import Fields, MessageError, shard_to_json
from gpuops.checkpoint.peer_shards import Holders
from gpuops.checkpoint.states import Shard
from gpuops.checkpoint.transfer_team import Peer

HOLDERS_OF_ONE_MAX = 8
KEPT_MAX = 2048
_PEERS_MAX = 1000
_SHARDS_PER_PAGE = 100
_NAME_CHARS_MAX = 200
_PORT_MAX = 65_535
_ROOT_CHARS = 64


def peers_to_json(peers: Iterable[Peer]) -> list[object]:
    """Return ``[name, host, port]`` of each."""
    return [[peer.name, peer.host, peer.port] for peer in peers]


def peers_from_json(fields: Fields, name: str) -> list[Peer]:
    """Return the peers; raises MessageError."""
    found = []
    for item in fields.items(name, _PEERS_MAX):
        parts = item if isinstance(item, list) and len(item) == 3 else ["", "", None]
        part = Fields({"name": parts[0], "host": parts[1], "port": parts[2]})
        peer = Peer(
            part.text("name", _NAME_CHARS_MAX),
            part.text("host", _NAME_CHARS_MAX),
            part.integer("port", 1, _PORT_MAX),
        )
        found.append(peer)
    return found


def shards_from_json(fields: Fields, name: str) -> list[Shard]:
    """Return the shards; raises MessageError."""
    return [Fields({"shard": item}).shard() for item in fields.items(name, KEPT_MAX)]


def pages_of_holders(
    sources: Mapping[Shard, Sequence[Peer]], roots: Mapping[Shard, str]
) -> Iterator[dict[str, object]]:
    """Yield the fields of the messages that say who holds what, each short enough for one.

    Of many holders of one shard the first are said.
    """
    shards = sorted(sources)
    for at in range(0, len(shards), _SHARDS_PER_PAGE):
        places: dict[Peer, int] = {}
        rows = []
        for shard in shards[at : at + _SHARDS_PER_PAGE]:
            peers = list(sources[shard])[:HOLDERS_OF_ONE_MAX]
            indexes = [places.setdefault(peer, len(places)) for peer in peers]
            rows.append([shard_to_json(shard), roots.get(shard, ""), indexes])
        yield {"begin": at == 0, "peers": peers_to_json(places), "shards": rows}


def holders_from_json(fields: Fields) -> dict[Shard, Holders]:
    """Return what one page says; raises MessageError."""
    peers = peers_from_json(fields, "peers")
    found: dict[Shard, Holders] = {}
    for item in fields.items("shards", _SHARDS_PER_PAGE):
        parts = item if isinstance(item, list) and len(item) == 3 else [None, None, None]
        row = Fields({"shard": parts[0], "root": parts[1], "peers": parts[2]})
        root = row.text("root", _ROOT_CHARS)
        if root and (len(root) != _ROOT_CHARS or root.strip("0123456789abcdef")):
            raise MessageError(f"{root!r} is no root of a digest")
        indexes = row.items("peers", HOLDERS_OF_ONE_MAX)
        if not all(type(n) is int and 0 <= n < len(peers) for n in indexes):
            raise MessageError(f"a message names peers {indexes} of {len(peers)}")
        found[row.shard()] = Holders(tuple(peers[n] for n in indexes), root)
    return found
