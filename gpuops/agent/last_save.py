"""Waiting until checkpoints have persisted, where a signal must not have to wait as well."""

import threading
from collections.abc import Callable

LOOK_S = 0.1


def awaited(act: Callable[[], object], waiting: Callable[[], None]) -> None:
    """Do *act*, which is bounded in time, in a thread; call *waiting* until it is done.

    What *waiting* raises ends the wait, not the act: the keeper goes on with it by itself.
    """
    acting = threading.Thread(target=act, name="gpuops-last-save", daemon=True)
    acting.start()
    acting.join(LOOK_S)
    while acting.is_alive():
        waiting()
        acting.join(LOOK_S)
