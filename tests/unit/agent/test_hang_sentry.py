"""The sentry: suspicion, evidence from a thread, one report; with a fake reader and clock."""

import itertools
import threading
import time
from dataclasses import replace

import pytest
from support.monitors import evidence_of, report_of
from support.recorded_job import RecordedJob
from support.runs import wait_until

from gpuops.agent.elastic.exits import RankFiles
from gpuops.agent.elastic.workers import RingReader, Worker
from gpuops.agent.monitors.api import MonitoredAttempt
from gpuops.agent.monitors.evidence import EVIDENCE_S
from gpuops.agent.monitors.hang.monitor import HOLD_S, HangMonitor
from gpuops.agent.monitors.stacks import StackFrame, Stacks, ThreadStack
from gpuops.convert.flight_recorder import read_dump
from gpuops.host.clock import FakeClock
from gpuops.host.process.inspect import ProcessDetails
from gpuops.host.process.traffic import TrafficKind
from gpuops.incident.decision import NodeReport, ReportKind
from gpuops.model import Confidence, Entity, EntityKind, FailureClass, Role, Side
from gpuops.wire.ring import Beat, StepSource, WorkerPhase

SITE = "/venv/site-packages"
WAITS = StackFrame(f"{SITE}/torch/distributed/distributed_c10d.py", 3, "all_reduce")
SLEEPS = StackFrame("/job/train.py", 40, "lost")


class FakeReader:
    """Returns by rank a state and frames, or a list of frames, one for each sample."""

    def __init__(self, **ranks):
        self.ranks = {int(name[1:]): seen for name, seen in ranks.items()}
        self.blocked = threading.Event()
        self.blocked.set()
        self.files = set()
        self.asked = []
        self.moved = {}  # by rank, an iterator over what its connections have received
        self.dumps = {}  # of flight recorders, by rank

    def inspect(self, pid):
        self.blocked.wait()
        state = self.ranks[pid - 100][0]
        return None if state is None else ProcessDetails(state=state, cpu_s=1.0)

    def traffic(self, pids):
        return {pid: next(self.moved[pid - 100]) for pid in pids if pid - 100 in self.moved}

    def collectives(self, targets, wait_s):
        return {t.rank: self.dumps[t.rank] for t in targets if t.rank in self.dumps}

    def dump(self, targets, wait_s):
        self.asked += [target.rank for target in targets]
        return {}

    def spy(self, targets, wait_s):
        return {target.rank: self._stacks(target.rank) for target in targets}

    def _stacks(self, rank):
        frames = self.ranks[rank][1]
        frame = frames.pop(0) if isinstance(frames, list) else frames
        return Stacks((ThreadStack((frame,), is_main=True, owns_gil=False),), "py-spy")

    def record(self, targets):
        return None

    def source_line(self, path, line):
        return "time.sleep(9)"

    def exists(self, path):
        return path in self.files

    def dumped_collectives(self, path, target):
        return None


class Node:
    """A node with two workers and a sentry."""

    def __init__(self, tmp_path, reader, timeout_s=10.0, **env):
        self.clock = FakeClock()
        self.seq = 0
        self.sentry = HangMonitor(
            self.clock,
            timeout_s,
            env,
            reader=reader,
            pause=lambda _s: None,
            state=lambda pid: reader.ranks[pid - 100][0],
        )
        self.watched = MonitoredAttempt(
            generation=4,
            node="n041",
            folder=tmp_path,
            workers=[
                Worker(
                    rank=rank,
                    local_rank=rank,
                    pid=100 + rank,
                    ring=RingReader(tmp_path / "none"),
                    files=RankFiles(stacks=tmp_path / f"stacks{rank}"),
                )
                for rank in (0, 1)
            ],
        )
        self.sentry.begin(self.watched)

    def steps(self, count, ranks=(0, 1), phase=WorkerPhase.STEPPING):
        for _ in range(count):
            self.clock.advance(1)
            self.seq += 1
            now_ns = self.clock.mono_ns()
            beat = Beat(self.seq, self.seq, now_ns, phase, StepSource.REPORTED, 0)
            self.sentry.feed({rank: [beat] for rank in ranks})
            assert self.look() is None
        return self

    def look(self):
        return report_of(self.sentry, "n041", 4)

    def silence(self, seconds):
        """Look each second for so long; return the first report."""
        for _ in range(round(seconds)):
            self.clock.advance(1)
            if (report := self.look()) is not None:
                return report
        return None

    def report(self):
        """Return the report that comes once the thread has its evidence."""
        self.gathered()
        return self.silence(HOLD_S + 2)

    def gathered(self):
        wait_until(lambda: not _threads(), what="the end of the gathering thread")


def _threads():
    return [t for t in threading.enumerate() if t.name == "gpuops-evidence"]


def stuck():
    return FakeReader(r0=("S", WAITS), r1=("S", SLEEPS))


def test_a_hang_is_reported_once_with_the_rank_the_others_wait_for(tmp_path):
    node = Node(tmp_path, stuck()).steps(8)
    assert node.silence(11) is None
    report = node.report()

    assert (report.kind, report.node, report.generation) == (ReportKind.HANG, "n041", 4)
    assert report.failure_class is FailureClass.HANG_NO_PROGRESS
    assert report.culprits == (Entity(EntityKind.RANK, "1"),)
    assert report.how == (
        "rank 1 (last step 8): is in lost (/job/train.py:40);"
        " silent for 12 s, the limit for this phase (step) is 10 s"
    )
    assert (report.last_step, report.blames_node) == (8, False)
    said = {end.rank: end.summary for end in report.ends}
    assert said[1] == "rank 1 made no progress for 12 s, is in lost (/job/train.py:40)"
    assert said[0].startswith("rank 0 waits for other ranks")
    assert [(e.rank, e.role, e.failure_class, e.step) for e in report.ends] == [
        (0, Role.SYMPTOM, FailureClass.HANG_COLLECTIVE, 8),
        (1, Role.ROOT, FailureClass.HANG_NO_PROGRESS, 8),
    ]
    assert NodeReport.from_json(report.to_json()) == report
    (suspicion,) = node.sentry.poll()
    assert (suspicion.value, suspicion.threshold, suspicion.source) == (12.0, "10 s (step)", "hang")
    assert node.silence(100) == report, "it is judged once"


def test_ranks_that_wait_for_each_other_in_two_groups_are_reported_with_their_calls(tmp_path):
    groups = {"a": [0, 1], "b": [0, 1]}
    programs = {0: [("a", "all_reduce"), ("b", "barrier")], 1: [("b", "barrier")]}
    reader = FakeReader(r0=("S", WAITS), r1=("S", WAITS))
    job = RecordedJob(groups, programs).play()
    reader.dumps = {rank: read_dump(job.dump(rank)) for rank in (0, 1)}
    node = Node(tmp_path, reader).steps(8)
    report = node.silence(11) or node.report()

    assert (report.failure_class, report.side) == (FailureClass.HANG_DEADLOCK, Side.USER)
    assert report.culprits == (Entity(EntityKind.RANK, "0"), Entity(EntityKind.RANK, "1"))
    assert "rank 1 waits in barrier(1024 Float), call 1 of group b" in report.how
    assert [end.collectives.rank for end in report.ends] == [0, 1]
    assert NodeReport.from_json(report.to_json()) == report
    of_first, _ = evidence_of(node.sentry, node.clock, 5.0)
    assert "; pending is all_reduce(1024 Float), call 1 of group a" in of_first.text


@pytest.mark.parametrize(
    ("state", "failure_class", "blames", "side"),
    [
        ("T", FailureClass.HANG_STOPPED, False, Side.EXTERNAL),
        ("D", FailureClass.HANG_D_STATE, True, Side.INFRA),
        (None, FailureClass.USER_EARLY_EXIT, False, Side.AMBIGUOUS),
    ],
)
def test_the_systems_word_decides_the_class(tmp_path, state, failure_class, blames, side):
    reader = FakeReader(r0=("S", WAITS), r1=(state, WAITS))
    node = Node(tmp_path, reader).steps(8)
    report = node.silence(11) or node.report()

    assert (report.failure_class, report.blames_node, report.side) == (failure_class, blames, side)
    node_too = (Entity(EntityKind.NODE, "n041"),) if blames else ()
    assert report.culprits == (Entity(EntityKind.RANK, "1"), *node_too)


def test_a_stopped_rank_has_the_limit_of_a_step_whatever_it_said_it_was_doing(tmp_path):
    reader = FakeReader(r0=("S", WAITS), r1=("T", WAITS))
    node = Node(tmp_path, reader).steps(2).steps(1, ranks=(1,), phase=WorkerPhase.CHECKPOINT)
    assert node.silence(10) is None
    report = node.report()

    assert report.failure_class is FailureClass.HANG_STOPPED
    assert report.culprits == (Entity(EntityKind.RANK, "1"),)


def test_workers_that_have_all_ended_are_no_hang(tmp_path):
    node = Node(tmp_path, FakeReader(r0=(None, WAITS), r1=("Z", WAITS))).steps(8)
    node.silence(11)
    node.gathered()

    assert node.silence(100) is None


def test_a_node_that_only_waits_lets_others_speak_first(tmp_path):
    node = Node(tmp_path, FakeReader(r0=("S", WAITS), r1=("S", WAITS))).steps(8)
    node.silence(11)
    node.gathered()

    assert node.silence(HOLD_S - 1) is None
    report = node.silence(3)
    assert (report.culprits, report.failure_class) == ((), FailureClass.HANG_COLLECTIVE)
    assert report.confidence is Confidence.SYMPTOM_ONLY


def test_evidence_that_does_not_come_holds_nothing_up(tmp_path):
    reader = stuck()
    reader.blocked.clear()
    node = Node(tmp_path, reader).steps(8)
    node.silence(11)
    assert node.silence(EVIDENCE_S - 1) is None
    report = node.silence(HOLD_S + 2)
    late = evidence_of(node.sentry, node.clock, 0.0)
    reader.blocked.set()
    node.gathered()

    assert report.culprits == ()
    assert [item.text.rpartition(") ")[2] for item in late] == ["could not be inspected"] * 2


def test_ranks_that_go_on_after_all_are_no_hang(tmp_path):
    node = Node(tmp_path, stuck()).steps(8)
    node.silence(11)
    node.gathered()
    node.steps(5)

    assert node.silence(9) is None


def moving():
    frames = [StackFrame("/job/eval.py", line, "evaluate") for line in range(5000)]
    return FakeReader(r0=("R", frames), r1=("S", WAITS))


def test_a_learned_limit_is_not_held_against_who_is_seen_at_work(tmp_path, caplog):
    node = Node(tmp_path, moving(), timeout_s=None).steps(20)
    node.silence(62)
    node.gathered()

    assert node.silence(2) is None
    assert "rank 0 is in evaluate (/job/eval.py:" in caplog.text
    assert 'gpuops.phase("eval")' in caplog.text
    assert node.sentry.busy_for_s() > 50
    assert node.silence(58) is None


def test_who_is_seen_at_work_for_longer_than_a_phase_may_last_hangs(tmp_path):
    node = Node(tmp_path, moving(), timeout_s=None).steps(20)
    report = None
    while report is None and node.clock.mono_ns() < 700 * 10**9:
        report = node.silence(2)
        node.gathered()

    assert 600 <= node.clock.mono_ns() / 1e9 - 21 <= 620
    assert report.culprits == (Entity(EntityKind.RANK, "0"),)


def start(tmp_path, reader, **kwargs):
    """Return a node in its second generation: the first one stepped, so heartbeats are expected."""
    node = Node(tmp_path, reader, timeout_s=kwargs.pop("timeout_s", None), **kwargs).steps(20)
    node.sentry.begin(node.watched)
    return node


def hang_after(node, limit_s=20_000):
    """Return after how many seconds a hang is reported, with the report."""
    begun_ns = node.clock.mono_ns()
    while node.clock.mono_ns() - begun_ns < limit_s * 1e9:
        report = node.silence(1)
        node.gathered()
        if report is not None:
            return (node.clock.mono_ns() - begun_ns) / 1e9, report
    raise AssertionError("no hang")


def downloading():
    reader = FakeReader(r0=("S", SLEEPS), r1=("S", WAITS))
    reader.moved[0] = ({(TrafficKind.RECEIVED, 7): 2000 * n} for n in itertools.count())
    return reader


@pytest.mark.parametrize("reader", [moving, downloading])
@pytest.mark.parametrize("timeout_s", [None, 30.0], ids=["learned", "asked of steps"])
def test_a_start_that_loads_for_a_quarter_of_an_hour_is_no_hang(tmp_path, reader, timeout_s):
    """120 s and 15 min; the rank reads, downloads or decodes."""
    node = start(tmp_path, reader(), timeout_s=timeout_s)
    for _ in range(900):
        assert node.silence(1) is None
        node.gathered()
    node.steps(1)


@pytest.mark.parametrize("timeout_s", [None, 30.0], ids=["learned", "asked of steps"])
def test_a_start_that_hangs_is_one_after_its_floor(tmp_path, timeout_s):
    after_s, report = hang_after(start(tmp_path, stuck(), timeout_s=timeout_s))

    assert 600 < after_s < 606
    assert report.culprits == (Entity(EntityKind.RANK, "1"),)


def stepless(tmp_path, reader):
    """Return a node in its second generation, of a run of which no step was seen."""
    node = Node(tmp_path, reader, timeout_s=None)
    assert node.silence(20) is None
    node.sentry.begin(node.watched)
    return node


def test_a_restart_that_hangs_is_found_though_the_run_never_made_a_step(tmp_path):
    after_s, report = hang_after(stepless(tmp_path, stuck()))

    assert 600 < after_s < 606
    assert report.culprits == (Entity(EntityKind.RANK, "1"),)


def on_gpu():
    waits = StackFrame(f"{SITE}/torch/cuda/__init__.py", 9, "synchronize")
    return FakeReader(r0=("S", waits), r1=("S", SLEEPS))


def compiling():
    reader = FakeReader(r0=("S", SLEEPS), r1=("S", WAITS))
    reader.moved[0] = ({(TrafficKind.CPU_TICKS, 7): 10_000 * n} for n in itertools.count())
    return reader


def unreadable():
    reader = stuck()
    reader.spy = lambda _targets, _wait_s: {}
    return reader


@pytest.mark.parametrize("reader", [moving, downloading, on_gpu, compiling, unreadable])
def test_a_run_that_never_made_a_step_may_train_unseen_while_a_rank_may_work(tmp_path, reader):
    node = stepless(tmp_path, reader())
    for _ in range(8000):
        assert node.silence(1) is None
        node.gathered()


def test_who_never_ends_loading_hangs_after_an_hour(tmp_path):
    assert 3600 <= hang_after(start(tmp_path, moving()))[0] <= 3620


def test_ranks_that_stand_in_one_place_where_none_waits_for_another_have_the_time_of_a_phase(
    tmp_path,
):
    """They may evaluate in one long call; a rank that hangs alone is elsewhere than the others."""
    same = FakeReader(r0=("S", SLEEPS), r1=("S", SLEEPS))
    assert 600 <= hang_after(Node(tmp_path, same, timeout_s=None).steps(20))[0] <= 602
    line = replace(SLEEPS, line=41)
    for other in (("S", line), ("S", WAITS), ("T", SLEEPS), ("D", SLEEPS)):
        apart = FakeReader(r0=("S", SLEEPS), r1=other)
        assert hang_after(Node(tmp_path, apart, timeout_s=None).steps(20))[0] <= 61
    node = Node(tmp_path, same, timeout_s=None).steps(20)
    node.silence(70)
    node.gathered()
    assert node.silence(20) is None
    assert node.sentry.busy_for_s() == 0, "another node may still find one of its own"
    inner = [replace(SLEEPS, line=line) for line in range(500)]
    one_moves = FakeReader(r0=("R", inner), r1=("S", SLEEPS))
    assert hang_after(Node(tmp_path, one_moves, timeout_s=None).steps(20))[0] >= 600
    behind = Node(tmp_path, same, timeout_s=None).steps(20).steps(1, ranks=(0,))
    assert hang_after(behind)[0] <= 62
    assert hang_after(Node(tmp_path, same).steps(20))[0] == 12


def test_a_silence_in_which_bytes_move_may_last_longer_than_one_in_which_frames_do(tmp_path):
    node = Node(tmp_path, downloading(), timeout_s=None).steps(20)

    assert 3600 <= hang_after(node)[0] <= 3620


def test_a_start_in_which_all_load_names_nobody(tmp_path):
    reader = FakeReader(r0=("S", SLEEPS), r1=("S", SLEEPS))
    after_s, report = hang_after(start(tmp_path, reader))

    assert 600 < after_s < 606
    assert (report.culprits, report.confidence) == ((), Confidence.SYMPTOM_ONLY)
    assert report.failure_class is FailureClass.HANG_NO_PROGRESS
    assert [end.signature for end in report.ends] == ["hang at train.py in lost"] * 2


def verdict_at(node, steps):
    """Return how long after its *steps* the job is called hung; it is ended and started again."""
    node.steps(steps)
    after_s, _ = hang_after(node)
    evidence_of(node.sentry, node.clock, 5.0)
    node.sentry.begin(node.watched)
    node.seq = 0
    return round(after_s)


def test_a_limit_is_raised_while_restarts_get_the_run_no_further(tmp_path):
    node = Node(tmp_path, stuck(), timeout_s=None)

    assert [verdict_at(node, 20) for _ in range(3)] == [61, 180, 540]
    assert verdict_at(node, 30) == 61, "it came further: another hang"
    _, report = hang_after(node.steps(30))
    assert "the limit for this phase (step) is 180 s" in report.how


def test_a_start_that_hangs_after_the_run_came_further_has_its_own_limit_again(tmp_path):
    node = start(tmp_path, stuck())

    assert [verdict_at(node, 0) for _ in range(2)] == [601, 1800]
    node.steps(9)
    node.sentry.begin(node.watched)
    assert verdict_at(node, 0) == 601


def test_what_the_kernel_says_or_the_user_asked_for_is_not_put_off(tmp_path):
    stopped = FakeReader(r0=("S", WAITS), r1=("D", WAITS))
    node = Node(tmp_path, stopped, timeout_s=None)
    assert [verdict_at(node, 20) for _ in range(3)] == [61] * 3
    asked = Node(tmp_path, stuck())
    assert [verdict_at(asked, 20) for _ in range(2)] == [12] * 2


def test_samples_begin_before_the_limit_so_that_many_are_there_at_it(tmp_path):
    reader = stuck()
    reader.blocked.clear()
    node = Node(tmp_path, reader, timeout_s=None).steps(20)

    assert node.silence(54) is None
    assert not _threads()
    node.silence(1)
    assert _threads()
    assert node.sentry.is_suspicious
    reader.blocked.set()
    node.gathered()
    node.steps(1)
    assert not node.sentry.is_suspicious


def test_evidence_has_one_deadline_however_often_it_is_asked_for(tmp_path):
    reader = stuck()
    reader.blocked.clear()
    node = Node(tmp_path, reader).steps(8)
    node.silence(11)
    node.silence(EVIDENCE_S + HOLD_S)
    begun_s = time.monotonic()
    evidence_of(node.sentry, node.clock, 600.0)
    reader.blocked.set()

    assert time.monotonic() - begun_s < 300
    node.gathered()


@pytest.mark.parametrize("state", ["T", "D"])
def test_whoever_notices_a_hang_first_each_node_reports_what_its_ranks_do(tmp_path, state):
    """The node with the cause may be the slower one."""
    node = Node(tmp_path, FakeReader(r0=("S", WAITS), r1=(state, WAITS))).steps(8)
    assert node.look() is None
    evidence_of(node.sentry, node.clock, 30.0)
    report = node.look()

    assert report.culprits[0] == Entity(EntityKind.RANK, "1")
    assert report.blames_node is (state == "D")
    assert {end.rank: end.role for end in report.ends} == {0: Role.SYMPTOM, 1: Role.ROOT}


@pytest.mark.parametrize("r1", [("S", WAITS), ("R", [SLEEPS, WAITS])], ids=["waits", "works"])
def test_a_node_whose_ranks_wait_or_work_blames_none_of_them_for_anothers_hang(tmp_path, r1):
    node = Node(tmp_path, FakeReader(r0=("S", WAITS), r1=r1)).steps(8)
    evidence_of(node.sentry, node.clock, 30.0)

    assert node.look().culprits == ()


def test_workers_that_have_ended_are_not_reported_as_anothers_hang(tmp_path):
    node = Node(tmp_path, FakeReader(r0=("S", WAITS), r1=(None, WAITS))).steps(8)
    evidence_of(node.sentry, node.clock, 30.0)

    assert node.look() is None


@pytest.mark.parametrize(
    ("reader", "timeout_s", "busy_s"),
    [(moving, None, EVIDENCE_S), (stuck, None, 0.0), (moving, 10.0, 0.0)],
    ids=["works", "stands still", "asked for"],
)
def test_while_samples_show_work_the_other_nodes_are_told_to_wait_for_the_rest(
    tmp_path, reader, timeout_s, busy_s
):
    node = Node(tmp_path, reader(), timeout_s=timeout_s).steps(20)
    node.silence(56 if timeout_s is None else 11)
    node.gathered()

    assert node.sentry.busy_for_s() == busy_s


@pytest.mark.parametrize(
    ("reader", "latest_s"), [(stuck, 100), (moving, 720)], ids=["stand still", "never end"]
)
def test_nodes_that_hear_of_each_other_do_not_wait_for_each_other_for_ever(
    tmp_path, reader, latest_s
):
    nodes = [Node(tmp_path, reader(), timeout_s=None).steps(20) for _ in range(2)]
    nodes[0].sentry.others_are_busy_for(60)  # a third node's words
    told, reports, seconds = [0.0, 0.0], [], 0
    while not any(reports) and (seconds := seconds + 1) <= latest_s:
        for node, other_s in zip(nodes, reversed(told), strict=True):
            node.clock.advance(1)
            if node.sentry.is_suspicious:  # only then an agent reads the others' heartbeats
                node.sentry.others_are_busy_for(other_s)
        reports = [node.look() for node in nodes]
        nodes[0].gathered()
        told = [node.sentry.busy_for_s() for node in nodes]

    assert any(reports), told


def test_what_the_user_asked_for_is_held_against_everyone(tmp_path):
    node = Node(tmp_path, moving()).steps(8)
    node.silence(11)

    assert node.report() is not None


def test_another_nodes_work_is_waited_for(tmp_path):
    node = Node(tmp_path, stuck()).steps(8)
    node.sentry.others_are_busy_for(100)

    assert node.silence(99) is None
    assert not _threads()
    assert (node.silence(2) or node.report()) is not None


def test_off_is_off(tmp_path):
    node = Node(tmp_path, stuck(), timeout_s=0).steps(8)

    assert node.silence(5000) is None
    assert not _threads()


def test_a_job_whose_steps_are_not_seen_is_told_so(tmp_path, caplog):
    node = Node(tmp_path, stuck(), timeout_s=None)

    assert node.silence(2000) is None
    assert caplog.text.count("hangs cannot be judged") == 1


def test_what_was_learned_lasts_and_what_was_reported_does_not(tmp_path):
    node = Node(tmp_path, stuck()).steps(8)
    node.silence(11)
    assert node.report() is not None
    node.sentry.begin(node.watched)
    assert node.look() is None
    node.steps(3)
    node.silence(11)

    assert node.report() is not None


def test_a_bug_of_ours_ends_the_watch_and_not_the_run(tmp_path, caplog):
    node = Node(tmp_path, stuck()).steps(8)
    node.sentry._judge = None

    assert node.silence(3) is None
    assert caplog.text.count("hang detection failed") == 1


def test_evidence_tells_what_every_rank_does_and_where_more_is(tmp_path):
    reader = stuck()
    reader.files = {"/dumps/nccl_1"}
    node = Node(tmp_path, reader, TORCH_FR_DUMP_TEMP_FILE="/dumps/nccl_").steps(8)
    node.silence(11)
    node.report()
    first, second = evidence_of(node.sentry, node.clock, 5.0)

    assert (first.role, first.entity) == (Role.ROOT, Entity(EntityKind.RANK, "1"))
    assert first.text.startswith("rank 1 (pid 101; last step 8, silent for 1")
    assert first.text.endswith("torch's flight recorder left /dumps/nccl_1")
    assert first.lines == ("lost (/job/train.py:40)",)
    assert (second.role, second.lines) == (Role.SYMPTOM, (str(WAITS),))
    assert "waits for other ranks in all_reduce" in second.text


def test_a_node_that_noticed_nothing_gathers_when_asked(tmp_path):
    node = Node(tmp_path, stuck()).steps(8)

    evidence = evidence_of(node.sentry, node.clock, 30.0)

    assert [item.role for item in evidence] == [Role.ROOT, Role.SYMPTOM]
    assert "is in lost" in evidence[0].text
    node.sentry.close()
    assert evidence_of(node.sentry, node.clock, 1.0) == ()


def test_only_workers_that_said_so_are_asked_for_a_dump(tmp_path):
    reader = stuck()
    node = Node(tmp_path, reader).steps(8)
    node.silence(11)
    node.report()

    assert reader.asked == []  # their rings say nothing of SIGUSR2


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ("SZ", ["rank 0 (pid 100)"]),
        ("SS", ["rank 0 (pid 100), rank 1 (pid 101)"]),
        ("ZZ", []),
        ((None, None), []),
    ],
)
def test_a_process_that_outlives_its_program_is_told_of_once_and_not_ended(
    tmp_path, caplog, states, said
):
    reader = FakeReader(r0=(states[0], WAITS), r1=(states[1], WAITS))
    node = Node(tmp_path, reader, timeout_s=None).steps(9).steps(1, phase=WorkerPhase.FINISHED)

    assert node.silence(590) is None
    assert caplog.messages == []
    assert node.silence(3600) is None
    assert [line.partition(": the program ended 60")[0] for line in caplog.messages] == said
    assert all("`py-spy dump --pid 100`" in line for line in caplog.messages)


def test_each_generation_is_told_of_its_own_lingering_processes(tmp_path, caplog):
    node = Node(tmp_path, FakeReader(r0=("S", WAITS), r1=("S", WAITS)), timeout_s=None)
    for generation in (0, 1):
        node.sentry.begin(node.watched)
        node.steps(9).steps(1, phase=WorkerPhase.FINISHED).silence(700)
        assert len(caplog.messages) == generation + 1


def test_while_another_rank_trains_the_one_that_stays_is_told_of_too(tmp_path, caplog):
    node = Node(tmp_path, FakeReader(r0=("S", WAITS), r1=("R", WAITS)), timeout_s=None).steps(9)
    node.steps(1, ranks=(0,), phase=WorkerPhase.FINISHED).steps(700, ranks=(1,))

    (line,) = caplog.messages
    assert line.startswith("rank 0 (pid 100): the program ended 60")
