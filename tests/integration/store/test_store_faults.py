"""A store that cannot be used: one clear line, no password, never a wait without end."""

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from support.stories import dump, envelopes, story

from gpuops.errors import (
    EXIT_TRY_LATER,
    EXIT_USAGE,
    NetworkFilesystemError,
    StoreUnreachableError,
    UsageError,
)
from gpuops.host.clock import SystemClock
from gpuops.store.engine import open_store
from gpuops.store.events import new_event
from gpuops.store.ingest.batch import ingest
from gpuops.store.migrate import upgrade_store
from gpuops.store.spool.record import spool_recorder
from gpuops.store.spool.send import flush

BOUND_S = 60  # of what takes up to ten seconds, on a busy machine


def fake_root(tmp_path, point, filesystem):
    """Return a root whose mount table has one network file system."""
    info = tmp_path / "root" / "proc" / "self" / "mountinfo"
    info.parent.mkdir(parents=True)
    info.write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"23 22 0:50 / {point} rw - {filesystem} server:/export rw\n"
    )
    return tmp_path / "root"


@pytest.mark.parametrize("filesystem", ["nfs4", "lustre", "fuse.sshfs", "beegfs"])
def test_sqlite_on_a_network_file_system_is_refused(tmp_path, filesystem):
    root = fake_root(tmp_path, tmp_path, filesystem)

    with pytest.raises(NetworkFilesystemError, match="use a path on a local disk") as caught:
        open_store(f"sqlite:///{tmp_path}/store.db", mode="write", root=root)

    assert caught.value.exit_code == EXIT_USAGE
    assert "Postgres" in str(caught.value)
    assert filesystem in str(caught.value)


def test_a_link_to_a_network_file_system_is_followed(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far")
    root = fake_root(tmp_path, tmp_path / "far", "nfs")

    with pytest.raises(NetworkFilesystemError):
        open_store(f"sqlite:///{tmp_path}/near/store.db", mode="write", root=root)


def test_a_missing_sqlite_file_cannot_be_read(tmp_path):
    with pytest.raises(StoreUnreachableError, match=r"no such file.*db upgrade"):
        open_store(f"sqlite:///{tmp_path}/none.db", mode="read")


def test_a_file_that_is_no_database_is_said(tmp_path):
    (tmp_path / "store.db").write_text("a letter to a friend, certainly not a database" * 100)

    with pytest.raises(StoreUnreachableError, match="not a database"):
        open_store(f"sqlite:///{tmp_path}/store.db", mode="write")


def test_a_directory_in_place_of_the_file_is_said(tmp_path):
    with pytest.raises(StoreUnreachableError, match="it is a directory"):
        open_store(f"sqlite:///{tmp_path}", mode="write")


OPEN = """
import sys
from gpuops.errors import StoreUnreachableError
from gpuops.store.engine import open_store
try:
    with open_store(sys.argv[1], mode=sys.argv[2]) as store, store.begin() as connection:
        print("opened", connection.exec_driver_sql("SELECT count(*) FROM events").scalar())
except StoreUnreachableError as exc:
    print("refused:", exc)
"""


def as_nobody(url, mode):
    """Open a store in a process of an unprivileged user."""
    drop = []
    if os.geteuid() == 0:
        setpriv = shutil.which("setpriv")
        drop = [setpriv, "--reuid=65534", "--regid=65534", "--clear-groups"]
    done = subprocess.run(
        [*drop, sys.executable, "-c", OPEN, url, mode],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
        env={"PATH": "/usr/bin", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.stdout or done.stderr


def everyone_may_enter(path):
    for parent in [path, *path.parents]:
        if parent.stat().st_uid == os.geteuid() and parent.is_relative_to("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o055)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to be refused as")
def test_a_directory_without_permission_is_said_and_still_read(tmp_path):
    with open_store(f"sqlite:///{tmp_path}/store.db", mode="write"):
        pass
    everyone_may_enter(tmp_path)
    (tmp_path / "store.db").chmod(0o644)

    assert as_nobody(f"sqlite:///{tmp_path}/new/store.db", "write").startswith("refused: cannot")
    assert as_nobody(f"sqlite:///{tmp_path}/store.db", "write").startswith("refused: cannot")
    assert as_nobody(f"sqlite:///{tmp_path}/store.db", "read") == "opened 0\n"


def test_a_locked_sqlite_store_is_waited_for_until_the_deadline(tmp_path):
    url = f"sqlite:///{tmp_path}/store.db"
    with open_store(url, mode="write"):
        pass
    holder = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    start = time.monotonic()

    with pytest.raises(StoreUnreachableError, match="locked"):
        open_store(url, mode="write", deadline_s=0.5)

    holder.close()
    assert time.monotonic() - start < BOUND_S


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://ada:hunter2@no-such-host.invalid/x", "no-such-host"),
        ("postgresql://ada:hunter2@127.0.0.1:1/x", "refused"),
        ("postgresql://ada:hunter2@/x?host=/nowhere", "nowhere"),
    ],
)
def test_a_server_that_is_not_there_is_one_line_without_a_password(url, words):
    start = time.monotonic()

    with pytest.raises(StoreUnreachableError, match=words) as caught:
        open_store(url, mode="read")

    assert caught.value.exit_code == EXIT_TRY_LATER
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < BOUND_S


def test_a_server_that_never_answers_is_given_up(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        start = time.monotonic()

        with pytest.raises(StoreUnreachableError, match="timeout"):
            open_store(f"postgresql://ada:hunter2@127.0.0.1:{port}/x", mode="read")

    assert time.monotonic() - start < BOUND_S


NO_DRIVER = """
import sys
sys.modules["psycopg"] = None
from gpuops.errors import UsageError
from gpuops.store.engine import open_store
try:
    open_store("postgresql://ada:hunter2@db/x", mode="read")
except UsageError as exc:
    print(exc.exit_code, exc)
"""


def test_a_missing_driver_says_what_to_install():
    done = subprocess.run(
        [sys.executable, "-c", NO_DRIVER], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.startswith("64 ")
    assert "pip install 'psycopg[binary]'" in done.stdout
    assert "hunter2" not in done.stdout


@pytest.mark.postgres
def test_a_wrong_password_is_said_without_it(guarded_postgres):
    with guarded_postgres.database() as url:
        wrong = guarded_postgres.url("postgres", password="hunter2")
        with pytest.raises(StoreUnreachableError, match="password authentication failed") as bad:
            open_store(wrong, mode="read")

        assert "hunter2" not in str(bad.value)
        upgrade_store(url)
        with open_store(url, mode="read") as store:
            assert guarded_postgres.password not in str(store.url)


@pytest.mark.postgres
def test_an_unknown_database_is_said(postgres_server):
    with pytest.raises(StoreUnreachableError, match='database "nope" does not exist'):
        open_store(postgres_server.url("nope"), mode="read")


@pytest.mark.postgres
def test_an_empty_postgres_is_not_filled_by_itself(postgres_url, tmp_path):
    keeper = spooled(tmp_path / "spool", 3)

    report = flush(tmp_path / "spool", postgres_url, clock=SystemClock())

    assert keeper.lost == 0
    assert report.remaining == 3
    assert "`gpuops db upgrade`" in report.note


@pytest.mark.postgres
def test_a_role_that_may_not_write_leaves_everything_in_the_spool(postgres_server, tmp_path):
    with postgres_server.database() as url:
        upgrade_store(url)
        name = url.rpartition("/")[2]
        postgres_server.execute(f"CREATE ROLE reader_{name} LOGIN", name)
        postgres_server.execute(
            f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader_{name}", name
        )
        spooled(tmp_path / "spool", 3)

        reader = postgres_server.url(name, user=f"reader_{name}")
        report = flush(tmp_path / "spool", reader, clock=SystemClock())

        assert report.remaining == 3
        assert "permission denied" in report.note
        assert flush(tmp_path / "spool", url, clock=SystemClock()).sent == 3


@pytest.mark.postgres
def test_a_server_that_stops_answering_in_the_middle_is_given_up(guarded_postgres, tmp_path):
    with guarded_postgres.database() as url:
        upgrade_store(url)
        spooled(tmp_path / "spool", 3)
        start = time.monotonic()
        guarded_postgres.signal(signal.SIGSTOP)
        try:
            report = flush(tmp_path / "spool", url, clock=SystemClock(), deadline_s=1)
            with pytest.raises(StoreUnreachableError):
                open_store(url, mode="read", deadline_s=1)
        finally:
            guarded_postgres.signal(signal.SIGCONT)

        assert report.remaining == 3
        assert time.monotonic() - start < BOUND_S
        assert flush(tmp_path / "spool", url, clock=SystemClock()).sent == 3


@pytest.mark.postgres
def test_a_session_is_cut_when_the_server_stops_within_it(guarded_postgres):
    with guarded_postgres.database() as url:
        upgrade_store(url)
        with open_store(url, mode="read") as store:
            start = time.monotonic()
            try:
                with pytest.raises(StoreUnreachableError, match="no answer within 1 s"):
                    _stop_within(store, guarded_postgres)
            finally:
                guarded_postgres.signal(signal.SIGCONT)

        assert time.monotonic() - start < BOUND_S


def _stop_within(store, server):
    with store.begin(deadline_s=1) as connection:
        server.signal(signal.SIGSTOP)
        dump(connection)


@pytest.mark.postgres
def test_a_statement_that_waits_for_a_lock_is_given_up(postgres_url):
    import psycopg

    upgrade_store(postgres_url)
    start = time.monotonic()
    with (
        psycopg.connect(postgres_url.replace("+psycopg", "")) as holder,
        open_store(postgres_url, mode="write") as store,
    ):
        holder.execute("LOCK TABLE events IN ACCESS EXCLUSIVE MODE")
        with (
            pytest.raises(StoreUnreachableError, match="statement timeout"),
            store.begin() as connection,
        ):
            ingest(connection, envelopes(story(1)), 1)

    assert time.monotonic() - start < BOUND_S


@pytest.mark.postgres
@pytest.mark.timeout(300)
def test_writers_lose_and_double_nothing_when_the_server_dies(guarded_postgres, tmp_path):
    """The small form of the benchmark: 8 writers of 200 events, the server killed meanwhile."""
    with guarded_postgres.database() as url:
        upgrade_store(url)
        keepers = [spooled(tmp_path / f"spool{n}", 0, node=f"n{n}") for n in range(8)]
        threads = [
            threading.Thread(
                target=_record_and_flush, args=(tmp_path / f"spool{n}", url, keeper, n)
            )
            for n, keeper in enumerate(keepers)
        ]
        for thread in threads:
            thread.start()
        _wait_for_events(url, 200)
        guarded_postgres.kill()
        guarded_postgres.start()
        for thread in threads:
            thread.join(timeout=120)

        with open_store(url, mode="read") as store, store.begin() as connection:
            rows = dump(connection)
        assert len(rows["events"]) == 8 * 200
        assert len(rows["progress"]) == 8 * 200
        assert [row.endswith("0, 1, 200, 200)") for row in rows["ingest_log"]] == [True] * 8


def _wait_for_events(url, wanted):
    deadline = time.monotonic() + 60
    with open_store(url, mode="read") as store:
        while time.monotonic() < deadline:
            with store.begin() as connection:
                if connection.exec_driver_sql("SELECT count(*) FROM events").scalar() >= wanted:
                    return
    raise TimeoutError(f"{wanted} events did not arrive")


def _record_and_flush(spool, url, keeper, number):
    for n in range(200):
        keeper.record(_beat(f"n{number}", n))
        if n % 50 == 0:
            flush(spool, url, deadline_s=5, clock=SystemClock())
    keeper.close()
    deadline = time.monotonic() + 110
    while time.monotonic() < deadline:
        report = flush(spool, url, deadline_s=5, clock=SystemClock())
        if report.note is None:
            return


def _beat(node, n):
    return new_event(
        "attempt.progress",
        node=node,
        clock=SystemClock(),
        run_id=f"run-{node}",
        attempt=0,
        payload={"minute_us": n * 60_000_000, "step_last": n, "beats": n},
    )


def spooled(spool, count, *, node="n1"):
    keeper = spool_recorder(spool, node=node, boot_id="b1", bytes_max=2**26, clock=SystemClock())
    for n in range(count):
        keeper.record(_beat(node, n))
    if count:
        keeper.close()
    return keeper


def test_a_malformed_url_is_a_usage_error_for_the_flusher_too(tmp_path):
    with pytest.raises(UsageError, match="malformed"):
        flush(tmp_path, "nonsense", clock=SystemClock())
