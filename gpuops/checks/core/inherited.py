"""Files of data in several folders, one thing each: a site's replace or inherit shipped ones."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from gpuops.checks.core.suite import unknown_name
from gpuops.config.resolve import ErrorHandler, read_toml
from gpuops.errors import ConfigError


class Inheriting(Protocol):
    """What a file describes: its ``name``, and that of what it inherits from, or ""."""

    @property
    def name(self) -> str: ...

    @property
    def inherits(self) -> str: ...


T = TypeVar("T", bound=Inheriting)
Parser = Callable[[Path, Mapping[str, Any], Mapping[str, T], ErrorHandler], T]


def load_inherited(
    directories: Iterable[Path], parse: Parser[T], on_error: ErrorHandler
) -> dict[str, T]:
    """Return what is in *directories* by name; of several with one name the last folder's.

    *parse* gets what earlier folders have, to inherit from. A file with an error is left out.
    """
    found: dict[str, T] = {}
    for directory in directories:
        earlier = dict(found)
        for path in sorted(directory.glob("*.toml")):
            try:
                found[path.stem] = parse(path, read_toml(path), earlier, on_error)
            except ConfigError as exc:
                on_error(exc)
    return found


def base_of(
    kind: str,
    table: Mapping[str, Any],
    earlier: Mapping[str, T],
    where: str,
    on_error: ErrorHandler,
) -> T | None:
    """Return the one of *earlier* that *table* inherits from, None if none; *kind* names it."""
    base = table.get("inherits")
    if base is None:
        return None
    if not isinstance(base, str) or base not in earlier:
        on_error(ConfigError(f"inherits of {where}: {unknown_name(kind, str(base), earlier)}"))
        return None
    return earlier[base]


def most_specific(found: Iterable[T]) -> list[T]:
    """Return *found* without those that another one of them inherits from."""
    found = list(found)
    inherited = {item.inherits for item in found if item.inherits != item.name}
    return [item for item in found if item.name not in inherited]
