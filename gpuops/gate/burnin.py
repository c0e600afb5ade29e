"""Run a burn-in on this node: each test with its error counters, judged, and kept as it comes.

A test is one process for each part, all at the same time (`gpuops.host.process.together`). The
result is a `CheckRun` of the suite ``burnin``, recorded as that of a check, and one event
``burnin.measured`` for each measurement. The caller must have a single thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from gpuops.burnin.baseline import floors_in_force
from gpuops.burnin.baseline_file import Baseline, checked_baseline
from gpuops.burnin.judge import JudgeTerms, PeerLimits, judge_test
from gpuops.burnin.measurement import Measurement
from gpuops.burnin.plan import DIAGNOSTIC, BurninTest
from gpuops.burnin.results import ProgramOutput, SoftwareVersions
from gpuops.checks.core.check import JudgeContext, not_judged
from gpuops.checks.core.runner import CheckRun
from gpuops.checks.core.silence import apply_silences
from gpuops.gate.burnin_counters import (
    CounterReading,
    diagnostic_plan,
    new_errors,
    read_counters,
)
from gpuops.gate.burnin_parts import PartsUnderTest, PartUnderTest, choose_parts
from gpuops.gate.burnin_progress import (
    BurninProgress,
    TestedTest,
    forget_progress,
    load_progress,
    save_progress,
)
from gpuops.gate.node_state import GPUS_PROBE
from gpuops.gate.session import CheckPlan
from gpuops.host.clock import Clock
from gpuops.host.gpu_names import Gpus
from gpuops.host.process.abandoned import abandoned
from gpuops.host.process.command import module_command
from gpuops.host.process.together import ParallelCommand, ParallelEnd, run_together
from gpuops.model import Entity, EntityKind, Event, Finding, Json, Status, UnknownReason

SUITE = "burnin"
# Imports of torch from a cold disk, a CUDA context on each GPU, memory to allocate.
START_S = 180.0
_LATE = 2.0
# No number of threads or kernel may depend on the load: the bits of a product would.
_STEADY = {"MKL_DYNAMIC": "FALSE", "OMP_DYNAMIC": "FALSE", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# NCCL 2.31 and later test the paths between the GPUs as they begin, and print what they found.
_DIAGNOSE = {"NCCL_RUN_DIAGNOSTICS": "1"}

Command = Callable[[BurninTest, PartUnderTest, Sequence[str]], Sequence[str]]


def program_command(
    test: BurninTest, part: PartUnderTest, more: Sequence[str] = ()
) -> Sequence[str]:
    """Return the command of *test* on *part*."""
    words = (test.name, *part.words, "--seconds", f"{test.seconds:g}", *more)
    return module_command("gpuops.worker.burnin", *words)


@dataclass(frozen=True, slots=True, kw_only=True)
class BurninRequest:
    """What to run. ``plan``: the checks that count errors; ``asked``: the options, as one text.

    ``baselines``, ``limits``: what results are held against. ``start_s``: how long a program may
    take besides its measuring. Without ``keeps_progress`` nothing can be resumed, and what an
    earlier burn-in left for that stays.
    """

    plan: CheckPlan
    tests: tuple[BurninTest, ...]
    asked: str
    cpus: tuple[int, ...]
    disks: tuple[Path, ...]
    environ: Mapping[str, str]
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    limits: PeerLimits = field(default_factory=PeerLimits)
    resume: bool = False
    keeps_progress: bool = True
    start_s: float = START_S
    command: Command = program_command

    @property
    def node(self) -> Entity:
        return Entity(EntityKind.NODE, self.plan.request.node)


@dataclass(frozen=True, slots=True)
class BurninWatcher:
    """Callbacks: for each test as it begins and ends, and for what could not be saved.

    ``on_turn`` gets what was printed so far, many times a second; ``on_ended``: the programs ended.
    """

    on_start: Callable[[BurninTest, int], None] = lambda _test, _parts: None
    on_turn: Callable[[Sequence[ProgramOutput]], None] = lambda _outputs: None
    on_ended: Callable[[], None] = lambda: None
    on_done: Callable[[TestedTest], None] = lambda _tested: None
    on_problem: Callable[[str], None] = lambda _text: None


@dataclass(slots=True)
class Burnin:
    """One burn-in: `run` it, then take its `result`, also after it was interrupted."""

    request: BurninRequest
    clock: Clock
    watcher: BurninWatcher = field(default_factory=BurninWatcher)
    versions: dict[str, str] = field(default_factory=dict)
    _progress: BurninProgress | None = None
    _first: CounterReading | None = None
    _parts: PartsUnderTest | None = None
    _baseline: Baseline | None = None
    _no_baseline: str | None = None
    _is_over: bool = False

    def run(self) -> None:
        """Run all tests that are not done yet; each is saved as it ends.

        Raises:
            UsageError: To resume, and there is nothing to go on from.
            ConfigError: The baseline of this machine cannot be right.
            KeyboardInterrupt: No test runs any more; what was done is kept.
        """
        request, state_dir = self.request, self.request.plan.request.state_dir
        if request.resume:
            uid = request.plan.request.uid
            self._progress = load_progress(state_dir, request.asked, uid)
        else:
            self._progress = BurninProgress(plan=request.asked, start_us=self.clock.now_us())
        reading = self._first = read_counters(request.plan, self.clock, None)
        gpus = reading.run.facts.get(GPUS_PROBE)
        if isinstance(gpus, Gpus) and gpus.nvml.driver:
            self.versions["driver"] = gpus.nvml.driver
        context = JudgeContext(node=request.node, gpus=request.plan.request.gpus)
        self._parts = choose_parts(gpus, context, request.cpus, request.disks)
        if self._shape:
            found = checked_baseline(request.baselines, self._shape)
            self._baseline, self._no_baseline = found
        done = {tested.name for tested in self._progress.done}
        for test in request.tests:
            if test.name not in done:
                reading = self._run_test(test, self._parts, reading)
        if request.keeps_progress:
            forget_progress(state_dir)
        self._is_over = True

    def _run_test(
        self, test: BurninTest, parts: PartsUnderTest, before: CounterReading
    ) -> CounterReading:
        assert self._progress is not None
        chosen = parts.of(test)
        self.watcher.on_start(test, len(chosen))
        findings, outputs = list[Finding](), list[ProgramOutput]()
        if test.name == DIAGNOSTIC:
            findings += self.diagnose(parts)
        elif chosen:
            outputs = self._outputs(test, chosen, parts)
            findings += judge_test(test, outputs, self._terms())
        for versions in (item for out in outputs for item in out.of(SoftwareVersions)):
            self.versions.update(versions.versions)
        after = read_counters(self.request.plan, self.clock, before)
        findings += new_errors(before.run, after.run, test.name)
        tested = TestedTest(
            name=test.name,
            findings=tuple(self._silenced(findings)),
            measurements=tuple(item for out in outputs for item in out.of(Measurement)),
        )
        self._progress = replace(self._progress, done=(*self._progress.done, tested))
        state_dir = self.request.plan.request.state_dir
        keeps = self.request.keeps_progress
        problem = save_progress(state_dir, self._progress) if keeps else None
        if problem is not None:
            self.watcher.on_problem(problem)
        self.watcher.on_done(tested)
        return after

    def diagnose(self, parts: PartsUnderTest) -> Sequence[Finding]:
        """Run DCGM's diagnostic, which tests all GPUs of the node; not where one is not ours."""
        if parts.n_left_out:
            text = "not run: it tests all GPUs of the node, and some are in use or not selected"
            check = f"{SUITE}/{DIAGNOSTIC}"
            return [
                Finding(check=check, entity=self.request.node, status=Status.SKIP, message=text)
            ]
        return read_counters(diagnostic_plan(self.request.plan), self.clock, None).run.findings

    @property
    def _shape(self) -> str:
        """Return what machine this is: its profile, else its GPUs or processors."""
        profile = "none" if self._first is None else self._first.run.profile
        return profile if profile != "none" or self._parts is None else self._parts.shape

    def _terms(self) -> JudgeTerms:
        floors = () if self._baseline is None else self._baseline.floors
        versions = {name: self.versions.get(name, "") for name in ("driver", "nccl")}
        return JudgeTerms(
            node=self.request.node,
            limits=self.request.limits,
            floors=floors_in_force(floors, **versions),
        )

    def _silenced(self, findings: list[Finding]) -> list[Finding]:
        plan = self.request.plan
        return apply_silences(
            findings,
            silences=plan.silences,
            node=plan.request.node,
            now_us=self.clock.now_us(),
        )

    def _outputs(
        self, test: BurninTest, chosen: Sequence[PartUnderTest], parts: PartsUnderTest
    ) -> list[ProgramOutput]:
        request = self.request
        visible = ",".join(part.visible_gpu for part in parts.parts if part.visible_gpu)
        sees_all = test.together or not test.on_parts
        outputs = [ProgramOutput(part.entity) for part in chosen]
        with TemporaryDirectory(prefix="gpuops-burnin-") as folder:
            commands = [
                ParallelCommand(
                    argv=request.command(
                        test,
                        part.as_rank(number) if test.together else part,
                        self._more_words(test, parts, (number, len(chosen)), Path(folder) / "meet"),
                    ),
                    env={
                        **_environment(request.environ, visible if sees_all else part.visible_gpu),
                        "TMPDIR": folder,  # what a program that is killed leaves goes with it
                    },
                    deadline_s=_LATE * test.seconds + request.start_s,
                    question=f"burnin {test.name} {part.entity}",
                )
                for number, part in enumerate(chosen)
            ]
            try:
                ends = run_together(
                    commands,
                    lambda number, line: outputs[number].add_line(line),
                    abandoned(),
                    lambda: self.watcher.on_turn(outputs),
                )
            finally:
                self.watcher.on_ended()
        for output, end in zip(outputs, ends, strict=True):
            _add_end(output, end)
        return outputs

    def _more_words(
        self, test: BurninTest, parts: PartsUnderTest, rank: tuple[int, int], meet: Path
    ) -> Sequence[str]:
        """Return the arguments of a program that depend on the node or on the other programs."""
        if test.together:
            words = ("--rank", str(rank[0]), "--ranks", str(rank[1]), "--meet", str(meet))
            return (*words, "--node", self.request.node.id)
        disks = [("--folder", str(disk)) for disk in parts.disks]
        gpus = [("--gpu", gpu.visible_gpu) for gpu in parts.parts if gpu.visible_gpu]
        named = {"disk": disks, "links": gpus, "tools": gpus + disks}
        return [word for words in named.get(test.name, ()) for word in words]

    def result(self) -> CheckRun:
        """Return what was found so far; tests that were not run are unknown."""
        progress, parts = self._progress, self._parts
        done = progress.done if progress is not None else ()
        names = {tested.name for tested in done}
        missing = [test.name for test in self.request.tests if test.name not in names]
        findings = [found for tested in done for found in tested.findings]
        findings += list(parts.findings) if parts is not None else []
        if self._no_baseline is not None:
            text, node = self._no_baseline, self.request.node
            findings.append(
                Finding(check="burnin/baseline", entity=node, status=Status.SKIP, message=text)
            )
        if missing or not self._is_over:
            text = "interrupted: all tests were run"
            if missing:
                text = f"interrupted: not run: {', '.join(missing)}; `--resume` goes on from there"
            reason = UnknownReason.NOT_RECORDED
            findings.append(not_judged(SUITE, self.request.node, text, reason))
        now_us = self.clock.now_us()
        return CheckRun(
            suite=SUITE,
            node=self.request.plan.request.node,
            start_us=now_us if progress is None else progress.start_us,
            end_us=now_us,
            findings=tuple(findings),
            late=tuple(
                dict.fromkeys(
                    found.check
                    for found in findings
                    if found.unknown_reason is UnknownReason.TIMEOUT
                )
            ),
            profile="none" if self._first is None else self._first.run.profile,
            moment=None if self._first is None else self._first.moment,
        )

    def measured(self) -> list[Json]:
        """Return the payload of a ``burnin.measured`` for each measurement, without its run."""
        done = () if self._progress is None else self._progress.done
        return [
            measured_json(item, tested, self._shape, self.versions)
            for tested in done
            for item in tested.measurements
        ]


def _environment(environ: Mapping[str, str], visible_gpus: str | None) -> Mapping[str, str]:
    gpu = {"CUDA_VISIBLE_DEVICES": visible_gpus} if visible_gpus else {}
    return {**environ, **_STEADY, **_DIAGNOSE, **gpu}


def _add_end(output: ProgramOutput, end: ParallelEnd) -> None:
    if end.problem is not None:
        output.reason = UnknownReason.TIMEOUT if end.late else UnknownReason.CRASH
        output.problem = f"its program {end.problem}"
    elif end.dropped:
        output.reason = UnknownReason.CRASH
        output.problem = f"its program printed {end.dropped} bytes more than a test prints"


def measured_json(
    item: Measurement, tested: TestedTest, shape: str, versions: Mapping[str, str]
) -> Json:
    """Return what is recorded of *item*, whose status is the worst of its part's findings."""
    about = [
        found.status
        for found in tested.findings
        if found.entity == item.part and found.message.startswith(f"{item.parameters_text}:")
    ]
    return {
        "suite": SUITE,
        "test": item.test,
        "part": item.part.to_json(),
        "parameters": item.parameters_text,
        "value": item.median if item.is_measured else None,
        "spread_percent": round(item.spread_percent, 3) if item.is_measured else None,
        "repeats": len(item.values),
        "unit": item.unit,
        "higher_is_better": item.higher_is_better,
        "status": max(about, default=Status.PASS).word,
        "shape": shape,
        "software": dict(versions),
    }


def measured_events(payloads: Sequence[Json], run_id: str, node: str, clock: Clock) -> list[Event]:
    """Return the events of *payloads*, of the recorded check run *run_id*."""
    from gpuops.store.events import MEASURED, new_event

    return [
        new_event(MEASURED, node=node, clock=clock, payload={"check_run": run_id, **payload})
        for payload in payloads
    ]
