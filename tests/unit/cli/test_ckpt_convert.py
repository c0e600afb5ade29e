"""``gpuops ckpt export`` and ``import`` as typed."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.made_states import make_state, part, whole

from gpuops.checkpoint.storage.directory import DirectoryStore
from gpuops.cli.main import run_command

W = torch.arange(24.0).reshape(6, 4)
RANKS = [
    {"model.w": part(W, slice(0, 4)), "model.b": whole(torch.ones(3).bfloat16())},
    {"model.w": part(W, slice(4, 6)), "model.b": whole(torch.ones(3).bfloat16())},
]


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "states")


@pytest.fixture
def ckpt(capsys, store):
    def run(*words):
        code = run_command(["ckpt", *map(str, words), "--dir", store.address])
        return code, *capsys.readouterr()

    return run


def test_export_one_file_and_import_it_again(tmp_path, store, ckpt):
    make_state(store, RANKS, step=10)

    code, out, _ = ckpt("export", "10", "--to", tmp_path / "m.safetensors", "--part", "model")
    assert code == 0
    assert "2 tensors" in out
    assert "omitted: what is not a tensor" in out
    loaded = load_file(tmp_path / "m.safetensors")
    assert torch.equal(loaded["w"], W)

    code, out, _ = ckpt(
        "import", tmp_path / "m.safetensors", "--from", "safetensors", "--step", "11", "--json"
    )
    body = json.loads(out)
    assert code == 0
    assert body["schema"] == "gpuops.checkpoint-import/1"
    assert body["checkpoint"]["name"] == "step-000000000011.e00001"
    assert ckpt("verify", "11")[0] == 0
    assert {item["name"] for item in json.loads(ckpt("show", "11", "--json")[1])["tensors"]} == {
        "model.w",
        "model.b",
    }


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_export_json(tmp_path, store, ckpt, form):
    make_state(store, RANKS, step=10)

    code, out, _ = ckpt("export", "--to", tmp_path / "x", "--format", form, "--json")
    body = json.loads(out)

    assert code == 0
    assert body["schema"] == "gpuops.checkpoint-export/1"
    assert body["state"] == {"step": 10, "epoch": 0}
    assert body["tensors"] == 2
    assert body["left_out"] == []
    assert all(
        (tmp_path / "x") in [path, *path.parents] for path in map(type(tmp_path), body["files"])
    )


def test_a_sharded_set(tmp_path, store, ckpt):
    make_state(store, RANKS, step=10)

    assert ckpt("export", "--to", tmp_path / "x", "--max-shard-size", "90B")[0] == 0
    assert (tmp_path / "x" / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--max-shard-size", "5 apples"], 64, "max-shard-size"),
        (["--max-shard-size", "0"], 64, "at least one byte"),
        (["--max-shard-size", "5GB", "--format", "torch"], 64, "safetensors"),
        (["--part", "none"], 64, "no part"),
        (["--format", "onnx"], 64, "onnx"),
    ],
)
def test_what_cannot_be(tmp_path, store, ckpt, words, code, message):
    make_state(store, RANKS, step=10)

    found, _, err = ckpt("export", "--to", tmp_path / "x", *words)

    assert found == code
    assert message in err
    assert not (tmp_path / "x").exists()


def test_a_place_that_is_not_there_is_a_usage_error(tmp_path, store, ckpt):
    make_state(store, RANKS, step=10)

    code, _, err = ckpt("export", "--to", tmp_path / "missing" / "x")
    assert (code, err) == (
        64,
        f"gpuops: there is no directory {tmp_path}/missing to write x into\n",
    )
    code, _, err = ckpt("import", tmp_path / "missing", "--from", "torch", "--step", "1")
    assert (code, err) == (64, f"gpuops: there is no {tmp_path}/missing\n")


def test_what_is_there_is_not_written_over(tmp_path, store, ckpt):
    make_state(store, RANKS, step=10)
    (tmp_path / "x").write_text("mine")

    code, _, err = ckpt("export", "--to", tmp_path / "x")

    assert code == 64
    assert "exists already" in err
    assert (tmp_path / "x").read_text() == "mine"


def test_a_file_that_is_refused(tmp_path, store, ckpt):
    torch.save({"x": torch.nn.Linear(1, 1)}, tmp_path / "x")

    code, _, err = ckpt("import", tmp_path / "x", "--from", "torch", "--step", "1")

    assert code == 70
    assert "--trust" in err
    assert store.list_states() == ()


def test_scratch_files_vanish_also_in_a_directory_that_is_new(tmp_path, store, ckpt):
    torch.save({"w": torch.ones(3)}, tmp_path / "x")

    assert ckpt("import", tmp_path / "x", "--from", "torch", "--step", "1")[0] == 0
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["step-000000000001.e00000"]
