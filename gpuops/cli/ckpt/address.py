"""The checkpoint store and the state that a command of ``gpuops ckpt`` selects."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuops.cli.options import settings_of
from gpuops.errors import UsageError
from gpuops.log import printable

if TYPE_CHECKING:  # needs an extra that this command line may do without
    from gpuops.checkpoint.storage.api import CheckpointStore, DamagedState, StoredState, StoreScan

SETTING = "checkpoint.directory"
FIRST_ANSWER_TIMEOUT_S = 8.0  # the command is interactive
NEWEST_WORDS = {"newest", "latest", "last"}
_EXTRA = {"blake3", "xxhash", "torch", "numpy", "safetensors", "fsspec"}
_NAME = re.compile(r"step-(\d{12})\.e(\d{5})", re.ASCII)
_STEP = re.compile(r"\d{1,12}", re.ASCII)

_ADDRESS_HELP = "The directory or URL of the states; unset: checkpoint.directory, GPUOPS_CKPT_DIR."
address_argument = click.argument("address", metavar="[DIR|URL]", required=False)
address_option = click.option("--dir", "address", metavar="DIR|URL", help=_ADDRESS_HELP)


@contextlib.contextmanager
def needs_extra(command: str) -> Iterator[None]:
    """Name the module to install if *command* lacks one of those that training needs.

    Raises:
        UsageError: A module is missing.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        # Each of these is the name of a module and of its distribution.
        module = (exc.name or "").partition(".")[0]
        if module not in _EXTRA:
            raise
        raise UsageError(
            f"{command} needs the Python module {module}, which is missing: pip install {module}"
        ) from exc


def address_of(ctx: click.Context, address: str | None) -> str:
    """Return the location of the states: that of the command line, else the configured one.

    Raises:
        UsageError: Neither.
    """
    if address:
        return address
    configured = settings_of(ctx).values.get(SETTING)
    if configured is not None and configured.value:
        return str(configured.value)
    raise UsageError(
        "which checkpoints? Give their directory or URL with --dir, or set GPUOPS_CKPT_DIR, or "
        "checkpoint.directory in the configuration"
    )


@contextlib.contextmanager
def open_states(ctx: click.Context, address: str | None) -> "Iterator[CheckpointStore]":
    """Yield the store at *address* or the configured one.

    Raises:
        UsageError: There is none.
        CheckpointError: It cannot be opened.
    """
    location = address_of(ctx, address)
    path = Path(location.removeprefix("file://"))
    if "://" not in str(path) and path.is_file():
        raise UsageError(f"{printable(str(path))} is a file: expected a directory of states")
    from gpuops.checkpoint.storage.address import open_store

    yield open_store(location, first_response_timeout_s=FIRST_ANSWER_TIMEOUT_S)


def find_state(store: "CheckpointStore", name: str) -> "StoredState":
    """Return the state *name*: ``newest``, a step, or the name of its directory.

    Of several states of one step it is the newest.

    Raises:
        UsageError: There is none; lists the newest ones.
        CheckpointError: The store cannot be listed, or that state is damaged.
    """
    survey = store.scan()
    if name in NEWEST_WORDS:
        if survey.states:
            _warn_skipped(survey)
            return survey.states[0]
        raise UsageError(f"there is no state in {store.address}{missing_reason(store)}")
    named, is_step = _NAME.fullmatch(name), _STEP.fullmatch(name)
    if not named and not is_step:
        raise UsageError(
            f"{printable(name)!r} is no state: give a step, newest, or a name such as "
            f"step-000000001200.e00003{_dir_hint(name)}"
        )
    for stored in survey.states:
        if stored.state.name == name or (is_step and stored.state.step == int(name)):
            return stored
    _raise_if_damaged(survey.damaged, name, int(name) if is_step else None)
    steps = ", ".join(str(stored.state.step) for stored in survey.states[:5])
    more = " …" if len(survey.states) > 5 else ""
    none = f"there is no state at all{missing_reason(store)}"
    there = f"the newest are of the steps {steps}{more}" if steps else none
    raise UsageError(f"there is no state {name} in {store.address}: {there}")


def missing_reason(store: "CheckpointStore") -> str:
    """Return why *store* has no states, if its directory is missing; "" else."""
    is_missing = "://" not in store.address and not Path(store.address).is_dir()
    return ": there is no such directory" if is_missing else ""


def _dir_hint(name: str) -> str:
    is_place = "://" in name or Path(name).is_dir()
    return f"; for a directory or URL say --dir {printable(name)}" if is_place else ""


def find_damaged(survey: "StoreScan", name: str) -> "list[DamagedState]":
    """Return the damaged states that match *name*; for ``newest`` those newer than any other.

    A step that a readable state has as well matches only that one.
    """
    newest = max((stored.state for stored in survey.states), default=None)
    found = []
    for item in survey.damaged:
        named = _NAME.fullmatch(item.name)
        key = (int(named[2]), int(named[1])) if named else (-1, -1)
        is_step = _STEP.fullmatch(name) is not None and key[1] == int(name)
        has_other = any(stored.state.step == key[1] for stored in survey.states)
        is_newest = name in NEWEST_WORDS and (newest is None or key > (newest.epoch, newest.step))
        if item.name == name or (is_step and not has_other) or is_newest:
            found.append(item)
    return found


def _warn_skipped(survey: "StoreScan") -> None:
    """Warn on standard error about unreadable states newer than the selected one."""
    for item in find_damaged(survey, "newest"):
        click.echo(
            f"gpuops: {printable(item.name)} {item.condition}, using the newest state before it: "
            f"{printable(item.why)}",
            err=True,
        )


def _raise_if_damaged(damaged: "tuple[DamagedState, ...]", name: str, step: int | None) -> None:
    from gpuops.checkpoint.types import CheckpointError, CorruptError

    for item in damaged:
        named = _NAME.fullmatch(item.name)
        if item.name == name or (step is not None and named and int(named[1]) == step):
            error = CorruptError if item.is_corrupt else CheckpointError
            raise error(f"{printable(item.name)} {item.condition}: {printable(item.why)}")
