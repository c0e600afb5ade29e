"""The spool of a user, as root forwards it: what is in it may be anything."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from sqlalchemy import select

from gpuops.host.clock import FakeClock
from gpuops.store.engine import open_store
from gpuops.store.queries import run_queries
from gpuops.store.spool.format import encode_line
from gpuops.store.spool.forward import ForwardOptions, forward_users
from gpuops.store.spool.send import flush
from support.stories import START_US, Teller, story

USER = 65534
OTHER = 65533
NOW_US = START_US + 3_600_000_000
LINES = [line for line in story(1) if line.event.node == "n1" and line.event.kind[:3] == "att"]
ORIGIN = LINES[0].origin
RUN = LINES[0].event.run_id


def raw(lines):
    return b"".join(map(encode_line, lines))


DATA = raw(LINES)


def line(kind, payload=None, *, seq=500, origin=ORIGIN, run_id=RUN, node="n1", **changes):
    """Return a line of the user's agent that is in order, but for *changes* of its event."""
    event = Teller(seq).event(kind, payload, run_id=run_id, node=node, attempt=0)
    return replace(LINES[0], seq=seq, origin=origin, event=replace(event, **changes))


def as_user(act, uid=USER):
    """Return the process that does *act* as *uid*; it ends with 0 if it returns."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            act()
            code = 0
        finally:
            os._exit(code)
    return pid


class Machine:
    """Root's spool, its store, the spool of a user, and a folder of root's that is the prey."""

    def __init__(self, url=None):
        self.base = base = Path(tempfile.mkdtemp())
        base.chmod(0o755)  # pytest's own are closed to users
        self._stack = contextlib.ExitStack()
        self.users, self.roots, self.prey = base / "users", base / "root", base / "prey"
        self.spool = self.users / str(USER)
        self.url = url or f"sqlite:///{base}/store.db"
        for path in (self.users, self.roots, self.prey, self.spool):
            path.mkdir(mode=0o755)
        self.own(self.spool)

    def own(self, path, uid=USER):
        os.chown(path, uid, uid, follow_symlinks=False)
        return path

    def lay(self, data=DATA, *, number=1, suffix="ready", origin=ORIGIN, uid=USER):
        """Put a segment where a writer of *uid* would have left it."""
        directory = self.users / str(uid) / origin
        directory.mkdir(exist_ok=True, parents=True)
        path = directory / f"{number:08d}.{suffix}"
        path.write_bytes(data)
        self.own(directory.parent, uid)
        self.own(directory, uid)
        return self.own(path, uid)

    def hold_lock(self, path):
        """Be the living writer of a segment, so that root writes a mark."""
        fcntl.flock(self._stack.enter_context(path.open("rb")), fcntl.LOCK_EX)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()
        # A busy machine may still be writing a record, in a process of its own.
        shutil.rmtree(self.base, ignore_errors=True)

    @property
    def options(self):
        return ForwardOptions(
            users_dir=self.users,
            spool_dir=self.roots,
            store_url=self.url,
            cluster="c1",
            node="n1",
        )

    def forward(self, clock=None, **changes):
        options = replace(self.options, **changes)
        return forward_users(options, deadline_s=30, clock=clock or FakeClock(NOW_US))

    def flush(self, clock=None):
        """Send the user's spool as if it were root's own: with GPUOPS_SPOOL."""
        return flush(self.spool, self.url, cluster="c1", clock=clock or FakeClock(NOW_US))

    def events(self, **query):
        if self.url.startswith("sqlite") and not (self.base / "store.db").exists():
            return []
        with open_store(self.url, mode="read") as store, store.begin() as connection:
            return run_queries.events(connection, **query)

    def rows(self, table):
        with open_store(self.url, mode="read") as store, store.begin() as connection:
            return [dict(row) for row in connection.execute(select(table)).mappings()]
