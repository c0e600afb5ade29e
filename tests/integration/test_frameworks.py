"""Rows of docs/frameworks.md: real trainings of each kind, whose rank 1 is killed once."""

import pytest
from support.runs import JOBS, Run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
DIES = 4
SOAK = pytest.mark.soak


def recovered(run, world, start=DIES):
    """Check that rank 1 was blamed, and that all ranks went on from *start* as if undisturbed."""
    assert run.finish(240) == 0, run.said()
    for rank in range(world):
        assert f"rank {rank} from step {start}: same True" in run.said(), run.said()
    (incident,) = run.incidents()
    assert [c["id"] for c in incident["culprits"] if c["kind"] == "rank"] == ["1"]
    assert incident["state"] == "closed"
    return incident


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        pytest.param("ddp", 2, marks=SOAK),
        pytest.param("fsdp1", 2, marks=SOAK),
        pytest.param("fsdp2", 2, marks=SOAK),
        pytest.param("hsdp", 4, marks=SOAK),
        pytest.param("tp", 2, marks=SOAK),
        pytest.param("pp", 2, marks=SOAK),
        pytest.param("compiled", 2, marks=SOAK),
        pytest.param("recomputed", 2, marks=SOAK),
        pytest.param("zero", 2, marks=SOAK),
        pytest.param("accumulation", 2, marks=SOAK),
        pytest.param("scaler", 2, marks=SOAK),
        pytest.param("ema", 2, marks=SOAK),
    ],
)
def test_torchs_own_ways_to_train(tmp_path, kind, world):
    env = {"JOB_DIR": str(tmp_path)}
    with Run(tmp_path / "run", JOBS / "frameworks.py", kind, env=env, nproc=world) as run:
        recovered(run, world)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("accelerate", "accelerate"),
        ("titan", "torchtitan.components.optimizer"),
        ("torchft", "torchft.optim"),
    ],
)
def test_optimizers_that_frameworks_wrap(tmp_path, kind, module):
    pytest.importorskip(module, reason=f"{module} is not installed")
    env = {"JOB_DIR": str(tmp_path)}
    with Run(tmp_path / "run", JOBS / "frameworks.py", kind, env=env) as run:
        recovered(run, 2)
