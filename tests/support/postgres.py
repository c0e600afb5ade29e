"""A real PostgreSQL server of our own: private directory, free loopback port, unprivileged user."""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from support.ports import free_port
from support.runs import is_alive, wait_until
from support.services import unavailable

FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
START_S = 60
_TRIES = 5


def find_binaries():
    """Return the directory of initdb and postgres, or None."""
    found = shutil.which("initdb")
    if found and (Path(found).resolve().parent / "postgres").exists():
        return Path(found).resolve().parent
    candidates = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"),
        key=lambda path: int(path.parts[-3]) if path.parts[-3].isdecimal() else 0,
    )
    return candidates[-1].parent if candidates else None


def unprivileged_user():
    """Return the user to run the server as, or None when we are not root; initdb refuses root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise RuntimeError("this machine has neither a user postgres nor nobody")


@dataclass
class PostgresServer:
    """One server. ``password`` is None where every local connection is trusted."""

    home: Path
    binaries: Path
    user: pwd.struct_passwd | None
    port: int
    password: str | None
    options: tuple[str, ...]
    process: subprocess.Popen | None = None
    address: str | None = None  # one more to listen on, whose /24 is trusted

    def url(self, database, *, user="app", password=None):
        """Return the store URL of *database* over TCP."""
        secret = password or self.password
        login = user if secret is None else f"{user}:{quote(secret, safe='')}"
        return f"postgresql+psycopg://{login}@127.0.0.1:{self.port}/{database}"

    def start(self):
        """Start it and wait until it answers."""
        settings = (f"port={self.port}", f"unix_socket_directories={self.home}", *self.options)
        options = [word for setting in settings for word in ("-c", setting)]
        command = [*_as_user(self.user), str(self.binaries / "postgres"), *options]
        listen = ",".join(["127.0.0.1", *([self.address] if self.address else [])])
        command += ["-D", str(self.home / "data"), "-c", f"listen_addresses={listen}"]
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait_ready()

    def wait_ready(self):
        """Return when it takes queries; raise with its log when it does not."""
        deadline = time.monotonic() + START_S
        pause = threading.Event()
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            ready = [str(self.binaries / "pg_isready"), "-q", "-h", "127.0.0.1"]
            ready += ["-p", str(self.port), "-d", "postgres", "-U", "app"]
            if subprocess.run(ready, check=False, timeout=10).returncode == 0:
                return
            pause.wait(0.02)
        log = (self.home / "log").read_text(errors="replace")[-2000:]
        self.kill()
        raise RuntimeError(f"postgres does not start on port {self.port}: {log}")

    def kill(self):
        """End it as a crash does: SIGKILL for it and every one of its processes."""
        if self.process is None:
            return
        pids = self._pids()  # its children are found by it, as long as it is there
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=60)
        self.process = None
        # A process that waits for a disk dies later, and the next server does not start before.
        wait_until(lambda: not any(map(is_alive, pids)), 60, "the end of postgres")

    def signal(self, number):
        """Send a signal to the server and every one of its processes."""
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _pids(self):
        """Return the server's process and its children (each child leads a session of its own)."""
        found = [self.process.pid]
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[1]) == self.process.pid:
                    found.append(int(path.parent.name))
        return found

    def stop(self):
        """End it and remove everything it had."""
        if self.process is not None:
            self.signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGQUIT)
            try:
                self.process.wait(timeout=10)
                self.process = None
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self.home, ignore_errors=True)

    def execute(self, statement, database="postgres"):
        """Run one statement outside any transaction."""
        import psycopg

        url = self.url(database).replace("postgresql+psycopg", "postgresql")
        with psycopg.connect(url, autocommit=True, connect_timeout=30) as connection:
            connection.execute(statement)

    @contextlib.contextmanager
    def database(self):
        """Yield the URL of a new empty database; drop it afterwards."""
        name = f"t_{secrets.token_hex(6)}"
        self.execute(f"CREATE DATABASE {name}")
        try:
            yield self.url(name)
        finally:
            self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def _as_user(user):
    if user is None:
        return []
    setpriv = shutil.which("setpriv") or "/usr/bin/setpriv"
    return [setpriv, f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]


def new_server(*, password=None, options=FAST, address=None):
    """Return a started server; with *password*, connections must give it (SCRAM).

    With *address*, one of this machine, it listens there as well, and trusts that /24 network.

    Raises:
        FileNotFoundError: The server's binaries are not installed.
    """
    binaries = find_binaries()
    if binaries is None:
        raise FileNotFoundError("PostgreSQL's server binaries (initdb, postgres) are not installed")
    user = unprivileged_user()
    # Not below pytest's own directory: its parents are closed to other users.
    home = Path(tempfile.mkdtemp(prefix="gpuops-pg-"))
    try:
        _initdb(home, binaries, user, password)
        if address is not None:
            with (home / "data" / "pg_hba.conf").open("a") as rules:
                rules.write(f"host all all {address}/24 trust\n")
        for attempt in range(_TRIES):
            server = PostgresServer(
                home, binaries, user, free_port(), password, tuple(options), address=address
            )
            try:
                server.start()
            except RuntimeError:
                # Another test's server may have taken the port in between.
                if attempt == _TRIES - 1:
                    raise
            else:
                return server
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    raise AssertionError("not reached")


def _initdb(home, binaries, user, password):
    command = [*_as_user(user), str(binaries / "initdb"), "-D", str(home / "data")]
    command += ["-U", "app", "-E", "UTF8", "--locale=C", "--no-sync"]
    if password is None:
        command += ["-A", "trust"]
    else:
        (home / "password").write_text(password + "\n")
        command += ["-A", "scram-sha-256", "--pwfile", str(home / "password")]
    if user is not None:
        for path in (home, *home.iterdir()):
            os.chown(path, user.pw_uid, user.pw_gid)
    done = subprocess.run(
        command, cwd=home, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"initdb failed: {done.stderr[-2000:]}")


@contextlib.contextmanager
def running_server(**wanted):
    """Yield a server for the time of a test; skip (in CI: fail) where there cannot be one."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        unavailable("psycopg is not installed")
    try:
        server = new_server(**wanted)
    except FileNotFoundError as exc:
        unavailable(str(exc))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def postgres_server():
    """One fast server for the whole session, trusting local connections."""
    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def guarded_postgres():
    """One durable server (fsync on) that asks for a password."""
    with running_server(password="s3cret/p@ss:word", options=()) as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server):
    """A new empty database."""
    with postgres_server.database() as url:
        yield url
