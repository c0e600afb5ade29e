"""NVML fields: many numbers of one GPU in one call, each with its own return code."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuops.host.nvml.caller import UNSUPPORTED, NvmlCaller, NvmlRefused
from gpuops.host.nvml.facts import NOT_SUPPORTED, UNREADABLE, NvLink, RetiredPages
from gpuops.host.nvml.plausible import BOUNDS, COUNT, FLAG, LINK_STATE, LINKS, Bounds, why_not

_CALL = "nvmlDeviceGetFieldValues"
_INVALID_ARGUMENT = 2
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

# Numbers of nvml.h, because a pynvml older than the driver does not define them all.
IDS = {
    "NVML_FI_DEV_ECC_SBE_VOL_TOTAL": 3,
    "NVML_FI_DEV_ECC_DBE_VOL_TOTAL": 4,
    "NVML_FI_DEV_ECC_SBE_AGG_TOTAL": 5,
    "NVML_FI_DEV_ECC_DBE_AGG_TOTAL": 6,
    "NVML_FI_DEV_RETIRED_SBE": 29,
    "NVML_FI_DEV_RETIRED_DBE": 30,
    "NVML_FI_DEV_RETIRED_PENDING": 31,
    "NVML_FI_DEV_MEMORY_TEMP": 82,
    "NVML_FI_DEV_NVLINK_LINK_COUNT": 91,
    "NVML_FI_DEV_PCIE_REPLAY_COUNTER": 94,
    "NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY": 161,
    "NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY": 162,
    "NVML_FI_DEV_NVLINK_ERROR_DL_CRC": 163,
    "NVML_FI_DEV_NVLINK_GET_STATE": 165,
    "NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT": 193,
    "NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT": 194,
    "NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS": 208,
    "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS": 215,
    "NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER": 220,
    "NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER": 222,
    "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION": 230,
}
# GPUs before Hopper have a field for each of their links: the numbers of links 0 and 6.
LANE_IDS = {
    "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L": (32, 96),
    "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_L": (46, 108),
    "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_L": (53, 114),
}
IDS |= {
    f"{name}{link}": ids[link // 6] + link % 6
    for name, ids in LANE_IDS.items()
    for link in range(12)
}

_LINK_COUNT = "NVML_FI_DEV_NVLINK_LINK_COUNT"
_REPLAYS = "NVML_FI_DEV_PCIE_REPLAY_COUNTER"
_PLACES = {
    "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION": "recovery_action",
    "NVML_FI_DEV_MEMORY_TEMP": "temperature.memory_c",
    "NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT": "temperature.slowdown_margin_c",
    "NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT": "temperature.shutdown_margin_c",
}
# The arguments of nvmlDeviceGetTotalEccErrors for the same number: which errors, since when.
_ECC = {
    "NVML_FI_DEV_ECC_SBE_VOL_TOTAL": ("ecc.volatile_corrected", 0, 0),
    "NVML_FI_DEV_ECC_DBE_VOL_TOTAL": ("ecc.volatile_uncorrected", 1, 0),
    "NVML_FI_DEV_ECC_SBE_AGG_TOTAL": ("ecc.aggregate_corrected", 0, 1),
    "NVML_FI_DEV_ECC_DBE_AGG_TOTAL": ("ecc.aggregate_uncorrected", 1, 1),
}
_RETIRED = ("NVML_FI_DEV_RETIRED_SBE", "NVML_FI_DEV_RETIRED_DBE", "NVML_FI_DEV_RETIRED_PENDING")
_STATE = "NVML_FI_DEV_NVLINK_GET_STATE"
# By the attribute of `NvLink`: the field of any link, and the field names before Hopper.
_LINK_COUNTERS = {
    "crc_errors": ("NVML_FI_DEV_NVLINK_ERROR_DL_CRC", "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L"),
    "replay_errors": (
        "NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY",
        "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_L",
    ),
    "recovery_errors": (
        "NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY",
        "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_L",
    ),
    "receive_errors": ("NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS", None),
}
# Bit error rates.
_EFFECTIVE_BER = "NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER"
_SYMBOL_BER = "NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER"
# nvml.h, NVML_NVLINK_BER_*: the exponent in the low eight bits, the mantissa in the next four.
_EXPONENT_BITS, _MANTISSA_BITS = 8, 4
_PACKED_RATE = Bounds(0, 2 ** (_EXPONENT_BITS + _MANTISSA_BITS) - 1)
# Recoveries of Blackwell.
_RECOVERIES = "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS"
_LANES = 12
# Active, asleep to save power, active with traffic disabled (NVML_NVLINK_STATE_*).
_UP = {1, 2, 3}

_BOUNDS = {
    _LINK_COUNT: LINKS,
    _STATE: LINK_STATE,
    _RETIRED[2]: FLAG,
    _EFFECTIVE_BER: _PACKED_RATE,
    _SYMBOL_BER: _PACKED_RATE,
}

# A field's name and its scope, which is the NVLink for those about one.
Field = tuple[str, int]
Values = Mapping[Field, int | NvmlRefused]


def fields(gpu: NvmlCaller) -> None:
    """Read all fields: recovery action, ECC totals, temperatures, NVLinks.

    Raises:
        GpuLostError: NVML reports it.
    """
    values = _read(gpu, [(name, 0) for name in (*_PLACES, *_ECC, *_RETIRED, _REPLAYS, _LINK_COUNT)])
    for name, place in _PLACES.items():
        _store(gpu, place, _value_or_none(gpu, values, (name, 0)))
    _store_or_query(gpu, "pcie.replays", values[_REPLAYS, 0], "nvmlDeviceGetPcieReplayCounter")
    for name, (place, *kinds) in _ECC.items():
        _store_or_query(gpu, place, values[name, 0], "nvmlDeviceGetTotalEccErrors", *kinds)
    _retired(gpu, values)
    count = _value_or_none(gpu, values, (_LINK_COUNT, 0))
    if count is not None:
        links = _links(gpu, count)
        gpu.found["nvlinks"] = links
        # Only GPUs that count receive errors have these. A call of its own: one that hangs loses
        # nothing else.
        if any(link.receive_errors is not None for link in links):
            gpu.found["nvlinks"] = _with_rates(gpu, links)


def _read(gpu: NvmlCaller, names: Sequence[Field]) -> Values:
    """Return the value of each field, or its error."""
    ids = [(IDS[name], scope) for name, scope in names]
    try:
        values = gpu.call_nvml(_CALL, gpu.handle, ids)
    except NvmlRefused as refused:
        code = NOT_SUPPORTED if refused.code in UNSUPPORTED else refused.code
        return dict.fromkeys(names, NvmlRefused(code, f"{_CALL}: {refused.text}"))
    pairs = zip(names, values, strict=True)
    return {field: _value(gpu, value, _bounds(field[0])) for field, value in pairs}


def _bounds(name: str) -> Bounds:
    if name in _BOUNDS:
        return _BOUNDS[name]
    place = _PLACES.get(name) or _ECC.get(name, ("",))[0]
    return BOUNDS.get(place, COUNT)


def _value(gpu: NvmlCaller, value: Any, bounds: Bounds) -> int | NvmlRefused:  # noqa: ANN401 a structure without types
    code, kind = value.nvmlReturn, value.valueType
    if code == 0 and kind < len(_MEMBERS):
        number = getattr(value.value, _MEMBERS[kind])
        # An infinite one and none at all (NaN) are outside of all bounds.
        problem = why_not(number, bounds)
        return int(number) if problem is None else NvmlRefused(*problem)
    # A driver older than a field returns "invalid argument" for its number.
    code = NOT_SUPPORTED if code == _INVALID_ARGUMENT or code in UNSUPPORTED else code
    return NvmlRefused(
        code or UNREADABLE, str(gpu.nvml.NVMLError(code)) if code else f"type {kind}"
    )


def _store(gpu: NvmlCaller, place: str, value: int | None) -> None:
    if value is not None:
        gpu.keep(place, _CALL, value)


def _store_or_query(
    gpu: NvmlCaller, place: str, value: int | NvmlRefused, instead: str, *args: object
) -> None:
    """Store the value of a field; *instead* is the older call for the same number."""
    if isinstance(value, NvmlRefused):
        gpu.store(place, instead, *args)
    else:
        gpu.keep(place, _CALL, value)


def _value_or_none(gpu: NvmlCaller, values: Values, field: Field) -> int | None:
    value = values[field]
    if not isinstance(value, NvmlRefused):
        return value
    gpu.note(field[0], value)
    return None


def _retired(gpu: NvmlCaller, values: Values) -> None:
    single, double, pending = (_value_or_none(gpu, values, (name, 0)) for name in _RETIRED)
    if single is not None and double is not None and pending is not None:
        gpu.found["retired"] = RetiredPages(
            single_bit=single, double_bit=double, pending=bool(pending)
        )


def _links(gpu: NvmlCaller, count: int) -> tuple[NvLink, ...]:
    names = [_STATE, _RECOVERIES, *(scoped for scoped, _ in _LINK_COUNTERS.values())]
    values = dict(_read(gpu, [(name, link) for name in names for link in range(count)]))
    lanes = [
        (f"{lane}{link}", 0)
        for scoped, lane in _LINK_COUNTERS.values()
        for link in range(min(count, _LANES))
        if lane and isinstance(values[scoped, link], NvmlRefused)
    ]
    if lanes:
        values |= _read(gpu, lanes)
    return tuple(_link(gpu, values, link) for link in range(count))


def _link(gpu: NvmlCaller, values: Values, link: int) -> NvLink:
    counted = {
        place: _first(gpu, values, [(scoped, link), (f"{lane}{link}", 0)])
        for place, (scoped, lane) in _LINK_COUNTERS.items()
    }
    if counted["recovery_errors"] is None:
        counted["recovery_errors"] = _first(gpu, values, [(_RECOVERIES, link)])
    return NvLink(link=link, active=_active(gpu, values[_STATE, link], link), **counted)


def _with_rates(gpu: NvmlCaller, links: Sequence[NvLink]) -> tuple[NvLink, ...]:
    names = (_EFFECTIVE_BER, _SYMBOL_BER)
    values = _read(gpu, [(name, link.link) for name in names for link in links])
    return tuple(
        replace(
            link,
            effective_ber=_rate(gpu, values, (_EFFECTIVE_BER, link.link)),
            symbol_ber=_rate(gpu, values, (_SYMBOL_BER, link.link)),
        )
        for link in links
    )


def _rate(gpu: NvmlCaller, values: Values, field: Field) -> float | None:
    """Return the errors per bit; a healthy link has the smallest number, 15e-255."""
    packed = _value_or_none(gpu, values, field)
    if packed is None:
        return None
    mantissa, exponent = packed >> _EXPONENT_BITS, packed % 2**_EXPONENT_BITS
    # Read as decimal digits: a product of floats can be a little above the number that is meant.
    rate = float(f"{mantissa}e-{exponent}")
    if rate < 1:
        return rate
    gpu.note(field[0], NvmlRefused(UNREADABLE, f"{rate:g} errors per bit are not plausible"))
    return None


def _first(gpu: NvmlCaller, values: Values, sources: Sequence[Field]) -> int | None:
    """Return the first value of *sources*; without any, record the error of the first."""
    known = [field for field in sources if field in values]
    for field in known:
        value = values[field]
        if not isinstance(value, NvmlRefused):
            return value
    return _value_or_none(gpu, values, known[0])


def _active(gpu: NvmlCaller, state: int | NvmlRefused, link: int) -> bool | None:
    if isinstance(state, NvmlRefused):
        active = gpu.query("nvmlDeviceGetNvLinkState", link)
        return None if active is None else bool(active)
    return state in _UP
