"""What a run is refused for before anything starts, and what it bears with."""

import socket

import pytest
from support.faulty import FaultyRun
from support.runs import JOBS, Run, wait_until

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]
PLAIN = JOBS / "plain.py"


def refused(run, *words, code=64):
    """Assert that *run* was refused in one line with all of *words*, and nothing was started."""
    assert run.finish() == code, run.said()
    (line,) = [x for x in run.err.read_text().splitlines() if not x.startswith("gpuops: warning")]
    assert all(word in line for word in words), line
    assert "Traceback" not in run.said()
    assert "]:ready" not in run.said()
    assert run.directory is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--nnodes=2", "--min-nodes=3"), ("--min-nodes", "3", "2")),
        (("--nnodes=3:2",), ("--nnodes", "3:2")),
        (("--nnodes=4", "--node-unit=3"), ("--node-unit", "3")),
        (("--standalone", "--nnodes=2"), ("--standalone", "--nnodes")),
        (("--nnodes=1:2", "--min-nodes=2"), ("--min-nodes", "1:2")),
    ],
    ids=" ".join,
)
def test_flags_that_contradict_each_other(tmp_path, flags, said):
    with Run(tmp_path, *flags, "--rdzv-endpoint=127.0.0.1:29400", PLAIN) as run:
        refused(run, *said)


@pytest.mark.parametrize(
    ("text", "said"),
    [("#!/bin/sh\necho hello\n", "a script for /bin/sh"), ("\x7fELF\x02\x01", "compiled")],
)
def test_a_script_that_is_not_python(tmp_path, text, said):
    script = tmp_path / "job"
    script.write_text(text)
    with Run(tmp_path / "run", script) as run:
        refused(run, "job", said, "--no-python")


def test_a_run_within_a_run(tmp_path):
    """The inner one is refused; the outer one is none the worse."""
    inner = tmp_path / "inner.py"
    inner.write_text(
        "import subprocess, sys\n"
        f"words = [sys.executable, '-m', 'gpuops', 'run', {str(PLAIN)!r}]\n"
        "done = subprocess.run(words, capture_output=True, text=True)\n"
        "print('inner', done.returncode, done.stdout + done.stderr)\n"
    )
    with Run(tmp_path / "run", inner, nproc=1) as run:
        assert run.finish() == 0, run.said()

    assert "inner 64" in run.said()
    assert "this is a worker of a `gpuops run` already" in run.said()
    assert "]:ready" not in run.said()


def test_a_torch_that_is_not_supported(tmp_path):
    """Said before training starts, with what is missing and what would do."""
    fake = tmp_path / "site" / "torch"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("__version__ = '1.9.0'\n")
    with Run(tmp_path / "run", PLAIN, env={"PYTHONPATH": str(fake.parent)}) as run:
        refused(run, "torch 1.9.0 is not supported", "use torch 2.8 or newer")


@pytest.fixture
def stranger():
    """Some other service, which answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.mark.soak
def test_a_board_port_that_somebody_else_has(tmp_path, stranger):
    port = stranger.getsockname()[1]
    flags = ("--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x", "--local-addr")
    with Run(tmp_path, *flags, "127.0.0.1", PLAIN, nproc=1) as run:
        assert run.finish() == 1, run.said()

    assert f"127.0.0.1:{port}" in run.err.read_text()
    assert "taken" in run.err.read_text()
    assert "Traceback" not in run.said()
    assert "]:ready" not in run.said()


def test_a_workers_port_that_is_taken_costs_no_restart(tmp_path):
    """It counts as infrastructure: with no restart allowed the run goes on once it is free."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ("--max-restarts", 0, f"--master-port={port}", "--master-addr=127.0.0.1")
        words = ("--steps", 5)
        with FaultyRun(tmp_path, tuple(map(str, flags)), words, script="train.py") as run:
            run.start()
            wait_until(run.rules, what="the first failure")
            taken.close()
            assert run.ended() == 0, run.said()

    assert set(run.rules()) == {"launch.infrastructure"}
    assert run.incidents()[0]["failure_class"] == "launcher.port_taken"
    assert run.incidents()[0]["actions"] == ["restart"]


def test_two_runs_with_one_id(tmp_path):
    """The second job is refused; the first one goes on waiting for its own second node."""
    with FaultyRun(tmp_path, (), ("none", "--steps", 5), n_nodes=2, nproc=1) as run:
        run.start(run.hosts[0])
        run.wait(lambda: run.folders(run.host), "the first run's folder")
        other = run.hosts[1].gpuops("run", *run.flags, PLAIN, env=run.env, timeout=90)
        assert other.returncode == 64, other.stderr
        assert "another job is running under the same --rdzv-id" in other.stderr
        assert list(run.hosts[1].runs.iterdir()) == []
        run.start(run.hosts[1])
        assert run.finish() == {"n0": 0, "n1": 0}, run.said()

    assert run.generations() == [0]
