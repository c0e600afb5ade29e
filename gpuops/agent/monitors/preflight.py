"""Decides whether this node may join: its health check, and the memory of its GPUs.

Both are checked while the workers of the last generation are being ended, so that a healthy node
waits for neither.

The health check is `gpuops check --suite preflight` in a separate process, because this one has
threads and a driver can hang. It is not recorded as a check of the node: its findings go into the
run's journal, and a failure of the job must not count against the node twice.

``--preflight=quick`` also tests the node under load before the first generation, by a short
`gpuops burnin`, once the health check has passed. ``--preflight=sweep``: see `preflight_sweep`.

A failed check excludes the node. A failure of gpuops itself, or a lack of permissions, never does:
it would stop a training that torchrun would have started.
"""

import json
import logging
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuops.agent.elastic.rendezvous import Preflight
from gpuops.agent.monitors.gpu_memory import GpuMemoryGate
from gpuops.errors import EXIT_FAIL, EXIT_OK
from gpuops.host.clock import Clock
from gpuops.host.process.command import CommandEnd, module_command, run_bounded
from gpuops.host.sysfs import read_pci_gpus
from gpuops.incident.decision import NodeReport, ReportKind
from gpuops.model import Confidence, Entity, EntityKind, FailureClass, Side, Status, UnknownReason
from gpuops.scrub import scrub
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

# Whether the driver answers; its findings name the calls that gave no answer.
_DRIVER = "gpu_driver"
_LOST = "gpu_lost"
# Judged by `gpuops.agent.monitors.gpu_memory`: the job's own workers may just be ending, and on a
# shared machine a GPU may rightly be in use.
_IGNORED_CHECKS = frozenset({"gpu_processes"})
SHOWN_MAX = 5
TEXT_CHARS_MAX = 200
TRIES = 2
# The part of the deadline that the child needs in addition to its probes: to start, judge, print.
_OVERHEAD_S = 2.0
_OVERHEAD_SHARE = 0.25
_GPU = re.compile(r"\d{1,4}|GPU-[0-9a-fA-F-]{4,64}")
POLL_S = 0.02
# A spare that has waited for longer since its check is checked again before it joins.
STALE_S = 60.0
BURNIN_S = 20.0
BASELINE_S = 3.0
CANCEL_S = 1.0  # for `run_bounded` to end the check and all its children


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightResult:
    """Whether the node may join.

    ``reason`` is for people: the failure, or why nothing could be judged. ``hung``: the check, or
    one of its calls to the driver, gave no answer. ``findings``: the bad ones, in short.
    """

    passed: bool
    reason: str = ""
    failure_class: FailureClass = FailureClass.UNRESOLVED
    culprits: tuple[Entity, ...] = ()
    findings: tuple[str, ...] = ()
    tries: int = 1
    hung: bool = False

    def to_report(self, node: str, generation: int) -> NodeReport:
        """Return the report of *node*'s agent where this did not pass."""
        here = Entity(EntityKind.NODE, node)
        return NodeReport(
            kind=ReportKind.GATE_FAILED,
            node=node,
            generation=generation,
            failure_class=self.failure_class,
            side=Side.INFRA,
            confidence=Confidence.PROBABLE if self.hung else Confidence.CONFIRMED,
            how=self.reason,
            culprits=tuple(dict.fromkeys((*self.culprits, here))),
            blames_node=True,
        )


def judge_check(
    end: CommandEnd, *, listed: bool = False, has_device: bool = True
) -> PreflightResult:
    """Return the result of a check that ended as *end*.

    *listed*: NVML has listed the requested GPUs before, so that a missing one is gone.
    *has_device*: an NVIDIA device is on the PCI bus; without one no driver hangs.
    """
    if end.exit_code is None:
        text = f"the health check gave no answer in {end.seconds:.0f} s"
        if has_device:
            return _hung(text)
        text += "; no NVIDIA device is on the PCI bus, so no driver is to blame: the node joins"
        return PreflightResult(passed=True, reason=text)
    findings = _findings(end.output)
    if findings is None:
        return PreflightResult(passed=True, reason=_no_result(end))
    bad = tuple(_short(item) for item in findings if _weight(item) > Status.SKIP)[:SHOWN_MAX]
    hang = next((item for item in findings if _is_hang(item)), None)
    failed = [item for item in findings if _fails(item) or (listed and _is_gone(item))]
    if failed:
        return _failed(failed, bad)
    if hang is not None:
        result = _hung(f"the GPU driver hangs: {_text(hang)}")
        return replace(result, culprits=_entities([hang]), findings=bad)
    note = "" if end.exit_code in {EXIT_OK, EXIT_FAIL} else "not all was judged: "
    note = note and note + ("; ".join(bad) or "no check says why")
    return PreflightResult(passed=True, reason=note, findings=bad)


def _hung(reason: str) -> PreflightResult:
    failure_class = FailureClass.GPU_DRIVER_HANG
    return PreflightResult(passed=False, reason=reason, failure_class=failure_class, hung=True)


def _failed(failed: Sequence[Mapping[str, Any]], bad: tuple[str, ...]) -> PreflightResult:
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return PreflightResult(
        passed=False,
        reason=f"the check {failed[0]['check']} failed: {_text(failed[0])}{more}",
        failure_class=_class(failed[0]),
        culprits=_entities(failed),
        findings=bad,
    )


def judge_burnin(end: CommandEnd, what: str = "the burn-in") -> PreflightResult:
    """Return the result of *what* that ended as *end*: only a failed test excludes the node."""
    if end.exit_code is None:
        reason = f"{what} gave no answer in {end.seconds:.0f} s: the node joins"
        return PreflightResult(passed=True, reason=reason)
    findings = _findings(end.output)
    if findings is None:
        return PreflightResult(passed=True, reason=_no_result(end, what))
    bad = tuple(_short(item) for item in findings if _weight(item) > Status.SKIP)[:SHOWN_MAX]
    failed = [item for item in findings if _fails(item)]
    if failed:
        return _failed(failed, bad)
    return PreflightResult(passed=True, reason="; ".join(bad), findings=bad)


def _no_result(end: CommandEnd, what: str = "the health check") -> str:
    code = end.exit_code or 0
    how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    lines = end.errors.decode("utf-8", errors="replace").strip().splitlines()
    last = f": {lines[-1][:TEXT_CHARS_MAX]}" if lines else ""
    return f"{what} gave no result ({how}{last})"


def _findings(output: bytes) -> list[Mapping[str, Any]] | None:
    """Return the findings in *output*, None where it is not that of `gpuops check --json`."""
    try:
        body = json.loads(output)
        findings = body["findings"]
        return [item for item in findings if isinstance(item, Mapping) and "check" in item]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _fails(item: Mapping[str, Any]) -> bool:
    return item.get("status") == Status.FAIL.word and item["check"] not in _IGNORED_CHECKS


def _is_gone(item: Mapping[str, Any]) -> bool:
    """Return whether a GPU is no longer listed; a lost one may not report its name."""
    return item["check"] == _LOST and item.get("failure_class") == FailureClass.GPU_MISSING


def _is_hang(item: Mapping[str, Any]) -> bool:
    return item["check"] == _DRIVER and item.get("unknown_reason") == UnknownReason.TIMEOUT


def _weight(item: Mapping[str, Any]) -> Status:
    try:
        return Status.parse(str(item.get("status")))
    except KeyError:
        return Status.UNKNOWN


def _class(item: Mapping[str, Any]) -> FailureClass:
    try:
        return FailureClass(str(item.get("failure_class")))
    except ValueError:
        return FailureClass.UNRESOLVED


def _entities(items: Sequence[Mapping[str, Any]]) -> tuple[Entity, ...]:
    found = []
    for item in items:
        try:
            found.append(Entity.from_json(item["entity"]))
        except (KeyError, ValueError, TypeError):
            continue
    return tuple(dict.fromkeys(found))


def _text(item: Mapping[str, Any]) -> str:
    return str(item.get("message", ""))[:TEXT_CHARS_MAX]


def _short(item: Mapping[str, Any]) -> str:
    return f"{item.get('status')} {item['check']}: {_text(item)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightPlan(ABC):
    """What tests the node; *env* is the agent's, *deadline_s* for each of two attempts.

    *gpus*: the job's by UUID, as NVML listed them before; none: those that ``CUDA_VISIBLE_DEVICES``
    of *env* names, or all. *command* runs gpuops, with ``--config`` where one was given.
    """

    what: str
    env: Mapping[str, str]
    deadline_s: float = 20.0
    gpus: Collection[str] = ()
    command: Sequence[str] = module_command("gpuops")

    def _gpu_words(self) -> list[str]:
        names = sorted(self.gpus) or _visible(self.env)
        return ["--gpus", ",".join(names)] if names else []

    @abstractmethod
    def run(self, is_over: Callable[[], bool]) -> CommandEnd | None:
        """Return how the command ended, None if *is_over* returned True first."""

    @abstractmethod
    def judge(self, end: CommandEnd) -> PreflightResult:
        """Return what the *end* of the command means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPlan(PreflightPlan):
    """How the node is checked; *root*: where ``/sys`` is."""

    what: str = "the health check"
    suite: str = "preflight"
    root: Path = Path("/")

    def argv(self) -> list[str]:
        """Return the command line; the check gives up before its own deadline."""
        probes_s = self.deadline_s - min(_OVERHEAD_S, _OVERHEAD_SHARE * self.deadline_s)
        return [
            *self.command,
            "check",
            *("--suite", self.suite),
            *("--trigger", "preflight"),
            *("--deadline", f"{probes_s:g}"),
            *self._gpu_words(),
            "--json",
            "--no-record",
        ]

    def run(self, is_over: Callable[[], bool]) -> CommandEnd | None:
        """Return how the command ended; see `PreflightPlan.run`."""
        return run_bounded(self.argv(), self.env, self.deadline_s, is_over)

    def judge(self, end: CommandEnd) -> PreflightResult:
        """Return what the *end* of the command means."""
        has_device = bool(read_pci_gpus(self.root))
        return judge_check(end, listed=bool(self.gpus), has_device=has_device)


@dataclass(frozen=True, slots=True, kw_only=True)
class BurninPlan(PreflightPlan):
    """How the node is tested under load: its GPUs that are free, or its processors.

    The products of a GPU find most in a short time; the deadline leaves 10 s to start and to end.
    """

    what: str = "the burn-in"

    def argv(self) -> list[str]:
        """Return the command line."""
        words = ("burnin", "--only", "gemm", "--duration", f"{BURNIN_S:g}")
        return [*self.command, *words, *self._gpu_words(), "--json", "--no-record"]

    def run(self, is_over: Callable[[], bool]) -> CommandEnd | None:
        """Return how the command ended; see `PreflightPlan.run`."""
        return run_bounded(self.argv(), self.env, self.deadline_s, is_over)

    def judge(self, end: CommandEnd) -> PreflightResult:
        """Return what the *end* of the command means."""
        return judge_burnin(end)


def _visible(env: Mapping[str, str]) -> list[str]:
    """Return the GPUs in ``CUDA_VISIBLE_DEVICES``, none where it is unset or malformed."""
    words = [word.strip() for word in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return words if all(_GPU.fullmatch(word) for word in words) else []


class PreflightCheck:
    """One run of the check, repeated once if it hangs; `start` does not wait."""

    def __init__(self, plan: PreflightPlan) -> None:
        self._plan = plan
        self._cancelled = threading.Event()
        self._done = threading.Event()
        self._result = PreflightResult(passed=True, reason=f"{plan.what} was not run")
        self._thread = threading.Thread(target=self._run, name="gpuops-gate", daemon=True)

    def start(self) -> None:
        """Begin; to be called once."""
        self._thread.start()

    def result(self, timeout_s: float = 0.0) -> PreflightResult | None:
        """Return the result, None where there is none within *timeout_s*."""
        return self._result if self._done.wait(timeout_s) else None

    def cancel(self) -> None:
        """End the check; its result is that it passed. Does not wait."""
        self._cancelled.set()

    def _run(self) -> None:
        try:
            result = self._attempt()
        except Exception as exc:  # boundary: our failure is no failure of the node
            log.debug("%s", self._plan.what, exc_info=True)
            reason = f"{self._plan.what} failed: {scrub(str(exc))}"
            result = PreflightResult(passed=True, reason=reason)
        findings = tuple(map(scrub, result.findings))
        self._result = replace(result, reason=scrub(result.reason), findings=findings)
        self._done.set()

    def _attempt(self) -> PreflightResult:
        result = PreflightResult(passed=True)
        for number in range(1, TRIES + 1):
            plan = self._plan
            end = plan.run(self._cancelled.is_set)
            if end is None:
                return PreflightResult(passed=True, reason=f"{plan.what} was cancelled")
            result = replace(plan.judge(end), tries=number)
            if not result.hung:
                return result
        return replace(result, reason=f"{result.reason}, twice")


class PreflightGate:
    """Decides whether this node may join a generation; this base class lets every node join."""

    def begin(self) -> None:
        """Start the checks, unless they run already."""

    def started(self) -> None:
        """Note that workers are about to be started."""

    def result(self, wait: Callable[[float], object]) -> Preflight:  # noqa: ARG002 never waits
        """Return the result; *wait* is called with seconds between polls, and may raise."""
        return Preflight(passed=True)

    def close(self) -> None:
        """End the processes."""


class NoPreflight(PreflightGate):
    """The gate of ``--health-gate=off``."""


class HealthPreflight(PreflightGate):
    """Runs the preflight suite, and waits for the memory that dead workers still hold.

    *uuids* returns the job's GPUs, None where they are not known: memory that other jobs hold on
    other GPUs is ignored.
    """

    def __init__(
        self,
        make: Callable[[], PreflightCheck],
        memory: GpuMemoryGate,
        clock: Clock,
        info: Callable[[str], None],
        uuids: Callable[[], Collection[str] | None] = lambda: None,
    ) -> None:
        self._make = make
        self._memory = memory
        self._clock = clock
        self._info = info
        self._uuids = uuids
        self._check: PreflightCheck | None = None
        self._begun_ns = 0

    def begin(self) -> None:
        if self._check is not None and not self._is_stale():
            return
        self._begun_ns = self._clock.mono_ns()
        self._memory.begin()
        self._check = self._make()
        self._check.start()

    def started(self) -> None:
        """Record the memory that is held now as the baseline."""
        self._memory.started()

    def result(self, wait: Callable[[float], object]) -> Preflight:
        self.begin()
        assert self._check is not None
        while (found := self._check.result()) is None:
            wait(POLL_S)
        self._check = None
        if not found.passed:
            return Preflight(passed=False, reason=found.reason, to_report=found.to_report)
        if found.reason:
            self._info(found.reason)
        while (release := self._memory.poll(self._uuids())) is None:
            wait(POLL_S)
        self._await_baseline(wait)
        if release.released:
            return Preflight(passed=True, reason=found.reason)
        reason = release.to_report("", 0).how
        return Preflight(passed=False, reason=reason, to_report=release.to_report)

    def _await_baseline(self, wait: Callable[[float], object]) -> None:
        """Wait until the memory before the first worker has been read, for `BASELINE_S`."""
        ends_ns = self._clock.mono_ns() + round(BASELINE_S * NS_PER_S)
        while not self._memory.has_baseline and self._clock.mono_ns() < ends_ns:
            wait(POLL_S)

    def close(self) -> None:
        """Cancel the check, wait for its end, and end the reading of the memory."""
        if self._check is not None:
            self._check.cancel()
            self._check.result(CANCEL_S)
        self._memory.close()

    def _is_stale(self) -> bool:
        return self._clock.mono_ns() - self._begun_ns > STALE_S * NS_PER_S


class BurninPreflight(PreflightGate):
    """Tests a node that passes *gate* under load, too, but only once: its first workers wait.

    *news*: what is said before the test.
    """

    def __init__(
        self,
        gate: PreflightGate,
        make: Callable[[], PreflightCheck],
        info: Callable[[str], None],
        news: str = f"testing this node for {BURNIN_S:g} s before the first start",
    ) -> None:
        self._gate = gate
        self._make = make
        self._info = info
        self._news = news
        self._check: PreflightCheck | None = None
        self._passed = False

    def begin(self) -> None:
        self._gate.begin()

    def started(self) -> None:
        self._gate.started()

    def result(self, wait: Callable[[float], object]) -> Preflight:
        preflight = self._gate.result(wait)
        if self._passed or not preflight.passed:
            return preflight
        if self._check is None:
            self._info(self._news)
            self._check = self._make()
            self._check.start()
        while (found := self._check.result()) is None:
            wait(POLL_S)
        self._check, self._passed = None, found.passed
        if not found.passed:
            return Preflight(passed=False, reason=found.reason, to_report=found.to_report)
        self._info(found.reason or "this node passed its burn-in")
        return preflight

    def close(self) -> None:
        if self._check is not None:
            self._check.cancel()
            self._check.result(CANCEL_S)
        self._gate.close()
