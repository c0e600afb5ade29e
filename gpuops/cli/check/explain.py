"""``gpuops check --explain``: what a check reads, its limits, and what it can report."""

import json
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpuops.checks import NAMES, is_check
from gpuops.checks.core.explain import Explanation, catalogued_for, explain
from gpuops.checks.core.profile import NO_PROFILE, Expectation, Profile
from gpuops.checks.core.suite import Suite, unknown_name
from gpuops.cli.check.text import parameters
from gpuops.errors import UsageError
from gpuops.gate.node_state import load_state
from gpuops.gate.session import CheckRequest, ProfileSelector, make_plan
from gpuops.host.process.abandoned import abandoned
from gpuops.host.records import to_json
from gpuops.incident.runbook import Runbook, load_runbooks
from gpuops.model import FailureClass, Json, envelope
from gpuops.resources import data_dir

_WIDTH = 96
Runbooks = Mapping[FailureClass, Runbook]


def explain_check(request: CheckRequest, name: str, *, as_json: bool) -> str:
    """Explain the check called *name*, as *request* would run it.

    A check that the suite does not run is shown as the suite ``full`` has it.

    Raises:
        UsageError: There is no such check.
    """
    if not is_check(name):
        raise UsageError(unknown_name("check", name, NAMES))
    plan = make_plan(request)
    if name not in plan.suite.names:
        plan = make_plan(replace(request, suite="full", only=()))
    (planned,) = plan.suite.only((name,)).planned[:1]
    stored = load_state(request.state_dir, request.root, request.uid, abandoned())
    selector = plan.selector(stored.state.profile)
    profile = selector.first()
    is_given = request.gpus_expected is not None and planned.check.name == "gpu_count"
    settings = (
        dict.fromkeys(("expected", "source"), request.gpus_expected_origin) if is_given else {}
    )
    classes = catalogued_for(planned.check.name, plan.machine)
    explanation = explain(planned, plan.suite.name, plan.suites, profile, settings, classes)
    why = _profile_reason(selector, profile)
    if as_json:
        return explanation_json(explanation, plan.suite, profile, why)
    runbooks = load_runbooks(data_dir("runbooks"))
    return explanation_text(explanation, plan.suite, profile, why, runbooks)


def _profile_reason(selector: ProfileSelector, profile: Profile) -> str:
    if selector.named is not None:
        return "check.profile names it"
    if profile is NO_PROFILE:
        return "none is known before a check has read this node's GPUs"
    if profile.name == selector.remembered:
        return "it last matched this node's GPUs"
    return "it matches this node's name"


def explanation_json(explanation: Explanation, suite: Suite, profile: Profile, why: str) -> str:
    """Return *explanation* as one JSON object; *why* says how *profile* was found."""
    check = explanation.planned.check
    values = to_json(explanation.planned.parameters)
    body: Json = {
        "name": check.name,
        "about": check.about,
        "suite": suite.name,
        "timeout_s": explanation.planned.timeout_s,
        "look": check.probe.name,
        "locks": sorted(check.probe.locks),
        "reads": list(explanation.sources),
        "judges": explanation.doc,
        "limits": [
            {"name": name, "value": value, "from": _limit_origin(explanation, name)}
            for name, value in values.items()
        ],
        "profile": {"name": profile.name, "because": why},
        "expectations": to_json(explanation.expectations),
        "failure_classes": [item.value for item in explanation.failure_classes],
    }
    return json.dumps(envelope("gpuops.check-explanation/1", body), indent=2)


def explanation_text(
    explanation: Explanation, suite: Suite, profile: Profile, why: str, runbooks: Runbooks
) -> str:
    """Return *explanation* as a page; *why* says how *profile* was found."""
    check, timeout_s = explanation.planned.check, explanation.planned.timeout_s
    sources = ", ".join(explanation.sources) or "see its module"
    lines = [
        f"{check.name}: {check.about}",
        "",
        f"suite     {suite.name}, up to {timeout_s:g} s of {suite.deadline_s:g} s",
        f"reads     {sources} (probe {check.probe.name!r})",
    ]
    if check.probe.locks:
        lines.append(f"locks     {', '.join(sorted(check.probe.locks))}")
    lines.append("")
    for paragraph in explanation.doc.split("\n\n"):
        lines += textwrap.wrap(" ".join(paragraph.split()), _WIDTH)
    lines += ["", "limits:", *_limits(explanation)]
    if explanation.expectations:
        lines += ["", f"profile {profile.name} ({why}):", *_expectations(explanation)]
    if explanation.failure_classes:
        lines += ["", "can fail or warn as:"]
        lines += [_failure_class_line(item, runbooks) for item in explanation.failure_classes]
    return "\n".join(lines)


def _limits(explanation: Explanation) -> list[str]:
    texts = parameters(explanation.planned.parameters)
    if not texts:
        return ["  none that a suite can change"]
    return [f"  {text}  ({_limit_origin(explanation, name)})" for name, text in texts.items()]


def _limit_origin(explanation: Explanation, name: str) -> str:
    return explanation.origins.get(name, "the check's own default")


def _expectations(explanation: Explanation) -> list[str]:
    return [
        f"  {name}: {_expectation_text(item)}" for name, item in explanation.expectations.items()
    ]


def _expectation_text(item: Expectation[Any] | None) -> str:
    if item is None:
        return "not set, so not judged"
    if isinstance(item.value, tuple):
        value = " or ".join(item.value)
    elif isinstance(item.value, bool):
        value = "on" if item.value else "off"
    else:
        value = f"{item.value:g}"
    return f"{value}  [{item.source}]"


def _failure_class_line(item: FailureClass, runbooks: Runbooks) -> str:
    page = runbooks.get(item)
    title = f": {page.title}" if page is not None else ""
    return f"  {item.value}{title}  (gpuops runbook {item.value})"
