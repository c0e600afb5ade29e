"""``gpuops ckpt plan``: placement of copies, what they survive, what they cost, save intervals."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import click

from gpuops.checkpoint.placement.domains import FailureDomains, even_domains, read_domains
from gpuops.checkpoint.placement.estimate import (
    SLOTS_MIN,
    EstimateInput,
    RamNeed,
    estimate,
    ram_refusal,
)
from gpuops.checkpoint.placement.replica_placement import NODES_MAX
from gpuops.checkpoint.types import IMAGE_BYTES_MAX, WORLD_MAX
from gpuops.cli.options import json_option, option_callback
from gpuops.config.schema import seconds_up_to, to_size
from gpuops.errors import EXIT_FAIL, EXIT_OK, UsageError
from gpuops.hostlist import expand
from gpuops.model import envelope
from gpuops.plan.interval import FAILURES_PER_1000_NODE_DAYS, mtbf_of_nodes

SCHEMA = "gpuops.checkpoint-plan/1"
TIME_S_MAX = 30 * 86_400.0
RESTART_S = 60.0
SLOWDOWN_PERCENT = "8"
REPLICAS = 2
PERCENT_MIN = 1e-6
_GBIT_BYTES = 1e9 / 8
_GB_BYTES = 1e9


def _parse_percent(value: object) -> float:
    number = _positive_up_to(100)(value) if str(value).strip("0.") else 0.0
    if 0 < number < PERCENT_MIN:
        raise ValueError(f"{value!r:.60} is neither 0 nor {PERCENT_MIN:g} percent or more")
    return number / 100


def _positive_up_to(maximum: float) -> Callable[[object], float]:
    """Return a parser of finite numbers: click's ranges accept nan."""

    def read(value: object) -> float:
        try:
            number = float(str(value))
        except ValueError:
            number = math.nan
        if not 0 < number <= maximum:
            raise ValueError(f"{value!r:.60} is no number above 0 and up to {maximum:g}")
        return number

    return read


_RATE = option_callback(_positive_up_to(1e6))
_TIME = option_callback(seconds_up_to(TIME_S_MAX))
_SIZE = option_callback(to_size)
_PERCENT = option_callback(_parse_percent)


@click.command(epilog="Example: gpuops ckpt plan --nodes 64 --bytes-per-gpu 12GB --json")
@click.option(
    "--nodes",
    metavar="N|HOSTLIST",
    help="How many, or which: 64, gpu[001-064]; default: all in the file of --domains.",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, NODES_MAX),
    help="Copies of a state in memory, including a node's own; default: 2, or 1 for one node.",
)
@click.option(
    "--domains",
    metavar="F|FILE",
    help="How many equal failure domains of neighbours; or Slurm's topology.conf; or lines with a"
    " host list and a path, as in: gpu[1-8] row1/rack3.",
)
@click.option("--gpus-per-node", type=click.IntRange(1, 1024), default=8, show_default=True)
@click.option(
    "--bytes-per-gpu",
    metavar="SIZE",
    required=True,
    callback=_SIZE,
    help="The state of one rank, like 12.0GB; Adam in mixed precision has 12 to 14 bytes a"
    " parameter, over the ranks that share it.",
)
@click.option(
    "--shared-bytes",
    metavar="SIZE",
    callback=_SIZE,
    help="How much of it replicas hold alike, save once a node and write once: with"
    " DistributedDataParallel and HSDP, parameters and optimizer state; default: nothing.",
)
@click.option(
    "--shards",
    metavar="N",
    type=click.IntRange(1, WORLD_MAX),
    default=1,
    help="HSDP: over how many neighbouring ranks one replica of the shared bytes is sharded.",
)
@click.option("--slots", type=click.IntRange(SLOTS_MIN, 16), default=SLOTS_MIN, show_default=True)
@click.option("--ram", metavar="SIZE", callback=_SIZE, help="A node's memory for checkpoints.")
@click.option(
    "--nic-gbps", metavar="RATE", callback=_RATE, help="Gbit/s that a node sends, measured."
)
@click.option(
    "--disk-gbs", metavar="RATE", callback=_RATE, help="GB/s that a node writes to the directory."
)
@click.option(
    "--mtbf-hours",
    metavar="HOURS",
    callback=option_callback(_positive_up_to(1e7)),
    help="Between failures of the job; default: 6.5 in 1000 node days.",
)
@click.option(
    "--stall", metavar="TIME", callback=_TIME, help="A save to memory; default: 55 GB/s per GPU."
)
@click.option(
    "--restart",
    metavar="TIME",
    callback=_TIME,
    default=f"{RESTART_S:g}s",
    show_default=True,
    help="From a failure until states are read.",
)
@click.option("--step", metavar="TIME", callback=_TIME, help="A training step, like 2.5s.")
@click.option(
    "--missed",
    callback=_PERCENT,
    metavar="PERCENT",
    help="Failures that memory cannot serve; default: as if each took two nodes.",
)
@click.option(
    "--slowdown",
    callback=_PERCENT,
    metavar="PERCENT",
    default=SLOWDOWN_PERCENT,
    show_default=True,
    help="Training rate lost while a state is written to the directory.",
)
@json_option
def plan(
    *,
    nodes: str | None,
    replicas: int | None,
    domains: str | None,
    gpus_per_node: int,
    bytes_per_gpu: int,
    shared_bytes: int | None,
    shards: int,
    slots: int,
    ram: int | None,
    nic_gbps: float | None,
    disk_gbs: float | None,
    mtbf_hours: float | None,
    stall: float | None,
    restart: float,
    step: float | None,
    missed: float | None,
    slowdown: float,
    as_json: bool,
) -> int:
    """Show what copies of a job's state survive, what they cost, and how often to save.

    Nothing is read from this machine: the result depends only on the options.

    Exit codes: 0; 1 the copies do not fit in --ram; 64 an error on the command line or in a file.
    """
    if bytes_per_gpu > IMAGE_BYTES_MAX:
        raise UsageError(f"--bytes-per-gpu {bytes_per_gpu} is more than {IMAGE_BYTES_MAX} bytes")
    shared = shared_bytes or 0
    if shared > bytes_per_gpu:
        raise UsageError(f"--shared-bytes {shared} is more than --bytes-per-gpu {bytes_per_gpu}")
    names, node_domains = nodes_and_domains(nodes, domains)
    if shards > len(names) * gpus_per_node:
        raise UsageError(f"--shards {shards} with {len(names) * gpus_per_node} ranks")
    if replicas is None:
        replicas = min(REPLICAS, len(names))
    if replicas > len(names):
        raise UsageError(
            f"--replicas {replicas}: at most {len(names)}, since a node holds one copy of a state"
        )
    figures = estimate(
        EstimateInput(
            nodes=names,
            replicas=replicas,
            domains=node_domains,
            need=RamNeed(gpus_per_node, bytes_per_gpu, replicas, slots, slots, shared, shards),
            mtbf_s=mtbf_of_nodes(len(names)) if mtbf_hours is None else mtbf_hours * 3600,
            restart_s=restart,
            slowdown=slowdown,
            step_s=step,
            stall_s=stall,
            missed=missed,
            nic_bytes_per_s=None if nic_gbps is None else nic_gbps * _GBIT_BYTES,
            disk_bytes_per_s=None if disk_gbs is None else disk_gbs * _GB_BYTES,
        )
    )
    refusal_text = None if ram is None else ram_refusal(figures.job.need, ram)
    if as_json:
        from gpuops.cli.ckpt.plan_output import plan_json

        click.echo(json.dumps(envelope(SCHEMA, plan_json(figures, ram, refusal_text)), indent=2))
    else:
        from gpuops.cli.ckpt.plan_output import plan_text

        assumed = (
            f" (assumed: {FAILURES_PER_1000_NODE_DAYS:g} failures in 1000 node days)"
            if mtbf_hours is None
            else ""
        )
        click.echo(plan_text(figures, ram, refusal_text, mtbf_from=assumed))
    return EXIT_OK if refusal_text is None else EXIT_FAIL


def nodes_and_domains(
    nodes: str | None, domains: str | None
) -> tuple[tuple[str, ...], FailureDomains | None]:
    """Return the names of the nodes, and their failure domains.

    Raises:
        UsageError: There are no nodes, or the two do not match.
    """
    names = None if nodes is None else _parse_nodes(nodes)
    if domains is None or domains.isdecimal():
        if names is None:
            raise UsageError("--nodes is required: a number, or a host list like gpu[001-064]")
        if domains is None:
            return names, None
        n_domains = int(domains[:9])
        if not 1 <= n_domains <= len(names):
            raise UsageError(f"--domains {domains}: {len(names)} nodes are in 1 to {len(names)}")
        return names, even_domains(names, n_domains)
    if not Path(domains).exists():
        raise UsageError(
            f"--domains {domains}: No such file or directory; expected a number or a file"
        )
    known = read_domains(Path(domains))
    if names is None:
        names = tuple(known.paths)
        if len(names) > NODES_MAX:
            raise UsageError(f"{domains} names {len(names)} nodes; {NODES_MAX} can be placed")
    elif nodes is not None and nodes.strip().isdecimal():
        raise UsageError(
            f"--nodes {nodes} is a number, and {domains} has nodes by name: give a host list"
            f" like gpu[001-064], or omit --nodes for all {len(known.paths)}"
        )
    known.of(names)
    return names, known


def _parse_nodes(text: str) -> tuple[str, ...]:
    if text.strip().isdecimal():
        count = int(text.strip()[:9])
        if not 1 <= count <= NODES_MAX:
            raise UsageError(f"--nodes {text.strip()[:40]}: from 1 to {NODES_MAX} can be placed")
        width = len(str(count - 1))
        return tuple(f"n{number:0{width}}" for number in range(count))
    try:
        names = expand(text)
    except ValueError as exc:
        raise UsageError(f"--nodes: {exc}") from exc
    if not names:
        raise UsageError("--nodes names no node")
    return names
