"""Where the agents of a run meet: torchrun's rendezvous flags, Slurm's step, or nowhere.

==================================================  ==========================================
one node, or ``--standalone``                       in this process, no port
``--rdzv-backend=c10d --rdzv-endpoint=host:port``   a control store on that host
``--node-rank``, ``--master-addr``, …               a control store on node 0, at the master's port
``--rdzv-endpoint=postgresql+psycopg://…``          a table: any single node may be lost
``--rdzv-endpoint=etcd://host:port``                keys in etcd (v3): the same
`srun`, none of these                               a control store on the step's first node
==================================================  ==========================================
"""

import argparse
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from gpuops.agent.launch.job_token import refused_token
from gpuops.agent.launch.options import Option, Options
from gpuops.agent.launch.plan import EndpointKind, EndpointPlan
from gpuops.agent.launch.restart_policy import NodeCount
from gpuops.agent.launch.slurm import SlurmStep
from gpuops.control.etcd.address import SCHEME as ETCD_SCHEME
from gpuops.control.etcd.address import EtcdAddress
from gpuops.control.etcd.formation import QuorumPlan, form_quorum
from gpuops.control.etcd.handle import QuorumHandle
from gpuops.control.etcd.quorum import QUORUM_KIND
from gpuops.control.etcd.store import EtcdControlStore
from gpuops.control.memory import MemoryControlStore
from gpuops.control.record import RECORD_KEY
from gpuops.control.store import (
    ControlStore,
    ControlStoreError,
    ControlStoreUnreachableError,
    OtherTokenError,
)
from gpuops.control.tcp.client_connection import OtherRunError, is_local
from gpuops.control.tcp.process import (
    INTRODUCTION_LOST,
    RECORD_LOST,
    PortTakenError,
    ServerGuard,
    ServerProcess,
    start_server,
)
from gpuops.control.tcp.process import RESTART_LEASE_S as GUARD_LEASE_S
from gpuops.control.tcp.server import LEASE_S, RUN_OVER_LEASE_S
from gpuops.control.tcp.store import DEADLINE_S, TcpControlStore
from gpuops.errors import UsageError
from gpuops.host.clock import Clock
from gpuops.scrub import scrub
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
RETRY_S = 0.5
# A requeued job meets where it met before: the control store of its last run ends within this.
PREDECESSOR_S = RUN_OVER_LEASE_S + 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEndpoint:
    """A control store, this node's address for its peers, and who watches a server of ours."""

    store: ControlStore
    address: str
    endpoint: str  # for people and for `gpuops run status`; holds no secret
    is_shared: bool
    guard: ServerGuard | None = None
    quorum: QuorumHandle | None = None
    gathered_s: float = 0.0  # that agents have waited for each other before they join

    def describe(self, meeting: EndpointPlan) -> dict[str, str | int]:
        """Return where the control store is, for `gpuops run status`; nothing of it is secret."""
        place: dict[str, str | int] = {
            "kind": meeting.kind.value if self.quorum is None else QUORUM_KIND,
            "host": meeting.host,
            "port": meeting.port,
            "run_key": meeting.run_key if self.quorum is None else self.quorum.run_key,
            "endpoint": self.endpoint,
        }
        return {**place, "insecure": True} if meeting.is_insecure else place


def meet(  # noqa: PLR0913 who meets where, and each limit of it
    meeting: EndpointPlan,
    clock: Clock,
    *,
    local_address: str | None,
    limit_s: float,
    wait: Callable[[float], object],
    predecessor_s: float = PREDECESSOR_S,
    deadline_s: float = DEADLINE_S,
    quorum: QuorumPlan | None = None,
) -> ControlEndpoint:
    """Return the control store of the run; start its server where this is the node for it.

    The node of the endpoint may come up last, so this waits for a control store that is not there
    yet. One of another run is given *predecessor_s* to end: a run that is over leaves its port
    soon. Each call to a server, now and later, is given *deadline_s*. With *quorum*, a server only
    introduces the agents, and several nodes hold the store, where enough of them can.

    Raises:
        ControlStoreUnreachableError: Not there within *limit_s*.
        UsageError: It has another token, and stays.
        ControlStoreError: It is another run's, and stays.
    """
    if meeting.kind is EndpointKind.PRIVATE:
        address = local_address or LOOPBACK
        return ControlEndpoint(
            store=MemoryControlStore(clock), address=address, endpoint="", is_shared=False
        )
    is_host = meeting.kind is EndpointKind.TCP and _is_host(meeting)
    patience = _Patience(clock, limit_s, predecessor_s)
    while True:
        try:
            # Each time: the server of an earlier run may just have come to its end.
            server = _start(meeting) if is_host else None
            met = _reach(meeting, local_address, deadline_s)
        except (
            PortTakenError,
            ControlStoreUnreachableError,
            OtherRunError,
            OtherTokenError,
        ) as exc:
            if isinstance(exc, OtherTokenError):
                # A given token may be new since the job's last run; the user's own is the same.
                if meeting.own_token is not None or not patience.bears(exc):
                    raise refused_token(exc, meeting) from None
            elif not patience.bears(exc):
                raise
            wait(RETRY_S)
            continue
        try:
            holds = server is not None and server.pid is not None
            met = _with_quorum(met, meeting, quorum, wait, is_holder=holds)
        except ControlStoreUnreachableError as exc:
            if not patience.bears(exc):
                raise
            wait(RETRY_S)
            continue
        return met if server is None else _guarded(met, meeting, server)


@dataclass(slots=True)
class _Patience:
    clock: Clock
    limit_s: float
    predecessor_s: float
    end_ns: int = field(init=False)
    refused_ns: int | None = field(init=False, default=None)
    has_logged: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.end_ns = self.clock.mono_ns() + round(self.limit_s * NS_PER_S)

    def bears(self, exc: ControlStoreError) -> bool:
        """Say whether to try again after *exc*; log once what is waited for."""
        now_ns, end_ns = self.clock.mono_ns(), self.end_ns
        if not isinstance(exc, ControlStoreUnreachableError):
            if self.refused_ns is None:
                self.refused_ns = now_ns
            end_ns = min(end_ns, self.refused_ns + round(self.predecessor_s * NS_PER_S))
        if now_ns >= end_ns:
            return False
        if not self.has_logged:
            log.warning("waiting for the control store of this run: %s", exc)
            self.has_logged = True
        return True


def _with_quorum(
    met: ControlEndpoint,
    meeting: EndpointPlan,
    plan: QuorumPlan | None,
    wait: Callable[[float], object],
    *,
    is_holder: bool,
) -> ControlEndpoint:
    """Return where the run's record is held once the agents at *met* have agreed on that."""
    if plan is None:
        return met
    began_s = time.monotonic()
    formed: QuorumHandle | str | None = None
    try:
        place, job = (meeting.host, meeting.port), (meeting.run_key, meeting.token)
        formed = form_quorum(met.store, plan, place, job, address=met.address, wait=wait)
    finally:
        if not isinstance(formed, str):
            met.store.close()
    gathered_s = time.monotonic() - began_s
    if isinstance(formed, str):
        plan.explain(formed, None if is_holder else meeting.host)
        return replace(met, gathered_s=gathered_s)
    where = str(replace(formed.store.address, tls=()))
    return replace(met, store=formed.store, endpoint=where, quorum=formed, gathered_s=gathered_s)


def _guarded(met: ControlEndpoint, meeting: EndpointPlan, server: ServerProcess) -> ControlEndpoint:
    """Return *met* with who watches *server*, where this process has started it."""
    if server.pid is None:
        return met
    lost = RECORD_LOST if met.quorum is None else INTRODUCTION_LOST
    return replace(met, guard=ServerGuard(server, lambda: _start(meeting, GUARD_LEASE_S), lost))


def _start(meeting: EndpointPlan, lease_s: float = LEASE_S) -> ServerProcess:
    return start_server(
        host=meeting.host,
        port=meeting.port,
        run_key=meeting.run_key,
        token=meeting.token,
        lease_s=lease_s,
    )


def _is_host(meeting: EndpointPlan) -> bool:
    return is_local(meeting.host) if meeting.is_host is None else meeting.is_host


def _reach(meeting: EndpointPlan, local_address: str | None, deadline_s: float) -> ControlEndpoint:
    if meeting.kind is EndpointKind.TCP:
        run_key, token = meeting.run_key, meeting.token
        tcp = TcpControlStore(
            meeting.host, meeting.port, run_key=run_key, token=token, deadline_s=deadline_s
        )
        tcp.get(RECORD_KEY)  # an answer shows that it is there, and our own address on the way
        return ControlEndpoint(
            store=tcp,
            address=local_address or tcp.local_address,
            endpoint=f"{meeting.host}:{meeting.port}",
            is_shared=True,
        )
    if meeting.kind is EndpointKind.ETCD:
        return _reach_etcd(meeting, local_address)
    # psycopg is an extra that only this needs.
    from gpuops.control.postgres.store import PostgresControlStore

    table = PostgresControlStore(meeting.url, run_key=meeting.run_key, token=meeting.token)
    _check_answers(table)
    parts = urlsplit(meeting.url)
    host, port = parts.hostname or LOOPBACK, parts.port or 5432
    return ControlEndpoint(
        store=table,
        address=local_address or address_towards(host, port),
        endpoint=f"postgresql://{host}:{port}{parts.path}",
        is_shared=True,
    )


def _reach_etcd(meeting: EndpointPlan, local_address: str | None) -> ControlEndpoint:
    store = EtcdControlStore(meeting.url, run_key=meeting.run_key, token=meeting.token)
    _check_answers(store)
    return ControlEndpoint(
        store=store,
        address=local_address or address_towards(*store.address.members[0]),
        endpoint=str(store.address),
        is_shared=True,
    )


def _check_answers(store: ControlStore) -> None:
    """Read from *store*; it is closed if that fails."""
    try:
        store.get(RECORD_KEY)
    except ControlStoreError:
        store.close()
        raise


def address_towards(host: str, port: int) -> str:
    """Return the address of ours from which *host* would be reached; nothing is sent."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return LOOPBACK


C10D_PORT = 29400  # torch's, for an endpoint without one
MASTER_PORT = 29500  # torch's, for its static rendezvous
NO_KEY = "none"  # torch's --rdzv-id where nobody gave one
BACKENDS = ("c10d", "postgres", "static")
_WORKS = (
    "what works: --rdzv-backend=c10d with --rdzv-endpoint=HOST:PORT, or "
    "--rdzv-endpoint=postgresql+psycopg://USER@HOST/DATABASE, or --rdzv-endpoint=etcd://HOST:PORT"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The meeting, without the token, and this node's requested place in the order of nodes."""

    kind: EndpointKind
    run_key: str
    host: str = ""
    port: int = 0
    url: str = field(default="", repr=False)
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
    options: Options,
    size: NodeCount,
    step: SlurmStep | None,
    *,
    is_standalone: bool,
    store_url: str,
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
        is_etcd = (endpoint.text or "").startswith(ETCD_SCHEME)
        url = _etcd(endpoint) if is_etcd else _database(backend, endpoint, store_url)
        if key == NO_KEY:
            raise UsageError(
                f"agents that meet in {'etcd' if is_etcd else 'Postgres'} need --rdzv-id=NAME, the "
                "same on each node of a run and another for each run"
            )
        kind = EndpointKind.ETCD if is_etcd else EndpointKind.POSTGRES
        return Endpoint(kind=kind, run_key=key, url=url, order=order)
    host, port, is_host = _address(options, step, order)
    return Endpoint(
        kind=EndpointKind.TCP, run_key=key, host=host, port=port, is_host=is_host, order=order
    )


def fill_torch(found: argparse.Namespace, place: Endpoint) -> None:
    """Put into *found* what torch's own functions read there: its rendezvous is not used."""
    found.rdzv_id = place.run_key
    found.rdzv_backend, found.rdzv_endpoint, found.node_rank = "static", "", 0
    found.master_addr, found.master_port = "127.0.0.1", MASTER_PORT


def workers_master(options: Options) -> tuple[str, int] | None:
    """Return the master that the user named for the workers of a single node.

    Raises:
        UsageError: Not a port.
    """
    port = options["master_port"]
    if port.text is None:
        return None
    return options["master_addr"].text or "127.0.0.1", _port(port.text, port.shown)


def _is_static(options: Options) -> bool:
    return any(options[name].text for name in ("node_rank", "master_addr", "master_port"))


def _order(options: Options, step: SlurmStep | None) -> int | None:
    rank = options["node_rank"]
    if rank.text is not None:
        if not rank.text.isdecimal():
            raise UsageError(f"{rank.shown}: a number from 0 is wanted")
        return int(rank.text)
    return None if step is None else step.order


def _refuse_backend(backend: Option) -> None:
    if backend.text is None or backend.text in BACKENDS:
        return
    is_torchs = backend.text.startswith("etcd")
    old = "torch's etcd backends (etcd's API v2) are not used here; " if is_torchs else ""
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


def _etcd(endpoint: Option) -> str:
    """Return the URL of the etcd to meet in."""
    try:
        EtcdAddress.parse(endpoint.given)
    except ControlStoreError as exc:
        raise UsageError(f"{scrub(endpoint.shown)}: {exc}") from None
    return endpoint.given


def _address(
    options: Options, step: SlurmStep | None, order: int | None
) -> tuple[str, int, bool | None]:
    """Return host, port, and whether this node is that host (None: to be found out)."""
    endpoint, backend = options["rdzv_endpoint"], options["rdzv_backend"]
    if endpoint.text:
        host, port = _host_and_port(endpoint, C10D_PORT)
        is_ranked = options["node_rank"].text is not None and backend.text in (None, "static")
        return host, port, order == 0 if is_ranked else None
    if _is_static(options) and backend.text in (None, "static"):
        host = options["master_addr"].text or "127.0.0.1"
        port_option = options["master_port"]
        port = _port(port_option.text or str(MASTER_PORT), port_option.shown)
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
