"""``slurm/burnin.sbatch`` in a real Slurm: pair tests of real processes, and one slow node.

The slow one waits before each message that it sends. Everything else is equal on all nodes, which
are one machine: a rate counts as slow below a tenth of the median, whatever runs beside this test.
"""

import fcntl
import json
import os

import pytest
from support.slow_sender import slow_sender
from support.slurm import SHIPPED

pytestmark = [
    pytest.mark.quick_disk,
    pytest.mark.slurm,
    pytest.mark.torch,
    pytest.mark.cc,
    pytest.mark.timeout(900),
]
BAD, LIMIT_S = "n3", 600
# What a login of root gives its jobs is the node's environment here. Its GPUs are a mock of NVML.
PROGRAM = """\
#!/bin/sh
. {home}/nodes/$SLURMD_NODENAME/env
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
[ "$SLURMD_NODENAME" != {bad} ] || export LD_PRELOAD={library}
exec {front} {home}/gpuops "$@"
"""
# Root of this machine is uid 1000 there: it may read Python, and gpuops takes it for a user.
AS_USER = "unshare --user --map-user=1000 --map-group=1000"


class Nightly:
    """The shipped job, on nodes of which one is slow."""

    def __init__(self, cluster, folder, history):
        self.cluster, self.folder, self.history = cluster, folder, history
        self.library = slow_sender(folder)

    def run(self, nodes, front=""):
        """Return the fields of the job at its end, and the result that it printed."""
        program = self.folder / "gpuops"
        text = PROGRAM.format(home=self.cluster.home, bad=BAD, library=self.library, front=front)
        program.write_text(text)
        program.chmod(0o755)
        script = self.folder / "burnin.sbatch"
        shipped = (SHIPPED / "burnin.sbatch").read_text()
        assert "/opt/gpuops/bin/gpuops" in shipped
        script.write_text(shipped.replace("/opt/gpuops/bin/gpuops", str(program)))
        out, err = self.folder / "out", self.folder / "err"
        words = ("--seconds=0.2", "--size=64KiB", "--slow-percent=90", "--timeout=200", "--json")
        job = self.cluster._run(
            *("sbatch", "--parsable", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}"),
            *(f"--output={out}", f"--error={err}", str(script), *words),
        ).stdout.strip()
        fields = self.cluster.finished(job, LIMIT_S)
        assert out.read_text(), err.read_text()
        return fields, json.loads(out.read_text())

    def found_about(self, node):
        """Return the findings of *node* in the run that it recorded itself."""
        ran = self.history.wait("check.ran", node, suite="sweep", trigger="sweep")
        return [(item["entity"]["id"], item["status"]) for item in ran["findings"]]

    def drained(self, nodes):
        return {name for name in nodes if "DRAIN" in self.cluster.state(name)[0]}


@pytest.fixture
def nightly(cluster, tmp_path, history):
    return Nightly(cluster, tmp_path, history)


def test_root_drains_exactly_the_slow_node_where_the_gate_enforces(cluster, nightly, history):
    nodes = ("n1", "n2", "n3", "n4")
    fields, result = nightly.run(nodes)
    named = [(v["kind"], v["entity"]["id"], v["status"]) for v in result["verdicts"]]
    assert named == [("node", BAD, "fail")], result
    assert fields["ExitCode"] == "1:0"
    assert cluster.drained_for(BAD, f"gpuops: fail sweep {BAD}")
    assert nightly.drained(nodes) == {BAD}
    assert nightly.found_about(BAD) == [(BAD, "fail")]
    assert history.wait("check.ran", "n4", suite="sweep", trigger="sweep", verdict="pass")
    assert history.wait("gate.decided", BAD, course="drain", hook="sweep")
    assert history.wait("incident.recorded", BAD, failure_class="host_hw.slow")
    assert cluster[BAD].drain_record()["stage"] == "set"


@pytest.mark.parametrize("who", ["root that observes", "a user"])
def test_who_only_observes_and_who_is_a_user_drains_nothing(cluster, nightly, history, who):
    nodes = ("n1", "n2", "n3")
    for name in nodes:
        state = cluster[name].home / "state"
        user = {"GPUOPS_STATE": f"{state}/user", "GPUOPS_SPOOL": f"{state}/user-spool"}
        cluster[name].set(**(user if who == "a user" else {"GPUOPS_MODE": "observe"}))
    _, result = nightly.run(nodes, AS_USER if who == "a user" else "")
    assert [(v["entity"]["id"], v["status"]) for v in result["verdicts"]] == [(BAD, "fail")]
    assert nightly.found_about(BAD) == [(BAD, "fail")]
    if who == "a user":
        assert history.events("gate.decided") == []
        assert history.events("incident.recorded") == []
    else:
        assert history.wait("gate.decided", BAD, course="would_drain", hook="sweep")
    assert nightly.drained(nodes) == set()
    assert cluster[BAD].drain_record() is None


def test_a_node_that_is_being_tested_is_left_out_and_named_with_the_pid(cluster, nightly):
    state = cluster["n2"].home / "state"
    state.mkdir()
    with (state / "node-test.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(json.dumps({"pid": os.getpid(), "suite": "burnin"}))
        lock.flush()
        _, result = nightly.run(("n1", "n2", "n4"))
    assert result["nodes"] == ["n1", "n4"]
    assert f"burnin (pid {os.getpid()}) holds" in result["unfit"]["n2"]
    assert {test["outcome"] for test in result["tests"]} == {"pass"}
