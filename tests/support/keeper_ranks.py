"""Ranks that save and load small states through a keeper, without torch."""

import time
from contextlib import ExitStack, contextmanager

from gpuops.checkpoint.image import TensorSpec, plan_image, read_layout
from gpuops.checkpoint.keeper.messages import CheckpointPolicy, Lease
from gpuops.checkpoint.keeper.rank_client import ReservedMemory
from gpuops.checkpoint.memory.copy_stamp import COPIED, INTACT, create_stamp, write_stamp
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.types import Shard, StateId

LEASE = Lease(0, StateId(0, 1), 1)


def until(holds, *, deadline_s=60.0, what="it"):
    """Wait until *holds* returns something true; return that."""
    end_s = time.monotonic() + deadline_s
    while not (found := holds()):
        assert time.monotonic() < end_s, f"{what} did not come about within {deadline_s:g} s"
        time.sleep(0.005)
    return found


def layout_of(rank=0, world=1, *, n_floats=1000, name="weight"):
    spec = TensorSpec(name, "F32", (n_floats,), 4 * n_floats, (0,), (n_floats,))
    return plan_image(Shard(rank, world), [spec], 200)


def fill(view, layout, step):
    """Write a whole image whose every byte of data says which step and rank it is of."""
    begin = len(layout.header)
    view[:begin] = layout.header
    pattern = bytes((step * 31 + layout.shard.rank * 7 + n) % 251 for n in range(251))
    data = pattern * (layout.nbytes // 251 + 1)
    view[begin : layout.nbytes] = data[: layout.nbytes - begin]


@contextmanager
def reserved_of(layout, n_slots=1):
    """Yield what `reserve` returns, without a keeper."""
    with ExitStack() as stack:
        slots = [
            stack.enter_context(SharedBuffer.create("test", layout.nbytes)) for _ in range(n_slots)
        ]
        yield ReservedMemory(slots, stack.enter_context(create_stamp("test")))


def holds(source, layout, step):
    """Return whether *source* (memory or a path) is what `fill` writes."""
    found = source.read_bytes() if hasattr(source, "read_bytes") else bytes(source.view)
    expected = bytearray(layout.nbytes)
    fill(memoryview(expected), layout, step)
    return read_layout(found) is not None and found == bytes(expected)


class Rank:
    """One rank: its keeper, and its slots."""

    def __init__(self, keeper, rank=0, world=1, *, slots=2, n_floats=1000, **policy):
        self.keeper = keeper
        self.layout = layout_of(rank, world, n_floats=n_floats)
        self.n_slots = slots
        keeper.set_policy(CheckpointPolicy(slots=slots, **policy))
        self.slots = []

    def reserve(self):
        self.slots, self._stamp = self.keeper.reserve(self.layout, slots=self.n_slots)
        return self

    def copy(self, step):
        """Ask, and copy where that is granted; return the answer."""
        answer = self.keeper.acquire(step)
        if isinstance(answer, Lease):
            fill(self.slots[answer.slot].view, self.layout, step)
        return answer

    def stamp(self, lease):
        for word in (COPIED, INTACT):
            write_stamp(self._stamp, word, lease.number)

    def save(self, step):
        answer = self.copy(step)
        if isinstance(answer, Lease):
            self.keeper.mark_written(answer)
        return answer


def ready(keepers, **kwargs):
    """Return the ranks of *keepers*, of a world of as many, ready to save their first state."""
    world = len(keepers)
    ranks = [Rank(keeper, n, world, **kwargs) for n, keeper in enumerate(keepers)]
    for rank in ranks:
        rank.keeper.restore_point(30.0)
    return [rank.reserve() for rank in ranks]


def newest(keeper):
    return keeper.stats()["newest"]


def save_all(ranks, step):
    """Save *step* by all ranks and wait for the commit; return the state."""
    answers = [rank.save(step) for rank in ranks]
    assert all(isinstance(answer, Lease) for answer in answers), answers
    state = answers[0].state
    pair = [state.epoch, state.step]
    until(lambda: newest(ranks[0].keeper) == pair, what=f"the commit of {state}")
    return state
