"""Which state is offered: stores that fail, that must be fetched from, that another run uses."""

import contextlib
from dataclasses import replace

import pytest
from support.keeper_ranks import fill, holds, layout_of

from gpuops.checkpoint.agreement.local_recovery import StateSearchCriteria, find_restorable
from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.image import TensorSpec, plan_image
from gpuops.checkpoint.memory.node_memory import MemoryShard
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.memory.state_record import SlotKey
from gpuops.checkpoint.sharing import plan_sharing
from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.storage.api import DamagedState, StoreScan
from gpuops.checkpoint.storage.persist import StateOrigin, persist
from gpuops.checkpoint.types import (
    CheckpointError,
    KeeperError,
    RestoreUndecidedError,
    Shard,
    ShardCopy,
    StateId,
    Tier,
)
from gpuops.resources import data_dir
from gpuops.rules import load_rules

OLD, NEW = StateId(0, 5), StateId(1, 7)


@pytest.fixture
def stack():
    with contextlib.ExitStack() as found:
        yield found


def in_memory(stack, state, *, world=2, ranks=None, step=None):
    found = {}
    for rank in range(world) if ranks is None else ranks:
        layout = layout_of(rank, world)
        memory = stack.enter_context(SharedBuffer.create("test", layout.nbytes))
        fill(memory.view, layout, state.step if step is None else step)
        copy = ShardCopy(
            state, layout.shard, layout.header_hash, compute_digest(memory.view), Tier.MEMORY, "n1"
        )
        found[layout.shard] = MemoryShard(copy, SlotKey(1, rank), memory)
    return found


def in_store(stack, folder, state, *, world=2, step=None):
    held = in_memory(stack, state, world=world, step=step)
    sources = {shard: (it.memory.fd, it.copy.digest) for shard, it in held.items()}
    store = open_store(str(folder))
    persist(store, state, sources, origin=StateOrigin("run", 0))
    return store


class Store:
    """A store with one thing that is other than of the real one."""

    def __init__(self, store, **changed):
        self._store = store
        self._changed = changed

    def __getattr__(self, name):
        return self._changed.get(name) or getattr(self._store, name)


def fails(*_args):
    raise CheckpointError("the server resets the connection")


def test_of_memory_and_directory_the_newer_state_is_chosen(stack, tmp_path):
    store = in_store(stack, tmp_path, NEW)
    choice = find_restorable({OLD: in_memory(stack, OLD)}, store, StateSearchCriteria())
    assert (choice.selected.state, choice.selected.tier) == (NEW, Tier.PERSISTENT)

    store = in_store(stack, tmp_path / "other", OLD)
    choice = find_restorable({NEW: in_memory(stack, NEW)}, store, StateSearchCriteria())
    assert (choice.selected.state, choice.selected.tier) == (NEW, Tier.MEMORY)
    assert choice.epoch_max == NEW.epoch


def test_a_state_of_a_later_version_is_skipped_as_what_it_is(stack, tmp_path):
    store = in_store(stack, tmp_path, OLD)
    in_store(stack, tmp_path, NEW)
    manifest = tmp_path / NEW.name / "manifest.json"
    manifest.write_text(manifest.read_text().replace("gpuops.checkpoint/1", "gpuops.checkpoint/7"))

    choice = find_restorable({}, store, StateSearchCriteria())

    assert choice.selected.state == OLD
    assert choice.why[0].startswith(f"{NEW.name} in {tmp_path} cannot be read: ")
    assert "has version 7 of the format" in choice.why[0]


def test_a_directory_that_does_not_list_is_no_obstacle_to_memory_and_is_told(stack, tmp_path):
    store = Store(open_store(str(tmp_path)), scan=fails)
    choice = find_restorable({OLD: in_memory(stack, OLD)}, store, StateSearchCriteria())

    assert choice.selected.state == OLD
    assert any("resets" in why for why in choice.why)


def test_a_directory_that_does_not_list_is_no_reason_to_start_anew(tmp_path):
    with pytest.raises(RestoreUndecidedError, match="resets"):
        find_restorable({}, Store(open_store(str(tmp_path)), scan=fails), StateSearchCriteria())


def test_a_directory_with_nothing_but_damage_is_no_reason_to_start_anew(tmp_path):
    survey = StoreScan((), (DamagedState("step-000000000009.e00000", "its manifest was edited"),))
    with pytest.raises(RestoreUndecidedError, match="manifest was edited"):
        find_restorable(
            {}, Store(open_store(str(tmp_path)), scan=lambda: survey), StateSearchCriteria()
        )


def test_a_corrupt_state_in_the_directory_gives_way_to_the_one_before(stack, tmp_path):
    in_store(stack, tmp_path, OLD)
    store = in_store(stack, tmp_path, NEW)
    path = tmp_path / NEW.name / Shard(1, 2).file_name
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    choice = find_restorable({}, store, StateSearchCriteria())

    assert choice.selected.state == OLD
    assert [(p.state, p.shard, p.tier, p.is_corrupt) for p in choice.problems] == [
        (NEW, Shard(1, 2), Tier.PERSISTENT, True)
    ]
    assert any("corrupt in piece 0" in why for why in choice.why)


def test_a_shard_that_only_the_directory_has_makes_a_state_complete(stack, tmp_path):
    store = in_store(stack, tmp_path, NEW)
    memory = {NEW: in_memory(stack, NEW, ranks=[1])}
    choice = find_restorable(memory, store, StateSearchCriteria())

    assert choice.selected.tier is Tier.PERSISTENT
    assert choice.selected.sources[Shard(1, 2)] is memory[NEW][Shard(1, 2)].memory
    assert holds(choice.selected.sources[Shard(0, 2)], layout_of(0, 2), NEW.step)


def test_the_same_state_of_another_run_is_not_mixed_in(stack, tmp_path):
    store = in_store(stack, tmp_path, NEW, step=1234)
    memory = {NEW: in_memory(stack, NEW, ranks=[1]), OLD: in_memory(stack, OLD)}
    choice = find_restorable(memory, store, StateSearchCriteria())

    assert choice.selected.state == OLD
    assert any("two runs" in why for why in choice.why)


def test_a_state_is_stored_by_the_run_that_wrote_the_same_bytes(stack, tmp_path):
    memory, criteria = {NEW: in_memory(stack, NEW)}, StateSearchCriteria()
    same = in_store(stack, tmp_path / "same", NEW)
    other = in_store(stack, tmp_path / "other", NEW, step=1234)
    found = [find_restorable(memory, store, criteria) for store in (same, other, None)]

    job = same.read_manifest(NEW).job
    assert job
    assert [choice.selected.stored_by for choice in found] == [job, None, None]
    assert {choice.selected.tier for choice in found} == {Tier.MEMORY}
    assert find_restorable({}, same, criteria).selected.stored_by == job


def test_shards_that_must_be_fetched_are_served_from_memory(stack, tmp_path):
    store = Store(in_store(stack, tmp_path, NEW), local_shard_path=lambda *_args: None)
    choice = find_restorable({}, store, StateSearchCriteria())

    assert choice.selected.tier is Tier.PERSISTENT
    assert len(choice.selected.fetched) == 2
    for rank in range(2):
        assert holds(choice.selected.sources[Shard(rank, 2)], layout_of(rank, 2), NEW.step)
    for memory in choice.selected.fetched:
        memory.close()


def test_what_was_fetched_is_given_back_where_the_state_is_skipped(stack, tmp_path):
    made = []

    def make(nbytes):
        if made:
            raise KeeperError("it does not fit into memory")
        made.append(SharedBuffer.create("test", nbytes))
        return made[0]

    store = Store(in_store(stack, tmp_path, NEW), local_shard_path=lambda *_args: None)
    choice = find_restorable(
        {OLD: in_memory(stack, OLD)}, store, StateSearchCriteria(), allocate=make
    )

    assert choice.selected.state == OLD
    assert not any(problem.is_corrupt for problem in choice.problems)
    assert any("does not fit" in why for why in choice.why)
    with pytest.raises(CheckpointError, match="closed"):
        made[0].fd  # noqa: B018 it raises


def test_only_what_is_wanted_is_checked(stack):
    memory = {OLD: in_memory(stack, OLD), NEW: in_memory(stack, NEW)}

    assert find_restorable(memory, None, StateSearchCriteria(only=OLD)).selected.state == OLD
    assert (
        find_restorable(memory, None, StateSearchCriteria(excluded_step=NEW.step)).selected.state
        == OLD
    )
    assert find_restorable(memory, None, StateSearchCriteria(is_none=True)).selected is None
    missing = find_restorable(memory, None, StateSearchCriteria(only=StateId(9, 9)))
    assert missing.selected is None
    assert missing.why == ["step 9 (epoch 9) was requested and is not here"]


def test_of_several_nodes_each_looks_at_its_own_shards(stack):
    memory = {NEW: in_memory(stack, NEW, world=4, ranks=[2, 3])}
    mine = frozenset({Shard(2, 4), Shard(3, 4)})

    assert (
        find_restorable(memory, None, StateSearchCriteria(only=NEW, shards=mine)).selected.tier
        is Tier.MEMORY
    )
    other = frozenset({Shard(0, 2)})
    assert (
        find_restorable(memory, None, StateSearchCriteria(only=NEW, shards=other)).selected is None
    )


def test_memory_with_another_digest_than_it_had_is_told_with_the_piece(stack):
    held = in_memory(stack, NEW)
    shard = Shard(0, 2)
    held[shard] = replace(
        held[shard], copy=replace(held[shard].copy, digest=compute_digest(b"x" * 99))
    )
    memory = {NEW: held, OLD: in_memory(stack, OLD)}
    first = find_restorable(memory, None, StateSearchCriteria())
    assert (first.selected.state, first.selected.is_verified) == (NEW, False)
    assert first.selected.digests[shard] == held[shard].copy.digest

    choice = find_restorable(memory, None, StateSearchCriteria(doubted=frozenset({NEW})))
    assert choice.selected.state == OLD
    assert choice.problems[0].tier is Tier.MEMORY


def test_reasons_are_few_and_short(stack):
    memory = {}
    for step in range(40):
        held = in_memory(stack, StateId(0, step), ranks=[0])
        memory[StateId(0, step)] = held
    choice = find_restorable(memory, None, StateSearchCriteria())

    assert choice.selected is None
    assert len(choice.why) <= 16
    assert all(len(why) <= 300 for why in choice.why)


def test_the_owners_of_what_a_rank_shares_are_found_with_its_own_shard(stack, tmp_path):
    """Where the ranks are on other nodes than before, a node needs shards of others, too."""
    names = ("a", "b", "c")
    replicas = dict.fromkeys(names, (0, 1))
    sources = {}
    for rank in range(4):
        shard, node = Shard(rank, 4), (0, 1) if rank < 2 else ()
        specs = [TensorSpec(name, "F32", (100,), 400, (0,), (100,)) for name in names]
        layout = plan_image(shard, specs, 100, {}, plan_sharing(shard, specs, replicas, node))
        memory = stack.enter_context(SharedBuffer.create("test", layout.nbytes))
        fill(memory.view, layout, 7)
        sources[shard] = (memory.fd, compute_digest(memory.view))
    store = open_store(str(tmp_path))
    persist(store, NEW, sources, origin=StateOrigin("run", 0))

    def ranks_of(*shards):
        criteria = StateSearchCriteria(only=NEW, shards=frozenset(shards))
        return sorted(s.rank for s in find_restorable({}, store, criteria).selected.sources)

    assert ranks_of(Shard(1, 4), Shard(2, 4)) == [0, 1, 2]
    assert ranks_of(Shard(2, 4)) == [2]
    path = store.local_shard_path(NEW, Shard(0, 4))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    choice = find_restorable({}, store, StateSearchCriteria(shards=frozenset({Shard(2, 4)})))
    assert choice.selected is not None
    with pytest.raises(RestoreUndecidedError, match="the shard of rank 0") as caught:
        find_restorable({}, store, StateSearchCriteria(shards=frozenset({Shard(1, 4)})))
    remedy = "are damaged: restore one from a copy, or set another --ckpt-dir"
    assert str(caught.value).startswith(f"all states in {tmp_path} {remedy}")


def test_only_what_is_damaged_for_certain_ends_the_run_at_once(stack, tmp_path):
    rules = load_rules([data_dir("checks") / "rules"])
    (refused,) = [rule for rule in rules if rule.id == "checkpoint_refused"]

    def is_final(store):
        with pytest.raises(RestoreUndecidedError) as caught:
            find_restorable({}, store, StateSearchCriteria())
        return refused.matches(f"gpuops.checkpoint.types.RestoreUndecidedError: {caught.value}")

    store = in_store(stack, tmp_path, NEW)
    assert not is_final(Store(store, read_chunks=fails))
    path = store.local_shard_path(NEW, Shard(0, 2))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert is_final(store)
    in_store(stack, tmp_path, OLD)
    assert not is_final(Store(store, read_chunks=fails))
