"""The settings of ``gpuops burnin`` and ``gpuops sweep``: the table ``[burnin]``."""

from collections.abc import Callable
from typing import Any

from gpuops.config.schema import DURATION_S_MAX, Setting, seconds_up_to, to_text

BURNIN_TIERS = ("10m", "30m", "60m")


def to_percent(value: object) -> float:
    """Return *value*, a percentage above zero and below a hundred."""
    try:
        percent = float(value) if isinstance(value, str) else value
    except ValueError:
        percent = None
    if isinstance(percent, bool) or not isinstance(percent, int | float) or not 0 < percent < 100:
        raise ValueError("expected a percentage above 0 and below 100")
    return float(percent)


def to_tier(value: object) -> str:
    """Return the tier of a burn-in in *value*."""
    if value not in BURNIN_TIERS:
        raise ValueError(f"expected one of {', '.join(BURNIN_TIERS)}")
    return str(value)


def _burnin_setting(
    name: str,
    parse: Callable[[object], Any],
    default: object,
    help: str,  # noqa: A002 the field's name
) -> Setting:
    env = f"GPUOPS_BURNIN_{name.upper()}"
    return Setting(f"burnin.{name}", env, parse, lambda _env, _root: default, help)


_SLOWER = "by how many percent a part is slower than the others of its node when it"
BURNIN_SETTINGS = (
    _burnin_setting("tier", to_tier, "10m", "which tests `gpuops burnin` runs, and how long"),
    _burnin_setting("peers_warn_percent", to_percent, 7.0, f"{_SLOWER} warns"),
    _burnin_setting("peers_fail_percent", to_percent, None, f"{_SLOWER} fails; unset: never"),
    _burnin_setting(
        "sweep_max_age",
        seconds_up_to(DURATION_S_MAX),
        86_400.0,
        "`gpuops run --preflight sweep`: how old a node's last sweep may be; seconds, or as 24h",
    ),
    _burnin_setting("ssh", to_text, "ssh -o BatchMode=yes", "how a sweep starts on other hosts"),
)
