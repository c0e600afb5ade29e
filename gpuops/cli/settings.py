"""The settings of one command line, and the options that several commands share."""

from functools import partial
from pathlib import Path

import click

from gpuops.config import Complain, Settings, environ, refuse, resolve
from gpuops.host.trust import current_uid, refuse_foreign_file


def settings_of(ctx: click.Context, complain: Complain = refuse, **flags: object) -> Settings:
    """Return the settings in force; *flags* are by setting key with ``__`` for the dot.

    *complain* is told of mistakes, as in `gpuops.config.resolve`.

    Raises:
        ConfigError: See `gpuops.config.resolve`; or this is root, and the file is not only root's.
    """
    uid = current_uid()
    named = (ctx.find_root().obj or {}).get("config_file")
    return resolve(
        {key.replace("__", "."): value for key, value in flags.items()},
        environ(),
        config_file=Path(named) if named else None,
        is_root=uid == 0,
        vet=partial(refuse_foreign_file, uid=uid),
        complain=complain,
    )


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
store_option = click.option("--store", metavar="URL", help="The incident store's URL.")
