"""``gpuops ckpt export`` and ``import``: convert states to and from other formats."""

import json
import os
import tempfile
from pathlib import Path

import click

from gpuops.cli.ckpt.address import address_of, address_option, find_state, needs_extra, open_states
from gpuops.cli.ckpt.verify_prune import bytes_progress
from gpuops.cli.options import exit_on_ctrl_c, json_option
from gpuops.errors import UsageError
from gpuops.log import printable
from gpuops.model import envelope
from gpuops.units import format_bytes, parse_bytes

FORMATS = click.Choice(["dcp", "safetensors", "torch"])


@click.command(
    epilog="Example: gpuops ckpt export --dir /scratch/ck1 --to w.safetensors --part model"
)
@click.argument("state", metavar="[STATE]", default="newest")
@address_option
@click.option(
    "--to", required=True, type=click.Path(path_type=Path), help="What to write; must not exist."
)
@click.option(
    "--format", "form", type=FORMATS, default="safetensors", show_default=True, help="As what."
)
@click.option(
    "--part", metavar="KEY", help="Only this part, such as model; names are written without KEY."
)
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
    """Write STATE (default: the newest) for other tools; it is verified while it is read.

    dcp: a directory for torch.distributed.checkpoint.load. safetensors: one file, or a set with an
    index. torch: a file that torch.load reads with weights_only=True.
    """
    limit = _parse_size(max_shard_size)
    if limit is not None and form != "safetensors":
        raise UsageError("--max-shard-size is for --format safetensors")
    if os.path.lexists(to):
        raise UsageError(f"{to} exists already: give a path that does not")
    with needs_extra("gpuops ckpt export"), open_states(ctx, address) as store:
        with exit_on_ctrl_c():
            from gpuops.convert.export import ConvertFormat, export_state
            from gpuops.convert.state_reader import StateReader

        manifest = find_state(store, state).manifest
        with bytes_progress(quiet=as_json) as progress:
            task = progress.add_task(str(manifest.state), total=2 * manifest.nbytes)
            with StateReader(
                store, manifest, to.absolute().parent, lambda n: progress.advance(task, n)
            ) as reader:
                result = export_state(
                    reader,
                    to.absolute(),
                    ConvertFormat(form),
                    part=part,
                    max_shard_bytes=limit,
                    advance=lambda n: progress.advance(task, n),
                )
    if as_json:
        body = {
            "state": {"step": manifest.state.step, "epoch": manifest.state.epoch},
            "format": form,
            "files": [str(file) for file in result.files],
            "size_bytes": result.nbytes,
            "tensors": result.n_tensors,
            "left_out": list(result.omitted),
        }
        click.echo(json.dumps(envelope("gpuops.checkpoint-export/1", body), indent=2))
        return
    click.echo(
        printable(
            f"{manifest.state}: {result.n_tensors} tensors, {format_bytes(result.nbytes)} in "
            f"{len(result.files)} {'file' if len(result.files) == 1 else 'files'}, {to}"
        )
    )
    for item in result.omitted:
        click.echo(printable(f"omitted: {item}"))


@click.command("import", epilog="Example: gpuops ckpt import dcp_dir --from dcp --dir /scratch/ck2")
@click.argument("path", type=click.Path(path_type=Path))
@address_option
@click.option("--from", "form", type=FORMATS, required=True, help="What PATH is.")
@click.option("--step", type=click.IntRange(min=1), help="Steps completed, if PATH does not say.")
@click.option(
    "--epoch", type=click.IntRange(min=0), help="Unset: newer than all states in the directory."
)
@click.option(
    "--part",
    metavar="KEY",
    help="PATH is the state of one object: its name among Checkpointer's arguments.",
)
@click.option(
    "--trust", is_flag=True, help="Run code that PATH contains, if reading it requires that."
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
    """Convert PATH, which another tool wrote, to a state; no code in it is run.

    A plain set of tensors is a model's, unless --part says otherwise.
    """
    location = address_of(ctx, address)
    with needs_extra("gpuops ckpt import"), open_states(ctx, location) as store:
        with exit_on_ctrl_c():
            from gpuops.convert.export import ConvertFormat
            from gpuops.convert.import_state import import_state, open_import_source

        with bytes_progress(quiet=as_json) as progress:
            task = progress.add_task(printable(path.name), total=None)
            result = import_state(
                open_import_source(path, ConvertFormat(form), trust=trust),
                store,
                _scratch_dir(location),
                step=step,
                epoch=epoch,
                part=part,
                advance=lambda n: progress.advance(task, n),
            )
    if as_json:
        body = {
            "address": store.address,
            "checkpoint": {
                "name": result.state.name,
                "step": result.state.step,
                "epoch": result.state.epoch,
                "size_bytes": result.nbytes,
                "tensors": result.n_tensors,
            },
            "notes": list(result.notes),
        }
        click.echo(json.dumps(envelope("gpuops.checkpoint-import/1", body), indent=2))
        return
    click.echo(
        printable(
            f"{result.state.name}: {result.n_tensors} tensors, {format_bytes(result.nbytes)}, in "
            f"{store.address}"
        )
    )
    for note in result.notes:
        click.echo(printable(f"note: {note}"))


def _parse_size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        size = parse_bytes(text)
    except ValueError as exc:
        raise UsageError(f"--max-shard-size {text!r}: {exc}") from exc
    if size < 1:
        raise UsageError(f"--max-shard-size {text!r}: expected at least one byte")
    return size


def _scratch_dir(address: str) -> Path:
    """Return a folder for the temporary copy: the store's directory, else the temporary one."""
    path = Path(address.removeprefix("file://")).absolute()
    while "://" not in address and path != path.parent:
        if path.is_dir():
            return path
        path = path.parent
    return Path(tempfile.gettempdir())
