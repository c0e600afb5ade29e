"""The settings and the store of one command line, options that several share, and Ctrl-C."""

import math
import os
import shlex
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click

from gpuops.config.resolve import ErrorHandler, Settings, environ, raise_error, resolve
from gpuops.errors import StoreError, UsageError
from gpuops.host.clock import SystemClock
from gpuops.host.trust import current_uid, is_system_root, refuse_foreign_file
from gpuops.log import printable
from gpuops.units import US_PER_S, parse_iso_utc, parse_seconds

F = TypeVar("F", bound=Callable[..., object])
_STORE_S = 5.0


def settings_of(
    ctx: click.Context, on_error: ErrorHandler = raise_error, **flags: object
) -> Settings:
    """Return the settings in force; *flags* are by setting key with ``__`` for the dot.

    *on_error* receives errors, as in `gpuops.config.resolve.resolve`.

    Raises:
        ConfigError: See `gpuops.config.resolve.resolve`; or this is root, and others may write the
            file.
    """
    uid = current_uid()
    config_file = (ctx.find_root().obj or {}).get("config_file")
    return resolve(
        {key.replace("__", "."): value for key, value in flags.items()},
        environ(),
        config_file=Path(config_file) if config_file else None,
        is_root=is_system_root(uid),
        check_file=partial(refuse_foreign_file, uid=uid),
        on_error=on_error,
    )


class OutputFile(click.Path):
    """A file to write: a path that exists and is no regular file, as a link, is a usage error.

    The new file takes the place of the old one: as root, ``/dev/null`` would become a file.
    """

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 click's signature
        """Return the path of *value*."""
        path: Any = super().convert(value, param, ctx)
        try:
            mode = path.lstat().st_mode
        except OSError:
            return path  # it is not there, or writing it reports the error
        if not stat.S_ISREG(mode):
            kind = "a link" if stat.S_ISLNK(mode) else "no regular file"
            self.fail(f"{path} is {kind} and would be replaced; name a regular file", param, ctx)
        return path


class FiniteRange(click.FloatRange):
    """A range of numbers without nan, which click's has."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 click's signature
        """Return the number in *value*."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def command_words(option: str, text: str) -> list[str]:
    """Return the words of the command in *text*, split as a shell does it.

    Raises:
        UsageError: A quotation does not end, or there is no word; names *option*.
    """
    try:
        words = shlex.split(text)
    except ValueError as exc:
        raise UsageError(f"{option} {text!r}: {exc}") from exc
    if not words:
        raise UsageError(f"{option} {text!r}: a command is expected")
    return words


def terminal_width() -> int | None:
    """Return the terminal's columns, None where the output goes elsewhere."""
    return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None


OptionCallback = Callable[[click.Context, click.Parameter, str | None], Any]


def option_callback(parse: Callable[[str], object]) -> OptionCallback:
    """Return a callback that parses an option's text with *parse*, which raises ValueError."""

    def read(_ctx: click.Context, _param: click.Parameter, value: str | None) -> object:
        try:
            return None if value is None else parse(value)
        except ValueError as exc:
            raise click.BadParameter(str(exc)) from exc

    return read


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
store_option = click.option("--store", metavar="URL", help="The incident store's URL.")


def parse_since(text: str) -> int:
    """Return the microseconds since the epoch of a day, or of so long ago."""
    try:
        return parse_iso_utc(text)
    except ValueError:
        return SystemClock().now_us() - round(parse_seconds(text) * US_PER_S)


def since_option(default: str) -> Callable[[F], F]:
    """Return the option that says from when on results count; *default* for people."""
    return click.option(
        "--since",
        "since_us",
        metavar="DAY|TIME",
        callback=option_callback(parse_since),
        help=f"Only results since this day (2026-11-01) or for so long (28d); default: {default}.",
    )


def warn_unless_stored(store_url: str, spool_dir: Path, root: Path) -> None:
    """Say on standard error, in 5 s at most, if the store cannot take what was spooled."""
    from gpuops.store.engine import open_store  # commands in a prolog need no store

    try:
        with open_store(store_url, mode="write", root=root, deadline_s=_STORE_S):
            return
    except (StoreError, UsageError) as exc:
        text = f"spooled in {spool_dir}, the store has it after `gpuops db flush`: {exc}"
        click.echo(f"gpuops: {printable(text)}", err=True)


@contextmanager
def exit_on_ctrl_c() -> Iterator[None]:
    """Exit at once on Ctrl-C during imports: some modules swallow KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # it is ignored, as in a shell's background job, or has another handler
        return
    signal.signal(signal.SIGINT, _exit_now)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit_now(number: int, _frame: FrameType | None) -> None:
    os.write(2, b"gpuops: interrupted\n")
    os._exit(128 + number)
