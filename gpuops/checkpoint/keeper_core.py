"""What the keeper knows and decides, without sockets; one thread calls it, jobs work for long."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.crew import Crew, Guest, Post, pin_of
from gpuops.checkpoint.finder import Command, Finder
from gpuops.checkpoint.keeper import Policy, Skipped
from gpuops.checkpoint.keeper_events import Events
from gpuops.checkpoint.keeper_jobs import Jobs
from gpuops.checkpoint.keeper_peers import Peers
from gpuops.checkpoint.keeper_progress import REFUSED_MAX, WHOLE_MAX, Progress
from gpuops.checkpoint.messages import state_to_json
from gpuops.checkpoint.node_memory import Arena, NodeMemory, SealedSlot
from gpuops.checkpoint.offering import Source
from gpuops.checkpoint.peer_shards import Holders
from gpuops.checkpoint.persist import Origin
from gpuops.checkpoint.persister import Persister
from gpuops.checkpoint.persisting import OpenStore
from gpuops.checkpoint.slots import Granted, Reason
from gpuops.checkpoint.states import CheckpointError, Digest, KeeperError, Shard, StateId
from gpuops.checkpoint.stores import open_store as open_any_store
from gpuops.checkpoint.voting import Voting


class Core:
    """The keeper of one node."""

    def __init__(
        self,
        memory: NodeMemory,
        jobs: Jobs,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
        open_store: OpenStore = open_any_store,
    ) -> None:
        self.memory = memory
        self.jobs = jobs
        self.clock_s = clock_s
        self.wall_s = wall_s
        self.events = Events()
        self.agent: Guest | None = None
        self.crew: Crew | None = None
        self.command: Command | None = None
        self.is_ending = False
        self.hash_s: float | None = None
        self.n_hashing = 0
        self.persister = Persister(
            memory, jobs, self.events, clock_s, open_store, lambda: self.is_ending
        )
        self.peers = Peers(memory, jobs, self.events, clock_s, self._shards)
        self.voting = Voting(memory, jobs, self.events, clock_s)
        self._finder = Finder(memory, jobs, self.events, open_store, self._goes_on, self.peers)
        self._granted_s: dict[StateId, float] = {}
        self._sealed_s = 0.0
        self._populating: set[int] = set()

    # Who is there.

    @property
    def is_in_use(self) -> bool:
        """Say whether an agent or a rank is connected; from any thread."""
        crew = self.crew
        return self.agent is not None or (crew is not None and bool(crew.members))

    def begin_generation(
        self, generation: int, n_nodes: int, excluded_step: int | None, job: str
    ) -> None:
        """Let nobody of an older generation do anything from now on.

        Another *job* counts its generations anew: the agent of the one before was killed, and who
        took its place on this node began another run of the same program.

        Raises:
            KeeperError: A newer one of this job was begun.
        """
        is_same = job in ("", self.persister.origin.job)
        if is_same and self.command is not None and generation < self.command.generation:
            raise KeeperError(
                f"generation {generation} is over: {self.command.generation} was begun"
            )
        if self.command is not None:
            self.command.close()
        self.command = Command(generation, n_nodes, excluded_step)
        self.peers.begin_generation()
        self.persister.origin = Origin(job or self.persister.origin.job, generation)
        self._disband()
        self.memory.gate.begin_epoch(0, is_alone=n_nodes == 1)

    def join(self, guest: Guest, post: Post, *, is_patient: bool, is_back: bool = False) -> bool:
        """Take a rank in; return False where it has to wait until older workers are gone.

        Not *is_patient*: it has waited long enough; they are cut off. *is_back*: it goes on after
        its line broke, and is no new worker.

        Raises:
            KeeperError: It is of an older start, or cannot be of this node.
        """
        self._check_generation(post)
        crew = self.crew
        if crew is None or not crew.takes(post, guest, is_back=is_back):
            if crew is not None and post.generation < crew.generation:
                raise KeeperError(
                    f"generation {post.generation} is over: {crew.generation} has begun"
                )
            if crew is not None and crew.members and is_patient:
                return False
            self._disband()
            crew = self.crew = Crew(post.generation, post.shard.world, post.n_ranks)
            self.memory.gate.begin_epoch(post.n_ranks, is_alone=self._is_alone(post))
            self.persister.origin = Origin(self.persister.origin.job, post.generation)
            self.voting.begin(self.persister.origin, has_agent=self.command is not None)
        crew.join(post, guest)
        return True

    def lost(self, guest: Guest) -> None:
        """Take note that a connection ended."""
        if self.agent is guest:
            self.agent = None
        crew = self.crew
        for local_rank, member in list(crew.members.items()) if crew else []:
            if member is guest:
                assert crew is not None
                given_up = self.memory.gate.given_up
                self.memory.gate.lost(local_rank)
                self.memory.gate.unpin(pin_of(local_rank))
                crew.leave(local_rank)
                if self.memory.gate.given_up > given_up:
                    self.events.add("given_up", why=f"local rank {local_rank} is gone")

    def _check_generation(self, post: Post) -> None:
        command = self.command
        if command is None:
            return
        if post.generation != command.generation:
            what = "is over" if post.generation < command.generation else "was not begun"
            raise KeeperError(
                f"generation {post.generation} {what}: the agent runs {command.generation}"
            )
        if command.n_nodes == 1 and post.shard.world != post.n_ranks:
            raise KeeperError(
                f"{post.n_ranks} of {post.shard.world} ranks are on this node, but the agent says "
                "that there is no other"
            )

    def _shards(self) -> set[Shard]:
        return {post.shard for post in self.crew.posts.values()} if self.crew else set()

    def _is_alone(self, post: Post) -> bool:
        if self.command is not None:
            return self.command.n_nodes == 1
        return post.shard.world == post.n_ranks

    def _disband(self) -> None:
        crew, self.crew = self.crew, None
        if crew is None:
            return
        for local_rank in crew.posts:
            self.memory.gate.unpin(pin_of(local_rank))
        for member in list(crew.members.values()):
            member.close()
        crew.is_over = True
        crew.free()

    # Saving.

    def set_policy(self, policy: Policy) -> None:
        """Take the policy over."""
        self.persister.set_policy(policy)
        self.memory.gate.every_s = policy.every_s

    def reserve(self, post: Post, layout: str, nbytes: int, n_slots: int) -> Arena:
        """Return the rank's slots, and begin to take their memory."""
        wanted = (post.local_rank, post.shard, layout, nbytes, n_slots)
        try:
            try:
                arena = self.memory.reserve(*wanted)
            except CheckpointError:
                # What was fetched to go on from is one copy more; the next states come first.
                if not self.peers.give_back():
                    raise
                arena = self.memory.reserve(*wanted)
        except CheckpointError as exc:
            self.events.add("refused", rank=post.shard.rank, why=str(exc))
            raise
        for slot in self.memory.unpopulated():
            if id(slot) not in self._populating:
                self._populate(slot)
        return arena

    def _populate(self, slot: SlotMemory) -> None:
        self._populating.add(id(slot))

        def then(is_done: bool | None, error: BaseException | None) -> None:
            self._populating.discard(id(slot))
            if error is not None:
                self.events.add("not_populated", why=str(error))
            elif is_done:
                self.memory.populated(slot)

        self.jobs.populate(lambda: slot.populate(lambda: self.is_ending), then)

    def begin(self, post: Post, step: int, *, is_last: bool = False) -> Granted | Skipped:
        """Say whether the rank is to copy."""
        assert self.crew is not None
        gate = self.memory.gate
        self.done_reading(post)
        if gate.epoch is None:
            self.want(self.crew)
        if is_last and self.n_hashing and gate.in_flight is None:
            # Its digest must not be taken for that of the same step, saved anew.
            return Skipped("what was given up is still being verified")
        skipped, now_s = sum(gate.skipped.values()), self.clock_s()
        gate_s = now_s if gate.is_alone else self.wall_s()
        answer = gate.begin(post.local_rank, step, gate_s, is_last=is_last)
        if isinstance(answer, Granted):
            self._granted_s.setdefault(answer.state, now_s)
            return answer
        if sum(gate.skipped.values()) > skipped and answer.reason is not Reason.NOT_DUE:
            self.events.add("skipped", step=step, reason=answer.reason.value, why=answer.why)
        return Skipped(answer.why, answer.reason is not Reason.NOT_DUE)

    def seal(self, post: Post, state: StateId) -> None:
        """Have the image hashed."""
        sealed = self.memory.seal(post.local_rank, state)
        if sealed is None:
            return
        self._sealed_s = self.clock_s()
        self.n_hashing += 1

        def then(digest: Digest | None, error: BaseException | None) -> None:
            self.n_hashing -= 1
            if digest is None:
                self.memory.gate.give_up(state)
                self.events.add(
                    "corrupt", state=state_to_json(state), rank=post.shard.rank, why=str(error)
                )
            else:
                self._hashed(sealed, digest)

        self.jobs.hash(sealed.hash, then)

    def abandon(self, post: Post, state: StateId) -> None:
        """Give the state up."""
        self.memory.gate.abandon(post.local_rank, state)
        self.events.add(
            "given_up", state=state_to_json(state), why=f"rank {post.shard.rank} could not"
        )

    def _hashed(self, sealed: SealedSlot, digest: Digest) -> None:
        if not self.memory.hashed(sealed, digest):
            return
        self.hash_s = self.clock_s() - self._sealed_s
        if self.memory.gate.newest == sealed.state:
            self._committed(sealed.state)
        else:
            self.events.add(
                "whole", state=state_to_json(sealed.state), bytes=self._nbytes(sealed.state)
            )
            self.peers.tick()

    def _committed(self, state: StateId) -> None:
        """Act on a commit: tell it, free what it makes superfluous, persist it when it is time."""
        now_s = self.clock_s()
        seconds = now_s - self._granted_s.get(state, now_s)
        self._granted_s = {s: at for s, at in self._granted_s.items() if s > state}
        nbytes = self._nbytes(state)
        self.events.add("committed", state=state_to_json(state), seconds=seconds, bytes=nbytes)
        self.peers.committed(state)
        self.memory.release()
        self.persister.persist_if_due()
        self.voting.committed(state)

    def notice_for(self, post: Post) -> str | None:
        """Return what the first rank here is to tell whoever trains; an agent would tell itself."""
        is_teller = self.agent is None and post.local_rank == 0
        if not is_teller:
            return None
        return self.voting.take_notice() or self.persister.take_notice()

    def _nbytes(self, state: StateId) -> int:
        return sum(held.copy.digest.nbytes for held in self.memory.held(state).values())

    # Going on from a state.

    def want(self, crew: Crew) -> None:
        """See to it that the state to go on from is found out."""
        crew.is_wanted = True
        self.tick()

    def choose(
        self,
        state: StateId | None,
        epoch: int,
        holders: Mapping[Shard, Holders] | None = None,
        why: tuple[str, ...] = (),
    ) -> None:
        """Go on from *state* (None: anew), as all nodes do; new states are of *epoch*.

        *holders*: what other nodes hold of it; what is not here is fetched from now on. *why*: what
        spoke against newer states.

        Raises:
            KeeperError: No generation was begun, its ranks were told something else already, or
                there are holders and this keeper is not among peers.
        """
        command = self.command
        if command is None:
            raise KeeperError("no generation was begun")
        crew = self.crew
        if crew is not None and (crew.is_looking or crew.found is not None):
            if (command.state, command.epoch) == (state, epoch):
                return
            raise KeeperError("the ranks of this generation were told already where to go on")
        self.peers.chosen(state, epoch)
        peers = None
        if state is not None and holders:
            peers = self.peers.shards_of(state, holders, self._finder.made)
        command.close()
        if crew is not None:
            crew.trouble = ""
        command.state, command.epoch, command.is_chosen = state, epoch, True
        command.why, command.peers = why, peers
        self.tick()

    def take_over(self, epoch: int) -> None:
        """Let ranks that run already save states of *epoch*: the keeper before this one is gone.

        Raises:
            KeeperError: No generation was begun, or its ranks were told something already.
        """
        command, crew = self.command, self.crew
        if command is None:
            raise KeeperError("no generation was begun")
        if crew is not None and (crew.is_looking or crew.found is not None):
            raise KeeperError("the ranks of this generation were told already where to go on")
        self.peers.chosen(None, epoch)
        command.close()
        command.state, command.epoch = None, epoch
        command.is_chosen = command.is_taken_over = True
        self.tick()

    def commit(self, state: StateId, *, is_to_persist: bool) -> bool:
        """Commit a state that all nodes have; return whether memory holds it and it was newer.

        Raises:
            KeeperError: It is to be persisted, and cannot be just now.
        """
        is_new = self.memory.gate.commit_from_outside(state)
        if is_new:
            self._committed(state)
        if is_to_persist:
            self.persister.persist(state)
        return is_new

    def aim(self, step: int) -> None:
        """Grant nothing before *step*."""
        self.memory.gate.not_before = step

    def give_up(self, state: StateId) -> None:
        """Give *state* up: it will not be whole on all nodes."""
        self.memory.gate.give_up(state)
        self.peers.tick()

    def progress(self) -> Progress:
        """Return what whoever decides for all nodes has to know of this one."""
        gate, persister = self.memory.gate, self.persister
        whole = tuple(self.memory.states()[:WHOLE_MAX])
        refused = sorted(set(gate.refused) - set(whole), reverse=True)
        return Progress(
            whole=whole,
            replicated=tuple(s for s in whole if self.peers.replication.is_replicated(s)),
            refused=tuple(refused[:REFUSED_MAX]),
            newest=gate.newest,
            persisted=persister.last,
            parts=tuple(persister.parts),
            in_flight=gate.in_flight,
            decided=gate.decided,
            last=gate.last,
            is_due=persister.is_due,
            ballots=self.voting.ballots,
        )

    def _goes_on(self, state: StateId | None) -> None:
        self.persister.went_back(state)
        self._granted_s.clear()
        self.peers.tick()

    def source(self, state: StateId, shard: Shard) -> Source:
        """Return where a shard of the offered state is read.

        Raises:
            KeeperError: It is not on offer.
        """
        found = self.crew.found if self.crew else None
        chosen = found.chosen if found else None
        if chosen is None or chosen.state != state or shard not in chosen.sources:
            raise KeeperError(f"the shard of rank {shard.rank} of {state} is not on offer")
        return chosen.sources[shard]

    def done_reading(self, post: Post) -> None:
        """Let the rank's hold on the offered state go."""
        self.memory.gate.unpin(pin_of(post.local_rank))
        if self.crew is not None and self.crew.found is not None:
            self.crew.is_done_with(post.local_rank)

    def restored(
        self, post: Post, state: StateId, *, tier: str, seconds: float, nbytes: int
    ) -> None:
        """Take note of what a rank has loaded."""
        self.done_reading(post)
        self.events.add(
            "restored",
            state=state_to_json(state),
            tier=tier,
            rank=post.shard.rank,
            world=post.shard.world,
            seconds=seconds,
            bytes=nbytes,
        )

    def counts(self) -> dict[str, Any]:
        """Return what there is to know in a glance, by name."""
        return {
            **self.memory.counts(),
            **self.peers.counts(),
            **self.voting.counts(),
            **self.persister.counts(),
            "hash_s": self.hash_s,
            "ranks": len(self.crew.members) if self.crew else 0,
            "generation": self.crew.generation if self.crew else None,
            "agent": self.agent.pid if self.agent else None,
        }

    def tick(self) -> None:
        """Do what became possible, or due, meanwhile."""
        if self.crew is not None:
            policy = self.persister.policy
            self._finder.look(self.crew, self.command, policy.directory if policy else None)
        self.persister.persist_if_due()
        self.peers.tick()
