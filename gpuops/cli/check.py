"""``gpuops check``: run a suite, print what it found, remember it, exit with the verdict.

It imports neither torch nor SQLAlchemy: it runs before every job.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from gpuops.checks.runner import CheckRun
from gpuops.cli.check_request import request_of
from gpuops.cli.check_text import listing, nagios_line, table
from gpuops.cli.settings import json_option, settings_of
from gpuops.config import Settings, environ
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_UNKNOWN, UsageError
from gpuops.gate.node_incidents import Occasion
from gpuops.gate.remember import Memory, remember
from gpuops.gate.session import Plan, check_node, keep_state, plan_of
from gpuops.host.clock import SystemClock
from gpuops.host.trust import current_uid
from gpuops.model import Finding, Status, envelope

TRIGGERS = ("manual", "prolog", "epilog", "periodic", "preflight")
_EXIT = {Status.FAIL: EXIT_FAIL, Status.UNKNOWN: EXIT_UNKNOWN}
# The plugin API of Nagios: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN.
_NAGIOS_EXIT = {
    Status.PASS: 0,
    Status.SKIP: 0,
    Status.WARN: 1,
    Status.FAIL: 2,
    Status.UNKNOWN: 3,
}


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
    settings = settings_of(ctx, check__suite=suite, check__gpus_expected=gpus_expected)
    plan = plan_of(request_of(settings, environ(), only=only, deadline_s=deadline, trigger=trigger))
    if as_list:
        click.echo(listing(plan.suite, plan.suites, as_json=as_json))
        return EXIT_OK
    clock = SystemClock()
    output = _Output()
    tell = _telling(plan, output) if as_jsonl else (lambda _findings: None)
    ran = check_node(plan, clock, tell)
    if as_json:
        output.say(json.dumps(envelope("gpuops.check/1", ran.to_json()), indent=2))
    elif as_jsonl:
        output.say(_summary_line(ran))
    elif nagios:
        output.say(nagios_line(ran))
    else:
        output.say(table(ran, width=_width()))
    if not no_record:
        occasion = Occasion(trigger=trigger, gpus=plan.request.gpus, mode=settings.mode.value)
        trouble = remember(ran, occasion, _memory(ctx, settings), clock)
        for text in (trouble, keep_state(plan, ran)):
            if text is not None:
                click.echo(text, err=True)
    if output.error is not None:
        raise output.error
    return _NAGIOS_EXIT[ran.verdict] if nagios else _EXIT.get(ran.verdict, EXIT_OK)


def _memory(ctx: click.Context, settings: Settings) -> Memory:
    named = (ctx.find_root().obj or {}).get("config_file")
    return Memory(
        spool_dir=settings.spool_dir,
        spool_bytes_max=settings.spool_bytes_max,
        root=settings.root,
        config_file=Path(named).absolute() if named else None,
        environ=environ(),
        state_dir=settings.state_dir if current_uid() == 0 else None,
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


def _telling(plan: Plan, output: _Output) -> Callable[[Iterable[Finding]], None]:
    about = {"node": plan.request.node, "suite": plan.suite.name}

    def tell(findings: Iterable[Finding]) -> None:
        for finding in findings:
            line = {**about, "finding": finding.to_json()}
            output.say(json.dumps(envelope("gpuops.finding/1", line)))

    return tell


def _summary_line(ran: CheckRun) -> str:
    body = ran.to_json()
    del body["findings"]
    return json.dumps(envelope("gpuops.check-summary/1", body))
