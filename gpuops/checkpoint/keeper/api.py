"""What a rank asks of the keeper of its node's copies."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gpuops.checkpoint.image import ImageLayout
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.types import CheckpointError, RestorePoint, Shard, StateId

DEADLINE_S = 30.0
# Of what a rank asks while it trains: one that does not answer in time is not waited for.
FAST_CALL_S = 2.0
STATS_CALL_S = 5.0
NO_ANSWER = "the keeper does not answer"
SLOTS_MIN = 2
SLOTS_MAX = 8
DIRECTORY_CHARS_MAX = 4096
SECONDS_MAX = 1e9
KEPT_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Lease:
    """Copy now: into this one of the slots that `Keeper.reserve` returned; it becomes *state*.

    ``notice`` is for whoever trains, where no agent is there to tell it.
    """

    slot: int
    state: StateId
    notice: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Skipped:
    """Do not copy at this step, and do not wait.

    ``is_due`` is false where it was merely too early for a save (`CheckpointPolicy.every_s`):
    nothing was missed then, and nothing is counted.
    """

    why: str
    is_due: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """How often states are kept, where, and how many; the same for all ranks.

    ``every_s``: the first rank that asks for a step less than this after the last grant is told
    that none is due, and so are all others of the node (0: each step that is asked for is due).
    ``directory``: a directory or an fsspec URL, None: nothing is persisted. ``persist_every_s``:
    between the beginnings of two; None: only when it is asked for (a flush). Of what is persisted
    the last ``keep_last`` stay, and every state whose step divides by ``keep_every`` (0: none).
    """

    directory: str | None = None
    persist_every_s: float | None = 600.0
    keep_last: int = 3
    keep_every: int = 0
    slots: int = 2
    every_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise CheckpointError for what cannot be."""
        if self.directory is not None and not (
            0 < len(self.directory) <= DIRECTORY_CHARS_MAX and "\0" not in self.directory
        ):
            raise CheckpointError(f"this is no directory for checkpoints: {self.directory[:80]!r}")
        for name, seconds in (("persist_every", self.persist_every_s), ("every", self.every_s)):
            if seconds is not None and not (math.isfinite(seconds) and 0 <= seconds <= SECONDS_MAX):
                raise CheckpointError(f"{name} is {seconds!r}: it must be 0 or more seconds")
        for name in ("keep_last", "keep_every", "slots"):
            if type(getattr(self, name)) is not int:
                raise CheckpointError(
                    f"{name} is {getattr(self, name)!r}: a whole number is wanted"
                )
        if not 1 <= self.keep_last <= KEPT_MAX:
            raise CheckpointError(f"keep_last is {self.keep_last}: at least one must be kept")
        if not 0 <= self.keep_every <= KEPT_MAX:
            raise CheckpointError(f"keep_every is {self.keep_every}: it must be 0 or more steps")
        if not SLOTS_MIN <= self.slots <= SLOTS_MAX:
            raise CheckpointError(f"slots is {self.slots}: from {SLOTS_MIN} to {SLOTS_MAX}")


class RankKeeper(Protocol):
    """One rank's side of its node's keeper.

    Every call ends: `restore_point` within the given seconds, the others within a fixed deadline.
    All raise `KeeperError` where the keeper is gone, does not answer, or refuses (what, on what,
    why); the handle is of no use afterwards, and training goes on without it. Calls come from one
    thread at a time.
    """

    def reserve(self, layout: ImageLayout, *, slots: int) -> Sequence[SharedBuffer]:
        """Return the memory of at least *slots* slots for images of *layout*.

        It is the same memory for the same layout, also after a restart of the workers, and may
        hold a state then: write headers and data only into a slot that `acquire` granted. Another
        layout is other memory; what the old one holds stays until a state of the new one is
        committed. All ranks of the node must have reserved before the first grant.

        Raises:
            KeeperError: The memory of this machine does not hold it; the message has the figures.
        """
        ...

    def acquire(self, step: int, *, is_last: bool = False) -> Lease | Skipped:
        """Say whether this rank is to copy at *step*; the same for all ranks of the node.

        It takes `SOON_S` seconds at most: a keeper that has not answered by then (`NO_ANSWER`) is
        not waited for again until it has. The first rank that asks decides for all. Steps grow; a
        step that is not after the last one decided is skipped. *is_last*: no step follows; it may
        be asked again until there is room.
        """
        ...

    def seal(self, lease: Lease) -> None:
        """Say that the image is complete; returns at once.

        The keeper hashes it, and commits the state once all ranks have got so far.
        """
        ...

    def abandon(self, lease: Lease) -> None:
        """Say that the copy failed: the state is given up for all ranks."""
        ...

    def restore_point(self, deadline_s: float) -> RestorePoint | None:
        """Return the state that all ranks are to load, None where there is none (a fresh start).

        It was verified just before, every byte. The answer is the same for all ranks and for as
        long as they run; which policy counts is that of the first who asks.
        """
        ...

    def open_shard(self, restore_point: RestorePoint, shard: Shard) -> SharedBuffer | Path:
        """Return a verified copy of any shard of the offered state, to be read only.

        Memory stays as it is until `report_restored`, or until this handle is closed.
        """
        ...

    def report_restored(self, restore_point: RestorePoint, seconds: float, nbytes: int) -> None:
        """Say that this rank has loaded *nbytes* bytes in *seconds*; it goes into the record."""
        ...

    def set_policy(self, policy: CheckpointPolicy) -> None:
        """Set the policy; call it before the first `restore_point`."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Return counts by name: ``granted``, ``committed``, ``skipped`` (by reason), ….

        ``newest``: [epoch, step] of the newest committed state, or None; ``persisted`` likewise.
        ``reserved_bytes`` and ``populated_bytes`` of memory; ``hash_s``: seconds of the last state
        from the last seal to its commit. ``votes``: how many states were looked at for replicas
        that differ; ``votes_missed``: their slots were granted meanwhile; ``vote_s`` of a core.
        """
        ...

    def close(self) -> None:
        """Take leave; what is committed stays with the keeper. Never raises."""
        ...
