"""The figures of a benchmark: medians, extremes, ratios to the limits, and the goals."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpuops.worker.bench.limits import Surroundings
from gpuops.worker.bench.savers import GPUOPS, MEMCPY, RAW, RAW_DIRECT, BenchJob

LIMITS = "memcpy + hash"


@dataclass(frozen=True, slots=True)
class SaveSample:
    """One save.

    ``stall_s``: the duration of the call. ``extra_s``: the step with the save in it, less the mean
    of the steps just before and just after the save, since a shared machine drifts.
    ``recoverable_s`` and ``durable_s`` count from the end of the training step. ``loss``: how much
    slower the steps between call and durability were, as a share of their rate; None where there
    were none. ``lost_s``: all the training time that the save took.
    """

    stall_s: float
    extra_s: float
    recoverable_s: float | None
    durable_s: float
    loss: float | None
    lost_s: float


def save_figures(
    job: BenchJob,
    samples: Mapping[str, Mapping[int, SaveSample]],
    around: Mapping[int, Surroundings],
) -> dict[str, Any]:
    """Return the figures of all ways, and of gpuops the ratios to others of the same round.

    *around*: by round, the limits right before and right after gpuops saved. Ratios to them are
    those of quiet rounds, if there are any but the cold one.
    """
    ours = samples[GPUOPS]
    quiet = quiet_rounds(around)
    ratios = {
        "stall over " + name: summarize(ours[at].stall_s / each[at].stall_s for at in each)
        for name, each in samples.items()
        if name not in {GPUOPS, MEMCPY, RAW, RAW_DIRECT}
    }
    limits = [(ours[at], around[at].mean) for at in quiet]
    ratios |= {
        "stall over " + MEMCPY: summarize(one.stall_s / limit.memcpy_s for one, limit in limits),
        "recoverable over " + LIMITS: summarize(
            (one.recoverable_s or 0.0) / (limit.memcpy_s + limit.hash_s) for one, limit in limits
        ),
        "durable over " + RAW_DIRECT: summarize(
            one.durable_s / limit.write_s for one, limit in limits
        ),
    }
    return {
        "nbytes": job.nbytes,
        "n_tensors": len(job.tensors()),
        "quiet_rounds": count_quiet(around),
        "hash": summarize(each.mean.hash_s for each in around.values()),
        "ways": [{"way": name, **_summaries(each.values())} for name, each in samples.items()],
        "ratios": ratios,
    }


def restore_figures(
    took: Mapping[str, Sequence[float]], around: Mapping[int, Surroundings]
) -> dict[str, Any]:
    """Return the seconds of each way to restore, and the ratio of gpuops to memcpy around it."""
    ours = took[GPUOPS]
    ratio = summarize(ours[at] / around[at].mean.memcpy_s for at in quiet_rounds(around))
    return {
        "quiet_rounds": count_quiet(around),
        "ways": [{"way": name, "seconds": summarize(seconds)} for name, seconds in took.items()],
        "ratios": {"recovery over " + MEMCPY: ratio},
    }


def quiet_rounds(around: Mapping[int, Surroundings]) -> list[int]:
    """Return the cold round and the quiet ones; all where no other was quiet."""
    cold, *others = sorted(around)
    quiet = [at for at in others if around[at].is_quiet]
    return [cold, *(quiet or others)]


def count_quiet(around: Mapping[int, Surroundings]) -> dict[str, int]:
    """Return how many rounds but the cold one were quiet, and how many there were."""
    _cold, *others = sorted(around)
    return {"quiet": sum(around[at].is_quiet for at in others), "of": len(others)}


def _summaries(samples: Iterable[SaveSample]) -> dict[str, Any]:
    fields = [asdict(each) for each in samples]
    return {name: summarize(each[name] for each in fields) for name in fields[0]}


def summarize(values: Iterable[float | None]) -> dict[str, Any]:
    """Return the first value separately, and median and extremes of the others."""
    first, *rest = list(values)
    there = [value for value in rest if value is not None]
    return {
        "first": first,
        "median": statistics.median(there) if there else None,
        "min": min(there, default=None),
        "max": max(there, default=None),
        "n": len(there),
    }


def limit_goals(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for each limit of the hardware the measurement, the goal, and whether it is met."""
    rows = []

    def at_most(metric: str, beside: str, figures: Mapping[str, Any], bound: float) -> None:
        value = figures["median"]
        rows.append(
            {
                "metric": metric,
                "beside": beside,
                "value": value,
                "min": figures["min"],
                "max": figures["max"],
                "goal": f"at most {bound:g}",
                "met": value is not None and value <= bound,
            }
        )

    if "save" in found:
        ratios = found["save"]["ratios"]
        loss = {way["way"]: way["loss"] for way in found["save"]["ways"]}
        at_most("stall", MEMCPY, ratios["stall over " + MEMCPY], 1.1)
        at_most("recoverable", LIMITS, ratios["recoverable over " + LIMITS], 1.1)
        at_most("durable", RAW_DIRECT, ratios["durable over " + RAW_DIRECT], 1.1)
        at_most("training slower while persisting", "no save", loss[GPUOPS], 0.04)
    if "recovery" in found:
        at_most("recovery", MEMCPY, found["recovery"]["ratios"]["recovery over " + MEMCPY], 1.15)
    return rows
