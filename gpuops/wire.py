"""Formats that two processes share: the heartbeat ring of one rank.

One writer (the worker, from its optimizer hook) and any number of readers (the agent, after the
worker's death too) map the same small file. No lock and no system call: a beat is one 64-byte
copy. A record carries its sequence number at both ends; a reader that sees two different numbers
has met a half-written record and leaves it for the next poll.

Layout, little endian: a 64-byte header (magic, version, slots, rank, generation, pid, start, head)
and then ``slots`` records of 64 bytes. ``head`` is the number of beats written so far; beat *n*
(1-based) lies in slot ``(n - 1) % slots``.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"GPUOPSHB"
VERSION = 1
SLOTS = 1024
SLOTS_MAX = 1 << 16
RECORD_BYTES = 64
HEADER_BYTES = 64
RING_BYTES = HEADER_BYTES + SLOTS * RECORD_BYTES
STEP_UNKNOWN = -1

_HEADER = struct.Struct("<8sIIIIQQQ16x")
HEAD_OFFSET = 40
_HEAD = struct.Struct("<Q")
_RECORD = struct.Struct("<QqQIIQ16xQ")
assert _HEADER.size == HEADER_BYTES
assert _RECORD.size == RECORD_BYTES


class StepSource(IntEnum):
    """Where a step number is from; a hook's count alone is not a step."""

    UNKNOWN = 0
    OPTIMIZER_STATE = 1


class Phase(IntEnum):
    """What the worker is doing."""

    STARTING = 0
    STEPPING = 1
    FINISHED = 2
    RAISED = 3


class RingError(ValueError):
    """The bytes are not a heartbeat ring of a version we read."""


@dataclass(frozen=True, slots=True)
class RingHeader:
    """Whose ring it is."""

    rank: int
    generation: int
    pid: int
    start_mono_ns: int
    slots: int = SLOTS
    head: int = 0


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat: the *seq*-th since the worker started, at *mono_ns* on this host's clock."""

    seq: int
    step: int
    mono_ns: int
    phase: Phase
    source: StepSource
    optimizer_calls: int


def write_header(buffer: bytearray | memoryview, header: RingHeader) -> None:
    """Initialise *buffer* (of ``RING_BYTES``) as an empty ring."""
    _HEADER.pack_into(
        buffer,
        0,
        MAGIC,
        VERSION,
        header.slots,
        header.rank,
        header.generation,
        header.pid,
        header.start_mono_ns,
        header.head,
    )


def read_header(buffer: bytes | memoryview) -> RingHeader:
    """Return the header of the ring in *buffer*.

    Raises:
        RingError: Too short, another magic or version, or an absurd number of slots.
    """
    if len(buffer) < HEADER_BYTES:
        raise RingError(f"{len(buffer)} bytes are too few for a heartbeat ring")
    magic, version, slots, rank, generation, pid, start, head = _HEADER.unpack_from(buffer, 0)
    if magic != MAGIC or version != VERSION:
        raise RingError(f"not a heartbeat ring of version {VERSION}: {magic!r} {version}")
    if not 0 < slots <= SLOTS_MAX or len(buffer) < HEADER_BYTES + slots * RECORD_BYTES:
        raise RingError(f"a heartbeat ring of {slots} slots does not fit {len(buffer)} bytes")
    return RingHeader(rank, generation, pid, start, slots, head)


def write_beat(buffer: bytearray | memoryview, beat: Beat, slots: int = SLOTS) -> None:
    """Put *beat* into its slot and advance the head."""
    offset = HEADER_BYTES + (beat.seq - 1) % slots * RECORD_BYTES
    _RECORD.pack_into(
        buffer,
        offset,
        beat.seq,
        beat.step,
        beat.mono_ns,
        beat.phase,
        beat.source,
        beat.optimizer_calls,
        beat.seq,
    )
    _HEAD.pack_into(buffer, HEAD_OFFSET, beat.seq)


def read_beats(buffer: bytes | memoryview, after: int = 0) -> list[Beat]:
    """Return the beats after sequence number *after* that the ring still holds, oldest first.

    Raises:
        RingError: Not a heartbeat ring.
    """
    header = read_header(buffer)
    first = max(after + 1, header.head - header.slots + 1)
    beats = []
    for seq in range(first, header.head + 1):
        offset = HEADER_BYTES + (seq - 1) % header.slots * RECORD_BYTES
        front, step, mono_ns, phase, source, calls, back = _RECORD.unpack_from(buffer, offset)
        if front == back == seq:
            beats.append(Beat(seq, step, mono_ns, Phase(phase), StepSource(source), calls))
    return beats
