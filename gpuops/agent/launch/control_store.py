"""Opens the control store of a run: in this process, on the endpoint's node, or in Postgres."""

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from gpuops.agent.launch.plan import EndpointKind, EndpointPlan
from gpuops.control.memory import MemoryControlStore
from gpuops.control.record import RECORD_KEY
from gpuops.control.store import (
    ControlStore,
    ControlStoreError,
    ControlStoreUnreachableError,
)
from gpuops.control.tcp.client_connection import OtherRunError
from gpuops.control.tcp.local_address import is_local
from gpuops.control.tcp.process import RESTART_LEASE_S as GUARD_LEASE_S
from gpuops.control.tcp.process import PortTakenError, ServerGuard, ServerProcess, start_server
from gpuops.control.tcp.server import LEASE_S, RUN_OVER_LEASE_S
from gpuops.control.tcp.store import DEADLINE_S, TcpControlStore
from gpuops.host.clock import Clock
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
RETRY_S = 0.5
# A requeued job meets where it met before: the control store of its last run ends within this.
PREDECESSOR_S = RUN_OVER_LEASE_S + 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEndpoint:
    """A control store, this node's address for its peers, and who watches a server of ours."""

    board: ControlStore
    address: str
    endpoint: str  # for people and for `gpuops run status`; holds no secret
    is_shared: bool
    guard: ServerGuard | None = None

    def told(self, meeting: EndpointPlan) -> dict[str, str | int]:
        """Return where the control store is, for `gpuops run status`; nothing of it is secret."""
        return {
            "kind": meeting.kind.value,
            "host": meeting.host,
            "port": meeting.port,
            "run_key": meeting.run_key,
            "endpoint": self.endpoint,
        }


def meet(  # noqa: PLR0913 who meets where, and each limit of it
    meeting: EndpointPlan,
    clock: Clock,
    *,
    local_address: str | None,
    limit_s: float,
    wait: Callable[[float], object],
    predecessor_s: float = PREDECESSOR_S,
    deadline_s: float = DEADLINE_S,
) -> ControlEndpoint:
    """Return the control store of the run; start its server where this is the node for it.

    The node of the endpoint may come up last, so this waits for a control store that is not there
    yet. One of another run is given *predecessor_s* to end: a run that is over leaves its port
    soon. Each call to a server, now and later, is given *deadline_s*.

    Raises:
        ControlStoreUnreachableError: Not there within *limit_s*.
        ControlStoreError: It is another run's, and stays; or it wants another token.
    """
    if meeting.kind is EndpointKind.PRIVATE:
        address = local_address or LOOPBACK
        return ControlEndpoint(
            board=MemoryControlStore(clock), address=address, endpoint="", is_shared=False
        )
    is_host = meeting.kind is EndpointKind.TCP and _is_host(meeting)
    patience = _Patience(clock, limit_s, predecessor_s)
    while True:
        try:
            # Each time: the server of an earlier run may just have come to its end.
            server = _start(meeting) if is_host else None
        except PortTakenError as exc:
            if not patience.bears(exc):
                raise
            wait(RETRY_S)
            continue
        try:
            met = _reach(meeting, local_address, deadline_s)
        except (ControlStoreUnreachableError, OtherRunError) as exc:
            if not patience.bears(exc):
                raise
            wait(RETRY_S)
            continue
        if server is None or server.pid is None:
            return met
        return replace(met, guard=ServerGuard(server, lambda: _start(meeting, GUARD_LEASE_S)))


@dataclass(slots=True)
class _Patience:
    clock: Clock
    limit_s: float
    predecessor_s: float
    end_ns: int = field(init=False)
    refused_ns: int | None = field(init=False, default=None)
    has_told: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.end_ns = self.clock.mono_ns() + round(self.limit_s * NS_PER_S)

    def bears(self, exc: ControlStoreError) -> bool:
        """Say whether to try again after *exc*; tell once what is waited for."""
        now_ns, end_ns = self.clock.mono_ns(), self.end_ns
        if not isinstance(exc, ControlStoreUnreachableError):
            if self.refused_ns is None:
                self.refused_ns = now_ns
            end_ns = min(end_ns, self.refused_ns + round(self.predecessor_s * NS_PER_S))
        if now_ns >= end_ns:
            return False
        if not self.has_told:
            log.warning("waiting for the board of this run: %s", exc)
            self.has_told = True
        return True


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
        tcp = TcpControlStore(
            meeting.host,
            meeting.port,
            run_key=meeting.run_key,
            token=meeting.token,
            deadline_s=deadline_s,
        )
        tcp.get(RECORD_KEY)  # an answer shows that it is there, and our own address on the way
        return ControlEndpoint(
            board=tcp,
            address=local_address or tcp.local_address,
            endpoint=f"{meeting.host}:{meeting.port}",
            is_shared=True,
        )
    # psycopg is an extra that only this needs.
    from gpuops.control.postgres.store import PostgresControlStore

    table = PostgresControlStore(meeting.url, run_key=meeting.run_key, token=meeting.token)
    parts = urlsplit(meeting.url)
    host, port = parts.hostname or LOOPBACK, parts.port or 5432
    return ControlEndpoint(
        board=table,
        address=local_address or address_towards(host, port),
        endpoint=f"postgresql://{host}:{port}{parts.path}",
        is_shared=True,
    )


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
