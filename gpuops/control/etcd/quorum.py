"""Three or five nodes of a run hold its control record, so that the run outlives its first host.

The control store on the endpoint's node then only introduces the agents to each other. Under
`QUORUM_KEY` it holds a `QuorumState`, which any agent may move on by compare-and-set:

``gather``  each agent notes where it is and whether it can start an etcd;
``start``   members are chosen, in different failure domains, and start theirs;
``on``      an agent has had an answer from them: the run's control store is that etcd;
``off``     there are too few nodes or too few etcds: the control store is the endpoint's.

Agents that come later, or again, find ``on``. Members keep it there: a server that was started anew
at the endpoint learns it within `ANNOUNCE_S`. Where nobody does and no member answers, the next
round begins once agents on so many of the members' nodes see it so that the others have no majority
(`may_begin_anew`): members that were cut off from here may train on.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from gpuops.control.store import ControlStoreError

QUORUM_KIND = "quorum"  # of a control store, where it is named
QUORUM_KEY = "quorum/state"
ALIVE_KEY = "quorum/alive"
NODES_MIN = 3
MEMBERS_MAX = 5
# Each agent polls its members four times a second; more agents were not tried.
NODES_MAX = 256
# Three nodes can start an etcd, and no further one has come for so long.
SETTLE_S = 5.0
START_TIMEOUT_S = 30.0
ANNOUNCE_S = 2.0
# No member has announced the quorum for so long: none of them reaches the server.
STALE_S = 4 * ANNOUNCE_S


class QuorumPhase(StrEnum):
    """See the module."""

    GATHER = "gather"
    START = "start"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An agent, where it is, and the ports of its etcd and of its server: 0 where it has no etcd.

    Without openssl it ``can_call`` none either.
    """

    agent: str
    node: str
    address: str
    client_port: int = 0
    peer_port: int = 0
    presence_port: int = 0
    domain: tuple[str, ...] = ()
    can_call: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherLimits:
    """How many nodes the run wants (spares included), and for how long it would wait for more.

    ``settle_s`` counts from the last node that came. ``first_call_s`` counts from when there are
    enough nodes to train, ``join_timeout_s`` is for fewer.
    """

    nodes_min: int
    nodes_max: int
    settle_s: float = SETTLE_S
    first_call_s: float = 30.0
    join_timeout_s: float = 600.0

    def wait_s(self, n_nodes: int) -> float:
        """Return for how long *n_nodes* wait for others."""
        return self.first_call_s if n_nodes >= self.nodes_min else self.join_timeout_s


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
    ports = (candidate.client_port, candidate.peer_port, candidate.presence_port)
    return json.dumps([*fields, *ports, list(candidate.domain), candidate.can_call]).encode()


def read_candidate(data: bytes) -> Candidate:
    """Return the candidate in *data*; raises ValueError where there is none."""
    agent, node, address, client_port, peer_port, presence_port, domain, can_call = json.loads(data)
    return Candidate(
        agent=str(agent),
        node=str(node),
        address=str(address),
        client_port=int(client_port),
        peer_port=int(peer_port),
        presence_port=int(presence_port),
        domain=tuple(str(part) for part in domain),
        can_call=bool(can_call),
    )


def bracketed(address: str) -> str:
    """Return *address* as it stands in a URL."""
    return f"[{address}]" if ":" in address else address


def reason_against(nodes_max: int) -> str:
    """Return why no quorum is tried for *nodes_max* nodes, "" where it is."""
    if nodes_max < NODES_MIN:
        return "two nodes have no majority without one of them"
    return "" if nodes_max <= NODES_MAX else f"it was not tried on more than {NODES_MAX} nodes"


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
    limits: GatherLimits,
    *,
    quiet_s: float,
    waited_s: float,
) -> QuorumState | None:
    """Return the state after ``gather``, None while more agents are waited for.

    *candidates* are of different nodes, *quiet_s*: since when no further one has come, *waited_s*:
    for how long they have been enough to train, or too few.
    """
    n_nodes = len(candidates)
    members = choose_members(candidates)
    if any(not candidate.can_call for candidate in candidates):
        members = ()
    if members and (n_nodes >= limits.nodes_max or quiet_s >= limits.settle_s):
        return replace(state, phase=QuorumPhase.START, members=members)
    why = _why_impossible(candidates, limits)
    if why is None and waited_s >= limits.wait_s(n_nodes):
        why = f"only {n_nodes} of {limits.nodes_max} nodes came within {waited_s:.0f} s"
    return None if why is None else replace(state, phase=QuorumPhase.OFF, why=why)


def _why_impossible(candidates: Sequence[Candidate], limits: GatherLimits) -> str | None:
    """Return what no further node can change, None where there is nothing."""
    without_tls = [candidate.node for candidate in candidates if not candidate.can_call]
    if without_tls:
        return f"openssl is not installed on {_listed(without_tls)}"
    without = [candidate.node for candidate in candidates if not candidate.client_port]
    if max(limits.nodes_max, len(candidates)) - len(without) >= NODES_MIN:
        return None
    return f"etcd is not installed on {_listed(without)}; 3 of {limits.nodes_max} nodes need it"


def _listed(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - 4} more" if len(nodes) > 4 else ""
    return ", ".join(nodes[:4]) + more


def may_begin_anew(state: QuorumState, candidates: Sequence[Candidate]) -> bool:
    """Say whether those of *state* have no majority without the nodes of *candidates*."""
    here = {candidate.node for candidate in candidates}
    others = [member for member in state.members if member.node not in here]
    return 2 * len(others) <= len(state.members)
