"""Which store ``report`` and ``incident`` read: the configured one, or a run's own journal."""

from pathlib import Path

import click

from gpuops.cli.settings import settings_of
from gpuops.errors import UsageError
from gpuops.host.clock import SystemClock
from gpuops.log import printable
from gpuops.store.engine import Store
from gpuops.store.history import load_journal, store_for_reading

run_dir_option = click.option(
    "--run-dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Read this run directory alone, no store.",
)


def open_history(ctx: click.Context, store_url: str | None, run_dir: Path | None) -> Store:
    """Return the store to read, to be closed by the caller.

    Raises:
        UsageError: Two sources were named, or one that is not there.
        StoreError: The store cannot be read now.
    """
    if run_dir is not None:
        if store_url is not None:
            raise UsageError("--store and --run-dir exclude each other: name one source")
        return load_journal(run_dir / "journal")
    settings = settings_of(ctx, store__url=store_url)
    return store_for_reading(
        settings.store_url,
        is_default=settings.store_is_default,
        spool_dir=settings.spool_dir,
        cluster=settings.cluster,
        clock=SystemClock(),
        root=settings.root,
    )


def tell_notes(store: Store) -> None:
    """Print what the store does not hold, on standard error."""
    for note in store.notes:
        click.echo(f"gpuops: {printable(note)}", err=True)
