"""Do all power supplies deliver, as the baseboard management controller sees them?"""

from gpuops.checks.core.check import Check, JudgeContext, NoParameters, Probe, Subject, skipped
from gpuops.host.bmc import PowerSupplies, read_power_supplies
from gpuops.model import FailureClass, Finding, Status

_SOURCE = "IPMI 2.0, table 42-3: Power Supply"
_PRESENT = "presence detected"
_FAILING = "predictive failure"
_LOST = ("failure detected", "power supply ac lost", "ac lost or out-of-range")
_TOO_FEW = "non-redundant: insufficient resources"


def judge(facts: PowerSupplies, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return one finding; a supply that is lost or about to fail warns: the others carry the load.

    It fails if the controller says besides that the others do not suffice. Several nodes hang on
    one feed, so the cause is shared. An empty bay, and redundancy alone, are no fault: some
    machines are bought so.
    """
    subject = Subject(
        "power_supplies",
        context.node,
        FailureClass.GPU_THERMAL_POWER,
        unit="supplies",
        shared_cause=True,
    )
    if facts.missing is not None:
        return [skipped(subject, facts.missing)]
    lost = [item for item in facts.sensors if any(state in _LOST for state in item.states)]
    well = [item for item in facts.sensors if _PRESENT in item.states and item not in lost]
    if not lost and not well:
        return [skipped(subject, "the controller shows no power supply")]
    deliver = f"{len(well)} deliver{'s' if len(well) == 1 else ''}"
    if not lost:
        failing = [item.name for item in well if _FAILING in item.states]
        status = Status.WARN if failing else Status.PASS
        text = f"{', '.join(failing)}: {_FAILING}; {deliver}" if failing else f"{deliver}, 0 lost"
        return [subject.compared(status, 0, "= 0 lost", _SOURCE, text)]
    too_few = any(_TOO_FEW in item.states for item in facts.sensors)
    # A node on which all supplies are lost would not answer.
    status = Status.FAIL if too_few and well else Status.WARN
    named = ", ".join(f"{item.name} ({', '.join(item.states)})" for item in lost)
    text = f"lost: {named}; {deliver}" + (", which is too little" if too_few else "")
    return [subject.compared(status, len(lost), "= 0 lost", _SOURCE, text)]


CHECK = Check(
    name="power_supplies",
    about="every power supply delivers, as the BMC sees it",
    probe=Probe(
        "power_supplies",
        PowerSupplies,
        lambda machine, budget_s: read_power_supplies(machine.root, budget_s),
        locks=frozenset({"bmc"}),
        sources=('ipmitool sdr type "Power Supply"',),
    ),
    parameters=NoParameters,
    judge=judge,
)
