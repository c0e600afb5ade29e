"""``gpuops run --preflight=sweep``: real agents whose nodes test each other before they train."""

import json
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import psutil
import pytest
from support.ports import free_port
from support.runs import JOBS, Run, is_alive, wait_until

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]
LIMIT_S = 300.0
# What a pair's program prints on each node, in the place of a test: $BAD fails with everybody.
SITE = """
import json, os, sys
if "gpuops.worker.burnin.pair" in sys.orig_argv:
    is_bad = os.environ["SLURMD_NODENAME"] == os.environ["BAD"]
    print(json.dumps({"failed": "planted"} if is_bad else {"busbw_gbs": 1.0}), flush=True)
    os._exit(0)
"""


@pytest.fixture
def agents_of(tmp_path):
    """Return a context manager: an agent on each of *nodes*.

    *bad*: the node that fails each planted test; None: the tests are real.
    """

    @contextmanager
    def start(name, nodes, *flags, bad=None, env=None):
        planted = {"OMP_NUM_THREADS": "1"}
        if bad is not None:
            (tmp_path / "sitecustomize.py").write_text(SITE)
            planted |= {"PYTHONPATH": str(tmp_path), "BAD": bad}
        shared = {"GPUOPS_TOKEN": "4f" * 16, "GPUOPS_STORE": f"sqlite:///{tmp_path}/store.db"}
        words = (
            *("--rdzv-backend=c10d", "--rdzv-id=job", "--local-addr=127.0.0.1"),
            *(f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-conf=quorum=0"),
            *("--preflight=sweep", "--health-gate=off", *flags),
        )
        with ExitStack() as stack:
            yield {
                node: stack.enter_context(
                    Run(
                        tmp_path / name / node,
                        *(*words, JOBS / "plain.py"),
                        nproc=1,
                        env={**shared, **planted, "SLURMD_NODENAME": node, **(env or {})},
                    )
                )
                for node in nodes
            }

    return start


@pytest.fixture
def run(agents_of):
    """Return a function that returns agents which have come to their end; see `agents_of`."""

    def to_the_end(*words, **how):
        with agents_of(*words, **how) as agents:
            for agent in agents.values():
                agent.finish(LIMIT_S)
        return agents

    return to_the_end


def swept(tmp_path):
    """Return the last sweep in the store, once all of it is there."""
    store = f"sqlite:///{tmp_path}/store.db"

    def shown():
        words = ("sweep", "show", "--json", "--store", store)
        done = subprocess.run(
            [sys.executable, "-m", "gpuops", *words], capture_output=True, text=True, check=False
        )
        return json.loads(done.stdout) if done.returncode == 0 and not done.stderr else None

    return wait_until(shown, what="the whole sweep in the store")


def codes(agents):
    return {node: agent.process.returncode for node, agent in agents.items()}


def said(agents):
    return "\n".join(agent.said() for agent in agents.values())


def test_two_nodes_are_swept_once_and_again_when_the_sweep_is_old(run, tmp_path):
    first = run("first", ["n1", "n2"], "--nnodes=2")
    assert codes(first) == {"n1": 0, "n2": 0}, said(first)
    for node, agent in first.items():
        assert "gpuops: the nodes of this run are swept in pairs" in agent.said()
        assert f"node {node}: pass: passed 1 pair tests" in agent.said(), said(first)
    sweep = swept(tmp_path)
    assert (sweep["nodes"], [t["outcome"] for t in sweep["tests"]]) == (["n1", "n2"], ["pass"])
    assert sweep["tests"][0]["value"] > 0

    young = run("young", ["n1", "n2"], "--nnodes=2")
    assert codes(young) == {"n1": 0, "n2": 0}, said(young)
    for node, agent in young.items():
        assert (
            f"the sweep: node {node}: skip: all nodes were swept in the last 24 h" in agent.said()
        )
    assert swept(tmp_path)["sweep"] == sweep["sweep"]

    old = run("old", ["n1", "n2"], "--nnodes=2", env={"GPUOPS_BURNIN_SWEEP_MAX_AGE": "1s"})
    assert codes(old) == {"n1": 0, "n2": 0}, said(old)
    assert "node n1: pass: passed 1 pair tests" in said(old)
    wait_until(lambda: swept(tmp_path)["sweep"] != sweep["sweep"], what="a second sweep")


def test_a_run_on_one_node_has_nothing_to_sweep_and_trains(run):
    agents = run("one", ["n1"], "--nnodes=1")

    assert codes(agents) == {"n1": 0}, said(agents)
    assert "--preflight=sweep: a run on one node has no pairs of nodes" in said(agents)


def test_of_two_nodes_that_fail_with_each_other_nobody_is_blamed(run):
    agents = run("two", ["n1", "n2"], "--nnodes=2", bad="n2")

    assert codes(agents) == {"n1": 0, "n2": 0}, said(agents)
    for agent in agents.values():
        assert "pair n1,n2: fail: failed: failed 2 of 2 times; of two nodes nobody" in agent.said()


def test_the_node_that_fails_with_everybody_stays_out_and_the_others_train(run):
    agents = run("three", ["n1", "n2", "n3"], "--nnodes=2:3", bad="n2")

    assert codes(agents) == {"n1": 0, "n2": 86, "n3": 0}, said(agents)
    out = agents["n2"]
    assert "the check sweep failed: failed: failed with n1, n3" in out.said()
    (report,) = out.payloads("agent.report")
    (incident,) = out.incidents()
    assert report["kind"] == "gate_failed"
    assert (report["failure_class"], incident["failure_class"]) == ("network.node_failing",) * 2
    assert incident["culprits"] == [{"kind": "node", "id": "n2"}]
    for node in ("n1", "n3"):
        assert f"node {node}: pass: passed 1 pair tests" in agents[node].said()


def leading(agents):
    """Return which node leads the sweep, and its process there; None before it has a server."""
    found = [process.info for process in psutil.process_iter(["pid", "ppid", "cmdline"])]
    nodes, parents = {agents[node].process.pid: node for node in agents}, {x["ppid"] for x in found}
    leaders = (x for x in found if x["ppid"] in nodes and "--lead" in (x["cmdline"] or ()))
    return next(((nodes[x["ppid"]], x["pid"]) for x in leaders if x["pid"] in parents), None)


def test_a_leader_whose_agent_is_killed_ends_and_the_others_train_unswept(agents_of):
    with agents_of("killed", ["n1", "n2"], "--nnodes=1:2") as agents:
        node, pid = wait_until(lambda: leading(agents), what="a leader")
        other = agents["n2" if node == "n1" else "n1"]
        other.wait_for_output("the nodes of this run are swept in pairs")
        agents[node].process.kill()
        wait_until(lambda: not is_alive(pid), what="the end of the leader")

        assert other.finish(LIMIT_S) == 0, said(agents)
    assert "gpuops: the sweep gave no result (exit code 75: " in other.said()
