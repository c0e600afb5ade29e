"""What people type after ``gpuops run``, and what becomes of it."""

import pytest
from support.launches import requested, typed_of

from gpuops.agent.launch.options import HelpAskedError, help_text
from gpuops.agent.launch.plan import EndpointKind
from gpuops.errors import UsageError

pytestmark = pytest.mark.torch


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
def test_the_spellings_of_torchrun_are_the_same(script, front):
    words = [*front, "--nproc-per-node", "2", "--max-restarts=5", script, "--lr", "1", "--", "-x"]

    found = requested(*words).torch

    assert found.training_script == script
    assert found.training_script_args[:2] == ["--lr", "1"]
    assert (found.nproc_per_node, found.max_restarts) == ("2", 5)


def test_flags_before_and_behind_the_launcher_both_count(script):
    words = ["--store", "sqlite:///x", "--nproc-per-node=4", "torchrun", "--role", "a", script]

    request = requested(*words)

    assert typed_of(words).store == "sqlite:///x"
    assert (request.torch.nproc_per_node, request.torch.role) == ("4", "a")


def test_python_before_a_script_or_module_is_left_out(script):
    assert requested("python", script, "a").torch.training_script == script
    module = requested("python", "-m", "pkg.train", "a").torch
    assert (module.module, module.training_script) == (True, "pkg.train")
    with pytest.raises(UsageError, match="after `python`"):
        requested("python", "-c", "1")


def test_the_scripts_own_flags_are_the_scripts(script):
    found = requested(script, "--help", "--nproc-per-node", "9", "--store", "x")

    assert found.torch.training_script_args == ["--help", "--nproc-per-node", "9", "--store", "x"]
    assert typed_of([script, "--store", "x"]).store is None


@pytest.mark.parametrize(
    ("flags", "env", "budget"),
    [
        ([], {}, (3, None)),
        (["--max-restarts", "0"], {}, (0, None)),
        (["--max_restarts=10/6h"], {}, (10, 21600.0)),
        ([], {"PET_MAX_RESTARTS": "7/1h"}, (7, 3600.0)),
        (["--max-restarts=2"], {"PET_MAX_RESTARTS": "7"}, (2, None)),
        ([], {"GPUOPS_MAX_RESTARTS": "5"}, (5, None)),
        ([], {"GPUOPS_MAX_RESTARTS": "5", "PET_MAX_RESTARTS": "7"}, (7, None)),
    ],
)
def test_the_budget_of_restarts_is_three_unless_said_otherwise(script, flags, env, budget):
    request = requested(*flags, script, env=env)

    terms = request.plan.restart_policy
    assert (terms.restarts_max, terms.restarts_window_s) == budget
    assert request.torch.max_restarts == budget[0]


def test_output_goes_to_console_and_file_unless_the_user_chose(script):
    assert requested(script).torch.tee == "3"
    chosen = requested("-r", "1", script).torch
    assert (chosen.redirects, chosen.tee) == ("1", "0")


@pytest.mark.parametrize("flags", [[], ["--nnodes=1"], ["--standalone"], ["--nnodes=1:1"]])
def test_one_node_gets_a_private_rendezvous(script, flags):
    request = requested(*flags, script)

    assert request.is_private
    assert request.torch.rdzv_endpoint == ""
    assert request.torch.local_addr == "127.0.0.1"
    assert request.master is None


def test_a_port_given_for_one_node_is_what_the_workers_see(script):
    request = requested("--master-port", "29512", script)

    assert request.is_private
    assert request.master == ("127.0.0.1", 29512)


def test_one_node_with_an_endpoint_has_nobody_to_meet_there(script):
    request = requested("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=7", script)

    assert request.plan.endpoint.kind is EndpointKind.PRIVATE
    assert request.torch.rdzv_id == "7"


def test_torchs_own_functions_read_the_namespace_that_is_left(script):
    from torch.distributed.run import config_from_args

    request = requested("--nnodes=1:4", "--rdzv-endpoint=h:29400", "--nproc-per-node=2", script)
    config, _entry, words = config_from_args(request.torch)

    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 4, 2)
    assert script in words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: training_script"),
        (["--no-such-flag", "x.py"], "unrecognized arguments|required"),
        (["--nproc-per-node"], "expected one argument"),
        (["--max-restarts", "many", "-m", "x"], "--max-restarts=many: expected a number"),
        (["--max-restarts=1001/9h", "-m", "x"], "1001/9h: expected at most 1000 restarts in"),
        (["no_such.py"], "'no_such.py' does not exist"),
        (["."], "'.' is a directory"),
        (["--no-python", "no-such-program"], "is not executable"),
        (["--no-python", "-m", "x"], "exclude each other"),
    ],
)
def test_bad_input_is_one_line(words, said):
    with pytest.raises(UsageError, match=said) as caught:
        requested(*words)

    assert "\n" not in str(caught.value)
    assert not str(caught.value).startswith("gpuops")
    assert caught.value.exit_code == 64


def test_a_program_that_is_not_executable_is_said(script):
    with pytest.raises(UsageError, match="chmod"):
        requested("--no-python", script)


def test_help_shows_torchruns_flags_and_ours():
    from torch.distributed.run import get_args_parser

    text = help_text(get_args_parser(), {})

    for flag in ("--nproc-per-node", "--rdzv-endpoint", "--run-name", "--store", "--run-dir"):
        assert flag in text
    for flag in ("--spares", "--min-nodes", "--hang-timeout", "--on-exhausted", "--decide"):
        assert flag in text
    assert "93 do not requeue" in text
    with pytest.raises(HelpAskedError):
        requested("--help")


def test_a_drill_needs_its_flag_and_a_name(script):
    env = {"GPUOPS_DRILL": "slow:rank=1"}

    asked = requested("--allow-drills", script, env=env)
    assert asked.drill.kind == "slow"
    assert "--allow-drills: the fault slow:rank=1 is injected" in asked.warnings

    ignored = requested(script, env=env)
    assert ignored.drill is None
    assert "GPUOPS_DRILL is ignored: a fault is injected with --allow-drills only" in (
        ignored.warnings
    )
    assert requested(script, env={"GPUOPS_DRILL": "nonsense"}).drill is None
    assert requested("--allow-drills", script).drill is None
    with pytest.raises(UsageError, match="there is no fault 'nonsense'"):
        requested("--allow-drills", script, env={"GPUOPS_DRILL": "nonsense"})
