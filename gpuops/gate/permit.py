"""What a hook asks the store, in a child with a deadline: permission to drain, repairs, strikes.

Only this child loads SQLAlchemy and talks to the database. An error is reported, and the file
stays as it was.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from gpuops.config.resolve import GateMode
from gpuops.errors import GpuopsError, ProbeError
from gpuops.gate.node_state import StateError, change_state
from gpuops.gate.policy import DrainCause, PermitReply
from gpuops.gate.record import with_repair
from gpuops.host.clock import Clock
from gpuops.host.node_state import NodeState, Repair, Strikes
from gpuops.host.process import probe
from gpuops.host.process.run_with_deadline import abandoned

# To fork and to import SQLAlchemy, in addition to the store's own timeout.
START_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """The settings of the gate of this node; see ``gate.*``."""

    node: str
    cluster: str
    store_url: str
    state_dir: Path
    uid: int
    mode: GateMode
    fuse_nodes: int
    fuse_window_s: float
    passes_to_resume: int
    resumes_max_per_day: int
    permit_deadline_s: float


def start_permission_request(
    gate: GateSettings, cause: DrainCause, clock: Clock
) -> Callable[[], PermitReply]:
    """Start to ask whether this node may be drained for *cause*; call the result for the reply.

    The caller must have a single thread. Any error becomes a reply without a decision.
    """
    now_us = clock.now_us()
    try:
        child = probe.start_call(
            lambda: _ask(gate, cause, now_us), deadline_s=START_S + gate.permit_deadline_s
        )
    except ProbeError:
        return lambda: PermitReply(None, "no process to ask the store with")

    def reply() -> PermitReply:
        outcome = probe.within(child, child.deadline_s)
        if outcome is None:
            return PermitReply(None, f"the store gave no answer in {child.deadline_s:g} s")
        try:
            answer = probe.answer(outcome)
        except ProbeError as exc:
            return PermitReply(None, f"the store: {exc}")
        if "error" in answer:
            return PermitReply(None, str(answer["error"]))
        return PermitReply(bool(answer["granted"]), str(answer["reason"]))

    return reply


def _ask(gate: GateSettings, cause: DrainCause, now_us: int) -> dict[str, object]:
    from gpuops.store.permits import request_permit

    try:
        permit = request_permit(
            gate.store_url,
            cluster=gate.cluster,
            node=gate.node,
            check=cause.finding.check,
            failure_class=cause.failure_class.value,
            now_us=now_us,
            limit=gate.fuse_nodes,
            window_s=gate.fuse_window_s,
            deadline_s=gate.permit_deadline_s,
        )
    except GpuopsError as exc:
        return {"error": str(exc)}
    return {"granted": permit.granted, "reason": permit.reason}


FETCH_S = 2.0


def sync_from_store(
    store_url: str, *, cluster: str, node: str, state_dir: Path, uid: int, clock: Clock
) -> str | None:
    """Fetch repairs and strikes into the node's file; return what went wrong, or None.

    The caller must have a single thread.
    """
    now_us = clock.now_us()

    def ask() -> str | None:
        from gpuops.store.queries.node_queries import fetch_repairs_and_strikes

        try:
            repairs, strikes = fetch_repairs_and_strikes(
                store_url, cluster=cluster, node=node, now_us=now_us, deadline_s=FETCH_S
            )
            change_state(state_dir, uid, lambda state: with_store_records(state, repairs, strikes))
        except (GpuopsError, StateError) as exc:
            return str(exc)
        return None

    try:
        problem: str | None = probe.ask(
            ask, START_S + FETCH_S, question=f"sync {state_dir}", left=abandoned()
        )
    except ProbeError as exc:
        problem = str(exc)
    return problem and f"gpuops: cannot fetch repairs and strikes from the store: {problem}"


def with_store_records(
    state: NodeState, repairs: tuple[Repair, ...], strikes: tuple[Strikes, ...]
) -> NodeState:
    """Return *state* with what the store has; a repair that the store lacks is kept."""
    known = reduce(with_repair, repairs, state.repairs)
    return replace(state, repairs=known, strikes=strikes)
