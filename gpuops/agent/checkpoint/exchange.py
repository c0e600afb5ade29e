"""How often nodes exchange what they have saved, by heartbeats and the commit record."""

from dataclasses import replace

from gpuops.agent.checkpoint.messages import FinalStatus, NodeStatus
from gpuops.control.threads import HOLD_S

# All nodes together send so many heartbeats a second to the control store while states change, and
# read from it as often: no more than 200 nodes send anyway, with one heartbeat a second each.
EXCHANGES_PER_S, EXCHANGE_MIN_S = 200, 0.1
QUICK_POLLS = 100  # after the last change
EXCHANGES_PER_COMMIT = 6  # and a little more; from a save to the next, if copies take no time


def exchange_s(n_nodes: int) -> float:
    """Return the seconds between two heartbeats of each of *n_nodes* while states change."""
    return min(HOLD_S, max(EXCHANGE_MIN_S, n_nodes / EXCHANGES_PER_S))


class ExchangeRhythm:
    """How often one node takes part: seldom once its status has not changed for a while."""

    def __init__(self) -> None:
        self._status: NodeStatus | None = None  # without what changes all the time
        self._n_unchanged = QUICK_POLLS

    def observe(self, status: NodeStatus) -> None:
        """Take in the status of this node at a poll of its keeper."""
        status = replace(status, decided=None, last=FinalStatus())
        self._n_unchanged = self._n_unchanged + 1 if status == self._status else 0
        self._status = status

    def every_s(self, n_nodes: int) -> float:
        """Return the seconds until the next exchange, with *n_nodes* in all."""
        return HOLD_S if self._n_unchanged >= QUICK_POLLS else exchange_s(n_nodes)
