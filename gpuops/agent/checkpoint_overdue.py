"""Tells of states that all nodes gave up since they waited for some node for too long."""

from collections.abc import Callable

from gpuops.agent.chronicle import Chronicle
from gpuops.checkpoint.states import StateId
from gpuops.model import Severity


class Overdue:
    """What the leader records of them: each one; *say* tells the user, of the same again only once.

    Until there is another one nothing newer is in memory: a failure costs more than it should.
    """

    def __init__(self, chronicle: Chronicle, say: Callable[[str], None]) -> None:
        self._chronicle = chronicle
        self._say = say
        self._said = ""

    def gave_up(self, state: StateId, why: str) -> None:
        """Record that *state* was given up by all, for *why*."""
        payload = {"count": 1, "step": state.step, "epoch": state.epoch, "why": why}
        self._chronicle.checkpoint("checkpoint.given_up", payload, Severity.WARNING)
        if why != self._said:
            self._said = why
            self._say(f"the checkpoint of step {state.step} was given up: {why}")
