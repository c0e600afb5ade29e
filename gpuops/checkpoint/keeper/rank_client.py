"""A rank's line to the keeper of its node."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpuops.checkpoint.agreement.local_recovery import RestoreUndecidedError
from gpuops.checkpoint.image import ImageLayout
from gpuops.checkpoint.keeper.api import (
    DEADLINE_S,
    FAST_CALL_S,
    NO_ANSWER,
    SLOTS_MAX,
    STATS_CALL_S,
    CheckpointPolicy,
    Lease,
    RankKeeper,
    Skipped,
)
from gpuops.checkpoint.keeper.connection import (
    SLACK_S,
    KeeperConnection,
    KeeperTimeoutError,
    as_keeper_error,
)
from gpuops.checkpoint.keeper.messages import (
    ID_MAX,
    MessageFields,
    policy_to_json,
    restore_point_from_json,
    shard_to_json,
    state_to_json,
)
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.types import CheckpointError, KeeperError, RestorePoint, Shard

__all__ = [
    "CheckpointPolicy",
    "Lease",
    "RankKeeper",
    "RankKeeperClient",
    "RestoreUndecidedError",
    "Skipped",
    "connect_rank",
]

_NOTICE_CHARS_MAX = 4000
_PATH_CHARS_MAX = 16_384


def connect_rank(  # noqa: PLR0913 where a rank stands has as many parts
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
    """Return a rank's line to the keeper at *socket_path*.

    *generation* is the generation of the workers: of an older one nobody is let in. *is_reconnect*:
    this process was connected before and goes on with its training. Each call takes *deadline_s*
    seconds at most.

    Raises:
        KeeperGoneError: There is no keeper.
        KeeperError: It does not answer, or refuses this rank.
    """
    connection = KeeperConnection(socket_path, deadline_s=deadline_s)
    try:
        connection.call(
            "hello",
            role="rank",
            rank=rank,
            world=world,
            local_rank=local_rank,
            local_world=local_world,
            generation=generation,
            is_back=is_reconnect,
        )
    except BaseException:  # boundary: the line is closed, the error goes on
        connection.close()
        raise
    return RankKeeperClient(connection, Shard(rank, world))


class RankKeeperClient:
    """A `Keeper` in a process of its own."""

    def __init__(self, connection: KeeperConnection, shard: Shard) -> None:
        self.shard = shard
        self._connection = connection
        self._slot_numbers: list[int] = []
        self._leases: set[Lease] = set()

    def reserve(self, layout: ImageLayout, *, slots: int) -> Sequence[SharedBuffer]:
        self._handle_late_reply()
        fields, fds = self._connection.call(
            "reserve", layout=layout.header_hash, nbytes=layout.nbytes, slots=slots
        )
        buffers: list[SharedBuffer] = []
        with ExitStack() as undo:
            indexes = fields.items("slots", SLOTS_MAX)
            for fd in fds:
                undo.callback(_close, fd)
            if len(indexes) != len(fds) or len(fds) < slots:
                raise KeeperError(f"the keeper sent {len(fds)} slots, not {slots}")
            for fd in fds:
                memory = _attach(os.dup(fd), layout.nbytes, writable=True)
                undo.callback(memory.close)
                buffers.append(memory)
            undo.pop_all()
        for fd in fds:
            _close(fd)
        self._slot_numbers = [int(index) for index in indexes]
        return buffers

    def acquire(self, step: int, *, is_last: bool = False) -> Lease | Skipped:
        try:
            self._handle_late_reply()
            fields = self._connection.call_within(
                "begin", wait_s=FAST_CALL_S, step=step, is_last=is_last
            )
        except KeeperTimeoutError:
            return Skipped(NO_ANSWER)
        if "skipped" in fields:
            return Skipped(fields.text("skipped", 4000), fields.flag("is_due"))
        slot = fields.integer("slot", 0, ID_MAX)
        if slot not in self._slot_numbers:
            raise KeeperError(f"the keeper grants slot {slot}, which it did not send")
        notice = fields.text("notice", _NOTICE_CHARS_MAX) if "notice" in fields else None
        lease = Lease(self._slot_numbers.index(slot), fields.state(), notice)
        self._leases.add(lease)
        return lease

    def seal(self, lease: Lease) -> None:
        self._end_lease(lease)
        self._connection.notify("seal", state=state_to_json(lease.state))

    def abandon(self, lease: Lease) -> None:
        self._end_lease(lease)
        self._connection.notify("abandon", state=state_to_json(lease.state))

    def restore_point(self, deadline_s: float) -> RestorePoint | None:
        fields, _ = self._connection.call(
            "offer", wait_s=deadline_s + SLACK_S, deadline_s=deadline_s
        )
        return restore_point_from_json(fields.nested("offer")) if "offer" in fields else None

    def open_shard(self, restore_point: RestorePoint, shard: Shard) -> SharedBuffer | Path:
        fields, fds = self._connection.call(
            "open_shard", state=state_to_json(restore_point.state), shard=shard_to_json(shard)
        )
        if "path" in fields:
            return Path(fields.text("path", _PATH_CHARS_MAX))
        if len(fds) != 1:
            for fd in fds:
                _close(fd)
            raise KeeperError(f"the keeper sent {len(fds)} descriptors for one shard")
        return _attach(fds[0], _size_bytes(fields), writable=False)

    def report_restored(self, restore_point: RestorePoint, seconds: float, nbytes: int) -> None:
        self._connection.call(
            "restored",
            state=state_to_json(restore_point.state),
            tier=restore_point.tier.value,
            seconds=seconds,
            bytes=nbytes,
        )

    def set_policy(self, policy: CheckpointPolicy) -> None:
        values = policy_to_json(policy)
        if policy.directory is not None and "://" not in policy.directory:
            # The keeper runs in another directory.
            values["directory"] = os.path.abspath(policy.directory)  # noqa: PTH100 keeps links
        self._connection.call("settings", policy=values)

    def stats(self) -> Mapping[str, Any]:
        self._handle_late_reply()
        return self._connection.call_within("stats", wait_s=STATS_CALL_S).values

    def close(self) -> None:
        self._connection.close()

    def _handle_late_reply(self) -> None:
        """Take in the answer that came too late, where one is owed: its step is over.

        Raises:
            KeeperTimeoutError: It has not come yet.
            KeeperError: The keeper is gone.
        """
        late_reply = self._connection.late_reply()
        if late_reply is not None and late_reply[0] == "begin" and "slot" in late_reply[1]:
            self._connection.notify("abandon", state=state_to_json(late_reply[1].state()))

    def _end_lease(self, lease: Lease) -> None:
        """Take note that the copy is over; the keeper is not asked whether there was one."""
        if lease not in self._leases:
            raise KeeperError(f"this rank is not writing {lease.state}")
        self._leases.remove(lease)


def _attach(fd: int, nbytes: int, *, writable: bool) -> SharedBuffer:
    try:
        return SharedBuffer.attach(fd, nbytes=nbytes, writable=writable)
    except CheckpointError as exc:
        raise as_keeper_error(exc) from exc


def _size_bytes(fields: MessageFields) -> int:
    return fields.integer("nbytes", 1, ID_MAX)


def _close(fd: int) -> None:
    os.close(fd)
