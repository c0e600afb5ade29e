"""Tests with short time limits, on a machine that may be too busy to keep them."""

import functools
import threading
import time

TRIES = 5
_TICK_S = 0.02


class Lateness(threading.Thread):
    """Measures, within its context, by how much this process was late at most, in seconds."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most_s = 0.0
        self._is_over = threading.Event()

    def run(self):
        due_s = time.monotonic() + _TICK_S
        while not self._is_over.wait(_TICK_S):
            now_s = time.monotonic()
            self.most_s = max(self.most_s, now_s - due_s)
            due_s = now_s + _TICK_S

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self.join()


def again_if_late(by_s):
    """Return a decorator: a test that fails while this process is late by *by_s* runs again."""

    def decorate(test):
        @functools.wraps(test)
        def run(*args, **kwargs):
            for n_left in reversed(range(TRIES)):
                with Lateness() as late:
                    try:
                        return test(*args, **kwargs)
                    except Exception:
                        late_s = late.most_s
                        if late_s < by_s or not n_left:
                            raise
            return None

        return run

    return decorate
