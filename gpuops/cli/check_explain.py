"""``gpuops check --explain``: what a check reads, what it is held against, what it can mean."""

import json
import textwrap
from collections.abc import Mapping
from dataclasses import replace

from gpuops.checks import NAMES, is_check
from gpuops.checks.explain import Explanation, catalogued_for, explain
from gpuops.checks.profile import NO_PROFILE, Flag, Number, Profile, Words
from gpuops.checks.suites import Suite, unknown_name
from gpuops.cli.check_text import parameters
from gpuops.errors import UsageError
from gpuops.gate.choice import Choice
from gpuops.gate.session import Request, plan_of
from gpuops.gate.state_file import recall
from gpuops.host.abandoned import abandoned
from gpuops.host.records import to_json
from gpuops.incident.runbook import Runbook, load_runbooks
from gpuops.model import FailureClass, Json, envelope
from gpuops.resources import data_dir

_WIDTH = 96
Runbooks = Mapping[FailureClass, Runbook]


def explained(request: Request, name: str, *, as_json: bool) -> str:
    """Return what there is to know of the check called *name*, as *request* would run it.

    A check that the suite does not run is shown as the suite ``full`` has it.

    Raises:
        UsageError: There is no such check.
    """
    if not is_check(name):
        raise UsageError(unknown_name("check", name, NAMES))
    plan = plan_of(request)
    if name not in plan.suite.names:
        plan = plan_of(replace(request, suite="full", only=()))
    (planned,) = plan.suite.only((name,)).planned[:1]
    known = recall(request.state_dir, request.root, request.uid, abandoned())
    choice = plan.choice(known.state.profile)
    profile = choice.first()
    given = request.gpus_expected is not None and planned.check.name == "gpu_count"
    settings = dict.fromkeys(("expected", "source"), request.gpus_expected_origin) if given else {}
    classes = catalogued_for(planned.check.name, plan.machine)
    it = explain(planned, plan.suite.name, plan.suites, profile, settings, classes)
    if as_json:
        return explanation_json(it, plan.suite, profile, _because(choice, profile))
    runbooks = load_runbooks(data_dir("runbooks"))
    return explanation_text(it, plan.suite, profile, _because(choice, profile), runbooks)


def _because(choice: Choice, profile: Profile) -> str:
    if choice.named is not None:
        return "check.profile names it"
    if profile is NO_PROFILE:
        return "none is known before a check has seen this node's GPUs"
    if profile.name == choice.remembered:
        return "this node's GPUs last spoke for it"
    return "by this node's name"


def explanation_json(it: Explanation, suite: Suite, profile: Profile, why: str) -> str:
    """Return *it* as one JSON object; *why* says how *profile* was found."""
    check = it.planned.check
    values = to_json(it.planned.parameters)
    body: Json = {
        "name": check.name,
        "about": check.about,
        "suite": suite.name,
        "timeout_s": it.planned.timeout_s,
        "look": check.look.name,
        "locks": sorted(check.look.locks),
        "reads": list(it.sources),
        "judges": it.doc,
        "limits": [
            {"name": name, "value": value, "from": _origin(it, name)}
            for name, value in values.items()
        ],
        "profile": {"name": profile.name, "because": why},
        "expectations": to_json(it.expectations),
        "failure_classes": [item.value for item in it.failure_classes],
    }
    return json.dumps(envelope("gpuops.check-explanation/1", body), indent=2)


def explanation_text(
    it: Explanation, suite: Suite, profile: Profile, why: str, runbooks: Runbooks
) -> str:
    """Return *it* as a page; *why* says how *profile* was found."""
    check = it.planned.check
    lines = [
        f"{check.name}: {check.about}",
        "",
        f"suite     {suite.name}, up to {it.planned.timeout_s:g} s of {suite.deadline_s:g} s",
        f"reads     {', '.join(it.sources) or 'what its module says'} (look {check.look.name!r})",
    ]
    if check.look.locks:
        lines.append(f"alone on  {', '.join(sorted(check.look.locks))}")
    lines.append("")
    for paragraph in it.doc.split("\n\n"):
        lines += textwrap.wrap(" ".join(paragraph.split()), _WIDTH)
    lines += ["", "limits:", *_limits(it)]
    if it.expectations:
        lines += ["", f"profile {profile.name} ({why}):", *_expectations(it)]
    if it.failure_classes:
        lines += ["", "can fail or warn as:"]
        lines += [_class(item, runbooks) for item in it.failure_classes]
    return "\n".join(lines)


def _limits(it: Explanation) -> list[str]:
    told = parameters(it.planned.parameters)
    if not told:
        return ["  none that a suite can set"]
    return [f"  {text}  ({_origin(it, name)})" for name, text in told.items()]


def _origin(it: Explanation, name: str) -> str:
    return it.origins.get(name, "the check's own default")


def _expectations(it: Explanation) -> list[str]:
    return [f"  {name}: {_expected(item)}" for name, item in it.expectations.items()]


def _expected(item: Number | Words | Flag | None) -> str:
    if item is None:
        return "not said, so not judged by it"
    if isinstance(item, Words):
        value = " or ".join(item.value)
    elif isinstance(item, Flag):
        value = "on" if item.value else "off"
    else:
        value = f"{item.value:g}"
    return f"{value}  [{item.source}]"


def _class(item: FailureClass, runbooks: Runbooks) -> str:
    page = runbooks.get(item)
    title = f": {page.title}" if page is not None else ""
    return f"  {item.value}{title}  (gpuops runbook {item.value})"
