"""Keepers of several nodes on addresses of their own, each with ranks, in this one machine."""

import contextlib
import itertools
import threading

from gpuops.checkpoint.keeper.agent_client import KeeperClient
from gpuops.checkpoint.keeper.connection import keeper_socket_path
from gpuops.checkpoint.keeper.core import KeeperCore
from gpuops.checkpoint.keeper.jobs import Jobs, Waker
from gpuops.checkpoint.keeper.messages import Lease
from gpuops.checkpoint.keeper.process import start_or_adopt
from gpuops.checkpoint.keeper.rank_client import connect_rank
from gpuops.checkpoint.keeper.server import KeeperServer
from gpuops.checkpoint.memory.node_memory import NodeMemory
from gpuops.checkpoint.types import (
    KeeperAddress,
    Shard,
)
from support.keeper_ranks import Rank, until

JOB, TOKEN = "run", "the token of the job"


class Node:
    """One node: a keeper's process, the agent's line to it, and its ranks."""

    def __init__(self, folder, name, address, *, token=TOKEN, job=JOB):
        self.name, self.address = name, address
        self._folder, self._pass = folder / name, {"token": token, "job": job}
        self.port, self.agent = 0, None
        self.events = []
        self.lines = []
        self.ranks = []
        self.replace()

    def replace(self):
        """Start a keeper in place of one that is gone, where that one was, and an agent's line."""
        if self.agent is not None:
            self.agent.close()
        self.process = start_or_adopt(self._folder, lease_s=60.0, node=self.name)
        self.agent = KeeperClient.connect(self.process.socket_path)
        self.port = self.agent.serve_peers(
            self.address, node=self.name, port=self.port, **self._pass
        )

    @property
    def peer(self):
        return KeeperAddress(self.name, self.address, self.port)

    def acquire(self, generation, n_nodes, excluded_step=None):
        for line in self.lines:
            line.close()
        self.lines = []
        self.agent.begin_generation(generation, n_nodes, excluded_step, job=JOB)

    def connect(self, generation, shards, world):
        """Connect a rank for each of the numbers *shards*."""
        self.lines = [
            connect_rank(
                self.process.socket_path,
                rank=rank,
                world=world,
                local_rank=n,
                local_world=len(shards),
                generation=generation,
            )
            for n, rank in enumerate(shards)
        ]

    def offers(self, deadline_s=60.0):
        """Return what each rank is offered; all of them ask at once."""
        return [self.lines[0].restore_point(deadline_s)] + [
            line.restore_point(deadline_s) for line in self.lines[1:]
        ]

    def reserve(self, shards, world, *, rank_class=Rank, **kwargs):
        self.ranks = [
            rank_class(line, rank, world, **kwargs).reserve()
            for line, rank in zip(self.lines, shards, strict=True)
        ]

    def heard(self):
        self.events += self.agent.events()
        return self.events

    def heard_of(self, kind):
        return [event for event in self.heard() if event["kind"] == kind]

    def shards_here(self, state):
        return sorted(copy.shard for copy in self.agent.inventory() if copy.state == state)

    def is_replicated(self, state):
        return state in self.agent.status().progress.replicated

    def kill(self):
        """End it as a node ends that loses its power."""
        self.process.kill()

    def close(self):
        for line in self.lines:
            line.close()
        self.agent.close()
        self.process.kill()


class SmallNode(Node):
    """A node whose keeper runs in a thread of the test, with as much room in memory as that says.

    *room_bytes* are what is left of it beside what the keeper's own ranks have taken.
    """

    def __init__(self, folder, name, address, room_bytes, **kwargs):
        self.room_bytes = room_bytes
        super().__init__(folder, name, address, **kwargs)

    def replace(self):
        folder = self._folder
        folder.mkdir(mode=0o700)
        memory = NodeMemory(self.name, lambda: self.room_bytes - memory.populated_bytes())
        self._waker = waker = Waker()
        self._jobs = Jobs(waker.wake)
        self._core = KeeperCore(memory, self._jobs)
        server = KeeperServer(
            self._core, folder, lease_s=60.0, waker=waker, run_callbacks=self._jobs.run_callbacks
        )
        self._thread = threading.Thread(target=lambda: (server.serve(), server.close()))
        self._thread.start()
        self.process = self
        self.socket_path = keeper_socket_path(folder)
        self.agent = KeeperClient.connect(self.socket_path)
        self.port = self.agent.serve_peers(self.address, node=self.name, **self._pass)

    def kill(self):
        self._core.is_ending = True
        self._thread.join()
        self._core.peers.close()
        self._jobs.close()
        self._waker.close()
        self._core.memory.close()


@contextlib.contextmanager
def starting_nodes(folder):
    """Give a function that starts node n1, n2, … by its number; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(number):
            node = Node(folder, f"n{number}", f"127.0.0.{number}")
            stack.callback(node.close)
            return node

        yield make


def seat(nodes, generation, world, state=None, epoch=0, sources=None, *, placed=None, **kwargs):
    """Start the ranks of *nodes*, each a part of *world*; holders are as *placed* says.

    Without, each is the holder of the node before it.
    """
    n_here = world // len(nodes)
    posts = {node: list(range(n * n_here, (n + 1) * n_here)) for n, node in enumerate(nodes)}
    for node in nodes:
        node.acquire(generation, len(nodes))
    for n, node in enumerate(nodes):
        before, after = [nodes[n - 1]], [nodes[(n + 1) % len(nodes)]]
        if placed is not None:
            before = [other for other in nodes if other.name in placed.owners_of(node.name)]
            after = [other for other in nodes if other.name in placed.holders(node.name)]
        keep = [Shard(rank, world) for o in before if o is not node for rank in posts[o]]
        holders = [other for other in after if other is not node]
        ranks = [(posts[other][0], posts[other][-1] + 1) for other in holders]
        node.agent.replicate([other.peer for other in holders], keep, ranks=ranks)
    for node in nodes:
        node.agent.restore_from(state, epoch, (sources or {}).get(node), loading_world=world)
    for node in nodes:
        node.connect(generation, posts[node], world)
    offers = []
    for node in nodes:
        offers += node.offers()
    for node in nodes:
        node.reserve(posts[node], world, **kwargs)
    return offers


def save(nodes, step):
    """Save *step*, or the next that all nodes grant; return its state once it is whole.

    Each node decides for itself, and one may have a slot still in a push's hands when another has
    none: what only some of them grant is given up there, as the leader of the agents has it done.
    """
    steps = itertools.count(step)

    def granted():
        n = next(steps)
        answers = {node: [rank.save(n) for rank in node.ranks] for node in nodes}
        grants = {node: here[0] for node, here in answers.items() if isinstance(here[0], Lease)}
        for here in answers.values():
            assert len({isinstance(answer, Lease) for answer in here}) == 1, here
        states = {grant.state for grant in grants.values()}
        if len(grants) == len(nodes):
            return states
        for node, grant in grants.items():
            node.agent.give_up(grant.state)
        return None

    (state,) = until(granted, what="a grant on all nodes")
    until(
        lambda: all(state in node.agent.status().progress.whole for node in nodes), what="all whole"
    )
    return state


def commit(nodes, state, *, persist=False):
    """Wait until *state* is replicated and commit it, as the leader of the agents does."""
    until(lambda: all(node.is_replicated(state) for node in nodes), what=f"{state} replicated")
    for node in nodes:
        assert node.agent.commit(state, persist=persist)
    return state
