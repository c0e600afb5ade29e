"""A sharded job goes on with another number of ranks, from memory, with the very same state."""

import pytest
from support.gloo_ranks import run_ranks, said
from support.same_state import same

from gpuops.checkpoint.keeper_process import start_or_adopt

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]
STEPS = 3


@pytest.fixture
def keeper(tmp_path):
    process = start_or_adopt(tmp_path / "keeper", lease_s=600)
    yield process.socket_path
    process.kill()


@pytest.mark.parametrize(
    ("before", "after"),
    [(("fsdp", 4), ("fsdp", 3)), (("fsdp", 2), ("fsdp", 4)), (("ddp", 2), ("plain", 1))],
    ids=["fsdp 4 to 3", "fsdp 2 to 4", "ddp 2 to plain"],
)
def test_another_world_goes_on_from_the_same_state(tmp_path, keeper, before, after):
    kind, world = before
    job = {"kind": kind, "name": "first", "until": STEPS, "die": True}
    saved = run_ranks(tmp_path, world, job, keeper=keeper)
    kind, world = after
    job = {"kind": kind, "name": "second", "until": STEPS + 2}
    loaded = run_ranks(tmp_path, world, job, keeper=keeper)

    for rank in range(world):
        assert loaded[rank]["start"] == STEPS, said(tmp_path, world, "second")
        assert loaded[rank]["restored"]["world"] == before[1]
        assert loaded[rank]["restored"]["tier"] == "memory"
        assert loaded[rank]["tokens"] == 10 * STEPS
        assert same(loaded[rank]["loaded"], saved[0]["state"])
        assert len(loaded[rank]["losses"]) == 2
    assert "seeded anew" in said(tmp_path, world, "second")
