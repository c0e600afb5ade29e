"""What a hook asks the store, in a child with a deadline: permission to drain, repairs, strikes.

Here alone a hook loads SQLAlchemy and talks to the database.

In a child with a deadline; what went wrong is reported, and the file stays as it was.
"""

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

# To fork and to import SQLAlchemy, in addition to the time that the store has to answer.
START_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPermitClient:
    """How the gate of this node is set; see the settings ``gate.*``."""

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


def start_asking(
    gate: DrainPermitClient, cause: DrainCause, clock: Clock
) -> probe.ProbeChild | None:
    """Start to ask whether this node may be drained for *cause*; None: no child can be had.

    The caller must have a single thread. Read the answer with `permission_of`.
    """
    now_us = clock.now_us()
    try:
        return probe.start_call(
            lambda: _ask(gate, cause, now_us), deadline_s=START_S + gate.permit_deadline_s
        )
    except ProbeError:
        return None


def permission_of(child: probe.ProbeChild | None) -> PermitReply:
    """Return what the store said; whatever went wrong, it is no answer."""
    if child is None:
        return PermitReply(None, "no process to ask the store with")
    outcome = probe.within(child, child.deadline_s)
    if outcome is None:
        return PermitReply(None, f"the store gave no answer in {child.deadline_s:g} s")
    try:
        said = probe.answer(outcome)
    except ProbeError as exc:
        return PermitReply(None, f"the store: {exc}")
    if "error" in said:
        return PermitReply(None, str(said["error"]))
    return PermitReply(bool(said["granted"]), str(said["reason"]))


def _ask(gate: DrainPermitClient, cause: DrainCause, now_us: int) -> dict[str, object]:
    from gpuops.errors import GpuopsError
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


def sync(
    store_url: str, *, cluster: str, node: str, state_dir: Path, uid: int, clock: Clock
) -> str | None:
    """Ask the store and keep its answer; return what went wrong, None where nothing did.

    The caller must have a single thread.
    """
    now_us = clock.now_us()

    def ask() -> str | None:
        from gpuops.store.queries.node_queries import fetch_repairs_and_strikes

        try:
            repairs, strikes = fetch_repairs_and_strikes(
                store_url, cluster=cluster, node=node, now_us=now_us, deadline_s=FETCH_S
            )
            change_state(state_dir, uid, lambda state: with_news(state, repairs, strikes))
        except (GpuopsError, StateError) as exc:
            return str(exc)
        return None

    try:
        trouble: str | None = probe.ask(
            ask, START_S + FETCH_S, question=f"sync {state_dir}", left=abandoned()
        )
    except ProbeError as exc:
        trouble = str(exc)
    return trouble and f"gpuops: repairs and strikes were not asked of the store: {trouble}"


def with_news(
    state: NodeState, repairs: tuple[Repair, ...], strikes: tuple[Strikes, ...]
) -> NodeState:
    """Return *state* with what the store has; a repair that it does not have yet stays."""
    known = reduce(with_repair, repairs, state.repairs)
    return replace(state, repairs=known, strikes=strikes)
