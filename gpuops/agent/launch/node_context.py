"""What a run is surrounded by: the node, the folders, the rules, the way to the store."""

import getpass
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuops import __version__
from gpuops.agent.journal.payloads import NodeFacts, RunFacts, slurm_job
from gpuops.agent.journal.run_dir import writable_parent
from gpuops.agent.journal.session import NodeContext
from gpuops.config.resolve import Settings
from gpuops.errors import GpuopsError
from gpuops.host.clock import Clock
from gpuops.host.container import ContainerFacts
from gpuops.host.node_state import boot_id, node_name
from gpuops.host.procfs import boot_us
from gpuops.host.sysfs import driver_version
from gpuops.host.trust import check_folders, current_uid
from gpuops.rules import LogRule, load_rules
from gpuops.scrub import scrub
from gpuops.store.spool.record import NullRecorder, Recorder, spool_recorder

log = logging.getLogger(__name__)


def node_context_of(
    settings: Settings,
    env: Mapping[str, str],
    clock: Clock,
    *,
    describe: Callable[[Path], RunFacts],
) -> NodeContext:
    """Return what `Session` needs for a run that *describe* describes, given its folder.

    Raises:
        UsageError: The run directory that the user named cannot be written.
    """
    node, boot = node_name(env), boot_id(settings.root)
    parent = writable_parent(
        settings.run_dir,
        was_asked_for=settings.values["run.dir"].origin != "default",
        fallbacks=(
            settings.state_dir / "runs",
            Path(tempfile.gettempdir()) / f"gpuops-{os.geteuid()}",
        ),
    )
    if parent.problem is not None:
        log.warning(
            "this run is kept in %s: cannot write %s (%s)",
            parent.path,
            settings.run_dir.absolute(),
            parent.problem,
        )

    def make_recorder(journal: Path) -> Recorder:
        try:
            return spool_recorder(
                settings.spool_dir,
                node=node,
                boot_id=boot,
                bytes_max=settings.spool_bytes_max,
                clock=clock,
                journal=journal,
                users_dir=settings.spool_users_dir,
            )
        except GpuopsError as exc:
            log.warning("this run is not recorded: %s", exc)
            return NullRecorder()

    return NodeContext(
        node=node,
        clock=clock,
        root=settings.root,
        run_parent=parent.path,
        rules=_rules(settings),
        node_facts=_node_facts(settings.root, boot),
        run_facts=describe,
        make_recorder=make_recorder,
        flush=_flusher(settings, clock),
    )


def _flusher(settings: Settings, clock: Clock) -> Callable[[float], Any]:
    def flush_now(deadline_s: float) -> Any:  # noqa: ANN401 a FlushReport; SQLAlchemy comes late
        from gpuops.store.spool.send import flush

        return flush(
            settings.spool_dir,
            settings.store_url,
            deadline_s=deadline_s,
            cluster=settings.cluster,
            clock=clock,
            root=settings.root,
        )

    return flush_now


def _rules(settings: Settings) -> tuple[LogRule, ...]:
    try:
        return load_rules(check_folders(settings.site_dir, uid=current_uid()).rules)
    except GpuopsError as exc:
        log.warning("failures are classified without log rules: %s", exc)
        return ()


def _node_facts(root: Path, boot: str) -> NodeFacts:
    return NodeFacts(
        boot_id=boot,
        boot_us=boot_us(root),
        kernel=os.uname().release,
        driver=driver_version(root),
        gpuops_version=__version__,
    )


def lost_in_container(
    container: ContainerFacts, env: Mapping[str, str], users_dir: Path
) -> str | None:
    """Return a line that says what the run does not have in *container*, None where it has all."""
    lost = []
    if container.kernel_log is not None:
        lost.append(f"Xids come from NVML alone, no OOM kill is proven: {container.kernel_log}")
    elif container.has_own_pids:
        lost.append("no OOM kill is proven: the kernel's log has other process ids")
    if container.has_own_pids:
        lost.append("checkpoints in memory end with it (--ckpt-dir keeps them)")
    if env.get("SLURM_JOB_ID") and not users_dir.is_dir():
        lost.append(f"the fleet's store learns of this run only if {users_dir} is mounted")
    if not container.is_container or not lost:
        return None
    return f"in a container: {'; '.join(lost)}; all else works"


def describe_run(
    name: str,
    words: Sequence[str],
    env: Mapping[str, str],
    *,
    cluster: str,
    torch_version: str,
    max_restarts: int,
) -> Callable[[Path], RunFacts]:
    """Return a function from a run's folder to what is recorded of the run at its start."""
    job, _restarts = slurm_job(env)

    def describe(path: Path) -> RunFacts:
        return RunFacts(
            name=name,
            command=("gpuops", "run", *(scrub(word) for word in words)),
            user=_user(),
            cluster=cluster,
            run_dir=str(path),
            torch_version=torch_version,
            gpuops_version=__version__,
            max_restarts=max_restarts,
            slurm_job_id=job,
        )

    return describe


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.geteuid())  # a container without a name for this uid
