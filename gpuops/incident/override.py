"""A site's plug-in that may override the decision: it runs in its own process, at most 5 s.

The plug-in is a function that takes one dictionary (``reports``, ``cluster``, ``history``,
``now_s``, ``decision``: their JSON forms) and returns None, or a dictionary with any of
``verdict``, ``reason``, ``exclude`` (reasons by node), ``exclude_checkpoint``, ``backoff_s``.
If it fails, gpuops' decision stands and a note says why.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuops.errors import EXIT_DO_NOT_REQUEUE, EXIT_FAIL, EXIT_REQUEUE
from gpuops.host.process.command import module_command
from gpuops.host.process.run_with_deadline import ProgramAnswer, run_with_deadline
from gpuops.incident import budget, fields
from gpuops.incident.decision import (
    ClusterState,
    NodeReport,
    PastFailure,
    RestartDecision,
    RunAction,
)
from gpuops.scrub import scrub

DEADLINE_S = 5.0
RULE = "site"
BACKOFF_MAX_S = 600.0
_KEYS = frozenset({"verdict", "reason", "exclude", "exclude_checkpoint", "backoff_s"})
_EXIT_CODES = {
    RunAction.RESTART: None,
    RunAction.REQUEUE: EXIT_REQUEUE,
    RunAction.FAIL: EXIT_FAIL,
    RunAction.STOP: EXIT_DO_NOT_REQUEUE,
}
_NOTE_CHARS = 300


@dataclass(frozen=True, slots=True)
class SiteDecision:
    """The final decision, and a note on the site's; "" if the site left it unchanged."""

    decision: RestartDecision
    note: str = ""


def apply_site_decision(  # noqa: PLR0913  the decision, its inputs and the plug-in
    own_decision: RestartDecision,
    *,
    plugin: str,
    reports: Sequence[NodeReport],
    cluster: ClusterState,
    history: Sequence[PastFailure],
    now_s: float,
    env: Mapping[str, str],
    deadline_s: float = DEADLINE_S,
) -> SiteDecision:
    """Return the decision after calling the site's *plugin*; blocks for at most *deadline_s*.

    One second more if its process is stuck inside the kernel. Errors of the plug-in do not raise.

    Args:
        own_decision: Stands if the plug-in returns None or fails.
        plugin: ``module:function``, or the path of a file, with ``:function`` if not ``decide``.
        reports: As for `gpuops.incident.decide.decide`.
        cluster: Likewise.
        history: Likewise.
        now_s: Likewise.
        env: The environment of its process.
        deadline_s: How long it may take.
    """
    question = {
        "reports": [report.to_json() for report in reports],
        "cluster": cluster.to_json(),
        "history": [past.to_json() for past in history],
        "now_s": now_s,
        "decision": own_decision.to_json(),
    }
    try:
        process_result = run_with_deadline(
            _command(plugin), _encode(question), _with_package_path(env), deadline_s=deadline_s
        )
        answer = _decode(process_result, deadline_s)
        decision = merge_answer(answer, own_decision, cluster)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        text = scrub(_printable(str(error)))[:_NOTE_CHARS]
        return SiteDecision(own_decision, f"the site's decision {plugin} was ignored: {text}")
    if decision is own_decision:
        return SiteDecision(own_decision)
    return SiteDecision(decision, f"the site's decision {plugin} replaces {own_decision.rule}")


def merge_answer(
    answer: object, own_decision: RestartDecision, cluster: ClusterState
) -> RestartDecision:
    """Return *own_decision* with the changes of *answer*; *own_decision* itself without any.

    Raises:
        ValueError, TypeError: It is malformed, names an unknown node, or restarts with too few
            nodes.
    """
    if answer is None or answer == {}:
        return own_decision
    if not isinstance(answer, Mapping):
        raise TypeError(f"it answered {type(answer).__name__}, not an object")
    if unknown := sorted(map(str, answer.keys() - _KEYS)):
        raise ValueError(f"it answered unknown keys: {', '.join(unknown)[:100]}")
    action = RunAction(answer.get("verdict", own_decision.action))
    exclude = (
        fields.reasons(answer["exclude"]) if "exclude" in answer else dict(own_decision.exclude)
    )
    _check(action, exclude, cluster)
    checkpoint = fields.number(answer.get("exclude_checkpoint", own_decision.exclude_checkpoint))
    backoff_s = fields.seconds(answer.get("backoff_s", own_decision.backoff_s))
    if not 0 <= backoff_s <= BACKOFF_MAX_S:
        raise ValueError(f"a back-off of {backoff_s:g} s is not within 0 to {BACKOFF_MAX_S:g} s")
    site_reason = _printable(
        fields.text(answer.get("reason"), fields.REASON_CHARS_MAX) or "no reason"
    )
    is_same_action = action is own_decision.action
    return replace(
        own_decision,
        action=action,
        rule=RULE,
        reason=(
            f"{own_decision.reason} (our rule: {own_decision.rule}); the site decides "
            f"otherwise: {scrub(site_reason)}"
        ),
        exclude=exclude,
        exclude_checkpoint=checkpoint,
        backoff_s=backoff_s,
        exit_code=own_decision.exit_code if is_same_action else _EXIT_CODES[action],
        failure=replace(own_decision.failure, rule=RULE, excluded_checkpoint=checkpoint),
    )


def _check(action: RunAction, exclude: Mapping[str, str], cluster: ClusterState) -> None:
    unknown_nodes = sorted(set(exclude) - {*cluster.members, *cluster.live})
    if unknown_nodes:
        raise ValueError(f"it excludes unknown nodes: {', '.join(unknown_nodes[:8])}")
    if action is RunAction.RESTART and budget.trainable_nodes(cluster, exclude) == 0:
        raise ValueError("it restarts with fewer nodes than the run needs")


def _command(plugin: str) -> tuple[str, ...]:
    return module_command("gpuops.incident.override_child", plugin)


def _encode(question: Mapping[str, Any]) -> bytes:
    return json.dumps(question).encode()


def _with_package_path(env: Mapping[str, str]) -> dict[str, str]:
    """Return *env* with this package on PYTHONPATH: a checkout may not be installed."""
    root = str(Path(__file__).parents[2])
    python_path = env.get("PYTHONPATH")
    return {**env, "PYTHONPATH": f"{python_path}:{root}" if python_path else root}


def _decode(process_result: ProgramAnswer, deadline_s: float) -> object:
    if process_result.exit_code is None:
        raise ValueError(f"it did not answer within {deadline_s:g} s")
    if process_result.exit_code != 0:
        lines = process_result.errors.decode(errors="replace").strip().splitlines()
        raise ValueError(
            f"it ended with {process_result.exit_code}: {lines[-1] if lines else 'no message'}"
        )
    if process_result.cut:
        raise ValueError("it answered more than is read")
    return json.loads(process_result.output)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
