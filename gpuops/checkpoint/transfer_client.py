"""Fetches a copy from another node's memory, or pushes a replica there, over several connections.

What is already there is never sent twice: a chunk counts once its hash is that of the digest, and
only chunks that do not count are asked for after a broken connection, a restarted peer, or from the
next holder.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gpuops.checkpoint import transfer_wire as wire
from gpuops.checkpoint.digest import check_digest, n_chunks_of, root_of
from gpuops.checkpoint.states import Copy, CorruptError, Digest, Shard, StateId
from gpuops.checkpoint.transfer_auth import JobPass
from gpuops.checkpoint.transfer_intake import Intake
from gpuops.checkpoint.transfer_line import Line
from gpuops.checkpoint.transfer_pace import Pace
from gpuops.checkpoint.transfer_team import Peer, Team, Terms
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


@dataclass(frozen=True, slots=True)
class Fetched:
    """What it took to have an image here."""

    seconds: float
    received_bytes: int
    found_bytes: int  # that a transfer before had left here
    n_damaged: int  # chunks that came damaged and were asked for again
    served: tuple[tuple[str, int], ...]  # bytes by each peer that was asked, in order
    failed: tuple[str, ...]  # what was wrong with those that did not see it through


@dataclass(frozen=True, slots=True)
class Pushed:
    """What it took to have a replica at a holder, verified there."""

    seconds: float
    sent_bytes: int  # of the image; 0 where the holder had it already


def fetch(
    peers: Sequence[Peer],
    job: JobPass,
    wanted: Copy,
    target: memoryview,
    terms: Terms,
    *,
    resume: bool = False,
) -> Fetched:
    """Fill *target* with the bytes of *wanted*, from the first of *peers* that can.

    Where one fails, the next is asked for what is still missing; the holder that *wanted* names
    does not matter. With *resume* what lies in *target* is looked at first. When this returns or
    raises, nobody writes into *target* any more.

    Raises:
        CorruptError: The last damage that was met, with the chunk and the holder.
        TransferError: No peer had it, or could be reached, within the terms.
    """
    began_s = time.monotonic()
    digest, chunk_bytes = wanted.digest, terms.limits.chunk_bytes
    intake = Intake(target, digest, chunk_bytes=chunk_bytes)
    if resume:
        intake.look()
    request = Open(wanted.state, wanted.shard, chunk_bytes, digest.root).to_bytes()

    def work(line: Line) -> None:
        line.send(Kind.OPEN, request)
        kind, body = line.receive(line.limits.stall_s)
        if kind is not Kind.COPY or wire.read_copy(body) != (digest.nbytes, digest.root):
            raise WireError("not the copy that was asked for")
        # We have it, and it is the same or the root would be another.
        line.receive_bytes(len(digest.table))
        ask(line, intake, lambda: True)

    what = f"{wanted.shard.file_name} of {wanted.state}"
    served: list[tuple[str, int]] = []
    failed: list[tuple[Peer, Exception]] = []
    for peer in peers:
        if intake.is_whole:
            break
        before = intake.received_bytes
        team = Team(peer, job, terms, work, lambda: intake.received_bytes)
        try:
            team.run(min(terms.n_connections, intake.n_missing), began_s + terms.deadline_s)
        except (TransferError, CorruptError) as exc:
            if isinstance(exc, RefusedError) and exc.code is Refusal.OLD_EPOCH:
                raise RefusedError(exc.code, f"{what} is not handed out: {exc}") from exc
            failed.append((peer, exc))
            intake.forgive()
        served.append((peer.name, intake.received_bytes - before))
    if not intake.is_whole:
        raise _no_copy(what, failed)
    intake.check_root()
    return Fetched(
        seconds=time.monotonic() - began_s,
        received_bytes=intake.received_bytes,
        found_bytes=intake.found_bytes,
        n_damaged=intake.n_damaged,
        served=tuple(served),
        failed=tuple(_told(peer, error) for peer, error in failed),
    )


def fetch_digest(
    peer: Peer,
    job: JobPass,
    wanted: tuple[StateId, Shard],
    root: str,
    terms: Terms,
) -> Digest:
    """Return the whole digest of the copy with this *root*, where only the root is known.

    With *root* "" that of whichever copy *peer* has.

    Raises:
        TransferError: *peer* has no such copy, or cannot be reached, within the terms.
    """
    found: list[Digest] = []
    chunk_bytes = terms.limits.chunk_bytes

    def work(line: Line) -> None:
        line.send(Kind.OPEN, Open(*wanted, chunk_bytes, root).to_bytes())
        kind, body = line.receive(line.limits.stall_s)
        if kind is not Kind.COPY:
            raise WireError("not the copy that was asked for")
        nbytes, told = wire.read_copy(body)
        table = line.receive_bytes(wire.table_bytes(nbytes, chunk_bytes))
        digest = Digest(nbytes, table, told)
        if root not in ("", told) or root_of(nbytes, table) != told:
            raise WireError("a digest that does not agree with itself")
        found.append(digest)

    try:
        Team(peer, job, terms, work, lambda: len(found)).run(1, time.monotonic() + terms.deadline_s)
    except (TransferError, CorruptError) as exc:
        raise _no_copy(
            f"the digest of {wanted[1].file_name} of {wanted[0]}", [(peer, exc)]
        ) from exc
    return found[0]


def push(
    peer: Peer,
    job: JobPass,
    offer: Push,
    copy: PinnedCopy,
    terms: Terms,
    pace: Pace,
) -> Pushed:
    """Give *peer* the replica *offer*, from *copy*; return once it has verified all of it.

    *copy* must stay pinned until this returns or raises; it is not released here.

    Raises:
        RefusedError: The holder does not take it; the code says why.
        CorruptError: It arrives damaged again and again, or *copy* itself is damaged.
        TransferError: The holder cannot be reached, or not within the terms.
    """
    began_s = time.monotonic()
    digest, chunk_bytes = copy.digest, terms.limits.chunk_bytes
    check_digest(digest, chunk_bytes=chunk_bytes)
    request = offer.to_bytes(chunk_bytes)
    sent = _Sum()

    def work(line: Line) -> None:
        line.send(Kind.PUSH, request, digest.table)
        wait_s = line.limits.idle_s
        while True:
            kind, body = line.receive(wait_s)
            wait_s = line.limits.stall_s
            if kind is Kind.DONE:
                return
            if kind is Kind.GET:
                sent.add(_serve_own(line, body, copy, pace, chunk_bytes))
            elif kind is not Kind.WAIT:
                raise WireError(f"{kind.name} was not expected")

    what = f"the replica of {offer.shard.file_name} of {offer.state}"
    n_chunks = n_chunks_of(digest.nbytes, chunk_bytes=chunk_bytes)
    team = Team(peer, job, terms, work, lambda: sent.total)
    try:
        team.run(min(terms.n_connections, n_chunks), began_s + terms.deadline_s)
    except RefusedError as exc:
        if exc.code is Refusal.DAMAGED:
            raise CorruptError(f"{what} reached {peer} damaged: {exc}") from exc
        raise RefusedError(exc.code, f"{peer} does not take {what}: {exc}") from exc
    except CorruptError as exc:
        raise CorruptError(f"{what} cannot be given to {peer}: {exc}") from exc
    except TransferError as exc:
        raise TransferError(f"{what} did not get to {peer}: {exc}") from exc
    return Pushed(time.monotonic() - began_s, sent.total)


def _serve_own(line: Line, body: bytes, copy: PinnedCopy, pace: Pace, chunk_bytes: int) -> int:
    before = line.sent_bytes
    try:
        serve(line, body, copy, pace, chunk_bytes)
    except RefusedError as exc:
        line.send(Kind.REFUSED, wire.refused_bytes(exc.code, str(exc)))
        raise CorruptError(str(exc)) from exc
    return line.sent_bytes - before


class _Sum:
    """A sum that several threads add to."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:
            self.total += number


def _no_copy(what: str, failed: Sequence[tuple[Peer, Exception]]) -> TransferError | CorruptError:
    reasons = "; ".join(_told(peer, error) for peer, error in failed) or "no peer has it"
    text = f"{what} could not be fetched: {reasons}"
    is_damaged = any(
        isinstance(error, CorruptError)
        or (isinstance(error, RefusedError) and error.code is Refusal.DAMAGED)
        for _peer, error in failed
    )
    return CorruptError(text) if is_damaged else TransferError(text)


def _told(peer: Peer, error: Exception) -> str:
    return f"{peer}: {error}"
