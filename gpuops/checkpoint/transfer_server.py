"""The server of a keeper's copies: hands out those that it has, takes in replicas of others.

One thread per connection, because each is either inside one long system call or idle. A stranger
may send two short frames of fixed length within a few seconds and no more; what anybody sends is
bounded before it is read. A slow or broken peer costs its own connection only.
"""

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from gpuops.checkpoint import transfer_wire as wire
from gpuops.checkpoint.digest import root_of
from gpuops.checkpoint.states import CheckpointError, Digest, Shard, StateId
from gpuops.checkpoint.transfer_auth import JobPass
from gpuops.checkpoint.transfer_intake import DamagedError, Intake
from gpuops.checkpoint.transfer_line import Limits, Line, OldPeerError
from gpuops.checkpoint.transfer_pace import Pace
from gpuops.checkpoint.transfer_turns import PinnedCopy, ask, serve
from gpuops.checkpoint.transfer_wire import (
    Kind,
    Open,
    Push,
    Refusal,
    RefusedError,
    TransferError,
)
from gpuops.host.frames import WireError
from gpuops.host.job_proof import Welcome

log = logging.getLogger(__name__)

_BACKLOG = 256
_PAUSE_S = 0.1
T = TypeVar("T")


class Source(Protocol):
    """Where a server's copies are from; called by several threads."""

    def open(self, state: StateId, shard: Shard) -> PinnedCopy | None:
        """Return a verified copy, pinned; None where there is none."""
        ...


class Inbox(Protocol):
    """A replica on its way into a holder's memory, over any number of connections."""

    @property
    def intake(self) -> Intake:
        """Return what has arrived."""
        ...

    def is_wanted(self) -> bool:
        """Say whether it is still to come; its memory may be needed for something newer."""
        ...

    def complete(self) -> None:
        """Keep what is whole as a copy, however often this is called; raises `CheckpointError`."""
        ...

    def leave(self) -> None:
        """Say that one connection no longer writes into the memory."""
        ...


class Sink(Protocol):
    """Where pushed replicas go; called by several threads."""

    def accept(self, push: Push, digest: Digest) -> Inbox | None:
        """Return where *push* is to go, to be left once; None where it is here already, whole.

        The same inbox for each connection that offers the same content.

        Raises:
            RefusedError: It is not wanted, or there is no room.
        """
        ...


@dataclass(slots=True)
class Figures:
    """What a server has done so far."""

    connections: int = 0  # that were accepted
    turned_away: int = 0  # because there were too many
    strangers_cut: int = 0  # who did not prove the token
    refused: int = 0  # requests
    sent_bytes: int = 0  # of images
    received_bytes: int = 0


class TransferServer:
    """Serves *source* and fills *sink* (None: takes nothing in) until `close`.

    Raises:
        TransferError: The address cannot be listened on.
    """

    def __init__(
        self,
        address: tuple[str, int],
        job: JobPass,
        source: Source,
        sink: Sink | None,
        pace: Pace,
        limits: Limits | None = None,
    ) -> None:
        self._job, self._source, self._sink, self._pace = job, source, sink, pace
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._lines: dict[Line, threading.Thread] = {}
        self._strangers: Counter[str] = Counter()
        self._figures = Figures()
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            self._listener = socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as exc:
            raise TransferError(
                f"cannot listen on {address[0]} port {address[1]} for copies of checkpoints: {exc}"
            ) from exc
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="gpuops-copies", daemon=True)
        self._thread.start()

    def figures(self) -> dict[str, int]:
        """Return what this server has done so far, by name."""
        with self._lock:
            found = asdict(self._figures)
            found["sent_bytes"] += sum(line.sent_bytes for line in self._lines)
            found["received_bytes"] += sum(line.received_bytes for line in self._lines)
            return found

    def close(self) -> None:
        """Listen no more, cut every connection, return when their threads have ended."""
        self._ends.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            lines = dict(self._lines)
        for line in lines:
            line.cut()
        for thread in lines.values():
            thread.join()

    # Connections.

    def _accept(self) -> None:
        while not self._ends.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError as exc:
                # No more files, or the caller is gone already: the others are not to suffer.
                if not self._ends.wait(_PAUSE_S):
                    log.debug("a connection could not be accepted: %s", exc)
                continue
            try:
                self._admit(sock, str(address[0]))
            except (OSError, RuntimeError) as exc:
                # RuntimeError: no more threads.
                log.debug("a connection from %s was dropped: %s", address[0], exc)
                sock.close()

    def _admit(self, sock: socket.socket, address: str) -> None:
        limits = self._limits
        line = Line(sock, self._job, limits)
        with self._lock:
            is_too_much = (
                len(self._lines) >= limits.connections_max
                or self._strangers.total() >= limits.strangers_max
                or self._strangers[address] >= limits.strangers_per_address_max
            )
            if is_too_much:
                self._figures.turned_away += 1
            else:
                thread = threading.Thread(
                    target=self._serve, args=(line, address), name="gpuops-copy", daemon=True
                )
                self._lines[line] = thread
                self._strangers[address] += 1
                self._figures.connections += 1
        if is_too_much:
            with suppress(OSError):
                line.turn_away(Welcome.BUSY)
            line.close()
            return
        try:
            thread.start()
        except RuntimeError:
            self._known(address)
            self._forget(line)
            raise

    def _serve(self, line: Line, address: str) -> None:
        try:
            try:
                line.answer_call()
            except (OSError, WireError):
                self._count("strangers_cut")
                raise
            finally:
                self._known(address)
            self._requests(line)
        except (OSError, WireError) as exc:
            log.debug("the connection from %s ends: %s", address, exc)
        except Exception:  # boundary: one peer's bytes must not end the copies of all
            log.exception("a connection from %s failed", address)
        finally:
            line.close()
            self._forget(line)

    def _known(self, address: str) -> None:
        with self._lock:
            self._strangers[address] -= 1
            if self._strangers[address] <= 0:
                del self._strangers[address]

    def _forget(self, line: Line) -> None:
        with self._lock:
            if self._lines.pop(line, None) is not None:
                self._figures.sent_bytes += line.sent_bytes
                self._figures.received_bytes += line.received_bytes

    def _count(self, name: str) -> None:
        with self._lock:
            setattr(self._figures, name, getattr(self._figures, name) + 1)

    # Requests.

    def _requests(self, line: Line) -> None:
        pinned: list[PinnedCopy] = []
        try:
            while True:
                try:
                    kind, body = line.receive(self._limits.idle_s)
                    if kind is Kind.OPEN:
                        self._open(line, body, pinned)
                    elif kind is Kind.GET and pinned:
                        serve(line, body, pinned[0], self._pace, self._limits.chunk_bytes)
                    elif kind is Kind.PUSH:
                        self._take_in(line, body)
                    elif kind is not Kind.WAIT:
                        raise WireError(f"{kind.name} was not expected")
                except RefusedError as exc:
                    self._refuse(line, exc)
                    if isinstance(exc, OldPeerError):
                        return
        finally:
            _release(pinned)

    def _refuse(self, line: Line, error: RefusedError) -> None:
        self._count("refused")
        line.send(Kind.REFUSED, wire.refused_bytes(error.code, str(error)))

    def _open(self, line: Line, body: bytes, pinned: list[PinnedCopy]) -> None:
        wanted = Open.from_bytes(body)
        _release(pinned)
        self._check_chunks(wanted.chunk_bytes)
        copy = _or_refused(lambda: self._source.open(wanted.state, wanted.shard))
        if copy is None:
            raise RefusedError(
                Refusal.NOT_HERE, f"it has no copy of {wanted.shard.file_name} of {wanted.state}"
            )
        pinned.append(copy)
        digest = copy.digest
        if wanted.root not in ("", digest.root):
            _release(pinned)
            raise RefusedError(
                Refusal.DIFFERENT,
                f"its copy has the root {digest.root[:16]}…, not {wanted.root[:16]}…",
            )
        line.send(Kind.COPY, wire.copy_bytes(digest.nbytes, digest.root), digest.table)

    def _take_in(self, line: Line, body: bytes) -> None:
        push, chunk_bytes = Push.from_bytes(body)
        self._check_chunks(chunk_bytes)
        table = line.receive_bytes(wire.table_bytes(push.nbytes, chunk_bytes))
        if root_of(push.nbytes, table) != push.root:
            # The table stands in no frame: no tag tells that it was damaged on the way.
            raise WireError("a table with another root")
        sink = self._sink
        if sink is None:
            raise RefusedError(Refusal.NOT_WANTED, "it keeps no replicas")
        digest = Digest(push.nbytes, table, push.root)
        inbox = _or_refused(lambda: sink.accept(push, digest))
        if inbox is None:
            line.send(Kind.DONE)
            return
        try:
            ask(line, inbox.intake, inbox.is_wanted)
            _or_refused(inbox.complete)
        except DamagedError as exc:
            inbox.intake.forgive()
            raise RefusedError(Refusal.DAMAGED, str(exc)) from exc
        finally:
            inbox.leave()
        line.send(Kind.DONE)

    def _check_chunks(self, chunk_bytes: int) -> None:
        if chunk_bytes != self._limits.chunk_bytes:
            raise RefusedError(
                Refusal.DIFFERENT,
                f"chunks of {chunk_bytes} bytes, not of {self._limits.chunk_bytes}",
            )


def _release(pinned: list[PinnedCopy]) -> None:
    while pinned:
        pinned.pop().release()


def _or_refused(do: Callable[[], T]) -> T:
    """Return what *do* returns; what speaks against it is told to the other side."""
    try:
        return do()
    except RefusedError:
        raise
    except CheckpointError as exc:
        raise RefusedError(Refusal.FAILED, str(exc)) from exc
