"""One check of this node: the suite, the profile, the node's state file, and the run.

The order: the state file is read (`gpuops.gate.node_state`) and names a first profile; all probes
start for that profile; once the GPUs are known the profile is final, probes that it changes run
again, and judging begins. `keep_state` writes the state file, after the result is out.

The hardware profile, in this order: the one that ``check.profile`` names; else the one that matches
the GPUs that the check found; where none were found, or some are missing, the last one that matched
on this node; else one that matches the node's name alone. So a node whose driver hangs or whose GPU
fell off the bus is still compared with what it had.

`confirmed` repeats checks whose failure may pass by itself: when an epilog runs, a process of the
ended job may still be exiting, and its memory is freed a moment later. gpuops ends no process: that
is Slurm's part (``proctrack/cgroup``, ``KillWait``). `record_facts` and `judge_recording` are the
two halves of a check on different machines: judging never reads the machine that it runs on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpuops.checks.core.check import ProbeContext
from gpuops.checks.core.probes import ProbeResult, ProfileChooser, collect
from gpuops.checks.core.profile import Profile
from gpuops.checks.core.profile_files import fits, load_profiles, profile_for
from gpuops.checks.core.recording import Recording
from gpuops.checks.core.runner import CheckRun, OnFinding, RunContext, judge, run_suite
from gpuops.checks.core.silence import Silence, load_silences, silenced
from gpuops.checks.core.suite import Suite, load_suite, suite_paths
from gpuops.errors import ConfigError
from gpuops.gate.node_state import (
    GPUS_LOOK,
    READ_S,
    StateUpdate,
    StoredNodeState,
    case_of,
    load_state,
    save_state,
    state_after,
)
from gpuops.host.clock import Clock, FakeClock
from gpuops.host.gpu_names import Gpus
from gpuops.host.node_state import BootMoment
from gpuops.host.process.run_with_deadline import abandoned
from gpuops.host.records import from_json
from gpuops.host.trust import check_folders
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSelector:
    """What is known of *node* before it is probed; ``remembered`` is a profile's name."""

    profiles: Mapping[str, Profile]
    node: str
    named: str | None = None
    remembered: str | None = None

    def first(self) -> Profile:
        """Return the profile that holds before any probe.

        Raises:
            ConfigError: There is no profile called ``named``.
        """
        if self.named is None and self.remembered in self.profiles:
            return self.profiles[str(self.remembered)]
        return self._fitting((), 0)[0]

    def by(self, gpus: Gpus) -> Profile:
        """Return the profile that matches *gpus*."""
        return self._speak_for(gpus)[0]

    def problem(self, gpus: object) -> Finding | None:
        """Return the finding about a choice that went wrong, given the facts of the GPUs.

        Hardware without a profile is judged by what it reports; only a contradiction warns.
        """
        text = self._speak_for(gpus)[1] if isinstance(gpus, Gpus) else None
        if text is None or not isinstance(gpus, Gpus):
            return None
        names, count = _seen(gpus)
        several = sum(fits(item.match, self.node, names, count) for item in self.profiles.values())
        return Finding(
            check="profile",
            entity=Entity(EntityKind.NODE, self.node),
            status=Status.WARN if several > 1 else Status.SKIP,
            message=text,
            source="checks/profiles",
        )

    def _speak_for(self, gpus: Gpus) -> tuple[Profile, str | None]:
        names, count = _seen(gpus)
        first = self.first()
        wanted = first.match.gpu_count
        if not names or (wanted is not None and count < wanted):
            return first, None
        return self._fitting(names, count)

    def _fitting(self, names: tuple[str, ...], count: int) -> tuple[Profile, str | None]:
        return profile_for(
            self.profiles, node=self.node, gpu_names=names, gpu_count=count, named=self.named
        )

    def chooser(self) -> ProfileChooser:
        """Return how a run finds the profile."""
        return ProfileChooser(self.first(), GPUS_LOOK, self._looked)

    def _looked(self, looked: ProbeResult) -> Profile:
        if looked.error is not None:
            return self.first()
        try:
            return self.by(from_json(Gpus, looked.facts, "the GPUs"))
        except (ConfigError, ValueError):
            return self.first()


def _seen(gpus: Gpus) -> tuple[tuple[str, ...], int]:
    """Return what NVML calls each GPU, and how many are on the bus."""
    return tuple(gpu.name for gpu in gpus.nvml.gpus if gpu.name), len(gpus.pci)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """What is to be checked, and where this node keeps its things.

    ``gpus``: see `gpuops.checks.core.check.JudgeContext`. ``trigger`` and ``job_id``: who asks, and
    the Slurm job that the hook is for (`gpuops.gate.node_state.StateUpdate`). ``profile``: the
    name of the one to take whatever matches. ``uid``: whose files may be believed
    (`gpuops.host.trust`).
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
    def purpose(self) -> StateUpdate:
        """Return what the check is for."""
        return StateUpdate(trigger=self.trigger, job_id=self.job_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPlan:
    """A request with everything read that it names."""

    request: CheckRequest
    suite: Suite
    suites: Mapping[str, Path]
    machine: ProbeContext
    profiles: Mapping[str, Profile]
    silences: tuple[Silence, ...] = ()

    def choice(self, remembered: str | None) -> ProfileSelector:
        """Return how the profile is chosen where *remembered* was the node's last one.

        Raises:
            ConfigError: The request names a profile that does not exist.
        """
        request = self.request
        choice = ProfileSelector(
            profiles=self.profiles,
            node=request.node,
            named=request.profile,
            remembered=remembered,
        )
        choice.first()
        return choice


def plan_of(request: CheckRequest) -> CheckPlan:
    """Return what *request* comes to.

    Raises:
        UsageError: There is no such suite or check.
        ConfigError: A file is malformed, root must not believe it, or there is no such profile.
    """
    folders = check_folders(request.site_dir, uid=request.uid)
    suite = load_suite(request.suite, folders.suites).only(request.only).within(request.deadline_s)
    plan = CheckPlan(
        request=request,
        suite=suite.expecting_gpus(request.gpus_expected, request.gpus_expected_origin),
        suites=suite_paths(folders.suites),
        machine=ProbeContext(
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


def check_node(plan: CheckPlan, clock: Clock, tell: OnFinding = lambda _findings: None) -> CheckRun:
    """Return what the suite finds; the caller must have a single thread."""
    request, left = plan.request, abandoned()
    known = load_state(request.state_dir, request.root, request.uid, left)
    moment = BootMoment(boot_id=known.boot_id, since_boot_s=known.since_boot_s, t_us=clock.now_us())
    choice = plan.choice(known.state.profile)
    terms = terms_of(plan, choice, known, moment, tell)
    ran = run_suite(plan.suite, plan.machine, terms, clock, left)
    return with_notes(replace(ran, moment=moment), choice, known, terms)


def terms_of(
    plan: CheckPlan,
    choice: ProfileSelector,
    known: StoredNodeState,
    moment: BootMoment,
    tell: OnFinding,
) -> RunContext:
    """Return what *plan* is judged by, given the node's state at *moment*."""
    request = plan.request
    case = case_of(
        known.state,
        node=Entity(EntityKind.NODE, request.node),
        moment=moment,
        purpose=request.purpose,
        gpus=request.gpus,
    )
    amend = partial(silenced, silences=plan.silences, node=request.node, now_us=moment.t_us)
    return RunContext(case, chooser=choice.chooser(), amend=amend, tell=tell)


def with_notes(
    ran: CheckRun, choice: ProfileSelector, known: StoredNodeState, terms: RunContext
) -> CheckRun:
    """Return *ran* with the notes about its profile and the state file."""
    notes = [choice.problem(ran.facts.get(GPUS_LOOK)), _of_state(known, terms.case.node)]
    found = terms.amend([note for note in notes if note is not None])
    terms.tell(found)
    return replace(ran, findings=(*ran.findings, *found))


def _of_state(known: StoredNodeState, node: Entity) -> Finding | None:
    if known.note is None:
        return None
    return Finding(check="node_state", entity=node, status=Status.WARN, message=known.note)


def keep_state(plan: CheckPlan, ran: CheckRun) -> str | None:
    """Write the node's state after *ran*; return what went wrong, None where nothing did.

    Where the boot id is unknown nothing is written: what is below the same root hangs. The
    caller must have a single thread.
    """
    return keeping(plan, ran)()


def keeping(plan: CheckPlan, ran: CheckRun) -> Callable[[], str | None]:
    """Begin to do as `keep_state`; call what is returned for what went wrong."""
    request, moment = plan.request, ran.moment
    if moment is None or not moment.boot_id:
        return lambda: None
    change = partial(state_after, ran=ran, moment=moment, purpose=request.purpose)
    trouble = save_state(request.state_dir, request.uid, change, abandoned())

    def wait() -> str | None:
        text = trouble()
        return text and f"gpuops: what this node remembers is not kept: {text}"

    return wait


AGAIN_AFTER_S = 1.5
# A second check that has less is not begun.
LEAST_S = 0.5

Key = tuple[str, str, FailureClass | None]


def confirmed(
    plan: CheckPlan, ran: CheckRun, left_s: float, pause: Callable[[float], None], clock: Clock
) -> CheckRun:
    """Return *ran*, in which a failure that may pass by itself only warns unless it was seen twice.

    Args:
        plan: Of *ran*.
        ran: The first check.
        left_s: The seconds that are left for the pause and the second check.
        pause: Waits.
        clock: Dates the second run.
    """
    passing = {item.check.name for item in plan.suite.planned if item.check.passing}
    doubtful = tuple({item.check for item in _failures(ran) if item.check in passing})
    if not doubtful:
        return ran
    look_s = left_s - AGAIN_AFTER_S - READ_S
    if look_s < LEAST_S:
        return _settled(ran, doubtful, (), "no time was left for a second look")
    pause(AGAIN_AFTER_S)
    second = check_node(replace(plan, suite=plan.suite.only(doubtful).within(look_s)), clock)
    words = f"at a second look {AGAIN_AFTER_S:g} s later"
    return _settled(ran, doubtful, second.findings, words)


def _failures(ran: CheckRun) -> list[Finding]:
    return [item for item in ran.findings if item.status is Status.FAIL]


def _key(finding: Finding) -> Key:
    return finding.check, finding.entity.id, finding.failure_class


def _settled(
    ran: CheckRun, doubtful: tuple[str, ...], second: tuple[Finding, ...], words: str
) -> CheckRun:
    again = {_key(item): item for item in second if item.status is Status.FAIL}
    silent = {item.check for item in second if item.status is Status.UNKNOWN}

    def judged(first: Finding) -> Finding:
        if first.status is not Status.FAIL or first.check not in doubtful:
            return first
        found = again.get(_key(first))
        if found is not None:
            return replace(found, message=f"{found.message}, {words} too")
        if second and first.check not in silent:
            text = f"{first.message}; not any more {words}"
        else:
            text = f"{first.message}; {words}" + (", without an answer" if second else "")
        return replace(first, status=Status.WARN, message=text)

    return replace(ran, findings=tuple(judged(item) for item in ran.findings))


def record_facts(plan: CheckPlan, clock: Clock) -> tuple[Recording, str | None]:
    """Return what the probes of *plan* give, and what is wrong with the node's state file.

    The caller must have a single thread.
    """
    request, left = plan.request, abandoned()
    known = load_state(request.state_dir, request.root, request.uid, left)
    moment = BootMoment(boot_id=known.boot_id, since_boot_s=known.since_boot_s, t_us=clock.now_us())
    chooser = plan.choice(known.state.profile).chooser()
    recording = Recording(
        node=request.node,
        moment=moment,
        looks={item.look: item for item in collect(plan.suite, plan.machine, chooser, left)},
        state=known.state,
        profile=request.profile,
        gpus_expected=request.gpus_expected,
    )
    return recording, known.note


def judge_recording(
    plan: CheckPlan, recording: Recording, tell: OnFinding = lambda _findings: None
) -> CheckRun:
    """Return what the suite of *plan*, for the recorded node, makes of *recording*.

    The run is dated when the recording was made.

    Raises:
        UsageError: Facts have another form than this gpuops knows.
    """
    moment, state = recording.moment, recording.state
    known = StoredNodeState(state=state, boot_id=moment.boot_id, since_boot_s=moment.since_boot_s)
    choice = plan.choice(state.profile)
    terms = terms_of(plan, choice, known, moment, tell)
    looks = list(recording.looked(plan.suite, GPUS_LOOK))
    ran = judge(plan.suite, looks, terms, FakeClock(moment.t_us))
    return with_notes(ran, choice, known, terms)
