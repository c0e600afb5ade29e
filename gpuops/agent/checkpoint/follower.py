"""One node's part in the agreement on checkpoints between nodes.

Each heartbeat carries the status of this node's keeper; the keeper carries out what was agreed on.
The control store is read in the keeper's thread, and only while a script saves: as often as
`ExchangeRhythm` says. A store that does not answer delays commits, and nothing else.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

from gpuops.agent.checkpoint.exchange import ExchangeRhythm
from gpuops.agent.checkpoint.leader import commit_record_of, generation_plan_of, restore_plan_in
from gpuops.agent.checkpoint.messages import (
    CommitRecord,
    FinalStatus,
    GenerationPlan,
    Inventory,
    NodeStatus,
    StoredStates,
    held_states,
)
from gpuops.agent.checkpoint.replica_check import ReplicaDifferenceReporter
from gpuops.agent.checkpoint.sources import keeper_sources, try_read_sources
from gpuops.agent.checkpoint.stored_states import StoredStatesLookup
from gpuops.checkpoint.agreement.progress import KeeperProgress
from gpuops.checkpoint.agreement.recovery import RestorePlan
from gpuops.checkpoint.keeper.agent_client import KeeperClient
from gpuops.checkpoint.keeper.messages import KeeperStatus
from gpuops.checkpoint.placement.domains import DomainPath
from gpuops.checkpoint.types import KeeperAddress, Shard, StateId
from gpuops.control.record import ControlKeys, Member, RecordError, Roster
from gpuops.control.store import ControlStore, ControlStoreError
from gpuops.control.threads import HOLD_S
from gpuops.model import Json
from gpuops.wire.messages import MessageFormatError

log = logging.getLogger(__name__)

STATES_HELD_MAX = 4
SEAL_RETRY_POLLS = 15
SURVEY_S = 1.0  # a restart waits no longer for the listing of a directory


@dataclass(slots=True)
class _Generation:
    """The state of the current generation."""

    number: int
    roster: Roster
    plan: GenerationPlan
    restore: RestorePlan | None = None  # with its sources
    is_restore_set: bool = False
    committed: StateId | None = None
    persisted: StateId | None = None  # the newest that the keeper accepted to persist
    acknowledged: StateId | None = None
    next_step: StateId | None = None
    seal_polls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperLocation:
    """This node's identity and failure domain, and the token that peers authenticate with.

    Without a token (``--insecure``) nothing is served to peers.
    """

    me: Member
    token: str = field(repr=False)
    job: str
    directory: str | None = None
    domain: DomainPath = ()


class CommitFollower:
    """This node's part.

    *survey* lists a directory; it may take long, and raise. ``is_led`` returns whether there is a
    leader at present. ``must_persist`` asks all nodes to persist their newest state; ``trouble`` is
    the error that has prevented this here since, "" without one (a failure to write an older state
    does not count). ``is_over``: the ranks here have ended. ``last`` is the state that one of them
    requested as the final one. ``agreed`` is the newest commit record.
    """

    def __init__(
        self,
        store: ControlStore,
        keys: ControlKeys,
        location: KeeperLocation,
        survey: Callable[[str], StoredStates],
        warn: Callable[[str], None],
        is_led: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._keys = keys
        self._location = location
        self._warn = warn
        self.is_led = is_led
        self._stored_states = StoredStatesLookup(survey, warn)
        self._current: _Generation | None = None
        self._is_attached = True  # False: the keeper has died under the current generation
        self._difference_reporter = ReplicaDifferenceReporter(location.me)
        self._status: Json | None = None
        self._rhythm = ExchangeRhythm()
        self.agreed = CommitRecord()
        self._epoch_max = -1
        self._port: int | None = None
        self._has_warned = False
        self._n_colocated = 0
        self.must_persist = False
        self.trouble = ""
        self._tries: tuple[int, StateId | None] = (0, None)  # number that failed before, and state
        self._failed: StateId | None = None
        self._persist_from = _NONE
        self.is_uncommitted = False
        self.is_over = False
        self.last: StateId | None = None
        self._retried: StateId | None = None
        self.directory = location.directory

    @property
    def is_on(self) -> bool:
        """Return whether the current generation has other nodes to agree with."""
        return self._current is not None and self._is_attached

    @property
    def is_waiting(self) -> bool:
        """Return whether ranks wait for the decision which state to load."""
        now = self._current
        return now is not None and not now.is_restore_set and self._status is not None

    @property
    def exchange_s(self) -> float:
        """Return the seconds between two exchanges with the other nodes, by the control store."""
        now = self._current
        return HOLD_S if now is None else self._rhythm.every_s(len(now.roster.members))

    @property
    def is_first(self) -> bool:
        """Return whether this node has group rank 0."""
        now = self._current
        return now is not None and now.roster.members[0].agent == self._location.me.agent

    def node_status(self) -> Json | None:
        """Return the status for the next heartbeat, None where no script saves; never waits."""
        return self._status

    def inventory(self, client: KeeperClient) -> Json:
        """Return the inventory for a join request.

        Raises:
            KeeperError: The keeper does not answer.
        """
        self._port = self._serve_peers(client)
        copies = list(client.inventory())
        stored = self._stored_states.refresh(self.directory, SURVEY_S)
        newest = sorted({copy.state for copy in copies}, reverse=True)
        self._epoch_max = max([self._epoch_max, *(state.epoch for state in newest)])
        kept = set(newest[:STATES_HELD_MAX])
        return Inventory(
            port=self._port,
            states=held_states(copy for copy in copies if copy.state in kept),
            epoch_max=self._epoch_max,
            domain=self._location.domain,
            stored_max=-1 if stored is None else stored.epoch_max,
        ).to_json()

    def _serve_peers(self, client: KeeperClient, port: int = 0) -> int:
        """Have the keeper listen for its peers, on *port* unless that is 0.

        Returns the port, 0 if this node serves nothing.
        """
        at = self._location
        if not at.token:
            return 0
        return client.serve_peers(
            at.me.address, node=at.me.node, token=at.token, job=at.job, port=port
        )

    def detach(self) -> None:
        """Forget the keeper, which is gone; its states are no longer reported."""
        self._is_attached, self._status = False, None

    def reattach(self) -> None:
        """Continue with the keeper that `detach` gave up: it answers again."""
        self._is_attached = True

    def begin_replaced(self, client: KeeperClient, roster: Roster, epoch: int | None) -> bool:
        """Do as `begin` with the replacement of a keeper that died while the workers run.

        *epoch*: of the states that they have saved, None where they may still ask what to load.

        Raises:
            KeeperError: The keeper does not answer.
        """
        previous = self._current
        if self._port:
            # The other nodes connect to this port for as long as their generation lasts.
            self._port = self._serve_peers(client, self._port)
        if epoch is None:
            return self.begin(client, roster)
        plan = generation_plan_of(roster)
        if plan is not None and plan.is_kept:
            self._replicate(client, roster, plan)
        client.take_over(epoch)
        if previous is not None:
            self._current = replace(
                previous, is_restore_set=True, committed=None, next_step=None, seal_polls=0
            )
        self._is_attached = True
        return True

    def begin(self, client: KeeperClient, roster: Roster) -> bool:
        """Prepare the keeper for the workers of *roster*; return whether they can save.

        Raises:
            KeeperError: The keeper does not answer.
        """
        self._current, self._status, self._is_attached = None, None, True
        self.must_persist = self.is_over = False
        self.last = self._retried = None
        plan, is_alone = generation_plan_of(roster), len(roster.members) == 1
        if plan is None or not plan.is_kept:
            if not is_alone:
                self._warn_not_kept(plan)
            return is_alone
        self._replicate(client, roster, plan)
        now = _Generation(roster.generation, roster, plan)
        self._warn_if_colocated(now)
        if plan.restore is not None:
            # A node alone asks nobody later: its own memory and the directory have to do.
            now.restore = self._with_sources(now, plan.restore) or (
                plan.restore if is_alone else None
            )
        if now.restore is not None:
            self._restore_from(client, now, now.restore)
        if not is_alone:
            self._current = now
        return True

    def fetch(self) -> None:
        """Read the commit record and the restore plan, where a rank saves; never raises.

        A slow read may end in the next generation: the plan belongs to the one that it was read of.
        """
        now = self._current
        if now is None or self._status is None:
            return
        try:
            self.agreed = commit_record_of(self._store.get(self._keys.commit_record()))[1]
            if now.restore is None:
                now.restore = self._find_restore(now)
        except (ControlStoreError, RecordError, MessageFormatError) as exc:
            log.debug("the agreement on checkpoints cannot be read: %s", exc)

    def _find_restore(self, now: _Generation) -> RestorePlan | None:
        """Return the restore plan with its sources, None until there is one."""
        found = now.plan.restore
        if found is None:
            entry = self._store.get(self._keys.restore(now.number))
            found = restore_plan_in(entry) if entry.version else None
        return found and self._with_sources(now, found)

    def _with_sources(self, now: _Generation, restore: RestorePlan) -> RestorePlan | None:
        """Return *restore* with the sources for this node, None where they cannot be read now."""
        is_same_world = restore.world == now.roster.world_size
        ranks = now.roster.ranks(self._location.me.agent) if is_same_world else None
        return try_read_sources(self._store, self._keys, now.number, restore, ranks)

    def update(self, client: KeeperClient, status: KeeperStatus) -> None:
        """Have the keeper carry out what was agreed on, and record its *status*.

        Raises:
            KeeperError: The keeper does not answer.
        """
        now = self._current
        if now is None or not self._is_attached:
            return
        progress = status.progress
        self.last = progress.final_state
        self._update_trouble(status)
        if self._status is None and not status.n_ranks and not progress.whole:
            return  # nobody saves
        if now.restore is not None and not now.is_restore_set:
            self._restore_from(client, now, now.restore)
        if now.restore is not None:
            self._follow(client, now, now.restore.epoch, progress)
        self.directory = status.directory or self._location.directory
        wants = not now.is_restore_set and status.n_ranks >= self._location.me.n_workers
        incomplete = {progress.in_flight, *progress.whole} - {None, progress.newest}
        newest = progress.newest or _NONE
        self.is_uncommitted = any(state is not None and state > newest for state in incomplete)
        found = self._node_status(now, progress, status.persist_pieces, wants=wants)
        self._status = found.to_json()
        self._rhythm.observe(found)

    def _update_trouble(self, status: KeeperStatus) -> None:
        failed = status.persist_failed
        tries = (status.n_persist_failed, failed)
        if not self.must_persist:
            self._tries, self._persist_from = tries, status.progress.newest or _NONE
        wanted = max(self._persist_from, self.agreed.persist or _NONE)
        is_new = tries[0] > 0 and tries != self._tries
        is_trouble = is_new and (failed is None or failed >= wanted)
        self.trouble = status.persist_trouble if is_trouble else ""
        self._failed = failed if is_trouble else None

    def _node_status(
        self, now: _Generation, progress: KeeperProgress, pieces: int, *, wants: bool
    ) -> NodeStatus:
        stored = self._stored_states.of(self.directory) if wants and self.is_first else None
        known = {field.name: getattr(progress, field.name) for field in fields(progress)}
        known["is_due"] |= self.must_persist
        return NodeStatus(
            **known,
            generation=now.number,
            told=now.acknowledged,
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
        record = self.agreed
        aim, committed, persist = record.aim, record.committed, record.persist
        if aim is not None and aim.epoch == epoch and aim != now.next_step:
            client.set_next_step(aim.step)  # before the buffers are free
            now.next_step = aim
        if self._must_retry(persist, progress):
            now.persisted = None
        if persist is not None and persist.epoch == epoch and persist != now.persisted:
            now.acknowledged = persist
            # While it is still the newest.
            if client.try_persist(persist, record.write_once(now.roster)):
                now.persisted = persist
        is_new = committed is not None and committed.epoch == epoch
        if committed is not None and is_new and (now.committed or _NONE) < committed:
            client.commit(committed)
            now.committed = committed
        held = {*progress.whole, *progress.replicated, progress.in_flight}
        for state in record.dropped:
            # The final state is no longer dropped once the other nodes know of it.
            if state in held and state != progress.final_state:
                client.give_up(state)
        self._seal(client, now, record, progress)
        self._difference_reporter.report_new(
            client.report_difference, now.roster, record.differ, epoch
        )

    def _must_retry(self, persist: StateId | None, progress: KeeperProgress) -> bool:
        """Return whether to retry a write that failed here before: only at the end of a run.

        During the run the next state is written instead.
        """
        if not self.must_persist or persist in (None, self._retried, *progress.parts):
            return False
        self._retried = persist
        return True

    def _seal(
        self, client: KeeperClient, now: _Generation, record: CommitRecord, progress: KeeperProgress
    ) -> None:
        sealed, is_ours = record.sealed, record.sealer == self._location.me.node
        if sealed is None or not is_ours or sealed not in progress.parts:
            return
        if max(progress.persisted or _NONE, record.persisted or _NONE) >= sealed:
            now.seal_polls = 0
            return
        if now.seal_polls % SEAL_RETRY_POLLS == 0:
            client.try_commit_persisted(sealed, now.roster.world_size)
        now.seal_polls += 1

    def _restore_from(self, client: KeeperClient, now: _Generation, restore: RestorePlan) -> None:
        peers = _peers(now.plan)
        me, world = self._location.me, restore.world
        wanted = now.roster.ranks(me.agent) if world == now.roster.world_size else range(world)
        sources = keeper_sources(restore, peers, me.node, wanted)
        roots = {s: restore.roots[s.rank] for s in sources if s.rank in restore.roots}
        client.restore_from(
            restore.state,
            restore.epoch,
            sources,
            restore.why,
            roots=roots,
            loading_world=now.roster.world_size,
        )
        self._epoch_max = max(self._epoch_max, restore.epoch)
        now.is_restore_set = True

    def _replicate(self, client: KeeperClient, roster: Roster, plan: GenerationPlan) -> None:
        """Have the keeper exchange copies with its peers; those that push to it come first."""
        me, placement, peers = self._location.me.node, plan.placement, _peers(plan)
        if placement is None or me not in placement.nodes:
            client.replicate([], nodes=[peer.host for peer in peers.values()])
            return
        agents = {member.node: member.agent for member in roster.members}
        owners, holders = placement.owners_of(me), placement.holders(me)
        ranks = {node: roster.ranks(agents[node]) for node in {*owners, *holders} & agents.keys()}
        nearest = (*owners, *plan.peers)
        served = [node for node in holders[1:] if node in peers]
        client.replicate(
            [peers[node] for node in served],
            [Shard(r, roster.world_size) for node in owners[1:] for r in ranks.get(node, ())],
            nodes=[peers[node].host for node in nearest if node in peers],
            ranks=[(it.start, it.stop) for it in (ranks.get(n, range(0)) for n in served)],
        )

    def _warn_if_colocated(self, now: _Generation) -> None:
        """Warn once, on the first node, that copies share a failure domain."""
        plan, n_nodes = now.plan, len(now.roster.members)
        is_mine = now.roster.members[0].agent == self._location.me.agent
        together, self._n_colocated = self._n_colocated, plan.together
        if not is_mine or not plan.together or plan.together == together:
            return
        if plan.n_domains == 1:
            what = f"all {n_nodes} nodes are in one failure domain, and so are all copies"
        else:
            what = f"{plan.together} of {n_nodes} nodes have all their copies in one domain"
        self._warn(
            f"checkpoints in memory: {what}; after the loss of a whole domain they can be loaded "
            "from the persistent directory only"
        )

    def _warn_not_kept(self, plan: GenerationPlan | None) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        who = ", ".join(plan.missing) if plan is not None and plan.missing else "a node"
        self._warn(
            f"no checkpoint keeper on {who}: nothing is saved, since no state would be complete; "
            "the ranks resume from the newest state in the persistent directory, if there is one"
        )


def _peers(plan: GenerationPlan) -> dict[str, KeeperAddress]:
    return {node: KeeperAddress(node, host, port) for node, (host, port) in plan.peers.items()}


_NONE = StateId(0, 0)
