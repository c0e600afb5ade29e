"""What one rank's flight recorder holds: the collectives that it called, and which are complete.

A group is known by its name. Its number in the dump (``pg_id``) differs between ranks. Gloo leaves
an operation ``scheduled`` for ever; only ``retired`` says that it is complete, and one that ended
with an exception is retired as well, so a dump of gloo must be older than the time-out.
Source: torch 2.13, ``torch/csrc/distributed/c10d/FlightRecorder``, and measured over gloo.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

ENTRIES_MAX = 1_000_000
RANKS_MAX = 2**20
_TEXT_MAX = 256
_DIMENSIONS_MAX = 16
_TENSORS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """A collective, a send or a receive that a rank called on ``group``.

    ``number`` counts the collectives of a group, and apart from them its sends and receives.
    ``sizes`` and ``dtypes`` are those of the inputs. ``peer``: the other end of a send or receive,
    by its place in the group. ``place``: the program's own line that called it, if it was recorded.
    ``created_ns``: when it was called, by the wall clock; with ``backend`` nccl that is when it was
    enqueued, and ``duration_s`` is what it took on the device, if that was timed.
    """

    group: str
    number: int
    operation: str
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    is_complete: bool = False
    is_p2p: bool = False
    peer: int | None = None
    place: str = ""
    backend: str = ""
    created_ns: int = 0
    duration_s: float | None = None

    def __str__(self) -> str:
        sizes = ", ".join("x".join(map(str, size)) or "1" for size in self.sizes)
        what = " ".join(filter(None, (sizes, *dict.fromkeys(self.dtypes))))
        return f"{self.operation}({what})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDump:
    """The dump of one rank. ``members``: the ranks of each group, as far as the dump names them."""

    rank: int
    calls: tuple[CollectiveCall, ...]
    members: Mapping[str, tuple[int, ...]]


def parse_dump(body: object, rank: int) -> RankDump:
    """Return the dump of *rank* in *body*, as `gpuops.convert.flight_recorder` reads it.

    Raises:
        ValueError: It is none, or has more than `ENTRIES_MAX` entries.
    """
    body = body if isinstance(body, Mapping) else {}
    entries = body.get("entries")
    if not isinstance(entries, list):
        raise ValueError(  # noqa: TRY004 one kind of error for a dump
            "it has no list of entries: not a dump of torch's flight recorder"
        )
    if len(entries) > ENTRIES_MAX:
        raise ValueError(f"it has {len(entries)} entries, more than {ENTRIES_MAX}")
    calls = [_call(entry, number) for number, entry in enumerate(entries)]
    # A group that was destroyed may be made again under its name, and counts from 1 again; its
    # number in the dump is new then. Entries are in order.
    ids = [entry.get("pg_id") for entry in entries]
    newest = {call.group: made for call, made in zip(calls, ids, strict=True)}
    return RankDump(
        rank=rank,
        calls=tuple(c for c, made in zip(calls, ids, strict=True) if newest[c.group] == made),
        members=_members(body.get("pg_config")),
    )


def _call(entry: object, place: int) -> CollectiveCall:
    where = f"entry {place}"
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} is no table")  # noqa: TRY004 as above
    backend, _, name = _text(entry.get("profiling_name"), f"{where}: profiling_name").partition(":")
    group = entry.get("process_group")
    if not isinstance(group, Sequence) or isinstance(group, str) or not group:
        raise ValueError(f"{where}: process_group is {group!r:.80}, not a name and a description")
    is_p2p = entry.get("is_p2p") is True
    is_retired = entry.get("retired") is True
    operation, _, ends = name.partition(" ")
    created_ns = entry.get("time_created_ns")
    return CollectiveCall(
        group=_text(group[0], f"{where}: process_group"),
        number=_whole(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id"), where),
        operation=operation or backend,
        sizes=_sizes(entry.get("input_sizes")),
        dtypes=_texts(entry.get("input_dtypes")),
        is_complete=is_retired if backend == "gloo" else entry.get("state") == "completed",
        is_p2p=is_p2p,
        peer=_peer(ends),
        place=_place(entry.get("frames")),
        backend=backend,
        created_ns=created_ns if _is_number(created_ns) else 0,
        duration_s=_duration_s(entry.get("duration_ms")),
    )


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is {value!r:.80}, not a text")  # noqa: TRY004 as above
    return value[:_TEXT_MAX]


def _whole(value: object, where: str) -> int:
    if not _is_number(value):
        raise ValueError(f"{where}: the number in its group is {value!r:.80}")
    return value


def _is_number(value: object, limit: int = 2**63) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def _texts(value: object) -> tuple[str, ...]:
    items = value[:_TENSORS_MAX] if isinstance(value, list | tuple) else ()
    return tuple(item[:_TEXT_MAX] for item in items if isinstance(item, str))


def _sizes(value: object) -> tuple[tuple[int, ...], ...]:
    tensors = value[:_TENSORS_MAX] if isinstance(value, list | tuple) else ()
    return tuple(
        tuple(n for n in size[:_DIMENSIONS_MAX] if _is_number(n))
        for size in tensors
        if isinstance(size, list | tuple)
    )


def _duration_s(value: object) -> float | None:
    if isinstance(value, int | float) and 0 <= value < 1e12:
        return value / 1e3
    return None


def _peer(ends: str) -> int | None:
    """Return the second of ``0->1`` (a send) or ``1<-0`` (a receive)."""
    other = ends.replace("<-", "->").partition("->")[2]
    return int(other) if other.isascii() and other.isdecimal() else None


def _place(frames: object) -> str:
    """Return the innermost frame outside torch."""
    for frame in frames[:_TENSORS_MAX] if isinstance(frames, list | tuple) else ():
        file, line = (
            (frame.get("filename"), frame.get("line")) if isinstance(frame, dict) else ("", 0)
        )
        if isinstance(file, str) and file and "/torch/" not in file and _is_number(line):
            return f"{file[-_TEXT_MAX:]}:{line}"
    return ""


def _members(config: object) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group; gloo names those of no group, or of one without a name."""
    found = {}
    for name, about in config.items() if isinstance(config, Mapping) else ():
        ranks = about.get("ranks") if isinstance(about, Mapping) else None
        try:
            ranks = json.loads(ranks) if isinstance(ranks, str) else ranks
        except (ValueError, RecursionError):
            continue
        if name and isinstance(ranks, list) and all(_is_number(rank, RANKS_MAX) for rank in ranks):
            found[str(name)] = tuple(sorted(ranks))
    return {name: ranks for name, ranks in found.items() if ranks}
