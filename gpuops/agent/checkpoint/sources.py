"""The sources of a restore plan, in the control store: by node, in keys of their own.

The sources of 4,096 nodes with 8 ranks each take 1.6 MB. So they are written in blocks of ranks,
and a node reads the blocks of its own ranks; only after a change of the world's size it reads all.
Consecutive ranks that the same nodes hold are one run. The name of the blocks is the digest of
their contents, so that a plan never goes with the sources of another leader's plan.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import groupby
from typing import Annotated

from gpuops.agent.checkpoint.messages import Packed
from gpuops.checkpoint.agreement.recovery import RestorePlan, SourceNames
from gpuops.checkpoint.types import KeeperAddress, Shard
from gpuops.control.record import ControlKeys, RecordError, pack, unpack
from gpuops.control.store import NO_ENTRY, ControlStore, ControlStoreError, Entry
from gpuops.wire.messages import Limit, Message, MessageFormatError

log = logging.getLogger(__name__)

BLOCK_RANKS = 512
_ROOT_BYTES = 32


@dataclass(frozen=True, slots=True)
class SourceBlock(Message):
    """The sources of up to `BLOCK_RANKS` consecutive ranks.

    ``runs`` are (number of ranks, nodes that hold them); ``roots`` has 32 bytes for each rank.
    """

    runs: Annotated[
        tuple[tuple[Annotated[int, Limit(BLOCK_RANKS, low=1)], SourceNames], ...],
        Limit(BLOCK_RANKS),
    ]
    roots: Packed

    def __post_init__(self) -> None:
        if len(self.roots) != _ROOT_BYTES * sum(n_ranks for n_ranks, _names in self.runs):
            raise ValueError(f"{len(self.roots)} bytes are not a root for each rank")


def write_sources(
    store: ControlStore, keys: ControlKeys, generation: int, plan: RestorePlan
) -> RestorePlan:
    """Write the sources of *plan*; return the plan with their name in their place.

    Raises:
        ControlStoreError: Not all of them were written; the plan must not be used.
    """
    if not plan.sources:
        return plan
    values = {
        first: pack(_block(plan, range(first, min(first + BLOCK_RANKS, plan.world))).to_json())
        for first in range(0, plan.world, BLOCK_RANKS)
    }
    name = sha256(b"".join(values.values())).hexdigest()[:32]
    for first, value in values.items():
        store.put(keys.sources(generation, name, first), value)
    return replace(plan, sources={}, roots={}, blocks=name)


def try_read_sources(
    store: ControlStore,
    keys: ControlKeys,
    generation: int,
    plan: RestorePlan,
    ranks: Collection[int] | None,
) -> RestorePlan | None:
    """Return *plan* with the sources of at least *ranks*; of all where that is None.

    Returns None where they cannot be read now.
    """
    if not plan.blocks:
        return plan
    try:
        return _read(_entries(store, keys, generation, plan, ranks), plan)
    except (ControlStoreError, RecordError, MessageFormatError) as exc:
        log.debug("the sources of %s cannot be read yet: %s", plan.state, exc)
        return None


def keeper_sources(
    plan: RestorePlan, peers: Mapping[str, KeeperAddress], me: str, ranks: Iterable[int]
) -> dict[Shard, list[KeeperAddress]]:
    """Return the *peers* from which node *me* fetches the shards of *ranks*, in order.

    Each rank begins at another one, to spread the load.
    """
    found = {}
    for rank in sorted(plan.sources.keys() & set(ranks)):
        holders = [peers[node] for node in plan.sources[rank] if node in peers and node != me]
        if holders:
            at = rank % len(holders)
            found[Shard(rank, plan.world)] = [*holders[at:], *holders[:at]]
    return found


def _read(entries: Iterable[tuple[int, Entry]], plan: RestorePlan) -> RestorePlan:
    sources: dict[int, tuple[str, ...]] = {}
    roots: dict[int, str] = {}
    for first, entry in entries:
        block = SourceBlock.from_json(unpack(entry.value))
        names_of = [names for n_ranks, names in block.runs for _ in range(n_ranks)]
        for at, names in enumerate(names_of):
            if names:
                sources[first + at] = names
                roots[first + at] = block.roots[_ROOT_BYTES * at :][:_ROOT_BYTES].hex()
    return replace(plan, sources=sources, roots=roots)


def _entries(
    store: ControlStore,
    keys: ControlKeys,
    generation: int,
    plan: RestorePlan,
    ranks: Collection[int] | None,
) -> Iterator[tuple[int, Entry]]:
    """Yield the first rank and the entry of each block that is needed."""
    if ranks is None:
        found = store.list(keys.sources(generation, plan.blocks))
        for first in range(0, plan.world, BLOCK_RANKS):
            key = keys.sources(generation, plan.blocks, first)
            yield first, found.get(key, NO_ENTRY)
        return
    for first in sorted({rank - rank % BLOCK_RANKS for rank in ranks}):
        yield first, store.get(keys.sources(generation, plan.blocks, first))


def _block(plan: RestorePlan, ranks: range) -> SourceBlock:
    runs = groupby(ranks, key=lambda rank: plan.sources.get(rank, ()))
    roots = (bytes.fromhex(plan.roots.get(rank, "")).ljust(_ROOT_BYTES, b"\0") for rank in ranks)
    return SourceBlock(tuple((len(list(of_run)), names) for names, of_run in runs), b"".join(roots))
