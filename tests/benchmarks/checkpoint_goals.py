"""What the figures are held against: the other checkpointers, and what may not be lost."""

from collections.abc import Iterator
from typing import Any

from gpuops.worker.bench.run import limit_goals

Row = dict[str, Any]
_DCP_THREAD = "dcp.async_save, thread"


def goals(found: dict[str, Any]) -> list[Row]:
    """Return the goals of ``gpuops ckpt bench``, and those beside others."""
    peers = [row for part in (_saving, _small, _recovery, _safety) for row in part(found)]
    return limit_goals(found) + peers


def _row(metric: str, beside: str, value: float | None, bound: str, *, met: bool) -> Row:
    return {"metric": metric, "beside": beside, "value": value, "goal": bound, "met": met}


def _at_most(metric: str, beside: str, value: float | None, bound: float) -> Row:
    is_met = value is not None and value <= bound
    return _row(metric, beside, value, f"at most {bound:g}", met=is_met)


def _at_least(metric: str, beside: str, value: float | None, bound: float) -> Row:
    is_met = value is not None and value >= bound
    return _row(metric, beside, value, f"at least {bound:g}", met=is_met)


def _saving(found: dict[str, Any]) -> Iterator[Row]:
    if "save" not in found:
        return
    ratios = found["save"]["ratios"]
    for way, times in ((_DCP_THREAD, 5), ("dcp.save", 8)):
        yield _at_least("stall, times less", way, _inverse(ratios.get(f"stall over {way}")), times)


def _small(found: dict[str, Any]) -> Iterator[Row]:
    if "small" in found:
        ratios = found["small"]["ratios"]
        metric = "stall of small tensors, times less"
        yield _at_least(metric, "dcp.save", _inverse(ratios.get("stall over dcp.save")), 100)


def _recovery(found: dict[str, Any]) -> Iterator[Row]:
    if "recovery" not in found:
        return
    took = {way["way"]: way["seconds"]["median"] for way in found["recovery"]["ways"]}
    yield _at_least("recovery, times faster", "dcp.load", took["dcp.load"] / took["gpuops"], 4)


def _safety(found: dict[str, Any]) -> Iterator[Row]:
    for tally in found.get("flips", ()):
        if tally["way"] == "gpuops":
            share = tally["found"] / tally["flips"] if tally["flips"] else None
            yield _at_least(f"bit flips found, {tally['where']}", f"{tally['flips']}", share, 1)
    if "kills" in found:
        kills = found["kills"]
        bad = kills["unrecoverable"] + kills["wrong"]
        yield _at_most("not recovered, or wrong", f"{kills['n']} kills", bad, 0)
        yield _at_most("saves lost", f"{kills['n']} kills", kills["lost_max"], 1)
    for odds in found.get("odds", ()):
        error = abs(odds["exact"] - odds["published"])
        yield _at_most(f"odds of {odds['lost']} lost of 16", "the paper", error, 0.0005)
    if found.get("peer"):
        yield _at_least("peer recovery", "raw socket", found["peer"]["of_raw"], 0.8)


def _inverse(figures: dict[str, Any] | None) -> float | None:
    return 1 / figures["median"] if figures and figures["median"] else None
