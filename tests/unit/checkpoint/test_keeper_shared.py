"""The keeper of a node whose ranks save once what they hold alike."""

import struct

import pytest
import xxhash
from support.in_process_keeper import InProcessNode

from gpuops.checkpoint.image import TensorSpec, image_order, plan_image, write_digests
from gpuops.checkpoint.keeper.messages import Lease, Skipped
from gpuops.checkpoint.memory.node_memory import SYSTEM_RESERVE_BYTES
from gpuops.checkpoint.sharing import plan_sharing
from gpuops.checkpoint.types import KeeperError, Shard

N_FLOATS = 1000
NAMES = ("a", "b", "c")


class Node:
    """Ranks that hold three tensors alike, and one each for itself."""

    def __init__(self, n=3, *, world=None, dtypes=None, on_device=()):
        self.available = 2**40
        self.node = InProcessNode(available=lambda: self.available)
        self.n, self.world = n, world or n
        self.dtypes, self.on_device = dtypes or ["F32"] * n, on_device
        if self.world != n:
            self.node.core.begin_generation(0, 2, None, "job")
        self.connect()

    def connect(self, generation=0):
        self.keepers = [
            self.node.connect(
                rank=r, world=self.world, local_rank=r, local_world=self.n, generation=generation
            )
            for r in range(self.n)
        ]
        if self.world != self.n:
            self.node.core.restore_from(None, 1)
        self.offer = self.keepers[0].restore_point(1.0)
        self.layouts, self.slots = [None] * self.n, [None] * self.n
        for rank in range(self.n):
            self.reserve(rank, shares=True)

    def reserve(self, rank, *, shares):
        shard, replicas = Shard(rank, self.world), dict.fromkeys(NAMES, tuple(range(self.world)))
        specs = image_order(
            TensorSpec(
                x,
                self.dtypes[rank] if x == "a" else "F32",
                (N_FLOATS,),
                4 * N_FLOATS,
                (0,),
                (N_FLOATS,),
            )
            for x in (*NAMES, "own")
        )
        shared = plan_sharing(
            shard, specs, replicas, range(self.n) if shares else (), self.on_device
        )
        self.layouts[rank] = plan_image(shard, specs, 100, replicas, shared)
        self.slots[rank] = self.keepers[rank].reserve(self.layouts[rank], slots=2).slots

    def copy(self, rank, step, wrong=()):
        """Return the lease after the copy, or why there is none; *wrong*: tensors with a flip."""
        lease = self.keepers[rank].acquire(step)
        if isinstance(lease, Skipped):
            return lease
        layout, view = self.layouts[rank], self.slots[rank][lease.slot].view
        view[: len(layout.header)] = layout.header

        def data_of(name):
            data = bytearray(struct.pack("<f", step + (rank if name == "own" else 0)) * N_FLOATS)
            data[1234] ^= 4 if name in wrong else 0
            return bytes(data)

        for placed in layout.tensors:
            view[placed.begin : placed.end] = data_of(placed.spec.name)
        names = [name for each in layout.shared for name in each.stored_names]
        write_digests(view, layout, [xxhash.xxh3_128_digest(data_of(name)) for name in names])
        return lease

    def save(self, step, wrong=None):
        leases = [
            self.copy(r, step, [t for rank, t in wrong or () if rank == r]) for r in range(self.n)
        ]
        for keeper, lease in zip(self.keepers, leases, strict=True):
            if isinstance(lease, Lease):
                keeper.mark_written(lease)
        return leases

    @property
    def newest(self):
        return (self.keepers[0].stats()["newest"] or [None, None])[1]

    def events(self, *kinds):
        return [event for event in self.node.events() if event["kind"] in kinds]


@pytest.fixture
def nodes():
    made = []

    def make(*args, **kwargs):
        made.append(Node(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.node.close()


def test_equal_digests_commit_and_each_tensor_is_in_memory_once(nodes):
    node = nodes()
    for step in (1, 2, 3):
        node.save(step)

    assert node.newest == 3
    assert node.keepers[0].stats()["votes"] == 3
    own = sum(tensor.spec.name == "own" for it in node.layouts for tensor in it.tensors)
    shared = [tensor.spec.name for it in node.layouts for tensor in it.tensors]
    assert (own, sorted(set(shared))) == (3, ["a", "b", "c", "own"])
    assert len(shared) == 3 + 3
    assert node.events("replicas_differ", "replicas_apart", "given_up") == []


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("on_device", [(), ("b", "c")], ids=["host", "device"])
def test_a_state_with_another_digest_is_not_committed_whoever_owns_the_tensor(
    nodes, rank, name, on_device
):
    """The owner has no more say than the others: the majority names it."""
    node = nodes(on_device=on_device)
    node.save(1)
    node.save(2, [(rank, name)])
    (differ, void) = node.events("replicas_differ", "given_up")

    assert node.newest == 1
    assert (differ["suspects"], differ["outcome"]) == ([rank], "minority")
    assert (differ["tensors"], differ["state"][1], differ["alike"][1]) == ([name], 2, 1)
    assert void["state"][1] == 2


def test_after_a_difference_all_are_told_to_copy_all_until_new_workers_share_again(nodes):
    node = nodes()
    node.save(1)
    node.save(2, [(1, "b")])

    for rank in range(3):
        answer = node.copy(rank, 3)
        assert answer.copies_all
        assert answer.why.startswith("ranks 0-2 differ in b, which they should hold alike")
        node.reserve(rank, shares=False)
    node.save(4, [(1, "b")])
    assert node.newest == 4
    assert node.events("replicas_differ")[0]["state"][1] == 2
    assert node.events("replicas_differ") == []  # once
    node.connect(generation=1)
    node.save(5)
    assert node.newest == 5
    assert len(node.layouts[0].tensors) < 4


def test_where_memory_has_no_room_for_all_the_last_state_that_agreed_stays(nodes):
    node = nodes()
    node.save(1)
    node.save(2, [(1, "b")])
    node.available = SYSTEM_RESERVE_BYTES
    assert node.copy(0, 3).copies_all
    with pytest.raises(KeeperError, match="the checkpoints of rank 0 do not fit into memory"):
        node.reserve(0, shares=False)

    assert node.newest == 1
    node.available = 2**40
    node.connect(generation=1)
    assert node.offer.state.step == 1


def test_a_rank_that_missed_it_is_told_again(nodes):
    node = nodes()
    node.save(1, [(1, "b")])
    node.copy(0, 2)
    node.reserve(0, shares=False)

    assert node.copy(0, 3).copies_all
    assert node.copy(1, 3).copies_all


def test_ranks_that_describe_a_tensor_differently_share_nothing(nodes):
    node = nodes(2, dtypes=["F32", "I32"])
    node.save(1)

    assert node.newest is None
    (void,) = node.events("given_up")
    assert void["why"].startswith("ranks 0-1 should hold the same tensors (")
    assert void["why"].endswith("describe them with other names, dtypes or shapes")
    assert [node.copy(rank, 2).copies_all for rank in range(2)] == [True, True]


def test_an_owner_that_dies_during_its_copy_leaves_the_state_before(nodes):
    node = nodes()
    node.save(1)
    leases = [node.copy(rank, 2) for rank in range(3)]
    for rank in (1, 2):
        node.keepers[rank].mark_written(leases[rank])
    node.node.kill()
    node.connect(generation=1)

    assert node.offer.state.step == 1


def test_what_all_had_written_when_they_died_is_compared_and_kept(nodes):
    node = nodes()
    node.save(1)
    leases = [node.copy(rank, 2) for rank in range(3)]
    core = node.node.core
    for keeper, lease in zip(node.keepers, leases, strict=True):
        core.mark_written(keeper._rank_info, lease.state)  # nothing is hashed yet
    node.node.kill()
    node.connect(generation=1)

    assert node.offer.state.step == 2


def test_what_differed_when_all_died_is_not_kept_and_new_workers_share(nodes):
    node = nodes()
    node.save(1)
    leases = [node.copy(rank, 2, ["c"] if rank == 1 else ()) for rank in range(3)]
    core = node.node.core
    for keeper, lease in zip(node.keepers, leases, strict=True):
        core.mark_written(keeper._rank_info, lease.state)
    node.node.kill()
    node.connect(generation=1)

    assert node.offer.state.step == 1
    assert node.node.core.group.copies_all_why == ""
    node.save(2)
    assert node.newest == 2


def test_ranks_of_several_nodes_report_their_digests_before_the_commit(nodes):
    node = nodes(2, world=4)
    node.save(1)

    (group,) = node.node.core.progress().group_digests
    assert (group.n_ranks, sorted(group.rank_digests)) == (4, [0, 1])
    assert len(set(group.rank_digests.values())) == 1
    node.node.core.commit(group.state, persist=False)
    node.save(2, [(1, "c")])
    (group,) = node.node.core.progress().group_digests
    assert group.state.step == 2
    assert len(set(group.rank_digests.values())) == 2
    assert node.newest == 1
