"""What was seen, worded for the reader of an incident: one item for each rank, cause first."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from gpuops.incident import exception
from gpuops.incident.cause import Cause
from gpuops.incident.classify import Verdict
from gpuops.model import Entity, EntityKind, Evidence, Role, WorkerExit
from gpuops.rules import LINE_MAX
from gpuops.scrub import scrub, scrub_lines

TAIL_LINES = 20
LINE_CHARS = 500
# An agent has at most a few dozen ranks; beyond, ranks that ended alike share an item, so that an
# incident stays far below the spool's limit for a line.
RANKS_APART_MAX = 64
_ORDER = (Role.ROOT, Role.CONFIRMATION, Role.SYMPTOM, Role.TEARDOWN, Role.NOISE)


def evidence_for(
    cause: Cause, verdicts: Sequence[Verdict], node: str, remarks: Sequence[str] = ()
) -> tuple[Evidence, ...]:
    """Return the evidence for *cause*: root, confirmations, symptoms, teardown, in that order.

    *remarks* are kernel lines that a reader should see although they decided nothing.
    """
    blamed = {id(v) for v in cause.blamed}
    told = _kernel_lines(cause)
    items = [_confirmation(line, node) for line in told]
    items += _remarks([line for line in remarks if line not in told], node)
    apart = [v for v in verdicts if id(v) in blamed or len(verdicts) <= RANKS_APART_MAX]
    quoted = cause.blamed[0] if cause.blamed else cause.first
    shown = sorted(apart, key=lambda v: (v is not quoted, v.order))
    items += [_of_rank(v, quoted=v is quoted, role=_role(v, blamed)) for v in shown]
    alone = {id(v) for v in apart}
    items += _grouped(v for v in verdicts if id(v) not in alone)
    items += [_suspect(v) for v in cause.suspects[:RANKS_APART_MAX]]
    return tuple(sorted(items, key=lambda item: _ORDER.index(item.role)))


def step_phrase(worker: WorkerExit) -> str:
    """Return ``"at step 57"``, or what is known where no step number is."""
    if worker.last_step is not None:
        return f"at step {worker.last_step}"
    if worker.beats:
        return f"after {worker.beats} heartbeats (step number unknown)"
    return "before its first step"


def clip(lines: Iterable[str]) -> tuple[str, ...]:
    """Return *lines* without secrets, each cut to `LINE_CHARS`."""
    return tuple(line[:LINE_CHARS] for line in scrub_lines([line[:LINE_MAX] for line in lines]))


def rank_entity(worker: WorkerExit) -> Entity:
    """Return the rank as an entity."""
    return Entity(EntityKind.RANK, str(worker.rank))


def _kernel_lines(cause: Cause) -> list[str]:
    lines = [cause.kernel.line] if cause.kernel else []
    for verdict in (*cause.blamed, cause.first):
        if verdict is not None:
            lines += [line for line in verdict.kernel_lines if line not in lines]
    return lines


def _confirmation(line: str, node: str) -> Evidence:
    return Evidence(
        role=Role.CONFIRMATION,
        text="the kernel log says",
        entity=Entity(EntityKind.NODE, node),
        lines=clip([line]),
    )


def _remarks(lines: Sequence[str], node: str) -> list[Evidence]:
    if not lines:
        return []
    text = "the kernel log also says, which did not decide the cause"
    entity = Entity(EntityKind.NODE, node)
    return [Evidence(role=Role.NOISE, text=text, entity=entity, lines=clip(lines))]


def _role(verdict: Verdict, blamed: set[int]) -> Role:
    """Return what *verdict* is to the incident: a failure after the cause is a symptom of it."""
    if id(verdict) in blamed:
        return Role.ROOT
    return Role.SYMPTOM if verdict.role is Role.ROOT else verdict.role


def _of_rank(verdict: Verdict, *, quoted: bool, role: Role) -> Evidence:
    worker = verdict.worker
    text = f"rank {worker.rank} (pid {worker.pid}) {worker.describe()} {step_phrase(worker)}"
    told = worker.exception_type is not None and verdict.role is not Role.TEARDOWN
    if told:
        text += f": {exception.headline(worker)}"
    return Evidence(
        role=role,
        text=scrub(f"{text}; {verdict.by}"),
        entity=rank_entity(worker),
        lines=clip(_last_lines(worker) if quoted else () if told else verdict.lines),
        path=worker.log_path,
    )


def _last_lines(worker: WorkerExit) -> Sequence[str]:
    """Return the end of the log, and of the traceback where the log does not hold it."""
    tail = list(worker.log_tail[-TAIL_LINES:])
    if any("Traceback (most recent call last)" in line for line in tail):
        return tail
    return tail + list(worker.traceback[-TAIL_LINES:])


def _grouped(verdicts: Iterable[Verdict]) -> list[Evidence]:
    def alike(v: Verdict) -> tuple[str, str, str, int]:
        step = -1 if v.worker.last_step is None else v.worker.last_step
        return v.role.value, v.failure_class.value, v.worker.describe(), step

    items = []
    for _, members in groupby(sorted(verdicts, key=lambda v: (alike(v), v.worker.rank)), key=alike):
        group = list(members)
        first = group[0]
        ranks = span([v.worker.rank for v in group])
        role = Role.SYMPTOM if first.role is Role.ROOT else first.role
        text = f"ranks {ranks} {first.worker.describe()} {step_phrase(first.worker)}"
        items.append(Evidence(role=role, text=f"{text}; {first.by}", lines=clip(first.lines)))
    return items


def _suspect(verdict: Verdict) -> Evidence:
    worker = verdict.worker
    silent = verdict.role is Role.TEARDOWN
    why = "the others lost it first or waited for it" if silent else "it was behind the others"
    return Evidence(
        role=Role.SYMPTOM,
        text=f"suspect: rank {worker.rank}, {step_phrase(worker)}: {why}",
        entity=rank_entity(worker),
    )


def span(ranks: Sequence[int]) -> str:
    """Return ``"0-3,7"`` for the ranks 0, 1, 2, 3 and 7."""
    parts: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][1] + 1:
            parts[-1] = parts[-1][0], rank
        else:
            parts.append((rank, rank))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
