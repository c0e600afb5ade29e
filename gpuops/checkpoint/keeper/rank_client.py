"""A rank's client of its node's keeper."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from gpuops.checkpoint.hashed_image import HashedImage
from gpuops.checkpoint.image import ImageLayout
from gpuops.checkpoint.keeper.connection import (
    DEADLINE_S,
    SLACK_S,
    KeeperConnection,
    KeeperTimeoutError,
    as_keeper_error,
)
from gpuops.checkpoint.keeper.messages import (
    RANGES_MAX,
    CheckpointPolicy,
    Done,
    HelloReply,
    Lease,
    OpenedShard,
    RankInfo,
    ReservedSlots,
    Restore,
    SaveDecision,
    Skipped,
)
from gpuops.checkpoint.memory.copy_stamp import STAMP_BYTES
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.partial_image import ByteRange, PieceMap
from gpuops.checkpoint.types import (
    WHY_CHARS_MAX,
    CheckpointError,
    Digest,
    KeeperError,
    RestorePoint,
    Shard,
    StateId,
)

# For requests during training: a late reply is not awaited.
FAST_CALL_S = 2.0
STATS_CALL_S = 5.0
# For as many bytes as one request has at most: a file system of 1 MB/s is awaited.
PARTS_CALL_S = 300.0
_PARTS_BYTES = 256 * 2**20
NO_ANSWER = "the keeper does not answer"


def connect_rank(  # noqa: PLR0913 the parts of a rank's identity
    socket_path: Path,
    *,
    rank: int,
    world: int,
    local_rank: int,
    local_world: int,
    generation: int = 0,
    is_reconnect: bool = False,
    deadline_s: float = DEADLINE_S,
) -> "RankKeeperClient":
    """Return a rank's client of the keeper at *socket_path*.

    *generation* is that of the workers; ranks of older ones are refused. *is_reconnect*: this
    process was connected before and continues its training. Each call takes *deadline_s* seconds at
    most.

    Raises:
        KeeperGoneError: There is no keeper.
        KeeperError: It does not answer, or refuses this rank.
    """
    connection = KeeperConnection(socket_path, deadline_s=deadline_s)
    rank_info = RankInfo(Shard(rank, world), local_rank, local_world, generation)
    try:
        connection.call(HelloReply, "hello", role="rank", rank=rank_info, is_back=is_reconnect)
    except BaseException:  # boundary: the connection is closed, the error is raised again
        connection.close()
        raise
    return RankKeeperClient(connection, Shard(rank, world))


class ReservedMemory(NamedTuple):
    """A rank's slots of one layout, and the stamp of the copies into them."""

    slots: Sequence[SharedBuffer]
    stamp: SharedBuffer


class RankKeeperClient:
    """One rank's client of its node's keeper.

    Every call ends: `restore_point` within the given seconds, the others within a fixed deadline.
    All raise `KeeperError` where the keeper is gone, does not answer, or refuses (with the reason);
    the client is then closed, and training continues without it. Not thread-safe.
    """

    def __init__(self, connection: KeeperConnection, shard: Shard) -> None:
        self.shard = shard
        self._connection = connection
        self._slot_numbers: Sequence[int] = ()
        self._leases: set[Lease] = set()

    def reserve(self, layout: ImageLayout, *, slots: int) -> ReservedMemory:
        """Return the memory of at least *slots* slots for images of *layout*, and its stamp.

        The memory is the same for the same layout, also after a restart of the workers, and may
        hold a state: write only into a slot that `acquire` granted. Another layout has other
        memory; that of the old one stays until a state of the new one is committed. All ranks of
        the node must have reserved before the first grant.

        Raises:
            KeeperError: It does not fit into this machine's memory; the message has the figures.
        """
        self._handle_late_reply()
        reserved, fds = self._connection.call_for_fds(
            ReservedSlots, "reserve", layout=layout.header_hash, nbytes=layout.nbytes, slots=slots
        )
        with ExitStack() as undo:
            for fd in fds:
                undo.callback(os.close, fd)
            if not slots < len(fds) == len(reserved.slots) + 1:
                raise KeeperError(f"the keeper sent {len(fds)} descriptors for {slots} slots")
            with ExitStack() as undo_attached:
                buffers = []
                sizes = [*[layout.nbytes] * len(reserved.slots), STAMP_BYTES]
                for fd, nbytes in zip(fds, sizes, strict=True):
                    buffers.append(_attach(os.dup(fd), nbytes, writable=True))
                    undo_attached.callback(buffers[-1].close)
                undo_attached.pop_all()
        self._slot_numbers = reserved.slots
        return ReservedMemory(buffers[:-1], buffers[-1])

    def acquire(self, step: int, *, n_steps: int = 0, is_last: bool = False) -> Lease | Skipped:
        """Return whether this rank copies at *step*; the same for all ranks of the node.

        It takes `FAST_CALL_S` seconds at most: a keeper that has not answered by then (`NO_ANSWER`)
        is not awaited again until it has. The first rank that asks decides for all. Steps ascend; a
        step that is not after the last decided one is skipped. *is_last*: no step follows; it may
        be requested again until there is a free slot. *n_steps*: how many steps this rank has
        named so far, to be compared with the other ranks; 0: not compared.
        """
        try:
            self._handle_late_reply()
            decision = self._connection.call_within(
                SaveDecision,
                "begin",
                wait_s=FAST_CALL_S,
                step=step,
                n_steps=n_steps,
                is_last=is_last,
            )
        except KeeperTimeoutError:
            return Skipped(NO_ANSWER)
        granted = decision.lease
        if granted is None:
            return decision.skipped or Skipped(NO_ANSWER)
        if granted.slot not in self._slot_numbers:
            raise KeeperError(f"the keeper grants slot {granted.slot}, which it did not send")
        lease = replace(granted, slot=self._slot_numbers.index(granted.slot))
        self._leases.add(lease)
        return lease

    def mark_written(self, lease: Lease) -> None:
        """Report that the image is complete; returns at once.

        The keeper hashes it, and commits the state once it has the images of all ranks.
        """
        self._end_lease(lease)
        self._connection.notify("seal", state=lease.state)

    def abandon(self, lease: Lease) -> None:
        """Report that the copy failed: the state is given up for all ranks."""
        self._end_lease(lease)
        self._connection.notify("abandon", state=lease.state)

    def restore_point(self, deadline_s: float) -> RestorePoint | None:
        """Return the state that all ranks load, None where there is none (a fresh start).

        What is read of it is verified, by now or when it is read. The result is the same for all
        ranks of the generation; the policy of the first caller applies.
        """
        wait_s = deadline_s + SLACK_S
        found = self._connection.call(Restore, "offer", wait_s=wait_s, deadline_s=deadline_s)
        return found.restore_point

    def open_shard(
        self, restore_point: RestorePoint, shard: Shard
    ) -> "SharedBuffer | Path | KeeperParts":
        """Return a copy of any shard of the state to load, read-only.

        It is verified, but for a `HashedImage` and `KeeperParts`, of which the requested parts are.
        Its memory is not reused before `report_restored`, or before this handle is closed.
        """
        opened, fds = self._connection.call_for_fds(
            OpenedShard, "open_shard", state=restore_point.state, shard=shard
        )
        if len(fds) != (0 if opened.path else 1 + bool(opened.root)):
            for fd in fds:
                os.close(fd)
            raise KeeperError(f"the keeper sent {len(fds)} descriptors for one shard")
        if opened.path:
            return Path(opened.path)
        if opened.root:
            return _attach_hashed(fds[0], fds[1], opened)
        memory = _attach(fds[0], opened.nbytes, writable=False)
        if not opened.is_partial:
            return memory
        return KeeperParts(
            memory, lambda ranges: self._read_parts(restore_point.state, shard, ranges)
        )

    def reject(
        self, restore_point: RestorePoint | None, why: str, *, is_given_up: bool = False
    ) -> None:
        """Report that the state to load is damaged; `restore_point` then returns an older one.

        Or the same one from verified copies, where it was not, unless it *is_given_up*. None: the
        keeper found the damage. All ranks of the node report it.
        """
        point = restore_point
        self._connection.call(
            Done,
            "reject",
            state=None if point is None else point.state,
            is_verified=point is None or point.is_verified,
            why=why[:WHY_CHARS_MAX],
            is_given_up=is_given_up,
        )

    def _read_parts(self, state: StateId, shard: Shard, ranges: Sequence[ByteRange]) -> None:
        self._connection.call(
            Done,
            "read_parts",
            wait_s=PARTS_CALL_S + SLACK_S,
            deadline_s=PARTS_CALL_S,
            state=state,
            shard=shard,
            ranges=ranges,
        )

    def report_restored(self, restore_point: RestorePoint, seconds: float, nbytes: int) -> None:
        """Report that this rank has loaded *nbytes* bytes in *seconds*, for the event log."""
        state, tier = restore_point.state, restore_point.tier
        self._connection.call(
            Done, "restored", state=state, tier=tier, seconds=seconds, nbytes=nbytes
        )

    def set_policy(self, policy: CheckpointPolicy) -> None:
        """Set the policy; call it before the first `restore_point`."""
        if policy.directory is not None and "://" not in policy.directory:
            # The keeper has another working directory.
            path = os.path.abspath(policy.directory)  # noqa: PTH100 does not resolve links
            policy = replace(policy, directory=path)
        self._connection.call(Done, "settings", policy=policy)

    def stats(self) -> Mapping[str, Any]:
        """Return counts by name: ``granted``, ``committed``, ``skipped`` (by reason), ….

        ``newest``: [epoch, step] of the newest committed state, or None; ``persisted`` likewise.
        ``reserved_bytes`` and ``populated_bytes`` of memory; ``hash_s``: seconds of the last state
        from the last image written to the commit. ``votes``: how many states were checked for
        differing replicas; ``votes_missed``: their slots were reused meanwhile; ``vote_s``: CPU
        seconds of that.
        """
        self._handle_late_reply()
        return self._connection.call_within(dict, "stats", wait_s=STATS_CALL_S)

    def close(self) -> None:
        """Disconnect; committed states stay with the keeper. Never raises."""
        self._connection.close()

    def _handle_late_reply(self) -> None:
        """Receive the outstanding late reply, if any; its step is over.

        Raises:
            KeeperTimeoutError: It has not come yet.
            KeeperError: The keeper is gone.
        """
        late = self._connection.late_reply(SaveDecision, "begin")
        if late is not None and late.lease is not None:
            self._connection.notify("abandon", state=late.lease.state)

    def _end_lease(self, lease: Lease) -> None:
        """End the lease of a copy, whose result the keeper need not have."""
        if lease not in self._leases:
            raise KeeperError(f"this rank is not writing {lease.state}")
        self._leases.remove(lease)


class KeeperParts:
    """An image of which the keeper reads and verifies what is requested, into shared memory.

    *read* has it read some ranges of whole pieces.
    """

    def __init__(self, memory: SharedBuffer, read: Callable[[Sequence[ByteRange]], None]) -> None:
        self._memory = memory
        self._read = read
        self._pieces = PieceMap(memory.nbytes)

    @property
    def view(self) -> memoryview:
        return self._memory.view

    def ensure(self, ranges: Iterable[ByteRange]) -> None:
        """Have *ranges* read and verified.

        Raises:
            CorruptError: A part is damaged, and no copy of it is intact.
            KeeperError: It cannot be read.
        """
        missing = self._pieces.missing(ranges)
        while missing:
            batch, nbytes = 0, 0
            while batch < min(len(missing), RANGES_MAX) and nbytes < _PARTS_BYTES:
                nbytes += missing[batch][1] - missing[batch][0]
                batch += 1
            self._read(missing[:batch])
            for run in missing[:batch]:
                self._pieces.mark(*run)
            del missing[:batch]

    def close(self) -> None:
        """Release the memory once nothing refers to `view`."""
        self._memory.close()


def _attach_hashed(fd: int, table_fd: int, opened: OpenedShard) -> HashedImage:
    try:
        with SharedBuffer.attach(table_fd, writable=False) as table:
            digest = Digest(opened.nbytes, bytes(table.view), opened.root)
    except CheckpointError as exc:
        os.close(fd)
        raise as_keeper_error(exc) from exc
    try:
        return HashedImage.open(fd, digest)
    except CheckpointError as exc:
        raise as_keeper_error(exc) from exc


def _attach(fd: int, nbytes: int, *, writable: bool) -> SharedBuffer:
    try:
        return SharedBuffer.attach(fd, nbytes=nbytes, writable=writable)
    except CheckpointError as exc:
        raise as_keeper_error(exc) from exc
