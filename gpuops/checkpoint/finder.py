"""Finds out, once for each start of the workers, which state all of them go on from."""

from collections.abc import Callable
from dataclasses import dataclass

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.crew import Crew, Found, pin_of
from gpuops.checkpoint.keeper_events import Events
from gpuops.checkpoint.keeper_jobs import Jobs
from gpuops.checkpoint.messages import state_to_json
from gpuops.checkpoint.node_memory import NodeMemory
from gpuops.checkpoint.offering import CannotTellError, Choice, Wanted, choose
from gpuops.checkpoint.persisting import OpenStore
from gpuops.checkpoint.states import EPOCH_MAX, CheckpointError, KeeperError, Offer, StateId


@dataclass(slots=True)
class Command:
    """What the agent has said of the present generation.

    ``state`` and ``epoch``: what all nodes go on from, once ``is_chosen``.
    """

    generation: int
    n_nodes: int = 1
    excluded_step: int | None = None
    state: StateId | None = None
    epoch: int = 0
    is_chosen: bool = False


@dataclass(slots=True)
class Finder:
    """Looks for the state in *memory* and in a directory; *found* is called with the outcome."""

    memory: NodeMemory
    jobs: Jobs
    events: Events
    open_store: OpenStore
    found: Callable[[StateId | None], None]
    epoch_max: int = -1
    _n_looks: int = 0

    def look(self, crew: Crew, command: Command | None, directory: str | None) -> None:
        """Begin to look where somebody waits for it, and it can be told by now."""
        gate = self.memory.gate
        if not crew.is_wanted or crew.is_looking or crew.trouble or crew.found is not None:
            return
        is_alone = command is None or command.n_nodes == 1
        # Of which shards this node needs, the last of its ranks tells.
        is_agreed = is_alone or (command.is_chosen and len(crew.posts) == crew.n_ranks)
        if gate.is_settling or not is_agreed:
            return
        wanted = _wanted(crew, command)
        crew.is_looking = True
        self._n_looks += 1
        pin = f"look-{self._n_looks}"
        states = self.memory.states()
        held = {state: self.memory.held(state) for state in states}
        for state in states:
            gate.pin(state, pin)

        def work() -> Choice:
            store = self.open_store(directory) if directory else None
            return choose(held, store, wanted, run=self.jobs.map, make=self._made)

        def then(choice: Choice | None, error: BaseException | None) -> None:
            gate.unpin(pin)
            crew.is_looking = False
            if crew.is_over:
                _free(choice)
            else:
                self._looked(crew, command, choice, error)

        self.jobs.look(work, then)

    def _made(self, nbytes: int) -> SlotMemory:
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
            crew.cannot_tell = isinstance(error, CannotTellError)
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
                why = "; ".join(choice.why[:4])
                raise KeeperError(f"{command.state} cannot be served here: {why}")
            if command.epoch < epoch:
                raise KeeperError(f"epoch {command.epoch} is not new: {epoch - 1} was seen here")
            epoch = command.epoch
        if epoch > EPOCH_MAX:
            raise KeeperError(f"this job was started {EPOCH_MAX} times: give it a new directory")
        self.epoch_max = epoch
        state = chosen.state if chosen else None
        gate.resume(state, epoch)
        offer = None
        if chosen is not None:
            offer = Offer(chosen.state, chosen.world, chosen.tier, epoch, tuple(choice.why))
            for local_rank in set(range(crew.n_ranks)) - crew.gone:
                if chosen.state in gate.whole():
                    gate.pin(chosen.state, pin_of(local_rank))
        crew.found = Found(offer, chosen)
        self.events.add(
            "offered" if offer else "fresh_start",
            state=state_to_json(offer.state) if offer else None,
            tier=offer.tier.value if offer else None,
            epoch=epoch,
            why=list(choice.why),
        )
        self.found(state)

    def _tell_problems(self, choice: Choice) -> None:
        for problem in choice.problems:
            self.events.add(
                "corrupt",
                state=state_to_json(problem.state),
                rank=problem.shard.rank,
                tier=problem.tier.value,
                why=problem.why,
            )


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
