"""Where a node is in the network, from the environment that Slurm gives each step of a job.

Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES", and the topology plug-ins. ``SLURM_TOPOLOGY_ADDR``
has the switches above the node from the top to the leaf, then the node's own name, joined by dots;
``SLURM_TOPOLOGY_ADDR_PATTERN`` what each of them is::

    spine.leaf3.gpu017   switch.switch.node    topology/tree
    block05.gpu017       block.node            topology/block
    gpu017               node                  no topology

A level without a switch above the node is empty (``spine..gpu017``); one with several has a host
list (``leaf[3-4]``). The coordinates of topology/torus3d are no failure domain.
"""

from collections.abc import Mapping

LEVELS_MAX = 16
NAME_CHARS_MAX = 200
_ADDRESS, _PATTERN, _NODE = (
    "SLURM_TOPOLOGY_ADDR",
    "SLURM_TOPOLOGY_ADDR_PATTERN",
    "SLURMD_NODENAME",
)
_DOMAINS = frozenset({"switch", "block"})


def domain_of(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the switches or blocks above the node by *env* of a step, the widest first.

    ``()`` if Slurm names none, or in an unknown form. The path has the same length for all nodes
    of a topology: a level without a name gets that of the next level above, or else below.
    """
    *kinds, last = env.get(_PATTERN, "").split(".")
    names = _names(env.get(_ADDRESS, ""), env.get(_NODE, ""), len(kinds))
    if last != "node" or not kinds or not _DOMAINS.issuperset(kinds) or len(kinds) > LEVELS_MAX:
        return ()
    known = next((name for name in names if name), "")
    path = []
    for name in names:
        known = name or known
        path.append(known[:NAME_CHARS_MAX])
    return tuple(path) if known else ()


def _names(address: str, node: str, n_levels: int) -> list[str]:
    """Return the names above the node's own, which may have dots itself."""
    if node and address.endswith(f".{node}"):
        names = address[: -len(node) - 1].split(".")
        return names if len(names) == n_levels else []
    return address.split(".", n_levels)[:n_levels] if address.count(".") >= n_levels else []
