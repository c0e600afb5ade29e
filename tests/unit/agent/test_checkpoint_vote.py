"""Ranks of several nodes are compared by whoever leads, and one of their nodes tells of it."""

import random
from dataclasses import replace

import pytest
from support.kept_states import SavingWorld

from gpuops.agent.checkpoint.messages import CommitRecord, NodeStatus
from gpuops.agent.checkpoint.replica_check import ReplicaCheck, ReplicaDifferenceReporter
from gpuops.checkpoint.agreement.replica_check import (
    RANK_DIGESTS_MAX,
    REPORTS_MAX,
    GroupDigest,
    RankDigest,
    ReplicaOutcome,
    ReplicaVerdict,
    group_digests_from_json,
    group_digests_to_json,
    replica_report_from_json,
    replica_report_to_json,
)
from gpuops.checkpoint.keeper.replica_digests import rank_digest_of
from gpuops.checkpoint.types import StateId
from gpuops.incident.decision import ReportKind, RestartPolicy

N_TENSORS = 40
APART = ReplicaVerdict(ReplicaOutcome.APART, (0, 1, 2, 3))


def state(step, epoch=1):
    return StateId(epoch, step)


def said(step, *ranks, wrong=None, key="k", n_ranks=4):
    """Return what a node with *ranks* says; *wrong* has the tensors that differ, by rank."""
    sketches = {}
    for rank in ranks:
        digests = [b"%08d%08d" % (step, number) for number in range(N_TENSORS)]
        for number in (wrong or {}).get(rank, ()):
            digests[number] = b"%08d%08d" % (number, 777 + rank)
        sketches[rank] = rank_digest_of(digests)
    ballot = GroupDigest(
        state=state(step), key=key, n_ranks=n_ranks, n_tensors=N_TENSORS, rank_digests=sketches
    )
    return NodeStatus(generation=1, group_digests=(ballot,))


def hear(polls, words):
    return polls.observe(words, 1)


def test_equal_ranks_are_no_news():
    polls = ReplicaCheck()

    assert [hear(polls, [said(n, 0, 1), said(n, 2, 3)]) for n in range(9)] == [[]] * 9


def test_who_differs_is_found_though_nodes_speak_of_states_at_different_times():
    polls, bad = ReplicaCheck(), {2: [17]}
    heard = [
        hear(polls, [said(1, 0, 1)]),
        hear(polls, [said(2, 0, 1), said(1, 2, 3)]),
        hear(polls, [said(3, 0, 1), said(2, 2, 3, wrong=bad)]),
        hear(polls, [said(4, 0, 1), said(3, 2, 3, wrong=bad)]),
        hear(polls, [said(4, 0, 1), said(4, 2, 3, wrong=bad)]),
    ]

    assert [len(each) for each in heard] == [0, 0, 1, 0, 0]
    (told,) = heard[2]
    found = told.difference
    assert (found.state, found.last_equal) == (state(2), state(1))
    assert (found.verdict.outcome, found.verdict.suspects) == (ReplicaOutcome.MINORITY, (2,))
    assert (told.number, told.reporter_rank) == (17, 2)


def outcomes(heard):
    """Return the outcomes that were found, in order."""
    return [told.difference.verdict.outcome for found in heard for told in found]


def test_ranks_that_are_equal_again_are_told_of_once_with_whom_it_was_told_of():
    polls, bad = ReplicaCheck(), {2: [17]}
    flips = [{}, bad, bad, {}, {}, bad, {}]
    heard = [hear(polls, [said(n, 0, 1), said(n, 2, 3, wrong=w)]) for n, w in enumerate(flips)]

    assert [len(each) for each in heard] == [0, 1, 0, 1, 0, 1, 1]
    assert outcomes(heard) == [ReplicaOutcome.MINORITY, ReplicaOutcome.ALIKE] * 2
    ((over,),) = [heard[3]]
    assert (over.difference.state, over.difference.ranks) == (state(3), (0, 1, 2, 3))
    assert over.reporter_rank == 2


def test_a_node_that_speaks_late_or_twice_changes_nothing():
    polls, bad = ReplicaCheck(), {2: [17]}
    hear(polls, [said(1, 0, 1), said(1, 2, 3)])
    assert len(hear(polls, [said(3, 0, 1), said(3, 2, 3, wrong=bad)])) == 1
    late = [said(2, 0, 1), said(2, 2, 3)], [said(1, 0, 1), said(1, 2, 3)], [said(3, 0, 1)]

    assert [hear(polls, words) for words in late] == [[], [], []]
    assert [hear(polls, [said(n, 0, 1)]) for n in range(4, 40)] == [[]] * 36
    assert outcomes([hear(polls, [said(39, 2, 3)])]) == [ReplicaOutcome.ALIKE]


def test_what_comes_and_goes_is_told_of_a_few_times_and_each_is_closed():
    polls = ReplicaCheck()
    flips = [{}, {2: [17]}] * 40
    heard = [hear(polls, [said(n, 0, 1), said(n, 2, 3, wrong=w)]) for n, w in enumerate(flips)]

    assert outcomes(heard) == [ReplicaOutcome.MINORITY, ReplicaOutcome.ALIKE] * REPORTS_MAX


def test_ranks_that_are_trained_apart_later_are_not_compared_again():
    polls, everything = ReplicaCheck(), {1: range(N_TENSORS)}
    words = [{}, everything, {}, everything, {1: [3]}]
    heard = [
        hear(polls, [said(n, 0, n_ranks=2), said(n, 1, wrong=w, n_ranks=2)])
        for n, w in enumerate(words)
    ]

    assert outcomes(heard) == [ReplicaOutcome.APART]


def test_another_leader_goes_on_from_what_is_written_down():
    first, bad = ReplicaCheck(), {2: [17]}
    hear(first, [said(1, 0, 1), said(1, 2, 3)])
    second = ReplicaCheck()
    second.restore([], first.last_equal)
    (told,) = hear(second, [said(2, 0, 1), said(2, 2, 3, wrong=bad)])
    assert (told.difference.last_equal, told.number) == (state(1), 17)
    third = ReplicaCheck()
    third.restore([told], second.last_equal)

    assert hear(third, [said(3, 0, 1), said(3, 2, 3, wrong=bad)]) == []
    (over,) = hear(third, [said(4, 0, 1), said(4, 2, 3)])
    assert (over.difference.verdict.outcome, over.reporter_rank) == (ReplicaOutcome.ALIKE, 2)
    for polls in (first, second, third):
        polls.restore([told, over], third.last_equal)
        assert hear(polls, [said(5, 0, 1), said(5, 2, 3)]) == []
    assert first.last_equal == {"k": state(5)}
    apart = ReplicaCheck()
    apart.restore([replace(told, difference=replace(told.difference, verdict=APART))], {})
    assert hear(apart, [said(6, 0, 1), said(6, 2, 3, wrong=bad)]) == []


def test_only_so_many_sets_of_ranks_are_remembered():
    polls = ReplicaCheck()
    for number in range(20):
        hear(polls, [said(number, 0, 1, key=f"k{number}", n_ranks=2)])

    assert list(polls.last_equal) == [f"k{number}" for number in range(19, 11, -1)]


def test_two_nodes_with_a_rank_each_have_no_majority():
    polls = ReplicaCheck()
    hear(polls, [said(1, 0, n_ranks=2), said(1, 1, n_ranks=2)])
    (told,) = hear(polls, [said(2, 0, n_ranks=2), said(2, 1, wrong={1: [3, 4]}, n_ranks=2)])

    assert told.difference.verdict.outcome is ReplicaOutcome.TIE
    assert told.difference.verdict.suspects == (0, 1)
    assert told.number is None


def test_two_that_differ_nearly_everywhere_train_apart():
    polls = ReplicaCheck()
    hear(polls, [said(1, 0, n_ranks=2), said(1, 1, n_ranks=2)])
    everything = {1: range(N_TENSORS)}
    (told,) = hear(polls, [said(2, 0, n_ranks=2), said(2, 1, wrong=everything, n_ranks=2)])

    assert told.difference.verdict.outcome is ReplicaOutcome.APART


def test_what_differs_from_the_first_on_is_said_once_and_not_compared_again():
    polls, bad = ReplicaCheck(), {0: [1]}
    heard = [hear(polls, [said(n, 0, 1, wrong=bad), said(n, 2, 3)]) for n in range(3)]

    assert [len(each) for each in heard] == [1, 0, 0]
    assert heard[0][0].difference.verdict.outcome is ReplicaOutcome.APART


def test_a_node_that_says_nothing_leaves_it_open():
    polls = ReplicaCheck()

    assert hear(polls, [said(1, 0, 1), NodeStatus(generation=1)]) == []
    assert hear(polls, [said(2, 0, 1, wrong={0: [1]})]) == []


def test_sets_that_say_other_things_do_not_meet():
    polls = ReplicaCheck()
    words = [said(1, 0, 1, n_ranks=2), said(1, 2, 3, key="b", n_ranks=2)]

    assert hear(polls, words) == []
    assert polls.observe([said(2, 0, 1, wrong={0: [1]}, n_ranks=2)], 2) == []  # of former workers


def test_words_come_back_as_they_were_and_are_short():
    word = said(12, 0, 1, 2, 3, 4, 5, 6, 7, n_ranks=64)
    back = NodeStatus.from_json(word.to_json())
    assert back == word
    assert len(str(word.to_json()["group_digests"])) < 150
    ballots = [said(1, rank, key=f"k{rank}").group_digests[0] for rank in range(30)]
    back = group_digests_from_json(group_digests_to_json(ballots))
    assert back == tuple(ballots[:RANK_DIGESTS_MAX])
    assert len(back) > 16  # of HSDP: the shards of 16 ranks, and what all of them share
    polls = ReplicaCheck()
    hear(polls, [said(1, 0, 1), said(1, 2, 3)])
    (told,) = hear(polls, [said(2, 0, 1), said(2, 2, 3, wrong={3: [9]})])
    placed = replace(told, nodes=("n3",))
    mark = CommitRecord(differ=(told, placed), alike={"k": state(1), "b": state(2)})
    assert CommitRecord.from_json(mark.to_json()) == mark
    assert {"differ", "alike"}.isdisjoint(CommitRecord().to_json())
    many = {str(number): [1, 2] for number in range(9)}
    for odd in (7, [], {"k": 1}, {"k": [1, -2]}, {"": [1, 2]}, many):
        assert CommitRecord.from_json({**mark.to_json(), "alike": odd}).alike == {}
    assert replica_report_from_json({**replica_report_to_json(told), "nodes": ["n" * 256]}) is None


@pytest.mark.parametrize("seed", range(300))
def test_words_that_are_none_say_nothing(seed):
    dice = random.Random(seed)
    row = [1, 2, "key", 4, 40, [0, 2], "A" * 76]
    odd = [None, -1, 2**80, "x", "x" * 99, [], [1], [2, 1.5], [0, 10**9], {}, True]
    bad = list(row)
    bad[dice.randrange(len(row))] = dice.choice(odd)
    assert all(isinstance(each.rank_digests, dict) for each in group_digests_from_json([bad]))
    assert group_digests_from_json(dice.choice(odd)) == ()
    polls = ReplicaCheck()
    hear(polls, [said(1, 0, 1), said(1, 2, 3)])
    (told,) = hear(polls, [said(2, 0, 1), said(2, 2, 3, wrong={3: [9]})])
    word = replica_report_to_json(told)
    assert replica_report_from_json({**word, dice.choice(list(word)): dice.choice(odd)}) != told
    assert replica_report_from_json(dice.choice(odd)) is None


def test_a_sketch_in_a_word_has_one_length():
    with pytest.raises(ValueError, match="56"):
        RankDigest.from_bytes(bytes(55))


def running(low=3, high=3, n_players=3, **more):
    world = SavingWorld(
        RestartPolicy(nodes_min=low, nodes_max=high, restarts_max=99), n_players, **more
    )
    world.run_until(lambda w: w.all_run(0, high))
    world.pass_time(15)
    assert len(world.committed) >= 2
    return world


@pytest.mark.parametrize("seed", range(3))
def test_a_flip_on_one_of_three_nodes_is_told_once_by_that_node(seed):
    world = running(seed=seed)
    assert world.told() == []
    bad = world.players[seed % 3]
    bad.keeper.flipped_from = world.step + 1
    world.pass_time(30)

    ((node, told),) = world.told()
    assert node == bad.node
    assert told.difference.verdict.suspects == (bad.keeper.shard.rank,)
    assert told.number == 7
    assert told.nodes == (node,)
    assert told.difference.last_equal < told.difference.state
    assert told.difference.state.step >= bad.keeper.flipped_from
    bad.keeper.mended_from = world.step + 1
    world.pass_time(30)
    ((_, _), (teller, over)) = world.told()
    assert (teller, over.difference.verdict.outcome) == (node, ReplicaOutcome.ALIKE)


def test_another_generation_does_not_tell_it_again_and_says_when_it_is_over():
    world = running()
    bad = world.players[2]
    bad.keeper.flipped_from = world.step + 1
    world.pass_time(30)
    ((node, first),) = world.told()
    assert first.difference.verdict.outcome is ReplicaOutcome.MINORITY
    world.players[1].fails = ReportKind.WORKERS_FAILED
    world.run_until(lambda w: w.all_run(1, 3))
    world.pass_time(30)
    assert len(world.told()) == 1
    bad.keeper.mended_from = world.step + 1
    world.pass_time(30)

    (_, (teller, over)) = world.told()
    assert (teller, over.difference.verdict.outcome) == (node, ReplicaOutcome.ALIKE)
    assert over.difference.state.epoch > first.difference.state.epoch


def test_a_flip_before_a_restart_is_told_after_it_and_blames_no_node():
    world = running()
    bad = world.players[2]
    world.players[1].fails = ReportKind.WORKERS_FAILED
    world.run_until(lambda w: all(player.running != 0 for player in w.players))
    bad.keeper.flipped_from = 0
    world.run_until(lambda w: w.all_run(1, 3))
    world.pass_time(30)

    ((node, told),) = world.told()
    assert (node, told.difference.verdict.outcome) == (bad.node, ReplicaOutcome.MINORITY)
    assert told.difference.last_equal.epoch < told.difference.state.epoch
    assert told.nodes == ()


def test_two_leaders_that_found_the_same_are_heard_once():
    world = running()
    world.players[2].keeper.flipped_from = world.step + 1
    world.pass_time(30)
    ((_, told),) = world.told()
    found, bad = told.difference, world.players[2]
    later = replace(found, state=replace(found.state, step=found.state.step + 9))
    both = [told, replace(told, difference=later)]
    bad.keeper.told.clear()
    differing = ReplicaDifferenceReporter(bad.me)
    for _ in range(2):
        differing.report_new(
            bad.keeper.report_difference, bad.leader.roster, both, found.state.epoch
        )

    assert bad.keeper.told == [told]


def test_ranks_without_a_majority_are_told_of_with_their_nodes():
    world = running(2, 2, 2)
    world.players[1].keeper.flipped_from = world.step + 1
    world.pass_time(30)

    ((node, told),) = world.told()
    assert told.difference.verdict.suspects == (0, 1)
    assert set(told.nodes) == {player.node for player in world.players}
    assert told.nodes[0] == node
