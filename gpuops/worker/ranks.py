"""Which rank this process is, and how ranks compare their findings."""

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
import xxhash

from gpuops.checkpoint.types import ArgumentError, CheckpointError, StateId

RELEASE_S = 1.0  # it takes less than a millisecond
_POLL_S = 0.0002


@dataclass(frozen=True, slots=True)
class RankContext:
    """A rank of the job and of its node; ``run`` names this start of the workers."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    run: str

    @property
    def node_ranks(self) -> range:
        """Return the ranks of this node, as a launcher numbers them: one after the other."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world)

    @property
    def n_nodes(self) -> int:
        """Return the number of nodes, if all have as many ranks as this one."""
        return -(-self.world // self.local_world)


def detect_ranks(env: Mapping[str, str]) -> RankContext:
    """Return the ranks of this process: from torch's process group, else from *env*.

    Raises:
        CheckpointError: *env* contradicts itself.
    """
    rank, world = _number(env, "RANK", 0), _number(env, "WORLD_SIZE", 1)
    if dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    local_world = _number(env, "LOCAL_WORLD_SIZE", world)
    local_rank = _number(env, "LOCAL_RANK", rank if local_world == world else rank % local_world)
    if not (0 <= rank < world and 0 <= local_rank < local_world <= world):
        raise CheckpointError(
            f"this is rank {rank} of {world} and local rank {local_rank} of {local_world}: that is "
            "impossible; RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE come from the launcher"
        )
    run = f"{env.get('TORCHELASTIC_RUN_ID', '')}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return RankContext(rank, world, local_rank, local_world, run)


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else default


def has_process_group(ranks: RankContext) -> bool:
    """Return whether the ranks can communicate."""
    return ranks.world > 1 and dist.is_available() and dist.is_initialized()


def all_reduce_min(values: list[int]) -> list[int]:
    """Return the minimum over all ranks of each of *values*; all ranks must call it."""
    tensor = torch.tensor(values, dtype=torch.int64, device=_device())
    all_reduce_min_in_place(tensor)
    return [int(value) for value in tensor.tolist()]


def all_reduce_min_in_place(tensor: torch.Tensor) -> None:
    """Reduce *tensor* to the minimum of all ranks; nothing else refers to it afterwards.

    A thread of gloo has the tensor a moment longer, and needs the GIL to release it. CPython ends a
    thread that needs the GIL while the interpreter shuts down, and C++, which must not be unwound
    like this, ends the process with SIGABRT: a program that restores, has nothing to do and ends
    would fail. The program's own last reduction is not our concern.
    """
    n_references = sys.getrefcount(tensor)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    if tensor.device.type != "cpu":
        return
    end_s = time.monotonic() + RELEASE_S
    while sys.getrefcount(tensor) > n_references and time.monotonic() < end_s:
        time.sleep(_POLL_S)


def _device() -> torch.device:
    """Return a device on which the process group works."""
    backend = str(dist.get_backend())
    if any(name in backend for name in ("gloo", "cpu", "mpi", "ucc", "fake")):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def check_same_state(found: tuple[StateId, int] | None, what: str) -> None:
    """Raise unless all ranks call this with the same state and world; all must call it.

    Raises:
        CheckpointError: They found different states. All ranks raise it.
    """
    epoch, step, world = (found[0].epoch, found[0].step, found[1]) if found else (-1, -1, -1)
    low = all_reduce_min([epoch, step, world, -epoch, -step, -world])
    if low[:3] == [-value for value in low[3:]]:
        return
    own_state = str(found[0]) if found else "no state"
    raise CheckpointError(
        f"the ranks found different states to resume from ({what}): this one {own_state}, others "
        f"from step {max(low[1], 0)} to step {-low[4]}; is a keeper gone, or does a node see "
        "another directory?"
    )


def check_same_replicas(groups: Mapping[tuple[int, ...], str] | None, ranks: RankContext) -> None:
    """Raise unless all members of each of *groups*, which must hold tensors alike, describe it so.

    *groups* has what is equal for equal descriptions (`group_key`), None where they are not known:
    then nothing is checked, as without a process group. All ranks must call it.

    Raises:
        ArgumentError: They describe some of them differently. All ranks raise it.
    """
    if not has_process_group(ranks):
        return
    is_known, minus_n = all_reduce_min([int(groups is not None), -len(groups or ())])
    if not is_known or not minus_n:
        return
    numbers = {
        members: xxhash.xxh3_64_intdigest(repr((members, key)).encode()) >> 1
        for members, key in (groups or {}).items()
    }
    row = [-number for number in numbers.values()] or [-1]
    row += [0] * (-minus_n - len(row))
    rows = [row if rank == ranks.rank else [0] * len(row) for rank in range(ranks.world)]
    table = all_reduce_min(list(chain.from_iterable(rows)))
    if 0 in table[:: len(row)]:
        return  # a rank took no part: the process group is a fake
    seen = Counter(table)
    is_odd = any(seen[-number] != len(members) for members, number in numbers.items())
    first = all_reduce_min([ranks.rank if is_odd else ranks.world])[0]
    if first < ranks.world:
        raise ArgumentError(
            f"rank {first} and others should hold the same tensors alike, and describe them with "
            "other names, dtypes or shapes: give each rank the same model and optimizer, in the "
            "same wrappers"
        )


def check_same_source(kind: int, names: Sequence[str], ranks: RankContext) -> None:
    """Raise unless all ranks call this with the same *kind*; all must call it.

    *names*: of the kinds, for messages, by number.

    Raises:
        CheckpointError: They are of different kinds. All ranks raise it.
    """
    low, minus_high = all_reduce_min([kind, -kind])
    if low == -minus_high:
        return
    raise CheckpointError(
        f"the ranks resume from different sources: some from {names[low]}, others from "
        f"{names[-minus_high]}, this one (rank {ranks.rank}) from {names[kind]}. Nothing is "
        "loaded, since these may be different states. The log of a rank without a keeper says why "
        "it has none: fix that, give all the same directory, and start the job again"
    )
