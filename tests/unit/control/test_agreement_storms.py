"""Storms over the agreement: the real rules, lost messages, frozen and hanging agents, newcomers.

What must hold at any moment: one generation trains, generations only grow, an end stays the end.
And at last everybody who is left comes to the same end.
"""

import random
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace

import pytest
from support.agreement import Player, World, by_the_table

from gpuops.control.join import RunIsOverError
from gpuops.control.record import RECORD_KEY, ControlRecord, RunPhase
from gpuops.control.store import ControlStoreError
from gpuops.errors import EXIT_NODE_UNHEALTHY, UsageError
from gpuops.incident.decision import ReportKind, RestartPolicy

SEEDS = range(60)
SIZES = ((1, 2), (2, 4), (2, 3), (3, 3), (1, 4))
FAILURES = (ReportKind.WORKERS_FAILED, ReportKind.GPU_FAULT, ReportKind.HANG)


class Watcher:
    """Holds every record against the ones before."""

    def __init__(self):
        self.run_id = None
        self.generation = 0
        self.end = None

    def __call__(self, world):
        assert len(world.running()) <= 1, world.describe()
        entry = world.store.get(RECORD_KEY)
        if not entry.version:
            return
        record = ControlRecord.from_bytes(entry.value)
        if record.run_id != self.run_id:  # all had left the one before
            self.run_id, self.generation, self.end = record.run_id, 0, None
        assert record.generation >= self.generation
        self.generation = record.generation
        assert self.end in (None, entry.value), "the end was changed"
        if record.phase is RunPhase.STOP:
            self.end = entry.value


class Storm:
    """One world and one random way to treat it."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        low, high = rng.choice(SIZES)
        self.world = World(
            RestartPolicy(nodes_min=low, nodes_max=high, restarts_max=rng.choice([3, 1000])),
            high + rng.randrange(2),
            by_the_table,
            grow_after_s=rng.choice([None, 1.0, 20.0]),
            join_timeout_s=rng.choice([40.0, 600.0]),
            first_call_s=rng.choice([5.0, 30.0]),
        )
        self.lost = rng.choice([0.0, 0.0, 0.02, 0.1])
        for player in self.world.players:
            player.store.lose = self.lose
        self.world.after_each.append(Watcher())
        self.newcomers = 100

    def lose(self, _name):
        if self.rng.random() >= self.lost:
            return None
        return self.rng.choice(["call", "answer"])

    def turns(self, n):
        for _ in range(n):
            self.rng.shuffle(self.world.players)
            self.world.run_once(self.rng.choice([0.1, 0.25, 0.25, 0.5]))

    def rage(self):
        """Do to a few agents, one after the other, whatever comes."""
        self.turns(80)
        for _ in range(self.rng.randrange(3, 15)):
            alive = [p for p in self.world.players if not p.is_dead and p.exit_code is None]
            if not alive:
                return
            victim = self.rng.choice(alive)
            self.rng.choice(DEEDS)(self, victim)
            self.turns(self.rng.randrange(2, 100))
            if self.rng.random() < 0.6:
                victim.store.is_cut = victim.is_frozen = victim.is_stuck = False

    def calm(self):
        """Undo what can be undone, and let everybody finish."""
        self.lost = 0.0
        left = [p for p in self.world.players if not p.is_dead]
        for player in left:
            player.store.is_cut = player.is_frozen = player.is_stuck = False
            player.done = True
        self.world.run_until(lambda _w: all(p.exit_code is not None for p in left), limit_s=1500)

    def fail(self, victim):
        if victim.running is not None and not victim.done:
            victim.fails = self.rng.choice(FAILURES)

    def fail_with_evidence(self, victim):
        self.fail(victim)
        victim.blames = victim.fails is not None

    def freeze(self, victim):
        victim.is_frozen = True

    def hang(self, victim):
        victim.is_stuck = True

    def cut(self, victim):
        victim.store.is_cut = True

    def die(self, victim):
        victim.is_dead = True
        victim.stop()

    def kill(self, victim):
        victim.stop()
        victim.is_killed()

    def close(self, victim):
        victim.is_closed()

    def fall_sick(self, victim):
        victim.is_sick = self.rng.random() < 0.5

    def end_slowly(self, victim):
        victim.ends_in_s = self.rng.choice([3.0, 8.0, 15.0])

    def join(self, _victim):
        self.newcomers += 1
        self._enter(self.newcomers)

    def start_again(self, victim):
        self.die(victim)
        self._enter(int(victim.node[1:]))

    def drain(self, victim):
        victim.drains = self.rng.random() < 0.2

    def leave_out(self, victim):
        def change(now):
            if now.phase is not RunPhase.RENDEZVOUS:
                return None
            return replace(now, excluded={**now.excluded, victim.node: "its check failed"})

        with suppress(ControlStoreError):
            victim.link.update_record(change)

    def finish(self, victim):
        victim.done = True

    def _enter(self, number):
        with suppress(UsageError, RunIsOverError, ControlStoreError):
            player = Player(self.world, number)
            player.store.lose = self.lose
            self.world.players.append(player)


DEEDS = (
    Storm.fail,
    Storm.fail,
    Storm.fail_with_evidence,
    Storm.freeze,
    Storm.freeze,
    Storm.hang,
    Storm.cut,
    Storm.close,
    Storm.kill,
    Storm.fall_sick,
    Storm.die,
    Storm.end_slowly,
    Storm.join,
    Storm.start_again,
    Storm.drain,
    Storm.leave_out,
    Storm.finish,
)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_ends_the_same_for_all_and_never_with_two_generations(seed):
    storm = Storm(seed)
    storm.rage()
    storm.calm()

    codes = defaultdict(set)
    for player in storm.world.players:
        # Who is left out, or found another run in the place of its own, ends by itself.
        ends_alone = player.exit_code == EXIT_NODE_UNHEALTHY or player.link.reset_error is not None
        if not player.is_dead and not ends_alone:
            codes[player.link.record.run_id].add(player.exit_code)
    assert all(len(found) == 1 for found in codes.values()), (codes, storm.world.describe())
