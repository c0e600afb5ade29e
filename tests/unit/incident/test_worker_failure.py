"""Exits of one attempt become exactly one incident with the right cause and culprit."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draws import draws
from support.exits import (
    NODE,
    PEER_CLOSED,
    RULES,
    WATCHDOG,
    S,
    culprits,
    finished,
    incident_of,
    killed,
    raised,
    terminated,
    worker,
)

from gpuops.incident.classify import classify
from gpuops.model import (
    Confidence,
    EntityKind,
    FailureClass,
    Incident,
    IncidentState,
    Role,
    Side,
    Status,
)
from gpuops.rules import LogRule, LogSource

SIZES_DIFFER = (
    "Received data size doesn't match expected size."
    " Is there a distributed collective mismatch in your code?"
)


def lost_peer(rank, at_s=100.1, **changes):
    return raised(rank, f"RuntimeError: {PEER_CLOSED}", at_s, **changes)


@pytest.mark.parametrize(("victim", "other"), [(0, 1), (1, 0)])
def test_a_killed_rank_is_the_culprit_whichever_rank_it_was(victim, other):
    incident = incident_of(killed(victim), terminated(other))

    assert incident.failure_class is FailureClass.SIGKILL_PROBABLE
    assert incident.side is Side.AMBIGUOUS
    assert incident.confidence is Confidence.PROBABLE
    assert incident.state is IncidentState.OPEN
    assert culprits(incident) == [f"rank {victim}", f"node {NODE}"]
    assert incident.title == f"rank {victim} on n041 was ended by SIGKILL at step 57"
    assert incident.authority == 2


def test_a_symptom_seen_first_is_not_the_cause():
    incident = incident_of(lost_peer(0, at_s=100.02), killed(1, at_s=100.2))

    assert incident.failure_class is FailureClass.SIGKILL_PROBABLE
    assert culprits(incident) == ["rank 1", f"node {NODE}"]
    (symptom,) = [item for item in incident.evidence if item.role is Role.SYMPTOM]
    assert "rank 0" in symptom.text


def test_an_exception_within_the_poll_before_a_sigkill_was_noticed_follows_from_it():
    wrapped = raised(0, "TrainerError: step failed", at_s=100.0)
    incident = incident_of(wrapped, killed(1, at_s=100.4))

    assert culprits(incident) == ["rank 1", f"node {NODE}"]
    assert "same second" in incident.culprit_how


def test_an_exception_well_before_a_sigkill_is_the_cause():
    incident = incident_of(raised(0, at_s=100.0), killed(1, at_s=130.0), detected_s=130.1)

    assert incident.failure_class is FailureClass.USER_EXCEPTION
    assert culprits(incident) == ["rank 0", f"node {NODE}"]
    assert "30.00 s ahead" in incident.culprit_how


def test_of_two_failures_the_earlier_one_is_the_cause():
    incident = incident_of(
        killed(0, at_s=100.3, signal="SIGSEGV"), killed(1, at_s=100.1, signal="SIGABRT")
    )

    assert incident.failure_class is FailureClass.ABORT
    assert culprits(incident)[0] == "rank 1"


def test_an_abort_is_named_with_the_reason_in_its_log():
    words = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        "  what():  [enforce fail at /w/gloo/transport/tcp/pair.cc:456] length <= n. 20 vs 4",
        "Fatal Python error: Aborted",
    )
    incident = incident_of(killed(1, signal="SIGABRT", last_step=None, beats=0, log_tail=words))

    assert incident.failure_class is FailureClass.ABORT
    assert incident.title == (
        f"rank 1 on {NODE} was ended by SIGABRT before its first step: gloo::EnforceNotMet: "
        "[enforce fail at pair.cc:456] length <= n. 20 vs 4"
    )


def test_a_rank_that_gloo_ends_because_collectives_differ_may_be_the_one_that_noticed():
    words = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        f"  what():  [enforce fail at /w/pair.cc:456] length <= n. 8 vs 4. {SIZES_DIFFER}",
        "Fatal Python error: Aborted",
    )
    incident = incident_of(killed(1, signal="SIGABRT", log_tail=words), terminated(0))

    assert (incident.failure_class, incident.side) == (
        FailureClass.COLLECTIVE_MISMATCH,
        Side.USER,
    )
    assert "[enforce fail at pair.cc:456] length <= n. 8 vs 4." in incident.title
    assert "it, or a rank that sent to it, called another one" in incident.culprit_how


@pytest.mark.parametrize(("early", "late"), [(0, 1), (1, 0)])
def test_ranks_that_one_signal_ended_at_once_share_the_blame(early, late):
    incident = incident_of(killed(early), killed(late, at_s=100.01), terminated(2))

    assert culprits(incident) == ["rank 0", "rank 1", f"node {NODE}"]
    assert incident.title == "ranks 0-1 on n041 were ended by SIGKILL at step 57"
    assert incident.culprit_how == "both within 0.01 s: their order is unknown"
    assert [item.role for item in incident.evidence] == [Role.ROOT, Role.ROOT, Role.TEARDOWN]
    assert incident.detected_us - incident.first_us == 500_000


def test_ranks_killed_before_their_first_step_are_told_as_several():
    exits = [killed(rank, last_step=None, beats=0) for rank in range(3)]
    incident = incident_of(*exits)

    assert incident.title == "ranks 0-2 on n041 were ended by SIGKILL before their first step"
    assert incident.culprit_how == "all 3 within 0.01 s: their order is unknown"


def test_kills_further_apart_than_the_order_is_uncertain_keep_their_order():
    incident = incident_of(killed(1), killed(0, at_s=100.06))

    assert culprits(incident) == ["rank 1", f"node {NODE}"]
    assert "0.06 s ahead" in incident.culprit_how


def test_different_signals_at_once_are_not_one_deed():
    incident = incident_of(killed(0), killed(1, signal="SIGSEGV"))

    assert culprits(incident) == ["rank 0", f"node {NODE}"]


def test_of_two_killed_at_once_the_one_that_the_kernel_names_is_the_culprit():
    incident = incident_of(killed(0), killed(1, at_s=100.01), kernel_lines=[oom(4001)])

    assert incident.failure_class is FailureClass.CGROUP_OOM
    assert culprits(incident) == ["rank 1", f"node {NODE}"]


def test_an_exception_on_one_rank_blames_that_rank():
    incident = incident_of(raised(1, last_step=12), terminated(0), terminated(2))

    assert incident.failure_class is FailureClass.USER_EXCEPTION
    assert incident.confidence is Confidence.PROBABLE
    assert incident.title == "rank 1 on n041 raised ValueError at step 12: bad batch"
    assert culprits(incident) == ["rank 1", f"node {NODE}"]


def test_the_same_exception_on_all_ranks_is_the_programs_and_blames_no_node():
    exits = [raised(r, f"KeyError: 'rank {r}'", at_s=100 + r / 100) for r in range(8)]
    incident = incident_of(*exits)

    assert incident.side is Side.USER
    assert incident.confidence is Confidence.CONFIRMED
    assert culprits(incident) == [f"rank {r}" for r in range(8)]
    assert incident.title.startswith("ranks 0-7 on n041 raised KeyError at step 57")


def test_a_rank_that_was_ended_while_it_raised_the_same_counts_but_is_no_culprit():
    cut_short = raised(1, terminated=True, signal="SIGTERM", exit_code=None)
    incident = incident_of(raised(0), cut_short)

    assert incident.confidence is Confidence.CONFIRMED
    assert culprits(incident) == ["rank 0"]


def test_different_places_are_different_exceptions():
    incident = incident_of(raised(0, line=88), raised(1, line=99, at_s=100.5))

    assert incident.confidence is Confidence.PROBABLE
    assert culprits(incident) == ["rank 0", f"node {NODE}"]


def test_a_full_disk_on_all_ranks_stays_a_storage_failure():
    what = "OSError: [Errno 116] Stale file handle: '/shared/data/a.bin'"
    incident = incident_of(*(raised(r, what) for r in range(4)))

    assert incident.failure_class is FailureClass.STORAGE_SHARED_FS
    assert incident.side is Side.INFRA


def test_a_rank_that_left_early_is_the_culprit_when_the_others_lose_their_peer():
    incident = incident_of(finished(1, at_s=90, last_step=10), lost_peer(0), terminated(2))

    assert incident.failure_class is FailureClass.USER_EARLY_EXIT
    assert incident.side is Side.USER
    assert culprits(incident) == ["rank 1"]
    assert incident.title == "rank 1 on n041 exited with code 0 at step 10"


def test_a_rank_that_left_early_is_the_culprit_however_long_its_process_took_to_be_gone():
    slow = finished(1, at_s=104, last_step=10, finished_mono_ns=99 * S)
    ended = terminated(1, at_s=100.2, last_step=10, finished_mono_ns=99 * S)

    for early in (slow, ended):
        incident = incident_of(early, lost_peer(0), terminated(2))
        assert incident.failure_class is FailureClass.USER_EARLY_EXIT
        assert culprits(incident) == ["rank 1"]
    assert incident.title == "rank 1 on n041 came to its end at step 10"


def test_who_was_done_long_after_the_others_had_lost_their_peer_is_not_to_blame():
    done = finished(1, at_s=104, finished_mono_ns=103 * S)

    assert incident_of(done, lost_peer(0)).failure_class is FailureClass.PEER_CLOSED


def test_a_rank_that_finished_normally_is_not_blamed_for_a_later_kill():
    incident = incident_of(finished(1), killed(0, at_s=100.2))

    assert incident.failure_class is FailureClass.SIGKILL_PROBABLE
    assert culprits(incident)[0] == "rank 0"


def test_only_symptoms_leave_the_cause_open_and_name_suspects():
    incident = incident_of(
        lost_peer(0), lost_peer(1, at_s=100.2), terminated(2, last_step=55), terminated(3)
    )

    assert incident.failure_class is FailureClass.PEER_CLOSED
    assert incident.confidence is Confidence.SYMPTOM_ONLY
    assert incident.culprits == ()
    assert incident.authority == 1
    assert incident.title == "2 ranks on n041 lost a peer at step 57"
    suspects = [item for item in incident.evidence if item.text.startswith("suspect")]
    assert [item.entity.id for item in suspects] == ["2", "3"]


def test_an_abort_by_the_nccl_watchdog_is_a_timeout_and_only_a_symptom():
    exits = [killed(r, signal="SIGABRT", log_tail=(WATCHDOG.format(rank=r),)) for r in range(3)]
    incident = incident_of(*exits, terminated(3, last_step=56))

    assert incident.failure_class is FailureClass.COLLECTIVE_TIMEOUT
    assert incident.confidence is Confidence.SYMPTOM_ONLY
    assert "timed out waiting for a peer" in incident.title


def test_a_segfault_beats_the_watchdog_timeouts_of_the_others():
    storm = [
        killed(r, at_s=700, signal="SIGABRT", log_tail=(WATCHDOG.format(rank=r),)) for r in range(3)
    ]
    incident = incident_of(*storm, killed(3, at_s=100, signal="SIGSEGV"), detected_s=700.1)

    assert incident.failure_class is FailureClass.SEGFAULT
    assert culprits(incident)[0] == "rank 3"
    assert incident.detected_us - incident.first_us == 600_100_000


def oom(pid, scope="Memory cgroup out of memory"):
    return f"[812.4] {scope}: Killed process {pid} (python) total-vm:90GB, anon-rss:61GB"


@pytest.mark.parametrize(
    ("scope", "expected", "side"),
    [
        ("Memory cgroup out of memory", FailureClass.CGROUP_OOM, Side.USER),
        ("Out of memory", FailureClass.KERNEL_OOM, Side.AMBIGUOUS),
    ],
)
def test_the_kernels_oom_record_confirms_what_a_sigkill_only_suggests(scope, expected, side):
    incident = incident_of(killed(1), terminated(0), kernel_lines=["eth0: up", oom(4001, scope)])

    assert incident.failure_class is expected
    assert incident.confidence is Confidence.CONFIRMED
    assert incident.side is side
    assert "SIGKILL (out of memory)" in incident.title
    (record,) = [item for item in incident.evidence if item.role is Role.CONFIRMATION]
    assert record.lines == (oom(4001, scope),)


def test_an_oom_record_of_another_process_proves_nothing():
    incident = incident_of(killed(1), kernel_lines=[oom(40010), oom(999)])

    assert incident.failure_class is FailureClass.SIGKILL_PROBABLE


def test_an_oom_record_of_a_rank_s_loader_process_explains_the_rank_s_exception():
    what = "RuntimeError: DataLoader worker (pid 7777) is killed by signal: Killed."
    incident = incident_of(raised(0, what), kernel_lines=[oom(7777)])

    assert incident.failure_class is FailureClass.CGROUP_OOM


def test_slurm_s_word_about_an_oom_kill_is_taken_from_the_log():
    tail = ("slurmstepd: error: Detected 1 oom_kill event in StepId=48213.0.",)
    incident = incident_of(killed(0, log_tail=tail))

    assert incident.failure_class is FailureClass.CGROUP_OOM
    assert incident.confidence is Confidence.PROBABLE


def test_a_peers_words_in_the_log_of_a_killed_rank_do_not_turn_the_kill_into_a_symptom():
    incident = incident_of(killed(0, log_tail=(f"retrying after {PEER_CLOSED}",)))

    assert incident.failure_class is FailureClass.SIGKILL_PROBABLE


def test_cuda_oom_is_known_by_the_exception():
    what = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB."
    incident = incident_of(raised(3, what), terminated(0))

    assert incident.failure_class is FailureClass.CUDA_OOM
    assert incident.side is Side.USER
    assert incident.confidence is Confidence.CONFIRMED


def test_a_shell_between_agent_and_worker_does_not_hide_the_signal():
    incident = incident_of(worker(0, exit_code=137))

    assert incident.failure_class is FailureClass.SIGKILL_PROBABLE
    assert "SIGKILL" in incident.title


def test_a_traceback_in_the_log_counts_where_no_error_file_was_left():
    tail = (
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/home/ada/train.py", line 8, in <module>',
        "[rank0]: ModuleNotFoundError: No module named 'flash'",
    )
    incident = incident_of(worker(0, log_tail=tail, last_step=None, beats=0))

    assert incident.failure_class is FailureClass.USER_EXCEPTION
    assert incident.title == (
        "rank 0 on n041 exited with code 1 before its first step:"
        " ModuleNotFoundError: No module named 'flash'"
    )


def test_what_sys_exit_printed_is_the_last_word_of_a_worker():
    incident = incident_of(worker(1, log_tail=("[rank 1] step 57", "bye")), terminated(0))

    assert incident.title == "rank 1 on n041 exited with code 1 at step 57: bye"
    assert "it left no exception, but a last line" in incident.evidence[0].text


def test_a_last_line_of_standard_output_is_no_last_word():
    incident = incident_of(worker(1, log_path="/runs/demo/generation-0/rank1/stdout.log"))

    assert incident.title == "rank 1 on n041 exited with code 1 at step 57"


def test_an_exit_code_alone_is_the_programs_own_doing():
    incident = incident_of(worker(0, exit_code=3, log_tail=()))

    assert incident.failure_class is FailureClass.USER_EXCEPTION
    assert incident.confidence is Confidence.PROBABLE


def test_a_worker_that_somebody_else_asked_to_end_was_cancelled():
    incident = incident_of(killed(0, signal="SIGTERM"), terminated(1))

    assert incident.failure_class is FailureClass.CANCELLED
    assert incident.confidence is Confidence.PROBABLE


@pytest.mark.parametrize("exits", [(), (terminated(0), terminated(1)), (finished(0),)])
def test_a_failure_that_nobody_saw_is_on_record_as_unresolved(exits):
    incident = incident_of(*exits)

    assert incident.failure_class is FailureClass.UNRESOLVED
    assert incident.culprits == ()
    assert incident.authority == 0


XID_79 = LogRule(
    id="xid79",
    pattern=re.compile(r"NVRM: Xid .*: 79,"),
    failure_class=FailureClass.GPU_FELL_OFF_BUS,
    source=LogSource.KERNEL,
    role=Role.ROOT,
    side=Side.INFRA,
    status=Status.FAIL,
    reference="test",
    example="NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
)


def test_the_kernels_word_about_the_node_explains_an_abort():
    exits = (killed(0, signal="SIGABRT"), terminated(1))
    incident = incident_of(*exits, rules=[*RULES, XID_79], kernel_lines=[XID_79.example])

    assert incident.failure_class is FailureClass.GPU_FELL_OFF_BUS
    assert incident.side is Side.INFRA
    assert culprits(incident) == ["rank 0", f"node {NODE}"]
    assert incident.evidence[1].lines == (XID_79.example,)


def test_kernel_and_exception_that_agree_make_the_cause_certain():
    exits = (raised(0, "RuntimeError: CUDA error: GPU is lost"),)
    incident = incident_of(*exits, rules=[*RULES, XID_79], kernel_lines=[XID_79.example])

    assert incident.confidence is Confidence.CONFIRMED


def test_the_kernels_word_about_the_node_does_not_excuse_the_program():
    exits = (raised(0), raised(1))
    incident = incident_of(*exits, rules=[*RULES, XID_79], kernel_lines=[XID_79.example])

    assert incident.failure_class is FailureClass.USER_EXCEPTION


def test_a_sign_of_trouble_that_decided_nothing_is_shown_as_a_remark():
    line = "nfs: server filer-3.cluster not responding, still trying"
    incident = incident_of(killed(0), terminated(1), kernel_lines=["eth0: up", line])

    assert incident.failure_class is FailureClass.SIGKILL_PROBABLE
    assert incident.evidence[-1].role is Role.NOISE
    assert incident.evidence[-1].lines == (line,)


def test_the_shipped_kernel_rules_know_a_lost_gpu():
    line = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off"
    incident = incident_of(killed(0, signal="SIGABRT"), kernel_lines=[line])

    assert incident.failure_class is FailureClass.GPU_FELL_OFF_BUS
    assert incident.confidence is Confidence.PROBABLE


def test_every_rank_has_its_last_step_and_its_log_in_the_evidence():
    incident = incident_of(killed(1, last_step=57), terminated(0, last_step=58), terminated(2))
    by_rank = {item.entity.id: item for item in incident.evidence}

    assert set(by_rank) == {"0", "1", "2"}
    assert "SIGKILL at step 57" in by_rank["1"].text
    assert "at step 58" in by_rank["0"].text
    assert [by_rank[r].role for r in "012"] == [Role.TEARDOWN, Role.ROOT, Role.TEARDOWN]
    assert by_rank["1"].lines[-1] == "[rank 1] step 57 loss 3.20"
    assert by_rank["1"].path.endswith("rank1/stderr.log")
    assert incident.evidence[0].role is Role.ROOT


def test_secrets_in_a_log_do_not_reach_the_incident():
    tail = ("connecting to postgresql://gpu:hunter2@db/x",)
    incident = incident_of(killed(0, log_tail=tail))

    assert "hunter2" not in str(incident.to_json())


def test_the_id_depends_on_run_and_attempt_only():
    one, other = incident_of(killed(0)), incident_of(lost_peer(1), detected_s=222)

    assert one.id == other.id
    assert incident_of(killed(0), attempt=1).id != one.id


def test_a_thousand_ranks_make_one_incident_in_bounded_time():
    storm = [
        killed(r, signal="SIGABRT", log_tail=("step",) * 40 + (WATCHDOG.format(rank=r),))
        for r in range(999)
    ]
    begin = time.process_time()
    incident = incident_of(*storm, killed(999, at_s=99, signal="SIGSEGV"))

    assert time.process_time() - begin < 20
    assert culprits(incident)[0] == "rank 999"
    assert len(incident.evidence) < 100
    assert len(str(incident.to_json())) < 200_000


@st.composite
def any_exit(draw, rank):
    kind = draw(st.sampled_from([killed, terminated, finished, raised, lost_peer, worker]))
    changes = {"at_s": draw(st.floats(1, 1000))}
    if kind is killed:
        changes["signal"] = draw(st.sampled_from(["SIGKILL", "SIGSEGV", "SIGABRT", "SIGUSR1"]))
    changes["last_step"] = draw(st.none() | st.integers(0, 100))
    return kind(rank, **changes)


@st.composite
def any_exits(draw):
    ranks = draw(st.integers(0, 6))
    return [draw(any_exit(rank)) for rank in range(ranks)]


@settings(max_examples=draws(150))
@given(exits=any_exits(), random=st.randoms(use_true_random=False))
def test_any_exits_in_any_order_make_the_same_incident_and_no_terminated_culprit(exits, random):
    incident = incident_of(*exits)
    shuffled = list(exits)
    random.shuffle(shuffled)

    assert incident_of(*shuffled) == incident
    assert Incident.from_json(incident.to_json()) == incident
    ended = {str(e.rank) for e in exits if e.terminated}
    blamed = {c.id for c in incident.culprits if c.kind is EntityKind.RANK}
    assert blamed.isdisjoint(ended)
    if any(e.exit_code is None and not e.terminated for e in exits):
        assert incident.authority == 2
        assert blamed
    assert incident.first_us <= incident.detected_us
    assert incident.detected_us - incident.first_us < 1000 * S


def test_a_root_in_the_log_goes_before_a_symptom_that_stands_above_it():
    root = next(r for r in RULES if r.source is LogSource.WORKER and r.role is Role.ROOT)
    exited = worker(0, log_tail=(PEER_CLOSED, root.example))

    found = classify(exited, RULES)

    assert (found.role, found.failure_class) == (Role.ROOT, root.failure_class)
    assert found.lines == (root.example,)


def test_of_two_ends_seen_in_one_look_the_one_by_a_signal_comes_first():
    ends = [classify(worker(0), RULES), classify(killed(1), RULES)]

    assert [end.worker.rank for end in sorted(ends, key=lambda end: end.sort_key)] == [1, 0]
