"""One node's part in the agreement on checkpoints between nodes.

It sends what this node's keeper has with each heartbeat, and does there what was agreed on. The
control store is read once a second, in the keeper's thread, and only while a script saves. A
store that does not answer delays commits, and nothing else.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from gpuops.agent.checkpoint.leader import notes_of, restore_in, watermark_of
from gpuops.agent.checkpoint.messages import (
    CommitRecord,
    FinalStatus,
    GenerationPlan,
    Inventory,
    NodeStatus,
    StoredStates,
)
from gpuops.agent.checkpoint.replica_check import ReplicaDifferenceReporter
from gpuops.agent.checkpoint.stored_states import StoredStatesLookup
from gpuops.checkpoint.agreement.progress import KeeperProgress
from gpuops.checkpoint.agreement.recovery import RestorePlan
from gpuops.checkpoint.keeper.agent_client import KeeperClient
from gpuops.checkpoint.keeper.messages import KeeperStatus
from gpuops.checkpoint.placement.domains import DomainPath
from gpuops.checkpoint.types import KeeperAddress, Shard, ShardCopy, StateId
from gpuops.control.record import ControlKeys, Member, RecordError, Roster
from gpuops.control.store import ControlStore, ControlStoreError
from gpuops.model import Json
from gpuops.wire.messages import MessageFormatError

log = logging.getLogger(__name__)

STATES_HELD_MAX = 4
LAYOUT_CHARS = 16
SEAL_AGAIN_LOOKS = 15
SURVEY_S = 1.0  # a restart waits no longer for what a directory has


@dataclass(slots=True)
class _Generation:
    """What is known of the present one."""

    number: int
    roster: Roster
    notes: GenerationPlan
    restore: RestorePlan | None
    is_chosen: bool = False
    committed: StateId | None = None
    persisted: StateId | None = None  # the newest that the keeper agreed to persist
    told: StateId | None = None
    aimed: StateId | None = None
    seal_looks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperLocation:
    """Who this node is to its peers, what fails with it, and what they prove to each other."""

    me: Member
    token: str
    job: str
    directory: str | None = None
    domain: DomainPath = ()


class CommitFollower:
    """This node's part.

    *survey* lists a directory; it may take long, and raise. ``is_led`` says whether there is
    a leader at present. ``must_persist`` asks all to persist their newest state, and
    ``trouble`` says what has kept this node from that since, "" where nothing has: that an older
    state cannot be written does not keep it from anything. ``is_over``: the ranks here have ended.
    ``last`` is the state that one of them asked for as the last.
    """

    def __init__(
        self,
        board: ControlStore,
        keys: ControlKeys,
        place: KeeperLocation,
        survey: Callable[[str], StoredStates],
        say: Callable[[str], None],
        is_led: Callable[[], bool] = lambda: True,
    ) -> None:
        self._board = board
        self._keys = keys
        self._place = place
        self._say = say
        self.is_led = is_led
        self._look_up = StoredStatesLookup(survey, say)
        self._now: _Generation | None = None
        self._before: tuple[_Generation | None, int | None] = (None, None)
        self._differing = ReplicaDifferenceReporter(place.me)
        self._said: Json | None = None
        self._mark = CommitRecord()
        self._found: RestorePlan | None = None
        self._epoch_max = -1
        self._port: int | None = None
        self._has_said = False
        self._together = 0
        self.must_persist = False
        self.trouble = ""
        self._tries: tuple[int, StateId | None] = (0, None)  # that failed before, and of what
        self._failed: StateId | None = None
        self._wanted = _NONE
        self.is_uncommitted = False
        self.is_over = False
        self.last: StateId | None = None
        self._tried_again: StateId | None = None
        self.directory = place.directory

    @property
    def is_on(self) -> bool:
        """Say whether the present generation has other nodes to agree with."""
        return self._now is not None

    @property
    def is_waiting(self) -> bool:
        """Say whether ranks wait to know which state to load."""
        now = self._now
        return now is not None and not now.is_chosen and self._said is not None

    @property
    def has_directory(self) -> bool:
        """Say whether anybody has named a directory."""
        return self.directory is not None

    @property
    def persisted(self) -> StateId | None:
        """Return the newest state that lies whole in the directory, as far as anybody said."""
        return self._mark.persisted

    @property
    def sign(self) -> object:
        """Return what changes as long as any node comes on with what is to persist."""
        mark = self._mark
        return (mark.committed, mark.persist, mark.sealed, mark.persisted, mark.last)

    @property
    def behind(self) -> tuple[str, ...]:
        """Return nodes that have not written their part of what is to persist."""
        return self._mark.last.behind

    def why_missed(self, state: StateId) -> str:
        """Return why *state* will not be there for all, "" where it may be yet."""
        missed = self._mark.last.missed
        return self._mark.last.why if missed is not None and missed >= state else ""

    @property
    def is_first(self) -> bool:
        """Say whether this node has the first place."""
        now = self._now
        return now is not None and now.roster.members[0].agent == self._place.me.agent

    def said(self) -> Json | None:
        """Return what goes with the next heartbeat, None where no script saves; never waits."""
        return self._said

    def holding(self, client: KeeperClient) -> Json:
        """Return what goes with a join request.

        Raises:
            KeeperError: The keeper does not answer.
        """
        me = self._place.me
        self._port = client.serve_peers(
            me.address, node=me.node, token=self._place.token, job=self._place.job
        )
        copies = list(client.inventory())
        stored = self._look_up.anew(self.directory, SURVEY_S)
        newest = sorted({copy.state for copy in copies}, reverse=True)
        self._epoch_max = max([self._epoch_max, *(state.epoch for state in newest)])
        kept = set(newest[:STATES_HELD_MAX])
        return Inventory(
            port=self._port,
            copies=tuple(_brief(copy) for copy in copies if copy.state in kept),
            epoch_max=self._epoch_max,
            domain=self._place.domain,
            stored_max=-1 if stored is None else stored.epoch_max,
        ).to_json()

    def lost(self) -> None:
        """Forget the keeper, which is gone: nothing is said of its states any more."""
        self._before = (self._now or self._before[0], self._port or self._before[1])
        self._now = self._said = self._port = None

    def found_again(self) -> None:
        """Go on with the keeper that was given up: it answers again."""
        self._now, self._port = self._before

    def begin_again(self, client: KeeperClient, roster: Roster, epoch: int | None) -> bool:
        """Do as `begin` with a keeper in place of one that died under these workers.

        *epoch*: of the states that they have saved, None where they may still ask what to load.

        Raises:
            KeeperError: The keeper does not answer.
        """
        me, (left, port) = self._place.me, self._before
        if port is not None:
            # The others look for this node there for as long as they run.
            self._port = client.serve_peers(
                me.address, node=me.node, token=self._place.token, job=self._place.job, port=port
            )
        if epoch is None:
            return self.begin(client, roster)
        notes = notes_of(roster)
        if notes is not None and notes.is_kept:
            client.replicate(*self._copies(roster, notes))
        client.take_over(epoch)
        if left is not None:
            self._now = replace(left, is_chosen=True, committed=None, aimed=None, seal_looks=0)
        return True

    def begin(self, client: KeeperClient, roster: Roster) -> bool:
        """Prepare the keeper for the workers of *roster*; say whether they are to save.

        Raises:
            KeeperError: The keeper does not answer.
        """
        self._now = self._said = self._found = None
        self._before = (None, None)
        self.must_persist = self.is_over = False
        self.last = self._tried_again = None
        notes, is_alone = notes_of(roster), len(roster.members) == 1
        if notes is None or not notes.is_kept:
            if not is_alone:
                self._not_kept(notes)
            return is_alone
        holders, keep = self._copies(roster, notes)
        client.replicate(holders, keep)
        now = _Generation(roster.generation, roster, notes, notes.restore)
        self._say_what_lies_together(now)
        if notes.restore is not None:
            self._choose(client, now, notes.restore)
        if not is_alone:
            self._now = now
        return True

    def fetch(self) -> None:
        """Read from the control store what was agreed on, where a rank saves; never raises."""
        now = self._now
        if now is None or self._said is None:
            return
        try:
            self._mark = watermark_of(self._board.get(self._keys.commit_record()))[1]
            if now.restore is None:
                entry = self._board.get(self._keys.restore(now.number))
                self._found = restore_in(entry) if entry.version else None
        except (ControlStoreError, RecordError, MessageFormatError) as exc:
            log.debug("what was agreed on of checkpoints cannot be read: %s", exc)

    def look(self, client: KeeperClient, status: KeeperStatus) -> None:
        """Do with the keeper what was agreed on, and take in how far it is.

        Raises:
            KeeperError: The keeper does not answer.
        """
        now = self._now
        if now is None:
            return
        progress = status.progress
        self.last = progress.final_state
        self._see_trouble(status)
        if self._said is None and not status.n_ranks and not progress.whole:
            return  # nobody saves
        if now.restore is None and self._found is not None:
            now.restore = self._found
        if now.restore is not None and not now.is_chosen:
            self._choose(client, now, now.restore)
        if now.restore is not None:
            self._follow(client, now, now.restore.epoch, progress)
        self.directory = status.directory or self._place.directory
        wants = not now.is_chosen and status.n_ranks >= self._place.me.n_workers
        flying = {progress.in_flight, *progress.whole} - {None, progress.newest}
        newest = progress.newest or _NONE
        self.is_uncommitted = any(state is not None and state > newest for state in flying)
        self._said = self._word(now, progress, status.persist_pieces, wants=wants).to_json()

    def _see_trouble(self, status: KeeperStatus) -> None:
        failed = status.persist_failed
        tries = (status.n_persist_failed, failed)
        if not self.must_persist:
            self._tries, self._wanted = tries, status.progress.newest or _NONE
        wanted = max(self._wanted, self._mark.persist or _NONE)
        is_new = tries[0] > 0 and tries != self._tries
        is_trouble = is_new and (failed is None or failed >= wanted)
        self.trouble = status.persist_trouble if is_trouble else ""
        self._failed = failed if is_trouble else None

    def _word(
        self, now: _Generation, progress: KeeperProgress, pieces: int, *, wants: bool
    ) -> NodeStatus:
        stored = self._look_up.of(self.directory) if wants and self.is_first else None
        known = {field.name: getattr(progress, field.name) for field in fields(progress)}
        known["is_due"] |= self.must_persist
        return NodeStatus(
            **known,
            generation=now.number,
            told=now.told,
            wants=wants,
            stored=stored,
            last=FinalStatus(
                is_over=self.is_over,
                waits=self.must_persist,
                trouble=self.trouble,
                failed=self._failed,
                pieces=pieces,
            ),
        )

    def _follow(
        self, client: KeeperClient, now: _Generation, epoch: int, progress: KeeperProgress
    ) -> None:
        mark = self._mark
        aim, committed, persist = mark.aim, mark.committed, mark.persist
        if aim is not None and aim.epoch == epoch and aim != now.aimed:
            client.set_next_step(aim.step)  # before the slots are free
            now.aimed = aim
        if self._is_to_try_again(persist, progress):
            now.persisted = None
        if persist is not None and persist.epoch == epoch and persist != now.persisted:
            now.told = persist
            if client.try_persist(persist):  # while it is still the newest
                now.persisted = persist
        is_new = committed is not None and committed.epoch == epoch
        if committed is not None and is_new and (now.committed or _NONE) < committed:
            client.commit(committed)
            now.committed = committed
        held = {*progress.whole, *progress.replicated, progress.in_flight}
        for state in mark.dropped:
            # The last one is not dropped any more, as soon as the others know of it.
            if state in held and state != progress.final_state:
                client.give_up(state)
        self._seal(client, now, mark, progress)
        self._differing.tell(client.report_difference, now.roster, mark.differ, epoch)

    def _is_to_try_again(self, persist: StateId | None, progress: KeeperProgress) -> bool:
        """Say whether what could not be written here before is to be tried once more: at the end.

        In the middle of a run the next state is written instead.
        """
        if not self.must_persist or persist in (None, self._tried_again, *progress.parts):
            return False
        self._tried_again = persist
        return True

    def _seal(
        self, client: KeeperClient, now: _Generation, mark: CommitRecord, progress: KeeperProgress
    ) -> None:
        sealed = mark.sealed
        if sealed is None or mark.sealer != self._place.me.node or sealed not in progress.parts:
            return
        if max(progress.persisted or _NONE, mark.persisted or _NONE) >= sealed:
            now.seal_looks = 0
            return
        if now.seal_looks % SEAL_AGAIN_LOOKS == 0:
            client.try_seal(sealed, now.roster.world_size)
        now.seal_looks += 1

    def _choose(self, client: KeeperClient, now: _Generation, restore: RestorePlan) -> None:
        peers = _peers(now.notes)
        me, world = self._place.me, restore.world
        wanted = set(range(world))
        if world == now.roster.world_size:
            seat = now.roster.group_rank(me.agent) or 0
            first = now.roster.first_rank(seat)
            wanted &= set(range(first, first + me.n_workers))
        sources = {}
        for rank in sorted(wanted & restore.sources.keys()):
            nodes = [node for node in restore.sources[rank] if node in peers and node != me.node]
            if nodes:
                sources[Shard(rank, world)] = _in_turn([peers[node] for node in nodes], rank)
        roots = {s: restore.roots[s.rank] for s in sources if s.rank in restore.roots}
        client.restore_from(restore.state, restore.epoch, sources, restore.why, roots=roots)
        self._epoch_max = max(self._epoch_max, restore.epoch)
        now.is_chosen = True

    def _copies(
        self, roster: Roster, notes: GenerationPlan
    ) -> tuple[list[KeeperAddress], list[Shard]]:
        """Return who is to have copies of what is saved here, and which shards others send."""
        me, placement, peers = self._place.me.node, notes.placement, _peers(notes)
        if placement is None or me not in placement.nodes:
            return [], []
        world = roster.world_size
        seats = {member.node: place for place, member in enumerate(roster.members)}
        keep = []
        for owner in placement.held_by(me)[1:]:
            if owner in seats:
                first = roster.first_rank(seats[owner])
                n_ranks = roster.members[seats[owner]].n_workers
                keep += [Shard(rank, world) for rank in range(first, first + n_ranks)]
        return [peers[node] for node in placement.holders(me)[1:] if node in peers], keep

    def _say_what_lies_together(self, now: _Generation) -> None:
        """Say once, on the first node, that copies could not be kept apart."""
        notes, n_nodes = now.notes, len(now.roster.members)
        is_mine = now.roster.members[0].agent == self._place.me.agent
        together, self._together = self._together, notes.together
        if not is_mine or not notes.together or notes.together == together:
            return
        if notes.n_domains == 1:
            what = f"all {n_nodes} nodes are in one failure domain, so no copies lie apart"
        else:
            what = f"{notes.together} of {n_nodes} nodes have all their copies in one domain"
        self._say(
            f"checkpoints in memory: {what}; what is lost with a whole domain is had from the "
            "persistent directory only"
        )

    def _not_kept(self, notes: GenerationPlan | None) -> None:
        if self._has_said:
            return
        self._has_said = True
        who = ", ".join(notes.missing) if notes is not None and notes.missing else "a node"
        self._say(
            f"no keeper of checkpoints on {who}: none are saved, since no state would be whole; "
            "the ranks go on from the newest in the persistent directory, if they name one"
        )


def _peers(notes: GenerationPlan) -> dict[str, KeeperAddress]:
    return {node: KeeperAddress(node, host, port) for node, (host, port) in notes.peers.items()}


def _brief(copy: ShardCopy) -> ShardCopy:
    """Return *copy* with what is enough to see which copies are equal."""
    digest = replace(copy.digest, table=b"")
    return replace(copy, layout=copy.layout[:LAYOUT_CHARS], digest=digest)


def _in_turn(peers: Sequence[KeeperAddress], number: int) -> list[KeeperAddress]:
    """Return *peers* beginning at another one for each *number*, so that all serve alike."""
    at = number % len(peers) if peers else 0
    return [*peers[at:], *peers[:at]]


_NONE = StateId(0, 0)
