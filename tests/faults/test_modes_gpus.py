"""GPUs that fail under a run, before it, and after its workers: with a driver in C for NVML."""

import pytest
from support import mock_nvml
from support.accounts import check_account
from support.fake_root import FakeRoot
from support.faulty import FaultyRun, culprits
from support.mock_nvml import UUIDS, addresses, shape
from support.one_at_a_time import hung_driver
from support.runs import wait_until

pytestmark = [pytest.mark.quick_disk, pytest.mark.torch, pytest.mark.cc, pytest.mark.timeout(240)]
HEALTHY = shape("h100", 2)
GIB = 2**30
LONG = ("none", "--steps", 400, "--pause", 0.1)


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    return mock_nvml.build(tmp_path_factory.mktemp("nvml"))


def test_a_gpu_that_falls_off_the_bus_ends_the_run_on_this_node(mock, tmp_path):
    """Mode 9: Xid 79 is the device's; without another node the job is to go elsewhere."""
    env = mock.env(HEALTHY)
    with FaultyRun(tmp_path, (), LONG, env=env) as run:
        run.start()
        run.wait_for_step(3)
        mock_nvml.change(env, HEALTHY + "\nxid 1 79")
        assert run.ended() == 86, run.said()

    blamed = ("gpu", UUIDS[1]), ("node", "n0")
    check_account(run, "gpu_hw.fell_off_bus", *blamed, actions=["exclude-node", "requeue"])
    assert run.rules() == ["node.unhealthy"]


def test_a_gpu_that_falls_off_the_bus_excludes_its_node(mock, tmp_path):
    """Mode 9: the other node goes on alone."""
    healthy, sick = mock.env(HEALTHY), mock.env(HEALTHY + "\n# of the node that fails")
    with FaultyRun(tmp_path, (), LONG, n_nodes=2, nproc=1, nnodes="1:2") as run:
        run.start(run.hosts[0], env=healthy)
        run.start(run.hosts[1], env=sick)
        run.wait_for_step(3)
        mock_nvml.change(sick, HEALTHY + "\nxid 0 79")
        assert run.finish(run.hosts[1]) == {"n1": 86}, run.said()
        run.wait_for_generation(1)

    assert run.rules() == ["node.excluded"]
    blamed = ("gpu", UUIDS[0]), ("node", "n1")
    check_account(run, "gpu_hw.fell_off_bus", *blamed, actions=["exclude-node", "restart"])


def test_an_xid_of_the_applications_names_the_failure_and_blames_no_node(mock, tmp_path):
    """Mode 9: Xid 31 and then the worker's end: a restart with the class that the GPU told."""
    env = mock.env(HEALTHY)
    words = ("abort", "--rank", 1, "--at", 60, "--generation", 0, "--steps", 70, "--pause", 0.1)
    with FaultyRun(tmp_path, (), words, env=env) as run:
        run.start()
        run.wait_for_step(2)
        mock_nvml.change(env, HEALTHY + "\nxid 1 31")
        assert run.ended() == 0, run.said()

    assert run.generations() == [0, 1]
    assert run.rules() == ["restart"]
    check_account(run, "gpu_fault.illegal_access", ("gpu", UUIDS[1]), actions=["restart"])


@pytest.mark.parametrize(
    ("sickness", "failure_class"),
    [
        ("lost 1", "gpu_hw.fell_off_bus"),
        pytest.param(
            "delay * nvmlDeviceGetPowerUsage 600000", "gpu_sw.driver_hang", marks=pytest.mark.soak
        ),
    ],
    ids=["fails", "hangs"],
)
def test_a_sick_node_does_not_join(mock, tmp_path, sickness, failure_class):
    """Mode 12: no worker is started, exit 86, and an incident that says why."""
    root = FakeRoot(tmp_path / "root")
    for address in addresses(2):
        root.gpu(address)
    env = {**mock.env(f"{HEALTHY}\n{sickness}"), "GPUOPS_ROOT": str(root.path)}
    with hung_driver(), FaultyRun(tmp_path, (), LONG, gate=True, env=env) as run:
        run.start()
        assert run.ended(limit_s=120) == 86, run.said()

    assert run.lines() == []
    assert run.payloads("node.excluded") != []
    (incident,) = run.incidents()
    assert ("node", "n0") in culprits(incident)
    assert incident["actions"] == ["exclude-node"]
    assert incident["failure_class"] == failure_class


def test_a_gate_that_cannot_judge_lets_the_node_join(mock, tmp_path):
    """Mode 12: our own failure is not the node's."""
    env = mock.env(f"{HEALTHY}\ncrash * nvmlInit")
    with FaultyRun(tmp_path, (), ("none", "--steps", 3), gate=True, env=env) as run:
        run.start()
        assert run.ended() == 0, run.said()

    assert run.incidents() == []


def memory(gib):
    return f"{HEALTHY}\nset 1 used_bytes {gib * GIB}"


def test_a_restart_waits_for_the_memory_of_dead_workers(mock, tmp_path):
    """Mode 18: it is let go of after a while."""
    env = mock.env(HEALTHY)
    words = ("kill", "--rank", 1, "--at", 40, "--generation", 0, "--steps", 50, "--pause", 0.1)
    with FaultyRun(tmp_path, (), words, gate=True, env=env) as run:
        run.start()
        run.wait_for_step(2)
        mock_nvml.change(env, memory(40))
        wait_until(lambda: run.payloads("run.phase")[-1]["phase"] == "form", 60, "the failure")
        with pytest.raises(AssertionError):
            wait_until(lambda: 1 in run.generations(), 5)
        mock_nvml.change(env, HEALTHY)
        assert run.ended() == 0, run.said()

    assert run.generations() == [0, 1]


@pytest.mark.soak
def test_memory_that_is_never_released_takes_the_node_out(mock, tmp_path):
    """Mode 18: after 50 s, exit 86."""
    env = mock.env(HEALTHY)
    words = ("kill", "--rank", 1, "--at", 40, "--generation", 0, "--steps", 50, "--pause", 0.1)
    with FaultyRun(tmp_path, (), words, gate=True, env=env) as run:
        run.start()
        run.wait_for_step(2)
        mock_nvml.change(env, memory(40))
        assert run.ended(limit_s=150) == 86, run.said()

    assert run.generations() == [0]
    blamed = ("gpu", UUIDS[1]), ("node", "n0")
    check_account(run, "gpu_mem.leaked_memory", *blamed, actions=["exclude-node"])
