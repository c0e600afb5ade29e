"""Runbooks: one Markdown page for each failure class, with the policy in its front matter.

The page that a person reads and the action that gpuops takes are one file and cannot differ.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpuops.config.resolve import ErrorHandler, raise_error, read_or_default, reject_unknown
from gpuops.errors import ConfigError, UsageError
from gpuops.model import ActionKind, FailureClass, Finding, ReturnCondition, Side, Status

SECTIONS = (
    "What you see",
    "What gpuops already did",
    "Confirm",
    "Fix",
    "Prove it is fixed",
    "Escalate",
)
SEVERITIES = ("page", "ticket", "note")
_KEYS = ("failure_class", "title", "severity", "side", "action", "returns", "sources")
_FRONT_MATTER = re.compile(r"\A\+\+\+\n(?P<front>.*?)\n\+\+\+\n(?P<body>.*)\Z", re.DOTALL)
_HEADING = re.compile(r"^## (.+?)\s*$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# Pages of the folder that are about runbooks, not runbooks.
_NOT_RUNBOOKS = frozenset({"README.md"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Runbook:
    """One page.

    ``severity``: ``page`` a person now, open a ``ticket`` for working hours, or only ``note`` it.
    ``action``: the automatic action; in observe mode it is only recommended, except for the restart
    within the budget of ``gpuops run``. ``returns``: what a node that was drained for it must show
    before gpuops resumes it.
    """

    failure_class: FailureClass
    title: str
    severity: str
    side: Side
    action: ActionKind
    sources: tuple[str, ...]
    body: str
    text: str
    returns: ReturnCondition = ReturnCondition.CHECK


def load_runbooks(
    directory: Path, on_error: ErrorHandler = raise_error
) -> dict[FailureClass, Runbook]:
    """Return every runbook in *directory*, by failure class in the order of the enum.

    Raises:
        ConfigError: A page is malformed, misnamed, or of a class that does not exist.
    """
    found = {}
    for path in sorted(directory.glob("*.md")):
        if path.name not in _NOT_RUNBOOKS:
            runbook = read_or_default(partial(_parsed, path), on_error, None)
            if runbook is not None:
                found[runbook.failure_class] = runbook
    return {kind: found[kind] for kind in FailureClass if kind in found}


def failing_runbooks(findings: Iterable[Finding], directory: Path) -> dict[FailureClass, Runbook]:
    """Return the runbook of each failing class whose page is in *directory* and can be read.

    A missing or malformed page is skipped: it must not take a node out of service.
    """
    failing = {item.failure_class for item in findings if item.status is Status.FAIL}
    found = {}
    for kind in sorted(filter(None, failing)):
        with suppress(OSError, UnicodeDecodeError, ConfigError):
            path = directory / f"{kind.value}.md"
            found[kind] = parse_runbook(path.name, path.read_text(encoding="utf-8"))
    return found


def return_condition(failure_class: FailureClass, directory: Path) -> ReturnCondition:
    """Return what a node that was drained for it must show, by its page in *directory*.

    A missing or malformed page has the default of its class.
    """
    with suppress(OSError, UnicodeDecodeError, ConfigError):
        path = directory / f"{failure_class.value}.md"
        return parse_runbook(path.name, path.read_text(encoding="utf-8")).returns
    return ReturnCondition.default(failure_class)


def _parsed(path: Path) -> Runbook:
    return parse_runbook(path.name, _read(path))


def parse_runbook(name: str, text: str) -> Runbook:
    """Return the runbook in *text*, which came from the file *name*.

    Raises:
        ConfigError: Says what is wrong with which page.
    """
    match = _FRONT_MATTER.match(text)
    if match is None:
        raise ConfigError(f"runbook {name}: it must begin with front matter between +++ lines")
    front = _front_matter(name, match["front"])
    try:
        failure_class = FailureClass(front["failure_class"])
        returns = front.get("returns", ReturnCondition.default(failure_class))
        runbook = Runbook(
            failure_class=failure_class,
            title=str(front["title"]),
            severity=str(front["severity"]),
            side=Side(front["side"]),
            action=ActionKind(front["action"]),
            returns=ReturnCondition(returns),
            sources=tuple(map(str, front["sources"])),
            body=match["body"].strip("\n"),
            text=text,
        )
    except KeyError as exc:
        raise ConfigError(f"runbook {name}: its front matter lacks {exc}") from exc
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"runbook {name}: {exc}") from exc
    _check(name, runbook)
    return runbook


def find_runbook(runbooks: Mapping[FailureClass, Runbook], name: str) -> Runbook:
    """Return the runbook called *name*: a failure class, or the part after its dot if unique.

    Raises:
        UsageError: There is none; suggests the closest.
    """
    by_name = {kind.value: runbook for kind, runbook in runbooks.items()}
    wanted = name.removesuffix(".md").lower()
    if wanted in by_name:
        return by_name[wanted]
    short = [kind for kind in by_name if wanted in (kind.partition(".")[2], kind.partition(".")[0])]
    if len(short) == 1:
        return by_name[short[0]]
    pool = {kind: kind for kind in by_name} | {kind.partition(".")[2]: kind for kind in by_name}
    close = short or [pool[c] for c in difflib.get_close_matches(wanted, pool, n=1, cutoff=0.4)]
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise UsageError(f"there is no runbook {name!r}; {hint}`gpuops runbook --list` names them all")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the runbook {path}: {exc}") from exc


def _front_matter(name: str, text: str) -> dict[str, Any]:
    try:
        front = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"runbook {name}: its front matter is not TOML: {exc}") from exc
    reject_unknown(front, _KEYS, f"runbook {name}")
    return front


def _check(name: str, runbook: Runbook) -> None:
    if name != f"{runbook.failure_class.value}.md":
        raise ConfigError(f"runbook {name}: it is about {runbook.failure_class.value}; rename it")
    if runbook.severity not in SEVERITIES:
        raise ConfigError(
            f"runbook {name}: severity {runbook.severity!r} (valid: {', '.join(SEVERITIES)})"
        )
    if not runbook.sources:
        raise ConfigError(f"runbook {name}: it names no source")
    headings = tuple(_HEADING.findall(_FENCE.sub("", runbook.body)))
    if headings != SECTIONS:
        raise ConfigError(
            f"runbook {name}: its sections are {', '.join(headings) or 'none'}; they must be"
            f" {', '.join(SECTIONS)}"
        )
