"""The plan of a job as JSON, ``gpuops.checkpoint-plan/1``: a contract that users script against."""

from dataclasses import asdict

from gpuops.checkpoint.interval import TierInterval
from gpuops.checkpoint.plan_figures import Plan
from gpuops.checkpoint.ram import options
from gpuops.model import Json


def plan_json(plan: Plan, ram_bytes: int | None, refused: str | None) -> Json:
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
        "ram": _ram(plan, ram_bytes, refused),
        "seconds": asdict(plan.seconds),
        "failures": {
            "mtbf_s": job.mtbf_s,
            "missed": plan.missed,
            "restart_s": job.restart_s,
        },
        "stall_s": plan.stall_s,
        "slowdown": job.slowdown,
        "step_s": job.step_s,
        "tiers": None
        if plan.tiers is None
        else {
            "memory": _tier(plan.tiers.memory, job.step_s),
            "persistent": _tier(plan.tiers.persistent, job.step_s),
        },
        "waste": None if plan.tiers is None else plan.tiers.waste,
    }


def _ram(plan: Plan, ram_bytes: int | None, refused: str | None) -> Json:
    need = plan.job.need
    return {
        **asdict(need),
        "state_bytes": need.state_bytes,
        "own_bytes": need.own_bytes,
        "peers_bytes": need.peers_bytes,
        "total_bytes": need.total_bytes,
        "available_bytes": ram_bytes,
        "refused": refused,
        "options": [
            {"gives_up": option.rung.value, "total_bytes": option.need.total_bytes}
            for option in options(need)
        ],
    }


def _tier(tier: TierInterval | None, step_s: float | None) -> Json | None:
    if tier is None:
        return None
    steps = None if step_s is None else max(1, round(tier.interval_s / step_s))
    return {**asdict(tier), "interval_steps": steps}
