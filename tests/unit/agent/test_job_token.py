"""The token of a job: given, or the user's own, made by the first agent that needs it."""

import multiprocessing
import os
import stat

import pytest

from gpuops.agent.checkpoint.follower import KeeperLocation
from gpuops.agent.launch.endpoint import Endpoint
from gpuops.agent.launch.job_token import given_token, own_token, read_own_token
from gpuops.agent.launch.plan import EndpointKind, EndpointPlan
from gpuops.checkpoint.peers.service import _RunningServer
from gpuops.checkpoint.transfer.wire import JobCredentials
from gpuops.cli.main import run_command
from gpuops.control.tcp.server_connection import ServerState
from gpuops.errors import UsageError
from gpuops.host.net.job_proof import JobHandshake

TOKEN = "5b" * 16


def token_file(folder, mode=0o600, text=f"{TOKEN}\n"):
    path = folder / "token"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_the_token_is_from_the_environment_or_from_a_private_file(tmp_path):
    uid = os.getuid()
    assert given_token({}, None, uid) == ""
    assert given_token({"GPUOPS_TOKEN": TOKEN}, None, uid) == TOKEN
    assert given_token({}, token_file(tmp_path), uid) == TOKEN
    assert given_token({"GPUOPS_TOKEN": "a" * 16}, token_file(tmp_path), uid) == "a" * 16


def test_a_token_that_others_can_read_is_refused_and_never_said(tmp_path):
    for mode in (0o640, 0o604):
        with pytest.raises(UsageError, match="chmod 600") as caught:
            given_token({}, token_file(tmp_path, mode), os.getuid())
        assert TOKEN not in str(caught.value)
    (tmp_path / "link").symlink_to(token_file(tmp_path))
    for path in ("link", "no-such", "."):
        with pytest.raises(UsageError, match="--token-file="):
            given_token({}, str(tmp_path / path), os.getuid())


def test_a_short_token_is_refused_without_being_said(tmp_path):
    for env, file in (
        ({"GPUOPS_TOKEN": "hunter2"}, None),
        ({}, token_file(tmp_path, text="hunter2")),
        ({"GPUOPS_TOKEN": "hunter2" * 1000}, None),
    ):
        with pytest.raises(UsageError, match="openssl rand") as caught:
            given_token(env, file, os.getuid())
        assert "hunter2" not in str(caught.value)


def made_together(path, start, tokens):
    start.wait(60)
    tokens.put(own_token(path, os.getuid()))


def test_agents_that_start_together_make_one_token(tmp_path):
    fork, n_agents = multiprocessing.get_context("fork"), 8
    start, tokens = fork.Barrier(n_agents), fork.Queue()
    path = tmp_path / "state" / "gpuops" / "token"
    agents = [
        fork.Process(target=made_together, args=(path, start, tokens)) for _ in range(n_agents)
    ]
    for agent in agents:
        agent.start()
    found = {tokens.get(timeout=60) for _ in agents}
    for agent in agents:
        agent.join(60)

    assert found == {read_own_token(path, os.getuid())}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [file.name for file in path.parent.iterdir()] == ["token"]


def test_reading_makes_no_token(tmp_path):
    assert read_own_token(tmp_path / "token", os.getuid()) == ""
    assert list(tmp_path.iterdir()) == []


def test_an_own_token_that_others_planted_or_can_read_is_refused(tmp_path):
    mine = own_token(tmp_path / "mine" / "token", os.getuid())
    (tmp_path / "token").symlink_to(tmp_path / "mine" / "token")
    with pytest.raises(UsageError, match=r"token cannot be made: .*GPUOPS_TOKEN=\$\(openssl"):
        own_token(tmp_path / "token", os.getuid())

    (tmp_path / "token").unlink()
    os.mkfifo(tmp_path / "token")
    with pytest.raises(UsageError, match="it is not a file"):
        own_token(tmp_path / "token", os.getuid())

    (tmp_path / "token").unlink()
    token_file(tmp_path, 0o644)
    with pytest.raises(UsageError, match="chmod 600") as caught:
        own_token(tmp_path / "token", os.getuid())
    assert mine not in str(caught.value)


def test_an_own_token_that_gpuops_did_not_make_is_refused(tmp_path):
    """The exploit: who may write the folder puts a private file of the user there, and knows it."""
    known = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA ada@login1"
    token_file(tmp_path, text=known)

    for use in (own_token, read_own_token):
        with pytest.raises(UsageError, match="no token that gpuops made; remove it") as caught:
            use(tmp_path / "token", os.getuid())
        assert known not in str(caught.value)
    (tmp_path / "token").unlink()
    assert own_token(tmp_path / "token", os.getuid()) == read_own_token(
        tmp_path / "token", os.getuid()
    )


def test_a_token_that_cannot_be_made_says_how_to_give_one(tmp_path):
    (tmp_path / "state").write_text("no directory")
    with pytest.raises(UsageError, match=r"state/token cannot be made: .*--token-file FILE"):
        own_token(tmp_path / "state" / "token", os.getuid())


def test_what_holds_the_token_does_not_show_it():
    requested = ("127.0.0.1", "n", TOKEN, "job")
    for holder in (
        KeeperLocation(me=None, token=TOKEN, job="job"),
        _RunningServer(requested, JobCredentials("job", TOKEN), None, None, None),
        EndpointPlan(kind=EndpointKind.TCP, run_key="r", token=TOKEN),
        ServerState(run_key="r", token=TOKEN),
        JobHandshake(TOKEN.encode(), b""),
        Endpoint(kind=EndpointKind.POSTGRES, run_key="r", url=f"postgresql://ada:{TOKEN}@db/x"),
    ):
        assert TOKEN not in repr(holder)


@pytest.mark.torch
def test_what_a_run_starts_does_not_get_the_token(tmp_path, monkeypatch):
    """The exploit: a site's ``--decide`` or a detector that prints its environment."""
    script = tmp_path / "train.py"
    script.touch()
    given = {}

    def launch(request, _settings, env, *_rest):
        given.update(env)
        assert request.plan.endpoint.token == TOKEN
        raise UsageError("far enough")

    monkeypatch.setattr("gpuops.agent.launch.launch.launch", launch)
    monkeypatch.setattr("gpuops.cli.run._requeue_on_early_signal", lambda: None)
    monkeypatch.setenv("GPUOPS_TOKEN", TOKEN)
    monkeypatch.setenv("GPUOPS_STATE", str(tmp_path))
    meet = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:1")

    assert run_command(["run", *meet, str(script)]) == 64
    assert given["GPUOPS_STATE"] == str(tmp_path)
    assert TOKEN not in given.values()
