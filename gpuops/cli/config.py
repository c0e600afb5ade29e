"""``gpuops config show|validate``."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click

from gpuops.burnin.baseline_file import Baseline, baseline_for, load_baselines, outliers
from gpuops.checks.core import silence, site
from gpuops.checks.core.profile_files import load_profiles, parse_profile
from gpuops.checks.core.suite import Suite, load_suite, suite_paths, unknown_name
from gpuops.checks.core.xid_catalogue import load_sxids, load_xids
from gpuops.cli.options import json_option, settings_of
from gpuops.config.resolve import SETTINGS, Settings, read_toml
from gpuops.errors import EXIT_OK, EXIT_USAGE, ConfigError, UsageError
from gpuops.gate.session import is_profile_file
from gpuops.host.clock import SystemClock
from gpuops.host.trust import CheckFolders, check_folders, current_uid
from gpuops.incident.runbook import load_runbooks
from gpuops.log import printable
from gpuops.model import envelope
from gpuops.resources import data_dir
from gpuops.rules import load_rules
from gpuops.scrub import scrub


@click.group(epilog="Example: gpuops config show --json")
def config() -> None:
    """Show or validate the settings in force."""


@config.command(epilog="Example: gpuops config show --json")
@json_option
@click.pass_context
def show(ctx: click.Context, *, as_json: bool) -> None:
    """Print each setting with its value and its origin; secrets are never printed."""
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
    """Check all files that an operator writes, and print every mistake; exit 64 if there is one.

    These are the configuration, suites, profiles, baselines, log rules, Xids, silences, the site's
    checks, and the front matter of runbooks. Which profile matches a node can only be checked on
    the node.
    """
    found = ValidationReport()
    settings = settings_of(ctx, found.on_error)
    validate_settings(settings, found, uid=current_uid(), now_us=SystemClock().now_us())
    for word, texts in (("warning", found.warnings), ("mistake", found.mistakes)):
        for text in texts:
            click.echo(f"{word}: {' '.join(printable(scrub(text)).split())}", err=True)
    if found.mistakes:
        return EXIT_USAGE
    origin = settings.file or "no file, defaults only"
    click.echo(f"valid: configuration ({origin}); {'; '.join(found.read)}")
    return EXIT_OK


@dataclass(slots=True)
class ValidationReport:
    """What was read, the mistakes in it, and warnings; each a line."""

    read: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def on_error(self, error: ConfigError) -> None:
        """Add *error* once: suites that inherit from another repeat its mistakes."""
        self.add_mistake(str(error))

    def add_mistake(self, text: str) -> None:
        """Add a mistake, once."""
        if text not in self.mistakes:
            self.mistakes.append(text)


def validate_settings(
    settings: Settings, found: ValidationReport, *, uid: int, now_us: int
) -> None:
    """Check all files that *settings* refer to, as *uid* would read them at *now_us*."""
    from gpuops.store.backends import parse_url

    on_error = found.on_error
    try:
        parse_url(settings.store_url)
    except UsageError as exc:
        found.add_mistake(f"store.url: {exc}")
    folders = check_folders(settings.site_dir, uid=uid, on_error=on_error)
    suites = list(_suites(folders, settings.suite, found))
    profiles = load_profiles(folders.profiles, on_error)
    named = settings.profile
    if named is not None and is_profile_file(named):
        try:
            parse_profile(Path(named), read_toml(Path(named)), profiles, on_error)
        except ConfigError as exc:
            on_error(exc)
    elif named is not None and named not in profiles:
        found.add_mistake(f"check.profile: {unknown_name('profile', named, profiles)}")
    found.read.append(f"suites: {', '.join(suite.name for suite in suites)}")
    found.read.append(f"profiles: {', '.join(profiles) or 'none'}")
    _baselines(load_baselines(folders.baselines, on_error), found)
    found.read.append(f"log rules: {len(load_rules(folders.rules, on_error))}")
    found.read.append(f"Xids: {len(load_xids(folders.xid, on_error))}")
    found.read.append(f"SXids: {len(load_sxids(folders.xid, on_error))}")
    found.read.append(f"runbooks: {len(load_runbooks(data_dir('runbooks'), on_error))}")
    _silences(folders.silences, found, now_us)
    _site_checks(suites, folders.site_checks, found)


def _suites(folders: CheckFolders, chosen: str, found: ValidationReport) -> Iterable[Suite]:
    paths = suite_paths(folders.suites)
    if chosen not in paths:
        found.add_mistake(f"check.suite: {unknown_name('suite', chosen, paths)}")
    for name in paths:
        try:
            yield load_suite(name, folders.suites, found.on_error)
        except ConfigError as exc:
            found.on_error(exc)


def _baselines(baselines: Mapping[str, Baseline], found: ValidationReport) -> None:
    for item in baselines.values():
        for text in outliers(item):
            found.add_mistake(f"the baseline {item.path}: {text}")
        _, problem = baseline_for(baselines, item.shape)
        if problem is not None:
            found.add_mistake(problem)
    found.read.append(f"baselines: {', '.join(baselines) or 'none'}")


def _silences(paths: Iterable[Path], found: ValidationReport, now_us: int) -> None:
    read = silence.load_silences(paths, found.on_error)
    for one in read:
        for text in silence.expired(one, now_us):
            found.add_mistake(text)
        found.warnings.extend(silence.warnings(one, now_us))
    found.read.append(f"silences: {len(read)}")


def _site_checks(suites: Iterable[Suite], folder: Path | None, found: ValidationReport) -> None:
    used = set()
    for suite in suites:
        for planned in suite.planned:
            check, parameters = planned.check, planned.parameters
            if isinstance(parameters, site.Parameters):
                used.add(site.file_of(check.name, parameters))
                fault = site.fault(check.name, parameters, folder)
                if fault is not None:
                    found.add_mistake(f"check {check.name!r} in the suite {suite.path}: {fault}")
    found.read.append(f"site checks: {len(used)}")
    for path in sorted(folder.iterdir()) if folder is not None and folder.is_dir() else ():
        if path.name not in used:
            found.warnings.append(f"no suite runs {path}: name it as [[check]] site/{path.name}")
