"""Fault injectors of the network: this machine is cut off, or a link gets slow.

With ``--interface`` a cut link is down for all processes. With ``--peer`` a blackhole route drops
what is sent to that address; no other traffic is affected.

A slow link has delay, loss or a low rate, set by tc(8). Delay and loss need the kernel module
``sch_netem``, which not every kernel has; a rate alone uses ``tbf``.
"""

import ipaddress

from gpuops.drill.fault import (
    DrillOptions,
    DrillTarget,
    Fault,
    UndoableStep,
    format_seconds,
    scenario,
)
from gpuops.drill.steps import RunProgram
from gpuops.errors import DrillError, UsageError
from gpuops.host.net.traffic import (
    global_addresses6,
    interfaces,
    may_change_links,
    own_qdisc,
    routes,
)
from gpuops.model import Entity, EntityKind


def check_interface(target: DrillTarget, interface: str) -> str:
    """Return *interface* if it exists and may be changed.

    Raises:
        UsageError: It is the loopback, which other programs need.
        DrillError: It does not exist, or this process may not change it.
    """
    existing = interfaces(target.root)
    if interface == "lo":
        raise UsageError("--interface lo: too many programs on this machine need the loopback")
    if interface not in existing:
        raise DrillError(f"no interface {interface}; there are {', '.join(existing) or 'none'}")
    check_permission(target)
    return interface


def check_permission(target: DrillTarget) -> None:
    """Check that this process may change links and routes.

    Raises:
        DrillError: It may not.
    """
    if not may_change_links(target.root):
        raise DrillError("changing the network needs root (CAP_NET_ADMIN); try sudo")


def host_prefix(address: str) -> str:
    """Return *address* with the prefix length of a single host.

    Raises:
        UsageError: Not an IP address.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        raise UsageError(f"--peer {address}: not an IP address") from None
    return f"{parsed}/{parsed.max_prefixlen}"


CUT_LINK_FOR_S = 30.0  # above the 15 s after which peers count a silent agent as dead


@scenario(
    "cut-link", "Take an interface down, or cut off some peers.", "interface", "peers", "for_s"
)
def cut_link(target: DrillTarget, options: DrillOptions) -> Fault:
    """Return the fault: a link down, or routes that lead nowhere."""
    if (options.interface is None) == (not options.peers):
        raise UsageError("what to cut? either --interface or --peer (which may be repeated)")
    for_s = CUT_LINK_FOR_S if options.for_s is None else options.for_s
    if options.interface is None:
        return _towards(target, options.peers, for_s)
    name = check_interface(target, options.interface)
    kept_routes = routes(name)
    # Nothing else would restore these.
    kept = [("ip", "route", "replace", *words, "dev", name) for words in kept_routes]
    kept += [("ip", "-6", "addr", "replace", it, "dev", name) for it in global_addresses6(name)]
    is_default = any(words[0] == "default" for words in kept_routes)
    shell = " The default route uses it: your shell may depend on it." if is_default else ""
    return Fault(
        breaks=f"Interface {name} goes down, for all processes, not only the run.{shell}",
        undone=f"After {format_seconds(for_s)} it comes up again with its routes and addresses, "
        "also when this command ends or is killed.",
        entities=(Entity(EntityKind.LINK, name),),
        changes=(
            *(UndoableStep(None, RunProgram(words)) for words in reversed(kept)),
            UndoableStep(
                RunProgram(("ip", "link", "set", "dev", name, "down")),
                RunProgram(("ip", "link", "set", "dev", name, "up")),
            ),
        ),
        for_s=for_s,
    )


def _towards(target: DrillTarget, peers: tuple[str, ...], for_s: float) -> Fault:
    check_permission(target)
    prefixes = [host_prefix(peer) for peer in peers]
    return Fault(
        breaks=f"All packets from this machine to {', '.join(peers)} are dropped.",
        undone=(
            f"After {format_seconds(for_s)} they are sent again, also when this command ends or is "
            "killed."
        ),
        entities=tuple(Entity(EntityKind.LINK, peer) for peer in peers),
        changes=tuple(
            UndoableStep(
                RunProgram(("ip", "route", "add", "blackhole", prefix)),
                RunProgram(("ip", "route", "del", "blackhole", prefix)),
            )
            for prefix in prefixes
        ),
        for_s=for_s,
    )


SLOW_LINK_FOR_S = 60.0
_QUEUE_MS = 400  # tc-tbf(8): how long a packet may queue before it is dropped


@scenario(
    "slow-link",
    "Delay, lose or throttle what an interface sends.",
    "interface",
    "delay_ms",
    "loss_percent",
    "rate_mbit",
    "for_s",
)
def slow_link(target: DrillTarget, options: DrillOptions) -> Fault:
    """Return the fault: a queueing discipline on the interface."""
    if options.interface is None:
        raise UsageError("which link? name its interface with --interface")
    words = discipline(options)
    name = check_interface(target, options.interface)
    other = own_qdisc(name)
    if other is not None:
        raise DrillError(f"{name} already has a queueing discipline ({other}); nothing was changed")
    for_s = SLOW_LINK_FOR_S if options.for_s is None else options.for_s
    return Fault(
        breaks=f"All that interface {name} sends, not only of the run, gets {_described(options)}.",
        undone=(
            f"After {format_seconds(for_s)} it is as before, also when this command ends or "
            "is killed."
        ),
        entities=(Entity(EntityKind.LINK, name),),
        changes=(
            UndoableStep(
                RunProgram(("tc", "qdisc", "add", "dev", name, "root", *words)),
                RunProgram(("tc", "qdisc", "del", "dev", name, "root")),
            ),
        ),
        for_s=for_s,
    )


def discipline(options: DrillOptions) -> tuple[str, ...]:
    """Return the arguments of tc(8) for *options*.

    Raises:
        UsageError: There are none, or a number is out of range.
    """
    delay, loss, rate = options.delay_ms, options.loss_percent, options.rate_mbit
    if delay is None and loss is None and rate is None:
        raise UsageError("how slow? give --delay, --loss or --rate")
    if (delay or 0) < 0 or not 0 <= (loss or 0) <= 100 or (rate is not None and rate <= 0):
        raise UsageError("--delay is 0 ms or more, --loss 0 to 100 %, --rate above 0 Mbit/s")
    if delay is None and loss is None:
        burst_bytes = max(round((rate or 0) * 1e6 / 8 / 100), 16_000)  # 10 ms, some packets
        shape = ("rate", f"{rate:g}mbit", "burst", f"{burst_bytes}b", "latency", f"{_QUEUE_MS}ms")
        return ("tbf", *shape)
    words = ["netem", "limit", "100000"]
    words += [] if delay is None else ["delay", f"{delay:g}ms"]
    words += [] if loss is None else ["loss", f"{loss:g}%"]
    words += [] if rate is None else ["rate", f"{rate:g}mbit"]
    return tuple(words)


def _described(options: DrillOptions) -> str:
    parts = []
    if options.delay_ms is not None:
        parts.append(f"{options.delay_ms:g} ms of delay")
    if options.loss_percent is not None:
        parts.append(f"{options.loss_percent:g} % of loss")
    if options.rate_mbit is not None:
        parts.append(f"{options.rate_mbit:g} Mbit/s")
    return ", ".join(parts)
