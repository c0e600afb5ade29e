"""The agreement of agents on a fake clock: restarts, losses, partitions, spares, ends."""

import random
from dataclasses import replace

import pytest
from support.agreement import Player, World, by_the_table, restart

from gpuops.control.record import RunPhase
from gpuops.control.store import ControlStoreError
from gpuops.control.tcp.server_connection import REFUSED_PREFIX
from gpuops.control.transitions import readmit
from gpuops.errors import EXIT_NODE_UNHEALTHY
from gpuops.incident.decision import OnExhausted, ReportKind, RestartPolicy
from gpuops.log import NOTICE_LOGGER


def terms(low, high, **more):
    return RestartPolicy(nodes_min=low, nodes_max=high, **more)


def started(low, high, n_players, **more):
    world = World(terms(low, high), n_players, **more)
    world.run_until(lambda w: w.all_run(0, min(high, n_players)))
    return world


def test_full_number_of_nodes_starts_without_a_last_call():
    world = World(terms(2, 3), 3)

    assert world.run_until(lambda w: w.all_run(0, 3)) < 2


def test_fewer_nodes_start_after_the_first_call():
    world = World(terms(2, 3), 2, first_call_s=30.0)

    assert 29 < world.run_until(lambda w: w.all_run(0, 2)) < 33


def test_a_run_that_waits_says_once_who_has_come_and_who_was_refused(caplog):
    caplog.set_level("INFO", NOTICE_LOGGER)
    world = World(terms(2, 2), 1)
    refused = "an agent on node n9 (10.0.0.9) was refused: another job is running"
    world.players[0].store.put(f"{REFUSED_PREFIX}n9", refused.encode())
    for _ in range(60):
        world.run_once()

    first, second = (record.getMessage() for record in caplog.records)
    assert first == refused
    assert second.startswith("1 of at least 2 nodes came so far: n0; waiting for the others, 9 min")


def test_a_failure_on_one_node_restarts_all_within_two_seconds_and_keeps_ranks():
    world = started(3, 3, 3)
    before = {p.node: p.rank for p in world.players}
    world.players[1].fails = ReportKind.WORKERS_FAILED

    assert world.run_until(lambda w: w.all_run(1, 3)) <= 2
    assert {p.node: p.rank for p in world.players} == before


def sick(number, terms, n_players, **more):
    """Return a world in which one of the nodes fails its check before the first start."""
    world = World(terms, n_players, decide=by_the_table, **more)
    world.players[number].is_sick = True
    return world


def ended(world, code):
    return [p.exit_code for p in world.players if not p.is_sick] == [code] * (
        len(world.players) - 1
    )


@pytest.mark.parametrize("number", [0, 2])
def test_a_job_of_fixed_size_with_a_sick_node_ends_at_once_with_its_finding(number):
    world = sick(number, terms(3, 3), 3)

    assert world.run_until(lambda w: ended(w, 85)) <= 5
    assert world.players[1].link.record.decided_by != f"n{number}", "it leaves: who hears of it?"
    decision = world.players[1].link.record.decision
    assert (decision.rule, decision.cause.kind) == ("nodes.exhausted", ReportKind.GATE_FAILED)
    assert decision.reason.startswith(f"gpu_hw.row_remap on n{number}: a row waits")
    assert decision.exclude.keys() == {f"n{number}"}


def test_so_does_one_whose_node_is_sick_when_it_restarts():
    world = started(3, 3, 3, decide=by_the_table)
    world.players[1].is_sick = True
    world.players[2].fails = ReportKind.WORKERS_FAILED

    assert world.run_until(lambda w: ended(w, 85)) <= 5


@pytest.mark.parametrize(("low", "n_left", "spares"), [(2, 2, 1), (1, 1, 0)])
def test_a_spare_takes_the_place_of_a_sick_node_or_the_job_starts_smaller(low, n_left, spares):
    world = sick(1, terms(low, 2), 2 + spares, spares=spares)

    assert world.run_until(lambda w: w.all_run(0, n_left)) <= 5
    assert world.players[0].link.record.reason.endswith("restart without n1")

    world.players[0].fails = ReportKind.WORKERS_FAILED
    world.run_until(lambda w: w.all_run(1, n_left))
    decision = world.players[0].link.record.decision
    assert decision.cause.kind is ReportKind.WORKERS_FAILED, "not what kept a node out"


def decided_on_the_check(world, player=0):
    """Say whether the run ended with the finding of the check as its cause."""
    decision = world.players[player].link.record.decision
    return (decision.rule, decision.cause.kind) == ("nodes.exhausted", ReportKind.GATE_FAILED)


@pytest.mark.parametrize(("high", "spares"), [(2, 1), (3, 0)])
def test_a_spare_or_last_node_that_has_not_started_yet_is_waited_for(high, spares):
    """It may take minutes to pull its image."""
    world = sick(1, terms(2, high), 2, spares=spares)
    world.pass_time(300)
    assert world.players[0].exit_code is None

    world.players.append(Player(world, 2, order=2))
    assert world.run_until(lambda w: w.all_run(0, 2)) <= 5
    assert world.players[0].link.record.reason.endswith("restart without n1")


def test_one_that_does_not_come_within_the_join_timeout_leaves_the_finding_as_the_cause():
    world = sick(1, terms(2, 2), 2, spares=1)

    assert 599 < world.run_until(lambda w: w.players[0].exit_code == 85, limit_s=700) < 603
    assert decided_on_the_check(world)


def test_nodes_that_would_still_be_too_few_are_not_waited_for():
    """Two of three have come, one of them is sick, and all three are needed."""
    world = sick(1, terms(3, 3), 2)

    assert world.run_until(lambda w: w.players[0].exit_code == 85) <= 6
    assert decided_on_the_check(world)


def test_a_node_that_comes_after_a_sick_one_ends_at_once_with_its_finding():
    world = sick(0, terms(2, 2), 1)
    world.pass_time(60)

    world.players.append(Player(world, 1, order=1))
    assert world.run_until(lambda w: w.players[1].exit_code == 85) <= 5
    assert decided_on_the_check(world, 1)


def test_a_spare_that_never_came_is_not_waited_for_once_the_job_has_run():
    world = started(2, 2, 2, spares=1, first_call_s=1.0, decide=by_the_table)
    world.players[1].is_sick = True
    world.players[0].fails = ReportKind.WORKERS_FAILED

    assert world.run_until(lambda w: w.players[0].exit_code == 85) <= 5


def test_a_suspected_node_that_stays_is_not_said_to_leave():
    world = sick(1, terms(1, 4), 4)
    suspect = {"n2": "slow"}
    world.players[0].link.update_record(lambda now: replace(now, suspected=suspect))

    world.run_until(lambda w: w.all_run(0, 3))
    assert world.players[0].link.record.reason.endswith("; restart without n1")


def generations_on_board(world):
    """Return the generations of which anything lies on the board."""
    words = (key.split("/") for key in world.store.list(""))
    return {int(some[2]) for some in words if some[1:2] == ["gen"]}


def fail_until(world, generation):
    """Let nodes fail in turn until *generation* runs, the next one."""
    world.players[generation % len(world.players)].fails = ReportKind.WORKERS_FAILED
    world.run_until(lambda w: w.all_run(generation, len(w.players)))


def test_generations_that_are_over_leave_the_board():
    world = started(3, 3, 3)
    fail_until(world, 1)
    n_keys = len(world.store.list(""))

    for generation in range(2, 23):
        fail_until(world, generation)
        assert generations_on_board(world) == {generation - 1, generation}
        assert len(world.store.list("")) == n_keys


def test_a_checkpoint_that_was_left_out_may_be_loaded_again_once_it_was_saved_anew():
    failures = iter(
        (
            {"exclude": 100, "checkpoint_step": 100, "highest_step": 103},
            {"checkpoint_step": 90, "highest_step": 95},
            {"checkpoint_step": 100, "highest_step": 140},
        )
    )

    def decided(reports, cluster, history, now_s):
        changes = next(failures)
        exclude = changes.pop("exclude", None)
        made, note = restart(reports, cluster, history, now_s)
        failure = replace(made.failure, **changes)
        return replace(made, failure=failure, exclude_checkpoint=exclude), note

    world = started(2, 2, 2, decide=decided)
    seen = []
    for generation in (1, 2, 3):
        fail_until(world, generation)
        seen.append(world.players[0].link.record.excluded_checkpoint)

    assert seen == [100, 100, None]


def test_a_board_that_takes_nothing_away_keeps_no_generation_from_starting():
    world = started(3, 3, 3)
    for player in world.players:
        player.store.lose = lambda name: "call" if name == "delete" else None

    for generation in range(1, 5):
        fail_until(world, generation)

    assert generations_on_board(world) == set(range(5))


def test_a_frozen_node_is_replaced_by_the_spare_at_its_rank():
    world = started(2, 2, 3)
    frozen = world.players[0]
    frozen.is_frozen = True

    took_s = world.run_until(lambda w: w.players[2].running == 1)

    assert 14 <= took_s <= 18
    assert world.players[2].rank == 0
    assert world.players[1].rank == 1


def test_a_survivor_that_is_ready_late_keeps_its_place_though_a_spare_is_there():
    world = started(2, 2, 3)
    survivor, failed, spare = world.players
    failed.fails = ReportKind.WORKERS_FAILED
    world.run_until(lambda _w: survivor.left == 0)

    survivor.is_stuck = True
    world.pass_time(2.0)
    survivor.is_stuck = False
    world.run_until(lambda w: w.all_run(1, 2))

    assert (survivor.rank, failed.rank, spare.running) == (0, 1, None)


def test_a_thawed_node_fences_itself_and_waits_as_a_spare():
    world = started(2, 3, 3)
    frozen = world.players[2]
    frozen.is_frozen = True
    world.run_until(lambda w: w.players[0].running == 1)

    frozen.is_frozen = False
    frozen.act()
    assert frozen.running is None
    world.run_until(lambda w: not frozen.link.is_fenced, limit_s=5)
    assert world.players[0].running == 1


def test_a_node_that_comes_back_gets_a_seat_when_the_run_may_grow():
    world = started(2, 3, 3, grow_after_s=20.0)
    frozen = world.players[2]
    frozen.is_frozen = True
    world.run_until(lambda w: w.players[0].running == 1)
    frozen.is_frozen = False

    world.run_until(lambda w: w.all_run(2, 3))

    assert frozen.rank == 2


def test_a_flapping_node_restarts_the_others_three_times_an_hour_at_most():
    world = started(2, 3, 3, grow_after_s=1.0)
    flapping = world.players[2]
    for _ in range(6):
        flapping.is_frozen = True
        world.run_until(
            lambda w: (
                w.players[0].running is not None
                and w.players[2].is_frozen
                and w.players[0].link.record.phase is not RunPhase.COLLECT
                and len([p for p in w.players if p.running == w.players[0].running]) == 2
            )
        )
        flapping.is_frozen = False
        for _ in range(80):
            world.run_once()

    assert len(world.players[0].link.record.grown_at_s) == 3


def test_the_leaders_death_is_noticed_by_the_next_in_line():
    world = started(2, 3, 3)
    world.players[0].is_dead = True

    assert world.run_until(lambda w: w.players[1].running == 1) <= 18
    assert {world.players[1].rank, world.players[2].rank} == {0, 1}


def leaders(world):
    return [p.node for p in world.players if p.leader.is_leader and not p.is_dead]


def test_who_is_answered_late_leaves_the_lead_to_one_that_is_not_and_takes_it_back():
    world = started(3, 3, 3)
    world.players[0].is_answered_late(1.2)
    assert leaders(world) == ["n0"]

    world.run_until(lambda w: leaders(w) == ["n1"])
    world.players[2].fails = ReportKind.WORKERS_FAILED
    world.run_until(lambda w: w.all_run(1, 3))
    assert world.players[0].link.record.decided_by == "n1"

    world.players[0].is_answered_late(0.0)
    world.run_until(lambda w: leaders(w) == ["n0"])


def test_a_slow_one_leads_where_all_are_slow_or_it_is_alone():
    world = started(2, 3, 3)
    for player in world.players:
        player.is_answered_late(1.2)
    world.run_until(lambda w: all(p.link.is_slow for p in w.players))
    for _ in range(40):
        world.run_once()
    assert leaders(world) == ["n0"]

    world.players[0].is_dead = True
    world.run_until(lambda w: w.all_run(1, 2) and len(leaders(w)) == 1, limit_s=120)


def test_the_quick_one_dies_and_the_slow_one_leads_again():
    world = started(1, 2, 2)
    world.players[0].is_answered_late(1.2)
    world.run_until(lambda w: leaders(w) == ["n1"])

    world.players[1].is_dead = True
    world.run_until(lambda w: w.all_run(1, 1) and leaders(w) == ["n0"])


def test_two_deaths_at_once_are_survived():
    world = started(2, 4, 4)
    world.players[0].is_dead = world.players[1].is_dead = True

    world.run_until(lambda w: {p.rank for p in w.players[2:] if p.running == 1} == {0, 1})


def test_a_leader_that_dies_while_it_gathers_is_replaced():
    world = started(2, 3, 3)
    world.players[2].fails = ReportKind.WORKERS_FAILED
    world.clock.advance(0.25)
    world.players[2].act()
    world.players[2].act()
    world.players[0].is_dead = True

    world.run_until(lambda w: {p.rank for p in w.players[1:] if p.running is not None} == {0, 1})


def test_a_killed_agent_is_missed_within_seconds_and_a_frozen_one_after_its_silence():
    world = started(1, 3, 3)
    world.players[2].is_killed()

    assert world.run_until(lambda w: w.all_run(1, 2)) <= 5
    how = world.players[0].link.record.decision.cause.how
    assert how == "its agent's connection to the control store was closed, and no new one came"

    world.players[1].is_frozen = True
    assert 14 < world.run_until(lambda w: w.players[0].running == 2) < 19


def test_one_whose_connection_is_closed_ends_its_workers_before_the_others_go_on():
    world = started(1, 3, 3)
    one_generation_only(world)
    world.players[2].is_closed()

    world.run_until(lambda w: w.players[2].running is None, limit_s=2)
    assert world.run_until(lambda w: w.players[0].running == 1) <= 3
    world.players[2].store.is_cut = False
    world.run_until(lambda w: not w.players[2].link.is_fenced, limit_s=1)


def test_a_job_of_fixed_size_waits_for_a_killed_agent_that_is_started_again():
    world = started(3, 3, 3, decide=by_the_table)
    world.players[1].is_killed()
    world.pass_time(8)
    world.players[1] = Player(world, 1, order=1)

    world.run_until(lambda w: w.all_run(1, 3), limit_s=8)


def test_a_job_of_fixed_size_ends_without_a_killed_agent_as_without_a_silent_one():
    world = started(3, 3, 3, decide=by_the_table)
    world.players[1].is_killed()

    assert 15 < world.run_until(lambda w: w.players[0].exit_code == 85) < 20


def test_an_agent_that_leaves_is_not_waited_for():
    world = started(2, 2, 2, decide=by_the_table)
    gone = world.players[1]
    gone.is_dead = True
    for key in (gone.link.keys.heartbeat, gone.link.keys.agent):
        world.store.delete(key(gone.me.agent))

    assert world.run_until(lambda w: w.players[0].exit_code == 85) < 5
    assert world.players[0].link.record.decision.cause.how == "its agent left the run"


def dies_between_roster_and_record(world, player, generation=0):
    """Let *player* die once it has written the roster; the record does not say so yet."""
    key = player.link.keys.roster(generation)

    def lose(_name):
        if not world.store.get(key).version:
            return None
        player.is_dead, player.running = True, None
        return "call"

    player.store.lose = lose


def test_a_roster_that_names_its_dead_leader_never_runs():
    world = World(terms(2, 3), 3)
    dies_between_roster_and_record(world, world.players[0])
    ran = set()
    world.after_each.append(lambda w: ran.update(w.running()))

    world.run_until(lambda w: w.all_run(1, 2))

    assert ran == {1}
    assert "n0" in world.players[1].link.record.reason


def test_a_roster_of_a_leader_that_is_only_slow_runs():
    world = World(terms(2, 3), 3)
    slow, key = world.players[0], world.players[0].link.keys.roster(0)
    slow.store.lose = lambda _name: "call" if world.store.get(key).version else None
    world.run_until(lambda w: w.store.get(key).version)
    for player in world.players[1:]:
        player.leader._membership.current_leader = lambda _ns, me=player.me.agent: me

    world.run_until(lambda w: w.players[1].running == w.players[2].running == 0, limit_s=5)


def test_a_roster_that_cannot_be_read_holds_nobody_up():
    world = World(terms(2, 2), 2)
    world.store.put(world.players[0].link.keys.roster(0), b"of another version")

    world.run_until(lambda w: w.all_run(1, 2))


def test_nor_does_one_that_nobody_deleted_when_another_was_formed():
    world = World(terms(2, 2), 2)
    world.store.put(world.players[0].link.keys.roster(0), b"of another version")
    for player in world.players:
        player.store.lose = lambda name: "call" if name == "delete" else None

    world.run_until(lambda w: w.all_run(1, 2))


def test_a_partition_leaves_the_side_with_the_board_and_the_other_side_fences():
    world = started(2, 3, 3)
    cut = world.players[1]
    cut.store.is_cut = True
    overlap = []
    world.after_each.append(lambda w: overlap.append(len(w.running())))

    world.run_until(lambda w: w.players[0].running == 1)

    assert cut.running is None
    assert max(overlap) <= 1
    cut.store.is_cut = False
    world.run_until(lambda w: not cut.link.is_fenced, limit_s=5)


def test_everybody_cut_off_fences_and_goes_on_together_afterwards():
    world = started(2, 2, 2)
    for player in world.players:
        player.store.is_cut = True
    world.run_until(lambda w: not w.running(), limit_s=11)
    for player in world.players:
        player.store.is_cut = False

    world.run_until(lambda w: w.all_run(1, 2))


def test_the_run_ends_when_all_are_done():
    world = started(2, 2, 2)
    for player in world.players:
        player.done = True

    world.run_until(lambda w: {p.exit_code for p in w.players} == {0})


def test_one_that_dies_after_it_was_done_is_not_missed():
    world = started(2, 2, 2)
    world.players[1].done = True
    for _ in range(8):
        world.run_once()
    world.players[1].is_dead = True
    world.players[0].done = True

    world.run_until(lambda w: w.players[0].exit_code == 0, limit_s=3)


def test_done_here_while_others_fail_restarts_everybody():
    world = started(2, 2, 2)
    world.players[0].done = True
    for _ in range(8):
        world.run_once()
    world.players[0].done = False
    world.players[1].fails = ReportKind.WORKERS_FAILED

    world.run_until(lambda w: w.all_run(1, 2))


def test_a_drain_ends_with_85_once_all_have_stopped():
    world = started(2, 2, 2)
    player = world.players[1]
    player.link.update_record(
        lambda now: replace(now, phase=RunPhase.DRAIN, drain_signal="SIGUSR1")
    )

    world.run_until(lambda w: {p.exit_code for p in w.players} == {85})


def test_a_drain_goes_on_until_the_last_state_of_every_node_has_persisted_or_one_dies():
    for dies in (False, True):
        world = started(2, 2, 2)
        world.players[0].saves_s = 30.0
        world.players[1].drains = True
        world.run_until(lambda w: w.players[1].left == 0)
        began_ns = world.clock.mono_ns()
        world.players[1].is_dead = dies
        world.run_until(lambda w: w.players[0].exit_code == 85, limit_s=40)

        assert (world.clock.mono_ns() - began_ns > 29e9) is not dies


def test_too_few_nodes_end_with_85_after_the_join_timeout():
    world = World(replace(terms(2, 2), on_exhausted=OnExhausted.REQUEUE), 2, join_timeout_s=40.0)
    world.run_until(lambda w: w.all_run(0, 2))
    world.players[1].is_dead = True

    world.run_until(lambda w: w.players[0].exit_code == 85, limit_s=80)


def test_an_agent_that_was_restarted_by_hand_takes_its_old_rank():
    world = started(3, 3, 3)
    world.players[1].is_dead = True
    world.players.append(Player(world, 1, order=1))

    world.run_until(lambda w: w.players[-1].running == 1)

    assert world.players[-1].rank == 1


def test_an_excluded_node_gets_no_seat():
    world = started(2, 3, 3)
    world.players[0].link.update_record(lambda now: replace(now, excluded={"n1": "it is sick"}))
    world.players[0].fails = ReportKind.WORKERS_FAILED

    world.run_until(lambda w: w.players[2].running == 1)

    assert world.players[1].running is None


def test_a_node_that_was_excluded_and_readmitted_trains_again():
    world = started(2, 3, 3, grow_after_s=1.0)
    world.players[0].link.update_record(lambda now: replace(now, excluded={"n1": "it is sick"}))
    world.players[0].fails = ReportKind.WORKERS_FAILED
    world.run_until(lambda w: w.players[1].exit_code == EXIT_NODE_UNHEALTHY)
    world.players[0].link.update_record(lambda now: readmit(now, "n1"))
    world.players.append(Player(world, 1))

    world.run_until(lambda w: w.players[3].running is not None, limit_s=900.0)
    assert len(world.running()) == 1


def test_node_unit_leaves_the_odd_one_as_a_spare():
    world = World(terms(2, 4, node_unit=2), 3, first_call_s=5.0)

    world.run_until(lambda w: w.all_run(0, 2))
    assert len([p for p in world.players if p.running is None]) == 1


def test_a_clock_that_runs_apart_kills_nobody():
    world = started(2, 2, 2)
    for _ in range(200):
        world.run_once()
        world.clock._now_us += 60_000_000

    assert world.all_run(0, 2)


def one_generation_only(world):
    world.after_each.append(lambda w: None if len(w.running()) <= 1 else pytest.fail(w.describe()))


@pytest.mark.parametrize("ends_in_s", [1.0, 5.0, 9.0, 14.0])
def test_no_generation_begins_while_workers_of_the_last_are_still_being_ended(ends_in_s):
    world = started(2, 3, 3)
    one_generation_only(world)
    world.players[2].ends_in_s = ends_in_s
    world.players[1].fails = ReportKind.WORKERS_FAILED

    took_s = world.run_until(lambda w: w.all_run(1, 3))

    assert ends_in_s <= took_s < ends_in_s + 3


def test_growth_waits_for_the_last_workers_too():
    world = started(2, 3, 2, first_call_s=2.0, grow_after_s=1.0)
    one_generation_only(world)
    world.players[1].ends_in_s = 12.0
    world.players.append(Player(world, 2, order=2))

    world.run_until(lambda w: w.all_run(1, 3), limit_s=90)


def test_workers_of_an_agent_whose_main_thread_hangs_are_ended_before_the_others_go_on():
    world = started(2, 3, 3)
    one_generation_only(world)
    world.players[0].is_stuck = True
    world.players[1].fails = ReportKind.WORKERS_FAILED

    world.run_until(lambda w: w.players[1].running == 1 and w.players[2].running == 1)

    assert world.players[0].running is None


def test_a_run_that_is_nearly_done_does_not_grow():
    world = started(2, 3, 2, first_call_s=2.0, grow_after_s=1.0)
    world.players[0].done = True
    for _ in range(8):
        world.run_once()
    world.players.append(Player(world, 2, order=2))
    for _ in range(400):
        world.run_once()
    world.players[1].done = True

    world.run_until(lambda w: {p.exit_code for p in w.players} == {0})

    assert world.players[0].link.record.generation == 0


def test_a_board_whose_clock_jumps_back_does_not_prolong_a_back_off():
    world = started(2, 2, 2, decide=backing_off)
    world.players[1].fails = ReportKind.WORKERS_FAILED
    world.run_until(lambda w: w.players[0].link.record.generation == 1)
    world.store._shared.started_ns += 3600 * 10**9

    assert 3 < world.run_until(lambda w: w.all_run(1, 2)) < 6


def backing_off(*known):
    made, note = restart(*known)
    return replace(made, backoff_s=4.0), note


def hurt(rng, world, victim):
    """Do one random thing to *victim*."""
    act = rng.choice(["fail", "freeze", "cut", "die", "wait", "slow"])
    if act == "fail" and victim.running is not None:
        victim.fails = ReportKind.WORKERS_FAILED
    elif act == "freeze":
        # Its workers are frozen with it: they train nowhere, and are ended when it thaws.
        victim.is_frozen = True
    elif act == "cut":
        victim.store.is_cut = True
    elif act == "slow":
        victim.is_answered_late(rng.choice([0.0, 1.2]))
    elif act == "die" and len([p for p in world.players if not p.is_dead]) > 3:
        victim.is_dead, victim.running = True, None


@pytest.mark.parametrize("seed", range(60))
def test_random_faults_never_run_two_generations_and_end_well(seed):
    rng = random.Random(seed)
    world = World(terms(2, 4), 5)
    world.run_until(lambda w: w.all_run(0, 4))

    def one_generation(w):
        assert len(w.running()) <= 1, w.describe()

    world.after_each.append(one_generation)
    for _ in range(12):
        victim = rng.choice([p for p in world.players if not p.is_dead])
        hurt(rng, world, victim)
        for _ in range(rng.randrange(4, 120)):
            world.run_once()
        if rng.random() < 0.6:
            victim.store.is_cut = victim.is_frozen = False
    for player in world.players:
        player.store.is_cut = player.is_frozen = False
    for player in [p for p in world.players if not p.is_dead]:
        player.done = True
    world.run_until(lambda w: {p.exit_code for p in w.players if not p.is_dead} == {0}, limit_s=200)


def test_a_board_that_fails_in_the_middle_of_a_turn_is_survived():
    world = started(2, 2, 2)
    world.players[0].store.is_cut = True
    with pytest.raises(ControlStoreError):
        world.players[0].threads.run_once(hold_s=0.0)
    world.players[0].store.is_cut = False

    world.players[0].threads.run_once(hold_s=0.0)
