"""Which numbers of NVML are none: its "not available" (all bits set), and garbage.

A structure can hold "not available" in any member although its call succeeds. A number outside the
bounds of its field is garbage of that GPU alone. The bounds are wider than any board's values; they
are gpuops' judgement, since nvml.h gives none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gpuops.host.nvml.facts import NOT_SUPPORTED, UNREADABLE

# NVML_VALUE_NOT_AVAILABLE, (unsigned)-1, in the widths that also hold large numbers.
NOT_AVAILABLE = frozenset({2**64 - 1, 2**32 - 1})
# In the others it could be a number: only outside the bounds it is not.
_ALL_ONES = frozenset({-1, 2**8 - 1, 2**16 - 1})


@dataclass(frozen=True, slots=True)
class Bounds:
    """The plausible range of a number; ``zero_is_none``: as virtual GPUs report what they lack."""

    low: float
    high: float
    unit: str = ""
    zero_is_none: bool = False


COUNT = Bounds(0, 1e15)
FLAG = Bounds(0, 1)
LINKS = Bounds(0, 64, "links")
LINK_STATE = Bounds(0, 3)
GPUS = Bounds(0, 1024, "GPUs")
BYTES = Bounds(0, 2**50, "bytes")
_LIMIT_C = Bounds(0, 200, "°C", zero_is_none=True)
_MARGIN_C = Bounds(-200, 200, "°C")
_LIMIT_W = Bounds(0, 10_000, "W", zero_is_none=True)
_LIMIT_MHZ = Bounds(0, 20_000, "MHz", zero_is_none=True)
_GENERATION = Bounds(0, 16, zero_is_none=True)
_LANES = Bounds(0, 32, "lanes", zero_is_none=True)

# By the field of `NvmlGpu`.
BOUNDS: Mapping[str, Bounds] = MappingProxyType(
    {
        "minor": Bounds(0, 2**20),
        "utilization_percent": Bounds(0, 100, "%"),
        "recovery_action": Bounds(0, 254),
        "remapped.correctable": COUNT,
        "remapped.uncorrectable": COUNT,
        "remapped.pending": FLAG,
        "remapped.failure": FLAG,
        "ecc.volatile_corrected": COUNT,
        "ecc.volatile_uncorrected": COUNT,
        "ecc.aggregate_corrected": COUNT,
        "ecc.aggregate_uncorrected": COUNT,
        "ecc.sram_threshold_exceeded": FLAG,
        "temperature.core_c": Bounds(0, 200, "°C"),
        "temperature.memory_c": Bounds(0, 200, "°C"),
        "temperature.slowdown_c": _LIMIT_C,
        "temperature.shutdown_c": _LIMIT_C,
        "temperature.memory_max_c": _LIMIT_C,
        "temperature.margin_c": _MARGIN_C,
        "temperature.slowdown_margin_c": _MARGIN_C,
        "temperature.shutdown_margin_c": _MARGIN_C,
        "power.drawn_w": Bounds(0, 10_000, "W"),
        "power.limit_w": _LIMIT_W,
        "power.default_limit_w": _LIMIT_W,
        "power.max_limit_w": _LIMIT_W,
        "clocks.sm_mhz": Bounds(0, 20_000, "MHz"),
        "clocks.memory_mhz": Bounds(0, 20_000, "MHz"),
        "clocks.sm_max_mhz": _LIMIT_MHZ,
        "clocks.memory_max_mhz": _LIMIT_MHZ,
        "clocks.sm_application_mhz": _LIMIT_MHZ,
        "clocks.memory_application_mhz": _LIMIT_MHZ,
        # nvml.h defines nine bits.
        "clocks.reasons": Bounds(0, 2**15 - 1),
        "pcie.generation": _GENERATION,
        "pcie.generation_max": _GENERATION,
        "pcie.width": _LANES,
        "pcie.width_max": _LANES,
        "pcie.replays": COUNT,
        "fabric.state": Bounds(0, 254),
        # The last code of nvmlReturn_t is 999.
        "fabric.status": Bounds(0, 999),
        "fabric.health_summary": Bounds(0, 254),
        "modes.ecc": FLAG,
        "modes.ecc_pending": FLAG,
        "modes.mig": FLAG,
        "modes.mig_pending": FLAG,
        "modes.persistence": FLAG,
        "modes.compute": Bounds(0, 254),
        "memory.total_bytes": Bounds(0, 2**50, "bytes", zero_is_none=True),
    }
)


def why_not(value: float, bounds: Bounds | None) -> tuple[int, str] | None:
    """Return NVML's code and text for a *value* that is no number; None if it is plausible.

    The code is ``NOT_SUPPORTED`` for "not available" and `UNREADABLE` for garbage.
    """
    if value in NOT_AVAILABLE:
        return NOT_SUPPORTED, "not available"
    if bounds is None:
        return None
    is_inside = bounds.low <= value <= bounds.high
    if (value in _ALL_ONES and not is_inside) or (bounds.zero_is_none and not value):
        return NOT_SUPPORTED, "not available"
    if is_inside:
        return None
    unit = f" {bounds.unit}" if bounds.unit else ""
    return UNREADABLE, f"{value:g}{unit} is not plausible: {bounds.low:g} to {bounds.high:g} are"
