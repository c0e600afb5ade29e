"""What the figures are held against: limits of the hardware, and the others, each as a ratio."""

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]
_DCP_THREAD = "dcp.async_save, thread"


def goals(found: dict[str, Any]) -> list[Row]:
    """Return for each goal what was measured beside what, the bound, and whether it was met."""
    return [row for part in (_saving, _small, _recovery, _safety) for row in part(found)]


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
    yield _at_most("stall", "memcpy", ratios["stall over memcpy"]["median"], 1.15)
    for way, times in ((_DCP_THREAD, 5), ("dcp.save", 8)):
        yield _at_least("stall, times less", way, _inverse(ratios.get(f"stall over {way}")), times)
    loss = {way["way"]: way["loss"]["median"] for way in found["save"]["ways"]}
    yield _at_most("training slower while persisting", "no save", loss["gpuops"], 0.08)
    for name in ("recoverable over memcpy + hash", "durable over write + fsync"):
        metric, _, beside = name.partition(" over ")
        yield _at_most(metric, beside, ratios[name]["median"], 1.3 if "hash" in name else 1.15)


def _small(found: dict[str, Any]) -> Iterator[Row]:
    if "small" in found:
        ratios = found["small"]["ratios"]
        metric = "stall of small tensors, times less"
        yield _at_least(metric, "dcp.save", _inverse(ratios.get("stall over dcp.save")), 100)


def _recovery(found: dict[str, Any]) -> Iterator[Row]:
    if "recovery" not in found:
        return
    took = {way["way"]: way["seconds"]["median"] for way in found["recovery"]["ways"]}
    yield _at_most("recovery", "memcpy", took["gpuops"] / took["memcpy"], 1.3)
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
