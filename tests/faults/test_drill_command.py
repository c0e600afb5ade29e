"""``gpuops drill``: says what it will break, asks, and leaves word of what it did."""

import json
import os
import pty
import subprocess
import sys

import pytest
from support.command import gpuops
from support.dummy_run import DummyRun, goes_on
from support.runs import is_alive, wait_until

from gpuops.drill.catalogue import SCENARIOS
from gpuops.store.spool.format import decode_line
from gpuops.wire.worker_drill import KINDS


@pytest.fixture
def run(tmp_path):
    made = DummyRun(tmp_path)
    yield made
    made.end()


def drill(run, *words, **options):
    return gpuops("drill", *words, "--run-dir", run.folder.parent, **options)


def at_terminal(words, answer):
    """Run ``gpuops drill`` with a terminal at which *answer* is typed; return code and screen."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "gpuops", "drill", *map(str, words)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    screen = b""
    while True:
        try:
            screen += os.read(ours, 4096)
        except OSError:
            break
        if b"[y/N]" in screen and answer is not None:
            os.write(ours, answer)
            answer = None
    os.close(ours)
    return child.wait(30), screen.decode()


def test_the_list_names_every_scenario():
    shown = gpuops("drill", "list")
    rows = json.loads(gpuops("drill", "list", "--json").stdout)

    assert shown.returncode == 0
    scenarios, _, worker_faults = shown.stdout.partition("\n\nFaults inside a worker, with ")
    assert [line.split()[0] for line in scenarios.splitlines()] == [s.name for s in SCENARIOS]
    assert [line.split()[0] for line in worker_faults.splitlines()[1:]] == [*KINDS]
    assert [row["name"] for row in rows["worker_faults"]] == [*KINDS]
    assert rows["schema"] == "gpuops.drill-list/1"
    assert [row["name"] for row in rows["scenarios"]] == [s.name for s in SCENARIOS]


def test_without_a_terminal_and_without_yes_nothing_is_broken(run):
    done = drill(run, "kill-rank", "--rank", "0")

    assert done.returncode == 64
    assert f"rank 0 (pid {run.workers[0]}) on node n0 gets SIGKILL" in done.stderr
    assert "It is not undone" in done.stderr
    assert "--yes" in done.stderr
    assert goes_on(run.workers[0])


def test_who_says_no_is_heeded_and_who_says_yes_too(run):
    words = ["kill-rank", "--rank", "1", "--run-dir", run.folder]

    code, screen = at_terminal(words, b"n\n")
    assert code == 1
    assert "nothing was broken" in screen
    assert goes_on(run.workers[1])

    code, screen = at_terminal(words, b"y\n")
    assert code == 0, screen
    wait_until(lambda: not is_alive(run.workers[1]))


def test_what_was_injected_is_told_in_json_and_recorded(run, tmp_path):
    done = drill(
        *(run, "stop-rank", "--rank", "1", "--for", "0.2", "--yes", "--json"),
        env={"GPUOPS_SPOOL": str(tmp_path / "spool")},
    )

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["schema"] == "gpuops.drill/1"
    (fault,) = told["faults"]
    assert (fault["scenario"], fault["run"], fault["attempt"]) == ("stop-rank", "0190-dummy", 0)
    assert fault["entities"] == [{"kind": "rank", "id": "1"}]
    spooled = lines(tmp_path / "spool")
    assert [event.kind for event in spooled] == ["drill.injected", "drill.ended"]
    assert spooled[0].run_id == "0190-dummy"
    assert spooled[0].payload["breaks"] == fault["breaks"]
    assert spooled[0].payload["uid"] == os.geteuid()
    journal = [event for event in lines(run.folder / "journal") if event.kind.startswith("drill")]
    assert [event.id for event in journal] == [event.id for event in spooled]


def test_a_store_takes_the_event_and_makes_no_incident_of_it(run, tmp_path):
    env = {
        "GPUOPS_SPOOL": str(tmp_path / "spool"),
        "GPUOPS_STORE": f"sqlite:///{tmp_path}/store.db",
    }
    drill(run, "stop-rank", "--rank", "1", "--for", "0.1", "--yes", env=env)

    assert gpuops("db", "upgrade", env=env).returncode == 0
    assert gpuops("db", "flush", env=env).returncode == 0

    listed = json.loads(gpuops("incident", "ls", "--json", env=env).stdout)
    assert listed["incidents"] == []


def test_it_waits_for_a_step_that_does_not_come(run):
    done = drill(
        *(run, "kill-rank", "--rank", "0", "--at-step", "5", "--deadline", "0.3", "--yes"),
    )

    assert done.returncode == 1
    assert "was not at step 5" in done.stderr
    assert goes_on(run.workers[0])


def test_the_run_of_a_process_is_found_by_its_pid(run, tmp_path):
    newer = DummyRun(tmp_path, node="n9", name="20270101T000000Z-b-00000002")
    try:
        done = drill(run, "kill-rank", "--rank", "0", "--pid", str(run.workers[1]), "--yes")
        assert done.returncode == 0, done.stderr
        wait_until(lambda: not is_alive(run.workers[0]))
        assert goes_on(newer.workers[0])
        unknown = drill(run, "kill-rank", "--rank", "0", "--pid", str(os.getpid()), "--yes")
        assert unknown.returncode == 1
        assert "has an agent or a worker with pid" in unknown.stderr
    finally:
        newer.end()


def test_where_no_run_is_it_is_not_possible(tmp_path):
    done = gpuops("drill", "freeze-node", "--run-dir", tmp_path, "--yes")

    assert done.returncode == 1
    assert "no run publishes its state" in done.stderr


@pytest.mark.parametrize(
    "words",
    [["nope"], ["kill-rank", "--nope"], ["kill-rank", "--yes"], ["fill-disk", "--size", "x"]],
)
def test_what_makes_no_sense_is_usage(run, words):
    options = [] if words[0] != "kill-rank" else ["--run-dir", str(run.folder)]

    done = gpuops("drill", *words, *options)

    assert done.returncode == 64
    assert "Traceback" not in done.stderr


def test_random_faults_are_drawn_from_the_seed(run):
    done = drill(
        *(run, "random", "--seed", "5", "--faults", "1", "--every", "0", "--yes", "--json"),
        *("--scenario", "kill-rank"),
    )

    assert done.returncode == 0, done.stderr
    ((scenario, seed, entities),) = [
        (fault["scenario"], fault["seed"], fault["entities"])
        for fault in json.loads(done.stdout)["faults"]
    ]
    assert (scenario, seed) == ("kill-rank", 5)
    victim = run.workers[int(entities[0]["id"])]
    wait_until(lambda: not is_alive(victim))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may name an owner")
def test_root_names_the_owner_of_another_user_s_run(run):
    os.chown(run.path, 12345, 12345)

    refused = drill(run, "kill-rank", "--rank", "0", "--yes")
    assert refused.returncode == 1
    assert "belongs to user 12345" in refused.stderr

    # The file is theirs now, the processes are not: a file alone opens no door.
    named = drill(run, "kill-rank", "--rank", "0", "--owner", "12345", "--yes")
    assert named.returncode == 1
    assert "is not the agent" in named.stderr
    assert goes_on(run.workers[0])


def lines(folder):
    """Return the events in all files of a spool or a journal."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    found = [decode_line(raw).event for path in files for raw in path.read_bytes().splitlines()]
    return sorted(found, key=lambda event: event.id)
