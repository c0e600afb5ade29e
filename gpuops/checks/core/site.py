"""A site's own executable as a check: ``site/fan_speed`` runs ``checks.d/fan_speed``.

It reports its status as a Nagios plugin does: exit code 0 pass, 1 warn, 2 fail, 3 unknown, and one
line of output (Monitoring Plugins Development Guidelines, "Plugin Return Codes"). A script that
crashes, hangs or is missing never fails the node.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from gpuops.checks.core.check import AnyCheck, Check, JudgeContext, Probe, ProbeContext
from gpuops.checks.core.profile import Profile
from gpuops.errors import ConfigError, ProbeError
from gpuops.host.process.command import ask
from gpuops.host.process.probe import STOP_S
from gpuops.model import FailureClass, Finding, Status, UnknownReason

PREFIX = "site/"
OUTPUT_MAX = 64 * 2**10
LINE_MAX = 200
# The part of the timeout that is kept to end the process and to read its output.
_STOP_S = STOP_S + 0.1
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}", re.ASCII)
_STATUS: Mapping[int | None, Status] = MappingProxyType(
    {0: Status.PASS, 1: Status.WARN, 2: Status.FAIL, 3: Status.UNKNOWN}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``run``: the file in ``checks.d``, if its name is not the check's."""

    run: str | None = None
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.run is not None and _FILE.fullmatch(self.run) is None:
            raise ConfigError(f"run is the name of a file in checks.d, got {self.run!r}")
        if any("\0" in word for word in self.arguments):
            raise ConfigError("an argument cannot hold a NUL byte")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteResult:
    """The result of the executable at ``path``: its first line, and how it ended.

    ``exit_code`` is negative for a signal.
    """

    path: str
    exit_code: int | None
    line: str
    ending: str


def site_check(name: str) -> AnyCheck:
    """Return the check that runs a site's executable; *name* starts with `PREFIX`.

    Raises:
        ConfigError: The rest is not a valid name of a file in ``checks.d``.
    """
    file = name.removeprefix(PREFIX)
    if _FILE.fullmatch(file) is None:
        raise ConfigError(
            f"the check {name!r}: after {PREFIX} comes the name of a file in checks.d:"
            " letters, digits, '_', '.', '-', up to 63"
        )
    return Check(
        name=name,
        about="the site's own check",
        probe=Probe(name, SiteResult, _read, sources=(f"checks.d/{file}",)),
        parameters=Parameters,
        judge=partial(judge, name),
        inputs=partial(_inputs, name),
    )


def file_of(name: str, parameters: Parameters) -> str:
    """Return the file in ``checks.d`` that the site's check *name* runs."""
    return parameters.run or name.removeprefix(PREFIX)


def fault(name: str, parameters: Parameters, folder: Path | None) -> str | None:
    """Return why the site's check *name* cannot be run from *folder*, None if it can."""
    path = _path(folder, file_of(name, parameters))
    if path is None:
        return "no site folder is set (check.site_dir)"
    if not path.is_file():
        return f"there is no file {path}"
    return None if os.access(path, os.X_OK) else f"{path} is not executable"


def judge(
    name: str, facts: SiteResult, _parameters: Parameters, context: JudgeContext
) -> list[Finding]:
    """Return the result of the site's check *name* as one finding."""
    status = _STATUS.get(facts.exit_code, Status.UNKNOWN)
    message = facts.line or f"it printed nothing and {facts.ending}"
    if facts.exit_code not in _STATUS:
        message = f"no result: it {facts.ending} (0 pass, 1 warn, 2 fail, 3 unknown)"
        message += f" and printed: {facts.line}" if facts.line else ""
    return [
        Finding(
            check=name,
            entity=context.node,
            status=status,
            message=message,
            source=facts.path,
            failure_class=FailureClass.SITE_CHECK if status is Status.FAIL else None,
            unknown_reason=UnknownReason.CRASH if status is Status.UNKNOWN else None,
        )
    ]


def _inputs(name: str, parameters: Parameters, _profile: Profile) -> tuple[str, ...]:
    # One text: duplicate inputs are removed, and an argument may come twice.
    return (json.dumps([file_of(name, parameters), *parameters.arguments]),)


def _path(folder: Path | None, file: str) -> Path | None:
    return None if folder is None else folder.absolute() / file


def _read(machine: ProbeContext, budget_s: float) -> SiteResult:
    """Run the executable.

    Raises:
        ProbeError: It is missing, cannot be started, or timed out.
    """
    ((file, *arguments),) = (json.loads(text) for text in machine.inputs)
    path = _path(machine.site_checks, file)
    if path is None or not path.is_file():
        where = path or "checks.d: no site folder is set (check.site_dir)"
        raise ProbeError(f"there is no {where}", UnknownReason.MISSING_TOOL)
    if not os.access(path, os.X_OK):
        raise ProbeError(f"{path} is not executable", UnknownReason.NO_PERMISSION)
    result = ask(
        [path, *arguments],
        max(budget_s - _STOP_S, budget_s / 2),
        bytes_max=OUTPUT_MAX,
        env={"GPUOPS_NODE": machine.node, "GPUOPS_ROOT": str(machine.root)},
    )
    if result.timed_out:
        raise ProbeError(f"{path} {result.ending}", UnknownReason.TIMEOUT)
    return SiteResult(
        path=str(path),
        exit_code=result.exit_code,
        line=_first_line(result.output) or _first_line(result.errors),
        ending=result.ending,
    )


def _first_line(text: str) -> str:
    """Return the first line that is not empty, without Nagios' performance data."""
    lines = (line.partition("|")[0].strip() for line in text.splitlines())
    return next((line[:LINE_MAX] for line in lines if line), "")
