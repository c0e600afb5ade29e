"""Failure domains of nodes: which nodes share a switch or a rack.

Sources: topology.conf(5) of Slurm, for ``topology/tree`` (``SwitchName`` with ``Nodes`` or
``Switches``) and ``topology/block`` (``BlockName`` with ``Nodes``); or a file of labels, a host
list and the path of its domain on each line, the widest first::

    gpu[001-016]  row1/rack3    # nodes of rack 3
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import ConfigError
from gpuops.hostlist import expand

LEVELS_MAX = 16
FILE_BYTES_MAX = 16 * 2**20
DomainPath = tuple[str, ...]

_SLURM = re.compile(r"\s*(switchname|blockname|blocksizes|include)\s*=?", re.IGNORECASE)
_PAIR = re.compile(r"([A-Za-z]+)=(\S*)")


@dataclass(frozen=True, slots=True)
class FailureDomains:
    """The domain of each node, as names from the widest domain to the narrowest.

    All paths have one length, ``len(levels)``; a domain is a path or the beginning of one, so equal
    names under different parents are different domains.
    """

    levels: tuple[str, ...]
    paths: Mapping[str, DomainPath]

    def of(self, nodes: Iterable[str]) -> dict[str, DomainPath]:
        """Return the paths of *nodes*.

        Raises:
            ConfigError: Some of them have no path.
        """
        wanted = list(nodes)
        missing = [node for node in wanted if node not in self.paths]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ConfigError(
                f"no failure domain is known of {', '.join(missing[:3])}{more}: the topology names"
                f" {len(self.paths)} other nodes"
            )
        return {node: self.paths[node] for node in wanted}


def even_domains(nodes: Sequence[str], n_domains: int) -> FailureDomains:
    """Return *nodes*, in order, divided into *n_domains* domains of nearly equal size.

    Raises:
        ConfigError: There are fewer nodes than domains, or no domain.
    """
    if not 1 <= n_domains <= len(nodes):
        raise ConfigError(f"{len(nodes)} nodes cannot be in {n_domains} failure domains")
    width = len(str(n_domains - 1))
    paths = {
        node: (f"domain{index * n_domains // len(nodes):0{width}}",)
        for index, node in enumerate(nodes)
    }
    return FailureDomains(("domain",), paths)


def read_domains(path: Path) -> FailureDomains:
    """Return the failure domains of the nodes that the file at *path* names; see `parse_domains`.

    Raises:
        ConfigError: It cannot be read, is too large or not text, or is invalid.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as exc:
        raise ConfigError(f"failure domains cannot be read from {path}: {exc.strerror}") from exc
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} has more than {FILE_BYTES_MAX} bytes")
    try:
        text = raw.decode()
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not text: {exc}") from exc
    return parse_domains(text, str(path))


def parse_domains(text: str, source: str) -> FailureDomains:
    """Parse *text*, the content of the file *source*.

    Raises:
        ConfigError: Neither a topology.conf nor a file of labels, or it contradicts itself.
    """
    lines = list(_lines(text))
    if not lines:
        raise ConfigError(f"{source} names no node: expected a topology.conf or lines of labels")
    if _SLURM.match(lines[0][1]):
        return _slurm(lines, source)
    return _labels(lines, source)


def align_paths(paths: Mapping[str, DomainPath]) -> dict[str, DomainPath]:
    """Return *paths*, as nodes report them, padded to one length; empty where all are ().

    A shorter path is extended by its own last domain, as in `parse_domains`. Nodes without a path
    share an unnamed domain, so that none counts as separate from another.
    """
    depth = max(map(len, paths.values()), default=0)
    if not depth:
        return {}
    return {
        node: ((path or ("",))[0],) * (depth - len(path)) + path for node, path in paths.items()
    }


def _lines(text: str) -> Iterable[tuple[int, str]]:
    """Yield the lines with their numbers, without comments; a backslash joins two lines."""
    joined, since = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].rstrip()
        since = since or number
        if line.endswith("\\"):
            joined += f"{line[:-1]} "
            continue
        joined += line
        if joined.strip():
            yield since, joined.strip()
        joined, since = "", 0
    if joined.strip():
        yield since, joined.strip()


def _labels(lines: Iterable[tuple[int, str]], source: str) -> FailureDomains:
    paths: dict[str, DomainPath] = {}
    depth = 0
    for number, line in lines:
        fields = line.split()
        where = f"{source}:{number}"
        if len(fields) != 2:
            raise ConfigError(
                f"{where}: {_short(line)!r} is not a host list and a path like row1/rack3"
            )
        path = tuple(fields[1].strip("/").split("/"))
        if not all(path) or len(path) > LEVELS_MAX:
            raise ConfigError(f"{where}: {_short(fields[1])!r} is not a path like row1/rack3")
        if depth and len(path) != depth:
            raise ConfigError(
                f"{where}: {fields[1]!r} has {len(path)} levels, and the lines before have {depth}"
            )
        depth = len(path)
        for node in _names(fields[0], where):
            if paths.setdefault(node, path) != path:
                raise ConfigError(
                    f"{where}: {node} is in {'/'.join(path)} and in {'/'.join(paths[node])}"
                )
    return FailureDomains(_level_names("domain", depth), paths)


@dataclass(frozen=True, slots=True)
class _Switch:
    """One line of topology.conf."""

    where: str
    nodes: tuple[str, ...]
    children: tuple[str, ...]


def _slurm(lines: Iterable[tuple[int, str]], source: str) -> FailureDomains:
    switches: dict[str, _Switch] = {}
    kinds = set()
    for number, line in lines:
        where = f"{source}:{number}"
        values = _values(line, where)
        kind = next(iter(values))
        if kind == "blocksizes":
            continue  # how blocks are allocated together, not what they share
        if kind not in {"switchname", "blockname"}:
            raise ConfigError(
                f"{where}: unexpected {_short(line)!r}; SwitchName and BlockName are supported"
            )
        kinds.add(kind)
        entry = _Switch(
            where, _names(values.get("nodes", ""), where), _names(values.get("switches", ""), where)
        )
        if entry.nodes and entry.children:
            raise ConfigError(f"{where}: {values[kind]} has both Nodes and Switches")
        for name in _names(values[kind], where):
            if name in switches:
                raise ConfigError(f"{where}: {name} is already in {switches[name].where}")
            switches[name] = entry
    if len(kinds) > 1:
        raise ConfigError(f"{source} has both SwitchName and BlockName; only one may be used")
    return _tree(switches, "block" if "blockname" in kinds else "switch", source)


def _values(line: str, where: str) -> dict[str, str]:
    values = {}
    for word in line.split():
        match = _PAIR.fullmatch(word)
        if match is None:
            raise ConfigError(f"{where}: {_short(word)!r} is not a Name=Value of a topology.conf")
        values[match[1].lower()] = match[2]
    return values


def _tree(switches: Mapping[str, _Switch], level_name: str, source: str) -> FailureDomains:
    parents = _parents(switches, source)
    path_of = {name: _path(name, parents, switches[name].where) for name in switches}
    paths: dict[str, DomainPath] = {}
    for name, switch in switches.items():
        for node in switch.nodes:
            if paths.setdefault(node, path_of[name]) != path_of[name]:
                raise ConfigError(f"{switch.where}: {node} is under {paths[node][-1]} and {name}")
    if not paths:
        raise ConfigError(f"{source} names no node")
    depth = max(map(len, paths.values()))
    return FailureDomains(_level_names(level_name, depth), align_paths(paths))


def _parents(switches: Mapping[str, _Switch], source: str) -> dict[str, str]:
    parents: dict[str, str] = {}
    for name, switch in switches.items():
        for child in switch.children:
            if child not in switches:
                raise ConfigError(f"{switch.where}: switch {child} of {name} is not in {source}")
            if parents.setdefault(child, name) != name:
                raise ConfigError(
                    f"{switch.where}: switch {child} is under {parents[child]} and under {name}"
                )
    return parents


def _path(name: str, parents: Mapping[str, str], where: str) -> DomainPath:
    path: list[str] = []
    at: str | None = name
    while at is not None:
        if len(path) == LEVELS_MAX:
            raise ConfigError(
                f"{where}: switch {name} is below itself, or below more than {LEVELS_MAX} others"
            )
        path.append(at)
        at = parents.get(at)
    return tuple(reversed(path))


def _level_names(level_name: str, depth: int) -> tuple[str, ...]:
    """Return names from the widest to the narrowest, like ``("switch 1 up", "switch")``."""
    return tuple(
        level_name if up == 0 else f"{level_name} {up} up" for up in reversed(range(depth))
    )


def _names(text: str, where: str) -> tuple[str, ...]:
    try:
        return expand(text)
    except ValueError as exc:
        raise ConfigError(f"{where}: {exc}") from exc


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
