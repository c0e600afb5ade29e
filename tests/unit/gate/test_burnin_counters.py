"""What two readings of the error counters say of the test between them."""

from gpuops.checks.core.runner import CheckRun
from gpuops.gate.burnin_counters import new_errors
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status, UnknownReason

GPU = Entity(EntityKind.GPU, "GPU-1")


def reading(*findings: Finding) -> CheckRun:
    return CheckRun(suite="default", node="n1", start_us=0, end_us=1, findings=findings)


def judged(status: Status, value: float = 0) -> Finding:
    return Finding(
        check="gpu_ecc",
        entity=GPU,
        status=status,
        value=value,
        message=f"{value:g} errors",
        failure_class=FailureClass.GPU_ECC_UNCORRECTABLE,
        unknown_reason=UnknownReason.TIMEOUT if status is Status.UNKNOWN else None,
    )


def test_an_error_that_was_there_before_is_not_the_tests() -> None:
    assert new_errors(reading(judged(Status.WARN, 3)), reading(judged(Status.WARN, 3)), "hbm") == []


def test_a_warning_that_grew_during_a_test_fails_it() -> None:
    (found,) = new_errors(reading(judged(Status.WARN, 3)), reading(judged(Status.WARN, 4)), "hbm")
    assert found.status is Status.FAIL
    assert found.message == "4 errors; new during the burn-in test hbm"


def test_counters_that_cannot_be_read_after_a_test_are_unknown() -> None:
    before, after = reading(judged(Status.PASS)), reading(judged(Status.UNKNOWN))
    (found,) = new_errors(before, after, "hbm")
    assert (found.status, found.check) == (Status.UNKNOWN, "gpu_ecc")
    assert new_errors(after, after, "hbm") == []
