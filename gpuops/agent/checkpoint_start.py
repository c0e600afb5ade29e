"""Which checkpoints a run keeps: the keeper that it starts or adopts, or none."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from gpuops.agent.arguments import Request
from gpuops.agent.checkpoint_keeper import Keeping
from gpuops.agent.checkpoint_peers import Agreement
from gpuops.agent.checkpoints import Checkpoints, KeeperRecord, NoCheckpoints
from gpuops.agent.keeper_folder import (
    FolderError,
    keeper_key,
    runtime_parents,
    sweep,
    take_folder,
)
from gpuops.host.clock import Clock
from gpuops.units import US_PER_S

# The keeper hashes with these; without them no script can make a Checkpointer either.
NEEDED = ("xxhash", "blake3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What this agent runs, and where; ``name`` is the same on all nodes of the run."""

    request: Request
    name: str
    env: Mapping[str, str]
    node: str
    cwd: str
    uid: int


def checkpoints_of(
    job: Job, record: KeeperRecord, clock: Clock, agreement: Agreement | None = None
) -> Checkpoints:
    """Return what keeps the checkpoints of *job*; a keeper is being started when this returns.

    *agreement*: with the other nodes of the run; None where there are none.
    """
    plan = job.request.plan.checkpoints
    if not plan.in_memory or any(find_spec(name) is None for name in NEEDED):
        return NoCheckpoints(plan.directory)
    key = keeper_key(job.request, job.env, node=job.node, cwd=job.cwd)
    parents = runtime_parents(job.env, Path(tempfile.gettempdir()), job.uid)
    sweep(parents, job.uid, clock.now_us() / US_PER_S)
    try:
        folder = take_folder(parents, key, job.uid)
    except FolderError as exc:
        record.failed("making a folder for the keeper of the checkpoints", exc)
        return NoCheckpoints(plan.directory)
    from gpuops.agent.keeper_tie import start_keeper

    return Keeping(
        partial(start_keeper, folder.path, lease_s=plan.lease_s, node=job.node, job=job.name),
        record,
        clock,
        directory=plan.directory,
        release=lambda ended: folder.leave(remove=ended),
        refusal=partial(_refusal, plan.directory, job.name, clock),
        agreement=agreement,
    ).open()


def _refusal(
    directory: str | None,
    job: str,
    clock: Clock,
    keeper_pid: int | None,
    pause: Callable[[float], object],
) -> str | None:
    """Return why another job has *directory*, None where none has; URLs have no owner."""
    if directory is None:
        return None
    from gpuops.checkpoint.claim import refusal

    return refusal(directory, job, clock, keeper_pid, pause)
