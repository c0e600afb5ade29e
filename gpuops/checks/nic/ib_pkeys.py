"""Are the InfiniBand ports members of the partitions that the node's jobs need?"""

from collections.abc import Iterable, Sequence

from gpuops.checks.core.check import (
    Check,
    JudgeContext,
    NoParameters,
    Probe,
    Subject,
    skipped,
)
from gpuops.checks.core.profile import NumberExpectation, Profile
from gpuops.host.infiniband import PkeyTable, PkeyTables, limited, read_pkeys
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status

_NAME = "ib_pkeys"


def judge(facts: PkeyTables, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each active port that lacks a P_Key, else one for all.

    Keys of the profile fail where fewer than ``nic_count`` adapters hold them all; without a
    ``nic_count``, where no port does. Else a port that lacks one warns: it may be for storage.
    Without keys in the profile, a port in no partition at all warns.
    """
    subject = Subject(_NAME, context.node, FailureClass.NETWORK_PORT, "ports")
    active = [port for port in facts.ports if port.is_active]
    if not active:
        why = "no InfiniBand port is active; see ib_ports" if facts.ports else "no InfiniBand port"
        return [skipped(subject, why)]
    expected, keys = context.profile.ib_pkeys, _keys(context.profile)
    good = [port for port in active if _holds(port, keys)]
    unread = [port for port in active if port not in good and not port.is_complete]
    lacking = [port for port in active if port not in good and port.is_complete]
    status = Status.WARN
    if expected is not None:
        count = context.profile.nic_count
        if count is not None and _adapters(good) >= count.value:
            lacking = []
        # An adapter without link, or one that does not tell, may hold them.
        unknown = [port for port in facts.ports if not port.is_active] + unread
        if _are_too_few(good, unknown, count):
            status = Status.FAIL
    source = "subnet manager" if expected is None else expected.source
    findings = [_lacking(port, keys, status, source) for port in lacking]
    if good and not lacking:
        findings = [_passed(subject, good, keys)]
    text = "its P_Key table cannot be read"
    return findings + [skipped(_subject(port), f"{_name(port)}: {text}") for port in unread]


def _keys(profile: Profile) -> tuple[int, ...]:
    return () if profile.ib_pkeys is None else tuple(int(key, 16) for key in profile.ib_pkeys.value)


def _holds(port: PkeyTable, keys: Iterable[int]) -> bool:
    return bool(port.keys) and all(port.has(key) for key in keys)


def _adapters(ports: Iterable[PkeyTable]) -> int:
    return len({port.guid for port in ports})


def _are_too_few(
    good: Sequence[PkeyTable], unknown: Sequence[PkeyTable], count: NumberExpectation | None
) -> bool:
    if count is None:
        return not good and not unknown
    return _adapters([*good, *unknown]) < count.value


def _lacking(port: PkeyTable, keys: Iterable[int], status: Status, source: str) -> Finding:
    missing = [key for key in keys if not port.has(key)]
    there = ", ".join(map(_shown, port.keys)) or "none"
    if not missing:
        text, threshold = "is in no partition: its P_Key table has no valid key", "one P_Key"
    elif any(limited(key) in port.keys for key in missing):
        text = f"is only a limited member of {_listed(missing)} (its P_Keys: {there})"
        threshold = _listed(keys)
    else:
        text, threshold = f"lacks the P_Key {_listed(missing)} (its P_Keys: {there})", _listed(keys)
    return _subject(port).compared(status, there, threshold, source, f"{_name(port)} {text}")


def _passed(subject: Subject, good: Sequence[PkeyTable], keys: Iterable[int]) -> Finding:
    held = keys or sorted({port.keys[0] for port in good})
    text = f"{len(good)} InfiniBand ports hold the P_Key {_listed(held)}"
    return subject.compared(Status.PASS, len(good), ">= 1", "subnet manager", text)


def _subject(port: PkeyTable) -> Subject:
    # The subnet manager assigns the keys, to many nodes at once.
    entity = Entity(EntityKind.NIC, port.guid)
    return Subject(_NAME, entity, FailureClass.NETWORK_PORT, shared_cause=True)


def _name(port: PkeyTable) -> str:
    return f"{port.device}/{port.number}"


def _shown(key: int) -> str:
    return f"{key:#06x}"


def _listed(keys: Iterable[int]) -> str:
    return " and ".join(map(_shown, keys))


CHECK = Check(
    name=_NAME,
    about="InfiniBand ports hold the partition keys (P_Keys) that they need",
    probe=Probe(
        "ib_pkeys",
        PkeyTables,
        lambda machine, _budget_s: read_pkeys(
            machine.root, tuple(int(key, 16) for key in machine.inputs)
        ),
        sources=("/sys/class/infiniband/*/ports/*/pkeys",),
    ),
    parameters=NoParameters,
    judge=judge,
    inputs=lambda _parameters, profile: () if profile.ib_pkeys is None else profile.ib_pkeys.value,
)
