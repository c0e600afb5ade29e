"""The live display of a burn-in: what it shows of the programs that run."""

import io

from rich.console import Console

from gpuops.burnin.measurement import Measurement
from gpuops.burnin.plan import TESTS
from gpuops.burnin.results import ProgramNote, ProgramOutput, WrongResult
from gpuops.cli.burnin_live import LiveDisplay
from gpuops.gate.burnin import BurninWatcher
from gpuops.model import Entity, EntityKind

CPUS = [Entity(EntityKind.CPU, str(number)) for number in range(2)]


def outputs():
    rate = Measurement(
        test="gemm", part=CPUS[0], parameters={"dtype": "fp32"}, values=(0.25,), unit="TFLOP/s"
    )
    wrong = WrongResult(test="gemm", part=CPUS[1], parameters="", message="3 differ")
    note = ProgramNote(test="gemm", part=CPUS[1], message="[/red] at most 60 C")
    return [ProgramOutput(CPUS[0], [rate]), ProgramOutput(CPUS[1], [wrong, note])]


def test_a_terminal_shows_each_part_with_its_last_result_and_its_faults():
    screen, started = io.StringIO(), []
    console = Console(file=screen, force_terminal=True, width=100)
    lines = BurninWatcher(on_start=lambda test, parts: started.append((test.name, parts)))
    watcher = LiveDisplay(console).watcher(lines)

    watcher.on_start(TESTS["gemm"], 2)
    watcher.on_turn(outputs())
    watcher.on_ended()

    assert started == [("gemm", 2)]
    shown = screen.getvalue()
    assert "gemm: 0.0" in shown
    assert "dtype=fp32: 0.25 TFLOP/s" in shown
    assert "[/red] at most 60 C" in shown
