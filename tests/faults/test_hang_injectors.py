"""Each fault inside a worker that stops its job, on four hosts in namespaces: who is named, when.

Most hosts see only that their own ranks wait. The figures go where ``SOAK_OUT`` says.
"""

import json
import os
import random
import re
import time

import pytest
from support.cluster_run import ClusterRun
from support.faulty import culprits
from support.hosts import Hosts
from support.soak_result import keep_soak

pytestmark = [pytest.mark.torch, pytest.mark.soak, pytest.mark.timeout(900)]
COMMAND = "SOAK_OUT=FILE python -m pytest -m soak tests/faults/test_hang_injectors.py"
SEED = int(os.environ.get("SOAK_SEED", "1"))
TIMEOUT_S, STEP = 6, 8
# By kind: the ranks of each host, the class, and what the account says of the rank.
HANGS = {
    "sleep": (1, "hang.no_progress", "rank {} has not called all_reduce("),
    "hold-lock": (2, "hang.gil_held", "it holds Python's global interpreter lock"),
    "receive-alone": (1, "hang.collective", "rank {} has not called all_reduce("),
    "stuck-loader": (2, "hang.no_progress", "rank {} has not called all_reduce("),
    "skip-collective": (1, "hang.deadlock", "rank {} waits in one group for ranks that wait for"),
    "cross-groups": (2, "hang.deadlock", "rank {} waits in one group for ranks that wait for it"),
    "other-operation": (2, "collective.mismatch", "and broadcast(8 Float) on rank {}"),
}
# By kind: the call of the rank. Of these gloo ends a rank that receives more than it expects.
MISMATCHES = {"other-shape": "all_reduce(16 Float)", "other-dtype": "all_reduce(8 Double)"}
BEGAN_S, ROWS = time.monotonic(), []


class FaultyHosts:
    """A run over four hosts with a fault of one rank in its first generation; it has ended."""

    def __init__(self, kind, nproc, folder):
        self.rank = random.Random(f"{kind} {SEED}").randrange(4 * nproc)
        self._env = {"GPUOPS_STORE": f"sqlite:///{folder}/gpuops.db"}
        drill = {"GPUOPS_DRILL": f"{kind}:rank={self.rank},step={STEP}"}
        flags = ("--health-gate=off", "--allow-drills", f"--hang-timeout={TIMEOUT_S}")
        job = {"script": "train.py", "args": ("--steps=20",), "nproc": nproc}
        with (
            Hosts(4, folder) as hosts,
            ClusterRun(hosts, folder, *flags, **job, env={**drill, **self._env}) as run,
        ):
            run.start()
            self.codes, self.said = set(run.finish(limit_s=300).values()), run.said()
            consoles = {agent.host.name: agent.said() for agent in run.agents}
            self.incidents = self._incidents(hosts[0])
            self.report = " ".join(hosts[0].gpuops("report", env=self._env).stdout.split())
        is_first = re.compile(
            rf"rank {self.rank} step {STEP - 1}\n(?s:.*)rank {self.rank} step 1\n"
        )
        (self.node,) = (name for name, text in consoles.items() if is_first.search(text))

    def _incidents(self, host):
        listed = self._asked(host, "ls")["incidents"]
        return [self._asked(host, "show", each["id"])["incident"] for each in listed]

    def _asked(self, host, *words):
        done = host.gpuops("incident", *words, "--json", env=self._env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def keep(kind, run, incident):
    """Write down whom *incident* names and how long it took from the last beat."""
    spent_s = incident["lost_seconds_by_phase"]
    row = {
        "kind": kind,
        "rank": run.rank,
        "node": run.node,
        "failure_class": incident["failure_class"],
        "culprits": sorted(map(" ".join, culprits(incident))),
        "noticed_s": round(spent_s["detect"], 2),
        "verdict_s": round(spent_s["detect"] + spent_s["decide"], 2),
    }
    ROWS.append(row)
    keep_soak(
        {"hang_timeout_s": TIMEOUT_S, "n_hosts": 4, "runs": ROWS},
        command=COMMAND,
        seed=SEED,
        began_s=BEGAN_S,
    )
    print(json.dumps(row), f"\n{incident['title']}\n{incident['culprit_how']}", flush=True)


@pytest.mark.parametrize("kind", HANGS)
def test_the_rank_that_hangs_its_job_is_named_with_its_node_and_class(tmp_path, kind):
    nproc, failure_class, says = HANGS[kind]
    run = FaultyHosts(kind, nproc, tmp_path)
    (incident,) = run.incidents
    keep(kind, run, incident)

    assert run.codes == {0}, run.said
    assert culprits(incident) == {("rank", str(run.rank)), ("node", run.node)}, incident
    assert incident["failure_class"] == failure_class
    assert says.format(run.rank) in incident["culprit_how"]
    assert incident["state"] == "closed"
    assert f"blame rank {run.rank} on {run.node} " in run.report, run.report


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("kind", MISMATCHES)
def test_another_shape_or_dtype_is_a_mismatch_and_its_rank_named_unless_gloo_ends_one(
    tmp_path, kind, nproc
):
    run = FaultyHosts(kind, nproc, tmp_path)
    (incident,) = run.incidents
    keep(kind, run, incident)

    assert run.codes == {0}, run.said
    assert incident["failure_class"] == "collective.mismatch", incident
    assert incident["state"] == "closed"
    if "SIGABRT" in incident["title"]:
        assert "it, or a rank that sent to it, called another one" in incident["culprit_how"]
    else:
        assert culprits(incident) == {("rank", str(run.rank)), ("node", run.node)}, incident
        assert f"and {MISMATCHES[kind]} on rank {run.rank}" in incident["culprit_how"]
