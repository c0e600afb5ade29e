"""From the worker exits of one generation on one node to its agent's report."""

from collections.abc import Mapping, Sequence

from gpuops.incident.cause import HostCause, JudgedExits
from gpuops.incident.classify import ClassifiedExit
from gpuops.incident.decision import TEXT_CHARS_MAX, NodeReport, RankEnd, ReportKind
from gpuops.incident.evidence import rank_entity
from gpuops.incident.incidents.worker_failure import describe_exit
from gpuops.incident.signature import signature_of
from gpuops.model import Entity, EntityKind, FailureClass, Role, Side, WorkerExit
from gpuops.scrub import scrub

# Categories in which an exception of a worker blames its node: errors of the driver and the
# hardware. A full or dead file system and a lost connection need not be the fault of this node.
_NODE_CATEGORIES = frozenset({"gpu_hw", "gpu_sw", "host_hw"})
_INFRASTRUCTURE = frozenset({FailureClass.PORT_TAKEN, FailureClass.START_FAILED})
_NO_UUIDS: Mapping[int, str] = {}


def build_node_report(  # noqa: PLR0913  all that the agent knows of one generation
    judged: JudgedExits,
    *,
    node: str,
    generation: int,
    kind: ReportKind = ReportKind.WORKERS_FAILED,
    gpu_uuids: Mapping[int, str] = _NO_UUIDS,
    checkpoint_step: int | None = None,
    has_stepped: bool | None = None,
) -> NodeReport:
    """Return the report of *node*.

    WORKERS_FAILED without a failure among the exits becomes STOPPED, or DONE if every worker exited
    with code 0. The node is blamed only by the kernel log or a driver error in an exception, never
    for an exception of the program or a SIGKILL. If no worker failed, only kernel lines about the
    job's own GPUs blame it.

    Args:
        judged: The ends of all workers of the generation on this node.
        node: Its name.
        generation: 0-based.
        kind: What the agent saw; for a hang or a GPU fault the monitor's report has the class.
        gpu_uuids: The GPU of each local rank, as far as known.
        checkpoint_step: The newest checkpoint known here.
        has_stepped: Whether a rank here made a step; None: by the heartbeats of the exits.
    """
    cause, exits = judged.cause, judged.workers
    failure_class = cause.failure_class
    return NodeReport(
        kind=_report_kind(kind, cause, judged.exits),
        node=node,
        generation=generation,
        failure_class=failure_class,
        side=cause.side,
        confidence=cause.confidence,
        how=scrub(cause.how)[:TEXT_CHARS_MAX],
        culprits=_culprits(cause, node),
        blames_node=_blames_node(cause),
        has_stepped=_has_stepped(exits) if has_stepped is None else has_stepped,
        last_step=max((w.last_step for w in exits if w.last_step is not None), default=None),
        checkpoint_step=checkpoint_step,
        ends=_rank_ends(cause, judged.exits, gpu_uuids),
        is_infrastructure=failure_class in _INFRASTRUCTURE or kind is ReportKind.START_FAILED,
    )


def _report_kind(
    kind: ReportKind, cause: HostCause, classified: Sequence[ClassifiedExit]
) -> ReportKind:
    if kind is not ReportKind.WORKERS_FAILED or cause.first is not None or cause.kernel is not None:
        return kind
    all_succeeded = bool(classified) and all(v.role is Role.NOISE for v in classified)
    return ReportKind.DONE if all_succeeded else ReportKind.STOPPED


def _blames_node(cause: HostCause) -> bool:
    if cause.kernel is not None:
        return True
    is_of_node = cause.failure_class.category in _NODE_CATEGORIES
    return is_of_node and cause.side is Side.INFRA and bool(cause.blamed)


def _culprits(cause: HostCause, node: str) -> tuple[Entity, ...]:
    ranks = tuple(rank_entity(item.worker) for item in cause.blamed)
    return (*ranks, Entity(EntityKind.NODE, node)) if _blames_node(cause) else ranks


def _has_stepped(exits: Sequence[WorkerExit]) -> bool:
    return any(worker.beats > 0 or worker.last_step is not None for worker in exits)


def _rank_ends(
    cause: HostCause, classified: Sequence[ClassifiedExit], gpu_uuids: Mapping[int, str]
) -> tuple[RankEnd, ...]:
    """Return every rank's end, the blamed ones first: a report holds a bounded number."""
    blamed = {id(item) for item in cause.blamed}
    ordered = sorted(classified, key=lambda v: (id(v) not in blamed, v.worker.rank))
    return tuple(_rank_end(v, id(v) in blamed, gpu_uuids) for v in ordered)


def _rank_end(classified: ClassifiedExit, is_blamed: bool, gpu_uuids: Mapping[int, str]) -> RankEnd:
    worker = classified.worker
    is_consequence = classified.role is Role.ROOT and not is_blamed
    return RankEnd(
        rank=worker.rank,
        local_rank=worker.local_rank,
        role=Role.SYMPTOM if is_consequence else classified.role,
        failure_class=classified.failure_class,
        side=classified.side,
        signature=signature_of(classified),
        exit_code=worker.exit_code,
        signal=worker.signal,
        step=worker.last_step,
        gpu_uuid=gpu_uuids.get(worker.local_rank),
        summary=scrub(f"rank {worker.rank} {describe_exit(classified)}")[:TEXT_CHARS_MAX],
        log_path=worker.log_path,
    )
