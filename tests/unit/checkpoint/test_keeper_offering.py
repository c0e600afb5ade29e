"""Which state is offered: stores that fail, that must be fetched from, that another run uses."""

import contextlib
from dataclasses import replace

import pytest
from support.keeper_ranks import fill, holds, layout_of

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.digest import digest_of
from gpuops.checkpoint.node_memory import Held
from gpuops.checkpoint.offering import CannotTellError, Wanted, choose
from gpuops.checkpoint.persist import Origin, persist
from gpuops.checkpoint.slots import SlotKey
from gpuops.checkpoint.state_store import Damaged, Survey
from gpuops.checkpoint.states import CheckpointError, Copy, KeeperError, Shard, StateId, Tier
from gpuops.checkpoint.stores import open_store

OLD, NEW = StateId(0, 5), StateId(1, 7)


@pytest.fixture
def stack():
    with contextlib.ExitStack() as found:
        yield found


def in_memory(stack, state, *, world=2, ranks=None, step=None):
    found = {}
    for rank in range(world) if ranks is None else ranks:
        layout = layout_of(rank, world)
        memory = stack.enter_context(SlotMemory.create("test", layout.nbytes))
        fill(memory.view, layout, state.step if step is None else step)
        copy = Copy(state, layout.shard, layout.hash, digest_of(memory.view), Tier.MEMORY, "n1")
        found[layout.shard] = Held(copy, SlotKey(1, rank), memory)
    return found


def in_store(stack, folder, state, *, world=2, step=None):
    held = in_memory(stack, state, world=world, step=step)
    sources = {shard: (it.memory.fd, it.copy.digest) for shard, it in held.items()}
    store = open_store(str(folder))
    persist(store, state, sources, origin=Origin("run", 0))
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
    choice = choose({OLD: in_memory(stack, OLD)}, store, Wanted())
    assert (choice.chosen.state, choice.chosen.tier) == (NEW, Tier.PERSISTENT)

    store = in_store(stack, tmp_path / "other", OLD)
    choice = choose({NEW: in_memory(stack, NEW)}, store, Wanted())
    assert (choice.chosen.state, choice.chosen.tier) == (NEW, Tier.MEMORY)
    assert choice.epoch_max == NEW.epoch


def test_a_state_of_a_later_version_is_passed_over_as_what_it_is(stack, tmp_path):
    store = in_store(stack, tmp_path, OLD)
    in_store(stack, tmp_path, NEW)
    manifest = tmp_path / NEW.name / "manifest.json"
    manifest.write_text(manifest.read_text().replace("gpuops.checkpoint/1", "gpuops.checkpoint/7"))

    choice = choose({}, store, Wanted())

    assert choice.chosen.state == OLD
    assert choice.why[0].startswith(f"{NEW.name} in {tmp_path} cannot be read: ")
    assert "has version 7 of the format" in choice.why[0]


def test_a_directory_that_does_not_list_is_no_obstacle_to_memory_and_is_told(stack, tmp_path):
    store = Store(open_store(str(tmp_path)), survey=fails)
    choice = choose({OLD: in_memory(stack, OLD)}, store, Wanted())

    assert choice.chosen.state == OLD
    assert any("resets" in why for why in choice.why)


def test_a_directory_that_does_not_list_is_no_reason_to_start_anew(tmp_path):
    with pytest.raises(CannotTellError, match="resets"):
        choose({}, Store(open_store(str(tmp_path)), survey=fails), Wanted())


def test_a_directory_with_nothing_but_damage_is_no_reason_to_start_anew(tmp_path):
    survey = Survey((), (Damaged("step-000000000009.e00000", "its manifest was edited"),))
    with pytest.raises(CannotTellError, match="manifest was edited"):
        choose({}, Store(open_store(str(tmp_path)), survey=lambda: survey), Wanted())


def test_a_corrupt_state_in_the_directory_gives_way_to_the_one_before(stack, tmp_path):
    in_store(stack, tmp_path, OLD)
    store = in_store(stack, tmp_path, NEW)
    path = tmp_path / NEW.name / Shard(1, 2).file_name
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    choice = choose({}, store, Wanted())

    assert choice.chosen.state == OLD
    assert [(p.state, p.shard, p.tier) for p in choice.problems] == [
        (NEW, Shard(1, 2), Tier.PERSISTENT)
    ]
    assert any("corrupt in piece 0" in why for why in choice.why)


def test_a_shard_that_only_the_directory_has_makes_a_state_whole(stack, tmp_path):
    store = in_store(stack, tmp_path, NEW)
    memory = {NEW: in_memory(stack, NEW, ranks=[1])}
    choice = choose(memory, store, Wanted())

    assert choice.chosen.tier is Tier.PERSISTENT
    assert choice.chosen.sources[Shard(1, 2)] is memory[NEW][Shard(1, 2)].memory
    assert holds(choice.chosen.sources[Shard(0, 2)], layout_of(0, 2), NEW.step)


def test_the_same_state_of_another_run_is_not_mixed_in(stack, tmp_path):
    store = in_store(stack, tmp_path, NEW, step=1234)
    memory = {NEW: in_memory(stack, NEW, ranks=[1]), OLD: in_memory(stack, OLD)}
    choice = choose(memory, store, Wanted())

    assert choice.chosen.state == OLD
    assert any("two runs" in why for why in choice.why)


def test_shards_that_must_be_fetched_are_served_from_memory(stack, tmp_path):
    store = Store(in_store(stack, tmp_path, NEW), open_shard=lambda *_args: None)
    choice = choose({}, store, Wanted())

    assert choice.chosen.tier is Tier.PERSISTENT
    assert len(choice.chosen.fetched) == 2
    for rank in range(2):
        assert holds(choice.chosen.sources[Shard(rank, 2)], layout_of(rank, 2), NEW.step)
    for memory in choice.chosen.fetched:
        memory.close()


def test_what_was_fetched_is_given_back_where_the_state_is_passed_over(stack, tmp_path):
    made = []

    def make(nbytes):
        if made:
            raise KeeperError("it does not fit into memory")
        made.append(SlotMemory.create("test", nbytes))
        return made[0]

    store = Store(in_store(stack, tmp_path, NEW), open_shard=lambda *_args: None)
    choice = choose({OLD: in_memory(stack, OLD)}, store, Wanted(), make=make)

    assert choice.chosen.state == OLD
    assert any("does not fit" in why for why in choice.why)
    with pytest.raises(CheckpointError, match="closed"):
        made[0].fd  # noqa: B018 it raises


def test_only_what_is_wanted_is_looked_at(stack):
    memory = {OLD: in_memory(stack, OLD), NEW: in_memory(stack, NEW)}

    assert choose(memory, None, Wanted(only=OLD)).chosen.state == OLD
    assert choose(memory, None, Wanted(excluded_step=NEW.step)).chosen.state == OLD
    assert choose(memory, None, Wanted(is_none=True)).chosen is None
    missing = choose(memory, None, Wanted(only=StateId(9, 9)))
    assert missing.chosen is None
    assert missing.why == ["step 9 (epoch 9) was asked for and is not here"]


def test_of_several_nodes_each_looks_at_its_own_shards(stack):
    memory = {NEW: in_memory(stack, NEW, world=4, ranks=[2, 3])}
    mine = frozenset({Shard(2, 4), Shard(3, 4)})

    assert choose(memory, None, Wanted(only=NEW, shards=mine)).chosen.tier is Tier.MEMORY
    other = frozenset({Shard(0, 2)})
    assert choose(memory, None, Wanted(only=NEW, shards=other)).chosen is None


def test_memory_with_another_digest_than_it_had_is_told_with_the_piece(stack):
    held = in_memory(stack, NEW)
    shard = Shard(0, 2)
    held[shard] = replace(held[shard], copy=replace(held[shard].copy, digest=digest_of(b"x" * 99)))
    choice = choose({NEW: held, OLD: in_memory(stack, OLD)}, None, Wanted())

    assert choice.chosen.state == OLD
    assert choice.problems[0].tier is Tier.MEMORY


def test_reasons_are_few_and_short(stack):
    memory = {}
    for step in range(40):
        held = in_memory(stack, StateId(0, step), ranks=[0])
        memory[StateId(0, step)] = held
    choice = choose(memory, None, Wanted())

    assert choice.chosen is None
    assert len(choice.why) <= 16
    assert all(len(why) <= 300 for why in choice.why)
