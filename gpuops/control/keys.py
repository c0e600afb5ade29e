"""The keys of one run in its control store, and when old ones are removed."""

import logging
from dataclasses import dataclass

from gpuops.control.store import ControlStore, ControlStoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlKeys:
    """Where things of one run lie on the control store.

    A control store outlives runs, so all but the record carry the run's id: a new run under the
    same key does not find the entries of the one before.
    """

    run_id: str

    @property
    def prefix(self) -> str:
        return self.run_id[-12:]

    def agent(self, agent: str = "") -> str:
        return f"{self.prefix}/agent/{agent}"

    def heartbeat(self, agent: str = "") -> str:
        return f"{self.prefix}/alive/{agent}"

    def generation(self, generation: int) -> str:
        """Return what all keys of *generation* begin with, and no other's."""
        return f"{self.prefix}/gen/{generation}/"

    def ready(self, generation: int, agent: str = "") -> str:
        return f"{self.generation(generation)}ready/{agent}"

    def roster(self, generation: int) -> str:
        return f"{self.generation(generation)}roster"

    def published(self, monitor: str = "", agent: str = "") -> str:
        return f"{self.prefix}/monitor/{monitor and f'{monitor}/{agent}'}"

    def commit_record(self) -> str:
        return f"{self.prefix}/ckpt/watermark"

    def restore(self, generation: int) -> str:
        return f"{self.generation(generation)}restore"

    def report(self, generation: int, agent: str = "") -> str:
        return f"{self.generation(generation)}report/{agent}"


log = logging.getLogger(__name__)

# Of the one before, a slow agent may still read who sat where and what was reported.
GENERATIONS_KEPT = 2


def delete_old_generations(store: ControlStore, keys: ControlKeys, generation: int) -> None:
    """Take off *store* what nobody needs while *generation* runs.

    What it does not do now it is asked for once more with the next generation; what stays there
    costs its space.
    """
    newest_deleted = generation - GENERATIONS_KEPT
    for number in range(max(newest_deleted - 1, 0), newest_deleted + 1):
        try:
            store.delete(keys.generation(number))
        except ControlStoreError as exc:
            log.debug("generation %d stays on the board: %s", number, exc)
