"""Fault injector: a link with delay, loss or a low rate, by tc(8).

Delay and loss need the kernel's ``sch_netem``, which not every kernel has; a rate alone goes
through ``tbf``.
"""

from gpuops.drill.fault import Change, Fault
from gpuops.drill.network import check_interface
from gpuops.drill.scenario import Scenario, Scene, Wanted, seconds
from gpuops.drill.steps import RunProgram
from gpuops.errors import DrillError, UsageError
from gpuops.host.links import own_qdisc
from gpuops.model import Entity, EntityKind

FOR_S = 60.0
_QUEUE_MS = 400  # tc-tbf(8): how long a packet may wait before it is dropped


def plan(scene: Scene, wanted: Wanted) -> Fault:
    """Return the fault: a queueing discipline on the interface."""
    if wanted.interface is None:
        raise UsageError("which link? name its interface with --interface")
    words = discipline(wanted)
    name = check_interface(scene, wanted.interface)
    other = own_qdisc(name)
    if other is not None:
        raise DrillError(f"{name} has a queueing discipline of its own ({other}); it is left alone")
    for_s = FOR_S if wanted.for_s is None else wanted.for_s
    return Fault(
        scenario="slow-link",
        breaks=f"What leaves through interface {name} gets {_described(wanted)}, not of the run "
        "alone.",
        undone=f"After {seconds(for_s)} it is as before, also when this command ends or is killed.",
        entities=(Entity(EntityKind.LINK, name),),
        changes=(
            Change(
                RunProgram(("tc", "qdisc", "add", "dev", name, "root", *words)),
                RunProgram(("tc", "qdisc", "del", "dev", name, "root")),
            ),
        ),
        for_s=for_s,
    )


def discipline(wanted: Wanted) -> tuple[str, ...]:
    """Return the words of tc(8) for what is wanted.

    Raises:
        UsageError: Nothing is, or a number makes no sense.
    """
    delay, loss, rate = wanted.delay_ms, wanted.loss_percent, wanted.rate_mbit
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


def _described(wanted: Wanted) -> str:
    parts = []
    if wanted.delay_ms is not None:
        parts.append(f"{wanted.delay_ms:g} ms of delay")
    if wanted.loss_percent is not None:
        parts.append(f"{wanted.loss_percent:g} % of loss")
    if wanted.rate_mbit is not None:
        parts.append(f"{wanted.rate_mbit:g} Mbit/s")
    return ", ".join(parts)


SCENARIO = Scenario(
    name="slow-link",
    summary="Delay, lose or throttle what leaves by an interface.",
    options=("interface", "delay_ms", "loss_percent", "rate_mbit", "for_s"),
    plan=plan,
)
