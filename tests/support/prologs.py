"""Prologs of many simulated nodes: each records one check run into a spool of its own."""

import random
import time

from gpuops.checks.core.runner import CheckRun
from gpuops.gate.record import CheckOccasion, events_of
from gpuops.host.clock import SystemClock
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status
from gpuops.store.spool.record import spool_recorder

GPUS = 8
CHECKS_PER_GPU = 6
FINDINGS = GPUS * CHECKS_PER_GPU


def check_run(number, seed=0):
    """Return what the prolog of node *number* found: one in ten nodes has a lost GPU."""
    draw = random.Random(f"{seed}.{number}")
    node = f"n{number:04d}"
    bad = draw.randrange(GPUS) if draw.random() < 0.1 else None
    findings = tuple(
        _finding(f"GPU-{node}-{gpu}", check, bad=gpu == bad and check == 0, draw=draw)
        for gpu in range(GPUS)
        for check in range(CHECKS_PER_GPU)
    )
    now_us = SystemClock().now_us()
    return CheckRun(
        suite="prolog", node=node, start_us=now_us - 800_000, end_us=now_us, findings=findings
    )


def _finding(gpu, check, *, bad, draw):
    return Finding(
        check=f"gpu_check_{check}",
        entity=Entity(EntityKind.GPU, gpu),
        status=Status.FAIL if bad else Status.PASS,
        message="GPU is lost" if bad else "as it should be",
        value=round(draw.uniform(20, 80), 1),
        unit="C",
        threshold="< 90",
        source="nvml",
        failure_class=FailureClass.GPU_FELL_OFF_BUS if bad else None,
    )


def record(ran, spool):
    """Record *ran* as the hook's child does; return the seconds that it took."""
    clock = SystemClock()
    occasion = CheckOccasion(trigger="prolog", job_id="17", mode="observe")
    before = time.perf_counter()
    recorder = spool_recorder(spool, node=ran.node, boot_id="boot", bytes_max=2**26, clock=clock)
    recorder.record(*events_of(ran, occasion, clock))
    recorder.close()
    took_s = time.perf_counter() - before
    assert recorder.lost == 0
    return took_s
