"""Partitions over the agreement: real agents' rules, a replicated store that a majority reaches.

An agent without a majority of the members gets no answer, or an answer is lost on its way back.
What must hold at any moment: one generation trains, what was decided stays so, and each agent knows
of nothing else. After a partition the run trains again.
"""

import os
import random
from collections import defaultdict
from contextlib import suppress

import pytest
from support.agreement import Player, World, by_the_table, restart

from gpuops.control.join import RunIsOverError
from gpuops.control.record import RECORD_KEY, ControlKeys, ControlRecord
from gpuops.control.store import ControlStoreError
from gpuops.incident.decision import ReportKind, RestartPolicy

SEEDS = range(400 if os.environ.get("GPUOPS_TEST_DRAWS") == "many" else 12)
N_HOSTS, N_ROUNDS = 5, 5
STORE_LOST_S = 20.0


class History:
    """What was decided, as the store shows it after each turn, and what each agent knows of it."""

    def __init__(self):
        self.decided, self.rosters, self.known = {}, {}, set()

    def __call__(self, world):
        assert len(world.running()) <= 1, world.describe()
        record = ControlRecord.from_bytes(world.store.get(RECORD_KEY).value)
        self._keep(record)
        for player in world.players:
            self._keep(player.link.record)
            if player.running is not None:
                run_id = player.link.keys.run_id
                self.known.add((run_id, player.running, player.node, player.rank))
        roster = world.store.get(ControlKeys(run_id=record.run_id).roster(record.generation))
        if roster.version:
            key = record.run_id, record.generation
            was = self.rosters.setdefault(key, roster.value)
            assert was == roster.value, "a membership was changed"

    def _keep(self, record):
        key = (record.run_id, record.generation, record.phase)
        is_new = (record.reason, record.decided_by, record.trigger)
        assert self.decided.setdefault(key, is_new) == is_new, (key, "decided twice")


class Partitions:
    """One world of five hosts, three or all of which are members, and random partitions of it."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.low = rng.choice([1, 2, 3, 4])
        self.world = World(
            RestartPolicy(nodes_min=self.low, nodes_max=N_HOSTS, restarts_max=1000),
            N_HOSTS,
            rng.choice([restart, by_the_table]),
            grow_after_s=rng.choice([1.0, 20.0]),
            last_call_s=1.0,
        )
        self.members = set(rng.sample(range(N_HOSTS), rng.choice([3, 5])))
        self.lost = 0.0
        self.reaching = set(range(N_HOSTS))
        self.history = History()
        self.world.after_each.append(self.history)
        for player in self.world.players:
            player.store.lose = self.lose
        self.cut_s = defaultdict(float)

    def lose(self, _name):
        return self.rng.choice(["call", "answer"]) if self.rng.random() < self.lost else None

    def run_until_calm(self):
        """Have an agent on each host, and a generation that trains with all its members.

        Others may wait: a run grows three times an hour.
        """
        self.lost = 0.0

        def is_calm(world):
            self.start_again()
            players = [p for p in world.players if not p.is_dead and p.exit_code is None]
            n_training = sum(p.running is not None for p in players)
            found = (world.all_run(generation, n_training) for generation in world.running())
            return len(players) == N_HOSTS and n_training >= self.low and any(found)

        self.world.run_until(is_calm, 900.0)

    def round(self):
        links = self.links()
        held_s, starts_again = self.rng.uniform(1, 60), self.rng.random() < 0.5
        self.cut(links)
        self.lost = self.rng.choice([0.0, 0.0, 0.05])
        while held_s > 0:
            self.fail()
            step_s = self.rng.choice([0.1, 0.25, 0.5])
            self.rng.shuffle(self.world.players)
            self.world.run_once(step_s)
            held_s -= step_s
            self.give_up(step_s)
            if starts_again:
                self.start_again()
        self.cut({host: set(range(N_HOSTS)) for host in range(N_HOSTS)})
        self.cut_s.clear()
        self.run_until_calm()

    def links(self):
        """Return who reaches whom both ways: the hosts of a group, or all but for some losses."""
        if self.rng.random() < 0.3:
            lost = {(self.rng.randrange(N_HOSTS), self.rng.randrange(N_HOSTS)) for _ in range(8)}
            return {
                a: {b for b in range(N_HOSTS) if a == b or not {(a, b), (b, a)} & lost}
                for a in range(N_HOSTS)
            }
        group = [self.rng.randrange(self.rng.choice([2, 2, 3, 5])) for _ in range(N_HOSTS)]
        return {a: {b for b in range(N_HOSTS) if group[b] == group[a]} for a in range(N_HOSTS)}

    def cut(self, links):
        """Let those reach the store who reach a member that follows a member with a majority."""
        leads = [m for m in self.members if 2 * len(links[m] & self.members) > len(self.members)]
        lead = self.rng.choice(leads) if leads else None
        follow = links[lead] & self.members if leads else set()
        self.reaching = {host for host in links if links[host] & follow}
        for player in self.world.players:
            player.store.is_cut = int(player.node[1:]) not in self.reaching

    def fail(self):
        """Have a worker fail now and then: a decision that falls into the partition."""
        training = [p for p in self.world.players if p.running is not None and not p.is_dead]
        if training and self.rng.random() < 0.02:
            self.rng.choice(training).fails = ReportKind.WORKERS_FAILED

    def give_up(self, step_s):
        """End the agents that were cut off for too long, as with exit code 85."""
        for player in self.world.players:
            is_cut = player.store.is_cut and not player.is_dead
            self.cut_s[player.me.agent] = self.cut_s[player.me.agent] + step_s if is_cut else 0.0
            if self.cut_s[player.me.agent] >= STORE_LOST_S:
                assert player.running is None, "an agent gives up, and its workers train"
                player.is_dead = True

    def start_again(self):
        """Start an agent wherever one has ended and would find the run."""
        alive = {p.node for p in self.world.players if not p.is_dead and p.exit_code is None}
        for number in self.reaching - {int(node[1:]) for node in alive}:
            with suppress(RunIsOverError, ControlStoreError):
                player = Player(self.world, number)
                player.store.lose = self.lose
                player.store.is_cut = number not in self.reaching
                self.world.players.append(player)


@pytest.mark.parametrize("seed", SEEDS)
def test_partitions_leave_one_generation_and_every_decision(seed):
    partitions = Partitions(seed)
    partitions.run_until_calm()

    for _ in range(N_ROUNDS):
        partitions.round()

    ranks = defaultdict(set)
    for run_id, generation, node, rank in partitions.history.known:
        ranks[run_id, generation, rank].add(node)
    assert all(len(nodes) == 1 for nodes in ranks.values()), "two hosts had one place"
