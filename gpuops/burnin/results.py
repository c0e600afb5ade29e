"""What the program of a test prints: one JSON object a line, each about one part of the node.

A line is trusted no further than its form: the program may run a broken driver. A program that
came to its end says so in its last line (`ProgramEnd`); without it, what it printed is incomplete.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from gpuops.burnin.measurement import Measurement
from gpuops.errors import ConfigError
from gpuops.host.records import from_json, to_json
from gpuops.log import printable
from gpuops.model import Entity, UnknownReason

TEXT_MAX = 500
RECORDS_MAX = 10_000
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongResult:
    """A result that is not what it must be; ``message`` says what differed and where."""

    test: str
    part: Entity
    parameters: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultDigest:
    """The digest of a result that all parts of the same ``model`` must have, bit for bit."""

    test: str
    part: Entity
    parameters: str
    model: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMeasured:
    """What a test did not measure on a part, and why."""

    test: str
    part: Entity
    reason: UnknownReason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramNote:
    """What else a person should know, as how much of the memory was tested."""

    test: str
    part: Entity
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareVersions:
    """The versions of what was measured with, by name (``torch``, ``cuda``)."""

    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """The last line of a program that came to its end."""

    test: str


Record = (
    Measurement
    | WrongResult
    | ResultDigest
    | NotMeasured
    | ProgramNote
    | SoftwareVersions
    | ProgramEnd
)
_KINDS: Mapping[str, type] = {
    "measurement": Measurement,
    "wrong": WrongResult,
    "digest": ResultDigest,
    "not_measured": NotMeasured,
    "note": ProgramNote,
    "software": SoftwareVersions,
    "end": ProgramEnd,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_line(record: Record) -> str:
    """Return *record* as one line of JSON, without a newline."""
    return json.dumps({"record": _NAMES[type(record)], **to_json(record)})


def parse_line(line: bytes) -> Record:
    """Return the record that *line* holds.

    Raises:
        ValueError: It is none.
    """
    try:
        body = dict(json.loads(line))
        name = body.pop("record")
        if _KINDS[name] is Measurement:
            return Measurement.from_json(body)
        record: Record = from_json(_KINDS[name], body, f"a line of {name!r}")
    except (KeyError, TypeError, AttributeError, RecursionError, ConfigError) as exc:
        raise ValueError(f"not a record: {exc}") from exc
    return record


@dataclass(slots=True)
class ProgramOutput:
    """What one program printed about ``part``, and what went wrong with the program itself.

    ``diagnostics``: the results of NCCL's own diagnostics, which NCCL prints among the records.
    ``garbage``: lines that are no record. ``reason`` and ``problem``: why it did not come to its
    end; None if it did.
    """

    part: Entity
    records: list[Record] = field(default_factory=list)
    diagnostics: list[str] = field(default_factory=list)
    garbage: int = 0
    reason: UnknownReason | None = None
    problem: str = ""

    def add_line(self, line: bytes) -> None:
        """Keep the record in *line*; count a line that is not empty and holds none."""
        try:
            record = parse_line(line)
        except ValueError:
            _, is_nccl, text = line.partition(b"NCCL DIAG ")
            if text.startswith(b"[") and len(self.diagnostics) < RECORDS_MAX:
                self.diagnostics.append(text.decode(errors="replace"))
            self.garbage += bool(line.strip() and not is_nccl)
            return
        if len(self.records) < RECORDS_MAX:
            self.records.append(record)
        else:
            self.garbage += 1

    def of(self, kind: type[_R]) -> list[_R]:
        """Return the records of *kind*, in order."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def has_ended(self) -> bool:
        """Return whether the program said that it came to its end."""
        return bool(self.of(ProgramEnd))


def shown(text: str) -> str:
    """Return *text* of a program for people: printable, one line, at most `TEXT_MAX` characters."""
    return printable(" ".join(text.split()))[:TEXT_MAX]
