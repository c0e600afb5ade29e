"""Kernel log lines about a process, or about the node it ran on.

The OOM killer's record is the only proof that a SIGKILL came from a lack of memory. Its forms are
those of ``mm/oom_kill.c``: ``Out of memory: Killed process …`` for the whole machine, ``Memory
cgroup out of memory: Killed process …`` for a limit. Before Linux 5.0 these lines have ``Kill
process … or sacrifice child``, and a second one, ``Killed process …``, names who was killed.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from gpuops.host.kmsg import message_of, quotes_user
from gpuops.host.xid import parse_xid
from gpuops.model import FailureClass, Role, Status
from gpuops.rules import LogRule, LogSource, first_match

REMARKS_MAX = 3
_OOM = re.compile(
    r"(?P<scope>Memory cgroup out|Out) of memory(?: \([^)]{0,80}\))?: "
    r"[Kk]ill(?:ed)? process (?P<pid>\d+)"
)
_KILLED = re.compile(r"Killed process (?P<pid>\d+)(?:, UID \d+,)? \(")
# The kernel writes a pid as "python[4711]:", "pid=4711", "process 4711" or "task python:4711".
_PIDS = re.compile(r"(?:\[|\bpid[= ]'?|\bprocess |\btask [^\s:]{1,32}:)(\d{1,10})\b")


@dataclass(frozen=True, slots=True)
class KernelMatch:
    """One kernel line with a failure class.

    ``is_job_gpu``: it concerns the job, because one of its own GPUs reports a fault too.
    """

    failure_class: FailureClass
    line: str
    is_job_gpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobXidFilter:
    """Which Xids of the node's log may relate to a failure of this job.

    ``addresses``: the PCI addresses of the job's GPUs. ``stale``: address and code of Xids that
    these GPUs logged long before the failure, and not since.
    """

    addresses: frozenset[str]
    stale: frozenset[tuple[str, int]] = frozenset()


def oom_record(lines: Sequence[str], pids: Collection[int]) -> KernelMatch | None:
    """Return the OOM killer's record about one of *pids* in *lines*, which are in their order."""
    kind = FailureClass.KERNEL_OOM
    for line in lines:
        message = message_of(line)
        if quotes_user(message):
            continue
        match = _OOM.match(message)
        if match is not None:
            in_cgroup = match["scope"].startswith("Memory")
            kind = FailureClass.CGROUP_OOM if in_cgroup else FailureClass.KERNEL_OOM
        killed = match or _KILLED.match(message)
        if killed and int(killed["pid"]) in pids:
            return KernelMatch(kind, line)
    return None


def lines_with_pids(lines: Sequence[str], pids: Collection[int]) -> tuple[str, ...]:
    """Return the lines that name one of *pids*."""
    wanted = frozenset(map(str, pids))
    return tuple(line for line in lines if not wanted.isdisjoint(_PIDS.findall(line)))


def job_lines(lines: Sequence[str], xids: JobXidFilter | None) -> tuple[str, ...]:
    """Return *lines* without the Xids of other jobs' GPUs and old ones; all if *xids* is None.

    Another job on the machine writes into the same log, and a line stays in it for days.
    """
    if xids is None:
        return tuple(lines)
    return tuple(line for line in lines if _may_matter(line, xids))


def _may_matter(line: str, xids: JobXidFilter) -> bool:
    xid = parse_xid(line)
    if xid is None:
        return True
    return xid.address in xids.addresses and (xid.address, xid.code) not in xids.stale


def find_node_fault(
    lines: Sequence[str], rules: Sequence[LogRule], own_gpus: Collection[str] = ()
) -> KernelMatch | None:
    """Return the first line that by a rule is the root of a failure of the entire node.

    Only rules that fail the node's check count: a corrected error does not explain this failure.
    OOM records are skipped; they concern a single process (see `oom_record`).
    *own_gpus*: the PCI addresses of the job's GPUs, as far as known.
    """
    hits = list(_node_faults(lines, rules, own_gpus))
    return replace(hits[0], is_job_gpu=any(hit.is_job_gpu for hit in hits)) if hits else None


def _node_faults(
    lines: Sequence[str], rules: Sequence[LogRule], own_gpus: Collection[str]
) -> Iterator[KernelMatch]:
    for line in lines:
        rule = first_match(rules, line, LogSource.KERNEL)
        if rule is None or rule.failure_class.category == "host_mem":
            continue
        if rule.role is Role.ROOT and rule.status is Status.FAIL:
            xid = parse_xid(line)
            is_ours = xid is not None and xid.address in own_gpus
            yield KernelMatch(rule.failure_class, line, is_ours)


def node_remarks(lines: Sequence[str], rules: Sequence[LogRule]) -> tuple[str, ...]:
    """Return the last few lines that by a rule are signs of trouble with the node.

    They are for the reader: without an error of the driver or the hardware they blame nothing.
    """
    known = (
        line
        for line in reversed(lines)
        if (rule := first_match(rules, line, LogSource.KERNEL)) is not None
        and rule.failure_class.category != "host_mem"
    )
    return tuple(islice(known, REMARKS_MAX))[::-1]
