"""Disks that are full and stores that do not answer: training goes on, events arrive later."""

import shutil
import sqlite3

import pytest
from support.faulty import FaultyRun
from support.postgres import running_server
from support.small_disk import small_disk

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
MIB = 2**20


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, with little more space than rank logs ask for."""
    with small_disk(tmp_path / "small", "80m") as place:
        yield place


def fill(place):
    """Leave no byte of *place*."""
    with (place / "ballast").open("wb", buffering=0) as file:
        for size in (MIB, 4096, 1):
            while True:
                try:
                    if file.write(b"x" * size) < size:
                        break
                except OSError:
                    break


@pytest.mark.parametrize("what", ["all", pytest.param("logs", marks=pytest.mark.soak)])
def test_a_disk_that_fills_up_during_a_run_costs_a_restart_at_most(tmp_path, disk, what):
    """Mode 19: run folder, journal, spool and store on it, or the ranks' logs alone."""
    ours = {"GPUOPS_RUN_DIR": "runs", "GPUOPS_SPOOL": "spool", "GPUOPS_STATE": "state"}
    env = {name: str(disk / folder) for name, folder in ours.items() if what == "all"}
    flags = ("--log-dir", disk / "logs") if what == "logs" else ()
    flags = tuple(map(str, flags))
    words = ("talk", "--steps", 60, "--pause", 0.1)
    with FaultyRun(tmp_path, flags, words, env=env) as run:
        run.start()
        run.wait_for_step(5)
        fill(disk)
        assert run.ended() == 0, run.said()

    written = disk / ("runs" if what == "all" else "logs")
    assert list(written.rglob("rank*")), "it was in use"
    assert max(line.number for line in run.lines()) == 60
    assert len(run.generations()) <= 2
    assert run.orphans() == set()
    assert "Traceback" not in "".join(
        line for line in run.said().splitlines() if not line.startswith("[default")
    )


def test_a_disk_that_is_full_before_a_run_ends_nothing(tmp_path, disk):
    """Mode 19: output goes to the console alone."""
    logs = disk / "logs"
    logs.mkdir()
    fill(disk)
    with FaultyRun(tmp_path, ("--log-dir", str(logs)), ("talk", "--steps", 10)) as run:
        run.start()
        assert run.ended() == 0, run.said()

    assert run.generations() == [0]
    assert run.agents[0].said().count("x" * 2000) == 20


def flush(run):
    done = run.host.gpuops("db", "flush", "--json", timeout=60)
    assert done.returncode == 0, done.stderr
    return done


def test_a_locked_database_delays_nothing_and_gets_all_later(tmp_path):
    """Mode 20: SQLite, locked by somebody from the first step until after the end."""
    words = ("kill", "--rank", 1, "--at", 6, "--generation", 0)
    with FaultyRun(tmp_path, (), words) as run:
        done = run.host.gpuops("db", "upgrade", timeout=60)
        assert done.returncode == 0, done.stderr
        path = run.host.folder / "gpuops.db"
        lock = sqlite3.connect(path, isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
        run.start()
        assert run.ended() == 0, run.said()
        lock.execute("ROLLBACK")
        lock.close()
        flush(run)
        ids = {event["id"] for event in run.events()}

    with sqlite3.connect(path) as database:
        stored = {row[0] for row in database.execute("SELECT id FROM events")}
        incidents = list(database.execute("SELECT failure_class FROM incidents"))
    database.close()
    assert ids <= stored
    assert len(incidents) == 1


@pytest.mark.postgres
def test_a_database_that_is_down_gets_all_later(tmp_path):
    """Mode 20: Postgres is killed while a run trains and comes back after it."""
    words = ("kill", "--rank", 1, "--at", 30, "--generation", 0, "--steps", 40, "--pause", 0.1)
    with running_server() as server, server.database() as url:
        env = {"GPUOPS_STORE": url}
        with FaultyRun(tmp_path, (), words, env=env) as run:
            done = run.host.gpuops("db", "upgrade", env=env, timeout=60)
            assert done.returncode == 0, done.stderr
            run.start()
            run.wait_for_step(3)
            server.kill()
            assert run.ended() == 0, run.said()
            assert "not in the store yet" in run.said() or "wait in the spool" in run.said()
            server.start()
            server.wait_ready()
            done = run.host.gpuops("db", "flush", env=env, timeout=60)
            assert done.returncode == 0, done.stderr
            ids = {event["id"] for event in run.events()}
            shown = run.host.gpuops("incident", "ls", "--json", env=env, timeout=60)

    assert ids
    assert shown.returncode == 0, shown.stderr
    assert "host_mem.sigkill_probable" in shown.stdout
    shutil.rmtree(tmp_path / "n0" / "spool", ignore_errors=True)
