"""Whether work in one thread leaves Python's lock to the others."""

import threading
import time


def seconds_beside(work):
    """Do *work* in a thread; return the seconds of processor it used, and this thread beside it.

    Who waits for the lock uses no processor: this one had at most two slices of 5 ms then.
    """
    began, ended = threading.Event(), threading.Event()
    working_s = []

    def run():
        began.set()
        start_s = time.thread_time()
        work()
        working_s.append(time.thread_time() - start_s)
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    began.wait()
    start_s = time.thread_time()
    while not ended.is_set():
        pass
    here_s = time.thread_time() - start_s
    thread.join()
    return working_s[0], here_s
