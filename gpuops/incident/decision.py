"""The types of a restart decision: agents' reports, the state of the run, the decision.

The control store holds them as JSON, so each has `to_json` and `from_json`, bounded in size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from gpuops.config.schema import WINDOW_RESTARTS_MAX
from gpuops.detect import last_calls
from gpuops.detect.recorder_dump import RankDump
from gpuops.host.records import to_json
from gpuops.incident import fields
from gpuops.model import Confidence, Entity, FailureClass, Json, Role, Side

TEXT_CHARS_MAX = 600
PATH_CHARS_MAX = 4096
REASON_CHARS_MAX = 4000  # it names two log files
EXITS_MAX = 64
CULPRITS_MAX = 16
HISTORY_MAX = 32


def _entity(data: Mapping[str, Any]) -> Entity:
    entity = Entity.from_json(data)
    return Entity(entity.kind, entity.id[: fields.NAME_CHARS_MAX])


class ReportKind(StrEnum):
    """What one agent reports of one generation."""

    WORKERS_FAILED = "workers_failed"
    HANG = "hang"
    GPU_FAULT = "gpu_fault"
    VERDICT = "verdict"  # of one of the site's detectors
    NODE_LOST = "node_lost"  # reported by the agent that noticed
    GATE_FAILED = "gate_failed"
    START_FAILED = "start_failed"
    STOPPED = "stopped"  # nothing failed here: the group is being restarted
    DONE = "done"  # every worker here had ended with code 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """One worker's end, as far as a decision over nodes needs it."""

    rank: int
    local_rank: int
    role: Role
    failure_class: FailureClass
    side: Side
    signature: str | None = None  # see `gpuops.incident.signature`
    exit_code: int | None = None
    signal: str | None = None
    step: int | None = None
    gpu_uuid: str | None = None
    summary: str = ""
    log_path: str | None = None
    place: str | None = None  # in the program, of a main thread that waits for other ranks
    collectives: RankDump | None = None  # the last ones; see `gpuops.detect.last_calls`

    def to_json(self) -> Json:
        body: Json = to_json(replace(self, collectives=None))
        collectives = last_calls.to_json(self.collectives)
        return {**body, "summary": self.summary[:TEXT_CHARS_MAX], "collectives": collectives}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        rank = fields.required_number(data["rank"])
        return cls(
            rank=rank,
            local_rank=fields.required_number(data["local_rank"]),
            role=Role(data["role"]),
            failure_class=FailureClass(data["failure_class"]),
            side=Side(data["side"]),
            signature=fields.text(data.get("signature")),
            exit_code=fields.number(data.get("exit_code")),
            signal=fields.text(data.get("signal")),
            step=fields.number(data.get("step")),
            gpu_uuid=fields.text(data.get("gpu_uuid")),
            summary=fields.text(data.get("summary"), TEXT_CHARS_MAX) or "",
            log_path=fields.text(data.get("log_path"), PATH_CHARS_MAX),
            place=fields.text(data.get("place")),
            collectives=last_calls.from_json(data.get("collectives"), rank),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What one agent reports of its node in one generation.

    ``blames_node``: there is evidence against the node itself (an Xid, a failed check, a worker in
    state D), so that a restart should exclude it. ``arrival`` is the order in which
    reports reached the control store; only that orders reports of different hosts.
    """

    kind: ReportKind
    node: str
    generation: int
    failure_class: FailureClass = FailureClass.UNRESOLVED
    side: Side = Side.AMBIGUOUS
    confidence: Confidence = Confidence.UNKNOWN
    how: str = ""
    culprits: tuple[Entity, ...] = ()
    blames_node: bool = False
    has_stepped: bool = False  # a rank of this node made a step in this generation
    last_step: int | None = None
    checkpoint_step: int | None = None  # newest checkpoint known here
    ends: tuple[RankEnd, ...] = ()
    is_infrastructure: bool = False  # a port taken, a start refused: does not count
    arrival: int = 0

    @property
    def is_usage_error(self) -> bool:
        """Say whether no attempt can begin to train before the user has changed something."""
        is_not_executable = self.failure_class is FailureClass.START_FAILED
        return self.failure_class.is_usage_error or (is_not_executable and self.side is Side.USER)

    def to_json(self) -> Json:
        return {
            **to_json(replace(self, ends=())),
            "how": self.how[:TEXT_CHARS_MAX],
            "culprits": [entity.to_json() for entity in self.culprits[:CULPRITS_MAX]],
            "ends": [end.to_json() for end in self.ends[:EXITS_MAX]],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the report in *data*.

        Raises:
            KeyError, TypeError, ValueError: Not a report.
        """
        return cls(
            kind=ReportKind(data["kind"]),
            node=fields.name(data["node"]),
            generation=fields.required_number(data["generation"]),
            failure_class=FailureClass(data["failure_class"]),
            side=Side(data["side"]),
            confidence=Confidence(data["confidence"]),
            how=fields.text(data.get("how"), TEXT_CHARS_MAX) or "",
            culprits=tuple(map(_entity, data.get("culprits", ())[:CULPRITS_MAX])),
            blames_node=bool(data.get("blames_node")),
            has_stepped=bool(data.get("has_stepped")),
            last_step=fields.number(data.get("last_step")),
            checkpoint_step=fields.number(data.get("checkpoint_step")),
            ends=tuple(RankEnd.from_json(item) for item in data.get("ends", ())[:EXITS_MAX]),
            is_infrastructure=bool(data.get("is_infrastructure")),
            arrival=fields.required_number(data.get("arrival", 0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PastFailure:
    """One earlier failure, as the control record keeps it; times are the control store's.

    ``counted_total`` counts those of the entire run up to and including this one: the record keeps
    only the last `HISTORY_MAX`. ``highest_step`` is the highest that any rank had reached by then.
    ``earlier_failures_s``: the times of counted failures that are no longer kept; only the oldest
    failure has it.
    """

    generation: int
    at_s: float
    failure_class: FailureClass
    side: Side
    is_counted: bool  # against the budget of restarts
    signature: str | None = None
    step: int | None = None
    has_stepped: bool = False
    checkpoint_step: int | None = None
    nodes: tuple[str, ...] = ()  # culprits
    gpu_uuids: tuple[str, ...] = ()
    log_path: str | None = None
    rule: str = ""  # of the decision that it led to
    is_infrastructure: bool = False
    counted_total: int = 0
    highest_step: int | None = None
    excluded_checkpoint: int | None = None
    earlier_failures_s: tuple[float, ...] = ()

    def to_json(self) -> Json:
        body: Json = to_json(self)
        body["counted"] = body.pop("is_counted")
        earlier_s = body.pop("earlier_failures_s")
        return {**body, "earlier_s": earlier_s} if earlier_s else body

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            generation=fields.required_number(data["generation"]),
            at_s=fields.seconds(data["at_s"]),
            failure_class=FailureClass(data["failure_class"]),
            side=Side(data["side"]),
            is_counted=bool(data["counted"]),
            signature=fields.text(data.get("signature")),
            step=fields.number(data.get("step")),
            has_stepped=bool(data.get("has_stepped")),
            checkpoint_step=fields.number(data.get("checkpoint_step")),
            nodes=fields.names(data.get("nodes", ()), CULPRITS_MAX),
            gpu_uuids=fields.names(data.get("gpu_uuids", ()), CULPRITS_MAX),
            log_path=fields.text(data.get("log_path"), PATH_CHARS_MAX),
            rule=fields.text(data.get("rule")) or "",
            is_infrastructure=bool(data.get("is_infrastructure")),
            counted_total=fields.required_number(data.get("counted_total", 0)),
            highest_step=fields.number(data.get("highest_step")),
            excluded_checkpoint=fields.number(data.get("excluded_checkpoint")),
            earlier_failures_s=tuple(
                map(fields.seconds, data.get("earlier_s", ())[-WINDOW_RESTARTS_MAX:])
            ),
        )


class OnExhausted(StrEnum):
    """What to do when fewer nodes remain than the job was started with."""

    SHRINK = "shrink"
    REQUEUE = "requeue"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The user's restart settings; the same on every agent.

    Up to ``nodes_max`` nodes train, at least ``nodes_min``, always a multiple of ``node_unit``;
    agents beyond that are spares. ``restarts_window_s`` None: the budget is for the entire run.
    ``benign_exit_codes`` are those with which a framework asks for a restart (Megatron's rerun
    machine), never a software fault.
    """

    nodes_min: int = 1
    nodes_max: int = 1
    node_unit: int = 1
    restarts_max: int = 3
    restarts_window_s: float | None = None
    on_exhausted: OnExhausted = OnExhausted.SHRINK
    benign_exit_codes: frozenset[int] = frozenset()

    def to_json(self) -> Json:
        return dict(to_json(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        window_s = data.get("restarts_window_s")
        return cls(
            nodes_min=fields.required_number(data["nodes_min"]),
            nodes_max=fields.required_number(data["nodes_max"]),
            node_unit=fields.required_number(data["node_unit"]),
            restarts_max=fields.required_number(data["restarts_max"]),
            restarts_window_s=None if window_s is None else fields.seconds(window_s),
            on_exhausted=OnExhausted(data["on_exhausted"]),
            benign_exit_codes=frozenset(
                map(fields.required_number, data.get("benign_exit_codes", ()))
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """The nodes by name. ``live`` ones have an agent that sends heartbeats; they include spares.

    ``suspected``: nodes with suspicions that ended no generation, oldest first.
    """

    policy: RestartPolicy
    generation: int
    members: tuple[str, ...]  # of this generation, by group rank
    live: tuple[str, ...]
    excluded: Mapping[str, str] = field(default_factory=dict)
    suspected: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> Json:
        return {
            "terms": self.policy.to_json(),
            "generation": self.generation,
            "members": list(self.members),
            "live": list(self.live),
            "excluded": dict(self.excluded),
            "doubted": dict(self.suspected),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            policy=RestartPolicy.from_json(data["terms"]),
            generation=fields.required_number(data["generation"]),
            members=fields.names(data["members"]),
            live=fields.names(data["live"]),
            excluded=fields.reasons(data.get("excluded", {})),
            suspected=fields.reasons(data.get("doubted", {})),
        )


class RunAction(StrEnum):
    """What the run does next."""

    RESTART = "restart"  # of all that are live and not excluded
    REQUEUE = "requeue"  # exit 85
    FAIL = "fail"  # exit 1: the budget is spent
    STOP = "stop"  # exit 93: it would fail again, do not requeue


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartDecision:
    """The decision, and everything needed to explain it.

    ``rule`` is the stable name of the rule of the decision table that held; ``reason`` is for
    people. ``exclude`` maps nodes to the reason for their exclusion from now on.
    ``failure`` goes into the history of the run. ``cause`` is the report that holds the root cause.
    """

    action: RunAction
    rule: str
    reason: str
    failure: PastFailure
    cause: NodeReport | None = None
    exclude: Mapping[str, str] = field(default_factory=dict)
    exclude_checkpoint: int | None = None
    backoff_s: float = 0.0
    exit_code: int | None = None

    def to_json(self) -> Json:
        return {
            "verdict": self.action.value,
            "rule": self.rule,
            "reason": self.reason[:REASON_CHARS_MAX],
            "failure": self.failure.to_json(),
            "cause": self.cause and self.cause.to_json(),
            "exclude": dict(self.exclude),
            "exclude_checkpoint": self.exclude_checkpoint,
            "backoff_s": self.backoff_s,
            "exit_code": self.exit_code,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        cause = data.get("cause")
        return cls(
            action=RunAction(data["verdict"]),
            rule=fields.name(data["rule"]),
            reason=fields.text(data["reason"], REASON_CHARS_MAX) or "",
            failure=PastFailure.from_json(data["failure"]),
            cause=NodeReport.from_json(cause) if cause else None,
            exclude=fields.reasons(data.get("exclude", {})),
            exclude_checkpoint=fields.number(data.get("exclude_checkpoint")),
            backoff_s=fields.seconds(data.get("backoff_s", 0.0)),
            exit_code=fields.number(data.get("exit_code")),
        )
