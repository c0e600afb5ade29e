"""How often nodes exchange what they have saved, and how far apart commits are: a fake clock."""

from collections import Counter

import pytest
from support.agreement import Player
from support.kept_states import Saver, SavingWorld

from gpuops.agent.checkpoint.exchange import EXCHANGES_PER_S, QUICK_POLLS, exchange_s
from gpuops.control.threads import HOLD_S
from gpuops.incident.decision import RestartPolicy


@pytest.mark.parametrize(
    ("n_nodes", "seconds"), [(2, 0.1), (20, 0.1), (64, 0.32), (200, 1.0), (4096, 1.0)]
)
def test_few_nodes_exchange_more_often_and_many_no_more_often_than_they_always_do(n_nodes, seconds):
    assert exchange_s(n_nodes) == seconds
    assert n_nodes / exchange_s(n_nodes) <= max(n_nodes / HOLD_S, EXCHANGES_PER_S)


class Punctual(Saver):
    """A node that sends heartbeats and polls its keeper when it is time; *lag_s* later by turns."""

    def __init__(self, world, number, order=None):
        super().__init__(world, number, order)
        self.calls = Counter()
        self.store.lose = self._count
        self.lag_s = 0.0
        self.beats_at_s, self.polls_at_s = (world.rng.uniform(0, 1) for _ in "ab")

    def _count(self, name):
        self.calls[name] += 1

    def act(self):
        now_s, every_s = self.world.now_s(), self.agreement.exchange_s
        if now_s >= self.beats_at_s or self.running is None:
            Player.act(self)
            self.beats_at_s = now_s + every_s
        if self.running is not None and not self.is_dead and now_s >= self.polls_at_s:
            self.agreement.fetch()
            self.agreement.update(self.keeper, self.keeper.status())
            self.polls_at_s = now_s + every_s + self.world.rng.uniform(0, self.lag_s)


class PunctualWorld(SavingWorld):
    """Nodes that make a step of 50 ms each turn, and save a state in a turn."""

    turn_s, transit_s = 0.05, (0.0, 0.05)

    def player(self, number, order=None):
        return Punctual(self, number, order)

    def dropped(self):
        return {state for mark in self.marks for state in mark.dropped}


def training(n_nodes, seed=0):
    policy = RestartPolicy(nodes_min=n_nodes, nodes_max=n_nodes, restarts_max=9)
    world = PunctualWorld(policy, n_nodes, seed=seed, step_s=0.05)
    world.run_until(lambda w: w.all_run(0, n_nodes) and len(w.committed) > 3)
    return world


@pytest.mark.parametrize(("n_nodes", "apart_s"), [(2, 0.7), (64, 2.1)])
def test_commits_follow_as_quickly_as_nodes_exchange_and_the_store_bears_it(n_nodes, apart_s):
    world = training(n_nodes)
    before, seconds = len(world.committed), 10
    for player in world.players:
        player.calls.clear()

    world.pass_time(seconds)

    assert seconds / (len(world.committed) - before) <= apart_s
    assert not world.dropped()
    for call in ("heartbeat", "get"):
        assert sum(player.calls[call] for player in world.players) <= seconds * EXCHANGES_PER_S


@pytest.mark.parametrize("lag_s", [0.5, 4.0])
def test_where_one_node_begins_to_lag_few_states_are_saved_in_vain(lag_s):
    world = training(3)
    world.players[1].lag_s = lag_s

    world.pass_time(60)
    assert len(world.dropped()) <= 3
    before, in_vain = len(world.committed), world.dropped()
    world.pass_time(60)
    assert world.dropped() == in_vain
    assert 60 / (len(world.committed) - before) <= 3 * (lag_s + exchange_s(3))


def test_nodes_exchange_rarely_once_nothing_has_changed_for_a_while():
    world = training(2)
    (agreement, other) = (player.agreement for player in world.players)
    assert agreement.exchange_s == other.exchange_s == exchange_s(2)

    world.end_training(0.0)
    world.pass_time((QUICK_POLLS - 20) * exchange_s(2))
    assert agreement.exchange_s == exchange_s(2)
    world.pass_time(40 * exchange_s(2))

    assert agreement.exchange_s == other.exchange_s == HOLD_S
