"""What breaks a run on several nodes, and how long until it steps again: beside torchrun.

Nodes are network namespaces joined by a bridge, with real gloo traffic between them; each scenario
is run with both launchers in turn, round after round. The clock starts with the fault and stops
with the first step of the new attempt. A peer that never recovers takes the whole limit each time,
so it runs in the first rounds only. torchrun gets every chance: its store is not shared with
the workers (with the default it often does not come back from anything, see bench_recovery), its
last call is shortened to 3 s, and its budget is the same. A launcher without a new step within the
limit has not recovered.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.cluster_run import ClusterRun, postgres_endpoint
from support.hosts import Hosts, Loopbacks
from support.postgres import running_server
from support.runs import is_alive

LIMIT_S = 60.0
START_S = 90.0
LONG = {"JOB_STEPS": "100000", "JOB_PAUSE_S": "0.1", "JOB_SAVE_EVERY": "10"}


class Gpuops(ClusterRun):
    """``gpuops run``."""

    name = "gpuops run"


class Torchrun(ClusterRun):
    """``torchrun`` of the same torch, on the same hosts, with the same script."""

    name = "torchrun"

    def command(self, host, flags):
        is_host = int(self.endpoint.startswith(host.address))
        ours = ("--hang-timeout", "--grow-after", "--spares")
        kept = [word for word in (*self.flags, *flags) if not word.startswith(ours)]
        return [
            *(sys.executable, "-m", "torch.distributed.run", *kept),
            "--max-restarts=3" if not any("max-restarts" in w for w in kept) else "--log-dir=",
            f"--rdzv-conf=is_host={is_host},last_call_timeout=3",
            f"--local-addr={host.address}",
        ]

    def start(self, *hosts, **options):
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        try:
            return super().start(*hosts, **options)
        finally:
            del os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]


def wait_for(condition, limit_s):
    """Return the first true value of *condition*, None after *limit_s*."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    return None


@contextlib.contextmanager
def running(launcher, n_hosts, *flags, env=None, on_postgres=False, **options):
    """Start *launcher* on *n_hosts* new hosts; give the run once it steps, with its hosts."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make = Hosts if n_hosts > 1 else Loopbacks
        hosts = stack.enter_context(make(n_hosts, folder))
        if on_postgres:
            server = stack.enter_context(running_server(address=hosts.address))
            url = stack.enter_context(server.database())
            options["endpoint"] = postgres_endpoint(url, hosts.address)
        everything = {**LONG, **(env or {})}
        run = stack.enter_context(launcher(hosts, folder, *flags, env=everything, **options))
        run.start()
        run.wait_for_step(12, limit_s=START_S)
        yield run, hosts


def steps_after(run, since_ns, old_pids, limit_s=LIMIT_S):
    """Return the seconds from *since_ns* to the first step of a new worker, None for never."""

    def look():
        new = [x for x in run.lines() if x.what == "step" and x.pid not in old_pids]
        return min((line.mono_ns for line in new), default=None)

    at_ns = wait_for(look, limit_s)
    return None if at_ns is None else (at_ns - since_ns) / 1e9


def pids_of(run):
    return {line.pid for line in run.lines()}


def frozen_peer(launcher):
    """SIGSTOP to everything on one of two nodes, then SIGCONT."""
    with running(launcher, 2, "--grow-after=2", nnodes="1:2") as (run, hosts):
        old, of_frozen = pids_of(run), run.worker_pids(hosts[1])
        since_ns = time.monotonic_ns()
        hosts[1].freeze()
        result = {"stepping_again_s": steps_after(run, since_ns, old)}
        if result["stepping_again_s"] is None:
            return result
        thawed_ns = time.monotonic_ns()
        hosts[1].thaw()
        gone = wait_for(lambda: not any(map(is_alive, of_frozen)), LIMIT_S)
        result["old_workers_gone_s"] = (time.monotonic_ns() - thawed_ns) / 1e9 if gone else None
        with_both = pids_of(run)
        again = wait_for(lambda: run.worker_pids(hosts[1]) - with_both, LIMIT_S)
        result["rejoined_s"] = (time.monotonic_ns() - thawed_ns) / 1e9 if again else None
        return result


def lost_first_node(launcher):
    """The node with rank 0 dies with all on it, the store's host among them; three, at least two.

    gpuops meets on Postgres here; torchrun has no store that outlives its node.
    """
    with running(launcher, 3, nnodes="2:3", on_postgres=launcher is Gpuops) as (run, hosts):
        old = pids_of(run)
        first = next(x.pid for x in run.lines() if x.rank == 0 and x.what == "step")
        victim = next(host for host in hosts if first in host.pids())
        since_ns = time.monotonic_ns()
        victim.kill_all()
        return {"stepping_again_s": steps_after(run, since_ns, old)}


def lost_agent(launcher):
    """SIGKILL to the agent on one of two nodes; its workers are left."""
    with running(launcher, 2, "--grow-after=never", nnodes="1:2") as (run, hosts):
        old, orphans = pids_of(run), run.worker_pids(hosts[1])
        since_ns = time.monotonic_ns()
        run.agent(hosts[1]).process.kill()
        gone = wait_for(lambda: not any(map(is_alive, orphans)), 20)
        gone_s = (time.monotonic_ns() - since_ns) / 1e9 if gone else None
        return {
            "orphans_gone_s": gone_s,
            "stepping_again_s": steps_after(run, since_ns, old),
        }


def deterministic_exception(launcher):
    """The same exception at the same step, a budget of five."""
    with tempfile.TemporaryDirectory() as name, Loopbacks(1, Path(name)) as hosts:
        env = {**LONG, "JOB_AT": "0:5", "JOB_DEED": "raise", "JOB_SAVE_EVERY": "100"}
        with launcher(hosts, Path(name), "--max-restarts=5", nproc=2, env=env) as run:
            began = time.monotonic()
            run.start()
            wait_for(lambda: run.agents[0].code is not None, 120)
            return {
                "seconds": time.monotonic() - began,
                "attempts": len({line.pid for line in run.lines() if line.rank == 0}),
                "exit_code": run.agents[0].code,
            }


def hang(launcher):
    """One rank sleeps for ever at step 20; the limit is 10 s."""
    env = {"JOB_AT": "1:20:0", "JOB_DEED": "sleep"}
    with running(launcher, 1, "--hang-timeout=10", nproc=2, env=env) as (run, _hosts):
        old = pids_of(run)
        wait_for(lambda: any(x.number == 19 and x.rank == 1 for x in run.lines()), 30)
        last_ns = max(x.mono_ns for x in run.lines() if x.what == "step")
        result = {"stepping_again_s": steps_after(run, last_ns, old)}
        result["detected_s"] = None
        if result["stepping_again_s"] is not None:
            ended = run.events("agent.report")
            wall_us = time.time_ns() // 1000 - time.monotonic_ns() // 1000
            result["detected_s"] = ended[0]["t_us"] / 1e6 - (last_ns / 1e9 + wall_us / 1e6)
        return result


def partition(launcher):
    """One of three nodes is cut off; at least two must train."""
    with running(launcher, 3, "--grow-after=never", nnodes="2:3") as (run, hosts):
        old, alone = pids_of(run), run.worker_pids(hosts[2])
        since_ns = time.monotonic_ns()
        hosts[2].cut()
        gone = wait_for(lambda: not any(map(is_alive, alone)), LIMIT_S)
        gone_s = (time.monotonic_ns() - since_ns) / 1e9 if gone else None
        again_s = steps_after(run, since_ns, old)
        lines = [x for x in run.lines() if x.what == "step"]
        last_old = max((x.mono_ns for x in lines if x.pid in old), default=0)
        first_new = min((x.mono_ns for x in lines if x.pid not in old), default=None)
        return {
            "cut_workers_gone_s": gone_s,
            "stepping_again_s": again_s,
            "two_generations_at_once": first_new is not None and first_new < last_old,
        }


def spare(launcher):
    """One of two nodes dies, a third waits as a spare."""
    with running(launcher, 3, "--spares=1", nnodes="2") as (run, hosts):
        old = pids_of(run)
        by_host = {host.name: run.worker_pids(host) for host in hosts}
        seated = [host for host in hosts if by_host[host.name]]
        ranks = {x.pid: x.rank for x in run.lines()}
        before = {h.name: {ranks[p] for p in by_host[h.name]} for h in seated}
        since_ns = time.monotonic_ns()
        seated[1].kill_all()
        again_s = steps_after(run, since_ns, old)

        def both():
            found = [x for x in run.lines() if x.what == "step" and x.pid not in old]
            return found if len({x.rank for x in found}) == 2 else None

        new = wait_for(both, 20) or []
        kept = {x.rank for x in new if x.pid in run.worker_pids(seated[0])}
        return {
            "stepping_again_s": again_s,
            "world_size": len({x.rank for x in new}),
            "survivor_kept_its_rank": kept == before[seated[0].name],
        }


SCENARIOS = {
    "peer node frozen (SIGSTOP)": frozen_peer,
    "rank-0 node and store host lost": lost_first_node,
    "agent killed, workers left": lost_agent,
    "deterministic exception, budget 5": deterministic_exception,
    "one rank sleeps for ever": hang,
    "network partition 2 + 1": partition,
    "spare takes over": spare,
}


def measured(scenario, launcher):
    """Return the figures of one run; what went wrong, where it did not come as far as the fault."""
    try:
        return scenario(launcher)
    except AssertionError as exc:
        return {"error": str(exc).splitlines()[0][:200]}


def shown(value):
    """Return a figure for people."""
    if value is None:
        return "never"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def summary(results):
    """Return the median of each figure over the rounds; how often there was one, if not always."""
    found = {}
    for key in dict.fromkeys(key for result in results for key in result):
        values = [result[key] for result in results if key in result]
        figures = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(figures) == len(values):
            found[key] = statistics.median(figures)
        elif figures:
            found[key] = {"times": f"{len(figures)} of {len(values)}"}
            found[key]["median"] = statistics.median(figures)
        else:
            found[key] = values[0] if len(set(values)) == 1 else values
    return found


def main():
    """Run all scenarios and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-rounds", type=int, default=1)
    parser.add_argument("--only", help="part of a scenario's name")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    table = run_all(args)
    if args.out:
        args.out.write_text(json.dumps(table, indent=2) + "\n")


def run_all(args):
    """Return every figure of every round, and their medians."""
    rounds = {}
    for number in range(args.rounds):
        for name, scenario in SCENARIOS.items():
            if args.only and args.only not in name:
                continue
            for launcher in (Gpuops, Torchrun)[: 2 if number < args.peer_rounds else 1]:
                result = measured(scenario, launcher)
                rounds.setdefault(name, {}).setdefault(launcher.name, []).append(result)
                figures = ", ".join(f"{k} {shown(v)}" for k, v in result.items())
                line = f"{number + 1}/{args.rounds} {name:34} {launcher.name:11} {figures}"
                print(line, flush=True)
    medians = {
        name: {launcher: summary(results) for launcher, results in by_launcher.items()}
        for name, by_launcher in rounds.items()
    }
    return {"limit_s": LIMIT_S, "medians": medians, "rounds": rounds}


if __name__ == "__main__":
    main()
