"""The heartbeat ring of one rank.

One writer (the worker, from its optimizer hook) and any number of readers (the agent, after the
worker's death too) map the same small file. No lock and no system call: a beat is one 64-byte
copy. A record carries its sequence number at both ends; a reader that sees two different numbers
has met a half-written record and leaves it for the next poll.

Layout, little endian: a 64-byte header (magic, version, slots, rank, generation, pid, start, head,
request, flags, stop step) and then ``slots`` records of 64 bytes. ``head`` is the number of beats
written so far; beat *n* (1-based) lies in slot ``(n - 1) % slots``.

Two words of the header go the other way or beside the beats. ``request`` and ``stop step`` are
written by the agent only, ``flags`` by the worker only; each byte of ``flags`` has a writer of its
own there (the beat, `should_stop`, a signal handler, a Checkpointer), so that none undoes what
another wrote.

A beat of `WorkerPhase.STEPPING` has no name. Its 16 bytes say what the step took and had: u32
microseconds in the data loader, u32 microseconds in optimizers, u64 tokens.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag

MAGIC = b"GPUOPSHB"
VERSION = 3
SLOTS = 1024
SLOTS_MAX = 1 << 16
RECORD_BYTES = 64
HEADER_BYTES = 64
RING_BYTES = HEADER_BYTES + SLOTS * RECORD_BYTES
STEP_UNKNOWN = -1

NAME_BYTES = 16

_HEADER = struct.Struct("<8sIIIIQQQIIq")
HEAD_OFFSET = 40
REQUEST_OFFSET = 48
FLAGS_OFFSET = 52
STOP_STEP_OFFSET = 56
_HEAD = struct.Struct("<Q")
_WORD = struct.Struct("<I")
_STEP = struct.Struct("<q")
_RECORD = struct.Struct("<QqQIIQ16sQ")
_STEP_RECORD = struct.Struct("<QqQIIQIIQQ")
_TIMES = struct.Struct("<IIQ")
assert _HEADER.size == HEADER_BYTES
assert _RECORD.size == _STEP_RECORD.size == RECORD_BYTES
_U32_MAX = 2**32 - 1
_U64_MAX = 2**64 - 1


class StepSource(IntEnum):
    """Where a step number is from; a hook's count alone is not a step."""

    UNKNOWN = 0
    OPTIMIZER_STATE = 1
    REPORTED = 2  # by `gpuops.progress`, or to a Checkpointer
    COUNTED = 3  # no step: how often the optimizer was called since the worker started


class WorkerPhase(IntEnum):
    """What the worker is doing, from this beat on. Only `STEPPING` beats are steps."""

    STARTING = 0
    STEPPING = 1
    FINISHED = 2  # the program came to its end; the process may have things to tidy up
    RAISED = 3
    EVAL = 4
    CHECKPOINT = 5
    RESTORE = 6
    OTHER = 7  # its name says what
    RESUMED = 8  # a phase has ended, a step is next


class AgentRequest(IntEnum):
    """What the agent wants of the worker."""

    NONE = 0
    DRAIN = 1  # finish the step, save, stop
    TERMINATE = 2  # the group is being ended: SIGTERM means now


class WorkerFlag(IntFlag):
    """What the worker says of itself beside its beats; one byte for each writer.

    The first two are known from the first beat on only, and looked at again every few beats:
    before it a script may still install a handler of its own.
    """

    HANDLES_SIGTERM = (
        1 << 0
    )  # SIGTERM only sets `SIGNALLED`: nothing is lost by SIGKILL in its place
    HANDLES_SIGUSR1 = 1 << 1
    HANDLES_SIGUSR2 = 1 << 2  # SIGUSR2 writes the stacks of all threads to ``GPUOPS_STACKS``
    STOP_POLLED = 1 << 8  # the script has called `gpuops.should_stop`
    STOP_RETURNED = 1 << 9  # and was told to stop
    PROGRAM_ENDED = 1 << 10  # as `WorkerPhase.FINISHED`: the process only has things to tidy up
    SIGNALLED = 1 << 16  # SIGTERM or SIGUSR1 reached the worker itself while `Request.NONE`
    HANDLER_RAN = 1 << 17  # a signal met our handler: the script has none of its own
    SAVES_AT_STOP = 1 << 24  # its Checkpointer saves the state of the step at which a drain stops
    SAVED_AT_STOP = 1 << 25  # and has done so, or has failed to


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
    phase: WorkerPhase
    source: StepSource
    optimizer_calls: int
    name: str = ""  # of the phase, as the script says it, cut to `NAME_BYTES`
    counted: int | None = None  # with `StepSource.COUNTED`; the step is unknown
    # Of a `STEPPING` beat with a new step, or without one: since the last such beat. 0: not known.
    data_us: int = 0  # in torch's data loader, by the thread that steps; at most 71 minutes
    optimizer_us: int = 0  # from the pre-hooks to the post-hooks of all optimizers
    tokens: int = 0  # that the script reported


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
        AgentRequest.NONE,
        0,
        STEP_UNKNOWN,
    )


def read_header(buffer: bytes | memoryview) -> RingHeader:
    """Return the header of the ring in *buffer*.

    Raises:
        RingError: Too short, another magic or version, or an absurd number of slots.
    """
    if len(buffer) < HEADER_BYTES:
        raise RingError(f"{len(buffer)} bytes are too few for a heartbeat ring")
    magic, version, slots, rank, generation, pid, start, head, *_ = _HEADER.unpack_from(buffer, 0)
    if magic != MAGIC or version != VERSION:
        raise RingError(f"not a heartbeat ring of version {VERSION}: {magic!r} {version}")
    if not 0 < slots <= SLOTS_MAX or len(buffer) < HEADER_BYTES + slots * RECORD_BYTES:
        raise RingError(f"a heartbeat ring of {slots} slots does not fit {len(buffer)} bytes")
    return RingHeader(rank, generation, pid, start, slots, head)


def write_beat(buffer: bytearray | memoryview, beat: Beat, slots: int = SLOTS) -> None:
    """Put *beat* into its slot and advance the head."""
    offset = HEADER_BYTES + (beat.seq - 1) % slots * RECORD_BYTES
    seq, step = beat.seq, beat.step if beat.counted is None else beat.counted
    front = seq, step, beat.mono_ns, beat.phase, beat.source, beat.optimizer_calls
    if beat.phase is WorkerPhase.STEPPING:
        data_us, optimizer_us = min(beat.data_us, _U32_MAX), min(beat.optimizer_us, _U32_MAX)
        tokens = min(beat.tokens, _U64_MAX)
        _STEP_RECORD.pack_into(buffer, offset, *front, data_us, optimizer_us, tokens, seq)
    else:
        name = beat.name.encode()[:NAME_BYTES] if beat.name else b""
        _RECORD.pack_into(buffer, offset, *front, name, seq)
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
        fields = _RECORD.unpack_from(buffer, offset)
        front, step, mono_ns, number, source, calls, name, back = fields
        if front == back == seq:
            phase, found, counted = WorkerPhase(number), StepSource(source), None
            if found is StepSource.COUNTED:
                step, counted = STEP_UNKNOWN, step
            is_step = phase is WorkerPhase.STEPPING
            text = _decode_name(name) if name[0] and not is_step else ""
            times = _TIMES.unpack(name) if is_step else (0, 0, 0)
            beats.append(Beat(seq, step, mono_ns, phase, found, calls, text, counted, *times))
    return beats


def _decode_name(name: bytes) -> str:
    text = name.rstrip(b"\0").decode("utf-8", errors="replace")
    return "".join(char if char.isprintable() else "?" for char in text)


def write_request(
    buffer: bytearray | memoryview, request: AgentRequest, stop_step: int = STEP_UNKNOWN
) -> None:
    """Tell the worker of *request*; it drains once its own step is *stop_step*, or at once."""
    _STEP.pack_into(buffer, STOP_STEP_OFFSET, stop_step)
    _WORD.pack_into(buffer, REQUEST_OFFSET, request)


def read_request(buffer: bytes | bytearray | memoryview) -> tuple[AgentRequest, int]:
    """Return what the agent wants, and the step from which on it wants that.

    Raises:
        ValueError: A request of a later version.
    """
    (request,) = _WORD.unpack_from(buffer, REQUEST_OFFSET)
    (stop_step,) = _STEP.unpack_from(buffer, STOP_STEP_OFFSET)
    return AgentRequest(request), stop_step


def write_flags(buffer: bytearray | memoryview, flags: WorkerFlag, mask: WorkerFlag) -> None:
    """Set the byte of *flags* that holds *mask* to *flags*."""
    byte = (mask.bit_length() - 1) // 8
    buffer[FLAGS_OFFSET + byte] = flags >> 8 * byte & 0xFF


def raise_flag(buffer: bytearray | memoryview, flag: WorkerFlag) -> None:
    """Add *flag* to those of its writer."""
    write_flags(buffer, flag | read_flags(buffer), flag)


def read_flags(buffer: bytes | bytearray | memoryview) -> WorkerFlag:
    """Return what the worker says of itself."""
    (flags,) = _WORD.unpack_from(buffer, FLAGS_OFFSET)
    return WorkerFlag(flags)
