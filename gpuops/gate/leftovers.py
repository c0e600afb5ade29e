"""Whose processes were found on a GPU.

By the cgroup that slurmstepd made for a job (cgroup.conf(5), ``proctrack/cgroup``); elsewhere the
user is all that the kernel knows. Nothing is ended.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from gpuops.checks.core.runner import CheckRun
from gpuops.checks.gpu.gpus import entity_of
from gpuops.errors import ProbeError
from gpuops.gate.node_state import GPUS_LOOK
from gpuops.host.gpus import Gpus
from gpuops.host.process import probe
from gpuops.host.process.abandoned import abandoned
from gpuops.model import FailureClass, Finding, Status

OWNERS_S = 0.2
_SHOWN = 8
_JOB = re.compile(r"/job_(\d+)(?:/|$)", re.MULTILINE)


def with_owners(
    ran: CheckRun, root: Path, job_uid: int | None, *, deadline_s: float = OWNERS_S
) -> CheckRun:
    """Return *ran* with the owners of left-over processes in its findings, where they are known.

    *job_uid*: the user of the job that the hook is for; *deadline_s*: how long to look for them.
    The caller must have a single thread.
    """
    if not any(_is_leftover(finding) for finding in ran.findings):
        return ran
    pids = _pids(ran)
    wanted = sorted({pid for item in pids.values() for pid in item})[:_SHOWN]
    try:
        owners = probe.ask(
            lambda: _owners(root, wanted, job_uid),
            deadline_s,
            question=f"owners {root}",
            left=abandoned(),
        )
    except ProbeError:
        return ran

    def told(finding: Finding) -> Finding:
        mine = [str(pid) for pid in pids.get(finding.entity.id, ()) if str(pid) in owners]
        if not mine or not _is_leftover(finding):
            return finding
        words = ", ".join(f"{pid} is {owners[pid]}" for pid in mine)
        return replace(finding, message=f"{finding.message}; {words}")

    return replace(ran, findings=tuple(told(item) for item in ran.findings))


def _is_leftover(finding: Finding) -> bool:
    bad = finding.status in {Status.FAIL, Status.WARN}
    return bad and finding.failure_class is FailureClass.HOST_LEFTOVERS


def _pids(ran: CheckRun) -> dict[str, tuple[int, ...]]:
    """Return the processes on each GPU, by the id of its entity."""
    gpus = ran.facts.get(GPUS_LOOK)
    if not isinstance(gpus, Gpus):
        return {}
    found = {}
    for gpu in gpus.nvml.gpus:
        for finding in ran.findings:
            if finding.entity == entity_of(gpu, finding.entity):
                found[finding.entity.id] = tuple(item.pid for item in gpu.processes or ())
    return found


def _owners(root: Path, pids: Iterable[int], job_uid: int | None) -> dict[str, str]:
    found = {}
    for pid in pids:
        folder = root / "proc" / str(pid)
        try:
            uid, cgroup = folder.stat().st_uid, (folder / "cgroup").read_text(errors="replace")
        except OSError:
            continue
        job = _JOB.search(cgroup)
        if job is not None:
            found[str(pid)] = f"of job {job[1]}"
        elif uid == job_uid:
            found[str(pid)] = f"of the job's user, {uid}"
    return found
