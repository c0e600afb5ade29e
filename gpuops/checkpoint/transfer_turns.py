"""The two roles of a transfer: to ask for the chunks that are missing, and to serve them."""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from gpuops.checkpoint import transfer_wire as wire
from gpuops.checkpoint.digest import HASH_BYTES, n_chunks_of
from gpuops.checkpoint.states import Digest
from gpuops.checkpoint.transfer_intake import Claim, Intake
from gpuops.checkpoint.transfer_line import Line
from gpuops.checkpoint.transfer_pace import Pace
from gpuops.checkpoint.transfer_wire import Get, Kind, Refusal, RefusedError
from gpuops.host.frames import WireError

# Requests on their way: while one range arrives, the next is already asked for.
_AHEAD = 2
_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class PinnedCopy:
    """A whole copy that stays as it is until *release* is called, once.

    *fd* is a memfd or a file that begins with the image, *view* the same bytes where they are
    mapped already. *damaged* is told the number of a chunk whose bytes are found not to be those of
    the digest.
    """

    fd: int
    digest: Digest
    release: Callable[[], None] = lambda: None
    damaged: Callable[[int], None] = lambda _number: None
    view: memoryview | None = None


def ask(line: Line, intake: Intake, is_wanted: Callable[[], bool]) -> None:
    """Ask *line* for what *intake* lacks; return when all is there, or is not wanted any more.

    Where this raises, what was asked for is left to other lines.

    Raises:
        DamagedError: A chunk came damaged too often.
        RefusedError: The other side cannot serve.
        WireError, OSError: The line is of no more use.
    """
    asked: deque[Claim] = deque()
    try:
        while is_wanted():
            while len(asked) < _AHEAD and (claim := intake.claim()) is not None:
                asked.append(claim)
                get = Get(claim.first, claim.count, claim.is_doubtful)
                line.send(Kind.GET, get.to_bytes())
            if asked:
                _take(line, intake, asked[0])
                asked.popleft()
            elif intake.is_whole:
                return
            else:
                intake.wait(line.limits.stall_s / 4)
                line.send(Kind.WAIT)
    finally:
        for claim in asked:
            intake.give_back(claim)


def _take(line: Line, intake: Intake, claim: Claim) -> None:
    kind, body = line.receive(line.limits.stall_s)
    if kind is not Kind.DATA or Get.from_bytes(body) != Get(claim.first, claim.count):
        raise WireError("not the chunks that were asked for")
    hasher = xxhash.xxh3_64()
    for number in range(claim.first, claim.first + claim.count):
        hasher.reset()
        with intake.chunk(number) as view:
            line.receive_into(view, hasher)
        intake.settle(number, hasher.digest())


def serve(line: Line, body: bytes, copy: PinnedCopy, pace: Pace, chunk_bytes: int) -> None:
    """Answer one `GET` with chunks of *copy*.

    A chunk that came damaged before is hashed here first, so that both sides learn whether the copy
    is to blame or the way.

    Raises:
        RefusedError: This copy is damaged. The caller tells the other side.
        WireError: A range that the image does not have.
    """
    get = Get.from_bytes(body)
    digest = copy.digest
    n_chunks = n_chunks_of(digest.nbytes, chunk_bytes=chunk_bytes)
    is_too_much = get.count > 1 and get.count * chunk_bytes > wire.RANGE_BYTES_MAX
    if get.count < 1 or get.first + get.count > n_chunks or is_too_much:
        raise WireError(f"chunks {get.first} to {get.first + get.count - 1} of {n_chunks}")
    if get.is_doubtful:
        for number in range(get.first, get.first + get.count):
            _check_own(copy, number, chunk_bytes)
    begin = get.first * chunk_bytes
    nbytes = min(begin + get.count * chunk_bytes, digest.nbytes) - begin
    line.send(Kind.DATA, Get(get.first, get.count).to_bytes())
    line.send_image(copy, begin, nbytes, pace)


def _check_own(copy: PinnedCopy, number: int, chunk_bytes: int) -> None:
    at, end = number * chunk_bytes, min((number + 1) * chunk_bytes, copy.digest.nbytes)
    hasher = xxhash.xxh3_64()
    while at < end:
        piece = os.pread(copy.fd, min(_PIECE_BYTES, end - at), at)
        if not piece:
            break
        hasher.update(piece)
        at += len(piece)
    expected = copy.digest.table[number * HASH_BYTES : (number + 1) * HASH_BYTES]
    if hasher.digest() != expected:
        copy.damaged(number)
        raise RefusedError(Refusal.DAMAGED, f"chunk {number} of its copy is damaged")
