"""Where the agents of a run meet: torchrun's rendezvous flags, Slurm's step, or nowhere.

==================================================  ==========================================
one node, or ``--standalone``                       in this process, no port
``--rdzv-backend=c10d --rdzv-endpoint=host:port``   a control store on that host
``--node-rank``, ``--master-addr``, …               a control store on node 0, at the master's port
``--rdzv-endpoint=postgresql+psycopg://…``          a table: any single node may be lost
`srun`, none of these                               a control store on the step's first node
==================================================  ==========================================
"""

import argparse
from dataclasses import dataclass

from gpuops.agent.launch.options import Option, Wishes
from gpuops.agent.launch.plan import EndpointKind, EndpointPlan
from gpuops.agent.launch.restart_policy import NodeCount
from gpuops.agent.launch.slurm import SlurmStep
from gpuops.errors import UsageError
from gpuops.scrub import scrub

C10D_PORT = 29400  # torch's, for an endpoint without one
MASTER_PORT = 29500  # torch's, for its static rendezvous
NO_KEY = "none"  # torch's --rdzv-id where nobody gave one
BACKENDS = ("c10d", "postgres", "static")
_WORKS = (
    "what works: --rdzv-backend=c10d with --rdzv-endpoint=HOST:PORT, or "
    "--rdzv-endpoint=postgresql+psycopg://USER@HOST/DATABASE"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The meeting, without the token, and this node's wished place in the order of nodes."""

    kind: EndpointKind
    run_key: str
    host: str = ""
    port: int = 0
    url: str = ""
    is_host: bool | None = None
    order: int | None = None

    def meeting(self, token: str) -> EndpointPlan:
        """Return the meeting that agents with *token* may join."""
        return EndpointPlan(
            kind=self.kind,
            run_key=self.run_key,
            host=self.host,
            port=self.port,
            url=self.url,
            token=token,
            is_host=self.is_host,
        )


def resolve_endpoint(
    options: Wishes, size: NodeCount, step: SlurmStep | None, *, is_standalone: bool, store_url: str
) -> Endpoint:
    """Return where the agents meet; *store_url* is where ``--rdzv-backend=postgres`` alone points.

    Raises:
        UsageError: A backend that is none of ours, an endpoint that is no address, no endpoint.
    """
    backend, endpoint = options["rdzv_backend"], options["rdzv_endpoint"]
    _refuse_backend(backend)
    key = options["rdzv_id"].text or (step.run_key if step else NO_KEY)
    has_endpoint = bool(endpoint.text) or step is not None or _is_static(options)
    if is_standalone or (size.high == 1 and not size.spares):
        return Endpoint(kind=EndpointKind.PRIVATE, run_key=key)
    if size.high == 1 and not has_endpoint:
        raise UsageError(
            f"{options['spares'].shown}: a run on one node has no other agent to be a spare; "
            "say --nnodes, or --rdzv-endpoint where they meet"
        )
    order = _order(options, step)
    if backend.text == "postgres" or "://" in (endpoint.text or ""):
        url = _database(backend, endpoint, store_url)
        if key == NO_KEY:
            raise UsageError(
                "agents that meet in Postgres need --rdzv-id=NAME, the same on each node of a run "
                "and another for each run"
            )
        return Endpoint(kind=EndpointKind.POSTGRES, run_key=key, url=url, order=order)
    host, port, is_host = _address(options, step, order)
    return Endpoint(
        kind=EndpointKind.TCP, run_key=key, host=host, port=port, is_host=is_host, order=order
    )


def fill_torch(found: argparse.Namespace, place: Endpoint) -> None:
    """Put into *found* what torch's own functions read there: its rendezvous is not used."""
    found.rdzv_id = place.run_key
    found.rdzv_backend, found.rdzv_endpoint, found.node_rank = "static", "", 0
    found.master_addr, found.master_port = "127.0.0.1", MASTER_PORT


def workers_master(options: Wishes) -> tuple[str, int] | None:
    """Return the master that the user named for the workers of a single node.

    Raises:
        UsageError: Not a port.
    """
    port = options["master_port"]
    if port.text is None:
        return None
    return options["master_addr"].text or "127.0.0.1", _port(port.text, port.shown)


def _is_static(options: Wishes) -> bool:
    return any(options[name].text for name in ("node_rank", "master_addr", "master_port"))


def _order(options: Wishes, step: SlurmStep | None) -> int | None:
    rank = options["node_rank"]
    if rank.text is not None:
        if not rank.text.isdecimal():
            raise UsageError(f"{rank.shown}: a number from 0 is wanted")
        return int(rank.text)
    return None if step is None else step.order


def _refuse_backend(backend: Option) -> None:
    if backend.text is None or backend.text in BACKENDS:
        return
    old = "etcd is not used here; " if backend.text.startswith("etcd") else ""
    raise UsageError(f"{backend.shown}: {old}{_WORKS}")


def _database(backend: Option, endpoint: Option, store_url: str) -> str:
    """Return the URL of the Postgres to meet in."""
    from gpuops.store.backends import parse_url

    text = endpoint.text or store_url
    if "://" not in text:
        raise UsageError(f"{scrub(endpoint.shown)}: no URL; {_WORKS}")
    url = parse_url(text)
    if not url.drivername.startswith("postgresql"):
        where = scrub(endpoint.shown) if endpoint.text else f"{backend.shown} without an endpoint"
        raise UsageError(f"{where}: several nodes cannot meet in SQLite; {_WORKS}")
    return url.render_as_string(hide_password=False)


def _address(
    options: Wishes, step: SlurmStep | None, order: int | None
) -> tuple[str, int, bool | None]:
    """Return host, port, and whether this node is that host (None: to be found out)."""
    endpoint, backend = options["rdzv_endpoint"], options["rdzv_backend"]
    if endpoint.text:
        host, port = _host_and_port(endpoint, C10D_PORT)
        is_ranked = options["node_rank"].text is not None and backend.text in (None, "static")
        return host, port, order == 0 if is_ranked else None
    if _is_static(options) and backend.text in (None, "static"):
        host = options["master_addr"].text or "127.0.0.1"
        port_wish = options["master_port"]
        port = _port(port_wish.text or str(MASTER_PORT), port_wish.shown)
        return host, port, None if order is None else order == 0
    if step is not None:
        return step.host, step.port, step.order == 0
    raise UsageError(
        f"{options['nnodes'].shown}: where do the nodes meet? Say --rdzv-backend=c10d "
        "--rdzv-endpoint=HOST:PORT (the same on each), or start the agents with srun"
    )


def _host_and_port(endpoint: Option, default: int) -> tuple[str, int]:
    text = endpoint.given.strip()
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") > 1:  # an IPv6 address without brackets
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    if not host or any(character.isspace() or character in "/@" for character in host):
        raise UsageError(f"{scrub(endpoint.shown)}: HOST:PORT is wanted; {_WORKS}")
    return host, _port(port or str(default), scrub(endpoint.shown))


def _port(text: str, shown: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65_535:
        raise UsageError(f"{shown}: a port from 1 to 65535 is wanted, the same on each node")
    return int(text)
