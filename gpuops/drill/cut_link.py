"""Fault injector: cut this machine off: an interface goes down, or some peers become unreachable.

With ``--interface`` the link is down for everybody. With ``--peer`` a blackhole route swallows what
is sent to that address: nothing else on the machine notices.
"""

from gpuops.drill.fault import Change, Fault
from gpuops.drill.network import check_interface, check_permission, host_prefix
from gpuops.drill.scenario import Scenario, Scene, Wanted, seconds
from gpuops.drill.steps import RunProgram
from gpuops.errors import UsageError
from gpuops.host.links import global_addresses6, routes
from gpuops.model import Entity, EntityKind

FOR_S = 30.0  # above the 15 s after which peers count a silent agent as dead


def plan(scene: Scene, wanted: Wanted) -> Fault:
    """Return the fault: a link down, or routes that lead nowhere."""
    if (wanted.interface is None) == (not wanted.peers):
        raise UsageError("what is to be cut? either --interface or --peer (which may be repeated)")
    for_s = FOR_S if wanted.for_s is None else wanted.for_s
    if wanted.interface is None:
        return _towards(scene, wanted.peers, for_s)
    name = check_interface(scene, wanted.interface)
    kept_routes = routes(name)
    # Neither root nor the kernel would bring these back.
    kept = [("ip", "route", "replace", *words, "dev", name) for words in kept_routes]
    kept += [("ip", "-6", "addr", "replace", it, "dev", name) for it in global_addresses6(name)]
    is_default = any(words[0] == "default" for words in kept_routes)
    shell = " The default route goes through it: so may your shell." if is_default else ""
    return Fault(
        scenario="cut-link",
        breaks=f"Interface {name} goes down: nothing gets through it, not of the run alone.{shell}",
        undone=f"After {seconds(for_s)} it comes up again with its routes and addresses, also when "
        "this command ends or is killed.",
        entities=(Entity(EntityKind.LINK, name),),
        changes=(
            *(Change(None, RunProgram(words)) for words in reversed(kept)),
            Change(
                RunProgram(("ip", "link", "set", "dev", name, "down")),
                RunProgram(("ip", "link", "set", "dev", name, "up")),
            ),
        ),
        for_s=for_s,
    )


def _towards(scene: Scene, peers: tuple[str, ...], for_s: float) -> Fault:
    check_permission(scene)
    prefixes = [host_prefix(peer) for peer in peers]
    return Fault(
        scenario="cut-link",
        breaks=f"Nothing that this machine sends to {', '.join(peers)} leaves it.",
        undone=f"After {seconds(for_s)} it does again, also when this command ends or is killed.",
        entities=tuple(Entity(EntityKind.LINK, peer) for peer in peers),
        changes=tuple(
            Change(
                RunProgram(("ip", "route", "add", "blackhole", prefix)),
                RunProgram(("ip", "route", "del", "blackhole", prefix)),
            )
            for prefix in prefixes
        ),
        for_s=for_s,
    )


SCENARIO = Scenario(
    name="cut-link",
    summary="Take an interface down, or cut off some peers.",
    options=("interface", "peers", "for_s"),
    plan=plan,
)
