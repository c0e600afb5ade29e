"""One run, several agents: they agree on the run's id, folder and generation.

Group rank 0 publishes them in the rendezvous store of each round, the others read with a
deadline. An agent that reads nothing goes on under its own id: this never delays training.
"""

import json
import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from uuid import UUID

from gpuops.agent.rundir import SAFE_NAME

KEY = "gpuops/run"
READ_WAIT_S = 5.0
GENERATION_MAX = 10**6
log = logging.getLogger(__name__)


class Store(Protocol):
    """The part of torch's ``Store`` that is used here."""

    def set(self, key: str, value: str, /) -> Any: ...  # noqa: ANN401

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> Any: ...  # noqa: ANN401


@dataclass(frozen=True, slots=True)
class Identity:
    """Which run this is, and the name of its folder."""

    run_id: str
    folder: str


def agree(
    store: Store, *, group_rank: int, alone: bool, mine: Identity, generation: int
) -> tuple[Identity, int]:
    """Return the run's identity and generation as group rank 0 has them.

    *generation* is the one this agent would count next; it never goes back.
    """
    try:
        if group_rank == 0:
            if not alone:
                store.set(KEY, json.dumps([mine.run_id, mine.folder, generation]))
            return mine, generation
        store.wait([KEY], timedelta(seconds=READ_WAIT_S))
        theirs, number = _parse(store.get(KEY))
    except (RuntimeError, ValueError, TypeError) as exc:
        log.warning(
            "this agent records under its own run id: the first agent's is not known: %s", exc
        )
        return mine, generation
    return theirs, max(number, generation)


def _parse(data: bytes) -> tuple[Identity, int]:
    run_id, folder, generation = json.loads(data)
    if not isinstance(generation, int) or not 0 <= generation <= GENERATION_MAX:
        raise ValueError(f"{generation!r} is not a generation")
    if not SAFE_NAME.fullmatch(folder):
        raise ValueError(f"{folder!r} is not a folder's name")
    return Identity(str(UUID(run_id)), folder), generation
