"""How ``gpuops run`` ends: budgets, cancellation, and what must not be left behind."""

import os
import signal
import socket
import subprocess

import psutil
import pytest
from support.ports import free_port
from support.runs import JOBS, Run, is_alive, wait_until

from gpuops.agent.launch.launch import CANCEL_GRACE_S
from gpuops.host.process.inspect import read_details

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
PLAIN = JOBS / "plain.py"


def workers_of(run):
    return list(run.state()["pids"].values())


def assert_ended_soon(workers):
    """Fail unless *workers* end well within the grace; their agent may still write its records."""
    wait_until(lambda: not any(map(is_alive, workers)), CANCEL_GRACE_S - 5, "the workers' end")


def rings_of(run):
    from pathlib import Path

    return Path(run.state()["ring_dir"]).parent


@pytest.mark.parametrize(
    ("restarts", "attempts", "code", "said"),
    [(0, 1, 1, "no restart is allowed"), (5, 2, 93, "exit 93: do not requeue")],
)
def test_raising_before_the_first_step_ends_with_the_budget_or_at_the_second_time(
    tmp_path, restarts, attempts, code, said
):
    with Run(tmp_path, f"--max-restarts={restarts}", PLAIN, "raise") as run:
        assert run.finish() == code, run.said()

    assert len(run.payloads("attempt.started")) == attempts
    assert len(run.incidents()) == attempts
    assert {incident["failure_class"] for incident in run.incidents()} == {"user_code.exception"}
    assert {incident["state"] for incident in run.incidents()} == {"closed"}
    assert run.payloads("attempt.first_step") == []
    assert run.payloads("run.ended")[0]["exit_code"] == code
    assert said in run.err.read_text()
    assert "RuntimeError: no such dataset" in run.err.read_text()
    assert "hunter2" not in str(run.events())
    assert (run.directory / f"generation-{attempts - 1}" / "rank0" / "stderr.log").exists()


def test_the_exit_code_of_a_script_is_in_the_record(tmp_path):
    with Run(tmp_path, "--max-restarts=0", PLAIN, "exit3") as run:
        assert run.finish() == 1

    (first, *_rest) = [p for p in run.payloads("worker.exited") if not p["terminated"]]
    assert first["exit_code"] == 3
    assert run.payloads("attempt.ended")[0]["exit_code"] == 3


@pytest.mark.parametrize(
    ("number", "code", "outcome"),
    [(signal.SIGINT, 130, "cancelled"), (signal.SIGTERM, 85, "preempted")],
)
def test_a_cancelled_run_leaves_no_worker_and_one_closed_incident(tmp_path, number, code, outcome):
    with Run(tmp_path, PLAIN, "sleep") as run:
        workers, rings = workers_of(run), rings_of(run)
        run.wait_for_output("[default0]:ready")
        run.wait_for_output("[default1]:ready")
        run.signal(number)

        # A script that does not ask whether to stop cannot use the grace: nobody waits for it.
        assert_ended_soon(workers)
        assert run.finish() == code, run.said()

    (incident,) = run.incidents()
    assert (incident["failure_class"], incident["state"]) == (f"scheduler.{outcome}", "closed")
    assert run.payloads("run.ended")[0]["outcome"] == outcome
    assert [p["outcome"] for p in run.payloads("attempt.ended")] == ["cancelled"]
    assert all(p["terminated"] for p in run.payloads("worker.exited"))
    assert not rings.exists()


def test_a_notice_that_comes_while_every_rank_ends_by_itself_changes_nothing(tmp_path):
    script, go = tmp_path / "ends.py", tmp_path / "go"
    script.write_text(
        "import atexit, pathlib, time\n"
        "def tidy():\n"
        "    print('tidying up', flush=True)\n"
        "    end = time.monotonic() + 60\n"
        f"    while time.monotonic() < end and not pathlib.Path({str(go)!r}).exists():\n"
        "        time.sleep(0.02)\n"
        "atexit.register(tidy)\n"
    )
    with Run(tmp_path / "run", script) as run:
        run.wait_for_output("[default0]:tidying up")
        run.wait_for_output("[default1]:tidying up")
        run.signal(signal.SIGTERM)
        wait_until(lambda: run.payloads("drain.requested"), what="the drain")
        go.touch()

        assert run.finish() == 0, run.said()
    assert run.incidents() == []
    assert run.payloads("run.ended")[0]["outcome"] == "completed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_preemption_while_torch_is_imported_asks_for_a_requeue(tmp_path, number):
    with Run(tmp_path, PLAIN, "sleep") as run:

        def is_listening():
            look = read_details(run.process.pid)
            return look is not None and number in look.caught

        wait_until(is_listening, what="its handler")
        run.signal(number)

        assert run.finish() == 85, run.said()
    assert f"{number.name} before the run began: exit 85" in run.said()
    assert run.directory is None


def test_ctrl_c_during_a_recovery_is_an_incident_of_its_own_and_a_second_one_ends_at_once(tmp_path):
    """The second attempt's worker ignores SIGINT and SIGTERM: only a second Ctrl-C is quick."""
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import os, signal, time\n"
        "for name in ('SIGINT', 'SIGTERM'):\n"
        "    signal.signal(getattr(signal, name), lambda *_: print('not yet', flush=True))\n"
        "if os.environ['GPUOPS_GENERATION'] == '0':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('ready', flush=True)\n"
        "end = time.monotonic() + 120\n"
        "while time.monotonic() < end:\n"
        "    time.sleep(0.05)\n"
    )
    with Run(tmp_path / "run", "--max-restarts=1", script, nproc=1) as run:
        (worker,) = run.state(generation=1)["pids"].values()
        rings = rings_of(run)
        wait_until(lambda: not (rings / "generation-0").exists(), what="the end of its old rings")
        assert (rings / "generation-1").is_dir()
        run.wait_for_output("ready")
        run.signal(signal.SIGINT)
        run.wait_for_output("not yet")
        run.signal(signal.SIGINT)

        assert_ended_soon([worker])
        assert run.finish() == 130, run.said()

    failed, cancelled = sorted(run.incidents(), key=lambda incident: incident["attempt"])
    assert failed["failure_class"] == "host_mem.sigkill_probable"
    assert failed["state"] == cancelled["state"] == "closed"
    assert "cancelled by SIGINT" in failed["resolution"]
    assert (cancelled["failure_class"], cancelled["attempt"]) == ("scheduler.cancelled", 1)


def test_the_workers_of_a_killed_agent_die_with_it(tmp_path):
    with Run(tmp_path, PLAIN, "sleep") as run:
        workers = workers_of(run)
        run.wait_for_output("[default1]:ready")
        run.signal(signal.SIGKILL)
        run.finish()

        wait_until(lambda: not any(is_alive(pid) for pid in workers), what="the workers' end")


def test_disabled_the_script_runs_as_under_plain_torchrun(tmp_path):
    with Run(tmp_path, PLAIN, env={"GPUOPS_DISABLE": "1"}, nproc=1) as run:
        assert run.finish() == 0, run.said()

    assert "gpuops/worker/shim.py" not in run.said()
    assert run.payloads("run.ended")[0]["outcome"] == "completed"


def test_an_unreachable_store_is_a_note_and_nothing_is_lost(tmp_path):
    store = "postgresql+psycopg://u:secret@127.0.0.1:9/x"
    with Run(tmp_path, "--store", store, PLAIN, nproc=1) as run:
        assert run.finish() == 0, run.said()

    said = run.err.read_text()
    assert "wait in the spool" in said
    assert "secret" not in said
    assert run.payloads("run.ended")[0]["outcome"] == "completed"


def test_a_run_directory_that_vanishes_does_not_stop_the_training(tmp_path):
    import shutil

    with Run(tmp_path, "--max-restarts=1", PLAIN, "sleep", nproc=1) as run:
        (worker,) = workers_of(run)
        run.wait_for_output("ready")
        # At once: the agent writes there, too.
        shutil.rmtree(run.runs.rename(tmp_path / "gone"))
        run.runs.write_text("no directory")
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: run.said().count("ready") == 2, what="a second generation")
        run.signal(signal.SIGTERM)

        assert run.finish() == 85, run.said()


# About the shortest that the ladder of timeouts takes: a silence of 4 s is death.
SOON = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1,join_timeout=5"
UNCHECKED = "--health-gate=off"  # a health check may take longer


def test_a_rendezvous_that_nobody_answers_is_one_line_and_an_incident(tmp_path):
    flags = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:9")
    conf = f"--rdzv-conf=is_host=0,{SOON}"
    with Run(tmp_path, *flags, conf, UNCHECKED, "--rdzv-id=x", PLAIN, nproc=1) as run:
        assert run.finish() == 1, run.said()

    assert "Traceback" not in run.err.read_text()
    assert "the rendezvous failed" in run.err.read_text()
    (incident,) = run.incidents()
    assert (incident["failure_class"], incident["state"]) == ("launcher.rendezvous", "closed")
    assert "127.0.0.1:9" in str(incident["evidence"])
    assert run.payloads("run.ended")[0]["outcome"] == "failed"


def test_too_few_nodes_within_the_time_are_an_incident(tmp_path):
    flags = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    conf = f"--rdzv-conf={SOON}"
    with Run(tmp_path, *flags, conf, UNCHECKED, "--rdzv-id=x", PLAIN, nproc=1) as run:
        assert run.finish() == 1, run.said()

    assert "1 of at least 2 nodes came within 5 s" in run.err.read_text()
    (incident,) = run.incidents()
    assert (incident["failure_class"], incident["state"]) == ("launcher.rendezvous", "closed")
    assert "1 of at least 2 nodes" in str(incident["evidence"])


def test_a_malformed_store_url_ends_with_64_before_anything_starts(tmp_path):
    with Run(tmp_path, "--store", "mysql://u:secret@h/d", PLAIN, nproc=1) as run:
        assert run.finish() == 64

    (line,) = run.err.read_text().splitlines()
    assert "mysql" in line
    assert "secret" not in line
    assert run.directory is None


def test_the_workers_lines_reach_a_file_as_they_are_written(tmp_path):
    """A tee that keeps lines back shows a failure's last words after the next attempt's first."""
    script = tmp_path / "waits.py"
    script.write_text(
        "import sys, threading, time\n"
        "print('first line', flush=True)\n"
        "end = time.monotonic() + 60\n"
        "while 'first line' not in open(sys.argv[1]).read():\n"
        "    assert time.monotonic() < end, 'the line never came'\n"
        "    threading.Event().wait(0.05)\n"
    )

    with Run(tmp_path / "run", script, tmp_path / "run" / "out", nproc=1) as run:
        assert run.finish() == 0, run.said()


def test_lines_of_several_ranks_stay_whole_on_the_console(tmp_path):
    script = tmp_path / "talks.py"
    script.write_text("for n in range(3000): print('line', n, 'end')\n")

    with Run(tmp_path / "run", script) as run:
        assert run.finish() == 0, run.said()

    lines = [line for line in run.out.read_text().splitlines() if "line" in line]
    assert sorted(lines) == sorted(
        f"[default{rank}]:line {n} end" for rank in range(2) for n in range(3000)
    )


def test_a_failure_seen_before_the_signal_is_what_the_run_ended_with(tmp_path):
    """The others of the group do not end at once: the signal comes while they get their grace."""
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('not yet', flush=True))\n"
        "print('ready', flush=True)\n"
        "end = time.monotonic() + 120\n"
        "while time.monotonic() < end:\n"
        "    time.sleep(0.05)\n"
    )
    with Run(tmp_path / "run", script) as run:
        run.wait_for_output("[default0]:ready")
        run.wait_for_output("[default1]:ready")
        os.kill(run.state()["pids"]["1"], signal.SIGKILL)
        run.wait_for_output("[default0]:not yet")
        run.signal(signal.SIGINT)

        assert run.finish() == 130, run.said()

    (incident,) = run.incidents()
    assert incident["failure_class"] == "host_mem.sigkill_probable"
    assert {"kind": "rank", "id": "1"} in incident["culprits"]
    assert incident["state"] == "closed"
    assert "SIGINT" in incident["resolution"]
    assert run.payloads("run.ended")[0]["outcome"] == "cancelled"


def test_ctrl_c_at_a_terminal_reaches_the_workers_too_and_nobody_failed(tmp_path):
    with Run(tmp_path, PLAIN, "sleep") as run:
        workers = workers_of(run)
        run.wait_for_output("[default0]:ready")
        run.wait_for_output("[default1]:ready")
        for pid in workers:
            os.kill(pid, signal.SIGINT)
        run.signal(signal.SIGINT)

        assert run.finish() == 130, run.said()

    (incident,) = run.incidents()
    assert incident["failure_class"] == "scheduler.cancelled"


def test_the_first_ctrl_c_is_answered_at_once(tmp_path):
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "print('ready', flush=True)\n"
        "time.sleep(120)\n"
    )
    with Run(tmp_path / "run", script, nproc=1) as run:
        run.wait_for_output("ready")
        workers = workers_of(run)
        run.signal(signal.SIGINT)
        run.wait_for_output("SIGINT: ending the workers, at most 20 s; again to kill them now")
        run.signal(signal.SIGINT)

        assert_ended_soon(workers)
        assert run.finish() == 130, run.said()


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.mark.parametrize(
    ("number", "code", "outcome"),
    [(signal.SIGINT, 130, "cancelled"), (signal.SIGTERM, 85, "preempted")],
)
def test_a_signal_while_a_host_does_not_answer_ends_the_run_in_seconds(
    tmp_path, listener, number, code, outcome
):
    endpoint = f"--rdzv-endpoint=127.0.0.1:{listener.getsockname()[1]}"
    flags = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-conf=is_host=0", "--rdzv-id=x", endpoint)
    with Run(tmp_path, *flags, PLAIN, nproc=1) as run:
        listener.settimeout(60)
        connection, _address = listener.accept()
        with connection:
            run.signal(number)

            assert run.finish(60) == code, run.said()

    assert "Traceback" not in run.err.read_text()
    (incident,) = run.incidents()
    assert (incident["failure_class"], incident["state"]) == (f"scheduler.{outcome}", "closed")
    assert run.payloads("run.ended")[0]["outcome"] == outcome


def test_a_signal_while_the_second_node_is_awaited_is_a_closed_incident(tmp_path):
    flags = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    with Run(tmp_path, *flags, "--rdzv-id=x", PLAIN, nproc=1) as run:
        process = psutil.Process(run.process.pid)
        wait_until(lambda: process.net_connections("tcp"), what="its way to the board")
        run.signal(signal.SIGTERM)

        assert run.finish(60) == 85, run.said()

    assert "Traceback" not in run.err.read_text()
    (incident,) = run.incidents()
    assert (incident["failure_class"], incident["state"]) == ("scheduler.preempted", "closed")


@pytest.mark.parametrize("both", [False, True], ids=["stdout", "stdout and stderr"])
def test_a_reader_that_leaves_ends_neither_the_job_nor_its_output(tmp_path, both):
    script = tmp_path / "talks.py"
    # More than a pipe holds: the agent must meet the closed end.
    script.write_text("for n in range(30000): print('line', n)\n")
    streams = {"stdout": subprocess.PIPE} | ({"stderr": subprocess.STDOUT} if both else {})
    with Run(tmp_path / "run", script, nproc=1, **streams) as run:
        run.process.stdout.readline()
        run.process.stdout.close()

        assert run.finish() == 0, run.said()

    said = run.err.read_text()
    assert "Traceback" not in said
    assert said.count("cannot write to standard output, the job continues") == (0 if both else 1)
    (log,) = run.directory.rglob("stdout.log")
    assert len(log.read_text().splitlines()) == 30000
