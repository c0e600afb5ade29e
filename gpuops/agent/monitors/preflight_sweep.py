"""``--preflight=sweep``: the nodes of a run test each other in pairs before its first generation.

The first agent that asks leads: it writes into the run's control store where its child, a
`gpuops sweep`, serves the sweep, and the children of the others take part there. A sweep takes who
comes while the leader waits; whoever comes after its end joins the run untested.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpuops.agent.elastic.workers import free_port
from gpuops.agent.launch.job_token import TOKEN
from gpuops.agent.launch.plan import EndpointKind, LaunchPlan
from gpuops.agent.monitors.preflight import (
    BurninPreflight,
    PreflightCheck,
    PreflightGate,
    PreflightPlan,
    PreflightResult,
    judge_burnin,
)
from gpuops.control.client import ControlClient
from gpuops.control.store import ControlStoreError
from gpuops.errors import EXIT_OK
from gpuops.host.process.command import CommandEnd, run_bounded
from gpuops.log import log_notice

_OVER = b"over"
_PREFIX = "gpuops: "


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan(PreflightPlan):
    """How this node takes part in the sweep, or leads it at *place* (``HOST:PORT``).

    A leader waits *join_s* for *nodes_max* nodes. *token*: of the run.
    """

    control: ControlClient
    place: str
    token: str
    nodes_max: int
    join_s: float
    what: str = "the sweep"

    def run(self, is_over: Callable[[], bool]) -> CommandEnd | None:
        """Take part; see `PreflightPlan.run`.

        Raises:
            ControlStoreError: The run's control store cannot be reached, or the sweep is over.
        """
        store, key = self.control.store, f"{self.control.keys.prefix}/sweep"
        leads, entry = store.compare_and_set(key, self.place.encode(), version=0)
        if entry.value == _OVER:
            raise ControlStoreError("it was over when this node came; the node joins")
        env = {**self.env, TOKEN: self.token}
        try:
            return run_bounded(
                self.words(entry.value.decode(), leads=leads), env, self.deadline_s, is_over
            )
        finally:
            if leads:
                store.put(key, _OVER)

    def words(self, place: str, *, leads: bool) -> list[str]:
        """Return the command line of a node in the sweep at *place*."""
        lead = ["--lead", str(self.nodes_max), "--join-limit", f"{self.join_s:g}"] if leads else []
        key, name = f"{self.control.keys.prefix}-sweep", self.control.me.node
        join = ("--join", place, "--run-key", key, "--name", name)
        return [*self.command, "sweep", *join, *lead, "--no-check", "--json"]

    def judge(self, end: CommandEnd) -> PreflightResult:
        """Return what the *end* of the command means, with all that it said."""
        result = judge_burnin(end, self.what)
        if not result.passed or end.exit_code != EXIT_OK:
            return result
        lines = end.errors.decode("utf-8", errors="replace").splitlines()
        notes = [line.removeprefix(_PREFIX) for line in lines] + [result.reason]
        reason = "; ".join(filter(None, notes)) or "it says nothing of this node"
        return replace(result, reason=f"{self.what}: {reason}")


def sweep_gate(
    gate: PreflightGate,
    plan: LaunchPlan,
    env: Mapping[str, str],
    address: str,
    config_file: Path | None,
    control: ControlClient,
) -> PreflightGate:
    """Return *gate* with a sweep behind it; *address*: where the other nodes reach this one."""
    if plan.endpoint.kind is EndpointKind.PRIVATE:
        log_notice("--preflight=sweep: a run on one node has no pairs of nodes; nothing is tested")
        return gate
    config = {} if config_file is None else {"GPUOPS_CONFIG": str(config_file)}

    def sweep() -> PreflightCheck:
        part = SweepPlan(
            env={**env, **config},
            deadline_s=plan.preflight_limit_s,
            control=control,
            place=f"{address}:{free_port()}",
            token=plan.endpoint.token,
            nodes_max=plan.gather_limits.nodes_max,
            join_s=plan.first_call_s,
        )
        return PreflightCheck(part)

    return BurninPreflight(gate, sweep, log_notice, "the nodes of this run are swept in pairs")
