"""The output of ``gpuops ckpt plan``: text, or ``gpuops.checkpoint-plan/1``, a contract."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from gpuops.agent.checkpoint.exchange import EXCHANGES_PER_COMMIT, exchange_s
from gpuops.checkpoint.placement.estimate import CheckpointEstimate, describe_option, ram_options
from gpuops.checkpoint.placement.survival import DomainLoss, DomainSpread
from gpuops.hostlist import compress
from gpuops.model import Json
from gpuops.plan.interval import TierInterval
from gpuops.report.render.layout import count_noun, labelled, table, truncate
from gpuops.units import format_bytes, format_seconds


def plan_json(plan: CheckpointEstimate, ram_bytes: int | None, refusal_text: str | None) -> Json:
    """Return *plan*; times in seconds, sizes in bytes, shares and probabilities from 0 to 1."""
    job = plan.job
    return {
        "nodes": list(job.nodes),
        "replicas": job.replicas,
        "placement": {
            "groups": list(map(list, plan.placement.groups)),
            "ring": list(plan.placement.ring),
        },
        "spreads": [asdict(level) for level in plan.spreads],
        "recoveries": [
            {
                "lost": each.odds.lost,
                "probability": each.odds.probability,
                "missed": each.odds.missed,
                "bound": each.bound,
                "ring": each.ring.probability,
            }
            for each in plan.recoveries
        ],
        "domains": [
            {
                "level": loss.level,
                "domain": "/".join(loss.domain),
                "nodes": loss.n_nodes,
                "survived": loss.is_survived,
                "lost_states": list(loss.lost_states),
            }
            for loss in plan.losses
        ],
        "ram": _ram_json(plan, ram_bytes, refusal_text),
        "seconds": asdict(plan.times),
        "failures": {"mtbf_s": job.mtbf_s, "missed": plan.missed, "restart_s": job.restart_s},
        "stall_s": plan.stall_s,
        "slowdown": job.slowdown,
        "step_s": job.step_s,
        "tiers": None
        if plan.tiers is None
        else {
            "memory": _tier_json(plan.tiers.memory, job.step_s),
            "persistent": _tier_json(plan.tiers.persistent, job.step_s),
        },
        "waste": None if plan.tiers is None else plan.tiers.waste,
    }


def _ram_json(plan: CheckpointEstimate, ram_bytes: int | None, refusal_text: str | None) -> Json:
    need = plan.job.need
    return {
        **asdict(need),
        "state_bytes": need.state_bytes,
        "replica_bytes": need.replica_bytes,
        "own_bytes": need.own_bytes,
        "peers_bytes": need.peers_bytes,
        "total_bytes": need.total_bytes,
        "available_bytes": ram_bytes,
        "refused": refusal_text,
        "options": [
            {"gives_up": option.saving.value, "total_bytes": option.need.total_bytes}
            for option in ram_options(need)
        ],
    }


def _tier_json(tier: TierInterval | None, step_s: float | None) -> Json | None:
    if tier is None:
        return None
    steps = None if step_s is None else max(1, round(tier.interval_s / step_s))
    return {**asdict(tier), "interval_steps": steps}


BLOCKS_MAX = 8
DOMAINS_MAX = 6
WIDTH = 100


def plan_text(
    plan: CheckpointEstimate, ram_bytes: int | None, refusal_text: str | None, *, mtbf_from: str
) -> str:
    """Return *plan* as text; *mtbf_from* names the source of the time between failures."""
    parts = (
        _placement(plan),
        _recovery(plan),
        _domains(plan),
        _cost_lines(plan, ram_bytes, refusal_text),
        _intervals(plan, mtbf_from),
    )
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part)))


def _placement(plan: CheckpointEstimate) -> Iterator[str]:
    placement = plan.placement
    sizes = (
        [f"{count_noun(len(placement.groups), 'group')} of {placement.replicas}"]
        if placement.groups
        else []
    )
    if placement.ring:
        sizes.append(f"a ring of {len(placement.ring)}")
    copies = "1 copy" if placement.replicas == 1 else f"{placement.replicas} copies"
    head = f"{count_noun(len(placement.nodes), 'node')}, {copies} of each state"
    yield labelled("placement", f"{head}: {' and '.join(sizes)}")
    if placement.replicas == 1:
        why = (
            "there is no other node to hold a copy"
            if len(placement.nodes) == 1
            else ("no node holds another's state")
        )
        yield labelled("", f"{why}: a lost node loses its state")
        return
    shown, hidden = list(placement.groups), 0
    if len(shown) > BLOCKS_MAX:
        hidden = len(shown) - BLOCKS_MAX + 1
        shown = [*shown[: BLOCKS_MAX - 2], shown[-1]]
    for number, group in enumerate(shown):
        if hidden and number == BLOCKS_MAX - 2:
            yield f"{'':11}... {hidden} more"
        yield f"{'':11}{truncate(_group_text(group), WIDTH - 11)}"
    if placement.ring:
        more = " ..." if len(placement.ring) > BLOCKS_MAX else ""
        yield labelled("", f"ring: {' > '.join(placement.ring[:BLOCKS_MAX])}{more}")


def _group_text(nodes: Sequence[str]) -> str:
    try:
        return compress(nodes)
    except ValueError:
        return ", ".join(nodes)


def _recovery(plan: CheckpointEstimate) -> Iterator[str]:
    rows = [
        [
            str(each.odds.lost),
            _probability_text(each.odds.missed),
            f"{100 * each.bound:.4g} %",
            _probability_text(each.ring.missed),
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


def _probability_text(missed: float) -> str:
    """Return 1 - *missed* in percent, with enough digits to show the difference to 100."""
    if missed in {0.0, 1.0}:
        return f"{100 * (1 - missed):.0f} %"
    digits = 1
    while digits < 12 and round(100 * missed, digits) < 2 * 10**-digits:
        digits += 1
    return f"{100 * (1 - missed):.{digits}f} %"


def _domains(plan: CheckpointEstimate) -> Iterator[str]:
    if not plan.spreads:
        yield labelled("domains", "none given: common failures are unknown; see --domains")
        return
    by_level: dict[str, list[DomainLoss]] = {}
    for loss in plan.losses:
        by_level.setdefault(loss.level, []).append(loss)
    rows = [_level_row(level, by_level[level.level]) for level in plan.spreads]
    head = ["level lost", "domains", "largest", "survived", "domains per state", "lost with one"]
    yield table(head, rows, right=(1, 2, 3, 4))
    for level in plan.spreads:
        if level.together > level.together_at_best:
            yield (
                f"{level.level}: {count_noun(level.together, 'state')} with all copies in one, "
                f"while no placement has fewer than {level.together_at_best}"
            )


def _level_row(level: DomainSpread, losses: Sequence[DomainLoss]) -> list[str]:
    fatal = [loss for loss in losses if not loss.is_survived]
    names = ", ".join(
        f"{'/'.join(loss.domain)} ({count_noun(len(loss.lost_states), 'state')})"
        for loss in fatal[:DOMAINS_MAX]
    )
    more = f" and {len(fatal) - DOMAINS_MAX} more" if len(fatal) > DOMAINS_MAX else ""
    return [
        level.level,
        str(level.n_domains),
        count_noun(level.largest, "node"),
        f"{len(losses) - len(fatal)} of {len(losses)}",
        f"{level.met:.2f} of {level.met_at_best:.2f}",
        f"{names}{more}" if fatal else "-",
    ]


def _cost_lines(
    plan: CheckpointEstimate, ram_bytes: int | None, refusal_text: str | None
) -> Iterator[str]:
    need, seconds = plan.job.need, plan.times
    available = "" if ram_bytes is None or refusal_text else f", of {format_bytes(ram_bytes)}"
    yield labelled("RAM", refusal_text or f"{need}{available}")
    if ram_bytes is None:
        for option in (it for it in ram_options(need)[1:] if it.keeps_optimizer):
            yield labelled(
                "", f"{format_bytes(option.need.total_bytes)} with {describe_option(option)}"
            )
    yield labelled(
        "", "slots are allocated in restore(), in huge pages where shmem_enabled allows them"
    )
    if plan.placement.replicas > 1:
        yield labelled("replica", _replica_time(plan, format_bytes(need.replica_bytes)))
        if need.shared_bytes and need.are_alike:
            held = format_bytes(need.state_bytes - need.replica_bytes)
            yield labelled("", f"no copies of the other {held}: holders have them themselves")
    if len(plan.job.nodes) > 1:
        apart = format_seconds(EXCHANGES_PER_COMMIT * exchange_s(len(plan.job.nodes)))
        yield labelled("commit", f"{apart} or more between two states: all nodes agree on each")
    written = format_bytes(need.persisted_bytes(len(plan.job.nodes)))
    if seconds.persist_s is None:
        yield labelled("persist", f"{written} a node; seconds with --disk-gbs")
    else:
        yield labelled("persist", f"{format_seconds(seconds.persist_s)} for {written} a node")


def _replica_time(plan: CheckpointEstimate, state: str) -> str:
    seconds = plan.times
    if seconds.replica_s is None or seconds.replicas_s is None:
        return f"{state} a node; seconds with --nic-gbps"
    text = f"{format_seconds(seconds.replica_s)} for {state} a node"
    if plan.placement.replicas > 2:
        text += f", {format_seconds(seconds.replicas_s)} for its {plan.placement.replicas - 1}"
    return text


def _intervals(plan: CheckpointEstimate, mtbf_from: str) -> Iterator[str]:
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
        _tier_row(name, tier, job.step_s)
        for name, tier in (("memory", plan.tiers.memory), ("persistent", plan.tiers.persistent))
    ]
    yield table(["tier", "Young", "Daly", "exact", "save every", "waste"], rows, right=(1, 2, 3, 5))
    yield labelled("waste", f"{100 * plan.tiers.waste:.3g} % of the time, restarts included")


def _tier_row(name: str, tier: TierInterval | None, step_s: float | None) -> list[str]:
    if tier is None:
        return [name, "-", "-", "-", "serves no counted failure", "-"]
    chosen = format_seconds(tier.interval_s)
    if step_s is not None:
        chosen += f", {count_noun(max(1, round(tier.interval_s / step_s)), 'step')}"
    if tier.interval_s > tier.optimum_s:
        chosen += " (cannot be sooner)"
    times = [format_seconds(value) for value in (tier.young_s, tier.daly_s, tier.optimum_s)]
    return [name, *times, chosen, f"{100 * tier.waste:.3g} %"]
