"""Do the RDMA network ports count errors?"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext, Subject, skipped
from gpuops.checks.nic.ib_ports import PROBE, counter, counters_of, nic
from gpuops.errors import ConfigError
from gpuops.host.infiniband import Port, RdmaPorts, is_full
from gpuops.host.node_state import CounterGrowth
from gpuops.model import FailureClass, Finding, Status
from gpuops.units import format_seconds

# Files of counters/ (IBTA port counters) and hw_counters/ (mlx5) that indicate a bad link.
COUNTERS = (
    "symbol_error",
    "link_error_recovery",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "implied_nak_seq_err",
    "roce_slow_restart",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``per_hour``: a limit for each counter, by the name of its file in sysfs (`COUNTERS`)."""

    per_hour: Mapping[str, CheckLimit]

    def __post_init__(self) -> None:
        for name in self.per_hour:
            if name not in COUNTERS:
                raise ConfigError(
                    f"ib_errors has no counter {name!r} (it has: {', '.join(COUNTERS)})"
                )


def judge(facts: RdmaPorts, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each counter that grows too fast, else one for all ports.

    One more names the counters that are saturated, and so cannot be judged.
    """
    subject = Subject("ib_errors", context.node, FailureClass.NETWORK_ERRORS, shared_cause=True)
    if not facts.ports:
        return [skipped(subject, "no RDMA network adapter")]
    findings, compared, full = list[Finding](), 0, list[str]()
    for port in facts.ports:
        for name, limit in parameters.per_hour.items():
            growth = _growth(port, name, context)
            if is_full(port, name) and not (growth and growth.grown):
                full.append(f"{name} of {port.name}")
                continue
            if growth is None:
                continue
            compared += 1
            text = f"{port.name}: {name} grew by {growth.grown:g}"
            text += f" in {format_seconds(growth.elapsed_s)}"
            about = replace(subject, entity=nic(port), unit="per hour")
            found = about.below(limit, growth.per_hour, text, digits=2, unit="per hour")
            if found.status is not Status.PASS:
                findings.append(found)
    if full:
        stuck = f"not judged, at the maximum value: {', '.join(full)}"
        findings.append(skipped(subject, f"{stuck}; `perfquery -R` clears them"))
    if any(finding.status is not Status.SKIP for finding in findings):
        return findings
    if not compared:
        return findings or [skipped(subject, "no earlier count of this boot to compare with")]
    text = f"{compared} error counters of {len(facts.ports)} ports grow slowly or not at all"
    passed = Finding(check="ib_errors", entity=context.node, status=Status.PASS, message=text)
    return [passed, *findings]


def _growth(port: Port, name: str, context: JudgeContext) -> CounterGrowth | None:
    value = port.counters.get(name)
    if value is None:
        return None
    return context.counters.lately(counter("ib_errors", port, name), value)


def counters(facts: RdmaPorts) -> Mapping[str, float]:
    """Return the error counters of every port that a suite may limit."""
    return counters_of(facts, "ib_errors", COUNTERS)


CHECK = Check(
    name="ib_errors",
    about="error counters of InfiniBand and RoCE ports, as rates",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
    counters=counters,
)
