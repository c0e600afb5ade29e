"""``--rdzv-conf``: which of torchrun's keys mean something here."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpuops.errors import UsageError

# torch's defaults for its keep-alive; see `Timing`.
INTERVAL_S, ATTEMPTS = 5.0, 3
_TAKEN = frozenset(
    (
        "join_timeout",
        "last_call_timeout",
        "is_host",
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "store_lost_timeout",
    )
)
# Of torch's own store and rendezvous, of which nothing is left here.
_NEEDLESS = frozenset(
    ("rank", "timeout", "close_timeout", "read_timeout", "store_type", "use_libuv")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What ``--rdzv-conf`` says; None where it is silent.

    ``dead_s`` is torch's keep_alive_interval times keep_alive_max_attempt: silence that is death.
    ``store_lost_s`` has no key of torch's: without the board for so long, a run is given up.
    ``ignored`` are keys that change nothing.
    """

    join_timeout_s: float | None = None
    last_call_s: float | None = None
    dead_s: float | None = None
    store_lost_s: float | None = None
    is_host: bool | None = None
    ignored: tuple[str, ...] = ()


def parse_conf(text: str, shown: str = "--rdzv-conf") -> Timing:
    """Return what ``key=value,key=value`` says.

    Raises:
        UsageError: Not of that form, or a value that is not what its key takes.
    """
    pairs: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"{shown}: {item!r} is not key=value")
        pairs[key.strip().lower()] = value.strip()
    return Timing(
        join_timeout_s=_seconds(pairs, "join_timeout", shown),
        last_call_s=_seconds(pairs, "last_call_timeout", shown),
        dead_s=_dead_s(pairs, shown),
        store_lost_s=_seconds(pairs, "store_lost_timeout", shown),
        is_host=_truth(pairs, "is_host", shown),
        ignored=tuple(sorted(pairs.keys() - _TAKEN - _NEEDLESS)),
    )


def _dead_s(pairs: Mapping[str, str], shown: str) -> float | None:
    if not pairs.keys() & {"keep_alive_interval", "keep_alive_max_attempt"}:
        return None
    interval_s = _seconds(pairs, "keep_alive_interval", shown) or INTERVAL_S
    attempts = _seconds(pairs, "keep_alive_max_attempt", shown) or ATTEMPTS
    return interval_s * attempts


def _seconds(pairs: Mapping[str, str], key: str, shown: str) -> float | None:
    if key not in pairs:
        return None
    try:
        seconds = float(pairs[key])
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{shown}: {key}={pairs[key]}: a number above zero is wanted")
    return seconds


def _truth(pairs: Mapping[str, str], key: str, shown: str) -> bool | None:
    words = {"1": True, "true": True, "t": True, "yes": True, "y": True}
    words |= {"0": False, "false": False, "f": False, "no": False, "n": False}
    if key not in pairs:
        return None
    if pairs[key].lower() not in words:
        raise UsageError(f"{shown}: {key}={pairs[key]}: 1 or 0 is wanted")
    return words[pairs[key].lower()]
