"""An agent and the others at the endpoint's server make a quorum: `quorum` says which, by state."""

import logging
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from gpuops.config.resolve import environ
from gpuops.control.etcd import quorum
from gpuops.control.etcd.credentials import write_credentials
from gpuops.control.etcd.folders import locked_folder
from gpuops.control.etcd.handle import PROBE_TIMEOUT_S, QuorumHandle
from gpuops.control.etcd.member import member_url, request_end
from gpuops.control.etcd.presence import QuorumControlStore
from gpuops.control.etcd.quorum import Candidate, GatherLimits, QuorumPhase, QuorumState
from gpuops.control.etcd.store import DEADLINE_S, EtcdControlStore
from gpuops.control.join import WAIT_NOTICE_S, describe_arrivals
from gpuops.control.record import RECORD_KEY
from gpuops.control.store import ControlStore, ControlStoreError, ControlStoreUnreachableError
from gpuops.control.tcp.process import start_server
from gpuops.control.tcp.store import TcpControlStore
from gpuops.host.process.command import module_command
from gpuops.host.process.sidecar import start_sidecar
from gpuops.log import log_notice

log = logging.getLogger(__name__)

POLL_S = 0.2
START_MEMBER_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumPlan:
    """Who this agent is for the quorum; *is_asked_for*: by the user, else it is tried by itself."""

    node: str
    domain: tuple[str, ...] = ()
    limits: GatherLimits
    is_asked_for: bool = False

    def explain(self, why: str, host: str | None) -> None:
        """Say what a run without a quorum does not survive; *host* None: this agent holds it.

        One agent says it, unless the user has asked for a quorum.
        """
        if host is None or self.is_asked_for:
            name = host or f"node {self.node}"
            log_notice(f"the run ends if {name}, which holds the control store, is lost: {why}")


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
    now_s: Callable[[], float] = time.monotonic
    probe_timeout_s: float = PROBE_TIMEOUT_S
    me: Candidate = field(init=False)
    folder: Path = field(init=False)
    files: dict[str, str] = field(init=False, default_factory=dict)
    _sockets: tuple[socket.socket, ...] = field(init=False, default=())  # keep our ports ours
    _noted: set[str] = field(init=False, default_factory=set)
    _started: int = 0
    _since: dict[str, tuple[object, float]] = field(init=False, default_factory=dict)
    _has_logged: bool = field(init=False, default=False)
    _has_shown: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        try:
            self.folder, _mark = locked_folder("gpuops-quorum-", parent)  # until this process ends
        except OSError as exc:
            raise ControlStoreError(f"no folder for certificates in {parent}: {exc}") from exc
        try:
            self.files = write_credentials(self.folder, self.token, self.address)
            if shutil.which("etcd") is not None:
                self._sockets = _bound_sockets(self.address)
        except ControlStoreError as exc:
            log.debug("this node cannot hold the control record: %s", exc)
        ports = [sock.getsockname()[1] for sock in self._sockets] or [0, 0, 0]
        self.me = Candidate(
            agent=f"m{uuid4().hex[:12]}",
            node=self.plan.node,
            address=self.address,
            client_port=ports[0],
            peer_port=ports[1],
            presence_port=ports[2],
            domain=self.plan.domain,
            can_call=bool(self.files),
        )

    def run(self) -> QuorumHandle | str:
        """Return the quorum, or why there is none.

        Raises:
            ControlStoreError: The endpoint's server does not answer, or this node cannot reach the
                quorum.
        """
        why = ""
        handle: QuorumHandle | None = None
        try:
            while handle is None and not why:
                entry = self.server.get(quorum.QUORUM_KEY)
                state = QuorumState.from_bytes(entry.value) if entry.version else None
                why = "" if state is None else state.why
                following, handle = self._next(state)
                if following is not None:
                    self.server.compare_and_set(
                        quorum.QUORUM_KEY, following.to_bytes(), version=entry.version
                    )
                elif handle is None and not why:
                    self.wait(POLL_S)
        finally:
            self.close(keeps_folder=handle is not None)
        if handle is None:
            return why
        handle.start()
        return handle

    def close(self, *, keeps_folder: bool = False) -> None:
        """Take this agent off the lists of candidates: it is none any more."""
        if not keeps_folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        for sock in self._sockets:
            sock.close()
        with suppress(ControlStoreError):
            for key in self._noted:
                self.server.delete(key)

    def _next(self, state: QuorumState | None) -> tuple[QuorumState | None, QuorumHandle | None]:
        """Return the state to write, and the quorum once it is there."""
        if state is None:
            return QuorumState(), None
        if state.phase is QuorumPhase.GATHER:
            return self._gather(state), None
        if state.phase is QuorumPhase.START:
            return self._begin(state), None
        if state.phase is QuorumPhase.ON and self._is_answering(state):
            handle = QuorumHandle(
                store=self._connect(state),
                run_key=self._key(state),
                state=state,
                introduction=self.introduction,
                folder=self.folder,
            )
            return None, handle
        return (self._begin_anew(state) if state.phase is QuorumPhase.ON else None), None

    def _begin(self, state: QuorumState) -> QuorumState | None:
        since_s = self._seconds_with("phase", state.number)
        why = ""
        if self.me in state.members and self._started != state.number:
            self._started = state.number
            why = self._start_member(state)
        if self._is_answering(state):
            return replace(state, phase=QuorumPhase.ON)
        if since_s >= quorum.START_TIMEOUT_S:
            why = f"the etcds of {_nodes(state)} did not start in {quorum.START_TIMEOUT_S:g} s"
        return replace(state, phase=QuorumPhase.OFF, why=why) if why else None

    def _begin_anew(self, state: QuorumState) -> QuorumState | None:
        """Return the next round, None while the members of *state* may serve others."""
        version = self.server.get(quorum.ALIVE_KEY).version
        if self._seconds_with("alive", version) < quorum.STALE_S:
            return None
        number = state.number + 1
        # No member is ended for a round that does not come: the run needs it after the cut.
        if (
            quorum.may_begin_anew(state, self._candidates(f"{number}"))
            and self._has_no_member_of(state)
            and quorum.may_begin_anew(state, self._candidates(f"{number}-ended"))
        ):
            return QuorumState(number=number)
        why = (
            f"{_nodes(state)} hold the control record of this run, and most of them do not answer: "
            "they may train where they cannot be reached from here"
        )
        if self._seconds_with("stale", state.number) >= self.plan.limits.join_timeout_s:
            raise ControlStoreUnreachableError(f"{why}; start a new run with another --rdzv-id")
        if not self._has_logged:
            self._has_logged = True
            log.warning("waiting: %s", why)
        return None

    def _has_no_member_of(self, state: QuorumState) -> bool:
        """Say whether no member of *state* runs on this node, after asking it to end.

        With those that were cut off from here it could be a majority again.
        """
        own = [member for member in state.members if member.node == self.plan.node]
        for member in own:
            request_end(member.agent)
        return not any(_is_listening(member.address, member.client_port) for member in own)

    def _gather(self, state: QuorumState) -> QuorumState | None:
        if self.server.get(RECORD_KEY).version:
            # Of another version, or of a run before this one whose agents were killed.
            why = "an agent of this run holds it there already, without a quorum"
            return replace(state, phase=QuorumPhase.OFF, why=why)
        limits, candidates = self.plan.limits, self._candidates(f"{state.number}")
        self._show_who_is_missing(state, [candidate.node for candidate in candidates])
        wait_s = limits.wait_s(len(candidates))
        return quorum.after_gathering(
            state,
            candidates,
            limits,
            quiet_s=self._seconds_with("quiet", (state.number, len(candidates))),
            waited_s=self._seconds_with("waited", (state.number, wait_s)),
        )

    def _show_who_is_missing(self, state: QuorumState, nodes: list[str]) -> None:
        """Tell the user, once and on one node, which *nodes* have come so far."""
        waited_s, limits = self._seconds_with("arrivals", state.number), self.plan.limits
        is_late = waited_s >= WAIT_NOTICE_S and len(nodes) < limits.nodes_max
        if is_late and self.plan.node == min(nodes) and not self._has_shown:
            self._has_shown = True
            left_s = max(limits.join_timeout_s - waited_s, 0.0)
            log_notice(describe_arrivals(nodes, limits.nodes_min, left_s))

    def note_in(self, name: str) -> str:
        """Note this agent as one of the round *name*; return the prefix of its agents' keys."""
        prefix = f"quorum/{name}/"
        self._noted.add(prefix + self.me.agent)
        self.server.put(prefix + self.me.agent, quorum.candidate_bytes(self.me))
        return prefix

    def _candidates(self, name: str) -> list[Candidate]:
        """Return the agents of the round *name*, this one among them: the newest of each node."""
        prefix = self.note_in(name)
        found = self.server.list(prefix)
        try:
            candidates = [quorum.read_candidate(entry.value) for entry in found.values()]
        except (ValueError, TypeError) as exc:
            raise ControlStoreError(f"an entry of {prefix} cannot be read: {exc!r}") from exc
        return list({candidate.node: candidate for candidate in candidates}.values())

    def _seconds_with(self, name: str, what: object) -> float:
        """Return for how long what is called *name* has been *what*, as seen by this agent."""
        now_s = self.now_s()
        if self._since.get(name, (None, 0.0))[0] != what:
            self._since[name] = (what, now_s)
        return now_s - self._since[name][1]

    def _is_answering(self, state: QuorumState) -> bool:
        """Say whether a majority of the members of *state* answers."""
        if not self.files:
            raise ControlStoreError(
                f"{_nodes(state)} hold the control record of this run, in etcd, which this node "
                "cannot reach: openssl is not installed, or fails"
            )
        probe = EtcdControlStore(
            self._url(state),
            run_key=self._key(state),
            token=self.token,
            deadline_s=self.probe_timeout_s,
        )
        with closing(probe) as store:
            try:
                store.get(RECORD_KEY)
            except ControlStoreError as exc:
                log.debug("the quorum does not answer: %s", exc)
                return False
        return True

    def _connect(self, state: QuorumState) -> QuorumControlStore:
        """Return a client of the control store that the members of *state* hold."""
        return QuorumControlStore(
            self._url(state),
            servers=[(member.address, member.presence_port) for member in state.members],
            run_key=self._key(state),
            token=self.token,
            deadline_s=DEADLINE_S,
        )

    def _url(self, state: QuorumState) -> str:
        members = [(member.address, member.client_port) for member in state.members]
        own = (self.address, self.me.client_port)
        # Each agent asks the member on its own node first, the others in an order of its own.
        start = members.index(own) if own in members else int(self.me.agent[1:], 16)
        start %= len(members)
        return member_url(members[start:] + members[:start], self.files)

    def _key(self, state: QuorumState) -> str:
        """Return the run's key in the etcds of *state*."""
        return f"{self.run_key}/{state.members[0].agent}"

    def _start_member(self, state: QuorumState) -> str:
        """Start the etcd of this node; return why it does not run, "" where it does."""
        me = self.me
        argv = [*module_command("gpuops.control.etcd.member")]
        argv += ["--name", me.agent, "--address", me.address]
        argv += ["--client-port", str(me.client_port), "--peer-port", str(me.peer_port)]
        argv += ["--cluster", state.cluster, "--cluster-token", state.members[0].agent]
        argv += ["--run-key", self._key(state), "--credentials", str(self.folder)]
        for sock in self._sockets:
            sock.close()
        try:
            start_server(me.address, me.presence_port, run_key=self._key(state), token=self.token)
            process = start_sidecar(argv, environ())
            end_s = time.monotonic() + START_MEMBER_S
            line = process.first_line(end_s, self.token.encode())
        except (OSError, ControlStoreError) as exc:
            line = f"failed {exc}"
        why = line.removeprefix("failed ") or "no answer"
        return "" if line == "ready" else f"the etcd of {me.node} does not run: {why}"


def form_quorum(
    server: ControlStore,
    plan: QuorumPlan,
    place: tuple[str, int],
    job: tuple[str, str],
    *,
    address: str,
    wait: Callable[[float], object],
) -> QuorumHandle | str:
    """Return the quorum that the agents at *server* agree on, or why there is none.

    *place* is the server's host and port, *job* its run's key and token, *address* this node's.

    Raises:
        ControlStoreError: The server does not answer.
    """
    why = quorum.reason_against(plan.limits.nodes_max)
    if why:
        return why
    run_key, token = job

    def introduction() -> TcpControlStore:
        return TcpControlStore(*place, run_key=run_key, token=token, deadline_s=PROBE_TIMEOUT_S)

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


def _is_listening(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=PROBE_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        pass  # nobody knows
    return True


def _bound_sockets(address: str) -> tuple[socket.socket, ...]:
    """Return three sockets with ports of *address*; nobody else gets these while they are open."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sockets = tuple(socket.socket(family) for _ in range(3))
    try:
        for sock in sockets:
            sock.bind((address, 0))
    except OSError as exc:
        for sock in sockets:
            sock.close()
        raise ControlStoreError(f"no port of {address} can be had: {exc}") from exc
    return sockets
