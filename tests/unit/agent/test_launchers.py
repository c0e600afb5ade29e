"""Other launchers behind ``gpuops run``: what of their settings becomes torchrun's flags."""

import os
import sys

import pytest
from support.launches import typed_of

from gpuops.agent.launch.launchers import LOCAL_RANK, carry_over, launcher_of, reader
from gpuops.agent.launch.options import read_words
from gpuops.errors import UsageError

pytestmark = pytest.mark.torch
DEEPSPEED = {
    "hostfile": "/job/hostfile",
    "include": "",
    "exclude": "",
    "autotuning": "",
    "num_nodes": -1,
    "num_gpus": -1,
    "force_multi": False,
    "module": False,
    "no_python": False,
    "no_local_rank": False,
    "user_script": "train.py",
    "user_args": ["-x"],
}


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def read_as(found, *words):
    """Return what gpuops makes of *words* where the launcher asks for *found*."""
    from torch.distributed.run import get_args_parser

    return read_words([str(word) for word in words], {}, get_args_parser(), lambda *_: found)


def test_torchruns_flags_and_the_workers_environment_are_carried_over(script):
    flags = {"nproc_per_node": "8", "role": "r", "master_port": "29500"}
    env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "MASTER_ADDR": "127.0.0.1"}
    launcher = {"flags": flags, "program": [script, "--lr", "1"], "env": env}

    typed = read_as(launcher, "--max-restarts=5", "accelerate", "launch", "--fsdp", script)

    assert typed.found.training_script_args == ["--lr", "1"]
    assert (typed.found.nproc_per_node, typed.found.role) == ("8", "r")
    assert typed.found.max_restarts == "5"
    assert typed.found.master_port is None  # its default, which would collide
    assert typed.env == {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert typed.command[1] == "accelerate"


def test_what_is_typed_before_the_launcher_wins(script):
    launcher = {"flags": {"nproc_per_node": "8"}, "program": [script], "env": {}}

    assert read_as(launcher, "--nproc-per-node=2", "trl", "sft").found.nproc_per_node == "2"


def test_nodes_of_accelerate_stay_with_their_port(script):
    flags = {"nnodes": "2", "node_rank": 1, "master_addr": "n0", "master_port": "29500"}

    found = read_as({"flags": flags, "program": [script], "env": {}}, "accelerate-launch").found

    assert (found.nnodes, found.node_rank, found.master_port) == ("2", 1, 29500)


def test_a_script_that_accelerate_starts_once_is_one_worker(script):
    env = {"ACCELERATE_USE_CPU": "True", "MASTER_PORT": "29500"}
    typed = read_as({"command": [sys.executable, script, "a"], "env": env}, "accelerate", "launch")
    module = {"command": [sys.executable, "-m", "pkg.train"], "env": {}}

    assert (typed.found.nproc_per_node, typed.found.training_script_args) == ("1", ["a"])
    assert typed.env == {"ACCELERATE_USE_CPU": "True"}
    assert read_as(module, "accelerate", "launch").found.module
    no_python = read_as({"command": ["sh", "x"], "env": {}}, "accelerate", "launch").found
    assert (no_python.no_python, no_python.training_script) == (True, "sh")


@pytest.mark.parametrize(
    ("asked", "nproc", "args", "env"),
    [
        ({}, "gpu", [LOCAL_RANK, "-x"], {}),
        ({"num_gpus": 4, "no_local_rank": True}, "4", ["-x"], {}),
        ({"include": "localhost:1,3"}, "2", [LOCAL_RANK, "-x"], {"CUDA_VISIBLE_DEVICES": "1,3"}),
    ],
)
def test_deepspeed_on_one_node(script, asked, nproc, args, env):
    launcher = {"deepspeed": DEEPSPEED | {"user_script": script} | asked}

    typed = read_as(launcher, "deepspeed", script)

    assert typed.found.nproc_per_node == nproc
    assert typed.found.training_script_args == args
    assert typed.env == env


def test_what_deepspeed_would_do_and_we_do_not_is_a_warning(script):
    launcher = {"deepspeed": DEEPSPEED | {"user_script": script, "bind_cores_to_rank": True}}

    assert read_as(launcher, "deepspeed", script).warnings == (
        "deepspeed's --bind_cores_to_rank is left out",
    )


@pytest.mark.parametrize(
    ("words", "found", "expected"),
    [
        (["deepspeed"], {"deepspeed": DEEPSPEED | {"hostfile": __file__}}, "srun --ntasks"),
        (["deepspeed"], {"deepspeed": DEEPSPEED | {"exclude": "localhost:1"}}, "VISIBLE_DEVICES"),
        (["deepspeed"], {"deepspeed": DEEPSPEED | {"autotuning": "run"}}, "autotuning"),
        (["accelerate", "launch"], {"command": ["mpirun", "x"], "env": {}}, "srun --ntasks"),
        (["accelerate", "config"], {}, "`accelerate launch` starts a training"),
        (["trl", "env"], {"error": "it starts no training"}, "it starts no training; write"),
        (["litgpt", "pretrain"], {}, "--devices N"),
        (["--nproc-per-node=2", "litgpt", "pretrain", "--devices=4"], {}, "--devices=4"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_carried_over_is_said_with_what_to_write(words, found, expected):
    with pytest.raises(UsageError, match=expected):
        read_as(found, *words)


@pytest.mark.parametrize(
    ("words", "nproc"),
    [
        (["litgpt", "pretrain", "--devices", "2", "--num_nodes=3"], "2"),
        (["litgpt", "pretrain", "--devices=auto"], "gpu"),
        (["--nproc-per-node=2", "litgpt", "pretrain", "--config", "x.yaml"], "2"),
    ],
)
def test_litgpts_devices_are_workers(words, nproc):
    found = read_as({}, *words).found

    assert (found.module, found.training_script) == (True, "litgpt")
    assert found.nproc_per_node == nproc
    assert found.nnodes == ("3" if "--num_nodes=3" in words else None)
    assert found.training_script_args[0] == "pretrain"


def test_a_script_of_a_launchers_name_stays_a_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launcher_of("deepspeed", is_module=False) == "deepspeed"
    assert launcher_of("/venv/bin/accelerate", is_module=False) == "accelerate"
    assert launcher_of("accelerate.commands.launch", is_module=True) == "accelerate-launch"
    assert launcher_of("deepspeed", is_module=True) is None

    (tmp_path / "deepspeed").touch()

    assert launcher_of("deepspeed", is_module=False) is None
    assert typed_of(["./deepspeed"]).found.training_script == "./deepspeed"


def test_a_program_on_the_path_is_no_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="or --no-python before it"):
        typed_of(["sh", "-c", "true"])


def test_ranks_that_accelerate_does_not_start_are_missed_in_one_line(tmp_path, script):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    config = tmp_path / "config.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nmixed_precision: 'no'\n"
        "num_machines: 1\nnum_processes: 2\nuse_cpu: true\n"
    )
    words, read = ["launch", "--config_file", str(config), script], reader(dict(os.environ))

    found = carry_over("accelerate", words, {}, read)
    typed = carry_over("accelerate", words, {"nproc_per_node": "2"}, read)

    (line,) = found.warnings
    assert (found.flags["nproc_per_node"], typed.warnings) == ("1", ())
    assert "one process here, though 2 are asked for" in line
    assert "put --nproc-per-node=2 before accelerate" in line


def test_the_installed_accelerate_is_asked_itself(tmp_path, script):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    config = tmp_path / "config.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n"
        "num_machines: 1\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"
    )
    read = reader(dict(os.environ))

    found = carry_over("accelerate", ["launch", "--config_file", str(config), script], {}, read)

    assert found.flags == {"nproc_per_node": "2"}
    assert found.program == (script,)
    assert found.env["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert (found.env["ACCELERATE_USE_FSDP"], found.env["FSDP_VERSION"]) == ("true", "2")
    with pytest.raises(UsageError, match=r"unrecognized|required"):
        carry_over("accelerate", ["launch", "--no-such-flag"], {}, read)
