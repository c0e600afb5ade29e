"""Own times of ranks that wait for one another: built jobs whose slow rank is known."""

import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stepped_job import Call, ddp, fsdp, traces

from gpuops.detect.own_time import NO_TIMING, OVER_NODES, Measure, own_times, step_spans
from gpuops.detect.slow_rank import SlowRankDetector
from gpuops.wire.ring import STEP_UNKNOWN, Beat, StepSource, WorkerPhase

# Each backward pass ends with its gradients reduced, two passes a step.
ACCUMULATION = [
    *(Call("all_reduce", 0.04), Call("all_reduce", 0.01, blocks=True)),
    *(Call("all_reduce", 0.04), Call("all_reduce", 0.01)),
]
# The loss is summed for a log after all gradients are there.
LOGGED = [*ddp()[:-1], Call("all_reduce", 0.025, blocks=True), Call("all_reduce", 0.0005)]
TENSOR_PARALLEL = [
    *(Call("all_reduce", 0.02, blocks=True, groups=((0, 1), (2, 3))) for _ in range(4)),
    Call("all_reduce", 0.02, sizes=((9,),)),
]


def medians(found):
    return {rank: statistics.median(steps.seconds.values()) for rank, steps in found.items()}


def named(found):
    """Return whom the detector names at the end of the steps that all ranks have."""
    detector = SlowRankDetector({rank: steps.role for rank, steps in found.items()})
    last = ()
    for step in sorted(set.intersection(*(set(s.seconds) for s in found.values()))):
        last = detector.feed({rank: steps.seconds[step] for rank, steps in found.items()})
    return {item.rank for item in last}


@pytest.mark.parametrize(
    ("program", "n_ranks", "ratio"),
    [
        (ddp(), 3, 1.25),
        (ddp(1), 3, 1.25),
        (fsdp(), 3, 1.25),
        (ACCUMULATION, 3, 1.25),
        (LOGGED, 3, 1.25),
        (TENSOR_PARALLEL, 4, 1.25),
        ([Call("all_reduce", 1800.0), Call("all_reduce", 1800.0)], 3, 1.25),
    ],
    ids=["ddp", "one bucket", "fsdp", "accumulation", "logged", "tensor-parallel", "an hour"],
)
@pytest.mark.parametrize("noise", [0.0005, 0.01])
def test_the_rank_that_computes_longer_is_named_and_nobody_else(program, n_ranks, ratio, noise):
    found, why = own_times(traces(program, n_ranks, slow={1: ratio}, noise=noise), n_ranks)

    own = medians(found)
    others = statistics.median(own[rank] for rank in own if rank != 1)
    assert why == ""
    assert all(steps.measure is Measure.OWN for steps in found.values())
    assert own[1] / others == pytest.approx(ratio, rel=0.08)
    assert named(found) == {1}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("program", "n_ranks"),
    [(ddp(), 8), (fsdp(), 8), (ACCUMULATION, 8), (LOGGED, 8), (TENSOR_PARALLEL, 4)],
    ids=["ddp", "fsdp", "accumulation", "logged", "tensor-parallel"],
)
def test_of_healthy_ranks_nobody_is_named(program, n_ranks, seed):
    for noise in (0.001, 0.01, 0.05):
        found, _ = own_times(traces(program, n_ranks, seed=seed, noise=noise), n_ranks)
        assert named(found) == set()


def test_all_ranks_slow_are_all_alike():
    job = traces(fsdp(), 4, slow=dict.fromkeys(range(4), 1.5))

    assert named(own_times(job, 4)[0]) == set()


def test_a_rank_that_saves_in_every_tenth_step_is_not_slow():
    job = traces(ddp(), 4, slow={0: lambda step: 8.0 if step % 10 == 0 else 1.0})

    assert named(own_times(job, 4)[0]) == set()


def test_steps_without_a_collective_count_as_they_are():
    job = traces([*ddp()], 3, slow={2: 1.3})
    # A step in 40 has collectives, as with local SGD: the ranks do not wait in the others.
    alone = {
        rank: replace(trace, dump=replace(trace.dump, calls=trace.dump.calls[:2]))
        for rank, trace in job.items()
    }

    found, _ = own_times(alone, 3)

    assert {rank: len(steps.seconds) for rank, steps in found.items()} == dict.fromkeys(
        range(3), 29
    )
    assert found[0].seconds[20] == pytest.approx(found[0].step_s, rel=0.1)


def test_only_steps_whose_calls_the_recorder_still_holds_are_used():
    job = traces(ddp(), 3)
    newest = {
        rank: replace(trace, dump=replace(trace.dump, calls=trace.dump.calls[-18:]))
        for rank, trace in job.items()
    }

    found, _ = own_times(newest, 3)

    assert all(sorted(steps.seconds) == [27, 28, 29, 30] for steps in found.values())


def test_after_a_step_of_the_wall_clock_only_the_calls_since_then_are_used():
    hour_ns = 3600 * 10**9
    job = {}
    for rank, trace in traces(ddp(), 3, slow={1: 1.25}).items():
        calls = trace.dump.calls
        later = [replace(call, created_ns=call.created_ns + hour_ns) for call in calls[60:]]
        dump = replace(trace.dump, calls=(*calls[:60], *later))
        job[rank] = replace(trace, dump=dump, wall_offset_ns=trace.wall_offset_ns + hour_ns)

    found, _ = own_times(job, 3)

    assert all(sorted(steps.seconds) == list(range(16, 31)) for steps in found.values())
    assert named(found) == {1}


def test_a_rank_that_started_late_is_compared_in_the_steps_it_has():
    job = traces(ddp(), 3, slow={1: 1.25})
    late = job[2]
    spans = late.spans[10:]
    job[2] = replace(late, spans=spans, dump=replace(late.dump, calls=late.dump.calls[40:]))

    found, _ = own_times(job, 3)

    assert min(found[2].seconds) == 12
    assert medians(found)[1] / medians(found)[2] == pytest.approx(1.25, rel=0.05)


def test_of_one_rank_all_of_its_step_is_its_own():
    found, why = own_times(traces(ddp(), 1), 1)

    assert why == ""
    assert medians(found)[0] == pytest.approx(found[0].step_s, rel=0.01)


def test_pipeline_stages_have_different_roles_and_data_parallel_ranks_the_same():
    sizes = {0: ((10,),), 1: ((20,),)}
    pairs = ((0, 2), (1, 3))
    job = traces([Call("all_reduce", 0.05, groups=pairs)], 4)
    for rank, trace in job.items():
        calls = tuple(replace(call, sizes=sizes[rank % 2]) for call in trace.dump.calls)
        job[rank] = replace(trace, dump=replace(trace.dump, calls=calls))

    found, _ = own_times(job, 4)

    roles = {rank: steps.role for rank, steps in found.items()}
    assert roles[0] == roles[2] != roles[1] == roles[3]


def test_sizes_that_differ_from_step_to_step_make_no_role():
    job = traces(ddp(2), 3)
    for rank, trace in job.items():
        calls = tuple(
            replace(call, sizes=((call.number * (rank + 1),),)) for call in trace.dump.calls
        )
        job[rank] = replace(trace, dump=replace(trace.dump, calls=calls))

    assert len({steps.role for steps in own_times(job, 3)[0].values()}) == 1


def on_one_node(job, ranks):
    return {rank: trace for rank, trace in job.items() if rank in ranks}


def test_gradients_reduced_over_nodes_leave_each_node_its_ranks_own_times():
    job = traces(ddp(), 4, slow={3: 1.25})

    first, why = own_times(on_one_node(job, {0, 1}), 4)
    second, _ = own_times(on_one_node(job, {2, 3}), 4)

    assert why == ""
    assert named({**first, **second}) == {3}


def test_where_all_ranks_wait_over_nodes_only_what_follows_the_last_wait_is_seen():
    job = traces([*fsdp()[:4], Call("all_gather", 0.0, blocks=True)], 4, slow={3: 1.25})

    first, _ = own_times(on_one_node(job, {0, 1}), 4)
    second, _ = own_times(on_one_node(job, {2, 3}), 4)

    assert named({**first, **second}) == set()


def test_who_waits_for_another_node_in_a_smaller_group_is_not_judged():
    pairs = ((0, 3), (1, 2))
    job = traces([Call("all_reduce", 0.05, blocks=True, groups=pairs), *ddp(1)], 4)

    assert own_times(on_one_node(job, {0, 1}), 4) == ({}, OVER_NODES)


def timed(job, slow=()):
    """Return *job* as NCCL records it: all but the *slow* wait 30 ms in their last call."""
    found = {}
    for rank, trace in job.items():
        calls = tuple(
            replace(call, backend="nccl", duration_s=0.002 if rank in slow else 0.032)
            for call in trace.dump.calls
        )
        found[rank] = replace(trace, dump=replace(trace.dump, calls=calls))
    return found


def test_with_nccl_the_seconds_in_collectives_are_taken():
    found, why = own_times(timed(traces(ddp(1), 3), slow={1}), 3)

    assert why == ""
    assert {steps.measure for steps in found.values()} == {Measure.IN_COLLECTIVES}
    assert medians(found) == pytest.approx({0: 0.032, 1: 0.002, 2: 0.032})


def test_steps_whose_collectives_are_still_under_way_are_left_out():
    job = timed(traces(ddp(2), 3), slow={1})
    calls = job[0].dump.calls
    pending = [replace(call, duration_s=None) for call in calls[-3:]]
    job[0] = replace(job[0], dump=replace(job[0].dump, calls=(*calls[:-3], *pending)))

    found, _ = own_times(job, 3)

    assert max(found[0].seconds) == 28, "two steps have calls without a duration"
    assert max(found[1].seconds) == 30


def test_parts_of_a_batch_that_are_never_timed_are_left_out():
    job = timed(traces(ddp(3), 3), slow={1})
    for rank, trace in job.items():
        calls = tuple(
            replace(call, duration_s=None) if call.number % 3 == 1 else call
            for call in trace.dump.calls
        )
        job[rank] = replace(trace, dump=replace(trace.dump, calls=calls))

    assert medians(own_times(job, 3)[0]) == pytest.approx({0: 0.064, 1: 0.004, 2: 0.064})


def test_nccl_without_timing_is_not_judged_and_says_so():
    assert own_times(traces(ddp(), 3, backend="nccl"), 3) == ({}, NO_TIMING)


def test_ranks_without_entries_or_without_steps_are_left_out():
    job = traces(ddp(), 3)
    empty = replace(job[0], dump=replace(job[0].dump, calls=()))

    assert own_times({0: empty, 1: replace(job[1], spans=[])}, 3) == ({}, "")


JOB = traces(fsdp(2), 3, n_steps=24, slow={1: 1.3})
WHOLE, _ = own_times(JOB, 3)


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.sets(st.tuples(st.integers(0, 2), st.integers(0, 95))))
def test_in_any_order_and_with_any_entries_lost_the_other_steps_stay_as_they_are(draw, lost):
    job = {}
    for rank, trace in JOB.items():
        calls = [call for n, call in enumerate(trace.dump.calls) if (rank, n) not in lost]
        draw.shuffle(calls)
        job[rank] = replace(trace, dump=replace(trace.dump, calls=tuple(calls)))

    found, _ = own_times(job, 3)

    untouched = set(range(2, 25)) - {1 + n // 4 for _, n in lost}
    if len(untouched) < 18:
        return  # too few are left to see what blocks
    for rank, steps in found.items():
        assert untouched <= steps.seconds.keys()
        for step in untouched:
            assert steps.seconds[step] == pytest.approx(WHOLE[rank].seconds[step], rel=0.2)


def beat(step, mono_ms, calls=None, phase=WorkerPhase.STEPPING, **more):
    source = StepSource.OPTIMIZER_STATE
    return Beat(1, step, mono_ms * 10**6, phase, source, step if calls is None else calls, **more)


def spans_of(beats):
    return [(span.step, round(span.seconds * 1e3)) for span in step_spans(beats)]


def test_a_step_is_from_one_optimizer_to_the_next():
    assert spans_of([beat(5, 100), beat(6, 150), beat(7, 210)]) == [(6, 50), (7, 60)]


def test_the_first_step_after_another_phase_is_no_step():
    evaluation = beat(6, 160, phase=WorkerPhase.EVAL)
    resumed = beat(6, 900, phase=WorkerPhase.RESUMED)

    beats = [beat(5, 100), beat(6, 150), evaluation, resumed, beat(7, 950), beat(8, 1000)]

    assert spans_of(beats) == [(6, 50), (8, 50)]


def test_reports_between_two_optimizer_steps_end_no_step():
    beats = [beat(5, 100), beat(5, 120, calls=5), beat(6, 150), beat(6, 170, calls=6), beat(7, 200)]

    assert spans_of(beats) == [(6, 50), (7, 50)]


def test_a_step_of_two_optimizers_ends_with_the_second():
    beats = [beat(n // 2, 100 + 10 * n, calls=n) for n in range(2, 10)]

    assert spans_of(beats) == [(2, 20), (3, 20), (4, 20)]


def test_where_steps_are_lost_or_made_again_there_is_no_span():
    assert spans_of([beat(5, 100), beat(8, 200, calls=9), beat(3, 300, calls=10)]) == []


def test_without_a_step_the_calls_of_the_optimizer_are_counted():
    beats = [
        Beat(1, STEP_UNKNOWN, n * 10**7, WorkerPhase.STEPPING, StepSource.COUNTED, n, "", n)
        for n in (3, 4, 5)
    ]

    assert spans_of(beats) == [(4, 10), (5, 10)]


def test_a_step_has_the_times_and_tokens_of_all_its_beats():
    beats = [
        beat(5, 100, data_us=7, tokens=9),
        beat(5, 120, calls=5, tokens=400),
        beat(6, 150, data_us=20_000, optimizer_us=1000),
        beat(6, 160, calls=7, optimizer_us=2000),
        beat(7, 200, calls=8),
    ]

    sixth, seventh = step_spans(beats)

    assert (sixth.step, sixth.end_ns, sixth.tokens) == (6, 160 * 10**6, 400)
    assert (sixth.data_s, sixth.optimizer_s) == pytest.approx((0.02, 0.003))
    assert (seventh.data_s, seventh.tokens) == (0.0, 0)
