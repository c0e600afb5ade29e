"""An event to ingest, and typed reading of its payload."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from gpuops.model import Event
from gpuops.store.columns import derived_id
from gpuops.store.ingest.merge import MergeRule, Row
from gpuops.store.spool.format import SpoolLine, SpoolLineError

T = TypeVar("T")

SHORT_TEXT_MAX = 255
_INTEGER_MAX = 2**63
_NUMBER_MAX = 10**300
_TEXT_MAX = 64 * 1024


class PayloadReader:
    """Reads the values of a payload; all methods raise `SpoolLineError` for other types.

    A missing key is None: agents of an older release do not send the newest keys. For the
    ``required_*`` methods it is an error.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def integer(self, name: str) -> int | None:
        """Return an integer that fits a 64-bit column."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, float) and math.isfinite(value):
            value = round(value)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= _INTEGER_MAX:
            raise self.field_error(name, "a whole number")
        return value

    def number(self, name: str) -> float | None:
        """Return a finite number."""
        value = self._values.get(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # An integer may be too large for a float.
        if not is_number or not abs(value) < _NUMBER_MAX:
            raise self.field_error(name, "a number")
        return float(value)

    def text(self, name: str) -> str | None:
        """Return a text (a number is converted)."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, (bool, dict, list)) or len(str(value)) > _TEXT_MAX:
            raise self.field_error(name, "a text")
        return str(value)

    def short_text(self, name: str) -> str | None:
        """Return a short text that fits an index."""
        value = self.text(name)
        if value is not None and len(value) > SHORT_TEXT_MAX:
            raise self.field_error(name, f"at most {SHORT_TEXT_MAX} characters")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of texts; an empty one if the key is missing."""
        values = self._values.get(name)
        if values is None:
            return []
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.field_error(name, "a list of texts")
        return values

    def required_integer(self, name: str) -> int:
        return self._required(name, self.integer(name))

    def required_text(self, name: str) -> str:
        return self._required(name, self.text(name))

    def required_short_text(self, name: str) -> str:
        return self._required(name, self.short_text(name))

    def _required(self, name: str, value: T | None) -> T:
        if value is None:
            raise self.field_error(name, "present")
        return value

    def field_error(self, name: str, expected: str) -> SpoolLineError:
        """Return the error that names the field and what was expected."""
        return SpoolLineError(f"{self._where}: {name} is not {expected}")


ProjectedRow = tuple[MergeRule, Row]


@dataclass(frozen=True, slots=True)
class EventEnvelope:
    """One line, its cluster and the uid that owns its file."""

    line: SpoolLine
    cluster: str = "default"
    uid: int = 0

    @property
    def event(self) -> Event:
        return self.line.event

    @property
    def is_from_root(self) -> bool:
        """Return whether root wrote it: a user can lie, but only about their own runs."""
        return self.uid == 0

    @property
    def cluster_id(self) -> str:
        return derived_id("cluster", self.cluster)

    @property
    def node_id(self) -> str:
        return derived_id("node", self.cluster, self.event.node)

    @property
    def order_key(self) -> str:
        """Return text that sorts as the events happened; no two events share it."""
        return f"{self.event.t_us:020d}/{self.event.id}"

    @property
    def earliest_key(self) -> str:
        """Return text of which the greatest belongs to the earliest event."""
        return f"{10**20 - 1 - self.event.t_us:020d}/{self.event.id}"

    def payload_reader(self) -> PayloadReader:
        """Return a reader of the payload."""
        return PayloadReader(self.event.payload, self.event.kind)


def attempt_id(run_id: str, ordinal: int) -> str:
    """Return the id of the row of one attempt."""
    return derived_id("attempt", run_id, ordinal)
