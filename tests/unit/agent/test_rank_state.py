"""What a rank that makes no progress does, told from facts."""

import pytest

from gpuops.agent.monitors.evidence import EvidenceTarget, RankFacts, WorkerSample
from gpuops.agent.monitors.rank_state import RankState, judge_rank, judge_ranks
from gpuops.agent.monitors.stacks import StackFrame, Stacks, ThreadStack
from gpuops.host.process.inspect import ProcessDetails
from gpuops.host.process.traffic import TrafficKind

TARGET = EvidenceTarget(rank=1, local_rank=1, pid=77)
SITE = "/venv/lib/python3.11/site-packages"
USER = StackFrame("/job/train.py", 40, "main")


def stacks(*frames, source="py-spy", owns=False, others=()):
    main = ThreadStack(tuple(frames), is_main=True, owns_gil=owns if source == "py-spy" else None)
    return Stacks((*others, main), source)


def facts(*samples, line=None, elsewhere=None):
    return RankFacts(target=TARGET, samples=tuple(samples), source_line=line, elsewhere=elsewhere)


def sample(at_s=0.0, state="S", cpu_s=0.0, wchan=None, waits=None, on_cpu_s=None, **seen):
    process = None
    if state is not None:
        process = ProcessDetails(
            state=state,
            cpu_s=cpu_s,
            wchan=wchan,
            kernel_stack=("f",),
            main_waits=waits,
            main_cpu_s=on_cpu_s,
        )
    return WorkerSample(at_s=at_s, process=process, **seen)


def at(*frames, line=None):
    return judge_rank(facts(sample(dumped=stacks(*frames, source="faulthandler")), line=line))


@pytest.mark.parametrize(
    ("state", "expected", "says"),
    [
        (None, RankState.EXITED, "has exited"),
        ("Z", RankState.EXITED, "has exited"),
        ("T", RankState.STOPPED, "stopped by a signal"),
        ("t", RankState.STOPPED, "debugger"),
        ("D", RankState.D_STATE, "in nfs_wait (state D)"),
    ],
)
def test_what_the_system_says_goes_first(state, expected, says):
    seen = {"wchan": "nfs_wait", "spied": stacks(USER)}
    verdict = judge_rank(facts(sample(0.0, state, **seen), sample(0.3, state, **seen)))

    assert verdict.state is expected
    assert says in verdict.how


def test_one_look_in_state_d_is_an_ordinary_disk_wait():
    assert judge_rank(facts(sample(0, "D"), sample(0.3, "S"))).state is RankState.UNKNOWN
    assert judge_rank(facts(sample(0, "D"))).state is RankState.UNKNOWN


def test_a_thread_that_holds_the_lock_and_uses_no_processor_waits_with_it():
    seen = {"spied": stacks(StackFrame("/job/native.py", 3, "call"), USER, owns=True)}
    verdict = judge_rank(facts(sample(0.0, **seen), sample(0.3, **seen)))

    assert verdict.state is RankState.GIL_HELD
    assert "its main thread holds" in verdict.how
    assert "call (/job/native.py:3)" in verdict.how


def test_it_may_be_another_thread_that_holds_the_lock():
    holder = ThreadStack((StackFrame("/job/io.py", 9, "read"),), owns_gil=True, name="reader")
    seen = {"spied": stacks(USER, others=(holder,))}
    verdict = judge_rank(facts(sample(0.0, **seen), sample(0.3, **seen)))

    assert (verdict.state, "its thread reader" in verdict.how) == (RankState.GIL_HELD, True)


def test_a_busy_thread_that_holds_the_lock_only_computes():
    seen = {"spied": stacks(USER, owns=True)}
    verdict = judge_rank(facts(sample(0.0, cpu_s=5.0, **seen), sample(0.3, cpu_s=5.3, **seen)))

    assert (verdict.state, verdict.is_moving) == (RankState.IN_USER_CODE, False)


@pytest.mark.parametrize("second", [None, stacks(StackFrame("/job/t.py", 8, "f"), owns=True)])
def test_the_lock_seen_once_says_nothing(second):
    first = stacks(USER, owns=True)
    verdict = judge_rank(facts(sample(0.0, spied=first), sample(0.3, spied=second)))

    assert verdict.state is not RankState.GIL_HELD


COLLECTIVES = {
    "all_reduce": [
        StackFrame(f"{SITE}/torch/distributed/distributed_c10d.py", 3, "all_reduce"),
        USER,
    ],
    "wrapped": [
        StackFrame(f"{SITE}/torch/_ops.py", 1, "__call__"),
        StackFrame(f"{SITE}/torch/distributed/_functional_collectives.py", 2, "wait_tensor"),
        USER,
    ],
    "backward": [
        StackFrame(f"{SITE}/torch/autograd/graph.py", 9, "_engine_run_backward"),
        StackFrame(f"{SITE}/torch/autograd/__init__.py", 8, "backward"),
        StackFrame(f"{SITE}/torch/_tensor.py", 7, "backward"),
        USER,
    ],
    "init": [
        StackFrame(f"{SITE}/torch/distributed/rendezvous.py", 9, "_create_c10d_store"),
        StackFrame(f"{SITE}/torch/distributed/distributed_c10d.py", 8, "init_process_group"),
        USER,
    ],
}


@pytest.mark.parametrize("frames", COLLECTIVES.values(), ids=COLLECTIVES.keys())
def test_a_rank_in_a_collective_waits_for_others(frames):
    assert at(*frames).state is RankState.IN_COLLECTIVE


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("work.wait()", RankState.IN_COLLECTIVE),
        ("dist.barrier()", RankState.IN_COLLECTIVE),
        ("self.comm.recv(source=0)", RankState.IN_COLLECTIVE),
        ("while data := far.recv(2**20):", RankState.IN_USER_CODE),
        ("total += loss.item()", RankState.WAITS_FOR_DEVICE),
        ("batch.to('cpu')", RankState.WAITS_FOR_DEVICE),
        ("time.sleep(3600)", RankState.IN_USER_CODE),
        (None, RankState.IN_USER_CODE),
    ],
)
def test_native_code_that_the_script_calls_is_told_by_the_scripts_own_line(line, expected):
    assert at(USER, line=line).state is expected


def test_a_rank_that_reads_a_checkpoint_of_dcp_waits_for_nobody():
    reads = (
        StackFrame(f"{SITE}/torch/distributed/checkpoint/filesystem.py", 3, "read_data"),
        StackFrame(f"{SITE}/torch/distributed/checkpoint/state_dict_loader.py", 2, "load"),
        USER,
    )
    gathers = StackFrame(f"{SITE}/torch/distributed/distributed_c10d.py", 9, "gather_object")

    assert at(*reads).state is RankState.IN_USER_CODE
    assert at(gathers, *reads).state is RankState.IN_COLLECTIVE


@pytest.mark.parametrize(
    "line",
    [
        "if loss > 0:",
        "if found_inf:",
        "elif not scores[0] == best.value:",
        "assert loss < limit",
        "skip = bool(overflow)",
        "total += float(losses[0])",
        "losses.append(loss.item())",
        "print(f'{loss.item():.3f}')",
        "best = max(best, loss.item())",
        "el.item()",
        "if loss > 0:  # (so)",
        "total += (\n    scale\n    * loss.item()\n)",
        "if (\n    grads.isnan()\n    .any()\n):",
        "n = int(batch.count)",
        "values = loss.tolist()",
        "rows = mask.nonzero()",
        "rows = torch.nonzero(mask, as_tuple=True)",
        "if torch.equal(a, b):",
        "same = torch.allclose(a, b)",
        "if torch.isnan(loss):",
        "if grads.isnan().any():",
        "assert torch.isfinite(norm).all(), 'overflow'",
        "kept = x.masked_select(mask)",
        "if error_if_nonfinite and torch.logical_or(total_norm.isnan(), total_norm.isinf()):",
        'if not sum(v.item() for v in optimizer_state["found_inf_per_device"].values()):',
    ],
)
def test_a_value_of_the_device_that_the_script_looks_at_is_waited_for(line):
    assert at(USER, line=line).state is RankState.WAITS_FOR_DEVICE
    looks = facts(sample(spied=stacks(USER, owns=True)), line=line)
    assert judge_rank(looks).state is RankState.IN_USER_CODE, "Python computes, torch would not"


@pytest.mark.parametrize(
    "line", ["if loss > 0:", "total += loss.item()", "print(max(best, float(t)))", "b.to('cpu')"]
)
def test_a_line_that_calls_nothing_else_waits_for_its_gpu_for_sure(line):
    assert judge_ranks({0: waiting(line=line)})[0].is_certain


def test_gradscaler_waits_for_the_overflow_flag_of_its_device():
    scaler = StackFrame(f"{SITE}/torch/amp/grad_scaler.py", 371, "_maybe_opt_step")
    line = 'if not sum(v.item() for v in optimizer_state["found_inf_per_device"].values()):'

    assert at(scaler, USER, line=line).state is RankState.WAITS_FOR_DEVICE


@pytest.mark.parametrize(
    "line",
    [
        "score = float(evaluate(model))",
        "x = native(float(t))",
        "return self.lib.run(int(n), [float(t)])",
        "weights = read_shard(path, int(rank))",
        "while not ready:",
        "if evaluate(model) > 0:",
        "if reader.wait_for(path) > 0:",
        "model.generate(prompts)",
        "n = interpret(values)",
    ],
)
def test_a_call_of_native_code_that_may_compute_is_the_scripts(line):
    assert at(USER, line=line).state is RankState.IN_USER_CODE


def test_a_synchronisation_waits_for_the_gpu():
    frames = StackFrame(f"{SITE}/torch/cuda/__init__.py", 9, "synchronize"), USER

    assert at(*frames).state is RankState.WAITS_FOR_DEVICE


def test_a_module_that_sleeps_below_ddp_is_not_in_a_collective():
    frames = (
        StackFrame("/job/model.py", 3, "forward"),
        StackFrame(f"{SITE}/torch/nn/modules/module.py", 2, "_call_impl"),
        StackFrame(f"{SITE}/torch/nn/parallel/distributed.py", 1, "forward"),
        USER,
    )
    verdict = at(*frames)

    assert verdict.state is RankState.IN_USER_CODE
    assert verdict.how == "is in forward (/job/model.py:3)"


def test_a_data_loader_that_gives_nothing_is_named():
    frames = (
        StackFrame("/usr/lib/python3.11/threading.py", 1, "wait"),
        StackFrame("/usr/lib/python3.11/multiprocessing/queues.py", 2, "get"),
        StackFrame(f"{SITE}/torch/utils/data/dataloader.py", 3, "_try_get_data"),
        USER,
    )
    verdict = at(*frames)

    assert verdict.state is RankState.IN_USER_CODE
    assert "waits for its data loader in _try_get_data" in verdict.how


def test_who_is_elsewhere_at_the_next_look_is_at_work():
    first, second = stacks(StackFrame("/job/e.py", 1, "eval"), USER), stacks(USER)
    moved = judge_rank(facts(sample(0.0, spied=first), sample(0.3, spied=second)))
    still = judge_rank(facts(sample(0.0, spied=first), sample(0.3, spied=first)))

    assert (moved.is_moving, still.is_moving) == (True, False)
    assert moved.how.endswith("it moved between samples")


def test_the_words_of_two_sources_are_not_compared():
    seen = judge_rank(
        facts(
            sample(0.0, dumped=stacks(USER, source="faulthandler")),
            sample(0.3, spied=stacks(StackFrame("/job/train.py", 41, "main"))),
        )
    )

    assert not seen.is_moving


FILES, MAIN, RECEIVED, SENT, TICKS, FROM_RANK = TrafficKind


@pytest.mark.parametrize(
    ("before", "now", "moving"),
    [
        ({(FILES, 77): 0}, {(FILES, 77): 2**20 - 1}, False),
        ({(FILES, 77): 0}, {(FILES, 77): 2**20}, True),
        ({(FILES, 77): 9}, {(FILES, 77): 9, (FILES, 8): 2**23}, True),
        ({(FILES, 77): 9}, {(FILES, 77): 9, (FILES, 8): 2**23 - 1}, False),
        ({(SENT, 5): 0}, {(SENT, 5): 2**20}, True),
        ({(SENT, 5): 0}, {(SENT, 5): 2**13}, False),
        ({(RECEIVED, 5): 100}, {(RECEIVED, 5): 100 + 2**13}, True),
        ({(RECEIVED, 5): 100}, {(RECEIVED, 5): 99 + 2**13}, False),
        ({}, {(RECEIVED, n): 60 for n in range(1000)}, False),
        ({(RECEIVED, 5): 2**30}, {}, False),
        (None, {(FILES, 77): 2**30}, False),
    ],
    ids=["a little", "reads", "a child reads", "a child measures", "sends", "sends a little",
         "slow socket", "less", "a thousand heartbeats", "closed", "seen once"],
)  # fmt: skip
def test_who_moves_bytes_is_at_work(before, now, moving):
    here = stacks(USER)
    seen = judge_rank(
        facts(sample(0.0, spied=here, traffic=before), sample(8.0, spied=here, traffic=now))
    )

    assert (seen.is_moving, seen.moves_bytes) == (moving, moving)
    assert seen.how.endswith("; it moved bytes meanwhile") is moving


IN_BARRIER = StackFrame(f"{SITE}/torch/distributed/distributed_c10d.py", 3, "barrier")
READS_GPU = {"line": "total += loss.item()"}
UPLOADS = {(FILES, 77): 2**24, (FILES, 99): 2**26, (SENT, 5): 2**24, (RECEIVED, 5): 2**20}
UPLOADS |= {(MAIN, 77): 2**20 - 1, (FROM_RANK, 6): 2**20 - 1}


def waiting(*frames, grown=UPLOADS, line=None, **seen):
    """Return the facts on a rank that stands in one place while its process moves bytes."""
    here = stacks(*frames, USER)
    first = sample(0.0, spied=here, traffic=dict.fromkeys(grown, 0), **seen)
    return facts(first, sample(8.0, spied=here, traffic=grown, **seen), line=line)


def test_where_the_main_threads_of_all_wait_for_others_an_upload_is_no_work():
    both = judge_ranks({0: waiting(IN_BARRIER), 1: waiting(**READS_GPU)})

    assert [each.state.waits_for_others for each in both.values()] == [True, True]
    assert [(each.is_moving, each.moves_bytes) for each in both.values()] == [(False, False)] * 2


@pytest.mark.parametrize(
    "grown", [{(MAIN, 77): 2**20}, {(FROM_RANK, 6): 2**20}], ids=["its own", "of another rank"]
)
def test_bytes_of_the_main_thread_or_of_another_rank_are_work_where_all_wait(grown):
    both = judge_ranks({0: waiting(IN_BARRIER), 1: waiting(IN_BARRIER, grown=UPLOADS | grown)})

    assert [each.moves_bytes for each in both.values()] == [False, True]


@pytest.mark.parametrize(
    "other",
    [
        waiting(),
        waiting(line="engine.wait()"),
        waiting(line="rows = table.scan(path).tolist()"),
        waiting(line="weights = read_shard(path, int(rank))"),
        waiting(StackFrame(f"{SITE}/torch/distributed/checkpoint/filesystem.py", 3, "read_data")),
        waiting(StackFrame(f"{SITE}/torch/distributed/rpc/api.py", 3, "_wait_all_workers")),
        waiting(IN_BARRIER, state="D"),
        facts(sample()),
    ],
    ids=[
        "runs",
        "waits for its own",
        "calls native code",
        "reads, then asks",
        "reads a checkpoint",
        "serves",
        "in the kernel",
        "unknown",
    ],
)
def test_who_may_be_waited_for_excuses_those_that_wait(other):
    """A native reader has a `wait`, too; a remote call does anything, in any thread."""
    assert judge_ranks({0: waiting(IN_BARRIER), 1: other})[0].moves_bytes


def test_a_main_thread_that_is_recorded_elsewhere_goes_round_its_collectives():
    samples = [
        sample(0.0, spied=stacks(IN_BARRIER, USER), on_cpu_s=0.0),
        sample(8.0, spied=stacks(IN_BARRIER, USER), on_cpu_s=1.0),
    ]
    goes_on = judge_ranks({0: facts(*samples, elsewhere=0.02), 1: facts(*samples)})

    assert [each.is_moving for each in goes_on.values()] == [True, False]


@pytest.mark.parametrize(("grown", "uses"), [({(TICKS, 8): 16}, True), ({(TICKS, 8): 15}, False)])
def test_a_rank_whose_children_use_a_processor_may_compile(grown, uses):
    """On a crowded machine they get little of it."""
    seen = judge_rank(waiting(grown=grown))

    assert (seen.uses_cpu, seen.may_work, seen.is_moving) == (uses, uses, False)


BACKWARD = COLLECTIVES["backward"]
SWAPPER = "/deepspeed/runtime/swap_tensor/partitioned_param_swapper.py"
SWAPS = StackFrame(f"{SITE}{SWAPPER}", 5, "synchronize_reads")


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("assert n == self.aio_read_handle.wait()", RankState.IN_COLLECTIVE),
        ("self.read(fd)", RankState.IN_USER_CODE),
    ],
)
def test_a_hook_that_reads_in_the_thread_of_autograd_is_what_the_backward_pass_waits_for(
    line, state
):
    """DeepSpeed reads offloaded parameters there, in native threads."""
    engine = ThreadStack((SWAPS,), owns_gil=False)
    thread = ThreadStack((USER, StackFrame("/lib/threading.py", 9, "_bootstrap")), owns_gil=False)
    here = stacks(*BACKWARD, others=(thread, engine))
    first = sample(0.0, spied=here, traffic=dict.fromkeys(UPLOADS, 0))
    reads = facts(first, sample(8.0, spied=here, traffic=UPLOADS), line=line)
    found = judge_ranks({0: waiting(*BACKWARD), 1: reads})

    assert found[1].state is state
    assert found[1].frames[:2] == (SWAPS, BACKWARD[0])
    assert found[1].moves_bytes
    alone = stacks(*BACKWARD, others=(thread,))
    assert alone.main.frames == tuple(BACKWARD), "an uploader is no part of the backward pass"


@pytest.mark.parametrize(
    ("waits", "on_cpu_s", "moving"),
    [
        (400, 0.08, True),
        (1600, 0.2, False),
        (80, 0.03, False),
        (7, 4.0, False),
        (0, 8.0, False),
        (None, None, False),
    ],
    ids=["evaluates", "polls often", "polls", "waits seldom", "spins", "not known"],
)
def test_who_waits_again_and_again_and_computes_in_between_is_at_work(waits, on_cpu_s, moving):
    here = stacks(USER)
    first = sample(0.0, spied=here, waits=waits and 0, on_cpu_s=on_cpu_s and 0.0)
    seen = judge_rank(facts(first, sample(8.0, spied=here, waits=waits, on_cpu_s=on_cpu_s)))

    assert seen.is_moving is moving
    in_collective = COLLECTIVES["all_reduce"]
    first = sample(0.0, spied=stacks(*in_collective), waits=0, on_cpu_s=0.0)
    last = sample(8.0, spied=stacks(*in_collective), waits=waits, on_cpu_s=on_cpu_s)
    assert not judge_rank(facts(first, last)).is_moving


@pytest.mark.parametrize("line", ["total += loss.item()", "engine.step(batch)"])
@pytest.mark.parametrize(
    ("waits", "on_cpu_s", "elsewhere", "moving"),
    [(0, 8.0, 0.02, True), (0, 8.0, 0.0, False), (1600, 0.2, 0.02, False), (0, 8.0, None, False)],
    ids=["spins and goes on", "spins", "polls", "not recorded"],
)
def test_who_waits_in_one_line_and_is_recorded_elsewhere_is_at_work(
    line, waits, on_cpu_s, elsewhere, moving
):
    """A GPU is waited for in one line for nearly all of an evaluation."""
    samples = [
        sample(0.0, spied=stacks(USER), waits=0, on_cpu_s=0.0),
        sample(8.0, spied=stacks(USER), waits=waits, on_cpu_s=on_cpu_s),
    ]
    seen = judge_rank(facts(*samples, line=line, elsewhere=elsewhere))

    assert (seen.is_moving, seen.moves_bytes) == (moving, False)


def test_who_waits_again_and_again_for_its_gpu_polls_it():
    samples = [
        sample(0.0, spied=stacks(USER), waits=0, on_cpu_s=0.0),
        sample(8.0, spied=stacks(USER), waits=400, on_cpu_s=0.08),
    ]

    assert not judge_rank(facts(*samples, line="total += loss.item()")).is_moving


def test_a_lock_of_a_jit_build_is_named_and_asking_for_it_is_no_work():
    baton = StackFrame(f"{SITE}/torch/utils/file_baton.py", 50, "wait")
    load = StackFrame(f"{SITE}/torch/utils/cpp_extension.py", 2300, "_jit_compile")
    asks = StackFrame("/usr/lib/python3.11/genericpath.py", 19, "exists")
    seen = judge_rank(
        facts(
            sample(0.0, spied=stacks(asks, baton, load, USER), waits=0, on_cpu_s=0.0),
            sample(8.0, spied=stacks(baton, load, USER), waits=80, on_cpu_s=1.0),
        )
    )

    assert (seen.state, seen.is_moving) == (RankState.WAITS_FOR_LOCK, False)
    assert "a killed build left the file `lock`" in seen.how
    assert "TORCH_EXTENSIONS_DIR" in seen.how


def test_nothing_seen_is_said_to_be_unknown():
    assert judge_rank(RankFacts(target=TARGET)).how == "could not be inspected"
    silent = judge_rank(facts(sample(0.0, wchan="futex_wait")))
    assert silent.state is RankState.UNKNOWN
    assert silent.how == "has no readable stack; it waits in the kernel in futex_wait"
    assert at().how == "has no Python frame"
