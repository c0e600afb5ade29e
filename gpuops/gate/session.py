"""One check of this node: the suite, the profile, the node's state file, and the run.

The order: the state file is read (`gpuops.gate.node_state`) and names a first profile; all probes
start for that profile; once the GPUs are known the profile is final, probes that it changes run
again, and judging begins. `start_saving_state` writes the state file, after the result is out.

The hardware profile, in this order: the one that ``check.profile`` names; else the one that matches
the GPUs that the check found; if none were found, or some are missing, the last one that matched
on this node; else one that matches the node's name alone. So a node whose driver hangs or whose GPU
fell off the bus is still compared with what it had.

`recheck_failures` repeats checks whose failure may be transient: when an epilog runs, a process of
the ended job may still be exiting, and its memory is freed a moment later. gpuops ends no process:
that is Slurm's job (``proctrack/cgroup``, ``KillWait``). `record_facts` and `judge_recording` are
the two halves of a check on different machines: judging never reads the machine that it runs on.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpuops.checks.core.check import ProbeContext
from gpuops.checks.core.probes import ProbeResult, ProfileChooser, collect
from gpuops.checks.core.profile import NumberExpectation, Profile
from gpuops.checks.core.profile_files import fits, load_profiles, parse_profile, profile_for
from gpuops.checks.core.recording import Recording
from gpuops.checks.core.runner import CheckRun, OnFinding, RunContext, judge, run_suite
from gpuops.checks.core.silence import Silence, apply_silences, load_silences
from gpuops.checks.core.suite import Suite, load_suite, suite_paths
from gpuops.config.resolve import read_toml
from gpuops.errors import BusyError, ConfigError
from gpuops.gate.node_lock import node_lock
from gpuops.gate.node_state import (
    GPUS_PROBE,
    READ_S,
    StateUpdate,
    StoredNodeState,
    judge_context_for,
    load_state,
    save_state,
    state_after,
)
from gpuops.host.clock import Clock, FakeClock
from gpuops.host.gpu_names import Gpus
from gpuops.host.node_state import BootMoment
from gpuops.host.process.abandoned import AbandonedProbes, abandoned
from gpuops.host.records import from_json
from gpuops.host.trust import check_folders, refuse_foreign_file
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status

# It needs the GPUs for itself.
_DIAGNOSTIC = "dcgm_diag"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSelector:
    """Selects the profile of *node*; ``remembered`` is the name of the last one."""

    profiles: Mapping[str, Profile]
    node: str
    named: str | None = None
    remembered: str | None = None

    def first(self) -> Profile:
        """Return the profile to use before any probe has run.

        Raises:
            ConfigError: There is no profile called ``named``.
        """
        if self.named is None and self.remembered in self.profiles:
            return self.profiles[str(self.remembered)]
        return self._matching((), 0)[0]

    def select(self, gpus: Gpus) -> tuple[Profile, str | None]:
        """Return the profile that matches *gpus*, and what is wrong if none or several do."""
        names, count = names_and_count(gpus)
        first = self.first()
        expected = first.match.gpu_count
        if not names or (expected is not None and count < expected):
            return first, None
        return self._matching(names, count)

    def problem(self, gpus: object) -> Finding | None:
        """Return the finding about a failed selection, given the facts of the GPUs.

        Hardware without a profile is judged by what it reports; only a contradiction warns.
        """
        text = self.select(gpus)[1] if isinstance(gpus, Gpus) else None
        if text is None or not isinstance(gpus, Gpus):
            return None
        names, count = names_and_count(gpus)
        several = sum(fits(item.match, self.node, names, count) for item in self.profiles.values())
        return Finding(
            check="profile",
            entity=Entity(EntityKind.NODE, self.node),
            status=Status.WARN if several > 1 else Status.SKIP,
            message=text,
            source="checks/profiles",
        )

    def _matching(self, names: tuple[str, ...], count: int) -> tuple[Profile, str | None]:
        return profile_for(
            self.profiles, node=self.node, gpu_names=names, gpu_count=count, named=self.named
        )

    def chooser(self) -> ProfileChooser:
        """Return how a run finds the profile."""
        return ProfileChooser(self.first(), GPUS_PROBE, self._choose)

    def _choose(self, result: ProbeResult) -> Profile:
        if result.error is not None:
            return self.first()
        try:
            return self.select(from_json(Gpus, result.facts, "the GPUs"))[0]
        except (ConfigError, ValueError):
            return self.first()


def names_and_count(gpus: Gpus) -> tuple[tuple[str, ...], int]:
    """Return NVML's name of each GPU, and how many are on the bus."""
    return tuple(gpu.name for gpu in gpus.nvml.gpus if gpu.name), len(gpus.pci)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """What to check, and where this node keeps its files.

    ``gpus``: see `gpuops.checks.core.check.JudgeContext`. ``trigger``, ``job_id`` and ``job_uid``:
    the caller, and the Slurm job that the hook is for with its user
    (`gpuops.gate.node_state.StateUpdate`). ``profile``: name or file of the one to use without
    matching. ``uid``: the trusted owner of files (`gpuops.host.trust`).
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
    job_uid: int | None = None

    @property
    def purpose(self) -> StateUpdate:
        return StateUpdate(trigger=self.trigger, job_id=self.job_id)

    @property
    def gpus_required(self) -> NumberExpectation | None:
        """Return ``gpus_expected`` with its origin; suites without `gpu_count` need it too."""
        if self.gpus_expected is None:
            return None
        return NumberExpectation(value=self.gpus_expected, source=self.gpus_expected_origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPlan:
    """A request with all the files that it names."""

    request: CheckRequest
    suite: Suite
    suites: Mapping[str, Path]
    machine: ProbeContext
    profiles: Mapping[str, Profile]
    silences: tuple[Silence, ...] = ()

    def selector(self, remembered: str | None) -> ProfileSelector:
        """Return how the profile is selected if *remembered* was the node's last one.

        Raises:
            ConfigError: The request names a profile that does not exist.
        """
        request = self.request
        selector = ProfileSelector(
            profiles=self.profiles, node=request.node, named=request.profile, remembered=remembered
        )
        selector.first()
        return selector


def is_profile_file(text: str) -> bool:
    """Return whether *text* (``check.profile``) is the path of a file, not a profile's name."""
    return "/" in text or text.endswith(".toml")


def make_plan(request: CheckRequest) -> CheckPlan:
    """Read the files that *request* names.

    Raises:
        UsageError: There is no such suite or check.
        ConfigError: A file is malformed or not to be trusted, or there is no such profile.
    """
    folders = check_folders(request.site_dir, uid=request.uid)
    suite = load_suite(request.suite, folders.suites).only(request.only).within(request.deadline_s)
    profiles = load_profiles(folders.profiles)
    if request.profile is not None and is_profile_file(request.profile):
        path = Path(request.profile)
        refuse_foreign_file(path, uid=request.uid)
        profiles[path.stem] = parse_profile(path, read_toml(path), profiles)
        request = replace(request, profile=path.stem)
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
            job_uid=request.job_uid,
        ),
        profiles=profiles,
        silences=load_silences(folders.silences),
    )
    plan.selector(None)
    return plan


def check_node(
    plan: CheckPlan, clock: Clock, on_finding: OnFinding = lambda _findings: None
) -> CheckRun:
    """Return what the suite finds; the caller must have a single thread.

    DCGM's diagnostic holds the node's lock while it runs, and is skipped where another test does.
    """
    left = abandoned()
    stored, moment = _load_state(plan, clock, left)
    selector = plan.selector(stored.state.profile)
    run = run_context(plan, selector, stored, moment, on_finding)
    with ExitStack() as stack:
        suite, busy = plan.suite, list[Finding]()
        if _DIAGNOSTIC in suite.names:
            try:
                stack.enter_context(node_lock(plan.request.state_dir, _DIAGNOSTIC))
            except BusyError as exc:
                others = tuple(item for item in suite.planned if item.check.name != _DIAGNOSTIC)
                suite = replace(suite, planned=others)
                node, skip = run.judge_context.node, Status.SKIP
                busy.append(Finding(check=_DIAGNOSTIC, entity=node, status=skip, message=str(exc)))
                on_finding(busy)
        check_run = run_suite(suite, _machine(plan, stored), run, clock, left)
    found = replace(check_run, findings=(*check_run.findings, *busy))
    return with_notes(
        replace(found, moment=moment, fleet=stored.state.fleet), selector, stored, run
    )


def _machine(plan: CheckPlan, stored: StoredNodeState) -> ProbeContext:
    return replace(plan.machine, kernel=stored.state.kernel.of_boot(stored.boot_id))


def _load_state(
    plan: CheckPlan, clock: Clock, left: AbandonedProbes
) -> tuple[StoredNodeState, BootMoment]:
    request = plan.request
    stored = load_state(request.state_dir, request.root, request.uid, left)
    return stored, BootMoment(
        boot_id=stored.boot_id, since_boot_s=stored.since_boot_s, t_us=clock.now_us()
    )


def run_context(
    plan: CheckPlan,
    selector: ProfileSelector,
    stored: StoredNodeState,
    moment: BootMoment,
    on_finding: OnFinding,
) -> RunContext:
    """Return what *plan* is judged by, given the node's state at *moment*."""
    request = plan.request
    context = replace(
        judge_context_for(
            stored.state,
            node=Entity(EntityKind.NODE, request.node),
            moment=moment,
            purpose=request.purpose,
            gpus=request.gpus,
        ),
        gpus_expected=request.gpus_required or plan.suite.gpus_expected,
    )
    silence = partial(apply_silences, silences=plan.silences, node=request.node, now_us=moment.t_us)
    return RunContext(context, selector.chooser(), silence, on_finding)


def with_notes(
    check_run: CheckRun, selector: ProfileSelector, stored: StoredNodeState, run: RunContext
) -> CheckRun:
    """Return *check_run* with the findings about its profile and the state file."""
    notes = [selector.problem(check_run.facts.get(GPUS_PROBE))]
    if stored.note is not None:
        node = run.judge_context.node
        notes.append(
            Finding(check="node_state", entity=node, status=Status.WARN, message=stored.note)
        )
    findings = run.apply_silences([note for note in notes if note is not None])
    run.on_finding(findings)
    return replace(check_run, findings=(*check_run.findings, *findings))


def start_saving_state(plan: CheckPlan, check_run: CheckRun) -> Callable[[], str | None]:
    """Begin to write the node's state after *check_run*; call the result to wait for errors.

    If the boot id is unknown nothing is written: what is below the same root hangs. The caller
    must have a single thread.
    """
    request, moment = plan.request, check_run.moment
    if moment is None or not moment.boot_id:
        return lambda: None
    change = partial(state_after, check_run=check_run, moment=moment, purpose=request.purpose)
    wait_for_child = save_state(request.state_dir, request.uid, change, abandoned())

    def wait() -> str | None:
        problem = wait_for_child()
        return problem and f"gpuops: cannot save the state of this node: {problem}"

    return wait


AGAIN_AFTER_S = 1.5
# A second check that has less is not started.
LEAST_S = 0.5


def recheck_failures(
    plan: CheckPlan,
    check_run: CheckRun,
    left_s: float,
    pause: Callable[[float], None],
    clock: Clock,
) -> CheckRun:
    """Return *check_run*; a failure that may be transient only warns unless it was found twice.

    Args:
        plan: Of *check_run*.
        check_run: The first check.
        left_s: The seconds that are left for the pause and the second check.
        pause: Waits.
        clock: Dates the second run.
    """
    transient = {item.check.name for item in plan.suite.planned if item.check.transient}
    failed = {item.check for item in check_run.findings if item.status is Status.FAIL}
    doubtful = tuple(failed & transient)
    if not doubtful:
        return check_run
    check_s = left_s - AGAIN_AFTER_S - READ_S
    if check_s < LEAST_S:
        return _merge(check_run, doubtful, (), "no time was left for a second check")
    pause(AGAIN_AFTER_S)
    again = replace(plan, suite=plan.suite.only(doubtful).within(check_s))
    when = f"in a second check {AGAIN_AFTER_S:g} s later"
    return _merge(check_run, doubtful, check_node(again, clock).findings, when)


def _key(finding: Finding) -> tuple[str, str, FailureClass | None]:
    return finding.check, finding.entity.id, finding.failure_class


def _merge(
    check_run: CheckRun, doubtful: tuple[str, ...], second: tuple[Finding, ...], when: str
) -> CheckRun:
    again = {_key(item): item for item in second if item.status is Status.FAIL}
    silent = {item.check for item in second if item.status is Status.UNKNOWN}

    def judged(first: Finding) -> Finding:
        if first.status is not Status.FAIL or first.check not in doubtful:
            return first
        found = again.get(_key(first))
        if found is not None:
            return replace(found, message=f"{found.message}, again {when}")
        if second and first.check not in silent:
            text = f"{first.message}; not {when}"
        else:
            text = f"{first.message}; {when}" + (", without an answer" if second else "")
        return replace(first, status=Status.WARN, message=text)

    return replace(check_run, findings=tuple(judged(item) for item in check_run.findings))


def record_facts(plan: CheckPlan, clock: Clock) -> tuple[Recording, str | None]:
    """Return the results of *plan*'s probes, and what is wrong with the node's state file.

    The caller must have a single thread.
    """
    request, left = plan.request, abandoned()
    stored, moment = _load_state(plan, clock, left)
    chooser = plan.selector(stored.state.profile).chooser()
    recording = Recording(
        node=request.node,
        moment=moment,
        results={
            item.probe: item for item in collect(plan.suite, _machine(plan, stored), chooser, left)
        },
        state=stored.state,
        profile=request.profile,
        gpus_expected=request.gpus_expected,
    )
    return recording, stored.note


def judge_recording(
    plan: CheckPlan, recording: Recording, on_finding: OnFinding = lambda _findings: None
) -> CheckRun:
    """Return what the suite of *plan*, for the recorded node, finds in *recording*.

    The run is dated when the recording was made.

    Raises:
        UsageError: Facts have another form than this gpuops knows.
    """
    moment, state = recording.moment, recording.state
    stored = StoredNodeState(state=state, boot_id=moment.boot_id, since_boot_s=moment.since_boot_s)
    selector = plan.selector(state.profile)
    run = run_context(plan, selector, stored, moment, on_finding)
    results = list(recording.results_for(plan.suite, GPUS_PROBE))
    check_run = judge(plan.suite, results, run, FakeClock(moment.t_us))
    return with_notes(check_run, selector, stored, run)
