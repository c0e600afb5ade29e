"""DCP's metadata read as data: what it tells, and what is refused."""

import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from gpuops.checkpoint.types import CheckpointError, CorruptError
from gpuops.convert.pickle_reader import RefusedPickleError
from gpuops.convert.read_dcp import parse_index, read_index

STATE = {
    "model": {"w": torch.arange(6.0).reshape(2, 3), "s": torch.tensor(3), "e": torch.zeros(0, 4)},
    "step": 5,
    "list": [1, torch.ones(2, dtype=torch.bfloat16)],
}


def save(state, directory, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=directory, **how)


def metadata(**changes):
    size = torch.Size([2])
    tensor = TensorStorageMetadata(
        TensorProperties(torch.float32), size, [ChunkStorageMetadata(torch.Size([0]), size)]
    )
    return Metadata(
        state_dict_metadata=changes.get("entries", {"w": tensor}),
        planner_data=changes.get("paths", {"w": ("w",)}),
        storage_data=changes.get(
            "places",
            {MetadataIndex("w", [0]): _StorageInfo(changes.get("file", "__0_0.distcp"), 0, 9)},
        ),
    )


def test_what_dcp_saved_is_told_as_dcp_tells_it(tmp_path):
    save(STATE, tmp_path / "d")
    index = read_index(tmp_path / "d")
    theirs = dcp.FileSystemReader(tmp_path / "d").read_metadata()

    assert set(index.tensors) | set(index.values) == set(theirs.state_dict_metadata)
    assert index.paths == theirs.planner_data
    for name, tensor in index.tensors.items():
        told = theirs.state_dict_metadata[name]
        assert tensor.shape == tuple(told.size)
        assert getattr(torch, tensor.dtype) == told.properties.dtype
        for piece, chunk in zip(tensor.chunks, told.chunks, strict=True):
            assert (piece.offsets, piece.shape) == (tuple(chunk.offsets), tuple(chunk.sizes))
            info = theirs.storage_data[MetadataIndex(name, chunk.offsets)]
            assert (piece.file_range.file, piece.file_range.offset, piece.file_range.nbytes) == (
                info.relative_path,
                info.offset,
                info.length,
            )
    assert set(index.values) == {"step", "list.0"}


def test_a_name_that_dcp_does_not_write_is_refused_and_not_called(tmp_path):
    proof = tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {proof}",)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata(paths=Bomb())))

    with pytest.raises(RefusedPickleError, match=r"cannot read .*\.metadata.*system"):
        read_index(tmp_path)
    assert not proof.exists()
    dcp.FileSystemReader(tmp_path).read_metadata()
    assert proof.exists(), "the bomb is none"


@pytest.mark.parametrize("name", ["builtins.eval", "torch.load", "torch.hub.load", "torch.Tensor"])
def test_only_the_names_that_dcp_writes(name):
    module, _, attribute = name.rpartition(".")
    data = b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + b"."

    with pytest.raises(RefusedPickleError):
        parse_index(data)


@pytest.mark.parametrize("file", ["../x.distcp", "/etc/passwd", "a/../../x", "", "a\0b"])
def test_a_file_outside_of_the_directory_is_refused(file):
    with pytest.raises(CorruptError, match="outside"):
        parse_index(pickle.dumps(metadata(file=file)))


def chunk(offsets, sizes):
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def tensor(size, *chunks):
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), list(chunks))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"places": {}}, "no file is named"),
        ({"entries": {"w": tensor([2], chunk([0, 0], [2, 1]))}}, "other dimensions"),
        ({"entries": {"w": 3}}, "expected a .*BytesStorageMetadata"),
        ({"entries": [1]}, "not a dict"),
        ({"entries": {3: BytesStorageMetadata()}}, "not text"),
        ({"places": {"w": _StorageInfo("a", 0, 1)}}, "expected a .*MetadataIndex"),
        ({"places": {MetadataIndex("w", [0]): _StorageInfo("a", -1, 1)}}, "not a file"),
        ({"places": {MetadataIndex("w", [0]): _StorageInfo("a", 0, 2**70)}}, "not a file"),
    ],
)
def test_nonsense_is_one_error(changes, message):
    with pytest.raises(CorruptError, match=message):
        parse_index(pickle.dumps(metadata(**changes)))


def test_an_extension_is_named():
    info = _StorageInfo("a", 0, 1, transform_descriptors=["stream.zstd"])

    with pytest.raises(CheckpointError, match=r"stream\.zstd"):
        parse_index(pickle.dumps(metadata(places={MetadataIndex("w", [0]): info})))


def test_a_directory_that_is_none(tmp_path):
    with pytest.raises(CheckpointError, match="not a DCP directory"):
        read_index(tmp_path)
    (tmp_path / ".metadata").mkdir()
    with pytest.raises(CheckpointError, match="cannot read"):
        read_index(tmp_path)


def test_saved_without_coordination_is_told(tmp_path):
    Path(tmp_path / "__0.metadata").write_bytes(b"")

    with pytest.raises(CheckpointError, match="rank coordination"):
        read_index(tmp_path)
