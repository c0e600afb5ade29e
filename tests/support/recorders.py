"""A recorder that keeps events in memory as a store would get them."""

from gpuops.model import Event
from gpuops.store.spool.format import sanitize_event


class ListRecorder:
    """Keeps events in memory as a store would get them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def record(self, *events: Event) -> None:
        self.events.extend(sanitize_event(event) for event in events)

    def close(self) -> None:
        self.closed = True
