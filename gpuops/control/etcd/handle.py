"""What an agent has of the quorum that it is part of: the store, and its duty to announce it."""

import logging
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpuops.control.etcd import quorum
from gpuops.control.etcd.presence import QuorumControlStore
from gpuops.control.etcd.quorum import QuorumState
from gpuops.control.store import ControlStore, ControlStoreError
from gpuops.control.tcp.server import RUN_OVER_KEY

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 2.0


@dataclass(slots=True)
class QuorumHandle:
    """The quorum that this agent is part of; ``store`` is the run's control store."""

    store: QuorumControlStore
    run_key: str
    state: QuorumState
    introduction: Callable[[], ControlStore]
    folder: Path
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Keep the endpoint's server informed, so that later agents find the quorum."""
        self._thread = threading.Thread(target=self._run, name="gpuops-quorum", daemon=True)
        self._thread.start()

    def close(self, *, is_last: bool) -> None:
        """Announce it no more; the last agent of a run takes it off the endpoint's server."""
        self.abandon()
        with suppress(ControlStoreError):
            server = self.introduction()
            try:
                if is_last:
                    server.delete("quorum/")
                server.compare_and_set(RUN_OVER_KEY, b"1" if is_last else b"30", version=0)
            finally:
                server.close()

    def abandon(self) -> None:
        """Announce it no more: it does not answer, and nobody else must wait for it."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * PROBE_TIMEOUT_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self) -> None:
        server: ControlStore | None = None
        while not self._stopping.wait(quorum.ANNOUNCE_S):
            try:
                server = server or self.introduction()
                announce(server, self.state)
            except ControlStoreError as exc:
                # Its host is gone, or it was started anew: a handle on the old one is of no use.
                log.debug("the endpoint's server does not answer: %s", exc)
                if server is not None:
                    server.close()
                server = None
        if server is not None:
            server.close()


def announce(server: ControlStore, state: QuorumState) -> None:
    """Have *server* introduce agents to *state*, whatever was gathered there."""
    entry = server.get(quorum.QUORUM_KEY)
    found = QuorumState.from_bytes(entry.value) if entry.version else None
    if found != state:
        if found is not None and found.number > state.number:
            return  # agents that found nobody have begun another round
        server.compare_and_set(quorum.QUORUM_KEY, state.to_bytes(), version=entry.version)
    server.put(quorum.ALIVE_KEY, b"")
