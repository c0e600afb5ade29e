"""One check of this node: the suite, the profile, what the node remembers, and the run of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuops.checks.protocol import Case, Machine
from gpuops.checks.runner import CheckRun, Tell, Terms, run_suite
from gpuops.checks.suites import Suite, load_suite, suite_paths
from gpuops.host.clock import Clock
from gpuops.host.trust import check_folders
from gpuops.model import Entity, EntityKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be checked, and where this node keeps its things.

    ``gpus``: see `gpuops.checks.protocol.Case`. ``job_id``: the Slurm job that the hook is for.
    ``uid``: whose files may be believed (`gpuops.host.trust`).
    """

    suite: str
    node: str
    root: Path
    state_dir: Path
    uid: int
    site_dir: Path | None = None
    only: tuple[str, ...] = ()
    deadline_s: float | None = None
    gpus: frozenset[str] | None = None
    gpus_expected: int | None = None
    gpus_expected_origin: str = "config"
    job_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request with everything read that it names."""

    request: Request
    suite: Suite
    suites: Mapping[str, Path]
    machine: Machine


def plan_of(request: Request) -> Plan:
    """Return what *request* comes to.

    Raises:
        UsageError: There is no such suite or check.
        ConfigError: A file is malformed, or root must not believe it.
    """
    folders = check_folders(request.site_dir, uid=request.uid)
    suite = load_suite(request.suite, folders.suites).only(request.only).within(request.deadline_s)
    return Plan(
        request=request,
        suite=suite.expecting_gpus(request.gpus_expected, request.gpus_expected_origin),
        suites=suite_paths(folders.suites),
        machine=Machine(
            request.root,
            folders.rules,
            node=request.node,
            site_checks=folders.site_checks,
            xid_dirs=folders.xid,
        ),
    )


def check_node(plan: Plan, clock: Clock, tell: Tell = lambda _findings: None) -> CheckRun:
    """Return what the suite finds; the caller must have a single thread."""
    request = plan.request
    case = Case(node=Entity(EntityKind.NODE, request.node), gpus=request.gpus)
    return run_suite(plan.suite, plan.machine, Terms(case, tell=tell), clock)
