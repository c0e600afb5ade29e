"""Bring what the store knows of this node into the node's own file: repairs and strikes.

A health check does it, so that no prolog has to ask the database.
"""

from dataclasses import replace
from functools import reduce

from gpuops.errors import GpuopsError, ProbeError
from gpuops.gate.node_incidents import with_repair
from gpuops.gate.permit import START_S, Gate
from gpuops.gate.state_file import StateError, change_state
from gpuops.host import probe
from gpuops.host.abandoned import abandoned
from gpuops.host.clock import Clock
from gpuops.host.node_state import NodeState, Repair, Strikes

FETCH_S = 2.0


def sync(gate: Gate, clock: Clock) -> str | None:
    """Fetch and keep them; return what went wrong. The caller must have a single thread."""
    now_us = clock.now_us()
    try:
        said: str | None = probe.ask(
            lambda: _sync(gate, now_us),
            START_S + FETCH_S,
            question=f"sync {gate.state_dir}",
            left=abandoned(),
        )
    except ProbeError as exc:
        said = str(exc)
    return said and f"gpuops: repairs and strikes are as they were: {said}"


def _sync(gate: Gate, now_us: int) -> str | None:
    from gpuops.store.node_sync import fetch

    try:
        repairs, strikes = fetch(
            gate.store_url,
            cluster=gate.cluster,
            node=gate.node,
            now_us=now_us,
            deadline_s=FETCH_S,
        )
        change_state(gate.state_dir, gate.uid, lambda state: _told(state, repairs, strikes))
    except (GpuopsError, StateError) as exc:
        return str(exc)
    return None


def _told(state: NodeState, repairs: tuple[Repair, ...], strikes: tuple[Strikes, ...]) -> NodeState:
    """Return *state* with *repairs* besides its own, which the store may not have yet."""
    return replace(state, repairs=reduce(with_repair, repairs, state.repairs), strikes=strikes)
