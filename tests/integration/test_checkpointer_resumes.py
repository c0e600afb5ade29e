"""Training that is killed and resumes is, bit for bit, training that was never disturbed."""

import pytest
from support.gloo_ranks import run_ranks, said
from support.same_state import same

from gpuops.checkpoint.keeper.process import start_or_adopt

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]
HALF, ALL = 4, 8
# Four ranks are there with `hsdp` and `tp`, whose ranks start much sooner than those of DDP.
DDP_OF_FOUR, FSDP_OF_FOUR = (
    pytest.param(kind, 4, marks=pytest.mark.soak) for kind in ("ddp", "fsdp")
)


@pytest.fixture
def keeper(tmp_path):
    process = start_or_adopt(tmp_path / "keeper", lease_s=600)
    yield process.socket_path
    process.kill()


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("plain", 1),
        ("ddp", 2),
        DDP_OF_FOUR,
        ("zero", 2),
        ("fsdp", 2),
        FSDP_OF_FOUR,
        ("tp", 4),
        ("hsdp", 4),
    ],
    ids=str,
)
def test_killed_and_resumed_equals_undisturbed(tmp_path, keeper, kind, world):
    first = {"kind": kind, "name": "first", "reference": ALL, "until": HALF, "die": True}
    before = run_ranks(tmp_path, world, first, keeper=keeper)
    after = run_ranks(
        tmp_path, world, {"kind": kind, "name": "second", "until": ALL}, keeper=keeper
    )

    for rank in range(world):
        one, two = before[rank], after[rank]
        assert one["start"] == 0
        assert two["start"] == HALF, said(tmp_path, world, "second")
        assert two["restored"]["tier"] == "memory"
        assert two["tokens"] == 10 * HALF
        assert one["losses"] + two["losses"] == one["reference"]
        assert same(two["state"], one["reference_state"])
        assert two["stats"]["saved"] + sum(two["stats"]["skipped"].values()) == ALL - HALF


@pytest.mark.parametrize(("every", "least"), [("20ms", 2), ("auto", 1)])
def test_ranks_agree_on_when_to_save_over_the_store_of_their_group(tmp_path, keeper, every, least):
    job = {"kind": "ddp", "name": "timed", "until": 150, "every": every, "settles": False}
    ranks = run_ranks(tmp_path, 2, job, keeper=keeper)

    stats = [rank["stats"] for rank in ranks]
    assert stats[0]["saved"] == stats[1]["saved"] >= least, stats
    assert stats[0]["last_step"] == stats[1]["last_step"]
    assert stats[0]["keeper"]["given_up"] == 0
