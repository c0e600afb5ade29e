"""Thousands of nodes with 8 ranks each resume from memory: their plan fits the control store."""

import time

import pytest
from support.agreement import CutBoard, restart

from gpuops.agent.checkpoint.follower import CommitFollower, KeeperLocation
from gpuops.agent.checkpoint.generation_plan import plan_generation
from gpuops.agent.checkpoint.leader import CommitLeader, generation_plan_of
from gpuops.agent.checkpoint.messages import FIELD, Inventory, StoredStates, held_states
from gpuops.checkpoint.agreement.progress import KeeperProgress
from gpuops.checkpoint.keeper.messages import KeeperStatus
from gpuops.checkpoint.placement.replica_placement import place
from gpuops.checkpoint.types import Digest, Shard, ShardCopy, StateId, Tier
from gpuops.control.client import ControlClient
from gpuops.control.leader import Leader
from gpuops.control.memory import MemoryControlStore
from gpuops.control.record import (
    RECORD_KEY,
    ControlKeys,
    ControlRecord,
    Member,
    RecordView,
    Roster,
    RunPhase,
    pack,
)
from gpuops.control.step import LeaderPolicy, LeaderTimeouts
from gpuops.host.clock import FakeClock
from gpuops.incident.decision import RestartPolicy

N_RANKS = 8
STATES = (StateId(1, 100), StateId(1, 200))


def root_of(state, rank):
    return f"{state.step:032x}{rank:032x}"


class Client:
    """Notes what the keeper of a node is asked to load."""

    def __init__(self):
        self.asked = None

    def replicate(self, *_args, **_more):
        pass

    def report_difference(self, *_args):
        raise AssertionError

    def restore_from(self, state, epoch, sources, _why, *, roots, loading_world):
        self.asked = (state, epoch, sources, roots)


class Fleet:
    """*n_nodes* that trained in generation 0 and are ready for the next one, and one leader."""

    def __init__(self, n_nodes, lost=()):
        self.clock = FakeClock()
        self.store = MemoryControlStore(self.clock)
        self.members = [
            Member(
                agent=f"00000000-0000-4000-8000-{number:012x}",
                node=f"gpu-node-{number:05d}",
                address=f"10.1.{number // 256}.{number % 256}",
                n_workers=N_RANKS,
                node_rank_hint=number,
            )
            for number in range(n_nodes)
        ]
        self.keys = ControlKeys(run_id=self.members[0].agent)
        self.placement = place([member.node for member in self.members], 2)
        self.ranks = {
            m.node: range(n * N_RANKS, (n + 1) * N_RANKS) for n, m in enumerate(self.members)
        }
        before = Roster(generation=0, members=tuple(self.members))
        holding = {member.agent: Inventory(port=7000) for member in self.members}
        plan = plan_generation(before, holding, None, replicas=2, excluded_step=None)
        before = Roster(generation=0, members=before.members, metadata={FIELD: plan.to_json()})
        self.store.put(self.keys.roster(0), before.to_bytes())
        ready = [member for member in self.members if member.node not in lost]
        for member in ready:
            self.store.put(self.keys.agent(member.agent), pack(member.to_json()))
            body = {**member.to_json(), FIELD: self.inventory(member).to_json()}
            self.store.put(self.keys.ready(1, member.agent), pack(body))
        self.leader = self._leader(ready)
        for member in ready:
            self.store.put(self.keys.heartbeat(member.agent), pack({"seq": 1}))

    def _leader(self, ready):
        record = ControlRecord(
            run_id=self.members[0].agent,
            folder="run",
            generation=1,
            phase=RunPhase.RENDEZVOUS,
            since_s=0.0,
        )
        self.store.put(RECORD_KEY, record.to_bytes())
        me = ready[0]
        view = RecordView(record, 1, 0.0, self.clock.mono_ns())
        self.client = ControlClient(self.store, me, view, self.clock, fence_timeout_s=None)
        policy = RestartPolicy(nodes_min=1, nodes_max=len(ready), restarts_max=9)
        return Leader(
            self.client,
            self.clock,
            LeaderPolicy(restart=policy, timeouts=LeaderTimeouts(), decide=restart),
            on_decision=lambda _record: None,
            extensions=[CommitLeader(self.store, self.keys, me, self.clock, 2)],
        )

    def inventory(self, member):
        """Return what a node holds: each state of its own ranks and of its peer's."""
        world = len(self.members) * N_RANKS
        copies = [
            ShardCopy(
                state,
                Shard(rank, world),
                "ab" * 8,
                Digest(10, b"", root_of(state, rank)),
                Tier.MEMORY,
                member.node,
            )
            for state in STATES
            for owner in self.placement.owners_of(member.node)
            for rank in self.ranks[owner]
        ]
        return Inventory(port=7000, states=held_states(copies), epoch_max=1)

    def decide(self):
        """Have the leader form the generation; return its roster, and the processor's seconds."""
        began_s = time.process_time()
        self.leader.tick(self.client.view)
        took_s = time.process_time() - began_s
        assert self.client.record.phase is RunPhase.RUN
        return Roster.from_bytes(self.store.get(self.keys.roster(1)).value), took_s

    def asked(self, roster, number):
        """Return what the keeper of one node is asked to load."""
        client = Client()
        assert self.follower(roster.members[number], self.store).begin(client, roster)
        return client.asked

    def follower(self, me, store):
        """Return the part of the node of *me*."""
        location = KeeperLocation(me=me, token="t" * 16, job="run")
        return CommitFollower(
            store, self.keys, location, lambda _d: StoredStates(), lambda _text: None
        )


def resumes_from_memory(n_nodes):
    """Form a generation of *n_nodes*; return the processor's seconds that it took."""
    fleet = Fleet(n_nodes)
    roster, took_s = fleet.decide()
    assert len(roster.members) == n_nodes
    assert generation_plan_of(roster).restore.state == STATES[-1]
    for number in (0, n_nodes // 2, n_nodes - 1):
        state, _epoch, sources, roots = fleet.asked(roster, number)
        node = roster.members[number].node
        shards = [Shard(rank, n_nodes * N_RANKS) for rank in fleet.ranks[node]]
        assert state == STATES[-1]
        assert sorted(sources) == sorted(roots) == shards
        assert {peer.name for found in sources.values() for peer in found} == set(
            fleet.placement.holders(node)[1:]
        )
        assert roots == {shard: root_of(state, shard.rank) for shard in shards}
    return took_s


def test_more_than_a_thousand_nodes_with_8_ranks_resume_from_memory():
    resumes_from_memory(1024)


@pytest.mark.soak
def test_the_largest_run_resumes_from_memory_and_is_decided_within_2_s_of_processor_time():
    assert resumes_from_memory(4096) < 2.0


def test_a_smaller_world_learns_of_the_sources_of_every_shard():
    fleet = Fleet(100, lost=("gpu-node-00007",))
    roster, _took_s = fleet.decide()

    state, _epoch, sources, roots = fleet.asked(roster, 50)
    assert state == STATES[-1]
    assert {shard.rank for shard in roots} == set(range(800))
    partner = fleet.placement.holders("gpu-node-00007")[1]
    assert {peer.name for peer in sources[Shard(7 * N_RANKS, 800)]} == {partner}


def test_sources_that_cannot_be_read_when_a_generation_begins_are_read_later():
    fleet = Fleet(20)
    roster, _took_s = fleet.decide()
    store, client = CutBoard(fleet.store), Client()
    follower = fleet.follower(roster.members[3], store)
    status = KeeperStatus(progress=KeeperProgress(), n_ranks=N_RANKS)

    store.is_cut = True
    assert follower.begin(client, roster)
    follower.update(client, status)
    follower.fetch()
    follower.update(client, status)
    assert client.asked is None
    assert follower.is_waiting

    store.is_cut = False
    follower.fetch()
    follower.update(client, status)
    state, _epoch, sources, _roots = client.asked
    assert state == STATES[-1]
    assert {shard.rank for shard in sources} == set(range(24, 32))
