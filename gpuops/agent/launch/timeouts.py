"""The time limits of a launch, from the shortest to the longest, and which of them must not cross.

Who notices first decides what is known of a failure: an agent that polls its workers before
peers call the node dead, a hang that is named before torch's own time-out kills the evidence.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gpuops.agent.launch.options import RunRequest
from gpuops.agent.launch.plan import LOOK_S_MAX, EndpointKind, LaunchPlan
from gpuops.agent.launch.slurm import seconds_left
from gpuops.agent.launch.torch_compat import GLOO_TIMEOUT_S, HEARTBEAT, NCCL_TIMEOUT_S, heartbeat_s
from gpuops.control.store import CLOSED_DEAD_S
from gpuops.errors import UsageError
from gpuops.model import Json
from gpuops.units import format_seconds

_DEFAULTS = "default"
_CONF = "--rdzv-conf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeout:
    """One limit; ``limit_s`` None: learned, off, or not known before the job runs (``shown``)."""

    name: str
    limit_s: float | None
    source: str
    what: str
    shown: str = ""
    is_set: bool = False

    def to_json(self) -> Json:
        return {
            "name": self.name,
            "limit_s": self.limit_s,
            "shown": self.text,
            "source": self.source,
            "what": self.what,
        }

    @property
    def text(self) -> str:
        """Return the limit for people."""
        if self.limit_s is None:
            return self.shown
        return f"{self.limit_s:g} s" if self.limit_s < 10 else format_seconds(self.limit_s)

    @property
    def named(self) -> str:
        """Return the limit as a problem names it: the flag where one was given."""
        return self.source if self.is_set else f"{self.name} ({self.text}, {self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutConflict:
    """Two limits in the wrong order."""

    text: str
    is_error: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """All limits, and what is wrong with them."""

    timeouts: tuple[Timeout, ...]
    problems: tuple[TimeoutConflict, ...]

    def to_json(self) -> Json:
        return {
            "timeouts": [timeout.to_json() for timeout in self.timeouts],
            "problems": [{"text": p.text, "is_error": p.is_error} for p in self.problems],
        }

    def to_text(self) -> str:
        """Return a table, a line for each limit, and then the problems."""
        wide = max(len(timeout.name) for timeout in self.timeouts)
        values = max(len(timeout.text) for timeout in self.timeouts)
        lines = [
            f"{timeout.name:<{wide}}  {timeout.text:>{values}}  {timeout.what} [{timeout.source}]"
            for timeout in self.timeouts
        ]
        words = {True: "error", False: "warning"}
        return "\n".join([*lines, *(f"{words[p.is_error]}: {p.text}" for p in self.problems)])

    def refuse(self) -> tuple[str, ...]:
        """Return the warnings.

        Raises:
            UsageError: The first error, if there is one.
        """
        for problem in self.problems:
            if problem.is_error:
                raise UsageError(problem.text)
        return tuple(problem.text for problem in self.problems)


def timeouts_of(
    request: RunRequest,
    env: Mapping[str, str],
    now_s: float,
    phases: Mapping[str, float] | None = None,
) -> Timeouts:
    """Return the limits of *request*; *phases* has those of evaluation and the like, if any are."""
    plan = request.plan
    timeouts = {
        timeout.name: timeout for timeout in _all_timeouts(request, env, now_s, phases or {})
    }
    problems = [
        problem
        for low, high, why, rule in _order(plan)
        if (problem := _judge(timeouts.get(low), timeouts.get(high), why, rule)) is not None
    ]
    return Timeouts(timeouts=tuple(timeouts.values()), problems=tuple(problems))


def _judge(
    low: Timeout | None, high: Timeout | None, why: str, rule: str
) -> TimeoutConflict | None:
    """Compare two limits; *rule* says what a crossing is: "error", "warning", "if_set".

    With "if_set" it is an error where the user gave both.
    """
    if low is None or high is None or low.limit_s is None or high.limit_s is None:
        return None
    if low.limit_s < high.limit_s:
        return None
    is_error = rule == "error" or (rule == "if_set" and low.is_set and high.is_set)
    text = f"{low.named} must be shorter than {high.named}: {why}"
    return TimeoutConflict(text=text, is_error=is_error)


def _order(plan: LaunchPlan) -> list[tuple[str, str, str, str]]:
    several = [
        ("beat", "suspect", "a heartbeat must have been missed", "error"),
        ("suspect", "fence", "a node is suspected before it stops its own workers", "error"),
        ("fence", "dead", "a node stops its workers before others take its place", "error"),
        ("fence", "store lost", "agents wait for a control store that comes back", "error"),
        ("dead", "hang", "a lost node would look like a hang", "warning"),
        ("dead", "join", "a joining agent would give up before dead agents are detected", "error"),
        ("last call", "join", "the last call is a part of the join timeout", "error"),
        ("health gate", "join", "the check comes before joining", "error"),
        ("preflight", "join", "the test comes before joining", "error"),
    ]
    alone = [
        ("monitor", "hang", "a hang cannot be detected faster than workers are polled", "error"),
        ("hang", "process group", "torch's own timeout may end the workers first", "warning"),
        ("hang", "NCCL heartbeat", "NCCL's monitor would abort the workers first", "if_set"),
        ("hang", "time left", "the job's time limit comes first", "warning"),
    ]
    if plan.endpoint.kind is EndpointKind.PRIVATE:
        return alone
    return [*several, *alone, ("join", "time left", "the job's time limit comes first", "warning")]


def _all_timeouts(
    request: RunRequest, env: Mapping[str, str], now_s: float, phases: Mapping[str, float]
) -> list[Timeout]:
    plan, torch = request.plan, request.torch
    poll = Timeout(
        name="monitor",
        limit_s=min(float(getattr(torch, "monitor_interval", 0.1)), LOOK_S_MAX),
        source=f"--monitor-interval, {LOOK_S_MAX:g} s at most",
        what="an agent polls its workers",
    )
    timeouts = [poll]
    if plan.endpoint.kind is not EndpointKind.PRIVATE:
        timeouts += _agreement(plan, request.given)
    timeouts += [_hang(request), *_torchs(env, plan)]
    timeouts += [
        Timeout(
            name=name,
            limit_s=limit_s,
            source=_DEFAULTS,
            what="a phase without a step may take this long",
        )
        for name, limit_s in sorted(phases.items(), key=lambda item: item[1])
    ]
    timeouts += _joining(plan, request.given)
    left_s = seconds_left(env, now_s)
    if left_s is not None:
        what = "until Slurm's time limit"
        timeouts.append(
            Timeout(name="time left", limit_s=left_s, source="SLURM_JOB_END_TIME", what=what)
        )
    return timeouts


def _agreement(plan: LaunchPlan, given: Mapping[str, str]) -> list[Timeout]:
    default = LaunchPlan(restart_policy=plan.restart_policy, endpoint=plan.endpoint)
    is_set = plan.dead_s != default.dead_s
    source = given.get("rdzv_conf", _CONF) if is_set else _DEFAULTS
    parts = (
        ("suspect", plan.suspect_s, "a silent agent is suspected"),
        ("fence", plan.fence_s, "an agent that cannot reach the control store stops its workers"),
        ("dead", plan.dead_s, "a silent agent counts as dead: the run continues without it"),
    )
    beat = Timeout(name="beat", limit_s=1.0, source="fixed", what="every agent sends a heartbeat")
    closed = Timeout(
        name="closed",
        limit_s=CLOSED_DEAD_S,
        source="fixed",
        what="an agent without a new connection counts as dead; it has stopped its workers by then",
    )
    return [
        beat,
        *([closed] if plan.endpoint.kind is EndpointKind.TCP else []),
        *(
            Timeout(name=name, limit_s=limit_s, source=source, what=what, is_set=is_set)
            for name, limit_s, what in parts
        ),
    ]


def _hang(request: RunRequest) -> Timeout:
    limit_s = request.plan.hang_timeout_s
    source = request.given.get("hang_timeout", _DEFAULTS)
    what = "a run without progress is hung: evidence, then a restart"
    if not limit_s:
        shown = "off" if limit_s == 0 else "learned"
        return Timeout(name="hang", limit_s=None, source=source, what=what, shown=shown)
    is_set = "hang_timeout" in request.given
    return Timeout(name="hang", limit_s=limit_s, source=source, what=what, is_set=is_set)


def _torchs(env: Mapping[str, str], plan: LaunchPlan) -> list[Timeout]:
    gloo = format_seconds(GLOO_TIMEOUT_S)
    is_set = HEARTBEAT in env
    return [
        Timeout(
            name="process group",
            limit_s=NCCL_TIMEOUT_S,
            source=f"torch's default for NCCL; gloo {gloo}; a script may set others",
            what="a collective times out",
        ),
        Timeout(
            name="NCCL heartbeat",
            limit_s=heartbeat_s(env, plan.hang_timeout_s),
            source=f"{HEARTBEAT}={env[HEARTBEAT]}" if is_set else _DEFAULTS,
            what="a rank whose watchdog is stuck is aborted",
            is_set=is_set,
        ),
    ]


def _joining(plan: LaunchPlan, given: Mapping[str, str]) -> list[Timeout]:
    gate = Timeout(
        name="health gate",
        limit_s=plan.gate_deadline_s if plan.gate else None,
        source=given.get("health_gate", _DEFAULTS),
        what="a node is checked before it joins",
        shown="off",
    )
    gates = [gate]
    is_alone = plan.endpoint.kind is EndpointKind.PRIVATE
    if plan.preflight == "quick" or (plan.preflight == "sweep" and not is_alone):
        what = "a node is tested under load before the first start"
        source = given.get("preflight", _DEFAULTS)
        gates.append(
            Timeout(name="preflight", limit_s=plan.preflight_limit_s, source=source, what=what)
        )
    if is_alone:
        return gates
    default = LaunchPlan(restart_policy=plan.restart_policy, endpoint=plan.endpoint)
    parts = (
        ("last call", plan.last_call_s, default.last_call_s, "enough nodes wait for the others"),
        ("first call", plan.first_call_s, default.first_call_s, "the same, before the first start"),
        ("store lost", plan.store_lost_s, default.store_lost_s, "the store is lost: exit 85"),
        ("join", plan.join_timeout_s, default.join_timeout_s, "with too few nodes: wait for more"),
    )
    return [
        *gates,
        *(
            Timeout(
                name=name,
                limit_s=limit_s,
                source=given.get("rdzv_conf", _CONF) if limit_s != usual_s else _DEFAULTS,
                what=what,
                is_set=limit_s != usual_s,
            )
            for name, limit_s, usual_s, what in parts
        ),
    ]
