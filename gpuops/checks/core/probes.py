"""Run the probes of a suite, each in its own child process, all within the suite's deadline.

Probes run at the same time, except those that share a lock. Their results are plain JSON, so that
they can be recorded and judged elsewhere (`gpuops.checks.core.recording`).
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpuops.checks.core.check import Probe, ProbeContext
from gpuops.checks.core.profile import NO_PROFILE, Profile
from gpuops.checks.core.suite import PlannedCheck, Suite
from gpuops.errors import ProbeError
from gpuops.host.process.abandoned import AbandonedProbes
from gpuops.host.process.probe import ProbeChild, ProbeOutcome, answer, start_call, watch
from gpuops.host.records import to_json
from gpuops.model import UnknownReason

# Less is not worth a fork: the child would be stopped before its first call.
_LEAST_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The result of the probe called ``probe``: facts as JSON, or an error and its reason.

    ``notes`` is a traceback, if the error is a bug in gpuops.
    """

    probe: str
    facts: Any = None
    error: str | None = None
    reason: UnknownReason | None = None
    notes: str = ""


@dataclass(frozen=True, slots=True)
class ProfileChooser:
    """How a node's profile is found: ``first`` before any probe has run.

    ``choose`` returns the profile that matches the result of ``probe``; it is pure.
    """

    first: Profile = NO_PROFILE
    probe: str | None = None
    choose: Callable[[ProbeResult], Profile] = lambda _result: NO_PROFILE


def by_probe(suite: Suite) -> Mapping[str, list[PlannedCheck]]:
    """Return the checks of *suite* by the name of their probe, in the suite's order."""
    groups: dict[str, list[PlannedCheck]] = {}
    for planned in suite.planned:
        groups.setdefault(planned.check.probe.name, []).append(planned)
    return groups


def collect(
    suite: Suite,
    machine: ProbeContext,
    chooser: ProfileChooser,
    left: AbandonedProbes,
) -> Iterator[ProbeResult]:
    """Yield the result of each probe of *suite* as it arrives; one for each probe.

    The result of ``chooser.probe`` is the first, if the suite has it: nothing can be judged before
    the profile is known. A probe whose inputs the new profile changes runs again.
    *left*: see `gpuops.host.process.probe.start_call`. The caller must have a single thread.
    """
    scheduler = _ProbeScheduler(suite, machine, chooser.first, left)
    is_final = chooser.probe not in scheduler.groups
    held: list[ProbeResult] = []
    for result in scheduler.run():
        if is_final:
            yield result
        elif result.probe == chooser.probe:
            is_final = True
            yield result
            stale = scheduler.use_profile(chooser.choose(result), {item.probe for item in held})
            yield from (item for item in held if item.probe not in stale)
        else:
            held.append(result)


class _ProbeScheduler:
    """Which probes wait, which run, and which locks those hold."""

    def __init__(
        self,
        suite: Suite,
        machine: ProbeContext,
        profile: Profile,
        left: AbandonedProbes,
    ) -> None:
        self.groups = by_probe(suite)
        self._machine = machine
        self._deadline_s = suite.deadline_s
        self._started_s = time.monotonic()
        self._waiting = list(self.groups)
        self._running: dict[int, tuple[str, tuple[str, ...]]] = {}
        self._not_started: list[ProbeResult] = []
        self._inputs: dict[str, tuple[str, ...]] = {}
        self._left = left
        self.use_profile(profile, set())

    def use_profile(self, profile: Profile, finished: set[str]) -> set[str]:
        """Take the inputs that *profile* names; return which *finished* probes run again."""
        before = self._inputs
        self._inputs = {name: self._inputs_for(name, profile) for name in self.groups}
        stale = {name for name in finished if self._inputs[name] != before[name]}
        self._waiting.extend(name for name in self.groups if name in stale)
        return stale

    def _inputs_for(self, name: str, profile: Profile) -> tuple[str, ...]:
        inputs = (item.check.inputs(item.parameters, profile) for item in self.groups[name])
        return tuple(dict.fromkeys(text for each in inputs for text in each))

    def run(self) -> Iterator[ProbeResult]:
        for child, outcome in watch(self._start(), self._start):
            name, inputs = self._running.pop(child.pid)
            if inputs == self._inputs[name]:
                yield _result(name, outcome)
            else:
                self._waiting.append(name)
        yield from self._not_started
        for name in self._waiting:
            locks = ", ".join(sorted(self._probe(name).locks)) or "its turn"
            text = f"not run: it waited for {locks} until the {self._deadline_s:g} s were over"
            yield ProbeResult(probe=name, error=text, reason=UnknownReason.TIMEOUT)

    def _start(self) -> list[ProbeChild]:
        started = []
        for name in tuple(self._waiting):
            left_s = self._deadline_s - (time.monotonic() - self._started_s)
            if left_s < _LEAST_S or self._probe(name).locks & self._locked():
                continue
            self._waiting.remove(name)
            try:
                child = self._child(name, left_s)
            except ProbeError as exc:
                self._not_started.append(_failed(name, exc))
                continue
            self._running[child.pid] = name, self._inputs[name]
            started.append(child)
        return started

    def _child(self, name: str, left_s: float) -> ProbeChild:
        probe, machine = self._probe(name), replace(self._machine, inputs=self._inputs[name])
        budget_s = min(max(planned.timeout_s for planned in self.groups[name]), left_s)
        return start_call(
            lambda: to_json(probe.read(machine, budget_s)),
            deadline_s=budget_s,
            question=f"probe {name} {machine.root}",
            left=self._left,
        )

    def _probe(self, name: str) -> Probe[Any]:
        probe: Probe[Any] = self.groups[name][0].check.probe
        return probe

    def _locked(self) -> frozenset[str]:
        return frozenset().union(*(self._probe(name).locks for name, _ in self._running.values()))


def _result(probe: str, outcome: ProbeOutcome) -> ProbeResult:
    try:
        return ProbeResult(probe=probe, facts=answer(outcome))
    except ProbeError as exc:
        return _failed(probe, exc)


def _failed(probe: str, exc: ProbeError) -> ProbeResult:
    notes = "".join(getattr(exc, "__notes__", ()))
    return ProbeResult(probe=probe, error=str(exc), reason=UnknownReason(exc.reason), notes=notes)
