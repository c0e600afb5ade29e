"""The control record of a run: one JSON value in the control store, changed by compare-and-set.

It names the generation, its phase, the reason and the excluded nodes. Any agent may take a
generation from RUN to COLLECT or DRAIN; the first writer wins, all others follow.

Keys in the store::

    control                    the record
    agent/<agent id>           who an agent is (`Member`), written once
    alive/<agent id>           its heartbeat: a sequence number, its progress
    gen/<g>/ready/<agent id>   it can join generation g (`Member`, with a free port)
    gen/<g>/roster             the members of generation g by rank (`Roster`), written once
    gen/<g>/report/<agent id>  its report on generation g (`NodeReport`)
    gen/<g>/restore            the checkpoint that generation g resumes from, if there is one
    gen/<g>/sources/<name>/<r> the nodes that have the shards of ranks r and following of it
    ckpt/...                   what else the agents agree on about checkpoints

The keys of a generation are deleted once the second next one runs; see `gpuops.control.record`.
"""

import json
import logging
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from signal import Signals
from typing import Any, Self
from uuid import UUID

from gpuops.control.store import ControlStore, ControlStoreError, ControlStoreResetError, Entry
from gpuops.incident import fields
from gpuops.incident.decision import (
    HISTORY_MAX,
    REASON_CHARS_MAX,
    PastFailure,
    ReportKind,
    RestartDecision,
)
from gpuops.model import Json
from gpuops.units import NS_PER_S

RECORD_VERSION = 1
NAME_CHARS_MAX = 255
GENERATION_MAX = 10**6
WORKERS_MAX = 4096  # of one node
PORT_MAX = 2**16 - 1
DOMAIN_LEVELS_MAX = 16
EXIT_CODE_MAX = 255
RECORD_KEY = "control"
# Longer values are compressed: the roster of 4,096 nodes, which each of them reads, from 0.8 MB to
# 0.1 MB.
PLAIN_BYTES_MAX = 2**16
UNPACKED_BYTES_MAX = 2**26
_ZLIB_HEAD = b"\x78"
SENT_KEY = "sent_ns"  # in a heartbeat: when it was sent, on the monotonic clock of its host
SLOW_FLAG = "slow"  # in the heartbeat of an agent whose calls are answered late
# A run's folder: one name, no way out of the directory of all runs.
FOLDER_PATTERN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}")


class RecordError(ValueError):
    """The bytes are not a record of this version."""


# What parsing the entry of another agent may raise.
ENTRY_ERRORS = (RecordError, AttributeError, KeyError, OverflowError, TypeError, ValueError)


class RunPhase(StrEnum):
    """What every agent does now."""

    RENDEZVOUS = "form"  # the generation is being formed: join
    RUN = "run"  # its workers run
    COLLECT = "gather"  # something happened: stop the workers, report
    DRAIN = "drain"  # finish the step, save, stop; then exit 85
    STOP = "stop"  # the run is over; exit with its code


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One agent: its node's name and the address at which its peers reach it.

    ``node_rank_hint`` is the launcher's rank (SLURM_PROCID, ``--node-rank``), None where it gives
    none. ``master_port`` is free for the workers' store, should this agent get group rank 0.
    ``domain`` names its failure domains, the widest first; () where none is known.
    """

    agent: str
    node: str
    address: str
    n_workers: int
    node_rank_hint: int | None = None
    master_port: int = 0
    domain: tuple[str, ...] = ()

    def to_json(self) -> Json:
        return {
            "agent": self.agent,
            "node": self.node,
            "address": self.address,
            "n_workers": self.n_workers,
            "order": self.node_rank_hint,
            "master_port": self.master_port,
            **({"domain": list(self.domain)} if self.domain else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        node, address = str(data["node"]), str(data["address"])
        if not 0 < len(node) <= NAME_CHARS_MAX or len(address) > NAME_CHARS_MAX:
            raise ValueError("a node's name or address is too long")
        return cls(
            agent=str(UUID(data["agent"])),
            node=node,
            address=address,
            n_workers=_bounded_int(data["n_workers"], WORKERS_MAX),
            node_rank_hint=fields.number(data.get("order")),
            master_port=_bounded_int(data.get("master_port", 0), PORT_MAX),
            domain=fields.names(data.get("domain", ()), DOMAIN_LEVELS_MAX),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Who trains in a generation, by group rank; ``spares`` wait.

    ``metadata`` comes from the leader's extensions; see `gpuops.control.leader`.
    """

    generation: int
    members: tuple[Member, ...]
    spares: tuple[Member, ...] = ()
    metadata: Json = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Return the number of workers."""
        return sum(member.n_workers for member in self.members)

    def group_rank(self, agent: str) -> int | None:
        """Return the node rank of *agent*, None where it is not a member."""
        for rank, member in enumerate(self.members):
            if member.agent == agent:
                return rank
        return None

    def ranks(self, agent: str) -> range:
        """Return the global ranks of the workers of *agent*; none where it is not a member."""
        group_rank = self.group_rank(agent)
        if group_rank is None:
            return range(0)
        first = self.first_rank(group_rank)
        return range(first, first + self.members[group_rank].n_workers)

    def first_rank(self, group_rank: int) -> int:
        """Return the global rank of the first worker of *group_rank*."""
        return sum(member.n_workers for member in self.members[:group_rank])

    def to_bytes(self) -> bytes:
        return _pack(
            {
                "generation": self.generation,
                "members": [member.to_json() for member in self.members],
                "spares": [member.to_json() for member in self.spares],
                **({"notes": self.metadata} if self.metadata else {}),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the roster in *data*.

        Raises:
            RecordError: Not a roster.
        """
        with _decoding("roster"):
            body = _unpack(data)
            notes = body.get("notes", {})
            return cls(
                generation=_generation(body["generation"]),
                members=tuple(map(Member.from_json, body["members"])),
                spares=tuple(map(Member.from_json, body["spares"])),
                metadata=notes if isinstance(notes, dict) else {},
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRecord:
    """What the agents of a run have agreed on; ``*_s`` are times of the control store.

    ``excluded`` nodes are not assigned; ``suspected`` ones, oldest first: see
    `gpuops.incident.suspicion`. ``not_before_s`` is the back-off of the generation that is being
    formed. ``decision`` is the last one, ``exit_code`` the run's once the phase is STOP.
    """

    run_id: str
    folder: str
    generation: int
    phase: RunPhase
    since_s: float
    gpuops_version: str = ""  # of the agent that made the record, and its node
    made_by: str = ""
    fingerprint: str = ""  # of the command: agents of another job are not of this run
    reason: str = ""
    trigger: ReportKind | None = None  # what took the generation to GATHER
    decided_by: str = ""
    excluded: Mapping[str, str] = field(default_factory=dict)
    suspected: Mapping[str, str] = field(default_factory=dict)
    excluded_checkpoint: int | None = None
    history: tuple[PastFailure, ...] = ()
    decision: RestartDecision | None = None
    not_before_s: float = 0.0
    grown_at_s: tuple[float, ...] = ()  # when the run was restarted to take more nodes in
    drain_signal: str | None = None
    drain_step: int | None = None  # ranks that ask whether to stop do so after this step, all alike
    exit_code: int | None = None

    def to_bytes(self) -> bytes:
        return _pack(
            {
                "run_id": self.run_id,
                "folder": self.folder,
                "generation": self.generation,
                "phase": self.phase.value,
                "since_s": self.since_s,
                "gpuops": self.gpuops_version,
                "node": self.made_by,
                "fingerprint": self.fingerprint,
                "reason": self.reason,
                "trigger": self.trigger and self.trigger.value,
                "decided_by": self.decided_by,
                "excluded": dict(self.excluded),
                "doubted": dict(self.suspected),
                "excluded_checkpoint": self.excluded_checkpoint,
                "history": [item.to_json() for item in self.history[-HISTORY_MAX:]],
                "decision": self.decision and self.decision.to_json(),
                "not_before_s": self.not_before_s,
                "grown_s": list(self.grown_at_s[-HISTORY_MAX:]),
                "drain_signal": self.drain_signal,
                "drain_step": self.drain_step,
                "exit_code": self.exit_code,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the record in *data*.

        Raises:
            RecordError: Not a control record of this version.
        """
        with _decoding("control record"):
            body = _unpack(data)
            decision, trigger = body.get("decision"), body.get("trigger")
            return cls(
                run_id=str(UUID(body["run_id"])),
                folder=_folder(body["folder"]),
                generation=_generation(body["generation"]),
                phase=RunPhase(body["phase"]),
                since_s=fields.seconds(body["since_s"]),
                gpuops_version=fields.text(body.get("gpuops")) or "",
                made_by=fields.text(body.get("node")) or "",
                fingerprint=fields.text(body.get("fingerprint")) or "",
                reason=fields.text(body.get("reason"), REASON_CHARS_MAX) or "",
                trigger=ReportKind(trigger) if trigger else None,
                decided_by=fields.text(body.get("decided_by")) or "",
                excluded=fields.reasons(body.get("excluded", {})),
                suspected=fields.reasons(body.get("doubted", {})),
                excluded_checkpoint=fields.number(body.get("excluded_checkpoint")),
                history=tuple(
                    PastFailure.from_json(x) for x in body.get("history", ())[-HISTORY_MAX:]
                ),
                decision=RestartDecision.from_json(decision) if decision else None,
                not_before_s=fields.seconds(body.get("not_before_s", 0.0)),
                grown_at_s=tuple(map(fields.seconds, body.get("grown_s", ())[-HISTORY_MAX:])),
                drain_signal=_signal_name(body.get("drain_signal")),
                drain_step=fields.number(body.get("drain_step")),
                exit_code=_exit_code(body.get("exit_code")),
            )


def pack(body: Json) -> bytes:
    """Return *body* as a value of the control store."""
    return _pack(body)


def unpack(data: bytes) -> dict[str, Any]:
    """Return the body of a value.

    Raises:
        RecordError: Not one.
    """
    with _decoding("value"):
        return _unpack(data)


def _pack(body: Json) -> bytes:
    data = json.dumps({"v": RECORD_VERSION, **body}, separators=(",", ":")).encode()
    return zlib.compress(data, level=1) if len(data) > PLAIN_BYTES_MAX else data


def unpack_any_version(data: bytes) -> dict[str, Any]:
    """Return the body of a value that any version of gpuops has written.

    Raises:
        RecordError: Not one.
    """
    with _decoding("value"):
        return _unpack_any_version(data)


def _unpack(data: bytes) -> dict[str, Any]:
    body = _unpack_any_version(data)
    if body.get("v") != RECORD_VERSION:
        raise ValueError(f"version {RECORD_VERSION} is wanted")
    return body


def _unpack_any_version(data: bytes) -> dict[str, Any]:
    if data[:1] == _ZLIB_HEAD:
        inflater = zlib.decompressobj()
        data = inflater.decompress(data, UNPACKED_BYTES_MAX)
        if not inflater.eof:
            raise ValueError(f"more than {UNPACKED_BYTES_MAX} bytes, or cut off")
    body = json.loads(data)
    if not isinstance(body, dict):
        raise TypeError("not a JSON object")
    return body


def _generation(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= GENERATION_MAX:
        raise ValueError(f"{value!r} is not a generation")
    return value


def _bounded_int(value: object, maximum: int) -> int:
    found = fields.required_number(value)
    if not 0 <= found <= maximum:
        raise ValueError(f"{found} is not within 0..{maximum}")
    return found


def _folder(value: object) -> str:
    found = fields.name(value)
    if not FOLDER_PATTERN.fullmatch(found):
        raise ValueError(f"{found[:40]!r} is not the name of a run's folder")
    return found


def _signal_name(value: object) -> str | None:
    found = fields.text(value)
    if found is not None and found not in Signals.__members__:
        raise ValueError(f"{found[:40]!r} is not a signal")
    return found


def _exit_code(value: object) -> int | None:
    return None if value is None else _bounded_int(value, EXIT_CODE_MAX)


_DECODE_ERRORS = (
    ValueError,
    zlib.error,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)


class _decoding:  # noqa: N801 a context manager, read as a verb
    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, _DECODE_ERRORS):
            raise RecordError(f"not a {self._what}: {error!r:.300}") from error


@dataclass(frozen=True, slots=True)
class RecordView:
    """The record as this agent knows it, and what time it is on the control store."""

    record: ControlRecord
    version: int
    store_s: float
    received_ns: int

    def store_now_s(self, now_ns: int) -> float:
        """Return the control store's time at this host's *now_ns*."""
        return self.store_s + (now_ns - self.received_ns) / NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlKeys:
    """Where things of one run lie on the control store.

    A control store outlives runs, so all but the record carry the run's id: a new run under the
    same key does not find the entries of the one before.
    """

    run_id: str

    @property
    def prefix(self) -> str:
        return self.run_id[-12:]

    def agent(self, agent: str = "") -> str:
        return f"{self.prefix}/agent/{agent}"

    def heartbeat(self, agent: str = "") -> str:
        return f"{self.prefix}/alive/{agent}"

    def generation(self, generation: int) -> str:
        """Return what all keys of *generation* begin with, and no other's."""
        return f"{self.prefix}/gen/{generation}/"

    def ready(self, generation: int, agent: str = "") -> str:
        return f"{self.generation(generation)}ready/{agent}"

    def roster(self, generation: int) -> str:
        return f"{self.generation(generation)}roster"

    def published(self, monitor: str = "", agent: str = "") -> str:
        return f"{self.prefix}/monitor/{monitor and f'{monitor}/{agent}'}"

    def commit_record(self) -> str:
        return f"{self.prefix}/ckpt/watermark"

    def restore(self, generation: int) -> str:
        return f"{self.generation(generation)}restore"

    def sources(self, generation: int, name: str, first_rank: int | None = None) -> str:
        first = "" if first_rank is None else first_rank
        return f"{self.generation(generation)}sources/{name}/{first}"

    def report(self, generation: int, agent: str = "") -> str:
        return f"{self.generation(generation)}report/{agent}"

    def settled(self, generation: int, agent: str = "") -> str:
        return f"{self.generation(generation)}settled/{agent}"


log = logging.getLogger(__name__)

# Of the one before, a slow agent may still read who sat where and what was reported.
GENERATIONS_KEPT = 2


def delete_old_generations(store: ControlStore, keys: ControlKeys, generation: int) -> None:
    """Take off *store* what nobody needs while *generation* runs.

    What it does not do now it is asked for once more with the next generation; what stays there
    costs its space.
    """
    newest_deleted = generation - GENERATIONS_KEPT
    for number in range(max(newest_deleted - 1, 0), newest_deleted + 1):
        try:
            store.delete(keys.generation(number))
        except ControlStoreError as exc:
            log.debug("generation %d stays in the control store: %s", number, exc)


def read_own_record(entry: Entry, run_id: str) -> ControlRecord:
    """Return the record in *entry*.

    Raises:
        ControlStoreResetError: It is gone, or another run's that came after ours.
        ControlStoreError: It is none.
    """
    if entry.version:
        try:
            record = ControlRecord.from_bytes(entry.value)
        except RecordError as exc:
            raise ControlStoreError(
                f"the control store does not hold a record of this version: {exc}"
            ) from exc
        if record.run_id == run_id:
            return record
    why = "holds the record of another run" if entry.version else "has no record"
    raise ControlStoreResetError(f"the control store {why}: this one is over, or was cleaned up")
