"""Network interfaces: which there are, what hangs on one, may we change it (ip(8), tc(8))."""

import re
from collections.abc import Sequence
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.process.command import ask, find
from gpuops.host.procfs import read_text
from gpuops.model import UnknownReason

TIMEOUT_S = 5.0
_CAP_NET_ADMIN = 12  # linux/capability.h
_CAPABILITIES = re.compile(r"^CapEff:\s+([0-9a-fA-F]+)$", re.MULTILINE)
# What `ip route show` says of a route's state, and does not take back.
_STATE = frozenset({"linkdown", "dead", "offload", "trap", "pervasive", "notify"})
_ADDRESS6 = re.compile(r"\binet6 (\S+) scope global\b")
_QDISC = re.compile(r"^qdisc (\S+) (\S+): .*\broot\b", re.MULTILINE)


def interfaces(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the names of the network interfaces, sorted; none where they cannot be listed."""
    try:
        return tuple(sorted(path.name for path in (root / "sys/class/net").iterdir()))
    except OSError:
        return ()


def may_change_links(root: Path = Path("/")) -> bool:
    """Say whether this process has CAP_NET_ADMIN."""
    try:
        match = _CAPABILITIES.search(read_text(root / "proc/self/status"))
    except ProbeError:
        return False
    return match is not None and bool(int(match[1], 16) >> _CAP_NET_ADMIN & 1)


def routes(interface: str) -> tuple[tuple[str, ...], ...]:
    """Return the routes over *interface*, each as the words that ``ip route`` takes back.

    A link that goes down loses them; the kernel brings back only those of its own addresses.

    Raises:
        ProbeError: ``ip`` is missing, or says no.
    """
    return parse_routes(_said(["ip", "-o", "route", "show", "dev", interface]))


def parse_routes(text: str) -> tuple[tuple[str, ...], ...]:
    """Return the routes in *text*, without the words that tell of a route's state."""
    lines = (line.replace("\\", " ").split() for line in text.splitlines())
    return tuple(tuple(word for word in words if word not in _STATE) for words in lines if words)


def global_addresses6(interface: str) -> tuple[str, ...]:
    """Return the global IPv6 addresses of *interface* (``fd00::1/64``): going down loses them too.

    Raises:
        ProbeError: As for `routes`.
    """
    return tuple(_ADDRESS6.findall(_said(["ip", "-6", "-o", "addr", "show", "dev", interface])))


def own_qdisc(interface: str) -> str | None:
    """Return the queueing discipline that somebody gave *interface*, None for the kernel's own.

    Raises:
        ProbeError: ``tc`` is missing, or says no.
    """
    return parse_qdisc(_said(["tc", "qdisc", "show", "dev", interface]))


def parse_qdisc(text: str) -> str | None:
    """Return the name of the root discipline in *text*; the kernel's own have the handle 0."""
    match = _QDISC.search(text)
    return match[1] if match is not None and match[2] != "0" else None


def _said(words: Sequence[str]) -> str:
    program = find(Path("/"), words[0])
    if program is None:
        raise ProbeError(f"this machine has no {words[0]}", UnknownReason.MISSING_TOOL)
    answer = ask([program, *words[1:]], TIMEOUT_S)
    if answer.exit_code != 0:
        said = answer.first_line() or answer.ending
        raise ProbeError(f"`{' '.join(words)}`: {said}", UnknownReason.CRASH)
    return answer.output
