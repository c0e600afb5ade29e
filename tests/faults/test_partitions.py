"""Random partitions of five hosts, without Postgres: one generation trains, no decision is lost.

A round splits the hosts into groups that reach each other inside a group (or loses what one host
sends to another), holds that for a random time, and heals it. Agents that ended with 85 are started
again, in some rounds while the partition lasts. After each round the run steps again.
"""

import json
import os
import random
import time
from collections import defaultdict

import pytest
from support.cluster_run import ClusterRun
from support.etcd import find_etcd
from support.hosts import Hosts
from support.ledger import in_one_row, overlaps
from support.runs import wait_until
from support.soak_result import keep_soak

from gpuops.errors import EXIT_REQUEUE
from gpuops.host.procfs import process
from gpuops.units import NS_PER_S

pytestmark = pytest.mark.torch
N_HOSTS, STORE_LOST_S = 5, 20
FLAGS = (
    *("--health-gate=off", "--grow-after=3", "--max-restarts=1000000"),
    f"--rdzv-conf=last_call_timeout=1,join_timeout=600,store_lost_timeout={STORE_LOST_S}",
)
JOB = {"JOB_STEPS": "10000000", "JOB_PAUSE_S": "0.1"}
STEPS_AGAIN_S = 240
# Longer partitions are seen: the fence is at 10 s, and peers count as dead after 15 s.
LONG_S = 17.0
DEAD_S = 15.0


class Partitions:
    """A run over hosts, and its random partitions."""

    def __init__(self, hosts, run, seed):
        self.hosts, self.run = hosts, run
        self.rng = random.Random(seed)
        self.log = []
        self.started_ns = {}  # when an agent was started again, by host

    def blow(self, n_rounds, hold_s=None):
        """Make *n_rounds* partitions, each of *hold_s* or as long as is drawn."""
        for number in range(n_rounds):
            self.all_join()
            began_s, last_ns = time.monotonic(), self.steps_again()
            what = self.round(hold_s or self.drawn_s())
            took_s = round((self.steps_again() - last_ns) / NS_PER_S, 1)
            self.log.append({"round": number, **what, "s": took_s})
            assert overlaps(in_one_row(self.run.lines())) == [], self.run.said()
            print(round(time.monotonic() - began_s), json.dumps(self.log[-1]), flush=True)
            self.pause(self.rng.uniform(0, 5))

    def drawn_s(self):
        """Return how long a partition lasts: unnoticed, fenced, or given up."""
        return self.rng.choice([self.rng.uniform(1, 17), self.rng.uniform(LONG_S, 45)])

    def round(self, hold_s):
        """Partition the hosts, and heal them; return what was done and seen."""
        is_one_way = self.rng.random() < 0.2
        starts_again = self.rng.random() < 0.5
        agents = {host.name: self.run.agent(host) for host in self.hosts}
        trains = {host.name: self.run.worker_pids(host) for host in self.hosts}
        groups = [] if is_one_way else self.split()
        what = {"groups": [[host.name for host in group] for group in groups]}
        if is_one_way:
            what = {"lost": self.lose()}
        since_ns = time.monotonic_ns()
        while time.monotonic_ns() < since_ns + hold_s * NS_PER_S:
            self.pause(0.5)
            if starts_again:
                self.requeue()
        if groups and hold_s >= LONG_S and self.members() == N_HOSTS:
            what |= self.seen(groups, trains, since_ns, starts_again)
            held_s = (time.monotonic_ns() - since_ns) / NS_PER_S
            if held_s >= STORE_LOST_S + 10:
                self.wait_for_ends([agents[host.name] for host in self.cut_off(groups)])
        self.hosts.heal()
        return {**what, "hold_s": round(hold_s, 1), "starts_again": starts_again}

    def split(self):
        """Split the hosts into two to five groups."""
        groups = defaultdict(list)
        n_groups = self.rng.choice([2, 2, 2, 3, 5])
        while len(groups) < 2:
            groups.clear()
            for host in self.hosts:
                groups[self.rng.randrange(n_groups)].append(host)
        self.hosts.partition(*groups.values())
        return list(groups.values())

    def lose(self):
        """Lose what some hosts send to some others."""
        pairs = [(one, other) for one in self.hosts for other in self.hosts if one is not other]
        lost = self.rng.sample(pairs, self.rng.randrange(1, len(pairs) // 2))
        for one, other in lost:
            self.hosts.lose(one, other)
        return [f"{one.name}>{other.name}" for one, other in lost]

    def members(self):
        """Return how many hosts have an etcd."""
        return sum(
            any((it := process(pid)) is not None and it.name == "etcd" for pid in host.pids())
            for host in self.hosts
        )

    def cut_off(self, groups):
        """Return the hosts without a majority."""
        return [host for group in groups if len(group) <= N_HOSTS // 2 for host in group]

    def seen(self, groups, trains, since_ns, starts_again):
        """Return for how long the hosts without a majority trained, once a majority has gone on."""
        minority = self.cut_off(groups)
        if len(minority) < N_HOSTS:
            self.wait_for_steps(since_ns + round(LONG_S * NS_PER_S), starts_again)
        pids = set().union(*(trains[host.name] for host in minority))
        late = [x.mono_ns for x in self.run.lines() if x.what == "step" and x.pid in pids]
        return {"minority_s": round(max(0, max(late, default=0) - since_ns) / NS_PER_S, 1)}

    def wait_for_ends(self, agents):
        """Wait until *agents* have ended with 85."""
        wait_until(lambda: all(agent.code is not None for agent in agents), STEPS_AGAIN_S)
        assert {agent.code for agent in agents} == {EXIT_REQUEUE}, self.run.said()

    def wait_for_steps(self, since_ns, starts_again=True):
        """Wait until the run has made steps after *since_ns*; return when the last one was."""

        def look():
            if starts_again:
                self.requeue()
            made = [x for x in self.run.lines()[-200:] if x.what == "step" and x.mono_ns > since_ns]
            return made[-1].mono_ns if len(made) >= 4 else None

        try:
            return wait_until(look, STEPS_AGAIN_S, "the next steps")
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.log}\n{self.run.said()}") from None

    def steps_again(self):
        """Return when the run makes steps, from now on."""
        return self.wait_for_steps(time.monotonic_ns())

    def pause(self, seconds):
        """Let *seconds* pass, as long as nobody has to wait for them."""
        time.sleep(seconds)

    def all_join(self):
        """Wait until an agent on each host is part of the run; it may wait for a place.

        A run grows three times an hour.
        """

        def look():
            self.requeue()
            return all(self.has_joined(host) for host in self.hosts)

        self.run.wait(look, "all agents", STEPS_AGAIN_S)

    def has_joined(self, host):
        """Say whether the newest agent of *host* has found the run: it has begun its journal."""
        since_ns = self.started_ns.get(host.name, 0)
        journals = host.runs.glob("*/journal/*")
        return any(path.stat().st_mtime_ns >= since_ns for path in journals)

    def requeue(self):
        """Start agents that ended with 85 again."""
        now_ns = time.time_ns()
        self.started_ns |= dict.fromkeys((host.name for host in self.run.requeue()), now_ns)

    def finish(self):
        """End the run once all agents are part of it; check what it was."""
        self.all_join()
        self.steps_again()
        self.run.enough()
        codes = self.run.finish(limit_s=STEPS_AGAIN_S)
        assert set(codes.values()) == {0}, self.run.said()
        # The ranks of this job do not wait for each other: it says who trained when, no more.
        assert overlaps(in_one_row(self.run.lines())) == [], self.run.said()
        assert self.run.orphans() == set()
        assert decided_twice(self.run.events()) == []
        minority = max((each.get("minority_s", 0.0) for each in self.log), default=0.0)
        assert minority < DEAD_S, self.log
        return {
            "generations": len({(x.run, x.generation) for x in self.run.lines()}),
            "runs": len({x.run for x in self.run.lines()}),
            "minority_s_max": minority,
            "rounds": self.log,
        }


def decided_twice(events):
    """Return what was decided in two ways, as the journals of all agents tell it."""
    told = defaultdict(set)
    seats = defaultdict(set)
    for event in events:
        body, run = event["payload"], event["run_id"]
        if event["kind"] == "run.phase":
            told[run, "phase", body["generation"], body["phase"]].add(body["reason"])
        elif event["kind"] == "attempt.started":
            told[run, "nodes", event["attempt"]].add(body["n_nodes"])
            seats[run, event["attempt"], body["group_rank"]].add(event["node"])
        elif event["kind"] == "decision.made":
            said = json.dumps(body["decision"], sort_keys=True)
            told[run, "decision", body["cluster"]["generation"]].add(said)
    return [(key, found) for key, found in [*told.items(), *seats.items()] if len(found) > 1]


def partitioned(folder, seed, n_rounds, nnodes, hold_s=None):
    """Make *n_rounds* random partitions; return what was done and seen."""
    find_etcd()
    with Hosts(N_HOSTS, folder) as hosts:
        options = {"nnodes": nnodes, "env": JOB, "run_id": f"p{seed}", "quorum": True}
        with ClusterRun(hosts, folder, *FLAGS, script="fake_steps.py", **options) as run:
            run.start()
            run.wait_for_step(3)
            partitions = Partitions(hosts, run, seed)
            partitions.blow(n_rounds, hold_s)
            return partitions.finish()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seed", "nnodes"),
    # Agents are started again while n0 and n2 are cut off; after that n0 and n2 were.
    [(39, "2:5"), pytest.param(8, "3:5", marks=pytest.mark.soak)],
)
def test_a_partition_of_five_hosts(tmp_path, seed, nnodes):
    partitioned(tmp_path, seed, 1, nnodes, hold_s=STORE_LOST_S + 20.0)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("nnodes", ["3:5", "2:5"])
def test_two_hundred_partitions_of_five_hosts(tmp_path, nnodes):
    seed = int(os.environ.get("SOAK_SEED", "20261126"))
    n_rounds = int(os.environ.get("SOAK_ROUNDS", "100"))
    began_s = time.monotonic()
    result = partitioned(tmp_path, seed, n_rounds, nnodes)
    keep_soak(
        result,
        command=f"SOAK_SEED={seed} SOAK_ROUNDS={n_rounds} make soak (--nnodes={nnodes})",
        seed=seed,
        began_s=began_s,
        name=nnodes.replace(":", "_"),
    )
