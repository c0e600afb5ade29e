"""Data-parallel ranks of a node keep what they hold alike once, in memory and on disk."""

import signal
from dataclasses import replace

import pytest
import torch
from support.gloo_ranks import codes_of_ranks, results_of, run_ranks, said
from support.runs import JOBS

from gpuops.checkpoint.keeper.process import start_or_adopt
from gpuops.checkpoint.placement.estimate import RamNeed

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]
MB = 10**6
JOB = JOBS / "shared_train.py"


@pytest.fixture
def keeper(tmp_path):
    process = start_or_adopt(tmp_path / "keeper", lease_s=600)
    yield process.socket_path
    process.kill()


def run(tmp_path, keeper, world, **job):
    return run_ranks(tmp_path, world, job, keeper=keeper, script=JOB)


def codes_of(tmp_path, keeper, world, **job):
    return codes_of_ranks(tmp_path, world, job, keeper=keeper, script=JOB)


def nbytes_of(results):
    return [result["stats"]["nbytes"] for result in results]


def state_bytes(result):
    return sum(tensor.nbytes for tensor in result["state"])


@pytest.mark.parametrize("world", [2, 4])
def test_a_node_has_one_copy_of_the_state_and_gives_it_to_each_rank(tmp_path, keeper, world):
    job = {"until": 3, "every": 3, "directory": str(tmp_path / "states")}
    saved = run(tmp_path, keeper, world, name="first", die=True, **job)
    loaded = run(tmp_path, keeper, world, name="second", **job)

    sizes, shared = nbytes_of(saved), state_bytes(saved[0])
    least = RamNeed(ranks=world, bytes_per_rank=shared, replicas=1, shared_bytes=shared)
    most = replace(least, bytes_per_rank=shared + MB)
    reserved = saved[0]["stats"]["keeper"]["reserved_bytes"]
    assert least.own_bytes <= reserved <= most.own_bytes, "what `gpuops ckpt plan` says"
    assert sum(sizes) <= shared + world * MB
    assert max(sizes) - min(sizes) <= MB
    for rank in range(world):
        assert loaded[rank]["start"] == 3, said(tmp_path, world, "second")
        assert loaded[rank]["tokens"] == 3 * (10 + rank)
        for kind in ("state", "average"):
            assert all(map(torch.equal, loaded[rank][kind], saved[rank][kind]))
        assert torch.equal(loaded[rank]["next"], saved[rank]["next"])
    assert not torch.equal(loaded[0]["average"][0], loaded[1]["average"][0])
    files = list((tmp_path / "states").glob("step-*/shard-*.safetensors"))
    assert len(files) == world
    assert sum(file.stat().st_size for file in files) <= most.state_bytes


def test_a_rank_that_is_killed_right_after_its_copy_loses_nothing(tmp_path, keeper):
    world = 2
    job = {"until": 2, "unreported": [0, 2]}
    codes = codes_of(tmp_path, keeper, world, name="first", **job)
    loaded = run(tmp_path, keeper, world, name="second", until=2)

    assert codes[0] == -signal.SIGKILL, said(tmp_path, world, "first")
    killed = torch.load(tmp_path / "result-0-first", weights_only=False)
    for each in loaded:
        assert each["start"] == 2, said(tmp_path, world, "second")
        assert all(map(torch.equal, each["state"], killed["state"]))


def test_replicas_that_differ_are_not_saved_and_then_each_rank_saves_its_own(tmp_path, keeper):
    flip = {"flip": [1, 3]}
    saved = run(tmp_path, keeper, 2, name="first", until=5, die=True, **flip)
    loaded = run(tmp_path, keeper, 2, name="second", until=5)

    for rank in range(2):
        log = said(tmp_path, 2, "first")
        # The state of step 3 is void, step 4 is skipped while memory is reserved anew.
        assert saved[rank]["saved"][1:] == [2, 2, 2, 5], log
        assert saved[rank]["stats"]["nbytes"] >= state_bytes(saved[rank])
        assert loaded[rank]["start"] == 5
        assert all(map(torch.equal, loaded[rank]["state"], saved[rank]["state"]))
    assert log.count("ranks 0-1 differ in model.3.weight") == 1, log
    differing = [
        number
        for number, pair in enumerate(zip(saved[0]["state"], saved[1]["state"], strict=True))
        if not torch.equal(*pair)
    ]
    assert differing, "the flipped bit is no more"


def test_ranks_that_describe_what_they_share_differently_say_so_and_save_their_own(
    tmp_path, keeper
):
    saved = run(tmp_path, keeper, 2, name="first", until=8, wrong_dtype=1)

    log = said(tmp_path, 2, "first")
    assert saved[0]["saved"][-1] == 8, log
    assert log.count("ranks 0-1 should hold the same tensors") == 1, log
    assert log.count("each rank copies all its tensors") == 1, log


def test_ranks_that_disagree_on_what_they_hold_alike_all_end_at_the_start(tmp_path, keeper):
    """Before training at the first start; before anything is loaded at a later one."""
    assert codes_of(tmp_path, keeper, 2, name="unwrapped", until=1, unwrapped=1) == [1, 1]
    log = said(tmp_path, 2, "unwrapped")
    assert log.count("ArgumentError: rank 0 and others should hold the same tensors alike") == 2
    run(tmp_path, keeper, 2, name="right", until=2, die=True)

    assert codes_of(tmp_path, keeper, 2, name="half", until=3, half=1) == [1, 1]
    log = said(tmp_path, 2, "half")
    assert "model.1.weight was saved as F32 and is F16 now; restore with" in log
    assert log.count("CheckpointError: another rank cannot load step 2") == 1, log


def test_an_owner_that_is_killed_during_its_last_copy_leaves_the_state_before(tmp_path, keeper):
    job = {"until": 3, "every": 2}
    directory = str(tmp_path / "states")
    first = {"name": "first", "directory": directory, "dies_last": 0, **job}
    assert codes_of(tmp_path, keeper, 2, **first) == [-signal.SIGKILL, 0], said(
        tmp_path, 2, "first"
    )
    saved = results_of(tmp_path, 2, first)
    again = run(tmp_path, keeper, 2, name="second", **job)

    for rank in range(2):
        assert again[rank]["start"] == 2
        assert again[rank]["stats"]["restored"]["tier"] == "memory"
        assert all(map(torch.equal, again[rank]["state"], saved[rank]["state"]))


def test_the_files_of_owners_give_each_rank_its_state(tmp_path, keeper):
    """To another keeper, which has nothing in memory, and to another number of ranks."""
    job = {"until": 2, "every": 2, "directory": str(tmp_path / "states")}
    saved = run(tmp_path, keeper, 2, name="first", **job)
    for world in (2, 3):
        name = f"of {world}"
        other = start_or_adopt(tmp_path / f"other-{world}", lease_s=600)
        try:
            loaded = run(tmp_path, other.socket_path, world, name=name, **job)
        finally:
            other.kill()
        for rank in range(world):
            assert loaded[rank]["start"] == 2, said(tmp_path, world, name)
            assert loaded[rank]["stats"]["restored"]["tier"] == "persistent"
            assert all(map(torch.equal, loaded[rank]["state"], saved[0]["state"]))
