"""The event log and the power supplies of the baseboard management controller, by ``ipmitool``.

Formats: ipmitool lib/ipmi_sel.c, lib/ipmi_time.c and lib/ipmi_sdr.c, releases 1.8.18 and 1.8.19.
The log is asked for without the names of its sensors: many controllers take half a minute to list
those. A controller may be slow, busy or hung, which is no fault of the node, and its clock may be
wrong: the age of an event is counted by that same clock.
"""

import os
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.process.abandoned import abandoned
from gpuops.host.process.command import CommandAnswer, ask, find
from gpuops.model import UnknownReason

EVENTS_MAX = 64
_MARGIN_S = 0.6
_LEAST_S = 0.1
# linux drivers/char/ipmi/ipmi_devintf.c and the older names that ipmitool tries.
_DEVICES = ("dev/ipmi0", "dev/ipmi/0", "dev/ipmidev/0")
_TIME = re.compile(r"(\d\d)/(\d\d)/(\d{4}|\d\d) +(\d\d):(\d\d):(\d\d)(?: UTC)?")
_DIRECTIONS = {"Asserted": True, "Deasserted": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class BmcEvent:
    """One event. ``age_s``: by the controller's clock; None if it had no time, or a later one.

    ``sensor`` has its type and number (``Memory #0x02``); ``text`` is what happened. ``asserted``:
    False if the state ended.
    """

    sensor: str
    text: str
    asserted: bool
    age_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BmcLog:
    """The newest events, the oldest first. ``missing``: why there are none to be had."""

    events: tuple[BmcEvent, ...] = ()
    missing: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSupply:
    """One sensor of the type "Power Supply"; ``states`` in lower case."""

    name: str
    states: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSupplies:
    """All such sensors with a state. ``missing``: as of `BmcLog`."""

    sensors: tuple[PowerSupply, ...] = ()
    missing: str | None = None


def read_bmc_log(root: Path, budget_s: float) -> BmcLog:
    """Return the newest `EVENTS_MAX` events.

    Raises:
        ProbeError: This user may not ask the controller.
    """
    ends_s = time.monotonic() + budget_s - _MARGIN_S
    clock = _asked(root, ends_s, "sel", "time", "get")
    if isinstance(clock, str):
        return BmcLog(missing=clock)
    log = _asked(root, ends_s, "sel", "list", "last", str(EVENTS_MAX))
    if isinstance(log, str):
        return BmcLog(missing=log)
    return BmcLog(events=parse_log(log.output, _seconds(clock.output.strip())))


def read_power_supplies(root: Path, budget_s: float) -> PowerSupplies:
    """Return the power supplies.

    Raises:
        ProbeError: This user may not ask the controller.
    """
    ends_s = time.monotonic() + budget_s - _MARGIN_S
    answer = _asked(root, ends_s, "sdr", "type", "Power Supply")
    if isinstance(answer, str):
        return PowerSupplies(missing=answer)
    return PowerSupplies(sensors=parse_supplies(answer.output))


def _asked(root: Path, ends_s: float, *words: str) -> CommandAnswer | str:
    """Return the answer of ``ipmitool``, or why there is none."""
    tool = find(root, "ipmitool")
    if tool is None:
        return "ipmitool is not installed"
    device = next((path for name in _DEVICES if (path := root / name).exists()), None)
    if device is None:
        return "no controller: there is no /dev/ipmi0"
    if not os.access(device, os.R_OK | os.W_OK):
        raise ProbeError(f"no permission to use {device}", UnknownReason.NO_PERMISSION)
    # The zone applies to all times that it prints, so that they can be compared.
    left_s = max(ends_s - time.monotonic(), _LEAST_S)
    answer = ask([tool, *words], left_s, env={"TZ": "UTC0"}, left=abandoned())
    what = f"ipmitool {' '.join(words)} {answer.ending}"
    if answer.timed_out:
        return what
    return answer if answer.exit_code == 0 else f"{what}: {answer.first_line()}"


def parse_log(text: str, now_s: float | None) -> tuple[BmcEvent, ...]:
    """Return the events in the output of ``ipmitool sel list`` or ``elist``.

    *now_s*: the controller's clock, None if unknown. Lines of another form are ignored.
    """
    events = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        at = next((n for n, field in enumerate(fields) if n > 4 and field in _DIRECTIONS), None)
        if at is None:
            continue
        seconds = _seconds(f"{fields[1]} {fields[2]}")
        age_s = None if seconds is None or now_s is None else now_s - seconds
        events.append(
            BmcEvent(
                sensor=fields[3],
                text=" | ".join(fields[4:at]),
                asserted=_DIRECTIONS[fields[at]],
                age_s=age_s if age_s is not None and age_s >= 0 else None,
            )
        )
    return tuple(events[-EVENTS_MAX:])


def _seconds(text: str) -> float | None:
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    month, day, year, hour, minute, second = (int(group) for group in match.groups())
    try:
        year += 2000 if year < 100 else 0
        return datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()
    except ValueError:
        return None


def parse_supplies(text: str) -> tuple[PowerSupply, ...]:
    """Return the sensors in the output of ``ipmitool sdr type``; other lines are ignored."""
    sensors = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 5 or not fields[0] or not fields[1].endswith("h"):
            continue
        states = tuple(state.strip().lower() for state in fields[4].split(","))
        sensors.append(PowerSupply(name=fields[0], states=states))
    return tuple(sensors)
