"""Two nodes whose ranks hold tensors alike: on disk they are once, where all digests were equal."""

import contextlib
import os
import resource
import signal
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.in_process_keeper import InProcessNode

from gpuops.agent.checkpoint.replica_check import ReplicaCheck
from gpuops.checkpoint.agreement.write_once import WriteOnce
from gpuops.checkpoint.image import (
    TensorSpec,
    image_order,
    plan_image,
    read_layout,
    write_digests,
    write_metadata_blob,
)
from gpuops.checkpoint.keeper.messages import CheckpointPolicy, Lease
from gpuops.checkpoint.sharing import assign_owners, assign_writers, plan_sharing
from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.storage.inspection import assemble_tensors, read_layouts, verify_state
from gpuops.checkpoint.types import Shard

NAMES = tuple(f"layer.{n}" for n in range(12))
N_FLOATS = 25_000
SHARED_BYTES = len(NAMES) * N_FLOATS * 4
WORLD = 4
KINDS = ("ddp", "alone", "hsdp")


class Node:
    """A node of a job of two nodes; its states go to *directory*.

    It has two ranks, or one that is "alone"; of "hsdp" each has a half, and its replica is on the
    other node.
    """

    def __init__(self, number, directory, generation=0, kind="ddp"):
        self.available = 2**40
        self.node = InProcessNode(available=lambda: self.available)
        self.kind, self.sizes = kind, (1, 1) if kind == "alone" else (2, 2)
        self.world, n_local = sum(self.sizes), self.sizes[number]
        self.ranks = range(n_local * number, n_local * (number + 1))
        self.core = self.node.core
        self.core.begin_generation(generation, 2, None, "job")
        self.keepers = [
            self.node.connect(
                rank=r, world=self.world, local_rank=n, local_world=n_local, generation=generation
            )
            for n, r in enumerate(self.ranks)
        ]
        self.keepers[0].set_policy(CheckpointPolicy(directory=str(directory)))

    def start(self, state=None, epoch=1):
        self.core.restore_from(state, epoch)
        self.points = [keeper.restore_point(1.0) for keeper in self.keepers]
        return self

    def reserve(self, own_floats=100, on_device=()):
        self.layouts, self.slots = [], []
        for rank, keeper in zip(self.ranks, self.keepers, strict=True):
            shard, specs = Shard(rank, self.world), image_order(specs_of(rank, self, own_floats))
            alike = range(rank % 2, WORLD, 2) if self.kind == "hsdp" else range(self.world)
            replicas = dict.fromkeys(NAMES, tuple(alike))
            shared = plan_sharing(shard, specs, replicas, self.ranks, on_device)
            self.layouts.append(plan_image(shard, specs, 100, replicas, shared))
            self.slots.append(keeper.reserve(self.layouts[-1], slots=2).slots)
        return self

    def save(self, step, wrong=()):
        for n, keeper in enumerate(self.keepers):
            lease, layout = keeper.acquire(step), self.layouts[n]
            assert isinstance(lease, Lease)
            view = self.slots[n][lease.slot].view
            view[: len(layout.header)] = layout.header
            for placed in layout.tensors:
                view[placed.begin : placed.end] = data_of(placed.spec, step, self.ranks[n], wrong)
            names = [name for each in layout.shared for name in each.stored_names]
            spec = next(t.spec for it in self.layouts for t in it.tensors if t.spec.name in NAMES)
            write_digests(
                view,
                layout,
                [
                    xxhash.xxh3_128_digest(data_of(spec, step, 0, wrong, name=name))
                    for name in names
                ],
            )
            write_metadata_blob(view, layout, b"rank %d" % self.ranks[n])
            keeper.mark_written(lease)
        self.node.jobs.run_callbacks()
        return self.core.progress().whole[0]

    def persist(self, state, once=()):
        self.core.commit(state, persist=True, once=WriteOnce(once, self.sizes) if once else None)
        self.node.jobs.run_callbacks()

    def seal(self, state):
        self.core.persister.commit_shards(state, self.world)
        self.node.jobs.run_callbacks()

    def values(self, n):
        """Return what rank *n* of the node loads, by name, through the images that name others."""
        found, images = {}, {}

        def image(rank):
            if rank not in images:
                opened = self.keepers[n].open_shard(self.points[n], Shard(rank, self.world))
                data = opened.read_bytes() if hasattr(opened, "read_bytes") else bytes(opened.view)
                images[rank] = data, read_layout(data)
            return images[rank]

        for name in (*NAMES, "own"):
            data, layout = image(self.ranks[n])
            while name not in {t.spec.name for t in layout.tensors}:
                data, layout = image(layout.owner_by_name[name])
            placed = next(t for t in layout.tensors if t.spec.name == name)
            found[name] = data[placed.begin : placed.end]
        return found

    def events(self, *kinds):
        return [event for event in self.node.events() if event["kind"] in kinds]


def specs_of(rank, node, own_floats=100):
    n = N_FLOATS // 2 if node.kind == "hsdp" else N_FLOATS
    begin = n * (rank % 2) if node.kind == "hsdp" else 0
    found = [TensorSpec(x, "F32", (n,), 4 * n, (begin,), (N_FLOATS,)) for x in NAMES]
    own = TensorSpec("own", "F32", (own_floats,), 4 * own_floats, (0,), (own_floats,))
    return [*found, own]


def data_of(spec, step, rank, wrong=(), *, name=None):
    name = name or spec.name
    value = step + (rank if name == "own" else NAMES.index(name) / 100) + spec.offsets[0]
    data = bytearray(struct.pack("<f", value) * (spec.nbytes // 4))
    data[1234 % len(data)] ^= 4 if name in wrong else 0
    return bytes(data)


def assert_restored(nodes, state, kind="ddp", **given):
    """Assert that fresh keepers give each rank, from the directory, what it has saved."""
    for node in nodes(generation=1, kind=kind, **given):
        node.start(state, 2)
        for n, rank in enumerate(node.ranks):
            specs = specs_of(rank, node)
            assert node.values(n) == {spec.name: data_of(spec, state.step, rank) for spec in specs}


def equal_keys(nodes, state):
    check = ReplicaCheck()
    check.observe([node.core.progress() for node in nodes], state.epoch)
    return check.equal_at(state)


def files(directory, state, suffix=".safetensors"):
    return sorted((directory / state.name).glob(f"shard-*{suffix}"))


def nbytes(directory, state):
    return sum(path.stat().st_size for path in files(directory, state))


@pytest.fixture
def nodes(tmp_path):
    made = []

    def make(generation=0, kind="ddp", place=tmp_path / "states"):
        made.extend(found := [Node(n, place, generation, kind) for n in (0, 1)])
        return found

    yield make
    for each in made:
        each.node.close()


def saved(nodes, step=5, *, where=None, **given):
    for each in (both := nodes(**where or {})):
        each.start().reserve(**given)
    (state,) = {each.save(step) for each in both}
    return both, state


@given(
    st.lists(st.integers(0, 10**9), max_size=40),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
def test_a_tensor_is_written_by_its_owner_on_one_of_the_nodes_and_all_write_about_as_much(
    sizes, counts
):
    begins = [sum(counts[:n]) for n in range(len(counts))]
    ranks_by_node = [range(b, b + count) for b, count in zip(begins, counts, strict=True)]
    writers = assign_writers(sizes, ranks_by_node)
    owners = [assign_owners(sizes, ranks) for ranks in ranks_by_node]

    loads = [0] * len(counts)
    for number, writer in enumerate(writers):
        node = next(n for n, ranks in enumerate(ranks_by_node) if writer in ranks)
        loads[node] += sizes[number]
        assert owners[node][number] == writer
    if len(set(counts)) == 1:
        assert max(loads) - min(loads) <= counts[0] * max(sizes, default=0)


def test_tensors_of_one_size_are_written_by_all_ranks_alike():
    writers = assign_writers([1000] * 64, [range(8 * n, 8 * n + 8) for n in range(8)])

    assert sorted(writers) == list(range(64))
    few = assign_writers([1000] * 16, [range(8 * n, 8 * n + 8) for n in range(8)])
    assert sorted(rank // 8 for rank in few) == sorted(2 * list(range(8)))


@pytest.mark.parametrize(
    ("kind", "on_device"), [*((kind, ()) for kind in KINDS), ("ddp", NAMES[:5])]
)
def test_what_all_ranks_hold_alike_is_on_disk_once_and_each_rank_gets_it_back(
    nodes, tmp_path, kind, on_device
):
    both, state = saved(nodes, where={"kind": kind}, on_device=on_device)
    keys = equal_keys(both, state)
    assert len(keys) == (2 if kind == "hsdp" else 1)
    for node in both:
        node.persist(state, keys)
    both[1].seal(state)

    sizes = [path.stat().st_size for path in files(tmp_path / "states", state)]
    assert len(sizes) == both[0].world
    assert SHARED_BYTES <= sum(sizes) <= 1.05 * SHARED_BYTES
    assert max(sizes) <= 1.2 * SHARED_BYTES / both[0].world
    assert verify_state(open_store(str(tmp_path / "states")), state) == []
    assert_restored(nodes, state, kind)


@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_an_object_store_has_it_once_and_gives_it_back_and_inspection_understands_it(nodes, kind):
    place = "memory://written-once/run"
    both, state = saved(nodes, where={"place": place, "kind": kind})
    for node in both:
        node.persist(state, equal_keys(both, state))
    both[0].seal(state)

    store = open_store(place)
    manifest = store.read_manifest(state)
    assert SHARED_BYTES <= manifest.nbytes <= 1.05 * SHARED_BYTES
    assert verify_state(store, state) == []
    tensors = assemble_tensors(read_layouts(store, manifest))
    n_copies = 2 if kind == "hsdp" else WORLD
    assert {name: tensors[name].n_copies for name in NAMES} == dict.fromkeys(NAMES, n_copies)
    assert_restored(nodes, state, kind, place=place)
    store.delete(state)


def test_a_node_that_does_not_know_it_writes_all_of_its_own_and_the_state_is_whole(nodes, tmp_path):
    both, state = saved(nodes)
    keys = equal_keys(both, state)
    both[0].persist(state, keys)
    both[1].persist(state)
    both[0].seal(state)

    assert nbytes(tmp_path / "states", state) >= 1.4 * SHARED_BYTES
    assert_restored(nodes, state)


@pytest.mark.parametrize(("kind", "knows"), [("ddp", True), ("ddp", False), ("alone", True)])
def test_where_a_node_differs_no_group_is_equal_and_each_keeps_its_own(
    nodes, tmp_path, kind, knows
):
    for each in (both := nodes(kind=kind)):
        each.start().reserve()
    both[0].save(5)
    state = both[1].save(5, wrong=["layer.3"])
    reported = both if knows else both[:1]
    keys = equal_keys(reported, state)
    assert keys == ()
    for node in both:
        node.persist(state, keys)
    both[0].seal(state)

    assert nbytes(tmp_path / "states", state) >= 2 * SHARED_BYTES
    own, other = [node.start(state, 2).values(0) for node in nodes(generation=1, kind=kind)]
    assert {name for name in NAMES if own[name] != other[name]} == {"layer.3"}


def test_a_writer_that_is_lost_leaves_no_state_that_could_be_loaded(nodes, tmp_path):
    both, state = saved(nodes)
    both[0].persist(state, equal_keys(both, state))
    both[0].seal(state)

    assert not (tmp_path / "states" / state.name).exists()
    assert both[0].events("persist_failed")
    # Its shards come from the copies that other nodes hold in memory: those are whole.
    both[1].persist(state)
    both[0].seal(state)
    assert_restored(nodes, state)


def persist_and_die(node, state, keys, at_byte):
    """End this process, as suddenly as by SIGKILL, within the file that the node writes."""

    def limit():  # called before the file is written; the memory of its image is there by now
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (at_byte, most))
        return False

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    node.core.persister.is_ending = limit
    with contextlib.suppress(Exception):
        node.persist(state, keys)
    os._exit(0)


def test_a_writer_that_is_killed_within_a_file_leaves_nothing_torn_and_the_next_write_mends_it(
    nodes, tmp_path
):
    both, state = saved(nodes, where={"kind": "alone"})
    keys = equal_keys(both, state)
    both[1].persist(state, keys)
    for at_byte in (1, 4096, 200_000):
        writer = os.fork()
        if not writer:
            persist_and_die(both[0], state, keys, at_byte)
        assert os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == -signal.SIGXFSZ
        assert at_byte in [path.stat().st_size for path in (tmp_path / "states").rglob("*")]
        both[1].seal(state)
        assert not (tmp_path / "states" / state.name).exists()
    both[0].persist(state, keys)
    both[1].seal(state)

    assert nbytes(tmp_path / "states", state) <= 1.05 * SHARED_BYTES
    assert verify_state(open_store(str(tmp_path / "states")), state) == []
    assert_restored(nodes, state, "alone")


def test_a_state_of_another_generation_is_written_as_it_is(nodes, tmp_path):
    """Its nodes may have had other ranks: they would leave out what no other one writes."""
    both, state = saved(nodes)
    keys = equal_keys(both, state)
    for node in both:
        node.core.begin_generation(1, 2, None, "job")
        node.persist(state, keys)
    both[0].seal(state)

    assert nbytes(tmp_path / "states", state) >= 2 * SHARED_BYTES


def test_a_state_that_is_there_is_not_written_again_though_memory_has_other_images(nodes, tmp_path):
    both, state = saved(nodes)
    keys = equal_keys(both, state)
    for node in both:
        node.persist(state, keys)
    both[0].seal(state)
    before = nbytes(tmp_path / "states", state)
    both[0].core.persister.schedule.reset()
    both[0].persist(state)

    assert both[0].core.persister.stats()["persist_bytes"] == 0
    assert both[0].events("persist_failed") == []
    assert nbytes(tmp_path / "states", state) == before
    assert [path.name for path in (tmp_path / "states").glob("step-*")] == [state.name]


def test_ranks_with_much_of_their_own_write_all_since_a_restore_reads_whole_images(nodes, tmp_path):
    both, state = saved(nodes, own_floats=N_FLOATS)
    for node in both:
        node.persist(state, equal_keys(both, state))
    both[0].seal(state)

    assert nbytes(tmp_path / "states", state) >= 2 * SHARED_BYTES


def test_without_room_for_one_more_image_all_is_written(nodes, tmp_path):
    both, state = saved(nodes)
    keys = equal_keys(both, state)
    for node in both:
        node.available = 0
        node.persist(state, keys)
    both[0].seal(state)

    assert nbytes(tmp_path / "states", state) >= 2 * SHARED_BYTES


def test_an_image_that_changed_in_memory_is_not_written(nodes, tmp_path):
    both, state = saved(nodes)
    (shard, entry) = next(iter(both[0].core.memory.complete_shards(state).items()))
    entry.memory.view[both[0].layouts[0].tensors[0].begin + 7] ^= 1
    both[0].persist(state, equal_keys(both, state))

    (failed,) = both[0].events("persist_failed")
    assert shard.file_name in failed["why"]


def test_the_directory_gives_back_what_is_damaged_in_memory(nodes, tmp_path):
    """The image in memory is another one than that on disk, and both are of one state."""
    both, state = saved(nodes)
    for node in both:
        node.persist(state, equal_keys(both, state))
    both[0].seal(state)
    damaged = both[1]
    entry = damaged.core.memory.complete_shards(state)[Shard(3, WORLD)]
    entry.memory.view[-1] ^= 1
    damaged.core.begin_generation(1, 2, None, "job")
    damaged.keepers = [
        damaged.node.connect(rank=r, world=WORLD, local_rank=n, local_world=2, generation=1)
        for n, r in enumerate(damaged.ranks)
    ]
    damaged.start(state, 2)

    for n, rank in enumerate(damaged.ranks):
        specs = specs_of(rank, damaged)
        assert damaged.values(n) == {spec.name: data_of(spec, 5, rank) for spec in specs}
