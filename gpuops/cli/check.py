"""``gpuops check``: run a suite, print what it found, remember it, exit with the verdict.

It imports neither torch nor SQLAlchemy: it runs before every job.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import click

from gpuops.checks.protocol import Case, Machine
from gpuops.checks.runner import CheckRun, run_suite
from gpuops.checks.suites import Suite, load_suite, suite_paths
from gpuops.cli.check_text import listing, nagios_line, table
from gpuops.cli.settings import json_option, settings_of
from gpuops.config import Settings, environ
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_UNKNOWN, ProbeError, UsageError
from gpuops.host import probe
from gpuops.host.abandoned import abandoned
from gpuops.host.clock import Clock, SystemClock
from gpuops.host.commands import spawn_detached
from gpuops.host.node import boot_id, node_name
from gpuops.host.trust import check_folders, current_uid
from gpuops.log import printable
from gpuops.model import Entity, EntityKind, Event, Finding, Severity, Status, envelope

TRIGGERS = ("manual", "prolog", "epilog", "periodic", "preflight")
# Part of the sum in checks/suites/prolog.toml.
RECORD_S = 1.0

_EXIT = {Status.FAIL: EXIT_FAIL, Status.UNKNOWN: EXIT_UNKNOWN}
# The plugin API of Nagios: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN.
_NAGIOS_EXIT = {
    Status.PASS: 0,
    Status.SKIP: 0,
    Status.WARN: 1,
    Status.FAIL: 2,
    Status.UNKNOWN: 3,
}
_SEVERITY = {Status.FAIL: Severity.ERROR, Status.UNKNOWN: Severity.WARNING} | {
    Status.WARN: Severity.WARNING
}


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one command line asks for."""

    settings: Settings
    suite: Suite
    suites: dict[str, Path]
    machine: Machine
    node: str


@click.command()
@click.option("--suite", metavar="NAME", help="The suite to run; see --list.")
@click.option("--only", metavar="CHECK", multiple=True, help="Of the suite, only this; repeatable.")
@click.option(
    "--deadline",
    metavar="S",
    type=click.FloatRange(0, 3600, min_open=True),
    help="Seconds for all looks; instead of the suite's.",
)
@click.option("--gpus-expected", metavar="N", type=int, help="GPUs that this node must have.")
@click.option(
    "--trigger",
    type=click.Choice(TRIGGERS),
    default="manual",
    show_default=True,
    help="Who asks; it is recorded.",
)
@json_option
@click.option(
    "--jsonl", "as_jsonl", is_flag=True, help="Print one JSON object a line, as they come."
)
@click.option("--nagios", is_flag=True, help="Print one line; exit 0/1/2/3 as Nagios wants it.")
@click.option("--no-record", is_flag=True, help="Do not remember the result.")
@click.option(
    "--list", "as_list", is_flag=True, help="Show the suites, and the limits of this one."
)
@click.pass_context
def check(
    ctx: click.Context,
    *,
    suite: str | None,
    only: tuple[str, ...],
    deadline: float | None,
    gpus_expected: int | None,
    trigger: str,
    as_json: bool,
    as_jsonl: bool,
    nagios: bool,
    no_record: bool,
    as_list: bool,
) -> int:
    """Check this node; exit 0 if it may run a job.

    Exit codes: 0 it may (pass, warn, skip); 1 a check failed; 3 it could not be judged; 64 a
    mistake on the command line or in a file; 70 gpuops itself failed.
    """
    if as_json + as_jsonl + nagios > 1:
        raise UsageError("--json, --jsonl and --nagios exclude each other")
    plan = _plan(ctx, suite, gpus_expected, only, deadline)
    if as_list:
        click.echo(listing(plan.suite, plan.suites, as_json=as_json))
        return EXIT_OK
    clock = SystemClock()
    output = _Output()
    tell = _telling(plan, output) if as_jsonl else (lambda _findings: None)
    case = Case(node=Entity(EntityKind.NODE, plan.node))
    ran = run_suite(plan.suite, plan.machine, case=case, clock=clock, tell=tell)
    if as_json:
        output.say(json.dumps(envelope("gpuops.check/1", ran.to_json()), indent=2))
    elif as_jsonl:
        output.say(_summary_line(ran))
    elif nagios:
        output.say(nagios_line(ran))
    else:
        output.say(table(ran, width=_width()))
    if not no_record:
        _remember(ctx, plan, ran, trigger, clock)
    if output.error is not None:
        raise output.error
    return _NAGIOS_EXIT[ran.verdict] if nagios else _EXIT.get(ran.verdict, EXIT_OK)


def _plan(
    ctx: click.Context,
    suite: str | None,
    gpus_expected: int | None,
    only: tuple[str, ...],
    deadline_s: float | None,
) -> _Plan:
    settings = settings_of(ctx, check__suite=suite, check__gpus_expected=gpus_expected)
    folders = check_folders(settings.site_dir, uid=current_uid())
    origin = settings.values["check.gpus_expected"].origin
    loaded = load_suite(settings.suite, folders.suites)
    return _Plan(
        settings=settings,
        suite=loaded.only(only).within(deadline_s).expecting_gpus(settings.gpus_expected, origin),
        suites=suite_paths(folders.suites),
        machine=Machine(settings.root, folders.rules),
        node=node_name(environ()),
    )


def _width() -> int | None:
    """Return the terminal's columns, None where the output goes elsewhere."""
    return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None


class _Output:
    """Standard output that may fail, as when its reader goes away: the suite is run to its end.

    ``error`` holds the first failure; what is said after it is not printed.
    """

    def __init__(self) -> None:
        self.error: OSError | None = None

    def say(self, text: str) -> None:
        if self.error is not None:
            return
        try:
            click.echo(text)
        except OSError as exc:
            self.error = exc


def _telling(plan: _Plan, output: _Output) -> Callable[[Iterable[Finding]], None]:
    about = {"node": plan.node, "suite": plan.suite.name}

    def tell(findings: Iterable[Finding]) -> None:
        for finding in findings:
            line = {**about, "finding": finding.to_json()}
            output.say(json.dumps(envelope("gpuops.finding/1", line)))

    return tell


def _summary_line(ran: CheckRun) -> str:
    body = ran.to_json()
    del body["findings"]
    return json.dumps(envelope("gpuops.check-summary/1", body))


def events_of(ran: CheckRun, trigger: str, clock: Clock) -> list[Event]:
    """Return what is recorded of *ran*: the run itself, and each failure of gpuops in it."""
    from gpuops.store.new_event import new_event

    payload = {
        "suite": ran.suite,
        "trigger": trigger,
        "start_us": ran.start_us,
        "end_us": ran.end_us,
        "verdict": ran.verdict.word,
        "findings": [finding.to_json() for finding in ran.findings],
        "late": list(ran.late),
    }
    severity = _SEVERITY.get(ran.verdict, Severity.INFO)
    events = [
        new_event("check.ran", node=ran.node, clock=clock, severity=severity, payload=payload)
    ]
    for failure in ran.failures:
        payload = {
            "what": failure.what,
            "error": failure.error,
            "traceback": failure.traceback,
        }
        events.append(
            new_event(
                "tool.failed",
                node=ran.node,
                clock=clock,
                severity=Severity.WARNING,
                payload=payload,
            )
        )
    return events


def _remember(ctx: click.Context, plan: _Plan, ran: CheckRun, trigger: str, clock: Clock) -> None:
    """Spool the result and start a flusher; a spool that hangs costs `RECORD_S`, no verdict."""
    try:
        child = probe.start_call(
            lambda: _spooled(plan, events_of(ran, trigger, clock), clock),
            deadline_s=RECORD_S,
            question=f"record {plan.settings.spool_dir}",
            left=abandoned(),
        )
        outcome = probe.run(child)
        probe.answer(outcome)
    except ProbeError as exc:
        click.echo(f"gpuops: this result is not recorded: {printable(str(exc))}", err=True)
        return
    if outcome.errors:
        click.echo(printable(outcome.errors.decode(errors="replace").rstrip("\n")), err=True)
        return
    named = (ctx.find_root().obj or {}).get("config_file")
    config = ["--config", str(Path(named).absolute())] if named else []
    # -P: as root, never import from the directory in which the job happens to be.
    argv = [sys.executable, "-P", "-m", "gpuops", *config, "db", "flush", "--quiet"]
    try:
        spawn_detached(argv, environ())
    except OSError as exc:
        click.echo(f"gpuops: recorded, but cannot start the flusher: {exc.strerror}", err=True)


def _spooled(plan: _Plan, events: list[Event], clock: Clock) -> None:
    from gpuops.store.recorder import spool_recorder

    recorder = spool_recorder(
        plan.settings.spool_dir,
        node=plan.node,
        boot_id=boot_id(plan.settings.root),
        bytes_max=plan.settings.spool_bytes_max,
        clock=clock,
    )
    recorder.record(*events)
    recorder.close()
