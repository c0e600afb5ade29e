"""Baselines: floors of one machine shape, in ``baselines/NAME.toml``.

Shipped ones quote public figures and are not verified here; ``gpuops baseline learn`` writes others
into the site's folder, where people read and edit them. A later folder's baseline replaces one of
its name, and may inherit from one of an earlier folder: floors of the same test, parameters and
software replace the inherited ones. `gpuops.host.trust` says which folders are read.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpuops.burnin.baseline import LEARNED, NODES_MIN, RESULTS_MIN, Floor
from gpuops.checks.core.check import ValueBounds
from gpuops.checks.core.inherited import base_of, load_inherited, most_specific
from gpuops.checks.core.suite import unknown_name
from gpuops.config.resolve import ErrorHandler, raise_error, reject_unknown
from gpuops.errors import ConfigError
from gpuops.host.records import from_json

# Wider than any machine: from the slowest CPU to a rack of GPUs.
_RANGES = {
    "TFLOP/s": (1e-6, 1e5),
    "GB/s": (1e-9, 1e5),
    "us": (1e-3, 1e8),
    "MHz": (1, 1e5),
    "%": (1e-3, 1e4),
}
UNITS: Mapping[str, ValueBounds] = MappingProxyType(
    {unit: ValueBounds(unit, low, high, whole=False) for unit, (low, high) in _RANGES.items()}
)
NEIGHBOUR_FACTOR = 1000.0
_HEAD = ("about", "shape", "verified", "until", "nodes_min", "results_min")


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The floors of machines of ``shape``, by profile or by GPUs or processors.

    ``verified``: measured on machines of the site, not only quoted. ``until``: the day of the last
    result that it was learned from. ``path``, ``inherits``: as in `checks.core.profile.Profile`.
    A floor that was learned from fewer than ``nodes_min`` nodes or ``results_min`` is refused.
    """

    name: str
    shape: str
    about: str = ""
    path: str = ""
    inherits: str = ""
    verified: bool = False
    until: date | None = None
    nodes_min: int = NODES_MIN
    results_min: int = RESULTS_MIN
    floors: tuple[Floor, ...] = ()


def load_baselines(
    directories: Iterable[Path], on_error: ErrorHandler = raise_error
) -> dict[str, Baseline]:
    """Return each baseline in *directories* by name; of several with one name the last folder's.

    Raises:
        ConfigError: Malformed TOML, an unknown key, a value of another type or unit, no source.
    """
    return load_inherited(directories, parse_baseline, on_error)


def parse_baseline(
    path: Path,
    table: Mapping[str, Any],
    earlier: Mapping[str, Baseline],
    on_error: ErrorHandler = raise_error,
) -> Baseline:
    """Return the baseline in *table* (from *path*), without the floors reported to *on_error*.

    It may inherit from one of *earlier*.

    Raises:
        ConfigError: See `load_baselines`; or it names no shape.
    """
    where = f"the baseline {path}"
    reject_unknown(table, (*_HEAD, "inherits", "floor"), where, on_error)
    base = base_of("baseline", table, earlier, where, on_error)
    head = {} if base is None else {name: getattr(base, name) for name in _HEAD}
    head |= {name: table[name] for name in _HEAD if name in table}
    head |= {"name": path.stem, "path": str(path), "inherits": "" if base is None else base.name}
    try:
        baseline = from_json(Baseline, head, where)
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc
    for name in ("nodes_min", "results_min"):
        if getattr(baseline, name) < 1:
            raise ConfigError(f"{where}: {name} = {getattr(baseline, name)}: at least 1 is needed")
    if not baseline.shape or (base is not None and base.shape != baseline.shape):
        text = f"{where}: its shape is {baseline.shape!r}"
        its_base = "" if base is None else f", and that of {base.name!r}, its base, {base.shape!r}"
        raise ConfigError(f"{text}{its_base}: floors hold for one shape")
    own = _floors(table.get("floor", []), baseline, where, on_error)
    merged = {_key(floor): floor for floor in (*(base.floors if base else ()), *own)}
    return replace(baseline, floors=tuple(merged.values()))


def _key(floor: Floor) -> tuple[str, ...]:
    return floor.test, floor.parameters, floor.driver, floor.nccl


def _floors(
    tables: object, baseline: Baseline, where: str, on_error: ErrorHandler
) -> Iterator[Floor]:
    if not isinstance(tables, list):
        on_error(ConfigError(f"floor of {where}: write each as a table [[floor]]"))
        return
    for number, table in enumerate(tables, 1):
        place = f"floor {number} of {where}"
        try:
            floor = from_json(Floor, table, place)
        except (ConfigError, ValueError) as exc:
            on_error(ConfigError(str(exc)))
            continue
        floor = replace(floor, parameters=" ".join(sorted(floor.parameters.split())))
        problem = _problem_of_values(floor) or _problem_of_floor(floor, baseline)
        if problem is None:
            yield floor
        else:
            about = f"{floor.test} {floor.parameters}".strip()
            on_error(ConfigError(f"{place} ({about}): {problem}"))


def _problem_of_values(floor: Floor) -> str | None:
    if not floor.test.strip() or not floor.source.strip():
        return "test and source must not be empty"
    if min(floor.results, floor.parts, floor.nodes) < 0:
        return "results, parts and nodes must not be below zero"
    bounds = UNITS.get(floor.unit)
    if bounds is None:
        return unknown_name("unit", floor.unit, UNITS)
    try:
        for value in (floor.value, floor.median):
            if value is not None:
                bounds.check(value)
    except ValueError as exc:
        return str(exc)
    return None


def _problem_of_floor(floor: Floor, baseline: Baseline) -> str | None:
    if floor.median is None:
        is_learned = floor.source.startswith(LEARNED)
        return "a learned floor has the median of its results" if is_learned else None
    if floor.nodes < baseline.nodes_min or floor.results < baseline.results_min:
        return (
            f"it was learned from {floor.results} results of {floor.nodes} nodes; this baseline"
            f" asks for {baseline.results_min} of {baseline.nodes_min} (results_min, nodes_min)"
        )
    ratio = floor.value / floor.median
    if (ratio > 1) is floor.higher_is_better and ratio != 1:
        side = "above" if floor.higher_is_better else "below"
        return f"the floor {floor.value:g} is {side} the median {floor.median:g} of its results"
    if not 1 / NEIGHBOUR_FACTOR < ratio < NEIGHBOUR_FACTOR:
        return f"the floor {floor.value:g} is a thousand times off its median {floor.median:g}"
    return None


def outliers(baseline: Baseline) -> Iterator[str]:
    """Yield what is wrong with floors that only their neighbours show.

    Neighbours are floors of the same test whose parameters have the same names. Sizes and formats
    make them differ, but one has another within a factor of `NEIGHBOUR_FACTOR`, and the same unit.
    """
    groups: dict[tuple[str, ...], list[Floor]] = {}
    for floor in baseline.floors:
        groups.setdefault((floor.test, *_variant(floor)), []).append(floor)
    for group in groups.values():
        for floor in group:
            about = f"{floor.test} {floor.parameters}".strip()
            others = [other for other in group if other is not floor]
            same_unit = [other for other in others if other.unit == floor.unit]
            if others and not same_unit:
                yield f"{about}: its unit {floor.unit} is not that of others, {others[0].unit}"
            nearest = min(
                (max(floor.value / x.value, x.value / floor.value) for x in same_unit), default=1.0
            )
            if nearest >= NEIGHBOUR_FACTOR:
                value = f"{floor.value:g} {floor.unit}"
                yield f"{about}: {value} is {nearest:.0f} times off the nearest of its kind"


def _variant(floor: Floor) -> Iterator[str]:
    """Yield the names of its parameters, and the values of those that change what is measured."""
    for parameter in floor.parameters.split():
        name, _, value = parameter.partition("=")
        yield parameter if name in {"work", "kernel", "collective"} and value else name


def baseline_for(
    baselines: Mapping[str, Baseline], shape: str
) -> tuple[Baseline | None, str | None]:
    """Return the baseline of machines of *shape*, and what is wrong if several claim it.

    Of one and one that inherits from it, the more specific one wins.
    """
    found = most_specific(item for item in baselines.values() if item.shape == shape)
    if len(found) < 2:
        return (found[0] if found else None), None
    which = " and ".join(f"{item.name!r} ({item.path})" for item in found)
    return None, (
        f"the baselines {which} are all of the shape {shape!r}, so none is used: let one inherit"
        " from the other, or remove one"
    )


def checked_baseline(
    baselines: Mapping[str, Baseline], shape: str
) -> tuple[Baseline | None, str | None]:
    """Return the baseline of machines of *shape*, and why there is none.

    Raises:
        ConfigError: One of its floors is far off its neighbours.
    """
    found, problem = baseline_for(baselines, shape)
    if found is None:
        shapes = ", ".join(sorted({item.shape for item in baselines.values()})) or "none"
        text = f"no baseline has the shape {shape!r} (there is: {shapes})"
        return None, f"{problem or text}; only parts of this node are compared"
    for text in outliers(found):
        raise ConfigError(f"the baseline {found.path}: {text}")
    return found, None


def baseline_text(baseline: Baseline) -> str:
    """Return the TOML of *baseline*, which `parse_baseline` reads as the same again."""
    tables = ["".join(_lines(baseline, {"name", "path", "floors"}))]
    tables += ["[[floor]]\n" + "".join(_lines(floor)) for floor in baseline.floors]
    return "\n".join(tables)


def _lines(record: Baseline | Floor, left_out: Collection[str] = ()) -> Iterator[str]:
    """Yield a line for each field that has not its default."""
    for item in fields(record):
        value = getattr(record, item.name)
        if value != item.default and item.name not in left_out:
            yield f"{item.name} = {_toml(value)}\n"


def _toml(value: object) -> str:
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, date):
        return value.isoformat()
    # Six digits are more than a measurement has.
    return repr(float(f"{value:.6g}")) if isinstance(value, float) else str(value)
