"""May this node join: its health check, and the memory of its GPUs.

Both are looked at while the workers of the last generation are being ended, so that a healthy node
waits for neither.

It is `gpuops check --suite preflight` as a process of its own, because this one has threads and a
driver can hang. It is not recorded as a check of the node: what it found goes into the run's own
record, and a failure that is the job's must not count as the node's twice.
"""

import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gpuops.agent.elastic.rendezvous import Preflight
from gpuops.agent.monitors.gpu_memory import GpuMemoryGate
from gpuops.agent.monitors.preflight_result import PreflightResult, judge_check
from gpuops.host.clock import Clock
from gpuops.host.process.bounded_command import run_bounded
from gpuops.scrub import scrub
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

TRIES = 2
# Of the deadline, what the child needs beside its looks: to start, to judge, to print.
_AROUND_S = 2.0
_AROUND_SHARE = 0.25
_GPU = re.compile(r"\d{1,4}|GPU-[0-9a-fA-F-]{4,64}")


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


LOOK_S = 0.02
# A spare that has waited for longer since its check is checked again before it is seated.
STALE_S = 60.0
FIRST_LOOK_S = 3.0
CANCEL_S = 1.0  # for `run_bounded` to end the check and all that it has started


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
