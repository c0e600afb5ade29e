"""Agents that meet in a real Postgres: its end, its pauses, its refusals, and what a run leaves."""

import signal
import threading

import psycopg
import pytest
from support.cluster_run import ClusterRun
from support.hosts import Loopbacks
from support.postgres import running_server

pytestmark = [pytest.mark.torch, pytest.mark.postgres, pytest.mark.timeout(240)]
LONG = {"JOB_STEPS": "3000", "JOB_PAUSE_S": "0.05"}


@pytest.fixture
def server():
    """Yield a Postgres of this test's own, which it may stop."""
    with running_server() as running:
        yield running


@pytest.fixture
def url(server):
    with server.database() as made:
        yield made


@pytest.fixture
def hosts(tmp_path):
    with Loopbacks(2, tmp_path) as made:
        yield made


def started(hosts, folder, url, *flags, **options):
    run = prepared(hosts, folder, url, *flags, **options)
    run.start()
    run.wait(
        lambda: all(run.events("attempt.first_step", host) for host in hosts),
        "a first step on each host",
    )
    run.wait_for_step(3)
    return run


def prepared(hosts, folder, url, *flags, **options):
    wanted = {"script": "fake_steps.py", "env": LONG, "endpoint": url, **options}
    return ClusterRun(hosts, folder, "--health-gate=off", *flags, **wanted)


def rows(url):
    with psycopg.connect(url.replace("postgresql+psycopg", "postgresql")) as line:
        return line.execute("SELECT run_key, key FROM gpuops_board ORDER BY key").fetchall()


def test_a_run_leaves_no_row_and_its_id_can_be_used_again_at_once(hosts, tmp_path, url):
    short = {"JOB_STEPS": "20", "JOB_PAUSE_S": "0.02"}
    ids = set()
    for turn in ("first", "second"):
        run = prepared(hosts, tmp_path / turn, url, env=short, run_id="again")
        run.start()
        assert run.finish() == {"n0": 0, "n1": 0}
        assert rows(url) == []
        ids |= {event["run_id"] for event in run.events("run.ended")}
    assert len(ids) == 2


def test_a_run_that_was_killed_leaves_its_id_usable(hosts, tmp_path, url):
    """Both agents are killed at once, as by a power cut; the same job is started again."""
    run = started(hosts, tmp_path, url)
    for host in hosts:
        host.kill_all()
    assert rows(url)

    run.start()
    run.wait_for_generation(1)
    run.enough()

    assert run.finish() == {"n0": 0, "n1": 0}
    assert rows(url) == []
    assert run.orphans() == set()


def test_a_restart_of_postgres_is_borne(hosts, tmp_path, server, url):
    run = started(hosts, tmp_path, url)

    server.kill()
    server.start()

    run.wait_for_step(run.lines()[-1].number + 50)
    run.enough()
    assert run.finish() == {"n0": 0, "n1": 0}
    assert {line.generation for line in run.lines()} == {0}


@pytest.fixture
def frozen(server):
    """Return a function that stops Postgres for some seconds."""

    def freeze(seconds):
        server.signal(signal.SIGSTOP)
        threading.Event().wait(seconds)
        server.signal(signal.SIGCONT)

    yield freeze
    if server.process is not None:
        server.signal(signal.SIGCONT)


@pytest.mark.soak
def test_a_pause_of_postgres_ends_nothing(hosts, tmp_path, frozen, url):
    run = started(hosts, tmp_path, url)

    frozen(5)

    run.wait_for_step(run.lines()[-1].number + 50)
    run.enough()
    assert run.finish() == {"n0": 0, "n1": 0}
    assert {line.generation for line in run.lines()} == {0}
    assert run.events("agent.fenced") == []


def test_a_long_pause_of_postgres_fences_the_workers_and_all_come_back(
    hosts, tmp_path, frozen, url
):
    run = started(hosts, tmp_path, url)

    frozen(15)

    run.wait_for_generation(1)
    run.enough()
    assert run.finish() == {"n0": 0, "n1": 0}
    fenced = {host.name for host in hosts if run.events("agent.fenced", host)}
    assert fenced
    # Ranks that lose a peer to the first fence may fail before that of their own node is due.
    failed = {
        host.name
        for host in hosts
        for event in run.events("agent.report", host)
        if event["payload"]["kind"] == "workers_failed"
    }
    assert fenced | failed == {"n0", "n1"}
    assert all(run.events("board.lost", host) for host in hosts)
    assert run.orphans() == set()


def test_a_database_that_is_not_there_is_one_clear_error(hosts, tmp_path, server):
    run = prepared([hosts[0]], tmp_path, server.url("nowhere"), nnodes=2)

    (agent,) = run.start()

    assert agent.process.wait(60) == 1
    assert 'database "nowhere" does not exist' in agent.said()
    assert "Traceback" not in agent.said()


def test_a_wrong_password_is_one_clear_error_that_does_not_tell_it(
    hosts, tmp_path, guarded_postgres
):
    url = guarded_postgres.url("postgres", password="not-the-s3cret")
    run = prepared([hosts[0]], tmp_path, url, nnodes=2)

    (agent,) = run.start()

    assert agent.process.wait(60) == 1
    assert "password authentication failed" in agent.said()
    assert "not-the-s3cret" not in agent.said()
    assert "Traceback" not in agent.said()
