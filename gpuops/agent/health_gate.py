"""The health check of a node before it joins, and again after each failure.

It is `gpuops check --suite preflight` as a process of its own, because this one has threads and a
driver can hang. It is not recorded as a check of the node: what it found goes into the run's own
record, and a failure that is the job's must not count as the node's twice.
"""

import logging
import re
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuops.agent.health_verdict import GateResult, judge_check
from gpuops.host.bounded_command import run_bounded
from gpuops.scrub import scrub

log = logging.getLogger(__name__)

TRIES = 2
# Of the deadline, what the child needs beside its looks: to start, to judge, to print.
_AROUND_S = 2.0
_AROUND_SHARE = 0.25
_GPU = re.compile(r"\d{1,4}|GPU-[0-9a-fA-F-]{4,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePlan:
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


class HealthGate:
    """One run of the check, twice where it hangs; started by `start`, which does not wait."""

    def __init__(self, plan: GatePlan) -> None:
        self._plan = plan
        self._cancelled = threading.Event()
        self._done = threading.Event()
        self._result = GateResult(passed=True, reason="the health check was not run")
        self._thread = threading.Thread(target=self._run, name="gpuops-gate", daemon=True)

    def start(self) -> None:
        """Begin; once for each gate."""
        self._thread.start()

    def result(self, timeout_s: float = 0.0) -> GateResult | None:
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
            result = GateResult(passed=True, reason=f"the health check failed: {scrub(str(exc))}")
        self._result = replace(
            result,
            seconds=round(time.monotonic() - started_s, 3),
            reason=scrub(result.reason),
            findings=tuple(map(scrub, result.findings)),
        )
        self._done.set()

    def _tried(self) -> GateResult:
        result = GateResult(passed=True)
        for number in range(1, TRIES + 1):
            plan = self._plan
            end = run_bounded(plan.argv(), plan.env, plan.deadline_s, self._cancelled.is_set)
            if end is None:
                return GateResult(passed=True, reason="the health check was cancelled")
            result = replace(judge_check(end, listed=bool(plan.gpus)), tries=number)
            if not result.hung:
                return result
        return replace(result, reason=f"{result.reason}, twice")
