"""What people type after ``gpuops run``, and what becomes of it."""

import pytest

from gpuops.agent.arguments import HelpAskedError, help_text, parse
from gpuops.errors import UsageError

pytestmark = pytest.mark.torch


@pytest.fixture
def torch_parser():
    from torch.distributed.run import get_args_parser

    return get_args_parser  # a new one for each parse, as in a process


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


@pytest.mark.parametrize(
    "front",
    [
        [],
        ["--"],
        ["torchrun"],
        ["--", "torchrun"],
        ["/opt/venv/bin/torchrun"],
        ["python", "-m", "torch.distributed.run"],
        ["python3", "-u", "-m", "torch.distributed.run"],
        ["/usr/bin/python3.11", "-m", "torch.distributed.run"],
    ],
    ids=" ".join,
)
def test_the_spellings_of_torchrun_are_the_same(torch_parser, script, front):
    words = [*front, "--nproc-per-node", "2", "--max-restarts=5", script, "--lr", "1", "--", "-x"]

    found = parse(words, {}, torch_parser()).torch

    assert found.training_script == script
    assert found.training_script_args[:2] == ["--lr", "1"]
    assert (found.nproc_per_node, found.max_restarts) == ("2", 5)


def test_flags_before_and_behind_the_launcher_both_count(torch_parser, script):
    words = ["--store", "sqlite:///x", "--nproc-per-node=4", "torchrun", "--role", "a", script]

    request = parse(words, {}, torch_parser())

    assert request.store == "sqlite:///x"
    assert (request.torch.nproc_per_node, request.torch.role) == ("4", "a")


def test_python_before_a_script_or_module_is_left_out(torch_parser, script):
    assert parse(["python", script, "a"], {}, torch_parser()).torch.training_script == script
    module = parse(["python", "-m", "pkg.train", "a"], {}, torch_parser()).torch
    assert (module.module, module.training_script) == (True, "pkg.train")
    with pytest.raises(UsageError, match="after `python`"):
        parse(["python", "-c", "1"], {}, torch_parser())


def test_the_scripts_own_flags_are_the_scripts(torch_parser, script):
    found = parse([script, "--help", "--nproc-per-node", "9", "--store", "x"], {}, torch_parser())

    assert found.torch.training_script_args == ["--help", "--nproc-per-node", "9", "--store", "x"]
    assert found.store is None


def test_restarts_default_to_three_unless_said_otherwise(torch_parser, script, monkeypatch):
    assert parse([script], {}, torch_parser()).torch.max_restarts == 3
    assert parse(["--max-restarts", "0", script], {}, torch_parser()).torch.max_restarts == 0

    monkeypatch.setenv("PET_MAX_RESTARTS", "7")  # torch's parser itself reads the environment
    found = parse([script], {"PET_MAX_RESTARTS": "7"}, torch_parser())
    assert found.torch.max_restarts == 7


def test_output_goes_to_console_and_file_unless_the_user_chose(torch_parser, script):
    assert parse([script], {}, torch_parser()).torch.tee == "3"
    chosen = parse(["-r", "1", script], {}, torch_parser()).torch
    assert (chosen.redirects, chosen.tee) == ("1", "0")


@pytest.mark.parametrize("flags", [[], ["--nnodes=1"], ["--standalone"], ["--nnodes=1:1"]])
def test_one_node_gets_a_private_rendezvous(torch_parser, script, flags):
    request = parse([*flags, script], {}, torch_parser())

    assert request.is_private
    assert request.torch.rdzv_endpoint == ""
    assert request.torch.local_addr == "127.0.0.1"
    assert request.master is None


def test_a_port_given_for_one_node_is_what_the_workers_see(torch_parser, script):
    request = parse(["--master-port", "29512", script], {}, torch_parser())

    assert request.is_private
    assert request.master == ("127.0.0.1", 29512)


@pytest.mark.parametrize(
    "flags",
    [
        ["--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1"],
        ["--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv-endpoint=h:29400"],
        ["--rdzv-backend=c10d", "--rdzv-endpoint=h:29400", "--rdzv-id=7"],
    ],
)
def test_several_nodes_or_an_endpoint_stay_as_torchrun_has_them(torch_parser, script, flags):
    from torch.distributed.run import parse_args

    request = parse([*flags, script], {}, torch_parser())
    theirs = parse_args([*flags, script])

    assert not request.is_private
    for name in ("nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "node_rank", "local_addr"):
        assert getattr(request.torch, name) == getattr(theirs, name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: training_script"),
        (["--no-such-flag", "x.py"], "unrecognized arguments|required"),
        (["--nproc-per-node"], "expected one argument"),
        (["--max-restarts", "many", "x.py"], "invalid int value"),
        (["no_such.py"], "'no_such.py' does not exist"),
        (["."], "'.' is a directory"),
        (["--no-python", "no-such-program"], "is not executable"),
        (["--no-python", "-m", "x"], "exclude each other"),
    ],
)
def test_bad_input_is_one_line(torch_parser, words, said):
    with pytest.raises(UsageError, match=said) as caught:
        parse(words, {}, torch_parser())

    assert "\n" not in str(caught.value)
    assert not str(caught.value).startswith("gpuops")
    assert caught.value.exit_code == 64


def test_a_program_that_is_not_executable_is_said(torch_parser, script):
    with pytest.raises(UsageError, match="chmod"):
        parse(["--no-python", script], {}, torch_parser())


def test_help_shows_torchruns_flags_and_ours(torch_parser):
    text = help_text(torch_parser(), {})

    for flag in ("--nproc-per-node", "--rdzv-endpoint", "--run-name", "--store", "--run-dir"):
        assert flag in text
    assert "last_call_timeout=5" in text
    with pytest.raises(HelpAskedError):
        parse(["--help"], {}, torch_parser())
