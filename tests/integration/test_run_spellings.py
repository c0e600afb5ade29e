"""``gpuops run`` as people type it, with scripts that need no torch."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import JOBS, Run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
PLAIN = JOBS / "plain.py"
ROOT = Path(__file__).parents[2]


def argv_of(run):
    (line,) = {li.partition("argv ")[2] for li in run.said().splitlines() if "argv " in li}
    return json.loads(line)


@pytest.mark.parametrize(
    "front",
    [
        pytest.param(["torchrun", "--nproc-per-node=2"], marks=pytest.mark.soak),
        ["--", "torchrun", "--nproc-per-node=2"],
        pytest.param(
            ["python", "-m", "torch.distributed.run", "--nproc-per-node=2"], marks=pytest.mark.soak
        ),
    ],
    ids=" ".join,
)
def test_torchruns_own_command_line_works_behind_gpuops_run(tmp_path, front):
    # Started anew: what a fork has imported says nothing.
    with Run(tmp_path, *front, PLAIN, "end", "--x", nproc=None, popen=subprocess.Popen) as run:
        assert run.finish() == 0, run.said()

    assert argv_of(run) == [str(PLAIN), "end", "--x"]
    assert run.payloads("attempt.started")[0]["world_size"] == 2
    assert "torch False" in run.said()


def test_a_module(tmp_path):
    with Run(tmp_path, "-m", "plain", "end", cwd=JOBS, nproc=1) as run:
        assert run.finish() == 0, run.said()

    assert argv_of(run) == [str(PLAIN), "end"]
    assert run.payloads("run.started")[0]["name"] == "plain"


def test_a_program_that_is_not_python(tmp_path):
    with Run(tmp_path, "--no-python", "sh", "-c", "echo out $RANK; exit 4", nproc=1) as run:
        assert run.finish() == 1

    exits = run.payloads("worker.exited")
    assert [p["exit_code"] for p in exits] == [4, 4, 4, 4]
    assert exits[0]["log_tail"] == ["out 0"]


def test_the_users_log_directory_and_streams_are_used(tmp_path):
    logs = tmp_path / "logs"
    flags = ("--log-dir", logs, "--redirects", "1", "--run-name", "my run")
    with Run(tmp_path, *flags, PLAIN, nproc=1) as run:
        assert run.finish() == 0

    (out,) = logs.rglob("stdout.log")
    assert "argv" in out.read_text()
    assert "argv" not in run.out.read_text()
    assert list(logs.rglob("stderr.log")) == []
    assert str(out).startswith(run.payloads("attempt.started")[0]["log_dir"])
    assert run.payloads("run.started")[0]["name"] == "my run"


@pytest.mark.parametrize(
    "words",
    [
        ["no-such-script.py"],
        ["--no-such-flag", PLAIN],
        ["--nnodes=x", PLAIN],
        ["--nproc-per-node=many", PLAIN],
        ["--tee=9", PLAIN],
        ["--nproc-per-node=0", PLAIN],
        ["--rdzv-backend=zzz", "--rdzv-endpoint=h:1", PLAIN],
        ["--log-dir=/proc/no", PLAIN],
    ],
    ids=lambda words: str(words[0]),
)
def test_bad_input_ends_with_64_and_one_line_before_anything_starts(tmp_path, words):
    with Run(tmp_path, *words, nproc=None) as run:
        assert run.finish() == 64

    (line,) = run.err.read_text().splitlines()
    assert line.startswith("gpuops: ")
    assert str(words[0]).partition("=")[0].lstrip("-") in line.replace("_", "-")
    assert not run.runs.exists() or run.directory is None
    assert sys.executable not in line


def test_ctrl_c_during_the_imports_is_one_line_and_130(tmp_path):
    """A module stands for torch whose import takes long and swallows KeyboardInterrupt."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "print('importing', flush=True)\n"
        "while True:\n"
        "    try:\n"
        "        while True: pass\n"
        "    except BaseException: pass\n"
    )
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    with Run(tmp_path / "run", PLAIN, env=env) as run:
        run.wait_for_output("importing")
        run.signal(signal.SIGINT)

        assert run.finish() == 130, run.said()

    assert run.err.read_text() == "gpuops: interrupted\n"


def test_a_python_that_is_not_there_is_one_line_before_anything_starts(tmp_path):
    missing = tmp_path / "no-python"
    with Run(tmp_path, PLAIN, env={"PYTHON_EXEC": str(missing)}) as run:
        assert run.finish() == 64

    (line,) = run.err.read_text().splitlines()
    assert line == f"gpuops: cannot start worker 0: {missing}: No such file or directory"
    assert run.directory is None


@pytest.mark.parametrize("starter", ["python", "--no-python"])
def test_a_program_that_cannot_be_executed_ends_the_run_at_once(tmp_path, starter):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF no program")
    program.chmod(0o755)
    words, env = ([PLAIN], {"PYTHON_EXEC": str(program)})
    if starter == "--no-python":
        words, env = ([starter, program], {})
    with Run(tmp_path / "run", *words, env=env) as run:
        assert run.finish() == 64, run.said()

    said = run.err.read_text()
    assert "Traceback" not in said
    assert f"cannot execute {program}: Exec format error; install it for this machine" in said
    assert "no restart: it would fail for the same reason" in said
    assert [p["outcome"] for p in run.payloads("run.ended")] == ["failed"]
    (incident,) = run.incidents()
    assert (incident["failure_class"], incident["state"]) == ("launcher.start_failed", "closed")


def test_a_secret_in_the_runs_name_is_in_no_name_of_a_folder(tmp_path):
    with Run(tmp_path, "--run-name", "password=hunter2", PLAIN, nproc=1) as run:
        assert run.finish() == 0

    assert "hunter2" not in run.directory.name
    assert "hunter2" not in str(run.events())
