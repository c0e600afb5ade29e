"""What others saved made into states; and hostile files, which must neither run nor overwhelm."""

import json
import os
import pickle
import struct
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.made_states import make_state, part
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from gpuops.checkpoint.storage.directory import DirectoryStore
from gpuops.checkpoint.storage.inspection import verify_state
from gpuops.checkpoint.types import CheckpointError, CorruptError, StateId
from gpuops.convert.export import ConvertFormat, export_state
from gpuops.convert.import_state import import_state, open_import_source
from gpuops.convert.pickle_reader import RefusedPickleError
from gpuops.convert.state_reader import StateReader
from gpuops.worker.checkpointer import Checkpointer

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "states")


def take(path, form, store, *, trust=False, **how):
    return import_state(open_import_source(path, form, trust=trust), store, path.parent, **how)


def dcp_save(state, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)


def model_and_optimizer(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(8, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def same(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


def test_all_dtypes_and_shapes_of_each_format(tmp_path, store):
    tensors = {
        f"{dtype}".removeprefix("torch."): torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in DTYPES
    }
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "t": torch.ones(3, 5).T}
    torch.save(tensors, tmp_path / "torch")
    dcp_save(tensors, tmp_path / "dcp")
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "safetensors")

    for step, form in enumerate(ConvertFormat, 1):
        done = take(tmp_path / form.value, form, store, step=step)
        assert done.n_tensors == len(tensors)
        assert verify_state(store, done.state) == []
        with StateReader(store, store.read_manifest(done.state), tmp_path) as reader:
            out = tmp_path / f"out{step}"
            export_state(
                reader,
                out,
                ConvertFormat.TORCH,
                part="model" if form is not ConvertFormat.DCP else None,
            )
        loaded = torch.load(out, weights_only=True)
        loaded.pop("gpuops", None)
        for key in ("rng", "step"):
            loaded.pop(key, None)
        assert {name: t.dtype for name, t in loaded.items()} == {
            name: t.dtype for name, t in tensors.items()
        }
        for name, tensor in tensors.items():
            assert torch.equal(
                loaded[name].contiguous().view(-1).view(torch.uint8),
                tensor.contiguous().view(-1).view(torch.uint8),
            )


@pytest.mark.parametrize("form", [ConvertFormat.TORCH, ConvertFormat.DCP])
def test_what_torchs_functions_saved_is_restored_into_a_job(tmp_path, store, form):
    model, optimizer = model_and_optimizer()
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": 12,
    }
    (dcp_save if form is ConvertFormat.DCP else torch.save)(state, tmp_path / "x")

    done = take(tmp_path / "x", form, store)
    fresh, fresh_optimizer = model_and_optimizer(seed=4)
    with Checkpointer(model=fresh, optimizer=fresh_optimizer, directory=store.address) as ck:
        assert ck.restore() == 12

    assert done.state == StateId(0, 12)
    same(fresh.state_dict(), model.state_dict())
    for ours, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        same(fresh_optimizer.state[ours], optimizer.state[theirs])
    assert fresh_optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("form", [ConvertFormat.TORCH, ConvertFormat.SAFETENSORS])
def test_bare_weights_are_a_models(tmp_path, store, form):
    model, _ = model_and_optimizer()
    save = torch.save if form is ConvertFormat.TORCH else save_file
    save(model.state_dict(), tmp_path / "x")

    take(tmp_path / "x", form, store, step=1)
    fresh, _ = model_and_optimizer(seed=4)
    with Checkpointer(model=fresh, directory=store.address) as ck:
        assert ck.restore() == 1

    same(fresh.state_dict(), model.state_dict())


def test_an_optimizer_by_numbers_is_told_apart(tmp_path, store):
    model, optimizer = model_and_optimizer()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x")
    (note,) = take(tmp_path / "x", ConvertFormat.TORCH, store, step=1).notes
    assert "by numbers" in note

    named = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    named.load_state_dict(
        optimizer.state_dict() | {"param_groups": named.state_dict()["param_groups"]}
    )
    torch.save({"model": model.state_dict(), "optimizer": named.state_dict()}, tmp_path / "y")
    assert take(tmp_path / "y", ConvertFormat.TORCH, store, step=2).notes == ()
    fresh, fresh_optimizer = model_and_optimizer(seed=4)
    with Checkpointer(model=fresh, optimizer=fresh_optimizer, directory=store.address) as ck:
        assert ck.restore() == 2
    for ours, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        same(fresh_optimizer.state[ours], optimizer.state[theirs])


def test_the_shards_that_dcp_writes_as_safetensors(tmp_path, store):
    w = torch.randn(6, 4)
    other = DirectoryStore(tmp_path / "o")
    cuts = [(slice(0, 4),), (slice(4, 6), slice(0, 1)), (slice(4, 6), slice(1, 4))]
    state = make_state(other, [{"model.w": part(w, *cut)} for cut in cuts], step=5)
    folder = tmp_path / "o" / state.name

    # Our own shards have the same form as those of torch's HuggingFaceStorageWriter.
    done = take(folder, ConvertFormat.SAFETENSORS, store, step=5)
    with StateReader(store, store.read_manifest(done.state), tmp_path) as reader:
        assert bytes(reader.bytes_of(reader.tensors["model.model.w"])) == bytes(
            w.view(-1).view(torch.uint8).numpy()
        )
    next(folder.glob("shard-00001*.safetensors")).unlink()
    with pytest.raises(CorruptError, match="do not cover its shape"):
        take(folder, ConvertFormat.SAFETENSORS, store, step=6)


def test_shards_that_overlap_and_leave_a_hole_of_the_same_size(tmp_path, store):
    folder = tmp_path / "m"
    folder.mkdir()
    for number, offset in enumerate((0, 1, 5)):
        sharding = json.dumps({"w": {"saved_offsets": [offset]}})
        metadata = {"DCP_SHARDING_INFO": sharding}
        save_file({"w": torch.ones(2)}, folder / f"{number}.safetensors", metadata=metadata)
    save_file(
        {"w": torch.ones(1)},
        folder / "3.safetensors",
        metadata={"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [4]}})},
    )

    with pytest.raises(CorruptError, match="do not cover"):
        take(folder, ConvertFormat.SAFETENSORS, store, step=1)


def test_a_set_with_an_index(tmp_path, store):
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.zeros(2)}, folder / "model-2.safetensors")
    save_file({"c": torch.zeros(2)}, folder / "consolidated.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    assert take(folder, ConvertFormat.SAFETENSORS, store, step=1).n_tensors == 2


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../m.safetensors"}}, "outside"),
        ({"weight_map": {"a": "/etc/passwd"}}, "outside"),
        ({"weight_map": {"a": 3}}, "outside"),
        ({"weight_map": {"a": "gone.safetensors"}}, "not there"),
        ({"weight_map": 3}, "not an index"),
        ([], "not an index"),
    ],
)
def test_an_index_that_is_none(tmp_path, store, index, message):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(CorruptError, match=message):
        take(folder, ConvertFormat.SAFETENSORS, store, step=1)


def test_a_newer_epoch_unless_told_and_never_over_another(tmp_path, store):
    torch.save({"model": {"w": torch.ones(1)}, "global_step": torch.tensor(9)}, tmp_path / "x")

    assert take(tmp_path / "x", ConvertFormat.TORCH, store).state == StateId(0, 9)
    assert take(tmp_path / "x", ConvertFormat.TORCH, store).state == StateId(1, 9)
    with pytest.raises(CheckpointError, match="already"):
        take(tmp_path / "x", ConvertFormat.TORCH, store, epoch=1)


def test_nobody_says_the_step(tmp_path, store):
    torch.save({"model": {"w": torch.ones(1)}, "step": "12"}, tmp_path / "x")

    with pytest.raises(CheckpointError, match="--step"):
        take(tmp_path / "x", ConvertFormat.TORCH, store)
    assert not store.list_states()


# Hostile files.


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "x is empty"),
        (b"import torch", "not at all. If you trust its author, give --trust"),
        (b"cposix\nsystem\n(S'touch x'\ntR.", "it names posix.system. If you trust"),
        (b"\x80\x04" + b"h\x00" * 99, "not at all. If you trust"),
    ],
)
def test_what_torch_refuses_is_told_without_its_advice(tmp_path, store, content, said):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        take(tmp_path / "x", ConvertFormat.TORCH, store, step=1)

    assert said in str(caught.value)
    assert "weights_only" not in str(caught.value)


def test_a_bomb_in_a_torch_file_does_not_go_off_unless_trusted(tmp_path, store):
    proof = tmp_path / "ran"
    torch.save({"model": {"w": torch.ones(1)}, "x": Bomb(proof)}, tmp_path / "x")

    with pytest.raises(CheckpointError, match=r"is refused.*--trust"):
        take(tmp_path / "x", ConvertFormat.TORCH, store, step=1)
    assert not proof.exists()
    assert not store.list_states()
    with pytest.raises(CheckpointError):  # an int in the state; but the user said so
        take(tmp_path / "x", ConvertFormat.TORCH, store, trust=True)
    assert proof.exists(), "the bomb is none"


def test_a_bomb_in_a_value_of_a_dcp_directory(tmp_path, store):
    proof = tmp_path / "ran"
    dcp_save({"model": {"w": torch.ones(1)}, "x": Bomb(proof)}, tmp_path / "x")

    with pytest.raises(CheckpointError, match="'x' is refused"):
        take(tmp_path / "x", ConvertFormat.DCP, store, step=1)
    assert not proof.exists()
    take(tmp_path / "x", ConvertFormat.DCP, store, step=1, trust=True)
    assert proof.exists(), "the bomb is none"


def test_a_bomb_in_the_metadata_of_a_dcp_directory(tmp_path, store):
    proof = tmp_path / "ran"
    dcp_save({"model": {"w": torch.ones(1)}}, tmp_path / "x")
    path = tmp_path / "x" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_meta.modules = [Bomb(proof)]
    path.write_bytes(pickle.dumps(metadata))

    with pytest.raises(RefusedPickleError):
        take(tmp_path / "x", ConvertFormat.DCP, store, step=1)
    assert not proof.exists()
    assert take(tmp_path / "x", ConvertFormat.DCP, store, step=1, trust=True).n_tensors == 1
    assert proof.exists(), "the bomb is none"


def test_a_bomb_in_a_tensor_of_a_dcp_directory(tmp_path, store):
    proof = tmp_path / "ran"
    dcp_save({"model": {"w": torch.ones(1)}}, tmp_path / "x")
    data = tmp_path / "x" / "__0_0.distcp"
    size = data.stat().st_size
    torch.save(Bomb(proof), tmp_path / "bomb")
    data.write_bytes((tmp_path / "bomb").read_bytes().ljust(size, b"\0")[:size])

    with pytest.raises(CorruptError):
        take(tmp_path / "x", ConvertFormat.DCP, store, step=1)
    assert not proof.exists()


def edited(path, **changes):
    """Change the one tensor of a DCP directory in its metadata."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    ((index, info),) = metadata.storage_data.items()
    entry = metadata.state_dict_metadata["w"]
    if "size" in changes:
        entry.size = torch.Size(changes["size"])
        entry.chunks[0].sizes = torch.Size(changes["size"])
    if "dtype" in changes:
        entry.properties.dtype = changes["dtype"]
    for name in ("offset", "length"):
        if name in changes:
            setattr(info, name, changes[name])
    metadata.storage_data = {index: info}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": [2**40]}, "cannot be"),
        ({"size": [2]}, "has the shape"),
        ({"size": [4, 1]}, "other dimensions"),
        ({"dtype": torch.int32}, "is not the"),
        ({"length": 10**12}, "ends at byte"),
        ({"offset": 7}, "ends at byte"),
        ({"length": 100}, "cannot be read"),
    ],
)
def test_metadata_that_lies(tmp_path, store, changes, message):
    dcp_save({"w": torch.ones(4)}, tmp_path / "x")
    edited(tmp_path / "x", **changes)

    with pytest.raises(CorruptError, match=message):
        take(tmp_path / "x", ConvertFormat.DCP, store, step=1)
    assert not store.list_states()


@pytest.mark.parametrize("form", list(ConvertFormat))
@pytest.mark.parametrize("cut", [0, 1, 100])
def test_a_file_that_was_cut_short(tmp_path, store, form, cut):
    tensors = {"w": torch.randn(1000)}
    path = data = tmp_path / "x"
    if form is ConvertFormat.DCP:
        dcp_save(tensors, path)
        data = path / "__0_0.distcp"
    elif form is ConvertFormat.TORCH:
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    size = data.stat().st_size
    os.truncate(data, cut if cut < 2 else size - cut)

    with pytest.raises(CheckpointError):
        take(path, form, store, step=1)
    assert not store.list_states()


@pytest.mark.parametrize("form", list(ConvertFormat))
def test_noise(tmp_path, store, form):
    (tmp_path / "x").write_bytes(os.urandom(5000))
    with pytest.raises(CheckpointError):
        take(tmp_path / "x", form, store, step=1)
    (tmp_path / "d").mkdir()
    with pytest.raises(CheckpointError):
        take(tmp_path / "d", form, store, step=1)
    with pytest.raises(CheckpointError, match="there is no"):
        take(tmp_path / "none", form, store, step=1)


def test_a_header_of_an_exabyte(tmp_path, store):
    (tmp_path / "x").write_bytes(struct.pack("<Q", 2**60) + b"{}")

    with pytest.raises(CorruptError, match="not a safetensors file"):
        take(tmp_path / "x", ConvertFormat.SAFETENSORS, store, step=1)


@pytest.mark.parametrize(
    "own",
    [
        {"extra": ["{"], "step": 1},
        {"extra": 3},
        {"extra": ['{"parts": {"model": {"aliases": 3, "others": 4}}}', "{}"], "step": 1},
        {"extra": ['{"parts": {"x": {"$": "tensor", "v": "gone"}}}', "{}"], "step": 1},
        {"extra": ["[" * 100_000], "step": 1},
    ],
)
def test_lies_about_an_export_of_ours(tmp_path, store, own):
    metadata = {"gpuops_extra": json.dumps({"world": 2, "step": 1} | own)}
    save_file({"model.w": torch.ones(1)}, tmp_path / "x", metadata=metadata)

    try:
        state = take(tmp_path / "x", ConvertFormat.SAFETENSORS, store).state
    except CorruptError:
        return
    # One rank's extra is kept as it is; it is judged when it is restored.
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(1))
    with Checkpointer(model=model, directory=store.address) as ck, pytest.raises(CheckpointError):
        ck.restore()
    assert verify_state(store, state) == []
