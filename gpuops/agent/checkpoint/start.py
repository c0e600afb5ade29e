"""Which checkpoint service a run has, and the failure domain of this node."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from gpuops.agent.checkpoint.api import CheckpointService
from gpuops.agent.checkpoint.follower import CommitFollower
from gpuops.agent.checkpoint.keeper_folder import (
    FolderError,
    keeper_key,
    runtime_parents,
    sweep,
    take_folder,
)
from gpuops.agent.checkpoint.keeper_supervisor import KeeperSupervisor
from gpuops.agent.checkpoint.record import CheckpointRecord
from gpuops.agent.launch.options import RunRequest
from gpuops.checkpoint.placement.domains import DomainPath, read_domains
from gpuops.config.schema import is_domain_file
from gpuops.errors import ConfigError
from gpuops.host.clock import Clock
from gpuops.slurm import topology
from gpuops.units import US_PER_S

# The keeper hashes with these; without them no script can make a Checkpointer either.
NEEDED = ("xxhash", "blake3")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointJob:
    """What this agent runs, and where; ``name`` is the same on all nodes of the run."""

    request: RunRequest
    name: str
    env: Mapping[str, str]
    node: str
    cwd: str
    uid: int


def checkpoints_of(
    job: CheckpointJob,
    record: CheckpointRecord,
    clock: Clock,
    agreement: CommitFollower | None = None,
) -> CheckpointService:
    """Return what keeps the checkpoints of *job*; a keeper is being started when this returns.

    *agreement*: with the other nodes of the run; None where there are none.
    """
    plan = job.request.plan.checkpoints
    if not plan.in_memory or any(find_spec(name) is None for name in NEEDED):
        return CheckpointService(plan.directory)
    key = keeper_key(job.request, job.env, node=job.node, cwd=job.cwd)
    parents = runtime_parents(job.env, Path(tempfile.gettempdir()), job.uid)
    sweep(parents, job.uid, clock.now_us() / US_PER_S)
    try:
        folder = take_folder(parents, key, job.uid)
    except FolderError as exc:
        record.failed("making a folder for the keeper of the checkpoints", exc)
        return CheckpointService(plan.directory)
    from gpuops.agent.checkpoint.keeper_client import start_keeper

    return KeeperSupervisor(
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
    from gpuops.checkpoint.storage.directory_lock import lock_conflict

    return lock_conflict(directory, job, clock, keeper_pid, pause)


def domain_of(
    wanted: str, node: str, env: Mapping[str, str], say: Callable[[str], None]
) -> DomainPath:
    """Return the names of the domains of *node*, the widest first; () where none is known.

    *wanted* is ``auto`` (what Slurm tells the step in *env*), ``off``, a path like row1/rack3, or a
    file as `parse_domains` reads it. A file that is of no use is said, and stops nothing.
    """
    if wanted == "off":
        return ()
    if wanted == "auto":
        return topology.domain_of(env)
    if not is_domain_file(wanted):
        return tuple(wanted.split("/"))
    try:
        known = read_domains(Path(wanted).expanduser()).paths
    except ConfigError as exc:
        say(f"copies of checkpoints are placed as if nothing failed together: {exc}")
        return ()
    # As the agent calls itself, as Slurm does, and without the network's name.
    names = [node, env.get("SLURMD_NODENAME", ""), node.partition(".")[0]]
    found = next((known[name] for name in names if name in known), None)
    if found is None:
        say(f"no failure domain of {node} in {wanted}: copies of checkpoints may lie together")
    return found or ()
