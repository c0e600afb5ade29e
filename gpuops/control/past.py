"""What lies on the board of generations that are over is taken off it, or a long run fills it."""

import logging

from gpuops.control.board import Board, BoardError
from gpuops.control.keys import Keys

log = logging.getLogger(__name__)

# Of the one before, a slow agent may still read who sat where and what was reported.
KEPT = 2


def forget_before(board: Board, keys: Keys, generation: int) -> None:
    """Take the newest generation off *board* that nobody needs while *generation* runs.

    What the board does not do now it need not do: a generation that stays there costs its space.
    """
    over = generation - KEPT
    if over < 0:
        return
    try:
        board.delete(keys.generation(over))
    except BoardError as exc:
        log.debug("generation %d stays on the board: %s", over, exc)
