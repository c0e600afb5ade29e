"""Ask the store for leave to drain: only for a node that fails, in a child, with a deadline.

Here alone a hook loads SQLAlchemy and talks to the database.
"""

from dataclasses import dataclass
from pathlib import Path

from gpuops.config import Mode
from gpuops.errors import ProbeError
from gpuops.host import probe
from gpuops.host.clock import Clock
from gpuops.incident.gate import Cause, Permission

# To fork and to import SQLAlchemy, besides the time that the store has to answer.
START_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """How the gate of this node is set; see the settings ``gate.*``."""

    node: str
    cluster: str
    store_url: str
    state_dir: Path
    uid: int
    mode: Mode
    fuse_nodes: int
    fuse_window_s: float
    passes_to_resume: int
    resumes_max_per_day: int
    permit_deadline_s: float


def start_asking(gate: Gate, cause: Cause, clock: Clock) -> probe.Child | None:
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


def permission_of(child: probe.Child | None) -> Permission:
    """Return what the store said; whatever went wrong, it is no answer."""
    if child is None:
        return Permission(None, "no process to ask the store with")
    outcome = probe.within(child, child.deadline_s)
    if outcome is None:
        return Permission(None, f"the store gave no answer in {child.deadline_s:g} s")
    try:
        said = probe.answer(outcome)
    except ProbeError as exc:
        return Permission(None, f"the store: {exc}")
    if "error" in said:
        return Permission(None, str(said["error"]))
    return Permission(bool(said["granted"]), str(said["reason"]))


def _ask(gate: Gate, cause: Cause, now_us: int) -> dict[str, object]:
    from gpuops.errors import GpuopsError
    from gpuops.store.permits import ask_permit

    try:
        permit = ask_permit(
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
