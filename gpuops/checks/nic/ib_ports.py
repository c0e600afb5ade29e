"""Are all RDMA network ports up, at full rate, and have they stayed up?"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from gpuops.checks.core.check import (
    Check,
    CheckLimit,
    JudgeContext,
    Probe,
    Subject,
    at_least,
    one_of,
    skipped,
)
from gpuops.checks.core.profile import NumberExpectation, NumbersExpectation, Profile
from gpuops.host.infiniband import Port, RdmaPorts, is_full, read_fabric
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status
from gpuops.units import format_seconds

PROBE = Probe(
    "infiniband",
    RdmaPorts,
    lambda machine, _budget_s: read_fabric(machine.root),
    sources=(
        "/sys/class/infiniband/*/ports",
        "/sys/class/infiniband/*/device/net/*/carrier_down_count",
    ),
)
DOWNS = ("link_downed", "carrier_downs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``downs_per_day``: how often one port lost its link."""

    downs_per_day: CheckLimit


def judge(facts: RdmaPorts, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding about the adapters, and one for each port with a problem.

    An adapter counts if a port of it is active at the profile's ``nic_rate_gbs`` or above; of a
    list, each rate needs an adapter of its own, so that a fast one which fell to the rate of a slow
    one is missed. If at least ``nic_count`` count, the others are ignored: they may have no cable.
    If fewer do, the node fails, and so does each bad port if it is clear which they are.
    Without a ``nic_count`` or a list a bad port warns, unless its driver disabled it.
    """
    # Adapters that are there and have no link: their switch may be down, which others share.
    linkless = sum(not port.is_active for port in facts.ports) > 0
    subject = Subject(
        "ib_ports", context.node, FailureClass.NETWORK_PORT, "adapters", shared_cause=linkless
    )
    expected, rates = _count(context.profile), context.profile.nic_rate_gbs
    if not facts.ports and not expected:
        return [skipped(subject, "no RDMA network adapter")]
    adapters = len({port.guid for port in facts.ports})
    match = _match(facts.ports, _wanted(expected, rates, adapters))
    text = f"{len(match.good)} of {adapters} network adapters are active{_at(rates)}"
    return [
        at_least(subject, len(match.good), expected, text),
        *_ports(facts.ports, match, rates, expected),
        *_firmware(facts.ports, context),
        *_downs(facts.ports, parameters.downs_per_day, context),
    ]


def _count(profile: Profile) -> NumberExpectation | None:
    """Return how many adapters must be good: as the profile says, else as many as it lists."""
    rates = profile.nic_rate_gbs
    if profile.nic_count is not None or rates is None or len(rates.value) == 1:
        return profile.nic_count
    return NumberExpectation(value=len(rates.value), source=rates.source)


def _wanted(
    expected: NumberExpectation | None, rates: NumbersExpectation | None, adapters: int
) -> list[float]:
    """Return the rate that each adapter that counts must have, in GB/s, the slowest first."""
    count = adapters if expected is None else int(expected.value)
    given = sorted(rates.value if rates is not None else [0.0], reverse=True)
    return [*reversed((given + [given[-1]] * count)[:count])]


@dataclass(frozen=True, slots=True)
class _Match:
    """The GUIDs of adapters that are good, and the rates in GB/s for which none is left."""

    good: AbstractSet[str]
    unmet: Sequence[float]


def _match(ports: Iterable[Port], wanted: Iterable[float]) -> _Match:
    """Give each rate of *wanted* (ascending) the slowest adapter that has it."""
    rates: dict[str, float] = {}
    for port in ports:
        if port.is_active:
            rates[port.guid] = max(port.rate_gbs or 0.0, rates.get(port.guid, 0.0))
    free, good, unmet = sorted(rates, key=rates.__getitem__), set(), []
    for rate in wanted:
        # What is too slow for this one is too slow for all that follow.
        free = [guid for guid in free if rates[guid] >= rate]
        if free:
            good.add(free.pop(0))
        else:
            unmet.append(rate)
    return _Match(good | set(free), unmet)


def _at(rates: NumbersExpectation | None) -> str:
    if rates is None:
        return ""
    if len(rates.value) == 1:
        return f" at {rates.value[0]:g} GB/s or more"
    counts = Counter(sorted(rates.value, reverse=True))
    listed = ", ".join(f"{count} x {rate:g}" for rate, count in counts.items())
    return f" at the rates of the profile ({listed} GB/s)"


def _ports(
    ports: Sequence[Port],
    match: _Match,
    rates: NumbersExpectation | None,
    expected: NumberExpectation | None,
) -> list[Finding]:
    bad = [port for port in ports if port.guid not in match.good]
    if expected is None:
        return [
            _port(port, match, rates, Status.WARN)
            for port in bad
            if port.is_active or port.phys_state != "Disabled"
        ]
    if not match.unmet:
        return []
    # Which of several is the one that fell to the rate of the others, nothing says.
    slow = {port.rate_gbs for port in bad if port.is_active}
    bad = [port for port in ports if port in bad or (port.is_active and port.rate_gbs in slow)]
    to_spare = len({port.guid for port in bad}) > len(match.unmet)
    status = Status.WARN if to_spare else Status.FAIL
    return [_port(port, match, rates, status) for port in bad]


def nic(port: Port) -> Entity:
    """Return the adapter of *port*."""
    return Entity(EntityKind.NIC, port.guid)


def counter(check: str, port: Port, name: str) -> str:
    """Return the name under which a counter of *port* is saved."""
    return f"{check}:{port.guid}:{port.number}/{name}"


def _port(port: Port, match: _Match, rates: NumbersExpectation | None, status: Status) -> Finding:
    link = port.link_layer or "link"
    subject = Subject("ib_ports", nic(port), FailureClass.NETWORK_PORT, shared_cause=True)
    if not port.is_active:
        text = f"{port.name}: {link} is {port.state or 'in an unknown state'},"
        text += f" physically {port.phys_state or 'unknown'}"
        return subject.compared(status, port.state, "ACTIVE", "kernel (sysfs)", text)
    assert rates is not None
    now = "an unknown rate" if port.rate_gbs is None else f"{port.rate_gbs:g} GB/s"
    wanted = min(rate for rate in match.unmet if rate > (port.rate_gbs or 0.0))
    text, threshold = f"{port.name}: {link} at {now}", f">= {wanted:g} GB/s"
    subject = replace(subject, unit="GB/s")
    return subject.compared(status, port.rate_gbs, threshold, rates.source, text)


def _firmware(ports: Iterable[Port], context: JudgeContext) -> list[Finding]:
    wanted = context.profile.nic_firmware
    if wanted is None:
        return []
    findings = {}
    for port in ports:
        subject = Subject("ib_ports", nic(port), FailureClass.HOST_CONFIG)
        text = f"{port.device}: firmware {port.firmware or 'unknown'}"
        if port.firmware is None:
            findings[port.guid] = skipped(subject, text)
        elif port.firmware not in wanted.value:
            findings[port.guid] = one_of(subject, port.firmware, wanted, text, bad=Status.FAIL)
    return list(findings.values())


def _downs(ports: Iterable[Port], limit: CheckLimit, context: JudgeContext) -> list[Finding]:
    findings = []
    for port in ports:
        subject = Subject(
            "ib_ports", nic(port), FailureClass.NETWORK_FLAP, "times", shared_cause=True
        )
        for name in DOWNS:
            value = port.counters.get(name)
            if value is None:
                continue
            growth = context.counters.since(counter("ib_ports", port, name), value)
            if is_full(port, name) and not (growth and growth.grown):
                text = f"{port.name}: {name} is at the maximum value; `perfquery -R` clears it"
                findings.append(skipped(replace(subject, unit=None), text, value))
            if growth is not None:
                text = f"{port.name} lost its link {growth.grown:g} times"
                text += f" in {format_seconds(growth.elapsed_s)} ({name})"
                findings.append(subject.below(limit, growth.grown, text))
    return [finding for finding in findings if finding.status is not Status.PASS]


def counters_of(facts: RdmaPorts, check: str, names: Iterable[str]) -> Mapping[str, float]:
    """Return the counters of every port for *check*, of those called *names*."""
    return {
        counter(check, port, name): port.counters[name]
        for port in facts.ports
        for name in names
        if name in port.counters
    }


def counters(facts: RdmaPorts) -> Mapping[str, float]:
    """Return how often each port lost its link."""
    return counters_of(facts, "ib_ports", DOWNS)


CHECK = Check(
    name="ib_ports",
    about="InfiniBand and RoCE ports are up, at their rate, with the right firmware, and stay up",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
    counters=counters,
)
