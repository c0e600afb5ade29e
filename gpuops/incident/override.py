"""A site's own decision, which may overrule ours: asked in a process of its own, within 5 s.

The plug-in is a function that takes one dictionary (``reports``, ``cluster``, ``history``,
``now_s``, ``decision``: their JSON forms) and returns None, or a dictionary with any of
``verdict``, ``reason``, ``exclude`` (reasons by node), ``exclude_checkpoint``, ``backoff_s``.
Whatever is wrong with it, our decision stands and a note says what it was.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuops.errors import EXIT_DO_NOT_REQUEUE, EXIT_FAIL, EXIT_REQUEUE
from gpuops.host.answering import Answered, answer_of
from gpuops.incident import budget, fields
from gpuops.incident.decision import Cluster, Decision, NodeReport, PastFailure, Verdict
from gpuops.scrub import scrub

DEADLINE_S = 5.0
RULE = "site"
BACKOFF_MAX_S = 600.0
_KEYS = frozenset({"verdict", "reason", "exclude", "exclude_checkpoint", "backoff_s"})
_EXIT_CODES = {
    Verdict.RESTART: None,
    Verdict.REQUEUE: EXIT_REQUEUE,
    Verdict.FAIL: EXIT_FAIL,
    Verdict.STOP: EXIT_DO_NOT_REQUEUE,
}
_NOTE_CHARS = 300


@dataclass(frozen=True, slots=True)
class Overruled:
    """The decision that stands, and a note on what became of the site's; "" where it had none."""

    decision: Decision
    note: str = ""


def overruled(  # noqa: PLR0913  what was decided, on what, and whom to ask
    ours: Decision,
    *,
    plugin: str,
    reports: Sequence[NodeReport],
    cluster: Cluster,
    history: Sequence[PastFailure],
    now_s: float,
    env: Mapping[str, str],
    deadline_s: float = DEADLINE_S,
) -> Overruled:
    """Return the decision after the site's *plugin* was asked; blocks for at most *deadline_s*.

    A second more where its process is stuck inside the kernel. Never raises for the plug-in.

    Args:
        ours: What stands if the plug-in says nothing or cannot be asked.
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
        "decision": ours.to_json(),
    }
    try:
        said = answer_of(_command(plugin), _packed(question), _with_us(env), deadline_s=deadline_s)
        answer = _read(said, deadline_s)
        decision = adopted(answer, ours, cluster)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        text = scrub(_printable(str(error)))[:_NOTE_CHARS]
        return Overruled(ours, f"the site's decision {plugin} was not taken: {text}")
    if decision is ours:
        return Overruled(ours)
    return Overruled(decision, f"the site's decision {plugin} replaces {ours.rule}")


def adopted(answer: object, ours: Decision, cluster: Cluster) -> Decision:
    """Return *ours* with what *answer* changes; *ours* itself where that is nothing.

    Raises:
        ValueError, TypeError: It is not an answer, names a node that is not there, or wants a
            restart with too few nodes.
    """
    if answer is None or answer == {}:
        return ours
    if not isinstance(answer, Mapping):
        raise TypeError(f"it answered {type(answer).__name__}, not an object")
    if unknown := sorted(map(str, answer.keys() - _KEYS)):
        raise ValueError(f"it answered unknown keys: {', '.join(unknown)[:100]}")
    verdict = Verdict(answer.get("verdict", ours.verdict))
    exclude = fields.reasons(answer["exclude"]) if "exclude" in answer else dict(ours.exclude)
    _check(verdict, exclude, cluster)
    checkpoint = fields.number(answer.get("exclude_checkpoint", ours.exclude_checkpoint))
    backoff_s = fields.seconds(answer.get("backoff_s", ours.backoff_s))
    if not 0 <= backoff_s <= BACKOFF_MAX_S:
        raise ValueError(f"a back-off of {backoff_s:g} s is not within 0 to {BACKOFF_MAX_S:g} s")
    told = _printable(fields.text(answer.get("reason"), fields.REASON_CHARS_MAX) or "no reason")
    same = verdict is ours.verdict
    return replace(
        ours,
        verdict=verdict,
        rule=RULE,
        reason=f"{ours.reason} (our rule: {ours.rule}); the site decides otherwise: {scrub(told)}",
        exclude=exclude,
        exclude_checkpoint=checkpoint,
        backoff_s=backoff_s,
        exit_code=ours.exit_code if same else _EXIT_CODES[verdict],
        failure=replace(ours.failure, rule=RULE, excluded_checkpoint=checkpoint),
    )


def _check(verdict: Verdict, exclude: Mapping[str, str], cluster: Cluster) -> None:
    strangers = sorted(set(exclude) - {*cluster.members, *cluster.live})
    if strangers:
        raise ValueError(f"it excludes nodes that are not there: {', '.join(strangers[:8])}")
    if verdict is Verdict.RESTART and budget.seats(cluster, exclude) == 0:
        raise ValueError("it wants a restart with fewer nodes than the run needs")


def _command(plugin: str) -> list[str]:
    return [sys.executable, "-m", "gpuops.incident.override_child", plugin]


def _packed(question: Mapping[str, Any]) -> bytes:
    return json.dumps(question).encode()


def _with_us(env: Mapping[str, str]) -> dict[str, str]:
    """Return *env* with this package on the path: in a checkout it may be on none."""
    root = str(Path(__file__).parents[2])
    before = env.get("PYTHONPATH")
    return {**env, "PYTHONPATH": f"{before}:{root}" if before else root}


def _read(said: Answered, deadline_s: float) -> object:
    if said.exit_code is None:
        raise ValueError(f"it did not answer within {deadline_s:g} s")
    if said.exit_code != 0:
        lines = said.errors.decode(errors="replace").strip().splitlines()
        raise ValueError(f"it ended with {said.exit_code}: {lines[-1] if lines else 'no word'}")
    if said.cut:
        raise ValueError("it answered more than is read")
    return json.loads(said.output)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
