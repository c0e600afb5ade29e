"""Keepers of three nodes: what one saved is had from another when it is gone."""

import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest
from support.keeper_ranks import holds, layout_of, until
from support.peer_keepers import JOB, TOKEN, Node, SmallNode, commit, save, seat

from gpuops.checkpoint.keeper.messages import CheckpointPolicy
from gpuops.checkpoint.keeper.rank_client import KeeperParts
from gpuops.checkpoint.memory.node_memory import SYSTEM_RESERVE_BYTES
from gpuops.checkpoint.peers.push import BACKOFF_MAX_S
from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.storage.directory_lock import LOCK_NAME
from gpuops.checkpoint.storage.inspection import verify_state
from gpuops.checkpoint.types import (
    KeeperAddress,
    KeeperError,
    Shard,
    StateId,
    Tier,
)

N_FLOATS = 300_000


@pytest.fixture
def stack():
    with contextlib.ExitStack() as found:
        yield found


@pytest.fixture
def start(tmp_path, stack):
    def make(name, number, **kwargs):
        node = Node(tmp_path, name, f"127.0.0.{number}", **kwargs)
        stack.callback(node.close)
        return node

    return make


@pytest.fixture
def nodes(start):
    return [start(f"n{n}", n) for n in (1, 2, 3)]


def sources_of(state, nodes, gone=()):
    """Return who has what of *state*, as the agents would find it out from the inventories."""
    found = {}
    for node in nodes:
        for shard in node.shards_here(state) if node not in gone else ():
            found.setdefault(shard, []).append(node.peer)
    return found


def reads(node, rank, world, offer, step):
    layout = layout_of(rank, world, n_floats=N_FLOATS)
    line = node.lines[0]
    source = line.open_shard(offer, Shard(rank, world))
    if isinstance(source, KeeperParts):
        source.ensure([(0, len(source.view))])
    return holds(source, layout, step)


def test_a_lost_node_is_replaced_and_its_ranks_continue_from_their_peers(nodes, start):
    world = 6
    seat(nodes, 0, world, n_floats=N_FLOATS)
    first = commit(nodes, save(nodes, 1))
    state = commit(nodes, save(nodes, 2))
    assert nodes[1].shards_here(state) == [Shard(rank, world) for rank in (0, 1, 2, 3)]
    told = nodes[0].heard_of("replicated")
    assert {event["holder"] for event in told} == {"n2"}
    assert {tuple(event["shard"]) for event in told} <= {(0, world), (1, world)}
    assert all(event["seconds"] >= 0 and event["bytes"] > 0 for event in told)

    nodes[2].kill()  # and its ranks with it
    spare = start("n4", 4)
    crew = [nodes[0], nodes[1], spare]
    sources = sources_of(state, crew)
    assert set(sources) == {Shard(rank, world) for rank in range(world)}
    needed = {spare: {shard: sources[shard] for shard in (Shard(4, world), Shard(5, world))}}
    offers = seat(crew, 1, world, state, first.epoch + 1, needed, n_floats=N_FLOATS)

    assert {(offer.state, offer.epoch) for offer in offers} == {(state, 1)}
    assert [offer.tier for offer in offers] == [Tier.MEMORY] * 4 + [Tier.PEER] * 2
    for n, offer in enumerate(offers):
        assert reads(crew[n // 2], n, world, offer, 2)
    fetched = spare.heard_of("fetched")
    # A peer has them: the directory is not even known.
    assert {event["holder"] for event in fetched} == {"n1"}
    assert sorted(event["shard"] for event in fetched) == [[4, world], [5, world]]
    # It is a copy as well, before anything new is committed: the one it is from may be lost now.
    mine = {Shard(4, world), Shard(5, world)}
    assert mine <= set(spare.shards_here(state))
    nodes[0].kill()
    until(lambda: len(spare.shards_here(state)) == 4, what="what the last one pushes to it")
    second = start("n5", 5)
    crew = [second, nodes[1], spare]
    sources = sources_of(state, crew)
    assert set(sources) == {Shard(rank, world) for rank in range(world)}
    needed = {second: {shard: sources[shard] for shard in (Shard(0, world), Shard(1, world))}}
    offers = seat(crew, 2, world, state, first.epoch + 2, needed, n_floats=N_FLOATS)
    assert [offer.tier for offer in offers] == [Tier.PEER] * 2 + [Tier.MEMORY] * 4
    for n, offer in enumerate(offers):
        assert reads(crew[n // 2], n, world, offer, 2)

    newer = commit(crew, save(crew, 3))
    assert newer == StateId(2, 3)
    # What was kept of the state before is given back.
    until(lambda: not mine & {c.shard for c in spare.agent.inventory() if c.state == state})


class TightNode(SmallNode):
    """A node with room for what it fetches, or for its own slots, not for both."""

    @property
    def room_bytes(self):
        return 0 if self._core.peers._adopted else self._most_bytes

    @room_bytes.setter
    def room_bytes(self, nbytes):
        self._most_bytes = nbytes


def test_what_was_fetched_gives_way_to_the_slots_of_the_next_states(nodes, tmp_path, stack):
    crew = nodes[:2]
    seat(crew, 0, 2, n_floats=N_FLOATS)
    state = commit(crew, save(crew, 5))
    crew[1].kill()
    spare = TightNode(tmp_path, "tight", "127.0.0.8", 100 * SYSTEM_RESERVE_BYTES)
    stack.callback(spare.close)
    crew = [crew[0], spare]
    sources = {spare: {Shard(1, 2): [crew[0].peer]}}
    offers = seat(crew, 1, 2, state, 1, sources, n_floats=N_FLOATS)

    assert reads(spare, 1, 2, offers[1], 5)
    assert Shard(1, 2) not in spare.shards_here(state)
    assert commit(crew, save(crew, 6)) == StateId(1, 6)


def test_after_a_node_is_gone_its_ranks_are_resharded_onto_those_that_are_left(nodes):
    seat(nodes, 0, 3, n_floats=N_FLOATS)
    state = commit(nodes, save(nodes, 5))
    nodes[0].kill()
    crew = nodes[1:]
    sources = dict.fromkeys(crew, sources_of(state, crew))
    offers = seat(crew, 1, 2, state, 1, sources, n_floats=N_FLOATS)

    assert {(offer.state, offer.world) for offer in offers} == {(state, 3)}
    for node, offer in zip(crew, offers, strict=True):
        assert all(reads(node, rank, 3, offer, 5) for rank in range(3))
    # What was held of the old world is needed no more once the new one has committed.
    newer = commit(crew, save(crew, 6))
    assert newer == StateId(1, 6)
    until(lambda: all({c.shard.world for c in n.agent.inventory()} == {2} for n in crew))


def test_a_node_that_is_left_alone_has_the_replicas_of_the_others(nodes):
    crew = nodes[:2]
    seat(crew, 0, 2, n_floats=N_FLOATS)
    state = commit(crew, save(crew, 5))
    crew[0].kill()
    offers = seat([crew[1]], 1, 1, state, 1, n_floats=N_FLOATS)

    assert [(o.state, o.world, o.tier) for o in offers] == [(state, 2, Tier.MEMORY)]
    assert all(reads(crew[1], rank, 2, offers[0], 5) for rank in range(2))


def corrupt(node, shard):
    """Flip a bit of a replica that *node* holds, behind its keeper's back."""
    name = f"gpuops-replica-{shard.rank:05d}"
    done = set()
    for link in Path(f"/proc/{node.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if name not in str(link.readlink()):
                continue
            with link.open("r+b") as file:
                inode = os.fstat(file.fileno()).st_ino
                byte = os.pread(file.fileno(), 1, 500_000)
                if inode not in done:  # a mapping has a descriptor of its own
                    os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), 500_000)
                done.add(inode)
    assert done


def test_a_corrupt_replica_is_skipped_for_that_of_the_next_holder(nodes, start):
    seat(nodes, 0, 3, n_floats=N_FLOATS)
    # All of them hold the last node's shard.
    nodes[1].agent.replicate([nodes[2].peer], [Shard(0, 3), Shard(2, 3)])
    nodes[2].agent.replicate([nodes[0].peer, nodes[1].peer], [Shard(1, 3)])
    state = commit(nodes, save(nodes, 4))
    nodes[2].kill()
    corrupt(nodes[0], Shard(2, 3))
    spare = start("n4", 4)
    crew = [nodes[0], nodes[1], spare]
    sources = {spare: {Shard(2, 3): [nodes[0].peer, nodes[1].peer]}}
    offers = seat(crew, 1, 3, state, 1, sources, n_floats=N_FLOATS)

    assert offers[2].tier is Tier.PEER
    assert reads(spare, 2, 3, offers[2], 4)
    (failed,) = spare.heard_of("fetch_failed")
    assert (failed["holder"], failed["shard"], failed["state"]) == ("n1", [2, 3], [0, 4])
    assert "damaged" in failed["why"]
    assert spare.heard_of("fetched")[0]["holder"] == "n2"
    assert [event["kind"] for event in nodes[0].heard_of("corrupt")] == ["corrupt"]
    # Nobody is told of the damaged one any more.
    assert Shard(2, 3) not in nodes[0].shards_here(state)


def test_a_state_that_nobody_can_serve_fails_the_offer_and_not_an_older_one(nodes, start):
    seat(nodes, 0, 3, n_floats=N_FLOATS)
    commit(nodes, save(nodes, 1))
    state = commit(nodes, save(nodes, 4))
    nodes[2].kill()
    corrupt(nodes[0], Shard(2, 3))
    spare = start("n4", 4)
    crew = [nodes[0], nodes[1], spare]
    sources = {spare: {Shard(2, 3): [nodes[0].peer]}}
    with pytest.raises(KeeperError, match=r"cannot be served here.*damaged"):
        seat(crew, 1, 3, state, 1, sources, n_floats=N_FLOATS)
    assert spare.heard_of("fetch_failed")
    assert spare.heard_of("cannot_offer")


def test_who_does_not_know_the_token_gets_nothing_and_gives_nothing(nodes, start):
    seat(nodes[:2], 0, 2, n_floats=N_FLOATS)
    state = commit(nodes[:2], save(nodes[:2], 4))
    stranger = start("n5", 5, token="another token")
    stranger.acquire(1, 3)
    stranger.agent.replicate([nodes[0].peer], [])
    stranger.agent.restore_from(state, 1, {Shard(0, 2): [nodes[0].peer, nodes[1].peer]})
    stranger.connect(1, [0], 2)
    with pytest.raises(KeeperError, match="not a keeper of this job"):
        stranger.lines[0].restore_point(60.0)
    other = start("n6", 6, job="another run")
    other.acquire(1, 3)
    other.agent.restore_from(state, 1, {Shard(0, 2): [nodes[0].peer]})
    other.connect(1, [0], 2)
    with pytest.raises(KeeperError, match="not a keeper of this job"):
        other.lines[0].restore_point(60.0)


def test_what_only_some_nodes_grant_is_given_up_and_the_next_is_saved_by_all(nodes):
    crew = nodes[:2]
    seat(crew, 0, 2, n_floats=N_FLOATS)
    crew[1].agent.set_next_step(6)
    assert commit(crew, save(crew, 4)) == StateId(0, 6)
    assert crew[0].agent.stats()["given_up"] == 2


def test_a_keeper_in_place_of_one_that_died_is_found_where_that_was(nodes, stack):
    seat(nodes, 0, 3, n_floats=N_FLOATS)
    first = commit(nodes, save(nodes, 1))
    nodes[1].process.kill()
    nodes[1].replace()
    stack.callback(nodes[1].process.kill)
    nodes[1].acquire(0, 3)
    nodes[1].agent.replicate([nodes[2].peer], [Shard(0, 3)])
    nodes[1].agent.take_over(first.epoch)
    nodes[1].connect(0, [1], 3)
    nodes[1].reserve([1], 3, n_floats=N_FLOATS)

    state = commit(nodes, save(nodes, 2))
    assert state.epoch == first.epoch
    assert nodes[1].shards_here(state) == [Shard(0, 3), Shard(1, 3)]
    assert nodes[2].shards_here(state) == [Shard(1, 3), Shard(2, 3)]


@pytest.mark.timeout(300)
def test_a_holder_that_is_stopped_does_not_stop_commits(nodes):
    seat(nodes, 0, 3, n_floats=N_FLOATS)
    commit(nodes, save(nodes, 1))
    living = nodes[:1] + nodes[2:]
    os.kill(nodes[1].process.pid, signal.SIGSTOP)
    try:
        saved = [commit(living, save(living, step * 1000)) for step in range(2, 6)]
        (failed,) = nodes[0].heard_of("replica_failed")
        assert (failed["holder"], failed["shard"], failed["state"]) == ("n2", [0, 3], [0, 2000])
        assert failed["seconds"] < 20
    finally:
        os.kill(nodes[1].process.pid, signal.SIGCONT)
    # It is back: what it lacks of the newest state is pushed to it, when it is next looked for.
    until(lambda: Shard(0, 3) in nodes[1].shards_here(saved[-1]), deadline_s=BACKOFF_MAX_S + 30)


def test_a_node_that_holds_nothing_for_others_is_told_and_saving_continues(nodes):
    seat(nodes[:2], 0, 2, n_floats=N_FLOATS)
    nodes[1].agent.replicate([], [])
    state = save(nodes[:2], 3)
    until(lambda: nodes[0].heard_of("replica_failed"), deadline_s=40)
    (failed,) = nodes[0].heard_of("replica_failed")
    assert "not a holder of" in failed["why"]
    commit(nodes[:2], state)


def test_a_node_without_the_room_for_others_says_so_and_its_own_states_are_saved(
    nodes, tmp_path, stack
):
    image_bytes = layout_of(0, 2, n_floats=N_FLOATS).nbytes
    # For its own two slots, and for half of what it is to hold for the other.
    room_bytes = SYSTEM_RESERVE_BYTES + 2 * image_bytes + image_bytes // 2
    small = SmallNode(tmp_path, "small", "127.0.0.8", room_bytes)
    stack.callback(small.close)
    crew = [nodes[0], small]
    seat(crew, 0, 2, n_floats=N_FLOATS)
    stats = small.agent.stats
    until(lambda: stats()["populated_bytes"] == 2 * image_bytes, what="memory of its own")
    state = commit(crew, save(crew, 3))
    failed = nodes[0].heard_of("replica_failed")[0]
    assert (failed["holder"], failed["shard"]) == ("small", [0, 2])
    assert "does not fit into memory" in failed["why"]
    assert "1.1 GB for the system" in failed["why"]
    assert small.shards_here(state) == [Shard(1, 2)]
    assert nodes[0].shards_here(state) == [Shard(0, 2), Shard(1, 2)]


def test_an_older_start_is_fenced_off(nodes):
    crew = nodes[:2]
    seat(crew, 0, 2, n_floats=N_FLOATS)
    state = commit(crew, save(crew, 3))
    # One node goes on with the next epoch; the other one has not heard of it.
    crew[1].acquire(1, 2)
    crew[1].agent.restore_from(state, 1)
    before = crew[1].agent.stats()["replica_bytes"]
    for rank in crew[0].ranks:
        rank.save(4)
    stale = StateId(0, 4)
    until(lambda: crew[0].heard_of("replica_failed"), deadline_s=40)
    assert "epoch" in crew[0].heard_of("replica_failed")[0]["why"]
    assert stale not in {copy.state for copy in crew[1].agent.inventory()}
    assert crew[1].agent.stats()["replica_bytes"] == before


def test_a_shared_directory_has_a_state_once_it_is_written_and_not_before(nodes, tmp_path):
    place = tmp_path / "states"
    seat(nodes, 0, 3, n_floats=N_FLOATS, directory=str(place), persist_every_s=0.0)
    store = open_store(str(place))
    state = save(nodes, 3)
    assert not any(node.agent.status().progress.is_due for node in nodes)
    commit(nodes, state)
    assert all(node.agent.status().progress.is_due for node in nodes)
    for node in nodes[:2]:
        node.agent.commit(state, persist=True)
    until(lambda: all(state in node.agent.status().progress.parts for node in nodes[:2]))
    # Two of three: nobody sees it, and nobody can make it appear.
    assert store.list_states() == ()
    nodes[0].agent.commit_persisted(state, 3)
    until(lambda: nodes[0].heard_of("persist_failed"))
    assert "not all of its 3 shards" in nodes[0].heard_of("persist_failed")[0]["why"]
    assert store.list_states() == ()
    assert nodes[0].agent.status().progress.persisted is None

    nodes[2].agent.commit(state, persist=True)
    until(lambda: state in nodes[2].agent.status().progress.parts)
    assert store.list_states() == ()
    nodes[0].agent.commit_persisted(state, 3)
    until(lambda: nodes[0].agent.status().progress.persisted == state)
    nodes[0].agent.commit_persisted(state, 3)
    assert [stored.state for stored in store.list_states()] == [state]
    assert verify_state(store, state) == []
    assert store.read_manifest(state).job == JOB
    assert sorted(p.name for p in place.iterdir()) == [LOCK_NAME, state.name]


def test_with_no_peer_left_the_directory_serves(nodes, start, tmp_path):
    options = {"n_floats": N_FLOATS, "directory": str(tmp_path / "states")}
    crew = nodes[:2]
    seat(crew, 0, 2, **options)
    state = commit(crew, save(crew, 3), persist=True)
    until(lambda: all(state in node.agent.status().progress.parts for node in crew))
    crew[1].agent.commit_persisted(state, 2)
    until(lambda: crew[1].agent.status().progress.persisted == state)
    crew[1].kill()
    corrupt(crew[0], Shard(1, 2))
    spare = start("n4", 4)
    spare.acquire(1, 2)
    crew[0].acquire(1, 2)
    crew[0].agent.restore_from(state, 1)
    spare.agent.restore_from(state, 1, {Shard(1, 2): [crew[0].peer]})
    spare.connect(1, [1], 2)
    spare.lines[0].set_policy(CheckpointPolicy(directory=options["directory"]))
    offer = spare.lines[0].restore_point(60.0)
    assert (offer.state, offer.tier) == (state, Tier.PERSISTENT)
    assert reads(spare, 1, 2, offer, 3)
    assert any("damaged" in why for why in offer.why)


def test_serving_is_asked_for_again_without_harm(nodes):
    node = nodes[0]
    again = node.agent.serve_peers(node.address, node="n1", token=TOKEN, job=JOB)
    assert again == node.port
    with pytest.raises(KeeperError, match="is not an address"):
        node.agent.serve_peers("localhost", node="n1", token=TOKEN, job=JOB)
    with pytest.raises(KeeperError, match="cannot listen"):
        node.agent.serve_peers("203.0.113.7", node="n1", token=TOKEN, job=JOB)


def test_a_peer_that_accepts_and_never_reads_delays_nobody(nodes, stack):
    crew = nodes[:1]
    deaf = stack.enter_context(socket.create_server(("127.0.0.9", 0)))
    crew[0].acquire(0, 2)
    crew[0].agent.replicate([KeeperAddress("deaf", "127.0.0.9", deaf.getsockname()[1])], [])
    crew[0].agent.restore_from(None, 0)
    crew[0].connect(0, [0], 2)
    crew[0].offers()
    crew[0].reserve([0], 2, n_floats=N_FLOATS)
    for step in (1, 2, 3):
        # A slot that is being pushed is granted only once that has ended.
        commit(crew, save(crew, step * 1000))
    (failed,) = crew[0].heard_of("replica_failed")
    assert failed["holder"] == "deaf"
