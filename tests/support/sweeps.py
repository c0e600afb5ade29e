"""A sweep of four nodes, as its coordinator judges and records it."""

from gpuops.burnin.blame import blame
from gpuops.burnin.pairs import PairOutcome, PairTest
from gpuops.burnin.sweep_findings import sweep_findings
from gpuops.cli.sweep_result import check_run_of, sweep_body, sweep_events
from gpuops.host.clock import FakeClock
from gpuops.model import FailureClass
from gpuops.sweep.coordinator import SweepResult

NODES = ("n0", "n1", "n2", "n3")
T0_US = 1_760_000_000_000_000


def a_sweep(sweep="5a3e", t_us=T0_US):
    """Return a sweep in which n3 fails with everybody: its body, its check run, its tests."""
    tests = tuple(
        PairTest(
            nodes=(a, b),
            outcome=PairOutcome.FAIL if b == "n3" else PairOutcome.PASS,
            round=number,
            value=None if b == "n3" else 40.0 + number,
            sweep=sweep,
            t_us=t_us + number,
        )
        for number, (a, b) in enumerate((a, b) for a in NODES for b in NODES if a < b)
    )
    verdicts = blame(tests)
    result = SweepResult(
        sweep=sweep,
        nodes=NODES,
        missing={"n4": "no route to host"},
        unfit={"n5": "gpu_count: 7 GPUs"},
        tests=tests,
        details={("n0", "n3"): "n3: connection refused"},
        verdicts=verdicts,
        findings=tuple(sweep_findings(verdicts, slow_node=FailureClass.HOST_SLOW)),
        share_tested=1.0,
    )
    check_run = check_run_of(result, "n0", (t_us, t_us + 9_000_000))
    return sweep_body(result, check_run), check_run, tests


def events_of_sweep(sweep="5a3e", t_us=T0_US):
    """Return what is recorded of it."""
    body, _, tests = a_sweep(sweep, t_us)
    return sweep_events(body, tests, "n0", FakeClock(t_us))
