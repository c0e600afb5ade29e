"""This agent's part in the quorum of its run: `gpuops.control.etcd.quorum` says what that is."""

import logging
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from gpuops.agent.launch.plan import EndpointPlan
from gpuops.config.resolve import environ
from gpuops.control.etcd import quorum
from gpuops.control.etcd.credentials import write_credentials
from gpuops.control.etcd.folders import locked_folder
from gpuops.control.etcd.member import member_url
from gpuops.control.etcd.quorum import Candidate, QuorumPhase, QuorumState
from gpuops.control.etcd.store import DEADLINE_S, EtcdControlStore
from gpuops.control.record import RECORD_KEY
from gpuops.control.store import ControlStore, ControlStoreError
from gpuops.control.tcp.server import RUN_OVER_KEY
from gpuops.control.tcp.store import TcpControlStore
from gpuops.host.process.command import module_command
from gpuops.host.process.sidecar import start_sidecar

log = logging.getLogger(__name__)

POLL_S = 0.2
PROBE_TIMEOUT_S = 2.0
START_MEMBER_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumPlan:
    """Who this agent is for the quorum, and how many nodes the run wants (spares included)."""

    node: str
    domain: tuple[str, ...] = ()
    nodes_min: int
    nodes_max: int


@dataclass(slots=True)
class QuorumHandle:
    """The quorum that this agent is part of; ``store`` is the run's control store."""

    store: EtcdControlStore
    state: QuorumState
    introduction: Callable[[], ControlStore]
    folder: Path
    is_member: bool
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def describe(self) -> str:
        """Return the nodes that hold the record, for people."""
        return ", ".join(member.node for member in self.state.members)

    def start(self) -> None:
        """Keep the endpoint's server informed, so that later agents find the quorum."""
        if self.is_member:
            self._thread = threading.Thread(target=self._run, name="gpuops-quorum", daemon=True)
            self._thread.start()

    def close(self, *, is_last: bool) -> None:
        """Announce it no more; the last agent of a run takes it off the endpoint's server."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * PROBE_TIMEOUT_S)
        with suppress(ControlStoreError):
            server = self.introduction()
            try:
                if is_last:
                    server.delete("quorum/")
                server.compare_and_set(RUN_OVER_KEY, b"1" if is_last else b"30", version=0)
            finally:
                server.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self) -> None:
        server: ControlStore | None = None
        while not self._stopping.wait(quorum.ANNOUNCE_S):
            try:
                server = server or self.introduction()
                announce(server, self.state)
            except ControlStoreError as exc:
                # Its host is gone, or it was started anew: a handle on the old one is of no use.
                log.debug("the endpoint's server does not answer: %s", exc)
                if server is not None:
                    server.close()
                server = None
        if server is not None:
            server.close()


def announce(server: ControlStore, state: QuorumState) -> None:
    """Have *server* introduce agents to *state*, whatever was gathered there."""
    entry = server.get(quorum.QUORUM_KEY)
    found = QuorumState.from_bytes(entry.value) if entry.version else None
    if found != state:
        if found is not None and found.number > state.number:
            return  # agents that found nobody have begun another round
        server.compare_and_set(quorum.QUORUM_KEY, state.to_bytes(), version=entry.version)
    server.put(quorum.ALIVE_KEY, b"")


@dataclass(slots=True, kw_only=True)
class QuorumFormation:
    """Moves the state on the endpoint's *server* until it is ``on`` or ``off``."""

    server: ControlStore
    plan: QuorumPlan
    address: str
    run_key: str
    token: str
    introduction: Callable[[], ControlStore]
    wait: Callable[[float], object]
    me: Candidate = field(init=False)
    folder: Path = field(init=False)
    files: dict[str, str] = field(init=False, default_factory=dict)
    _started: int = 0
    _seen: tuple[object, float] = (None, 0.0)
    _alive: tuple[int, float] = (-1, 0.0)

    def __post_init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        try:
            self.folder, _mark = locked_folder("gpuops-quorum-", parent)  # until this process ends
        except OSError as exc:
            raise ControlStoreError(f"no folder for certificates in {parent}: {exc}") from exc
        ports = (0, 0)
        try:
            self.files = write_credentials(self.folder, self.token, self.address)
            if shutil.which("etcd") is not None:
                ports = _free_ports(self.address)
        except ControlStoreError as exc:
            log.warning("this node cannot hold the control record: %s", exc)
        self.me = Candidate(
            agent=f"m{uuid4().hex[:12]}",
            node=self.plan.node,
            address=self.address,
            client_port=ports[0],
            peer_port=ports[1],
            domain=self.plan.domain,
        )

    def run(self) -> QuorumHandle | str:
        """Return the quorum, or why there is none.

        Raises:
            ControlStoreError: The endpoint's server does not answer.
        """
        handle: QuorumHandle | None = None
        try:
            while handle is None:
                entry = self.server.get(quorum.QUORUM_KEY)
                state = QuorumState.from_bytes(entry.value) if entry.version else None
                if state is not None and state.phase is QuorumPhase.OFF:
                    return state.why
                following, handle = self._next(state)
                if following is not None:
                    self.server.compare_and_set(
                        quorum.QUORUM_KEY, following.to_bytes(), version=entry.version
                    )
                elif handle is None:
                    self.wait(POLL_S)
        finally:
            if handle is None:
                shutil.rmtree(self.folder, ignore_errors=True)
        handle.start()
        return handle

    def _next(self, state: QuorumState | None) -> tuple[QuorumState | None, QuorumHandle | None]:
        """Return the state to write, and the quorum once it is there."""
        if state is None:
            return QuorumState(), None
        if state.phase is QuorumPhase.GATHER:
            return self._gather(state), None
        if state.phase is QuorumPhase.START:
            return self._begin(state), None
        if self._is_answering(state):
            handle = QuorumHandle(
                store=self._connect(state),
                state=state,
                introduction=self.introduction,
                folder=self.folder,
                is_member=self.me in state.members,
            )
            return None, handle
        return QuorumState(number=state.number + 1) if self._is_stale() else None, None

    def _begin(self, state: QuorumState) -> QuorumState | None:
        since_s = self._seconds_with((state.number, state.phase))
        if self.me in state.members and self._started != state.number:
            self._started = state.number
            self._start_member(state)
        if self._is_answering(state):
            return replace(state, phase=QuorumPhase.ON)
        if since_s < quorum.START_TIMEOUT_S:
            return None
        why = f"the etcds of {_nodes(state)} did not start in {quorum.START_TIMEOUT_S:g} s"
        return replace(state, phase=QuorumPhase.OFF, why=why)

    def _gather(self, state: QuorumState) -> QuorumState | None:
        prefix = f"quorum/{state.number}/"
        self.server.put(prefix + self.me.agent, quorum.candidate_bytes(self.me))
        found = self.server.list(prefix)
        try:
            candidates = [quorum.read_candidate(entry.value) for entry in found.values()]
        except (ValueError, TypeError) as exc:
            raise ControlStoreError(f"an entry of {prefix} cannot be read: {exc!r}") from exc
        return quorum.after_gathering(
            state,
            candidates,
            nodes_min=self.plan.nodes_min,
            nodes_max=self.plan.nodes_max,
            quiet_s=self._seconds_with((state.number, len(candidates))),
        )

    def _seconds_with(self, what: object) -> float:
        """Return for how long *what* has been so, as seen by this agent."""
        if self._seen[0] != what:
            self._seen = (what, time.monotonic())
        return time.monotonic() - self._seen[1]

    def _is_stale(self) -> bool:
        version = self.server.get(quorum.ALIVE_KEY).version
        if version != self._alive[0]:
            self._alive = (version, time.monotonic())
        return time.monotonic() - self._alive[1] >= quorum.STALE_S

    def _is_answering(self, state: QuorumState) -> bool:
        """Say whether a majority of the members of *state* answers."""
        if not self.files:
            return False
        with closing(self._connect(state, PROBE_TIMEOUT_S)) as store:
            try:
                store.get(RECORD_KEY)
            except ControlStoreError as exc:
                log.debug("the quorum does not answer: %s", exc)
                return False
        return True

    def _connect(self, state: QuorumState, deadline_s: float = DEADLINE_S) -> EtcdControlStore:
        """Return a client of the control store that the members of *state* hold."""
        members = [(member.address, member.client_port) for member in state.members]
        own = (self.address, self.me.client_port)
        # Each agent asks the member on its own node first, the others in an order of its own.
        start = members.index(own) if own in members else int(self.me.agent[1:], 16)
        start %= len(members)
        url = member_url(members[start:] + members[:start], self.files)
        key = f"{self.run_key}/{state.members[0].agent}"
        return EtcdControlStore(url, run_key=key, token=self.token, deadline_s=deadline_s)

    def _start_member(self, state: QuorumState) -> None:
        me = self.me
        argv = [*module_command("gpuops.control.etcd.member")]
        argv += ["--name", me.agent, "--address", me.address]
        argv += ["--client-port", str(me.client_port), "--peer-port", str(me.peer_port)]
        argv += ["--cluster", state.cluster, "--cluster-token", state.members[0].agent]
        argv += ["--run-key", f"{self.run_key}/{state.members[0].agent}"]
        try:
            process = start_sidecar(argv, environ())
            end_s = time.monotonic() + START_MEMBER_S
            line = process.first_line(end_s, self.token.encode())
        except OSError as exc:
            line = f"failed {exc}"
        if line != "ready":
            log.warning("this node's etcd does not run: %s", line or "no answer")


def form_quorum(
    server: ControlStore,
    meeting: EndpointPlan,
    plan: QuorumPlan,
    *,
    address: str,
    wait: Callable[[float], object],
) -> QuorumHandle | str:
    """Return the quorum that the agents at *server* agree on, or why there is none.

    Raises:
        ControlStoreError: The server does not answer.
    """
    token, run_key = meeting.token, meeting.run_key

    def introduction() -> TcpControlStore:
        return TcpControlStore(
            meeting.host, meeting.port, run_key=run_key, token=token, deadline_s=PROBE_TIMEOUT_S
        )

    return QuorumFormation(
        server=server,
        plan=plan,
        address=address,
        run_key=run_key,
        token=token,
        introduction=introduction,
        wait=wait,
    ).run()


def _nodes(state: QuorumState) -> str:
    return ", ".join(member.node for member in state.members)


def _free_ports(address: str) -> tuple[int, int]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as one, socket.socket(family) as other:
            one.bind((address, 0))
            other.bind((address, 0))
            return one.getsockname()[1], other.getsockname()[1]
    except OSError as exc:
        raise ControlStoreError(f"no port of {address} can be had: {exc}") from exc


def reason_against(nodes_max: int) -> str | None:
    """Return why no quorum is tried for *nodes_max* nodes, None where it is."""
    if nodes_max < quorum.NODES_MIN:
        return f"{nodes_max} nodes have no majority without one of them"
    if nodes_max > quorum.NODES_MAX:
        return f"it was not tried on more than {quorum.NODES_MAX} nodes"
    return None
