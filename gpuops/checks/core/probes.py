"""Look at a machine: each look of a suite in its own child, all within the suite's deadline.

Looks run at the same time, except those that share a lock. What comes back is plain JSON, so that
it can be kept and judged again, elsewhere (`gpuops.checks.core.recording`).
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpuops.checks.core.check import Probe, ProbeContext
from gpuops.checks.core.profile import NO_PROFILE, Profile
from gpuops.checks.core.suite import PlannedCheck, Suite
from gpuops.errors import ProbeError
from gpuops.host.process import probe
from gpuops.host.process.run_with_deadline import AbandonedProcess
from gpuops.host.records import to_json
from gpuops.model import UnknownReason

# Less is not worth a fork: the child would be stopped before it had asked anything.
_LEAST_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What the look called ``look`` gave: facts as JSON, or an error with the reason for it.

    ``notes`` is a traceback, where gpuops itself went wrong.
    """

    look: str
    facts: Any = None
    error: str | None = None
    reason: UnknownReason | None = None
    notes: str = ""


@dataclass(frozen=True, slots=True)
class ProfileChooser:
    """How a node's profile is found: ``first`` before anything was looked at.

    ``choose`` returns the profile that what ``look`` gave speaks for; it is pure.
    """

    first: Profile = NO_PROFILE
    look: str | None = None
    choose: Callable[[ProbeResult], Profile] = lambda _looked: NO_PROFILE


def by_look(suite: Suite) -> Mapping[str, list[PlannedCheck]]:
    """Return the checks of *suite* by the name of their look, in the suite's order."""
    groups: dict[str, list[PlannedCheck]] = {}
    for planned in suite.planned:
        groups.setdefault(planned.check.look.name, []).append(planned)
    return groups


def failed(look: str, exc: ProbeError) -> ProbeResult:
    """Return that *look* gave nothing, and why."""
    notes = "".join(getattr(exc, "__notes__", ()))
    return ProbeResult(look=look, error=str(exc), reason=UnknownReason(exc.reason), notes=notes)


def collect(
    suite: Suite,
    machine: ProbeContext,
    chooser: ProfileChooser,
    left: Mapping[str, AbandonedProcess],
) -> Iterator[ProbeResult]:
    """Yield what each look of *suite* gives, as they come; once for each look.

    That of ``chooser.look`` comes first, where the suite has it: nothing can be judged before the
    profile is known. A look that had been asked for what another profile names is asked again.
    *left*: see `gpuops.host.process.probe.start_call`. The caller must have a single thread.
    """
    desk = _Desk(suite, machine, chooser.first, left)
    settled = chooser.look not in desk.groups
    held: list[ProbeResult] = []
    for looked in desk.work():
        if settled:
            yield looked
        elif looked.look == chooser.look:
            settled = True
            yield looked
            stale = desk.ask_for(chooser.choose(looked), again={item.look for item in held})
            yield from (item for item in held if item.look not in stale)
        else:
            held.append(looked)


class _Desk:
    """Which looks wait, which run, and which locks those hold."""

    def __init__(
        self,
        suite: Suite,
        machine: ProbeContext,
        profile: Profile,
        left: Mapping[str, AbandonedProcess],
    ) -> None:
        self.groups = by_look(suite)
        self._machine = machine
        self._deadline_s = suite.deadline_s
        self._started_s = time.monotonic()
        self._waiting = list(self.groups)
        self._running: dict[int, tuple[str, tuple[str, ...]]] = {}
        self._refused: list[ProbeResult] = []
        self._asked: dict[str, tuple[str, ...]] = {}
        self._left = left
        self.ask_for(profile, again=set())

    def ask_for(self, profile: Profile, *, again: set[str]) -> set[str]:
        """Ask from now on for what *profile* names; return those of *again* that are asked anew."""
        before, self._asked = (
            self._asked,
            {
                name: tuple(
                    dict.fromkeys(
                        item
                        for planned in group
                        for item in planned.check.asks(planned.parameters, profile)
                    )
                )
                for name, group in self.groups.items()
            },
        )
        stale = {name for name in again if self._asked[name] != before[name]}
        self._waiting.extend(name for name in self.groups if name in stale)
        return stale

    def work(self) -> Iterator[ProbeResult]:
        for child, outcome in probe.watch(self._start(), self._start):
            name, asked = self._running.pop(child.pid)
            if asked == self._asked[name]:
                yield self._looked(name, outcome)
            else:
                self._waiting.append(name)
        yield from self._refused
        for name in self._waiting:
            yield failed(name, self._never_started(name))

    def _start(self) -> list[probe.ProbeChild]:
        started = []
        for name in tuple(self._waiting):
            left_s = self._deadline_s - (time.monotonic() - self._started_s)
            if left_s < _LEAST_S or self._look(name).locks & self._locked():
                continue
            self._waiting.remove(name)
            try:
                child = self._child(name, left_s)
            except ProbeError as exc:
                self._refused.append(failed(name, exc))
                continue
            self._running[child.pid] = name, self._asked[name]
            started.append(child)
        return started

    def _child(self, name: str, left_s: float) -> probe.ProbeChild:
        look, machine = self._look(name), replace(self._machine, asked=self._asked[name])
        budget_s = min(max(planned.timeout_s for planned in self.groups[name]), left_s)
        return probe.start_call(
            lambda: to_json(look.read(machine, budget_s)),
            deadline_s=budget_s,
            question=f"look {name} {machine.root}",
            left=self._left,
        )

    def _look(self, name: str) -> Probe[Any]:
        look: Probe[Any] = self.groups[name][0].check.look
        return look

    def _locked(self) -> frozenset[str]:
        return frozenset().union(*(self._look(name).locks for name, _ in self._running.values()))

    @staticmethod
    def _looked(name: str, outcome: probe.ProbeOutcome) -> ProbeResult:
        try:
            return ProbeResult(look=name, facts=probe.answer(outcome))
        except ProbeError as exc:
            return failed(name, exc)

    def _never_started(self, name: str) -> ProbeError:
        locks = ", ".join(sorted(self._look(name).locks)) or "its turn"
        return ProbeError(
            f"not looked: it waited for {locks} until the {self._deadline_s:g} s were over",
            UnknownReason.TIMEOUT,
        )
