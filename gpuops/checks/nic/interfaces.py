"""Do the network interfaces that the node needs have a link, and are its bonds whole?"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from gpuops.checks.core.check import (
    Check,
    CheckLimit,
    JudgeContext,
    Probe,
    Subject,
    skipped,
)
from gpuops.checks.core.profile import TextExpectation
from gpuops.host.net.interfaces import LACP, Bond, Interface, Interfaces, read_interfaces
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status
from gpuops.units import format_seconds

_NAME = "interfaces"
_KERNEL = "kernel (sysfs)"
_PARTNER = "an LACP partner"
# The modes that spread traffic evenly over all slaves; in the others a slower slave is ordinary.
_EVEN = frozenset({LACP, "balance-rr", "balance-xor"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``downs_per_day``: how often one interface lost its link."""

    downs_per_day: CheckLimit


def judge(facts: Interfaces, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each interface and bond with a problem, else one for all.

    An interface of the profile without a link fails; what is wrong in a bond warns. In a container
    with a network of its own, those that are not in there are not judged. Other interfaces may be
    down: an unused port, a bridge of containers. Error counters are not judged, since no rate is
    published that tells a bad cable from forward error correction at work.
    """
    subject = Subject(_NAME, context.node, FailureClass.NETWORK_PORT)
    expected = context.profile.interfaces
    has_none = not any(item.is_physical for item in facts.interfaces)
    # Each namespace has `lo`: without it /sys is not to be read.
    are_lost = facts.in_host_namespace and bool(facts.interfaces)
    if expected is not None and has_none and not are_lost:
        return [skipped(subject, "this network namespace has no interface of a device")]
    known = {item.name: item for item in facts.interfaces}
    findings = [] if expected is None else list(_expected(expected, facts, known, context))
    named = set(expected.value) if expected is not None else set()
    bonds = [bond for bond in facts.bonds if bond.slaves and _is_used(known.get(bond.name))]
    for bond in bonds:
        findings += _bond(bond, known, named)
    members = {name for bond in bonds for name in bond.slaves}
    used = [known[name] for name in sorted(named | members) if name in known]
    findings += _downs(used, parameters.downs_per_day, context)
    if any(finding.status is not Status.SKIP for finding in findings):
        return findings
    if not named | members:
        return [skipped(subject, "there is no bond, and the profile names no interface")]
    if not used:
        return findings
    up = [item.name for item in used if item.has_link]
    text = f"{len(up)} of {len(used)} interfaces have a link: {', '.join(up)}"
    passed = Finding(
        check=_NAME,
        entity=context.node,
        status=Status.PASS,
        value=len(up),
        unit="interfaces",
        message=text,
    )
    return [passed, *findings]


def _is_used(bond: Interface | None) -> bool:
    return bond is None or bond.is_switched_on is not False


def _expected(
    expected: TextExpectation,
    facts: Interfaces,
    known: Mapping[str, Interface],
    context: JudgeContext,
) -> Iterator[Finding]:
    source = f"profile {context.profile.name}: {expected.source}"
    for name in dict.fromkeys(expected.value):
        interface = known.get(name)
        if interface is None and facts.in_host_namespace is False:
            text = f"{name} is not in this network namespace, a container's; the node may have it"
            yield skipped(_subject(Interface(name=name)), text)
        elif interface is None:
            subject = _subject(Interface(name=name))
            yield subject.compared(Status.FAIL, "missing", "up", source, f"{name} does not exist")
        elif interface.has_link is None:
            yield skipped(_subject(interface), f"{name} does not say whether it has a link")
        elif not interface.has_link:
            # The network's switch may be down, which others share; but it disables no interface.
            is_shared = interface.is_switched_on is not False
            subject = replace(_subject(interface), shared_cause=is_shared)
            yield subject.compared(Status.FAIL, "down", "up", source, f"{name} {_state(interface)}")


def _bond(bond: Bond, known: Mapping[str, Interface], named: AbstractSet[str]) -> Iterator[Finding]:
    slaves = [known[name] for name in bond.slaves if name in known]
    up = [item for item in slaves if _carries(item)]
    for item in slaves:
        if not _carries(item) and not (item.name in named and item.has_link is False):
            text = f"{bond.name}: its slave {item.name} {_state(item)}"
            yield _warning(item, "down", "up", text)
    if bond.mode == LACP:
        alone = [item for item in up if item.slave is not None and item.slave.is_alone]
        for item in alone:
            text = f"{bond.name}: no LACP partner answers on {item.name}"
            yield _warning(item, "no partner", _PARTNER, text)
        if up and not alone and bond.has_partner is False:
            text = f"{bond.name}: its LACP group has no partner"
            yield _warning(Interface(name=bond.name), "no partner", _PARTNER, text)
    if bond.mode in _EVEN:
        yield from _slower(bond, up)


def _carries(slave: Interface) -> bool:
    """Return False if the interface has no link, or its bond does not use it for that reason."""
    status = None if slave.slave is None else slave.slave.mii_status
    return slave.has_link is not False and status != "down"


def _slower(bond: Bond, slaves: Sequence[Interface]) -> Iterator[Finding]:
    fastest = max((item.rate_gbs for item in slaves if item.rate_gbs), default=0.0)
    for item in slaves:
        if item.rate_gbs is not None and item.rate_gbs < fastest:
            subject = replace(_subject(item), unit="GB/s")
            text = f"{bond.name}: its slave {item.name} has {item.rate_gbs:g} GB/s, others"
            text += f" {fastest:g}"
            threshold = f">= {fastest:g} GB/s"
            yield subject.compared(Status.WARN, item.rate_gbs, threshold, "its bond", text)


def _warning(interface: Interface, value: str, threshold: str, text: str) -> Finding:
    return _subject(interface).compared(Status.WARN, value, threshold, _KERNEL, text)


def _state(interface: Interface) -> str:
    if interface.is_switched_on is False:
        return "is switched off (ip link set … up)"
    if interface.has_link is False:
        return "has no link"
    return "is down for its bond (mii_status)"


def _subject(interface: Interface) -> Subject:
    entity = Entity(EntityKind.LINK, interface.name)
    if interface.is_physical and interface.address is not None:
        entity = Entity(EntityKind.NIC, interface.address)
    return Subject(_NAME, entity, FailureClass.NETWORK_PORT)


def _downs(
    used: Sequence[Interface], limit: CheckLimit, context: JudgeContext
) -> Iterator[Finding]:
    for item in used:
        # `ib_ports` counts those of RDMA ports.
        if item.carrier_downs is None or item.has_rdma or not item.is_physical:
            continue
        growth = context.counters.since(_counter(item), item.carrier_downs)
        if growth is None:
            continue
        text = f"{item.name} lost its link {growth.grown:g} times"
        text += f" in {format_seconds(growth.elapsed_s)}"
        subject = replace(
            _subject(item),
            failure_class=FailureClass.NETWORK_FLAP,
            unit="times",
            shared_cause=True,
        )
        found = subject.below(limit, growth.grown, text)
        if found.status is not Status.PASS:
            yield found


def _counter(interface: Interface) -> str:
    return f"{_NAME}:{interface.address or interface.name}:carrier_downs"


def counters(facts: Interfaces) -> Mapping[str, float]:
    """Return how often each physical interface lost its link."""
    return {
        _counter(item): item.carrier_downs
        for item in facts.interfaces
        if item.carrier_downs is not None and item.is_physical and not item.has_rdma
    }


CHECK = Check(
    name=_NAME,
    about="the profile's network interfaces have a link, and bonds are whole",
    probe=Probe(
        "interfaces",
        Interfaces,
        lambda machine, _budget_s: read_interfaces(machine.root),
        sources=(
            "/sys/class/net/*/{carrier,operstate,flags,speed,carrier_down_count}",
            "/sys/class/net/*/{bonding,bonding_slave}",
            "/proc/sys/net/core/{netdev_max_backlog,somaxconn}",
        ),
    ),
    parameters=Parameters,
    judge=judge,
    counters=counters,
)
