"""The meaning of Xids and SXids, by code: data in ``checks/xid/*.toml``, with source and date."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Self

from gpuops.config.resolve import (
    ErrorHandler,
    raise_error,
    read_or_default,
    read_toml,
    reject_unknown,
)
from gpuops.errors import ConfigError
from gpuops.model import FailureClass, Status

_XID_KEYS = ("codes", "name", "class", "action", "failure_class", "remark")
_SXID_KEYS = ("codes", "name", "class", "remark")


class XidClass(StrEnum):
    """What an Xid says about the node."""

    HARDWARE = "hardware"
    MIXED = "mixed"
    APPLICATION = "application"
    INFORMATIONAL = "informational"
    RECOVERY = "recovery"

    def verdict(self, *, fatal: bool | None = None) -> Status:
        """Return the status of a line of this class, marked *fatal* or not (None: no mark)."""
        match self:
            case XidClass.HARDWARE:
                return Status.WARN if fatal is False else Status.FAIL
            case XidClass.MIXED:
                return Status.WARN
            case _:
                return Status.PASS


class SxidClass(StrEnum):
    """What an SXid says about its switch."""

    ALWAYS_FATAL = "always_fatal"
    POTENTIALLY_FATAL = "potentially_fatal"
    RESET = "reset"
    CORRECTED = "corrected"
    INFORMATIONAL = "informational"

    def verdict(self, *, fatal: bool) -> Status:
        """Return the status of a line of this class, marked *fatal* or not."""
        if fatal or self is SxidClass.ALWAYS_FATAL:
            return Status.FAIL
        mild = self in {SxidClass.CORRECTED, SxidClass.INFORMATIONAL}
        return Status.PASS if mild else Status.WARN


@dataclass(frozen=True, slots=True, kw_only=True)
class XidKind:
    """One Xid. ``action``: the catalogue's immediate action, "" if it names none."""

    code: int
    name: str
    xid_class: XidClass
    source: str
    action: str = ""
    failure_class: FailureClass | None = None
    remark: str | None = None

    @classmethod
    def unknown(cls, code: int) -> Self:
        """Return the entry of a code that no catalogue lists: it warns."""
        name = "a code that the catalogue does not list"
        return cls(code=code, name=name, xid_class=XidClass.MIXED, source="checks/xid")


@dataclass(frozen=True, slots=True, kw_only=True)
class SxidKind:
    """One SXid of an NVSwitch."""

    code: int
    name: str
    sxid_class: SxidClass
    source: str
    remark: str | None = None

    @classmethod
    def unknown(cls, code: int) -> Self:
        """Return the entry of a code that no catalogue lists: a line that is not fatal warns."""
        name = "a code that the catalogue does not list"
        sxid_class = SxidClass.POTENTIALLY_FATAL
        return cls(code=code, name=name, sxid_class=sxid_class, source="checks/xid")


def load_xids(
    directories: Iterable[Path], on_error: ErrorHandler = raise_error
) -> dict[int, XidKind]:
    """Return the Xids that the files in *directories* list, by code; a later one overrides.

    Raises:
        ConfigError: Malformed TOML, an unknown key, a code twice in one file, no source, or a
            hardware class without a failure class.
    """
    listed = _listed(directories, "xid", on_error)
    return {kind.code: kind for kind in listed if isinstance(kind, XidKind)}


def load_sxids(
    directories: Iterable[Path], on_error: ErrorHandler = raise_error
) -> dict[int, SxidKind]:
    """Return the SXids that the files in *directories* list, by code; a later one overrides.

    Raises:
        ConfigError: See `load_xids`.
    """
    listed = _listed(directories, "sxid", on_error)
    return {kind.code: kind for kind in listed if isinstance(kind, SxidKind)}


def _listed(
    directories: Iterable[Path], word: str, on_error: ErrorHandler
) -> Iterator[XidKind | SxidKind]:
    for directory in directories:
        for path in sorted(directory.glob("*.toml")):
            try:
                yield from _in_file(path, word, on_error)
            except ConfigError as exc:
                on_error(exc)


def _in_file(path: Path, word: str, on_error: ErrorHandler) -> Iterator[XidKind | SxidKind]:
    table = read_toml(path)
    reject_unknown(table, ("source", "xid", "sxid"), str(path), on_error)
    seen: set[int] = set()
    none: list[XidKind | SxidKind] = []
    for entry in _entries(table, word, path):
        for kind in read_or_default(
            partial(_kinds, entry, table.get("source"), word, path), on_error, none
        ):
            if kind.code in seen:
                on_error(ConfigError(f"{path} lists the {word} {kind.code} twice"))
            seen.add(kind.code)
            yield kind


def _entries(table: Mapping[str, Any], word: str, path: Path) -> list[dict[str, Any]]:
    entries = table.get(word, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path}: codes are written as [[{word}]] tables")
    return entries


def _kinds(
    entry: dict[str, Any], source: object, word: str, path: Path
) -> list[XidKind | SxidKind]:
    where = f"{word} {entry.get('codes', '?')} in {path}"
    reject_unknown(entry, _XID_KEYS if word == "xid" else _SXID_KEYS, where)
    if not isinstance(source, str) or not source.strip():
        raise ConfigError(f"{path} must name the source of its codes")
    codes = entry.get("codes")
    if not isinstance(codes, list) or not all(_is_code(code) for code in codes):
        raise ConfigError(f"{where}: codes is a list of whole numbers, got {codes!r}")
    try:
        if word == "xid":
            return [_xid(code, entry, source) for code in codes]
        return [_sxid(code, entry, source) for code in codes]
    except KeyError as exc:
        raise ConfigError(f"{where}: missing {exc}") from exc
    except ValueError as exc:
        raise ConfigError(f"{where}: {exc}") from exc


def _is_code(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _xid(code: int, entry: dict[str, Any], source: str) -> XidKind:
    named = entry.get("failure_class")
    kind = XidKind(
        code=code,
        name=str(entry["name"]),
        xid_class=XidClass(entry["class"]),
        source=source,
        action=str(entry.get("action", "")),
        failure_class=None if named is None else FailureClass(named),
        remark=entry.get("remark"),
    )
    if kind.xid_class is XidClass.HARDWARE and kind.failure_class is None:
        raise ValueError("a class that fails the node needs a failure_class")
    return kind


def _sxid(code: int, entry: dict[str, Any], source: str) -> SxidKind:
    return SxidKind(
        code=code,
        name=str(entry["name"]),
        sxid_class=SxidClass(entry["class"]),
        source=source,
        remark=entry.get("remark"),
    )
