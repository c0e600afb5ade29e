"""Fetch the shards of one state from other nodes: each once, when it is first requested.

Ranks of another number than saved the state need parts of many shards: these are fetched instead.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpuops.checkpoint.image import read_layout
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.partial_image import ByteRange, PartialImage, PutBytes, RangeHolder
from gpuops.checkpoint.transfer.client import FetchResult, fetch, fetch_digest
from gpuops.checkpoint.transfer.connection import TransferLimits
from gpuops.checkpoint.transfer.parallel import TransferOptions
from gpuops.checkpoint.transfer.parts import fetch_parts
from gpuops.checkpoint.transfer.wire import JobCredentials
from gpuops.checkpoint.types import (
    CheckpointError,
    Digest,
    KeeperAddress,
    KeeperError,
    Shard,
    ShardCopy,
    ShardHolders,
    StateId,
    Tier,
)

# A peer without progress for this long is given up: the next holder is asked.
NO_PROGRESS_S = 10.0
# The slowest rate that is still awaited.
_RATE_MIN_BYTES_S = 2 * 2**20
_DEADLINE_MIN_S = 60.0
_LIMITS = TransferLimits(stall_s=5.0)

# Called by any thread with the kind of an event and its fields.
OnEvent = Callable[[str, Mapping[str, object]], None]


@dataclass(slots=True)
class _FetchSlot:
    """One shard; the thread with the lock fetches it, the others wait."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    memory: SharedBuffer | None = None
    copy: ShardCopy | None = None  # describes `memory`, where that belongs to a shard
    error: CheckpointError | None = None


class PeerShards:
    """The copies of *state* on peers, and the memory into which they are fetched. Thread-safe.

    *allocate* returns that memory, or raises CheckpointError where it does not fit.
    """

    def __init__(
        self,
        state: StateId,
        holders: Mapping[Shard, ShardHolders],
        job: JobCredentials,
        allocate: Callable[[int], SharedBuffer],
        on_event: OnEvent,
        *,
        no_progress_s: float = NO_PROGRESS_S,
    ) -> None:
        self.state = state
        self._holders = dict(holders)
        self._job, self._make, self._on_event = job, allocate, on_event
        self._no_progress_s = no_progress_s
        self._stop = threading.Event()
        self._slots = {shard: _FetchSlot() for shard in holders}
        self._parts: list[_PeerRanges] = []

    def __contains__(self, shard: Shard) -> bool:
        return shard in self._holders

    @property
    def world(self) -> int | None:
        """Return the number of ranks of the world that saved the shards."""
        return next((shard.world for shard in self._holders), None)

    @property
    def is_closed(self) -> bool:
        """Return whether nothing more can be fetched."""
        return self._stop.is_set()

    def renewed(self) -> "PeerShards":
        """Return a new object with the same holders and nothing fetched."""
        return PeerShards(
            self.state,
            self._holders,
            self._job,
            self._make,
            self._on_event,
            no_progress_s=self._no_progress_s,
        )

    def get(self, shard: Shard) -> SharedBuffer:
        """Return the bytes of *shard*, all verified; they stay until `close`.

        Raises:
            CheckpointError: No holder could serve it; the message has the error of each.
        """
        slot = self._slots[shard]
        with slot.lock:
            if slot.memory is None and slot.error is None:
                try:
                    slot.memory, digest = self._fetch_verified(shard)
                    slot.copy = self._copy_of(shard, slot.memory, digest)
                except CheckpointError as exc:
                    slot.error = exc
            if slot.error is not None:
                raise slot.error
            assert slot.memory is not None
            if self.is_closed:
                slot.memory.close()
                raise KeeperError(f"newer workers have started: {shard.file_name} is not needed")
            return slot.memory

    def open_parts(
        self,
        shard: Shard,
        stored: Callable[[Digest], Sequence[RangeHolder]],
        check_fits: Callable[[int], None],
    ) -> PartialImage:
        """Return the image of *shard*; nothing of it is fetched yet.

        *stored* returns where else the image with its digest is, for what no peer can serve.

        Raises:
            CheckpointError: No holder has it; the message has the error of each.
        """
        holders, why = self._holders[shard], list[str]()
        for at, peer in enumerate(holders.peers):
            try:
                digest = self._fetch_digest(peer, shard, holders.root)
            except CheckpointError as exc:
                why.append(str(exc))
                self._report_failed(shard, peer.name, str(exc))
                continue
            copy = ShardCopy(self.state, shard, "", digest, Tier.PEER, "")
            ranges = [_PeerRanges(self, each, copy) for each in holders.peers[at:]]
            self._parts += ranges
            memory = SharedBuffer.create("gpuops-parts", digest.nbytes)
            name = f"{shard.file_name} of {self.state}"
            return PartialImage(name, memory, [*ranges, *stored(digest)], check_fits)
        reasons = "; ".join(why) or "no node has it"
        raise KeeperError(f"the shard of rank {shard.rank} of {self.state}: {reasons}")

    def fetch_parts(
        self, peer: KeeperAddress, copy: ShardCopy, ranges: Sequence[ByteRange], put: PutBytes
    ) -> None:
        """Call *put* with the bytes of *ranges* of *copy* on *peer*; see `RangeHolder.read`."""
        options = self._options(sum(end - begin for begin, end in ranges))
        try:
            fetch_parts(peer, self._job, copy, ranges, put, options)
        except CheckpointError as exc:
            self._report_failed(copy.shard, peer.name, str(exc))
            raise

    def fetched(self) -> Iterator[tuple[ShardCopy, SharedBuffer]]:
        """Yield the fetched, verified shards that are not in use yet; they stay until `close`."""
        for slot in self._slots.values():
            if slot.memory is not None and slot.copy is not None:
                yield slot.copy, slot.memory

    def close(self) -> None:
        """Stop fetching, and release all memory."""
        if not self.is_closed:
            self._report_parts()
        self._stop.set()
        for slot in self._slots.values():
            # A fetch in progress sees the flag, and releases its memory.
            if slot.lock.acquire(blocking=False):
                try:
                    if slot.memory is not None:
                        slot.memory.close()
                finally:
                    slot.lock.release()

    def _fetch_verified(self, shard: Shard) -> tuple[SharedBuffer, Digest]:
        holders = self._holders[shard]
        remaining, tried_roots, why = list(holders.peers), set[str](), list[str]()
        while remaining:
            if self.is_closed:
                raise KeeperError(f"newer workers have started: {shard.file_name} is not needed")
            peer = remaining.pop(0)
            try:
                digest = self._fetch_digest(peer, shard, holders.root)
                if digest.root in tried_roots:
                    continue
                tried_roots.add(digest.root)
                return self._fetch_bytes([peer, *remaining], shard, digest), digest
            except CheckpointError as exc:
                why.append(str(exc))
                self._report_failed(shard, peer.name, str(exc))
        reasons = "; ".join(why) or "no node has it"
        raise KeeperError(f"the shard of rank {shard.rank} of {self.state}: {reasons}")

    def _copy_of(self, shard: Shard, memory: SharedBuffer, digest: Digest) -> ShardCopy | None:
        try:
            layout = read_layout(memory.view)
        except CheckpointError:
            return None  # the load reports the error
        if layout.shard != shard:
            return None
        return ShardCopy(self.state, shard, layout.header_hash, digest, Tier.MEMORY, "")

    def _fetch_digest(self, peer: KeeperAddress, shard: Shard, root: str) -> Digest:
        return fetch_digest(peer, self._job, (self.state, shard), root, self._options(0))

    def _fetch_bytes(
        self, peers: list[KeeperAddress], shard: Shard, digest: Digest
    ) -> SharedBuffer:
        memory = self._make(digest.nbytes)
        wanted = ShardCopy(self.state, shard, "", digest, Tier.PEER, peers[0].name)
        try:
            done = fetch(peers, self._job, wanted, memory.view, self._options(digest.nbytes))
        except BaseException:  # boundary: no one else releases the memory
            memory.close()
            raise
        self._report_fetched(shard, done)
        return memory

    def _options(self, nbytes: int) -> TransferOptions:
        deadline_s = _DEADLINE_MIN_S + nbytes / _RATE_MIN_BYTES_S
        return TransferOptions(
            deadline_s=deadline_s,
            no_progress_s=self._no_progress_s,
            limits=_LIMITS,
            stop=self._stop,
        )

    def _report_fetched(self, shard: Shard, done: FetchResult) -> None:
        # The holders before the last one have failed, in this order.
        for (name, _nbytes), why in zip(done.served, done.failed, strict=False):
            self._report_failed(shard, name, why)
        self._on_event(
            "fetched",
            {
                "state": self.state,
                "shard": shard,
                "holder": done.served[-1][0] if done.served else "",
                "seconds": done.seconds,
                "bytes": done.received_bytes,
            },
        )

    def _report_parts(self) -> None:
        for each in self._parts:
            if each.nbytes:
                fields = {"state": self.state, "shard": each.copy.shard, "holder": each.peer.name}
                self._on_event("fetched", {**fields, "bytes": each.nbytes})

    def _report_failed(self, shard: Shard, holder: str, why: str) -> None:
        if not self.is_closed:
            fields = {"state": self.state, "shard": shard}
            self._on_event("fetch_failed", {**fields, "holder": holder, "why": why})


@dataclass(slots=True)
class _PeerRanges:
    """The copy of an image on one peer, of which ranges are read; ``nbytes``: so many so far."""

    peers: PeerShards
    peer: KeeperAddress
    copy: ShardCopy
    nbytes: int = 0

    def read(self, ranges: Iterable[ByteRange], put: PutBytes) -> None:
        def count(begin: int, data: memoryview) -> None:
            put(begin, data)
            self.nbytes += len(data)

        self.peers.fetch_parts(self.peer, self.copy, list(ranges), count)
