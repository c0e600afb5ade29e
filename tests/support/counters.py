"""What a node remembers of its counters, for checks that judge their growth."""

from gpuops.host.node_state import Counters, CounterSample

HOUR_S = 3600.0
DAY_S = 86400.0
_UP_S = 30 * DAY_S
_NOW_US = 1_800_000_000_000_000


def grown_from(past, age_s, *, boot_id="now"):
    """Return counters as seen *age_s* after a sample that held the values *past*."""
    sample = CounterSample(
        boot_id=boot_id,
        since_boot_s=_UP_S - age_s,
        t_us=_NOW_US - int(age_s * 1e6),
        values=past,
    )
    return Counters(boot_id="now", since_boot_s=_UP_S, t_us=_NOW_US, samples=(sample,))
