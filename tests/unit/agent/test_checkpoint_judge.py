"""What is agreed on follows from what was said, and never goes back; any words, in any order."""

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.agent.checkpoint.messages import (
    DROPPED_MAX,
    CommitRecord,
    FinalStatus,
    GenerationPlan,
    Inventory,
    NodeStatus,
    StoredStates,
    held_states,
)
from gpuops.agent.checkpoint.rules import (
    COPIED_MAX_S,
    LEAD_S,
    OVERDUE_S,
    SavePacer,
    StatusSummary,
    judge,
    why_overdue,
)
from gpuops.checkpoint.agreement.recovery import RestorePlan
from gpuops.checkpoint.placement.replica_placement import place
from gpuops.checkpoint.types import Digest, Shard, ShardCopy, StateId, Tier
from gpuops.wire.messages import MessageFormatError

EPOCH = 3
AGENTS = ("a", "b", "c")
states = st.builds(StateId, st.integers(2, 4), st.integers(0, 6))
some = st.lists(states, max_size=4).map(tuple)
maybe = st.none() | states
stored = st.builds(
    StoredStates,
    st.lists(st.tuples(states, st.integers(1, 9)), max_size=3).map(tuple),
    st.integers(-1, 9),
)
said = st.builds(
    NodeStatus,
    generation=st.sampled_from([5, 5, 5, 4]),
    whole=some,
    replicated=some,
    refused=some,
    parts=some,
    newest=maybe,
    persisted=maybe,
    in_flight=maybe,
    told=maybe,
    decided=maybe,
    is_due=st.booleans(),
    wants=st.booleans(),
    stored=st.none() | stored,
)
heard = st.builds(
    StatusSummary,
    generation=st.just(5),
    epoch=st.just(EPOCH),
    members=st.just(AGENTS),
    statuses=st.dictionaries(st.sampled_from([*AGENTS, "unknown"]), said),
    is_replicated=st.booleans(),
    overdue=st.frozensets(states, max_size=2),
    next_step=st.none() | st.integers(0, 9),
    leader=st.just("n0"),
)


def everybody(**more):
    one = NodeStatus(generation=5, **more)
    return StatusSummary(
        generation=5, epoch=EPOCH, members=AGENTS, statuses=dict.fromkeys(AGENTS, one), leader="n0"
    )


@given(st.lists(heard, min_size=1, max_size=6))
def test_nothing_goes_back_and_only_what_all_have_is_committed(found):
    mark = CommitRecord()
    for one in found:
        after = judge(mark, one)
        words = [one.statuses.get(agent) for agent in AGENTS]
        if after.committed != mark.committed:
            assert mark.committed is None or after.committed > mark.committed
            assert after.committed.epoch == EPOCH
            assert after.committed not in mark.dropped
            for word in words:
                assert word.generation == 5
                has = word.replicated if one.is_replicated else (*word.whole, *word.replicated)
                assert after.committed in has
        if after.sealed != mark.sealed:
            assert all(after.sealed in word.parts for word in words)
            is_left = after.persisted is None or after.persisted < after.sealed
            assert after.sealer == ("n0" if is_left else mark.sealer)
        for name in ("sealed", "persisted", "aim"):
            before, now = getattr(mark, name), getattr(after, name)
            assert before is None or now >= before
        assert after.committed not in after.dropped
        assert len(after.dropped) <= DROPPED_MAX
        assert CommitRecord.from_json(after.to_json()) == after
        mark = after


@given(heard, st.permutations(AGENTS))
def test_the_order_in_which_nodes_are_named_does_not_matter(found, order):
    assert judge(CommitRecord(), found) == judge(
        CommitRecord(), replace(found, members=tuple(order))
    )


def test_what_all_had_written_before_a_restart_is_committed_in_the_directory_after_it():
    written = StateId(EPOCH - 1, 9)
    found = everybody(parts=(written,))
    assert judge(CommitRecord(), found).sealed is None, "other ranks saved it, or none knows"

    after = judge(CommitRecord(), replace(found, resumed=StateId(EPOCH - 1, 12)))

    assert (after.sealed, after.sealer) == (written, "n0")
    one_lacks_it = {**found.statuses, "a": NodeStatus(generation=5)}
    lacking = replace(found, resumed=StateId(EPOCH - 1, 12), statuses=one_lacks_it)
    assert judge(CommitRecord(), lacking).sealed is None


def test_what_one_node_skipped_is_dropped_and_all_aim_at_a_later_step():
    state = StateId(EPOCH, 10)
    has = NodeStatus(generation=5, whole=(state,), decided=StateId(EPOCH, 14))
    lacks = NodeStatus(generation=5, decided=StateId(EPOCH, 14))
    words = {"a": has, "b": has, "c": lacks}

    after = judge(CommitRecord(), replace(everybody(), statuses=words, next_step=40))

    assert after.dropped == (state,)
    assert after.aim == StateId(EPOCH, 40)
    assert after.committed is None


def test_what_a_node_is_still_writing_is_not_dropped():
    state = StateId(EPOCH, 10)
    words = {
        "a": NodeStatus(generation=5, whole=(state,), decided=StateId(EPOCH, 14)),
        "b": NodeStatus(generation=5, in_flight=state, decided=StateId(EPOCH, 14)),
        "c": NodeStatus(generation=5, decided=StateId(EPOCH, 9)),
    }

    assert judge(CommitRecord(), replace(everybody(), statuses=words)) == CommitRecord()


def test_the_next_one_persists_only_once_all_know_of_the_one_before():
    first, second = StateId(EPOCH, 1), StateId(EPOCH, 2)
    mark = judge(CommitRecord(), everybody(replicated=(first,), is_due=True))
    assert mark.persist == first

    mark = judge(mark, everybody(replicated=(second,), is_due=True))
    assert (mark.committed, mark.persist) == (second, first)

    assert judge(mark, everybody(told=first, is_due=True)).persist == second


def test_what_is_written_once_is_decided_with_the_state_and_stays_until_the_next():
    first, second = StateId(EPOCH, 1), StateId(EPOCH, 2)
    keys = {first: ("0" * 16,), second: ()}

    def after(mark, known, **more):
        return judge(mark, replace(everybody(**more), equal_at=known))

    mark = after(CommitRecord(), keys.get, replicated=(first,), is_due=True)
    assert (mark.persist, mark.once) == (first, keys[first])
    assert CommitRecord.from_json(mark.to_json()) == mark
    later = after(mark, lambda _state: (), replicated=(second, first), told=None, is_due=True)
    assert (later.committed, later.persist, later.once) == (second, first, keys[first])
    later = after(later, keys.get, replicated=(second,), told=first, is_due=True)
    assert (later.persist, later.once) == (second, ())


@pytest.mark.parametrize(("step", "is_missed"), [(1, False), (2, True), (None, True)])
def test_only_who_cannot_write_what_is_to_persist_keeps_the_others_from_waiting(step, is_missed):
    older, newest = StateId(EPOCH, 1), StateId(EPOCH, 2)
    before = CommitRecord(committed=newest, persist=newest)
    failed = None if step is None else StateId(EPOCH, step)
    word = FinalStatus(waits=True, trouble="no space", failed=failed)

    mark = judge(before, everybody(replicated=(newest, older), told=newest, last=word))

    assert mark.last.missed == (newest if is_missed else None)
    assert NodeStatus.from_json(NodeStatus(generation=5, last=word).to_json()).last == word


def test_of_a_generation_that_is_over_nothing_is_taken():
    mark = CommitRecord(generation=6)

    assert judge(mark, everybody(replicated=(StateId(EPOCH, 1),))) == mark


def test_a_state_of_another_epoch_is_not_committed():
    found = everybody(replicated=(StateId(EPOCH, 3), StateId(EPOCH + 1, 4)))

    assert judge(CommitRecord(), found).committed == StateId(EPOCH, 3)


def test_the_aim_is_as_far_ahead_as_the_news_takes_and_learns_from_what_was_missed():
    pacer = SavePacer()
    assert pacer.next_step() is None
    pacer.observe(
        {
            "a": NodeStatus(generation=0, decided=StateId(EPOCH, 100)),
            "b": NodeStatus(generation=0, decided=StateId(EPOCH, 90)),
        },
        0.0,
        2,
    )
    assert pacer.next_step() == 101
    pacer.observe({"a": NodeStatus(generation=0, decided=StateId(EPOCH, 200))}, 10.0, 2)
    assert pacer.next_step() == 201 + 10 * LEAD_S

    pacer.learn(CommitRecord(), CommitRecord(dropped=(StateId(1, 1),)), 10.0)
    assert pacer.next_step() == 201 + 20 * LEAD_S


def test_the_aim_is_no_further_ahead_than_the_slowest_answer_of_all_nodes():
    pacer, state = SavePacer(), StateId(EPOCH, 10)
    at = {name: NodeStatus(generation=0, decided=StateId(EPOCH, 0)) for name in "ab"}
    pacer.observe(at, 0.0, 2)
    at = {name: replace(at[name], decided=StateId(EPOCH, 100)) for name in "ab"}
    pacer.observe(at, 10.0, 2)
    pacer.learn(CommitRecord(), CommitRecord(committed=state), 10.0)
    pacer.observe(at | {"a": replace(at["a"], newest=state)}, 10.2, 2)
    assert pacer.next_step() == 101 + 10 * LEAD_S

    pacer.observe({name: replace(at[name], newest=state) for name in "ab"}, 10.5, 2)
    assert pacer.next_step() == 101 + 5

    pacer.learn(CommitRecord(), CommitRecord(dropped=(StateId(EPOCH, 20),)), 11.0)
    assert pacer.next_step() == 101 + 10


def test_what_had_been_named_when_a_state_was_dropped_is_no_reason_to_aim_further_yet():
    pacer, before = SavePacer(), CommitRecord(aim=StateId(EPOCH, 20))
    for step in (0, 10):
        pacer.observe({"a": NodeStatus(generation=0, decided=StateId(EPOCH, step))}, step / 10, 1)
    assert pacer.next_step() == 11 + 10 * LEAD_S
    for step, factor in ((20, 2), (30, 2), (31, 4)):
        after = CommitRecord(aim=StateId(EPOCH, 30), dropped=(StateId(EPOCH, step),))
        pacer.learn(before, after, 2.0)
        assert pacer.next_step() == 11 + factor * 10 * LEAD_S


def test_the_aim_goes_by_the_pace_of_the_last_steps_not_by_that_of_a_slow_start():
    pacer = SavePacer()
    for step in range(1, 100):
        status = NodeStatus(generation=0, decided=StateId(EPOCH, step))
        pacer.observe({"a": status}, 0.0 if step == 1 else 600 + step / 8, 1)

    assert pacer.next_step() == 100 + 8 * LEAD_S


@pytest.mark.parametrize("other", [None, NodeStatus(generation=5, in_flight=StateId(EPOCH, 1))])
def test_what_one_node_does_not_come_to_have_whole_is_overdue(other):
    pacer, state = SavePacer(), StateId(EPOCH, 1)
    word = {"a": NodeStatus(generation=5, whole=(state,)), **({"b": other} if other else {})}
    pacer.observe(word, 0.0, 2)
    pacer.observe(word, OVERDUE_S, 2)

    assert pacer.overdue(OVERDUE_S - 0.1) == set()
    assert pacer.overdue(OVERDUE_S) == {state}
    found = StatusSummary(
        generation=5, epoch=EPOCH, members=("a", "b"), statuses=word, nodes={"b": "n1"}
    )
    assert why_overdue(found, state) == "n1 did not have it 60.0 s after other nodes had"
    pacer.observe({}, OVERDUE_S, 2)
    assert pacer.overdue(9 * OVERDUE_S) == set()


def test_what_all_have_whole_waits_for_its_copies_for_as_long_as_they_may_take():
    pacer, state = SavePacer(), StateId(EPOCH, 1)
    one = NodeStatus(generation=5, whole=(state,), in_flight=state, decided=StateId(EPOCH, 9))
    words, there = {"a": one, "b": one}, replace(one, replicated=(state,))
    mark, found = (
        CommitRecord(),
        StatusSummary(generation=5, epoch=EPOCH, members=("a", "b"), statuses=words),
    )
    for now_s in range(0, 10 * round(OVERDUE_S), 5):
        # One whose keeper was slow has said nothing for a moment.
        pacer.observe({"a": one} if now_s % 100 == 0 else words, now_s, 2)
        mark = judge(mark, replace(found, overdue=pacer.overdue(now_s)))
    assert mark == CommitRecord()

    assert judge(mark, replace(found, statuses=dict.fromkeys("ab", there))).committed == state
    pacer.observe(words, COPIED_MAX_S, 2)
    assert pacer.overdue(COPIED_MAX_S - 0.1) == set()
    assert pacer.overdue(COPIED_MAX_S) == {state}
    late = replace(found, statuses={"a": there, "b": one}, overdue=pacer.overdue(COPIED_MAX_S))
    assert judge(mark, late).dropped == (state,)
    why = "the copies of what b saved were not at their holders after 60 min 00 s"
    assert why_overdue(late, state) == why


@given(said)
def test_words_come_back_as_they_were_said(word):
    assert NodeStatus.from_json(word.to_json()) == word


def test_notes_and_holdings_come_back_as_they_were():
    copy = ShardCopy(StateId(1, 2), Shard(0, 2), "ab", Digest(9, b"", "f" * 64), Tier.MEMORY, "n0")
    holding = Inventory(port=70, states=held_states([copy]), epoch_max=1)
    restore = RestorePlan(
        state=StateId(1, 2),
        epoch=2,
        world=2,
        tier=Tier.PEER,
        why=("a",),
        sources={0: ("n0",)},
        roots={0: "f" * 64},
    )
    notes = GenerationPlan(
        is_kept=True,
        placement=place(["n0", "n1"], 2),
        peers={"n0": ("10.0.0.1", 70)},
        restore=restore,
        epoch_max=1,
    )

    assert Inventory.from_json(holding.to_json()) == holding
    (back,) = holding.copies(copy.state, "n0")
    assert back == replace(copy, digest=Digest(0, b"", copy.digest.root))
    assert GenerationPlan.from_json(notes.to_json()) == notes


NAMES = [
    *("whole", "stored", "states", "port", "copies", "kept", "placement", "peers"),
    *("restore", "state", "sources", "committed", "generation", "epoch", "world", "tier"),
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(NAMES),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(json_values)
@pytest.mark.parametrize(
    "read",
    [
        NodeStatus.from_json,
        Inventory.from_json,
        GenerationPlan.from_json,
        CommitRecord.from_json,
        RestorePlan.from_json,
    ],
    ids=["said", "holding", "notes", "watermark", "restore"],
)
def test_whatever_another_agent_wrote_is_read_or_refused(read, data):
    with contextlib.suppress(MessageFormatError):
        read(data)
