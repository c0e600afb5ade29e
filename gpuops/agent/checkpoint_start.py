"""Which checkpoints a run keeps: the keeper that it starts or adopts, or none."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from gpuops.agent.arguments import Request
from gpuops.agent.checkpoint_keeper import (
    Checkpoints,
    KeeperRecord,
    Keeping,
    NoCheckpoints,
    Started,
)
from gpuops.agent.keeper_folder import (
    FolderError,
    KeeperFolder,
    keeper_key,
    runtime_parents,
    take_folder,
)
from gpuops.host.clock import Clock

# The keeper hashes with these; without them no script can make a Checkpointer either.
NEEDED = ("xxhash", "blake3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What this agent runs, and where."""

    request: Request
    env: Mapping[str, str]
    node: str
    cwd: str
    uid: int


def checkpoints_of(job: Job, record: KeeperRecord, clock: Clock) -> Checkpoints:
    """Return what keeps the checkpoints of *job*; a keeper is being started when this returns."""
    plan = job.request.plan.checkpoints
    if not plan.in_memory or any(find_spec(name) is None for name in NEEDED):
        return NoCheckpoints(plan.directory)
    key = keeper_key(job.request, job.env, node=job.node, cwd=job.cwd)
    parents = runtime_parents(job.env, Path(tempfile.gettempdir()), job.uid)
    try:
        folder = take_folder(parents, key, job.uid)
    except FolderError as exc:
        record.failed("making a folder for the keeper of the checkpoints", exc)
        return NoCheckpoints(plan.directory)
    return Keeping(
        partial(start_keeper, folder, plan.lease_s),
        record,
        clock,
        directory=plan.directory,
        release=lambda ended: folder.leave(remove=ended),
    ).open()


def start_keeper(folder: KeeperFolder, lease_s: float) -> Started:
    """Return the keeper in *folder*, started where none is there.

    Raises:
        KeeperError: It could not be started, or does not answer.
    """
    from gpuops.checkpoint.agent_link import AgentLink
    from gpuops.checkpoint.keeper_process import start_or_adopt

    process = start_or_adopt(folder.path, lease_s=lease_s)
    return Started(
        tie=AgentLink.connect(process.socket_path),
        socket=str(process.socket_path),
        pid=process.pid,
        adopted=process.adopted,
    )
