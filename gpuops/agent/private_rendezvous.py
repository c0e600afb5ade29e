"""The rendezvous of a run that has one node: nobody to meet, so nothing is opened.

torch's own one for a single node is a TCP store on ``localhost:0``. It listens on every interface
whatever the name says, and the agent unpickles the state that it finds there: who reaches the port
runs code as the user. Here the store lives in this process and no socket is opened.
"""

import socket

from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not in __all__
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)


class PrivateRendezvous(RendezvousHandler):
    """Meets nobody, again and again; *address* is where the workers look for their rank 0."""

    def __init__(self, run_id: str, address: str) -> None:
        self._run_id = run_id
        self._address = address
        self._is_closed = False

    def get_backend(self) -> str:
        return "private"

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Return rank 0 of 1, an empty store, and a port that is free now.

        Raises:
            RendezvousClosedError: It has been closed.
        """
        if self._is_closed:
            raise RendezvousClosedError("the run has come to its end")
        # A new store and port each time: keys of dead workers must not be found by the next ones.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self._address, free_port()))

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._is_closed = True
        return True


def free_port() -> int:
    """Return a TCP port that is free on every address: the workers' rank 0 will listen on all."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
