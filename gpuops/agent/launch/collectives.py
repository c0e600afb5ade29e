"""What torch's process groups are told by the environment of the workers, where nobody else did.

Names and defaults are those of torch 2.13 (c10d/ProcessGroupNCCL.hpp, c10d/FlightRecorder.hpp). The
flight recorder's names with NCCL in them still work there and print a warning in every rank, so
they are set for the torch that knows no others.
"""

from collections.abc import Mapping
from pathlib import Path

# kProcessGroupNCCLDefaultTimeout and kProcessGroupDefaultTimeout; a script may choose others.
NCCL_TIMEOUT_S, GLOO_TIMEOUT_S = 600.0, 1800.0
HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
# The monitor aborts a rank whose watchdog is stuck: after the collective's own time-out has had the
# time to dump and to speak. torch's default, 480 s, comes before it.
HEARTBEAT_MARGIN_S = 120.0
ENTRIES = "2000"  # torch 2.13's own default
DUMP_PREFIX = "flight_recorder_rank_"
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def heartbeat_s(env: Mapping[str, str], hang_timeout_s: float | None = None) -> float:
    """Return the seconds after which NCCL's monitor aborts a rank with a stuck watchdog."""
    text = env.get(HEARTBEAT, "")
    if text.isdecimal():
        return float(text)
    return max(NCCL_TIMEOUT_S, hang_timeout_s or 0.0) + HEARTBEAT_MARGIN_S


def collective_env(
    env: Mapping[str, str],
    folder: Path,
    *,
    torch_version: str = "",
    hang_timeout_s: float | None = None,
) -> dict[str, str]:
    """Return what is to be added to *env* of the workers; nothing that is there is changed.

    Dumps of the flight recorder go to *folder*, which is there: one file a rank, its number last.
    """
    wanted = {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        HEARTBEAT: f"{heartbeat_s(env, hang_timeout_s):.0f}",
    }
    is_old = torch_version.startswith("2.8.")
    # Where both names are set, the newer one wins: an older one that somebody set must stay alone.
    if not any(name in env for name in _SIZES):
        wanted |= dict.fromkeys(_SIZES if is_old else _SIZES[:1], ENTRIES)
    if not any(name in env for name in _FILES):
        wanted |= dict.fromkeys(_FILES if is_old else _FILES[:1], str(folder / DUMP_PREFIX))
    return {name: value for name, value in wanted.items() if name not in env}
