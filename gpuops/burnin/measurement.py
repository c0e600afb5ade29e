"""A measurement: repeated results of one active test on one part of a node."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from gpuops.host.records import to_json
from gpuops.model import Entity, Json

VALUES_MAX = 10_000


def canonical(parameters: Mapping[str, str]) -> str:
    """Return *parameters* as one text: ``"dtype=bf16 size=8192"``."""
    return " ".join(f"{name}={value}" for name, value in sorted(parameters.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The results of one test on one part, in the order in which they were measured.

    ``test`` is the test's name (``gemm``); ``parameters`` tells its variants apart
    (``{"dtype": "bf16", "size": "8192"}``); ``values`` are in ``unit``. A rate is better if it is
    higher, a latency if it is lower.
    """

    test: str
    part: Entity
    parameters: Mapping[str, str] = field(default_factory=dict)
    values: tuple[float, ...]
    unit: str
    higher_is_better: bool = True

    @property
    def parameters_text(self) -> str:
        return canonical(self.parameters)

    @property
    def is_measured(self) -> bool:
        """Return whether every value is finite and above zero: else the test did not measure."""
        return bool(self.values) and all(math.isfinite(x) and x > 0 for x in self.values)

    @property
    def median(self) -> float:
        """Return the median of the values, in ``unit``."""
        return statistics.median(self.values)

    @property
    def spread_percent(self) -> float:
        """Return the range between the quartiles as a percentage of the median; 0 for one value."""
        if len(self.values) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return 100 * (high - low) / self.median

    def to_json(self) -> Json:
        body: Json = to_json(self)
        return body

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the measurement in *data*, which another process wrote.

        Raises:
            KeyError, TypeError, ValueError: Not a measurement, or one of too many values.
        """
        values = data["values"]
        if not isinstance(values, list) or len(values) > VALUES_MAX:
            raise ValueError(f"values must be a list of at most {VALUES_MAX} numbers")
        return cls(
            test=str(data["test"]),
            part=Entity.from_json(data["part"]),
            parameters={str(name): str(value) for name, value in data["parameters"].items()},
            values=tuple(map(float, values)),
            unit=str(data["unit"]),
            higher_is_better=data["higher_is_better"] is True,
        )
