"""A rank's line to the keeper of its node."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.image import ImageLayout
from gpuops.checkpoint.keeper import (
    DEADLINE_S,
    NO_ANSWER,
    SLOTS_MAX,
    SOON_S,
    STATS_S,
    Grant,
    Keeper,
    Policy,
    Skipped,
)
from gpuops.checkpoint.keeper_line import SLACK_S, KeeperLine, KeeperSilentError, checked
from gpuops.checkpoint.messages import (
    ID_MAX,
    Fields,
    offer_from_json,
    policy_to_json,
    shard_to_json,
    state_to_json,
)
from gpuops.checkpoint.offering import CannotTellError
from gpuops.checkpoint.states import CheckpointError, KeeperError, Offer, Shard

__all__ = ["CannotTellError", "Grant", "Keeper", "KeeperClient", "Policy", "Skipped", "connect"]

_NOTICE_CHARS_MAX = 4000
_PATH_CHARS_MAX = 16_384


def connect(  # noqa: PLR0913 where a rank stands has as many parts
    socket_path: Path,
    *,
    rank: int,
    world: int,
    local_rank: int,
    local_world: int,
    epoch_hint: int = 0,
    is_back: bool = False,
    deadline_s: float = DEADLINE_S,
) -> "KeeperClient":
    """Return a rank's line to the keeper at *socket_path*.

    *epoch_hint* is the generation of the workers: of an older one nobody is let in. *is_back*: this
    process was connected before and goes on with its training. Each call takes *deadline_s* seconds
    at most.

    Raises:
        KeeperGoneError: There is no keeper.
        KeeperError: It does not answer, or refuses this rank.
    """
    line = KeeperLine(socket_path, deadline_s=deadline_s)
    try:
        line.ask(
            "hello",
            role="rank",
            rank=rank,
            world=world,
            local_rank=local_rank,
            local_world=local_world,
            generation=epoch_hint,
            is_back=is_back,
        )
    except BaseException:  # boundary: the line is closed, the error goes on
        line.close()
        raise
    return KeeperClient(line, Shard(rank, world))


class KeeperClient:
    """A `Keeper` in a process of its own."""

    def __init__(self, line: KeeperLine, shard: Shard) -> None:
        self.shard = shard
        self._line = line
        self._slots: list[int] = []
        self._granted: set[Grant] = set()

    def reserve(self, layout: ImageLayout, *, slots: int) -> Sequence[SlotMemory]:
        self._settle()
        fields, fds = self._line.ask(
            "reserve", layout=layout.hash, nbytes=layout.nbytes, slots=slots
        )
        found: list[SlotMemory] = []
        with ExitStack() as undo:
            indexes = fields.items("slots", SLOTS_MAX)
            for fd in fds:
                undo.callback(_close, fd)
            if len(indexes) != len(fds) or len(fds) < slots:
                raise KeeperError(f"the keeper sent {len(fds)} slots, not {slots}")
            for fd in fds:
                memory = _attach(os.dup(fd), layout.nbytes, writable=True)
                undo.callback(memory.close)
                found.append(memory)
            undo.pop_all()
        for fd in fds:
            _close(fd)
        self._slots = [int(index) for index in indexes]
        return found

    def begin(self, step: int, *, is_last: bool = False) -> Grant | Skipped:
        try:
            self._settle()
            fields = self._line.ask_soon("begin", wait_s=SOON_S, step=step, is_last=is_last)
        except KeeperSilentError:
            return Skipped(NO_ANSWER)
        if "skipped" in fields:
            return Skipped(fields.text("skipped", 4000), fields.flag("is_due"))
        slot = fields.integer("slot", 0, ID_MAX)
        if slot not in self._slots:
            raise KeeperError(f"the keeper grants slot {slot}, which it did not send")
        notice = fields.text("notice", _NOTICE_CHARS_MAX) if "notice" in fields else None
        grant = Grant(self._slots.index(slot), fields.state(), notice)
        self._granted.add(grant)
        return grant

    def seal(self, grant: Grant) -> None:
        self._use_up(grant)
        self._line.tell("seal", state=state_to_json(grant.state))

    def abandon(self, grant: Grant) -> None:
        self._use_up(grant)
        self._line.tell("abandon", state=state_to_json(grant.state))

    def offer(self, deadline_s: float) -> Offer | None:
        fields, _ = self._line.ask("offer", wait_s=deadline_s + SLACK_S, deadline_s=deadline_s)
        return offer_from_json(fields.part("offer")) if "offer" in fields else None

    def open_shard(self, offer: Offer, shard: Shard) -> SlotMemory | Path:
        fields, fds = self._line.ask(
            "open_shard", state=state_to_json(offer.state), shard=shard_to_json(shard)
        )
        if "path" in fields:
            return Path(fields.text("path", _PATH_CHARS_MAX))
        if len(fds) != 1:
            for fd in fds:
                _close(fd)
            raise KeeperError(f"the keeper sent {len(fds)} descriptors for one shard")
        return _attach(fds[0], _size(fields), writable=False)

    def restored(self, offer: Offer, seconds: float, nbytes: int) -> None:
        self._line.ask(
            "restored",
            state=state_to_json(offer.state),
            tier=offer.tier.value,
            seconds=seconds,
            bytes=nbytes,
        )

    def settings(self, policy: Policy) -> None:
        values = policy_to_json(policy)
        if policy.directory is not None and "://" not in policy.directory:
            # The keeper runs in another directory.
            values["directory"] = os.path.abspath(policy.directory)  # noqa: PTH100 keeps links
        self._line.ask("settings", policy=values)

    def stats(self) -> Mapping[str, Any]:
        self._settle()
        return self._line.ask_soon("stats", wait_s=STATS_S).values

    def close(self) -> None:
        self._line.close()

    def _settle(self) -> None:
        """Take in the answer that came too late, where one is owed: its step is over.

        Raises:
            KeeperSilentError: It has not come yet.
            KeeperError: The keeper is gone.
        """
        late = self._line.owed()
        if late is not None and late[0] == "begin" and "slot" in late[1]:
            self._line.tell("abandon", state=state_to_json(late[1].state()))

    def _use_up(self, grant: Grant) -> None:
        """Take note that the copy is over; the keeper is not asked whether there was one."""
        if grant not in self._granted:
            raise KeeperError(f"this rank is not writing {grant.state}")
        self._granted.remove(grant)


def _attach(fd: int, nbytes: int, *, writable: bool) -> SlotMemory:
    try:
        return SlotMemory.attach(fd, nbytes=nbytes, writable=writable)
    except CheckpointError as exc:
        raise checked(exc) from exc


def _size(fields: Fields) -> int:
    return fields.integer("nbytes", 1, ID_MAX)


def _close(fd: int) -> None:
    os.close(fd)
