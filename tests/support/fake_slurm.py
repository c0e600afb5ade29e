"""A slurmctld of one node, as `gpuops.slurm.scontrol.Scontrol` shows it to the gate."""

from dataclasses import dataclass, field

from gpuops.errors import SlurmError
from gpuops.slurm.scontrol import SlurmNode


@dataclass
class FakeSlurm:
    """``script``: what happens before each look, a callable of this object or None."""

    reason: str | None = None
    states: set = field(default_factory=lambda: {"IDLE"})
    down: bool = False
    script: list = field(default_factory=list)
    calls: list = field(default_factory=list)
    refuses_to_resume: bool = False

    def node(self, name):
        if self.script:
            happens = self.script.pop(0)
            if happens is not None:
                happens(self)
        self._answer()
        return SlurmNode(name=name, states=frozenset(self.states), reason=self.reason)

    def drain(self, name, reason):
        self._answer()
        self.calls.append(("drain", reason))
        self.by_somebody(reason)

    def resume(self, name):
        self._answer()
        if self.refuses_to_resume:
            raise SlurmError("Access/permission denied")
        self.calls.append(("resume", self.reason))
        self.taken_back()

    def by_somebody(self, reason):
        """Let somebody drain the node."""
        self.states, self.reason = {"IDLE", "DRAIN"}, reason

    def taken_back(self):
        """Let somebody resume the node."""
        self.states, self.reason = {"IDLE"}, None

    def _answer(self):
        if self.down:
            raise SlurmError("Unable to contact slurm controller")
