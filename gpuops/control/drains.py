"""A run is asked to stop in order: after its step, or at once where nothing runs."""

import logging
from dataclasses import replace

from gpuops.control.board import BoardError
from gpuops.control.link import Link
from gpuops.control.record import ControlRecord, Phase

log = logging.getLogger(__name__)


def drain(link: Link, signal_name: str, stop_step: int | None) -> bool:
    """Take a run that has workers from RUN to DRAIN; say whether that was done by this call.

    Ranks that ask whether to stop leave their loops after *stop_step*.
    """

    def change(now: ControlRecord) -> ControlRecord | None:
        if now.phase is not Phase.RUN:
            return None
        return replace(
            now,
            phase=Phase.DRAIN,
            drain_signal=signal_name,
            drain_step=stop_step,
            reason=f"{signal_name} on {link.me.node}",
            decided_by=link.me.node,
        )

    try:
        return link.propose(change)
    except BoardError as exc:
        log.debug("the drain is not on the board yet: %s", exc)
        return False


def drain_at_once(link: Link, signal_name: str, exit_code: int) -> ControlRecord | None:
    """End a run that has no workers now; return its record once it has ended."""

    def change(now: ControlRecord) -> ControlRecord | None:
        if now.phase not in {Phase.FORM, Phase.GATHER}:
            return None
        return replace(
            now,
            phase=Phase.STOP,
            exit_code=exit_code,
            drain_signal=signal_name,
            reason=f"{signal_name} on {link.me.node}",
            decided_by=link.me.node,
        )

    try:
        link.propose(change)
    except BoardError as exc:
        log.debug("the run cannot be ended yet: %s", exc)
    record = link.record
    return record if record.phase is Phase.STOP else None
