"""The ranks that one start of the workers connected, and what they go on from."""

from dataclasses import dataclass, field
from typing import Protocol

from gpuops.checkpoint.offering import Chosen
from gpuops.checkpoint.states import KeeperError, Offer, Shard

# How long the workers before are waited for, before new ones take their place.
FENCE_S = 5.0


class Guest(Protocol):
    """Who is at the other end of a connection. ``pid`` 0: of another container."""

    @property
    def pid(self) -> int: ...

    def close(self) -> None:
        """End the connection; nothing that comes on it counts any more."""
        ...


@dataclass(frozen=True, slots=True)
class Post:
    """Where a rank stands: its shard, its number on this node, and which start it is of."""

    shard: Shard
    local_rank: int
    n_ranks: int
    generation: int


@dataclass(frozen=True, slots=True)
class Found:
    """What the ranks were told to load, the same for all of them."""

    offer: Offer | None
    chosen: Chosen | None


@dataclass(slots=True)
class Crew:
    """The ranks of one start.

    ``is_wanted``: somebody waits for the state to go on from. ``trouble``: why there will be no
    answer. ``is_left``: who answered for the keeper has left it to them. ``is_over``: others have
    taken their place.
    """

    generation: int
    world: int
    n_ranks: int
    members: dict[int, Guest] = field(default_factory=dict)
    posts: dict[int, Post] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    restored: set[int] = field(default_factory=set)
    _pids: dict[int, int] = field(default_factory=dict)
    is_wanted: bool = False
    is_looking: bool = False
    found: Found | None = None
    trouble: str = ""
    cannot_tell: bool = False
    is_left: bool = False
    is_over: bool = False

    def takes(self, post: Post, guest: Guest, *, is_back: bool = False) -> bool:
        """Say whether the rank belongs to this start; where not, it is of another one.

        A process that was here and says that it *is_back* does: only its line broke.

        Raises:
            KeeperError: It can be of none.
        """
        if (post.generation, post.shard.world, post.n_ranks) != (
            self.generation,
            self.world,
            self.n_ranks,
        ):
            return False
        other = self.members.get(post.local_rank)
        if other is not None and guest.pid and other.pid == guest.pid:
            raise KeeperError(
                f"process {guest.pid} is connected as local rank {post.local_rank} already: "
                "close that first"
            )
        if other is not None:
            return False
        if post.local_rank in self.gone:
            is_same = guest.pid != 0 and guest.pid == self._pids.get(post.local_rank)
            return is_back and is_same and self.posts[post.local_rank] == post
        twin = next((p for p in self.posts.values() if p.shard == post.shard), None)
        if twin is not None:
            raise KeeperError(
                f"local ranks {twin.local_rank} and {post.local_rank} both are rank "
                f"{post.shard.rank}"
            )
        return True

    def join(self, post: Post, guest: Guest) -> None:
        """Take a rank in."""
        self.members[post.local_rank] = guest
        self.posts[post.local_rank] = post
        self._pids[post.local_rank] = guest.pid
        self.gone.discard(post.local_rank)

    def leave(self, local_rank: int) -> None:
        """Take note that a rank is gone; a new process in its place is of another crew."""
        self.members.pop(local_rank, None)
        self.gone.add(local_rank)
        self.is_done_with(local_rank)

    def is_done_with(self, local_rank: int) -> None:
        """Take note that a rank reads what it was offered no more; free what was fetched."""
        self.restored.add(local_rank)
        if len(self.restored) >= self.n_ranks:
            self.free()

    def free(self) -> None:
        """Give back memory that was made for the offer alone."""
        if self.found is not None and self.found.chosen is not None:
            for memory in self.found.chosen.fetched:
                memory.close()


def pin_of(local_rank: int) -> str:
    """Return in whose name the offered state is pinned for a rank."""
    return f"restore-{local_rank}"
