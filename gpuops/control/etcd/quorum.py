"""Three or five nodes of a run hold its control record, so that the run outlives its first host.

The control store on the endpoint's node then only introduces the agents to each other. Under
`QUORUM_KEY` it holds a `QuorumState`, which any agent may move on by compare-and-set:

``gather``  each agent notes where it is and whether it can start an etcd;
``start``   members are chosen, in different failure domains, and start theirs;
``on``      an agent has had an answer from them: the run's control store is that etcd;
``off``     there are too few nodes or too few etcds: the control store is the endpoint's.

Agents that come later, or again, find ``on``. Members keep it there: a server that was started anew
at the endpoint learns it within `ANNOUNCE_S`. Where nobody does and no member answers, the run of
that state is over, and the next round begins.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from gpuops.control.store import ControlStoreError

QUORUM_KEY = "quorum/state"
ALIVE_KEY = "quorum/alive"
NODES_MIN = 3
MEMBERS_MAX = 5
# Each agent polls its members four times a second; more agents were not tried.
NODES_MAX = 256
# Enough nodes are there, and no further one has come for so long.
SETTLE_S = 5.0
START_TIMEOUT_S = 30.0
ANNOUNCE_S = 2.0
# No member has announced the quorum for so long: its run is over.
STALE_S = 4 * ANNOUNCE_S


class QuorumPhase(StrEnum):
    """See the module."""

    GATHER = "gather"
    START = "start"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An agent, where it is, and the ports of its etcd: 0 where it cannot start one."""

    agent: str
    node: str
    address: str
    client_port: int = 0
    peer_port: int = 0
    domain: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumState:
    """``number`` counts rounds; ``why`` says what kept a round from being on."""

    number: int = 1
    phase: QuorumPhase = QuorumPhase.GATHER
    members: tuple[Candidate, ...] = ()
    why: str = ""

    def to_bytes(self) -> bytes:
        """Return what `from_bytes` reads."""
        members = [candidate_bytes(member).decode() for member in self.members]
        body = {"number": self.number, "phase": self.phase, "members": members, "why": self.why}
        return json.dumps(body).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the state in *data*.

        Raises:
            ControlStoreError: There is none.
        """
        try:
            body = json.loads(data)
            return cls(
                number=int(body["number"]),
                phase=QuorumPhase(body["phase"]),
                members=tuple(read_candidate(text.encode()) for text in body["members"]),
                why=str(body["why"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ControlStoreError(f"the key {QUORUM_KEY} cannot be read: {exc!r}") from exc

    @property
    def cluster(self) -> str:
        """Return the members as etcd wants them."""
        return ",".join(
            f"{member.agent}=https://{bracketed(member.address)}:{member.peer_port}"
            for member in self.members
        )


def candidate_bytes(candidate: Candidate) -> bytes:
    """Return what `read_candidate` reads."""
    fields = (candidate.agent, candidate.node, candidate.address)
    ports = (candidate.client_port, candidate.peer_port)
    return json.dumps([*fields, *ports, list(candidate.domain)]).encode()


def read_candidate(data: bytes) -> Candidate:
    """Return the candidate in *data*; raises ValueError where there is none."""
    agent, node, address, client_port, peer_port, domain = json.loads(data)
    return Candidate(
        agent=str(agent),
        node=str(node),
        address=str(address),
        client_port=int(client_port),
        peer_port=int(peer_port),
        domain=tuple(str(part) for part in domain),
    )


def bracketed(address: str) -> str:
    """Return *address* as it stands in a URL."""
    return f"[{address}]" if ":" in address else address


def choose_members(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return five or three of *candidates* that can start an etcd, () where fewer can.

    Each next one shares as little as possible of its failure domain with those before it.
    """
    able = [candidate for candidate in candidates if candidate.client_port]
    n_members = next((n for n in (MEMBERS_MAX, NODES_MIN) if len(able) >= n), 0)
    chosen: list[Candidate] = []
    used: Counter[tuple[str, ...]] = Counter()
    while len(chosen) < n_members:
        left = [candidate for candidate in able if candidate not in chosen]
        best = min(left, key=lambda it: [used[it.domain[: i + 1]] for i in range(len(it.domain))])
        chosen.append(best)
        used.update(best.domain[: i + 1] for i in range(len(best.domain)))
    return tuple(chosen)


def after_gathering(
    state: QuorumState,
    candidates: Sequence[Candidate],
    *,
    nodes_min: int,
    nodes_max: int,
    quiet_s: float,
) -> QuorumState | None:
    """Return the state after ``gather``, None while more agents are waited for.

    *quiet_s*: since when no further agent has come.
    """
    n_nodes = len(candidates)
    if n_nodes < nodes_max and (n_nodes < nodes_min or quiet_s < SETTLE_S):
        return None
    members = choose_members(candidates)
    if members:
        return replace(state, phase=QuorumPhase.START, members=members)
    n_able = sum(1 for candidate in candidates if candidate.client_port)
    if n_nodes < NODES_MIN:
        why = f"{n_nodes} nodes have no majority without one of them"
    else:
        why = f"etcd and openssl are installed on {n_able} of {n_nodes} nodes, and 3 are needed"
    return replace(state, phase=QuorumPhase.OFF, why=why)
