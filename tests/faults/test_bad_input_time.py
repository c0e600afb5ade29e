"""Wall clocks that jump, and a store that takes its time.

A kernel has one wall clock (time namespaces shift only the others), so a library shifts it for the
processes of a run. That agents on several hosts agree whatever their clocks say is simulated in the
tests of the agreement.
"""

import shutil
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from support.faulty import FaultyRun, culprits
from support.ports import free_port
from support.services import unavailable
from support.slow_proxy import SlowProxy

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]
SOURCE = Path(__file__).parents[1] / "support" / "clock_shift.c"


@pytest.fixture(scope="module")
def clock_shift(tmp_path_factory):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        unavailable("no C compiler for the clock")
    library = tmp_path_factory.mktemp("clock") / "clock_shift.so"
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        [compiler, *flags, "-o", str(library), str(SOURCE), "-ldl"], check=True, timeout=60
    )
    return library


@pytest.mark.cc
@pytest.mark.parametrize("shift_s", [-86400, 86400], ids=["back", "ahead"])
def test_a_wall_clock_that_jumps_by_a_day_ends_nothing(tmp_path, clock_shift, shift_s):
    """In all processes of the run, while it trains; a rank dies afterwards."""
    shift = tmp_path / "shift"
    shift.write_text("0")
    env = {"LD_PRELOAD": str(clock_shift), "CLOCK_SHIFT": str(shift)}
    words = ("kill", "--rank", 1, "--at", 40, "--generation", 0, "--steps", 60, "--pause", 0.1)
    with FaultyRun(tmp_path, ("--hang-timeout", "10"), words, env=env) as run:
        run.start()
        run.wait_for_step(10)
        shift.write_text(str(shift_s))
        assert run.ended() == 0, run.said()

    assert run.generations() == [0, 1]
    (incident,) = run.incidents()
    assert ("rank", "1") in culprits(incident)
    assert all(0 <= seconds < 60 for seconds in incident["lost_seconds_by_phase"].values())
    run.check_ledger(60)


@pytest.mark.soak
def test_a_store_whose_answers_take_two_seconds_is_not_lost(tmp_path):
    """One agent of two reaches the board through a slow way; a rank dies in the meantime."""
    port = free_port("127.0.0.1")
    words = ("kill", "--rank", 1, "--at", 60, "--generation", 0, "--steps", 65, "--pause", 0.1)
    options = {"n_nodes": 2, "nproc": 1, "endpoint": f"127.0.0.1:{port}"}
    with closing(SlowProxy(port)) as way, FaultyRun(tmp_path, (), words, **options) as run:
        run.start(run.hosts[0])
        run.start(run.hosts[1], flags=("--rdzv-endpoint", f"127.0.0.1:{way.port}"))
        run.wait_for_step(3)
        way.delay_s = 2.0
        assert run.finish() == {"n0": 0, "n1": 0}, run.said()

    assert run.rules() == ["restart"]
    assert run.events("agent.fenced") == []
    assert run.generations() == [0, 1]
