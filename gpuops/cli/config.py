"""``gpuops config show|validate``."""

import json

import click

from gpuops.checks.suites import load_suite, suite_paths
from gpuops.cli.settings import json_option, settings_of
from gpuops.config import SETTINGS
from gpuops.host.trust import check_folders, current_uid
from gpuops.model import envelope
from gpuops.rules import load_rules
from gpuops.scrub import scrub


@click.group()
def config() -> None:
    """Show or validate the settings in force."""


@config.command()
@json_option
@click.pass_context
def show(ctx: click.Context, *, as_json: bool) -> None:
    """Print each setting with its value and where that is from; secrets are never printed."""
    settings = settings_of(ctx)
    rows = [
        {
            "key": item.key,
            "value": _shown(settings.values[item.key].value),
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


def _shown(value: object) -> str | None:
    return None if value is None else scrub(str(value))


@config.command()
@click.pass_context
def validate(ctx: click.Context) -> None:
    """Read the configuration, every suite and every rule; exit 64 at the first mistake."""
    settings = settings_of(ctx)
    folders = check_folders(settings.site_dir, uid=current_uid())
    rules = load_rules(folders.rules)
    suites = [load_suite(name, folders.suites).name for name in suite_paths(folders.suites)]
    origin = settings.file or "no file, defaults only"
    click.echo(
        f"valid: configuration ({origin}), {len(rules)} log rules, suites {', '.join(suites)}"
    )
