"""``gpuops ckpt``: list, show, verify, keep, remove and convert the states of jobs."""

import importlib.util
import json

import click

from gpuops.cli.ckpt.address import (
    address_argument,
    address_option,
    find_state,
    needs_extra,
    open_states,
)
from gpuops.cli.lazy_group import LazyGroup
from gpuops.cli.options import json_option
from gpuops.errors import UsageError
from gpuops.model import envelope

# Commands of other modules, imported when they are called.
_LAZY_COMMANDS = {
    "bench": ("gpuops.cli.ckpt.bench:bench", "Measure saving and restoring on this machine."),
    "export": ("gpuops.cli.ckpt.convert:export", "Write a state as DCP, safetensors or torch."),
    "import": ("gpuops.cli.ckpt.convert:import_", "Make a state of DCP, safetensors or torch."),
    "plan": ("gpuops.cli.ckpt.plan:plan", "Say what copies survive, and what they cost."),
    "prune": ("gpuops.cli.ckpt.verify_prune:prune", "Remove the states that no rule keeps."),
    "verify": (
        "gpuops.cli.ckpt.verify_prune:verify",
        "Read states and say whether they are intact.",
    ),
}


class _CkptGroup(LazyGroup):
    """Shows what is installed, and says which extra a command needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        missing = {name for name, (target, _) in self.lazy.items() if not _is_installed(target)}
        return [name for name in super().list_commands(ctx) if name not in missing]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        with needs_extra(f"gpuops ckpt {cmd_name}"):
            return super().get_command(ctx, cmd_name)


def _is_installed(target: str) -> bool:
    return importlib.util.find_spec(target.partition(":")[0]) is not None


@click.group(cls=_CkptGroup, lazy=_LAZY_COMMANDS, epilog="Example: gpuops ckpt ls /scratch/ck1")
def ckpt() -> None:
    """List, verify, keep, remove and convert checkpoints.

    A job's states are where `gpuops run --ckpt-dir` or Checkpointer(directory=) persisted them.
    Name that directory or URL with --dir, GPUOPS_CKPT_DIR, or checkpoint.directory in the
    configuration; `ls` also takes it without --dir.
    """


@ckpt.command(
    "ls",
    short_help="List the states in a directory or under a URL.",
    epilog="Example: gpuops ckpt ls /scratch/ck1 --json",
)
@address_argument
@click.option("--dir", "named", metavar="DIR|URL", help="The same, as in the other commands.")
@json_option
@click.pass_context
def ls_command(
    ctx: click.Context, address: str | None, named: str | None, *, as_json: bool
) -> None:
    """List the states in DIR, the newest first; DIR may be a URL such as s3://bucket/run.

    The epoch, the `e00001` of a name, counts how often the job's workers were started on this
    directory (not passes over data): after a restart from step 8, a step 10 that is made again is
    newer than the step 10 from before.
    """
    if address and named:
        raise UsageError("DIR and --dir are the same option: give one of them")
    with needs_extra("gpuops ckpt ls"), open_states(ctx, address or named) as store:
        from gpuops.cli.ckpt.view import listing_json, listing_text

        survey = store.scan()
        if as_json:
            body = listing_json(store, survey)
            click.echo(json.dumps(envelope("gpuops.checkpoints/1", body), indent=2))
        else:
            click.echo(listing_text(store, survey))


@ckpt.command(
    "show",
    short_help="Show the content of a state: shards, tensors, sharding.",
    epilog="Example: gpuops ckpt show newest --dir /scratch/ck1",
)
@click.argument("state", metavar="[STATE]", default="newest")
@address_option
@click.option(
    "--all", "all_tensors", is_flag=True, help="Show every tensor, not the first few dozen."
)
@json_option
@click.pass_context
def show_command(
    ctx: click.Context, state: str, address: str | None, *, all_tensors: bool, as_json: bool
) -> None:
    """Show the content of STATE: shards, digests, tensors, sharding, what wrote it.

    For a script that saves with every="auto", also the chosen interval, with the measured times
    and the failure rate that it follows from.

    STATE is a step, a name as `gpuops ckpt ls` shows it, or `newest`.
    """
    with needs_extra("gpuops ckpt show"), open_states(ctx, address) as store:
        from gpuops.checkpoint.storage.inspection import (
            assemble_tensors,
            read_chosen_interval,
            read_layouts,
        )
        from gpuops.cli.ckpt.view import state_json, state_text

        stored = find_state(store, state)
        layouts = read_layouts(store, stored.manifest)
        tensors = assemble_tensors(layouts)
        chosen = read_chosen_interval(store, stored.state, layouts[0])
        if as_json:
            body = state_json(store, stored, tensors, chosen)
            click.echo(json.dumps(envelope("gpuops.checkpoint-state/1", body), indent=2))
        else:
            click.echo(state_text(store, stored, tensors, chosen, all_tensors=all_tensors))


@ckpt.command("pin", epilog="Example: gpuops ckpt pin 6000 --dir /scratch/ck1")
@click.argument("state")
@address_option
@click.option("--tag", default="kept", show_default=True, help="Who or what keeps it.")
@click.pass_context
def pin_command(ctx: click.Context, state: str, address: str | None, tag: str) -> None:
    """Keep STATE, regardless of prune and retention, until it is unpinned."""
    with needs_extra("gpuops ckpt pin"), open_states(ctx, address) as store:
        stored = find_state(store, state)
        store.pin(stored.state, tag)
        click.echo(f"{stored.state} is pinned by {tag}")


@ckpt.command("unpin", epilog="Example: gpuops ckpt unpin 6000 --dir /scratch/ck1")
@click.argument("state")
@address_option
@click.option("--tag", default="kept", show_default=True, help="The pin to remove.")
@click.pass_context
def unpin_command(ctx: click.Context, state: str, address: str | None, tag: str) -> None:
    """Remove a pin from STATE."""
    with needs_extra("gpuops ckpt unpin"), open_states(ctx, address) as store:
        stored = find_state(store, state)
        was_pinned = tag in stored.tags
        store.unpin(stored.state, tag)
        click.echo(f"{stored.state} {'is no longer' if was_pinned else 'was not'} pinned by {tag}")
