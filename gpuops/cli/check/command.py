"""``gpuops check``: run a suite, print and record the findings, exit with the verdict.

It imports neither torch nor SQLAlchemy: it runs before every job.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from gpuops.checks.core.runner import CheckRun
from gpuops.cli.check.request import build_request, for_recording, read_recording
from gpuops.cli.check.text import findings_table, nagios_line, suite_list
from gpuops.cli.options import OutputFile, json_option, settings_of, terminal_width
from gpuops.config.resolve import Settings, environ
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_UNKNOWN, ProbeError, UsageError
from gpuops.gate.record import CheckOccasion, record_check_run, record_options
from gpuops.gate.session import CheckPlan, check_node, make_plan, start_saving_state
from gpuops.host.clock import Clock, SystemClock
from gpuops.host.process import probe
from gpuops.host.process.abandoned import abandoned
from gpuops.host.trust import atomic_write
from gpuops.model import Finding, Status, envelope

TRIGGERS = ("manual", "prolog", "epilog", "periodic", "preflight")
METRICS_TIMEOUT_S = 1.0
_FILE = click.Path(dir_okay=False, path_type=Path)
_EXIT_CODES = {Status.FAIL: EXIT_FAIL, Status.UNKNOWN: EXIT_UNKNOWN}
# The plugin API of Nagios: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN.
_NAGIOS_EXIT_CODES = {
    Status.PASS: 0,
    Status.SKIP: 0,
    Status.WARN: 1,
    Status.FAIL: 2,
    Status.UNKNOWN: 3,
}


@click.command(epilog="Example: gpuops check --suite prolog --json")
@click.option("--suite", metavar="NAME", help="The suite to run; see --list.")
@click.option(
    "--only", metavar="CHECK", multiple=True, help="Of the suite, only this; repeatable; a pattern."
)
@click.option(
    "--gpus",
    metavar="auto|all|GPUS",
    default="auto",
    show_default=True,
    help="GPUs to judge: indices, UUIDs or PCI addresses; auto: in a prolog or epilog the job's.",
)
@click.option(
    "--deadline",
    metavar="S",
    type=click.FloatRange(0, 3600, min_open=True),
    help="Seconds for all probes; instead of the suite's.",
)
@click.option("--profile", metavar="NAME|FILE", help="Judge by this hardware profile.")
@click.option("--gpus-expected", metavar="N", type=int, help="GPUs that this node must have.")
@click.option(
    "--trigger",
    type=click.Choice(TRIGGERS),
    default="manual",
    show_default=True,
    help="The caller; it is recorded.",
)
@click.option("--job", "job_id", metavar="ID", help="The Slurm job that this check is for.")
@click.option("--facts", metavar="FILE", type=_FILE, help="Judge this recording of `gpuops facts`.")
@json_option
@click.option(
    "--jsonl", "as_jsonl", is_flag=True, help="Print one JSON object a line, as they come."
)
@click.option("--nagios", is_flag=True, help="Print one line; exit 0/1/2/3 as Nagios wants it.")
@click.option("--prom", metavar="FILE", type=OutputFile(), help="Also write a Prometheus textfile.")
@click.option("--no-record", is_flag=True, help="Do not record the result.")
@click.option(
    "--list", "as_list", is_flag=True, help="Show the suites, and the limits of this one."
)
@click.option("--explain", metavar="CHECK", help="Show what a check reads, and its limits.")
@click.pass_context
def check(
    ctx: click.Context,
    *,
    suite: str | None,
    only: tuple[str, ...],
    gpus: str,
    deadline: float | None,
    profile: str | None,
    gpus_expected: int | None,
    trigger: str,
    job_id: str | None,
    facts: Path | None,
    as_json: bool,
    as_jsonl: bool,
    nagios: bool,
    prom: Path | None,
    no_record: bool,
    as_list: bool,
    explain: str | None,
) -> int:
    """Check this node; exit 0 if it may run a job.

    Exit codes: 0 it may (pass, warn, skip); 1 a check failed; 3 it could not be judged; 64 a
    mistake on the command line or in a file; 70 gpuops itself failed.
    """
    _reject_conflicting_options(ctx)
    settings = settings_of(
        ctx, check__suite=suite, check__gpus_expected=gpus_expected, check__profile=profile
    )
    request = build_request(
        settings,
        environ(),
        only=only,
        deadline_s=deadline,
        gpus=gpus,
        trigger=trigger,
        job_id=job_id,
    )
    recording = None if facts is None else read_recording(facts)
    if recording is not None:
        request = for_recording(request, recording, profile)
    if explain is not None:
        from gpuops.cli.check.explain import explain_check

        click.echo(explain_check(request, explain, as_json=as_json))
        return EXIT_OK
    plan = make_plan(request)
    if as_list:
        click.echo(suite_list(plan.suite, plan.suites, as_json=as_json))
        return EXIT_OK
    clock, output = SystemClock(), _Output()
    on_finding = _jsonl_printer(plan, output) if as_jsonl else (lambda _findings: None)
    if recording is None:
        check_run = check_node(plan, clock, on_finding)
    else:
        from gpuops.gate.session import judge_recording

        check_run = judge_recording(plan, recording, on_finding)
    output.print_text(_format_result(check_run, as_json=as_json, as_jsonl=as_jsonl, nagios=nagios))
    _record_result(ctx, plan, check_run, settings, prom, clock, record=not (no_record or facts))
    if output.error is not None:
        raise output.error
    if nagios:
        return _NAGIOS_EXIT_CODES[check_run.verdict]
    return _EXIT_CODES.get(check_run.verdict, EXIT_OK)


def _reject_conflicting_options(ctx: click.Context) -> None:
    """Raise UsageError if the options that were given exclude each other."""
    given = {
        name
        for name in ctx.params
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    for group, text in (
        ({"as_json", "as_jsonl", "nagios"}, "--json, --jsonl and --nagios exclude each other"),
        ({"as_list", "explain"}, "--list and --explain exclude each other"),
        ({"facts", "deadline"}, "--deadline limits probes, and with --facts nothing is probed"),
    ):
        if len(group & given) > 1:
            raise UsageError(text)
    for option in ("as_list", "explain"):
        other = given - {
            option,
            "as_json",
            "suite",
            "only",
            "gpus_expected",
            "profile",
            "no_record",
        }
        if option in given and other:
            names = ", ".join(
                sorted(param.opts[0] for param in ctx.command.params if param.name in other)
            )
            raise UsageError(f"--list and --explain check nothing; leave out {names}")


def _format_result(check_run: CheckRun, *, as_json: bool, as_jsonl: bool, nagios: bool) -> str:
    if as_json:
        return json.dumps(envelope("gpuops.check/1", check_run.to_json()), indent=2)
    if as_jsonl:
        return _jsonl_summary(check_run)
    return nagios_line(check_run) if nagios else findings_table(check_run, width=terminal_width())


def _record_result(
    ctx: click.Context,
    plan: CheckPlan,
    check_run: CheckRun,
    settings: Settings,
    prom: Path | None,
    clock: Clock,
    *,
    record: bool,
) -> None:
    """Write the metrics and what is remembered; problem with either changes no verdict."""
    warnings = [] if prom is None else [_write_metrics(check_run, prom)]
    if record:
        request = plan.request
        occasion = CheckOccasion(
            trigger=request.trigger,
            job_id=request.job_id,
            gpus=request.gpus,
            mode=settings.mode.value,
        )
        config_file = (ctx.find_root().obj or {}).get("config_file")
        options = record_options(settings, config_file, request.state_dir)
        wait_for_state = start_saving_state(plan, check_run)
        not_recorded = record_check_run(check_run, occasion, options, clock)
        not_saved = wait_for_state()
        # Usually both have one cause: a user who may write neither folder.
        warnings.append(not_recorded or not_saved)
    for text in warnings:
        if text is not None:
            click.echo(text, err=True)


def _write_metrics(check_run: CheckRun, path: Path) -> str | None:
    """Return what went wrong; the folder may be on a disk that hangs."""

    def write() -> str | None:
        from gpuops.cli.check.request import metrics

        try:
            atomic_write(path, metrics(check_run), 0o644)
        except OSError as exc:
            return exc.strerror
        return None

    try:
        problem = probe.ask(write, METRICS_TIMEOUT_S, question=f"metrics {path}", left=abandoned())
    except ProbeError as exc:
        problem = str(exc)
    return problem and f"gpuops: cannot write {path}: {problem}"


class _Output:
    """Standard output that may fail, as when its reader exits: the suite still runs to its end.

    ``error`` holds the first failure; nothing is printed after it.
    """

    def __init__(self) -> None:
        self.error: OSError | None = None

    def print_text(self, text: str) -> None:
        if self.error is not None:
            return
        try:
            click.echo(text)
        except OSError as exc:
            self.error = exc


def _jsonl_printer(plan: CheckPlan, output: _Output) -> Callable[[Iterable[Finding]], None]:
    about = {"node": plan.request.node, "suite": plan.suite.name}

    def on_finding(findings: Iterable[Finding]) -> None:
        for finding in findings:
            line = {**about, "finding": finding.to_json()}
            output.print_text(json.dumps(envelope("gpuops.finding/1", line)))

    return on_finding


def _jsonl_summary(check_run: CheckRun) -> str:
    body = check_run.to_json()
    del body["findings"]
    return json.dumps(envelope("gpuops.check-summary/1", body))
