"""What ``gpuops ckpt plan`` prints."""

from collections.abc import Iterator, Sequence

from gpuops.checkpoint.interval import TierInterval
from gpuops.checkpoint.plan_figures import Plan
from gpuops.checkpoint.ram import described, options
from gpuops.checkpoint.recovery_odds import DomainLoss
from gpuops.checkpoint.spread import Spread
from gpuops.hostlist import compress
from gpuops.report.text import count, cut, labelled, table
from gpuops.units import format_bytes, format_seconds

BLOCKS_MAX = 8
DOMAINS_MAX = 6
WIDTH = 100


def plan_text(plan: Plan, ram_bytes: int | None, refused: str | None, *, mtbf_from: str) -> str:
    """Return *plan* for a terminal; *mtbf_from* says where the time between failures is from."""
    parts = (
        _placement(plan),
        _recovery(plan),
        _domains(plan),
        _costs(plan, ram_bytes, refused),
        _intervals(plan, mtbf_from),
    )
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part)))


def _placement(plan: Plan) -> Iterator[str]:
    placed = plan.placement
    sizes = [f"{count(len(placed.groups), 'group')} of {placed.replicas}"] if placed.groups else []
    if placed.ring:
        sizes.append(f"a ring of {len(placed.ring)}")
    copies = "1 copy" if placed.replicas == 1 else f"{placed.replicas} copies"
    head = f"{count(len(placed.nodes), 'node')}, {copies} of each state"
    yield labelled("placement", f"{head}: {' and '.join(sizes)}")
    if placed.replicas == 1:
        yield labelled("", "no node holds another's state: with a node its state is lost")
        return
    shown, hidden = list(placed.groups), 0
    if len(shown) > BLOCKS_MAX:
        hidden = len(shown) - BLOCKS_MAX + 1
        shown = [*shown[: BLOCKS_MAX - 2], shown[-1]]
    for number, group in enumerate(shown):
        if hidden and number == BLOCKS_MAX - 2:
            yield f"{'':11}... {hidden} more"
        yield f"{'':11}{cut(_group(group), WIDTH - 11)}"
    if placed.ring:
        more = " ..." if len(placed.ring) > BLOCKS_MAX else ""
        yield labelled("", f"ring: {' > '.join(placed.ring[:BLOCKS_MAX])}{more}")


def _group(nodes: Sequence[str]) -> str:
    try:
        return compress(nodes)
    except ValueError:
        return ", ".join(nodes)


def _recovery(plan: Plan) -> Iterator[str]:
    rows = [
        [
            str(each.odds.lost),
            _chance(each.odds.missed),
            f"{100 * each.bound:.4g} %",
            _chance(each.ring.missed),
        ]
        for each in plan.recoveries
    ]
    head = [
        "nodes lost at once",
        "recovered from memory",
        "at least (paper)",
        "if all were one ring",
    ]
    yield table(head, rows, right=(0, 1, 2, 3))


def _chance(missed: float) -> str:
    """Return what is left of 1, with as many digits as show the difference to 1."""
    if missed in {0.0, 1.0}:
        return f"{100 * (1 - missed):.0f} %"
    digits = 1
    while digits < 12 and round(100 * missed, digits) < 2 * 10**-digits:
        digits += 1
    return f"{100 * (1 - missed):.{digits}f} %"


def _domains(plan: Plan) -> Iterator[str]:
    if not plan.spreads:
        yield labelled("domains", "none given: what falls together is not known; see --domains")
        return
    by_level: dict[str, list[DomainLoss]] = {}
    for loss in plan.losses:
        by_level.setdefault(loss.level, []).append(loss)
    rows = [_level(level, by_level[level.level]) for level in plan.spreads]
    head = ["lost whole", "domains", "largest", "survived", "domains per state", "lost with one"]
    yield table(head, rows, right=(1, 2, 3, 4))
    for level in plan.spreads:
        if level.together > level.together_at_best:
            yield (
                f"{level.level}: {count(level.together, 'state')} with all copies in one, where no"
                f" placement has fewer than {level.together_at_best}"
            )


def _level(level: Spread, losses: Sequence[DomainLoss]) -> list[str]:
    fatal = [loss for loss in losses if not loss.is_survived]
    names = ", ".join(
        f"{'/'.join(loss.domain)} ({count(len(loss.lost_states), 'state')})"
        for loss in fatal[:DOMAINS_MAX]
    )
    more = f" and {len(fatal) - DOMAINS_MAX} more" if len(fatal) > DOMAINS_MAX else ""
    return [
        level.level,
        str(level.n_domains),
        count(level.largest, "node"),
        f"{len(losses) - len(fatal)} of {len(losses)}",
        f"{level.met:.2f} of {level.met_at_best:.2f}",
        f"{names}{more}" if fatal else "-",
    ]


def _costs(plan: Plan, ram_bytes: int | None, refused: str | None) -> Iterator[str]:
    need, seconds = plan.job.need, plan.seconds
    there = "" if ram_bytes is None or refused else f", of {format_bytes(ram_bytes)}"
    yield labelled("RAM", refused or f"{need}{there}")
    if ram_bytes is None:
        for option in options(need)[1:]:
            yield labelled("", f"{format_bytes(option.need.total_bytes)} with {described(option)}")
    state = format_bytes(need.state_bytes)
    if plan.placement.replicas > 1:
        yield labelled("replica", _sent(plan, state))
    if seconds.persist_s is None:
        yield labelled("persist", f"{state} a node; seconds with --disk-gbs")
    else:
        yield labelled("persist", f"{format_seconds(seconds.persist_s)} for {state} a node")


def _sent(plan: Plan, state: str) -> str:
    seconds = plan.seconds
    if seconds.replica_s is None or seconds.replicas_s is None:
        return f"{state} a node; seconds with --nic-gbps"
    text = f"{format_seconds(seconds.replica_s)} for {state} a node"
    if plan.placement.replicas > 2:
        text += f", {format_seconds(seconds.replicas_s)} for its {plan.placement.replicas - 1}"
    return text


def _intervals(plan: Plan, mtbf_from: str) -> Iterator[str]:
    job = plan.job
    missed = "" if job.missed is not None else " (as if each took two nodes)"
    yield labelled(
        "failures",
        f"every {job.mtbf_s / 3600:.4g} h{mtbf_from}, restart {format_seconds(job.restart_s)};"
        f" memory cannot serve {100 * plan.missed:.3g} %{missed}",
    )
    assumed = "" if job.stall_s is not None else " (assumed: 55 GB/s per GPU, overlapping nothing)"
    yield labelled("stall", f"{format_seconds(plan.stall_s)} a save{assumed}")
    if plan.tiers is None:
        yield labelled("intervals", "with --nic-gbps and --disk-gbs")
        return
    rows = [
        _tier(name, tier, job.step_s)
        for name, tier in (("memory", plan.tiers.memory), ("persistent", plan.tiers.persistent))
    ]
    yield table(["tier", "Young", "Daly", "exact", "save every", "waste"], rows, right=(1, 2, 3, 5))
    yield labelled("waste", f"{100 * plan.tiers.waste:.3g} % of the time, restarts included")


def _tier(name: str, tier: TierInterval | None, step_s: float | None) -> list[str]:
    if tier is None:
        return [name, "-", "-", "-", "serves no failure counted here", "-"]
    chosen = format_seconds(tier.interval_s)
    if step_s is not None:
        chosen += f", {count(max(1, round(tier.interval_s / step_s)), 'step')}"
    if tier.interval_s > tier.optimum_s:
        chosen += " (cannot be sooner)"
    times = [format_seconds(value) for value in (tier.young_s, tier.daly_s, tier.optimum_s)]
    return [name, *times, chosen, f"{100 * tier.waste:.3g} %"]
