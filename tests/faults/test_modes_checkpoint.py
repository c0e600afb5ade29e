"""Checkpoints of a run on several nodes: whole nodes are lost, and their state is not."""

import os
import re
import time

import pytest
from support.cluster_run import ClusterRun
from support.hosts import Hosts

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


@pytest.fixture
def hosts(tmp_path):
    with Hosts(3, tmp_path) as made:
        yield made


def started(hosts, folder, *flags, args=(), **options):
    words = ["--diary", folder / "job" / "steps", "--steps", "100000", "--pause", "0.05", *args]
    run = ClusterRun(hosts, folder, *flags, script="resumes.py", args=words, **options)
    run.start()
    return run


def loads(run, generation):
    """Return the steps that the ranks of *generation* went on from."""
    lines = [line for line in run.lines() if line.generation == generation]
    return {line.number for line in lines if line.what == "load"}


def persisted(folder):
    """Return the shards in files anywhere below; folders may go meanwhile."""
    names = [name for _folder, _folders, names in os.walk(folder) for name in names]
    return [name for name in names if name.endswith(".safetensors")]


def tiers(run):
    """Return where ranks had their states from."""
    return {event["payload"]["tier"] for event in run.events("checkpoint.restored")}


@pytest.mark.soak
def test_a_lost_node_is_replaced_by_a_spare_that_has_its_state_from_a_peers_memory(hosts, tmp_path):
    run = started(hosts, tmp_path, "--spares", "1", nnodes="2")
    run.wait_for_step(200, limit_s=150)
    busy = [host for host in hosts if run.worker_pids(host)]
    victim = busy[1] if busy[0] is hosts[0] else busy[0]
    lost_ns = time.monotonic_ns()

    victim.kill_all()

    run.seconds_to_generation(1, lost_ns)
    steps = [line for line in run.lines() if (line.what, line.generation) == ("step", 0)]
    step = max(line.number for line in steps)
    (found,) = loads(run, 1)
    assert 0 < found <= step
    run.wait(lambda: len(run.events("checkpoint.restored")) == 2, "word of what was loaded")
    assert tiers(run) == {"memory", "peer"}
    assert persisted(tmp_path) == []


def test_two_that_go_on_without_the_third_have_its_state_and_persist_into_one_directory(
    hosts, tmp_path
):
    directory = tmp_path / "ckpt"
    flags = ("--ckpt-dir", directory, "--grow-after", "never")
    wide = ("--width", "2000")  # 1.75 MB that all ranks hold alike
    run = started(hosts, tmp_path, *map(str, flags), nnodes="2:3", args=wide)
    run.wait_for_step(200, limit_s=150)
    run.wait(lambda: list(directory.glob("step-*/manifest.json")), "the first that persists")

    hosts[2].kill_all()

    run.wait_for_generation(1)
    (found,) = loads(run, 1)
    assert found > 0
    assert "persistent" not in tiers(run)
    copies = [event["payload"] for event in run.events("checkpoint.replicated")]
    assert copies
    assert all(copy["bytes"] < 200_000 * copy["count"] for copy in copies)


def digests(run):
    """Return what each rank said of its weights, random numbers and losses at the end."""
    said = "".join(agent.said() for agent in run.agents)
    return dict(re.findall(r"rank (\d+) weights (\w{16}) after", said))


@pytest.mark.parametrize(
    ("kind", "nproc"),
    [
        pytest.param("plain", 1, marks=pytest.mark.soak),
        pytest.param("ddp", 1, marks=pytest.mark.soak),
        pytest.param("ddp", 2, marks=pytest.mark.soak),
        ("fsdp", 1),
        pytest.param("fsdp", 2, marks=pytest.mark.soak),
        pytest.param("hsdp", 2, marks=pytest.mark.soak),
    ],
)
def test_a_run_that_lost_a_node_ends_bit_for_bit_as_one_that_did_not(hosts, tmp_path, kind, nproc):
    """Weights, random numbers and every loss; the state of the lost ranks came from a peer."""
    words, options = ["--kind", kind, "--steps", "120"], {"nproc": nproc, "nnodes": "2"}
    calm = started(hosts[:2], tmp_path / "calm", args=[*words, "--pause", "0"], **options)
    assert set(calm.finish(limit_s=150).values()) == {0}, calm.said()
    undisturbed = digests(calm)
    assert len(undisturbed) == 2 * nproc
    run = started(hosts, tmp_path / "lost", "--spares", "1", args=words, run_id="lost", **options)
    run.wait_for_step(50, limit_s=150)
    busy = [host for host in hosts if run.worker_pids(host)]
    victim = busy[1] if busy[0] is hosts[0] else busy[0]

    victim.kill_all()

    left = [host for host in hosts if host is not victim]
    assert set(run.finish(*left, limit_s=150).values()) == {0}, run.said()
    (found,) = loads(run, 1)
    assert 0 < found < 120
    assert tiers(run) == {"memory", "peer"}
    assert digests(run) == undisturbed
    assert persisted(tmp_path) == []
