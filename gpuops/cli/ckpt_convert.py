"""``gpuops ckpt export`` and ``import``: between states and the formats of others."""

import json
import os
import tempfile
from pathlib import Path

import click

from gpuops.cli.ckpt_keep import bytes_bar
from gpuops.cli.ckpt_where import address_of, address_option, find_state, needs_extra, opened
from gpuops.cli.interrupt import ctrl_c_ends_at_once
from gpuops.cli.settings import json_option
from gpuops.errors import UsageError
from gpuops.log import printable
from gpuops.model import envelope
from gpuops.units import format_bytes, parse_bytes

FORMATS = click.Choice(["dcp", "safetensors", "torch"])


@click.command()
@click.argument("state", metavar="[STATE]", default="newest")
@address_option
@click.option(
    "--to", required=True, type=click.Path(path_type=Path), help="What to write; not there yet."
)
@click.option(
    "--format", "form", type=FORMATS, default="safetensors", show_default=True, help="As what."
)
@click.option("--part", metavar="KEY", help="Only this part, as in model; its names without KEY.")
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    help="safetensors: several files of about SIZE (5GB), with an index, in a directory.",
)
@json_option
@click.pass_context
def export(
    ctx: click.Context,
    *,
    state: str,
    address: str | None,
    to: Path,
    form: str,
    part: str | None,
    max_shard_size: str | None,
    as_json: bool,
) -> None:
    """Write STATE (default: the newest) for other tools, verified while it is read.

    dcp: a directory for torch.distributed.checkpoint.load. safetensors: one file, or a set with an
    index. torch: a file that torch.load reads with weights_only=True.
    """
    limit = _size(max_shard_size)
    if limit is not None and form != "safetensors":
        raise UsageError("--max-shard-size is for --format safetensors")
    if os.path.lexists(to):
        raise UsageError(f"{to} is there already: name a place that is not")
    with needs_extra("gpuops ckpt export"), opened(ctx, address) as store:
        with ctrl_c_ends_at_once():
            from gpuops.worker.checkpointer_convert.assemble import StateReader
            from gpuops.worker.checkpointer_convert.export import Format, export_state

        manifest = find_state(store, state).manifest
        with bytes_bar(quiet=as_json) as progress:
            task = progress.add_task(str(manifest.state), total=2 * manifest.nbytes)
            with StateReader(
                store, manifest, to.absolute().parent, lambda n: progress.advance(task, n)
            ) as reader:
                done = export_state(
                    reader,
                    to.absolute(),
                    Format(form),
                    part=part,
                    max_shard_bytes=limit,
                    advance=lambda n: progress.advance(task, n),
                )
    if as_json:
        body = {
            "state": {"step": manifest.state.step, "epoch": manifest.state.epoch},
            "format": form,
            "files": [str(file) for file in done.files],
            "size_bytes": done.nbytes,
            "tensors": done.n_tensors,
            "left_out": list(done.left_out),
        }
        click.echo(json.dumps(envelope("gpuops.checkpoint-export/1", body), indent=2))
        return
    click.echo(
        printable(
            f"{manifest.state}: {done.n_tensors} tensors, {format_bytes(done.nbytes)} in "
            f"{len(done.files)} {'file' if len(done.files) == 1 else 'files'}, {to}"
        )
    )
    for item in done.left_out:
        click.echo(printable(f"left out: {item}"))


@click.command("import")
@click.argument("path", type=click.Path(path_type=Path))
@address_option
@click.option("--from", "form", type=FORMATS, required=True, help="What PATH is.")
@click.option("--step", type=click.IntRange(min=1), help="Steps completed, where PATH has it not.")
@click.option(
    "--epoch", type=click.IntRange(min=0), help="Unset: newer than all states in the directory."
)
@click.option(
    "--part",
    metavar="KEY",
    help="PATH is the state of one thing: of which, as Checkpointer's arguments are called.",
)
@click.option(
    "--trust", is_flag=True, help="Run code that PATH contains, if it takes that to read it."
)
@json_option
@click.pass_context
def import_(
    ctx: click.Context,
    *,
    path: Path,
    address: str | None,
    form: str,
    step: int | None,
    epoch: int | None,
    part: str | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Make a state of PATH, which others wrote; nothing in it is run.

    A plain set of tensors is taken for a model's, unless --part says otherwise.
    """
    where = address_of(ctx, address)
    with needs_extra("gpuops ckpt import"), opened(ctx, where) as store:
        with ctrl_c_ends_at_once():
            from gpuops.worker.checkpointer_convert.export import Format
            from gpuops.worker.checkpointer_convert.import_state import import_state, open_incoming

        with bytes_bar(quiet=as_json) as progress:
            task = progress.add_task(printable(path.name), total=None)
            done = import_state(
                open_incoming(path, Format(form), trust=trust),
                store,
                _scratch(where),
                step=step,
                epoch=epoch,
                part=part,
                advance=lambda n: progress.advance(task, n),
            )
    if as_json:
        body = {
            "address": store.address,
            "checkpoint": {
                "name": done.state.name,
                "step": done.state.step,
                "epoch": done.state.epoch,
                "size_bytes": done.nbytes,
                "tensors": done.n_tensors,
            },
            "notes": list(done.notes),
        }
        click.echo(json.dumps(envelope("gpuops.checkpoint-import/1", body), indent=2))
        return
    click.echo(
        printable(
            f"{done.state.name}: {done.n_tensors} tensors, {format_bytes(done.nbytes)}, in "
            f"{store.address}"
        )
    )
    for note in done.notes:
        click.echo(printable(f"note: {note}"))


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        size = parse_bytes(text)
    except ValueError as exc:
        raise UsageError(f"--max-shard-size {text!r}: {exc}") from exc
    if size < 1:
        raise UsageError(f"--max-shard-size {text!r}: at least one byte is wanted")
    return size


def _scratch(address: str) -> Path:
    """Return where a copy of the state can lie meanwhile: beside a directory, else in /tmp."""
    path = Path(address.removeprefix("file://")).absolute()
    while "://" not in address and path != path.parent:
        if path.is_dir():
            return path
        path = path.parent
    return Path(tempfile.gettempdir())
