"""States written for other tools, read back by these tools themselves."""

import errno
import json
import random
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.made_states import checkpointer_state, make_state, part, whole
from support.small_disk import small_disk
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.storage.directory import DirectoryStore
from gpuops.checkpoint.types import CheckpointError, CorruptError, Shard
from gpuops.convert.export import (
    ConvertFormat,
    _save_dcp,
    _temporary_directory,
    _temporary_file,
    export_state,
)
from gpuops.convert.import_state import import_state, open_import_source
from gpuops.convert.state_reader import StateReader
from gpuops.worker.checkpointer import Checkpointer


class Job:
    """A small training, the same each time for the same seed."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 2),
        )
        self.model[3].bias.data = self.model[3].bias.data.double().float()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.extra = {"seen": 7, "nested": {"a": [1, (2.5, None)], "b": np.arange(3)}}
        self.losses = []

    def train(self, n_steps):
        for _ in range(n_steps):
            self.optimizer.zero_grad()
            loss = (
                self.model(torch.randn(16, 4)).square().mean() + np.random.rand() + random.random()  # noqa: NPY002
            )
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.losses.append(loss.item())
        return self

    def given(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "extra": self.extra,
        }

    def save(self, store, step):
        return checkpointer_state(store, step, **self.given())

    def restore(self, store):
        with Checkpointer(directory=store.address, **self.given()) as ck:
            return ck.restore()


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "states")


def export(store, state, to, form, **how):
    with StateReader(store, store.read_manifest(state), to.parent) as reader:
        return export_state(reader, to, form, **how)


def same(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert torch.equal(tensor, b[name]), name


def no_leftovers(folder, *expected):
    assert sorted(path.name for path in folder.iterdir()) == sorted(expected)


@pytest.mark.parametrize("form", list(ConvertFormat))
def test_a_round_trip_continues_bit_for_bit(store, tmp_path, form):
    job = Job().train(3)
    state = job.save(store, 3)
    export(store, state, tmp_path / "out", form)
    job.train(4)

    other = DirectoryStore(tmp_path / "other")
    imported = import_state(
        open_import_source(tmp_path / "out", form, trust=False), other, tmp_path
    )
    again = Job(seed=5)
    assert again.restore(other) == 3
    again.train(4)

    assert imported.notes == ()
    assert again.losses == job.losses[3:]
    same(again.model.state_dict(), job.model.state_dict())
    assert str(again.extra) == str(job.extra)
    no_leftovers(tmp_path, "out", "other", "states")


def test_torch_loads_an_export_without_running_anything(store, tmp_path):
    job = Job().train(2)
    job.optimizer.param_groups[0]["note"] = "x"
    export(store, job.save(store, 2), tmp_path / "out.pt", ConvertFormat.TORCH)

    loaded = torch.load(tmp_path / "out.pt", weights_only=True)

    same(loaded["model"], job.model.state_dict())
    named = dict(job.model.named_parameters())
    for name, entry in loaded["optimizer"]["state"].items():
        same(entry, job.optimizer.state[named[name]])
    (group,) = loaded["optimizer"]["param_groups"]
    assert group["params"] == list(named)
    assert group["lr"] == 0.005
    assert loaded["scheduler"]["last_epoch"] == 2
    assert torch.equal(loaded["extra.nested"]["b"], torch.arange(3))


def test_dcp_loads_an_export_into_the_dicts_of_its_own_functions(store, tmp_path):
    job = Job().train(2)
    export(store, job.save(store, 2), tmp_path / "out", ConvertFormat.DCP)

    fresh = Job(seed=9).train(1)
    into = {
        "model": get_model_state_dict(fresh.model),
        "optimizer": get_optimizer_state_dict(fresh.model, fresh.optimizer),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(into, checkpoint_id=tmp_path / "out", no_dist=True)

    same(into["model"], job.model.state_dict())
    theirs = get_optimizer_state_dict(job.model, job.optimizer)
    for name, entry in theirs["state"].items():
        same(into["optimizer"]["state"][name], entry)
    assert into["optimizer"]["param_groups"][0]["lr"] == 0.005


def test_safetensors_of_one_part_have_the_names_of_the_module(store, tmp_path):
    job = Job().train(1)
    done = export(
        store,
        job.save(store, 1),
        tmp_path / "m.safetensors",
        ConvertFormat.SAFETENSORS,
        part="model",
    )

    same(load_file(tmp_path / "m.safetensors"), job.model.state_dict())
    assert done.omitted[0] == "what is not a tensor"
    assert "optimizer: only model was asked for" in done.omitted
    Job(seed=3).model.load_state_dict(load_file(tmp_path / "m.safetensors"))


@pytest.mark.parametrize("form", [ConvertFormat.TORCH, ConvertFormat.DCP])
def test_one_part_alone(store, tmp_path, form):
    job = Job().train(1)
    export(store, job.save(store, 1), tmp_path / "out", form, part="model")

    imported = open_import_source(tmp_path / "out", form, trust=False)
    assert set(imported.tree) == set(job.model.state_dict())
    with pytest.raises(CheckpointError, match="no part 'x': it has model, optimizer"):
        export(store, store.list_states()[0].state, tmp_path / "y", form, part="x")


class Stops:
    """Something that is written until *error* comes, as a signal or a disk makes it come."""

    def __init__(self, error):
        self.error = error

    def __reduce_ex__(self, _protocol):
        raise self.error


def test_ctrl_c_while_torch_writes_is_no_failure_of_the_disk(tmp_path):
    with pytest.raises(KeyboardInterrupt), _temporary_file(tmp_path / "x") as file:
        torch.save({"a": torch.ones(3), "b": Stops(KeyboardInterrupt())}, file)
    with pytest.raises(KeyboardInterrupt), _temporary_directory(tmp_path / "y") as folder:
        _save_dcp({"a": torch.ones(3), "b": Stops(KeyboardInterrupt())}, folder)

    assert list(tmp_path.iterdir()) == []


def test_what_dcp_cannot_write_is_told_in_one_line(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        pytest.raises(CheckpointError, match=r"^cannot write .*: [^\n]*\Z"),
        _temporary_directory(tmp_path / "y") as folder,
    ):
        _save_dcp({"b": Stops(full)}, folder)

    assert list(tmp_path.iterdir()) == []


W = torch.randn(10, 6)
E = torch.randn(7, 3).bfloat16()
RANKS = [
    {
        "model.w": part(W, slice(0, 5), slice(0, 3)),
        "model.e": part(E, slice(0, 2)),
        "model.b": whole(torch.ones(3) * 0),
    },
    {
        "model.w": part(W, slice(0, 5), slice(3, 6)),
        "model.e": part(E, slice(2, 4)),
        "model.b": whole(torch.ones(3) * 1),
    },
    {
        "model.w": part(W, slice(5, 10), slice(0, 3)),
        "model.e": part(E, slice(4, 6)),
        "model.b": whole(torch.ones(3) * 2),
    },
    {
        "model.w": part(W, slice(5, 10), slice(3, 6)),
        "model.e": part(E, slice(6, 7)),
        "model.b": whole(torch.ones(3) * 3),
    },
]
WHOLE = {"model.w": W, "model.e": E, "model.b": torch.zeros(3)}


@pytest.mark.parametrize("form", list(ConvertFormat))
def test_shards_of_four_ranks_are_put_together(store, tmp_path, form):
    state = make_state(store, RANKS, step=8)
    export(store, state, tmp_path / "out", form)

    match form:
        case ConvertFormat.SAFETENSORS:
            loaded = load_file(tmp_path / "out")
        case ConvertFormat.TORCH:
            loaded = torch.load(tmp_path / "out", weights_only=True)
            del loaded["gpuops"]
        case ConvertFormat.DCP:
            loaded = {name: torch.empty_like(tensor) for name, tensor in WHOLE.items()}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    same(loaded, WHOLE)


@pytest.mark.parametrize("form", list(ConvertFormat))
def test_a_state_under_a_url_is_fetched_and_verified(tmp_path, form):
    store = open_store(f"memory://{tmp_path.name}")
    state = make_state(store, RANKS, step=8)
    export(store, state, tmp_path / "out", form)
    other = open_store(f"memory://{tmp_path.name}-other")
    incoming = open_import_source(tmp_path / "out", form, trust=False)
    imported = import_state(incoming, other, tmp_path).state

    with StateReader(other, other.read_manifest(imported), tmp_path) as reader:
        names = {name.removeprefix("model.") for name in reader.tensors}
    assert names >= {name.removeprefix("model.") for name in WHOLE}
    no_leftovers(tmp_path, "out")


def test_torchs_own_reader_puts_the_same_together(store, tmp_path):
    state = make_state(store, RANKS, step=8)
    loaded = {name: torch.empty_like(tensor) for name, tensor in WHOLE.items()}
    reader = dcp.HuggingFaceStorageReader(str(store.local_shard_path(state, Shard(0, 4)).parent))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, storage_reader=reader, no_dist=True)

    for name in ("model.w", "model.e"):
        assert torch.equal(loaded[name], WHOLE[name])


@pytest.mark.parametrize(("limit", "n_files"), [(1, 3), (200, 2), (10**6, 1)])
def test_a_set_of_files_with_an_index(store, tmp_path, limit, n_files):
    state = make_state(store, RANKS, step=8)
    done = export(
        store,
        state,
        tmp_path / "out",
        ConvertFormat.SAFETENSORS,
        max_shard_bytes=limit,
        part="model",
    )

    names = {file.name for file in done.files}
    if n_files == 1:
        assert names == {"model.safetensors"}
        return
    assert "model.safetensors.index.json" in names
    assert len(names) == n_files + 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    loaded = {}
    for name, file in index["weight_map"].items():
        loaded[f"model.{name}"] = load_file(tmp_path / "out" / file)[name]
    same(loaded, WHOLE)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in WHOLE.values())


@pytest.mark.parametrize("form", list(ConvertFormat))
def test_nothing_is_overwritten(store, tmp_path, form):
    state = make_state(store, RANKS)
    (tmp_path / "out").write_text("mine")

    with pytest.raises(CheckpointError, match="exists already"):
        export(store, state, tmp_path / "out", form)
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("form", list(ConvertFormat))
def test_a_damaged_state_is_not_exported_and_leaves_nothing(store, tmp_path, form):
    state = make_state(store, RANKS)
    path = store.local_shard_path(state, Shard(3, 4))
    content = bytearray(path.read_bytes())
    content[-4200] ^= 4
    path.write_bytes(content)

    with pytest.raises(CorruptError):
        export(store, state, tmp_path / "out", form)
    no_leftovers(tmp_path, "states")


@pytest.mark.parametrize("form", list(ConvertFormat))
def test_a_full_disk_is_an_error_and_leaves_nothing(store, tmp_path, form):
    w = torch.randn(500_000)
    cuts = [slice(0, 250_000), slice(250_000, 500_000)]
    state = make_state(store, [{"model.w": part(w, cut)} for cut in cuts])

    with small_disk(tmp_path / "disk", "1m") as disk:
        with pytest.raises(CheckpointError, match=r"No space left|no room|cannot write"):
            export(store, state, disk / "out", form)
        no_leftovers(disk)
