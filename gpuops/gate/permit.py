"""What a hook asks the store, in a child with a deadline: permission to drain, repairs, strikes.

Only this child loads SQLAlchemy and talks to the database. An error is reported, and the file
stays as it was.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from gpuops.config.resolve import GateMode
from gpuops.errors import GpuopsError, ProbeError
from gpuops.gate.drain import DrainStage, read_drain
from gpuops.gate.node_state import StateError, change_state
from gpuops.gate.policy import DrainCause, PermitReply
from gpuops.gate.record import with_repair
from gpuops.host.clock import Clock
from gpuops.host.node_state import FleetCount, NodeState, Repair, Strikes
from gpuops.host.process import probe
from gpuops.host.process.abandoned import abandoned
from gpuops.model import FailureClass
from gpuops.store.fuse import FuseSettings
from gpuops.units import US_PER_S

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
    fuse: FuseSettings
    passes_to_resume: int
    resumes_max_per_day: int
    permit_deadline_s: float


def start_permission_request(
    gate: GateSettings, causes: Sequence[DrainCause], clock: Clock
) -> Callable[[], list[PermitReply]]:
    """Start to ask whether this node may be drained; call the result for the replies.

    They are for *causes* in order, up to the first that is granted. The caller must have a single
    thread. Any error becomes one reply without a decision.
    """
    now_us = clock.now_us()
    try:
        child = probe.start_call(
            lambda: _ask(gate, causes, now_us), deadline_s=START_S + gate.permit_deadline_s
        )
    except ProbeError:
        return lambda: [PermitReply(None, "no process to ask the store with")]

    def replies() -> list[PermitReply]:
        outcome = probe.within(child, child.deadline_s)
        if outcome is None:
            return [PermitReply(None, f"the store gave no answer in {child.deadline_s:g} s")]
        try:
            answer = probe.answer(outcome)
        except ProbeError as exc:
            return [PermitReply(None, f"the store: {exc}")]
        return [PermitReply(granted, str(why)) for granted, why in answer]

    return replies


def _ask(
    gate: GateSettings, causes: Sequence[DrainCause], now_us: int
) -> list[tuple[bool | None, str]]:
    from gpuops.store.permits import DrainRequest, request_permits

    requests = [
        DrainRequest(check=cause.finding.check, failure_class=cause.failure_class, kind=cause.kind)
        for cause in causes
    ]
    try:
        permits = request_permits(
            gate.store_url,
            requests,
            cluster=gate.cluster,
            node=gate.node,
            now_us=now_us,
            settings=gate.fuse,
            deadline_s=gate.permit_deadline_s,
        )
    except GpuopsError as exc:
        return [(None, str(exc))]
    return [(permit.granted, permit.reason) for permit in permits]


FETCH_S = 2.0
# A hook that has a permit records its drain within this time.
RELEASE_AFTER_S = 120.0


def sync_from_store(
    store_url: str, *, cluster: str, node: str, state_dir: Path, uid: int, clock: Clock
) -> str | None:
    """Fetch repairs, strikes and the size of the fleet into the node's file.

    The fuse counts the nodes that are drained: a permit of a node without a drain is given back,
    and a drain that was set while the store was silent has a permit from then on. Returns what went
    wrong, or None. The caller must have a single thread.
    """
    now_us = clock.now_us()

    def ask() -> str | None:
        from gpuops.store.permits import DrainRequest, hold_permit, release_permits
        from gpuops.store.queries.node_queries import fetch_node_records

        try:
            found = fetch_node_records(
                store_url, cluster=cluster, node=node, now_us=now_us, deadline_s=FETCH_S
            )
            change_state(
                state_dir,
                uid,
                lambda state: with_store_records(state, found.repairs, found.strikes, found.fleet),
            )
            drain = read_drain(state_dir, uid=uid)
            if drain is not None and drain.stage == DrainStage.SET and not found.holds_permit:
                held = DrainRequest(
                    check=drain.check, failure_class=FailureClass(drain.failure_class)
                )
                hold_permit(store_url, held, cluster=cluster, node=node, now_us=now_us)
            if drain is None and found.holds_permit:
                before_us = now_us - round(RELEASE_AFTER_S * US_PER_S)
                release_permits(store_url, cluster=cluster, node=node, before_us=before_us)
        except (GpuopsError, StateError) as exc:
            return str(exc)
        return None

    try:
        problem: str | None = probe.ask(
            ask, START_S + FETCH_S, question=f"sync {state_dir}", left=abandoned()
        )
    except ProbeError as exc:
        problem = str(exc)
    return (
        problem
        and f"gpuops: cannot fetch repairs, strikes and the fleet's size from the store: {problem}"
    )


def with_store_records(
    state: NodeState,
    repairs: tuple[Repair, ...],
    strikes: tuple[Strikes, ...],
    fleet: FleetCount,
) -> NodeState:
    """Return *state* with what the store has; a repair that the store lacks is kept."""
    known = reduce(with_repair, repairs, state.repairs)
    return replace(state, repairs=known, strikes=strikes, fleet=fleet)
