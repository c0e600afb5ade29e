"""What does NVIDIA's own diagnostic report, for every entity and with every error?"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpuops.checks.core.check import (
    Check,
    JudgeContext,
    Probe,
    ProbeContext,
    Subject,
    not_judged,
    skipped,
)
from gpuops.checks.core.profile import Profile
from gpuops.host.dcgm import DcgmDiagnostic, DcgmError, DcgmResult, read_dcgm
from gpuops.model import FailureClass, Finding, Status, UnknownReason

# DCGM documentation, Diagnostic Errors: the severities, and what each asks for.
SEVERITIES = {
    0: "none",
    1: "monitor",
    2: "isolate",
    3: "unknown",
    4: "triage",
    5: "config",
    6: "reset",
}
_ISOLATE, _RESET = 2, 6
# dcgmi exits with the value of dcgmReturn_t: DCGM_ST_NVVS_ERROR (-30) where a test failed,
# DCGM_ST_NVVS_ISOLATE_ERROR (-51) where an error asks for isolation.
_TEST_FAILED, _ISOLATE_ADVISED = 226, 205
_SOURCE = "DCGM documentation, Diagnostic Errors"
# Tests of this category are about the installation: persistence mode, permissions, libraries.
_DEPLOYMENT = "deployment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``level`` of ``dcgmi diag -r``: 1 takes seconds, 2 two minutes, and from 2 on GPUs are used.

    ``ignore``: error codes that do not count.
    """

    level: int = 1
    ignore: tuple[int, ...] = ()


def judge(facts: DcgmDiagnostic, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each error and each failed test without one, else one for all.

    The severities ``isolate`` and ``reset`` fail; ``config`` (persistence mode is off), ``monitor``
    and the others warn. An older DCGM reports no severity: then a failed test fails, except those
    of the installation. Errors count even in tests that DCGM reports as passed.
    """
    subject = Subject("dcgm_diag", context.node, FailureClass.GPU_DIAGNOSTIC)
    if not facts.installed:
        return [skipped(subject, "dcgmi is not installed")]
    if not any(result.status for result in facts.results):
        why = facts.error or f"no test ran (exit code {facts.exit_code})"
        return [not_judged("dcgm_diag", context.node, why, UnknownReason.NOT_SUPPORTED)]
    findings: list[Finding] = []
    for result in facts.results:
        findings += _judge_result(result, parameters, context)
    findings = list(dict.fromkeys(findings))
    if facts.error is not None:
        findings.append(not_judged("dcgm_diag", context.node, facts.error, UnknownReason.CRASH))
    return findings or [_no_errors(facts, parameters, context)]


def _judge_result(
    result: DcgmResult, parameters: Parameters, context: JudgeContext
) -> Iterable[Finding]:
    errors = [error for error in result.errors if error.code not in parameters.ignore]
    for error in errors:
        status = _status(result, error)
        yield _finding(context, status, result, error)
    if not result.errors and result.status.startswith(("fail", "warn")):
        yield _finding(context, _status(result, None), result, None)


def _status(result: DcgmResult, error: DcgmError | None) -> Status:
    if error is not None and error.severity is not None:
        return Status.FAIL if error.severity in {_ISOLATE, _RESET} else Status.WARN
    failed = result.status.startswith("fail")
    return Status.FAIL if failed and result.category.lower() != _DEPLOYMENT else Status.WARN


def _finding(
    context: JudgeContext, status: Status, result: DcgmResult, error: DcgmError | None
) -> Finding:
    subject = Subject(
        "dcgm_diag", context.node, FailureClass.GPU_DIAGNOSTIC, hardware_reported=True
    )
    text = f"{result.entity}, test {result.test}: {(error and error.text) or 'no reason given'}"
    if error is None or error.code is None:
        return subject.compared(status, result.status, "pass", _SOURCE, text)
    severity = SEVERITIES.get(error.severity or 0, str(error.severity))
    text += f" [error {error.code}, {severity}]"
    about = replace(subject, unit="DCGM error")
    return about.compared(status, error.code, "pass", _SOURCE, text)


def _no_errors(facts: DcgmDiagnostic, parameters: Parameters, context: JudgeContext) -> Finding:
    """Return the finding if no result has an error: dcgmi's exit code decides."""
    passed = [result for result in facts.results if result.status.startswith("pass")]
    skipped_ones = [result for result in facts.results if result.status.startswith("skip")]
    tests = len({result.test for result in passed})
    version = f" (DCGM {facts.version})" if facts.version else ""
    text = f"level {parameters.level}{version}: {tests} tests passed, {len(skipped_ones)} skipped"
    if not passed:
        text += ": nothing was tested"
        return not_judged("dcgm_diag", context.node, text, UnknownReason.NOT_SUPPORTED)
    if facts.exit_code == 0 or parameters.ignore:
        status = Status.PASS
    else:
        status = Status.FAIL if facts.exit_code == _ISOLATE_ADVISED else Status.WARN
        what = {_TEST_FAILED: ", a test failed", _ISOLATE_ADVISED: ", isolation is advised"}
        text += f", yet it exited with {facts.exit_code}{what.get(facts.exit_code or 0, '')}"
    subject = Subject("dcgm_diag", context.node, FailureClass.GPU_DIAGNOSTIC, "exit code")
    return subject.compared(status, facts.exit_code, "= 0", "DCGM, dcgmReturn_t", text)


def inputs(parameters: Parameters, _profile: Profile) -> tuple[str, ...]:
    """Return the level to run."""
    return (str(parameters.level),)


def _read(machine: ProbeContext, budget_s: float) -> DcgmDiagnostic:
    return read_dcgm(machine.root, budget_s, machine.inputs[0] if machine.inputs else "1")


CHECK = Check(
    name="dcgm_diag",
    about="NVIDIA's DCGM diagnostic, where installed: every entity, every error",
    # Exclusive use of the GPUs: its own processes must not look like leftovers.
    probe=Probe(
        "dcgm", DcgmDiagnostic, _read, locks=frozenset({"gpus"}), sources=("dcgmi diag -j",)
    ),
    parameters=Parameters,
    judge=judge,
    inputs=inputs,
)
