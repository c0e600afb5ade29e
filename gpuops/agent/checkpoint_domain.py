"""The failure domain of this node, so that copies of its states lie elsewhere."""

from collections.abc import Callable, Mapping
from pathlib import Path

from gpuops.checkpoint.domains import DomainPath, read_domains
from gpuops.config_run import is_domain_file
from gpuops.errors import ConfigError
from gpuops.slurm import topology


def domain_of(
    wanted: str, node: str, env: Mapping[str, str], say: Callable[[str], None]
) -> DomainPath:
    """Return the names of the domains of *node*, the widest first; () where none is known.

    *wanted* is ``auto`` (what Slurm tells the step in *env*), ``off``, a path like row1/rack3, or a
    file as `parse_domains` reads it. A file that is of no use is said, and stops nothing.
    """
    if wanted == "off":
        return ()
    if wanted == "auto":
        return topology.domain_of(env)
    if not is_domain_file(wanted):
        return tuple(wanted.split("/"))
    try:
        known = read_domains(Path(wanted).expanduser()).paths
    except ConfigError as exc:
        say(f"copies of checkpoints are placed as if nothing failed together: {exc}")
        return ()
    # As the agent calls itself, as Slurm does, and without the network's name.
    names = [node, env.get("SLURMD_NODENAME", ""), node.partition(".")[0]]
    found = next((known[name] for name in names if name in known), None)
    if found is None:
        say(f"no failure domain of {node} in {wanted}: copies of checkpoints may lie together")
    return found or ()
