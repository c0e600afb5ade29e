"""A keeper in memory, as an agent sees it: committed, killed and slowed down by a test."""

import threading

from gpuops.agent.checkpoint.api import StartedKeeper
from gpuops.checkpoint.agreement.progress import KeeperProgress
from gpuops.checkpoint.keeper.messages import NO_DIRECTORY, FlushResult, KeeperStatus
from gpuops.checkpoint.types import KeeperError, StateId


class FakeKeeper:
    """What a keeper's process would hold; it outlives the clients to it."""

    def __init__(self):
        self.committed = []  # states, in order
        self.persisted = None
        self.directory = "/ckpt"
        self.told = []
        self.begun = []  # of each generation: number, nodes, excluded step
        self.epoch = None  # of what is saved now
        self.taken_over = []
        self.answers = threading.Event()
        self.answers.set()
        self.is_alive = True
        self.has_ended = False
        self.clients = []
        self.skipped = {}
        self.flushing = threading.Event()  # a flush has begun
        self.flush_may_go_on = threading.Event()
        self.flush_may_go_on.set()
        self.flush_s = 0.5
        self.others_s = 0.0  # a flush waits for other nodes' shards at most so long

    def commit(self, step, epoch=0):
        state = StateId(epoch, step)
        self.committed.append(state)
        self.told.append({"kind": "committed", "state": [epoch, step], "bytes": 100})

    def restored(self, step, rank, epoch=0, tier="memory", seconds=0.25, nbytes=1000):
        self.told.append(
            {
                "kind": "restored",
                "state": [epoch, step],
                "rank": rank,
                "tier": tier,
                "seconds": seconds,
                "bytes": nbytes,
            }
        )

    def kill(self):
        self.is_alive = False

    def client(self):
        if not self.is_alive:
            raise KeeperError("no keeper answers")
        client = FakeKeeperClient(self)
        self.clients.append(client)
        return client

    def started(self, adopted=False):
        return StartedKeeper(
            client=self.client(), socket="/run/keeper.sock", pid=7, adopted=adopted
        )


class FakeKeeperClient:
    """A `KeeperClient` of a `FakeKeeper`."""

    def __init__(self, keeper):
        self._keeper = keeper
        self.is_closed = False

    def begin_generation(self, generation, n_nodes, excluded_step):
        self._check()
        self._keeper.begun.append((generation, n_nodes, excluded_step))

    def take_over(self, epoch):
        self._check().taken_over.append(epoch)

    def status(self):
        keeper = self._check()
        assert keeper.answers.wait(30)
        return KeeperStatus(
            progress=KeeperProgress(
                newest=keeper.committed[-1] if keeper.committed else None,
                persisted=keeper.persisted,
            ),
            epoch=keeper.epoch,
            n_committed=len(keeper.committed),
            skipped=keeper.skipped,
        )

    def events(self):
        keeper = self._check()
        told, keeper.told = keeper.told, []
        return told

    def flush(self, deadline_s, on_wait=lambda _at_most_s: None):
        keeper = self._check()
        if keeper.others_s:
            on_wait(keeper.others_s)
        keeper.flushing.set()
        assert keeper.flush_may_go_on.wait(30)
        if not keeper.committed:
            return FlushResult(None, why="there is no committed state")
        if keeper.directory is None:
            return FlushResult(None, why=NO_DIRECTORY)
        if keeper.flush_s > deadline_s:
            return FlushResult(None, why="it takes longer", directory=keeper.directory)
        keeper.persisted = keeper.committed[-1]
        return FlushResult(keeper.persisted, directory=keeper.directory)

    def shut_down(self):
        self._check().has_ended = True
        self._keeper.is_alive = False

    def close(self):
        self.is_closed = True

    def _check(self):
        if self.is_closed or not self._keeper.is_alive:
            raise KeeperError("the keeper does not answer")
        return self._keeper


class Heard:
    """A `CheckpointRecord` that only remembers."""

    def __init__(self):
        self.adopted = []
        self.lost = []
        self.ended = []  # how one that hung was found
        self.events = []
        self.states = []
        self.failures = []
        self.flushes = []
        self.waits = []
        self.overs = 0

    def keeper_started(self, started, newest, *, lost=None):
        self.adopted.append((started.adopted, newest))
        self.lost.append(lost)
        self.ended += [started.ended] if started.ended else []

    def record_events(self, events):
        self.events += events

    def newest(self, state, *, is_new):
        self.states.append((state.step, is_new))

    def failed(self, what, error):
        self.failures.append((what, str(error)))

    def flushed(self, done):
        self.flushes.append(done)

    def waiting(self, at_most_s):
        self.waits.append(at_most_s)

    def end_generation(self):
        self.overs += 1
