"""What lies on the board of generations that are over is taken off it, or a long run fills it."""

import logging

from gpuops.control.board import Board, BoardError
from gpuops.control.keys import Keys

log = logging.getLogger(__name__)

# Of the one before, a slow agent may still read who sat where and what was reported.
KEPT = 2


def forget_before(board: Board, keys: Keys, generation: int) -> None:
    """Take off *board* what nobody needs while *generation* runs.

    What it does not do now it is asked for once more with the next generation; what stays there
    costs its space.
    """
    over = generation - KEPT
    for number in range(max(over - 1, 0), over + 1):
        try:
            board.delete(keys.generation(number))
        except BoardError as exc:
            log.debug("generation %d stays on the board: %s", number, exc)
