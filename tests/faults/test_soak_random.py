"""A seeded storm of faults over four hosts: what was trained must add up in the end.

Each fault is one that a cluster really has; after each the run must step again by itself. In the
end every step was trained once or redone from a recorded point, no two generations trained at the
same time, no worker is left behind, and every generation that ended has its incident.
"""

import contextlib
import os
import random
import signal
import time

import pytest
from support.cluster_run import ClusterRun, postgres_endpoint
from support.etcd import find_etcd
from support.hosts import Hosts
from support.postgres import running_server
from support.runs import is_alive, wait_until
from support.soak_result import keep_soak

from gpuops.host.procfs import process

pytestmark = pytest.mark.torch
FLAGS = (
    *("--hang-timeout=8", "--grow-after=3", "--max-restarts=1000000"),
    "--rdzv-conf=join_timeout=120",
)
QUORUM_FLAGS = ("--rdzv-conf=join_timeout=120,store_lost_timeout=30",)
JOB = {"JOB_STEPS": "10000000", "JOB_PAUSE_S": "0.05"}
STEPS_AGAIN_S = 150


class Storm:
    """One run over hosts, and what is done to it. Each act returns what undoes it, if anything."""

    def __init__(self, hosts, run, seed):
        self.hosts, self.run = hosts, run
        self.rng = random.Random(seed)
        self.acts = [
            *(self.kill_rank, self.stop_rank, self.kill_agent, self.freeze_node),
            *(self.kill_node, self.cut_link),
        ]
        self.log = []

    def blow(self, n_faults):
        """Do *n_faults* random faults, one after the other; the run must come back from each."""
        for number in range(n_faults):
            act = self.rng.choice(self.acts)
            began = time.monotonic()
            last_ns = self.steps_again(time.monotonic_ns())
            undo, what = act()
            self.log.append([number, act.__name__, what])
            if undo is not None:
                self.pause(self.rng.uniform(0.5, 22))
                undo()
            again_ns = self.steps_again(time.monotonic_ns())
            took_s = time.monotonic() - began
            self.log[-1] += [round(took_s, 1), round((again_ns - last_ns) / 1e9, 1)]
            print(*self.log[-1], flush=True)

    def steps_again(self, since_ns):
        """Return when some rank made a step after *since_ns*; those alive are all watched."""

        def look():
            self.look_after()
            lines = self.run.lines()[-200:]
            made = [x.mono_ns for x in lines if x.what == "step" and x.mono_ns > since_ns]
            return made[-1] if len(made) >= 4 else None

        try:
            return wait_until(look, STEPS_AGAIN_S, "the next steps")
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.log}\n{self.run.said()}") from None

    def look_after(self):
        """Do what has to be done while the next steps are waited for."""

    def pause(self, seconds):
        """Let *seconds* pass, as long as nobody has to wait for them."""
        time.sleep(seconds)

    def seated(self):
        """Return the hosts with living workers, and these."""

        def look():
            found = []
            for host in self.hosts:
                told = (self.run.state(host) or {}).get("pids", {}).values()
                pids = [pid for pid in told if is_alive(pid) and self.run.is_worker(pid)]
                found += [(host, pids)] if pids else []
            return found

        return wait_until(look, what="a worker")

    def kill_rank(self):
        """SIGKILL to one worker."""
        host, pids = self.rng.choice(self.seated())
        os.kill(self.rng.choice(pids), signal.SIGKILL)
        return None, host.name

    def stop_rank(self):
        """SIGSTOP to one worker: a hang that only its limit tells."""
        host, pids = self.rng.choice(self.seated())
        os.kill(self.rng.choice(pids), signal.SIGSTOP)
        return None, host.name

    def kill_agent(self):
        """SIGKILL to one agent, which somebody starts again."""
        host, _pids = self.rng.choice(self.seated())
        self.run.agent(host).process.kill()
        return lambda: self.run.start(host), host.name

    def kill_node(self):
        """A node loses power and comes back."""
        host, _pids = self.rng.choice(self.seated())
        host.kill_all()
        return lambda: self.run.start(host), host.name

    def freeze_node(self):
        """A node stands still."""
        host, _pids = self.rng.choice(self.seated())
        host.freeze()
        return host.thaw, host.name

    def cut_link(self):
        """A cable is out."""
        host, _pids = self.rng.choice(self.seated())
        host.cut()
        return host.heal, host.name


class PostgresStorm(Storm):
    """The run's record is in a database, which has faults of its own."""

    def __init__(self, hosts, run, seed, server):
        super().__init__(hosts, run, seed)
        self.server = server
        self.acts += [self.freeze_store, self.restart_store]

    def freeze_store(self):
        """The database answers nobody for some seconds."""
        self.server.signal(signal.SIGSTOP)
        self.pause(self.rng.uniform(1, 13))
        self.server.signal(signal.SIGCONT)
        return None, "store"

    def restart_store(self):
        """The database crashes and recovers."""
        self.server.kill()
        self.pause(self.rng.uniform(0.2, 5))
        self.server.start()
        return None, "store"


class QuorumStorm(Storm):
    """Three of the hosts hold the run's record: one of them may be lost, then a requeue follows."""

    def __init__(self, hosts, run, seed):
        super().__init__(hosts, run, seed)
        self.acts += [self.kill_first_node, self.freeze_member, self.kill_member]
        self.n_requeued = 0

    def look_after(self):
        """Start agents that ended with 85 again, as a requeue does."""
        self.n_requeued += len(self.run.requeue())

    def kill_first_node(self):
        """The node of the endpoint loses power, with the server there."""
        self.hosts[0].kill_all()
        return lambda: self.run.start(self.hosts[0]), self.hosts[0].name

    def members(self):
        """Return the hosts with an etcd, and its process."""
        found = ((host, process(pid)) for host in self.hosts for pid in host.pids())
        return [(host, it.pid) for host, it in found if it is not None and it.name == "etcd"]

    def freeze_member(self):
        """One etcd stands still."""
        if not (members := self.members()):
            return None, "nobody"
        host, pid = self.rng.choice(members)
        os.kill(pid, signal.SIGSTOP)
        return lambda: signal_if_there(pid, signal.SIGCONT), host.name

    def kill_member(self):
        """One etcd is killed, as the OOM killer does."""
        if not (members := self.members()):
            return None, "nobody"
        host, pid = self.rng.choice(members)
        os.kill(pid, signal.SIGKILL)
        return None, host.name


def signal_if_there(pid, number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def unexplained(run):
    """Return the generations that ended without an incident and were not ended to take nodes in.

    Each with the last digits of its run's id, with which the name of the run's folder ends.
    """
    last = {}
    for line in run.lines():
        last[line.run[-8:]] = max(line.generation, last.get(line.run[-8:], 0))
    told = {
        (event["run_id"][-8:], event["payload"]["attempt"])
        for event in run.events("incident.recorded")
    }
    grown = {
        (event["run_id"][-8:], event["payload"]["generation"] - 1)
        for event in run.events("run.phase")
        if event["payload"]["phase"] == "form" and "more node" in event["payload"]["reason"]
    }
    return {(one, number) for one in last for number in range(last[one])} - told - grown


def ended_well(run):
    """Fail unless the run, once it is told that it made enough steps, ends with a true record."""
    run.enough()
    codes = run.finish(limit_s=240)
    assert set(codes.values()) == {0}, run.said()
    run.check_ledger()
    assert unexplained(run) == set()
    return codes


@contextlib.contextmanager
def storm_over_postgres(folder, seed):
    """Yield a storm over a run of four hosts that meet in a database."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(4, folder))
        server = stack.enter_context(running_server(address=hosts.address))
        url = stack.enter_context(server.database())
        endpoint = postgres_endpoint(url, hosts.address)
        options = {"nnodes": "1:4", "endpoint": endpoint, "env": JOB, "run_id": f"s{seed}"}
        run = stack.enter_context(ClusterRun(hosts, folder, *FLAGS, **options))
        yield PostgresStorm(hosts, run, seed, server)


@contextlib.contextmanager
def storm_over_a_quorum(folder, seed):
    """Yield a storm over a run of four hosts that need nothing else."""
    find_etcd()
    with Hosts(4, folder) as hosts:
        options = {"nnodes": "2:4", "env": JOB, "run_id": f"s{seed}", "quorum": True}
        with ClusterRun(hosts, folder, *FLAGS, *QUORUM_FLAGS, **options) as run:
            yield QuorumStorm(hosts, run, seed)


def blown(storms, folder, seed, n_faults):
    """Run a storm; return what was done, with the seconds each time."""
    with storms(folder, seed) as storm:
        run = storm.run
        run.start()
        run.wait_for_step(3)
        storm.blow(n_faults)
        ended_well(run)
        generations = len({(line.run, line.generation) for line in run.lines()})
        runs = len({line.run for line in run.lines()})
        return {"faults": storm.log, "generations": generations, "runs": runs}


STORMS = [
    pytest.param(storm_over_postgres, marks=pytest.mark.postgres, id="postgres"),
    pytest.param(storm_over_a_quorum, id="quorum"),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [3])
@pytest.mark.parametrize("storms", STORMS)
@pytest.mark.soak
def test_a_few_random_faults_over_four_hosts(tmp_path, storms, seed):
    blown(storms, tmp_path, seed, 3)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("storms", STORMS)
def test_a_hundred_random_faults_over_four_hosts(tmp_path, request, storms):
    seed = int(os.environ.get("SOAK_SEED", "20261121"))
    n_faults = int(os.environ.get("SOAK_FAULTS", "100"))
    began_s = time.monotonic()
    name = request.node.callspec.id
    keep_soak(
        blown(storms, tmp_path, seed, n_faults),
        command=f"SOAK_SEED={seed} SOAK_FAULTS={n_faults} make soak ({name})",
        seed=seed,
        began_s=began_s,
        name=name,
    )
