"""The evidence of an incident as text: one item for each rank, the cause first."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from gpuops.incident import exception
from gpuops.incident.cause import HostCause
from gpuops.incident.classify import ClassifiedExit
from gpuops.model import Entity, EntityKind, Evidence, Role, WorkerExit
from gpuops.rules import LINE_MAX
from gpuops.scrub import scrub, scrub_lines

TAIL_LINES = 20
LINE_CHARS = 500
# An agent has at most a few dozen ranks. Beyond this number, ranks with the same end share an item,
# so that an incident stays far below the spool's line limit.
SEPARATE_RANKS_MAX = 64
_ORDER = (Role.ROOT, Role.CONFIRMATION, Role.SYMPTOM, Role.TEARDOWN, Role.NOISE)


def evidence_for(
    cause: HostCause, exits: Sequence[ClassifiedExit], node: str, remarks: Sequence[str] = ()
) -> tuple[Evidence, ...]:
    """Return the evidence for *cause*: root, confirmations, symptoms, teardown, in that order.

    *remarks* are kernel lines that did not decide the cause but that a reader should see.
    """
    blamed = {id(v) for v in cause.blamed}
    kernel_lines = _kernel_lines(cause)
    items = [_kernel_evidence(line, node) for line in kernel_lines]
    items += _remark_evidence([line for line in remarks if line not in kernel_lines], node)
    separate = [v for v in exits if id(v) in blamed or len(exits) <= SEPARATE_RANKS_MAX]
    quoted = cause.blamed[0] if cause.blamed else cause.first
    ordered = sorted(separate, key=lambda v: (v is not quoted, v.sort_key))
    items += [_rank_evidence(v, with_log=v is quoted, role=_role(v, blamed)) for v in ordered]
    separate_ids = {id(v) for v in separate}
    items += _grouped_evidence(v for v in exits if id(v) not in separate_ids)
    items += [_suspect_evidence(v) for v in cause.suspects[:SEPARATE_RANKS_MAX]]
    return tuple(sorted(items, key=lambda item: _ORDER.index(item.role)))


def step_phrase(worker: WorkerExit) -> str:
    """Return ``"at step 57"``, or what is known without step numbers."""
    if worker.last_step is not None:
        return f"at step {worker.last_step}"
    if worker.beats:
        return f"after {worker.beats} heartbeats (step number unknown)"
    return "before its first step"


def scrub_and_clip(lines: Iterable[str]) -> tuple[str, ...]:
    """Return *lines* without secrets, each cut to `LINE_CHARS`."""
    return tuple(line[:LINE_CHARS] for line in scrub_lines([line[:LINE_MAX] for line in lines]))


def rank_entity(worker: WorkerExit) -> Entity:
    """Return the rank as an entity."""
    return Entity(EntityKind.RANK, str(worker.rank))


def _kernel_lines(cause: HostCause) -> list[str]:
    lines = [cause.kernel.line] if cause.kernel else []
    for item in (*cause.blamed, cause.first):
        if item is not None:
            lines += [line for line in item.kernel_lines if line not in lines]
    return lines


def _kernel_evidence(line: str, node: str) -> Evidence:
    return Evidence(
        role=Role.CONFIRMATION,
        text="in the kernel log",
        entity=Entity(EntityKind.NODE, node),
        lines=scrub_and_clip([line]),
    )


def _remark_evidence(lines: Sequence[str], node: str) -> list[Evidence]:
    if not lines:
        return []
    text = "also in the kernel log, not decisive for the cause"
    entity = Entity(EntityKind.NODE, node)
    return [Evidence(role=Role.NOISE, text=text, entity=entity, lines=scrub_and_clip(lines))]


def _role(classified: ClassifiedExit, blamed: set[int]) -> Role:
    """Return the role of *classified*: a failure after the cause is a symptom of it."""
    if id(classified) in blamed:
        return Role.ROOT
    return Role.SYMPTOM if classified.role is Role.ROOT else classified.role


def _rank_evidence(classified: ClassifiedExit, *, with_log: bool, role: Role) -> Evidence:
    worker = classified.worker
    text = f"rank {worker.rank} (pid {worker.pid}) {worker.describe()} {step_phrase(worker)}"
    has_exception = worker.exception_type is not None and classified.role is not Role.TEARDOWN
    if has_exception:
        text += f": {exception.headline(worker)}"
    return Evidence(
        role=role,
        text=scrub(f"{text}; {classified.basis}"),
        entity=rank_entity(worker),
        lines=scrub_and_clip(
            _last_lines(worker) if with_log else () if has_exception else classified.lines
        ),
        path=worker.log_path,
    )


def _last_lines(worker: WorkerExit) -> Sequence[str]:
    """Return the end of the log, and of the traceback if the log does not contain it."""
    tail = list(worker.log_tail[-TAIL_LINES:])
    if any("Traceback (most recent call last)" in line for line in tail):
        return tail
    return tail + list(worker.traceback[-TAIL_LINES:])


def _grouped_evidence(exits: Iterable[ClassifiedExit]) -> list[Evidence]:
    def alike(v: ClassifiedExit) -> tuple[str, str, str, int]:
        step = -1 if v.worker.last_step is None else v.worker.last_step
        return v.role.value, v.failure_class.value, v.worker.describe(), step

    items = []
    for _, members in groupby(sorted(exits, key=lambda v: (alike(v), v.worker.rank)), key=alike):
        group = list(members)
        first = group[0]
        ranks = format_ranks([v.worker.rank for v in group])
        role = Role.SYMPTOM if first.role is Role.ROOT else first.role
        text = f"ranks {ranks} {first.worker.describe()} {step_phrase(first.worker)}"
        items.append(
            Evidence(role=role, text=f"{text}; {first.basis}", lines=scrub_and_clip(first.lines))
        )
    return items


def _suspect_evidence(classified: ClassifiedExit) -> Evidence:
    worker = classified.worker
    silent = classified.role is Role.TEARDOWN
    why = "others lost it first or waited for it" if silent else "it was behind the others"
    return Evidence(
        role=Role.SYMPTOM,
        text=f"suspect: rank {worker.rank}, {step_phrase(worker)}: {why}",
        entity=rank_entity(worker),
    )


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ``"0-3,7"`` for the ranks 0, 1, 2, 3 and 7."""
    parts: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][1] + 1:
            parts[-1] = parts[-1][0], rank
        else:
            parts.append((rank, rank))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
