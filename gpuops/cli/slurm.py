"""``gpuops slurm``: the commands of the hooks in ``slurm/``, and their installation.

``prolog`` and ``epilog`` do not import SQLAlchemy, except in the child that requests a permit.
"""

import json
import sys
import time
from pathlib import Path

import click

from gpuops.checks.core.runner import CheckRun
from gpuops.cli.check.text import reason_lines
from gpuops.cli.options import json_option, settings_of, store_option
from gpuops.config.resolve import Settings, environ
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_TRY_LATER, EXIT_UNKNOWN, UsageError
from gpuops.gate.drain import DrainRecord
from gpuops.gate.health_check import (
    DIAGNOSTIC,
    FindScontrol,
    check_health,
    diagnose,
    follow_up,
    publish_drain,
)
from gpuops.gate.hook import GateResult, HookContext, run_hook, within_shipped_deadline
from gpuops.gate.install import SHIPPED_HOOKS, check_program, installation, write_hooks
from gpuops.gate.permit import GateSettings
from gpuops.gate.policy import proves_healthy
from gpuops.gate.record import record_options
from gpuops.gate.session import CheckRequest, make_plan
from gpuops.host.clock import SystemClock
from gpuops.host.node_state import node_name
from gpuops.host.records import from_json
from gpuops.host.trust import current_uid
from gpuops.log import printable
from gpuops.model import Status, envelope
from gpuops.resources import data_dir
from gpuops.slurm.env import HookJob, job_of
from gpuops.slurm.scontrol import find_scontrol
from gpuops.store.fuse import FuseSettings
from gpuops.units import iso_utc

verdict_option = click.option(
    "--verdict",
    required=True,
    type=click.Path(path_type=Path),
    help="File to write if the node is refused; the hook uses a new name each time.",
)


@click.group(epilog="Example: gpuops slurm install --print")
def slurm() -> None:
    """Hooks of Slurm: prolog, epilog, health check, and how to install them."""


@slurm.command(epilog="Example: gpuops slurm prolog")
@verdict_option
@click.pass_context
def prolog(ctx: click.Context, *, verdict: Path) -> int:
    """Check this node before a job; exit 1 and write the verdict if it must not start here."""
    job = job_of(environ())
    return _print_result(run_hook(hook_context(ctx, "prolog", job), verdict))


@slurm.command(epilog="Example: gpuops slurm epilog")
@verdict_option
@click.pass_context
def epilog(ctx: click.Context, *, verdict: Path) -> int:
    """Check this node after a job; exit 1 and write the verdict if no other may start here.

    After a job that failed, or that claims with exit code 86 that the node is unhealthy, the full
    suite runs; only its findings count.
    """
    job = job_of(environ())
    suite = "full" if job.failed else "epilog"
    return _print_result(run_hook(hook_context(ctx, "epilog", job, suite), verdict))


@slurm.command(epilog="Example: gpuops slurm health")
@click.option(
    "--jitter",
    metavar="S",
    type=click.FloatRange(0, 20),
    default=10.0,
    show_default=True,
    help="Seconds over which nodes spread their start.",
)
@click.pass_context
def health(ctx: click.Context, *, jitter: float) -> int:
    """Check this node periodically; drain it, or resume it after a drain by gpuops."""
    context = hook_context(ctx, "health")
    result, action = check_health(context, scontrol_finder(ctx), jitter)
    _print_line(f"{action.action}: {action.why}")
    _print_result(result)
    return EXIT_OK


@slurm.command(hidden=True)
@click.option("--id", "drain_id", required=True, help="The drain that a hook requested.")
@click.option("--unsaved", metavar="JSON", help="That drain, if it is not on record yet.")
@click.pass_context
def publish(ctx: click.Context, *, drain_id: str, unsaved: str | None) -> int:
    """Report to slurmctld why a hook of this node failed; the hooks start it."""
    drain = None
    if unsaved is not None:
        drain = from_json(DrainRecord, json.loads(unsaved), "--unsaved")
    result = publish_drain(hook_context(ctx, "prolog"), drain_id, scontrol_finder(ctx), drain)
    _print_line(f"{result.step or 'given up'}: {result.error or drain_id}")
    return EXIT_OK


@slurm.command(hidden=True)
@click.pass_context
def followup(ctx: click.Context) -> int:
    """Check a GPU driver again, and longer, that gave no answer; the hooks start it."""
    result = follow_up(hook_context(ctx, "followup"), scontrol_finder(ctx))
    return EXIT_OK if result is None else _print_result(result)


@slurm.command(epilog="Example: gpuops slurm diag")
@click.pass_context
def diag(ctx: click.Context) -> int:
    """Run NVIDIA's diagnostic on this node; after a pass a drained node may return.

    It needs dcgmi and takes minutes. The health check starts it on a drained node without jobs.
    """
    check_run = diagnose(hook_context(ctx, "diag"))
    if check_run is None:
        _print_line("a diagnostic already runs on this node")
        return EXIT_TRY_LATER
    _print_findings(check_run)
    if proves_healthy(check_run.findings, DIAGNOSTIC):
        _print_line("passed: a drained node may return")
        return EXIT_OK
    _print_line(f"not passed: check {DIAGNOSTIC} gave no pass, or another check fails")
    return EXIT_FAIL if check_run.verdict is Status.FAIL else EXIT_UNKNOWN


@slurm.command(epilog="Example: gpuops slurm drains --dry-run")
@store_option
@click.option("--dry-run", is_flag=True, help="Show what would be recorded, record nothing.")
@json_option
@click.pass_context
def drains(ctx: click.Context, store: str | None, *, dry_run: bool, as_json: bool) -> None:
    """Record in the store who drained and resumed nodes by hand, from Slurm's reasons.

    It asks slurmctld once for all nodes: run it every few minutes, as root, on one host. What is
    on record already is not recorded again. If slurmctld or the store does not respond, it exits
    with 75, and the next run finds the same drains.
    """
    from gpuops.gate.slurm_drains import record_drains

    uid = current_uid()
    if uid != 0 and not dry_run:
        raise UsageError(
            f"gpuops slurm drains must be run by root, not by uid {uid}: users' reports about nodes"
            " do not count; try sudo, or --dry-run"
        )
    settings = settings_of(ctx, store__url=store)
    report = record_drains(
        scontrol_finder(ctx)(),
        settings.store_url,
        cluster=settings.cluster,
        clock=SystemClock(),
        root=settings.root,
        dry_run=dry_run,
    )
    states = [
        {
            "node": item.node,
            "state": "drained" if item.drained else "resumed",
            "time": iso_utc(item.t_us),
            "actor": item.actor,
            "reason": item.reason,
        }
        for item in report.changes
    ]
    if as_json:
        counts = {"dry_run": dry_run, "nodes": report.nodes, "unknown": report.unknown}
        body = envelope("gpuops.slurm-drains/1", {**counts, "states": states})
        click.echo(json.dumps(body, indent=2))
        return
    for state in states:
        line = "{node}: {state} {time} by {actor}: {reason}".format_map(state)
        click.echo(printable(line))
    click.echo(
        f"{'would record' if dry_run else 'recorded'} {len(states)} drains and resumes by hand; "
        f"Slurm has {report.nodes} nodes, the store knows {report.nodes - report.unknown} of them"
    )


@slurm.command(epilog="Example: gpuops slurm install --print")
@click.option("--print", "only_print", is_flag=True, help="Show everything, write nothing.")
@click.option(
    "--dir",
    "hooks_dir",
    type=click.Path(path_type=Path),
    default=Path(SHIPPED_HOOKS),
    show_default=True,
    help="The folder of the hooks, on every node.",
)
@click.option(
    "--gpuops",
    "program",
    type=click.Path(path_type=Path),
    help="The gpuops that the hooks call; default: this one.",
)
def install(*, only_print: bool, hooks_dir: Path, program: Path | None) -> int:
    """Write the hooks, and show the lines that slurm.conf needs."""
    package = Path(__file__).parents[1]
    mine = Path(sys.executable).parent / "gpuops"
    program = program or mine
    found = installation(data_dir("slurm"), hooks_dir, program)
    try:
        check_program(program, package if program == mine else program, current_uid())
    except UsageError as exc:
        if not only_print:
            raise
        _print_line(f"gpuops: warning: {exc}")
    if only_print:
        for name, text in found.hooks.items():
            click.echo(f"# ---- {hooks_dir / name} (mode 755, root's) ----\n{text}")
    else:
        write_hooks(found.hooks, hooks_dir)
        click.echo(f"# written into {hooks_dir}: {', '.join(found.hooks)}\n")
    click.echo(f"# ---- slurm.conf ----\n{found.conf}", nl=False)
    return EXIT_OK


def _print_line(text: str) -> None:
    """Print *text* as one line for slurmd's log; it may quote the kernel, files and processes."""
    click.echo(printable(text).replace("\n", " "), err=True)


def _print_findings(check_run: CheckRun) -> None:
    for line in reason_lines(check_run.findings):
        _print_line(line)


def _print_result(result: GateResult) -> int:
    """Print findings and the decision for slurmd's log; return the exit code."""
    _print_findings(result.check_run)
    for line in result.problems:
        _print_line(line)
    if result.cause is not None:
        _print_line(f"{result.decision.outcome}: {result.decision.why}")
    return EXIT_FAIL if result.decision.drains else EXIT_OK


def hook_context(
    ctx: click.Context, hook: str, job: HookJob | None = None, suite: str | None = None
) -> HookContext:
    """Return what *hook* works with on this node, by the settings of *ctx*; see `HookContext`."""
    job = HookJob() if job is None else job
    settings = settings_of(ctx)
    node = node_name(environ())
    request = CheckRequest(
        suite=suite or hook,
        node=node,
        root=settings.root,
        state_dir=settings.state_dir,
        uid=current_uid(),
        site_dir=settings.site_dir,
        gpus=job.gpus,
        gpus_expected=settings.gpus_expected,
        gpus_expected_origin=settings.values["check.gpus_expected"].origin,
        profile=settings.profile,
        trigger=hook,
        job_id=job.id,
        job_uid=job.uid,
    )
    plan = make_plan(request)
    config_file = (ctx.find_root().obj or {}).get("config_file")
    return HookContext(
        hook=hook,
        job_id=job.id,
        job_uid=job.uid,
        plan=within_shipped_deadline(plan, hook),
        gate=_gate_settings(settings, node),
        options=record_options(
            settings, config_file, settings.state_dir, job.uid if hook == "prolog" else None
        ),
        clock=SystemClock(),
        pause=time.sleep,
    )


def _gate_settings(settings: Settings, node: str) -> GateSettings:
    return GateSettings(
        node=node,
        cluster=settings.cluster,
        store_url=settings.store_url,
        state_dir=settings.state_dir,
        uid=current_uid(),
        mode=settings.mode,
        fuse=FuseSettings(
            nodes=settings.fuse_nodes,
            max_drained=settings.max_drained,
            window_s=settings.fuse_window_s,
        ),
        passes_to_resume=settings.passes_to_resume,
        resumes_max_per_day=settings.resumes_max_per_day,
        permit_deadline_s=settings.permit_deadline_s,
    )


def scontrol_finder(ctx: click.Context) -> FindScontrol:
    """Return what finds scontrol when it is needed: a prolog needs none."""
    settings = settings_of(ctx)
    return lambda: find_scontrol(environ(), settings.slurm_bin_dir)
