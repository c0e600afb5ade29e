"""Threads of the keeper: each at its priority, results in the thread that asks for them."""

import contextlib
import os
import selectors
import subprocess
import threading

from support.checkpoint_images import ORIGIN, images

from gpuops.checkpoint.keeper.jobs import (
    NICE_HASH,
    NICE_PERSIST,
    NICE_POPULATE,
    JobKind,
    Jobs,
    Waker,
)
from gpuops.checkpoint.keeper.off_ranks import off_ranks
from gpuops.checkpoint.storage.directory import DirectoryStore
from gpuops.checkpoint.storage.persist import persist
from gpuops.checkpoint.types import StateId


def results(jobs, waker, n):
    found = []
    with selectors.DefaultSelector() as ready:
        ready.register(waker, selectors.EVENT_READ)
        while len(found) < n:
            assert ready.select(30)
            waker.drain()
            before = len(found)
            jobs.run_callbacks()
            found += jobs.found[before:]
    return found


def nice():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_each_kind_of_work_has_its_priority_and_results_come_to_who_delivers():
    with contextlib.closing(Waker()) as waker, contextlib.closing(Jobs(waker.wake)) as jobs:
        jobs.found = []
        base = nice()

        def then(result, error):
            jobs.found.append((result, error, threading.current_thread()))

        for kind in (JobKind.HASH, JobKind.POPULATE, JobKind.SEARCH, JobKind.PERSIST):
            jobs.start(kind, nice, then)
        found = results(jobs, waker, 4)

        assert sorted(result for result, _, _ in found) == sorted(
            [max(base, NICE_HASH), max(base, NICE_POPULATE), base, NICE_PERSIST]
        )
        assert {thread for _, _, thread in found} == {threading.current_thread()}


def test_the_threads_that_write_shards_have_the_priority_of_the_one_that_persists(tmp_path):
    seen = set()

    def write():
        store, state = DirectoryStore(tmp_path), StateId(0, 1)
        return persist(store, state, shards, origin=ORIGIN, throttle=lambda _: seen.add(nice()))

    with (
        images(2) as shards,
        contextlib.closing(Waker()) as waker,
        contextlib.closing(Jobs(waker.wake)) as jobs,
    ):
        jobs.found = []
        jobs.start(JobKind.PERSIST, write, lambda *result: jobs.found.append(result))
        ((done, error),) = results(jobs, waker, 1)

    assert (done.nbytes > 0, error, seen) == (True, None, {NICE_PERSIST})


def test_work_keeps_off_the_processors_to_which_ranks_are_bound():
    allowed = os.sched_getaffinity(0)
    bound = {min(allowed)}
    with (
        subprocess.Popen(["sleep", "60"]) as rank,
        contextlib.closing(Waker()) as waker,
        contextlib.closing(Jobs(waker.wake)) as jobs,
    ):
        os.sched_setaffinity(rank.pid, bound)
        jobs.found = []
        for pids in ([rank.pid], [rank.pid, 0], [rank.pid, os.getpid()], []):
            work = off_ranks(pids, lambda: os.sched_getaffinity(0))
            jobs.start(JobKind.PERSIST, work, lambda result, _: jobs.found.append(result))
        cpus = results(jobs, waker, 4)
        rank.kill()

    assert cpus == [allowed - bound or allowed, allowed, allowed, allowed]
    assert os.sched_getaffinity(0) == allowed


def test_what_work_raises_is_its_result():
    with contextlib.closing(Waker()) as waker, contextlib.closing(Jobs(waker.wake)) as jobs:
        jobs.found = []
        jobs.start(
            JobKind.SEARCH, lambda: 1 // 0, lambda result, error: jobs.found.append((result, error))
        )

        ((result, error),) = results(jobs, waker, 1)
        assert result is None
        assert isinstance(error, ZeroDivisionError)


def test_a_full_waker_is_no_error():
    with contextlib.closing(Waker()) as waker:
        for _ in range(100_000):
            waker.wake()
        waker.drain()
