"""Without a keeper a state comes from the directory: the newest that verifies."""

import contextlib
import os
import socket
import tarfile
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from support.in_process_keeper import InProcessNode
from support.keeper_ranks import until
from torch import nn

from gpuops.checkpoint.keeper.connection import KeeperGoneError
from gpuops.checkpoint.keeper.messages import CheckpointPolicy
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.storage.inspection import verify_state
from gpuops.checkpoint.types import CheckpointError, CorruptError, KeeperError, Shard, StateId, Tier
from gpuops.worker.checkpointer import Checkpointer
from gpuops.worker.keeper_finder import (
    DirectoryInUseError,
    KeeperFinder,
    NoKeeperError,
    _acquire_lock,
    resolve_directory,
    standalone_folder,
)
from gpuops.worker.ranks import RankContext, detect_ranks
from gpuops.worker.restore_sources import _LARGE_BYTES, DirectoryStateSource, KeeperStateSource

ALONE = RankContext(0, 1, 0, 1, "")
FORMATS = Path(__file__).parents[3] / "fixtures" / "formats"


class Persisted:
    """A directory with the states of some steps, of one rank each."""

    def __init__(self, folder, steps):
        self.folder = folder
        node = InProcessNode()
        model = nn.Linear(40, 1, bias=False)
        with Checkpointer(
            model=model, every=1, directory=folder, persist_every=0, keeper=node.connect()
        ) as ck:
            ck.restore()
            for step in steps:
                nn.init.constant_(model.weight, step)
                ck.step(step)
            assert ck.stats["keeper"]["persisted"] == [0, steps[-1]]
        node.close()

    def shard(self, step):
        return self.folder / StateId(0, step).name / Shard(0, 1).file_name


@pytest.fixture
def persisted(tmp_path):
    return Persisted(tmp_path / "states", [1, 2, 3])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def source(folder):
    return DirectoryStateSource(open_store(str(folder)), ALONE)


def test_the_newest_is_found_and_read(persisted):
    found = source(persisted.folder)

    assert found.find().state == StateId(0, 3)
    assert bytes(found.open(Shard(0, 1)).view) == persisted.shard(3).read_bytes()
    found.close()


def test_a_damaged_one_is_skipped_with_a_reason(persisted):
    flip(persisted.shard(3))
    persisted.shard(2).unlink()

    found = source(persisted.folder).find()

    assert (found.state, found.tier) == (StateId(0, 1), Tier.PERSISTENT)
    assert any("step 3" in why for why in found.why)
    assert any("step 2" in why for why in found.why)


def test_where_all_are_damaged_training_does_not_begin_anew(persisted):
    for step in (1, 2, 3):
        flip(persisted.shard(step))

    with pytest.raises(CheckpointError, match="none is complete"):
        source(persisted.folder).find()


def test_a_state_of_a_later_gpuops_is_not_silently_a_fresh_start(persisted):
    for step in (1, 2, 3):
        manifest = persisted.shard(step).parent / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b"checkpoint/1", b"checkpoint/9"))

    with pytest.raises(CheckpointError, match="cannot determine whether"):
        source(persisted.folder).find()


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_an_empty_directory_is_a_fresh_start(tmp_path, kind):
    folder = tmp_path / "states"
    if kind == "empty":
        folder.mkdir()

    assert source(folder).find() is None


@pytest.mark.parametrize(("rank", "tokens", "drawn"), [(0, 30, 0.81720442), (1, 33, 0.67149234)])
def test_a_state_of_two_ranks_in_the_first_format_is_read(
    tmp_path, monkeypatch, rank, tokens, drawn
):
    """Written by gpuops before ranks shared tensors: DDP of two, three steps, AdamW."""
    with tarfile.open(FORMATS / "format-1-ddp-of-2.tar.xz") as archive:
        archive.extractall(tmp_path / "states", filter="data")
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    store = open_store(str(tmp_path / "states"))
    (stored,) = store.list_states()
    assert verify_state(store, stored.state) == []
    model, extra = nn.Linear(8, 4), {"tokens": 0}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Checkpointer(
        model=model, optimizer=optimizer, extra=extra, directory=tmp_path / "states", keeper=Gone()
    ) as ck:
        assert ck.restore() == 3

    assert extra == {"tokens": tokens}
    assert model.weight.double().sum().item() == 0.807516610249877
    assert {entry["step"].item() for entry in optimizer.state.values()} == {3.0}
    assert torch.rand(1).item() == pytest.approx(drawn, abs=1e-8)


class Gone:
    """A keeper that does not answer."""

    def __getattr__(self, name):
        raise KeeperError("the keeper is gone")


def test_a_job_without_a_keeper_restores_and_says_what_it_does_not_do(persisted, caplog):
    model = nn.Linear(40, 1, bias=False)
    with Checkpointer(model=model, directory=persisted.folder, every=1, keeper=Gone()) as ck:
        assert ck.restore() == 3
        ck.step(4)
        assert ck.stats["restored"]["tier"] == "persistent"
        assert ck.stats["saved"] == 0

    assert torch.equal(model.weight, torch.full((1, 40), 3.0))
    assert any("the keeper is gone" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_says_that_nothing_is_saved(monkeypatch, caplog, rank):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("GPUOPS_KEEPER", "GPUOPS_CKPT_DIR"):
        monkeypatch.delenv(name, raising=False)

    with Checkpointer(model=nn.Linear(1, 1), every=1) as ck:
        assert ck.restore() == 0
        ck.step(1)
        assert "directory=" in ck.stats["off"]

    assert len([r for r in caplog.records if "no checkpoints are saved" in r.getMessage()]) == (
        rank == 0
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_says_what_all_loaded(persisted, monkeypatch, caplog, rank):
    class Gone:
        def __getattr__(self, name):
            raise KeeperError("the keeper is gone")

    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.Linear(40, 1, bias=False)
    with Checkpointer(model=model, directory=persisted.folder, keeper=Gone()) as ck:
        assert ck.restore() == 3

    said = [r for r in caplog.records if "is loaded by 2" in r.getMessage()]
    assert len(said) == (rank == 0)


def test_a_keeper_that_is_gone_is_no_fresh_start(tmp_path):
    env = {"GPUOPS_KEEPER": str(tmp_path / "keeper.sock")}
    with pytest.raises(KeeperError, match="no keeper listens"):
        KeeperFinder(None, env, ALONE, CheckpointPolicy()).find()


def test_without_agent_and_directory_nothing_is_kept():
    with pytest.raises(NoKeeperError, match="gpuops run"):
        KeeperFinder(None, {}, ALONE, CheckpointPolicy()).find()


def test_several_nodes_need_agents(tmp_path):
    place = RankContext(0, 4, 0, 2, "")
    with pytest.raises(NoKeeperError, match="2 nodes"):
        KeeperFinder(None, {}, place, CheckpointPolicy(directory=str(tmp_path))).find()


def test_one_directory_serves_one_job_at_a_time(tmp_path):
    lock = _acquire_lock(tmp_path / "job.lock", "/states")

    with pytest.raises(DirectoryInUseError, match=r"pid \d+"):
        _acquire_lock(tmp_path / "job.lock", "/states", wait_s=0.2)
    assert lock > 0


def test_a_lock_that_its_last_holder_removed_is_none(tmp_path):
    path = tmp_path / "job.lock"
    first = _acquire_lock(path, "/states")
    found = []
    waiting = threading.Thread(target=lambda: found.append(_acquire_lock(path, "/states")))
    waiting.start()
    until(lambda: is_opened_twice(path), what="another who waits for it")
    path.unlink()
    os.close(first)
    waiting.join()

    assert found == [None]


def is_opened_twice(path):
    opened = [link for link in Path("/proc/self/fd").iterdir() if points_to(link, path)]
    return len(opened) == 2


def points_to(link, path):
    try:
        return link.readlink() == path
    except FileNotFoundError:
        return False


def test_the_folder_of_a_keeper_follows_from_the_directory(tmp_path):
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}

    assert standalone_folder(env, "/a") == standalone_folder(env, "/a")
    assert standalone_folder(env, "/a") != standalone_folder(env, "/b")
    assert str(standalone_folder(env, "/a")).startswith(f"{tmp_path}/gpuops/")
    assert socket.gethostname() not in str(standalone_folder({}, "/a"))


def test_a_folder_that_another_user_made_first_takes_no_states_away(tmp_path, monkeypatch):
    """The exploit: ``mkdir /tmp/gpuops-UID`` before the job starts, or a runtime directory gone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp" / f"gpuops-{os.geteuid()}").mkdir(parents=True)
    (tmp_path / "tmp" / f"gpuops-{os.geteuid()}").chmod(0o777)
    env = {"GPUOPS_STATE": str(tmp_path / "state"), "XDG_RUNTIME_DIR": str(tmp_path / "none")}

    folder = standalone_folder(env, "/a")

    assert folder == standalone_folder(env, "/a")
    assert folder.is_relative_to(tmp_path / "state" / "keepers")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("given", "env", "expected"),
    [
        ("/a", {}, "/a"),
        (None, {"GPUOPS_CKPT_DIR": "/b"}, "/b"),
        ("/a", {"GPUOPS_CKPT_DIR": "/b"}, "/a"),
        ("s3://bucket/run", {}, "s3://bucket/run"),
        (None, {}, None),
    ],
)
def test_where_states_persist(given, env, expected):
    assert resolve_directory(given, env) == expected


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, (0, 1, 0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4, 3, 4)),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            (3, 4, 1, 2),
        ),
        ({"RANK": "nine", "WORLD_SIZE": ""}, (0, 1, 0, 1)),
    ],
)
def test_which_rank_this_is(env, place):
    found = detect_ranks(env)

    assert (found.rank, found.world, found.local_rank, found.local_world) == place


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "4", "WORLD_SIZE": "4"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},
    ],
)
def test_a_launcher_that_contradicts_itself_is_an_error(env):
    with pytest.raises(CheckpointError, match="that is impossible"):
        detect_ranks(env)


class Watched(SharedBuffer):
    """Memory that tells which thread unmaps it, and whether that is to stop."""

    told: list

    def unmap(self, stop=lambda: False):
        self.told.append((threading.current_thread(), stop()))
        super().unmap(stop)


class MappedBefore:
    """What `map_ahead` would have mapped of *memory*."""

    def __init__(self, memory):
        self.memory, self.is_closed = memory, False

    def take(self, image):
        taken, self.memory = self.memory, None
        return taken if taken.nbytes == image.nbytes else None

    def close(self):
        self.is_closed = True


def test_what_was_mapped_ahead_is_what_is_read():
    node, model = InProcessNode(), nn.Linear(40, 1, bias=False)
    with Checkpointer(model=model, every=1, keeper=node.connect()) as ck:
        ck.restore()
        ck.step(1)
    keeper = node.connect()
    keeper.set_policy(CheckpointPolicy())
    state = keeper.restore_point(1.0)
    image = keeper.open_shard(state, Shard(0, 1))
    elsewhere = SharedBuffer.create("mapped", image.nbytes)
    elsewhere.view[:] = image.view
    elsewhere.view[-1] ^= 1
    mapped = MappedBefore(elsewhere)
    source = KeeperStateSource(keeper, 1.0, mapped=mapped)
    assert source.find().state == state.state

    with pytest.raises(CorruptError):
        source.open(Shard(0, 1)).ensure([(0, 8)])

    source.close()
    assert mapped.is_closed
    with pytest.raises(CheckpointError, match="closed"):
        _ = elsewhere.view
    node.close()


class Ended:
    """A keeper that is gone, or that disconnects its ranks as its agent begins the generation."""

    def restore_point(self, _deadline_s):
        raise KeeperGoneError("gone")


@pytest.mark.parametrize(("n_gone", "is_found"), [(0, True), (2, True), (3, False)])
def test_a_replacement_that_is_gone_as_well_is_replaced_once_more(n_gone, is_found):
    node = InProcessNode()
    keeper = node.connect()
    keeper.set_policy(CheckpointPolicy())
    keepers = iter([*(Ended() for _ in range(n_gone)), keeper])
    source = KeeperStateSource(next(keepers), 1.0, lambda: next(keepers))
    with contextlib.nullcontext() if is_found else pytest.raises(KeeperGoneError):
        assert source.find() is None
    node.close()


def test_large_memory_is_unmapped_by_a_thread_that_nobody_kills():
    """The end of the program waits for it, and it stops then."""
    memory = Watched.create("large", _LARGE_BYTES)
    memory.told = []
    source = KeeperStateSource(object(), 1.0)
    source._opened.append(memory)

    source.close()

    ((thread, must_stop),) = until(lambda: memory.told, what="unmapping")
    thread.join(30)
    assert thread is not threading.current_thread()
    assert not thread.daemon
    assert not must_stop
    with pytest.raises(CheckpointError, match="closed"):
        _ = memory.view
