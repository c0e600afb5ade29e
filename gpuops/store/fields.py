"""Typed reading of a payload that another process wrote."""

import math
from collections.abc import Mapping
from typing import Any

from gpuops.store.lines import LineError

WORD_MAX = 255
_INTEGER_MAX = 2**63
_TEXT_MAX = 64 * 1024


class Fields:
    """A payload whose values are refused when they are not of the kind that was asked for.

    A missing key is None: agents of an older release do not send the newest keys.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def integer(self, name: str) -> int | None:
        """Return a whole number that a 64-bit column takes.

        Raises:
            LineError: Something else is there.
        """
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, float) and math.isfinite(value):
            value = round(value)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= _INTEGER_MAX:
            raise self.refuse(name, "a whole number")
        return value

    def text(self, name: str) -> str | None:
        """Return a text (a number is taken for its text).

        Raises:
            LineError: Something else is there.
        """
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, (bool, dict, list)) or len(str(value)) > _TEXT_MAX:
            raise self.refuse(name, "a text")
        return str(value)

    def word(self, name: str) -> str | None:
        """Return a short text that an index takes.

        Raises:
            LineError: Something else is there.
        """
        value = self.text(name)
        if value is not None and len(value) > WORD_MAX:
            raise self.refuse(name, f"at most {WORD_MAX} characters")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of texts; none where there is none.

        Raises:
            LineError: Something else is there.
        """
        values = self._values.get(name)
        if values is None:
            return []
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.refuse(name, "a list of texts")
        return values

    def wanted_integer(self, name: str) -> int:
        """Return a whole number that must be there.

        Raises:
            LineError: It is not.
        """
        value = self.integer(name)
        if value is None:
            raise self.refuse(name, "there")
        return value

    def wanted_text(self, name: str) -> str:
        """Return a text that must be there.

        Raises:
            LineError: It is not.
        """
        value = self.text(name)
        if value is None:
            raise self.refuse(name, "there")
        return value

    def wanted_word(self, name: str) -> str:
        """Return a short text that must be there.

        Raises:
            LineError: It is not.
        """
        value = self.word(name)
        if value is None:
            raise self.refuse(name, "there")
        return value

    def refuse(self, name: str, wanted: str) -> LineError:
        """Return the error that names the field and what it should have been."""
        return LineError(f"{self._where}: {name} is not {wanted}")
