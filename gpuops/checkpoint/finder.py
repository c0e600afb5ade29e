"""Finds out, once for each start of the workers, which state all of them go on from."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.crew import Crew, Found, pin_of
from gpuops.checkpoint.keeper_events import Events
from gpuops.checkpoint.keeper_jobs import Jobs
from gpuops.checkpoint.keeper_peers import Lent, Peers
from gpuops.checkpoint.messages import state_to_json
from gpuops.checkpoint.node_memory import NodeMemory
from gpuops.checkpoint.offering import WHY_MAX, CannotTellError, Choice, Wanted, choose
from gpuops.checkpoint.peer_shards import PeerShards
from gpuops.checkpoint.persisting import OpenStore
from gpuops.checkpoint.states import EPOCH_MAX, CheckpointError, KeeperError, Offer, StateId


@dataclass(slots=True)
class Command:
    """What the agent has said of the present generation.

    ``state`` and ``epoch``: what all nodes go on from, once ``is_chosen``; ``why`` has what spoke
    against newer ones, ``peers`` what other nodes hold of it. ``is_taken_over``: the ranks run
    already, and save states of ``epoch``.
    """

    generation: int
    n_nodes: int = 1
    excluded_step: int | None = None
    state: StateId | None = None
    epoch: int = 0
    is_chosen: bool = False
    is_taken_over: bool = False
    why: tuple[str, ...] = ()
    peers: PeerShards | None = None

    def close(self) -> None:
        """End what is being fetched, and give back what was."""
        if self.peers is not None:
            self.peers.close()


@dataclass(slots=True)
class Finder:
    """Looks for the state in *memory* and in a directory; *found* is called with the outcome."""

    memory: NodeMemory
    jobs: Jobs
    events: Events
    open_store: OpenStore
    found: Callable[[StateId | None], None]
    peers: Peers
    epoch_max: int = -1
    _n_looks: int = 0

    def look(self, crew: Crew, command: Command | None, directory: str | None) -> None:
        """Begin to look where somebody waits for it, and it can be told by now."""
        gate = self.memory.gate
        if not crew.is_wanted or crew.is_looking or crew.trouble or crew.found is not None:
            return
        if command is not None and command.is_taken_over:
            self._take_over(crew, command.epoch)
            return
        if gate.is_settling or not _can_tell(crew, command):
            return
        wanted = _wanted(crew, command)
        crew.is_looking = True
        self._n_looks += 1
        pin = f"look-{self._n_looks}"
        states = self.memory.states()
        held = {state: self.memory.held(state) for state in states}
        for state in states:
            gate.pin(state, pin)
        lent, peers = self._of_others(command)
        for state, replicas in lent.held.items():
            own = held.get(state, {})
            # A state of another world that has the same name is not to be mixed with ours.
            worlds = {shard.world for shard in own}
            fitting = {s: one for s, one in replicas.items() if not worlds or s.world in worlds}
            held[state] = {**fitting, **own}

        def work() -> Choice:
            store = self.open_store(directory) if directory else None
            return choose(held, store, wanted, run=self.jobs.map, make=self.made, peers=peers)

        def then(choice: Choice | None, error: BaseException | None) -> None:
            gate.unpin(pin)
            crew.is_looking = False
            if choice is not None and choice.chosen is not None:
                chosen = choice.chosen
                choice.chosen = replace(chosen, fetched=(*chosen.fetched, lent))
            else:
                lent.close()
            if crew.is_over:
                _free(choice)
            else:
                self._looked(crew, command, choice, error)

        self.jobs.look(work, then)

    def _take_over(self, crew: Crew, epoch: int) -> None:
        """Let the ranks save: they were told where to go on by a keeper that is gone."""
        gate = self.memory.gate
        if gate.is_alone:
            # They may have found this one before their agent had, and have saved in a newer epoch.
            epoch = max(epoch, self.epoch_max)
        self.epoch_max = max(self.epoch_max, epoch)
        gate.resume(gate.newest, epoch)
        crew.found = Found(None, None)
        self.events.add("took_over", epoch=epoch)
        self.found(gate.newest)

    def _of_others(self, command: Command | None) -> tuple[Lent, PeerShards | None]:
        """Return the replicas that are here, and what other nodes have of the chosen state."""
        if command is None or not command.is_chosen:
            return self.peers.lend(None), None
        if command.state is None:
            return Lent(), None
        if command.peers is not None and command.peers.is_closed:
            command.peers = command.peers.again()  # other ranks have begun since
        return self.peers.lend(command.state), command.peers

    def made(self, nbytes: int) -> SlotMemory:
        """Return memory for what is fetched; raises CheckpointError where there is no room."""
        self.memory.check_fits(nbytes)
        return SlotMemory.create("gpuops-fetched", nbytes)

    def _looked(
        self,
        crew: Crew,
        command: Command | None,
        choice: Choice | None,
        error: BaseException | None,
    ) -> None:
        if choice is None:
            # Where all nodes have chosen a state, none of them may start anew without it.
            is_chosen = command is not None and command.is_chosen
            crew.cannot_tell = isinstance(error, CannotTellError) and not is_chosen
            is_ours = isinstance(error, CheckpointError)
            crew.trouble = str(error) if is_ours else f"looking for a state failed: {error!r}"
        else:
            self._tell_problems(choice)
            try:
                self._go_on(crew, command, choice)
            except CheckpointError as exc:
                crew.trouble = str(exc)
                _free(choice)
        if crew.trouble:
            self.events.add("cannot_offer", why=crew.trouble)

    def _go_on(self, crew: Crew, command: Command | None, choice: Choice) -> None:
        gate, chosen = self.memory.gate, choice.chosen
        newest = -1 if gate.newest is None else gate.newest.epoch
        epoch = 1 + max(self.epoch_max, choice.epoch_max, newest)
        if command is not None and command.is_chosen:
            if command.state is not None and chosen is None:
                reasons = "; ".join(choice.why[:4])
                whole = self._why_whole(command, command.state, crew.world)
                raise KeeperError(f"{command.state} cannot be served here: {reasons}{whole}")
            if command.epoch < epoch:
                self._check_is_new(command.epoch, epoch - 1)
            epoch = command.epoch
        if epoch > EPOCH_MAX:
            raise KeeperError(f"this job was started {EPOCH_MAX} times: give it a new directory")
        self.epoch_max = epoch
        state = chosen.state if chosen else None
        gate.resume(state, epoch)
        offer = None
        why = (*(command.why if command else ()), *choice.why)[:WHY_MAX]
        if chosen is not None:
            offer = Offer(chosen.state, chosen.world, chosen.tier, epoch, why)
            for local_rank in set(range(crew.n_ranks)) - crew.gone:
                if chosen.state in gate.whole():
                    gate.pin(chosen.state, pin_of(local_rank))
            for fetched in chosen.fetched:
                if isinstance(fetched, PeerShards):
                    self.peers.adopt(fetched)
        crew.found = Found(offer, chosen)
        self.events.add(
            "offered" if offer else "fresh_start",
            state=state_to_json(offer.state) if offer else None,
            tier=offer.tier.value if offer else None,
            epoch=epoch,
            why=list(why),
        )
        self.found(state)

    def _why_whole(self, command: Command, state: StateId, world: int) -> str:
        """Return what to do where *state* was saved by another number of ranks, "" where not."""
        held = next(iter(self.memory.held(state)), None)
        saved_by = held.world if held else command.peers.world if command.peers else None
        if saved_by in (None, world):
            return ""
        return (
            f". {saved_by} ranks saved it and {world} load it, so each node needs the whole of it "
            "in memory or in the directory; a job that is started anew goes on from the newest in "
            "the directory"
        )

    def _check_is_new(self, epoch: int, seen: int) -> None:
        """Tell of *seen*, a later epoch than that which all nodes agreed on.

        One that is in the directory alone is of another run that saves there, too. That is no
        reason to keep these ranks from their state.

        Raises:
            KeeperError: It is of this run.
        """
        here = max([self.epoch_max, *(state.epoch for state in self.memory.states())])
        if epoch <= here:
            raise KeeperError(f"epoch {epoch} is not new: {seen} was seen here")
        why = (
            f"the directory has states of epoch {seen}, which count as newer than what this run "
            f"saves (epoch {epoch}); does another run save there?"
        )
        self.events.add("epoch_behind", why=why)

    def _tell_problems(self, choice: Choice) -> None:
        for problem in choice.problems:
            self.events.add(
                "corrupt",
                state=state_to_json(problem.state),
                rank=problem.shard.rank,
                tier=problem.tier.value,
                why=problem.why,
            )


def _can_tell(crew: Crew, command: Command | None) -> bool:
    """Say whether it is known which state is wanted, and which shards of it."""
    if command is None or command.n_nodes == 1:
        return True
    # Of which shards this node needs, the last of its ranks tells.
    return command.is_chosen and len(crew.posts) == crew.n_ranks


def _wanted(crew: Crew, command: Command | None) -> Wanted:
    if command is None or not command.is_chosen:
        return Wanted(excluded_step=command.excluded_step if command else None)
    if command.state is None:
        return Wanted(is_none=True)
    is_whole = len(crew.posts) == crew.n_ranks
    mine = frozenset(post.shard for post in crew.posts.values())
    return Wanted(only=command.state, shards=mine if is_whole else None)


def _free(choice: Choice | None) -> None:
    for memory in choice.chosen.fetched if choice and choice.chosen else ():
        memory.close()
