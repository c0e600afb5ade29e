"""Bring what the store knows of this node into its file: repairs and strikes. For a health check.

In a child with a deadline; what went wrong is said, and the file stays as it was.
"""

from dataclasses import replace
from functools import reduce
from pathlib import Path

from gpuops.errors import GpuopsError, ProbeError
from gpuops.gate.node_incidents import with_repair
from gpuops.gate.permit import START_S
from gpuops.gate.state_file import StateError, change_state
from gpuops.host import probe
from gpuops.host.abandoned import abandoned
from gpuops.host.clock import Clock
from gpuops.host.node_state import NodeState, Repair, Strikes

FETCH_S = 2.0


def sync(
    store_url: str, *, cluster: str, node: str, state_dir: Path, uid: int, clock: Clock
) -> str | None:
    """Ask the store and keep its answer; return what went wrong, None where nothing did.

    The caller must have a single thread.
    """
    now_us = clock.now_us()

    def ask() -> str | None:
        from gpuops.store.node_sync import fetch

        try:
            repairs, strikes = fetch(
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
    """Return *state* with what the store told; a repair that it has not heard of yet stays."""
    known = reduce(with_repair, repairs, state.repairs)
    return replace(state, repairs=known, strikes=strikes)
