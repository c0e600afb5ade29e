"""A check run as a Prometheus textfile, for the textfile collector of node_exporter.

The metrics are listed in checks/README.md.
"""

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from gpuops.checks.core.runner import CheckRun
from gpuops.log import printable


def metrics(check_run: CheckRun) -> bytes:
    """Return *check_run* in Prometheus' text format."""
    registry = CollectorRegistry()
    status = Gauge(
        "gpuops_check_status",
        "Worst finding of a check about an entity: 0 pass, 1 skip, 2 warn, 3 unknown, 4 fail.",
        ("suite", "check", "entity_kind", "entity_id"),
        registry=registry,
    )
    worst: dict[tuple[str, str, str, str], int] = {}
    for finding in check_run.findings:
        entity = finding.entity
        key = check_run.suite, finding.check, entity.kind.value, printable(entity.id)
        worst[key] = max(worst.get(key, 0), int(finding.status))
    for key, value in worst.items():
        status.labels(*key).set(value)
    single = {
        "gpuops_check_verdict": (
            "Worst finding of the suite: 0 pass, 1 skip, 2 warn, 3 unknown, 4 fail.",
            int(check_run.verdict),
        ),
        "gpuops_check_late": ("Checks that gave no answer in time.", len(check_run.late)),
        "gpuops_check_last_run_timestamp_seconds": (
            "When the suite last ended, in seconds since the epoch.",
            check_run.end_us / 1e6,
        ),
        "gpuops_check_duration_seconds": (
            "How long the suite took, in seconds.",
            (check_run.end_us - check_run.start_us) / 1e6,
        ),
    }
    for name, (about, number) in single.items():
        Gauge(name, about, ("suite",), registry=registry).labels(check_run.suite).set(number)
    return generate_latest(registry)
