"""What the nodes of a job write to the directory once; in the messages between agents.

An agent has neither xxhash nor blake3 where it saves nothing, so this module imports neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from gpuops.checkpoint.types import WORLD_MAX
from gpuops.wire.messages import Limit

KEYS_MAX = 256  # groups that the nodes write once; of further ones each node writes its own copy
GroupKeys = Annotated[tuple[Annotated[str, Limit(16, low=16)], ...], Limit(KEYS_MAX)]
_NODES_MAX = 8192
_OWN_SHARE_MAX = 0.1


@dataclass(frozen=True, slots=True)
class WriteOnce:
    """Groups of ranks whose tensors were equal; ``keys`` are theirs, as in `SharedTensors`.

    ``node_sizes``: how many ranks each node of the job has, in the order of their ranks.
    """

    keys: GroupKeys
    node_sizes: Annotated[tuple[Annotated[int, Limit(WORLD_MAX, low=1)], ...], Limit(_NODES_MAX)]

    def ranks_by_node(self, ranks: Sequence[int]) -> list[list[int]]:
        """Return those of *ranks* on each node that has any."""
        found, begin = [], 0
        for size in self.node_sizes:
            found.append([rank for rank in ranks if begin <= rank < begin + size])
            begin += size
        return [local for local in found if local]


def is_written_once(own_bytes: float, shared_bytes: int, n_ranks: int) -> bool:
    """Return whether the nodes write once what *n_ranks* of a job hold alike.

    *own_bytes* is what each rank has for itself. A node that restores reads the whole images of all
    these ranks then.
    """
    return own_bytes * n_ranks <= _OWN_SHARE_MAX * shared_bytes
