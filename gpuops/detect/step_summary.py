"""The newest steps of one rank in at most 48 bytes, which agents publish for the leader. Pure.

Layout, little endian: the number of the first step, the median of the seconds, the median time of a
step, the shares of the data loader and of the optimizer (1/255), the role (its highest bit: seconds
in collectives instead of own time), then a byte a step: the logarithm of its seconds over the
median in hundredths, -128 for a step without a number.
"""

import base64
import binascii
import math
import statistics
import struct
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from gpuops.detect.own_time import Measure, RankSteps
from gpuops.detect.slow_rank import GROUP_MIN

STEPS_MAX = 30
_HEAD = struct.Struct("<IffBBI")
SUMMARY_BYTES_MAX = _HEAD.size + STEPS_MAX
_UNIT = 0.01
_CLIP = 127
_MISSING = -128
_MEASURE_BIT = 31
# A job that only waits would have no time of its own; this is far below any limit.
_OWN_SHARE_MIN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """What the leader knows of a rank: its ``seconds`` by step, of ``measure``."""

    role: int
    measure: Measure
    seconds: Mapping[int, float]
    step_s: float
    data_share: float
    optimizer_share: float


def pack_summary(steps: RankSteps) -> str:
    """Return the newest `STEPS_MAX` steps of a rank as base64, "" where it has none."""
    known = {step: s for step, s in steps.seconds.items() if math.isfinite(s) and s > 0}
    newest = [step for step in known if step > max(known) - STEPS_MAX]
    if not newest:
        return ""
    first, median_s = min(newest), statistics.median(known[step] for step in newest)
    units = (
        max(-_CLIP, min(_CLIP, round(math.log(known[step] / median_s) / _UNIT)))
        if step in known
        else _MISSING
        for step in range(first, max(newest) + 1)
    )
    shares = (round(255 * min(1.0, x)) for x in (steps.data_share, steps.optimizer_share))
    role = steps.role | steps.measure << _MEASURE_BIT
    head = _HEAD.pack(first % 2**32, median_s, steps.step_s, *shares, role)
    return base64.b64encode(head + struct.pack(f"{max(newest) + 1 - first}b", *units)).decode()


def unpack_summary(text: object) -> StepSummary:
    """Return the summary in *text*, as `pack_summary` made it.

    Raises:
        ValueError: It is none.
    """
    try:
        raw = base64.b64decode(text if isinstance(text, str) else "", validate=True)
    except binascii.Error as exc:
        raise ValueError(f"a summary of steps is base64: {exc}") from exc
    if not _HEAD.size < len(raw) <= SUMMARY_BYTES_MAX:
        raise ValueError(f"{len(raw)} bytes are no summary of steps")
    first, median_s, step_s, data, optimizer, role = _HEAD.unpack_from(raw)
    if not (0 < median_s < math.inf and 0 < step_s < math.inf):
        raise ValueError(f"{median_s} and {step_s} are no times of a step")
    units = struct.unpack(f"{len(raw) - _HEAD.size}b", raw[_HEAD.size :])
    return StepSummary(
        role=role & (1 << _MEASURE_BIT) - 1,
        measure=Measure(role >> _MEASURE_BIT),
        seconds={
            step: median_s * math.exp(unit * _UNIT)
            for step, unit in enumerate(units, first)
            if unit != _MISSING
        },
        step_s=step_s,
        data_share=data / 255,
        optimizer_share=optimizer / 255,
    )


def own_by_step(summaries: Mapping[int, StepSummary]) -> dict[int, dict[int, float]]:
    """Return the own time of each rank by step, of ranks of one role.

    Of seconds in collectives those beyond the least of all ranks are waiting.
    """
    seconds: dict[int, dict[int, float]] = defaultdict(dict)
    for rank, summary in summaries.items():
        for step, value_s in summary.seconds.items():
            seconds[step][rank] = value_s
    if all(summary.measure is Measure.OWN for summary in summaries.values()):
        return dict(seconds)
    step_s = statistics.median(summary.step_s for summary in summaries.values())
    return {
        step: {
            rank: max(step_s * _OWN_SHARE_MIN, step_s - value_s + min(by_rank.values()))
            for rank, value_s in by_rank.items()
        }
        for step, by_rank in seconds.items()
    }


def slowdowns_of(published: Mapping[str, object]) -> dict[str, float]:
    """Return by node how many times as long its slowest rank worked as those of its role.

    *published* is what their straggler monitors say; what cannot be read is left out, and a role of
    fewer than `GROUP_MIN` ranks: of two nobody can say which is slow.
    """
    nodes: dict[int, str] = {}
    roles: dict[tuple[int, Measure], dict[int, StepSummary]] = {}
    for node, body in published.items():
        ranks = body.get("ranks") if isinstance(body, Mapping) else None
        for rank, about in ranks.items() if isinstance(ranks, Mapping) else ():
            with suppress(ValueError, TypeError, KeyError):
                summary, number = unpack_summary(about["steps"]), int(rank)
                roles.setdefault((summary.role, summary.measure), {})[number] = summary
                nodes[number] = node
    found: dict[str, float] = {}
    for peers in roles.values():
        times: dict[int, list[float]] = {}
        for step_s in own_by_step(peers).values():
            for rank, seconds in step_s.items():
                times.setdefault(rank, []).append(seconds)
        own = {rank: statistics.median(each) for rank, each in times.items()}
        if len(own) < GROUP_MIN:
            continue
        middle_s = statistics.median(own.values())
        for rank, own_s in own.items():
            found[nodes[rank]] = max(found.get(nodes[rank], 0.0), own_s / middle_s)
    return found


def gain_without(step_s: float, own_s: float, peers_s: float) -> float:
    """Return by which share a job were faster if a rank took *peers_s* of its own, not *own_s*.

    A step takes as long as its slowest rank (the closed form of the what-if analysis of Lin et al.,
    OSDI 2025). At most what leaves *peers_s* of a step.
    """
    without_s = max(step_s - max(0.0, own_s - peers_s), peers_s, 1e-9)
    return max(0.0, step_s / without_s - 1)
