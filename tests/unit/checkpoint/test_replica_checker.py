"""The keeper of a node compares what its ranks hold alike, in the memory where it lies."""

import itertools
import struct
from dataclasses import replace

import pytest
from support.in_process_keeper import InProcessNode

from gpuops.checkpoint.agreement.replica_check import (
    REPORTS_MAX,
    ReplicaDifference,
    ReplicaOutcome,
    ReplicaReport,
    ReplicaVerdict,
    only_difference,
    replica_report_to_json,
)
from gpuops.checkpoint.image import TensorSpec, plan_image
from gpuops.checkpoint.keeper.jobs import JobKind
from gpuops.checkpoint.keeper.messages import CheckpointPolicy, Lease, MessageError
from gpuops.checkpoint.keeper.requests import ClientSession, KeeperRequests
from gpuops.checkpoint.types import Shard, StateId

N_FLOATS = 1000
NAMES = ("a.bias", "a.running_mean", "a.weight", "b.weight")
TRAINED = ("a.bias", "a.weight", "b.weight")


class Node:
    """A node with ranks that hold three of four tensors alike."""

    def __init__(self, n=3, world=None, *, first=0, trained=TRAINED, every_s=60.0):
        clock = itertools.count(0.0, every_s)
        self.node = InProcessNode(clock_s=lambda: next(clock))
        self.n, self.world, self.first = n, world or n, first
        self.last_equal = dict.fromkeys(trained, tuple(range(self.world)))
        if self.world != n:
            self.node.core.begin_generation(0, 2, None, "job")
        self.start()

    def start(self, generation=0):
        specs = [TensorSpec(x, "F32", (N_FLOATS,), 4 * N_FLOATS, (0,), (N_FLOATS,)) for x in NAMES]
        self.ranks = []
        keepers = [
            self.node.connect(
                rank=self.first + r,
                world=self.world,
                local_rank=r,
                local_world=self.n,
                generation=generation,
            )
            for r in range(self.n)
        ]
        for rank, keeper in enumerate(keepers):
            layout = plan_image(Shard(self.first + rank, self.world), specs, 100, self.last_equal)
            if self.world == self.n:
                keeper.restore_point(1.0)
            self.ranks.append((keeper, layout, keeper.reserve(layout, slots=2).slots))
        if self.world != self.n:
            self.node.core.restore_from(None, 1 + generation)
            self.ranks[0][0].restore_point(1.0)

    def save(self, step, wrong=None):
        """Save a state of *step*; *wrong* has (rank, tensor) whose one bit is flipped."""
        notices = []
        for rank, (keeper, layout, slots) in enumerate(self.ranks):
            grant = keeper.acquire(step)
            assert isinstance(grant, Lease), grant
            notices.append(grant.notice)
            view = slots[grant.slot].view
            view[: len(layout.header)] = layout.header
            for placed in layout.tensors:
                own = rank if placed.spec.name not in self.last_equal else 0
                data = bytearray(struct.pack("<f", step + own) * N_FLOATS)
                if (rank, placed.spec.name) in (wrong or ()):
                    data[1234] ^= 4
                view[placed.begin : placed.end] = bytes(data)
        for keeper, *_ in self.ranks:
            keeper.mark_written(grant)
        return notices

    def told(self, *kinds):
        events = self.node.events()
        assert not [e for e in events if e["kind"] == "vote_failed"], events
        return [e for e in events if e["kind"].startswith("replicas")]

    def stats(self):
        return self.ranks[0][0].stats()


@pytest.fixture
def nodes():
    made = []

    def make(*args, **kwargs):
        made.append(Node(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.node.close()


def test_ranks_that_hold_the_same_are_compared_and_nothing_is_said(nodes):
    node = nodes()
    for step in range(1, 6):
        node.save(step)

    assert node.told() == []
    assert node.stats()["votes"] == 5
    assert node.stats()["notice"] is None


def test_one_bit_in_one_rank_is_told_once_with_rank_tensor_and_step(nodes):
    node = nodes()
    bad = [(1, "a.weight")]
    for step in range(1, 9):
        node.save(step, bad if step in (4, 5, 6) else ())
    differ, alike = node.told()

    assert differ["kind"] == "replicas_differ"
    assert differ["state"][1] == 4
    assert differ["alike"][1] == 3
    assert (differ["ranks"], differ["suspects"], differ["outcome"]) == ("0-2", [1], "minority")
    assert differ["is_here"]
    assert differ["tensors"] == ["a.weight"]
    assert differ["why"] == "rank 1 differs from ranks 0, 2 in a.weight at step 4 (equal at step 3)"
    assert (alike["kind"], alike["state"][1]) == ("replicas_alike", 7)


def test_two_ranks_that_differ_are_both_named(nodes):
    node = nodes(2)
    node.save(1)
    node.save(2, [(0, "b.weight")])
    (differ,) = node.told()

    assert (differ["suspects"], differ["outcome"]) == ([0, 1], "tie")
    assert "either may be wrong" in differ["why"]


def test_what_never_was_equal_is_said_once_and_the_rest_is_compared(nodes):
    node = nodes(trained=NAMES[:3])
    node.last_equal.pop("a.running_mean")  # filled by each rank with values of its own
    for step in range(1, 5):
        node.save(step)
    (apart,) = node.told()

    assert apart["kind"] == "replicas_apart"
    assert "a.running_mean" in apart["why"]
    assert "a parameter that forward writes" in apart["why"]
    assert "max_norm" in apart["why"]
    node.save(5, [(2, "a.weight")])
    (differ,) = node.told()
    assert (differ["suspects"], differ["tensors"]) == ([2], ["a.weight"])


def test_where_all_differ_at_first_it_asks_whether_the_ranks_count_steps_alike(nodes):
    node = nodes(2)
    for step in (6, 8):
        node.save(step, [(1, name) for name in TRAINED])
    (apart,) = node.told()

    assert apart["kind"] == "replicas_apart"
    assert f"in all {len(TRAINED)} tensors that they should hold alike, at step 6" in apart["why"]
    assert "call Checkpointer.step() with the same number after the same" in apart["why"]


def test_ranks_of_which_no_two_agree_train_apart_and_are_not_blamed(nodes):
    node = nodes()
    node.save(1)
    for step in (2, 3):
        node.save(step, [(1, "a.weight"), (2, "b.weight")])
    (apart,) = node.told()

    assert apart["kind"] == "replicas_apart"
    node.save(4, [(1, "a.weight"), (2, "b.weight"), (0, "a.bias")])
    (differ,) = node.told()
    assert (differ["suspects"], differ["tensors"]) == ([0], ["a.bias"])


def test_what_comes_and_goes_is_not_told_for_ever(nodes):
    node = nodes()
    for step in range(1, 60, 2):
        node.save(step)
        node.save(step + 1, [(1, "a.weight")])

    kinds = [event["kind"] for event in node.told()]
    assert kinds == ["replicas_differ", "replicas_alike"] * REPORTS_MAX


def test_whoever_trains_without_an_agent_hears_it_from_the_first_rank(nodes):
    node = nodes()
    node.save(1)
    node.save(2, [(1, "a.weight")])
    said = node.save(3, [(1, "a.weight")])

    assert said[0].endswith(
        "rank 1 differs from ranks 0, 2 in a.weight at step 2 (equal at step 1)"
    )
    assert said[1:] == [None, None]
    assert node.save(4, [(1, "a.weight")]) == [None, None, None]


def test_a_difference_that_outlives_a_restart_is_no_news(nodes):
    node = nodes()
    node.save(1)
    node.save(2, [(1, "a.weight")])
    assert len(node.told()) == 1
    node.node.kill()
    node.start(generation=1)
    for step in (3, 4):
        node.save(step, [(1, "a.weight")])

    assert node.told() == []
    assert node.stats()["votes"] == 4


@pytest.mark.parametrize("has_agent", [True, False], ids=["agent", "alone"])
def test_another_run_on_the_same_node_is_told_of_what_it_continues_with(nodes, has_agent):
    node = nodes()
    if has_agent:
        node.node.core.begin_generation(0, 1, None, "first")
        node.start()
    node.save(1)
    node.save(2, [(1, "a.weight")])
    (told,) = node.told()
    node.node.kill()
    if has_agent:
        node.node.core.begin_generation(0, 1, None, "second")
    node.start()
    for step in (3, 4):
        node.save(step, [(1, "a.weight")])
    (again,) = node.told()

    assert (told["state"][1], again["state"][1]) == (2, 3)
    assert told["alike"] == again["alike"]
    node.save(5)
    assert [event["kind"] for event in node.told()] == ["replicas_alike"]


def test_jobs_that_declare_nothing_are_not_looked_at(nodes):
    node = nodes(trained=())
    node.save(1)
    node.save(2)

    assert node.stats()["votes"] == 0
    assert node.node.core.replica_checker.counts()["vote_s"] == 0


def test_a_slot_that_is_written_meanwhile_says_nothing(nodes):
    node = nodes()
    node.save(1)
    late, jobs = [], node.node.jobs
    begin = jobs.start

    def start(kind, work, then):  # a thread that has to wait
        if kind is JobKind.CHECK_REPLICAS:
            late.append((work(), then))
        else:
            begin(kind, work, then)

    jobs.start = start
    node.save(2, [(1, "a.weight")])
    node.save(3)
    node.save(4)
    (done, then), *_ = late
    then(done, None)

    assert node.told() == []
    assert node.stats()["votes_missed"] == 1


def test_ranks_of_other_nodes_are_compared_by_sketches(nodes):
    here, there = nodes(2, world=4), nodes(2, world=4, first=2)
    for node, wrong in ((here, ()), (there, [(1, "b.weight")])):
        node.save(1, wrong)
        (state,) = node.node.core.memory.complete_states()
        assert node.node.core.progress().group_digests == ()  # nothing is written: no hurry
        node.node.core.commit(state, persist=False)
        node.node.jobs.run_callbacks()

    (mine,), (theirs,) = (
        here.node.core.replica_checker.group_digests,
        there.node.core.replica_checker.group_digests,
    )
    assert (mine.state, mine.key, mine.n_ranks) == (theirs.state, theirs.key, 4)
    assert mine.rank_digests[0] == mine.rank_digests[1] == theirs.rank_digests[2]
    number = only_difference(mine.rank_digests[0], theirs.rank_digests[3], mine.n_tensors)
    assert TRAINED[number] == "b.weight"
    assert here.told() == there.told() == []


def test_where_nodes_persist_all_is_compared_at_each_save_and_a_difference_keeps_no_state_back(
    nodes, tmp_path
):
    node = nodes(2, world=4)
    node.ranks[0][0].set_policy(CheckpointPolicy(directory=str(tmp_path)))
    node.save(1, [(1, "a.weight")])
    progress = node.node.core.progress()
    (found,) = progress.group_digests

    assert progress.whole == (found.state,)
    assert found.rank_digests.keys() == {0, 1}
    assert found.rank_digests[0] != found.rank_digests[1]
    node.node.kill()
    node.node.core.begin_generation(1, 2, None, "job")
    node.first = 2
    node.start(generation=1)
    node.save(2)
    (found,) = node.node.core.progress().group_digests
    assert found.rank_digests.keys() == {2, 3}


def asked(node, told):
    """Have the agent tell what nodes found out together."""
    requests, session = KeeperRequests(node.node.core), ClientSession(None, role="agent")
    return requests.handle(session, "differ", {"report": told}, 0.0)


def test_what_nodes_found_out_together_is_told_with_the_name_of_the_tensor(nodes):
    node = nodes(2, world=4, first=2)
    node.save(1)
    (state,) = node.node.core.memory.complete_states()
    node.node.core.commit(state, persist=False)
    node.node.jobs.run_callbacks()
    (ballot,) = node.node.core.progress().group_digests
    before = StateId(state.epoch, 0)
    found = ReplicaDifference(
        state=state,
        ranks=(0, 1, 2, 3),
        verdict=ReplicaVerdict(ReplicaOutcome.MINORITY, (3,)),
        last_equal=before,
    )
    asked(node, replica_report_to_json(ReplicaReport(ballot.key, found, 1, nodes=("n2",))))
    tie = replace(found, verdict=ReplicaVerdict(ReplicaOutcome.TIE, (0, 3)))
    asked(node, replica_report_to_json(ReplicaReport(ballot.key, tie, nodes=("n1", "n2"))))
    asked(
        node,
        replica_report_to_json(
            ReplicaReport("unknown", replace(found, verdict=ReplicaVerdict(ReplicaOutcome.APART)))
        ),
    )
    asked(
        node,
        replica_report_to_json(
            ReplicaReport("unknown", replace(found, last_equal=StateId(0, 9)), 1)
        ),
    )
    asked(
        node,
        replica_report_to_json(
            ReplicaReport(
                ballot.key, replace(found, verdict=ReplicaVerdict(ReplicaOutcome.ALIKE, (3,)))
            )
        ),
    )
    one, tie, apart, moved, over = node.told()

    assert (one["tensors"], one["suspects"], one["is_here"]) == (["a.weight"], [3], True)
    assert one["why"] == "rank 3 differs from ranks 0-2 in a.weight at step 1 (equal at step 0)"
    assert (tie["tensors"], tie["suspects"], tie["is_here"]) == ([], [0, 3], False)
    assert (one["nodes"], tie["nodes"], moved["nodes"]) == (["n2"], ["n1", "n2"], [])
    assert "several tensors" in tie["why"]
    assert apart["kind"] == "replicas_apart"
    assert "in one tensor at step 1" in moved["why"]
    assert not moved["is_here"]  # nobody knows where the rank was when it came about
    assert (over["kind"], over["ranks"], over["state"][1]) == ("replicas_alike", "0-3", 1)
    with pytest.raises(MessageError, match="invalid replica report"):
        asked(node, {"key": "k"})
