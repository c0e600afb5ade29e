"""Do the services run that this node needs, as systemd reports it?"""

from dataclasses import dataclass

from gpuops.checks.core.check import Check, JudgeContext, Probe, Subject, skipped
from gpuops.checks.core.profile import Profile
from gpuops.host.systemd import Unit, Units, read_units
from gpuops.model import FailureClass, Finding, Status, UnknownReason

_RUNNING = frozenset({"active", "reloading", "refreshing"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``units`` that must run in addition to the profile's, and the source."""

    units: tuple[str, ...] = ()
    source: str = "suite"


def judge(facts: Units, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each unit that does not run, else one for all.

    ``failed`` and ``inactive`` fail; ``activating`` warns, as it is temporary. A unit that is not
    installed is unknown: a wrong name in a profile must not drain every node.
    """
    subject = Subject("services", context.node, FailureClass.HOST_SERVICE)
    expected = _expected_units(parameters, context.profile)
    if not expected:
        return [skipped(subject, "neither the profile nor the suite names a unit")]
    if not facts.systemd:
        return [skipped(subject, "systemd does not run here")]
    units = {unit.name: unit for unit in facts.units}
    findings = [
        _judged(name, units.get(name), source, subject) for name, source in expected.items()
    ]
    bad = [finding for finding in findings if finding.status is not Status.PASS]
    running = f"running: {', '.join(expected)}"
    source = "suite and profile"
    return bad or [subject.compared(Status.PASS, None, "active", source, running)]


def _expected_units(parameters: Parameters, profile: Profile) -> dict[str, str]:
    """Return the units by name with their source."""
    expected = dict.fromkeys(parameters.units, parameters.source)
    if profile.services is not None:
        expected |= dict.fromkeys(profile.services.value, profile.services.source)
    return expected


def _judged(name: str, unit: Unit | None, source: str, subject: Subject) -> Finding:
    if unit is None or unit.load == "not-found":
        text = f"{name} is not installed"
        reason = UnknownReason.MISSING_TOOL
        return subject.compared(Status.UNKNOWN, name, "active", source, text, reason)
    state = f"{unit.active} ({unit.sub})" if unit.sub else unit.active
    text = f"{name} is {state}" + (f", result {unit.result}" if unit.result else "")
    if unit.restarts:
        text += f", restarted {unit.restarts} times"
    status = Status.WARN
    if unit.active in _RUNNING:
        status = Status.PASS
    elif unit.active in {"failed", "inactive"} and unit.load != "masked":
        status = Status.FAIL
    else:
        text += f", {unit.load}"
    return subject.compared(status, name, "active", source, text)


def inputs(parameters: Parameters, profile: Profile) -> tuple[str, ...]:
    """Return the names of the units to read."""
    return tuple(_expected_units(parameters, profile))


CHECK = Check(
    name="services",
    about="the systemd units of the profile and the suite are running",
    probe=Probe(
        "services",
        Units,
        lambda machine, budget_s: read_units(machine.root, budget_s, machine.inputs),
        sources=("systemctl show",),
    ),
    parameters=Parameters,
    judge=judge,
    inputs=inputs,
)
