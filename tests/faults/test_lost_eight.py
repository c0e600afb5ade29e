"""Eight of many hosts are lost at once, a rack or all that would lead: the others go on.

``SOAK_AGENTS`` real agents (24) in namespaces, each with one worker without torch. ``SOAK_OUT`` is
the folder where the figures go, as JSON.
"""

import contextlib
import json
import os
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.cluster_run import ClusterRun, postgres_endpoint
from support.etcd import find_etcd
from support.hosts import Hosts
from support.ports import free_port
from support.postgres import running_server

from gpuops.control.membership import N_STANDBYS, succession_of

pytestmark = [pytest.mark.torch, pytest.mark.soak, pytest.mark.timeout(900)]
N_AGENTS = int(os.environ.get("SOAK_AGENTS", "24"))
LONG = {"JOB_STEPS": "100000", "JOB_PAUSE_S": "0.5"}
LIMIT_S = 300
GOAL_S = 30


def endpoint_of(store, hosts, stack):
    """Return where the agents meet, and the flags for it."""
    if store == "postgres":
        running = stack.enter_context(running_server(address=hosts.address))
        url = stack.enter_context(running.database())
        return postgres_endpoint(url, hosts.address), ()
    # A quorum outlives its rack, a server of one host is on one that lives on.
    host = hosts[0] if store == "quorum" else hosts[-1]
    endpoint = f"{host.address}:{free_port(host.address)}"
    return endpoint, (f"--rdzv-conf=quorum={int(store == 'quorum')}",)


def domains_in(folder, hosts):
    """Return the path of a file that says which hosts share a rack of eight."""
    path = folder / "domains"
    racks = (f"{host.name} rack{at // N_STANDBYS}\n" for at, host in enumerate(hosts))
    path.write_text("".join(racks))
    return path


def lost_of(which, hosts):
    """Return the eight hosts that are lost: ranks 0 to 7, or those that would lead first."""
    members = [SimpleNamespace(agent=host, domain=()) for host in hosts]
    return list(hosts)[:N_STANDBYS] if which == "rack" else succession_of(members)[:N_STANDBYS]


def lose(hosts):
    """Kill every process of *hosts* at once; return when (wall time)."""
    pids = [pid for host in hosts for pid in host.pids()]
    lost_s = time.time()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return lost_s


def keep(row):
    """Write the figures down, where ``SOAK_OUT`` says so; those of earlier tests stay."""
    print(json.dumps(row), flush=True)
    if out := os.environ.get("SOAK_OUT"):
        path = Path(out, "lost_eight.json")
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        body = {
            "command": f'SOAK_AGENTS={N_AGENTS} make soak PYTEST_ARGS="-k lost_eight"',
            "date": f"{datetime.now(tz=UTC):%Y-%m-%d}",
            "what": "the last survivor is seated again, and all have made a step; s after the loss",
            "agents": N_AGENTS,
            "goal_s": GOAL_S,
            "rows": [*rows, row],
        }
        path.write_text(json.dumps(body, indent=2) + "\n")


@pytest.mark.parametrize(
    ("store", "which"),
    [
        ("tcp", "rack"),
        ("tcp", "standbys"),
        ("quorum", "rack"),
        pytest.param("postgres", "rack", marks=pytest.mark.postgres),
        pytest.param("postgres", "standbys", marks=pytest.mark.postgres),
    ],
)
def test_the_others_go_on_within_30_s(tmp_path, store, which):
    if store == "quorum":
        find_etcd()
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(N_AGENTS, tmp_path))
        endpoint, flags = endpoint_of(store, hosts, stack)
        if which == "rack":
            flags += (f"--ckpt-domain={domains_in(tmp_path, hosts)}",)
        flags += ("--health-gate=off", "--min-nodes=1")  # the first start waits for all of them
        options = {"script": "fake_steps.py", "endpoint": endpoint, "env": LONG}
        run = ClusterRun(hosts, tmp_path, *flags, **options)
        for rank, host in enumerate(hosts):
            run.start(host, flags=(f"--node-rank={rank}",))
        run.wait(lambda: steppers(run, 0) == N_AGENTS, "the first steps", LIMIT_S)
        lost = lost_of(which, hosts)
        left = [host for host in hosts if host not in lost]
        lost_s = lose(lost)

        run.wait(lambda: steppers(run, 1) == len(left), "the next generation", LIMIT_S)
        steps_s = time.time() - lost_s
        run.wait(lambda: len(seated_s(run, lost_s)) == len(left), "the word of each agent", LIMIT_S)
        decided_s = max(seated_s(run, lost_s))
        figures = {"seated_s": round(decided_s, 1), "steps_s": round(steps_s, 1)}
        keep({"store": store, "lost": which, **figures})
        assert decided_s < GOAL_S
        run.enough()
        assert set(run.finish(*left, limit_s=LIMIT_S).values()) == {0}, run.said()
        assert run.orphans() == set()
        assert {line.generation for line in run.lines()} == {0, 1}


def steppers(run, generation):
    """Return how many ranks have made a step in *generation*."""
    made = (x for x in run.lines() if x.what == "step" and x.generation == generation)
    return len({line.rank for line in made})


def seated_s(run, since_s):
    """Return how long after *since_s* (wall time) each agent was seated once more."""
    started = [event["payload"]["seated_us"] / 1e6 for event in run.events("attempt.started")]
    return [at_s - since_s for at_s in started if at_s > since_s]
