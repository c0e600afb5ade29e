"""Of generations that are over, a board keeps the last one, and what it failed to forget once."""

from support.agreement import CutBoard

from gpuops.control.memory import MemoryControlStore
from gpuops.control.record import ControlKeys, delete_old_generations
from gpuops.host.clock import FakeClock

KEYS = ControlKeys(run_id="0123456789ab")


def test_what_could_not_be_forgotten_is_with_the_next_generation():
    board = CutBoard(MemoryControlStore(FakeClock()))
    left = []
    for generation in range(12):
        board.put(KEYS.ready(generation, "a"), b"x")
        board.put(KEYS.report(generation, "a"), b"x")
        board.is_cut = generation == 5
        delete_old_generations(board, KEYS, generation)
        board.is_cut = False
        left.append(len(board.list(f"{KEYS.prefix}/gen/")))

    assert left == [2, 4, 4, 4, 4, 6, 4, 4, 4, 4, 4, 4]
