"""Nodes that save states and agree on them, without processes or bytes: on a fake clock.

Each has a real gate of slots, `CommitFollower`, `Leader` and `CommitLeader`. Played are the ranks,
which make the same steps on all nodes, and the transfers.
"""

import random

from gpuops.agent.checkpoint.follower import CommitFollower, KeeperLocation
from gpuops.agent.checkpoint.leader import CommitLeader, commit_record_of
from gpuops.agent.checkpoint.messages import FIELD, StoredStates
from gpuops.checkpoint.agreement.progress import KeeperProgress
from gpuops.checkpoint.agreement.replica_check import GroupDigest
from gpuops.checkpoint.keeper.messages import KeeperStatus
from gpuops.checkpoint.keeper.replica_digests import rank_digest_of
from gpuops.checkpoint.memory.buffer_table import BufferTable, SkipReason, SlotLease
from gpuops.checkpoint.types import Digest, KeeperError, Shard, ShardCopy, StateId, Tier
from gpuops.control.record import RunPhase
from support.agreement import Player, World

NS_PER_S = 1e9


def digest_of(state, rank):
    """Return the digest of what *rank* has of *state*: always the same."""
    return Digest(100, b"", f"{state.epoch:016x}{state.step:016x}{rank:032x}")


class Keeper:
    """One node's keeper with one rank; a `KeeperClient` to itself."""

    def __init__(self, world, node):
        self.world, self.node = world, node
        self.buffer_table = BufferTable()
        self.is_alive = True
        self.checkpoint_step = {}  # which shard a whole state is of
        self.replicas = {}  # by state and shard
        self.holders, self.keep = [], []
        self.acks = {}
        self.due = []  # what happens when
        self.chosen = None
        self.shard = None
        self.ranks = 0
        self.arenas = 0
        self.persist_due = False
        self.writing = []
        self.parts = []
        self.told = []  # of ranks that differ
        self.flipped_from = None  # the step from which one of its tensors is not as elsewhere
        self.mended_from = None  # and from which it is again
        self.is_copying = False
        self.copy_s = 0.0  # for which a copy is under way to a holder, and a little more
        self.failures = 0  # of what was to be written
        self.failed = None  # the state that it was of, where that is told
        self.ends_s = None  # when its rank comes to the end of its script
        self.is_behind_to = -1  # states up to this step were held by one that died

    # What its agent asks.

    def serve_peers(self, address, *, node, token, job, port=0):
        self._check()
        return port or 7000

    def inventory(self):
        self._check()
        own = [
            (state, self.checkpoint_step[state]) for state in self.buffer_table.complete_states()
        ]
        return [
            ShardCopy(state, shard, "layout", digest_of(state, shard.rank), Tier.MEMORY, self.node)
            for state, shard in sorted([*own, *self.replicas], reverse=True)
        ]

    def begin(self, shard):
        self._check()
        self.buffer_table.begin_epoch(1, is_alone=False)
        self.chosen, self.shard, self.ranks = None, shard, 0
        self.due, self.holders, self.acks = [], [], {}

    def replicate(self, holders, keep=(), *, nodes=(), ranks=()):
        self._check()
        self.nodes = list(nodes)
        self.holders, self.keep = [peer.name for peer in holders], list(keep)

    def restore_from(self, state, epoch, sources, why, *, roots, loading_world):
        self._check()
        self.chosen = (state, epoch, sources)
        if state is not None:
            self.world.restored(self, state, sources, roots)
        self.buffer_table.resume(state, epoch)
        self.arenas += 1
        self.buffer_table.register(0, self.arenas, range(2))

    def take_over(self, epoch):
        self._check()
        self.chosen = (self.world.restores[max(self.world.restores)][0], epoch, {})
        self.buffer_table.resume(None, epoch)
        self.arenas += 1
        self.buffer_table.register(0, self.arenas, range(2))

    def progress(self):
        self._check()
        whole = sorted(self.buffer_table.complete_states(), reverse=True)
        return KeeperProgress(
            whole=tuple(whole[:4]),
            replicated=tuple(state for state in whole[:4] if self._is_replicated(state)),
            refused=tuple(reversed(self.buffer_table.rejected))[:8],
            parts=tuple(self.parts[-2:]),
            newest=self.buffer_table.last_committed,
            persisted=self.world.persisted.get(self.node),
            in_flight=self.buffer_table.in_flight,
            decided=self.buffer_table.decided,
            final_state=self.buffer_table.final,
            is_due=self.persist_due,
            group_digests=self._ballots(),
        )

    def _ballots(self):
        """Return what the rank has of the newest state, of which all others have the same."""
        state = self.buffer_table.last_committed
        if state is None or self.shard is None or self.chosen is None:
            return ()
        digests = [b"%08d%08d" % (number, state.step) for number in range(20)]
        if self._is_flipped(state.step):
            digests[7] = b"flipped and more"
        mine = {self.shard.rank: rank_digest_of(digests)}
        key = f"of {self.shard.world}"
        return (
            GroupDigest(
                state=state, key=key, n_ranks=self.shard.world, n_tensors=20, rank_digests=mine
            ),
        )

    def _is_flipped(self, step):
        is_mended = self.mended_from is not None and step >= self.mended_from
        return self.flipped_from is not None and step >= self.flipped_from and not is_mended

    def report_difference(self, told):
        self._check()
        self.told.append(told)

    def set_next_step(self, step):
        self._check()
        self.buffer_table.not_before = step

    def commit(self, state):
        self._check()
        if self.buffer_table.commit(state):
            self.replicas = {key for key in self.replicas if key[0] >= state}

    def try_persist(self, state, _once=None):
        self.commit(state)
        if state not in self.buffer_table.complete_states() or self.world.rng.random() < 0.1:
            return False
        self.later(lambda: self.parts.append(state))
        self.persist_due = False
        return True

    def give_up(self, state):
        self._check()
        self.buffer_table.give_up(state)

    def try_commit_persisted(self, state, world):
        self._check()
        for player in self.world.seated():
            assert state in player.keeper.parts
        self.world.persisted[self.node] = state
        return True

    # What happens in it.

    def later(self, act, least_s=0.0):
        at_s = self.world.now_s() + least_s + self.world.rng.uniform(*self.world.transit_s)
        self.due.append((at_s, act))

    def act(self):
        """Do what takes time and is over by now."""
        now_s = self.world.now_s()
        ready = [act for at_s, act in self.due if at_s <= now_s]
        self.due = [(at_s, act) for at_s, act in self.due if at_s > now_s]
        for act in ready:
            act()

    def step(self, step):
        """Have the rank ask for *step*."""
        answer = self.buffer_table.acquire(0, step, self.world.now_s())
        if isinstance(answer, SlotLease):
            self._copy(answer)

    def ask_last(self, step):
        """Have the rank ask for *step* as its last one; it ends where that is saved."""
        if self.is_copying:
            return
        answer = self.buffer_table.acquire(0, step, self.world.now_s(), is_last=True)
        if isinstance(answer, SlotLease):
            self._copy(answer)
        elif answer.reason is SkipReason.NOT_DUE:
            self.leave()

    def _copy(self, granted):
        self.is_copying = True
        self.later(lambda: self._seal(granted))

    def leave(self):
        """Have the rank end."""
        self.buffer_table.remove_rank(0)
        self.ranks, self.is_copying = 0, False

    def status(self):
        return KeeperStatus(
            progress=self.progress(),
            n_ranks=self.ranks,
            n_persist_failed=self.failures,
            persist_failed=self.failed,
            persist_trouble="no space",
        )

    def _seal(self, granted):
        if not self.is_copying:
            return  # its rank has gone
        state, self.is_copying = granted.state, False
        if self.buffer_table.mark_written(0, state) is None:
            return
        if self.world.rng.random() < self.world.p_corrupt:
            self.buffer_table.give_up(state)
            return
        if self.buffer_table.mark_verified(granted.slot, state):
            self.checkpoint_step[state] = self.shard
            for name in self.holders:
                self.later(lambda name=name: self._push(state, name), self.copy_s)

    def _push(self, state, name):
        holder = self.world.keeper_of(name)
        if state not in self.buffer_table.complete_states():
            return
        if holder is None or not holder.is_alive:
            self.later(lambda: self.acks.setdefault(state, set()).add(name))  # it counts as gone
            return
        if self.shard in holder.keep:
            holder.replicas = {*holder.replicas, (state, self.shard)}
            self.acks.setdefault(state, set()).add(name)

    def _is_replicated(self, state):
        return set(self.holders) <= self.acks.get(state, set())

    def _check(self):
        if not self.is_alive:
            raise KeeperError("gone")


class Saver(Player):
    """An agent whose script saves."""

    def __init__(self, world, number, order=None):
        super().__init__(world, number, order)
        self.keeper = Keeper(world, self.node)
        place = KeeperLocation(
            me=self.me,
            token="t" * 16,
            job="run",
            directory=None,
            domain=world.domains.get(self.node, ()),
        )
        keys = self.link.keys
        self.agreement = CommitFollower(
            self.store,
            keys,
            place,
            lambda _directory: StoredStates(),
            world.said.append,
            is_led=lambda: self.link.record.phase in {RunPhase.RUN, RunPhase.DRAIN},
        )
        self.looked_s = world.rng.uniform(-1, 0)

    def heartbeat_payload(self):
        said = self.agreement.node_status()
        return {} if said is None else {FIELD: said}

    def join_payload(self):
        return {FIELD: self.agreement.inventory(self.keeper)} if self.world.keeps(self) else {}

    def before_save(self, roster):
        if self.world.keeps(self):
            rank = roster.group_rank(self.me.agent)
            self.keeper.begin(Shard(rank, len(roster.members)))
            self.world.kept[self.node] = self.agreement.begin(self.keeper, roster)
            self.keeper.ranks = int(self.world.saves)

    def act(self):
        super().act()
        if self.is_dead or self.is_frozen or self.exit_code is not None:
            return
        now_s = self.world.now_s()
        if self.running is not None and now_s - self.looked_s >= 1.0:
            self.looked_s = now_s
            self.agreement.fetch()
            self.agreement.update(self.keeper, self.keeper.status())


class SavingWorld(World):
    """Everybody, the steps that all make together, and what must hold at any time."""

    transit_s = (0.05, 1.5)  # what verifying a state takes, and copying it

    def __init__(
        self,
        terms,
        n_players,
        seed=0,
        replicas=2,
        step_s=0.1,
        *,
        p_corrupt=0.0,
        domains=None,
        **more,
    ):
        self.rng = random.Random(seed)
        self.replicas, self.step_s, self.p_corrupt = replicas, step_s, p_corrupt
        self.persisted, self.kept, self.said, self.gave_up = {}, {}, [], []
        self.domains = domains or {}
        self.is_kept = lambda _player: True
        self.saves = True
        self.committed = []
        self.marks = []
        self.restores = {}
        self.step, self.of = 0, None
        super().__init__(terms, n_players, n_workers=1, **more)
        self.after_each.append(SavingWorld.train)
        self.after_each.append(SavingWorld.check)

    def extension(self, player):
        """Return the leader of the agreement on states."""
        return CommitLeader(
            player.store,
            player.link.keys,
            player.me,
            self.clock,
            self.replicas,
            gave_up=lambda state, why: self.gave_up.append((state, why)),
        )

    def player(self, number, order=None):
        return Saver(self, number, order)

    def keeps(self, player):
        return self.is_kept(player)

    def now_s(self):
        return self.clock.mono_ns() / NS_PER_S

    def keeper_of(self, name):
        living = [p.keeper for p in self.players if p.node == name and not p.is_dead]
        return living[-1] if living else None

    def lose(self, player):
        """Lose a whole node, with all that its memory holds."""
        player.is_dead = True
        player.keeper.is_alive = False

    def replace_keeper(self, player):
        """End a node's keeper under its workers, and start another one in its place."""
        before, roster = player.keeper, player.leader.roster
        before.is_alive = False
        player.agreement.detach()
        player.keeper = keeper = Keeper(self, player.node)
        keeper.begin(before.shard)
        keeper.is_behind_to = self.step
        assert player.agreement.begin_replaced(keeper, roster, before.chosen[1])
        keeper.ranks = before.ranks

    def told(self):
        """Return what was told of ranks that differ, with the node that was to tell it."""
        return [(p.node, told) for p in self.players for told in p.keeper.told]

    def seated(self):
        """Return those that train."""
        return [p for p in self.players if p.running is not None and not p.is_dead]

    def train(self):
        """Let all ranks make the steps of a turn, each node at a moment of its own."""
        for player in self.players:
            if not player.is_dead and not player.is_frozen:
                player.keeper.act()
        seated = self.seated()
        generations = {player.running for player in seated}
        if len(generations) != 1 or not all(p.keeper.chosen for p in seated):
            return
        if any(p.is_frozen for p in self.players) or len(seated) < self.n_seats(seated[0]):
            return
        if self.of != generations:
            state = seated[0].keeper.chosen[0]
            self.of, self.step = generations, 0 if state is None else state.step
        if seated[0].keeper.ends_s is not None:
            self._end(seated)
            return
        for _ in range(max(1, round(self.turn_s / self.step_s))):
            self.step += 1
            for player in self.rng.sample(seated, len(seated)):
                player.keeper.step(self.step)

    def end_training(self, most_s):
        """Let no step follow; each rank comes to its end at a time of its own, within *most_s*."""
        for player in self.seated():
            player.keeper.ends_s = self.now_s() + self.rng.uniform(0, most_s)

    def _end(self, seated):
        for player in seated:
            keeper = player.keeper
            if keeper.ranks and self.now_s() >= keeper.ends_s:
                keeper.ask_last(self.step)
            player.agreement.is_over = not keeper.ranks  # as its agent sees it

    def n_seats(self, player):
        roster = player.leader.roster
        return len(roster.members) if roster is not None else 0

    def restored(self, keeper, state, sources, roots):
        """Check that a node can have what it is to go on from, where it is to get it."""
        here = {copy.shard for copy in keeper.inventory() if copy.state == state}
        held = [(o, {c.shard for c in o.inventory() if c.state == state}) for o in self.living()]
        (world,) = {shard.world for _o, shards in held for shard in shards}
        is_same = world == keeper.shard.world
        for shard in [keeper.shard] if is_same else [Shard(rank, world) for rank in range(world)]:
            peers = {peer.name for peer in sources.get(shard, ())}
            has = [o for o, shards in held if o.node in peers and shard in shards]
            assert shard in here or has, (keeper.node, state, shard, peers)
            assert shard not in roots or roots[shard] == digest_of(state, shard.rank).root

    def living(self):
        """Return the keepers of the nodes that live."""
        return [player.keeper for player in self.players if not player.is_dead]

    def mark(self):
        """Return the watermark that is on the board."""
        keys = self.players[0].link.keys
        return commit_record_of(self.store.get(keys.commit_record()))[1]

    def check(self):
        """Fail where something was agreed on that must not be."""
        mark, before = self.mark(), self.marks[-1] if self.marks else None
        if before is None or mark != before:
            self.marks.append(mark)
        if mark.committed is not None and (before is None or mark.committed != before.committed):
            assert before is None or before.committed is None or mark.committed > before.committed
            self.committed.append(mark.committed)
            for player in self.seated():
                keeper = player.keeper
                is_had = mark.committed.step > keeper.is_behind_to
                if keeper.chosen and keeper.chosen[1] == mark.committed.epoch and is_had:
                    assert mark.committed in keeper.buffer_table.complete_states(), (
                        player.node,
                        mark,
                    )
        assert mark.committed not in mark.dropped
        chosen = {}
        for player in self.seated():
            if player.keeper.chosen is not None:
                chosen.setdefault(player.running, set()).add(player.keeper.chosen[:2])
        for generation, found in chosen.items():
            assert len(found) == 1, (generation, found)
            self.restores[generation] = next(iter(found))


def newest(states):
    """Return the newest of *states*, None where there is none."""
    return max(states, default=None)


NOTHING = StateId(0, 0)
