"""A run is asked to stop in order: after its step, or at once where nothing runs."""

import logging
from dataclasses import replace

from gpuops.control.client import ControlClient
from gpuops.control.record import ControlRecord, RunPhase
from gpuops.control.store import ControlStoreError

log = logging.getLogger(__name__)


def request_drain(client: ControlClient, signal_name: str, stop_step: int | None) -> bool:
    """Take a run that has workers from RUN to DRAIN; say whether that was done by this call.

    Ranks that ask whether to stop leave their loops after *stop_step*.
    """

    def change(current: ControlRecord) -> ControlRecord | None:
        if current.phase is not RunPhase.RUN:
            return None
        return replace(
            current,
            phase=RunPhase.DRAIN,
            drain_signal=signal_name,
            drain_step=stop_step,
            reason=f"{signal_name} on {client.me.node}",
            decided_by=client.me.node,
        )

    try:
        return client.update_record(change)
    except ControlStoreError as exc:
        log.debug("the drain is not on the board yet: %s", exc)
        return False


def stop_without_workers(
    client: ControlClient, signal_name: str, exit_code: int
) -> ControlRecord | None:
    """End a run that has no workers now; return its record once it has ended."""

    def change(current: ControlRecord) -> ControlRecord | None:
        if current.phase not in {RunPhase.RENDEZVOUS, RunPhase.COLLECT}:
            return None
        return replace(
            current,
            phase=RunPhase.STOP,
            exit_code=exit_code,
            drain_signal=signal_name,
            reason=f"{signal_name} on {client.me.node}",
            decided_by=client.me.node,
        )

    try:
        client.update_record(change)
    except ControlStoreError as exc:
        log.debug("the run cannot be ended yet: %s", exc)
    record = client.record
    return record if record.phase is RunPhase.STOP else None
