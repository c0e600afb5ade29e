"""``gpuops profile``: hardware profiles of a site's own nodes."""

from pathlib import Path

import click

from gpuops.cli.check.request import build_request
from gpuops.cli.options import OutputFile, settings_of
from gpuops.config.resolve import environ
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_UNKNOWN, UsageError
from gpuops.gate.session import make_plan
from gpuops.host.clock import SystemClock
from gpuops.host.trust import atomic_write
from gpuops.log import printable
from gpuops.model import Status

_SHOWN_MAX = 5


@click.group(epilog="Example: gpuops profile capture --name h100-rack")
def profile() -> None:
    """Make hardware profiles, which say what a node must have."""


@profile.command("capture", epilog="Example: gpuops profile capture --name h100-rack")
@click.option(
    "--out", metavar="FILE", type=OutputFile(), help="Output file; default: standard output."
)
@click.option("--name", metavar="NAME", help="Write profiles/NAME.toml of the site's folder.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option(
    "--accept", metavar="CHECK", multiple=True, help="Capture though CHECK warns; repeatable."
)
@click.option(
    "--profile", "judged_by", metavar="NAME|FILE", help="The profile that the node must pass first."
)
@click.pass_context
def capture_profile(
    ctx: click.Context,
    *,
    out: Path | None,
    name: str | None,
    force: bool,
    accept: tuple[str, ...],
    judged_by: str | None,
) -> int:
    """Write a profile of this node, which must be known to be good.

    The checks of the suite `default` run first: nothing is written if one fails, or if one that
    fills the profile warns. Exit codes: 0 written; 1 the node is not good; 3 it could not be
    judged; 64 a mistake on the command line, or the file exists.
    """
    from gpuops.gate.profile_capture import capture

    settings = settings_of(ctx, check__suite="default", check__profile=judged_by)
    path = _target(out, name, settings.site_dir)
    if path is not None and path.exists() and not force:
        raise UsageError(f"{path} exists; use --force to replace it")
    plan = make_plan(build_request(settings, environ()))
    plan.suite.only(accept)  # refuses a name that is no check's
    found = capture(plan, path or Path("captured.toml"), accept, SystemClock())
    if found.objections:
        shown = [
            f"  {item.status.word} {item.check}: {printable(item.message)}"
            for item in found.objections[:_SHOWN_MAX]
        ]
        more = len(found.objections) - len(shown)
        shown += [f"  and {more} more"] if more else []
        click.echo(
            "gpuops: no profile is written, since this node does not look good (`gpuops check`; "
            "--accept CHECK for a warning that is in order):\n" + "\n".join(shown),
            err=True,
        )
        unknown = all(item.status is Status.UNKNOWN for item in found.objections)
        return EXIT_UNKNOWN if unknown else EXIT_FAIL
    if name is not None and found.unused:
        raise UsageError(f"--name {name}: nothing is written: {found.unused}")
    if found.unused:
        text = f"gpuops: among the site's profiles this one would not apply: {found.unused}"
        click.echo(printable(text), err=True)
    if path is None:
        click.echo(found.text, nl=False)
        return EXIT_OK
    try:
        atomic_write(path, found.text.encode(), 0o644)
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror}") from exc
    click.echo(f"wrote {path}")
    return EXIT_OK


def _target(out: Path | None, name: str | None, site_dir: Path | None) -> Path | None:
    if name is None:
        return out
    if out is not None:
        raise UsageError("--out and --name exclude each other: the file's name is the profile's")
    if site_dir is None:
        raise UsageError("--name needs the site's folder (check.site_dir); or use --out FILE")
    if Path(name).name != name or name.startswith("."):
        raise UsageError(f"--name {name!r}: a profile's name is that of a file, without .toml")
    return site_dir / "profiles" / f"{name}.toml"
