"""When an agent reads the recorders of its ranks, and what it publishes of them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.stepped_job import ddp, traces

from gpuops.agent.monitors.api import MonitoredAttempt
from gpuops.agent.monitors.registry import PUBLISHED_BYTES_MAX
from gpuops.agent.monitors.straggler.monitor import ReadSchedule, StragglerMonitor, log
from gpuops.agent.monitors.straggler.signs import HostSigns
from gpuops.control.record import pack
from gpuops.detect.own_time import NO_TIMING
from gpuops.detect.step_summary import unpack_summary
from gpuops.host.clock import FakeClock
from gpuops.wire.ring import Beat, StepSource, WorkerPhase

PACE_S = 0.1


class SetClock(FakeClock):
    """A clock whose wall time can be set."""

    def set_wall(self, seconds):
        self._now_us += round(seconds * 1e6)


class Node:
    """An agent's monitor and its ranks, which make the steps of a job that is computed."""

    def __init__(self, tmp_path, *, n_ranks=3, hold_s=60.0, n_steps=400, **how):
        self.clock = SetClock(now_us=1_795_000_000_000_000, mono_ns=0)
        self.job = traces(ddp(step_s=PACE_S), n_ranks, n_steps=n_steps, offset_ns=0, **how)
        self.reads, self.given = [], dict.fromkeys(self.job, 0)
        self.monitor = StragglerMonitor(
            self.clock,
            hold_s,
            lambda _: {0: "GPU-0", 1: "GPU-1"},
            HostSigns(tmp_path),
            lambda: ["GPU-1"],
            self.read,
        )
        workers = tuple(
            SimpleNamespace(
                rank=r, local_rank=r, pid=100 + r, ring=SimpleNamespace(path=Path("/run/ring"))
            )
            for r in self.job
        )
        self.monitor.begin(
            MonitoredAttempt(
                generation=2, node="n1", workers=workers, folder=tmp_path, world_size=n_ranks
            )
        )

    def read(self, targets, deadline_s):
        """Return what the recorders hold by now, by the wall clock of each call."""
        self.reads.append(self.clock.mono_ns() / 1e9)
        now_ns, found = self.clock.mono_ns(), {}
        for target in targets:
            dump = self.job[target.rank].dump
            calls = [
                replace(call, created_ns=call.created_ns + self.wall_ns(call.created_ns))
                for call in dump.calls
                if call.created_ns <= now_ns
            ]
            found[target.rank] = replace(dump, calls=tuple(calls[-400:]))
        return found

    def wall_ns(self, mono_ns):
        return 1_795_000_000 * 10**9 + (3600 * 10**9 if mono_ns > self.set_ns else 0)

    set_ns = 2**62

    def run_until(self, end_s):
        """Feed the beats as an agent does, ten times a second."""
        while self.clock.mono_ns() < end_s * 1e9:
            self.clock.advance(0.1)
            now_ns = self.clock.mono_ns()
            self.monitor.feed({rank: self.beats(rank, now_ns) for rank in self.job})
            if self.monitor._reader is not None:
                self.monitor._reader.join()

    def beats(self, rank, now_ns):
        spans, found = self.job[rank].spans, []
        while self.given[rank] < len(spans) and spans[self.given[rank]].end_ns <= now_ns:
            s = spans[self.given[rank]]
            found.append(Beat(s.step, s.step, s.end_ns, WorkerPhase.STEPPING, SOURCE, s.step))
            self.given[rank] += 1
        return found

    def summaries(self):
        ranks = self.monitor.publish()["ranks"]
        return {int(rank): unpack_summary(about["steps"]) for rank, about in ranks.items()}


SOURCE = StepSource.OPTIMIZER_STATE


def test_after_the_first_steps_the_ranks_are_read_and_published(tmp_path):
    node = Node(tmp_path, slow={1: 1.5})
    assert node.monitor.publish() is None

    node.run_until(100 + 50 * PACE_S * 1.5)

    found = node.summaries()
    assert len(node.reads) == 1
    assert found.keys() == {0, 1, 2}
    assert min(found[1].seconds) == 23, "the first steps warm up"
    assert found[1].seconds[30] / found[0].seconds[30] == pytest.approx(1.5, rel=0.06)
    published = node.monitor.publish()
    assert (published["generation"], published["is_whole"], published["why"]) == (2, True, "")
    of_gpus = [(r.get("gpu"), r.get("throttled")) for r in published["ranks"].values()]
    assert of_gpus == [("GPU-0", 0), ("GPU-1", 1), (None, None)]


def test_reads_are_rare(tmp_path):
    node = Node(tmp_path, n_steps=10_000, n_ranks=1)

    node.run_until(100 + 1000)

    gaps = [b - a for a, b in zip(node.reads, node.reads[1:], strict=False)]
    assert 3 <= len(node.reads) <= 4
    assert all(gap >= 60 for gap in gaps)


def test_steps_that_became_slower_are_read_soon_after(tmp_path):
    node = Node(tmp_path, n_steps=1500, slow={1: lambda step: 1.3 if step > 1000 else 1.0})

    node.run_until(100 + 1060 * PACE_S + 15)

    rose_s = 100 + 1000 * (PACE_S + 0.001)
    assert any(rose_s < at_s < rose_s + 6 for at_s in node.reads)


def test_after_the_wall_clock_was_set_only_the_steps_since_then_are_published(tmp_path):
    node = Node(tmp_path, slow={1: 1.5})
    node.run_until(100 + 3.0)
    node.set_ns = node.clock.mono_ns()
    node.clock.set_wall(3600)

    node.run_until(100 + 50 * PACE_S * 1.5)

    found = node.summaries()
    last_before = max(s.step for s in node.job[0].spans if s.end_ns < node.set_ns)
    assert min(found[0].seconds) >= last_before
    assert found[1].seconds.keys() & found[0].seconds.keys()


def test_off_reads_nothing(tmp_path):
    node = Node(tmp_path, hold_s=0.0)

    node.run_until(110)

    assert (node.reads, node.monitor.publish()) == ([], None)


def test_without_timed_collectives_the_reason_is_published(tmp_path):
    node = Node(tmp_path, backend="nccl")

    node.run_until(110)

    assert node.monitor.publish()["why"] == NO_TIMING
    assert node.summaries() == {}


def test_a_rank_whose_recorder_does_not_answer_is_left_out(tmp_path):
    node = Node(tmp_path)
    whole = node.read
    node.monitor._read = lambda targets, deadline_s: {
        r: d for r, d in whole(targets, deadline_s).items() if r != 2
    }

    node.run_until(110)

    # Of a group without one of its ranks nobody knows who came last, so gradients alone tell.
    assert node.summaries().keys() == {0, 1}


def test_an_error_of_ours_ends_the_reads_and_nothing_else(tmp_path, monkeypatch):
    node, lines = Node(tmp_path, n_steps=1500), []
    monkeypatch.setattr(log, "warning", lambda text, **_: lines.append(text))
    node.monitor._read = lambda targets, deadline_s: {0: None}

    node.run_until(250)

    assert len(lines) == 1
    assert node.monitor.publish() is None


def test_a_generation_that_ends_while_it_is_read_is_not_published_as_the_next(tmp_path):
    node = Node(tmp_path)
    node.run_until(110)
    watched = node.monitor._watched.attempt

    node.monitor.begin(replace(watched, generation=3))

    assert node.monitor.publish() is None


def test_sixteen_ranks_fit_into_what_a_node_may_publish(tmp_path):
    node = Node(tmp_path, n_ranks=16)
    node.monitor._gpus_of = lambda ranks: {rank: f"GPU-{rank:036d}" for rank in ranks}

    node.run_until(110)

    value = pack({"generation": 2, "published": node.monitor.publish()})
    assert len(node.monitor.publish()["ranks"]) == 16
    assert len(value) <= PUBLISHED_BYTES_MAX


@pytest.mark.parametrize(("n_ranks", "n_published"), [(17, 17), (36, 36), (37, 0)])
def test_of_more_ranks_only_the_steps_are_published_or_why_they_are_not(
    tmp_path, n_ranks, n_published
):
    node = Node(tmp_path, n_ranks=n_ranks)

    node.run_until(100 + 50 * PACE_S)

    published = node.monitor.publish()
    assert len(published["ranks"]) == n_published
    assert len(pack({"generation": 2, "published": published})) <= PUBLISHED_BYTES_MAX
    assert (published["why"] == "") == bool(n_published)


def test_a_schedule_reads_twice_and_then_rests():
    schedule = ReadSchedule(60.0)
    reads = [n for n in range(9000) if schedule.is_due(n, 0.2, n * 0.2)]

    first, second, third, fourth = reads[:4]
    assert first == 36
    assert 60 <= (second - first) * 0.2 <= 90
    assert 600 <= (third - second) * 0.2 <= 900
    assert 60 <= (fourth - third) * 0.2 <= 90


@pytest.mark.parametrize("other_s", [0.19, 0.2, 0.21])
def test_agents_that_measure_another_step_time_read_the_same_steps_or_nearly(other_s):
    def reads(step_s):
        schedule = ReadSchedule(60.0)
        return [n for n in range(3600) if schedule.is_due(n, step_s, n * 0.2)]

    for one, other in zip(reads(0.2)[:2], reads(other_s)[:2], strict=True):
        assert abs(one - other) <= 128


def test_of_steps_of_an_hour_each_read_is_allowed():
    schedule = ReadSchedule(60.0)
    reads = [n for n in range(100) if schedule.is_due(n, 3600.0, n * 3600.0)]

    assert reads == [36, 52, 68, 84]


def test_many_rises_wait_for_their_turn():
    schedule, reads = ReadSchedule(60.0), []
    for n_steps in range(36, 2000):
        schedule.rose(n_steps)
        if schedule.is_due(n_steps, 1.0, float(n_steps)):
            reads.append(n_steps)

    assert len(reads) <= 3 + 2000 / 200


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def host(root, *, waited_s=0.0, memory_s=0.0, ticks=(1000, 0), errors=0, tid=7):
    write(root, f"proc/7/task/{tid}/schedstat", f"5 {round(waited_s * 1e9)} 3\n")
    write(root, "proc/pressure/memory", f"some avg10=0 avg60=0 total={round(memory_s * 1e6)}\n")
    write(root, "proc/stat", f"cpu  {ticks[0]} 0 0 0 0 0 0 {ticks[1]} 0 0\ncpu0 1\n")
    write(root, "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error", f"{errors}\n")
    write(root, "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data", "999\n")


def test_signs_are_shares_of_the_time_between_two_looks(tmp_path):
    signs = HostSigns(tmp_path)
    host(tmp_path)
    assert signs.look({0: 7}, 100.0) == {0: {}}

    host(tmp_path, waited_s=2.5, memory_s=1.0, ticks=(1900, 100), errors=3)

    assert signs.look({0: 7}, 110.0) == {
        0: {"cpu": 0.25, "memory": 0.1, "steal": 0.1, "errors": 3.0}
    }


def test_signs_of_a_thread_that_has_just_begun_or_ended_are_left_out(tmp_path):
    signs = HostSigns(tmp_path)
    host(tmp_path, waited_s=5.0)
    signs.look({0: 7}, 100.0)
    (tmp_path / "proc/7/task/7/schedstat").unlink()
    host(tmp_path, waited_s=50.0, tid=8)

    assert signs.look({0: 7, 1: 99}, 110.0) == {0: {}, 1: {}}


def test_a_host_without_these_files_has_no_signs(tmp_path):
    signs = HostSigns(tmp_path)

    assert signs.look({0: 7}, 1.0) == signs.look({0: 7}, 2.0) == {0: {}}


def test_what_is_no_number_is_no_sign(tmp_path):
    write(tmp_path, "proc/7/task/7/schedstat", "many\n")
    write(tmp_path, "proc/pressure/memory", "some\n")
    write(tmp_path, "proc/stat", "cpu x y\n")

    assert HostSigns(tmp_path).look({0: 7}, 1.0) == {0: {}}
