"""The faults that a worker injects into itself, as ``GPUOPS_DRILL`` names them.

``KIND:key=value,...``, for example ``slow:rank=1,step=20,factor=1.5``. The agent reads it with
``gpuops run --allow-drills`` only, and hands it to the workers, which obey it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gpuops.errors import UsageError

VARIABLE = "GPUOPS_DRILL"
ALL = "all"
_NUMBER_MAX = 10**9

# Each makes one rank slow, or several, from a step on.
SLOW_KINDS: Mapping[str, str] = {
    "slow": "its steps take factor times as long",
    "ramp": "its steps take longer and longer, up to factor after so many steps as every says",
    "periodic": "it is slow for every steps, then quick for as many",
    "rotating": "another rank is slow after every steps",
}
# Each stops a rank once, at a step.
ALONE_KINDS: Mapping[str, str] = {
    "sleep": "it sleeps outside a collective",
    "hold-lock": "it holds Python's global interpreter lock",
    "receive-alone": "it waits for a message that no rank sends",
    "stuck-loader": "its data loader gives no next batch",
}
# In each all ranks call collectives at a step, and the rank calls others.
COLLECTIVE_KINDS: Mapping[str, str] = {
    "skip-collective": "it leaves out an all_reduce that the others call",
    "cross-groups": "it calls the collectives of two groups in the other order",
    "other-operation": "it calls a broadcast where the others call an all_reduce",
    "other-shape": "it calls an all_reduce with more elements than the others",
    "other-dtype": "it calls an all_reduce with another dtype than the others",
}
KINDS: Mapping[str, str] = {**SLOW_KINDS, **ALONE_KINDS, **COLLECTIVE_KINDS}
_KEYS = ("rank", "node", "step", "generation", "factor", "every", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDrill:
    """A fault of ``ranks`` (None: of all), of a worker's ``step``-th step on (from 1).

    ``node``: only the workers of this node. ``generation`` None: in every one. ``seconds``: how
    long one that sleeps, holds the lock or blocks its loader does so.
    """

    kind: str
    ranks: frozenset[int] | None = None
    node: str | None = None
    step: int = 10
    generation: int | None = 0
    factor: float = 1.5
    every: int = 20
    seconds: float = 3600.0

    def extra_share(self, rank: int, step: int, n_ranks: int) -> float:
        """Return what *rank* adds to *step*, as a share of the time of a step."""
        number = step - self.step
        if self.kind not in SLOW_KINDS or number < 0:
            return 0.0
        turn = number // self.every
        if self.kind == "rotating":
            return self.factor - 1 if rank == turn % n_ranks else 0.0
        if not self.is_meant(rank) or (self.kind == "periodic" and turn % 2):
            return 0.0
        share = min(1.0, (number + 1) / self.every) if self.kind == "ramp" else 1.0
        return share * (self.factor - 1)

    def is_meant(self, rank: int) -> bool:
        """Return whether it is a fault of *rank*."""
        return self.ranks is None or rank in self.ranks


def drill_of_run(env: Mapping[str, str], *, is_allowed: bool) -> WorkerDrill | None:
    """Return the fault that *env* names, None without one and where none is allowed.

    Raises:
        UsageError: It is allowed, and names none.
    """
    text = env.get(VARIABLE, "")
    return parse_drill(text) if text and is_allowed else None


def parse_drill(text: str) -> WorkerDrill:
    """Return the fault that *text* names.

    Raises:
        UsageError: It names none.
    """
    kind, _, rest = text.strip().partition(":")
    if kind not in KINDS:
        raise UsageError(
            f"{VARIABLE}={text!r:.120}: there is no fault {kind!r:.40}; `gpuops drill list` names"
            f" those of a worker: {', '.join(KINDS)}"
        )
    values = dict(item.strip().partition("=")[::2] for item in rest.split(",") if item.strip())
    if unknown := sorted(values.keys() - set(_KEYS)):
        raise UsageError(
            f"{VARIABLE}={text!r:.120}: unknown {', '.join(unknown)}; known are {', '.join(_KEYS)}"
        )
    try:
        return _drill(kind, values)
    except ValueError as exc:
        raise UsageError(f"{VARIABLE}={text!r:.120}: {exc}") from None


def _drill(kind: str, values: Mapping[str, str]) -> WorkerDrill:
    if "rank" not in values and "node" not in values and kind != "rotating":
        raise ValueError(f"it names no rank: add rank=1, rank=0+2 or rank={ALL}")
    if "node" in values and kind not in SLOW_KINDS:
        raise ValueError(f"node= is for {', '.join(SLOW_KINDS)}: the other faults need all ranks")
    ranks, generation = values.get("rank", ALL), values.get("generation", "0")
    return WorkerDrill(
        kind=kind,
        ranks=None if ranks == ALL else frozenset(_whole("rank", r, 0) for r in ranks.split("+")),
        node=values.get("node"),
        step=_whole("step", values.get("step", "10"), 1),
        generation=None if generation == ALL else _whole("generation", generation, 0),
        factor=_positive("factor", values.get("factor", "1.5"), 1.0),
        every=_whole("every", values.get("every", "20"), 1),
        seconds=_positive("seconds", values.get("seconds", "3600"), 0.0),
    )


def _whole(key: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= _NUMBER_MAX:
        raise ValueError(f"{key}={text:.40} is not a whole number from {least} on")
    return int(text)


def _positive(key: str, text: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= _NUMBER_MAX:
        raise ValueError(f"{key}={text:.40} is not a number from {least:g} on")
    return value
