"""An event on its way into the store, with what the way itself knows about it."""

from dataclasses import dataclass

from gpuops.model import Event
from gpuops.store.columns import derived_id
from gpuops.store.fields import Fields
from gpuops.store.lines import Line
from gpuops.store.merge import Merge, Row

Fact = tuple[Merge, Row]


@dataclass(frozen=True, slots=True)
class Envelope:
    """One line, the cluster it is from and the uid that owns the file it stood in."""

    line: Line
    cluster: str = "default"
    uid: int = 0

    @property
    def event(self) -> Event:
        return self.line.event

    @property
    def is_roots(self) -> bool:
        """Say whether root wrote it: a user can lie, and may do so only about their own runs."""
        return self.uid == 0

    @property
    def cluster_id(self) -> str:
        return derived_id("cluster", self.cluster)

    @property
    def node_id(self) -> str:
        return derived_id("node", self.cluster, self.event.node)

    @property
    def order_key(self) -> str:
        """Return text that sorts as the events happened; no two events share it."""
        return f"{self.event.t_us:020d}/{self.event.id}"

    @property
    def earliest_key(self) -> str:
        """Return text of which the greatest belongs to the earliest event."""
        return f"{10**20 - 1 - self.event.t_us:020d}/{self.event.id}"

    def fields(self) -> Fields:
        """Return the payload, to be read by type."""
        return Fields(self.event.payload, self.event.kind)


def attempt_id(run_id: str, ordinal: int) -> str:
    """Return the id of the row of one attempt."""
    return derived_id("attempt", run_id, ordinal)
