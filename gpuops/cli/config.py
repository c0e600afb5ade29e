"""``gpuops config show|validate``."""

import json

import click

from gpuops.cli.options import json_option, settings_of
from gpuops.config.resolve import SETTINGS
from gpuops.errors import EXIT_OK, EXIT_USAGE
from gpuops.gate.validation import ValidationReport
from gpuops.gate.validation import validate as validate_all
from gpuops.host.clock import SystemClock
from gpuops.host.trust import current_uid
from gpuops.log import printable
from gpuops.model import envelope
from gpuops.scrub import scrub


@click.group(epilog="Example: gpuops config show --json")
def config() -> None:
    """Show or validate the settings in force."""


@config.command(epilog="Example: gpuops config show --json")
@json_option
@click.pass_context
def show(ctx: click.Context, *, as_json: bool) -> None:
    """Print each setting with its value and where that is from; secrets are never printed."""
    settings = settings_of(ctx)
    rows = [
        {
            "key": item.key,
            "value": _display_value(settings.values[item.key].value),
            "origin": settings.values[item.key].origin,
            "env": item.env,
            "help": item.help,
        }
        for item in SETTINGS
    ]
    if as_json:
        click.echo(json.dumps(envelope("gpuops.config/1", {"settings": rows}), indent=2))
        return
    width = max(len(str(row["key"])) for row in rows)
    for row in rows:
        click.echo(f"{row['key']:<{width}}  {row['value'] or '(unset)'}  [{row['origin']}]")


def _display_value(value: object) -> str | None:
    return None if value is None else scrub(str(value))


@config.command(epilog="Example: gpuops config validate")
@click.pass_context
def validate(ctx: click.Context) -> int:
    """Read all that an operator writes, and say every mistake in it; exit 64 where there is one.

    That is the configuration, suites, profiles, log rules, Xids, silences, the site's own checks,
    and the front matter of runbooks. Which profile is a node's can only be seen on the node.
    """
    found = ValidationReport()
    settings = settings_of(ctx, found.complain)
    validate_all(settings, found, uid=current_uid(), now_us=SystemClock().now_us())
    for word, texts in (("doubtful", found.doubts), ("mistake", found.mistakes)):
        for text in texts:
            click.echo(f"{word}: {' '.join(printable(scrub(text)).split())}", err=True)
    if found.mistakes:
        return EXIT_USAGE
    origin = settings.file or "no file, defaults only"
    click.echo(f"valid: configuration ({origin}); {'; '.join(found.read)}")
    return EXIT_OK
