"""The nouns of gpuops: what every part passes to every other part.

Plain frozen records without behaviour beyond their JSON form, which loses nothing. The JSON keys
are a contract that users script against (frozen by ``tests/unit/test_contracts.py``).
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Self

from gpuops import __version__
from gpuops.failure_class import FailureClass as FailureClass  # noqa: PLC0414 given on from here
from gpuops.units import iso_utc, parse_iso_utc

Json = dict[str, Any]
_INCIDENTS = uuid.UUID("6f0b0f8e-5d0c-5b1e-9a51-2d1c8f6a7e43")


class Status(IntEnum):
    """The verdict of one finding, ordered: the worst of several is their maximum."""

    PASS = 0
    SKIP = 1
    WARN = 2
    UNKNOWN = 3
    FAIL = 4

    @property
    def word(self) -> str:
        """Return the name used in JSON, TOML and tables."""
        return self.name.lower()

    @classmethod
    def parse(cls, word: str) -> Self:
        """Return the status called *word*.

        Raises:
            KeyError: No such status.
        """
        return cls[word.upper()]


class UnknownReason(StrEnum):
    """Why a check could not be judged."""

    MISSING_TOOL = "missing_tool"
    NO_PERMISSION = "no_permission"
    NOT_SUPPORTED = "not_supported"
    NOT_RECORDED = "not_recorded"
    TIMEOUT = "timeout"
    CRASH = "crash"


class EntityKind(StrEnum):
    """What a finding or an incident can be about."""

    NODE = "node"
    GPU = "gpu"
    NIC = "nic"
    LINK = "link"
    MOUNT = "mount"
    RANK = "rank"
    PAIR = "pair"
    SWITCH = "switch"
    DISK = "disk"
    CPU = "cpu"


@dataclass(frozen=True, slots=True, order=True)
class Entity:
    """One thing that can be healthy or sick: ``gpu`` by UUID, ``nic`` by GUID, never by index.

    ``cpu`` is a group of processors, by the kernel's numbers: ``0-15``.
    """

    kind: EntityKind
    id: str

    def to_json(self) -> Json:
        return {"kind": self.kind.value, "id": self.id}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(EntityKind(data["kind"]), str(data["id"]))

    def __str__(self) -> str:
        return f"{self.kind.value} {self.id}"


class Side(StrEnum):
    """Whose failure it is."""

    INFRA = "infra"
    USER = "user"
    AMBIGUOUS = "ambiguous"
    EXTERNAL = "external"
    SCHEDULER = "scheduler"
    TOOL = "tool"


class Confidence(StrEnum):
    """How well the cause is known."""

    CONFIRMED = "confirmed"
    PROBABLE = "probable"
    SYMPTOM_ONLY = "symptom_only"
    UNKNOWN = "unknown"


class Role(StrEnum):
    """What a piece of evidence is to its incident; only a root opens one."""

    ROOT = "root"
    CONFIRMATION = "confirmation"
    SYMPTOM = "symptom"
    TEARDOWN = "teardown"
    NOISE = "noise"
    RECOVERY = "recovery"  # no cause: from which state the job went on, or what was saved of it


class ActionKind(StrEnum):
    """What can be done about an incident."""

    NONE = "none"
    RESTART = "restart"
    EXCLUDE_NODE = "exclude-node"
    RESET_GPU = "reset-gpu"
    REBOOT = "reboot"
    DRAIN = "drain"
    REQUEUE = "requeue"
    STOP = "stop"
    RMA = "rma"


class ReturnCondition(StrEnum):
    """What a drained node must show before gpuops resumes it.

    Health checks that pass, a diagnostic that passes, a burn-in that passes, or a person's word: a
    repair. A repair is enough for all of them.
    """

    CHECK = "check"
    DIAG = "diag"
    BURNIN = "burnin"
    PERSON = "person"

    @classmethod
    def default(cls, failure_class: FailureClass) -> Self:
        """Return the condition of a class whose runbook names none.

        A passive check cannot see that faulty GPU hardware is well: the fault shows under load.
        """
        return cls.DIAG if failure_class.category == "gpu_hw" else cls.CHECK


class IncidentState(StrEnum):
    """Open, mitigated (the job runs again), closed (the cost is known), merged into another."""

    OPEN = "open"
    MITIGATED = "mitigated"
    CLOSED = "closed"
    MERGED = "merged"


class Severity(IntEnum):
    """How urgent an event is; at ERROR and above the spool is flushed to disk at once."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check says about one entity.

    ``value`` is in ``unit``; ``threshold`` says what it was held against and ``source`` where that
    number is from (``kernel``, ``nvml``, ``suite:prolog``, ``config``, a document, ``learned:…``).

    ``hardware_reported``: the device, its driver or the kernel itself reported this failure; no
    limit or expectation of ours judged it, so that a wrong one cannot be the cause.
    ``shared_cause``: what fails may be shared by many nodes (network, storage, fabric switch).
    """

    check: str
    entity: Entity
    status: Status
    message: str
    value: float | str | None = None
    unit: str | None = None
    threshold: str | None = None
    source: str | None = None
    failure_class: FailureClass | None = None
    unknown_reason: UnknownReason | None = None
    hardware_reported: bool = False
    shared_cause: bool = False

    def __post_init__(self) -> None:
        if self.status is Status.FAIL and self.failure_class is None:
            raise ValueError(f"a failing {self.check} finding must name its failure class")
        if self.status is Status.UNKNOWN and self.unknown_reason is None:
            raise ValueError(f"an unknown {self.check} finding must say why")

    @property
    def headline(self) -> str:
        """Return the message up to its first semicolon: what is wrong, without what follows."""
        return self.message.partition("; ")[0]

    def to_json(self) -> Json:
        return {
            "check": self.check,
            "entity": self.entity.to_json(),
            "status": self.status.word,
            "value": self.value,
            "unit": self.unit,
            "threshold": self.threshold,
            "source": self.source,
            "message": self.message,
            "failure_class": self.failure_class and self.failure_class.value,
            "unknown_reason": self.unknown_reason and self.unknown_reason.value,
            "hardware_reported": self.hardware_reported,
            "shared_cause": self.shared_cause,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the finding in *data*; KeyError, TypeError, ValueError: it is none."""
        words = {"failure_class": FailureClass, "unknown_reason": UnknownReason}
        read: Json = {name: data[name] and kind(data[name]) for name, kind in words.items()}
        read |= {"entity": Entity.from_json(data["entity"]), "status": Status.parse(data["status"])}
        return cls(**{**data, **read})


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened at a time: the only thing that is ever written to a spool.

    ``id`` is a UUIDv7 made by the writer, so that replaying a spool cannot double anything.
    ``kind`` is ``noun.verb`` (``attempt.ended``); the payload's keys belong to the kind.
    """

    id: str
    kind: str
    t_us: int
    node: str
    severity: Severity = Severity.INFO
    run_id: str | None = None
    attempt: int | None = None
    payload: Json = field(default_factory=dict)

    def to_json(self) -> Json:
        return {
            "id": self.id,
            "kind": self.kind,
            "t_us": self.t_us,
            "node": self.node,
            "severity": int(self.severity),
            "run_id": self.run_id,
            "attempt": self.attempt,
            "payload": self.payload,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the event in *data*.

        Raises:
            KeyError, TypeError, ValueError: Not an event.
        """
        payload = data["payload"]
        if not isinstance(payload, dict):
            raise TypeError(f"payload of event {data['id']!r} is not an object")
        attempt, run_id = data.get("attempt"), data.get("run_id")
        return cls(
            id=str(data["id"]),
            kind=str(data["kind"]),
            t_us=int(data["t_us"]),
            node=str(data["node"]),
            severity=Severity(int(data["severity"])),
            run_id=None if run_id is None else str(run_id),
            attempt=None if attempt is None else int(attempt),
            payload=payload,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """How one worker of an attempt ended, as its agent saw it.

    ``terminated`` means that the agent itself ended it because another worker had failed: such an
    exit is teardown and never a failure. ``finished_mono_ns`` is when its program came to its end
    by itself; a process may take a while to be gone after that. Monotonic times are comparable on
    one host only.
    """

    node: str
    rank: int
    local_rank: int
    pid: int
    exit_code: int | None
    signal: str | None
    terminated: bool
    seen_us: int
    seen_mono_ns: int
    exception_type: str | None = None
    exception_message: str | None = None
    traceback: tuple[str, ...] = ()
    error_mono_ns: int | None = None
    last_step: int | None = None
    beats: int = 0
    last_beat_mono_ns: int | None = None
    log_tail: tuple[str, ...] = ()
    log_path: str | None = None
    finished_mono_ns: int | None = None

    @property
    def completed(self) -> bool:
        """Say whether it ended well: by itself, or while it only had things to tidy up."""
        if self.terminated:
            return self.finished_mono_ns is not None
        return self.exit_code == 0 and self.signal is None

    def describe(self) -> str:
        """Return ``"ended by SIGKILL"`` or ``"exited with code 3"``."""
        if self.terminated and self.completed:
            return "came to its end"
        if self.signal is not None:
            return f"ended by {self.signal}"
        return f"exited with code {self.exit_code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One thing that was seen, and what it is to the incident."""

    role: Role
    text: str
    entity: Entity | None = None
    lines: tuple[str, ...] = ()
    path: str | None = None

    def to_json(self) -> Json:
        return {
            "role": self.role.value,
            "text": self.text,
            "entity": self.entity and self.entity.to_json(),
            "lines": list(self.lines),
            "path": self.path,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        entity = data.get("entity")
        return cls(
            role=Role(data["role"]),
            text=str(data["text"]),
            entity=Entity.from_json(entity) if entity else None,
            lines=tuple(map(str, data.get("lines", ()))),
            path=data.get("path"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One root cause, its symptoms, its culprits and what it cost.

    ``authority`` orders accounts of the same incident by different agents: one that saw the root
    (2) beats one that saw only symptoms or got a report (1) beats one that saw only an end (0).
    The account of the agent that decided over all nodes (3) beats those of single nodes.
    ``rev`` counts snapshots by one account; the store keeps the best account's newest snapshot.
    ``lost_s`` holds seconds by phase (``detect``, ``decide``, ``rendezvous``, ``init``,
    ``restore``, ``redo``; in old ones ``restart`` for all between detect and redo).
    """

    id: str
    failure_class: FailureClass
    side: Side
    confidence: Confidence
    state: IncidentState
    title: str
    first_us: int
    detected_us: int
    run_id: str | None = None
    attempt: int | None = None
    culprits: tuple[Entity, ...] = ()
    culprit_how: str | None = None
    evidence: tuple[Evidence, ...] = ()
    actions: tuple[ActionKind, ...] = ()
    lost_s: Mapping[str, float] = field(default_factory=dict)
    resolved_us: int | None = None
    resolution: str | None = None
    authority: int = 0
    rev: int = 1
    about: str | None = None

    @property
    def lost_seconds(self) -> float:
        """Return the seconds lost over all phases."""
        return sum(self.lost_s.values())

    def to_json(self) -> Json:
        return {
            "id": self.id,
            "failure_class": self.failure_class.value,
            "side": self.side.value,
            "confidence": self.confidence.value,
            "state": self.state.value,
            "title": self.title,
            "run": self.run_id,
            "attempt": self.attempt,
            "culprits": [entity.to_json() for entity in self.culprits],
            "culprit_how": self.culprit_how,
            "first_seen": iso_utc(self.first_us),
            "detected": iso_utc(self.detected_us),
            "evidence": [item.to_json() for item in self.evidence],
            "actions": [action.value for action in self.actions],
            "lost_seconds": round(self.lost_seconds, 6),
            "lost_seconds_by_phase": {phase: round(s, 6) for phase, s in self.lost_s.items()},
            "resolved": None if self.resolved_us is None else iso_utc(self.resolved_us),
            "resolution": self.resolution,
            "authority": self.authority,
            "rev": self.rev,
            **({} if self.about is None else {"about": self.about}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the incident in *data*.

        Raises:
            KeyError, TypeError, ValueError: Not an incident.
        """
        resolved = data.get("resolved")
        return cls(
            id=str(data["id"]),
            failure_class=FailureClass(data["failure_class"]),
            side=Side(data["side"]),
            confidence=Confidence(data["confidence"]),
            state=IncidentState(data["state"]),
            title=str(data["title"]),
            first_us=parse_iso_utc(data["first_seen"]),
            detected_us=parse_iso_utc(data["detected"]),
            run_id=data.get("run"),
            attempt=data.get("attempt"),
            culprits=tuple(Entity.from_json(item) for item in data.get("culprits", ())),
            culprit_how=data.get("culprit_how"),
            evidence=tuple(Evidence.from_json(item) for item in data.get("evidence", ())),
            actions=tuple(ActionKind(item) for item in data.get("actions", ())),
            lost_s={str(k): float(v) for k, v in data.get("lost_seconds_by_phase", {}).items()},
            resolved_us=None if resolved is None else parse_iso_utc(resolved),
            resolution=data.get("resolution"),
            authority=int(data.get("authority", 0)),
            rev=int(data.get("rev", 1)),
            about=None if (about := data.get("about")) is None else str(about),
        )


def run_incident_id(run_id: str, about: str) -> str:
    """Return the id of the incident of a run that is *about* an attempt (its number) or more.

    Every node makes the same. A run's id has no slash, so that no two runs make the same.
    """
    return str(uuid.uuid5(_INCIDENTS, f"{run_id}/{about}"))


def envelope(schema: str, body: Json) -> Json:
    """Return *body* under the header that every ``--json`` output carries.

    ``schema`` is ``gpuops.<noun>/<version>``.
    """
    return {"schema": schema, "gpuops_version": __version__, **body}


def uuid7(time_us: int, randomness: bytes) -> str:
    """Return a UUIDv7 (RFC 9562 §5.7) for *time_us* from ten random bytes; sorts by time.

    The twelve ``rand_a`` bits hold the microseconds within the millisecond (method 3 of §6.2), so
    that ids made by one writer within a millisecond stay in order.
    """
    assert len(randomness) >= 8
    millis, micros = divmod(time_us, 1000)
    rand_b = int.from_bytes(randomness[:8], "big") & (2**62 - 1)
    value = (millis & (2**48 - 1)) << 80 | 0x7 << 76 | (micros * 4096 // 1000) << 64
    value |= 0b10 << 62 | rand_b
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
