"""May this node join: its health check, and the memory of its GPUs.

Both are checked while the workers of the last generation are being ended, so that a healthy node
waits for neither.

The health check is `gpuops check --suite preflight` in a separate process, because this one has
threads and a driver can hang. It is not recorded as a check of the node: what it found goes into
the run's own record, and a failure that is the job's must not count as the node's twice.

A check that failed keeps the node out. A failure of gpuops itself, or of its rights, never does:
it would stop training that torchrun would have started.
"""

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gpuops.agent.elastic.rendezvous import Preflight
from gpuops.agent.monitors.gpu_memory import GpuMemoryGate
from gpuops.errors import EXIT_FAIL, EXIT_OK
from gpuops.host.clock import Clock
from gpuops.host.process.command import CommandEnd, run_bounded
from gpuops.incident.decision import NodeReport, ReportKind
from gpuops.model import (
    Confidence,
    Entity,
    EntityKind,
    FailureClass,
    Side,
    Status,
    UnknownReason,
)
from gpuops.scrub import scrub
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

# Whether the driver answers; its findings tell which of its calls gave no answer.
_DRIVER = "gpu_driver"
_LOST = "gpu_lost"
# Judged by `gpuops.agent.monitors.gpu_memory`: our own workers may just be ending, and on a machine
# that people share a GPU may rightly be in use.
_NOT_HERE = frozenset({"gpu_processes"})
SHOWN_MAX = 5
TEXT_CHARS_MAX = 200
TRIES = 2
# Of the deadline, what the child needs beside its looks: to start, to judge, to print.
_AROUND_S = 2.0
_AROUND_SHARE = 0.25
_GPU = re.compile(r"\d{1,4}|GPU-[0-9a-fA-F-]{4,64}")
LOOK_S = 0.02
# A spare that has waited for longer since its check is checked again before it is seated.
STALE_S = 60.0
FIRST_LOOK_S = 3.0
CANCEL_S = 1.0  # for `run_bounded` to end the check and all that it has started


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightResult:
    """Whether the node may join.

    ``reason`` is for people: what failed, or why nothing could be judged. ``hung``: the check, or
    a call that it made to the driver, gave no answer. ``findings``: what is not well, in short.
    """

    passed: bool
    reason: str = ""
    failure_class: FailureClass = FailureClass.UNRESOLVED
    culprits: tuple[Entity, ...] = ()
    findings: tuple[str, ...] = ()
    seconds: float = 0.0
    tries: int = 1
    hung: bool = False

    def to_report(self, node: str, generation: int) -> NodeReport:
        """Return what the agent of *node* reports where this did not pass."""
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


def judge_check(end: CommandEnd, *, listed: bool = False) -> PreflightResult:
    """Return what *end* says of the node.

    *listed*: NVML had listed the GPUs that were asked about, so one that it does not is gone.
    """
    if end.exit_code is None:
        return PreflightResult(
            passed=False,
            reason=f"the health check gave no answer in {end.seconds:.0f} s",
            failure_class=FailureClass.GPU_DRIVER_HANG,
            seconds=end.seconds,
            hung=True,
        )
    findings = _findings(end.output)
    if findings is None:
        return PreflightResult(passed=True, reason=_no_verdict(end), seconds=end.seconds)
    bad = tuple(_short(item) for item in findings if _weight(item) > Status.SKIP)[:SHOWN_MAX]
    hang = next((item for item in findings if _is_hang(item)), None)
    failed = [item for item in findings if _fails(item) or (listed and _is_gone(item))]
    if failed:
        return _failed(failed, bad, end)
    if hang is not None:
        return PreflightResult(
            passed=False,
            reason=f"the GPU driver hangs: {_text(hang)}",
            failure_class=FailureClass.GPU_DRIVER_HANG,
            culprits=_entities([hang]),
            findings=bad,
            seconds=end.seconds,
            hung=True,
        )
    note = "" if end.exit_code in {EXIT_OK, EXIT_FAIL} else f"not all was judged: {_said(bad)}"
    return PreflightResult(passed=True, reason=note, findings=bad, seconds=end.seconds)


def _failed(
    failed: Sequence[Mapping[str, Any]], bad: tuple[str, ...], end: CommandEnd
) -> PreflightResult:
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return PreflightResult(
        passed=False,
        reason=f"the check {failed[0]['check']} failed: {_text(failed[0])}{more}",
        failure_class=_class(failed[0]),
        culprits=_entities(failed),
        findings=bad,
        seconds=end.seconds,
    )


def _no_verdict(end: CommandEnd) -> str:
    code = end.exit_code or 0
    how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    lines = end.errors.decode("utf-8", errors="replace").strip().splitlines()
    said = f": {lines[-1][:TEXT_CHARS_MAX]}" if lines else ""
    return f"the health check gave no verdict ({how}{said})"


def _findings(output: bytes) -> list[Mapping[str, Any]] | None:
    """Return the findings in *output*, None where it is no answer of `gpuops check --json`."""
    try:
        body = json.loads(output)
        findings = body["findings"]
        return [item for item in findings if isinstance(item, Mapping) and "check" in item]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _fails(item: Mapping[str, Any]) -> bool:
    return item.get("status") == Status.FAIL.word and item["check"] not in _NOT_HERE


def _is_gone(item: Mapping[str, Any]) -> bool:
    """Say whether a GPU is no longer listed; a lost one may tell its name to nobody."""
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


def _said(bad: Sequence[str]) -> str:
    return "; ".join(bad) or "no check says why"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightPlan:
    """How the node is checked; *env* is the agent's, *deadline_s* for each of two tries.

    *gpus*: the job's by UUID, as NVML told them before; none: those that ``CUDA_VISIBLE_DEVICES``
    of *env* names, or all. *command* is what runs gpuops, with ``--config`` where one was given.
    """

    env: Mapping[str, str]
    deadline_s: float = 20.0
    gpus: Collection[str] = ()
    suite: str = "preflight"
    command: Sequence[str] = (sys.executable, "-P", "-m", "gpuops")

    def argv(self) -> list[str]:
        """Return the command line; the check gives up before its own deadline is over."""
        looks_s = self.deadline_s - min(_AROUND_S, _AROUND_SHARE * self.deadline_s)
        names = sorted(self.gpus) or _visible(self.env)
        gpus = ["--gpus", ",".join(names)] if names else []
        return [
            *self.command,
            "check",
            *("--suite", self.suite),
            *("--trigger", "preflight"),
            *("--deadline", f"{looks_s:g}"),
            *gpus,
            "--json",
            "--no-record",
        ]


def _visible(env: Mapping[str, str]) -> list[str]:
    """Return the GPUs that CUDA shows, none where that is not said or not understood."""
    words = [word.strip() for word in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return words if all(_GPU.fullmatch(word) for word in words) else []


class PreflightCheck:
    """One run of the check, twice where it hangs; started by `start`, which does not wait."""

    def __init__(self, plan: PreflightPlan) -> None:
        self._plan = plan
        self._cancelled = threading.Event()
        self._done = threading.Event()
        self._result = PreflightResult(passed=True, reason="the health check was not run")
        self._thread = threading.Thread(target=self._run, name="gpuops-gate", daemon=True)

    def start(self) -> None:
        """Begin; once for each gate."""
        self._thread.start()

    def result(self, timeout_s: float = 0.0) -> PreflightResult | None:
        """Return the result, None where there is none within *timeout_s*."""
        return self._result if self._done.wait(timeout_s) else None

    def cancel(self) -> None:
        """End the check; its result is that it passed. Does not wait."""
        self._cancelled.set()

    def _run(self) -> None:
        started_s = time.monotonic()
        try:
            result = self._tried()
        except Exception as exc:  # boundary: our failure is no failure of the node
            log.debug("the health check", exc_info=True)
            result = PreflightResult(
                passed=True, reason=f"the health check failed: {scrub(str(exc))}"
            )
        self._result = replace(
            result,
            seconds=round(time.monotonic() - started_s, 3),
            reason=scrub(result.reason),
            findings=tuple(map(scrub, result.findings)),
        )
        self._done.set()

    def _tried(self) -> PreflightResult:
        result = PreflightResult(passed=True)
        for number in range(1, TRIES + 1):
            plan = self._plan
            end = run_bounded(plan.argv(), plan.env, plan.deadline_s, self._cancelled.is_set)
            if end is None:
                return PreflightResult(passed=True, reason="the health check was cancelled")
            result = replace(judge_check(end, listed=bool(plan.gpus)), tries=number)
            if not result.hung:
                return result
        return replace(result, reason=f"{result.reason}, twice")


class PreflightGate(Protocol):
    """Says whether this node is fit for a generation."""

    def begin(self) -> None:
        """Start to look, unless that has begun already."""
        ...

    def started(self) -> None:
        """Hear that workers are about to be started."""
        ...

    def result(self, wait: Callable[[float], object]) -> Preflight:
        """Return what was found; *wait* is called with seconds between looks, and may raise."""
        ...

    def close(self) -> None:
        """Let go of processes."""
        ...


class NoPreflight:
    """Lets everyone in: ``--health-gate=off``."""

    def begin(self) -> None:
        """Do nothing."""

    def started(self) -> None:
        """Do nothing."""

    def result(self, wait: Callable[[float], object]) -> Preflight:  # noqa: ARG002 never waits
        """Return that this node may join."""
        return Preflight(passed=True)

    def close(self) -> None:
        """Do nothing."""


def _not_known() -> Collection[str] | None:
    return None


class HealthPreflight:
    """Asks the preflight suite, and waits for memory that dead workers still hold.

    *uuids* says which GPUs are the job's, None where that is not known: what another job holds on
    a GPU of its own is none of our business.
    """

    def __init__(
        self,
        make: Callable[[], PreflightCheck],
        memory: GpuMemoryGate,
        clock: Clock,
        say: Callable[[str], None],
        uuids: Callable[[], Collection[str] | None] = _not_known,
    ) -> None:
        self._make = make
        self._memory = memory
        self._clock = clock
        self._say = say
        self._uuids = uuids
        self._gate: PreflightCheck | None = None
        self._begun_ns = 0

    def begin(self) -> None:
        """Start to look, unless that has begun already."""
        if self._gate is not None and not self._is_stale():
            return
        self._begun_ns = self._clock.mono_ns()
        self._memory.begin()
        self._gate = self._make()
        self._gate.start()

    def started(self) -> None:
        """Take the memory that is held now as somebody else's."""
        self._memory.started()

    def result(self, wait: Callable[[float], object]) -> Preflight:
        """Return what was found; *wait* is called with seconds between looks, and may raise."""
        self.begin()
        assert self._gate is not None
        while (found := self._gate.result()) is None:
            wait(LOOK_S)
        self._gate = None
        if not found.passed:
            return Preflight(passed=False, reason=found.reason, to_report=found.to_report)
        if found.reason:
            self._say(found.reason)
        while (release := self._memory.poll(self._uuids())) is None:
            wait(LOOK_S)
        self._first_look(wait)
        if release.released:
            return Preflight(passed=True, reason=found.reason)
        reason = release.to_report("", 0).how
        return Preflight(passed=False, reason=reason, to_report=release.to_report)

    def _first_look(self, wait: Callable[[float], object]) -> None:
        """Give the look at the memory before the first worker the moment that NVML needs."""
        ends_ns = self._clock.mono_ns() + round(FIRST_LOOK_S * NS_PER_S)
        while not self._memory.has_looked and self._clock.mono_ns() < ends_ns:
            wait(LOOK_S)

    def close(self) -> None:
        """End what runs, and wait for it: a check that is being ended is stopped first."""
        if self._gate is not None:
            self._gate.cancel()
            self._gate.result(CANCEL_S)
        self._memory.close()

    def _is_stale(self) -> bool:
        return self._clock.mono_ns() - self._begun_ns > STALE_S * NS_PER_S
