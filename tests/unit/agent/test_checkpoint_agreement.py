"""Nodes agree on what is saved: seeds of losses, partitions and slow boards on a fake clock."""

import itertools
import threading
from collections import Counter
from dataclasses import replace

import pytest
from support.agreement import World
from support.kept_states import NOTHING, SavingWorld, newest
from support.placements import missing_copies

from gpuops.agent.checkpoint.follower import CommitFollower, KeeperLocation
from gpuops.agent.checkpoint.leader import generation_plan_of
from gpuops.agent.checkpoint.messages import Inventory, StoredStates
from gpuops.checkpoint.types import CheckpointError, Shard, StateId
from gpuops.control.record import Roster
from gpuops.incident.decision import ReportKind, RestartPolicy


def started(low, high, n_players, **more):
    world = SavingWorld(
        RestartPolicy(nodes_min=low, nodes_max=high, restarts_max=99), n_players, **more
    )
    world.run_until(lambda w: w.all_run(0, min(high, n_players)))
    return world


@pytest.mark.parametrize("step_s", [0.01, 0.1, 1.0])
def test_states_are_committed_again_and_again_though_nodes_hear_of_it_at_different_times(step_s):
    world = started(3, 3, 3, step_s=step_s)

    world.pass_time(60)

    assert len(world.committed) >= 6
    assert all(state.epoch == world.restores[0][1] for state in world.committed)


def test_a_lost_node_is_replaced_and_all_go_on_from_the_newest_that_was_agreed_on():
    world = started(2, 2, 3)
    world.pass_time(20)
    last = world.committed[-1]

    world.lose(world.players[1])
    world.run_until(lambda w: w.players[2].running == 1)
    world.pass_time(20)

    state, epoch = world.restores[1]
    assert state is not None
    assert state >= last
    assert epoch > last.epoch
    assert world.committed[-1].epoch == epoch


def test_one_node_that_goes_on_alone_has_what_the_lost_one_had():
    world = started(1, 2, 2)
    world.pass_time(20)
    last = world.committed[-1]

    world.lose(world.players[0])
    world.run_until(lambda w: w.players[1].running == 1)

    assert world.players[1].keeper.chosen[0] >= last


@pytest.mark.parametrize("seed", range(5))
def test_a_keeper_in_place_of_one_that_died_saves_with_the_others(seed):
    world = started(3, 3, 3, seed=seed)
    world.pass_time(20)
    epoch, before = world.committed[-1].epoch, len(world.committed)

    world.replace_keeper(world.players[seed % 3])
    world.run_until(lambda w: len(w.committed) >= before + 3, 60)

    assert {state.epoch for state in world.committed} == {epoch}
    last = world.committed[-1]
    world.players[(seed + 1) % 3].fails = ReportKind.WORKERS_FAILED
    world.run_until(lambda w: w.all_run(1, 3) and 1 in w.restores)
    assert world.restores[1][0] >= last


def test_what_the_directory_has_by_now_goes_with_the_wish_for_a_seat():
    may_tell, found = threading.Event(), iter([4, 6, 8])

    def survey(_directory):
        assert may_tell.wait(30)
        return StoredStates(epoch_max=next(found))

    world = SavingWorld(RestartPolicy(nodes_min=2, nodes_max=2, restarts_max=9), 2)
    player = world.players[0]
    place = KeeperLocation(me=player.me, token="t" * 16, job="run", directory="/states")
    agreement = CommitFollower(player.store, player.link.keys, place, survey, world.said.append)
    assert (
        Inventory.from_json(agreement.inventory(player.keeper)).stored_max == -1
    )  # within a second
    may_tell.set()
    while Inventory.from_json(agreement.inventory(player.keeper)).stored_max != 8:
        pass


def test_without_a_token_a_keeper_listens_for_no_peer():
    world = SavingWorld(RestartPolicy(nodes_min=2, nodes_max=2, restarts_max=9), 2)
    player = world.players[0]
    place = KeeperLocation(me=player.me, token="", job="run")
    agreement = CommitFollower(player.store, player.link.keys, place, no_survey, world.said.append)

    assert Inventory.from_json(agreement.inventory(player.keeper)).port == 0


def no_survey(_directory):
    raise AssertionError("there is no directory")


class SlowReads:
    """A board whose answer to a question for a decision comes after *meanwhile*."""

    def __init__(self, board, meanwhile):
        self.board, self.meanwhile = board, meanwhile

    def get(self, key):
        entry = self.board.get(key)
        if key.endswith("/restore"):
            self.meanwhile()
        return entry


def test_a_decision_that_is_read_while_the_next_generation_begins_is_not_its_decision():
    world = started(2, 2, 2)
    world.run_until(lambda w: 0 in w.restores)
    player, keeper = world.players[0], world.players[0].keeper
    keys = player.link.keys
    roster = Roster.from_bytes(world.store.get(keys.roster(0)).value)
    assert generation_plan_of(roster).restore is None, "the ranks name their directory first"
    assert world.store.get(keys.restore(0)).version

    def next_one_begins():
        keeper.begin(Shard(0, 2))
        agreement.begin(keeper, replace(roster, generation=1))

    board = SlowReads(world.store, next_one_begins)
    place = KeeperLocation(me=player.me, token="t" * 16, job="run")
    agreement = CommitFollower(board, keys, place, no_survey, world.said.append)
    keeper.begin(Shard(0, 2))
    agreement.begin(keeper, roster)
    agreement.update(keeper, replace(keeper.status(), n_ranks=1))
    agreement.fetch()
    agreement.update(keeper, replace(keeper.status(), n_ranks=1))

    assert keeper.chosen is None
    assert agreement.is_waiting


def test_a_directory_that_cannot_be_listed_is_told_once_however_often_it_is_tried():
    tries = itertools.count(1)

    def survey(directory):
        if next(tries) < 9:
            raise CheckpointError(f"cannot list {directory}: no answer")
        return StoredStates(epoch_max=3)

    world = SavingWorld(RestartPolicy(nodes_min=2, nodes_max=2, restarts_max=9), 2)
    player = world.players[0]
    place = KeeperLocation(me=player.me, token="t" * 16, job="run", directory="/states")
    agreement = CommitFollower(player.store, player.link.keys, place, survey, world.said.append)
    while Inventory.from_json(agreement.inventory(player.keeper)).stored_max != 3:
        pass

    assert world.said == [
        "cannot list /states: no answer; the ranks wait until it is known which state to load"
    ]


def test_only_what_failed_since_all_were_asked_to_persist_is_trouble():
    player = started(2, 2, 2).players[0]
    agreement, status = player.agreement, replace(player.keeper.status(), n_persist_failed=2)
    agreement.update(player.keeper, status)
    agreement.must_persist = True
    agreement.update(player.keeper, status)
    assert agreement.trouble == ""

    agreement.update(player.keeper, replace(status, n_persist_failed=3))
    assert agreement.trouble == "no space"


@pytest.mark.parametrize("seed", range(10))
def test_the_last_step_is_committed_though_a_node_refused_it_and_all_had_dropped_it(seed):
    world = started(3, 3, 3, seed=seed, step_s=0.05)
    world.pass_time(world.rng.uniform(15, 20))
    epoch, step = world.committed[-1].epoch, world.step

    world.end_training(80.0)  # longer than a state may stay uncommitted while they train
    world.run_until(lambda w: w.mark().committed == StateId(epoch, step), 110)

    assert world.step == step
    assert all(
        StateId(epoch, step) in p.keeper.buffer_table.complete_states() for p in world.players
    )
    assert world.mark().last.missed is None


def test_a_last_step_that_a_node_has_not_saved_when_its_ranks_are_gone_is_given_up_by_all():
    world = started(3, 3, 3)
    world.pass_time(20)
    state, lost = StateId(world.committed[-1].epoch, world.step + 1), world.players[1]
    world.end_training(0.0)
    world.step = state.step  # that rank fails to save it
    lost.keeper.buffer_table.give_up(state)
    lost.keeper.leave()
    lost.agreement.is_over = True

    world.run_until(lambda w: w.mark().last.missed == state, 60)

    assert world.mark().last.why == "not all ranks of n1 saved it"
    world.run_until(lambda w: all(p.agreement.agreed.last.why_missed(state) for p in w.players), 5)


def test_what_one_node_cannot_write_all_others_hear_of_and_wait_for_no_more():
    world = started(3, 3, 3)
    world.pass_time(10)
    world.end_training(0.0)
    world.run_until(lambda w: w.mark().committed == StateId(w.committed[-1].epoch, w.step), 60)
    bad, state = world.players[2], world.mark().committed
    bad.keeper.persist = lambda _state: False
    for player in world.players:
        player.agreement.must_persist = True
    world.run_until(lambda w: w.mark().last.behind == ("n2",), 20)
    assert not any(p.agreement.agreed.last.why_missed(state) for p in world.players)

    bad.keeper.failures += 1

    world.run_until(lambda w: all(p.agreement.agreed.last.why_missed(state) for p in w.players), 10)
    assert world.mark().last.why == "n2: no space"


def test_copies_that_take_longer_than_a_minute_are_waited_for():
    world = started(2, 2, 2)
    world.pass_time(20)
    before = world.committed[-1]
    for player in world.players:
        player.keeper.copy_s = 80.0

    world.run_until(lambda w: sum(state > before for state in w.committed) >= 3, 400)

    assert world.gave_up == []


def test_of_what_one_node_never_has_whole_all_let_go_and_it_is_named():
    world = started(2, 2, 2)
    world.pass_time(20)
    before, stuck = world.committed[-1], world.players[1].keeper
    stuck._seal = lambda _granted: None  # a rank that copies for ever

    world.run_until(lambda w: w.gave_up, 120)

    ((state, why),) = world.gave_up
    assert state > before
    assert why == "n1 did not have it 60.0 s after other nodes had"
    world.run_until(lambda w: state not in w.players[0].keeper.buffer_table.complete_states(), 5)


def test_that_a_node_cannot_write_an_older_state_is_no_reason_to_give_the_newest_up():
    world = started(3, 3, 3)
    world.pass_time(10)
    world.end_training(0.0)
    world.run_until(lambda w: w.mark().committed == StateId(w.committed[-1].epoch, w.step), 60)
    bad, state = world.players[2], world.mark().committed
    for player in world.players:
        player.agreement.must_persist = True
    bad.keeper.failures, bad.keeper.failed = 1, StateId(state.epoch, state.step - 1)

    world.run_until(lambda w: w.mark().persisted == state, 20)

    assert bad.agreement.trouble == ""
    assert world.mark().last.missed is None
    bad.keeper.failures, bad.keeper.failed = 2, state
    world.pass_time(1.0)
    assert bad.agreement.trouble == "no space"


RACKS = {f"n{n}": ("spine", f"leaf{n % 2}") for n in range(6)}


@pytest.mark.parametrize("seed", range(3))
def test_a_whole_rack_is_lost_and_the_rest_goes_on_from_the_other_racks_memory(seed):
    world = started(2, 4, 4, seed=seed, domains=RACKS)
    world.pass_time(20)
    last = world.committed[-1]

    for player in world.players:
        if RACKS[player.node] == ("spine", "leaf0"):
            world.lose(player)
    world.run_until(lambda w: w.players[1].running == w.players[3].running == 1)

    assert world.restores[1][0] >= last
    (said,) = world.said
    assert "all 2 nodes are in one failure domain" in said


def test_each_keeper_keeps_places_for_the_nodes_of_the_roster_its_own_owners_first():
    world = started(4, 4, 4, domains=RACKS)
    world.pass_time(5)
    roster = world.players[0].leader.roster
    placement = generation_plan_of(roster).placement
    addresses = {member.node: member.address for member in roster.members}

    for player in world.players:
        owners = [addresses[node] for node in placement.owners_of(player.node)]
        assert player.keeper.nodes[: len(owners)] == owners
        assert set(player.keeper.nodes) == set(addresses.values())


def test_what_cannot_be_kept_apart_is_said_once():
    world = started(2, 3, 3, domains=dict.fromkeys(RACKS, ("spine", "leaf0")))
    world.players[0].fails = ReportKind.WORKERS_FAILED
    world.run_until(lambda w: w.all_run(1, 3))

    (said,) = world.said
    assert "all 3 nodes are in one failure domain" in said


@pytest.mark.parametrize("seed", range(3))
def test_only_who_shared_copies_with_a_lost_node_gets_others(seed):
    world = started(4, 4, 5, seed=seed)
    world.pass_time(20)
    survivors = [world.players[n] for n in (0, 2, 3)]
    shards = {player.node: player.keeper.shard for player in survivors}
    before = generation_plan_of(survivors[0].leader.roster).placement

    world.lose(world.players[1])
    world.run_until(lambda w: w.players[4].running == 1)
    world.pass_time(5)

    after = generation_plan_of(survivors[0].leader.roster).placement
    partners = set(before.holders("n1")) - {"n1"}
    assert {node for pair in missing_copies(before, after) for node in pair} == partners | {"n4"}
    # Ranks stay where they were: what each node saved and holds is still what it needs.
    assert {player.node: player.keeper.shard for player in survivors} == shards


def test_with_one_copy_only_the_state_of_a_lost_node_is_gone_and_all_begin_anew():
    world = started(2, 2, 3, replicas=1)
    world.pass_time(20)
    assert world.committed

    world.lose(world.players[1])
    world.run_until(lambda w: w.players[2].running == 1)
    world.pass_time(10)

    state, epoch = world.restores[1]
    assert state is None
    assert epoch > world.marks[0].generation
    assert epoch > max(state.epoch for state in world.committed[:1])


def test_without_a_keeper_on_one_node_none_saves_and_it_is_said_once():
    world = SavingWorld(RestartPolicy(nodes_min=2, nodes_max=2, restarts_max=9), 2)
    world.is_kept = lambda player: player.node != "n1"
    world.run_until(lambda w: w.all_run(0, 2))
    world.pass_time(10)

    assert world.kept == {"n0": False}
    assert len(world.said) == 1
    assert "n1" in world.said[0]
    assert world.committed == []
    world.players[0].fails = ReportKind.WORKERS_FAILED
    world.run_until(lambda w: w.all_run(1, 2))
    world.pass_time(5)
    assert len(world.said) == 1


def test_a_run_without_a_checkpointer_asks_the_board_for_nothing_more():
    terms = RestartPolicy(nodes_min=2, nodes_max=2, restarts_max=9)
    found = []
    for world in (SavingWorld(terms, 2), World(terms, 2, n_workers=1)):
        world.saves = False
        asked = Counter()
        for player in world.players:
            player.store.lose = lambda name, asked=asked: asked.update([name])
        world.run_until(lambda w: w.all_run(0, 2))
        world.pass_time(20)
        found.append(asked)
        assert not any("ckpt" in key for key in world.store.list(""))

    assert found[0] == found[1]


def test_what_is_due_is_written_by_all_and_sealed_by_one():
    world = started(3, 3, 3)
    world.pass_time(10)

    world.players[2].keeper.persist_due = True
    world.run_until(lambda w: w.persisted)

    (state,) = set(world.persisted.values())
    assert len(world.persisted) == 1
    assert all(state in player.keeper.parts for player in world.players)
    world.run_until(lambda w: w.mark().persisted == state)


@pytest.mark.parametrize(
    "seed", [*range(25), *(pytest.param(n, marks=pytest.mark.soak) for n in range(25, 100))]
)
def test_nothing_wrong_is_agreed_on_whatever_is_lost(seed):
    world = started(2, 3, 4, seed=seed, step_s=0.1, p_corrupt=0.02)
    rng = world.rng
    for player in world.players:
        player.store.lose = lambda _name: rng.choices([None, "call", "answer"], [98, 1, 1])[0]
    for _ in range(3):
        world.pass_time(rng.uniform(5, 25))
        agreed = newest(world.committed) or NOTHING
        living = [p for p in world.seated() if not p.is_frozen]
        victim = rng.choice(living)
        before = max(world.running())
        deed = rng.choice(["lose", "fail", "freeze", "cut"])
        if deed == "lose":
            world.lose(victim)
            fresh = world.player(100 + len(world.players))
            fresh.store.lose = victim.store.lose
            world.players.append(fresh)
        elif deed == "fail":
            victim.fails = ReportKind.WORKERS_FAILED
        elif deed == "freeze":
            victim.is_frozen = True
        else:
            victim.store.is_cut = True
        world.run_until(
            lambda w, before=before: w.restores.keys() and max(w.restores) > before, 120
        )
        victim.is_frozen = victim.store.is_cut = False
        state, epoch = world.restores[max(world.restores)]
        assert state is None or state >= agreed or agreed == NOTHING, (deed, state, agreed)
        assert agreed == NOTHING or state is not None, (deed, agreed)
        assert epoch > agreed.epoch or agreed == NOTHING
        rest = len(world.committed)
        world.run_until(lambda w, rest=rest: len(w.committed) > rest, 180)
