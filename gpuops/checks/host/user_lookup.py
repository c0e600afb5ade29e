"""Does this node know the job's user, and those that the profile names? They may be in LDAP."""

from dataclasses import dataclass, replace

from gpuops.checks.core.check import (
    Check,
    CheckLimit,
    JudgeContext,
    Probe,
    Subject,
    not_judged,
    skipped,
)
from gpuops.checks.core.profile import Profile
from gpuops.host.users import UserLookup, Users, is_system_user, read_users
from gpuops.model import FailureClass, Finding, Status, UnknownReason
from gpuops.units import format_seconds

_NAME = "user_lookup"
_THRESHOLD = "known to the name service"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``answer_s``: seconds for one lookup."""

    answer_s: CheckLimit


def judge(facts: Users, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each user that is not found, late or slow, else one for all.

    Only those that the profile names fail. The user of a job may be gone, or slurmctld sends the
    user's record with the job (slurm.conf(5): ``nss_slurm``), so that the node needs no directory.
    A directory serves many nodes, so the cause is shared. Users of the system prove nothing.
    """
    subject = Subject(_NAME, context.node, FailureClass.HOST_SERVICE, unit="s", shared_cause=True)
    if not facts.lookups:
        return [skipped(subject, "no job of a user, and the profile names no user to look up")]
    local = [item for item in facts.lookups if item.uid is not None and is_system_user(item.uid)]
    asked = [item for item in facts.lookups if item not in local]
    if not asked:
        names = ", ".join(item.asked for item in local)
        return [skipped(subject, f"system users, which local files know: {names}")]
    findings = [_judged(item, subject, parameters, context) for item in asked]
    bad = [finding for finding in findings if finding.status is not Status.PASS]
    return bad or [max(findings, key=lambda finding: float(finding.value or 0))]


def _judged(
    item: UserLookup, subject: Subject, parameters: Parameters, context: JudgeContext
) -> Finding:
    required = None if item.of_job else context.profile.users
    who = f"the job's user {item.asked}" if item.of_job else f"user {item.asked}"
    status, source = Status.WARN, "nsswitch.conf(5)"
    if required is not None:
        status, source = Status.FAIL, required.source
    about = replace(subject, unit=None)
    if item.silent is not None:
        text = f"the lookup of {who} {item.silent}"
        if required is None:
            return not_judged(_NAME, context.node, text, UnknownReason.TIMEOUT)
        return about.compared(status, "no answer", _THRESHOLD, source, text)
    if item.uid is None:
        text = f"{who} is not known here"
        return about.compared(status, "not found", _THRESHOLD, source, text)
    text = f"{who} was found in {format_seconds(item.elapsed_s)}"
    return subject.below(parameters.answer_s, item.elapsed_s, text, digits=3, unit="s")


def inputs(_parameters: Parameters, profile: Profile) -> tuple[str, ...]:
    """Return the names of the users to look up."""
    return () if profile.users is None else profile.users.value


CHECK = Check(
    name=_NAME,
    about="the job's user and those of the profile are known to the name service (LDAP, SSSD)",
    probe=Probe(
        "users",
        Users,
        lambda machine, budget_s: read_users(
            machine.root, budget_s, machine.inputs, machine.job_uid
        ),
        sources=("getpwuid(3)", "getpwnam(3)"),
    ),
    parameters=Parameters,
    judge=judge,
    inputs=inputs,
    transient=True,
)
