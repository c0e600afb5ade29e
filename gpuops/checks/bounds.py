"""What a written number can be at all: one of another unit is a mistake, not a threshold."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from gpuops.checks.protocol import Limit
from gpuops.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a number can be at all, and how to say so."""

    unit: str
    low: float
    high: float
    whole: bool = True

    def check(self, value: object) -> float:
        """Return *value* where it is a number that can be meant.

        Raises:
            ValueError: No number, or one that looks like another unit.
        """
        number = _number(value, whole=self.whole)
        if number is None:
            wanted = "whole number" if self.whole else "number"
            raise ValueError(f"a {wanted} of {self.unit} is wanted, got {value!r}")
        if not self.low <= number <= self.high:
            raise ValueError(
                f"{number:g} looks like another unit: {self.unit} are wanted,"
                f" from {self.low:g} to {self.high:g}"
            )
        return number


def _number(value: object, *, whole: bool) -> float | None:
    kinds = int if whole else int | float
    return float(value) if isinstance(value, kinds) and not isinstance(value, bool) else None


# By the end of a limit's name, the first that fits; wider than anybody's opinion. More than 100 %
# of its life can be used of an NVMe drive (NVM Express Base Specification, "Percentage Used").
LIMITS: Mapping[str, Bounds] = MappingProxyType(
    {
        "used_percent": Bounds("percent", 0, 255, whole=False),
        "_percent": Bounds("percent", 0, 100, whole=False),
        "_s": Bounds("seconds", 0, 3600, whole=False),
        "_minutes": Bounds("minutes", 0, 100_000, whole=False),
        "_bytes": Bounds("bytes", 1e3, 1e15, whole=False),
        "_w": Bounds("watts", 0, 10_000, whole=False),
        "_c": Bounds("degrees Celsius", -100, 200, whole=False),
        "": Bounds("numbers", 0, 1e15, whole=False),
    }
)


def refuse_other_units(parameters: object, where: str) -> None:
    """Return quietly where each limit in *parameters* (a record) can be meant.

    Raises:
        ConfigError: One looks like another unit: it would fail every node, or none.
    """
    for name, limit in _limits(parameters):
        bounds = next(bounds for end, bounds in LIMITS.items() if name.endswith(end))
        for word, value in (("warn", limit.warn), ("fail", limit.fail)):
            try:
                if value is not None:
                    bounds.check(value)
            except ValueError as exc:
                raise ConfigError(f"{word} of {name} of {where}: {exc}") from exc


def _limits(parameters: object) -> Iterator[tuple[str, Limit]]:
    for field in fields(parameters):  # type: ignore[arg-type]  # every record of parameters is one
        value = getattr(parameters, field.name)
        if isinstance(value, Limit):
            yield field.name, value
        elif isinstance(value, Mapping):
            yield from ((field.name, item) for item in value.values() if isinstance(item, Limit))
