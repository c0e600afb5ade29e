"""One check of this node: the suite, the profile, what the node remembers, and the run of it.

The order: the state file is read (`gpuops.gate.state_file`); a first profile is chosen by what it
says; all looks start, asked for what that profile names; when the GPUs have been seen the profile
is settled (`gpuops.gate.choice`), looks that it would have asked otherwise are asked again, and
judging begins. `keep_state` writes the state file, after the verdict is out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpuops.checks.profile import Profile
from gpuops.checks.profiles import load_profiles
from gpuops.checks.protocol import Machine
from gpuops.checks.runner import CheckRun, Tell, Terms, run_suite
from gpuops.checks.silences import Silence, load_silences, silenced
from gpuops.checks.suites import Suite, load_suite, suite_paths
from gpuops.gate.choice import Choice
from gpuops.gate.state import GPUS_LOOK, Errand, case_of, state_after
from gpuops.gate.state_file import Remembered, keep, recall
from gpuops.host.abandoned import abandoned
from gpuops.host.clock import Clock
from gpuops.host.node_state import Moment
from gpuops.host.trust import check_folders
from gpuops.model import Entity, EntityKind, Finding, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be checked, and where this node keeps its things.

    ``gpus``: see `gpuops.checks.protocol.Case`. ``trigger`` and ``job_id``: who asks, and the
    Slurm job that the hook is for (`gpuops.gate.state.Errand`). ``profile``: the name of the one
    to take whatever matches. ``uid``: whose files may be believed (`gpuops.host.trust`).
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
    profile: str | None = None
    trigger: str = "manual"
    job_id: str | None = None

    @property
    def errand(self) -> Errand:
        """Return what the check is for."""
        return Errand(trigger=self.trigger, job_id=self.job_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request with everything read that it names."""

    request: Request
    suite: Suite
    suites: Mapping[str, Path]
    machine: Machine
    profiles: Mapping[str, Profile]
    silences: tuple[Silence, ...] = ()

    def choice(self, remembered: str | None) -> Choice:
        """Return how the profile is chosen where *remembered* is what the node last had.

        Raises:
            ConfigError: The request names a profile that does not exist.
        """
        request = self.request
        choice = Choice(
            profiles=self.profiles,
            node=request.node,
            named=request.profile,
            remembered=remembered,
        )
        choice.first()
        return choice


def plan_of(request: Request) -> Plan:
    """Return what *request* comes to.

    Raises:
        UsageError: There is no such suite or check.
        ConfigError: A file is malformed, root must not believe it, or there is no such profile.
    """
    folders = check_folders(request.site_dir, uid=request.uid)
    suite = load_suite(request.suite, folders.suites).only(request.only).within(request.deadline_s)
    plan = Plan(
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
        profiles=load_profiles(folders.profiles),
        silences=load_silences(folders.silences),
    )
    plan.choice(None)
    return plan


def check_node(plan: Plan, clock: Clock, tell: Tell = lambda _findings: None) -> CheckRun:
    """Return what the suite finds; the caller must have a single thread."""
    request, left = plan.request, abandoned()
    known = recall(request.state_dir, request.root, request.uid, left)
    moment = Moment(boot_id=known.boot_id, since_boot_s=known.since_boot_s, t_us=clock.now_us())
    choice = plan.choice(known.state.profile)
    terms = terms_of(plan, choice, known, moment, tell)
    ran = run_suite(plan.suite, plan.machine, terms, clock, left)
    return with_notes(replace(ran, moment=moment), choice, known, terms)


def terms_of(plan: Plan, choice: Choice, known: Remembered, moment: Moment, tell: Tell) -> Terms:
    """Return what *plan* is judged by, given what the node remembered at *moment*."""
    request = plan.request
    case = case_of(
        known.state,
        node=Entity(EntityKind.NODE, request.node),
        moment=moment,
        errand=request.errand,
        gpus=request.gpus,
    )
    amend = partial(silenced, silences=plan.silences, node=request.node, now_us=moment.t_us)
    return Terms(case, chooser=choice.chooser(), amend=amend, tell=tell)


def with_notes(ran: CheckRun, choice: Choice, known: Remembered, terms: Terms) -> CheckRun:
    """Return *ran* with what is to be said of its profile and of the state file."""
    notes = [choice.problem(ran.facts.get(GPUS_LOOK)), _of_state(known, terms.case.node)]
    found = terms.amend([note for note in notes if note is not None])
    terms.tell(found)
    return replace(ran, findings=(*ran.findings, *found))


def _of_state(known: Remembered, node: Entity) -> Finding | None:
    if known.note is None:
        return None
    return Finding(check="node_state", entity=node, status=Status.WARN, message=known.note)


def keep_state(plan: Plan, ran: CheckRun) -> str | None:
    """Write what the node shall remember of *ran*; return what went wrong, None where nothing did.

    Where the boot could not be told nothing is written: what is below the same root hangs. The
    caller must have a single thread.
    """
    return keeping(plan, ran)()


def keeping(plan: Plan, ran: CheckRun) -> Callable[[], str | None]:
    """Begin to do as `keep_state`; call what is returned for what went wrong."""
    request, moment = plan.request, ran.moment
    if moment is None or not moment.boot_id:
        return lambda: None
    change = partial(state_after, ran=ran, moment=moment, errand=request.errand)
    trouble = keep(request.state_dir, request.uid, change, abandoned())

    def told() -> str | None:
        text = trouble()
        return text and f"gpuops: what this node remembers is not kept: {text}"

    return told
