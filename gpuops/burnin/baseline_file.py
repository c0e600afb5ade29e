"""Baselines: floors of one machine shape, in ``baselines/NAME.toml``.

Shipped ones quote public figures and are not verified here; ``gpuops baseline learn`` writes others
into the site's folder, where people read and edit them. A later folder's baseline replaces one of
its name, and may inherit from one of an earlier folder: floors of the same test, parameters and
software replace the inherited ones. `gpuops.host.trust` says which folders are read.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpuops.burnin.baseline import LEARNED, NODES_MIN, RESULTS_MIN, Floor
from gpuops.checks.core.check import ValueBounds
from gpuops.checks.core.suite import unknown_name
from gpuops.config.resolve import ErrorHandler, raise_error, read_toml, reject_unknown
from gpuops.errors import ConfigError

# Wider than any machine: from the slowest CPU to a rack of GPUs.
UNITS: Mapping[str, ValueBounds] = MappingProxyType(
    {
        "TFLOP/s": ValueBounds("TFLOP/s", 1e-4, 1e5, whole=False),
        "GFLOP/s": ValueBounds("GFLOP/s", 1e-2, 1e8, whole=False),
        "GB/s": ValueBounds("GB/s", 1e-9, 1e5, whole=False),
        "MB/s": ValueBounds("MB/s", 1e-3, 1e8, whole=False),
        "us": ValueBounds("microseconds", 1e-3, 1e8, whole=False),
        "ms": ValueBounds("milliseconds", 1e-6, 1e6, whole=False),
        "s": ValueBounds("seconds", 1e-9, 1e5, whole=False),
    }
)
NEIGHBOUR_FACTOR = 1000.0
_KEYS = ("about", "inherits", "shape", "verified", "until", "nodes_min", "results_min", "floor")
_TEXTS = ("test", "parameters", "driver", "nccl", "unit", "source")
_COUNTS = ("results", "parts", "nodes")
_FLOOR_KEYS = (*_TEXTS, "value", "median", "higher_is_better", *_COUNTS)


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
    found: dict[str, Baseline] = {}
    for directory in directories:
        earlier = dict(found)
        for path in sorted(directory.glob("*.toml")):
            try:
                found[path.stem] = parse_baseline(path, read_toml(path), earlier, on_error)
            except ConfigError as exc:
                on_error(exc)
    return found


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
    reject_unknown(table, _KEYS, where, on_error)
    base = table.get("inherits")
    if base is not None and (not isinstance(base, str) or base not in earlier):
        on_error(
            ConfigError(f"inherits of {where}: {unknown_name('baseline', str(base), earlier)}")
        )
        base = None
    stated = {name: table[name] for name in _KEYS if name in table and name != "floor"}
    problem = _problem_of_head(stated)
    shape = str(stated.get("shape", "" if base is None else earlier[base].shape))
    if problem is None and not shape:
        problem = 'it must name the shape of its machines: shape = "h100-sxm"'
    if problem is not None:
        raise ConfigError(f"{where}: {problem}")
    start = Baseline(name=path.stem, shape=shape) if base is None else earlier[base]
    head = {**stated, "name": path.stem, "path": str(path), "shape": shape, "inherits": base or ""}
    baseline = replace(start, **head)
    if start.shape != shape:
        text = f"{where}: its shape is {shape!r}, and that of {base!r}, its base, {start.shape!r}"
        raise ConfigError(f"{text}: floors hold for one shape")
    own = _floors(table.get("floor", []), baseline, where, on_error)
    merged = {_key(floor): floor for floor in (*start.floors, *own)}
    return replace(baseline, floors=tuple(merged.values()))


def _problem_of_head(stated: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the keys beside the floors, or None."""
    kinds = {"verified": bool, "until": date, "nodes_min": int, "results_min": int}
    for name, value in stated.items():
        kind = kinds.get(name, str)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            return f"{name} is not a {kind.__name__}, got {value!r}"
    return None


def _key(floor: Floor) -> tuple[str, ...]:
    return floor.test, floor.parameters_text, floor.driver, floor.nccl


def _floors(
    tables: object, baseline: Baseline, where: str, on_error: ErrorHandler
) -> Iterator[Floor]:
    if not isinstance(tables, list):
        on_error(ConfigError(f"floor of {where}: write each as a table [[floor]]"))
        return
    for number, table in enumerate(tables, 1):
        place = f"floor {number} of {where}"
        if not isinstance(table, dict):
            on_error(ConfigError(f"{place}: it is not a table"))
            continue
        reject_unknown(table, _FLOOR_KEYS, place, on_error)
        try:
            yield _floor(table, baseline)
        except ValueError as exc:
            about = " ".join(str(table.get(name, "")) for name in ("test", "parameters")).strip()
            on_error(ConfigError(f"{place} ({about}): {exc}"))


def _floor(table: Mapping[str, Any], baseline: Baseline) -> Floor:
    texts = {name: table.get(name, "") for name in _TEXTS}
    for name, text in texts.items():
        if not isinstance(text, str) or (not text and name in {"test", "unit", "source"}):
            raise ValueError(f"{name} must be a text{'' if text else ' that is not empty'}")
    counts = {name: table.get(name, 0) for name in _COUNTS}
    for name, count in counts.items():
        if type(count) is not int or count < 0:
            raise ValueError(f"{name} must be a whole number, got {count!r}")
    higher_is_better = table.get("higher_is_better", True)
    if not isinstance(higher_is_better, bool):
        text = f"higher_is_better is true or false, got {higher_is_better!r}"
        raise ValueError(text)  # noqa: TRY004 one error kind
    bounds = UNITS.get(texts["unit"])
    if bounds is None:
        raise ValueError(unknown_name("unit", texts["unit"], UNITS))
    median = table.get("median")
    parameters = texts.pop("parameters")
    floor = Floor(
        shape=baseline.shape,
        parameters_text=" ".join(sorted(parameters.split())),
        value=bounds.check(table.get("value")),
        median=None if median is None else bounds.check(median),
        higher_is_better=higher_is_better,
        **texts,
        **counts,
    )
    problem = _problem_of_floor(floor, baseline)
    if problem is not None:
        raise ValueError(problem)
    return floor


def _problem_of_floor(floor: Floor, baseline: Baseline) -> str | None:
    if floor.median is None:
        return "a learned floor has the median of its results" if _is_learned(floor) else None
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


def _is_learned(floor: Floor) -> bool:
    return floor.source.startswith(LEARNED)


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
            about = f"{floor.test} {floor.parameters_text}".strip()
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
    for parameter in floor.parameters_text.split():
        name, _, value = parameter.partition("=")
        yield parameter if name in {"work", "kernel", "collective"} and value else name


def baseline_for(
    baselines: Mapping[str, Baseline], shape: str
) -> tuple[Baseline | None, str | None]:
    """Return the baseline of machines of *shape*, and what is wrong if several claim it.

    Of one and one that inherits from it, the more specific one wins.
    """
    found = [item for item in baselines.values() if item.shape == shape]
    inherited = {item.inherits for item in found if item.inherits != item.name}
    found = [item for item in found if item.name not in inherited]
    if len(found) < 2:
        return (found[0] if found else None), None
    which = " and ".join(f"{item.name!r} ({item.path})" for item in found)
    return None, (
        f"the baselines {which} are all of the shape {shape!r}, so none is used: let one inherit"
        " from the other, or remove one"
    )


def baseline_text(baseline: Baseline) -> str:
    """Return the TOML of *baseline*, which `parse_baseline` reads as the same again."""
    head = {
        "about": baseline.about or None,
        "inherits": baseline.inherits or None,
        "shape": baseline.shape,
        "verified": baseline.verified,
        "until": baseline.until,
        "nodes_min": baseline.nodes_min,
        "results_min": baseline.results_min,
    }
    lines = [f"{name} = {_toml(value)}" for name, value in head.items() if value is not None]
    for floor in baseline.floors:
        lines += ["", "[[floor]]"]
        values = {item.name: getattr(floor, item.name) for item in fields(Floor)}
        values["parameters"] = values.pop("parameters_text")
        shown = {name: values[name] for name in _FLOOR_KEYS}
        left_out = {name for name in shown if shown[name] in ("", None)}
        left_out |= {"higher_is_better"} if floor.higher_is_better else set()
        lines += [f"{name} = {_toml(x)}" for name, x in shown.items() if name not in left_out]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, date):
        return value.isoformat()
    # Six digits are more than a measurement has.
    return repr(float(f"{value:.6g}")) if isinstance(value, float) else str(value)
