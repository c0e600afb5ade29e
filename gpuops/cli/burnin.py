"""``gpuops burnin``: test this node under load, and record what was measured."""

import json
import os
import shutil

import click

from gpuops.burnin.baseline_file import load_baselines
from gpuops.burnin.judge import PeerLimits
from gpuops.burnin.plan import DIAGNOSTIC, TIERS, TOOLS, BurninTest, make_tests
from gpuops.checks.core.runner import CheckRun
from gpuops.cli.check.request import build_request
from gpuops.cli.check.text import findings_table
from gpuops.cli.interrupt import sigterm_interrupts
from gpuops.cli.options import (
    FiniteRange,
    json_option,
    settings_of,
    terminal_width,
    warn_unless_stored,
)
from gpuops.config.resolve import Settings, environ
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_UNKNOWN, ProbeError, UsageError
from gpuops.gate.burnin import SUITE, Burnin, BurninRequest, BurninWatcher, measured_events
from gpuops.gate.burnin_counters import counting_plan
from gpuops.gate.burnin_parts import CHECK as PARTS_CHECK
from gpuops.gate.burnin_parts import local_disks
from gpuops.gate.burnin_progress import TestedTest
from gpuops.gate.drain import update_diagnostic
from gpuops.gate.node_lock import node_lock
from gpuops.gate.record import (
    RECORD_TEST_S,
    CheckOccasion,
    record_check_run,
    record_options,
)
from gpuops.host.clock import Clock, SystemClock
from gpuops.host.process.command import find
from gpuops.host.trust import check_folders, current_uid
from gpuops.log import printable
from gpuops.model import Status, envelope
from gpuops.units import format_seconds

_EXIT_CODES = {Status.FAIL: EXIT_FAIL, Status.UNKNOWN: EXIT_UNKNOWN}
# Of it, the checks that count errors run before and after each test.
_COUNTING_SUITE = "full"


@click.command(epilog="Example: gpuops burnin --tier 10m --only gemm,hbm")
@click.option(
    "--tier",
    type=click.Choice(tuple(TIERS)),
    help="Which tests, and how long they measure in all; default: the setting burnin.tier (10m).",
)
@click.option("--only", metavar="TESTS", default="", help="Only these tests: gemm,hbm,host,…")
@click.option(
    "--duration",
    metavar="S",
    type=FiniteRange(0, 86_400, min_open=True),
    help="Seconds that all tests measure; instead of the tier's.",
)
@click.option(
    "--gpus",
    metavar="all|GPUS",
    default="all",
    show_default=True,
    help="GPUs to test: indices, UUIDs or PCI addresses.",
)
@json_option
@click.option("--jsonl", "as_jsonl", is_flag=True, help="Print one JSON object a line.")
@click.option("--resume", is_flag=True, help="Go on with the burn-in that was interrupted.")
@click.option("--no-record", is_flag=True, help="Do not record the result; no --resume later.")
@click.pass_context
def burnin(
    ctx: click.Context,
    *,
    tier: str | None,
    only: str,
    duration: float | None,
    gpus: str,
    as_json: bool,
    as_jsonl: bool,
    resume: bool,
    no_record: bool,
) -> int:
    """Test this node under load: its GPUs, or its processors if it has none.

    Nothing else may run meanwhile. Results are compared, not only produced: the same work must give
    the same bits, and parts of a kind the same rate. It ends no process and drains nothing. A node
    that gpuops drained for a class which returns by a burn-in is resumed after a whole one that
    passed, as root, without --only, --duration and --gpus.

    Exit codes: 0 all tests passed or warned; 1 a test failed; 3 it could not be judged; 64 a
    mistake on the command line; 70 gpuops itself failed; 75 the node is being tested; 130 Ctrl-C,
    143 SIGTERM: what was done until then is recorded.
    """
    if as_json and as_jsonl:
        raise UsageError("--json and --jsonl exclude each other")
    names = tuple(word.strip() for word in only.split(",") if word.strip())
    if only and not names:
        raise UsageError(f"--only {only!r} names no test")
    ctx.with_resource(sigterm_interrupts())
    settings = settings_of(ctx, check__suite=_COUNTING_SUITE, burnin__tier=tier)
    tier = settings.values["burnin.tier"].value
    plan = counting_plan(build_request(settings, environ(), gpus=gpus))
    request = BurninRequest(
        plan=plan,
        tests=make_tests(tier, names, duration, _absent(settings)),
        asked=_asked(tier, names, duration, gpus),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        disks=local_disks(settings.root),
        environ=environ(),
        baselines=load_baselines(check_folders(settings.site_dir, uid=current_uid()).baselines),
        limits=_peer_limits(settings),
        resume=resume,
        keeps_progress=not no_record,
    )
    clock, output = SystemClock(), _Output(as_json=as_json, as_jsonl=as_jsonl)
    run = Burnin(request, clock, output.watcher())
    with node_lock(plan.request.state_dir, SUITE) as not_locked:
        if not_locked is not None:
            _warn(f"another burn-in would not be noticed: no lock in {not_locked}")
        try:
            run.run()
        except KeyboardInterrupt:
            _finish(ctx, run, output, settings, clock, record=not no_record)
            raise
        check_run = _finish(ctx, run, output, settings, clock, record=not no_record)
    is_whole = not names and duration is None and gpus == "all" and not no_record
    is_whole = is_whole and all(found.check != PARTS_CHECK for found in check_run.findings)
    if is_whole and check_run.verdict is Status.PASS:
        _keep_pass(request, check_run.start_us)
    return _EXIT_CODES.get(check_run.verdict, EXIT_OK)


def _absent(settings: Settings) -> list[str]:
    """Return the tests for which nothing is installed."""
    has_tools = any(map(shutil.which, TOOLS))
    has_diagnostic = find(settings.root, "dcgmi") is not None
    return ["tools"] * (not has_tools) + [DIAGNOSTIC] * (not has_diagnostic)


def _peer_limits(settings: Settings) -> PeerLimits:
    """Return the limits that the site set, else the defaults; each with its source."""
    warn = settings.values["burnin.peers_warn_percent"]
    fail = settings.values["burnin.peers_fail_percent"]
    default = PeerLimits()
    origins = {item.origin for item in (warn, fail) if item.origin != "default"}
    return PeerLimits(
        warn_percent=warn.value,
        suspect_percent=max(warn.value, default.suspect_percent),
        fail_percent=fail.value,
        source=", ".join(["[burnin]", *sorted(origins)]) if origins else default.source,
    )


def _asked(tier: str, names: tuple[str, ...], duration: float | None, gpus: str) -> str:
    words = [f"--tier {tier}", *([f"--only {','.join(names)}"] if names else [])]
    words += [f"--duration {duration:g}"] if duration is not None else []
    return " ".join([*words, f"--gpus {gpus}"])


def _finish(
    ctx: click.Context,
    run: Burnin,
    output: "_Output",
    settings: Settings,
    clock: Clock,
    *,
    record: bool,
) -> CheckRun:
    """Record and print the result, also that of a part of the burn-in."""
    check_run, measured = run.result(), run.measured()
    if record:
        request = run.request.plan.request
        occasion = CheckOccasion(
            trigger=request.trigger,
            job_id=request.job_id,
            gpus=request.gpus,
            mode=settings.mode.value,
        )
        config_file = (ctx.find_root().obj or {}).get("config_file")
        problem = record_check_run(
            check_run,
            occasion,
            record_options(settings, config_file, request.state_dir),
            clock,
            lambda run_id: measured_events(measured, run_id, check_run.node, clock),
            deadline_s=RECORD_TEST_S,
        )
        if problem is not None:
            click.echo(problem, err=True)
        else:
            warn_unless_stored(settings.store_url, settings.spool_dir, settings.root)
    # Last: whoever does not read it, or has no space for it, loses no record.
    output.print_result(check_run, measured)
    return check_run


def _keep_pass(request: BurninRequest, began_us: int) -> None:
    """Record on this node that a whole burn-in passed: the health check may resume the node."""
    about = request.plan.request
    try:
        update_diagnostic(about.state_dir, about.uid, burnin_us=began_us)
    except ProbeError as exc:
        _warn(f"the health check will not know of this burn-in: {exc}")


def _warn(text: str) -> None:
    click.echo(f"gpuops: {printable(text)}", err=True)


class _Output:
    """Standard output as text, as one JSON object or as JSON lines."""

    def __init__(self, *, as_json: bool, as_jsonl: bool) -> None:
        self._as_json, self._as_jsonl = as_json, as_jsonl

    def watcher(self) -> BurninWatcher:
        lines = BurninWatcher(on_start=self._on_start, on_done=self._on_done, on_problem=_warn)
        if self._as_json or self._as_jsonl or terminal_width() is None:
            return lines
        from rich.console import Console

        from gpuops.cli.burnin_live import LiveDisplay

        return LiveDisplay(Console()).watcher(lines)

    def _on_start(self, test: BurninTest, parts: int) -> None:
        if not self._as_json and not self._as_jsonl:
            where = f"{parts} part{'' if parts == 1 else 's'}"
            click.echo(f"{test.name}: {test.about} ({where}, {format_seconds(test.seconds)})")

    def _on_done(self, tested: TestedTest) -> None:
        if self._as_jsonl:
            for item in tested.measurements:
                click.echo(json.dumps(envelope("gpuops.measurement/1", item.to_json())))
            for found in tested.findings:
                line = {"suite": SUITE, "finding": found.to_json()}
                click.echo(json.dumps(envelope("gpuops.finding/1", line)))
        elif not self._as_json:
            worst = max((found.status for found in tested.findings), default=Status.SKIP)
            click.echo(f"{tested.name}: {worst.word}")

    def print_result(self, check_run: CheckRun, measured: list[dict[str, object]]) -> None:
        body = check_run.to_json()
        if self._as_json:
            body["measurements"] = measured
            click.echo(json.dumps(envelope("gpuops.burnin/1", body), indent=2))
        elif self._as_jsonl:
            del body["findings"]
            click.echo(json.dumps(envelope("gpuops.check-summary/1", body)))
        else:
            click.echo()
            click.echo(findings_table(check_run, width=terminal_width()))
